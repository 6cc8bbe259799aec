"""The stopper `auto`: chooses the length and the number of drafts with the most tokens per second, or no draft.

The choice depends on the costs of a round and on the acceptance rates of earlier rounds. It is made before anything of
the round is drawn, so it is a stopping time, and every lossless rule stays lossless.

Costs are learned from the time of every round (`LearnedCosts`). A round is as wide as its widest draft, so the requests
of a round decide together, by the sum of their expected tokens. With a given cost (`auto:R`) nothing is learned from a
clock, each request decides for itself, and a seed gives the same text alone and in any batch.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftproof.errors import UserError
from draftproof.stoppers.base import AcceptanceRates, Outlook, RoundTime, StopperBase
from draftproof.stoppers.costs import LearnedCosts
from draftproof.stoppers.fixed import MAX_LENGTH
from draftproof.stoppers.rates import RequestRates, SharedRates
from draftproof.theory.cost import BatchCosts, RoundCosts, best_round, expected_tokens

Rates = tuple[tuple[int, float, float], ...]  # number of drafts, rate of the first token, rate of later tokens

GAIN = 1.05  # least expected speed of a draft, relative to plain decoding
PROBE = 1  # length of a probe: a draft that only measures whether drafts pay again
PAUSES = (8, 128)  # rounds between probes: at first, and after many probes without success
PROBE_SHARE = 0.01  # largest share of the time for probes at first; pauses are longer if a draft costs much
TRIAL = 4  # default draft length of a trial: a round that measures what a draft costs
CREDIT, REGAIN = 8.0, 1 / 32  # measuring rounds that are allowed: at first, and regained with each round
CATCH_UP = 8  # rounds without a draft after which a draft model has much to read first
READING = 0.12  # cost of one token that it reads then, of many at once, relative to a drafted one; assumed at first
CHEAP = 0.25  # cost of reading, in plain rounds, up to which one token may be tried though nothing was saved for it
# The same once costs are old, as a share of the rounds without a draft: if that cost was measured, and if not.
READ_SHARE_KNOWN, READ_SHARE_ASSUMED = 1 / 32, 1 / 8
ANSWER, ANSWER_DECAY = 64.0, 0.9  # tokens of an answer that are assumed at first, and the weight of earlier answers
STALE = (32, 1024)  # rounds without a draft after which the cost of drafts is measured again: at first, and later
CACHE_SIZE = 4096  # number of cached choices

ASSUMED = AcceptanceRates()


@dataclass(frozen=True)
class DraftPlan:
    """The draft lengths of a round."""

    length: int = 0  # tokens of each draft; 0 for a plain round
    drafts: int = 1  # number of drafts of each request
    speed: float = 1.0  # expected speed relative to plain decoding
    measures: bool = False  # whether the round is run to measure costs, and not for its speed
    only: int | None = None  # the request that drafts; None if all do


class Auto(StopperBase):
    """Chooses the length and the number of drafts with the least expected time per token, or no draft.

    For each request and each number of drafts there are two rates: how often the first drafted token is accepted, and
    how often a later one is accepted after an accepted one. The second rate is higher if text is easy in some places
    and hard in others. For a number of drafts that was not tried recently the rates are optimistic, so it is tried
    again if it might pay. If no draft pays, an occasional short draft (a probe) updates the rates.

    Args:
        costs: costs of a round, for any number of requests or by number; by default they are learned.
        limit: length of the longest chain.
        assumed: acceptance rates of a request before its first draft.
        catches_up: whether the draft model has its own cache, and must first read what others have drafted.
        most: the most drafted tokens of a round, over all its requests.

    Source: Leviathan et al. 2023, section 3.5, for the best length under i.i.d. acceptance; here there are two rates,
    estimated while decoding.
    """

    def __init__(
        self,
        costs: RoundCosts | BatchCosts | LearnedCosts | None = None,
        limit: int = 16,
        name: str = "auto",
        assumed: AcceptanceRates = ASSUMED,
        *,
        catches_up: bool = True,
        most: float = math.inf,
    ) -> None:
        if not 1 <= limit <= MAX_LENGTH:
            raise UserError(f"stopper auto: expected a limit of 1 to {MAX_LENGTH}, got {limit}")
        super().__init__(name, limit)
        self.costs = LearnedCosts() if costs is None else costs
        self.assumed = assumed
        self._catches_up = catches_up
        self._most = most
        self.shared_rates = SharedRates() if isinstance(self.costs, LearnedCosts) else None
        self.plan: DraftPlan | None = None  # of the current round, if its requests decide together
        self._rows: dict[int, RequestRates] = {}
        self._best: dict[
            tuple[int, int, Rates], DraftPlan
        ] = {}  # by version of the costs, number of requests and rates
        self._batch = 1
        self._most_drafts = 1
        self._drafts: dict[int, int] = {}  # number of drafts of each request in the current round
        self._widest = 1  # largest of these numbers; requests may end before the round's time is known
        self._credit = CREDIT
        self._preset: DraftPlan | None = None
        self._accepted = 0  # tokens of the round
        self._again = 0  # remaining rounds of a trial
        # rounds since the last draft, and the number after which figures are stale
        self._unused = 0
        self._paused = 0  # rounds without a draft until costs were last found to be old
        self._stale = STALE[0]
        self._reads_much = False
        # plain rounds' time that drafts must still have gained, had there been any, before the draft model catches up
        self._owed: float | None = None
        self._answer = ANSWER  # expected tokens of an answer

    @property
    def learned_costs(self) -> LearnedCosts | None:
        """The costs if they are learned; else None."""
        return self.costs if isinstance(self.costs, LearnedCosts) else None

    def use_plan(self, plan: DraftPlan) -> None:
        """Set the plan of the next round, for a caller that compared it with other drafters' plans."""
        self._preset = plan

    @property
    def reads_ahead(self) -> bool:  # type: ignore[override]  # a constant in the base class
        """Whether the newest round had a draft that was expected to gain, so that new requests will draft, too."""
        return self.plan is None or (self.plan.length > 0 and not self.plan.measures)

    def expect(self, outlooks: Mapping[int, Outlook]) -> None:
        """Note what the draft model would have to read for each request, and how long its draft may be."""
        for row, outlook in outlooks.items():
            state = self._state(row)
            state.unread = outlook.unread
            state.limit = outlook.limit
        if self.learned_costs is not None and any(outlook.fresh for outlook in outlooks.values()):
            self.learned_costs.passes.reading = True

    def begin(self, rows: Sequence[int], most: int = 1) -> None:
        """Set the size of the batch and the largest number of drafts; choose for all rows if costs are shared."""
        plan = self._preset
        self._preset = None
        if plan is None and self.costs.shared and rows:
            plan = self.make_plan(rows, most, len(rows))
        self.plan = plan
        self._batch = max(len(rows), 1)
        self._most_drafts = most
        self._drafts.clear()
        self._widest = 1
        self._accepted = 0
        drafting = rows if plan is None or plan.only is None else [plan.only]
        self._reads_much = self._catches_up and self._must_catch_up([self._state(row) for row in drafting])

    def make_plan(self, rows: Sequence[int], most: int = 1, batch: int = 1) -> DraftPlan:
        """The plan for a round of `batch` requests, of which these rows may draft together."""
        self._batch = max(batch, 1)
        self._most_drafts = most
        members = {row: self._state(row) for row in rows}
        best = self._choice(list(members.values()))
        learned = self.learned_costs
        if learned is not None and (forced := self._measuring_plan(learned, members, best)) is not None:
            return forced
        if best.length and self._waits(list(members.values()), best):
            return DraftPlan()
        if not best.length and 2 * sum(self._may_probe(one) for one in members.values()) > len(members):
            return self._trial(members, PROBE) or best
        return best

    def promise(self, batch: int) -> float:
        """The expected speed relative to plain decoding in a batch of new requests; 1 if drafts would not pay."""
        self._batch = max(batch, 1)
        self._most_drafts = 1
        known = None if self.shared_rates is None else self.shared_rates.expected(1)
        return self._choice([RequestRates(assumed=known or self.assumed)] * self._batch).speed

    def _measuring_plan(
        self, costs: LearnedCosts, members: Mapping[int, RequestRates], best: DraftPlan
    ) -> DraftPlan | None:
        """A measuring round, if estimates of costs are missing or old; else None."""
        batch = self._batch
        self._unused += 1
        if costs.passes.reading:  # a round that also reads a prompt measures nothing
            return DraftPlan() if costs.lacks(batch) and self._missed(members.values()) > CHEAP else None
        if costs.passes.is_old(batch) and best.length:
            return DraftPlan(measures=True)
        if self._unused > self._stale:
            self._paused += self._unused
            self._unused = 0
            self._stale = min(2 * self._stale, STALE[1])
            self._again = 1 + self._catches_up
        self._credit = min(self._credit + REGAIN, CREDIT)
        if self._again:
            trial = self._trial(members, max(best.length, 2), rounds=self._again)
            self._again -= trial is not None
            if trial is not None:
                return trial
        return self._first_trial(costs, members, best)

    def _first_trial(
        self, costs: LearnedCosts, members: Mapping[int, RequestRates], best: DraftPlan
    ) -> DraftPlan | None:
        """A measuring round while costs are unknown, unless drafts would not pay anyway; else None."""
        batch = self._batch
        # They pay even less than in smaller batches, or than by the time of reading prompts or an earlier run. Figures
        # of an earlier run may be wrong, so after a long time without drafts they are not believed.
        foretold = costs.is_foretold(batch, earlier=not self._again)
        hopeless = not best.length and (costs.knows_fewer(batch) or foretold)
        if not costs.lacks(batch) or self._credit < 1 or hopeless:
            return None
        if not costs.passes.last_was_plain and costs.passes.lacks(batch):
            self._credit -= 1
            return DraftPlan(measures=True)
        rounds = 1 + (self._catches_up and self._must_catch_up(members.values()))
        self._credit -= 1
        wanted = min(best.length or TRIAL, 2 * TRIAL)
        if (trial := self._trial(members, wanted, best.drafts, rounds)) is not None:
            return trial
        # A debt may come from one outlier, and only a trial shows that.
        for rows, only in self._ways(members):
            if self._missed(rows) <= self._bearable():
                return DraftPlan(1, best.drafts, measures=True, only=only)
        return None

    def _waits(self, members: Sequence[RequestRates], best: DraftPlan) -> bool:
        """Whether a draft model should not read yet what others have drafted, since a request may end before that pays.

        It waits until drafts would have gained what reading cost at first. So whenever the request ends, not much more
        than twice that cost is lost. For new requests it reads at once if a usual answer pays for twice that.
        """
        missed, gain = self._missed(members), best.speed - 1
        if missed > CHEAP and all(state.unread is not None for state in members):
            gain = self._choice(members, hopeful=False).speed - 1
        rounds = statistics.fmean(min(state.limit + 1, self._answer) for state in members)
        if all(state.idle <= CATCH_UP for state in members) and 2 * missed <= gain * rounds:
            self._owed = None
            return False
        if self._owed is None:
            self._owed = missed
        self._owed -= gain
        if missed and (self._owed > 0 or missed > gain * statistics.fmean(state.limit + 1 for state in members)):
            return True
        self._owed = None
        return False

    def _missed(self, members: Iterable[RequestRates]) -> float:
        """What a draft model's reading of tokens that it missed costs, in plain rounds.

        Where the stopper is not told what was missed, that is nothing for new requests.
        """
        tokens = sum(map(_unread, members)) if self._catches_up else 0
        if not tokens:
            return 0.0
        known = None if self.learned_costs is None else self.learned_costs.read(self._batch)
        return tokens * (READING / self._batch * min(self.costs.at(self._batch).draft, 1.0) if known is None else known)

    def _bearable(self) -> float:
        """Plain rounds that reading may cost for a draft of one token that is tried though nothing was saved for it.

        Old costs may be wrong by any factor, so the longer they have kept drafts from being tried, the more it may be.
        """
        if not self._again:
            return CHEAP
        known = self.learned_costs is not None and self.learned_costs.read(self._batch) is not None
        return max(CHEAP, (READ_SHARE_KNOWN if known else READ_SHARE_ASSUMED) * self._paused)

    def _ways(self, members: Mapping[int, RequestRates]) -> Iterator[tuple[list[RequestRates], int | None]]:
        """Who may draft in a measuring round: all; or if the draft model must read, the request with least to read."""
        yield list(members.values()), None
        if len(members) > 1 and self.learned_costs is not None and self._missed(members.values()) > CHEAP:
            row = min(members, key=lambda row: _unread(members[row]))
            yield [members[row]], row

    def _trial(
        self, members: Mapping[int, RequestRates], length: int, drafts: int = 1, rounds: int = 1
    ) -> DraftPlan | None:
        """A measuring round with drafts of this length or shorter ones, if the expected loss is allowed."""
        costs = self.costs.at(self._batch)
        allowance = None if self.learned_costs is None else self.learned_costs.passes.allowance
        for rows, only in self._ways(members):
            others, missed = self._batch - len(rows), self._missed(rows)
            sums = _sums([tokens_by_length(*one.expected(drafts), self.limit) for one in rows], self._most)
            if only is not None:
                costs = self._costs_of_one(costs)
            wanted = length if only is None else max(length, TRIAL)  # one request costs little, and shows little
            for n in sorted({min(wanted, self.limit), min(2, wanted), 1}, reverse=True):
                made, cost = (sums[n] + others) / self._batch, costs.of(n, drafts, self._share) / costs.of(0)
                loss = rounds * (cost - made)
                if allowance is None or allowance.affords(
                    loss, self._batch if only is None else 1, short=n == 1 and missed <= self._bearable(), once=missed
                ):
                    return DraftPlan(n, drafts, made / cost, measures=True, only=only)
        return None

    def _costs_of_one(self, costs: RoundCosts) -> RoundCosts:
        """Costs of a round in which one request of the batch drafts."""
        assert self.learned_costs is not None, "one request drafts to measure costs"
        share = 1 / self.learned_costs.passes.ratio(self._batch, 1)
        return replace(costs, draft=share * costs.draft, more=share * costs.more, token=costs.token / self._batch)

    @staticmethod
    def _must_catch_up(members: Iterable[RequestRates]) -> bool:
        """Whether a separate draft model has much to read first."""
        return any(_unread(state) or (state.unread is None and not state.counts) for state in members)

    def length(self, row: int) -> int:
        """The best length; if it is 0, occasionally the length of a probe."""
        if self.plan is not None:
            return self.plan.length if self.plan.only in (None, row) else 0
        state = self._state(row)
        return self._choice([state]).length or (min(PROBE, self.limit) if self._may_probe(state) else 0)

    def drafts(self, row: int, most: int) -> int:
        """The best number of drafts."""
        plan = self.plan or self._choice([self._state(row)])
        found = self._drafts[row] = min(plan.drafts, most)
        self._widest = max(self._widest, found)
        return found

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """Update the row's rates."""
        state = self._state(row)
        self._accepted += accepted
        state.emitted += accepted + 1
        if not drafted:
            state.rest()
            return
        state.learn(self._drafts.get(row, 1), drafted, accepted)
        state.idle = 0
        state.patience = 1 if self._choice([state]).length else min(2 * state.patience, PAUSES[1] // PAUSES[0])

    def spent(self, time: RoundTime) -> None:
        """Learn from the time of the round."""
        if (learned := self.learned_costs) is None:
            return
        if time.depth:
            self._unused = self._paused = 0
            if self.plan is not None and not self.plan.measures:
                self._stale = STALE[0]
        learned.passes.reading = time.reads > CATCH_UP
        if learned.passes.reading:
            learned.passes.learn_reading(time)
        else:
            few = None if self.plan is None or self.plan.only is None else 1
            learned.learn(time, self._widest, drafting=not self._reads_much, rows=few)
            learned.settle(time, self._accepted / time.rows, caught_up=self._reads_much, rows=few)
        self._accepted = 0

    def release(self, row: int) -> None:
        """Forget the row."""
        if (state := self._rows.pop(row, None)) is not None and state.emitted:
            self._answer = ANSWER_DECAY * self._answer + (1 - ANSWER_DECAY) * state.emitted
        self._drafts.pop(row, None)

    @property
    def timed(self) -> bool:  # type: ignore[override]  # a constant in the base class
        """Whether costs are learned."""
        return self.learned_costs is not None

    def to_dict(self) -> dict[str, Any]:
        """The learned costs and acceptance rates, for a file; empty if too little is known."""
        if (
            self.learned_costs is None
            or self.shared_rates is None
            or not any((costs := self.learned_costs.to_dict()).values())
        ):
            return {}
        return {"costs": costs, "rates": self.shared_rates.to_dict()}

    def restore(self, found: dict[str, Any]) -> None:
        """Start from the figures of an earlier run.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: the figures have another form.
        """
        if self.learned_costs is not None and self.shared_rates is not None:
            self.learned_costs.restore(found["costs"])
            self.shared_rates.restore(found["rates"])

    def _state(self, row: int) -> RequestRates:
        state = self._rows.get(row)
        if state is None:
            state = self._rows[row] = RequestRates(self.shared_rates, self.assumed)
        return state

    def _may_probe(self, state: RequestRates) -> bool:
        """Whether the last draft was long enough ago for a probe."""
        if state.idle < state.patience * PAUSES[0]:
            return False
        costs = self.costs.at(self._batch)
        pause = max(PAUSES[0], (costs.of(PROBE) / costs.of(0) - 1) / PROBE_SHARE)
        return state.idle >= state.patience * pause

    def tokens(self, row: int, drafts: int = 1) -> tuple[float, ...]:
        """Expected tokens of a round of this request with drafts of 0, 1, 2, ... tokens."""
        return tokens_by_length(*self._state(row).hopeful(drafts), self.limit)

    @property
    def _share(self) -> float:
        """Mean number of drafted tokens that a request may have."""
        return self._most / self._batch

    def _choice(self, members: Sequence[RequestRates], *, hopeful: bool = True) -> DraftPlan:
        """The best plan for these requests together, with hopeful or with expected rates."""
        numbers = [1 << power for power in range(self._most_drafts.bit_length()) if 1 << power < self._most_drafts]
        kinds = [(n, one) for n in (*numbers, self._most_drafts) for one in members]
        rates = tuple(sorted((n, *(one.hopeful(n) if hopeful else one.expected(n))) for n, one in kinds))
        case = self.learned_costs.version if self.learned_costs else 0, self._batch, rates
        if case not in self._best:
            if len(self._best) >= CACHE_SIZE:
                self._best.clear()
            each: dict[int, list[tuple[float, ...]]] = {}
            for drafts, first, later in rates:
                each.setdefault(drafts, []).append(tokens_by_length(first, later, self.limit))
            sums = {drafts: _sums(rows, self._most) for drafts, rows in each.items()}
            costs = self.costs.at(self._batch)
            length, drafts = best_round(costs, sums, GAIN, self._share)
            gain = sums[drafts][length] / sums[drafts][0] * costs.of(0) / costs.of(length, drafts, self._share)
            self._best[case] = DraftPlan(length, drafts, gain if length else 1.0)
        return self._best[case]


def _unread(state: RequestRates) -> int:
    """Tokens that a draft model has missed, as far as they are known; 0 for few, which are read with the next draft."""
    tokens = state.idle if state.unread is None else state.unread
    return tokens if tokens > CATCH_UP else 0


def _sums(each: Sequence[Sequence[float]], most: float) -> list[float]:
    """Expected tokens of all requests by draft length, if only the `most` likeliest drafted tokens are read."""
    gained = [[now - before for before, now in itertools.pairwise(tokens)] for tokens in each]
    longest = len(gained[0])
    if len(each) * longest <= most:
        return [sum(column) for column in zip(*each, strict=True)]
    begun = sum(tokens[0] for tokens in each)
    likeliest = [heapq.nlargest(int(most), itertools.chain(*(own[:n] for own in gained))) for n in range(longest + 1)]
    return [begun + sum(chances) for chances in likeliest]


@functools.lru_cache(maxsize=CACHE_SIZE)
def tokens_by_length(first: float, later: float, longest: int) -> tuple[float, ...]:
    """`expected_tokens`, cached."""
    return expected_tokens(first, later, longest)
