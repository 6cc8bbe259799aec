"""The suffix drafter: what it drafts, that its counts are exact, and that the output distribution is the target's."""

import random
from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftproof import Engine, SamplingParams, UserError
from draftproof.drafters import suffix
from draftproof.drafters.base import Drafter
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.verifier_parts import make_verifier
from draftproof.functional.chain import ChainVerdict
from draftproof.rng import CounterRoundRng
from draftproof.testing import TableModel, assert_lossless, exact_distribution, target_distribution, total_variation
from draftproof.verifiers.chain import ChainVerifier
from support.helpers import backend, tokenizer
from support.suffix_drafts import RNG, drafted, request

VOCAB = 3


def finished(drafter, tokens, name):
    """Run a request from its start to its end."""
    drafted(drafter, tokens, name)
    drafter.release(name)


def text(seed, length, vocab=4):
    source = random.Random(seed)
    return [source.randrange(vocab) for _ in range(length)]


# --- what is drafted --------------------------------------------------------------------------------------------------


def test_it_is_a_drafter():
    assert isinstance(SuffixDrafter(), Drafter)
    assert (SuffixDrafter(7).name, SuffixDrafter(7).limit) == ("suffix:7", 7)


def test_the_longest_known_suffix_is_followed():
    assert drafted(SuffixDrafter(3), [1, 2, 3, 4, 5, 9, 3, 6, 7, 1, 2, 3]) == (4, 5, 9)
    assert drafted(SuffixDrafter(3, context=1), [1, 2, 3, 4, 5, 9, 3, 6, 7, 1, 2, 3]) == (6, 7, 1)


def test_the_most_frequent_successor_is_drafted_and_the_latest_of_equals():
    assert drafted(SuffixDrafter(1), [5, 1, 6, 5, 1, 7, 5, 2, 8, 5]) == (1,)
    assert drafted(SuffixDrafter(1), [5, 1, 6, 5, 2, 7, 5]) == (2,)


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3, 4], [1, 1, 2]])
def test_an_unknown_suffix_has_no_draft(tokens):
    assert drafted(SuffixDrafter(), tokens) == ()


def test_a_draft_can_repeat_a_loop():
    assert drafted(SuffixDrafter(9), [1, 2, 3] * 3) == (1, 2, 3) * 3


@pytest.mark.parametrize(("limit", "length"), [(-1, 0), (0, 0), (1, 1), (5, 4)])
def test_a_draft_is_no_longer_than_the_limit_of_the_request(limit, length):
    assert len(drafted(SuffixDrafter(4), [1, 2, 3] * 3, limit=limit)) == length


def test_a_draft_ends_where_it_becomes_unlikely():
    tokens = [1, 2, 1, 2, 1, 3, 1]  # after 1: 2, 2, 3; after 2 and after 3: 1
    assert drafted(SuffixDrafter(4, context=1, threshold=0.7), tokens) == ()
    assert drafted(SuffixDrafter(4, context=1, threshold=0.6), tokens) == (2, 1)
    assert drafted(SuffixDrafter(4, context=1, threshold=0.5), [1, 2, 1, 3, 1]) == (3, 1)
    assert drafted(SuffixDrafter(5, context=1, threshold=0.4), tokens) == (2, 1, 2, 1)
    assert drafted(SuffixDrafter(5, context=1, threshold=0.0), tokens) == (2, 1, 2, 1, 2)


@pytest.mark.parametrize(("factor", "length"), [(0.0, 1), (0.5, 2), (1.0, 4), (2.0, 7), (100.0, 12)])
def test_a_longer_match_gives_a_longer_draft(factor, length):
    tokens = [9, 1, 2, 3, *range(20, 40), 8, 1, 2, 3]  # the match is 1, 2, 3
    assert len(drafted(SuffixDrafter(12, factor=factor), tokens)) == length


