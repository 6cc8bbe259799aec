"""SpecTr (arXiv 2310.15141): K-SEQ at every node, decided from the root down."""

from __future__ import annotations

from functools import partial

from jaxtyping import Float, Int
from torch import Tensor

from draftproof.functional.coupling import kseq_accept, kseq_plan, kseq_residual
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
from draftproof.functional.top_down import descend
from draftproof.rng import Rng


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


def _spectr(tries: Tries, q: QRows, p: PRows, rng: Rng) -> Ends:
    refuse_branching_points(tries, q)
    return descend(tries, p, partial(_spectr_step, tries, q, p), rng)


def _spectr_step(
    tries: Tries,
    q: QRows,
    p: PRows,
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
