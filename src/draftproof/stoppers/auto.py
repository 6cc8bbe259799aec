"""Drafts by the cost model: as many, and as long ones, as pay at the rates they are accepted, or none.

Knows: what a round costs, how drafts are thought to fare and how a request's fared. Does not know: clocks, models.

The choice depends on committed rounds alone, so it is a stopping time and every lossless rule stays lossless. Given
costs that are the same for any number of requests (`auto:R`) each request decides for itself, and a seed gives the same
text, alone and in any batch. Measured costs are those of a whole round, which is as wide as its widest draft: requests
that share a round decide together, by the sum of what they expect.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from draftproof.errors import UserError
from draftproof.stoppers.base import AcceptanceRates, StopperBase
from draftproof.stoppers.fixed import MAX_LENGTH
from draftproof.theory.cost import BatchCosts, RoundCosts, best_round, expected_tokens

Rates = tuple[tuple[int, float, float], ...]  # number of drafts, rate of a first token, rate of a further one

WEIGHT = 4.0  # tokens that assumed rates count for
MEMORY = 0.96  # what a round counts for after each later one
GAIN = 1.05  # a draft must promise this much over plain decoding
PROBE = 1  # tokens of a draft that only looks whether drafts pay again
PAUSES = (8, 128)  # rounds between such looks: at first, and after many in vain
LOOK = 0.01  # share of the time that looks may take at first; where a draft costs much pauses are longer


REMEMBERED = 4096  # choices that are looked up rather than made again
FORGET = 64  # rounds after which a number of drafts that was not used is tried anew, if it might pay


ASSUMED = AcceptanceRates()


@dataclass
class _Rates:
    """How drafts fared at their first token and after an accepted one; newer rounds count for more.

    Attributes:
        first, later: accepted and refused.
        unused: rounds since.
    """

    first: list[float]
    later: list[float]
    unused: int = 0

    @classmethod
    def assumed(cls, first: float, later: float) -> _Rates:
        """Rates that little is known of."""
        return cls([first * WEIGHT, (1 - first) * WEIGHT], [later * WEIGHT, (1 - later) * WEIGHT])

    @property
    def known(self) -> tuple[float, float]:
        """Both rates, in steps of a hundredth."""
        first, later = (round(accepted / (accepted + refused), 2) for accepted, refused in (self.first, self.later))
        return first, later


@dataclass
class _RequestRates:
    """A request's rates by the number of drafts, how many it got, and how long it got none.

    Attributes:
        assumed: before anything was tried.
        chosen: what was chosen since it last learnt, by number of requests and of drafts there can be.
    """

    assumed: AcceptanceRates
    rates: dict[int, _Rates] = field(default_factory=dict)
    drafts: int = 1
    idle: int = 0
    patience: int = 1
    chosen: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def expected(self, drafts: int) -> tuple[float, float]:
        """Rates for a number of drafts; one that was not tried lately gets the benefit of the doubt.

        A single draft is taken to do as well as several did, and several as well as independent ones would.
        """
        if drafts in self.rates:
            return self.rates[drafts].known
        if drafts == 1:
            assumed = round(self.assumed.first, 2), round(self.assumed.later, 2)
            return self.rates[min(self.rates)].known if self.rates else assumed
        first, later = self.expected(1)
        return round(1 - (1 - first) ** drafts, 2), later

    def learn(self, drafted: int, accepted: int) -> None:
        """Count a round's outcome to the number of drafts it had."""
        self.chosen.clear()
        own = self.rates.setdefault(self.drafts, _Rates.assumed(*self.expected(self.drafts)))
        _count(own.first, min(accepted, 1), refused=not accepted)
        if accepted and drafted > 1:
            _count(own.later, accepted - 1, refused=accepted < drafted)
        own.unused = 0
        for drafts, other in list(self.rates.items()):
            other.unused += other is not own
            if other.unused > FORGET:
                del self.rates[drafts]


