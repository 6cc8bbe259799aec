"""The stopper `auto`: what it chooses from costs and acceptance rates, when it probes, and how costs are measured."""

import copy
import itertools
import json
from types import SimpleNamespace

import pytest
import torch

from distributions import checks_off
from draftproof import Engine, SamplingParams, UserError
from draftproof.audit.compositions import PROMPT, STOPPERS, toy_engine
from draftproof.draft import Draft
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.engine import calibration
from draftproof.engine import engine as engine_module
from draftproof.engine.calibration import known_acceptance, known_costs, measured_acceptance, measured_costs
from draftproof.engine.loop import DecodingLoop
from draftproof.engine.registry import make_drafter, make_stopper, make_verifier
from draftproof.engine.stats import Seconds, Stats
from draftproof.rng import CounterRoundRng
from draftproof.stoppers.auto import PAUSES, PROBE, PROBE_SHARE, Auto
from draftproof.stoppers.base import AcceptanceRates
from draftproof.stoppers.fixed import FixedLength
from draftproof.testing import TableModel, exact_distribution, target_distribution, total_variation
from draftproof.theory.cost import BatchCosts, RoundCosts, best_round, best_round_length, expected_tokens
from draftproof.tree import TokenTree
from helpers import backend, engine

HOST = torch.device("cpu")
STORIES = ["Once upon a time", "The little dog", "Tom and Lily went to", "One day, a big cat"]


def pair():
    return {"target": backend("target"), "draft": backend("draft")}


def tokens(outputs):
    return [output.token_ids for output in outputs]


def test_the_best_length_by_hand():
    costs = RoundCosts(target=1.0, draft=0.2)
    # At rate 1/2 n tokens give 2 - 2^-n: 1.5/1.2 = 1.25, 1.75/1.4 = 1.25 and less, 1.875/1.6 and less.
    assert best_round_length(costs, 0.5, 8) == 1
    assert best_round_length(costs, 1.0, 8) == 8
    assert best_round_length(costs, 0.19, 8) == 0
    assert best_round_length(costs, 0.5, 8, gain=1.26) == 0, "too small a gain"
    assert best_round_length(RoundCosts(1.0, 0.1, token=0.1), 0.5, 8) == 1, "the target's cost for each token counts"
    assert costs.of(3) == pytest.approx(1.6)
    # Two rates, 1/2 and 4/5: 1.5/1.2 = 1.25, 1.9/1.4 = 1.357, 2.22/1.6 = 1.3875, 2.476/1.8 = 1.376 and less.
    assert best_round_length(costs, 0.5, 8, later=0.8) == 3
    assert best_round_length(costs, 0.8, 8, later=0.0) == 1


def play(stopper, answers, rounds=400, row=0):
    """Plays rounds of a request, in which answers(round) tokens are accepted; returns the drafted lengths."""
    lengths = []
    for number in range(rounds):
        n = stopper.length(row)
        lengths.append(n)
        stopper.observe(row, n, min(n, answers(number)))
    return lengths


def test_lengths_follow_what_is_accepted():
    costs = RoundCosts(1.0, 0.1)
    good = play(Auto(costs), lambda _: 16)
    bad = play(Auto(costs), lambda number: number % 2)
    assert good[-1] == 16
    assert good == sorted(good), "the length only grows"
    assert 1 <= bad[-1] <= 2


def test_tokens_after_an_accepted_one_have_their_own_rate():
    costs = RoundCosts(1.0, 0.25)
    streaks = play(Auto(costs), lambda number: 0 if number % 2 else 8)
    short = play(Auto(costs), lambda number: 1 if number % 2 else 0)
    assert min(streaks[100:]) >= 5, "half of the first tokens are accepted, and all after an accepted one"
    assert 0 < max(short[100:]) <= 1 or max(short[100:]) == PROBE, "as many first tokens, and no later ones"


