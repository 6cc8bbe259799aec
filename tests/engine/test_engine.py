"""The engine emits what plain decoding would, whoever shares the batch, whatever fails, wherever the sequence ends."""

import copy
import dataclasses
import functools
import inspect
import itertools
import json
import shutil

import numpy as np
import pytest
import torch

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.hf.backend import HFBackend
from draftproof.embedded import draft_dir, target_dir
from draftproof.engine.prompts import as_prompts, one_for_each
from support.helpers import embedded_model, engine, plain_rows, tokenizer

PROMPTS = (
    "Once upon a time",
    "Tom and Lily went to the park. They saw a big",
    "The dog",
    "One day, a girl named Sue found a red ball in the garden. She was very happy and wanted to show it to her mom.",
    'Ben said, "I am',
    "It was",
    "A small cat sat on a mat and looked at the moon. The cat",
)
GREEDY = SamplingParams(temperature=0, max_tokens=32)


def ids(text):
    return tokenizer()(text)["input_ids"]


def fresh(name="target", model=None):
    """A backend with a cache of its own."""
    return HFBackend(embedded_model(name) if model is None else model, name=name, check=False)


def tokens(outputs):
    return [output.token_ids for output in outputs]


@functools.cache
def reference(text, most=32, eos=(1, 2)):
    """transformers' own greedy tokens, at most so many, EOS included."""
    prompt = torch.tensor([ids(text)])
    out = embedded_model("target").generate(
        prompt, do_sample=False, max_new_tokens=most, eos_token_id=list(eos), pad_token_id=0, attention_mask=prompt > -1
    )
    return tuple(out[0, prompt.shape[1] :].tolist())


# --- the same tokens --------------------------------------------------------------------------------------------------


@pytest.mark.grid(3)
@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_target_that_drafts_for_itself_is_always_right(verifier, temperature):
    params = SamplingParams(temperature=temperature, max_tokens=25, seed=3, ignore_eos=True)
    outputs = engine(draft="target", verifier=verifier).generate(list(PROMPTS), params)
    for output in outputs:
        assert output.stats.num_accepted_tokens == output.stats.num_draft_tokens == 20
        assert output.stats.num_target_calls == 5


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_greedy_output_is_transformers_own_to_the_end_of_the_text_or_of_the_context(verifier):
    full_stop = ids("The end.")[-1]
    target = fresh("target")
    target.max_positions = 46
    ends = {"target": target, "eos_token_ids": (full_stop,)}
    params = SamplingParams(temperature=0, max_tokens=None)
    plain = engine(draft=None, **ends).generate(list(PROMPTS), params)
    fast = engine(verifier=verifier, **ends).generate(list(PROMPTS), params)
    assert tokens(fast) == tokens(plain)
    assert tokens(fast) == [reference(text, 46 - len(ids(text)), (full_stop,)) for text in PROMPTS]
    assert {output.finish_reason for output in fast} == {"stop", "length"}
    assert sum(output.stats.num_accepted_tokens for output in fast) > 20


def test_a_whole_greedy_story_is_transformers_own():
    story = engine().generate(PROMPTS[3], SamplingParams(temperature=0, max_tokens=None))[0]
    assert story.token_ids == reference(PROMPTS[3], 512 - len(ids(PROMPTS[3])))
    assert story.finish_reason == "stop"
    assert story.stats.block_efficiency > 1.5


def mixed_params(temperature=1.0):
    return [SamplingParams(temperature=temperature, max_tokens=2 + 3 * i, seed=100 + i) for i in range(len(PROMPTS))]


@pytest.mark.grid(2)
@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("max_batch", [3, 8])
def test_a_request_is_answered_alike_alone_and_in_any_batch(verifier, max_batch):
    batch = engine(verifier=verifier, max_batch=max_batch).generate(list(PROMPTS), mixed_params())
    single = engine(verifier=verifier, max_batch=1)
    alone = [single.generate(text, own)[0] for text, own in zip(PROMPTS, mixed_params(), strict=True)]
    assert tokens(batch) == tokens(alone)
    assert [output.text for output in batch] == [output.text for output in alone]
    times = dict.fromkeys(("seconds", "seconds_to_first", "tokens_per_second"))
    counts = [{**output.stats.to_dict(), **times} for output in (*batch, *alone)]
    assert counts[: len(batch)] == counts[len(batch) :]


