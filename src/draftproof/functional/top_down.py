"""What SpecTr and multi-round selection share: a decision from the root down, one node per row at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.functional.coupling import first_success, settle
from draftproof.functional.nodes import Ends, PRows, Tries
from draftproof.rng import Rng


def _first_of(hit: Bool[Tensor, "B D"], values: Int[Tensor, "B D"]) -> Int[Tensor, " B"]:
    """The value at the first hit of each row; the value at 0 in rows without a hit."""
    return values.gather(-1, hit.long().argmax(-1, keepdim=True)).squeeze(-1)


Step = Callable[
    [Float[Tensor, "B V"], Int[Tensor, "B D"], Int[Tensor, "B D"], bool],
    tuple[Float[Tensor, "B D"], Float[Tensor, "B V"]],
]
"""The coupling at one slot of each row.

It is given the row of p, the flat slots and the tokens of the draws, and whether any slot of this depth has several
draws. It returns the acceptance probability of each draw and the residual weights.
"""


def descend(tries: Tries, p: PRows, step: Step, rng: Rng) -> Ends:
    """Select a token at the root, go on with the draws that begin with it, and stop when there are none.

    A draw that begins with the selected token is kept, also when it was rejected on the way or when the token came from
    the residual (SpecTr, arXiv 2310.15141, Algorithm 3).

    Every depth takes two calls of `rng`, the leaves included. So the random numbers of a row do not depend on the depth
    of the other tries in the batch.
    """
    at = torch.zeros_like(tries.tokens[:, 0])
    token, done = at, torch.zeros_like(at, dtype=torch.bool)
    base = torch.arange(0, tries.tokens.numel(), tries.tokens.shape[1], device=at.device).unsqueeze(-1)
    for level in tries.inner:
        kids, ids = tries.draws_at(at)
        active = (kids > 0) & ~done.unsqueeze(-1)
        target = p[tries.p_row.gather(1, at.unsqueeze(-1)).squeeze(-1)]
        accept, residual = step(target, base + kids, ids, level.single < level.rows.shape[0])
        first = rng.categorical(first_success(accept * active))
        hit = first < ids.shape[1]
        drawn = ids.gather(-1, first.clamp(max=ids.shape[1] - 1).unsqueeze(-1)).squeeze(-1)
        residual = torch.where((kids > 0).any(-1, keepdim=True), residual, target)
        token = rng.categorical(settle(residual, torch.where(done, token, drawn), done | hit))
        same = active & (ids == token.unsqueeze(-1))
        at = torch.where(same.any(-1), _first_of(same, kids), at)
        done = ~same.any(-1)
    target = p[tries.p_row.gather(1, at.unsqueeze(-1)).squeeze(-1)]
    rng.categorical(target.new_ones(target.shape[0], 1))  # the first of the two calls of the leaves' depth
    return at, rng.categorical(settle(target, token, done))
