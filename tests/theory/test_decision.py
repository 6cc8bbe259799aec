"""SpecDec++'s stopping problem: against forward enumeration, all policies, Leviathan's formula, and its theorem."""

import dataclasses
import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof.errors import UserError
from draftproof.theory import cost, decision, lengths
from support.distributions import KINDS, Toy

EXACT = 1e-9


def _problem(seed, *, kind="dense", vocab=2, order=1, tokens=5, limit=3, target=5.0, near=0.0):
    """near: how much of p is mixed into q."""
    toy = Toy.random(seed, kind=kind, vocab=vocab, depth=order, order=order)
    q = (lambda c: near * toy.p(c) + (1 - near) * toy.q(c)) if near else toy.q
    return decision.Problem(toy.p, q, cost.PassCosts(1.0, target), tokens, limit, order)


def _arbitrary(state):
    return (sum(state.candidates) + len(state.candidates) + state.remaining) % 3 == 0


def _policies(problem):
    yield decision.Values(problem).stops
    yield _arbitrary
    yield from (decision.fixed_length(n) for n in (1, 2, 9))
    yield from (decision.acceptance_threshold(h) for h in (0.0, 0.3, 0.8))


def _iid(alpha, target, tokens, limit):
    """Every candidate is token 0 and is accepted with probability alpha."""
    toy = Toy.constant([alpha, 1 - alpha], [1.0, 0.0])
    return decision.Problem(toy.p, toy.q, cost.PassCosts(1.0, target), tokens, limit, order=0)


def _drafts(problem, policy, prefix, candidates, state):
    """The drafts of a round, with their probabilities."""
    if len(candidates) == min(problem.limit, state.remaining - 1):
        yield candidates, 1.0
        return
    context, stop = (*prefix, *candidates), policy(state)
    for token, (p, q) in enumerate(zip(problem.p(context).tolist(), problem.q(context).tolist(), strict=True)):
        longer = (*candidates, token)
        if q > 0 and stop:
            yield longer, q
        elif q > 0:
            after = state._replace(candidates=longer, accepted=state.accepted * min(1.0, p / q))
            yield from ((found, q * weight) for found, weight in _drafts(problem, policy, prefix, longer, after))


def _outcomes(problem, prefix, candidates):
    """The outcomes of token verification: number of accepted candidates, the token after them, probability."""
    reached = 1.0
    for i, token in enumerate(candidates):
        p, q = problem.p((*prefix, *candidates[:i])), problem.q((*prefix, *candidates[:i]))
        rest, rejected = (p - q).clamp(min=0).tolist(), reached * (1 - min(1.0, float(p[token] / q[token])))
        if rejected > 0:
            yield from ((i, w, rejected * weight / sum(rest)) for w, weight in enumerate(rest) if weight > 0)
        reached -= rejected
    p = problem.p((*prefix, *candidates)).tolist()
    yield from ((len(candidates), w, reached * weight) for w, weight in enumerate(p) if reached * weight > 0)


def _played(problem, policy):
    """E[drafted, target calls, discarded], by forward enumeration with whole prefixes."""

    @functools.cache
    def run(prefix, left):
        total = [0.0, 0.0, 0.0]
        root = decision.RoundState(prefix[max(len(prefix) - problem.order, 0) :], (), left)
        for candidates, weight in _drafts(problem, policy, prefix, (), root) if left else ():
            for accepted, token, chance in _outcomes(problem, prefix, candidates):
                later = run((*prefix, *candidates[:accepted], token), left - accepted - 1)
                now = (len(candidates), 1, len(candidates) - accepted)
                total = [t + weight * chance * (a + b) for t, a, b in zip(total, now, later, strict=True)]
        return total

    return run(problem.context, problem.tokens)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    kind=st.sampled_from(KINDS),
    shape=st.sampled_from([(2, 0, 5, 4), (2, 1, 5, 3), (2, 2, 4, 2), (3, 1, 4, 3), (3, 0, 1, 2)]),
    target=st.sampled_from([0.5, 2.0, 20.0]),
)
def test_costs_equal_a_forward_enumeration(seed, kind, shape, target):
    vocab, order, tokens, limit = shape
    problem = _problem(seed, kind=kind, vocab=vocab, order=order, tokens=tokens, limit=limit, target=target)
    for policy in _policies(problem):
        drafted, calls, discarded = _played(problem, policy)
        assert drafted + calls == pytest.approx(tokens + discarded, abs=EXACT)
        expected = problem.costs.draft * drafted + problem.costs.target * calls
        assert problem.seconds(decision.Values(problem, policy).cost) == pytest.approx(expected, abs=EXACT)
        rates = decision.expected_rates(problem, policy)
        assert rates == pytest.approx((discarded / tokens, calls / tokens), abs=EXACT)
        assert cost.latency(problem.costs, *rates) == pytest.approx(expected / tokens, abs=EXACT)