CHAINS = [("ngram:4", "block"), ("ngram:4", "token"), ("model", "match"), ("model", "greedy_block")]
TREES = [("chains:3", "trie_block"), ("chains:3", "spectr"), ("tree:3x2x1", "traversal"), ("tree:2x2", "multi_round")]


def loaded(drafter, verifier, max_batch):
    draft = None if drafter.startswith("ngram") else "embedded:draft"
    options = {"stopper": "fixed:3", "dtype": "float32", "check": False, "max_batch": max_batch}
    return Engine.load("embedded:target", draft, drafter=drafter, verifier=verifier, **options)


@pytest.mark.grid(2)
@pytest.mark.parametrize(("drafter", "verifier"), CHAINS + TREES)
def test_every_drafter_is_greedy_like_transformers(drafter, verifier):
    under_test = loaded(drafter, verifier, 3)
    outputs = under_test.generate(list(PROMPTS[:4]), GREEDY)
    assert tokens(outputs) == [reference(text) for text in PROMPTS[:4]]
    assert sum(output.stats.num_accepted_tokens for output in outputs) > 0
    under_test.forget()
    held = [under_test.target, *([] if "ngram" in drafter else [under_test.drafter.model.backend])]
    assert [slots_in_use(one) for one in held] == [0] * len(held)


@pytest.mark.grid(2)
@pytest.mark.parametrize(("drafter", "verifier"), CHAINS + TREES)
def test_every_drafter_answers_alike_alone_and_in_any_batch(drafter, verifier):
    batched, single = loaded(drafter, verifier, 3), loaded(drafter, verifier, 1)
    alone = [single.generate(text, own)[0] for text, own in zip(PROMPTS[:5], mixed_params(), strict=False)]
    assert tokens(batched.generate(list(PROMPTS[:5]), mixed_params()[:5])) == tokens(alone)


@pytest.mark.parametrize("stopper", ["confidence:0.3", "entropy:0.3"])
def test_adaptive_drafts_are_alike_alone_and_in_any_batch(stopper):
    """A stopper that learns from a request's rounds learns from that request alone."""
    options = {"stopper": stopper, "dtype": "float32", "check": False}
    batched, single = (Engine.load("embedded:target", "embedded:draft", max_batch=most, **options) for most in (3, 1))
    alone = [single.generate(text, own)[0] for text, own in zip(PROMPTS[:4], mixed_params(), strict=False)]
    batch = batched.generate(list(PROMPTS[:4]), mixed_params()[:4])
    assert tokens(batch) == tokens(alone)
    assert [one.stats.num_draft_tokens for one in batch] == [one.stats.num_draft_tokens for one in alone]
    assert not getattr(batched.drafter.stopper, "_moving", {})


def test_the_order_of_a_batch_changes_nothing():
    rows = list(zip(PROMPTS, mixed_params(), strict=True))
    straight = engine(max_batch=3).generate([text for text, _ in rows], [own for _, own in rows])
    turned = engine(max_batch=3).generate([text for text, _ in rows[::-1]], [own for _, own in rows[::-1]])
    assert tokens(straight) == tokens(turned)[::-1]


def test_continuations_of_one_prompt_differ_and_do_not_depend_on_the_batch():
    params = SamplingParams(n=4, max_tokens=30, seed=4)
    wide, narrow = engine(max_batch=8).generate(PROMPTS[0], params), engine(max_batch=2).generate(PROMPTS[0], params)
    assert tokens(wide) == tokens(narrow)
    assert [output.index for output in wide] == list(range(4))
    assert len({*tokens(wide)}) == 4
    assert tokens(wide)[0] == engine().generate(PROMPTS[0], SamplingParams(max_tokens=30, seed=4))[0].token_ids


