"""When to stop drafting: the optimal policy, the theorem of SpecDec++ (arXiv 2405.19715), and the greedy oracle.

The optimal policy is found by dynamic programming, on models that are functions from the context to a distribution.
Drafts are checked by token verification. With R tokens still to emit, a round drafts at most R - 1 candidates, as the
engine does, so N_draft + N_target = N + N_discarded holds exactly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from draftproof.errors import UserError
from draftproof.theory.cost import PassCosts, total_time
from draftproof.theory.lengths import Context, Model

THRESHOLDS = tuple(i / 20 for i in range(21))


@dataclass(frozen=True)
class Problem:
    """A run whose expected cost is to be minimised.

    Attributes:
        p: the target.
        q: the draft model.
        costs: seconds of the two passes; a discarded token costs c1 = draft, a target call costs c2 = target - draft.
        tokens: N, the number of tokens to emit.
        limit: largest number of candidates in a round.
        order: number of last tokens that p and q depend on and get; the work is V^(order + limit) N.
        context: the committed tokens.

    Raises:
        UserError: a number is out of range.
    """

    p: Model
    q: Model
    costs: PassCosts
    tokens: int
    limit: int
    order: int
    context: Context = ()

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("limit", 1), ("order", 0)):
            if getattr(self, name) < least:
                raise UserError(f"{name} of a decision problem: expected {least} or more, got {getattr(self, name)}")

    @property
    def discard_cost(self) -> float:
        """c1, the cost of a drafted token that is not emitted."""
        return self.costs.draft

    @property
    def call_cost(self) -> float:
        """c2, the cost of a target call."""
        return self.costs.target - self.costs.draft

    def seconds(self, cost: float) -> float:
        """Seconds of the whole run, from its cost in the decision process: the cost and t_draft N.

        Source: SpecDec++, arXiv 2405.19715, equation (2.2).
        """
        return self.costs.draft * self.tokens + cost


class RoundState(NamedTuple):
    """The state of an unfinished round, for a policy; the next candidate is drawn in any case.

    Attributes:
        prefix: the last `order` tokens committed before the round.
        candidates: Y_1 .. Y_k, drawn from q.
        remaining: tokens still to emit when the round began.
        accepted: Pr(all candidates are accepted | candidates) = prod min(1, p/q).
    """

    prefix: Context
    candidates: Context
    remaining: int
    accepted: float = 1.0


Policy = Callable[[RoundState], bool]
"""Whether to stop: then the target gets the candidates and one more; otherwise drafting continues after that one."""


class _Step(NamedTuple):
    """A token that can follow a context, with its two probabilities and their minimum."""

    token: int
    p: float
    q: float
    both: float


class _Ahead(NamedTuple):
    """Expected cost from a state on: of all rounds if the candidates so far are accepted, of this round if not."""

    accepted: float
    rejected: float


class Values:
    """Expected costs under a policy, solved from the last token back (SpecDec++, arXiv 2405.19715, section 3.1).

    The rounds after a rejection do not depend on decisions made after the rejected candidate. So two numbers are enough
    for a state: its cost if all its candidates are accepted, and its cost if one is not.

    Args:
        problem: the run.
        policy: decides in every state where both actions are legal; None for the optimal policy.
    """

    def __init__(self, problem: Problem, policy: Policy | None = None) -> None:
        self.problem = problem
        self._policy = policy
        self._discard = problem.discard_cost
        self._call = problem.call_cost
        self._steps = functools.cache(self._read_steps)
        self._loss = functools.cache(self._sum_loss)
        self._start = functools.cache(self._solve_start)
        self._later = functools.cache(self._solve_later)
        self._stop = functools.cache(self._solve_stop)
        self._act = functools.cache(self._solve_act)
        self._levels = self._reachable()
        for left in sorted(self._levels):  # in this order, the recursion is only one round deep
            for context in self._levels[left]:
                self._start(context, left)

    @property
    def cost(self) -> float:
        """E[c1 N_discarded + c2 N_target] of the whole run."""
        return self._start(self._seen(self.problem.context), self.problem.tokens)

    def stops(self, state: RoundState) -> bool:
        """The policy's decision; true where the limit or the end of the run forces the round to stop."""
        if not self.is_open(state):
            return True
        if self._policy is not None:
            return self._policy(state)
        return self._mean(state, stop=True) <= self._mean(state, stop=False)

    def is_open(self, state: RoundState) -> bool:
        """Whether both actions are legal: continuing needs space for two more candidates."""
        return len(state.candidates) + 2 <= min(self.problem.limit, state.remaining - 1)

    def open_states(self) -> Iterator[RoundState]:
        """Every state with two legal actions after a prefix that the target can emit, also those the policy avoids."""
        waiting = [RoundState(context, (), left) for left, contexts in self._levels.items() for context in contexts]
        while waiting:
            state = waiting.pop()
            if self.is_open(state):
                yield state
                waiting.extend(self._drawn(state, step) for step in self._steps(self._context(state)) if step.q > 0)

    def action_costs(self, state: RoundState) -> tuple[float, float]:
        """E[C(s, stop)] and E[C(s, continue)] given the candidates, when the policy is followed afterwards.

        The second is infinite where continuing is illegal.
        """
        replaced, accepted, context = 0.0, 1.0, state.prefix
        for place, token in enumerate(state.candidates):
            step = next(step for step in self._steps(context) if step.token == token)
            lost = accepted * (1 - step.both / step.q)
            replaced += lost * self._later(context, state.remaining - place, rejected=True) if lost > 0 else 0.0
            accepted, context = accepted - lost, self._seen((*context, token))
        go_on = self._mean(state, stop=False) if self.is_open(state) else math.inf
        return replaced + self._mean(state, stop=True), replaced + go_on

    def gaps(self, state: RoundState) -> list[float]:
        """E[Delta_1 | E_2] and E[Delta_2 | E_3] given the candidates; an expectation is left out if it is undefined.

        E_2: Y_1 .. Y_(k+1) are accepted and Y_(k+2) is not. E_3: all of them are accepted. Delta_1 is the cost after
        stopping minus the cost after the rejection of Y_(k+2). Delta_2 is the cost after stopping minus the cost of the
        state after continuing. After stopping, the bonus token is drawn from p independently, as in the proof.

        Args:
            state: a state with two legal actions.

        Source: SpecDec++, arXiv 2405.19715, appendix D.
        """
        if state.accepted == 0:
            return []
        left, found = state.remaining - len(state.candidates) - 1, [[0.0, 0.0], [0.0, 0.0]]
        for step in self._steps(self._context(state)):
            if step.both > 0:
                following = self._drawn(state, step)
                context = self._context(following)
                rejected, stopped = step.both * self._loss(context), self._later(context, left, rejected=False)
                found[0][0] += rejected
                found[0][1] += rejected * (stopped - self._later(context, left, rejected=True))
                for passed, cost in self._if_accepted(following):
                    found[1][0] += step.both * passed
                    found[1][1] += step.both * passed * (stopped - cost)
        return [total / weight for weight, total in found if weight > 0]

    def _if_accepted(self, state: RoundState) -> Iterator[tuple[float, float]]:
        """For each token: Pr(it is the next candidate and accepted), and the cost from the state on in this case."""
        context, left, stops = self._context(state), state.remaining - len(state.candidates) - 1, self.stops(state)
        for step in self._steps(context):
            if step.both > 0 and stops:
                yield step.both, self._call + self._later(self._seen((*context, step.token)), left, rejected=False)
            elif step.both > 0:
                yield step.both, self._decided(self._drawn(state, step)).accepted

    def _seen(self, tokens: Context) -> Context:
        """The part of a context that the models depend on."""
        return tokens[max(len(tokens) - self.problem.order, 0) :]

    def _context(self, state: RoundState) -> Context:
        return self._seen((*state.prefix, *state.candidates))

    def _read_steps(self, context: Context) -> tuple[_Step, ...]:
        rows = zip(self.problem.p(context).double().tolist(), self.problem.q(context).double().tolist(), strict=True)
        return tuple(_Step(token, p, q, min(p, q)) for token, (p, q) in enumerate(rows) if p > 0 or q > 0)

    def _reachable(self) -> dict[int, set[Context]]:
        """The contexts at which a round can begin, by the number of tokens still to emit."""
        levels = {self.problem.tokens: {self._seen(self.problem.context)}}
        for left in range(self.problem.tokens, 1, -1):
            pairs = [(context, step) for context in levels[left] for step in self._steps(context)]
            levels[left - 1] = {self._seen((*context, step.token)) for context, step in pairs if step.p > 0}
        return levels

    def _sum_loss(self, context: Context) -> float:
        """Pr(the candidate after this context is rejected)."""
        return math.fsum(step.p - step.both for step in self._steps(context))

    def _drawn(self, state: RoundState, step: _Step) -> RoundState:
        accepted = state.accepted * step.both / step.q
        return RoundState(state.prefix, (*state.candidates, step.token), state.remaining, accepted)

    def _solve_start(self, context: Context, left: int) -> float:
        """Cost at the beginning of a round."""
        if left <= 1:
            return left * self._call
        return self._decided(RoundState(context, (), left)).accepted

    def _solve_later(self, context: Context, left: int, *, rejected: bool) -> float:
        """Cost of later rounds when this one ends with a token from p, or from (p - q)+; `left` counts that token."""
        weights = [(step.token, step.p - step.both if rejected else step.p) for step in self._steps(context)]
        total = math.fsum(weight for _, weight in weights)
        costs = (w * self._start(self._seen((*context, token)), left - 1) for token, w in weights if w > 0)
        return math.fsum(costs) / total if total > 0 else 0.0

    def _mean(self, state: RoundState, *, stop: bool) -> float:
        ahead = self._act(state, stop=stop)
        return state.accepted * ahead.accepted + (1 - state.accepted) * ahead.rejected

    def _solve_stop(self, context: Context, left: int) -> float:
        """Cost of stopping if the candidates so far are accepted; `left` counts the next one."""
        total = self._call
        for step in self._steps(context):
            if step.both > 0:
                total += step.both * self._later(self._seen((*context, step.token)), left - 1, rejected=False)
        return total + self._if_rejected(context, left)

    def _if_rejected(self, context: Context, left: int) -> float:
        """Pr(the next candidate is rejected) times its cost and that of later rounds."""
        loss = self._loss(context)
        return loss * (self._discard + self._later(context, left, rejected=True)) if loss > 0 else 0.0

    def _solve_act(self, state: RoundState, *, stop: bool) -> _Ahead:
        """The cost of an action; `accepted` is 0 where the candidates cannot be accepted."""
        context, left = self._context(state), state.remaining - len(state.candidates)
        possible = state.accepted > 0
        if stop:
            return _Ahead(self._stop(context, left) if possible else 0.0, self._discard + self._call)
        accepted, rejected = self._if_rejected(context, left) if possible else 0.0, self._discard
        for step in self._steps(context):
            if step.q > 0:
                ahead = self._decided(self._drawn(state, step))
                accepted += step.both * ahead.accepted + (step.q - step.both) * ahead.rejected
                rejected += step.q * ahead.rejected
        return _Ahead(accepted, rejected)

    def _decided(self, state: RoundState) -> _Ahead:
        return self._act(state, stop=self.stops(state))


