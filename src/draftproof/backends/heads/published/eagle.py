"""EAGLE heads of the first and second paper (arXiv 2401.15077, 2406.16858) as published: SafeAILab's layout.

The input at a token is its embedding and the target's last hidden state at the token before, which one product fuses.
Llama layers follow, the first without a norm before its attention; their output predicts the target's next state, and
the target's own output layer computes logits from it.
"""

from __future__ import annotations

from typing import Any

import torch

from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.heads.base import Flat
from draftproof.backends.heads.published.files import HeadFiles, refuse_other_target
from draftproof.backends.heads.published.layers import LayerShape, make_layers, make_product, passes_of
from draftproof.backends.heads.published.net import PublishedNet, embedding_of, output_of
from draftproof.backends.lean.attention import Pass


class EagleNet(PublishedNet):
    """The network of an EAGLE head; its states are predictions of the target's."""

    algorithm = "eagle"

    def __init__(self, files: HeadFiles, target: SlotBackend) -> None:
        shape = LayerShape.of(files, "llama")
        refuse_other_target(files, target, hidden=shape.size, vocab=shape.vocab)
        self.width = shape.size
        self.embed = embedding_of(files, shape, target)
        self._fc = make_product(files, "fc", shape.size, 2 * shape.size, target)
        self._normed = "layers.0.input_layernorm.weight" in files.tensors
        self._decoder = make_layers(files, shape, target, first=self._normed)
        self._passes = passes_of(shape, self._decoder, target)
        self.logits = output_of(files, shape, target).product

    def _run(self, x: Flat, embedded: Flat, at: Pass, masks: dict[str, Any]) -> Flat:
        first, *others = self._decoder
        x = self._fc(torch.cat([embedded, x], -1))
        x = first.attend(first.normed(x) if self._normed else x, x, at, masks[first.kind])
        for layer in others:
            x = layer(x, at, masks[layer.kind])
        return x


eagle_backend = EagleNet.load