def test_seeds_decide():
    under_test = engine()
    first, again, other = (
        under_test.generate(list(PROMPTS[:2]), SamplingParams(max_tokens=12, seed=seed)) for seed in (1, 1, 2)
    )
    assert tokens(first) == tokens(again)
    assert tokens(first)[0] != tokens(other)[0]
    # The only real randomness here. At temperature 1 two texts of 20 tokens are equal once in 400 times; 100 nearly
    # uniform tokens of a vocabulary of 512 are not (false alarms below 1e-30).
    free = SamplingParams(temperature=4.0, max_tokens=100, ignore_eos=True)
    unseeded = [under_test.generate(PROMPTS[0], free)[0] for _ in range(2)]
    assert unseeded[0].token_ids != unseeded[1].token_ids
    repeated = under_test.generate(PROMPTS[0], dataclasses.replace(free, seed=unseeded[0].seed))[0]
    assert repeated.token_ids == unseeded[0].token_ids


def test_streams_and_generate_share_an_engine():
    params = [SamplingParams(max_tokens=25, seed=seed) for seed in range(3)]
    alone = [engine().generate(text, own)[0] for text, own in zip(PROMPTS, params, strict=False)]
    under_test = engine()
    streams = [under_test.stream(PROMPTS[i], params[i]) for i in range(2)]
    chunks = [[next(stream)] for stream in streams]
    middle = under_test.generate(PROMPTS[2], params[2])[0]
    for left, right in itertools.zip_longest(*streams):
        chunks[0] += [left] if left else []
        chunks[1] += [right] if right else []
    assert middle.token_ids == alone[2].token_ids
    for i in range(2):
        assert "".join(chunk.text for chunk in chunks[i]) == alone[i].text
        assert sum((chunk.token_ids for chunk in chunks[i]), ()) == alone[i].token_ids
        assert chunks[i][-1].output.token_ids == alone[i].token_ids
        assert [chunk.finish_reason is None for chunk in chunks[i]] == [True] * (len(chunks[i]) - 1) + [False]
    assert not under_test.busy


def test_names_build_the_same_engine():
    named = Engine.load("embedded:target", "embedded:draft", stopper="fixed:4", dtype="float32")
    assert tokens(named.generate(list(PROMPTS), mixed_params())) == tokens(
        engine().generate(list(PROMPTS), mixed_params())
    )


# --- nothing leaks ----------------------------------------------------------------------------------------------------


def slots_in_use(held):
    return held.cache.in_use


def test_fifty_requests_of_every_kind_leave_no_slot_in_use():
    target, draft = fresh("target"), fresh("draft")
    under_test = engine(target, draft, max_batch=4, prefix_reuse=False)
    for i in range(10):
        stream = under_test.stream(PROMPTS[i % 7], SamplingParams(max_tokens=9, seed=i))
        next(stream)
        stream.close()
        under_test.stream(PROMPTS[0])  # never started
        under_test.generate(list(PROMPTS[:3]), SamplingParams(max_tokens=5, seed=i))
        waiting = [under_test.add(text)[0] for text in PROMPTS]
        under_test.step()
        for sequence in waiting:
            under_test.abort(sequence)
            under_test.abort(sequence)
    assert not under_test.busy
    assert slots_in_use(target) == slots_in_use(draft) == 0
    assert target._cache._slots <= 4
    assert draft._cache._slots <= 4


def fail_once(monkeypatch, owner, name, *, call, after=False):
    """Make the call-th call of a method raise, before or after it has done its work."""
    right, calls = getattr(owner, name), itertools.count(1)

    def method(*args, **kwargs):
        fails = next(calls) == call
        if fails and not after:
            raise RuntimeError("a part broke")
        result = right(*args, **kwargs)
        if fails:
            raise RuntimeError("a part broke")
        return result

    monkeypatch.setattr(owner, name, method)