def test_the_longer_match_wins_and_the_own_tokens_of_equals():
    drafter = SuffixDrafter(1)
    finished(drafter, [1, 2, 3, 70, 2, 3, 71, 3, 71, 3, 71], 0)
    assert drafted(drafter, [2, 3, 80, 9, 2, 3], 1) == (80,)
    assert drafted(drafter, [2, 3, 80, 1, 2, 3], 2) == (70,)
    assert drafted(drafter, [4, 3], 3) == (71,)
    assert drafted(drafter, [3, 90, 4, 3], 4) == (90,)


def test_requests_of_a_batch_draft_from_each_other_in_any_order():
    rows = [request([1, 2, 3, 4, 5], 0), request([9, 2, 3], 1)]
    ahead, behind = SuffixDrafter(2).propose(rows, RNG), SuffixDrafter(2).propose(rows[::-1], RNG)
    assert [draft.tree.ids for draft in ahead] == [draft.tree.ids for draft in behind[::-1]] == [(), (4, 5)]


def test_without_sharing_a_request_drafts_from_its_own_tokens_only():
    drafter = SuffixDrafter(2, shared=False)
    finished(drafter, [1, 2, 3, 4, 5], 0)
    assert drafted(drafter, [9, 2, 3], 1) == ()
    assert drafted(drafter, [9, 2, 9], 2) == (2, 9)


def test_a_sampled_request_with_a_seed_drafts_from_its_own_tokens_only():
    drafter = SuffixDrafter(2)
    finished(drafter, [1, 2, 3, 4, 5], 0)
    assert drafted(drafter, [9, 2, 3], 1, seed=1) == ()
    assert drafted(drafter, [9, 2, 3], 2, seed=1, temperature=0) == (4, 5)
    assert drafted(drafter, [9, 2, 3], 3) == (4, 5)


def test_tokens_of_the_last_round_are_remembered():
    drafter = SuffixDrafter(2)
    running = request([1, 2, 3], 0)
    drafter.propose([running], RNG)
    running.tokens.extend([4, 5])
    drafter.release(0)
    assert drafted(drafter, [2, 3], 1) == (4, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "suffix draft length: expected 1 to 64, got 0"),
        ({"length": 65}, "suffix draft length: expected 1 to 64, got 65"),
        ({"context": 0}, "suffix context: expected 1 to 64 tokens, got 0"),
        ({"factor": -1.0}, "suffix factor: expected 0 or more .*, got -1.0"),
        ({"factor": float("nan")}, "suffix factor: expected .*, got nan"),
        ({"factor": float("inf")}, "suffix factor: expected .*, got inf"),
        ({"threshold": 1.5}, "suffix threshold: expected 0 to 1, got 1.5"),
        ({"capacity": -1}, "suffix capacity: expected 0 or more tokens, got -1"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        SuffixDrafter(**options)


# --- what is stored ---------------------------------------------------------------------------------------------------


def shape(level):
    """The tree as plain values, without the order that decides ties."""
    if level is None:
        return None
    return {
        node.label: (node.total, node.counts or node.best, shape(node.children))
        for first, node in level.items()
        if first == node.label[0]
    }


def nodes(level):
    return sum(1 + nodes(node.children) for node in (level or {}).values())


def counted(texts, context):
    """The slow reference: for every context of every length, how often each token followed."""
    found = defaultdict(Counter)
    for tokens in texts:
        for place in range(1, len(tokens)):
            for size in range(1, min(place, context) + 1):
                found[tuple(tokens[place - size : place])][tokens[place]] += 1
    return found


def assert_counts(index, texts, context):
    expected = counted(texts, context)
    for suffixes, after in expected.items():
        size, node = index.match(suffixes[::-1])
        assert size == len(suffixes)
        assert (node.counts or {node.best: node.total}) == after
        assert node.total == after.total()
        assert after[node.best] == max(after.values())
    for tokens in texts:  # of a longer context, the longest known part is found
        near = (*tokens[::-1], 7)[:context]
        longest = max((size for size in range(context + 1) if near[:size][::-1] in expected), default=0)
        assert index.match(near)[0] == longest


TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=14), max_size=5)


