"""EAGLE-3 heads (arXiv 2503.01840) as published: `speculators`' layout, and SafeAILab's.

The input at a token is its embedding and the target's hidden states of several layers at the token before, which one
product fuses. The first layer's attention reads both side by side; the head's own states, before their last norm, take
the place of the fused ones for drafted tokens. It drafts from a part of the vocabulary, which the map d2t names.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.heads.base import Flat
from draftproof.backends.heads.published.files import ALGORITHM, HeadFiles, refuse_other_target
from draftproof.backends.heads.published.layers import LayerShape, make_layers, make_norm, make_product, passes_of
from draftproof.backends.heads.published.net import PublishedNet, embedding_of, output_of, states_of, vocabulary_of
from draftproof.backends.lean.attention import Pass
from draftproof.backends.lean.layers import Norm

_NESTED, _ORIGINAL = "layers.0.", "midlayer."  # where the first layer's weights are


class Eagle3Net(PublishedNet):
    """The network of an EAGLE-3 head."""

    algorithm = "eagle3"

    def __init__(self, files: HeadFiles, target: SlotBackend) -> None:
        flags = {name: bool(files.config.get(name)) for name in _FLAGS}
        if flags["norm_before_fc"] and flags["fc_norm"]:
            raise files.refused("has norm_before_fc and fc_norm: expected at most one of them")
        self._norms_output = flags["norm_output"]
        self._norms_residual = flags["norm_before_residual"]
        shape = LayerShape.of(files, None if ALGORITHM in files.config else "llama")
        self.layers = states_of(files, _named_layers(files), target)
        given = files.config.get("target_hidden_size") or shape.size
        refuse_other_target(files, target, hidden=int(given), vocab=vocabulary_of(files, shape))
        self.width = shape.size
        self.embed = embedding_of(files, shape, target)
        features = len(self.layers) * int(given)
        self._norm_all = make_norm(files, shape, "input_norm", target, features) if flags["norm_before_fc"] else None
        self._norm_each: list[Norm] = []
        if flags["fc_norm"]:
            each = range(len(self.layers))
            self._norm_each = [make_norm(files, shape, f"fc_norm.{number}", target, int(given)) for number in each]
        self._fc = make_product(files, "fc", shape.size, features, target)
        at = _ORIGINAL if f"{_ORIGINAL}hidden_norm.weight" in files.tensors else _NESTED
        self._hidden_norm = make_norm(files, shape, f"{at}hidden_norm", target)
        self._decoder = make_layers(files, shape, target, at, wide=2)
        self._norm = make_norm(files, shape, "norm", target)
        self._passes = passes_of(shape, self._decoder, target)
        self.ids, _, self._head = output_of(files, shape, target)
        files.ignore("verifier_lm_head.weight", "verifier_norm.weight")

    def fuse(self, states: Float[Tensor, "tokens inner"]) -> Float[Tensor, "tokens dim"]:
        """The target's states of all layers, in one product."""
        if self._norm_all is not None:
            states = self._norm_all(states)
        elif self._norm_each:
            parts = states.chunk(len(self._norm_each), -1)
            states = torch.cat([norm(part.contiguous()) for norm, part in zip(self._norm_each, parts, strict=True)], -1)
        return self._fc(states)

    def _run(self, x: Flat, embedded: Flat, at: Pass, masks: dict[str, Any]) -> Flat:
        first, *others = self._decoder
        normed = self._hidden_norm(x)
        both = torch.cat([first.normed(embedded), normed], -1)
        x = first.attend(both, normed if self._norms_residual else x, at, masks[first.kind])
        for layer in others:
            x = layer(x, at, masks[layer.kind])
        return self._norm(x) if self._norms_output else x

    def logits(self, states: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens ids"]:
        """Logits of the drafted tokens, normed before where the head's states are not."""
        return self._head(states if self._norms_output else self._norm(states))


_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def _named_layers(files: HeadFiles) -> Any:
    """The layers of the target that the config names."""
    named: Any = files.config.get("eagle_aux_hidden_state_layer_ids")
    return named or (files.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")


eagle3_backend = Eagle3Net.load
