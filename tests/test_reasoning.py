"""Reasoning before an answer: its limit is exact with every drafter and rule, and its text is kept apart."""

import logging

import numpy as np
import pytest
import torch
from typing_extensions import override

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed
from draftproof.backends.loading.fast_tokenizer import Description, FastTokenizer, describe
from draftproof.cli.generate import GenerateRun, PromptInput
from draftproof.engine.prompts import PromptReader
from draftproof.engine.verifier_parts import make_verifier
from draftproof.finish import Cutter
from draftproof.integrations.rollout import Rollouts
from draftproof.reasoning import Reasoning, ReasoningConstraint, ReasoningMarkers, reasoning_after, reasoning_markers
from draftproof.sampling import Constraint
from draftproof.testing import EnumeratedNoise, TableModel, exact_distribution, total_variation
from support.reasoning_models import MARKERS as IDS
from support.reasoning_models import OPENED, QWEN, thinking_engine
from support.small_drafters import DRAFTERS, PAIRS, VOCAB, model
from type_checks import checks_off

WORD, BEGIN, STOP, END = 0, 1, 2, 3  # the vocabulary of the toys
MARKERS = ReasoningMarkers(BEGIN, STOP)
PROMPT = [0, 2, 0, 1, 0]


class Alternating(Constraint):
    """An answer of which every second token is WORD, and the others are not; it may end after an even number."""

    @override
    def fresh(self):
        return self

    @override
    def allowed(self, output_ids, paths):
        rows = [len(output_ids) + len(path) for path in paths]
        legal = {0: [False, True, True, True], 1: [True, False, False, False]}
        return torch.tensor([legal[count % 2] for count in rows])

    @override
    def forced(self, output_ids):
        return [WORD] if len(output_ids) % 2 else []


def legal(output, spent, budget, formed):
    """Which tokens may come next, by a walk through the output."""
    inside, count, answer = spent is not None, spent or 0, None if spent is not None else 0
    for place, token in enumerate(output):
        if inside and token == STOP:
            inside, answer = False, 0
        elif inside:
            count += 1
        elif place == 0 and token == BEGIN:
            inside, answer = True, None
        else:
            answer += 1
    found = [True] * VOCAB
    if inside:
        if budget is not None and count >= budget:
            return [token == STOP for token in range(VOCAB)]
        found[END] = not formed
    elif formed:
        found = [False, True, True, True] if answer % 2 == 0 else [True, False, False, False]
        found[BEGIN] = found[BEGIN] or (not output and spent is None)
    return found


def by_hand(target, spent, budget, formed, most, legal=legal):
    """Outputs and their probabilities, by walking through all of them."""
    found, open_ = {}, [((), 1.0)]
    while open_:
        output, weight = open_.pop()
        if len(output) == most or END in output:
            found[output] = weight
            continue
        session = target.open()
        logits = target.forward([Feed(session, [*PROMPT, *output], None)])[0].logits[-1].double()
        mask = torch.tensor(legal(output, spent, budget, formed))
        for token, prob in enumerate(logits.masked_fill(~mask, -torch.inf).softmax(-1).tolist()):
            if prob > 0:
                open_.append(((*output, token), weight * prob))
    return found


def found_by(drafter, rule, target, asked, most, change=lambda constraint: constraint, markers=MARKERS):
    """The same of an engine, by enumerating its draws."""
    spent, budget, formed = asked

    def program(rng):
        noise = EnumeratedNoise(rng)
        engine = Engine(
            target,
            drafter(),
            make_verifier(rule),
            eos_token_ids=[END],
            round_rng=lambda seeds, rounds: noise.round(seeds, rounds) if engine.verifier.shared_noise else rng,
        )
        request = engine.add(
            PROMPT,
            SamplingParams(max_tokens=most, thinking_token_budget=budget, grammar="json_object" if formed else None),
            reasoning=Reasoning(markers, spent),
            constraint=Alternating() if formed else None,
        )[0]
        request.transforms.__dict__["constraint"] = change(request.transforms.constraint)
        while not request.finished:
            engine.step()
        return tuple(request.output_ids)

    with checks_off():
        return exact_distribution(program)


