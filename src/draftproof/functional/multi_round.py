"""SpecInfer's multi-round selection (arXiv 2305.09781): recursive rejection, decided from the root down."""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.functional.coupling import rounds_plan
from draftproof.functional.nodes import Ends, NodeVerdict, PathVerdict, PRows, QRows, Tries, verify_chains, verify_tries
from draftproof.functional.top_down import descend
from draftproof.rng import Rng


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
    `replacement` is False when siblings were drawn without replacement and their rows are not renormalised. Other
    arguments and errors: see `spectr_on_tries`.

    Source: Miao et al. 2023 (SpecInfer, arXiv 2305.09781), algorithm 2.
    """
    return verify_tries(partial(_multi_round, replacement=replacement), tries, q, p, rng=rng, validate=validate)


def _multi_round(tries: Tries, q: QRows, p: PRows, rng: Rng, *, replacement: bool) -> Ends:
    return descend(tries, p, partial(_multi_round_step, tries, q, p, replacement=replacement), rng)


def _multi_round_step(
    tries: Tries,
    q: QRows,
    p: PRows,
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
