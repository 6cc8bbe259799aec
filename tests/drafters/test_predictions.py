"""Predicted outputs: where an answer stands in the text, its output distribution, and what is counted."""

import json
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftproof import Engine, SamplingParams, UserError
from draftproof.draft import Draft, Origin
from draftproof.drafters.auto import AutoDrafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.drafters.predicted import PredictedText
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.engine.verifier_parts import make_verifier
from draftproof.testing import TableModel, engine_distribution, exact_distribution, target_distribution, total_variation
from support.changing_costs import changing
from support.commands import call
from type_checks import checks_off


def after(text, answer, most=3, longest=4):
    """What follows an answer in a text, given token by token and at once."""
    at_once = PredictedText(text, longest)
    at_once.read(answer, 0)
    single = PredictedText(text, longest)
    for end in range(len(answer)):
        single.read(answer[: end + 1], end)
    assert (single.following(most), single.matched) == (at_once.following(most), at_once.matched)
    return at_once.following(most)


# --- places -------------------------------------------------------------------------------------------------------


def test_an_answer_is_expected_to_begin_as_the_text_does():
    assert after([5, 6, 7, 8], []) == [5, 6, 7]
    assert after([5, 6, 7, 8], [5]) == [6, 7, 8]
    assert after([5, 6, 7, 8], [5, 6, 7, 8]) == []


def test_an_answer_that_departs_is_found_again():
    assert after([5, 6, 7, 8, 9], [5, 1]) == [], "nothing ends with 1"
    assert after([5, 6, 7, 8, 9], [5, 1, 7]) == [8, 9], "a token was replaced"
    assert after([5, 6, 7, 8, 9], [5, 1, 2, 3, 6]) == [7, 8, 9], "tokens were inserted"
    assert after([5, 6, 7, 8, 9], [5, 8]) == [9], "tokens were left out"
    assert after([5, 6, 7, 8, 9], [5, 6, 7, 5]) == [6, 7, 8], "a part is repeated"


def test_longer_runs_count_more_and_then_nearer_ones():
    assert after([1, 2, 3, 9, 2, 4, 9, 5], [7, 2, 4, 9]) == [5]
    assert after([1, 9, 2, 1, 1, 9, 3, 1, 9, 4], [1, 9, 2, 1, 1, 8, 9]) == [3, 1, 9]


def by_hand(text, answer, longest):
    """The place after an answer, by comparing everything."""
    place, matched = 0, longest
    for end in range(1, len(answer) + 1):
        if place < len(text) and text[place] == answer[end - 1]:
            place, matched = place + 1, min(matched + 1, longest)
            continue
        tail, found = answer[max(end - longest, 0) : end], []
        for each in range(1, len(text) + 1):
            size = 0
            while size < min(each, len(tail)) and text[each - 1 - size] == tail[-1 - size]:
                size += 1
            if size:
                found.append((size, -abs(each - place), each))
        if found:
            matched, _, place = max(found)
        else:
            matched = 0
    return text[place : place + 3] if matched else []


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12), st.integers(1, 4))
def test_places_are_those_found_by_hand(text, answer, longest):
    assert after(text, answer, longest=longest) == by_hand(text, answer, longest)


def test_a_text_with_one_token_costs_no_more_than_others():
    text = PredictedText([1, 2] * 50_000, 16)
    text.read([1, 3] * 2000, 0)
    assert text.following(1) == []


# --- the output distribution --------------------------------------------------------------------------------------

TARGET, PROMPT, PARAMS = TableModel(3, 1), [0, 2, 1], SamplingParams(max_tokens=4)
TEXT = [1, 0, 2, 2]


def predicting(engine, prediction=TEXT):
    engine.generate = partial(engine.generate, predictions=[prediction])
    return engine


def suffix(**options):
    return SuffixDrafter(3, threshold=0.0, shared=False, **options)


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("rule", "make_drafter", "text"),
    [
        ("block", suffix, TEXT),
        ("token", suffix, [1, 1, 1, 1, 0]),
        ("match", suffix, [2]),
        ("gumbel", suffix, TEXT),
        ("block", changing, TEXT),
        ("gumbel", changing, [1, 1, 1, 1, 0]),
        ("token", lambda: changing(costs=()), TEXT),
    ],
    ids=range(7),
)
def test_the_distribution_with_a_prediction(rule, make_drafter, text):
    origins = set()

    def make(round_rng):
        drafter = make_drafter()
        propose = drafter.propose

        def noting(requests, rng):
            drafts = propose(requests, rng)
            origins.update(draft.origin for draft in drafts if len(draft))
            return drafts

        drafter.propose = noting
        return predicting(Engine(TARGET, drafter, make_verifier(rule), round_rng=round_rng), text)

    with checks_off():
        found = engine_distribution(make, PROMPT, PARAMS)
    assert total_variation(found, target_distribution(TARGET, tuple(PROMPT), PARAMS)) < 1e-12
    assert Origin.PREDICTION in origins


@pytest.mark.parametrize(
    "params", [{"temperature": 0.5}, {"top_k": 2}, {"repetition_penalty": 2.0, "min_tokens": 2}], ids=str
)
def test_the_distribution_with_transforms(params):
    params = SamplingParams(max_tokens=4, **params)

    def make(round_rng):
        return predicting(Engine(TARGET, suffix(), make_verifier("block"), round_rng=round_rng))

    with checks_off():
        found = engine_distribution(make, PROMPT, params)
    assert total_variation(found, target_distribution(TARGET, tuple(PROMPT), params)) < 1e-12


