"""The drafter `auto`: what it chooses, and that outputs have the target's distribution while it changes drafters."""

import itertools
import json

import pytest
import torch

from draftproof import Engine, SamplingParams, UserError
from draftproof.draft import Draft
from draftproof.drafters import auto as auto_module
from draftproof.drafters.auto import PLAIN, AutoDrafter, CandidateDrafter
from draftproof.drafters.base import DraftRequest
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.engine import drafter_parts
from draftproof.engine.drafter_parts import DRAFTERS, make_drafter
from draftproof.engine.verifier_parts import make_verifier
from draftproof.rng import CounterRoundRng, NoiseRoundRng, Purpose, SplitRoundRng
from draftproof.stoppers.auto import Auto
from draftproof.stoppers.base import RoundTime
from draftproof.stoppers.costs import DraftCosts, LearnedCosts
from draftproof.testing import TableModel, engine_distribution, target_distribution, total_variation
from draftproof.theory.cost import RoundCosts
from draftproof.tree import TokenTree
from support.changing_costs import changing, source
from support.distributions import joint_distance
from support.helpers import backend
from type_checks import checks_off

LEARN = LearnedCosts.learn  # before tests/conftest.py replaces it


class Noting:
    """Runs an engine's rounds and notes which source drafted in each."""

    def __init__(self):
        self.seen = set()

    def watch(self, drafter):
        spent = drafter.spent

        def noting(time):
            choice = drafter._choice
            self.seen.add(
                "lookup" if choice.lookups else choice.source.name if choice.source and time.depth else "none"
            )
            spent(time)

        drafter.spent = noting
        return drafter


@pytest.mark.grid(1)
@pytest.mark.parametrize("rule", ["block", "token", pytest.param("match", marks=pytest.mark.slow), "gumbel"])
def test_the_distribution_while_drafters_change(rule):
    target, prompt, params = TableModel(3, 1), [0, 2, 1, 0, 2], SamplingParams(max_tokens=4)
    noting = Noting()

    def make(round_rng):
        return Engine(target, noting.watch(changing()), make_verifier(rule), round_rng=round_rng)

    with checks_off():
        found = engine_distribution(make, prompt, params)
    assert total_variation(found, target_distribution(target, tuple(prompt), params)) < 1e-12
    assert noting.seen == {"none", "lookup", "table 2", "table 3"}, "everything was chosen somewhere"


@pytest.mark.grid(2)
@pytest.mark.parametrize("rule", ["block", "spectr", "trie_block", "multi_round", "traversal"])
def test_the_distribution_where_lookups_get_probabilities(rule):
    target, prompt, params = TableModel(3, 1), [0, 2, 1, 0, 2], SamplingParams(max_tokens=4)

    def make(round_rng):
        drafter = changing()
        drafter._masses = False
        return Engine(target, drafter, make_verifier(rule), round_rng=round_rng)

    with checks_off():
        found = engine_distribution(make, prompt, params)
    assert total_variation(found, target_distribution(target, tuple(prompt), params)) < 1e-9, (
        "some rules search for a factor"
    )


@pytest.mark.grid(2)
@pytest.mark.parametrize("rule", ["block", "token", "gumbel", "trie_block"])
def test_the_distribution_where_chains_are_extended(rule, monkeypatch):
    made, extended = [], auto_module.extended

    def watched(*args):
        made.append(extended(*args))
        return made[-1]

    monkeypatch.setattr(auto_module, "LEAST", 1)
    monkeypatch.setattr(auto_module, "extended", watched)
    target, prompt, params = TableModel(3, 1), [0, 2, 1, 0, 2], SamplingParams(max_tokens=4)

    def make(round_rng):
        return Engine(
            target, changing((0.05, 0.04), rates=(0.9, 0.9), limit=1), make_verifier(rule), round_rng=round_rng
        )

    with checks_off():
        found = engine_distribution(make, prompt, params)
    assert total_variation(found, target_distribution(target, tuple(prompt), params)) < 1e-12
    assert len(made) > 20


class Peeking(ModelDrafter):
    """Drops a draft whose first token it does not like: a choice by what was drawn, which no drafter may make."""

    def propose(self, requests, rng):
        drafts = super().propose(requests, rng)
        return [Draft.empty() if len(draft) and int(draft.tree.tokens[0]) == 0 else draft for draft in drafts]


