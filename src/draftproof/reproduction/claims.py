"""Claims that a number is above 0, judged by its interval: a paired bootstrap over prompts, or an exact value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.bench import estimate
from draftproof.bench.estimate import FEWEST, LEVEL, RESAMPLES, tail_share
from draftproof.errors import UserError

EDGE = 1e-9  # rounding error allowed for exact values
Item = TypeVar("Item")
Statistic = Callable[[Float[Tensor, "draws columns"]], Float[Tensor, " draws"]]


class Judgement(StrEnum):
    """The verdict of an interval on a claim."""

    HOLDS = "holds"
    UNDECIDED = "not distinguishable"
    VIOLATED = "violated"


class Kind(StrEnum):
    """Whether a claim follows from the rules, or was observed on the paper's models."""

    MUST = "must hold"
    MODELS = "depends on the models"


@dataclass(frozen=True)
class Interval:
    """A number with its interval.

    Attributes:
        value: the sample's own value.
        low, high: ends of the interval; equal to an exact value.
        level: of confidence; 1 for an exact value.
        clusters: number of units (prompts, pairs of distributions) that were resampled; 0 for an exact value.
    """

    value: float
    low: float
    high: float
    level: float = 1.0
    clusters: int = 0

    @classmethod
    def exact(cls, value: float) -> Interval:
        """The interval of an exactly computed number."""
        return cls(value, value, value)

    def __str__(self) -> str:
        """The number, and its interval where it has one."""
        if self.clusters == 0:
            return f"{self.value:.4g}"
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


@dataclass(frozen=True)
class Claim:
    """A claim and its verdict.

    Attributes:
        text: the claim, in the form "a number > 0".
        kind: whether it must hold.
        interval: of that number.
        at_least: whether the claim is also true of 0.
        verdict: see `judge`.
    """

    text: str
    kind: Kind
    interval: Interval
    at_least: bool
    verdict: Judgement


def claim(text: str, kind: Kind, interval: Interval, *, at_least: bool = False) -> Claim:
    """A judged claim that a number is above 0 (or not below it)."""
    return Claim(text, kind, interval, at_least, judge(interval, at_least=at_least))


def exact_claim(text: str, value: float, *, at_least: bool = False) -> Claim:
    """A judged claim that must hold, about a computed number."""
    return claim(text, Kind.MUST, Interval.exact(value), at_least=at_least)


def judge(interval: Interval, *, at_least: bool = False) -> Judgement:
    """Holds if the whole interval agrees with "above 0", violated if none of it does, else not distinguishable.

    Args:
        interval: of a number that the claim says is above 0.
        at_least: whether the claim is "not below 0".
    """
    if not all(map(math.isfinite, (interval.low, interval.high))):
        return Judgement.UNDECIDED
    if at_least:
        if interval.low >= -EDGE:
            return Judgement.HOLDS
        return Judgement.VIOLATED if interval.high < -EDGE else Judgement.UNDECIDED
    if interval.low > EDGE:
        return Judgement.HOLDS
    return Judgement.VIOLATED if interval.high <= EDGE else Judgement.UNDECIDED


def bootstrap(
    sums: Float[Tensor, "clusters columns"],
    statistic: Statistic,
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """The expanded percentile interval of a statistic of column totals, with clusters resampled with replacement.

    Columns of one cluster are drawn together, so differences between columns are paired. Ratios of totals (tokens per
    call) are computed after drawing, so clusters have the same weights as in the sample. The method is that of
    `estimate.bootstrap`, for all resamples at once.

    Args:
        sums: the contribution of each cluster to each column.
        statistic: gives one number for each row of totals.
        level: of confidence, between 0 and 1.
        resamples: draws of all clusters.
        seed: of the draws.

    Raises:
        UserError: fewer than two clusters, or a level out of range.
    """
    clusters = _clusters(sums.shape[0], level)
    values = sums.double()
    middle = float(statistic(values.sum(0, keepdim=True))[0])
    if clusters < FEWEST:
        return Interval(middle, math.nan, math.nan, level, clusters)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(clusters, (resamples, clusters), generator=generator)
    counts = torch.zeros(resamples, clusters, dtype=torch.float64)
    counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    found, tail = statistic(counts @ values), tail_share(level, clusters)
    low, high = (float(found.quantile(share)) for share in (tail, 1 - tail))
    return Interval(middle, low, high, level, clusters)


def resampled(
    clusters: Sequence[Item],
    statistic: Callable[[Sequence[Item]], float],
    *,
    level: float = LEVEL,
    resamples: int = 400,
    seed: int = 0,
) -> Interval:
    """`bootstrap` for statistics that are not functions of totals; slower.

    Args:
        clusters: the units that are resampled.
        statistic: of a list of them.
        level: see `bootstrap`.
        resamples: see `bootstrap`.
        seed: see `bootstrap`.

    Raises:
        UserError: fewer than two clusters, or a level out of range.
    """
    _clusters(len(clusters), level)
    found = estimate.bootstrap(clusters, statistic, level=level, resamples=resamples, seed=seed)
    return Interval(found.value, found.low, found.high, level, found.count)


def _clusters(count: int, level: float) -> int:
    if count < 2:
        raise UserError(f"an interval over {count} clusters: legal are 2 or more prompts")
    if not 0 < level < 1:
        raise UserError(f"level of confidence is {level:g}: legal is between 0 and 1")
    return count


def shifted(interval: Interval, by: float) -> Interval:
    """The interval of a number plus a constant."""
    ends = (interval.value + by, interval.low + by, interval.high + by)
    return Interval(*ends, interval.level, interval.clusters)


def column(place: int) -> Statistic:
    """The total of one column."""
    return lambda totals: totals[:, place]