class Rates(NamedTuple):
    """Discarded tokens and target calls, each divided by the number of emitted tokens (SpecDec++, section 2)."""

    discard: float
    verification: float


class Best(NamedTuple):
    """The parameter with the least expected cost in a family of policies, and this cost."""

    value: float
    cost: float


def fixed_length(length: int) -> Policy:
    """The policy that always drafts `length` tokens; 1 or more."""
    return lambda state: len(state.candidates) + 1 >= length


def acceptance_threshold(h: float) -> Policy:
    """The policy of SpecDec++ with the exact acceptance probabilities: stop when 1 - prod P > h.

    The next candidate is verified in any case and is not part of the product, so even h = 0 drafts two tokens if two
    fit.

    Source: SpecDec++, arXiv 2405.19715, section 3.2.
    """
    return lambda state: 1 - state.accepted > h


def fixed_cost(problem: Problem, length: int) -> float:
    """Expected cost of a constant draft length; 0 is plain decoding, which is no policy of the decision process."""
    return Values(problem, fixed_length(length)).cost if length > 0 else problem.call_cost * problem.tokens


def best_fixed(problem: Problem) -> Best:
    """The constant draft length, 0 to `limit`, with the least expected cost; the shortest of equals."""
    return min((Best(n, fixed_cost(problem, n)) for n in range(problem.limit + 1)), key=lambda best: best.cost)