@pytest.mark.grid(2)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("part", "name", "call"),
    [
        ("drafter", "propose", 3),
        ("draft", "forward", 1),
        ("draft", "forward", 7),
        ("target", "forward", 1),
        ("target", "forward", 4),
        ("verifier", "verify", 3),
    ],
)
def test_a_round_that_fails_is_repeated_as_if_nothing_had_happened(monkeypatch, part, name, call, after):
    params = SamplingParams(max_tokens=16, seed=5)
    undisturbed = tokens(engine().generate(list(PROMPTS[:3]), params))
    under_test = engine(fresh("target"), fresh("draft"), max_batch=3)
    parts = {"draft": under_test.drafter.model.backend, **vars(under_test)}
    fail_once(monkeypatch, parts[part], name, call=call, after=after)
    sequences = [under_test.add(text, params)[0] for text in PROMPTS[:3]]
    failures = 0
    while under_test.busy:
        try:
            under_test.step()
        except RuntimeError:
            failures += 1
    assert failures == 1
    assert tokens(under_test.output(sequence) for sequence in sequences) == undisturbed


def test_a_generate_that_fails_leaves_the_engine_as_it_was(monkeypatch):
    under_test = engine(fresh("target"), fresh("draft"))
    fail_once(monkeypatch, under_test.target, "forward", call=3)
    with pytest.raises(RuntimeError, match="a part broke"):
        under_test.generate(list(PROMPTS), GREEDY)
    assert not under_test.busy
    under_test.forget()
    assert slots_in_use(under_test.target) == slots_in_use(under_test.drafter.model.backend) == 0
    assert tokens(under_test.generate(PROMPTS[0], GREEDY)) == [reference(PROMPTS[0])]


# --- where a sequence ends --------------------------------------------------------------------------------------------


def assert_consistent(output, length=4):
    stats = output.stats
    assert stats.num_tokens == len(output.token_ids)
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens <= stats.num_draft_tokens
    assert stats.num_accepted_tokens_per_pos == sorted(stats.num_accepted_tokens_per_pos, reverse=True)
    assert len(stats.num_accepted_tokens_per_pos) <= length
    assert sum(stats.num_drafts_per_pos) == stats.num_draft_tokens  # a chain
    assert stats.num_drafts_per_pos[:1] in ([], [stats.num_drafts])
    assert stats.num_drafts <= stats.num_target_calls
    assert stats.num_draft_tokens <= length * stats.num_drafts
    assert stats.num_tokens <= stats.num_accepted_tokens + stats.num_target_calls
    assert stats.block_efficiency == stats.num_tokens / stats.num_target_calls
    assert stats.discard_rate == (stats.num_draft_tokens - stats.num_accepted_tokens) / stats.num_tokens
    assert stats.verification_rate == stats.num_target_calls / stats.num_tokens
    assert 1 <= stats.num_first_tokens <= min(stats.num_tokens, length + 1)
    assert 0 < stats.seconds_to_first <= stats.seconds.total
    parts = stats.seconds.to_dict()
    assert abs(sum(parts.values()) - 2 * parts["total"]) < 1e-9


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_statistics_add_up(verifier):
    for output in engine(verifier=verifier, max_batch=3).generate(list(PROMPTS), mixed_params()):
        assert_consistent(output)


def test_an_end_token_inside_an_accepted_block_ends_everything_there():
    long = reference(PROMPTS[0])[:14]
    places = [i for i, token in enumerate(long) if token not in long[:i]]
    assert len(places) > 7
    for place in places:
        under_test = engine(draft="target", eos_token_ids=(long[place],))
        stream = list(under_test.stream(PROMPTS[0], GREEDY))
        output = stream[-1].output
        assert output.token_ids == long[: place + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        assert sum((chunk.token_ids for chunk in stream), ()) == output.token_ids
        assert_consistent(output)
        rounds, inside = divmod(place + 1, 5)
        assert output.stats.num_target_calls == rounds + (inside > 0)
        assert output.stats.num_accepted_tokens == 4 * rounds + inside


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5, 6, 10, 11])
def test_max_tokens_inside_a_block_is_kept_to(max_tokens):
    output = engine(draft="target").generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=max_tokens))[0]
    assert output.token_ids == reference(PROMPTS[1])[:max_tokens]
    assert output.finish_reason == "length"
    assert_consistent(output)
    assert output.stats.num_accepted_tokens == output.stats.num_draft_tokens