FORMED = [(None, 0, True), (None, 1, True), (0, 0, True), (0, 2, True), (1, 2, True), (3, 2, True), (0, None, True)]
FREE = [(None, 1, False), (0, 2, False)]  # with many more outputs
CASES = [
    pytest.param(*pair, asked, marks=[pytest.mark.slow] * (asked in FREE and pair[0] not in {"none", "suffix"}))
    for pair in PAIRS
    for asked in (*FORMED, *FREE)
]


@pytest.mark.grid(6)
@pytest.mark.parametrize(("name", "rule", "asked"), CASES)
def test_the_distribution_is_the_targets_with_the_limit(name, rule, asked):
    target, most = TableModel(VOCAB, 1), 3 if name == "tree" else 4
    found = found_by(DRAFTERS[name], rule, target, asked, most)
    expected = by_hand(target, *asked, most)
    assert total_variation(found, expected) < 1e-9
    assert len(expected) > 2


class Late(ReasoningConstraint):
    """Counts committed tokens only, so that a draft may cross the limit."""

    @override
    def allowed(self, output_ids, paths):
        return super().allowed(output_ids, [()]).expand(len(paths), -1)


def test_a_limit_that_drafts_may_cross_is_detected():
    def late(constraint):
        return Late(constraint._reasoning, VOCAB, constraint._budget, constraint._answer, constraint._eos)

    target = TableModel(VOCAB, 1)
    expected = by_hand(target, 0, 2, False, 3)
    assert total_variation(found_by(DRAFTERS["none"], "block", target, (0, 2, False), 3, late), expected) < 1e-9
    assert total_variation(found_by(model, "block", target, (0, 2, False), 3, late), expected) > 0.1  # it is 0.21


