"""OTM-k: the best possible coupling of k i.i.d. draws with one token, by linear programming; for study.

It handles one pair of distributions. The number of variables grows with the number of multisets of k tokens.
`draftproof.theory.acceptance.optimal_acceptance` computes the acceptance probability alone, at any vocabulary size.
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
OTHER = -1


@dataclass(frozen=True, eq=False)
class OtmPlan:
    """An optimal coupling.

    Attributes:
        value: acceptance probability, Pr(the token is one of the draws).
        support: the tokens that may be selected from the draws; all others are treated as one token, OTHER (-1).
        accept: for each multiset of draws (sorted token ids), the probability of selecting each of its tokens; with the
            remaining probability no draw is selected.
        residual: weights of the token when no draw is selected.
    """

    value: float
    support: frozenset[int]
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


def _probability(counts: Counter[int], q: dict[int, float]) -> float:
    """Pr(k i.i.d. draws are this multiset)."""
    ways = math.factorial(counts.total())
    weight = 1.0
    for token, count in counts.items():
        ways //= math.factorial(count)
        weight *= q[token] ** count
    return ways * weight


def otm_plan(p: Float[Tensor, " V"], q: Float[Tensor, " V"], k: int, *, support: int | None = None) -> OtmPlan:
    """The coupling of k i.i.d. draws from q with a token from p that selects one of the draws as often as possible.

    The linear program is over multisets of draws: maximise the selected mass, with at most Pr(S) from each multiset S
    and at most p(y) for each token y in S. The rest of p is the residual.

    Args:
        p: the target's distribution.
        q: the draft's distribution.
        k: number of draws.
        support: keep only this many tokens, those with the largest min(p, k q). The others are never selected from the
            draws: the rule is still exact, and its acceptance probability is a lower bound of the best one.

    Raises:
        ImportError: scipy is missing (extra `audit`).
        ValueError: too many multisets; the message says how many.

    Source: SpecTr, arXiv 2310.15141, equations (3) and (4).
    """
    target, draft = p.double(), q.double()
    worth = torch.minimum(target, k * draft)
    kept = worth.argsort(descending=True)[: support or p.shape[0]]
    tokens = sorted(int(x) for x in kept if draft[x] > 0)
    chances = {token: float(draft[token]) for token in tokens}
    rest = 1.0 - sum(chances.values())
    symbols = [OTHER, *tokens] if len(tokens) < int((draft > 0).sum()) else tokens
    size = math.comb(len(symbols) + k - 1, k)
    if size > MAX_MULTISETS:
        raise ValueError(
            f"support: expected at most {MAX_MULTISETS} multisets of drafts, got {size} ({len(symbols)} tokens, "
            f"k = {k}): pass a smaller support"
        )
    sets = list(itertools.combinations_with_replacement(symbols, k))
    limits = [_probability(Counter(drawn), {OTHER: rest, **chances}) for drawn in sets]
    pairs = [(row, token) for row, drawn in enumerate(sets) for token in sorted(set(drawn) - {OTHER})]
    mass = _solve(limits, target[tokens].tolist(), [(row, tokens.index(token)) for row, token in pairs])
    return _as_plan(sets, limits, pairs, mass, target, frozenset(tokens))


def _solve(limits: list[float], targets: list[float], pairs: list[tuple[int, int]]) -> list[float]:
    """Mass of each (multiset, token) pair: the largest total within both lists of limits."""
    linprog, csr_array = _solver()
    count = len(pairs)
    rows = [row for row, _ in pairs] + [len(limits) + place for _, place in pairs]
    columns = [*range(count), *range(count)]
    matrix = csr_array(([1.0] * (2 * count), (rows, columns)), shape=(len(limits) + len(targets), count))
    found = linprog([-1.0] * count, A_ub=matrix, b_ub=[*limits, *targets], method="highs")
    if found.status != 0:
        raise RuntimeError(f"the linear program was not solved: {found.message}")
    return [max(float(x), 0.0) for x in found.x]


def _as_plan(
    sets: list[tuple[int, ...]],
    limits: list[float],
    pairs: list[tuple[int, int]],
    mass: list[float],
    target: Float[Tensor, " V"],
    support: frozenset[int],
) -> OtmPlan:
    """Selection probabilities from the solver's masses; masses that exceed a limit are scaled down to it.

    So the rule is exact up to rounding, also where the solver is not: the residual holds all mass that is not selected.
    """
    rows, tokens = [row for row, _ in pairs], [token for _, token in pairs]
    kept = _within(_within(mass, rows, limits), tokens, target.tolist())
    accept: dict[tuple[int, ...], dict[int, float]] = {drawn: {} for drawn in sets}
    residual, value = target.clone(), 0.0
    for row, token, x in zip(rows, tokens, kept, strict=True):
        if x > 0:
            accept[sets[row]][token] = x / limits[row]
            residual[token] -= x
            value += x
    residual.clamp_(min=0)
    return OtmPlan(value, support, accept, residual if float(residual.sum()) > 0 else target)


def _within(mass: list[float], groups: list[int], limits: list[float]) -> list[float]:
    """Scale each group's masses down to its limit, where their sum exceeds it."""
    total = [0.0] * len(limits)
    for group, x in zip(groups, mass, strict=True):
        total[group] += x
    return [x * min(1.0, limits[g] / total[g]) if x > 0 else 0.0 for g, x in zip(groups, mass, strict=True)]


def otm_select(tokens: Int[Tensor, "B K"], plan: OtmPlan, *, rng: Rng) -> Selection:
    """Select a token given k draws, by the optimal coupling; lossless for the p, q and k that the plan was made for.

    The draws are copied to the host: this is for study, not for serving.

    Args:
        tokens: the draws.
        plan: from `otm_plan`, for the same p, q and k.
        rng: source of all randomness.
    """
    draws, vocab = tokens.shape[1], plan.residual.shape[0]
    weights = torch.zeros(tokens.shape[0], vocab + 1, dtype=torch.float64)  # last: none
    drawn: list[list[int]] = tokens.tolist()
    for row, ids in enumerate(drawn):
        options = plan.accept.get(tuple(sorted(x if x in plan.support else OTHER for x in ids)), {})
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
