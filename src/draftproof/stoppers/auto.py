"""Drafts by the cost model: each request gets as many, and as long ones, as pay at the rate they are accepted, or none.

Knows: what a round costs, how a request's drafts fared. Does not know: clocks, models.

The choice depends on committed rounds of the same request and on how many requests share the round, so it is a stopping
time and every lossless rule stays lossless. Given costs that are the same for any number of requests (`auto:R`) a seed
gives the same text, alone and in any batch; measured costs grow with the batch, and drafts then get shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftproof.errors import UserError
from draftproof.stoppers.base import StopperBase
from draftproof.stoppers.fixed import MAX_LENGTH
from draftproof.theory.cost import BatchCosts, RoundCosts, best_round

Rates = tuple[tuple[int, float, float], ...]  # number of drafts, rate of a first token, rate of a further one

FIRST, WEIGHT = 0.7, 3.0  # acceptance rate that is assumed before anything is known, and tokens that it counts for
MEMORY = 0.93  # what a round counts for after each later one
GAIN = 1.02  # a draft must promise this much over plain decoding
PROBE = 2  # tokens of a draft that only looks whether drafts pay again
PAUSES = (8, 128)  # rounds between such looks: at first, and after many in vain


REMEMBERED = 4096  # choices that are looked up rather than made again
FORGET = 64  # rounds after which a number of drafts that was not used is tried anew, if it might pay


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
    def assumed(cls, first: float = FIRST, later: float = FIRST) -> _Rates:
        """Rates that little is known of."""
        return cls([first * WEIGHT, (1 - first) * WEIGHT], [later * WEIGHT, (1 - later) * WEIGHT])

    @property
    def known(self) -> tuple[float, float]:
        """Both rates, in steps of a hundredth."""
        first, later = (round(accepted / (accepted + refused), 2) for accepted, refused in (self.first, self.later))
        return first, later


@dataclass
class _Memory:
    """A request's rates by the number of drafts, how many it got, and how long it got none."""

    rates: dict[int, _Rates] = field(default_factory=dict)
    drafts: int = 1
    idle: int = 0
    pause: int = PAUSES[0]

    def expected(self, drafts: int) -> tuple[float, float]:
        """Rates for a number of drafts; one that was not tried lately gets the benefit of the doubt.

        A single draft is taken to do as well as several did, and several as well as independent ones would.
        """
        if drafts in self.rates:
            return self.rates[drafts].known
        if drafts == 1:
            return self.rates[min(self.rates)].known if self.rates else (FIRST, FIRST)
        first, later = self.expected(1)
        return round(1 - (1 - first) ** drafts, 2), later

    def learn(self, drafted: int, accepted: int) -> None:
        """Count a round's outcome to the number of drafts it had."""
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

    Raises:
        UserError: a limit out of range.

    Source: Leviathan et al. 2023, section 3.5, for the best length under i.i.d. acceptance; here there are two rates,
    estimated online.
    """

    def __init__(self, costs: RoundCosts | BatchCosts | None = None, limit: int = 16, name: str = "auto") -> None:
        if not 1 <= limit <= MAX_LENGTH:
            raise UserError(f"auto drafts at most {limit} tokens: legal are 1 to {MAX_LENGTH}")
        super().__init__(name, limit)
        self.costs = costs
        self._rows: dict[int, _Memory] = {}
        self._best: dict[tuple[int, Rates], tuple[int, int]] = {}  # by number of requests and rates
        self._together, self._most = 1, 1

    def begin(self, rows: Sequence[int], most: int = 1) -> None:
        """Take note of how many requests share the round, and how many drafts each can get."""
        self._together, self._most = max(len(rows), 1), most

    def wanted(self, row: int) -> int:
        """The row's best length; where that is 0, now and then a short draft to look again."""
        known = self._rows.get(row)
        best = self._choice(known or _Memory())[0]
        if best or known is None or known.idle < known.pause:
            return best
        return min(PROBE, self.limit)

    def drafts(self, row: int, most: int) -> int:
        """The row's best number of drafts."""
        known = self._rows.setdefault(row, _Memory())
        known.drafts = min(self._choice(known)[1], most)
        return known.drafts

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """Learn from a round."""
        known = self._rows.setdefault(row, _Memory())
        if not drafted:
            known.idle += 1
            return
        known.learn(drafted, accepted)
        known.idle = 0
        known.pause = PAUSES[0] if self._choice(known)[0] else min(2 * known.pause, PAUSES[1])

    def release(self, row: int) -> None:
        """Forget the row."""
        self._rows.pop(row, None)

    def _choice(self, known: _Memory) -> tuple[int, int]:
        """Length and number of drafts."""
        if self.costs is None:
            raise RuntimeError("stopper auto was not told what a round costs: Engine.load measures that, or give costs")
        numbers = [1 << power for power in range(self._most.bit_length()) if 1 << power < self._most]
        rates = tuple((drafts, *known.expected(drafts)) for drafts in (*numbers, self._most))
        case = self._together, rates
        if case not in self._best:
            if len(self._best) >= REMEMBERED:
                self._best.clear()
            by_number = {drafts: (first, later) for drafts, first, later in rates}
            self._best[case] = best_round(self.costs.at(self._together), by_number, self.limit, GAIN)
        return self._best[case]


def _count(rate: list[float], accepted: int, *, refused: bool) -> None:
    """Add what was seen to the two counts of a rate, the old ones fading."""
    rate[0] = MEMORY * rate[0] + accepted
    rate[1] = MEMORY * rate[1] + refused
