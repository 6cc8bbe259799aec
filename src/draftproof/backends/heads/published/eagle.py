"""EAGLE heads of the first and second paper (arXiv 2401.15077, 2406.16858) as published: SafeAILab's layout.

The input at a token is its embedding and the target's last hidden state at the token before, which one product fuses.
Llama layers follow, the first without a norm before its attention; their output predicts the target's next state, and
the target's own output layer computes logits from it.
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
    read_head,
    refuse_other_algorithm,
    refuse_other_target,
)
from draftproof.backends.heads.published.layers import LayerShape, Passes, make_layer
from draftproof.backends.lean.layers import Embedding
from draftproof.backends.products.packed_linear import Product


class EagleNet:
    """The network of an EAGLE head.

    Args:
        files: of the head.
        target: the model it was made for.

    Attributes:
        width: of its states, the target's.
        layers: (), for the target's last hidden states.
        ids: None: it drafts every token.

    Raises:
        UserError: made for another model, or weights that do not fit the config.
    """

    layers: tuple[int, ...] = ()
    ids = None

    def __init__(self, files: HeadFiles, target: SlotBackend) -> None:
        shape = LayerShape.of(files, "llama")
        refuse_other_target(files, target, hidden=shape.size, vocab=shape.vocab)
        self.width = shape.size
        own = files.optional("embed_tokens.weight", [target.vocab_size, shape.size])
        self.embed = target.embed if own is None else Embedding(cast(own, target))
        bias = files.optional("fc.bias", [shape.size])
        weight = cast(files.take("fc.weight", [shape.size, 2 * shape.size]), target)
        self._fc = Product(weight, None if bias is None else cast(bias, target))
        self._normed = "layers.0.input_layernorm.weight" in files.tensors
        self._decoder = [make_layer(files, shape, "layers.0.", 0, target, first=self._normed)]
        self._decoder += [
            make_layer(files, shape, f"layers.{number}.", number, target) for number in range(1, len(shape.windows))
        ]
        self._passes = Passes(shape, self._decoder, target)
        own = files.optional("lm_head.weight", [target.vocab_size, shape.size])
        rows = target.output_rows(torch.arange(target.vocab_size, device=target.device)) if own is None else own
        self.logits = Product(cast(rows, target))

    @staticmethod
    def fuse(states: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """The same: its own states predict the target's."""
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
        first, *others = self._decoder
        x = self._fc(torch.cat([embedded, states], -1).flatten(0, 1))
        x = first.attend(first.normed(x) if self._normed else x, x, at, masks[first.kind])
        for layer in others:
            x = layer(x, at, masks[layer.kind])
        return x.view(states.shape)


def eagle_backend(source: str, target: SlotBackend) -> HeadBackend:
    """An EAGLE head over the target it was made for.

    Args:
        source: directory or hub id of the head.
        target: the target's backend.

    Raises:
        UserError: as `read_head` and `EagleNet`.
    """
    files = read_head(source)
    refuse_other_algorithm(files, "eagle")
    net = EagleNet(files, target)
    files.refuse_left()
    return HeadBackend(target, net, f"eagle head {source}", back=0)