def best_threshold(problem: Problem, grid: Iterable[float] = THRESHOLDS) -> Best:
    """The threshold of `acceptance_threshold` with the least expected cost; the first of equals."""
    found = (Best(h, Values(problem, acceptance_threshold(h)).cost) for h in grid)
    return min(found, key=lambda best: best.cost)


def adaptive_gain(problem: Problem) -> float:
    """Share of the best constant length's time that the optimal policy saves; negative if drafting does not pay."""
    return 1 - problem.seconds(Values(problem).cost) / problem.seconds(best_fixed(problem).cost)


def expected_rates(problem: Problem, policy: Policy) -> Rates:
    """Discard rate and verification rate of a policy: its costs when only discarding, or only calls, have a cost."""
    discarded = Values(replace(problem, costs=PassCosts(1.0, 1.0)), policy).cost
    calls = Values(replace(problem, costs=PassCosts(0.0, 1.0)), policy).cost
    return Rates(discarded / problem.tokens, calls / problem.tokens)


class Choice(NamedTuple):
    """A state, Pr(a candidate is rejected), and the expected costs of both actions."""

    state: RoundState
    rejected: float
    stop: float
    go_on: float


def choices(values: Values) -> list[Choice]:
    """Every state where both actions are legal, with their costs when the policy is followed afterwards."""
    return [Choice(state, 1 - state.accepted, *values.action_costs(state)) for state in values.open_states()]


