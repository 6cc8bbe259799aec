"""Figures with intervals: the bootstrap over questions, and Student's t."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist, fmean, stdev
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.errors import UserError
from draftproof.rng import fold

LEVEL = 0.95
RESAMPLES = 4000
FEWEST = 6  # the range of fewer questions contains the median of all questions with a probability below 0.95
Item = TypeVar("Item")
Statistic = Callable[[Float[Tensor, "draws columns"]], Float[Tensor, " draws"]]  # of column totals


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval."""

    value: float  # of what was measured
    low: float  # ends of the interval; equal to an exact value, nan if there are too few units for an interval
    high: float
    count: int  # number of independent units (questions, prompts) it is computed from; 0 for an exact value
    level: float = LEVEL  # of confidence; 1 for an exact value

    @classmethod
    def exact(cls, value: float) -> Estimate:
        """The estimate of an exactly computed number."""
        return cls(value, value, value, 0, 1.0)

    @property
    def sure(self) -> int:
        """1 if the whole interval is above 1, -1 if it is below 1, and 0 if it contains 1 or is unknown."""
        return (self.low > 1) - (self.high < 1)

    def plus(self, constant: float) -> Estimate:
        """The estimate of the number plus a constant."""
        return replace(self, value=self.value + constant, low=self.low + constant, high=self.high + constant)

    def below(self, limit: float) -> Estimate:
        """The estimate of a limit minus the number."""
        return replace(self, value=limit - self.value, low=limit - self.high, high=limit - self.low)

    def to_dict(self) -> dict[str, float | None]:
        """Plain values for JSON; None for nan."""
        values = {"value": self.value, "low": self.low, "high": self.high}
        return {**{name: None if math.isnan(x) else x for name, x in values.items()}, "count": self.count}

    def __str__(self) -> str:
        """The number, and its interval if it has one."""
        return f"{self.value:.4g}" if self.count == 0 else f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def bootstrap(
    items: Sequence[Item],
    statistic: Callable[[Sequence[Item]], float],
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """A statistic of items with its expanded percentile bootstrap interval; no interval for fewer than FEWEST items.

    Plain percentiles of few items cover too little: with six items about 0.86 instead of 0.95. So the percentiles are
    moved outwards as far as Student's t and the factor n/(n-1) move those of a mean (Hesterberg 2015, "What teachers
    should know about the bootstrap"). Items are independent units, usually the questions; equal ones give equal
    intervals.
    """

    def resampled(picks: Int[Tensor, "draws items"]) -> list[float]:
        return [statistic([items[place] for place in row]) for row in picks.tolist()]

    return _expanded(statistic(items), len(items), resampled, level, resamples, fold(seed, len(items)) >> 1)


def resample(
    sums: Float[Tensor, "items columns"],
    statistic: Statistic,
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """`bootstrap` of a statistic of column totals, for all resamples at once.

    Columns of one item are drawn together, so differences between columns are paired. Ratios of totals (tokens per
    call) are computed after drawing, so items have the same weights as in the sample.
    """
    values, count = sums.double(), sums.shape[0]
    if count < 2:
        raise UserError(f"expected at least 2 prompts for an interval, got {count}")

    def resampled(picks: Int[Tensor, "draws items"]) -> list[float]:
        times = torch.zeros(resamples, count, dtype=torch.float64)
        times.scatter_add_(1, picks, torch.ones_like(picks, dtype=torch.float64))
        found: list[float] = statistic(times @ values).tolist()
        return found

    return _expanded(float(statistic(values.sum(0, keepdim=True))[0]), count, resampled, level, resamples, seed)


def _expanded(
    value: float,
    count: int,
    resampled: Callable[[Int[Tensor, "draws items"]], list[float]],
    level: float,
    resamples: int,
    seed: int,
) -> Estimate:
    """A value with the expanded percentile interval of its resampled values."""
    if not 0 < level < 1:
        raise UserError(f"expected a level of confidence between 0 and 1, got {level:g}")
    if count < FEWEST:
        return Estimate(value, math.nan, math.nan, count, level)
    source = torch.Generator().manual_seed(seed)
    found = sorted(resampled(torch.randint(count, (resamples, count), generator=source)))
    tail = tail_share(level, count)
    low, high = found[int(tail * resamples)], found[min(int((1 - tail) * resamples), resamples - 1)]
    return Estimate(value, low, high, count, level)


def geometric_mean(ratios: Sequence[float]) -> Estimate:
    """The geometric mean of independent ratios with a t interval on their logarithms; none for a single one."""
    logs = [math.log(ratio) for ratio in ratios]
    middle = fmean(logs)
    if len(logs) < 2:
        return Estimate(math.exp(middle), math.nan, math.nan, len(logs))
    reach = t_quantile((1 + LEVEL) / 2, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return Estimate(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach), len(logs))


@cache
def tail_share(level: float, count: int) -> float:
    """The share of resamples beyond each end of the expanded interval over `count` units."""
    return NormalDist().cdf(-math.sqrt(count / (count - 1)) * t_quantile((1 + level) / 2, count - 1))


def t_quantile(share: float, freedom: int) -> float:
    """The quantile of Student's t with `freedom` degrees of freedom, for a share of at least one half.

    The tail is integrated over the angle arctan(t / sqrt(freedom)), where the density is a power of the cosine.
    """
    constant = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 0.5 + constant * _power_of_cosine(middle, freedom - 1) < share else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _power_of_cosine(angle: float, power: int, steps: int = 400) -> float:
    """The integral of cos^power from 0 to an angle, by Simpson's rule."""
    width = angle / steps
    inner = math.fsum((4 if k % 2 else 2) * math.cos(k * width) ** power for k in range(1, steps))
    return (1 + inner + math.cos(angle) ** power) * width / 3