@given(TEXTS, st.integers(1, 5))
def test_the_index_counts_as_the_slow_reference(texts, context):
    drafter = SuffixDrafter(context=context)
    for name, tokens in enumerate(texts):
        finished(drafter, tokens, name)
    assert_counts(drafter._memory.index(""), texts, context)


@given(TEXTS, st.integers(1, 5), st.integers(0, 40))
def test_after_forgetting_a_request_the_index_is_as_if_it_had_never_run(texts, context, capacity):
    drafter, fresh = SuffixDrafter(context=context, capacity=capacity), SuffixDrafter(context=context)
    for name, tokens in enumerate(texts):
        finished(drafter, tokens, name)
    left = [tokens for _, tokens in drafter._memory.finished]
    assert drafter._memory.size == sum(map(len, left)) <= capacity
    assert left == texts[len(texts) - len(left) :]
    for name, tokens in enumerate(left):
        finished(fresh, tokens, name)
    assert shape(drafter._memory.index("").root) == shape(fresh._memory.index("").root)
    assert_counts(drafter._memory.index(""), left, context)


@pytest.mark.grid(15)
@pytest.mark.parametrize("seed", range(20))
def test_tokens_added_step_by_step_give_the_same_index_as_at_once(seed):
    source, tokens = random.Random(seed), text(seed, 80)
    growing, done = SuffixDrafter(6, context=4), 1
    while done < len(tokens):
        done = min(done + source.randrange(4), len(tokens))
        whole = SuffixDrafter(6, context=4)
        assert drafted(growing, tokens[:done]) == drafted(whole, tokens[:done])
        for a, b in (
            (growing._running[0].own, whole._running[0].own),
            (growing._memory.index(""), whole._memory.index("")),
        ):
            assert shape(a.root) == shape(b.root)


def test_nothing_is_left_of_forgotten_requests():
    drafter = SuffixDrafter(capacity=300)
    for name in range(5):
        finished(drafter, text(name, 60), name)
    assert nodes(drafter._memory.index("").root) > 100
    finished(drafter, [], 5)
    drafter._memory._capacity = 0
    finished(drafter, text(9, 10), 6)
    assert drafter._memory.index("").root == {}
    assert not drafter._memory.finished
    assert drafter._memory.size == 0
    assert drafter._running == {}


def test_the_request_that_finished_first_is_forgotten_first_and_no_running_one():
    drafter = SuffixDrafter(2, capacity=10)
    running = 9
    drafted(drafter, [50, 51, 52, 53], running)
    finished(drafter, [10, 11, 12, 13, 14], 0)
    finished(drafter, [20, 21, 22, 23, 24], 1)
    assert drafted(drafter, [10, 11], 10) == (12, 13)
    finished(drafter, [30, 31, 32, 33], 2)
    assert drafted(drafter, [10, 11], 11) == ()
    finished(drafter, text(0, 100), 3)  # too long to keep
    assert [drafted(drafter, [first, first + 1], first) for first in (20, 30)] == [(), ()]
    assert drafted(drafter, [50, 51], 12) == (52, 53)


def test_memory_stays_bounded_over_many_requests():
    drafter, sizes = SuffixDrafter(8, capacity=1000), []
    for name in range(2000):
        finished(drafter, text(name, 10 + name % 20, vocab=50), name)
        sizes += [nodes(drafter._memory.index("").root)] if name % 20 == 0 else []
    assert max(sizes) <= 2 * 1000
    assert max(sizes[50:]) <= 1.1 * max(sizes[:50])
    assert drafter._memory.size <= 1000
    assert len(drafter._memory.finished) < 100
    assert drafter._running == {}


@pytest.mark.parametrize("shared", [False, True])
def test_releasing_twice_or_an_unknown_request_is_allowed(shared):
    drafter = SuffixDrafter(2, shared=shared)
    drafter.release(3)
    finished(drafter, [1, 2, 3], 3)
    drafter.release(3)
    drafter.observe(3, 2, 1)
    assert drafted(drafter, [2, 3, 2], 3) == (3, 2)  # the same id for another request


