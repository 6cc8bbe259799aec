"""The stopper `auto`: chooses the length and the number of drafts with the most tokens per second, or no draft.

The choice depends on the costs of a round and on the acceptance rates of earlier rounds. Only committed rounds count,
so the choice is a stopping time, and every lossless rule stays lossless.

With the same costs for any number of requests (`auto:R`) each request decides for itself, and a seed gives the same
text alone and in any batch. Measured costs are costs of a whole round, which is as wide as its widest draft: there, the
requests of a round decide together, by the sum of the tokens they expect.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from draftproof.errors import UserError
from draftproof.stoppers.base import AcceptanceRates, StopperBase
from draftproof.stoppers.fixed import MAX_LENGTH
from draftproof.theory.cost import BatchCosts, RoundCosts, best_round, expected_tokens

Rates = tuple[tuple[int, float, float], ...]  # number of drafts, rate of the first token, rate of later tokens

PRIOR_WEIGHT = 4.0  # number of tokens that assumed rates count for
DECAY = 0.96  # weight of a round relative to the next one
GAIN = 1.05  # least expected speed of a draft, relative to plain decoding
PROBE = 1  # length of a probe: a draft that only measures whether drafts pay again
PAUSES = (8, 128)  # rounds between probes: at first, and after many probes without success
PROBE_SHARE = 0.01  # largest share of the time for probes at first; pauses are longer where a draft costs much
CACHE_SIZE = 4096  # number of choices that are kept instead of being computed again
FORGET_AFTER = 64  # rounds after which the rates of a number of drafts that was not used are forgotten


ASSUMED = AcceptanceRates()


@dataclass
class _RateCounts:
    """Counts of accepted and rejected tokens; older rounds count less.

    Attributes:
        first, later: accepted and rejected, for the first token and for tokens after an accepted one.
        unused: number of rounds of the request since these counts changed.
    """

    first: list[float]
    later: list[float]
    unused: int = 0

    @classmethod
    def assumed(cls, first: float, later: float) -> _RateCounts:
        """Counts for assumed rates, with little weight."""
        return cls(
            [first * PRIOR_WEIGHT, (1 - first) * PRIOR_WEIGHT], [later * PRIOR_WEIGHT, (1 - later) * PRIOR_WEIGHT]
        )

    @property
    def rates(self) -> tuple[float, float]:
        """Both rates, rounded to hundredths."""
        first, later = (round(accepted / (accepted + rejected), 2) for accepted, rejected in (self.first, self.later))
        return first, later


@dataclass
class _RequestState:
    """The acceptance counts of a request for each number of drafts, and its current choice.

    Attributes:
        assumed: rates before the first draft.
        counts: by number of drafts.
        drafts: number of drafts in the current round.
        idle: rounds since the last draft.
        patience: factor of the pause before the next probe.
        chosen: length and number of drafts that were chosen since the counts last changed, by number of requests in the
            round and by the largest number of drafts.
    """

    assumed: AcceptanceRates
    counts: dict[int, _RateCounts] = field(default_factory=dict)
    drafts: int = 1
    idle: int = 0
    patience: int = 1
    chosen: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def expected(self, drafts: int) -> tuple[float, float]:
        """Expected rates for a number of drafts; optimistic for a number that was not tried recently.

        A single draft is expected to do as well as several drafts did, and several as well as independent drafts would.
        """
        if drafts in self.counts:
            return self.counts[drafts].rates
        if drafts == 1:
            assumed = round(self.assumed.first, 2), round(self.assumed.later, 2)
            return self.counts[min(self.counts)].rates if self.counts else assumed
        first, later = self.expected(1)
        return round(1 - (1 - first) ** drafts, 2), later

    def learn(self, drafted: int, accepted: int) -> None:
        """Add the outcome of a round to the counts for its number of drafts."""
        self.chosen.clear()
        own = self.counts.setdefault(self.drafts, _RateCounts.assumed(*self.expected(self.drafts)))
        _count(own.first, min(accepted, 1), rejected=not accepted)
        if accepted and drafted > 1:
            _count(own.later, accepted - 1, rejected=accepted < drafted)
        own.unused = 0
        for drafts, other in list(self.counts.items()):
            other.unused += other is not own
            if other.unused > FORGET_AFTER:
                del self.counts[drafts]


class Auto(StopperBase):
    """Chooses the length and the number of drafts with the least expected time per token, or no draft.

    For each request and each number of drafts there are two rates: how often the first drafted token is accepted, and
    how often a later one is accepted after an accepted one. The second rate is higher where text is easy in some places
    and hard in others. For a number of drafts that was not tried recently the rates are optimistic, so it is tried
    again where it might pay. Where no draft pays, a short draft from time to time (a probe) updates the rates.

    Args:
        costs: costs of a round, for each number of requests in it or the same for all numbers; None until they are
            measured, and until then `length` raises RuntimeError.
        limit: length of the longest chain.
        name: the stopper's name.
        assumed: acceptance rates of a request before its first draft; the default rates where these are higher.

    Raises:
        UserError: the limit is out of range.

    Source: Leviathan et al. 2023, section 3.5, for the best length under i.i.d. acceptance; here there are two rates,
    estimated while decoding.
    """

    def __init__(
        self,
        costs: RoundCosts | BatchCosts | None = None,
        limit: int = 16,
        name: str = "auto",
        assumed: AcceptanceRates = ASSUMED,
    ) -> None:
        if not 1 <= limit <= MAX_LENGTH:
            raise UserError(f"the limit of stopper auto is {limit}: legal are 1 to {MAX_LENGTH}")
        super().__init__(name, limit)
        self.costs = costs
        self.assumed = assumed
        self._rows: dict[int, _RequestState] = {}
        self._best: dict[tuple[int, Rates], tuple[int, int]] = {}  # by number of requests and rates
        self._batch, self._most_drafts = 1, 1
        self._common: tuple[int, int] | None = None  # length and number of drafts for all requests of the round

    @property
    def needs_costs(self) -> bool:  # type: ignore[override]  # a constant in the base class
        """Whether no costs were given."""
        return self.costs is None

    def calibrate(self, costs: RoundCosts | BatchCosts, rates: AcceptanceRates) -> None:
        """Decide by these costs, and expect these rates of requests that are new."""
        self.costs, self.assumed = costs, rates

    def begin(self, rows: Sequence[int], most: int = 1) -> None:
        """Note the size of the batch and the largest number of drafts; choose for all rows where costs are shared."""
        self._batch, self._most_drafts, self._common = max(len(rows), 1), most, None
        if self.costs is not None and self.costs.shared and len(rows) > 1:
            members = [self._state(row) for row in rows]
            length, drafts = self._choice(members)
            probe = not length and 2 * sum(self._may_probe(one) for one in members) > len(members)
            self._common = (min(PROBE, self.limit), 1) if probe else (length, drafts)

    def length(self, row: int) -> int:
        """The best length; where this is 0, from time to time the length of a probe."""
        if self._common is not None:
            return self._common[0]
        state = self._state(row)
        return self._own(state)[0] or (min(PROBE, self.limit) if self._may_probe(state) else 0)

    def drafts(self, row: int, most: int) -> int:
        """The best number of drafts."""
        state = self._state(row)
        state.drafts = min((self._common or self._own(state))[1], most)
        return state.drafts

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """Update the row's rates."""
        state = self._state(row)
        if not drafted:
            state.idle += 1
            return
        state.learn(drafted, accepted)
        state.idle = 0
        state.patience = 1 if self._own(state)[0] else min(2 * state.patience, PAUSES[1] // PAUSES[0])

    def release(self, row: int) -> None:
        """Forget the row."""
        self._rows.pop(row, None)

    def _state(self, row: int) -> _RequestState:
        state = self._rows.get(row)
        if state is None:
            state = self._rows[row] = _RequestState(ASSUMED.at_least(self.assumed))
        return state

    def _own(self, state: _RequestState) -> tuple[int, int]:
        """Length and number of drafts that are best for this request alone."""
        case = self._batch, self._most_drafts
        found = state.chosen.get(case)
        if found is None:
            found = state.chosen[case] = self._choice([state])
        return found

    def _may_probe(self, state: _RequestState) -> bool:
        """Whether the pause since the last draft is long enough for a probe."""
        if state.idle < state.patience * PAUSES[0]:
            return False
        assert self.costs is not None, "a choice was made"
        costs = self.costs.at(self._batch)
        pause = max(PAUSES[0], (costs.of(PROBE) / costs.of(0) - 1) / PROBE_SHARE)
        return state.idle >= state.patience * pause

    def _choice(self, members: Sequence[_RequestState]) -> tuple[int, int]:
        """Length and number of drafts that are best for these requests together."""
        if self.costs is None:
            raise RuntimeError("stopper auto has no costs of a round: Engine.load measures them, or pass costs")
        numbers = [1 << power for power in range(self._most_drafts.bit_length()) if 1 << power < self._most_drafts]
        rates = tuple(sorted((n, *one.expected(n)) for n in (*numbers, self._most_drafts) for one in members))
        case = self._batch, rates
        if case not in self._best:
            if len(self._best) >= CACHE_SIZE:
                self._best.clear()
            each: dict[int, list[tuple[float, ...]]] = {}
            for drafts, first, later in rates:
                each.setdefault(drafts, []).append(_tokens(first, later, self.limit))
            sums = {drafts: [sum(column) for column in zip(*rows, strict=True)] for drafts, rows in each.items()}
            self._best[case] = best_round(self.costs.at(self._batch), sums, GAIN)
        return self._best[case]


@functools.lru_cache(maxsize=CACHE_SIZE)
def _tokens(first: float, later: float, longest: int) -> tuple[float, ...]:
    return expected_tokens(first, later, longest)


def _count(counts: list[float], accepted: int, *, rejected: bool) -> None:
    """Add a round's tokens to the counts of accepted and rejected tokens; older rounds lose weight."""
    counts[0] = DECAY * counts[0] + accepted
    counts[1] = DECAY * counts[1] + rejected
