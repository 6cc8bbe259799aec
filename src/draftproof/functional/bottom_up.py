"""Trie block verification and traversal verification: weights go down the draft trie, decisions go up.

Both rules give every node a weight: the probability, over drafts and decisions, that the node's subtree is accepted.
The root has weight 1. A node of weight a couples its draws with the sub-distribution a p: draw j is accepted with
probability w_j. The weight of a child is the probability that at least one of the draws of its token is accepted.

The decisions are made from the leaves up. Among the children whose subtrees are accepted, the one whose first success
is the earliest draw wins. When no child is accepted, the node itself is accepted with the rest of a.

Trie block verification couples by K-SEQ: it is SpecTr's coupling inside block verification. Traversal verification
couples by recursive rejection: it is the bottom-up form of multi-round selection.

Related: Block Verification (arXiv 2403.10444), SpecTr (arXiv 2310.15141), traversal verification (arXiv 2505.12398),
greedy multi-path block verification (arXiv 2602.16961), SpecTr-GBV (arXiv 2604.25925).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.functional.coupling import (
    first_success,
    kseq_accept,
    kseq_gamma,
    kseq_plan,
    kseq_residual,
    rounds_plan,
)
from draftproof.functional.nodes import Level, NodeVerdict, PathVerdict, Tries, verify_chains, verify_tries
from draftproof.functional.top_down import refuse_branching_points
from draftproof.rng import Rng

PORTION = 1 << 20  # entries of a temporary on a CPU


class TriePlan(NamedTuple):
    """The probabilities of all decisions, computed before any decision is made.

    Attributes:
        weight: Pr(the slot's subtree is accepted | the slot was drawn); 1 for the root.
        accept: acceptance probability of each draw at a slot, by the slot's coupling.
        own: Pr(the slot itself is accepted | no subtree of its children is accepted).
        gamma: the slot's division factor (K-SEQ only; else 1).
    """

    weight: Float[Tensor, "B N"]
    accept: Float[Tensor, "B N D"]
    own: Float[Tensor, "B N"]
    gamma: Float[Tensor, "B N"]


def _blank_plan(tries: Tries) -> TriePlan:
    shape, device = tries.tokens.shape, tries.tokens.device
    weight = torch.zeros(shape, dtype=torch.float64, device=device)
    weight[:, 0] = 1
    accept = torch.zeros(tries.kids.shape, dtype=torch.float64, device=device)
    return TriePlan(weight, accept, torch.ones_like(weight), torch.ones_like(weight))


def _draws_of(tries: Tries, level: Level) -> tuple[Int[Tensor, "r D"], Int[Tensor, "r D"]]:
    """The draws at the slots of a level: their slots and flat ids (the root's flat id where there is no draw)."""
    kids = tries.kids.flatten(0, 1)[level.rows]
    slots = tries.tokens.shape[1]
    return kids, kids + (level.rows // slots * slots).unsqueeze(-1)


def _portions(tries: Tries, p: Float[Tensor, "m V"]) -> Iterator[Level]:
    """The levels from the root down; on a CPU in parts of a few slots each.

    Slots of one depth are independent. On a CPU, temporaries for the whole batch would cost more in page faults than in
    arithmetic.
    """
    most = max(PORTION // p.shape[-1], 1) if p.device.type == "cpu" else p.shape[0]
    for level in tries.inner:
        for first in range(0, level.rows.shape[0], most):
            rows = level.rows[first : first + most]
            yield Level(rows, min(max(level.single - first, 0), rows.shape[0]))


def _hand_down(
    plan: TriePlan, kids: Int[Tensor, "r D"], flat: Int[Tensor, "r D"], accept: Float[Tensor, "r D"]
) -> None:
    """Set each child's weight to the probability that at least one draw of it is accepted: 1 - prod (1 - w_j)."""
    weight = plan.weight.view(-1)
    missed = torch.ones_like(weight).scatter_reduce_(0, flat.flatten(), (1 - accept).flatten(), "prod")
    given = torch.where(kids > 0, 1 - missed[flat], 1)  # without a draw `flat` is the root, whose weight is 1
    weight.scatter_(0, flat.flatten(), given.flatten())


def trie_block_plan(tries: Tries, q: Float[Tensor, "rows V"] | None, p: Float[Tensor, "m V"]) -> TriePlan:
    """The plan of trie block verification: one pass for each depth; g is searched only at slots with several draws.

    At a slot of weight a with k draws: g = kseq_gamma(a p, q, k) and w(x) = min(1, a p(x) / (g q(x))). When no child is
    accepted, the slot itself is accepted with probability (a - acc) / (1 - acc). A leaf is accepted with probability a.
    """
    plan = _blank_plan(tries)
    for level in _portions(tries, p):
        kids, flat = _draws_of(tries, level)
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
        _store(plan, level, accept, own, gamma)
        _hand_down(plan, kids, flat, accept)
    return _with_leaves(tries, plan)


def traversal_plan(
    tries: Tries, q: Float[Tensor, "rows V"] | None, p: Float[Tensor, "m V"], *, replacement: bool = True
) -> TriePlan:
    """The plan of traversal verification: at each slot recursive rejection, which starts from a p."""
    plan = _blank_plan(tries)
    for level in _portions(tries, p):
        kids, flat = _draws_of(tries, level)
        if level.single == level.rows.shape[0]:  # each padded draw would cost a pass over the rows
            kids, flat = kids[:, :1], flat[:, :1]
        weight = plan.weight.flatten()[level.rows]
        rule = rounds_plan(
            p[tries.p_row.flatten()[level.rows]],
            tries.tokens.flatten()[flat],
            kids > 0,
            lambda j, flat=flat: tries.drawn_from(q, p, flat[:, j]),  # type: ignore[misc]
            weight,
            replacement=replacement,
        )
        own = rule.left.sum(-1, dtype=torch.float64).clamp_(0, 1)
        _store(plan, level, rule.accept, own, torch.ones_like(own))
        _hand_down(plan, kids, flat, rule.accept)
    return _with_leaves(tries, plan)


def _store(
    plan: TriePlan, level: Level, accept: Float[Tensor, "r D"], own: Float[Tensor, " r"], gamma: Float[Tensor, " r"]
) -> None:
    plan.accept.flatten(0, 1)[level.rows, : accept.shape[-1]] = accept
    plan.own.view(-1)[level.rows] = own
    plan.gamma.view(-1)[level.rows] = gamma


def _with_leaves(tries: Tries, plan: TriePlan) -> TriePlan:
    """The plan with the slots that have no rest: a leaf is accepted with its weight, the root always."""
    own = torch.where((tries.kids > 0).any(-1), plan.own, plan.weight)
    own[:, 0] = 1
    return plan._replace(own=own)


def success_draw_weights(tries: Tries, plan: TriePlan) -> Float[Tensor, "B N D"]:
    """Weights of the draw that is the first accepted one, among the draws of a slot's token at its parent.

    Up to normalisation: w_j prod_{i < j} (1 - w_i) over the draws of the slot. When all w_j are equal, this is a
    geometric distribution truncated at the number of draws. A slot without siblings wins whenever it is accepted, so
    its first draw is used.
    """
    rows = torch.arange(tries.parent.shape[0], device=tries.parent.device).unsqueeze(-1)
    drawn = tries.kids[rows, tries.parent]
    here = drawn == torch.arange(tries.parent.shape[1], device=rows.device).unsqueeze(-1)
    weights = first_success(plan.accept[rows, tries.parent] * here)[..., :-1]
    chosen = (here | (drawn == 0)).all(-1, keepdim=True) | (weights.sum(-1, keepdim=True) <= 0)
    first = torch.arange(weights.shape[-1], device=rows.device) == 0
    return torch.where(chosen, first.double(), weights)


def decide(tries: Tries, plan: TriePlan, rng: Rng) -> Int[Tensor, " B"]:
    """The last accepted slot of each row, decided from the deepest slots up.

    This takes two calls of `rng` for tries of any depth. So the random numbers of a row do not depend on the depth of
    the other tries in the batch.
    """
    own = rng.bernoulli(plan.own * (tries.depth > 0))
    moment = rng.categorical(success_draw_weights(tries, plan))
    ends = torch.zeros_like(tries.tokens)  # where the accepted path below a slot ends; 0: its subtree is rejected
    for depth in range(tries.height, 0, -1):
        slots = tries.slots[depth]
        end = _winner(tries, ends, moment, slots)
        ends.scatter_(1, slots, torch.where((end == 0) & own.gather(1, slots), slots, end))
    return _winner(tries, ends, moment, tries.slots[0]).squeeze(-1)


def _winner(
    tries: Tries,
    ends: Int[Tensor, "B N"],
    moment: Int[Tensor, "B N"],
    slots: Int[Tensor, "B W"],
) -> Int[Tensor, "B W"]:
    """Where the path of the accepted child with the earliest success ends; 0 when no child is accepted."""
    rows = torch.arange(slots.shape[0], device=slots.device).unsqueeze(-1)
    places = torch.arange(tries.kids.shape[-1], device=slots.device)
    kids = tries.kids[rows, slots]
    below = ends.gather(1, kids.flatten(1)).view_as(kids) * (kids > 0)
    hit = (below > 0) & (moment.gather(1, kids.flatten(1)).view_as(kids) == places)
    return below.gather(-1, hit.long().argmax(-1, keepdim=True)).squeeze(-1) * hit.any(-1)


def _at(table: Tensor, at: Int[Tensor, " B"]) -> Tensor:
    return table.gather(1, at.unsqueeze(-1)).squeeze(-1)


def _end_of(tries: Tries, at: Int[Tensor, " B"]) -> tuple[Int[Tensor, "B D"], Int[Tensor, "B D"], Int[Tensor, "B D"]]:
    """The draws at each row's last accepted slot: slots, flat ids, tokens."""
    kids, ids = tries.draws_at(at)
    slots = tries.tokens.shape[1]
    return kids, kids + torch.arange(0, at.shape[0] * slots, slots, device=at.device).unsqueeze(-1), ids


def _trie_block(
    tries: Tries, q: Float[Tensor, "rows V"] | None, p: Float[Tensor, "m V"], rng: Rng
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    refuse_branching_points(tries, q)
    plan = trie_block_plan(tries, q, p)
    at = decide(tries, plan, rng)
    weights = p[_at(tries.p_row, at)]
    if tries.height > 0:
        kids, flat, _ = _end_of(tries, at)
        drafted, count, weight = tries.drawn_from(q, p, flat[:, 0]), (kids > 0).sum(-1), _at(plan.weight, at)
        rule = kseq_plan(weights, drafted, count, weight, gamma=_at(plan.gamma, at))
        weights = torch.where((count > 0).unsqueeze(-1), kseq_residual(weights, drafted, rule, weight), weights)
    return at, rng.categorical(weights)


def _traversal(
    tries: Tries, q: Float[Tensor, "rows V"] | None, p: Float[Tensor, "m V"], rng: Rng, *, replacement: bool
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    plan = traversal_plan(tries, q, p, replacement=replacement)
    at = decide(tries, plan, rng)
    weights = p[_at(tries.p_row, at)]
    if tries.height > 0:
        kids, flat, ids = _end_of(tries, at)
        rule = rounds_plan(
            weights,
            ids,
            kids > 0,
            lambda j: tries.drawn_from(q, p, flat[:, j]),
            _at(plan.weight, at),
            replacement=replacement,
        )
        weights = torch.where(rule.left.sum(-1, keepdim=True) > 0, rule.left, weights)
    return at, rng.categorical(weights)


def trie_block_on_tries(
    tries: Tries, q: Float[Tensor, "rows V"] | None, p: Float[Tensor, "m V"], *, rng: Rng, validate: bool = True
) -> NodeVerdict:
    """Trie block verification on explicit tries; lossless when the draws at a node are i.i.d.

    Args:
        tries: the drafts; the draws at a slot share one row of q. A slot without draws is a leaf: it is accepted with
            its weight and followed by a token from p. So a chain may stop at any length.
        q: rows that `tries.q_row` points into; None for point masses without branches.
        p: rows that `tries.p_row` points into.
        rng: source of all randomness.
        validate: check rows and tokens first.

    Raises:
        ValueError: point masses that branch, or `validate` found a mistake; the message names the row.
    """
    return verify_tries(_trie_block, tries, q, p, rng=rng, validate=validate)


def traversal_on_tries(
    tries: Tries,
    q: Float[Tensor, "rows V"] | None,
    p: Float[Tensor, "m V"],
    *,
    rng: Rng,
    replacement: bool = True,
    validate: bool = True,
) -> NodeVerdict:
    """Traversal verification on explicit tries; lossless. Arguments and errors: see `multi_round_on_tries`.

    Source: arXiv 2505.12398.
    """
    return verify_tries(partial(_traversal, replacement=replacement), tries, q, p, rng=rng, validate=validate)


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


def traversal_verify(
    tokens: Int[Tensor, "B K n"],
    q: Float[Tensor, "B K n V"] | None,
    p: Float[Tensor, "B K n+1 V"],
    *,
    rng: Rng,
    lengths: Int[Tensor, "B K"] | None = None,
    replacement: bool = True,
    validate: bool = True,
) -> PathVerdict:
    """Traversal verification of K chains: multi-round selection decided from the leaves up; lossless.

    Arguments and errors: see `spectr_verify`; `replacement` is False when siblings were drawn without replacement, see
    `multi_round_verify_without_replacement`.

    Source: arXiv 2505.12398.
    """
    rule = partial(_traversal, replacement=replacement)
    return verify_chains(rule, tokens, q, p, rng=rng, lengths=lengths, validate=validate, once=not replacement)