def test_drafts_that_never_pay_are_probed_rarely():
    lengths = play(Auto(RoundCosts(1.0, 0.1)), lambda _: 0, rounds=2000)
    drafting = [n for n in lengths if n]
    assert sum(drafting) * 0.1 / 2000 < 0.01, "under one percent of the time"
    late = [place for place, n in enumerate(lengths) if n and place > 1000]
    assert len(late) >= 3, "and there are still probes"
    pause = round(PAUSES[1] / PAUSES[0] * 0.1 / PROBE_SHARE)
    assert {b - a for a, b in itertools.pairwise(late)} == {pause + 2}, "one round by rounding, and the probe itself"
    assert {lengths[place] for place in late} == {PROBE}


def test_it_drafts_again_when_drafts_are_accepted_again():
    lengths = play(Auto(RoundCosts(1.0, 0.1)), lambda number: 0 if number < 300 else 16, rounds=600)
    assert lengths[250:290].count(0) > 35
    assert lengths[-1] >= 8


def test_every_row_has_its_own_rates():
    stopper = Auto(RoundCosts(1.0, 0.1))
    play(stopper, lambda _: 0, row=1)
    assert stopper.length(2) == Auto(RoundCosts(1.0, 0.1)).length(0)
    stopper.release(1)
    assert stopper.length(1) == stopper.length(2)
    stopper.release(77)


GROWING = BatchCosts((1, 4), (RoundCosts(1.0, 0.1), RoundCosts(1.2, 0.3, token=0.9)))


def test_costs_between_two_sizes_lie_on_a_line():
    assert GROWING.at(1) == GROWING.costs[0]
    assert GROWING.at(4) == GROWING.at(40) == GROWING.costs[1]
    assert GROWING.at(2).target == pytest.approx(1 + 0.2 / 3)
    assert GROWING.at(3).draft == pytest.approx(0.1 + 0.2 * 2 / 3)
    assert GROWING.at(3).token == pytest.approx(0.6)
    assert BatchCosts((1,), GROWING.costs[:1]).at(3) == GROWING.costs[0]


def test_drafts_get_shorter_as_the_batch_grows():
    stopper = Auto(GROWING)
    lengths = []
    for batch in (1, 2, 3, 4, 1):
        stopper.begin(range(batch))
        lengths.append(stopper.length(0))
    assert lengths[:4] == sorted(lengths[:4], reverse=True)
    assert lengths[0] == lengths[-1] > lengths[3] == 0


def test_the_engine_passes_the_size_of_the_batch():
    made = auto_engine(GROWING, max_batch=4)
    (alone,) = made.generate([[1, 403]], [SamplingParams(max_tokens=30, seed=0)])
    batch = made.generate([[1, 403 + n] for n in range(4)], [SamplingParams(max_tokens=30, seed=n) for n in range(4)])
    assert alone.stats.num_draft_tokens > 20
    assert batch[0].stats.num_draft_tokens < alone.stats.num_draft_tokens / 2


class Dropping(ModelDrafter):
    """Drops some last tokens in a batch, depending on their value: no stopper may do this."""

    def propose(self, requests, rng):
        drafts = super().propose(requests, rng)
        return drafts if len(requests) == 1 else [self._cut(draft) for draft in drafts]

    def _cut(self, draft):
        if not len(draft) or int(draft.tree.tokens[-1]):
            return draft
        kept = len(draft) - 1
        return Draft(TokenTree.chain(draft.tree.tokens[:kept]), draft.probs[:kept]) if kept else Draft.empty(HOST)


