"""Transforms against transformers' own processors and a slow twin, and the promises they make about rows and paths."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import generation

from draftproof.bad_words import BadWords, bad_word_ids
from draftproof.native import softmax
from draftproof.sampling import (
    SamplingParams,
    TokenLogprob,
    Transforms,
    _nucleus,
    check_logits,
    probabilities,
    top_logprobs,
)

V = 40
EOS = (3, 7)


def noise(rows: int, seed: int, *, vocab: int = V, dtype=torch.float32) -> torch.Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def bound(prompt=(), words=(), vocab=V, **params) -> Transforms:
    return Transforms(SamplingParams(**params), vocab, EOS, tuple(prompt), BadWords(words))


# --- against transformers ------------------------------------------------------------------------------------------


def through(processors, context, logits):
    """Softmax of the logits after transformers' processors, row by row on one context."""
    ids = torch.tensor([context], dtype=torch.long).expand(len(logits), -1)
    scores = logits.clone()
    for processor in processors:
        scores = processor(ids, scores)
    return scores.softmax(-1)


CASES = [
    ({"temperature": 0.7}, [generation.TemperatureLogitsWarper(0.7)]),
    ({"temperature": 3.0}, [generation.TemperatureLogitsWarper(3.0)]),
    ({"top_k": 5}, [generation.TopKLogitsWarper(5)]),
    ({"top_k": 1}, [generation.TopKLogitsWarper(1)]),
    ({"top_p": 0.8}, [generation.TopPLogitsWarper(0.8)]),
    ({"top_p": 0.05}, [generation.TopPLogitsWarper(0.05)]),
    ({"min_p": 0.1}, [generation.MinPLogitsWarper(0.1)]),
    ({"repetition_penalty": 1.7}, [generation.RepetitionPenaltyLogitsProcessor(1.7)]),
    ({"repetition_penalty": 0.6}, [generation.RepetitionPenaltyLogitsProcessor(0.6)]),
    ({"logit_bias": {1: 5.0, 2: -100}}, [generation.SequenceBiasLogitsProcessor([[[1], 5.0], [[2], -100.0]])]),
    ({"min_tokens": 6}, [generation.MinNewTokensLengthLogitsProcessor(0, 6, list(EOS), device="cpu")]),
    ({"min_tokens": 4}, [generation.MinNewTokensLengthLogitsProcessor(0, 4, list(EOS), device="cpu")]),
    (
        {"temperature": 0.7, "min_p": 0.02, "top_k": 8, "top_p": 0.9},
        [
            generation.TemperatureLogitsWarper(0.7),
            generation.MinPLogitsWarper(0.02),
            generation.TopKLogitsWarper(8),
            generation.TopPLogitsWarper(0.9),
        ],
    ),
]


@pytest.mark.parametrize(("params", "processors"), CASES, ids=[str(case[0]) for case in CASES])
def test_as_transformers(params, processors):
    context = [4, 9, 4, 30, 2]
    logits = noise(50, 1)
    ours = probabilities(logits, bound(**params), context[:3], [context[3:]] * 50)
    torch.testing.assert_close(ours, through(processors, context, logits))


def test_bad_words_as_transformers():
    words = [(5,), (9, 4), (30, 2, 8), (1, 2, 8), (2, 2)]
    context = [4, 9, 4, 30, 2]
    processor = generation.NoBadWordsLogitsProcessor([list(word) for word in words])
    ours = probabilities(noise(9, 2), bound(words=words), context[:4], [context[4:]] * 9)
    torch.testing.assert_close(ours, through([processor], context, noise(9, 2)))
    assert [token for token in range(V) if (ours[:, token] == 0).all()] == [2, 5, 8]  # (9, 4) is not about to complete


@pytest.mark.parametrize("split", range(4))
def test_a_bad_word_is_found_across_output_and_path(split):
    seen = [8, 4, 5]
    rows = probabilities(noise(1, 2), bound(words=[(4, 5, 6), (5, 5)]), seen[:split], [seen[split:]])
    assert (rows[0] == 0).nonzero().flatten().tolist() == [5, 6]


# --- against a slow twin -------------------------------------------------------------------------------------------


