"""Pairs of toy models that are small enough to enumerate, and chosen so that wrong rules fail on them.

Their rows have zeros, ties, disjoint supports, point masses, equal and nearly equal rows. There are three tokens: with
two, a wrong residual would not show, because every residual has mass on one token only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.testing import TableModel

VOCAB = 3
CONTEXTS: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (2,))
Context = tuple[int, ...]


@dataclass(frozen=True)
class ToyPair:
    """A target and a draft model, named after their special property; rules get rows of a dtype."""

    name: str
    target: TableModel
    draft: TableModel
    dtype: torch.dtype = torch.float64

    @property
    def vocab(self) -> int:
        """Number of tokens."""
        return self.target.vocab_size

    def p(self, context: Context) -> Float[Tensor, " V"]:
        """The target's next-token row."""
        return self.target.logits(context).softmax(-1).to(self.dtype)

    def q(self, context: Context) -> Float[Tensor, " V"]:
        """The draft's next-token row."""
        return self.draft.logits(context).softmax(-1).to(self.dtype)


def _table(name: int, rows: Sequence[Sequence[float]]) -> TableModel:
    """A model of order 1 with given weights for the contexts (), 0, 1 and 2."""
    scaled = {context: [x / sum(row) for x in row] for context, row in zip(CONTEXTS, rows, strict=True)}
    return TableModel(VOCAB, name, order=1, rows=scaled)


def _random(name: str, seed: int, *, zeros: float = 0.0, sharpness: float = 2.0, order: int = 1) -> ToyPair:
    target, draft = (TableModel(VOCAB, s, order=order, zeros=zeros, sharpness=sharpness) for s in (seed, seed + 1000))
    return ToyPair(name, target, draft)


def _near() -> ToyPair:
    """q equals p except for the last bits of float32."""
    p = [[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5], [0.7, 0.2, 0.1]]
    bit = 2.0**-23
    q = [[a * (1 + bit), b * (1 - bit), c] for a, b, c in p]
    return ToyPair("near-equal", _table(0, p), _table(1, q))


def _one_bit() -> ToyPair:
    """In float32 q exceeds p by one bit at the rarest token and equals p elsewhere: max(p - q, 0) is 0 everywhere."""
    p, bit = [0.6, 0.39, 0.01], 2.0**-30
    q = [0.6 - bit / 2, 0.39 - bit / 2, 0.01 + bit]
    return ToyPair("one bit", _table(0, [p] * 4), _table(1, [q] * 4))


# Rows of the target and of the draft after nothing and after each token.
_TABLES = {
    "ties": (
        [[2.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 2.0, 2.0], [1.0, 1.0, 2.0]],
        [[1.0, 1.0, 2.0], [1.0, 1.0, 1.0], [2.0, 1.0, 2.0], [2.0, 1.0, 1.0]],
    ),
    "disjoint": (  # supports, except after token 2, where they share one token
        [[0.0, 1.0, 2.0], [0.0, 2.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]],
        [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 3.0]],
    ),
    "one-hot q": (  # point masses, as from n-gram drafters
        [[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.4, 0.5, 0.1], [0.3, 0.3, 0.4]],
        [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]],
    ),
    "one-hot p": (  # the target at temperature 0
        [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]],
        [[0.3, 0.5, 0.2], [0.6, 0.1, 0.3], [0.3, 0.3, 0.4], [0.5, 0.0, 0.5]],
    ),
}


def plain() -> ToyPair:
    """A pair without special properties."""
    return _random("dense", 1)


def suite(*, full: bool = False) -> list[ToyPair]:
    """The pairs of an audit; `full` adds more random pairs of each kind.

    "trap" was chosen from 12000 pairs: with the residual of token verification in the block rule, its output
    distribution differs by 0.07. For most pairs the difference is very small.
    """
    same = TableModel(VOCAB, 5, order=1)
    pairs = [
        _random("trap", 1442, sharpness=3.0),
        plain(),
        _random("zeros", 2, zeros=0.4),
        _random("peaked", 3, sharpness=8.0),
        *(ToyPair(name, _table(0, p), _table(1, q)) for name, (p, q) in _TABLES.items()),
        ToyPair("p = q", same, same),
        _near(),
        _one_bit(),
    ]
    if full:
        pairs += [_random(f"dense {seed}", seed, order=2) for seed in range(10, 16)]
        pairs += [_random(f"zeros {seed}", seed, zeros=0.4, order=2) for seed in range(20, 26)]
        pairs += [_random(f"peaked {seed}", seed, sharpness=6.0, order=2) for seed in range(30, 34)]
    return pairs
