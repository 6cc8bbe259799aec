"""Traversal verification (arXiv 2505.12398): recursive rejection at every node, decided from the leaves up."""

from __future__ import annotations

from functools import partial

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
from draftproof.functional.coupling import rounds_plan
from draftproof.functional.nodes import Ends, NodeVerdict, PathVerdict, PRows, QRows, Tries, verify_chains, verify_tries
from draftproof.rng import Rng


def traversal_plan(tries: Tries, q: QRows, p: PRows, *, replacement: bool = True) -> TriePlan:
    """The plan of traversal verification: at each slot recursive rejection, which starts from a p."""
    plan = blank_plan(tries)
    for level in level_chunks(tries, p):
        kids, flat = draws_of(tries, level)
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
        store(plan, level, rule.accept, own, torch.ones_like(own))
        hand_down(plan, kids, flat, rule.accept)
    return with_leaves(tries, plan)


def _traversal(tries: Tries, q: QRows, p: PRows, rng: Rng, *, replacement: bool) -> Ends:
    plan = traversal_plan(tries, q, p, replacement=replacement)
    at = decide(tries, plan, rng)
    weights = p[entry_at(tries.p_row, at)]
    if tries.height > 0:
        kids, flat, ids = draws_at_end(tries, at)
        rule = rounds_plan(
            weights,
            ids,
            kids > 0,
            lambda j: tries.drawn_from(q, p, flat[:, j]),
            entry_at(plan.weight, at),
            replacement=replacement,
        )
        weights = torch.where(rule.left.sum(-1, keepdim=True) > 0, rule.left, weights)
    return at, rng.categorical(weights)


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