def twin(logits: list[float], bound: Transforms, context: list[int]) -> list[float]:
    """One row, one token at a time, in Python's floats."""
    params, x = bound.params, list(logits)
    for word in bound.bad_words.sequences:
        if list(word[:-1]) == context[len(context) - len(word) + 1 :]:
            x[word[-1]] = -math.inf
    if len(context) < params.min_tokens:
        for token in {*bound.eos_token_ids, *params.stop_token_ids}:
            x[token] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in range(len(x)):
        count = context.count(token)
        if count or token in bound.prompt_ids:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        x[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return twin_of_the_rest(x, params)


def twin_of_the_rest(x: list[float], params: SamplingParams) -> list[float]:
    if params.temperature == 0:
        return [float(token == x.index(max(x))) for token in range(len(x))]
    weights = [math.exp((value - max(x)) / params.temperature) for value in x]
    weights = [weight if weight >= params.min_p * max(weights) else 0.0 for weight in weights]
    if params.top_k:
        weights = [weight if sum(w > weight for w in weights) < params.top_k else 0.0 for weight in weights]
    mass, total = 0.0, sum(weights)
    for token in sorted(range(len(x)), key=lambda token: (-weights[token], token)):
        weights[token], mass = (weights[token] if mass < params.top_p * total else 0.0), mass + weights[token]
    return [weight / sum(weights) for weight in weights]


# Built inside the tests: the type checks of a test run draw random numbers, which strategies must not.
PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1.0, 0.0, 0.3, 2.5]),
        "top_k": st.sampled_from([0, -1, 1, 3, 100]),
        "top_p": st.sampled_from([1.0, 0.37, 0.921]),
        "min_p": st.sampled_from([0.0, 0.0713]),
        "repetition_penalty": st.sampled_from([1.0, 1.31, 0.7]),
        "presence_penalty": st.sampled_from([0.0, 0.7, -1.1]),
        "frequency_penalty": st.sampled_from([0.0, 0.9, -0.3]),
        "logit_bias": st.sampled_from([None, {0: 2.5, 4: -3.25}]),
        "stop_token_ids": st.sampled_from([(), (1, 3)]),
        "min_tokens": st.integers(0, 6),
    }
)
TOKENS = st.lists(st.integers(0, 9), max_size=5)
WORDS = st.lists(st.lists(st.integers(4, 7), min_size=1, max_size=3).map(tuple), max_size=3)
ASKED = st.fixed_dictionaries({"params": PARAMS, "prompt": TOKENS, "words": WORDS})


def asked(*, params, prompt, words) -> Transforms:
    return bound(prompt, words, vocab=10, **params)


