"""The drafter `auto`: in every round, the drafter with the most expected tokens per second, or none.

Its sources are the drafters that a target has: a named draft model, a feature head that ships for it, the target itself
with quantized weights. In addition, a lookup continues passages that repeat the request's own text, and extends chains
of a source. The choice depends on committed tokens and on the time of earlier rounds, and is made before anything of
the round is drawn; an extension depends only on the tokens before it. So every lossless rule stays lossless.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from typing_extensions import override

from draftproof.backends.base import Backend
from draftproof.backends.cache.prefix_cache import PrefixCache
from draftproof.draft import Draft, Origin
from draftproof.drafters.base import DraftRequest, PreparedDrafter, SessionDrafter
from draftproof.drafters.extended import LEAST, extended
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import point_chain, with_probabilities
from draftproof.drafters.suffix import SuffixDrafter, SuffixMatch
from draftproof.errors import reason
from draftproof.rng import RoundRng
from draftproof.stoppers.auto import ANSWER, CACHE_SIZE, CATCH_UP, GAIN, Auto, DraftPlan, tokens_by_length
from draftproof.stoppers.base import AcceptanceRates, RoundTime
from draftproof.stoppers.costs import DraftCosts, LearnedCosts, size_class
from draftproof.stoppers.rates import RequestRates, SharedRates
from draftproof.theory.cost import RoundCosts

_log = logging.getLogger(__name__)

BUILD_GAIN = 16.0  # plain rounds that sources would have gained before they are built for several requests
BUILD_SHARE = 0.5  # time for building a source while one request runs, as a share of the last round
TOGETHER = 8  # largest batch in which every round makes a choice at first; larger ones skip some plain rounds
PLAIN = 8  # plain rounds after which several requests skip another one between two choices, up to half their number
LOOKUP_KEY = "lookup"  # key of its figures in a file
PASSES_KEY = "passes"  # key of the costs of passes, which sources' figures have, too
LOOKUP = 16  # longest draft of a lookup, and longest suffix that it looks for
TRIED = 4  # length of a retried lookup, and of the match that it needs
LOOKUP_PAUSE = 32  # rounds after which a long match is retried, even if such drafts were not accepted
LOOKUP_PATIENCE = 4  # largest factor of that pause, after repeated failure
PREDICTED, FORCED = 64, 128  # added to the class of a match in a predicted text, and of tokens that a grammar forces
_CLASSES = {Origin.LOOKUP: 0, Origin.PREDICTION: PREDICTED, Origin.GRAMMAR: FORCED}
LOOKUP_RATES = {  # assumed, by length of the match
    1: AcceptanceRates(0.15, 0.5),
    2: AcceptanceRates(0.35, 0.7),
    4: AcceptanceRates(0.55, 0.8),
    8: AcceptanceRates(0.75, 0.9),
    16: AcceptanceRates(0.9, 0.95),
    PREDICTED + 1: AcceptanceRates(0.4, 0.8),
    PREDICTED + 2: AcceptanceRates(0.65, 0.9),
    PREDICTED + 4: AcceptanceRates(0.8, 0.95),
    PREDICTED + 8: AcceptanceRates(0.9, 0.97),
    PREDICTED + 16: AcceptanceRates(0.9, 0.98),
    FORCED + LOOKUP: AcceptanceRates(0.99, 0.99),
}


class CandidateDrafter:
    """A source of `AutoDrafter`; it may have to be built first.

    `steps` yields None after each step of building, and finally the drafter. `quick` says that this takes no time.
    """

    def __init__(self, name: str, stopper: Auto, steps: Iterator[ModelDrafter | None], *, quick: bool = False) -> None:
        self.quick = quick
        self.name = name
        self.stopper = stopper
        self.drafter: ModelDrafter | None = None
        self.unable: set[int] = set()  # requests that it cannot draft for
        self.failed = False
        self._steps = steps

    def build(self, end: float) -> bool:
        """Build until the time `end`, but at least one step; returns whether building has finished."""
        while self.drafter is None and not self.failed:
            try:
                self.drafter = next(self._steps)
            except (MemoryError, OSError, RuntimeError, ValueError) as error:
                self.failed = True
                _log.warning("drafter %s cannot be used (%s): decoding continues without it", self.name, reason(error))
            if time.perf_counter() >= end:
                break
        return self.drafter is not None or self.failed


def _kind(found: SuffixMatch) -> int:
    """The class of a match, by which its acceptance rates are counted."""
    return min(size_class(found.matched), LOOKUP) + _CLASSES[found.origin]


@dataclass
class _Choice:
    """The drafts of a round: lookups, by request, and the source's drafts for the other requests.

    Without a source the other requests have no draft. The plan is the source's.
    """

    source: CandidateDrafter | None = None
    plan: DraftPlan = field(default_factory=DraftPlan)
    lookups: dict[int, SuffixMatch] = field(default_factory=dict)


class AutoDrafter(SessionDrafter, PreparedDrafter):
    """Chooses in every round among drafters from models, a lookup of repeated passages, and no draft.

    The stoppers of all sources share `passes`, the costs of the target's pass. `masses` says whether the rule accepts
    drafts without probabilities; if not, lookups get one-hot rows.
    """

    name = "auto"
    branching = False
    point_masses = False
    constant = False
    max_positions = None
    timed = True
    reads_predictions = True

    def __init__(
        self,
        sources: Sequence[CandidateDrafter],
        lookup: SuffixDrafter | None,
        passes: DraftCosts,
        *,
        masses: bool = True,
    ) -> None:
        self.sources = list(sources)
        self.stopper = sources[0].stopper if sources else None
        self.lookup = lookup
        self.lookup_rates = SharedRates(dict(LOOKUP_RATES))
        self._lookup_costs = LearnedCosts(RoundCosts(1.0, 0.0), passes)
        self._masses = masses
        self._requests: dict[int, RequestRates] = {}
        self._choice = _Choice()
        self._matched: dict[int, int] = {}  # kind of the match of each request with a looked up draft
        self._drawn_tokens: dict[int, int] = {}  # of each request whose chain was extended
        self._built = False
        self._batch = 1
        self._accepted = 0  # tokens of the round
        self._seconds = 0.0
        self._waited = 0  # rounds in which nothing was built
        self._promised = 0.0  # plain rounds that missing sources would have gained, while a batch ends
        self._largest = 0  # the largest batch since there was no request
        self._plain = 0  # plain rounds in a row
        self._unpaid = 0  # choices since a source was expected to pay
        self._due = math.inf  # the number of them at which a choice is made
        self._kept = PrefixCache(0)

    @property
    def backends(self) -> Sequence[Backend]:
        """The models of the built sources."""
        return [model for source in self.sources if source.drafter for model in source.drafter.backends]

    @override
    def reuse(self, kept: PrefixCache) -> None:
        self._kept = kept
        for source in self.sources:
            if source.drafter is not None:
                source.drafter.reuse(kept)

    def read(self, parts: Sequence[DraftRequest]) -> None:
        """Let the source of the round read ahead; another one reads what it needs when it is chosen."""
        source = self._choice.source
        if source is not None and source.drafter is not None:
            source.drafter.read(parts)

    @override
    def ended(self, request_id: int, tokens: list[int]) -> None:
        for source in self.sources:
            if source.drafter is not None:
                source.drafter.ended(request_id, tokens)

    @property
    def limit(self) -> int:
        """Depth of the deepest draft."""
        lengths = [source.stopper.limit for source in self.sources]
        return max([*lengths, self.lookup.limit if self.lookup else 0])

    def propose(self, requests: Sequence[DraftRequest], rng: RoundRng) -> list[Draft]:
        """Draft by this round's choice; nothing is drafted in the round that reads a request's prompt."""
        able = [one for one in requests if one.limit > 0 and len(one.tokens) > one.prompt_length]
        before, batch = self._choice, len(requests)
        self._choice = _Choice()
        self._built = False
        self._batch = batch
        self._largest = max(self._largest, batch)
        self._accepted = 0
        self._matched.clear()
        self._drawn_tokens.clear()
        self._plain = 0 if before.source is not None or before.lookups else self._plain + 1
        self._due = min(self._due, self._plain - 1 + self._pause) if self._plain else 0
        if len(able) < len(requests) and any(len(one.tokens) == one.prompt_length for one in requests):
            self._lookup_costs.passes.reading = True  # this round reads a prompt, so it would measure nothing
        if able:
            self._build()
            if self._plain >= self._due and not self._lookup_costs.passes.asks_for_plain(batch):
                self._choice = self._choose(able, batch)
                self._due = self._plain + self._pause
        choice = self._choice
        drafts = (
            [Draft.empty() for _ in requests] if choice.source is None else self._source_drafts(choice, requests, rng)
        )
        device = drafts[0].tree.tokens.device
        for row, request in enumerate(requests):
            if (found := choice.lookups.get(request.id)) is not None:
                drafts[row] = point_chain(found.tokens[: request.limit], found.origin).to(device)
        if choice.source is not None and not choice.plan.measures:  # a measuring round shows the source alone
            drafts = [self._with_lookup_tail(each, one) for each, one in zip(drafts, requests, strict=True)]
        if not self._masses or choice.source is not None:
            dtype = next((draft.probs.dtype for draft in drafts if draft.probs is not None), torch.float32)
            width = requests[0].transforms.vocab_size
            drafts = [with_probabilities(each, width, dtype) for each in drafts]
        return drafts

    @property
    def _pause(self) -> int:
        """Rounds between two choices: a choice takes a few percent of a round, and nothing changes while none pays."""
        return max(-(-self._batch // TOGETHER), 1 + min(self._plain // PLAIN, self._batch // 2))

    def _source_drafts(self, choice: _Choice, requests: Sequence[DraftRequest], rng: RoundRng) -> list[Draft]:
        """Drafts of the chosen source, for the requests without a lookup."""
        source = choice.source
        assert source is not None
        assert source.drafter is not None, "only sources that are built are chosen"
        source.stopper.use_plan(choice.plan)
        asked = [replace(one, limit=0) if one.id in choice.lookups else one for one in requests]
        asked = [replace(one, limit=0) if len(one.tokens) == one.prompt_length else one for one in asked]
        requests[0].budget.reserve(sum(len(found.tokens) for found in choice.lookups.values()))
        drafts = source.drafter.propose(asked, rng)
        source.unable.update(
            one.id
            for one, draft in zip(asked, drafts, strict=True)
            if one.limit > 0 and not len(draft) and not source.drafter.model.depth(one, 1)
        )
        return drafts

    def _with_lookup_tail(self, draft: Draft, request: DraftRequest) -> Draft:
        """A source's chain, extended by the looked-up tokens whose expected gain exceeds their cost.

        They count only if all tokens before them are accepted.
        """
        row, size, choice = request.id, len(draft), self._choice
        most = min(request.limit, self.limit)
        if self.lookup is None or not size or row in choice.lookups or most <= size:
            return draft
        assert choice.source is not None, "only a source's chains are extended"
        by_length = choice.source.stopper.tokens(row)
        reached = by_length[min(size, len(by_length) - 1)] - by_length[min(size, len(by_length) - 1) - 1]
        least = max(choice.plan.speed, GAIN) * self._token_cost(self._batch) / max(reached, 1e-9)

        def worth(row: int, matched: int) -> int:
            rates = self._rates(row).expected(min(size_class(matched), LOOKUP))
            return _length(tokens_by_length(*rates, LOOKUP), least)

        found = self.lookup.extend(replace(request, limit=most), draft.tree.ids, worth)
        if found.matched >= LEAST and found.tokens:
            found = _first(found, _length(self._expected(row, found), least))
            if found.tokens:
                self._matched[row] = _kind(found)
                self._drawn_tokens[row] = size
                return extended(draft, found, request.transforms.vocab_size)
        return draft

    # --- the choice -----------------------------------------------------------------------------------------------

    def _build(self) -> None:
        """Continue to build missing sources that are expected to be the fastest in a batch of this size.

        For several requests, which they help less, not in every round; and only after drafts would have gained some
        rounds, or where they certainly will.
        """
        self._waited += 1
        self._make([one for one in self._missing if one.quick], 0.0)
        if self._waited < self._batch:
            return
        self._waited = 0
        built = [one.stopper.promise(self._batch) for one in self.sources if one.drafter is not None]
        gains = {one.name: one.stopper.promise(self._batch) - max(built, default=1.0) for one in self._missing}
        promising = [one for one in self._missing if gains[one.name] > 0]
        if promising:
            self._promised += self._batch * max(gains.values())
            if self._largest == 1 or self._promised >= BUILD_GAIN or self._pays_soon(max(gains.values())):
                self._built = True
                self._make(promising, BUILD_SHARE * self._seconds / self._batch)

    def _pays_soon(self, gain: float) -> bool:
        """Whether a whole batch begins for which costs are known, and sources would gain enough before it ends."""
        whole = self._batch == self._largest and not self._lookup_costs.passes.lacks(self._batch)
        return whole and gain * ANSWER >= 2 * BUILD_GAIN

    @property
    def _missing(self) -> list[CandidateDrafter]:
        """Sources that are not built yet."""
        return [one for one in self.sources if one.drafter is None and not one.failed]

    @override
    def prepare(self, seconds: float) -> bool:
        return self._make(self._missing, seconds)

    def _make(self, sources: Sequence[CandidateDrafter], seconds: float) -> bool:
        """Build these sources until the time is over, but at least one step; returns whether all are built."""
        end = time.perf_counter() + seconds
        for source in sources:
            if not source.build(end):
                return False
            if source.drafter is not None:
                source.drafter.reuse(self._kept)
        return True

    def _choose(self, able: Sequence[DraftRequest], batch: int) -> _Choice:
        ids = [one.id for one in able]
        best = _Choice()
        plain = False
        asked = self._unpaid % (1 + min(self._unpaid // PLAIN, batch // 2)) == 0
        self._unpaid += 1
        for source in self.sources if asked else ():
            mine = [row for row in ids if row not in source.unable]
            if source.drafter is None or not mine:
                continue
            model = source.drafter.model
            source.stopper.expect({one.id: model.outlook(one) for one in able if one.id not in source.unable})
            plan = source.stopper.make_plan(mine, batch=batch)
            if plan.length:
                self._unpaid = 0
            if plan.measures:
                if plan.length:
                    return _Choice(source, plan)
                plain = True
            elif plan.length and plan.speed > best.plan.speed:
                best = _Choice(source, plan)
        if plain:
            return _Choice()
        return self._choose_with_lookup(best, able, batch)

    def _choose_with_lookup(self, best: _Choice, able: Sequence[DraftRequest], batch: int) -> _Choice:
        """The choice, or one with lookups if these promise more."""
        if self.lookup is None:
            return best
        least = max(best.plan.speed, GAIN) * self._token_cost(batch)

        def worth(row: int, matched: int) -> int:
            tokens = tokens_by_length(*self._rates(row).expected(min(size_class(matched), LOOKUP)), LOOKUP)
            least_length = max(best.plan.length, TRIED if self._may_retry(row, matched) else 0)
            return max(_length(tokens, least), least_length)

        found = dict(zip([one.id for one in able], self.lookup.matches(able, worth), strict=True))
        found = {row: each for row, each in found.items() if each.tokens}
        if not found:
            return best
        self._matched = {row: _kind(each) for row, each in found.items()}
        expected = {row: self._expected(row, each) for row, each in found.items()}
        choice = self._best_lookups(best, found, expected, batch)
        if best.source is not None and len(able) > 1:
            choice = self._mix(best, choice, expected, found, {one.id: one.limit for one in able})
        if choice is best and (tried := self._due_retries(found, expected, batch)):
            choice = _Choice(best.source, best.plan if best.source else DraftPlan(measures=True), tried)
        passes = self._lookup_costs.passes
        if choice.source is None and passes.is_old(batch) and not passes.reading:
            return _Choice()  # a plain round measures the time of plain rounds
        return choice

    def _best_lookups(
        self, best: _Choice, found: dict[int, SuffixMatch], expected: dict[int, tuple[float, ...]], batch: int
    ) -> _Choice:
        """The lookups with the most tokens per second, if these promise more than the best choice so far.

        At speed s a draft pays as long as the expected gain of each token is at least s times its cost. The best speed
        is found by iteration with the resulting speed (Dinkelbach's method).
        """
        costs, choice, most = self._lookup_costs.at(batch), best, max(best.plan.speed, GAIN)
        token = self._token_cost(batch)
        while True:
            lengths = {row: _length(tokens, most * token) for row, tokens in expected.items()}
            made = sum(expected[row][n] - 1 for row, n in lengths.items()) / batch
            speed = (1 + made) / (costs.target + costs.begin + token * sum(lengths.values()) / batch)
            if speed <= most + 1e-9:
                return choice
            most, longest = speed, max(lengths.values())
            looked = {row: _first(found[row], n) for row, n in lengths.items() if n}
            choice = _Choice(None, DraftPlan(longest, 1, speed), looked)

    def _mix(
        self,
        best: _Choice,
        choice: _Choice,
        expected: dict[int, tuple[float, ...]],
        found: dict[int, SuffixMatch],
        limits: dict[int, int],
    ) -> _Choice:
        """Lookups for those requests where they promise more than the source, if that is the best choice."""
        assert best.source is not None
        n, stopper = best.plan.length, best.source.stopper
        drawn = {row: stopper.tokens(row)[min(n, limit)] for row, limit in limits.items()}
        gained = {row: tokens[min(n, len(tokens) - 1)] - drawn[row] for row, tokens in expected.items()}
        better = {row: _first(found[row], n) for row, gain in gained.items() if gain > 0}
        speed = best.plan.speed * (1 + sum(gained[row] for row in better) / sum(drawn.values()))
        if not better or speed <= choice.plan.speed:
            return choice
        return _Choice(best.source, replace(best.plan, speed=speed), better)

    def _due_retries(
        self, found: dict[int, SuffixMatch], expected: dict[int, tuple[float, ...]], batch: int
    ) -> dict[int, SuffixMatch]:
        """Long matches of requests without a recent lookup, as many as the allowance for losses permits."""
        costs, allowance = self._lookup_costs.at(batch), self._lookup_costs.passes.allowance
        tried: dict[int, SuffixMatch] = {}
        lost = 0.0
        for row, each in found.items():
            if not self._may_retry(row, each.matched):
                continue
            for n in (min(TRIED, len(each.tokens)), 1):
                loss = (costs.of(n) - expected[row][n]) / batch
                if allowance.affords(lost + loss, batch, short=n == 1 and not tried):
                    tried[row] = _first(each, n)
                    lost += loss
                    break
        return tried

    def _may_retry(self, row: int, matched: int) -> bool:
        """Whether a match is long, and the request had no lookup recently."""
        state = self._rates(row)
        return matched >= TRIED and state.idle >= LOOKUP_PAUSE * state.patience

    def _token_cost(self, batch: int) -> float:
        """The cost of one looked-up token of each request, in plain rounds."""
        costs = self._lookup_costs.at(batch)
        return costs.draft + costs.token

    def _expected(self, row: int, found: SuffixMatch) -> tuple[float, ...]:
        """Expected tokens of a round with 0, 1, 2, ... of the looked-up tokens."""
        return tokens_by_length(*self._rates(row).expected(_kind(found)), len(found.tokens))

    def _rates(self, row: int) -> RequestRates:
        return self._requests.setdefault(row, RequestRates(self.lookup_rates))

    # --- outcomes -------------------------------------------------------------------------------------------------

    def observe(self, request_id: int, drafted: int, accepted: int) -> None:
        """Pass the outcome to the drafter that drafted."""
        state, looked = self._rates(request_id), request_id in self._choice.lookups
        self._accepted += accepted
        if looked and drafted:
            state.learn(self._matched[request_id], drafted, accepted)
            paid = accepted + 1 > self._lookup_costs.at(self._batch).of(drafted)
            state.idle = 0
            state.patience = 1 if paid else min(2 * state.patience, LOOKUP_PATIENCE)
        else:
            state.idle += 1
        size = self._drawn_tokens.get(request_id)
        if size is not None and not looked and min(drafted, accepted) >= size and drafted > size:
            state.learn(self._matched[request_id], drafted - size, accepted - size)
        for source in self.sources:
            most = (drafted if size is None else size) if source is self._choice.source and not looked else 0
            source.stopper.observe(request_id, min(drafted, most), min(accepted, most))

    def spent(self, time: RoundTime) -> None:
        """Pass the time to the drafter that drafted; a plain round counts for all, since they share pass costs."""
        self._seconds = time.draft + time.rest
        source, looked, passes = self._choice.source, bool(self._choice.lookups), self._lookup_costs.passes
        passes.reading = time.reads > CATCH_UP
        if passes.reading and not self._built:
            passes.learn_reading(time)
        elif self._built or passes.reading:
            passes.interrupted()
        elif source is None:
            self._lookup_costs.learn(time)
            self._lookup_costs.settle(time, self._accepted / time.rows)
        elif looked:  # only some requests drafted, so the time of drafting says nothing
            passes.learn(time)
            (source.stopper.learned_costs or self._lookup_costs).settle(time, self._accepted / time.rows)
        else:  # looked-up tokens cost positions in the target's pass, but are not part of the source's drafts
            depth = min(time.depth, self._choice.plan.length) if self._drawn_tokens else time.depth
            source.stopper.spent(replace(time, depth=depth))

    def release(self, request_id: int) -> None:
        """Forget the request."""
        self._requests.pop(request_id, None)
        if not self._requests:
            self._largest = 0
        if self.lookup is not None:
            self.lookup.release(request_id)
        for source in self.sources:
            (source.drafter or source.stopper).release(request_id)
            source.unable.discard(request_id)

    def to_dict(self) -> dict[str, Any]:
        """The learned figures of all sources and of lookups, for a file."""
        found = {source.name: figures for source in self.sources if (figures := source.stopper.to_dict())}
        if not found and not self.lookup_rates.counts:
            return {}
        return {**found, LOOKUP_KEY: self.lookup_rates.to_dict(), PASSES_KEY: self._lookup_costs.to_dict()}

    def restore(self, found: dict[str, Any]) -> None:
        """Start from the figures of an earlier run.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: the figures have another form.
        """
        self.lookup_rates.restore(found[LOOKUP_KEY])
        if not self.sources:
            self._lookup_costs.restore(found[PASSES_KEY])
        for source in self.sources:
            if source.name in found:
                source.stopper.restore(found[source.name])


@functools.lru_cache(maxsize=CACHE_SIZE)
def _length(tokens: tuple[float, ...], least: float) -> int:
    """The draft length with the largest expected number of tokens, minus `least` for each drafted token."""
    return max(range(len(tokens)), key=lambda n: tokens[n] - least * n)


def _first(found: SuffixMatch, n: int) -> SuffixMatch:
    return replace(found, tokens=found.tokens[:n])