@pytest.mark.parametrize("spent", [None, 0, 1])
@pytest.mark.parametrize("budget", [0, 1, 3])
def test_forced_tokens_are_the_only_legal_ones(spent, budget):
    constraint = ReasoningConstraint(Reasoning(MARKERS, spent), VOCAB, budget, Alternating(), [END])
    seen = 0
    for length in range(5):
        for number in range(VOCAB**length):
            output = [number // VOCAB**place % VOCAB for place in range(length)]
            if not all(legal(output[:place], spent, budget, True)[token] for place, token in enumerate(output)):
                continue
            for place, token in enumerate(forced := constraint.forced(output)):
                assert legal([*output, *forced[:place]], spent, budget, True) == [
                    each == token for each in range(VOCAB)
                ]
            seen += len(forced)
    assert seen


# --- models that write in channels ------------------------------------------------------------------------------------

CHANNELS = ReasoningMarkers(BEGIN, STOP, opening=(WORD, STOP), turn=(WORD,), answer=(BEGIN, BEGIN))


def place_in_channels(output, spent):
    """Where an output ends: the part, how many tokens of reasoning, and what there is of the part."""
    at, count, part = "begins" if spent is None else "inside", spent or 0, ()
    headers = {
        ("begins", (BEGIN, WORD, STOP)): "inside",
        ("begins", (BEGIN, BEGIN)): "answers",
        ("turns", (WORD, BEGIN, BEGIN)): "answers",
    }
    for token in output:
        part = (*part, token)
        if at == "inside":
            count += token != STOP
            at, part = ("turns", ()) if token == STOP else (at, part)
        elif (at, part) in headers:
            at, part = headers[at, part], ()
    return at, count, part


def legal_in_channels(output, spent, budget, formed):
    """Which tokens may come next."""
    at, count, part = place_in_channels(output, spent)
    if at == "begins":
        return [[BEGIN], [WORD, BEGIN], [STOP]][len(part)]
    if at == "turns":
        return [(WORD, BEGIN, BEGIN)[len(part)]]
    if at == "inside":
        return [STOP] if budget is not None and count >= budget else [WORD, BEGIN, STOP, *([] if formed else [END])]
    if not formed:
        return [WORD, BEGIN, STOP, END]
    return [BEGIN, STOP, END] if len(part) % 2 == 0 else [WORD]


def mask_in_channels(*asked):
    return [token in legal_in_channels(*asked) for token in range(VOCAB)]


@pytest.mark.parametrize("spent", [None, 0, 1])
@pytest.mark.parametrize(("budget", "formed"), [(0, True), (1, True), (1, False), (2, False), (None, True)])
def test_headers_and_the_limit_are_a_mask_of_the_prefix(spent, budget, formed):
    """However an output is divided into what is committed and what is drafted."""
    answer = Alternating() if formed else None
    constraint = ReasoningConstraint(Reasoning(CHANNELS, spent), VOCAB, budget, answer, [END])
    outputs, seen = [()], 0
    for _ in range(8):
        for output in outputs:
            expected = mask_in_channels(output, spent, budget, formed)
            for cut in range(len(output) + 1):
                assert constraint.allowed(output[:cut], [(), output[cut:]])[1].tolist() == expected, (output, cut)
            for place, token in enumerate(forced := constraint.forced(output)):
                assert legal_in_channels([*output, *forced[:place]], spent, budget, formed) == [token]
            seen += len(forced)
        outputs = [
            (*output, token)
            for output in outputs
            if END not in output
            for token in legal_in_channels(output, spent, budget, formed)
        ][-60:]
    assert seen or budget is None


@pytest.mark.parametrize("name", ["none", "model", "suffix"])
@pytest.mark.parametrize("asked", [(None, 0, True), (0, 1, True)])
def test_the_distribution_in_channels_is_the_targets_with_the_mask(name, asked):
    target = TableModel(VOCAB, 1)
    found = found_by(DRAFTERS[name], "block", target, asked, 6, markers=CHANNELS)
    expected = by_hand(target, *asked, 6, mask_in_channels)
    assert total_variation(found, expected) < 1e-9
    assert len(expected) > 2
    assert total_variation(found, by_hand(target, *asked, 6)) > 0.01, "another mask has another distribution"


def cut_in_channels(ids, spent=None, **options):
    cutter = Cutter(SamplingParams(**options), [END], None, reasoning=Reasoning(CHANNELS, spent))
    kept = [cutter.cut([token]) for token in ids]
    return [each.reasoning_tokens for each in kept], cutter.finish


def test_headers_count_as_markers():
    first = CHANNELS.first
    assert cut_in_channels([*first, WORD, STOP, WORD, BEGIN, BEGIN, WORD, END]) == ([1] * 8 + [0, 0], "stop")
    assert cut_in_channels([BEGIN, BEGIN, WORD, END]) == ([1, 1, 0, 0], "stop")
    assert cut_in_channels([STOP, BEGIN, WORD], max_tokens=3) == ([0, 0, 0], "length")
    again = [*first, STOP, WORD, *first, WORD, STOP, WORD, BEGIN, BEGIN, WORD]
    assert cut_in_channels(again, max_tokens=14) == ([1] * 13 + [0], "length")
    assert cut_in_channels([WORD, STOP, WORD, BEGIN, BEGIN, WORD], spent=0, max_tokens=6)[0] == [1] * 5 + [0]


# --- where it begins --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "spent"),
    [
        ([0, 0], None),
        ([BEGIN, STOP, 0], None),  # earlier turns, or what a user writes
        ([BEGIN, 0], None),
        ([0, BEGIN], 0),
        ([0, BEGIN, 9, 9], 2),
        ([BEGIN, 9, 9, 9, 9, 9], None),  # too far away to be the template's
    ],
)
def test_the_end_of_the_prompt_says_whether_the_model_reasons(prompt, spent):
    assert reasoning_after(prompt, MARKERS, {9}) == Reasoning(MARKERS, spent)


def test_a_prompt_that_ends_the_reasoning_leaves_none():
    assert reasoning_after([BEGIN, 9, STOP, 9], MARKERS, {9}) is None


def test_markers_are_tokens_that_the_template_names(caplog):
    tokenizer = thinking_engine().tokenizer
    assert reasoning_markers(tokenizer) == ReasoningMarkers(IDS["<think>"], IDS["</think>"])
    tokenizer.chat_template = "{{ messages }}"
    assert reasoning_markers(tokenizer) is None
    assert reasoning_markers(None) is None
    assert not caplog.records
    tokenizer.chat_template = "{{ messages }}[THINK]x[/THINK]"
    with caplog.at_level(logging.WARNING):
        assert reasoning_markers(tokenizer) is None
    assert "[THINK] and [/THINK], are no tokens" in caplog.text