@pytest.mark.grid(3)
@pytest.mark.parametrize("room", [1, 2, 3, 5, 6, 11])
@pytest.mark.parametrize("verifier", ["token", "block"])
def test_the_context_ends_with_length_and_without_error(room, verifier):
    prompt = (ids(PROMPTS[0]) + list(reference(PROMPTS[3])) * 20)[: 512 - room]
    params = SamplingParams(max_tokens=None, ignore_eos=True, seed=4)
    for draft in ("draft", "target", None):
        output = engine(draft=draft, verifier=verifier).generate([prompt], params)[0]
        assert (len(output.token_ids), output.finish_reason) == (room, "length")
        assert_consistent(output)


# --- drafts that do not quite fit -------------------------------------------------------------------------------------


def test_a_draft_model_with_a_shorter_context_leaves_the_rest_to_plain_decoding():
    draft = fresh("draft")
    draft.max_positions = 20
    output = engine(draft=draft).generate(PROMPTS[0], GREEDY)[0]
    assert output.token_ids == reference(PROMPTS[0])
    assert output.stats.num_draft_tokens > 0
    assert output.stats.num_target_calls - output.stats.num_drafts >= len(ids(PROMPTS[0])) + 31 - 20
    beyond = engine(draft=draft).generate(PROMPTS[3], GREEDY)[0]
    assert beyond.token_ids == reference(PROMPTS[3])
    assert beyond.stats.num_draft_tokens == 0


@functools.cache
def resized(name, size):
    model = copy.deepcopy(embedded_model(name))
    model.resize_token_embeddings(size, mean_resizing=False)
    return HFBackend(model, name=f"{name}:{size}")


@pytest.mark.grid(2)
@pytest.mark.parametrize("size", [446, 520])
@pytest.mark.parametrize("verifier", ["token", "block"])
def test_a_draft_vocabulary_of_another_width_changes_no_output(size, verifier):
    prompts = [*PROMPTS, [*ids(PROMPTS[0]), 511]]
    assert any(max(*ids(text), *reference(text)) >= 446 for text in PROMPTS)
    expected = engine(draft=None).generate(prompts, GREEDY)
    found = engine(draft=resized("draft", size), verifier=verifier).generate(prompts, GREEDY)
    assert tokens(found) == tokens(expected)
    assert sum(output.stats.num_accepted_tokens for output in found) > 0
    engine(draft=resized("draft", size), verifier=verifier).generate(prompts, SamplingParams(max_tokens=9, seed=1))


def test_a_padded_target_drafted_for_by_an_unpadded_model():
    prompts = [*PROMPTS[:3], [*ids(PROMPTS[0]), 519]]
    target = resized("target", 520)
    expected = engine(target, None).generate(prompts, GREEDY)
    found = engine(target).generate(prompts, GREEDY)
    assert tokens(found) == tokens(expected)
    assert found[3].stats.num_draft_tokens == 0


def test_models_that_share_too_few_tokens_are_refused(tmp_path):
    other = tmp_path / "draft"
    shutil.copytree(draft_dir(), other)
    made = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    made["model"]["merges"] = []
    made["model"]["vocab"] = {
        token if token.startswith("<") else chr(0x4E00 + number): number
        for token, number in made["model"]["vocab"].items()
    }
    (other / "tokenizer.json").write_text(json.dumps(made), encoding="utf-8")
    with pytest.raises(UserError, match="must share one tokenizer"):
        Engine.load(str(target_dir()), str(other))


