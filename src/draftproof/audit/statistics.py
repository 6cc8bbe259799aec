"""A test with a known power: counts of outcomes against the distribution they should have (Pearson's chi-square).

Let d be the difference of two distributions and N the number of samples. The test's noncentrality is N sum d^2 / p,
which is at least N (sum |d|)^2 = N (2 TV)^2 by the Cauchy-Schwarz inequality. So the noncentrality that is detected
with probability 0.99 gives a total variation that is detected at least as often, for any difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple, TypeVar

import torch

SMALLEST = 10.0  # cells with a smaller expected count are pooled
STEPS = 100  # of a bisection

Outcome = TypeVar("Outcome", bound=Hashable)


class Tested(NamedTuple):
    """The outcome of a test."""

    # probability of counts that differ at least this much if the distribution is right; 0 if an impossible outcome
    # occurred
    p_value: float
    detectable: float  # total variation that is detected with the required power


def chi_square_survival(x: float, df: int) -> float:
    """Pr(X > x) for a chi-square variable."""
    return float(torch.special.gammaincc(torch.tensor(df / 2).double(), torch.tensor(x / 2).double()))


def noncentral_survival(x: float, df: int, noncentrality: float) -> float:
    """Pr(X > x) for a noncentral chi-square variable, as a Poisson mixture of central ones."""
    half = noncentrality / 2
    most = int(half + 12 * math.sqrt(half + 1) + 20)
    j = torch.arange(most, dtype=torch.float64)
    weight = (torch.xlogy(j, torch.tensor(half).double()) - half - torch.lgamma(j + 1)).exp()
    tails = torch.special.gammaincc(df / 2 + j, torch.full_like(j, x / 2))
    return float((weight * tails).sum())


def _first_above(rises: Callable[[float], float], goal: float) -> float:
    """The argument at which an increasing function reaches a goal, by bisection."""
    low, high = 0.0, 1.0
    while rises(high) < goal:
        high *= 2
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) < goal else (low, middle)
    return high


def needed_noncentrality(df: int, level: float, power: float) -> float:
    """The noncentrality that a test at this level detects with probability `power`."""
    critical = _first_above(lambda x: -chi_square_survival(x, df), -level)
    return _first_above(lambda strength: noncentral_survival(critical, df, strength), power)


def pooled(expected: Mapping[Outcome, float], counts: Mapping[Outcome, int]) -> tuple[list[tuple[float, int]], float]:
    """Cells (expected count, count) that are large enough, and the expected share of the pooled ones."""
    total = sum(expected.values())
    cells = sorted((mean, counts.get(key, 0)) for key, mean in expected.items() if mean > 0)
    mean, count, taken = 0.0, 0, 0
    while taken < len(cells) and (cells[taken][0] < SMALLEST or 0 < mean < SMALLEST):
        mean, count, taken = mean + cells[taken][0], count + cells[taken][1], taken + 1
    return [*([(mean, count)] if taken else []), *cells[taken:]], mean / total


def chi_square_test(
    counts: Mapping[Outcome, int], distribution: Mapping[Outcome, float], *, level: float, power: float = 0.99
) -> Tested:
    """Test whether counts come from a distribution; `detectable` is for this false-alarm rate and power."""
    samples = sum(counts.values())
    impossible = any(count and distribution.get(key, 0.0) <= 0 for key, count in counts.items())
    cells, share = pooled({key: samples * chance for key, chance in distribution.items()}, counts)
    df = len(cells) - 1
    if df == 0:  # only one outcome is possible, so one other outcome decides the test
        return Tested(0.0 if impossible else 1.0, -math.log(1 - power) / samples + share)
    statistic = math.fsum((count - mean) ** 2 / mean for mean, count in cells)
    detectable = math.sqrt(needed_noncentrality(df, level, power) / samples) / 2 + share
    return Tested(0.0 if impossible else chi_square_survival(statistic, df), detectable)