@settings(max_examples=400, deadline=None)
@given(wish=ASKED, output=TOKENS, paths=st.lists(TOKENS, min_size=1, max_size=4), seed=st.integers(0, 9999))
def test_as_the_twin(wish, output, paths, seed):
    transforms, logits = asked(**wish), noise(len(paths), seed, vocab=10, dtype=torch.float64)
    before = logits.clone()
    ours = probabilities(logits, transforms, output, paths)
    slow = [twin(row, transforms, output + path) for row, path in zip(logits.tolist(), paths, strict=True)]
    torch.testing.assert_close(ours, torch.tensor(slow, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    assert torch.equal(logits, before), "the caller's logits are left as they are"


@settings(max_examples=200, deadline=None)
@given(wish=ASKED, output=TOKENS, paths=st.lists(TOKENS, min_size=1, max_size=4), seed=st.integers(0, 9999))
def test_a_row_is_the_same_alone_and_however_its_context_is_split(wish, output, paths, seed):
    transforms, logits = asked(**wish), noise(len(paths), seed, vocab=10)
    together = probabilities(logits, transforms, output, paths)
    for row, path in enumerate(paths):
        for context in ((output, path), (output + path, []), ([], output + path)):
            alone = probabilities(logits[row : row + 1], transforms, context[0], [context[1]])
            assert torch.equal(together[row], alone[0])


def test_wide_rows_are_the_same_alone():
    logits = noise(6, 5, vocab=50_000)
    for params in ({}, {"temperature": 0.6}, {"top_p": 0.9}, {"top_p": 0.999}, {"top_k": 50, "min_p": 0.01}):
        transforms = bound(vocab=50_000, **params)
        together = probabilities(logits, transforms)
        assert all(torch.equal(together[r], probabilities(logits[r : r + 1], transforms)[0]) for r in range(6))


# --- promises ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.5, "top_p": 0.9}, {"logit_bias": {1: 1.0}}, {"temperature": 0}]
)
def test_without_path_dependence_the_context_is_not_touched(params):
    transforms = bound(**params)
    assert not transforms.path_dependent
    rows = probabilities(noise(3, 0), transforms, [V + 1], [[V + 1]])  # neither ids nor their number could be used
    assert torch.allclose(rows.sum(-1), torch.ones(3))


@pytest.mark.parametrize(
    "params",
    [{"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}, {"min_tokens": 1}],
)
def test_path_dependence_is_declared(params):
    assert bound(**params).path_dependent


def test_bad_words_depend_on_the_path_only_when_longer_than_one_token():
    assert not bound(words=[(4,)]).path_dependent
    assert bound(words=[(4,), (4, 5)]).path_dependent
    assert not Transforms(SamplingParams(min_tokens=3), V).path_dependent  # nothing to mask: no EOS


def test_nothing_active_is_one_softmax():
    logits = noise(4, 3)
    assert torch.equal(probabilities(logits, bound()), softmax(logits))
    assert torch.equal(probabilities(logits, bound(top_k=V, top_p=1)), softmax(logits))
    assert torch.allclose(softmax(logits), logits.softmax(-1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_and_float32_computed(dtype):
    logits = noise(4, 3, dtype=dtype)
    ours = probabilities(logits, bound(temperature=0.7, top_p=0.9))
    assert ours.dtype == torch.float32
    assert torch.equal(ours, probabilities(logits.float(), bound(temperature=0.7, top_p=0.9)))
    assert probabilities(logits.double(), bound()).dtype == torch.float64


def test_greedy_is_one_hot_at_the_lowest_of_the_best():
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [0.0, -math.inf, 0.0, 0.0]])
    greedy = probabilities(logits, bound(vocab=4, temperature=0, logit_bias={3: 5.0}))
    assert greedy.tolist() == [[0, 1, 0, 0], [0, 0, 0, 1]]
    assert probabilities(torch.zeros(2, 5000), bound(vocab=5000, temperature=0)).argmax(-1).tolist() == [0, 0]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-38, 1e-6, 1e-3, 1e6, 1e38, 1e300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_temperature_overflows(temperature, dtype):
    logits = torch.tensor([[1e4, -1e4, 3.0, -math.inf], [1.0, 1.0, 0.5, 0.9], [-3e38, 3e38, 0, 0]], dtype=dtype)
    rows = probabilities(logits, bound(vocab=4, temperature=temperature))
    assert rows.isfinite().all()
    assert torch.allclose(rows.sum(-1), torch.ones(3, dtype=dtype))
    assert rows[0, 3] == 0
    if temperature <= 1e-3:
        expected = torch.tensor([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 1, 0, 0]], dtype=dtype)
        assert torch.allclose(rows, expected, atol=1e-30)


def test_no_penalty_overflows():
    logits = torch.tensor([[3e38, 1.0, -3e38, -math.inf]])
    for penalty in (1e-4, 1e4):
        rows = probabilities(logits, bound(vocab=4, repetition_penalty=penalty), [0, 1, 2, 3], [[]])
        assert rows.isfinite().all()
        assert rows[0, 3] == 0


def test_top_k_keeps_the_tied():
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0, 1.0]])
    assert probabilities(logits, bound(vocab=5, top_k=2)).gt(0).tolist() == [[True, True, True, False, True]]


def test_top_p_keeps_the_crossing_token_and_the_lowest_of_the_tied():
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    for top_p, kept in ((1e-9, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.96, 4)):
        assert (probabilities(probs.log(), bound(vocab=4, top_p=top_p)) > 0).sum() == kept
    assert probabilities(torch.zeros(1, 4), bound(vocab=4, top_p=0.5)).tolist() == [[0.5, 0.5, 0, 0]]  # reached exactly
    flat = probabilities(torch.zeros(2, 1000), bound(vocab=1000, top_p=0.4995))
    assert (flat[:, :500] > 0).all()
    assert (flat[:, 500:] == 0).all()


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 9999), top_p=st.floats(0.01, 0.999), guess=st.integers(1, 70), step=st.sampled_from([0, 1, 0.1])
)
def test_the_nucleus_does_not_depend_on_the_guess(seed, top_p, guess, step):
    scores = noise(3, seed, vocab=64)
    scores = scores if step == 0 else (scores / step).round() * step  # ties
    scores[0, :60] = -math.inf
    small, full = _nucleus(scores, top_p, guess), _nucleus(scores, top_p, 64)
    assert torch.equal(small, full)
    mass = scores.softmax(-1).where(full > -math.inf, 0).sum(-1)
    assert (mass >= top_p - 1e-6).all()