def delta(values: Values) -> float:
    """The smallest Delta >= 0 that bounds E[Delta_1 | E_2] and E[Delta_2 | E_3] in every state; see `Values.gaps`.

    The proof requires a bound that holds almost surely (appendix D).

    Source: SpecDec++, arXiv 2405.19715, Theorem 3.1.
    """
    return max((gap for state in values.open_states() for gap in (0.0, *values.gaps(state))), default=0.0)


def stop_threshold(values: Values) -> float:
    """(c2 + Delta) / (c1 + c2 + Delta): where rejection is this likely or more, stopping costs no more than continuing.

    Source: SpecDec++, arXiv 2405.19715, Theorem 3.1.
    """
    bound = values.problem.call_cost + delta(values)
    return bound / (values.problem.discard_cost + bound)


def settled_stops(values: Values) -> list[Choice]:
    """The choices where stopping costs no more than continuing, by Theorem 3.1 of SpecDec++, arXiv 2405.19715."""
    threshold = stop_threshold(values)
    return [choice for choice in choices(values) if choice.rejected >= threshold]


@dataclass(frozen=True)
class Counts:
    """Counts of one recorded run: tokens emitted, candidates drawn, forward passes of the target."""

    emitted: int
    drafted: int
    target_calls: int

    @property
    def discarded(self) -> int:
        """Number of candidates that were not emitted."""
        return self.drafted + self.target_calls - self.emitted

    def seconds(self, costs: PassCosts) -> float:
        """Seconds of the run (SpecDec++, arXiv 2405.19715, equation (2.1))."""
        return total_time(costs, self.drafted, self.target_calls)


def fixed_counts(agrees: Sequence[bool], length: int) -> Counts:
    """Counts of a greedy run with `length` candidates per round, but less than the number of tokens still to emit.

    Args:
        agrees: for each position of the target's greedy output, whether the draft model's greedy token is the same.
        length: 0 or more; 0 is plain decoding.
    """
    place, drafted, calls = 0, 0, 0
    while place < len(agrees):
        candidates = agrees[place : min(place + length, len(agrees) - 1)]
        accepted = next((i for i, same in enumerate(candidates) if not same), len(candidates))
        place, drafted, calls = place + accepted + 1, drafted + len(candidates), calls + 1
    return Counts(len(agrees), drafted, calls)


def oracle_counts(agrees: Sequence[bool]) -> Counts:
    """Counts of a greedy run in which every round stops just before the first disagreement.

    Unless a draft pass takes longer than a target pass, no other sequence of lengths takes less time. The source counts
    |S| + 1 target calls, where S is the set of disagreements. When the last token disagrees, there are only |S| calls:
    the call that emits this token ends the run. Arguments as for `fixed_counts`.

    Source: SpecDec++, arXiv 2405.19715, Lemma 2.1.
    """
    calls = sum(not same for same in agrees) + (len(agrees) > 0 and agrees[-1])
    return Counts(len(agrees), len(agrees) - calls, calls)
