"""Claims that a number is above 0, judged by its interval: a paired bootstrap over prompts, or an exact value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from draftproof.bench.estimate import Estimate, Statistic

EDGE = 1e-9  # rounding error allowed for exact values


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
class Claim:
    """A claim "a number > 0", or with `at_least` "a number >= 0", the interval of that number, and the verdict."""

    text: str
    kind: Kind
    interval: Estimate
    at_least: bool
    verdict: Judgement


def claim(text: str, kind: Kind, interval: Estimate, *, at_least: bool = False) -> Claim:
    """A judged claim that a number is above 0 (or not below it)."""
    return Claim(text, kind, interval, at_least, judge(interval, at_least=at_least))


def exact_claim(text: str, value: float, *, at_least: bool = False) -> Claim:
    """A judged claim that must hold, about a computed number."""
    return claim(text, Kind.MUST, Estimate.exact(value), at_least=at_least)


def judge(interval: Estimate, *, at_least: bool = False) -> Judgement:
    """Holds if the whole interval agrees with "above 0", violated if none of it does, else not distinguishable."""
    if not all(map(math.isfinite, (interval.low, interval.high))):
        return Judgement.UNDECIDED
    if at_least:
        if interval.low >= -EDGE:
            return Judgement.HOLDS
        return Judgement.VIOLATED if interval.high < -EDGE else Judgement.UNDECIDED
    if interval.low > EDGE:
        return Judgement.HOLDS
    return Judgement.VIOLATED if interval.high <= EDGE else Judgement.UNDECIDED


def column(place: int) -> Statistic:
    """The total of one column."""
    return lambda totals: totals[:, place]
