"""Greedy multi-path block verification: the best of several i.i.d. drafts is selected, then verified as one block.

At every node the drawn tokens are ranked by p/q, and the path goes on with the best of them. What is selected is a draw
from another distribution than q: of m draws, token x is the best with probability F(x)^m - F(x-)^m, where F(x) is the
mass under q of x and all tokens ranked below it. Block verification of the selected path against these rows is
lossless, because the ranking is a function of p and q alone.

For K chains of one length Thomas and Pal use the distribution of the selected path as a whole: with A(x) the mass of
all paths ranked below the selected prefix and x, and Q its mass, (A(x) + Q q(x))^K - A(x)^K. Where the number of draws
at a node depends on other chains (stoppers that look at all of them, prefix trees), the rows are taken given it.

Source: Thomas and Pal 2026, greedy multi-path block verification (arXiv 2602.16961), written from its description and
from the published code's documentation; ties are ranked by token id.
"""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.functional.chain import block_verify
from draftproof.functional.nodes import (
    Ends,
    NodeVerdict,
    PathVerdict,
    PRows,
    QRows,
    Tries,
    refuse_branching_points,
    verify_chains,
    verify_tries,
)
from draftproof.rng import Rng


def power_difference(
    low: Float[Tensor, "*rows V"], step: Float[Tensor, "*rows V"], power: Int[Tensor, "*rows one"]
) -> Float[Tensor, "*rows V"]:
    """(low + step)^power - low^power without cancellation: step times the sum of (low + step)^j low^(power - 1 - j)."""
    high = low + step
    total = torch.zeros_like(low)
    upper = torch.ones_like(low)
    most = int(power.max())
    for _ in range(most):  # Horner's scheme from both ends: total_m = low total_(m-1) + high^(m-1)
        total = torch.where(power > 0, low * total + upper, total)
        upper = torch.where(power > 0, upper * high, upper)
        power = power - 1
    return step * total


def ranking(p: Float[Tensor, "r V"], q: Float[Tensor, "r V"]) -> Int[Tensor, "r V"]:
    """Token ids from the smallest p/q to the largest, ties by id; tokens with q = 0 cannot be drawn and come last."""
    ratio = torch.where(q > 0, p.double() / q.double().clamp(min=1e-300), torch.inf)
    return ratio.argsort(dim=-1, stable=True)


def _mass_below(order: Int[Tensor, "r V"], q: Float[Tensor, "r V"]) -> Float[Tensor, "r V"]:
    """For each token the mass under q of the tokens ranked below it."""
    ranked = q.double().gather(-1, order)
    return torch.zeros_like(ranked).scatter_(-1, order, ranked.cumsum(-1) - ranked)


def _select(
    tries: Tries, q: QRows, p: PRows, *, joint: bool
) -> tuple[Int[Tensor, "B n"], Float[Tensor, "B n V"], Float[Tensor, "B levels V"], Int[Tensor, " B"]]:
    """The selected path of each row: its slots, the rows it is a draw from, the target's rows, its length."""
    batch, vocab = tries.tokens.shape[0], p.shape[-1]
    rows = torch.arange(batch, device=p.device)
    at = torch.zeros(batch, dtype=torch.int64, device=p.device)
    length = torch.zeros_like(at)
    below = torch.zeros(batch, 1, dtype=torch.float64, device=p.device)  # paths ranked below the selected prefix
    mass = torch.ones_like(below)  # of the prefix under q
    first = (tries.kids[:, 0] > 0).sum(-1, keepdim=True)
    slots, skewed = [], []
    for _ in range(tries.height):
        kids, ids = tries.draws_at(at)
        drawn = kids > 0
        target = p[tries.p_row[rows, at]]
        flat = rows * tries.tokens.shape[1] + kids[:, 0]
        drafted = tries.drawn_from(q, p, flat).double()
        order = ranking(target, drafted)
        place = torch.zeros_like(order).scatter_(-1, order, torch.arange(vocab, device=p.device).expand_as(order))
        best = torch.where(drawn, place.gather(-1, ids), -vocab).argmax(-1, keepdim=True)
        token = ids.gather(-1, best)
        low, count = _mass_below(order, drafted), drawn.sum(-1, keepdim=True)
        if joint:
            low, step, count = below + mass * low, mass * drafted, first
        else:
            step = drafted
        made = power_difference(low, step, count)
        on = drawn.any(-1)
        skewed.append(torch.where(on.unsqueeze(-1), made / made.sum(-1, keepdim=True).clamp(min=1e-300), 0))
        if joint:
            below, mass = low.gather(-1, token), mass * drafted.gather(-1, token)
        at = torch.where(on, kids.gather(-1, best).squeeze(-1), at)
        length += on
        slots.append(at)
    path = torch.stack(slots, -1) if slots else at.unsqueeze(-1)[:, :0]
    along = torch.cat([torch.zeros_like(rows).unsqueeze(-1), path], -1)
    made_rows = torch.stack(skewed, 1) if skewed else p.new_zeros(batch, 0, vocab, dtype=torch.float64)
    return path, made_rows, p[tries.p_row.gather(1, along)], length


def _multi_path(tries: Tries, q: QRows, p: PRows, rng: Rng, *, joint: bool) -> Ends:
    refuse_branching_points(tries, q)
    path, skewed, target, length = _select(tries, q, p, joint=joint)
    tokens = tries.tokens.gather(1, path)
    found = block_verify(tokens, skewed.to(p.dtype), target, rng=rng, lengths=length, validate=False)
    along = torch.cat([torch.zeros_like(length).unsqueeze(-1), path], -1)
    return along.gather(1, found.accepted.unsqueeze(-1)).squeeze(-1), found.token


def multi_path_on_tries(
    tries: Tries, q: Float[Tensor, "rows V"] | None, p: Float[Tensor, "m V"], *, rng: Rng, validate: bool = True
) -> NodeVerdict:
    """Greedy multi-path block verification of trees whose draws at a node are i.i.d.; lossless.

    Arguments and errors: see `spectr_on_tries`. The rows of a node are those given its number of draws.

    Source: arXiv 2602.16961.
    """
    return verify_tries(partial(_multi_path, joint=False), tries, q, p, rng=rng, validate=validate)


def multi_path_verify(
    tokens: Int[Tensor, "B K n"],
    q: Float[Tensor, "B K n V"] | None,
    p: Float[Tensor, "B K n+1 V"],
    *,
    rng: Rng,
    validate: bool = True,
    joint: bool = True,
) -> PathVerdict:
    """Greedy multi-path block verification of K i.i.d. chains of one length; lossless.

    `joint` uses the distribution of the whole selected path, as the paper does; else the rows at each node are those
    given how many chains pass through it, which accepts less and allows chains that stop early. Other arguments and
    errors: see `spectr_verify`.

    Source: Thomas and Pal 2026, arXiv 2602.16961.
    """
    return verify_chains(partial(_multi_path, joint=joint), tokens, q, p, rng=rng, lengths=None, validate=validate)