@pytest.mark.parametrize(("order", "tokens", "limit"), [(0, 5, 3), (1, 4, 3), (0, 4, 9)])
@pytest.mark.parametrize("target", [2.0, 8.0])
def test_no_policy_is_cheaper_than_the_optimal_one(order, tokens, limit, target):
    problem = _problem(7, order=order, tokens=tokens, limit=limit, target=target)
    optimal = decision.Values(problem)
    states = list(optimal.open_states())
    tables = (dict(zip(states, acts, strict=True)) for acts in itertools.product([True, False], repeat=len(states)))
    costs = [decision.Values(problem, table.__getitem__).cost for table in tables]
    assert len(set(costs)) > 1
    assert optimal.cost == pytest.approx(min(costs), abs=EXACT)
    assert decision.Values(problem, optimal.stops).cost == pytest.approx(optimal.cost, abs=EXACT)


@pytest.mark.parametrize("kind", ["dense", "sparse", "peaked"])
def test_action_costs_follow_the_process_as_printed(kind):
    problem = _problem(3, kind=kind, vocab=3)
    for policy in _policies(problem):
        values = decision.Values(problem, policy)
        for state in values.open_states():
            context = (*state.prefix, *state.candidates)[-1:]
            drawn, continued = 0.0, 0.0
            for token, (p, q) in enumerate(zip(problem.p(context).tolist(), problem.q(context).tolist(), strict=True)):
                drawn += min(p, q)
                accepted = state.accepted * min(p, q) / q if q > 0 else 0.0
                following = state._replace(candidates=(*state.candidates, token), accepted=accepted)
                if q > 0:
                    continued += q * values.action_costs(following)[0 if values.stops(following) else 1]
            rejected = 1 - state.accepted * drawn
            _, go_on = values.action_costs(state)
            assert go_on == pytest.approx(rejected * problem.discard_cost + continued, abs=EXACT)


def test_the_gain_of_adaptive_drafting():
    gains = []
    for seed in range(4):
        target = (3.0, 10.0)[seed % 2]
        problem = _problem(seed, kind="peaked", vocab=3, tokens=7, limit=4, target=target, near=0.6)
        optimal, fixed = decision.Values(problem).cost, [decision.fixed_cost(problem, n) for n in range(5)]
        grid = {h: decision.Values(problem, decision.acceptance_threshold(h)).cost for h in (0.0, 0.2, 0.4, 0.8)}
        best = decision.best_threshold(problem, grid)
        assert best == (min(grid, key=grid.__getitem__), min(grid.values()))
        assert fixed[0] == pytest.approx(problem.call_cost * problem.tokens)
        assert decision.best_fixed(problem) == (fixed.index(min(fixed)), min(fixed))
        assert optimal <= min(*fixed[1:], best.cost) + EXACT
        gains.append(decision.adaptive_gain(problem))
        assert gains[-1] == pytest.approx(1 - problem.seconds(optimal) / problem.seconds(min(fixed)))
    assert min(gains) >= 0
    assert max(gains) > 0.01


def test_thresholds_at_their_ends():
    problem = _problem(2, limit=4, tokens=7)
    costs = [decision.fixed_cost(problem, n) for n in range(5)]
    assert decision.Values(problem, decision.acceptance_threshold(1.0)).cost == costs[4]
    assert decision.Values(problem, decision.acceptance_threshold(-1.0)).cost == costs[1]
    root = decision.RoundState((), (), 7)
    assert not decision.acceptance_threshold(0.0)(root), "there is no prediction for the first token"


def _theorem_cases():
    shapes = [(2, 1, 6, 4), (3, 1, 5, 4), (2, 0, 7, 5), (3, 2, 5, 3), (4, 0, 5, 4)]
    cases = itertools.product(shapes, ("dense", "peaked", "sparse"), (1.2, 4.0, 15.0))
    for seed, ((vocab, order, tokens, limit), kind, target) in enumerate(cases):
        problem = _problem(seed, kind=kind, vocab=vocab, order=order, tokens=tokens, limit=limit, target=target)
        yield from ((problem, policy) for policy in itertools.islice(_policies(problem), seed % 4, None, 4))