# --- the output distribution ------------------------------------------------------------------------------------------

# Zeros keep the enumeration short; every case occurs: likely, unlikely and impossible drafts.
TARGET = {(0,): [0.6, 0.4, 0.0], (1,): [0.1, 0.2, 0.7], (2,): [0.5, 0.0, 0.5]}
PAST = (0, 1, 2, 0, 0, 1, 2, 1, 0, 1, 1, 2)


def maker(rule, *, past=(), **options):
    """Makes engines that each have a new drafter: one run of the enumeration must not know the tokens of another."""
    target = TableModel(VOCAB, 0, order=1, rows=TARGET)

    def make(round_rng):
        drafter = SuffixDrafter(2, **options)
        if past:
            finished(drafter, past, -1)
        verifier = make_verifier(rule) if isinstance(rule, str) else rule
        return Engine(target, drafter, verifier, round_rng=round_rng)

    return make


RULES = ["token", "block", "match", "trie_block"]


@pytest.mark.grid(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shared", [False, True])
def test_output_distribution(rule, shared):
    most = 3 if rule == "match" else 4
    assert_lossless(maker(rule, shared=shared), prompt=(0, 1, 0, 1), params=SamplingParams(max_tokens=most))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_output_distribution_after_an_earlier_request(rule, threshold):
    make = maker(rule, past=PAST, threshold=threshold)
    assert drafted(make(CounterRoundRng).drafter, (2, 0)) != drafted(maker(rule)(CounterRoundRng).drafter, (2, 0))
    assert_lossless(make, prompt=(2, 0), params=SamplingParams(max_tokens=3))


@pytest.mark.parametrize("rule", ["token", "block"])
def test_output_distribution_of_two_requests_together_and_one_after_them(rule):
    """The second drafts from the first, the third from both: the joint distribution is the product of the three."""
    make, target, params = maker(rule), TableModel(VOCAB, 0, order=1, rows=TARGET), SamplingParams(max_tokens=2)
    prompts = (0, 1, 2, 0), (1, 2), (2, 0, 1)
    learnt = []

    def joint(rng):
        engine = make(lambda *_: rng)
        first, second = engine.generate([list(prompt) for prompt in prompts[:2]], params)
        third = engine.generate(list(prompts[2]), params)[0]
        learnt.append((second.stats.num_draft_tokens, third.stats.num_draft_tokens))
        return first.token_ids, second.token_ids, third.token_ids

    a, b, c = (target_distribution(target, prompt, params) for prompt in prompts)
    expected = {(x, y, z): a[x] * b[y] * c[z] for x in a for y in b for z in c}
    assert total_variation(exact_distribution(joint), expected) < 1e-12
    assert all(map(sum, zip(*learnt, strict=True)))


def accept_everything(tokens, q, p, *, rng, lengths, validate):
    rows = torch.arange(len(lengths))
    return ChainVerdict(lengths, rng.categorical(p[rows, lengths]))


@pytest.mark.parametrize("past", [(), PAST])
def test_a_rule_that_accepts_everything_is_detected(past):
    """Negative control: without drafts, or with only drafts that the target agrees with, this would not raise."""
    make = maker(ChainVerifier("everything", accept_everything), past=past)
    with pytest.raises(AssertionError, match="total variation"):
        assert_lossless(make, prompt=(0, 1, 0, 1), params=SamplingParams(max_tokens=3))


def first_token_of_a_repeated_request(seeds):
    """Frequencies, over seeds, of the first token of a request that ran before with the same seed."""
    target = TableModel(VOCAB, 0, order=0, rows={(): [1 / 3] * 3})
    found = Counter()
    for seed in range(seeds):
        engine = Engine(target, SuffixDrafter(2), make_verifier("token"))
        once, again = (engine.generate([[0, 1]], SamplingParams(max_tokens=2, seed=seed))[0] for _ in range(2))
        found[again.token_ids[0]] += 1
    return [found[token] / seeds for token in range(VOCAB)], once.token_ids == again.token_ids


def test_a_repeated_seed_repeats_the_answer_and_keeps_the_distribution(monkeypatch):
    """A later request with the same seed must not draft a token, since the same random number would verify it."""
    right, same = first_token_of_a_repeated_request(200)
    assert same
    assert max(abs(found - 1 / 3) for found in right) < 0.1
    monkeypatch.setattr(suffix, "_may_share", lambda _: True)
    wrong, _ = first_token_of_a_repeated_request(200)
    assert max(abs(found - 1 / 3) for found in wrong) > 0.15  # by hand: 5/9 for token 1


# --- through a model --------------------------------------------------------------------------------------------------

PROMPTS = ("Once upon a time", "Tom and Lily went to the park. They saw a big", "The dog", "Once upon a time")


def engine(drafter, max_batch=3, verifier="block"):
    options = {"tokenizer": tokenizer(), "eos_token_ids": (1, 2), "max_batch": max_batch}
    return Engine(backend("target"), drafter, make_verifier(verifier), **options)


@pytest.mark.parametrize("shared", [False, True])
def test_a_request_with_a_seed_has_the_same_answer_alone_and_in_any_batch(shared):
    params = [SamplingParams(max_tokens=12 + 3 * i, seed=100 + i) for i in range(len(PROMPTS))]
    batched = engine(SuffixDrafter(4, shared=shared)).generate(list(PROMPTS), params)
    single = engine(SuffixDrafter(4, shared=shared), max_batch=1)
    alone = [single.generate(prompt, own)[0] for prompt, own in zip(PROMPTS, params, strict=True)]
    assert [output.token_ids for output in batched] == [output.token_ids for output in alone]
    assert sum(output.stats.num_draft_tokens for output in alone) > 0


@pytest.mark.grid(2)
@pytest.mark.parametrize("verifier", RULES)
def test_greedy_output_equals_plain_decoding_and_a_repeated_request_needs_few_rounds(verifier):
    params = SamplingParams(temperature=0, max_tokens=30)
    plain = engine(None).generate(list(PROMPTS), params)
    fast = engine(SuffixDrafter(), max_batch=1, verifier=verifier)
    once, again = (fast.generate(list(PROMPTS), params) for _ in range(2))
    assert [output.token_ids for output in once + again] == [output.token_ids for output in plain] * 2
    assert once[0].stats.block_efficiency < 3
    assert min(output.stats.block_efficiency for output in (once[3], *again)) > 7


def test_samples_of_one_prompt_draft_from_each_other():
    params = SamplingParams(n=4, temperature=0, max_tokens=24)
    drafter = SuffixDrafter()
    outputs = engine(drafter, max_batch=2).generate("The dog", params)
    assert len({output.token_ids for output in outputs}) == 1
    assert outputs[3].stats.num_target_calls < outputs[0].stats.num_target_calls / 2
    assert len(drafter._memory.finished) == 4
    assert drafter._running == {}


# --- by name ----------------------------------------------------------------------------------------------------------


def made(name, draft=None):
    return make_drafter(name, target=backend("target"), draft=draft, stopper="fixed:4")


def test_a_drafter_is_made_by_name():
    assert (made("suffix").limit, made("suffix:5").limit) == (16, 5)
    finished(made("suffix"), [1, 2, 3], 0)


@pytest.mark.parametrize(
    ("name", "draft", "message"),
    [
        ("suffix:0", False, "suffix draft length: expected 1 to 64, got 0"),
        ("suffix:long", False, "expected integers separated by x, for example suffix:16, got 'long'"),
        ("suffix:8x2", False, "expected one integer, for example suffix:16, got '8x2'"),
        ("ngram:8x2", False, "expected one integer, for example ngram:8, got '8x2'"),
        ("suffix:8", True, "drafter suffix uses no draft model: leave out 'draft'"),
    ],
)
def test_a_bad_name_is_refused(name, draft, message):
    with pytest.raises(UserError, match=message):
        made(name, backend("draft") if draft else None)
