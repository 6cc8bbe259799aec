"""The output distribution of every lossless rule is exactly the target's, by enumeration; other claims of the rules."""

import itertools
from collections import defaultdict
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof.audit.distributions import as_paths, complete
from draftproof.functional import (
    ChainVerdict,
    GreedyState,
    Tries,
    advance,
    block_verify,
    greedy_block_verify,
    kseq_gamma,
    kseq_select,
    last_token_verify,
    match_verify,
    mentored_verify,
    mixture_verify,
    modified_target,
    multi_round_on_tries,
    multi_round_verify,
    multi_round_verify_without_replacement,
    otm_plan,
    otm_select,
    spectr_on_tries,
    spectr_verify,
    token_verify,
    traversal_on_tries,
    traversal_verify,
    trie_block_on_tries,
    trie_block_verify,
    typical_verify,
)
from draftproof.functional.chain import log_ratios, residual_weights, running_ratios
from draftproof.functional.coupling import first_success, kseq_plan, kseq_residual, rounds_plan
from draftproof.functional.lossy import mentored_bounds
from draftproof.functional.trie_block import trie_block_plan
from draftproof.rng import CounterRng, TorchRng
from draftproof.testing import exact_distribution, total_variation
from draftproof.tree import TokenTree
from support.distributions import (
    KINDS,
    Forest,
    Toy,
    emitted_distribution,
    greedy_distribution,
    rule_distribution,
    rule_length,
    verdict_distributions,
    walk,
)

CHAIN = {name: as_paths(f) for name, f in (("token", token_verify), ("block", block_verify), ("match", match_verify))}
PATHS = {
    "spectr": spectr_verify,
    "multi_round": multi_round_verify,
    "traversal": traversal_verify,
    "trie_block": trie_block_verify,
}
ON_TRIES = {
    "spectr": spectr_on_tries,
    "multi_round": multi_round_on_tries,
    "traversal": traversal_on_tries,
    "trie_block": trie_block_on_tries,
}
EXACT = 1e-12


# -- output distributions --------------------------------------------------------------------------------


@pytest.mark.grid(14)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHAIN)
def test_chain_rules_are_exact(name, kind):
    for seed in range(3):
        toy = Toy.random(seed, kind=kind, depth=3)
        assert total_variation(rule_distribution(CHAIN[name], toy, 1, 3), toy.target_distribution(4)) < EXACT


@pytest.mark.grid(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PATHS)
def test_path_rules_are_exact(name, kind):
    toy = Toy.random(1, kind=kind, depth=2)
    if name != "spectr" or kind in ("dense", "sparse", "onehot", "disjoint"):  # SpecTr has the most outcomes to walk
        assert total_variation(rule_distribution(PATHS[name], toy, 2, 2), toy.target_distribution(3)) < EXACT
    assert total_variation(rule_distribution(PATHS[name], toy, 2, 1), toy.target_distribution(2)) < EXACT
    assert total_variation(rule_distribution(PATHS[name], toy, 3, 1), toy.target_distribution(2)) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count", "length"), [(n, *s) for n in PATHS for s in ((3, 2), (2, 3))])
def test_path_rules_are_exact_on_larger_drafts(name, count, length):
    for kind in ("sparse", "ties"):
        toy = Toy.random(2, kind=kind, depth=length)
        assert (
            total_variation(rule_distribution(PATHS[name], toy, count, length), toy.target_distribution(length + 1))
            < EXACT
        )


@pytest.mark.grid(7)
@pytest.mark.parametrize("kind", ["dense", "peaked", "near", "ties"])
@pytest.mark.parametrize("name", [*CHAIN, *PATHS])
def test_distributions_in_float32(name, kind):
    toy = Toy.random(4, kind=kind, depth=2, dtype=torch.float32)
    rule, count = (CHAIN[name], 1) if name in CHAIN else (PATHS[name], 2)
    length = 1 if name == "spectr" else 2
    assert total_variation(rule_distribution(rule, toy, count, length), toy.target_distribution(length + 1)) < 1e-6


@pytest.mark.grid(4)
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("name", ON_TRIES)
def test_prefix_trees_are_exact(name, merged):
    for kind in ("sparse", "ties") if name == "traversal" else ("sparse",):
        toy = Toy.random(6, kind=kind, depth=2)
        forest = Forest(toy, (2, 2) if kind == "sparse" else (2, 1), merged=merged)
        assert total_variation(forest.distribution(ON_TRIES[name], 3), toy.target_distribution(3)) < EXACT