@pytest.mark.parametrize(("drafter", "exact"), [(ModelDrafter, True), (Dropping, False)])
def test_the_distribution_of_a_batch_whose_lengths_depend_on_its_size(drafter, exact):
    """The second request ends first, and then the other drafts more. The joint distribution is still the product."""
    costs = BatchCosts((1, 2), (RoundCosts(1.0, 0.1), RoundCosts(1.0, 0.4)))
    target = TableModel(3, 1)
    params = [SamplingParams(max_tokens=4 if exact else 3), SamplingParams(max_tokens=2)]
    prompts, lengths = [[0], [0, 2, 1]], {1: set(), 2: set()}

    def run(rng):
        made = drafter(DraftModel(TableModel(3, 2, order=2), vocab_size=3), Auto(costs, 2))
        propose = made.propose

        def watched(requests, rng):
            drafts = propose(requests, rng)
            lengths[len(requests)].add(len(drafts[0]))
            return drafts

        made.propose = watched
        outputs = Engine(target, made, round_rng=lambda *_: rng).generate(prompts, params)
        return tuple(output.token_ids for output in outputs)

    with checks_off():
        found = exact_distribution(run)
    first, second = (target_distribution(target, tuple(one), own) for one, own in zip(prompts, params, strict=True))
    expected = {(a, b): x * y for a, x in first.items() for b, y in second.items()}
    assert (total_variation(found, expected) < 1e-12) is exact
    if exact:
        assert lengths[1] - lengths[2], "a request alone drafts more than in a batch"


def test_drafting_that_costs_too_much_is_plain_decoding():
    under_test = Engine.load("embedded:target", "embedded:draft", stopper="auto:0.9", check=False)
    (out,) = under_test.generate(STORIES[0], SamplingParams(max_tokens=30, temperature=0, seed=3))
    plain = engine(draft=None).generate(STORIES[0], SamplingParams(max_tokens=30, temperature=0, seed=3))
    assert out.token_ids == plain[0].token_ids
    assert out.stats.num_draft_tokens <= 2 * PROBE


def auto_engine(costs, **options):
    drafter = ModelDrafter(DraftModel(backend("draft"), vocab_size=512), Auto(costs))
    return Engine(backend("target"), drafter, **options)