# --- what is reported -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["draft", "target", None])
def test_logprobs_are_those_of_a_plain_forward_pass(draft):
    prompt = ids(PROMPTS[1])
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=25, seed=2, logprobs=3)
    output = engine(draft=draft).generate([prompt], params)[0]
    prefixes = [prompt + list(output.token_ids[:i]) for i in range(len(output.token_ids))]
    rows = plain_rows(embedded_model("target"), prefixes)[0].log_softmax(-1)
    assert len(output.logprobs) == len(output.token_ids)
    for row, token, entry in zip(rows, output.token_ids, output.logprobs, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert entry.rank == 1 + int((row > row[token]).sum())
        values, best = row.topk(3)
        assert [token for token, _ in entry.top] == best.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


# --- what is refused --------------------------------------------------------------------------------------------------

BAD_PROMPTS = [
    ("", "empty"),
    ([], "expected at least one prompt"),
    ([[]], "empty"),
    ([[1, 512]], "token 1 of the prompt is 512: expected 0 to 511"),
    ([[-1]], "token 0 of the prompt is -1"),
    ([[1] * 512], "prompt: expected 1 to 511 tokens, .*, got 512"),
    ([{"role": "user", "content": "hi"}], "chat template"),
]


@pytest.mark.parametrize(("prompts", "message"), BAD_PROMPTS)
def test_a_bad_prompt_is_refused_in_one_line_and_nothing_is_decoded(prompts, message):
    under_test = engine()
    with pytest.raises(UserError, match=message) as caught:
        under_test.generate(prompts, GREEDY)
    assert "\n" not in str(caught.value)
    assert not under_test.busy


@pytest.mark.parametrize("prompts", [{"role": "user", "content": "hi"}, b"hi", 7, None])
def test_what_is_no_prompt_is_not_read_as_one(prompts):
    unchecked = inspect.unwrap(as_prompts)  # a mapping would give its keys as texts, bytes their numbers as tokens
    with pytest.raises(UserError, match=rf"expected a text, .* got {type(prompts).__name__}$"):
        unchecked(prompts)


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_arrays_of_token_ids_are_prompts(make):
    under_test, array = engine(), make([5, 6])
    assert inspect.unwrap(as_prompts)([*array.numpy()] if make is torch.tensor else [*array]) == [[5, 6]]
    (alone,), (_, beside) = (under_test.generate(prompts, GREEDY) for prompts in (array, [[7], array]))
    streamed = [token for chunk in under_test.stream(array, GREEDY) for token in chunk.token_ids]
    assert streamed == [*alone.token_ids] == [*beside.token_ids] == [*under_test.generate([5, 6], GREEDY)[0].token_ids]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_an_array_of_rows_is_refused_because_rows_may_be_padded(make):
    under_test = engine()
    for call in (under_test.generate, lambda prompt: next(under_test.stream(prompt))):
        with pytest.raises(UserError, match=r"expected one dimension, got an array of shape \(1, 2\) \(pass a list"):
            call(make([[5, 6]]))
    with pytest.raises(UserError, match=r"token 0 of the prompt: expected an integer, got 5\.0"):
        under_test.generate([make([5.0])])


@pytest.mark.parametrize("prompt", [{"role": "user", "content": "hi"}, b"hi", 7, None])
def test_a_single_prompt_or_prediction_is_checked_as_several_are(prompt):
    reader, kind = engine().prompts, type(prompt).__name__
    for what in ("prompt", "prediction"):  # bytes would be read as token ids
        with pytest.raises(UserError, match=rf"{what}: expected a text, token ids, or chat messages, got {kind}$"):
            inspect.unwrap(type(reader).read)(reader, prompt, what)


@pytest.mark.parametrize("token", [1.0, "7", None])
def test_token_ids_that_are_no_whole_numbers_are_refused_and_not_rounded(token):
    unchecked = inspect.unwrap(Engine.encode)  # the types say so too, but only tests check types
    with pytest.raises(UserError, match=r"token 1 of the prompt: expected an integer, got "):
        unchecked(engine(), [5, token])


def test_good_prompts_beside_a_bad_one_are_not_left_behind():
    under_test = engine()
    with pytest.raises(UserError, match="empty"):
        under_test.generate(["It was", ""], GREEDY)
    assert not under_test.busy
    assert tokens(under_test.generate(PROMPTS[0], GREEDY)) == [reference(PROMPTS[0])]


@pytest.mark.parametrize("verifier", ["token", "greedy_block", "gumbel"])
def test_a_prompt_can_be_read_only(verifier):
    under_test = engine(verifier=verifier)
    for prompt in PROMPTS[:2]:
        none, one = under_test.generate(
            [prompt] * 2, [SamplingParams(max_tokens=size, prompt_logprobs=1) for size in (0, 1)]
        )
        assert (none.token_ids, none.text, none.finish_reason) == ((), "", "length")
        assert [each.token_id for each in none.prompt_logprobs[1:]] == under_test.encode(prompt)[1][1:]
        assert [each.logprob for each in none.prompt_logprobs[1:]] == pytest.approx(
            [each.logprob for each in one.prompt_logprobs[1:]], abs=1e-4
        )
    assert not under_test.busy


def test_parameters_that_do_not_fit_are_refused():
    under_test = engine()
    with pytest.raises(UserError, match="params: expected one SamplingParams, or 3 for as many prompts, got 2"):
        under_test.generate(list(PROMPTS[:3]), [GREEDY, GREEDY])
    each, given = inspect.unwrap(one_for_each), {"max_tokens": 3}
    with pytest.raises(UserError, match=r"params: expected one SamplingParams, or a list with one .* got dict"):
        each("params", given, SamplingParams, 1)  # a list of its keys would be one for each prompt
    with pytest.raises(UserError, match=r"params: expected SamplingParams, got dict \(make them with SamplingParams"):
        inspect.unwrap(Engine._sampling)(under_test, given)
    with pytest.raises(ValueError, match="max_tokens: expected an integer >= 0, or None for no limit, got -1"):
        SamplingParams(max_tokens=-1)
    with pytest.raises(UserError, match="n: expected 1, since a stream has one continuation, got 2"):
        next(under_test.stream(PROMPTS[0], SamplingParams(n=2)))
    with pytest.raises(ValueError, match="logit_bias: expected token ids 0 <= id < 512, got 512"):
        under_test.generate(PROMPTS[0], SamplingParams(logit_bias={512: 1.0}))
    with pytest.raises(UserError, match="max_batch: expected 1 or more"):
        engine(max_batch=0)
    with pytest.raises(UserError, match="no tokenizer"):
        engine(tokenizer=None).generate("text")
    assert not under_test.busy


@functools.cache
def poisoned(name):
    """A model of the pair whose embedding of token 500 is NaN."""
    model = copy.deepcopy(embedded_model(name))
    with torch.no_grad():
        model.get_input_embeddings().weight[500] = torch.nan
    return HFBackend(model, name=name, check=False)


@pytest.mark.parametrize("who", ["target", "draft"])
def test_nan_logits_name_their_request_and_poison_no_later_one(who):
    pair = {"target": fresh("target"), "draft": fresh("draft"), who: poisoned(who)}
    if who == "target":  # a tied output embedding would make token 500's logit NaN everywhere
        pair[who].model.lm_head.weight = torch.nn.Parameter(embedded_model("target").lm_head.weight.detach().clone())
    else:
        pair[who].model.lm_head.weight = torch.nn.Parameter(embedded_model("draft").lm_head.weight.detach().clone())
    under_test = engine(pair["target"], pair["draft"])
    under_test.generate(list(PROMPTS[:2]), GREEDY)
    with pytest.raises(ValueError, match=rf"request 3 failed: the logits of the .*{who}.* hold NaN"):
        under_test.generate([PROMPTS[0], [*ids(PROMPTS[0]), 500, 400]], GREEDY)
    assert not under_test.busy
    after = under_test.generate([PROMPTS[2], PROMPTS[0], PROMPTS[3]], GREEDY)
    assert tokens(after) == [reference(PROMPTS[i]) for i in (2, 0, 3)]


def test_the_old_name_of_offline_still_works_and_warns():
    made = engine()
    with pytest.warns(DeprecationWarning, match="patient is now called offline"):
        (old,) = made.add([5, 6], patient=True)
    (new,) = made.add([5, 6], offline=True)
    assert old.offline
    assert new.offline
    assert not made.add([5, 6])[0].offline
