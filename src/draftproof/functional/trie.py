"""Trie block verification and traversal verification: weights flow down the draft trie, decisions flow up.

Knows: probabilities and tries of draws. Does not know: models, requests.

Both rules give every node an acceptance weight such that, over drafts and decisions, the subtree of a drafted node x
is accepted with probability W_x. A node couples its draws with the sub-distribution a p, a its own weight: draw j
would be accepted with w_j; the child it landed on gets the weight that some draw on it is accepted. The children's
subtrees are then verified with those weights, the accepted child whose success falls on the earliest draw wins, and
when none is accepted the node itself is, with what is left of a. Trie block verification couples by K-SEQ (SpecTr's
coupling inside block verification), traversal verification by recursive rejection (the bottom-up form of multi-round
selection).

Relatives: block verification (Block Verification, SpecTr (SpecTr, traversal verification, greedy
multi-path block verification (arXiv 2602.16961), SpecTr-GBV (arXiv 2604.25925).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.functional.checks import check_chain
from draftproof.functional.coupling import (
    first_success,
    flatten_rows,
    kseq_accept,
    kseq_gamma,
    kseq_plan,
    kseq_residual,
    refuse_branching_points,
    rounds_plan,
)
from draftproof.functional.nodes import Level, NodeVerdict, PathVerdict, Tries
from draftproof.rng import Rng
from draftproof.tree import ROOT

PORTION = 1 << 20  # entries of a temporary on a CPU


class TriePlan(NamedTuple):
    """Everything the decisions need, before any is made.

    Attributes:
        weight: Pr(the slot's subtree is accepted | it was drawn); 1 for the root.
        accept: acceptance probability of each draw at a slot, by the slot's coupling.
        own: Pr(the slot itself is accepted | none of its children's subtrees is).
        gamma: the slot's division factor (K-SEQ only; 1 elsewhere).
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
    """The draws at the slots of a level: their slots, and their flat ids (that of the root where there is none)."""
    kids = tries.kids.flatten(0, 1)[level.rows]
    slots = tries.tokens.shape[1]
    return kids, kids + (level.rows // slots * slots).unsqueeze(-1)


def _portions(tries: Tries, p: Float[Tensor, "m V"]) -> Iterator[Level]:
    """The levels from the root down, on a CPU a few slots at a time.

    Slots of one depth do not meet; temporaries of the whole batch would cost more in page faults than in arithmetic.
    """
    most = max(PORTION // p.shape[-1], 1) if p.device.type == "cpu" else p.shape[0]
    for level in tries.inner:
        for first in range(0, level.rows.shape[0], most):
            rows = level.rows[first : first + most]
            yield Level(rows, min(max(level.single - first, 0), rows.shape[0]))


def _hand_down(
    plan: TriePlan, kids: Int[Tensor, "r D"], flat: Int[Tensor, "r D"], accept: Float[Tensor, "r D"]
) -> None:
    """Give each child the probability that some draw on it is accepted: 1 - prod (1 - w_j)."""
    weight = plan.weight.view(-1)
    missed = torch.ones_like(weight).scatter_reduce_(0, flat.flatten(), (1 - accept).flatten(), "prod")
    given = torch.where(kids > 0, 1 - missed[flat], 1)  # where there is no draw, `flat` is the root, whose weight is 1
    weight.scatter_(0, flat.flatten(), given.flatten())


def trie_block_plan(tries: Tries, q: Float[Tensor, "rows V"] | None, p: Float[Tensor, "m V"]) -> TriePlan:
    """Weights of trie block verification: one pass a depth, the root search only where draws are several.

    At a slot of weight a with k draws: g = kseq_gamma(a p, q, k), w(x) = min(1, a p(x) / (g q(x))), and the slot
    itself is accepted with (a - acc) / (1 - acc) when no child is; a leaf with a.
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
    """Weights of traversal verification: at each slot the schedule of recursive rejection, started from a p."""
    plan = _blank_plan(tries)
    for level in _portions(tries, p):
        kids, flat = _draws_of(tries, level)
        if level.single == level.rows.shape[0]:  # each further draw would be a pass over the rows
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
    """A leaf is accepted with its weight; the root, where all weight has ended up, always."""
    own = torch.where((tries.kids > 0).any(-1), plan.own, plan.weight)
    own[:, 0] = 1
    return plan._replace(own=own)


def success_draw_weights(tries: Tries, plan: TriePlan) -> Float[Tensor, "B N D"]:
    """For each slot, how likely each draw at its parent is the first accepted one among those that landed on the slot.

    Up to normalisation: w_j prod_{i < j} (1 - w_i) over the draws on the slot. With one weight for all of them this is
    a geometric law cut off at the slot's multiplicity. A slot without siblings wins whenever it is accepted, so its
    first draw will do.
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

    Two calls of the rng, whatever the height: a row's draws are addressed by its slots, so they do not depend on how
    deep the tries are that share the batch.
    """
    own = rng.bernoulli(plan.own * (tries.depth > 0))
    moment = rng.categorical(success_draw_weights(tries, plan))
    ends = torch.zeros_like(tries.tokens)  # where the accepted path below a slot ends; 0: its subtree is refused
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
            its weight and followed by a token from p, so chains may stop where they like.
        q: rows that `tries.q_row` points into; None for point masses without branches.
        p: rows that `tries.p_row` points into.
        rng: source of all randomness.
        validate: check rows and tokens first; raises ValueError naming the row.
    """
    if validate:
        tries.check(q, p)
    at, token = _trie_block(tries, q, p, rng)
    return NodeVerdict(at + ROOT, token)


def traversal_on_tries(
    tries: Tries,
    q: Float[Tensor, "rows V"] | None,
    p: Float[Tensor, "m V"],
    *,
    rng: Rng,
    replacement: bool = True,
    validate: bool = True,
) -> NodeVerdict:
    """Traversal verification on explicit tries; lossless. Arguments as for `multi_round_on_tries`.

    Source: arXiv 2505.12398.
    """
    if validate:
        tries.check(q, p)
    at, token = _traversal(tries, q, p, rng, replacement=replacement)
    return NodeVerdict(at + ROOT, token)


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

    It is block verification for K = 1 and K-SEQ for chains of one token. Arguments as for `spectr_verify`.
    """
    if validate:
        check_chain(tokens, q, p, lengths)
    tries = Tries.from_chains(tokens, lengths)
    return tries.path_verdict(*_trie_block(tries, flatten_rows(q), p.reshape(-1, p.shape[-1]), rng))


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

    Args:
        tokens: drafted token ids; they are read to the host once, to merge equal prefixes.
        q: the distribution each token was drawn from, given its own chain's prefix; None for point masses.
        p: the target's distribution before each drafted token and after the last one.
        rng: source of all randomness.
        lengths: tokens in each chain when chains differ; entries beyond a chain's length are padding.
        replacement: False when siblings were drawn without replacement (see `multi_round_verify_without_replacement`).
        validate: check shapes, ranges and normalisation first; raises ValueError naming the row.

    Source: arXiv 2505.12398.
    """
    if validate:
        check_chain(tokens, q, p, lengths)
    tries = Tries.from_chains(tokens, lengths, once=not replacement)
    return tries.path_verdict(
        *_traversal(tries, flatten_rows(q), p.reshape(-1, p.shape[-1]), rng, replacement=replacement)
    )
