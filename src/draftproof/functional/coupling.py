"""Couplings of several draws from q with one token from p, row by row: K-SEQ and recursive rejection.

Each row couples its k draws with one token from p. A `weight` a in [0, 1] replaces p by the sub-distribution a p; the
rules that decide from the leaves up need this. The rules on whole drafts have
a file each: spectr.py, multi_round.py, trie_block.py and traversal.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from draftproof.functional.checks import check_chain
from draftproof.rng import Rng
from draftproof.triton.choose import fused

PASSES = 12


class Selection(NamedTuple):
    """The outcome of coupling k draws with one token.

    Attributes:
        accepted: index of the accepted draw, k when none was accepted.
        token: id of the selected token; it comes from the residual when no draw was accepted.
    """

    accepted: Int[Tensor, " B"]
    token: Int[Tensor, " B"]


class KSeqPlan(NamedTuple):
    """K-SEQ on rows: its division factor g and the probabilities that follow from it.

    Pr(one of the k draws is accepted) = 1 - (1 - beta)^k, with beta = sum_x min(q, a p / g), and min(q, a p / g) times
    accept / beta is the probability that a draw is accepted and is x.
    """

    gamma: Float[Tensor, " R"]
    accept: Float[Tensor, " R"]
    share: Float[Tensor, " R"]  # accept / beta


class RoundsPlan(NamedTuple):
    """Recursive rejection on rows."""

    accept: Float[Tensor, "R D"]  # acceptance probability of each draw, given that the draws before it were rejected
    left: Float[Tensor, "R V"]  # the residual of a p after all draws were rejected, a sub-distribution


@fused("coupling")
def capped_mass(p: Float[Tensor, "R V"], q: Float[Tensor, "R V"], ratio: Float[Tensor, " R"]) -> Float[Tensor, " R"]:
    """sum_x min(ratio q(x), p(x)) of each row, summed in float64, with one temporary of the size of q."""
    capped = q * ratio.clamp(max=torch.finfo(q.dtype).max / 4).to(q.dtype).unsqueeze(-1)
    return torch.minimum(capped, p, out=capped).sum(-1, dtype=torch.float64)


def _columns(
    p: Float[Tensor, "R V"], k: int | Shaped[Tensor, " R"], weight: Float[Tensor, " R"] | None
) -> tuple[Float[Tensor, " R"], Float[Tensor, " R"]]:
    draws = torch.as_tensor(k, dtype=torch.float64, device=p.device).expand(p.shape[0])
    return draws, torch.ones_like(draws) if weight is None else weight.double()


def _acceptance(
    p: Float[Tensor, "R V"],
    q: Float[Tensor, "R V"],
    draws: Float[Tensor, " R"],
    weight: Float[Tensor, " R"],
    gamma: Float[Tensor, " R"],
) -> tuple[Float[Tensor, " R"], Float[Tensor, " R"]]:
    """acc = 1 - (1 - beta)^k and acc / beta (k where beta = 0) at a division factor."""
    scale = gamma / weight.masked_fill(weight <= 0, 1)
    beta = (capped_mass(p, q, scale) * weight / gamma).clamp_(max=1)
    accept = -torch.expm1(draws * torch.log1p(-beta))
    return accept, torch.where(beta > 0, accept / beta, draws)


@fused("coupling")
def kseq_gamma(
    p: Float[Tensor, "R V"],
    q: Float[Tensor, "R V"],
    k: int | Shaped[Tensor, " R"],
    weight: Float[Tensor, " R"] | None = None,
    *,
    passes: int = PASSES,
) -> Float[Tensor, " R"]:
    """The smallest division factor g in [1, k] for which K-SEQ is exact: the root of 1 - (1 - beta)^k = g beta.

    A larger g is exact as well and accepts less; a smaller g is not exact. The returned factor is never below the
    root. The root is the fixed point of phi(g) = acc / beta, which increases with g. So phi of a point above (below)
    the root lies between the root and that point. Each pass therefore halves the bracket around the root, and then
    moves the new end of the remaining half closer to the root.

    Args:
        p: rows of the target.
        q: rows of the draft.
        k: number of i.i.d. draws, one number for all rows or one for each row.
        weight: a, when the coupling is with the sub-distribution a p; 1 when left out.
        passes: number of evaluations, each one pass over [R, V]; twelve lose at most 4e-5 of the acceptance, and 1e-6
            on average.

    Source: SpecTr, arXiv 2310.15141, Algorithm 2, equation (6) and Lemma 3.
    """
    draws, weight = _columns(p, k, weight)
    if isinstance(k, int) and k == 1:
        return draws.clone()  # the bracket is a point
    low, high = torch.ones_like(draws), draws.clamp(min=1)
    for _ in range(passes):
        at = (low + high) / 2
        value = _acceptance(p, q, draws, weight, at)[1].clamp_(min=1)
        above = value <= at
        high = torch.where(above, value, high)
        low = torch.where(above, low, torch.minimum(value, high))
    return high


def kseq_plan(
    p: Float[Tensor, "R V"],
    q: Float[Tensor, "R V"],
    k: int | Shaped[Tensor, " R"],
    weight: Float[Tensor, " R"] | None = None,
    *,
    gamma: Float[Tensor, " R"] | None = None,
) -> KSeqPlan:
    """K-SEQ's acceptance on rows, at the given division factor or at the one that `kseq_gamma` finds.

    Source: SpecTr, arXiv 2310.15141, Algorithm 2.
    """
    draws, weight = _columns(p, k, weight)
    factor = kseq_gamma(p, q, k, weight) if gamma is None else gamma
    return KSeqPlan(factor, *_acceptance(p, q, draws, weight, factor))


def kseq_accept(
    p_of: Float[Tensor, "R D"],
    q_of: Float[Tensor, "R D"],
    gamma: Float[Tensor, " R"],
    weight: Float[Tensor, " R"] | None = None,
) -> Float[Tensor, "R D"]:
    """min(1, a p(x) / (g q(x))) for the drawn tokens, from their probabilities, in float64."""
    scale = gamma.reciprocal() if weight is None else weight / gamma
    ratio = p_of.double() / q_of.double().clamp(min=torch.finfo(torch.float64).tiny)
    return (ratio * scale.unsqueeze(-1)).clamp_(max=1)


def kseq_residual(
    p: Float[Tensor, "R V"], q: Float[Tensor, "R V"], plan: KSeqPlan, weight: Float[Tensor, " R"] | None = None
) -> Float[Tensor, "R V"]:
    """Residual weights max(a p - min(q, a p / g) acc / beta, 0) of each row; p where all of them are 0.

    Source: SpecTr, arXiv 2310.15141, equation (5).
    """
    whole = torch.ones_like(plan.gamma) if weight is None else weight
    left = p * (whole / plan.gamma).to(p.dtype).unsqueeze(-1)
    torch.minimum(left, q, out=left)
    left.mul_(-plan.share.to(p.dtype).unsqueeze(-1)).addcmul_(p, whole.to(p.dtype).unsqueeze(-1)).clamp_(min=0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def kseq_select(
    tokens: Int[Tensor, "B K"], q: Float[Tensor, "B V"], p: Float[Tensor, "B V"], *, rng: Rng, validate: bool = True
) -> Selection:
    """K-SEQ: couple K i.i.d. draws from q with one token from p, trying the draws in order.

    It accepts at least 1 - (1 - 1/K)^K of what the best coupling accepts (Theorem 2 of the source).

    Args:
        tokens: the draws.
        q: the distribution they were drawn from.
        p: the target's distribution.
        rng: source of all randomness.
        validate: check shapes, ranges and normalisation first.

    Raises:
        ValueError: `validate` found a mistake; the message names the row.

    Source: SpecTr, arXiv 2310.15141, Algorithm 2.
    """
    draws = tokens.shape[1]
    if validate:
        rows = q.unsqueeze(1).expand(-1, draws, -1)
        check_chain(tokens, rows, p.unsqueeze(1).expand(-1, draws + 1, -1), None)
    plan = kseq_plan(p, q, draws)
    accept = kseq_accept(p.gather(-1, tokens), q.gather(-1, tokens), plan.gamma)
    first = rng.categorical(first_success(accept))
    drawn = tokens.gather(-1, first.clamp(max=draws - 1).unsqueeze(-1)).squeeze(-1)
    return Selection(first, rng.categorical(settle(kseq_residual(p, q, plan), drawn, first < draws)))


def first_success(accept: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D+1"]:
    """Probability that each of D independent trials is the first success; the last entry: that none succeeds."""
    missed = torch.cat([torch.ones_like(accept[..., :1]), (1 - accept).cumprod(-1)], -1)
    missed[..., :-1] *= accept
    return missed


def settle(
    weights: Float[Tensor, "B V"], token: Int[Tensor, " B"], settled: Bool[Tensor, " B"]
) -> Float[Tensor, "B V"]:
    """The weights, but all mass on `token` in rows whose token is settled, so that one draw serves the whole batch."""
    weights = weights.masked_fill(settled.unsqueeze(-1), 0)
    at = token.unsqueeze(-1)
    return weights.scatter_(-1, at, torch.where(settled.unsqueeze(-1), 1, weights.gather(-1, at)))


def rounds_plan(
    p: Float[Tensor, "R V"],
    tokens: Int[Tensor, "R D"],
    drawn: Bool[Tensor, "R D"],
    drawn_from: Callable[[int], Float[Tensor, "R V"]],
    weight: Float[Tensor, " R"] | None = None,
    *,
    replacement: bool = True,
) -> RoundsPlan:
    """Recursive rejection: accept draw j with min(1, r_j / q_j), else go on with r_{j+1} = norm(max(r_j - q_j, 0)).

    With a weight a, r starts as a p, and its mass is the probability that the node is still to be accepted, given that
    every draw so far was rejected.

    Args:
        p: rows of the target.
        tokens: the draws of each row, in order.
        drawn: false where a row has fewer draws, and the entry of `tokens` is padding.
        drawn_from: returns the rows of q that the j-th draws came from.
        weight: a; 1 when left out.
        replacement: False when every draw has the first draw's row of q, and later draws came from it without the
            tokens drawn before; the rule then renormalises the row.

    Source: Miao et al. 2023 (SpecInfer), algorithm 2; without replacement: Jeon et al. 2024 (arXiv 2402.14160).
    """
    _, whole = _columns(p, 1, weight)
    left, mass = p * whole.to(p.dtype).unsqueeze(-1), whole
    accept = torch.zeros(tokens.shape, dtype=torch.float64, device=p.device)
    for j in range(tokens.shape[1]):
        here, at = drawn[:, j], tokens[:, j : j + 1]
        q = drawn_from(j)
        if not replacement and j > 0:
            earlier = torch.where(drawn[:, :j], tokens[:, :j], tokens[:, :1])
            q = q.scatter(-1, earlier, 0)
            q /= q.sum(-1, keepdim=True).clamp_(min=torch.finfo(q.dtype).tiny)
        accept[:, j] = kseq_accept(left.gather(-1, at), q.gather(-1, at), torch.ones_like(mass)).squeeze(-1) * here
        rest = (left - q).clamp_(min=0)
        surplus = rest.sum(-1, dtype=torch.float64)
        rejected = (surplus + (1 - mass).clamp_(min=0)).clamp_(min=torch.finfo(p.dtype).tiny)
        rest /= rejected.to(p.dtype).unsqueeze(-1)
        left = torch.where(here.unsqueeze(-1), rest, left)
        mass = torch.where(here, surplus / rejected, mass)
    return RoundsPlan(accept, left)