def test_a_seed_gives_the_same_text_alone_and_in_a_batch():
    params = [SamplingParams(max_tokens=40, seed=seed) for seed in range(4)]
    prompts = [[1, 403, 407 + place] for place in range(4)]
    costs = RoundCosts(1.0, 0.05)
    batch = auto_engine(costs, max_batch=3).generate(prompts, params)
    alone = [auto_engine(costs).generate([prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
    assert tokens(batch) == tokens(alone)
    assert len({one.stats.num_draft_tokens for one in batch}) > 1, "each request has its own rates"


# --- several drafts ---------------------------------------------------------------------------------------------------


def test_the_best_number_of_drafts_by_hand():
    tokens = {1: expected_tokens(0.5, 0.5), 2: expected_tokens(0.75, 0.5)}
    assert tokens[2][:3] == (1, 1.75, 2.125)
    assert best_round(RoundCosts(1.0, 0.2), {1: tokens[1]}) == (1, 1)
    assert best_round(RoundCosts(1.0, 0.2), tokens) == (2, 2), "2.125 tokens for 1.4, where one draft has 1.5 for 1.2"
    assert best_round(RoundCosts(1.0, 0.2, more=0.3), tokens) == (1, 1), "1.75 tokens for 1.5"
    assert best_round(RoundCosts(1.0, 0.2, token=0.3), tokens) == (0, 1), "nothing pays"
    assert RoundCosts(1.0, 0.2, token=0.1, more=0.05).of(3, 4) == pytest.approx(1 + 3 * (0.2 + 0.15 + 0.4))
    begun = RoundCosts(1.0, 0.2, begin=0.3)
    assert (begun.of(0), begun.of(1), begun.of(4)) == pytest.approx((1.0, 1.5, 2.1))
    assert best_round(begun, {1: (1.0, 1.5, 1.8, 2.1)}) == (3, 1), "2.1 for 1.9, where one token has 1.5 for 1.5"
    halfway = BatchCosts((1, 3), (begun, RoundCosts(2.0, 0.2, begin=0.5))).at(2)
    assert (halfway.of(0), halfway.of(1)) == pytest.approx((1.5, 2.1))


def test_requests_that_share_a_round_decide_together():
    """With good drafts for one request of four, that request drafts alone and not in the batch; with three of four yes.

    In a batch its draft would make the other requests wait.
    """
    costs = BatchCosts((1, 4), (RoundCosts(1.0, 0.1), RoundCosts(1.0, 0.1, token=0.3)))
    for good in (1, 3):
        stopper = Auto(costs)
        for _ in range(60):
            stopper.begin(range(4))
            lengths = [stopper.length(row) for row in range(4)]
            assert len(set(lengths)) == 1
            for row in range(4):
                stopper.observe(row, lengths[row], lengths[row] if row < good else 0)
        assert (lengths[0] > 0) is (good == 3)
        stopper.begin([0])
        assert stopper.length(0) >= 2
    stopper.begin([3])
    assert stopper.length(3) <= 1, "the request whose drafts were always rejected"


def play_several(stopper, answers, rounds, most=4):
    """Plays rounds in which answers(length, drafts) tokens are accepted; returns the number of drafts of each round."""
    made = []
    for _ in range(rounds):
        stopper.begin([0], most)
        length, drafts = stopper.length(0), stopper.drafts(0, most)
        stopper.observe(0, length, min(answers(length, drafts), length))
        made.append(drafts)
    return made


def test_more_drafts_are_tried_and_kept_where_they_pay():
    """Four cheap drafts are kept if more of their tokens are accepted, and given up if they do no better than one."""
    costs = RoundCosts(1.0, 0.1, more=0.02)
    turns = itertools.cycle((0, 1))
    better = play_several(Auto(costs), lambda _, drafts: 5 if drafts == 4 else next(turns), 200)
    assert better.count(4) > 150
    same = play_several(Auto(costs), lambda length, _: length, 200)
    assert same.count(1) > 150
    assert set(same) > {1}, "they were tried"


def test_a_number_of_drafts_that_failed_is_tried_again():
    stopper = Auto(RoundCosts(1.0, 0.1, more=0.01))
    turns = itertools.cycle((0, 1))
    first = play_several(stopper, lambda _, drafts: next(turns) if drafts == 1 else 0, 150)
    assert first.count(1) > 75
    later = play_several(stopper, lambda _, drafts: 8 if drafts == 4 else next(turns), 400)
    assert later[-100:].count(4) > 90


def test_the_number_of_drafts_changes_in_the_toys_that_are_enumerated(monkeypatch):
    """Their output distributions are tested in tests/test_compositions.py."""
    seen, drafts = set(), Auto.drafts

    def watched(self, row, most):
        seen.add(drafts(self, row, most))
        return drafts(self, row, most)

    monkeypatch.setattr(Auto, "drafts", watched)
    for seed in range(20):
        under_test = toy_engine("chains", "auto", "trie_block", CounterRoundRng)
        under_test.generate([list(PROMPT)], SamplingParams(max_tokens=STOPPERS["auto"].tokens, seed=seed))
    assert seen == {1, 2}


# --- costs ------------------------------------------------------------------------------------------------------------


def test_costs_are_measured_and_the_engine_does_not_change():
    under_test = engine()
    kept = under_test.drafter.stopper
    costs = measured_costs(under_test, rows=2)
    assert min(costs.target, costs.draft) > 0
    assert 0.05 < costs.draft / costs.target < 5, "a pass of four layers against one of five"
    assert under_test.drafter.stopper is kept
    assert not under_test.busy
    same = engine().generate(STORIES[0], SamplingParams(max_tokens=20, seed=1))
    assert tokens(under_test.generate(STORIES[0], SamplingParams(max_tokens=20, seed=1))) == tokens(same)


@pytest.mark.parametrize("spec", ["chains:3", "tree:2x2", "tree:2"])
def test_costs_of_several_drafts_and_of_short_trees_are_measured(spec):
    model = {"target": backend("target"), "draft": backend("draft")}
    under_test = Engine(model["target"], make_drafter(spec, **model, stopper="fixed:4"), make_verifier("trie_block"))
    costs = measured_costs(under_test)
    assert 0 < costs.draft < 5 * costs.target
    assert (costs.more > 0) <= (spec == "chains:3"), "the number of drafts of a tree is fixed"
    assert costs.draft != costs.target, "drafts were measured"


def test_a_line_through_two_lengths_gives_the_cost_of_a_token_and_of_the_start_of_a_draft(monkeypatch):
    seconds = {0: (0.0, 2.0), 2: (0.5 + 2 * 0.4, 2.3 + 2 * 0.1), 8: (0.5 + 8 * 0.4, 2.3 + 8 * 0.1)}

    def rounds(_engine, _drafter, way, _rows):
        draft, rest = seconds[way[0]]
        return [Stats(num_draft_tokens=way[0], seconds=Seconds(draft=draft, total=draft + rest))] * 3

    monkeypatch.setattr(calibration, "_rounds", rounds)
    costs = measured_costs(engine(length=8))
    found = (costs.target, costs.draft, costs.token, costs.begin, costs.more)
    assert found == pytest.approx((2.0, 0.4, 0.1, 0.8, 0.0))
    assert [costs.of(n) for n in (0, 2, 8)] == pytest.approx([sum(seconds[n]) for n in (0, 2, 8)])
    seconds[8] = (1.0, 2.0)  # noise: a longer draft seemed to take less
    costs = measured_costs(engine(length=8))
    assert (costs.draft, costs.token) == pytest.approx((0.5 * 1.0 / 8, 0.0)), "no draft has cost 0"


def test_costs_are_measured_once_for_a_pair(tmp_path, monkeypatch):
    file, calls = tmp_path / "deep" / "costs.json", []
    monkeypatch.setattr(calibration, "measured_costs", lambda *of: calls.append(of) or RoundCosts(3.0, 1.0, 0.5))
    file.parent.mkdir()
    first = known_costs(engine(), file)
    assert first.sizes == (1, 8)
    assert (known_costs(engine(), file), len(calls)) == (first, 2)
    assert known_costs(engine(draft="target"), file) == first
    assert [rows for _, rows in calls] == [1, 8, 1, 8], "another pair"
    assert len(json.loads(file.read_text())) == 4
    for broken in ("{", "[]", '{"a": {"target": 1}}'):
        file.write_text(broken)
        assert known_costs(engine(), file) == first
    assert len(calls) == 10


def test_acceptance_is_counted_as_for_requests_and_kept_with_the_costs(tmp_path, monkeypatch):
    under_test, file = engine(draft="target"), tmp_path / "costs.json"
    kept = under_test.drafter.stopper
    assert measured_acceptance(under_test) == AcceptanceRates(1.0, 1.0), "a draft that is the target itself"
    assert under_test.drafter.stopper is kept
    assert not under_test.busy
    found = known_acceptance(engine(), file)
    assert 0.3 < found.first < found.later < 1
    monkeypatch.setattr(calibration, "measured_acceptance", lambda _: AcceptanceRates(0.0, 0.0))
    assert known_acceptance(engine(), file) == found
    counter = calibration._AcceptanceCounter(4)
    for drafted, accepted in ((4, 0), (4, 1), (4, 4), (2, 2), (1, 1), (0, 0)):
        counter.observe(0, drafted, accepted)
    assert counter.rates == AcceptanceRates(4 / 5, 0.8), "first tokens 4 of 5; later tokens 0 of 1, 3 of 3 and 1 of 1"


def test_acceptance_belongs_to_weights_rule_and_sampling(tmp_path, monkeypatch):
    file, made = tmp_path / "costs.json", []
    monkeypatch.setattr(calibration, "measured_acceptance", lambda _: made.append(0) or AcceptanceRates(0.1, 0.2))
    warm = Engine(backend("target"), make_drafter("model", **pair(), stopper="fixed:2"), make_verifier("token"))
    tempered = make_drafter("model", **pair(), stopper="fixed:2", temperature=0.5)
    cool = Engine(backend("target"), tempered, make_verifier("token"))
    block = Engine(backend("target"), make_drafter("model", **pair(), stopper="fixed:2"), make_verifier("block"))
    for under_test in (warm, cool, block, warm, cool, block):
        known_acceptance(under_test, file)
    assert len(made) == 3
    retrained = copy.deepcopy(backend("draft"))
    retrained.model.get_input_embeddings().weight.data.mul_(1.01)
    drafter = make_drafter("model", target=backend("target"), draft=retrained, stopper="fixed:2")
    known_acceptance(Engine(backend("target"), drafter, make_verifier("token")), file)
    assert len(made) == 4, "other weights under the same name"


@pytest.mark.parametrize("start", [5000, -1, None])
def test_texts_begin_at_a_token_that_the_target_has(start, monkeypatch):
    under_test = engine()
    under_test.prompts.tokenizer = None if start is None else SimpleNamespace(bos_token_id=start)
    under_test.eos_token_ids = (99999,)
    prompts = []
    monkeypatch.setattr(DecodingLoop, "generate", lambda _, given, __: prompts.extend(given))
    assert measured_acceptance(under_test) == AcceptanceRates(0.0, 0.0)
    assert {tuple(prompt) for prompt in prompts} == {(0,)}


@pytest.mark.parametrize("max_positions", [40, 64, 128])
def test_short_contexts_are_measured_up_to_their_end(max_positions, monkeypatch):
    under_test = engine(length=8)
    monkeypatch.setattr(under_test.target, "max_positions", max_positions)
    costs = measured_costs(under_test)
    assert costs.target > 0
    assert (costs.draft != costs.target) == (max_positions > 40), "drafts were measured where one of eight tokens fits"


def test_a_request_begins_with_the_assumed_rates_or_the_default_if_that_is_higher():
    costs = RoundCosts(1.0, 0.45)
    assert Auto(costs).length(0) == 0
    assert Auto(costs, assumed=AcceptanceRates(0.2, 0.1)).length(0) == Auto(costs).length(0)
    stopper = Auto(costs, assumed=AcceptanceRates(0.8, 0.9))
    assert stopper.length(0) == best_round_length(costs, 0.8, 16, later=0.9) > 1
    for _ in range(20):
        stopper.observe(0, 4, 0)
    assert (stopper.length(0), stopper.length(1)) == (0, Auto(costs, assumed=AcceptanceRates(0.8, 0.9)).length(0))


def test_costs_that_cannot_be_kept_are_used_with_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(calibration, "measured_costs", lambda *_: RoundCosts(3.0, 1.0, 0.5))
    (tmp_path / "taken").write_text("a file where a folder should be")
    assert known_costs(engine(), tmp_path / "taken" / "costs.json").at(1) == RoundCosts(3.0, 1.0, 0.5)
    assert "set DRAFTPROOF_HOME" in caplog.text


def test_the_stopper_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTPROOF_HOME", str(tmp_path))
    monkeypatch.setattr(engine_module, "known_costs", known_costs)
    monkeypatch.setattr(calibration, "measured_costs", lambda *_: RoundCosts(1.0, 0.01))
    made = Engine.load("embedded:target", "embedded:draft", stopper="auto", check=False)
    (out,) = made.generate(STORIES[1], SamplingParams(max_tokens=24, seed=2))
    assert made.drafter.stopper.costs.at(5) == RoundCosts(1.0, 0.01)
    assert out.stats.num_draft_tokens > 20
    assert make_stopper("auto:0.25").name == "auto:0.25"


@pytest.mark.parametrize("argument", ["auto:fast", "auto:-1", "auto:nan", "auto:inf"])
def test_costs_that_are_none_are_refused(argument):
    with pytest.raises(UserError, match=r"auto:0\.1"):
        make_stopper(argument)
    with pytest.raises(UserError, match="legal are 1 to"):
        Auto(RoundCosts(1.0, 1.0), limit=0)
    with pytest.raises(RuntimeError, match="has no costs of a round"):
        Auto().length(0)
    assert FixedLength(1).length(0) == 1
