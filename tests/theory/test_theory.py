"""Closed forms against each other, against enumeration and the linear program, and the papers' own examples."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof.audit.distributions import as_paths
from draftproof.functional import block_verify, greedy_block_verify, match_verify, otm_plan, token_verify
from draftproof.theory import acceptance, cost, lengths, sprinter
from support.distributions import Toy, rule_length


def _pairs(count, vocab, seed=0, power=3.0):
    gen = torch.Generator().manual_seed(seed)
    p, q = torch.rand(2, count, vocab, generator=gen, dtype=torch.float64).pow(power)
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_formula_equals_the_linear_program(k):
    p, q = _pairs(8, 5, seed=k)
    p[0, 0] = 0
    p[0] /= p[0].sum()
    q[1, :2] = 0
    q[1] /= q[1].sum()
    best = acceptance.optimal_acceptance(p, q, k)
    for row in range(8):
        assert float(best[row]) == pytest.approx(otm_plan(p[row], q[row], k).value, abs=1e-9)


def test_acceptances_are_ordered():
    p, q = _pairs(300, 12)
    for k in (1, 2, 4, 8):
        best, kseq = acceptance.optimal_acceptance(p, q, k), acceptance.kseq_acceptance(p, q, k)
        assert (kseq <= best + 1e-12).all()
        assert (kseq >= acceptance.kseq_guarantee(k) * best - 1e-12).all()
        assert (acceptance.multi_round_acceptance(p, q, k) <= best + 1e-12).all()
        assert (best <= acceptance.union_bound(p, q, k) + 1e-12).all()
        assert 1 - 1 / math.e < acceptance.kseq_guarantee(k)
    one = acceptance.token_acceptance(p, q)
    for rule in (acceptance.optimal_acceptance, acceptance.kseq_acceptance, acceptance.multi_round_acceptance):
        assert torch.allclose(rule(p, q, 1), one, atol=1e-12)
    assert (acceptance.match_acceptance(p, q) <= one).all()


def test_theorem_1_bounds_for_every_subset():
    p, q = _pairs(3, 4, seed=5)
    for row, k in itertools.product(range(3), (1, 2, 3)):
        best = float(acceptance.optimal_acceptance(p[row : row + 1], q[row : row + 1], k))
        subsets = [s for size in range(5) for s in itertools.combinations(range(4), size)]
        bounds = {s: acceptance.subset_bound(p[row], q[row], k, s) for s in subsets}
        assert min(bounds.values()) >= best - 1e-12
        whole = float(acceptance.union_bound(p[row : row + 1], q[row : row + 1], k))
        assert bounds[0, 1, 2, 3] == pytest.approx(whole)
        if k == 1:
            assert min(bounds.values()) == pytest.approx(best)


@pytest.mark.parametrize(("ratio", "k"), [(2, 2), (4, 3), (5, 8)])
def test_kseq_is_optimal_between_uniforms(ratio, k):
    d = 20
    q = torch.full((1, d), 1 / d, dtype=torch.float64)
    p = torch.zeros(1, d, dtype=torch.float64)
    p[0, : d // ratio] = ratio / d
    expected = acceptance.uniform_acceptance(ratio, k)
    assert float(acceptance.optimal_acceptance(p, q, k)) == pytest.approx(expected)
    assert float(acceptance.kseq_acceptance(p, q, k)) == pytest.approx(expected)
    from draftproof.functional import kseq_gamma

    assert float(kseq_gamma(p, q, k, passes=60)) == pytest.approx(acceptance.uniform_gamma(ratio, k))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), kind=st.sampled_from(["dense", "sparse", "peaked"]))
def test_lengths_equal_the_rules(seed, kind):
    toy = Toy.random(seed, kind=kind, depth=2)
    token = lengths.token_length(toy.p, toy.q, 2)
    block = lengths.block_length(toy.p, toy.q, 2)
    bound = lengths.full_information_length(toy.p, toy.q, 2)
    assert token == pytest.approx(rule_length(as_paths(token_verify), toy, 1, 2))
    assert block == pytest.approx(rule_length(as_paths(block_verify), toy, 1, 2))
    assert bound == pytest.approx(rule_length(as_paths(greedy_block_verify), toy, 1, 2))
    assert token <= block + 1e-12 <= bound + 2e-12


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(["dense", "sparse", "peaked", "ties"]))
def test_block_is_never_shorter_than_token(seed, kind):
    toy = Toy.random(seed, kind=kind, depth=4)
    block = lengths.block_length(toy.p, toy.q, 4)
    assert lengths.token_length(toy.p, toy.q, 4) <= block + 1e-12
    assert block <= lengths.full_information_length(toy.p, toy.q, 4) + 1e-12


def test_the_motivating_example_in_closed_form():
    toy = Toy.constant([1 / 3, 2 / 3], [2 / 3, 1 / 3])
    assert lengths.token_length(toy.p, toy.q, 2) == pytest.approx(10 / 9)
    assert lengths.block_length(toy.p, toy.q, 2) == pytest.approx(11 / 9)
    assert lengths.full_information_length(toy.p, toy.q, 2) == pytest.approx(12 / 9)
    assert lengths.iid_length(2 / 3, 2) == pytest.approx(10 / 9)


def test_leviathans_formulas():
    for alpha, n, c in ((0.3, 2, 0.1), (0.8, 5, 0.02), (0.0, 3, 0.5)):
        tokens = (1 - alpha ** (n + 1)) / (1 - alpha)
        assert lengths.iid_block_efficiency(alpha, n) == pytest.approx(tokens)
        assert lengths.iid_speedup(alpha, n, c) == pytest.approx(tokens / (n * c + 1))
        assert lengths.iid_operations(alpha, n, c) == pytest.approx((n * c + n + 1) / tokens)
    assert lengths.iid_block_efficiency(1.0, 4) == 5
    toy = Toy.constant([0.5, 0.2, 0.3], [0.2, 0.5, 0.3])
    matched = lengths.iid_length(0.1 + 0.1 + 0.09, 2)
    assert rule_length(as_paths(match_verify), toy, 1, 2) == pytest.approx(matched)


@pytest.mark.parametrize("run", [0, 1, 5])
@pytest.mark.parametrize(("tp", "fp"), [(0.9, 0.2), (0.5, 0.5), (1.0, 0.0), (0.0, 0.3)])
def test_sprinter_lengths_are_the_means_of_their_distribution(run, tp, fp):
    pmf = [sprinter.accepted_pmf(i, run, tp, fp) for i in range(400)]
    assert sum(pmf) == pytest.approx(1)
    mean = sum(i * w for i, w in enumerate(pmf))
    assert sprinter.expected_accepted(run, tp, fp) == pytest.approx(mean)
    assert sprinter.expected_stopping_time(run, tp, fp, 0.1) == pytest.approx(0.1 * (mean + 1))


def test_sprinter_formulas_as_printed():
    r, tp, fp = 5, 0.9, 0.5
    printed = (tp - tp**r) / (1 - tp) + tp**r / (1 - fp)
    assert sprinter.expected_accepted(r, tp, fp) == pytest.approx(printed)
    assert sprinter.expected_accepted(r, 1.0, 0.5) == pytest.approx(r + 1)
    assert sprinter.expected_accepted(r, 1.0, 1.0) == math.inf
    stopping = 0.1 * ((1 - tp**r) / (1 - tp) + tp**r / (1 - fp))
    assert sprinter.expected_stopping_time(r, tp, fp, 0.1) == pytest.approx(stopping)


def test_sprinter_acceptance_and_drift():
    p, q = _pairs(1, 6, seed=9)
    distance = 1 - float(acceptance.token_acceptance(p, q))
    for eta in (0.0, 0.4, 1.0):
        kept = torch.minimum(q, eta * q + (1 - eta) * p).sum()
        assert sprinter.acceptance_rate(eta, distance) == pytest.approx(float(kept))
        output = (1 - eta) * p + eta * q
        assert sprinter.drift(eta, distance) == pytest.approx(float((output - p).clamp(min=0).sum()))


def test_both_forms_of_the_cost_agree():
    costs = cost.PassCosts(draft=0.01, target=0.1)
    drafted, calls, accepted = 40, 10, 25
    emitted, discarded = accepted + calls, drafted - accepted
    time = cost.total_time(costs, drafted, calls)
    assert cost.total_time_by_waste(costs, emitted, discarded, calls) == pytest.approx(time)
    assert cost.latency(costs, discarded / emitted, calls / emitted) == pytest.approx(time / emitted)
    assert cost.time_per_token(costs, 4, emitted / calls) == pytest.approx(time / emitted)


def test_best_length_grows_with_acceptance_and_falls_with_cost():
    cheap, expensive = cost.PassCosts(0.01, 1.0), cost.PassCosts(0.2, 1.0)
    found = [cost.best_iid_length(cheap, alpha) for alpha in (0.0, 0.3, 0.6, 0.9)]
    assert found == sorted(found)
    assert found[0] == 0
    assert cost.best_iid_length(expensive, 0.9) < cost.best_iid_length(cheap, 0.9)
    speedups = [lengths.iid_speedup(0.8, n, 0.1) for n in range(30)]
    assert cost.best_iid_length(cost.PassCosts(0.1, 1.0), 0.8, 29) == speedups.index(max(speedups))