@pytest.mark.parametrize("factors", [(3,), (2, 1), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_drawing_without_replacement_is_exact(factors):
    toy, length = Toy.random(1, depth=2), len(factors) + 1
    forest, expected = Forest(toy, factors, replacement=False), toy.target_distribution(length)
    tokens = forest.leaf_chains()
    q, p = toy.rows(tokens)
    for rule in (multi_round_on_tries, traversal_on_tries):
        assert total_variation(forest.distribution(rule, length, replacement=False), expected) < EXACT
        assert total_variation(forest.distribution(rule, length), expected) > 1e-2  # the unchanged q is wrong here
    for rule in (multi_round_verify_without_replacement, partial(traversal_verify, replacement=False)):
        walks = walk(partial(_play, rule, tokens, q, p), tokens.shape[0])
        assert total_variation(emitted_distribution(toy, tokens, forest.weight, walks, length), expected) < EXACT


def _play(rule, tokens, q, p, rng):
    return rule(tokens, q, p, rng=rng)


def test_draws_from_different_distributions_need_no_option():
    """Rows that are already renormalised make drawing without replacement plain multi-round selection."""
    toy = Toy.random(8, depth=1)
    forest = Forest(toy, (2,), replacement=False)
    forest.q = forest.q.clone()
    for b, nodes in enumerate(forest.nodes):  # the second sibling was drawn without the first
        forest.q[2 * b + 1, nodes[0][0]] = 0
        forest.q[2 * b + 1] /= forest.q[2 * b + 1].sum()
    for rule in (multi_round_on_tries, traversal_on_tries):
        assert total_variation(forest.distribution(rule, 2), toy.target_distribution(2)) < EXACT


def test_point_masses_may_branch_where_draws_need_not_be_alike():
    toy = Toy.random(9, depth=2)
    tree = TokenTree(torch.tensor([0, 2, 1, 0]), (-1, -1, 0, 1))
    p = torch.stack([toy.p(c) for c in ((), (0,), (2,), (0, 1), (2, 0))])
    contexts = [(), (0,), (2,), (0, 1), (2, 0)]
    tries = Tries.from_trees([tree], [None])
    for rule in (multi_round_on_tries, traversal_on_tries):
        emitted = defaultdict(float)
        for weight, v in walk(lambda rng, rule=rule: rule(tries, None, p, rng=rng), 1):
            emitted[(*contexts[int(v.node) + 1], int(v.token))] += float(weight)
        assert total_variation(complete(toy, emitted, 3), toy.target_distribution(3)) < EXACT
    for rule in (spectr_on_tries, trie_block_on_tries):
        with pytest.raises(ValueError, match="point-mass draft branches"):
            rule(tries, None, p, rng=TorchRng(0))


@pytest.mark.parametrize("name", [*CHAIN, *PATHS])
def test_point_masses_equal_one_hot_rows(name):
    toy = Toy.random(10, depth=2)
    tokens = torch.tensor([[[0, 2]], [[1, 1]]]).expand(-1, 1 if name in CHAIN else 2, -1)
    _, p = toy.rows(tokens)
    q = torch.nn.functional.one_hot(tokens, 3).double()
    rule = CHAIN.get(name) or PATHS[name]
    for a, b in zip(
        verdict_distributions(rule, tokens, q, p), verdict_distributions(rule, tokens, None, p), strict=True
    ):
        assert total_variation(a, b) < EXACT


# -- adaptive lengths ------------------------------------------------------------------------------------


def _stop(prefix):
    """Looks at all drafted tokens, the newest included, and discards none."""
    return bool(prefix) and (prefix[-1] == 1 or sum(prefix) > 2)


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", [*CHAIN, *PATHS])
def test_stopping_times_keep_the_distribution(name):
    for kind in ("dense", "sparse"):
        toy = Toy.random(11, kind=kind, depth=3)
        rule, count = (CHAIN[name], 1) if name in CHAIN else (PATHS[name], 2)
        length = 3 if count == 1 else 2
        assert (
            total_variation(
                rule_distribution(rule, toy, count, length, stop=_stop), toy.target_distribution(length + 1)
            )
            < EXACT
        )


@pytest.mark.parametrize("name", PATHS)
def test_chains_of_different_lengths_keep_the_distribution(name):
    toy = Toy.random(12, kind="sparse", depth=2)
    for lengths in ((2, 1), (1, 2), (0, 2), (0, 0)):
        assert (
            total_variation(rule_distribution(PATHS[name], toy, 2, 2, lengths=lengths), toy.target_distribution(3))
            < EXACT
        )


@pytest.mark.parametrize("name", ["token", "block", "spectr", "trie_block"])
def test_peeking_and_dropping_is_biased(name):
    """A drafter that looks at the token it drew and then discards it changes the output distribution."""
    rule, count = (CHAIN[name], 1) if name in CHAIN else (PATHS[name], 2)

    def dropping(tokens, q, p, *, rng, **_):
        last = q[..., -1, :].gather(-1, tokens[..., -1:]).squeeze(-1)
        return rule(tokens, q, p, rng=rng, lengths=torch.where(last < 0.4, tokens.shape[-1] - 1, tokens.shape[-1]))

    toy = Toy.random(13, depth=2)
    assert total_variation(rule_distribution(dropping, toy, count, 1), toy.target_distribution(2)) > 1e-2


# -- identities ------------------------------------------------------------------------------------------


def _same(rule, other, toy, count, length):
    tokens, _, _ = toy.chains(count, length)
    q, p = toy.rows(tokens)
    pairs = zip(verdict_distributions(rule, tokens, q, p), verdict_distributions(other, tokens, q, p), strict=True)
    return max(total_variation(a, b) for a, b in pairs)


@pytest.mark.grid(2)
@pytest.mark.parametrize("kind", ["dense", "sparse", "ties", "equal"])
def test_one_chain_makes_them_token_or_block_verification(kind):
    toy = Toy.random(14, kind=kind, depth=2)
    for name, other in (
        ("spectr", "token"),
        ("multi_round", "token"),
        ("traversal", "block"),
        ("trie_block", "block"),
    ):
        assert _same(PATHS[name], CHAIN[other], toy, 1, 2) < EXACT


@pytest.mark.parametrize("kind", ["dense", "sparse", "ties"])
def test_chains_of_one_token_make_trie_block_kseq(kind):
    toy = Toy.random(15, kind=kind, depth=1)
    tokens, _, _ = toy.chains(3, 1)
    q, p = toy.rows(tokens)
    selected = verdict_distributions(kseq_select, tokens[..., 0], q[:, 0, 0], p[:, 0, 0])
    for rule in (spectr_verify, trie_block_verify):
        for drawn, a, b in zip(
            tokens[..., 0].tolist(), verdict_distributions(rule, tokens, q, p), selected, strict=True
        ):
            hit = sum(w for (accepted, _), w in b.items() if accepted < 3)
            late = sum(w for (k, y), w in b.items() if k == 3 and y in drawn)
            kept = sum(w for (accepted, _), w in a.items() if accepted == 1)
            # SpecTr also keeps a token from the residual when it was among the drafted ones
            assert kept == pytest.approx(hit + (late if rule is spectr_verify else 0), abs=EXACT)
    for a, b in zip(
        verdict_distributions(multi_round_verify, tokens, q, p),
        verdict_distributions(traversal_verify, tokens, q, p),
        strict=True,
    ):
        assert sum(w for (n, _), w in b.items() if n) <= sum(w for (n, _), w in a.items() if n) + EXACT


def test_batch_and_alone_agree():
    """Random numbers belong to a row and a place, so a row's result does not depend on other rows or on padding."""
    gen = torch.Generator().manual_seed(0)
    q = torch.rand(5, 3, 4, 6, generator=gen).softmax(-1)[:, :1].expand(-1, 3, -1, -1).contiguous()
    q = q[:, :, :1].expand_as(q).contiguous()  # one q and one p for all contexts of a row
    p = torch.rand(5, 1, 1, 6, generator=gen).mul(3).softmax(-1).expand(-1, 3, 5, -1).contiguous()
    tokens = torch.randint(0, 3, (5, 3, 4), generator=gen)
    keys = [11, 12, 13, 14, 15]
    for rule in PATHS.values():
        whole = rule(tokens, q, p, rng=CounterRng(keys))
        for b in range(5):
            alone = rule(tokens[b : b + 1], q[b : b + 1], p[b : b + 1], rng=CounterRng(keys[b : b + 1]))
            assert [int(x[b]) for x in whole] == [int(x) for x in alone]


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", ON_TRIES)
def test_trees_of_different_shapes_share_a_batch(name):
    gen = torch.Generator().manual_seed(3)
    trees = [
        TokenTree.empty(),
        TokenTree.chain(torch.tensor([1])),
        TokenTree(torch.tensor([2, 0, 1, 1]), (-1, -1, 0, 2)),
        TokenTree.chain(torch.tensor([0, 2, 2])),
    ]
    draws = [None, (0, 0, 0), (0, 1, 0, 2, 2, 3), None]
    q = [torch.rand(len(t), 3, generator=gen).softmax(-1) for t in trees]
    q[2][1] = q[2][0]  # siblings share a context
    p = [torch.rand(len(t) + 1, 3, generator=gen).mul(4).softmax(-1) for t in trees]
    for seed in range(20):
        keys = [100 * seed + b for b in range(4)]
        whole = ON_TRIES[name](Tries.from_trees(trees, draws), torch.cat(q), torch.cat(p), rng=CounterRng(keys))
        for b in range(4):
            tries = Tries.from_trees(trees[b : b + 1], draws[b : b + 1])
            alone = ON_TRIES[name](tries, q[b], p[b], rng=CounterRng(keys[b : b + 1]))
            assert [int(x[b]) for x in whole] == [int(x) for x in alone]


# -- invariants ------------------------------------------------------------------------------------------


def test_lemma_3_probability_of_each_prefix():
    """Pr(at least i accepted | the first i tokens) = P_i."""
    toy = Toy.random(16, depth=3)
    tokens, _, weight = toy.chains(1, 3)
    q, p = toy.rows(tokens)
    running = running_ratios(log_ratios(tokens[:, 0], q[:, 0], p[:, 0]))
    verdicts = verdict_distributions(CHAIN["block"], tokens, q, p)
    for i in range(1, 4):
        reached, mass, expected = defaultdict(float), defaultdict(float), {}
        for b, verdict in enumerate(verdicts):
            prefix = tuple(tokens[b, 0, :i].tolist())
            mass[prefix] += float(weight[b])
            reached[prefix] += float(weight[b]) * sum(w for (accepted, _), w in verdict.items() if accepted >= i)
            expected[prefix] = float(running[b, i - 1])
        for prefix, total in mass.items():
            assert reached[prefix] / total == pytest.approx(expected[prefix], abs=EXACT)


def test_children_are_accepted_with_their_weights():
    """Given the first tokens, some child's subtree is accepted with 1 - prod over children (1 - W_x)."""
    toy = Toy.random(17, depth=2)
    tokens, _, weight = toy.chains(2, 2)
    q, p = toy.rows(tokens)
    plan = trie_block_plan(Tries.from_chains(tokens), q.flatten(0, -2), p.flatten(0, -2))
    reached, mass, expected = defaultdict(float), defaultdict(float), {}
    verdicts = verdict_distributions(trie_block_verify, tokens, q, p)
    for b, verdict in enumerate(verdicts):
        first = tuple(tokens[b, :, 0].tolist())
        mass[first] += float(weight[b])
        reached[first] += float(weight[b]) * sum(w for (accepted, _), w in verdict.items() if accepted >= 1)
        slots = torch.tensor([1] if first[0] == first[1] else [1, 3 if tokens.shape[2] == 2 else 1])
        expected[first] = 1 - float((1 - plan.weight[b, slots]).prod())
    for first, total in mass.items():
        assert reached[first] / total == pytest.approx(expected[first], abs=1e-10)


def test_the_motivating_example():
    toy = Toy.constant([1 / 3, 2 / 3], [2 / 3, 1 / 3])
    assert rule_length(CHAIN["token"], toy, 1, 2) == pytest.approx(10 / 9)
    assert rule_length(CHAIN["block"], toy, 1, 2) == pytest.approx(11 / 9)
    assert rule_length(as_paths(greedy_block_verify), toy, 1, 2) == pytest.approx(12 / 9)


def test_the_division_factor_is_the_upper_end():
    gen = torch.Generator().manual_seed(1)
    p = torch.rand(200, 20, generator=gen, dtype=torch.float64).pow(4)
    q = torch.rand(200, 20, generator=gen, dtype=torch.float64).pow(4)
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    weight = torch.rand(200, generator=gen, dtype=torch.float64)
    for k in (1, 2, 7):
        root, found = kseq_gamma(p, q, k, weight, passes=60), kseq_gamma(p, q, k, weight)
        assert (found >= root).all()
        assert (found - root).max() < 1e-2
        beta = torch.minimum(q, p * (weight / found).unsqueeze(-1)).sum(-1)
        assert (1 - (1 - beta) ** k <= found * beta + 1e-14).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_nothing_is_left_the_residual_is_p(dtype):
    row = torch.tensor([[0.5, 0.3, 0.2]], dtype=dtype)
    one = torch.ones(1, dtype=torch.float64)
    assert torch.equal(residual_weights(row, row, torch.tensor([0]), one), row)
    assert torch.equal(kseq_residual(row, row, kseq_plan(row, row, 1)), row)
    nothing = torch.zeros(1, dtype=torch.float64)
    plan = kseq_plan(row, row, 3, nothing)
    assert plan.accept.tolist() == [0.0]
    assert torch.equal(kseq_residual(row, row, plan, nothing), row)
    rounds = rounds_plan(row, torch.tensor([[0, 1]]), torch.ones(1, 2, dtype=torch.bool), lambda _: row)
    assert torch.isfinite(rounds.left).all()
    assert rounds.accept[0, 0] == 1


def test_first_success_is_a_distribution():
    accept = torch.tensor([[0.25, 0.0, 1.0, 0.5], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    expected = torch.tensor([[0.25, 0, 0.75, 0, 0], [0, 0, 0, 0, 1]], dtype=torch.float64)
    assert torch.allclose(first_success(accept), expected)


# -- orderings -------------------------------------------------------------------------------------------


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(["dense", "sparse", "peaked", "ties"]))
def test_orderings(seed, kind):
    toy = Toy.random(seed, kind=kind, depth=2)
    best = rule_length(trie_block_verify, toy, 2, 2)
    block = rule_length(CHAIN["block"], toy, 1, 2)
    slack = 1e-4  # the root search stops that far above the root
    assert block >= rule_length(CHAIN["token"], toy, 1, 2) - EXACT
    assert rule_length(as_paths(greedy_block_verify), toy, 1, 2) >= block - EXACT
    assert rule_length(CHAIN["token"], toy, 1, 2) >= rule_length(CHAIN["match"], toy, 1, 2) - EXACT
    assert best >= block - slack
    assert best >= rule_length(traversal_verify, toy, 2, 2) - slack
    assert best >= rule_length(spectr_verify, toy, 2, 2) - slack


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(["dense", "sparse", "peaked", "ties"]))
def test_trie_block_accepts_at_least_what_spectr_does(seed, kind):
    toy = Toy.random(seed, kind=kind, depth=2)
    assert rule_length(trie_block_verify, toy, 2, 2) >= rule_length(spectr_verify, toy, 2, 2) - 1e-4


# -- greedy block verification over rounds ---------------------------------------------------------------


@pytest.mark.parametrize(("drafted", "horizon"), [(1, 3), (2, 5), (3, 5)])
def test_greedy_block_is_exact_over_rounds(drafted, horizon):
    for kind in ("dense", "sparse"):
        toy = Toy.random(18, kind=kind, depth=1, order=1)
        assert total_variation(greedy_distribution(toy, drafted, horizon), toy.target_distribution(horizon)) < EXACT


def test_greedy_block_without_its_state_is_biased():
    toy = Toy.random(18, kind="peaked", depth=1, order=1)
    assert total_variation(greedy_distribution(toy, 2, 3, keep=False), toy.target_distribution(3)) > 1e-3


def test_the_bonus_row_is_never_modified():
    toy = Toy.random(19, depth=1, order=1)
    gen = torch.Generator().manual_seed(0)
    state, seq = GreedyState.fresh(1, 3), ()
    for step in range(30):
        draft = tuple(torch.randint(0, 3, (3,), generator=gen).tolist())
        tokens = torch.tensor([draft])
        q = torch.stack([toy.q(seq + draft[:j]) for j in range(3)])[None]
        p = torch.stack([toy.p(seq + draft[:j]) for j in range(4)])[None]
        target = modified_target(state, p, q, tokens)
        assert torch.equal(target.rows[:, 3], p[:, 3])
        assert int(state.remaining.max()) <= 2
        verdict = greedy_block_verify(tokens, q, target.rows, rng=TorchRng(step))
        state = advance(state, target, q, tokens, verdict)
        seq = (*seq, *draft[: int(verdict.accepted)], int(verdict.token))


# -- optimal transport -----------------------------------------------------------------------------------


@pytest.mark.parametrize("support", [None, 2])
def test_the_optimal_coupling_is_exact(support):
    toy = Toy.random(20, vocab=4, depth=0)
    p, q = toy.p(()), toy.q(())
    for k in (1, 2, 3):
        plan = otm_plan(p, q, k, support=support)
        selected, kept = defaultdict(float), 0.0
        for drawn in itertools.product(range(4), repeat=k):
            weight = float(q[list(drawn)].prod())
            outcomes = exact_distribution(
                lambda rng, d=drawn, f=plan: tuple(map(int, otm_select(torch.tensor([d]), f, rng=rng)))
            )
            for (_, y), w in outcomes.items():
                selected[y] += weight * w
                kept += weight * w * (y in drawn)
        assert total_variation(selected, dict(enumerate(p.tolist()))) < 1e-9
        assert kept >= plan.value - 1e-9
        assert support or kept == pytest.approx(plan.value, abs=1e-9)


def test_too_large_a_program_is_refused():
    row = torch.full((200,), 1 / 200)
    with pytest.raises(ValueError, match="multisets"):
        otm_plan(row, row, 3)


# -- lossy rules: the output distribution they state -----------------------------------------------------


def _error_of(rule, toy, length, row):
    """Total variation from the distribution with row(context) at drafted positions and p at the bonus token."""
    stated = Toy(lambda context: row(context) if len(context) < length else toy.p(context), toy.q, toy.vocab)
    tokens, _, weight = toy.chains(1, length)
    q, p = toy.rows(tokens)
    emitted = defaultdict(float)
    for w, v in walk(lambda rng: rule(tokens[:, 0], q[:, 0], p[:, 0], rng=rng), tokens.shape[0]):
        for b, x in enumerate((w * weight).tolist()):
            if x > 0:
                emitted[(*tokens[b, 0, : v.accepted[b]].tolist(), int(v.token[b]))] += x
    return total_variation(complete(stated, emitted, length + 1), complete(stated, {(): 1.0}, length + 1))


@pytest.mark.parametrize("kind", ["dense", "sparse", "equal"])
def test_mixture_has_the_distribution_of_the_mixture(kind):
    toy = Toy.random(21, kind=kind, depth=2)
    for epsilon in (0.0, 0.3, 1.0):

        def mixed(context, e=epsilon):
            return (1 - e) * toy.p(context) + e * toy.q(context)

        def rule(*a, e=epsilon, **k):
            return mixture_verify(*a, epsilon=e, **k)

        assert _error_of(rule, toy, 2, mixed) < EXACT
    with pytest.raises(ValueError, match="expected 0"):
        mixture_verify(torch.zeros(1, 0).long(), None, torch.ones(1, 1, 1), rng=TorchRng(0), epsilon=2.0)


def test_typical_has_the_stated_distribution():
    toy = Toy.random(22, kind="peaked", depth=2)

    def stated(context):
        p, q = toy.p(context), toy.q(context)
        typical = p > min(0.09, 0.3 * float(torch.exp((p * p.log()).sum())))
        return q * typical + p * (q * ~typical).sum()

    assert _error_of(typical_verify, toy, 2, stated) < EXACT


def test_mentored_has_the_stated_distribution_within_its_budget():
    toy = Toy.random(23, depth=2)
    for budget in (0.0, 0.05, 0.5):

        def stated(context, budget=budget):
            p, q = toy.p(context)[None], toy.q(context)[None]
            floor, ceiling = mentored_bounds(p, q, budget)
            output = torch.maximum(torch.minimum(q, ceiling * p), floor * p)[0]
            assert float((p[0] * (p[0] / output).log()).sum()) <= budget + 1e-9
            return output

        def rule(*a, budget=budget, **k):
            return mentored_verify(*a, budget=budget, **k)

        assert _error_of(rule, toy, 2, stated) < 1e-11
    with pytest.raises(ValueError, match="expected a divergence, 0"):
        mentored_verify(
            torch.zeros(1, 0).long(), torch.ones(1, 0, 1), torch.ones(1, 1, 1), rng=TorchRng(0), budget=-1.0
        )


def test_mentored_is_optimal():
    """Of many random distributions within the budget, none shares more mass with q than the one found."""
    gen = torch.Generator().manual_seed(2)
    for seed in range(5):
        toy = Toy.random(seed, vocab=4, depth=0)
        p, q = toy.p(()), toy.q(())
        floor, ceiling = mentored_bounds(p[None], q[None], 0.1)
        best = float(torch.minimum(q, torch.maximum(torch.minimum(q, ceiling * p), floor * p)).sum())
        rivals = torch.rand(20_000, 4, generator=gen, dtype=torch.float64).log().neg()
        rivals = rivals / rivals.sum(-1, keepdim=True)
        rivals = torch.cat([rivals * t + q * (1 - t) for t in (0.1, 0.5, 1.0)])
        allowed = (p * (p / rivals).log()).sum(-1) <= 0.1
        assert float(torch.minimum(rivals, q).sum(-1)[allowed].amax()) <= best + 1e-9


@pytest.mark.parametrize("eta", [0.0, 0.25, 1.0])
def test_last_token_has_the_distribution_of_sprinter(eta):
    """A stopper that passes acceptable tokens and a fraction eta of the others gives (1 - eta) p + eta q."""
    toy = Toy.random(24, depth=3)

    def play(rng):
        draft = ()
        while len(draft) < 3:
            p, q = toy.p(draft), toy.q(draft)
            x = int(rng.categorical(q[None])[0])
            passed = bool(q[x] <= p[x]) or bool(rng.bernoulli(torch.tensor([eta]))[0])
            draft = (*draft, x)
            if not passed:
                break
        q = torch.stack([toy.q(draft[:i]) for i in range(len(draft))])[None]
        p = torch.stack([toy.p(draft[:i]) for i in range(len(draft) + 1)])[None]
        verdict = last_token_verify(torch.tensor([draft]), q, p, rng=rng)
        emitted = (*draft[: int(verdict.accepted)], int(verdict.token))
        return emitted[:2], len(draft)

    first = defaultdict(float)
    for (emitted, drafted), w in exact_distribution(play).items():
        if drafted >= 1:
            first[emitted[0]] += w
    mixed = (1 - eta) * toy.p(()) + eta * toy.q(())
    assert total_variation(first, dict(enumerate(mixed.tolist()))) < EXACT


def test_last_token_is_token_verification_for_one_token():
    toy = Toy.random(25, depth=1)
    assert _same(as_paths(last_token_verify), CHAIN["token"], toy, 1, 1) < EXACT


# -- errors ----------------------------------------------------------------------------------------------


def test_tries_say_what_is_wrong():
    tree = TokenTree.chain(torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"draws: .* got none of node 1"):
        Tries.from_trees([tree], [(0,)])
    with pytest.raises(ValueError, match="no trees"):
        Tries.from_trees([], [])
    tries = Tries.from_trees([tree], [None])
    row = torch.tensor([0.5, 0.5, 0.0])
    with pytest.raises(ValueError, match=r"row 0, node 1: .* gives it probability 0"):
        trie_block_on_tries(tries, torch.tensor([[1.0, 0, 0], [1.0, 0, 0]]), row.expand(3, -1), rng=TorchRng(0))
    with pytest.raises(ValueError, match="sums to 1 within"):
        trie_block_on_tries(tries, None, 2 * row.expand(3, -1), rng=TorchRng(0))


def test_empty_drafts_are_plain_decoding():
    tries = Tries.from_trees([TokenTree.empty(), TokenTree.empty()], [None, None])
    p = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    for rule in ON_TRIES.values():
        verdict = rule(tries, None, p, rng=TorchRng(0))
        assert verdict.node.tolist() == [-1, -1]
        assert verdict.token.tolist() == [1, 0]
    verdict = match_verify(torch.zeros(2, 0).long(), None, p[:, None], rng=TorchRng(0))
    assert isinstance(verdict, ChainVerdict)
    assert verdict.token.tolist() == [1, 0]
