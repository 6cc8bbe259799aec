"""A prediction layer in the layout of `speculators` (mtp): one layer, which drafts every token of a draft in its turn.

Step k reads pairs of a token and the state that step k - 1 made one token before, over the whole text, as the package
trains it (FastMTP, arXiv 2509.18362); the weights of all steps are the same.
"""

from __future__ import annotations

from typing import Any

import torch

from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.heads.base import Flat, HeadBackend
from draftproof.backends.heads.published.files import HeadFiles, cast, places_of, read_head, refuse_other_target
from draftproof.backends.heads.published.layers import LayerShape, make_layer, make_norm, passes_of
from draftproof.backends.heads.published.net import PublishedNet
from draftproof.backends.heads.published.steps import StepsBackend
from draftproof.backends.lean.attention import Pass
from draftproof.backends.products.packed_linear import PackedLinear

_AT = "mtp_layers.0."


class MtpHeadNet(PublishedNet):
    """The network of the layer, which reads the target's embedding and output layer; of family qwen3 only."""

    algorithm = "mtp"

    def __init__(self, files: HeadFiles, target: SlotBackend) -> None:
        family = files.layer.get("model_type")
        if family != "qwen3":
            raise files.refused(f"has a prediction layer of type {family!r}: expected qwen3")
        shape = LayerShape.of(files)
        refuse_other_target(files, target, hidden=shape.size, vocab=shape.vocab)
        self.width = shape.size
        self.embed = target.embed
        self._embedded = make_norm(files, shape, f"{_AT}token_layernorm", target)
        self._given = make_norm(files, shape, f"{_AT}hidden_layernorm", target)
        self._project = PackedLinear(cast(files.take(f"{_AT}input_proj.weight", [shape.size, 2 * shape.size]), target))
        self._layer = make_layer(files, shape, _AT, 0, target)
        self._norm = make_norm(files, shape, f"{_AT}final_layernorm", target)
        self._passes = passes_of(shape, [self._layer], target)
        self.logits = PackedLinear(target.output_rows(torch.arange(target.vocab_size, device=target.device)))
        files.ignore("verifier_lm_head.weight", "embed_tokens.weight", "lm_head.weight")

    def _run(self, x: Flat, embedded: Flat, at: Pass, masks: dict[str, Any]) -> Flat:
        x = self._project(torch.cat([self._embedded(embedded), self._given(x)], -1))
        return self._norm(self._layer(x, at, masks[self._layer.kind]))


def mtp_head_backend(source: str, target: SlotBackend) -> StepsBackend:
    """A prediction layer over the target it was made for."""
    files = read_head(source, MtpHeadNet.algorithm)
    net = MtpHeadNet(files, target)
    files.refuse_left()
    name = f"mtp head {source}"
    return StepsBackend(target, [HeadBackend(target, net, name, back=0) for _ in range(places_of(files))], name)