def test_a_choice_by_what_was_drawn_shows_in_the_distribution():
    target, prompt, params = TableModel(3, 1), [0, 2, 1, 0, 2], SamplingParams(max_tokens=3)

    def make(round_rng):
        return Engine(target, changing(drafter=Peeking), make_verifier("block"), round_rng=round_rng)

    with checks_off():
        found = engine_distribution(make, prompt, params)
    assert total_variation(found, target_distribution(target, tuple(prompt), params)) > 0.0001


@pytest.mark.slow
def test_the_joint_distribution_of_a_batch_with_looked_up_and_drawn_drafts():
    prompts, mixed = [[0, 2, 1, 0, 2, 1, 0, 2], [1]], set()

    def make(round_rng):
        drafter = changing((0.05, 0.04))
        spent = drafter.spent

        def noting(time):
            mixed.add(bool(drafter._choice.lookups) and drafter._choice.source is not None)
            spent(time)

        drafter.spent = noting
        return Engine(TableModel(3, 1), drafter, round_rng=round_rng)

    assert joint_distance(make, prompts, [SamplingParams(max_tokens=3)] * 2) < 1e-12
    assert True in mixed


class ClockByText:
    """Makes the time of every round depend on everything that happened before it, as a clock that lies may."""

    def __init__(self, drafter):
        self.spent, self.calls = drafter.spent, 0

    def __call__(self, time):
        self.calls += 1
        slow = 1 + 40 * (self.calls * 7 % 5 == time.depth)
        self.spent(RoundTime(0.3 * time.depth * slow, 1.0 + 0.1 * time.nodes, time.rows, time.depth, time.nodes))


def test_the_distribution_while_costs_are_learned_from_a_clock_that_lies(monkeypatch):
    monkeypatch.setattr(LearnedCosts, "learn", LEARN)
    target, prompt, params = TableModel(3, 1), [0, 2, 1], SamplingParams(max_tokens=4)
    lengths = set()

    def make(round_rng):
        passes = DraftCosts()
        sources = [source(seed, LearnedCosts(RoundCosts(1.0, 0.1, begin=0.05), passes)) for seed in (2, 3)]
        drafter = AutoDrafter(sources, SuffixDrafter(3, threshold=0.0, shared=False), passes)
        drafter.spent = ClockByText(drafter)
        propose = drafter.propose

        def watched(requests, rng):
            drafts = propose(requests, rng)
            lengths.update(map(len, drafts))
            return drafts

        drafter.propose = watched
        return Engine(target, drafter, round_rng=round_rng)

    with checks_off():
        found = engine_distribution(make, prompt, params)
    assert total_variation(found, target_distribution(target, tuple(prompt), params)) < 1e-12
    assert lengths >= {0, 2}


# --- what is chosen ---------------------------------------------------------------------------------------------------


def play(drafter, tokens, rounds, accept):
    """Plays rounds on a request without a target; `accept` says how many tokens of a draft are accepted."""
    target = TableModel(3, 0)
    transforms = SamplingParams().bind(vocab_size=3, eos_token_ids=(), prompt_ids=tokens)
    chosen, request = [], DraftRequest(0, tokens, 2, 50, transforms, target.open())
    for number in range(rounds):
        (draft,) = drafter.propose([request], CounterRoundRng([0], [number]))
        choice = drafter._choice
        name = "lookup" if choice.lookups else choice.source.name if choice.source else "none"
        accepted = accept(name, len(draft))
        tokens.extend([*draft.tree.tokens[:accepted].tolist(), number % 3])
        drafter.observe(0, len(draft), accepted)
        drafter.spent(RoundTime(0.1 * len(draft), 1.0, 1, len(draft), len(draft)))
        chosen.append(name)
    return chosen


def test_the_source_whose_drafts_are_accepted_is_taken():
    for good in ("table 2", "table 3"):
        sources = [source(seed, RoundCosts(1.0, 0.1), 8, rates=(0.7, 0.7)) for seed in (2, 3)]
        chosen = play(AutoDrafter(sources, None, DraftCosts()), [0, 1, 2], 100, lambda name, n, g=good: n * (name == g))
        assert chosen[-50:].count(good) >= 48


