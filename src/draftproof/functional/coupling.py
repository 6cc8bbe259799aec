"""Several draws from one context: K-SEQ and recursive rejection on rows, SpecTr and multi-round selection on tries.

Knows: probabilities and tables of draws. Does not know: models, requests. A row couples k draws from q with one token
of p (or of a fraction of p: `weight` a makes it the sub-distribution a p, which trie block verification needs). The
rules here walk from the root down, one node a row; those that decide from the leaves up are in trie.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from draftproof.functional.checks import check_chain
from draftproof.functional.nodes import NodeVerdict, PathVerdict, Tries
from draftproof.kernels.choose import fused
from draftproof.rng import Rng
from draftproof.tree import ROOT

PASSES = 12


class Selection(NamedTuple):
    """The outcome of coupling k draws with one token.

    Attributes:
        accepted: which draw was accepted, k when none was.
        token: the selected token, from the residual when none was accepted.
    """

    accepted: Int[Tensor, " B"]
    token: Int[Tensor, " B"]


class KSeqPlan(NamedTuple):
    """K-SEQ on rows: its division factor and what follows from it.

    Attributes:
        gamma: the division factor g.
        accept: Pr(one of the k draws is accepted) = 1 - (1 - beta)^k, beta = sum_x min(q, a p / g).
        share: accept / beta, what min(q, a p / g) is multiplied with to give the law of the accepted draw.
    """

    gamma: Float[Tensor, " R"]
    accept: Float[Tensor, " R"]
    share: Float[Tensor, " R"]


class RoundsPlan(NamedTuple):
    """Recursive rejection on rows.

    Attributes:
        accept: acceptance probability of each draw, given that those before it were rejected.
        left: what is left of a p after all draws were rejected, a sub-distribution.
    """

    accept: Float[Tensor, "R D"]
    left: Float[Tensor, "R V"]


@fused("coupling")
def capped_mass(p: Float[Tensor, "R V"], q: Float[Tensor, "R V"], ratio: Float[Tensor, " R"]) -> Float[Tensor, " R"]:
    """sum_x min(ratio q(x), p(x)), summed in float64, with one temporary of the size of q."""
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
    """acc = 1 - (1 - beta)^k and acc / beta (k in the limit of beta = 0) at a division factor."""
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
    """The smallest division factor g in [1, k] with which K-SEQ is exact: the root of 1 - (1 - beta)^k = g beta.

    Any g above the root is exact as well and accepts less, one below is not; what is returned never lies below. The
    root is the fixed point of phi(g) = acc / beta, which increases with g, so phi of a point above (below) the root
    lies between the root and that point: each evaluation halves the bracket and then pulls in the half's new end.

    Args:
        p: the target's rows.
        q: the draft's rows.
        k: number of i.i.d. draws, one number or one a row.
        weight: a, when the coupling is with the sub-distribution a p; 1 when left out.
        passes: evaluations, each one pass over [R, V]; twelve lose 4e-5 of acceptance at most, 1e-6 on average.

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
    """K-SEQ's acceptance on rows, at the factor `kseq_gamma` finds or at a given one.

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
    p: Float[Tensor, "R V"],
    q: Float[Tensor, "R V"],
    plan: KSeqPlan,
    weight: Float[Tensor, " R"] | None = None,
) -> Float[Tensor, "R V"]:
    """max(a p - min(q, a p / g) acc / beta, 0), falling back to p where nothing is left.

    Source: SpecTr, arXiv 2310.15141, equation (5).
    """
    whole = torch.ones_like(plan.gamma) if weight is None else weight
    left = p * (whole / plan.gamma).to(p.dtype).unsqueeze(-1)
    torch.minimum(left, q, out=left)
    left.mul_(-plan.share.to(p.dtype).unsqueeze(-1)).addcmul_(p, whole.to(p.dtype).unsqueeze(-1)).clamp_(min=0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def kseq_select(
    tokens: Int[Tensor, "B K"],
    q: Float[Tensor, "B V"],
    p: Float[Tensor, "B V"],
    *,
    rng: Rng,
    validate: bool = True,
) -> Selection:
    """K-SEQ: couple K i.i.d. draws from q with one token of law p, trying the draws in order.

    Args:
        tokens: the draws.
        q: the distribution they were drawn from.
        p: the target's distribution.
        rng: source of all randomness.
        validate: check shapes, ranges and normalisation first; raises ValueError naming the row.

    Source: SpecTr, Algorithm 2. It accepts at least 1 - (1 - 1/K)^K of what the best coupling accepts (its Theorem
    2).
    """
    draws = tokens.shape[1]
    if validate:
        rows = q.unsqueeze(1).expand(-1, draws, -1)
        check_chain(tokens, rows, p.unsqueeze(1).expand(-1, draws + 1, -1), None)
    plan = kseq_plan(p, q, draws)
    accept = kseq_accept(p.gather(-1, tokens), q.gather(-1, tokens), plan.gamma)
    first = rng.categorical(first_success(accept))
    drawn = tokens.gather(-1, first.clamp(max=draws - 1).unsqueeze(-1)).squeeze(-1)
    return Selection(first, rng.categorical(_settle(kseq_residual(p, q, plan), drawn, first < draws)))


def first_success(accept: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D+1"]:
    """The law of the first success among independent trials, and last that of none."""
    missed = torch.cat([torch.ones_like(accept[..., :1]), (1 - accept).cumprod(-1)], -1)
    missed[..., :-1] *= accept
    return missed


def _settle(
    weights: Float[Tensor, "B V"], token: Int[Tensor, " B"], settled: Bool[Tensor, " B"]
) -> Float[Tensor, "B V"]:
    """Weights with all mass on `token` where the draw is settled already, so that one draw serves the whole batch."""
    weights = weights.masked_fill(settled.unsqueeze(-1), 0)
    at = token.unsqueeze(-1)
    return weights.scatter_(-1, at, torch.where(settled.unsqueeze(-1), 1, weights.gather(-1, at)))


def rounds_plan(
    p: Float[Tensor, "R V"],
    tokens: Int[Tensor, "R D"],
    live: Bool[Tensor, "R D"],
    drawn_from: Callable[[int], Float[Tensor, "R V"]],
    weight: Float[Tensor, " R"] | None = None,
    *,
    replacement: bool = True,
) -> RoundsPlan:
    """Recursive rejection: accept draw j with min(1, r_j / q_j), else go on with r_{j+1} = norm(max(r_j - q_j, 0)).

    With a weight a, r starts as a p and keeps the mass it has given that every draw so far was rejected.

    Args:
        p: the target's rows.
        tokens: the draws of each row, in order.
        live: which of them there are.
        drawn_from: the rows of q of the j-th draw.
        weight: a; 1 when left out.
        replacement: False when the rows of q are those of the first draw and later draws came from them without the
            tokens drawn before; the rule then renormalises them itself.

    Source: Miao et al. 2023 (SpecInfer), algorithm 2; without replacement: Jeon et al. 2024 (arXiv 2402.14160).
    """
    _, whole = _columns(p, 1, weight)
    left, mass = p * whole.to(p.dtype).unsqueeze(-1), whole
    accept = torch.zeros(tokens.shape, dtype=torch.float64, device=p.device)
    for j in range(tokens.shape[1]):
        here, at = live[:, j], tokens[:, j : j + 1]
        q = drawn_from(j)
        if not replacement and j > 0:
            earlier = torch.where(live[:, :j], tokens[:, :j], tokens[:, :1])
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


def _first_of(hit: Bool[Tensor, "B D"], values: Int[Tensor, "B D"]) -> Int[Tensor, " B"]:
    """The value at the first hit of each row; that at 0 in rows without a hit."""
    return values.gather(-1, hit.long().argmax(-1, keepdim=True)).squeeze(-1)


Step = Callable[
    [Float[Tensor, "B V"], Int[Tensor, "B D"], Int[Tensor, "B D"], bool],
    tuple[Float[Tensor, "B D"], Float[Tensor, "B V"]],
]


def _descend(
    tries: Tries, p: Float[Tensor, "m V"], step: Step, rng: Rng
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    """Select a token at the root, go on with the draws that start with it, stop when there are none.

    A draw that starts with the selected token is kept whether or not it was rejected on the way, and also when the
    token came from the residual (SpecTr, arXiv 2310.15141, Algorithm 3).

    Args:
        tries: the drafts.
        p: rows of the target.
        step: given for a slot of each row the target's vector, the flat slots and the tokens of its draws, and whether
            any slot of that depth has several: acceptance probability of each draw, residual weights.
        rng: source of all randomness.

    Returns:
        the last accepted slot of each row, and the token after it. Each depth takes two calls of the rng, the leaves'
        too, so that a row's draws do not depend on how deep the tries are that share the batch.
    """
    at = torch.zeros_like(tries.tokens[:, 0])
    token, done = at, torch.zeros_like(at, dtype=torch.bool)
    base = torch.arange(0, tries.tokens.numel(), tries.tokens.shape[1], device=at.device).unsqueeze(-1)
    for level in tries.inner:
        kids, ids = tries.draws_at(at)
        live = (kids > 0) & ~done.unsqueeze(-1)
        target = p[tries.p_row.gather(1, at.unsqueeze(-1)).squeeze(-1)]
        accept, residual = step(target, base + kids, ids, level.single < level.rows.shape[0])
        first = rng.categorical(first_success(accept * live))
        hit = first < ids.shape[1]
        drawn = ids.gather(-1, first.clamp(max=ids.shape[1] - 1).unsqueeze(-1)).squeeze(-1)
        residual = torch.where((kids > 0).any(-1, keepdim=True), residual, target)
        token = rng.categorical(_settle(residual, torch.where(done, token, drawn), done | hit))
        same = live & (ids == token.unsqueeze(-1))
        at = torch.where(same.any(-1), _first_of(same, kids), at)
        done = ~same.any(-1)
    target = p[tries.p_row.gather(1, at.unsqueeze(-1)).squeeze(-1)]
    # a row that ends here draws as it would beside a deeper neighbour
    rng.categorical(target.new_ones(target.shape[0], 1))
    return at, rng.categorical(_settle(target, token, done))


def refuse_branching_points(tries: Tries, q: Float[Tensor, "rows V"] | None) -> None:
    """Rules for i.i.d. draws cannot use point masses that differ at one node.

    Raises:
        ValueError: saying which rules can.
    """
    if q is None and tries.branching:
        raise ValueError(
            "a point-mass draft branches: its tokens are no i.i.d. draws; use multi_round, traversal, or pass q"
        )


def spectr_on_tries(
    tries: Tries, q: Float[Tensor, "rows V"] | None, p: Float[Tensor, "m V"], *, rng: Rng, validate: bool = True
) -> NodeVerdict:
    """SpecTr on explicit tries; lossless when the draws at a node are i.i.d.

    Args:
        tries: the drafts; the draws at a slot share one row of q.
        q: rows that `tries.q_row` points into; None for point masses without branches.
        p: rows that `tries.p_row` points into.
        rng: source of all randomness.
        validate: check rows and tokens first; raises ValueError naming the row.

    Source: SpecTr, arXiv 2310.15141, Algorithms 2, 3 and 5.
    """
    if validate:
        tries.check(q, p)
    at, token = _spectr(tries, q, p, rng)
    return NodeVerdict(at + ROOT, token)


def _spectr(
    tries: Tries, q: Float[Tensor, "rows V"] | None, p: Float[Tensor, "m V"], rng: Rng
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    refuse_branching_points(tries, q)

    def step(
        target: Float[Tensor, "B V"],
        kids: Int[Tensor, "B D"],
        ids: Int[Tensor, "B D"],
        several: bool,
    ) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B V"]]:
        drafted = tries.drawn_from(q, p, kids[:, 0])
        count = (kids % tries.tokens.shape[1] > 0).sum(-1)
        plan = kseq_plan(target, drafted, count if several else 1)
        accept = kseq_accept(target.gather(-1, ids), drafted.gather(-1, ids), plan.gamma)
        return accept, kseq_residual(target, drafted, plan)

    return _descend(tries, p, step, rng)


def multi_round_on_tries(
    tries: Tries,
    q: Float[Tensor, "rows V"] | None,
    p: Float[Tensor, "m V"],
    *,
    rng: Rng,
    replacement: bool = True,
    validate: bool = True,
) -> NodeVerdict:
    """SpecInfer's multi-round selection on explicit tries: recursive rejection from the root down; lossless.

    Each draw is tested against its own row of q, so draws need not be identically distributed: point masses (q =
    None) may branch, and draws without replacement whose rows are already renormalised need no option.

    Args:
        tries: the drafts.
        q: rows that `tries.q_row` points into; None for point masses.
        p: rows that `tries.p_row` points into.
        rng: source of all randomness.
        replacement: False when siblings were drawn without replacement and their rows of q are not renormalised.
        validate: check rows and tokens first; raises ValueError naming the row.

    Source: Miao et al. 2023 (SpecInfer, arXiv 2305.09781), algorithm 2.
    """
    if validate:
        tries.check(q, p)
    at, token = _multi_round(tries, q, p, rng, replacement=replacement)
    return NodeVerdict(at + ROOT, token)


def _multi_round(
    tries: Tries, q: Float[Tensor, "rows V"] | None, p: Float[Tensor, "m V"], rng: Rng, *, replacement: bool
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    def step(
        target: Float[Tensor, "B V"],
        kids: Int[Tensor, "B D"],
        ids: Int[Tensor, "B D"],
        several: bool,
    ) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B V"]]:
        width = kids.shape[1] if several else 1
        live = kids[:, :width] % tries.tokens.shape[1] > 0
        plan = rounds_plan(
            target, ids[:, :width], live, lambda j: tries.drawn_from(q, p, kids[:, j]), replacement=replacement
        )
        accept = torch.nn.functional.pad(plan.accept, (0, kids.shape[1] - width))
        return accept, torch.where(plan.left.sum(-1, keepdim=True) > 0, plan.left, target)

    return _descend(tries, p, step, rng)


def flatten_rows(rows: Float[Tensor, "B K n V"] | None) -> Float[Tensor, "rows V"] | None:
    """Rows of chains as the list that `Tries.from_chains` points into; no copy of contiguous input."""
    return None if rows is None else rows.reshape(-1, rows.shape[-1])


def spectr_verify(
    tokens: Int[Tensor, "B K n"],
    q: Float[Tensor, "B K n V"] | None,
    p: Float[Tensor, "B K n+1 V"],
    *,
    rng: Rng,
    lengths: Int[Tensor, "B K"] | None = None,
    validate: bool = True,
) -> PathVerdict:
    """SpecTr: K i.i.d. chains, K-SEQ at every token, the chains that agree with the selected token go on; lossless.

    Args:
        tokens: drafted token ids; they are read to the host once, to merge equal prefixes.
        q: the distribution each token was drawn from, given its own chain's prefix; equal prefixes carry equal rows.
        p: the target's distribution before each drafted token and after the last one, likewise.
        rng: source of all randomness.
        lengths: tokens in each chain when chains differ; entries beyond a chain's length are padding.
        validate: check shapes, ranges and normalisation first; raises ValueError naming the row.

    Source: SpecTr, arXiv 2310.15141, Algorithms 2 and 3, and Theorem 3.
    """
    if validate:
        check_chain(tokens, q, p, lengths)
    tries = Tries.from_chains(tokens, lengths)
    return tries.path_verdict(*_spectr(tries, flatten_rows(q), p.reshape(-1, p.shape[-1]), rng))


def multi_round_verify(
    tokens: Int[Tensor, "B K n"],
    q: Float[Tensor, "B K n V"] | None,
    p: Float[Tensor, "B K n+1 V"],
    *,
    rng: Rng,
    lengths: Int[Tensor, "B K"] | None = None,
    validate: bool = True,
) -> PathVerdict:
    """SpecInfer's multi-round selection on K i.i.d. chains; lossless. Arguments as for `spectr_verify`.

    Source: Miao et al. 2023 (SpecInfer, arXiv 2305.09781), algorithm 2.
    """
    if validate:
        check_chain(tokens, q, p, lengths)
    tries = Tries.from_chains(tokens, lengths)
    return tries.path_verdict(*_multi_round(tries, flatten_rows(q), p.reshape(-1, p.shape[-1]), rng, replacement=True))


def multi_round_verify_without_replacement(
    tokens: Int[Tensor, "B K n"],
    q: Float[Tensor, "B K n V"],
    p: Float[Tensor, "B K n+1 V"],
    *,
    rng: Rng,
    lengths: Int[Tensor, "B K"] | None = None,
    validate: bool = True,
) -> PathVerdict:
    """Multi-round selection when siblings were drawn without replacement; lossless.

    The chains are the paths to the leaves of the draft tree in the order of drawing, so each node was drawn once,
    however many chains share it. q is the plain conditional everywhere: the rule takes the earlier siblings out of it
    and renormalises. Arguments as for `spectr_verify`.

    Source: Jeon et al. 2024 (recursive speculative decoding, arXiv 2402.14160).
    """
    if validate:
        check_chain(tokens, q, p, lengths)
    tries = Tries.from_chains(tokens, lengths, once=True)
    return tries.path_verdict(*_multi_round(tries, flatten_rows(q), p.reshape(-1, p.shape[-1]), rng, replacement=False))