def test_equals_beyond_the_guess_are_not_missed():
    scores = (noise(8, 4, vocab=4000) > 0).float()  # two levels: the guess cuts through the upper one
    kept = _nucleus(scores, 0.01, 256) > -math.inf
    assert torch.equal(kept, _nucleus(scores, 0.01, 4000) > -math.inf)
    assert all(torch.equal(row.nonzero(), scores[r].nonzero()[: row.sum()]) for r, row in enumerate(kept))


def test_min_tokens_counts_output_and_path():
    logits = torch.zeros(3, V)
    rows = probabilities(logits, bound(min_tokens=4, ignore_eos=True, stop_token_ids=[5]), [0, 0], [[], [0], [0, 0]])
    assert (rows[:2, [3, 5, 7]] == 0).all()
    assert (rows[2] > 0).all()


def test_everything_masked_is_an_error_that_names_the_cause():
    words = [(token,) for token in range(V) if token not in EOS]
    with pytest.raises(ValueError, match="every token of row 1 is masked by bad_words and min_tokens"):
        probabilities(noise(2, 0), bound(words=words, min_tokens=1), [], [[0], []])
    with pytest.raises(ValueError, match="every token of row 0 is masked by bad_words:"):
        probabilities(noise(2, 0), bound(words=[(token,) for token in range(V)], temperature=0))


def test_misuse_is_named():
    with pytest.raises(ValueError, match=r"expected logits of width 40 \(the vocabulary\), got 39"):
        probabilities(noise(2, 0, vocab=39), bound())
    with pytest.raises(ValueError, match="expected one path for each of 2 rows of logits, got 1"):
        probabilities(noise(2, 0), bound(presence_penalty=1), [], [[]])


# --- parameters ----------------------------------------------------------------------------------------------------

BAD = [
    ({"n": 0}, "n: expected an integer >= 1.*, got 0$"),
    ({"temperature": -0.1}, "temperature: expected a finite number >= 0.*, got -0.1$"),
    ({"temperature": math.nan}, "temperature: expected .*, got nan"),
    ({"temperature": True}, "temperature: expected .*, got True"),
    ({"top_p": 1.5}, "top_p: expected 0 < top_p <= 1, got 1.5$"),
    ({"top_p": 0}, "top_p: expected 0 < top_p <= 1, got 0$"),
    ({"top_k": -2}, "top_k: expected .*, got -2"),
    ({"top_k": 2.0}, "top_k: expected .*, got 2.0"),
    ({"min_p": 1.1}, "min_p: expected 0 <= min_p <= 1.*, got 1.1$"),
    ({"repetition_penalty": 0}, "repetition_penalty: expected .*, got 0"),
    ({"presence_penalty": 2.5}, "presence_penalty: expected .*, got 2.5"),
    ({"frequency_penalty": -math.inf}, "frequency_penalty: expected .*, got -inf"),
    ({"frequency_penalty": 10**400}, "frequency_penalty: expected .*, got 1000"),
    ({"logit_bias": {1: 101}}, "logit_bias: expected .*, got 101"),
    ({"logit_bias": {-1: 1}}, "logit_bias: expected .*, got -1"),
    ({"logit_bias": [1]}, "logit_bias: expected .*, got "),
    ({"bad_words": "no"}, "bad_words: expected a sequence.*, got 'no'$"),
    ({"bad_words": [""]}, "bad_words: expected .*, got "),
    ({"stop": ""}, "stop: expected .*, got "),
    ({"stop": ["a", 1]}, "stop: expected .*, got "),
    ({"stop": "\ud800"}, "stop: expected .*, got "),
    ({"stop_token_ids": [1.0]}, "stop_token_ids: expected .*, got 1.0"),
    ({"ignore_eos": 1}, "ignore_eos: expected True or False.*, got 1$"),
    ({"max_tokens": -1}, "max_tokens: expected an integer >= 0.*, got -1$"),
    ({"min_tokens": -1}, "min_tokens: expected .*, got -1"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens: expected 0 <= min_tokens <= max_tokens=8, got 9$"),
    ({"seed": 2**63}, "seed: expected .*, got 9223372036854775808"),
    ({"logprobs": -1}, "logprobs: expected .*, got -1"),
    ({"temperature": None}, "temperature: expected .*, got None"),
]


@pytest.mark.parametrize(("params", "message"), BAD, ids=[str(case[0])[:40] for case in BAD])
def test_invalid_values_are_named(params, message):
    with pytest.raises(ValueError, match="^" + message.replace("(", "[(]")):
        SamplingParams(**params)


def test_values_are_normalised():
    params = SamplingParams(stop="x", top_k=-1, temperature=1, stop_token_ids=[4], logit_bias={}, bad_words=None)
    assert (params.stop, params.top_k, params.stop_token_ids, params.logit_bias) == (("x",), 0, (4,), None)
    assert params.bad_words == ()
    assert isinstance(params.temperature, float)
    assert SamplingParams(stop=None).stop == ()
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert dataclasses.replace(params, n=2).n == 2
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params  # noqa: S301 - our own bytes


def test_logit_bias_is_a_copy():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = math.nan
    assert params.logit_bias == {1: 2.0}


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=2)
    | st.complex_numbers()
    | st.fractions()
    | st.just(object()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers() | st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=3))
