"""Acceptance rates of drafted tokens: counts for a request, and for all requests together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from draftproof.stoppers.base import AcceptanceRates

PRIOR_WEIGHT = 4.0  # weight of assumed rates, in tokens
DECAY = 0.96  # weight of a round relative to the next one of the same request
SHARED_DECAY = 0.995  # the same for the counts of all requests together
ENOUGH = 8.0  # tokens after which the counts of all requests are used for a new request
RESTORED = 32.0  # tokens that the rates of an earlier run stand for
FORGET_AFTER = 64  # rounds after which the rates of an unused kind of draft are forgotten
FORGET_IDLE = (24, 192)  # rounds without a draft after which a request's own rates are forgotten: at first, and later


@dataclass
class RateCounts:
    """Counts of accepted and rejected tokens; older rounds count less."""

    first: list[float]  # accepted and rejected first tokens
    later: list[float]  # accepted and rejected tokens after an accepted one
    unused: int = 0  # rounds of the request since these counts changed
    _rates: tuple[float, float] | None = None  # cached rates of these counts

    @classmethod
    def assumed(cls, first: float, later: float, weight: float = PRIOR_WEIGHT) -> RateCounts:
        """Counts for assumed rates, with little weight."""
        return cls([first * weight, (1 - first) * weight], [later * weight, (1 - later) * weight])

    @property
    def rates(self) -> tuple[float, float]:
        """Both rates, rounded to hundredths."""
        if self._rates is None:
            first, later = (round(hit / (hit + missed), 2) for hit, missed in (self.first, self.later))
            self._rates = first, later
        return self._rates

    def count(self, drafted: int, accepted: int, decay: float = DECAY) -> None:
        """Add a round with a draft."""
        self._rates = None
        _count(self.first, min(accepted, 1), rejected=not accepted, decay=decay)
        if accepted and drafted > 1:
            _count(self.later, accepted - 1, rejected=accepted < drafted, decay=decay)


class SharedRates:
    """Rates of all requests together, by kind of draft, as the expectation for a new request; at first `assumed`."""

    def __init__(self, assumed: dict[int, AcceptanceRates] | None = None) -> None:
        self.assumed = assumed or {}
        self.counts: dict[int, RateCounts] = {}
        self.version = 0  # rises with every change
        self._restored = set[int]()

    def expected(self, kind: int) -> AcceptanceRates | None:
        """Rates of a kind of draft; None if too little is known."""
        counts = self.counts.get(kind)
        if counts is None or sum(counts.first) < ENOUGH:
            return self.assumed.get(kind)
        return AcceptanceRates(*counts.rates)

    def learn(self, kind: int, drafted: int, accepted: int) -> None:
        """Add a round with a draft."""
        self.version += 1
        if kind not in self.counts:
            known = self.assumed.get(kind, AcceptanceRates())
            self.counts[kind] = RateCounts.assumed(known.first, known.later)
        self.counts[kind].count(drafted, accepted, SHARED_DECAY)

    def doubt(self, kind: int) -> float:
        """Standard error of the rate of first tokens of a kind of draft."""
        counts = self.counts.get(kind)
        tokens = PRIOR_WEIGHT if counts is None else sum(counts.first)
        rate = (self.expected(kind) or AcceptanceRates()).first
        return math.sqrt(rate * (1 - rate) / (tokens + RESTORED * (kind in self._restored)))

    def to_dict(self) -> dict[str, list[float]]:
        """The rates, for a file."""
        known = {kind: found for kind in self.counts if (found := self.expected(kind)) is not None}
        return {str(kind): [found.first, found.later] for kind, found in known.items()}

    def restore(self, found: dict[str, Iterable[float]]) -> None:
        """Start from rates that `to_dict` returned in an earlier run."""
        self.version += 1
        for kind, (first, later) in found.items():
            if not (0 <= first <= 1 and 0 <= later <= 1):
                raise ValueError(f"expected rates from 0 to 1, got {first} and {later}")
            self.assumed[int(kind)] = AcceptanceRates(float(first), float(later))
            self._restored.add(int(kind))


@dataclass
class RequestRates:
    """The acceptance counts of a request for each kind of draft, and when it last drafted."""

    shared: SharedRates | None = None  # of all requests together; None if each counts alone
    assumed: AcceptanceRates = field(default_factory=AcceptanceRates)  # before the first draft
    counts: dict[int, RateCounts] = field(default_factory=dict)  # by kind of draft
    idle: int = 0  # rounds since the last draft
    patience: int = 1  # factor of the pause before the next probe
    unread: int | None = None  # tokens that the draft model has not read; None if that is not known
    limit: float = math.inf  # the most tokens that a draft may have
    emitted: int = 0  # tokens since the first round
    memory: int = FORGET_IDLE[0]  # rounds without a draft until the counts are forgotten
    _expected: dict[int, tuple[float, float]] = field(default_factory=dict)  # by kind, since the last change
    _version: int = -1  # of the shared rates that these are for

    def rest(self) -> None:
        """Count a round without a draft; after many of them, fall back to the shared rates."""
        self.idle += 1
        if self.shared is not None and self.counts and self.idle >= self.memory:
            self.counts.clear()
            self._expected.clear()
            self.memory = min(2 * self.memory, FORGET_IDLE[1])

    def expected(self, drafts: int) -> tuple[float, float]:
        """Expected rates for a number of drafts; optimistic for a number that was not tried recently.

        A single draft is expected to do as well as several did, and several as well as independent drafts would.
        """
        if self.shared is not None and self.shared.version != self._version:
            self._expected.clear()
            self._version = self.shared.version
        if drafts not in self._expected:  # needed in every round, but rounds without drafts change nothing
            self._expected[drafts] = self._from_counts(drafts)
        return self._expected[drafts]

    def hopeful(self, drafts: int) -> tuple[float, float]:
        """Expected rates, the first one higher by its standard error over all requests, while that is large.

        A choice by the expectation alone would end with the first few refusals, which may be chance, and nothing is
        learned without drafts.
        """
        first, later = self.expected(drafts)
        return first if self.shared is None else min(round(first + self.shared.doubt(drafts), 2), 1.0), later

    def _from_counts(self, drafts: int) -> tuple[float, float]:
        if drafts in self.counts:
            return self.counts[drafts].rates
        if self.shared is not None and (known := self.shared.expected(drafts)) is not None:
            return round(known.first, 2), round(known.later, 2)
        if drafts == 1:
            assumed = round(self.assumed.first, 2), round(self.assumed.later, 2)
            return self.counts[min(self.counts)].rates if self.counts else assumed
        first, later = self.expected(1)
        return round(1 - (1 - first) ** drafts, 2), later

    def learn(self, drafts: int, drafted: int, accepted: int) -> None:
        """Add the outcome of a round to the counts for its number of drafts."""
        own = self.counts.setdefault(drafts, RateCounts.assumed(*self.expected(drafts)))
        own.count(drafted, accepted)
        own.unused = 0
        self._expected.clear()
        if self.shared is not None:
            self.shared.learn(drafts, drafted, accepted)
        for kind, other in list(self.counts.items()):
            other.unused += other is not own
            if other.unused > FORGET_AFTER:
                del self.counts[kind]


def _count(counts: list[float], accepted: int, *, rejected: bool, decay: float) -> None:
    """Add a round's tokens to the counts of accepted and rejected tokens; older rounds lose weight."""
    counts[0] = decay * counts[0] + accepted
    counts[1] = decay * counts[1] + rejected