def test_theorem_3_1():
    uncertain = refuted = 0
    for problem, policy in _theorem_cases():
        values = decision.Values(problem, policy)
        for choice in decision.settled_stops(values):
            assert choice.stop <= choice.go_on + EXACT, choice
            uncertain += choice.rejected < 1
        half = decision.stop_threshold(values) / 2
        refuted += any(c.rejected >= half and c.go_on < c.stop - EXACT for c in decision.choices(values))
    assert uncertain > 100, "the condition held for certain rejections only"
    assert refuted > 5, "the theorem also holds with half the threshold"


def test_delta_is_that_of_the_proof_of_theorem_3_1():
    """Where the policy stops directly after continuing, the proof's inequality is an equality."""
    for seed, (order, vocab) in itertools.product(range(4), [(0, 2), (1, 2), (1, 3)]):
        problem = _problem(seed, vocab=vocab, order=order, tokens=6, limit=4)
        values = decision.Values(problem, decision.fixed_length(1))
        c1, c2, delta = problem.discard_cost, problem.call_cost, decision.delta(values)
        for state in values.open_states():
            passed = rejected = 0.0
            for first, second in itertools.product(range(vocab), repeat=2):
                context = (*state.prefix, *state.candidates)
                both = torch.minimum(problem.p(context), problem.q(context))[first] * state.accepted
                p, q = problem.p((*context, first)), problem.q((*context, first))
                passed += float(both * torch.minimum(p, q)[second])
                rejected += float(both * (q - torch.minimum(p, q))[second])
            gap_1, gap_2 = values.gaps(state)
            stop, go_on = values.action_costs(state)
            bound = (1 - passed - rejected) * c1 + rejected * (c1 - gap_1) - passed * (c2 + gap_2)
            assert go_on - stop == pytest.approx(bound, abs=EXACT)
            assert max(gap_1, gap_2) <= delta


def _doubtful_first_token(kept, tokens):
    """Every candidate but the first is accepted for certain; c1 = c2 = 1."""
    p, q, later = (torch.tensor(row).double() for row in ([kept, 1 - kept], [1.0, 0.0], [0.0, 1.0]))
    models = (lambda c: later if c else p), (lambda c: later if c else q)
    return decision.Problem(*models, cost.PassCosts(1.0, 2.0), tokens, limit=tokens, order=1)


@pytest.mark.parametrize(("kept", "sign"), [(0.45, 1), (0.5, 0), (0.55, -1)])
def test_theorem_3_1_cannot_be_improved(kept, sign):
    """Only the first token can be rejected: Delta is 0, and at the threshold both actions cost the same."""
    values = decision.Values(_doubtful_first_token(kept, tokens=4))
    (choice,) = [c for c in decision.choices(values) if c.state.remaining == 4 and c.state.candidates]
    assert decision.delta(values) == 0
    assert decision.stop_threshold(values) == pytest.approx(0.5)
    assert choice.rejected == pytest.approx(1 - kept)
    assert choice.go_on - choice.stop == pytest.approx((1 - kept) - kept)
    assert (choice.go_on > choice.stop) - (choice.go_on < choice.stop) == sign
    assert (choice in decision.settled_stops(values)) == (sign >= 0)


def test_theorem_3_1_needs_its_delta():
    """A policy that needs extra target calls when 5 tokens remain and none when 4 remain: continuing avoids the 5."""
    values = decision.Values(
        _doubtful_first_token(0.5, tokens=8),
        lambda state: len(state.candidates) + 1 >= {8: 3, 4: 3}.get(state.remaining, 1),
    )
    (choice,) = [c for c in decision.choices(values) if c.state.remaining == 8 and c.state.candidates == (0,)]
    assert decision.delta(values) == pytest.approx(1)
    assert 0.5 <= choice.rejected < decision.stop_threshold(values)
    assert choice.go_on == pytest.approx(choice.stop - 0.5)


def _end_effect(problem, n, per_token):
    """Largest difference between a run of constant length n and N times the time per token of an infinite run.

    The run can take longer, by up to n unused tokens in the last round. It can take less time, because drafts get
    shorter within n tokens of the end.
    """
    return EXACT + max(n * per_token, problem.costs.draft * n * (n + 1) / 2)


@pytest.mark.parametrize("target", [2.0, 5.0, 12.0])
@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.6, 0.8])
def test_a_long_run_without_contexts_has_leviathans_length(alpha, target):
    tokens, limit = 60, 7
    problem = _iid(alpha, target, tokens, limit)
    rate = [cost.time_per_token(problem.costs, n, lengths.iid_block_efficiency(alpha, n)) for n in range(limit + 1)]
    for n, exact in enumerate(rate):
        assert abs(problem.seconds(decision.fixed_cost(problem, n)) - tokens * exact) <= _end_effect(problem, n, exact)
    found, best = int(decision.best_fixed(problem).value), cost.best_iid_length(problem.costs, alpha, limit)
    tie = alpha == 0.5 and target != 2.0  # lengths 1 and 2, 2 and 3: the longer one wins at the end of the run
    assert found == best + tie
    assert rate[found] == pytest.approx(rate[best])