def test_junk_is_refused_as_a_value_error(fields):
    try:
        SamplingParams(**fields).bind(vocab_size=2**70, encode=lambda _: [1])
    except ValueError as error:
        message = str(error)
    else:
        return
    assert any(f"{name}: expected " in message for name in FIELDS)


def test_ids_outside_the_vocabulary_are_named():
    for params, name in (({"logit_bias": {V: 1}}, "logit_bias"), ({"stop_token_ids": [V]}, "stop_token_ids")):
        with pytest.raises(ValueError, match=f"{name}: expected token ids 0 <= id < 40, got 40"):
            SamplingParams(**params).bind(vocab_size=V)
    with pytest.raises(ValueError, match=r"bad_words: expected token ids .*, got 99"):
        SamplingParams(bad_words=["x"]).bind(vocab_size=V, encode=lambda _: [99])
    with pytest.raises(ValueError, match=r"the prompt: expected token ids .*, got -1"):
        SamplingParams().bind(vocab_size=V, prompt_ids=[-1])
    assert SamplingParams().bind(vocab_size=V, eos_token_ids=[V, 2, -1]).eos_token_ids == (2,)


def test_bad_words_are_banned_bare_and_after_a_space():
    table = {"cat": [1, 2], " cat": [9], "dog": [4, 1], " dog": [4, 2], "\n": [], " \n": [8], "": [], " ": [6]}
    assert bad_word_ids(["cat", "dog", " cat"], table.__getitem__) == ((1, 2), (9,), (4, 1))
    assert bad_word_ids(["\n", " "], table.__getitem__) == ((8,), (6,))
    with pytest.raises(ValueError, match="which encodes to none"):
        bad_word_ids(["x"], lambda _: [])
    with pytest.raises(ValueError, match="there is no tokenizer"):
        SamplingParams(bad_words=["x"]).bind(vocab_size=V)


# --- log-probabilities and the finite check ------------------------------------------------------------------------


def test_top_logprobs():
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, -math.inf], dtype=torch.bfloat16)
    expected = logits.float().log_softmax(-1)
    rows, tokens = logits.expand(3, -1), [2, 3, 4]
    found = top_logprobs(rows, tokens, 3)
    assert found[0] == TokenLogprob(2, expected[2].item(), 3, tuple((i, expected[i].item()) for i in (1, 3, 2)))
    assert {each.top for each in found} == {found[0].top}
    assert top_logprobs(rows, tokens, 1)[1].top == ((1, expected[1].item()),)
    assert top_logprobs(rows, tokens, 0)[1] == TokenLogprob(3, expected[3].item(), 1, ())
    assert [token for token, _ in top_logprobs(rows, tokens, 99)[2].top] == [1, 3, 2, 0, 4]
    assert top_logprobs(rows, tokens, 0)[2].logprob == -math.inf


def test_check_logits():
    check_logits(torch.tensor([[0.0, -math.inf], [1.0, 2.0]]), "request 3")
    check_logits(torch.zeros(0, 5), "no rows")
    cases = {"NaN": [0.0, math.nan], "[+]inf": [0.0, math.inf], "no finite value": [-math.inf, -math.inf]}
    for problem, row in cases.items():
        for dtype in (torch.float32, torch.bfloat16):
            with pytest.raises(ValueError, match=f"the logits of request 3 hold {problem}"):
                check_logits(torch.tensor([[0.0, 1.0], row], dtype=dtype), "request 3")
