"""When to stop drafting: the best policy by dynamic programming, SpecDec++'s theorem, and the greedy oracle (SpecDec++.

Knows: next-token distributions as functions of the context, two costs, recorded agreements. Does not know: tensors of a
batch, stoppers, the engine. Drafts are checked by token verification. A round of a run that has R tokens to go drafts
at most R - 1 candidates, as the engine does, so N_draft + N_target = N + N_discarded holds exactly.
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
    """A run to be made as cheap as possible.

    Attributes:
        p: the target.
        q: the draft model.
        costs: seconds of the two passes; a discarded token costs c1 = draft, a target call c2 = target - draft.
        tokens: how many to emit, N.
        limit: most candidates a round.
        order: how many of the last tokens p and q depend on (they are shown no more); the work is V^(order + limit) N.
        context: what is committed already.

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
                raise UserError(f"a decision problem was given {name}={getattr(self, name)}: legal is {least} or more")

    @property
    def discard_cost(self) -> float:
        """c1, of a drafted token that is not emitted."""
        return self.costs.draft

    @property
    def call_cost(self) -> float:
        """c2, of a target call."""
        return self.costs.target - self.costs.draft

    def seconds(self, cost: float) -> float:
        """Time of the whole run from its cost in the decision process: t_draft N more.

        Source: SpecDec++, arXiv 2405.19715, equation (2.2).
        """
        return self.costs.draft * self.tokens + cost


