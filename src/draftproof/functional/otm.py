"""OTM-k: the best possible coupling of k i.i.d. draws with one token, by linear programming, for study.

Knows: one pair of distributions. Does not know: batches, models. The number of variables grows as the number of
multisets of k tokens; `draftproof.theory.acceptance.optimal_acceptance` gives the value alone at any vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.functional.coupling import Selection
from draftproof.rng import Rng

MAX_MULTISETS = 20_000


@dataclass(frozen=True, eq=False)
class OtmPlan:
    """An optimal coupling.

    Attributes:
        value: acceptance probability, Pr(the token is one of the draws).
        accept: for a multiset of draws (sorted token ids), the probability of selecting each of its tokens; what is
            missing to 1 goes to the residual.
        residual: weights of the token when no draw is accepted.
    """

    value: float
    accept: dict[tuple[int, ...], dict[int, float]]
    residual: Float[Tensor, " V"]


def _solver() -> Any:
    try:
        from scipy import optimize, sparse
    except ImportError as error:
        raise ImportError(
            "the exact optimal coupling is a linear program and needs scipy: pip install 'draftproof[audit]'"
        ) from error
    return optimize.linprog, sparse.csr_array


def _probability(counts: Counter[int], q: list[float]) -> float:
    """Pr(k i.i.d. draws are this multiset)."""
    ways = math.factorial(counts.total())
    weight = 1.0
    for token, count in counts.items():
        ways //= math.factorial(count)
        weight *= q[token] ** count
    return ways * weight


def otm_plan(p: Float[Tensor, " V"], q: Float[Tensor, " V"], k: int, *, support: int | None = None) -> OtmPlan:
    """The coupling of k i.i.d. draws from q with a token of law p that selects one of the draws as often as possible.

    Solved over multisets of draws in inequality form: maximise the selected mass, at most Pr(S) from each multiset S
    and at most p(y) for each token y in S. The rest of p is the residual.

    Args:
        p: the target's distribution.
        q: the draft's distribution.
        k: number of draws.
        support: keep only this many tokens, those with the largest min(p, k q); multisets with others are never
            selected from, so the value is then a lower bound and the rule still exact.

    Raises:
        ImportError: scipy is missing (extra `audit`).
        ValueError: too many multisets; the message says how many.

    Source: seed 002, equations (3) and (4).
    """
    linprog, csr_array = _solver()
    target, draft = p.double(), q.double()
    worth = torch.minimum(target, k * draft)
    kept = worth.argsort(descending=True)[: support or p.shape[0]]
    tokens = sorted(int(x) for x in kept if draft[x] > 0)
    size = math.comb(len(tokens) + k - 1, k)
    if size > MAX_MULTISETS:
        raise ValueError(f"{len(tokens)} tokens, k = {k}: {size} multisets, more than {MAX_MULTISETS}; pass support")
    sets = list(itertools.combinations_with_replacement(tokens, k))
    pairs = [(row, token) for row, drawn in enumerate(sets) for token in sorted(set(drawn))]
    place = {token: len(sets) + i for i, token in enumerate(tokens)}
    rows = [row for row, _ in pairs] + [place[token] for _, token in pairs]
    columns = [*range(len(pairs)), *range(len(pairs))]
    matrix = csr_array(([1.0] * len(rows), (rows, columns)), shape=(len(sets) + len(tokens), len(pairs)))
    limits = [_probability(Counter(drawn), draft.tolist()) for drawn in sets]
    found = linprog([-1.0] * len(pairs), A_ub=matrix, b_ub=[*limits, *target[tokens].tolist()], method="highs")
    if found.status != 0:
        raise RuntimeError(f"the linear program was not solved: {found.message}")
    return _as_plan(sets, limits, pairs, [max(float(x), 0.0) for x in found.x], target)


def _as_plan(
    sets: list[tuple[int, ...]],
    limits: list[float],
    pairs: list[tuple[int, int]],
    mass: list[float],
    target: Float[Tensor, " V"],
) -> OtmPlan:
    """Conditional selection probabilities; what rounding adds beyond a limit is scaled away."""
    chosen = [0.0] * len(sets)
    for (row, _), x in zip(pairs, mass, strict=True):
        chosen[row] += x
    accept: dict[tuple[int, ...], dict[int, float]] = {drawn: {} for drawn in sets}
    residual, value = target.clone(), 0.0
    for (row, token), x in zip(pairs, mass, strict=True):
        kept = x * min(1.0, limits[row] / chosen[row]) if x > 0 else 0.0
        if kept > 0:
            accept[sets[row]][token] = kept / limits[row]
            residual[token] -= kept
            value += kept
    residual.clamp_(min=0)
    return OtmPlan(value, accept, residual if float(residual.sum()) > 0 else target)


def otm_select(tokens: Int[Tensor, "B K"], plan: OtmPlan, *, rng: Rng) -> Selection:
    """Select a token given k draws, by the optimal coupling; lossless for the pair the plan was made for.

    Reads the draws to the host: a study tool, not a serving rule.

    Args:
        tokens: the draws.
        plan: from `otm_plan`, for the same p, q and k.
        rng: source of all randomness.
    """
    draws, vocab = tokens.shape[1], plan.residual.shape[0]
    weights = torch.zeros(tokens.shape[0], vocab + 1, dtype=torch.float64)  # last: none
    drawn: list[list[int]] = tokens.tolist()
    for row, ids in enumerate(drawn):
        options = plan.accept.get(tuple(sorted(ids)), {})
        for token, chance in options.items():
            weights[row, token] = chance
        weights[row, vocab] = max(1.0 - sum(options.values()), 0.0)
    choice = rng.categorical(weights.to(tokens.device))
    none = choice == vocab
    settled = torch.zeros_like(weights[:, :vocab], device=tokens.device)
    settled.scatter_(-1, choice.clamp(max=vocab - 1).unsqueeze(-1), 1)
    selected = rng.categorical(torch.where(none.unsqueeze(-1), plan.residual.to(settled), settled))
    first = (tokens == selected.unsqueeze(-1)).long().argmax(-1)
    return Selection(torch.where(none, draws, first), selected)
