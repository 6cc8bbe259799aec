"""Lengths by the cost model: each request drafts as far as pays at the rate its drafts are accepted, or not at all.

Knows: what a round costs, how a request's drafts fared. Does not know: clocks, models.

A length depends on committed rounds of the same request and on how many requests share the round, so it is a stopping
time and every lossless rule stays lossless. Given costs that are the same for any number of requests (`auto:R`) a seed
gives the same text, alone and in any batch; measured costs grow with the batch, and drafts then get shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftproof.errors import UserError
from draftproof.stoppers.base import StopperBase
from draftproof.stoppers.fixed import MAX_LENGTH
from draftproof.theory.cost import BatchCosts, RoundCosts, best_round_length

FIRST, WEIGHT = 0.7, 3.0  # acceptance rate that is assumed before anything is known, and tokens that it counts for
MEMORY = 0.93  # what a round counts for after each later one
GAIN = 1.02  # a draft must promise this much over plain decoding
PROBE = 2  # tokens of a draft that only looks whether drafts pay again
PAUSES = (8, 128)  # rounds between such looks: at first, and after many in vain


@dataclass
class _Memory:
    """How a request's drafts fared at their first token and after an accepted one; newer rounds count for more."""

    first: list[float] = field(default_factory=lambda: [FIRST * WEIGHT, (1 - FIRST) * WEIGHT])  # accepted, refused
    later: list[float] = field(default_factory=lambda: [FIRST * WEIGHT, (1 - FIRST) * WEIGHT])
    idle: int = 0
    pause: int = PAUSES[0]


class Auto(StopperBase):
    """Drafts the length with the least expected time a token, 0 where drafting does not pay.

    Two rates are followed for each request: how often the first drafted token is accepted, and how often a further one
    is after it. Where text is easy in some places and hard in others the second is the higher one.

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
        self._best: dict[tuple[int, int, int], int] = {}  # by number of requests and both rates in per cent
        self._together = 1

    def begin(self, rows: Sequence[int]) -> None:
        """Take note of how many requests share the round."""
        self._together = max(len(rows), 1)

    def wanted(self, row: int) -> int:
        """The row's best length; where that is 0, now and then a short draft to look again."""
        known = self._rows.get(row)
        best = self._length(known or _Memory())
        if best or known is None or known.idle < known.pause:
            return best
        return min(PROBE, self.limit)

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """Learn from a round."""
        known = self._rows.setdefault(row, _Memory())
        if not drafted:
            known.idle += 1
            return
        _count(known.first, min(accepted, 1), refused=not accepted)
        if accepted and drafted > 1:
            _count(known.later, accepted - 1, refused=accepted < drafted)
        known.idle = 0
        known.pause = PAUSES[0] if self._length(known) else min(2 * known.pause, PAUSES[1])

    def release(self, row: int) -> None:
        """Forget the row."""
        self._rows.pop(row, None)

    def _length(self, known: _Memory) -> int:
        if self.costs is None:
            raise RuntimeError("stopper auto was not told what a round costs: Engine.load measures that, or give costs")
        first, later = (
            round(100 * accepted / (accepted + refused)) for accepted, refused in (known.first, known.later)
        )
        case = self._together, first, later
        if case not in self._best:
            costs = self.costs.at(self._together)
            self._best[case] = best_round_length(costs, first / 100, self.limit, GAIN, later=later / 100)
        return self._best[case]


def _count(rate: list[float], accepted: int, *, refused: bool) -> None:
    """Add what was seen to the two counts of a rate, the old ones fading."""
    rate[0] = MEMORY * rate[0] + accepted
    rate[1] = MEMORY * rate[1] + refused