class State(NamedTuple):
    """A round in the making, as a policy sees it: the next candidate is drawn whatever is decided.

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


Policy = Callable[[State], bool]
"""Whether to stop: the candidates and one more go to the target, otherwise drafting goes on after that one."""


class _Step(NamedTuple):
    """A token that can follow a context: its probabilities, and the least of the two."""

    token: int
    p: float
    q: float
    both: float


class _Ahead(NamedTuple):
    """Expected cost from here on: all of it if the candidates so far are accepted, that of this round if not."""

    accepted: float
    rejected: float


class Values:
    """Expected costs under a policy, solved from the last token back (SpecDec++, arXiv 2405.19715, section 3.1).

    What follows a rejection does not depend on the decisions after it, so a state needs two numbers: its cost if all
    its candidates are accepted and its cost if one is not.

    Args:
        problem: the run.
        policy: decides in every state where both actions are legal; None for the optimal one.
    """

    def __init__(self, problem: Problem, policy: Policy | None = None) -> None:
        self.problem, self._policy = problem, policy
        self._discard, self._call = problem.discard_cost, problem.call_cost
        self._steps = functools.cache(self._read_steps)
        self._loss = functools.cache(self._sum_loss)
        self._start = functools.cache(self._solve_start)
        self._later = functools.cache(self._solve_later)
        self._stop = functools.cache(self._solve_stop)
        self._act = functools.cache(self._solve_act)
        self._levels = self._reachable()
        for left in sorted(self._levels):  # the recursion stays one round deep
            for context in self._levels[left]:
                self._start(context, left)

    @property
    def cost(self) -> float:
        """E[c1 N_discarded + c2 N_target] of the whole run."""
        return self._start(self._seen(self.problem.context), self.problem.tokens)

    def stops(self, state: State) -> bool:
        """The policy's decision; stopping where the limit or the end of the run leaves no choice."""
        if not self.is_open(state):
            return True
        if self._policy is not None:
            return self._policy(state)
        return self._mean(state, stop=True) <= self._mean(state, stop=False)

    def is_open(self, state: State) -> bool:
        """Whether both actions are legal: going on takes room for two more candidates."""
        return len(state.candidates) + 2 <= min(self.problem.limit, state.remaining - 1)

    def open_states(self) -> Iterator[State]:
        """Every state with two legal actions after a prefix the target can emit, visited by the policy or not."""
        waiting = [State(context, (), left) for left, contexts in self._levels.items() for context in contexts]
        while waiting:
            state = waiting.pop()
            if self.is_open(state):
                yield state
                waiting.extend(self._drawn(state, step) for step in self._steps(self._context(state)) if step.q > 0)

    def action_costs(self, state: State) -> tuple[float, float]:
        """E[C(s, stop)] and E[C(s, continue)] given the candidates, the policy being followed afterwards.

        Continuing costs infinity where it is illegal.
        """
        replaced, accepted, context = 0.0, 1.0, state.prefix
        for place, token in enumerate(state.candidates):
            step = next(step for step in self._steps(context) if step.token == token)
            lost = accepted * (1 - step.both / step.q)
            replaced += lost * self._later(context, state.remaining - place, rejected=True) if lost > 0 else 0.0
            accepted, context = accepted - lost, self._seen((*context, token))
        go_on = self._mean(state, stop=False) if self.is_open(state) else math.inf
        return replaced + self._mean(state, stop=True), replaced + go_on

    def gaps(self, state: State) -> list[float]:
        """E[Delta_1 | E_2] and E[Delta_2 | E_3] of SpecDec++, appendix D, given the candidates; none if impossible.

        E_2: Y_1 .. Y_(k+1) are accepted and Y_(k+2) is not. E_3: all of them are. Delta_1 is the cost after stopping
        less the cost after the rejection of Y_(k+2). Delta_2 is the cost after stopping less the cost of the state
        that going on leads to. After stopping the bonus token is drawn from p by itself, as in the proof.

        Args:
            state: one with two legal actions.
        """
        if state.accepted == 0:
            return []
        left, found = state.remaining - len(state.candidates) - 1, [[0.0, 0.0], [0.0, 0.0]]
        for step in self._steps(self._context(state)):
            if step.both > 0:
                following = self._drawn(state, step)
                context = self._context(following)
                refused, stopped = step.both * self._loss(context), self._later(context, left, rejected=False)
                found[0][0] += refused
                found[0][1] += refused * (stopped - self._later(context, left, rejected=True))
                for passed, cost in self._if_accepted(following):
                    found[1][0] += step.both * passed
                    found[1][1] += step.both * passed * (stopped - cost)
        return [total / weight for weight, total in found if weight > 0]

    def _if_accepted(self, state: State) -> Iterator[tuple[float, float]]:
        """Probability of the next candidate being one token, and accepted, and the cost from the state on if so."""
        context, left, stops = self._context(state), state.remaining - len(state.candidates) - 1, self.stops(state)
        for step in self._steps(context):
            if step.both > 0 and stops:
                yield step.both, self._call + self._later(self._seen((*context, step.token)), left, rejected=False)
            elif step.both > 0:
                yield step.both, self._decided(self._drawn(state, step)).accepted

    def _seen(self, tokens: Context) -> Context:
        """What the models see of a context."""
        return tokens[max(len(tokens) - self.problem.order, 0) :]

    def _context(self, state: State) -> Context:
        return self._seen((*state.prefix, *state.candidates))

    def _read_steps(self, context: Context) -> tuple[_Step, ...]:
        rows = zip(self.problem.p(context).double().tolist(), self.problem.q(context).double().tolist(), strict=True)
        return tuple(_Step(token, p, q, min(p, q)) for token, (p, q) in enumerate(rows) if p > 0 or q > 0)

    def _reachable(self) -> dict[int, set[Context]]:
        """The contexts that rounds can begin with, by the number of tokens still to emit."""
        levels = {self.problem.tokens: {self._seen(self.problem.context)}}
        for left in range(self.problem.tokens, 1, -1):
            pairs = [(context, step) for context in levels[left] for step in self._steps(context)]
            levels[left - 1] = {self._seen((*context, step.token)) for context, step in pairs if step.p > 0}
        return levels

    def _sum_loss(self, context: Context) -> float:
        """Pr(the candidate after this context is rejected)."""
        return math.fsum(step.p - step.both for step in self._steps(context))

    def _drawn(self, state: State, step: _Step) -> State:
        accepted = state.accepted * step.both / step.q
        return State(state.prefix, (*state.candidates, step.token), state.remaining, accepted)

    def _solve_start(self, context: Context, left: int) -> float:
        """Cost at the beginning of a round."""
        if left <= 1:
            return left * self._call
        return self._decided(State(context, (), left)).accepted

    def _solve_later(self, context: Context, left: int, *, rejected: bool) -> float:
        """Cost of later rounds when this one ends with a token from p, or from (p - q)+; `left` counts that token."""
        weights = [(step.token, step.p - step.both if rejected else step.p) for step in self._steps(context)]
        total = math.fsum(weight for _, weight in weights)
        costs = (w * self._start(self._seen((*context, token)), left - 1) for token, w in weights if w > 0)
        return math.fsum(costs) / total if total > 0 else 0.0

    def _mean(self, state: State, *, stop: bool) -> float:
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

    def _solve_act(self, state: State, *, stop: bool) -> _Ahead:
        """An action's cost; nothing is said about acceptance where it is impossible."""
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

    def _decided(self, state: State) -> _Ahead:
        return self._act(state, stop=self.stops(state))


class Rates(NamedTuple):
    """Tokens discarded and target calls, each divided by the tokens emitted.

    Source: SpecDec++, arXiv 2405.19715, section 2.
    """

    discard: float
    verification: float


class Best(NamedTuple):
    """The parameter of a family of policies that costs least, and its expected cost."""

    value: float
    cost: float


def fixed_length(length: int) -> Policy:
    """Stop as soon as `length` tokens are submitted; 1 or more."""
    return lambda state: len(state.candidates) + 1 >= length


def acceptance_threshold(h: float) -> Policy:
    """SpecDec++ with the exact acceptance probabilities: stop when 1 - prod P > h (SpecDec++, section 3.2).

    The candidate drawn last is submitted unseen, so that even h = 0 drafts two tokens where there is room.
    """
    return lambda state: 1 - state.accepted > h


