"""Pairs of distributions for exact computations: memoryless sources, uniform and Bernoulli rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.theory.lengths import Model


def constant(row: Sequence[float]) -> Model:
    """A model that gives the same row in every context."""
    probs = torch.tensor(row, dtype=torch.float64)
    return lambda _: probs


def bernoulli(chance: float) -> tuple[float, float]:
    """Probabilities of 0 and 1."""
    return (1 - chance, chance)


def rows(*made: Sequence[float]) -> Float[Tensor, "R V"]:
    """Distributions, one a row."""
    return torch.tensor(made, dtype=torch.float64)


def uniform(support: int, size: int) -> list[float]:
    """Uniform on the first `support` of `size` tokens."""
    return [1 / support] * support + [0.0] * (size - support)
