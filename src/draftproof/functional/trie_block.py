"""Trie block verification: SpecTr's coupling, K-SEQ, inside block verification; decided from the leaves up.

Related: Block Verification (arXiv 2403.10444), SpecTr (arXiv 2310.15141), SpecTr-GBV (arXiv 2604.25925).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.functional.bottom_up import (
    TriePlan,
    blank_plan,
    decide,
    draws_at_end,
    draws_of,
    entry_at,
    hand_down,
    level_chunks,
    store,
    with_leaves,
)
from draftproof.functional.coupling import kseq_accept, kseq_gamma, kseq_plan, kseq_residual
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


def trie_block_plan(tries: Tries, q: QRows, p: PRows) -> TriePlan:
    """The plan of trie block verification: one pass for each depth; g is searched only at slots with several draws.

    At a slot of weight a with k draws: g = kseq_gamma(a p, q, k) and w(x) = min(1, a p(x) / (g q(x))). When no child is
    accepted, the slot itself is accepted with probability (a - acc) / (1 - acc). A leaf is accepted with probability a.
    """
    plan = blank_plan(tries)
    for level in level_chunks(tries, p):
        kids, flat = draws_of(tries, level)
        ids, count = tries.tokens.flatten()[flat], (kids > 0).sum(-1)
        weight = plan.weight.flatten()[level.rows]
        target = p[tries.p_row.flatten()[level.rows]]
        drafted = tries.drawn_from(q, p, flat[:, 0])
        gamma, many = torch.ones_like(weight), slice(level.single, None)
        gamma[many] = kseq_gamma(target[many], drafted[many], count[many], weight[many])
        rule = kseq_plan(target, drafted, count, weight, gamma=gamma)
        accept = kseq_accept(target.gather(-1, ids), drafted.gather(-1, ids), gamma, weight) * (kids > 0)
        rejected = 1 - rule.accept
        own = torch.where(rejected > 0, (weight - rule.accept) / rejected, 1).clamp_(0, 1)
        store(plan, level, accept, own, gamma)
        hand_down(plan, kids, flat, accept)
    return with_leaves(tries, plan)


def _trie_block(tries: Tries, q: QRows, p: PRows, rng: Rng) -> Ends:
    refuse_branching_points(tries, q)
    plan = trie_block_plan(tries, q, p)
    at = decide(tries, plan, rng)
    weights = p[entry_at(tries.p_row, at)]
    if tries.height > 0:
        kids, flat, _ = draws_at_end(tries, at)
        drafted, count, weight = tries.drawn_from(q, p, flat[:, 0]), (kids > 0).sum(-1), entry_at(plan.weight, at)
        rule = kseq_plan(weights, drafted, count, weight, gamma=entry_at(plan.gamma, at))
        weights = torch.where((count > 0).unsqueeze(-1), kseq_residual(weights, drafted, rule, weight), weights)
    return at, rng.categorical(weights)


def trie_block_on_tries(
    tries: Tries, q: Float[Tensor, "rows V"] | None, p: Float[Tensor, "m V"], *, rng: Rng, validate: bool = True
) -> NodeVerdict:
    """Trie block verification on explicit tries; lossless when the draws at a node are i.i.d.

    A slot without draws is a leaf: it is accepted with its weight and followed by a token from p. So a chain may stop
    at any length. Arguments and errors: see `spectr_on_tries`.
    """
    return verify_tries(_trie_block, tries, q, p, rng=rng, validate=validate)


def trie_block_verify(
    tokens: Int[Tensor, "B K n"],
    q: Float[Tensor, "B K n V"] | None,
    p: Float[Tensor, "B K n+1 V"],
    *,
    rng: Rng,
    lengths: Int[Tensor, "B K"] | None = None,
    validate: bool = True,
) -> PathVerdict:
    """Block verification of K i.i.d. chains together, coupled by K-SEQ at every node of their trie; lossless.

    It is block verification for K = 1, and K-SEQ for chains of one token. Arguments and errors: see `spectr_verify`.
    """
    return verify_chains(_trie_block, tokens, q, p, rng=rng, lengths=lengths, validate=validate)
