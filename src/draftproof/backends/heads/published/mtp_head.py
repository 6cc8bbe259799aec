"""A prediction layer in the layout of `speculators` (mtp): one layer, which drafts every token of a draft in its turn.

Step k reads pairs of a token and the state that step k - 1 made one token before, over the whole text, as the package
trains it (FastMTP, arXiv 2509.18362); the weights of all steps are the same.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.backends.cache.layout import Layout
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.cache.slot_cache import SlotCache
from draftproof.backends.heads.base import HeadBackend
from draftproof.backends.heads.published.files import (
    HeadFiles,
    cast,
    places_of,
    read_head,
    refuse_other_algorithm,
    refuse_other_target,
)
from draftproof.backends.heads.published.layers import LayerShape, Passes, make_layer, make_norm
from draftproof.backends.heads.published.steps import StepsBackend
from draftproof.backends.products.packed_linear import Product
from draftproof.errors import UserError

_AT = "mtp_layers.0."


class MtpHeadNet:
    """The network of the layer.

    Args:
        files: of the head.
        target: the model it was made for; its embedding and output layer are read.

    Attributes:
        width: of its states, the target's.
        layers: (), for the target's last hidden states.
        ids: None: it drafts every token.

    Raises:
        UserError: made for another model, of another family than qwen3, or weights that do not fit the config.
    """

    layers: tuple[int, ...] = ()
    ids = None

    def __init__(self, files: HeadFiles, target: SlotBackend) -> None:
        family = files.layer.get("model_type")
        if family != "qwen3":
            raise UserError(f"the head {files.source!r} has a prediction layer of type {family!r}: legal is qwen3")
        shape = LayerShape.of(files)
        refuse_other_target(files, target, hidden=shape.size, vocab=shape.vocab)
        self.width, self.embed = shape.size, target.embed
        self._embedded = make_norm(files, shape, f"{_AT}token_layernorm", target)
        self._given = make_norm(files, shape, f"{_AT}hidden_layernorm", target)
        self._project = Product(cast(files.take(f"{_AT}input_proj.weight", [shape.size, 2 * shape.size]), target))
        self._layer = make_layer(files, shape, _AT, 0, target)
        self._norm = make_norm(files, shape, f"{_AT}final_layernorm", target)
        self._passes = Passes(shape, [self._layer], target)
        self.logits = Product(target.output_rows(torch.arange(target.vocab_size, device=target.device)))
        for unused in ("verifier_lm_head.weight", "embed_tokens.weight", "lm_head.weight"):
            files.tensors.pop(unused, None)

    @staticmethod
    def fuse(states: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """The same."""
        return states

    def __call__(
        self,
        states: Float[Tensor, "rows width dim"],
        embedded: Float[Tensor, "rows width dim"],
        layout: Layout,
        cache: SlotCache,
    ) -> Float[Tensor, "rows width dim"]:
        """See `HeadNet`."""
        at, masks = self._passes(states, layout, cache)
        parts = [self._embedded(embedded.flatten(0, 1)), self._given(states.flatten(0, 1))]
        x = self._layer(self._project(torch.cat(parts, -1)), at, masks[self._layer.kind])
        return self._norm(x).view(states.shape)


def mtp_head_backend(source: str, target: SlotBackend) -> StepsBackend:
    """A prediction layer over the target it was made for.

    Args:
        source: directory or hub id of the head.
        target: the target's backend.

    Raises:
        UserError: as `read_head` and `MtpHeadNet`.
    """
    files = read_head(source)
    refuse_other_algorithm(files, "mtp")
    net = MtpHeadNet(files, target)
    files.refuse_left()
    name = f"mtp head {source}"
    return StepsBackend(target, [HeadBackend(target, net, name, back=0) for _ in range(places_of(files))], name)