def test_repeated_passages_are_looked_up_and_others_drafted():
    passage = torch.randint(0, 3, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    drafter = AutoDrafter([source(2, RoundCosts(1.0, 0.3), 8)], SuffixDrafter(16, shared=False), DraftCosts())
    request = [*passage, *passage[:20]]
    chosen = play(drafter, request, 1, lambda _, n: n)
    assert chosen == ["lookup"]
    drafter = AutoDrafter([source(2, RoundCosts(1.0, 0.1), 8, rates=(0.9, 0.9))], None, DraftCosts())
    assert play(drafter, [*passage, *passage[:20]], 1, lambda _, n: n) == ["table 2"]


def test_lookups_that_fail_are_given_up_and_tried_again():
    drafter = AutoDrafter([], SuffixDrafter(16, threshold=0.0, shared=False), DraftCosts())
    chosen = play(drafter, [0, 1, 2] * 20, 300, lambda *_: 0)
    assert 1 <= chosen[50:].count("lookup") <= 10
    assert chosen[:3].count("lookup") >= 1


@pytest.mark.parametrize("accepted", [True, False])
def test_extensions_of_chains_are_made_as_long_as_they_are_accepted(accepted):
    """A source with short chains in a text that repeats, where a lookup alone may not begin."""
    passage = torch.randint(0, 40, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    target, tokens = TableModel(40, 0), [*passage, *passage[:10]]

    class Following(ModelDrafter):
        def propose(self, requests, rng):  # noqa: ARG002
            ids = [passage[(len(requests[0].tokens) + place) % 50] for place in range(2)]
            return [Draft(TokenTree.chain(torch.tensor(ids)), torch.full((2, 40), 1 / 40))]

    short = source(2, RoundCosts(1.0, 0.05), 2, drafter=Following, rates=(0.95, 0.95))
    drafter = AutoDrafter([short], SuffixDrafter(16, shared=False), DraftCosts(0.05))
    drafter._choose_with_lookup = lambda best, *_: best
    transforms = SamplingParams().bind(vocab_size=40, eos_token_ids=(), prompt_ids=tokens)
    sizes = []
    for number in range(200):
        request = DraftRequest(0, tokens, 2, 50, transforms, target.open())
        (draft,) = drafter.propose([request], CounterRoundRng([0], [number]))
        own = drafter._drawn_tokens.get(0, len(draft))
        sizes.append(len(draft) - own)
        taken = len(draft) if accepted else own
        tokens.append(passage[len(tokens) % 50])
        drafter.observe(0, len(draft), taken)
        drafter.spent(RoundTime(0.1 * own, 1.0, 1, len(draft), len(draft)))
    assert max(sizes[:20]) > 0
    assert (max(sizes[-20:]) > 4) if accepted else (sum(sizes[-50:]) <= 5)


@pytest.mark.parametrize(("token", "looked"), [(0.5, True), (1.5, False)])
def test_one_request_of_eight_is_looked_up_where_its_tokens_pay(token, looked):
    """Its draft costs what it reads, an eighth of what drafts of all eight would cost."""
    drafter = AutoDrafter([], SuffixDrafter(16, threshold=0.0, shared=False), DraftCosts(token))
    target, requests = TableModel(40, 0), []
    for number in range(8):
        tokens = [0, 1, 2, 3, 4] * 5 if number == 0 else [8 + number, 20 + number, 30 + number]
        transforms = SamplingParams().bind(vocab_size=40, eos_token_ids=(), prompt_ids=tokens)
        requests.append(DraftRequest(number, tokens, 1, 50, transforms, target.open()))
    lengths = [len(draft) for draft in drafter.propose(requests, CounterRoundRng(list(range(8)), [0] * 8))]
    assert bool(lengths[0]) == looked
    assert not any(lengths[1:])


def rounds_of_a_batch(drafter, texts, rounds, accept):
    """Plays rounds of several requests; gives the lengths of the drafts of each round."""
    target, made = TableModel(40, 0), []
    transforms = [SamplingParams().bind(vocab_size=40, eos_token_ids=(), prompt_ids=text) for text in texts]
    for number in range(rounds):
        requests = [
            DraftRequest(place, text, 2, 50, own, target.open())
            for place, (text, own) in enumerate(zip(texts, transforms, strict=True))
        ]
        drafts = drafter.propose(requests, CounterRoundRng([0] * len(texts), [number] * len(texts)))
        for place, (text, draft) in enumerate(zip(texts, drafts, strict=True)):
            accepted = accept(len(draft))
            text.extend([*draft.tree.tokens[:accepted].tolist(), number % 5])
            drafter.observe(place, len(draft), accepted)
        made.append([len(draft) for draft in drafts])
        nodes = sum(made[-1]) / len(texts)
        drafter.spent(RoundTime(0.0, 1.0 + 0.7 * nodes, len(texts), max(made[-1]), nodes))
    return made


@pytest.mark.parametrize(("size", "every"), [(1, 1), (8, 1), (9, 2), (16, 2), (32, 4)])
def test_many_requests_do_not_choose_in_every_plain_round(size, every, monkeypatch):
    drafter = AutoDrafter([], SuffixDrafter(16, threshold=0.0, shared=False), DraftCosts(2.0))
    texts = [[n % 40, (7 * n + 1) % 40, (11 * n + 3) % 40] for n in range(size)]
    choices, made = [], []
    chosen = drafter._choose
    monkeypatch.setattr(drafter, "_choose", lambda *given: choices.append(len(made)) or chosen(*given))
    for _ in range(PLAIN):
        made += rounds_of_a_batch(drafter, texts, 1, lambda n: n)
    assert not any(map(any, made)), "nothing pays"
    assert choices == list(range(every - 1, PLAIN, every))
    for _ in range(20 * PLAIN):
        made += rounds_of_a_batch(drafter, texts, 1, lambda n: n)
    pauses = [later - before for before, later in itertools.pairwise(choices)]
    assert (max(pauses) > every) is (size > 1), "less often while nothing pays"


def test_after_a_round_with_drafts_many_requests_choose_again(monkeypatch):
    passes = DraftCosts()
    passes.restore({"16": [1.0, 0.1]})
    drafter = AutoDrafter([], SuffixDrafter(4, threshold=0.0, shared=False), passes)
    texts = [[0, 1, 2, 3, 4] * 5, *([8 + n, 20 + n % 20, 30 + n % 10] for n in range(15))]
    choices, made = [], []
    chosen = drafter._choose
    monkeypatch.setattr(drafter, "_choose", lambda *given: choices.append(len(made)) or chosen(*given))
    for _ in range(12):
        made += rounds_of_a_batch(drafter, texts, 1, lambda n: n)
    drafted = [number for number, lengths in enumerate(made) if any(lengths)]
    assert len(drafted) >= 2
    assert {number + 1 for number in drafted} - {12} <= set(choices)
    assert set(choices) < set(range(12)), "not in every plain round"


def test_each_request_is_looked_up_as_far_as_its_tokens_pay():
    passes = DraftCosts()
    passes.restore({"8": [1.0, 0.5]})
    texts = [[0, 1, 2, 3, 4] * 5, [5, 6, 5, 6, 7, 5], *([8 + n, 20 + n, 30 + n] for n in range(6))]
    drafter = AutoDrafter([], SuffixDrafter(16, threshold=0.0, shared=False), passes)
    (lengths,) = rounds_of_a_batch(drafter, texts, 1, lambda n: n)
    assert lengths[0] > 4, "a long match"
    assert lengths[1:] == [0] * 7, "a short one, and none"


def test_lookups_that_fail_in_a_batch_are_tried_for_all_requests_together():
    passes = DraftCosts()
    passes.restore({"8": [1.0, 0.7]})
    drafter = AutoDrafter([], SuffixDrafter(16, threshold=0.0, shared=False), passes)
    made = rounds_of_a_batch(drafter, [[0, 1, 2, 3, 4] * 5 for _ in range(8)], 1200, lambda _: 0)
    lost = [0.7 * sum(lengths) / 8 for lengths in made]
    assert 0 < sum(lost[200:]) < 0.02 * 1000, "in plain rounds"


@pytest.mark.parametrize("sources", [0, 1])
def test_the_cost_of_lookups_is_learned(monkeypatch, sources):
    """Where a verified token costs as much as a pass, passages are not looked up any more."""
    monkeypatch.setattr(LearnedCosts, "learn", LEARN)
    passes = DraftCosts()
    made = [source(2, LearnedCosts(RoundCosts(1.0, 9.0), passes), 8) for _ in range(sources)]
    drafter = AutoDrafter(made, SuffixDrafter(16, threshold=0.0, shared=False), passes)
    spent, looked = drafter.spent, []

    def slow(time):
        looked.append(bool(drafter._choice.lookups))
        spent(RoundTime(time.draft, 1.0 + 2.0 * time.nodes, 1, time.depth, time.nodes))

    drafter.spent = slow
    play(drafter, [0, 1, 2] * 20, 300, lambda _, n: n)
    if not sources:
        assert True in looked[:40]
    assert passes.rest(1, 4) == pytest.approx(9.0, rel=0.2), "the tries of a source show what a token costs, too"
    assert looked[-100:].count(True) <= 5


def built_in_steps(steps):
    """A drafter over one source that takes four steps to build, and appends the number of each."""
    stopper = Auto(RoundCosts(1.0, 0.1), 2)

    def building():
        for step in range(4):
            steps.append(step)
            yield None
        yield ModelDrafter(DraftModel(TableModel(3, 2, order=2), vocab_size=3), stopper)

    return AutoDrafter([CandidateDrafter("slow", stopper, building())], None, DraftCosts())


def test_sources_are_built_in_steps_and_only_when_they_are_needed():
    steps = []
    under_test = Engine(TableModel(3, 1), built_in_steps(steps))
    assert not steps, "not before the first request"
    under_test.generate([[0, 1]], SamplingParams(max_tokens=1))
    assert not steps, "not before the first token"
    (out,) = under_test.generate([[0, 1]], SamplingParams(max_tokens=20, seed=1))
    assert steps == [0, 1, 2, 3]
    assert out.stats.num_draft_tokens > 0


def test_sources_can_be_built_before_the_first_request():
    steps = []
    under_test = Engine(TableModel(3, 1), built_in_steps(steps))
    assert not under_test.prepare(0.0)
    assert steps == [0], "one step, however short the time"
    assert under_test.prepare()
    assert steps == [0, 1, 2, 3]
    assert under_test.prepare(0.0)
    (out,) = under_test.generate([[0, 1]], SamplingParams(max_tokens=3, seed=1))
    assert out.stats.num_draft_tokens > 0, "in the round after the prompt"
    assert Engine(TableModel(3, 1)).prepare(), "plain decoding needs nothing"


def test_decoding_goes_on_without_a_source_that_cannot_be_made(caplog):
    def failing():
        yield None
        raise RuntimeError("no memory left")

    drafter = AutoDrafter([CandidateDrafter("large", Auto(RoundCosts(1.0, 0.1), 2), failing())], None, DraftCosts())
    (out,) = Engine(TableModel(3, 1), drafter).generate([[0, 1]], SamplingParams(max_tokens=20, seed=1))
    assert (len(out.token_ids), out.stats.num_draft_tokens) == (20, 0)
    assert caplog.text.count("drafter large cannot be used (no memory left)") == 1
    drafter = AutoDrafter([CandidateDrafter("large", Auto(RoundCosts(1.0, 0.1), 2), failing())], None, DraftCosts())
    assert Engine(TableModel(3, 1), drafter).prepare()


def test_weights_that_do_not_fit_are_not_made(monkeypatch, caplog):
    monkeypatch.setattr(drafter_parts, "available", lambda _: 1000)
    made = Engine.load("embedded:stories", check=False)
    (out,) = made.generate("Once upon a time", SamplingParams(max_tokens=30, seed=1, ignore_eos=True))
    assert len(out.token_ids) == 30
    assert "of memory are free): decoding continues without it" in caplog.text


# --- by name ----------------------------------------------------------------------------------------------------------


def test_it_is_the_default_and_takes_what_is_at_hand():
    alone = Engine.load("embedded:stories", check=False)
    assert alone.drafter.name == "auto"
    assert [one.name for one in alone.drafter.sources] == ["quantized:4"]
    pair = Engine.load("embedded:stories", "embedded:stories-draft", check=False)
    assert [one.name for one in pair.drafter.sources] == ["model embedded:stories-draft", "quantized:4"]
    other = Engine.load("embedded:stories", backend="hf", check=False)
    assert [one.name for one in other.drafter.sources] == ["quantized:4"]
    fixed = Engine.load("embedded:stories", stopper="fixed:3", check=False)
    assert (fixed.drafter.name, fixed.drafter.stopper.name) == ("quantized:4", "fixed:3")
    constant = Engine.load("embedded:stories", verifier="greedy_block", check=False)
    assert constant.drafter.name == "none", "nothing at hand fits a rule of constant lengths"
    with pytest.raises(UserError, match="drafter: expected one of"):
        make_drafter("auto:4", target=backend("target"), draft=None, stopper="auto")
    assert DRAFTERS["auto"].traits.accepts_draft_model


@pytest.mark.grid(2)
@pytest.mark.parametrize("rule", ["block", "spectr", "mixture:0.1", "typical:0.1"])
def test_every_rule_takes_it(rule):
    made = Engine.load("embedded:stories", "embedded:stories-draft", verifier=rule, check=False)
    (out,) = made.generate("Once upon a time", SamplingParams(max_tokens=40, seed=1, ignore_eos=True))
    assert out.stats.num_draft_tokens > 0


def test_greedy_text_is_that_of_plain_decoding():
    params = SamplingParams(max_tokens=60, temperature=0)
    texts = ["Once upon a time", "The little dog", "Tom and Lily", "One day"]
    for target in ("embedded:stories", "embedded:target"):
        plain = Engine.load(target, drafter="none", dtype="float32", check=False).generate(texts, params)
        found = Engine.load(target, dtype="float32", check=False).generate(texts, params)
        assert [one.token_ids for one in found] == [one.token_ids for one in plain]


def test_what_it_learned_can_be_kept():
    first = changing()
    play(first, [0, 1, 2] * 10, 60, lambda _, n: n)
    kept = json.loads(json.dumps(first.to_dict()))
    second = changing()
    second.restore(kept)
    assert second.lookup_rates.to_dict() == {}, "nothing of its own yet"
    assert second.lookup_rates.assumed != first.lookup_rates.assumed
    with pytest.raises(KeyError):
        second.restore({})


# --- a rule for each request ------------------------------------------------------------------------------------------


def test_a_seed_gives_one_text_whatever_the_clock_says(monkeypatch):
    monkeypatch.setattr(LearnedCosts, "learn", LEARN)
    texts = ["Once upon a time", "The little dog", "Tom and Lily"]
    params = [
        SamplingParams(max_tokens=50, seed=7),
        SamplingParams(max_tokens=50),
        SamplingParams(max_tokens=50, seed=9),
    ]
    options = {"dtype": "float32", "check": False}
    plain = Engine.load("embedded:stories", drafter="none", verifier="gumbel", **options).generate(texts, params)
    drafted, count = Engine.load("embedded:stories", "embedded:stories-draft", **options), 0
    for _ in range(3):
        found = drafted.generate(texts, params)
        assert [one.verifier for one in found] == ["gumbel", "block", "gumbel"]
        assert [one.lossless for one in found] == [True] * 3
        assert [one.token_ids for one in found[::2]] == [one.token_ids for one in plain[::2]]
        count += sum(one.stats.num_draft_tokens for one in found)
    assert count > 0, "at least while little is known of the costs"
    named = Engine.load("embedded:stories", "embedded:stories-draft", verifier="block", **options)
    assert named.generate(texts[0], params[0])[0].verifier == "block", "a rule that is named holds for all requests"
    fixed = Engine.load("embedded:stories", "embedded:stories-draft", stopper="fixed:2", **options)
    assert fixed.generate(texts[0], params[0])[0].verifier == "block", "its lengths depend on no clock"
    greedy = SamplingParams(max_tokens=4, temperature=0, seed=1)
    assert drafted.generate(texts[0], greedy)[0].verifier == "block", "nothing is drawn"


@pytest.mark.parametrize("picked", [None, [3, 0], [1], [2, 3, 1, 0]])
def test_rows_that_draw_in_two_ways_draw_as_they_would_alone(picked):
    seeds, numbers, kinds = [5, 6, 7, 8], [3, 2, 9, 4], [[0, 2], [1, 3]]
    made = (CounterRoundRng, NoiseRoundRng)
    parts = [
        (rows, kind([seeds[r] for r in rows], [numbers[r] for r in rows]))
        for rows, kind in zip(kinds, made, strict=True)
    ]
    alone = [made[row % 2]([seeds[row]], [numbers[row]]) for row in range(4)]
    rows = picked or list(range(4))
    weights = torch.rand(len(rows), 3, 11, generator=torch.Generator().manual_seed(1))
    together = SplitRoundRng(parts).at(Purpose.VERIFY, 1, picked)
    indices, decisions = together.categorical(weights), together.bernoulli(weights)
    for place, row in enumerate(rows):
        own = alone[row].at(Purpose.VERIFY, 1)
        assert torch.equal(indices[place : place + 1], own.categorical(weights[place : place + 1]))
        assert torch.equal(decisions[place : place + 1], own.bernoulli(weights[place : place + 1]))