@pytest.mark.parametrize("field", ["reasoning_content", "thinking"])
def test_markers_that_a_checkpoint_names_itself(field):
    """In the template that transformers reads answers back with; its own reader takes it, too."""
    tokenizer = thinking_engine().tokenizer
    tokenizer.chat_template = "{{ messages }}assistant:"
    assert reasoning_markers(tokenizer) is None
    fields = {field: {"open": "<think>\n", "close": "\n</think>"}, "content": {}}
    tokenizer.response_template = {"start_anchor": "assistant:", "fields": fields}
    assert reasoning_markers(tokenizer) == ReasoningMarkers(IDS["<think>"], IDS["</think>"])
    read = tokenizer.parse_response("<think>\nHm.\n</think>Yes.", prefix="assistant:")
    assert (read[field], read["content"]) == ("Hm.", "Yes.")
    content, description = describe(tokenizer)
    assert reasoning_markers(FastTokenizer(content, Description(**description), lambda: None)).begin == IDS["<think>"]
    for wrong in ({"fields": []}, {"fields": {field: "<think>"}}, {"fields": {field: {"open": ["<think>"]}}}, "x"):
        tokenizer.response_template = wrong
        assert reasoning_markers(tokenizer) is None


def test_a_template_that_is_replaced_counts():
    tokenizer = thinking_engine().tokenizer
    reader = PromptReader(tokenizer, "x")
    assert reader.markers
    tokenizer.chat_template = "{{ messages }}"
    assert reader.markers is None


# --- texts ------------------------------------------------------------------------------------------------------------


def cut(engine, words, *, opened, size=1, **params):
    """What a cutter makes of words, some tokens at a time; and what its pieces are together."""
    tokenizer = engine.tokenizer
    ids = tokenizer(words, add_special_tokens=False)["input_ids"]
    reasoning = Reasoning(engine.prompts.markers, 0 if opened else None)
    cutter = Cutter(SamplingParams(**params), [tokenizer.eos_token_id], tokenizer, reasoning=reasoning)
    parts = [ids[place : place + size] for place in range(0, len(ids), size)]
    cuts = [cutter.cut(part) for part in parts if cutter.finish is None]
    assert "".join(each.reasoning for each in cuts) == cutter.reasoning
    assert sum(each.reasoning_tokens for each in cuts) == cutter.reasoning_tokens
    if cutter.finish is not None:
        assert "".join(each.text for each in cuts) == cutter.text
    return cutter


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_reasoning_is_divided_from_the_answer(size):
    engine = thinking_engine()
    made = cut(engine, "<think>\n\nI see a cat.\n\nYes.\n</think>\n\nA cat.\n", opened=False, size=size)
    assert (made.reasoning, made.text) == ("I see a cat.\n\nYes.", "A cat.\n")
    opened = cut(engine, "I see a cat.\n</think>\n\nA cat.", opened=True, size=size)
    assert (opened.reasoning, opened.text) == ("I see a cat.", "A cat.")
    plain = cut(engine, "A <think> cat </think>", opened=False, size=size)
    assert (plain.reasoning, plain.reasoning_tokens) == ("", 0)
    assert plain.text.startswith("A")


def test_text_that_only_looks_like_a_marker_is_none():
    """Only the token ends the reasoning."""
    engine = thinking_engine()
    tokenizer = engine.tokenizer
    spelled = [token for each in "</think>" for token in tokenizer(each, add_special_tokens=False)["input_ids"]]
    end = engine.prompts.markers.end
    assert end not in spelled
    cutter = Cutter(SamplingParams(), [], tokenizer, reasoning=Reasoning(engine.prompts.markers, 0))
    cutter.cut([*spelled, end, *tokenizer("A", add_special_tokens=False)["input_ids"]])
    assert cutter.reasoning.replace(" ", "") == "</think>"
    assert cutter.text.strip() == "A"


@pytest.mark.parametrize("size", [1, 50])
def test_stop_strings_and_stop_tokens_count_in_the_answer_only(size):
    engine = thinking_engine()
    words = "a cat and a dog</think>a bird and a cat and a dog"
    assert cut(engine, words, opened=True, size=size, stop="cat", max_tokens=None).text == "a bird and a "
    cat = engine.tokenizer(" cat", add_special_tokens=False)["input_ids"][-1]
    stopped = cut(engine, words, opened=True, size=size, stop_token_ids=[cat], max_tokens=None)
    assert (stopped.stop_reason, stopped.reasoning) == (cat, "a cat and a dog")


