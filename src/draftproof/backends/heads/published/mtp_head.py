"""A prediction layer in the layout of `speculators` (mtp): one layer, which drafts every token of a draft in its turn.

Step k reads pairs of a token and the state that step k - 1 made one token before, over the whole text, as the package
trains it (FastMTP, arXiv 2509.18362); the weights of all steps are the same.
"""

from __future__ import annotations

from typing import Any

import torch

from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.heads.base import Flat, HeadBackend, HeadNet
from draftproof.backends.heads.published import mtp_qwen
from draftproof.backends.heads.published.files import HeadFiles, cast, places_of, read_head, refuse_other_target
from draftproof.backends.heads.published.layers import LayerShape, make_layer, make_norm, passes_of
from draftproof.backends.heads.published.mtp import checked_layers
from draftproof.backends.heads.published.net import PublishedNet
from draftproof.backends.heads.published.rounding import drafting_output
from draftproof.backends.heads.published.steps import StepsBackend
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.attention import Pass
from draftproof.backends.products.packed_linear import PackedLinear

_AT = "mtp_layers.0."


class MtpHeadNet(PublishedNet):
    """The network of the layer, which reads the target's embedding and output layer; of family qwen3."""

    algorithm = "mtp"

    def __init__(self, files: HeadFiles, target: SlotBackend) -> None:
        family = files.layer.get("model_type")
        if family != "qwen3":
            legal = ", ".join(("qwen3", *mtp_qwen.TYPES))
            raise files.refused(f"has a prediction layer of type {family!r}: expected {legal}")
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
        self.logits = drafting_output(target.output_rows(torch.arange(target.vocab_size, device=target.device)))
        files.ignore("verifier_lm_head.weight", "embed_tokens.weight", "lm_head.weight")

    def _run(self, x: Flat, embedded: Flat, at: Pass, masks: dict[str, Any]) -> Flat:
        x = self._project(torch.cat([self._embedded(embedded), self._given(x)], -1))
        return self._norm(self._layer(x, at, masks[self._layer.kind]))


def mtp_head_backend(source: str, target: SlotBackend) -> StepsBackend:
    """A prediction layer over the target it was made for."""
    files, name = read_head(source, MtpHeadNet.algorithm), f"mtp head {source}"
    if files.layer.get("model_type") in mtp_qwen.TYPES:
        net = _of_hybrid(files, target, name)
    else:
        net = MtpHeadNet(files, target)
    files.refuse_left()
    return StepsBackend(target, [HeadBackend(target, net, name, back=0) for _ in range(places_of(files))], name)


def _of_hybrid(files: HeadFiles, target: SlotBackend, name: str) -> HeadNet:
    """The network of a layer for Qwen3-Next or Qwen3.5, by transformers' class for their own prediction layers."""
    layer = files.layer
    family = layer["model_type"]
    if not isinstance(target, HFBackend) or target.config.model_type != family:
        there = target.config.model_type if isinstance(target, HFBackend) else type(target).__name__
        raise files.refused(f"has a prediction layer of type {family}, and {target.name} is {there}")
    refuse_other_target(files, target, hidden=layer.get("hidden_size"), vocab=layer.get("vocab_size"))
    files.ignore("verifier_lm_head.weight", "embed_tokens.weight", "lm_head.weight")
    (made,) = checked_layers(mtp_qwen.from_head(files, target.model), target, name)
    return made.net