@pytest.mark.parametrize("rule", ["block", "trie_block", "spectr"])
def test_the_distribution_where_predictions_get_probabilities(rule):
    def make(round_rng):
        drafter = AutoDrafter([], suffix(), changing()._lookup_costs.passes, masses=False)
        return predicting(Engine(TARGET, drafter, make_verifier(rule), round_rng=round_rng))

    with checks_off():
        found = engine_distribution(make, PROMPT, PARAMS)
    assert total_variation(found, target_distribution(TARGET, tuple(PROMPT), PARAMS)) < 1e-9


class ClaimsToHaveDrawn(SuffixDrafter):
    """Says that the tokens of the text were drawn uniformly, which they were not."""

    point_masses = False

    def propose(self, requests, rng):
        return [
            Draft(draft.tree, torch.full((len(draft), 3), 1 / 3)) if len(draft) else draft
            for draft in super().propose(requests, rng)
        ]


def test_a_wrong_q_for_predicted_tokens_shows_in_the_distribution():
    def make(round_rng):
        drafter = ClaimsToHaveDrawn(3, threshold=0.0, shared=False)
        return predicting(Engine(TARGET, drafter, make_verifier("block"), round_rng=round_rng))

    with checks_off():
        found = engine_distribution(make, PROMPT, PARAMS)
    assert total_variation(found, target_distribution(TARGET, tuple(PROMPT), PARAMS)) > 0.01


@pytest.mark.slow
def test_the_joint_distribution_of_a_batch_with_two_predictions():
    prompts, params = [PROMPT, [1]], [SamplingParams(max_tokens=3)] * 2

    def run(rng):
        engine = Engine(TARGET, changing((0.05,)), round_rng=lambda *_: rng)
        outputs = engine.generate(prompts, params, predictions=[TEXT, None])
        return tuple(output.token_ids for output in outputs)

    with checks_off():
        found = exact_distribution(run)
    first, second = (target_distribution(TARGET, tuple(one), own) for one, own in zip(prompts, params, strict=True))
    expected = {(a, b): x * y for a, x in first.items() for b, y in second.items()}
    assert total_variation(found, expected) < 1e-12


# --- what it does -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stories():
    return Engine.load("embedded:target", drafter="suffix")


def test_a_right_prediction_saves_rounds_and_changes_nothing(stories):
    params = SamplingParams(temperature=0, max_tokens=60)
    (plain,) = Engine.load("embedded:target", drafter="none").generate("Once upon a time", params)
    (made,) = stories.generate("Once upon a time", params, predictions=plain.text)
    assert made.text == plain.text
    assert made.stats.num_target_calls <= 10
    assert made.stats.num_accepted_prediction_tokens >= 50
    (wrong,) = stories.generate("Once upon a time", params, predictions="The quick brown fox.")
    assert wrong.text == plain.text
    assert wrong.stats.num_accepted_prediction_tokens <= 5


def test_chunks_say_what_was_drafted(stories):
    params = SamplingParams(temperature=0, max_tokens=40)
    (plain,) = stories.generate("Once upon a time", params)
    chunks = list(stories.stream("Once upon a time", params, prediction=plain.token_ids))
    assert sum(chunk.accepted for chunk in chunks) == chunks[-1].output.stats.num_accepted_tokens
    assert sum(chunk.drafted for chunk in chunks) == chunks[-1].output.stats.num_draft_tokens
    assert Origin.PREDICTION in {chunk.origin for chunk in chunks}


def test_drafters_that_cannot_use_one_refuse_it():
    for drafter in (None, NgramDrafter()):
        engine = Engine(TARGET, drafter)
        with pytest.raises(UserError, match="cannot use a prediction"):
            engine.generate([0, 1], SamplingParams(max_tokens=1), predictions=[[1, 2]])
        engine.generate([0, 1], SamplingParams(max_tokens=1), predictions="")


def test_predictions_are_one_or_one_for_each():
    engine = Engine(TARGET, suffix())
    with pytest.raises(UserError, match="predictions: expected one text, or 1 for as many prompts, got 2"):
        engine.generate([[0, 1]], predictions=[[1], [2]])


def test_on_the_command_line(tmp_path):
    asked = ("generate", "Once upon a time", "--temperature", 0, "--max-tokens", 40)
    plain = call(*asked, "-q").stdout
    file = tmp_path / "text"
    file.write_text(plain)
    made = json.loads(call(*asked, "--json", "--compare", "--prediction", file).stdout)
    assert made["text"] == plain.removesuffix("\n")
    assert made["stats"]["num_accepted_prediction_tokens"] > 20
    assert made["compare"]["identical"]
    assert "cannot read" in call(*asked, "--prediction", tmp_path / "none", code=1).stderr
    assert "cannot use a prediction" in call(*asked, "--drafter", "ngram:4", "--prediction", file, code=1).stderr


def test_a_text_is_read_once_for_all_continuations():
    """Each of 72 continuations made an index of its own, between two rounds."""
    text = list(range(1000))
    one, other = (PredictedText(list(text), 8) for _ in range(2))
    assert one._after is other._after
    one.read([5, 6, 7], 0)
    assert (one.following(2), other.following(2)) == ([8, 9], [0, 1])
