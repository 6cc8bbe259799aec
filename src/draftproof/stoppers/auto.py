"""Lengths by the cost model: each request drafts as far as pays at the rate its drafts are accepted, or not at all.

Knows: what a round costs, how a request's drafts fared. Does not know: clocks, models.

A length depends on committed rounds of the same request and on how many requests share the round, so it is a stopping
time and every lossless rule stays lossless. Given costs that are the same for any number of requests (`auto:R`) a seed
gives the same text, alone and in any batch; measured costs grow with the batch, and drafts then get shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """How a request's drafts fared; later rounds count for more."""

    accepted: float = FIRST * WEIGHT
    refused: float = (1 - FIRST) * WEIGHT
    idle: int = 0
    pause: int = PAUSES[0]


class Auto(StopperBase):
    """Drafts the length with the least expected time a token under i.i.d. acceptance, 0 where drafting does not pay.

    Args:
        costs: of a round, by the number of requests that share it or whatever that is; None until they are measured,
            and `wanted` refuses.
        limit: longest chain.
        name: how it is called.

    Raises:
        UserError: a limit out of range.

    Source: Leviathan et al. 2023, section 3.5, for the best length under i.i.d. acceptance; rates are estimated online.
    """

    def __init__(self, costs: RoundCosts | BatchCosts | None = None, limit: int = 16, name: str = "auto") -> None:
        if not 1 <= limit <= MAX_LENGTH:
            raise UserError(f"auto drafts at most {limit} tokens: legal are 1 to {MAX_LENGTH}")
        super().__init__(name, limit)
        self.costs = costs
        self._rows: dict[int, _Memory] = {}
        self._best: dict[tuple[int, int], int] = {}  # by number of requests and rate in per cent
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
        known.accepted = MEMORY * known.accepted + accepted
        known.refused = MEMORY * known.refused + (accepted < drafted)
        known.idle = 0
        known.pause = PAUSES[0] if self._length(known) else min(2 * known.pause, PAUSES[1])

    def release(self, row: int) -> None:
        """Forget the row."""
        self._rows.pop(row, None)

    def _length(self, known: _Memory) -> int:
        if self.costs is None:
            raise RuntimeError("stopper auto was not told what a round costs: Engine.load measures that, or give costs")
        case = self._together, round(100 * known.accepted / (known.accepted + known.refused))
        if case not in self._best:
            costs = self.costs.at(self._together)
            self._best[case] = best_round_length(costs, case[1] / 100, self.limit, gain=GAIN)
        return self._best[case]