@pytest.mark.parametrize(("tokens", "length"), [(10, 2), (50, 2), (200, 1)])
def test_near_a_tie_the_end_of_a_short_run_decides(tokens, length):
    problem = _iid(0.5, 4.99, tokens, limit=4)
    assert cost.best_iid_length(problem.costs, 0.5) == 1
    assert decision.best_fixed(problem).value == length


def test_only_the_overlap_matters_to_constant_lengths_without_contexts():
    toy = Toy.constant([0.5, 0.2, 0.3], [0.2, 0.5, 0.3])
    problem = _iid(0.7, 6.0, 7, 4)
    other = decision.Problem(toy.p, toy.q, problem.costs, 7, 4, order=0)
    for n in range(5):
        assert decision.fixed_cost(other, n) == pytest.approx(decision.fixed_cost(problem, n))
    assert decision.Values(other).cost < decision.Values(problem).cost - 0.01, "the policy can use the candidates"


@pytest.mark.parametrize(("name", "value"), [("tokens", 0), ("limit", 0), ("order", -1)])
def test_impossible_problems_are_refused(name, value):
    problem = _problem(0)
    with pytest.raises(UserError, match=rf"{name} of a decision problem: expected \d or more, got {value}"):
        dataclasses.replace(problem, **{name: value})


def _simulated(agrees, plan):
    """[drafted, calls, discarded] of a greedy run with the draft lengths of `plan`; None if the plan is too long."""
    target = list(range(len(agrees)))
    draft = [token if same else -1 for token, same in zip(target, agrees, strict=True)]
    emitted, counts = [], [0, 0, 0]
    for length in plan:
        place = len(emitted)
        candidates = draft[place : place + length]
        if len(candidates) < length or place + length >= len(target):
            return None
        kept = list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(candidates, target[place:], strict=False)))
        emitted += target[place : place + len(kept) + 1]
        counts = [counts[0] + length, counts[1] + 1, counts[2] + length - len(kept)]
    return counts if emitted == target else None


RECORDS = [agrees for size in range(6) for agrees in itertools.product([True, False], repeat=size)]


def test_no_lengths_are_cheaper_than_the_oracle():
    for agrees in RECORDS:
        size = len(agrees)
        plans = [plan for rounds in range(size + 1) for plan in itertools.product(range(size), repeat=rounds)]
        runs = [counts for plan in plans if (counts := _simulated(agrees, plan)) is not None]
        oracle = decision.oracle_counts(agrees)
        assert [oracle.drafted, oracle.target_calls, oracle.discarded] in runs
        assert oracle.discarded == 0
        for target in (1.0, 1.5, 4.0, 30.0):
            costs = cost.PassCosts(1.0, target)
            assert oracle.seconds(costs) == min(drafted + target * calls for drafted, calls, _ in runs)


def test_the_oracle_counts_of_lemma_2_1():
    for agrees in RECORDS[1:]:
        oracle, disagreements = decision.oracle_counts(agrees), agrees.count(False)
        assert oracle.emitted == oracle.drafted + oracle.target_calls == len(agrees)
        assert oracle.target_calls == disagreements + agrees[-1]  # the lemma has + 1
    assert decision.oracle_counts([False] * 3) == decision.Counts(3, 0, 3)
    assert decision.oracle_counts([True] * 3) == decision.Counts(3, 2, 1)
    assert decision.oracle_counts([]) == decision.Counts(0, 0, 0)
    slow = cost.PassCosts(2.0, 1.0)
    assert decision.fixed_counts([True] * 3, 0).seconds(slow) < decision.oracle_counts([True] * 3).seconds(slow)


def test_constant_lengths_on_a_record():
    for agrees, length in itertools.product(RECORDS, range(5)):
        plan, place = [], 0
        while place < len(agrees):
            plan.append(min(length, len(agrees) - place - 1))
            wrong = [i for i in range(place, place + plan[-1]) if not agrees[i]]
            place = (wrong[0] if wrong else place + plan[-1]) + 1
        counts = decision.fixed_counts(agrees, length)
        assert [counts.drafted, counts.target_calls, counts.discarded] == _simulated(agrees, plan)
        assert counts.seconds(cost.PassCosts(1.0, 7.0)) == counts.drafted + 7 * counts.target_calls
    assert decision.fixed_counts([True, False, True, True], 2) == decision.Counts(4, 3, 2)
