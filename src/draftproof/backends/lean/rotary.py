"""Rotary embeddings of the lean forward: angles by position, and in which order a family pairs the numbers of a head.

Here the numbers that are turned together stand half a head apart. Some families pair neighbours, or turn only a part of
each head. The rows of their query and key weights are reordered when they are read, and numbers that are not turned get
the angle 0: a product of queries and keys does not depend on the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from jaxtyping import Float, Int
from torch import Tensor

_FIRST_POSITIONS = 512

Angles = Callable[
    ..., tuple[Tensor, Tensor]
]  # (like, position_ids=[1, positions]) -> cosines and sines [1 positions dim]


class Rope:
    """Rotary angles by position; the table grows by doubling.

    Args:
        modules: what computes them, such as a model's rotary embedding; of a model whose layers differ, several.
        like: a tensor of the dtype and on the device of the hidden states.
    """

    def __init__(self, modules: Angles | Sequence[Angles], like: Tensor) -> None:
        self.modules: Sequence[Angles] = (modules,) if callable(modules) else modules
        self._like = like
        self._table = like.new_empty((0, 0))

    def __call__(self, positions: Int[Tensor, " tokens"], horizon: int) -> tuple[Tensor, Tensor]:
        """Cosine, and sine with the sign of `rotate_half`, each [tokens, 1, dim], or those of all modules in turn.

        Positions are below `horizon`.
        """
        if horizon > self._table.shape[0]:
            self._grow(max(horizon, 2 * self._table.shape[0], _FIRST_POSITIONS))
        cos, sin = F.embedding(positions, self._table).unsqueeze(1).chunk(2, -1)
        return cos, sin

    def _grow(self, size: int) -> None:
        positions = torch.arange(size, device=self._like.device).unsqueeze(0)
        cosines, sines = [], []
        for module in self.modules:
            cos, sin = module(self._like, position_ids=positions)
            low, high = sin[0].chunk(2, -1)
            cosines.append(cos[0])
            sines += [-low, high]
        self._table = torch.cat((*cosines, *sines), -1)


class Rotary:
    """Rotary angles with constant frequencies, as transformers computes them.

    Numbers whose frequency is 0 are not turned, and not scaled either.
    """

    def __init__(self, inv_freq: Float[Tensor, " half"], attention_scaling: float) -> None:
        self.inv_freq = inv_freq
        self.attention_scaling = torch.where(inv_freq == 0, 1.0, attention_scaling).repeat(2)

    def __call__(self, like: Tensor, *, position_ids: Int[Tensor, "1 positions"]) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each [1, positions, dim], in the dtype of `like`."""
        angles = position_ids[..., None].float() * self.inv_freq
        both = torch.cat((angles, angles), -1)
        return (both.cos() * self.attention_scaling).to(like.dtype), (both.sin() * self.attention_scaling).to(
            like.dtype
        )


def order_of(turn: Callable[..., tuple[Tensor, Tensor]], dim: int, turned: int) -> tuple[int, ...] | None:
    """The order of a head's numbers in which those that a family turns together stand half a head apart.

    First come the numbers that are turned by frequencies 0, 1, ..., then half of those that are not turned, then their
    partners in the same order, then the other half. None where the function does not turn pairs by their angle.
    """
    half, rest = turned // 2, dim - turned
    if turned % 2 or rest % 2 or rest < 0:
        return None
    each = torch.arange(1.0, half + 1).repeat(2)
    heads = torch.eye(dim).view(1, dim, 1, dim)  # one head for each number
    found = [made.view(dim, dim) for made in turn(heads, heads, torch.zeros(1, 1, turned), each.view(1, 1, -1))]
    moved = found[0]  # [from, into]
    firsts = [torch.nonzero(moved == -number) for number in range(1, half + 1)]
    if any(len(pair) != 1 for pair in firsts):
        return None
    high, low = torch.cat(firsts).T.tolist() if half else ([], [])
    kept = [number for number in range(dim) if number not in {*low, *high}]
    expected = torch.zeros(dim, dim)
    for number, (one, two) in enumerate(zip(low, high, strict=True), 1):
        expected[two, one], expected[one, two] = -number, number
    expected[kept, kept] = 1.0
    cosines = turn(heads, heads, each.view(1, 1, -1), torch.zeros(1, 1, turned))[0].view(dim, dim)
    scaled = torch.ones(dim)
    scaled[low] = scaled[high] = torch.arange(1.0, half + 1)
    if len(kept) != rest or not all(torch.equal(made, expected) for made in found):
        return None
    return (*low, *kept[: rest // 2], *high, *kept[rest // 2 :]) if torch.equal(cosines, scaled.diag()) else None
