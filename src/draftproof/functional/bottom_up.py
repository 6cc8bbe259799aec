"""What trie block verification and traversal verification share: weights go down the draft trie, decisions go up.

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
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.functional.coupling import first_success
from draftproof.functional.nodes import DepthSlots, Tries
from draftproof.rng import Rng

CHUNK_ENTRIES = 1 << 20  # entries of a temporary on a CPU


class TriePlan(NamedTuple):
    """The probabilities of all decisions, computed before any decision is made."""

    weight: Float[Tensor, "B N"]  # Pr(the slot's subtree is accepted | the slot was drawn); 1 for the root
    accept: Float[Tensor, "B N D"]  # acceptance probability of each draw at a slot, by the slot's coupling
    own: Float[Tensor, "B N"]  # Pr(the slot itself is accepted | no subtree of its children is)
    gamma: Float[Tensor, "B N"]  # the slot's division factor (K-SEQ only; else 1)


def blank_plan(tries: Tries) -> TriePlan:
    """A plan in which only the root is accepted."""
    shape, device = tries.tokens.shape, tries.tokens.device
    weight = torch.zeros(shape, dtype=torch.float64, device=device)
    weight[:, 0] = 1
    accept = torch.zeros(tries.kids.shape, dtype=torch.float64, device=device)
    return TriePlan(weight, accept, torch.ones_like(weight), torch.ones_like(weight))


def draws_of(tries: Tries, level: DepthSlots) -> tuple[Int[Tensor, "r D"], Int[Tensor, "r D"]]:
    """The draws at the slots of a level: their slots and flat ids (the root's flat id where there is no draw)."""
    kids = tries.kids.flatten(0, 1)[level.rows]
    slots = tries.tokens.shape[1]
    return kids, kids + (level.rows // slots * slots).unsqueeze(-1)


def level_chunks(tries: Tries, p: Float[Tensor, "m V"]) -> Iterator[DepthSlots]:
    """The levels from the root down; on a CPU in parts of a few slots each.

    Slots of one depth are independent. On a CPU, temporaries for the whole batch would cost more in page faults than in
    arithmetic.
    """
    most = max(CHUNK_ENTRIES // p.shape[-1], 1) if p.device.type == "cpu" else p.shape[0]
    for level in tries.inner:
        for first in range(0, level.rows.shape[0], most):
            rows = level.rows[first : first + most]
            yield DepthSlots(rows, min(max(level.single - first, 0), rows.shape[0]))


def hand_down(plan: TriePlan, kids: Int[Tensor, "r D"], flat: Int[Tensor, "r D"], accept: Float[Tensor, "r D"]) -> None:
    """Set each child's weight to the probability that at least one draw of it is accepted: 1 - prod (1 - w_j)."""
    weight = plan.weight.view(-1)
    missed = torch.ones_like(weight).scatter_reduce_(0, flat.flatten(), (1 - accept).flatten(), "prod")
    given = torch.where(kids > 0, 1 - missed[flat], 1)  # without a draw `flat` is the root, whose weight is 1
    weight.scatter_(0, flat.flatten(), given.flatten())


def store(
    plan: TriePlan,
    level: DepthSlots,
    accept: Float[Tensor, "r D"],
    own: Float[Tensor, " r"],
    gamma: Float[Tensor, " r"],
) -> None:
    """Write the decisions of one level into the plan."""
    plan.accept.flatten(0, 1)[level.rows, : accept.shape[-1]] = accept
    plan.own.view(-1)[level.rows] = own
    plan.gamma.view(-1)[level.rows] = gamma


def with_leaves(tries: Tries, plan: TriePlan) -> TriePlan:
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
    tries: Tries, ends: Int[Tensor, "B N"], moment: Int[Tensor, "B N"], slots: Int[Tensor, "B W"]
) -> Int[Tensor, "B W"]:
    """Where the path of the accepted child with the earliest success ends; 0 when no child is accepted."""
    rows = torch.arange(slots.shape[0], device=slots.device).unsqueeze(-1)
    places = torch.arange(tries.kids.shape[-1], device=slots.device)
    kids = tries.kids[rows, slots]
    below = ends.gather(1, kids.flatten(1)).view_as(kids) * (kids > 0)
    hit = (below > 0) & (moment.gather(1, kids.flatten(1)).view_as(kids) == places)
    return below.gather(-1, hit.long().argmax(-1, keepdim=True)).squeeze(-1) * hit.any(-1)


def entry_at(table: Tensor, at: Int[Tensor, " B"]) -> Tensor:
    """The entry of each row at its own slot."""
    return table.gather(1, at.unsqueeze(-1)).squeeze(-1)


def draws_at_end(
    tries: Tries, at: Int[Tensor, " B"]
) -> tuple[Int[Tensor, "B D"], Int[Tensor, "B D"], Int[Tensor, "B D"]]:
    """The draws at each row's last accepted slot: slots, flat ids, tokens."""
    kids, ids = tries.draws_at(at)
    slots = tries.tokens.shape[1]
    return kids, kids + torch.arange(0, at.shape[0] * slots, slots, device=at.device).unsqueeze(-1), ids