def fixed_cost(problem: Problem, length: int) -> float:
    """Expected cost of a constant draft length; 0 is plain decoding, which the decision process itself never does."""
    return Values(problem, fixed_length(length)).cost if length > 0 else problem.call_cost * problem.tokens


def best_fixed(problem: Problem) -> Best:
    """The constant draft length, 0 to `limit`, of least expected cost; the shortest of equals."""
    return min((Best(n, fixed_cost(problem, n)) for n in range(problem.limit + 1)), key=lambda best: best.cost)


def best_threshold(problem: Problem, grid: Iterable[float] = THRESHOLDS) -> Best:
    """The threshold of `acceptance_threshold` with the least expected cost; the first of equals."""
    found = (Best(h, Values(problem, acceptance_threshold(h)).cost) for h in grid)
    return min(found, key=lambda best: best.cost)


def adaptive_gain(problem: Problem) -> float:
    """Fraction of the best constant length's time that the optimal policy saves; below 0 if drafting does not pay."""
    return 1 - problem.seconds(Values(problem).cost) / problem.seconds(best_fixed(problem).cost)


def expected_rates(problem: Problem, policy: Policy) -> Rates:
    """Discard and verification rates of a policy: its costs where only the one or only the other costs anything."""
    discarded = Values(replace(problem, costs=PassCosts(1.0, 1.0)), policy).cost
    calls = Values(replace(problem, costs=PassCosts(0.0, 1.0)), policy).cost
    return Rates(discarded / problem.tokens, calls / problem.tokens)


class Choice(NamedTuple):
    """A state, Pr(a candidate is rejected), and the expected cost of both actions."""

    state: State
    rejected: float
    stop: float
    go_on: float


def choices(values: Values) -> list[Choice]:
    """Every state where both actions are legal, with what they cost when the policy is followed afterwards."""
    return [Choice(state, 1 - state.accepted, *values.action_costs(state)) for state in values.open_states()]


def delta(values: Values) -> float:
    """Delta of SpecDec++, Theorem 3.1: the least bound from 0 up on E[Delta_1 | E_2] and E[Delta_2 | E_3] in any state.

    The proof asks for a bound that holds almost surely (appendix D); `Values.gaps` has the two expectations.
    """
    return max((gap for state in values.open_states() for gap in (0.0, *values.gaps(state))), default=0.0)


def stop_threshold(values: Values) -> float:
    """(c2 + Delta) / (c1 + c2 + Delta): with rejection at least as likely, stopping is never dearer (Theorem 3.1)."""
    bound = values.problem.call_cost + delta(values)
    return bound / (values.problem.discard_cost + bound)


def settled_stops(values: Values) -> list[Choice]:
    """The choices that Theorem 3.1 of SpecDec++ settles: stopping costs no more than going on (it can cost as much)."""
    threshold = stop_threshold(values)
    return [choice for choice in choices(values) if choice.rejected >= threshold]


@dataclass(frozen=True)
class Counts:
    """What one recorded run took.

    Attributes:
        emitted: tokens of the record.
        drafted: candidates drawn.
        target_calls: forward passes of the target.
    """

    emitted: int
    drafted: int
    target_calls: int

    @property
    def discarded(self) -> int:
        """Candidates that were not emitted."""
        return self.drafted + self.target_calls - self.emitted

    def seconds(self, costs: PassCosts) -> float:
        """Time of the run (SpecDec++, arXiv 2405.19715, equation (2.1))."""
        return total_time(costs, self.drafted, self.target_calls)


def fixed_counts(agrees: Sequence[bool], length: int) -> Counts:
    """A greedy run with at most `length` candidates a round (never more than the tokens to go less one).

    Args:
        agrees: by position of the target's greedy output, whether the draft model's greedy token there is the same.
        length: 0 or more; 0 is plain decoding.
    """
    place, drafted, calls = 0, 0, 0
    while place < len(agrees):
        candidates = agrees[place : min(place + length, len(agrees) - 1)]
        accepted = next((i for i, same in enumerate(candidates) if not same), len(candidates))
        place, drafted, calls = place + accepted + 1, drafted + len(candidates), calls + 1
    return Counts(len(agrees), drafted, calls)


def oracle_counts(agrees: Sequence[bool]) -> Counts:
    """A greedy run in which every round stops just before the first disagreement (SpecDec++, Lemma 2.1).

    No sequence of lengths takes less time unless a draft pass takes longer than a target pass. The lemma's |S| + 1
    calls are |S| when the last token disagrees: the call that emits it ends the run. Arguments as for `fixed_counts`.
    """
    calls = sum(not same for same in agrees) + (len(agrees) > 0 and agrees[-1])
    return Counts(len(agrees), len(agrees) - calls, calls)
