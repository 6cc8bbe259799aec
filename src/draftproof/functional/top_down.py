"""SpecTr and multi-round selection: rules on tries that decide from the root down, one node per row at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.functional.coupling import first_success, kseq_accept, kseq_plan, kseq_residual, rounds_plan, settle
from draftproof.functional.nodes import NodeVerdict, PathVerdict, Tries, verify_chains, verify_tries
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


def _descend(
    tries: Tries, p: Float[Tensor, "m V"], step: Step, rng: Rng
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    """Select a token at the root, go on with the draws that begin with it, and stop when there are none.

    A draw that begins with the selected token is kept, also when it was rejected on the way or when the token came from
    the residual (SpecTr, arXiv 2310.15141, Algorithm 3).

    Every depth takes two calls of `rng`, the leaves included. So the random numbers of a row do not depend on the depth
    of the other tries in the batch.

    Returns:
        The last accepted slot of each row, and the token after it.
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


def refuse_branching_points(tries: Tries, q: Float[Tensor, "rows V"] | None) -> None:
    """Refuse point masses that branch, for rules that need i.i.d. draws at a node.

    Raises:
        ValueError: naming the rules that can use such drafts.
    """
    if q is None and tries.branching:
        raise ValueError(
            "a point-mass draft branches: its tokens are no i.i.d. draws; use multi_round or traversal, or pass q"
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
        validate: check rows and tokens first.

    Raises:
        ValueError: point masses that branch, or `validate` found a mistake; the message names the row.

    Source: SpecTr, arXiv 2310.15141, Algorithms 2, 3 and 5.
    """
    return verify_tries(_spectr, tries, q, p, rng=rng, validate=validate)


def _spectr(
    tries: Tries, q: Float[Tensor, "rows V"] | None, p: Float[Tensor, "m V"], rng: Rng
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    refuse_branching_points(tries, q)
    return _descend(tries, p, partial(_spectr_step, tries, q, p), rng)


def _spectr_step(
    tries: Tries,
    q: Float[Tensor, "rows V"] | None,
    p: Float[Tensor, "m V"],
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

    Each draw is tested against its own row of q, so the draws at a node may have different distributions: point masses
    (q = None) may branch, and draws without replacement whose rows are already renormalised need no option.

    Args:
        tries: the drafts.
        q: rows that `tries.q_row` points into; None for point masses.
        p: rows that `tries.p_row` points into.
        rng: source of all randomness.
        replacement: False when siblings were drawn without replacement and their rows of q are not renormalised.
        validate: check rows and tokens first.

    Raises:
        ValueError: `validate` found a mistake; the message names the row.

    Source: Miao et al. 2023 (SpecInfer, arXiv 2305.09781), algorithm 2.
    """
    return verify_tries(partial(_multi_round, replacement=replacement), tries, q, p, rng=rng, validate=validate)


def _multi_round(
    tries: Tries, q: Float[Tensor, "rows V"] | None, p: Float[Tensor, "m V"], rng: Rng, *, replacement: bool
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    return _descend(tries, p, partial(_multi_round_step, tries, q, p, replacement=replacement), rng)


def _multi_round_step(
    tries: Tries,
    q: Float[Tensor, "rows V"] | None,
    p: Float[Tensor, "m V"],
    target: Float[Tensor, "B V"],
    kids: Int[Tensor, "B D"],
    ids: Int[Tensor, "B D"],
    several: bool,
    *,
    replacement: bool,
) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B V"]]:
    width = kids.shape[1] if several else 1
    drawn = kids[:, :width] % tries.tokens.shape[1] > 0
    plan = rounds_plan(
        target, ids[:, :width], drawn, lambda j: tries.drawn_from(q, p, kids[:, j]), replacement=replacement
    )
    accept = torch.nn.functional.pad(plan.accept, (0, kids.shape[1] - width))
    return accept, torch.where(plan.left.sum(-1, keepdim=True) > 0, plan.left, target)


def spectr_verify(
    tokens: Int[Tensor, "B K n"],
    q: Float[Tensor, "B K n V"] | None,
    p: Float[Tensor, "B K n+1 V"],
    *,
    rng: Rng,
    lengths: Int[Tensor, "B K"] | None = None,
    validate: bool = True,
) -> PathVerdict:
    """SpecTr: K-SEQ at every token of K i.i.d. chains; the chains that agree with the selected token go on; lossless.

    Args:
        tokens: drafted token ids; they are copied to the host once, to merge equal prefixes.
        q: the distribution each token was drawn from, given its own chain's prefix; None for point masses. Equal
            prefixes have equal rows.
        p: the target's distribution before each drafted token and after the last one. Equal prefixes have equal rows.
        rng: source of all randomness.
        lengths: number of tokens in each chain when chains differ; entries beyond a chain's length are padding.
        validate: check shapes, ranges and normalisation first.

    Raises:
        ValueError: `validate` found a mistake; the message names the row.

    Source: SpecTr, arXiv 2310.15141, Algorithms 2 and 3, and Theorem 3.
    """
    return verify_chains(_spectr, tokens, q, p, rng=rng, lengths=lengths, validate=validate)


def multi_round_verify(
    tokens: Int[Tensor, "B K n"],
    q: Float[Tensor, "B K n V"] | None,
    p: Float[Tensor, "B K n+1 V"],
    *,
    rng: Rng,
    lengths: Int[Tensor, "B K"] | None = None,
    validate: bool = True,
) -> PathVerdict:
    """SpecInfer's multi-round selection on K i.i.d. chains; lossless. Arguments and errors: see `spectr_verify`.

    Source: Miao et al. 2023 (SpecInfer, arXiv 2305.09781), algorithm 2.
    """
    rule = partial(_multi_round, replacement=True)
    return verify_chains(rule, tokens, q, p, rng=rng, lengths=lengths, validate=validate)


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

    The chains are the paths to the leaves of the draft tree in the order of drawing, so each node counts as drawn once,
    also when several chains share it. q is the draft's unchanged conditional distribution everywhere: the rule removes
    the earlier siblings from it and renormalises. Arguments and errors: see `spectr_verify`.

    Source: Jeon et al. 2024 (recursive speculative decoding, arXiv 2402.14160).
    """
    rule = partial(_multi_round, replacement=False)
    return verify_chains(rule, tokens, q, p, rng=rng, lengths=lengths, validate=validate, once=True)
