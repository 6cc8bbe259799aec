"""Medusa heads (arXiv 2401.10774) as published: FasterDecoding's layout.

Head i reads the target's last hidden state at the token before the last committed one, and predicts the token i + 1
places after that one: layers x + silu(W x + b), and an output layer of its own. So all tokens of a draft come from one
state in one pass, each without knowing the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import silu

from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.heads.published.files import WEIGHTS, HeadFiles, cast, read_head, refuse_other_target
from draftproof.backends.heads.published.parallel import ParallelHeadBackend, ParallelLogits, ParallelSession
from draftproof.backends.heads.published.rounding import rounded_product
from draftproof.backends.products.packed_linear import PackedLinear

_FILES = ("medusa_lm_head.safetensors", WEIGHTS)
_PREFIXES = ("", "medusa_head.")


class MedusaBackend(ParallelHeadBackend):
    """Medusa heads over the target they were made for."""

    def __init__(self, source: str, target: SlotBackend) -> None:
        files = read_head(source, "medusa", weights=_FILES)
        self._dtype = target.dtype
        hidden, vocab = files.config.get("hidden_size"), files.config.get("vocab_size")
        refuse_other_target(files, target, hidden=hidden, vocab=vocab)
        width = target.capabilities.hidden
        at = next((prefix for prefix in _PREFIXES if any(name.startswith(f"{prefix}0.") for name in files.tensors)), "")
        count, depth = files.number("medusa_num_heads"), files.number("medusa_num_layers", 1)
        self._heads = [_Head(files, f"{at}{number}.", depth, width, target) for number in range(count)]
        files.refuse_left()
        super().__init__(target, f"medusa heads {source}", places=count, width=width)

    def _compute(self, sessions: Sequence[ParallelSession]) -> list[ParallelLogits]:
        states = torch.cat([session.owner.states_at([session.stem - 1]) for session in sessions]).to(self._dtype)
        rows = torch.stack([head(states) for head in self._heads], 1)
        return [
            ParallelLogits(row, state.expand(len(self._heads), -1)) for row, state in zip(rows, states, strict=True)
        ]


class _Head:
    def __init__(self, files: HeadFiles, at: str, depth: int, width: int, target: SlotBackend) -> None:
        linears = [f"{at}{number}.linear" for number in range(depth)]
        self._blocks = [
            rounded_product(
                PackedLinear(
                    cast(files.take(f"{name}.weight", [width, width]), target),
                    cast(files.take(f"{name}.bias", [width]), target),
                )
            )
            for name in linears
        ]
        weight = files.take(f"{at}{depth}.weight", [None, width])
        if weight.shape[0] != target.vocab_size:
            raise files.refused(
                f"is for a vocabulary of {weight.shape[0]} tokens, and {target.name} has "
                f"{target.vocab_size}: take heads that were made for this target"
            )
        self._output = rounded_product(PackedLinear(cast(weight, target)), output=True)

    def __call__(self, x: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows vocab"]:
        for block in self._blocks:
            x = x + silu(block(x))
        return self._output(x)