def test_a_length_limit_inside_the_reasoning_leaves_no_answer():
    made = cut(thinking_engine(), "a cat and a dog</think>a bird", opened=True, max_tokens=3)
    assert made.finish == "length"
    assert made.text == ""
    assert made.reasoning


# --- through the engine -----------------------------------------------------------------------------------------------

ASK = [{"role": "user", "content": "Who is there?"}]


@pytest.mark.grid(2)
@pytest.mark.parametrize("drafter", ["none", "suffix:4", "ngram:4", "auto", "model"])
@pytest.mark.parametrize("template", [QWEN, OPENED])
def test_a_limit_holds_with_every_drafter(drafter, template):
    engine = thinking_engine(drafter, template=template)
    markers = engine.prompts.markers
    reasoned = 0
    for budget in (0, 3, 7):
        params = SamplingParams(
            max_tokens=24, thinking_token_budget=budget, seed=3, n=4, logit_bias={markers.begin: 15.0}
        )
        for made in engine.generate([ASK], params):
            ids = list(made.token_ids)
            if template is OPENED:  # the prompt has the marker and a line break
                assert ids.index(markers.end) <= max(budget - 1, 0)
            elif ids[0] == markers.begin:
                assert ids.index(markers.end) <= budget + 1
            assert made.reasoning is not None
            assert made.reasoning_tokens == (ids.index(markers.end) + 1 if made.reasoning_tokens else 0)
            assert made.to_dict()["reasoning_tokens"] == made.reasoning_tokens
            reasoned += made.reasoning_tokens > 0
    assert reasoned > 3


@pytest.mark.parametrize("drafter", ["none", "suffix:4", "model"])
def test_the_greedy_text_is_the_same_with_drafts(drafter):
    params = SamplingParams(max_tokens=40, temperature=0, thinking_token_budget=6, grammar="regex:[a-z ]{5,20}")
    made, plain = (thinking_engine(each, template=OPENED).generate([ASK], params)[0] for each in (drafter, "none"))
    assert made.token_ids == plain.token_ids
    assert 5 <= len(made.text) <= 20
    assert made.reasoning_tokens


def test_a_text_is_divided_only_where_it_answers_a_chat():
    engine = thinking_engine(template=OPENED)
    assert engine.generate(["Once<think>"], SamplingParams(max_tokens=5, seed=1))[0].reasoning is None
    budget = SamplingParams(max_tokens=9, seed=1, thinking_token_budget=2)
    limited = engine.generate(["Once<think>"], budget)[0]
    assert limited.token_ids[2] == engine.prompts.markers.end
    assert limited.text == engine.tokenizer.decode(limited.token_ids)
    assert (limited.reasoning, limited.reasoning_tokens) == (None, 0)


@pytest.mark.parametrize("prompt", [np.array([5, 6, 7]), (5, 6, 7), [5, 6, 7], range(5, 8)])
def test_token_ids_in_any_form_are_no_chat(prompt):
    engine = thinking_engine(template=OPENED)
    with checks_off():  # an array is no sequence to them
        request = engine.add(prompt, SamplingParams(max_tokens=2))[0]
    assert (request.tokens, request.reasoning) == ([5, 6, 7], None)


def test_a_limit_must_be_a_number():
    with pytest.raises(UserError, match="thinking_token_budget: expected an integer >= 0, or None, got -1"):
        SamplingParams(thinking_token_budget=-1)


def test_what_the_model_reasons_is_in_rollouts_and_beside_generated_text(capfd):
    engine = thinking_engine(template=OPENED)
    params = SamplingParams(max_tokens=12, seed=1, thinking_token_budget=4)
    made = Rollouts(engine, params).sample([ASK])[0]
    output = engine.generate([ASK], params)[0]
    assert made.reasoning
    assert "</think>" not in made.reasoning + made.text
    inputs = [PromptInput(ASK, "")]
    GenerateRun(engine, inputs, params, (), as_json=False, with_plain=False, quiet=False).stream()
    shown = capfd.readouterr()
    assert shown.out == output.text + "\n"
    assert output.reasoning in shown.err
    GenerateRun(engine, inputs, params, (), as_json=False, with_plain=False, quiet=True).stream()
    assert output.reasoning not in capfd.readouterr().err