class Auto(StopperBase):
    """Drafts what has the least expected time a token: a length, a number of drafts, or nothing where none pays.

    Two rates are followed for each request and number of drafts: how often the first drafted token is accepted, and how
    often a further one is after it. Where text is easy in some places and hard in others the second is the higher one.
    What was not tried lately gets the benefit of the doubt, and so is tried where it might pay.

    Args:
        costs: of a round, by the number of requests that share it or whatever that is; None until they are measured,
            and `wanted` refuses.
        limit: longest chain.
        name: how it is called.
        assumed: how a request's drafts are thought to fare before it had any; raised to the default where that is more.

    Raises:
        UserError: a limit out of range.

    Source: Leviathan et al. 2023, section 3.5, for the best length under i.i.d. acceptance; here there are two rates,
    estimated online.
    """

    def __init__(
        self,
        costs: RoundCosts | BatchCosts | None = None,
        limit: int = 16,
        name: str = "auto",
        assumed: AcceptanceRates = ASSUMED,
    ) -> None:
        if not 1 <= limit <= MAX_LENGTH:
            raise UserError(f"auto drafts at most {limit} tokens: legal are 1 to {MAX_LENGTH}")
        super().__init__(name, limit)
        self.costs = costs
        self.assumed = assumed
        self._rows: dict[int, _RequestRates] = {}
        self._best: dict[tuple[int, Rates], tuple[int, int]] = {}  # by number of requests and rates
        self._together, self._most = 1, 1
        self._common: tuple[int, int] | None = None

    @property
    def needs_costs(self) -> bool:  # type: ignore[override]  # a constant in the base class
        """Whether no costs were given."""
        return self.costs is None

    def calibrate(self, costs: BatchCosts, rates: AcceptanceRates) -> None:
        """Decide by these costs, and expect these rates of requests that are new."""
        self.costs, self.assumed = costs, rates

    def begin(self, rows: Sequence[int], most: int = 1) -> None:
        """Take note of who shares the round and how many drafts each can get; choose for all where costs are shared."""
        self._together, self._most, self._common = max(len(rows), 1), most, None
        if self.costs is not None and self.costs.shared and len(rows) > 1:
            members = [self._of(row) for row in rows]
            length, drafts = self._choice(members)
            look = not length and 2 * sum(self._waited(one) for one in members) > len(members)
            self._common = (min(PROBE, self.limit), 1) if look else (length, drafts)

    def wanted(self, row: int) -> int:
        """The best length; where that is 0, now and then a short draft to look again."""
        if self._common is not None:
            return self._common[0]
        known = self._of(row)
        return self._own(known)[0] or (min(PROBE, self.limit) if self._waited(known) else 0)

    def drafts(self, row: int, most: int) -> int:
        """The best number of drafts."""
        known = self._of(row)
        known.drafts = min((self._common or self._own(known))[1], most)
        return known.drafts

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """Learn from a round."""
        known = self._of(row)
        if not drafted:
            known.idle += 1
            return
        known.learn(drafted, accepted)
        known.idle = 0
        known.patience = 1 if self._own(known)[0] else min(2 * known.patience, PAUSES[1] // PAUSES[0])

    def release(self, row: int) -> None:
        """Forget the row."""
        self._rows.pop(row, None)

    def _of(self, row: int) -> _RequestRates:
        known = self._rows.get(row)
        if known is None:
            known = self._rows[row] = _RequestRates(ASSUMED.or_better(self.assumed))
        return known

    def _own(self, known: _RequestRates) -> tuple[int, int]:
        """What is best for a request by itself."""
        case = self._together, self._most
        found = known.chosen.get(case)
        if found is None:
            found = known.chosen[case] = self._choice([known])
        return found

    def _waited(self, known: _RequestRates) -> bool:
        """Whether it is time to look again."""
        if known.idle < known.patience * PAUSES[0]:
            return False
        assert self.costs is not None, "a choice was made"
        costs = self.costs.at(self._together)
        pause = max(PAUSES[0], (costs.of(PROBE) / costs.of(0) - 1) / LOOK)
        return known.idle >= known.patience * pause

    def _choice(self, members: Sequence[_RequestRates]) -> tuple[int, int]:
        """Length and number of drafts that are best for all of them together."""
        if self.costs is None:
            raise RuntimeError("stopper auto was not told what a round costs: Engine.load measures that, or give costs")
        numbers = [1 << power for power in range(self._most.bit_length()) if 1 << power < self._most]
        rates = tuple(sorted((n, *one.expected(n)) for n in (*numbers, self._most) for one in members))
        case = self._together, rates
        if case not in self._best:
            if len(self._best) >= REMEMBERED:
                self._best.clear()
            each: dict[int, list[tuple[float, ...]]] = {}
            for drafts, first, later in rates:
                each.setdefault(drafts, []).append(_tokens(first, later, self.limit))
            sums = {drafts: [sum(column) for column in zip(*rows, strict=True)] for drafts, rows in each.items()}
            self._best[case] = best_round(self.costs.at(self._together), sums, GAIN)
        return self._best[case]


@functools.lru_cache(maxsize=REMEMBERED)
def _tokens(first: float, later: float, longest: int) -> tuple[float, ...]:
    return expected_tokens(first, later, longest)


def _count(rate: list[float], accepted: int, *, refused: bool) -> None:
    """Add what was seen to the two counts of a rate, the old ones fading."""
    rate[0] = MEMORY * rate[0] + accepted
    rate[1] = MEMORY * rate[1] + refused
