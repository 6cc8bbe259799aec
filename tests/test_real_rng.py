"""The real generator: its uniforms, its draws, and the output distribution of decoding with it.

Every test here is deterministic (fixed seeds). A chi-square test fails if a correct generator would give such a
statistic with probability ALPHA = 1e-6 or less. There are about 20 of these tests, so a correct generator had a chance
of 2e-5 to fail when the seeds were chosen. The negative controls show that the tests detect known mistakes.
"""

import itertools
import os
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof import SamplingParams
from draftproof import rng as rng_module
from draftproof.functional import block_verify, chain, token_verify
from draftproof.native.dispatch import VARIABLE
from draftproof.rng import (
    _NOISE,
    CounterRng,
    CounterRoundRng,
    Purpose,
    TorchRng,
    _DrawKind,
    _uniforms,
    fold,
    inverse_cdf,
)
from support.chi_square import ALPHA, chi_square, counts_of
from support.helpers import embedded_model, engine, plain_rows, tokenizer

HOST = torch.device("cpu")
KINDS = (_DrawKind.DECISION, _DrawKind.INDEX, _DrawKind.DECISION)


def uniforms(source, number):
    """`number` uniforms that differ in one coordinate: the row's seed, the round, the place, the element, the call."""
    if source == "seed":
        return _uniforms(CounterRoundRng(range(number), [0] * number).at(Purpose.DRAFT)._keys, (number,), HOST)
    if source == "round":
        return _uniforms(CounterRoundRng([5] * number, range(number)).at(Purpose.VERIFY)._keys, (number,), HOST)
    if source == "place":
        rounds = CounterRoundRng([5], [7])
        return _uniforms([rounds.at(Purpose.DRAFT, place)._keys[0] for place in range(number)], (number,), HOST)
    if source in {"element", "grid"}:
        return _uniforms([fold(11)], (1, number) if source == "element" else (1, 200, number // 200), HOST).flatten()
    if source.startswith("noise"):
        pairs = [(5, place) if source == "noise of a place" else (place, 3) for place in range(number)]
        return _uniforms([fold(seed, _NOISE, place) for seed, place in pairs], (number, 8), HOST)[:, 7]
    rng = TorchRng(9)
    return torch.cat([rng._next((number // 100,), HOST) for _ in range(100)])


SOURCES = ["seed", "round", "place", "element", "grid", "call", "noise of a place", "noise of a seed"]


@pytest.mark.parametrize("source", SOURCES)
def test_uniforms_are_uniform_in_every_coordinate(source):
    u = uniforms(source, 20_000)
    assert u.min() > 0
    assert u.max() < 1
    assert len(u.unique()) == len(u)
    assert chi_square(counts_of((u * 256).long(), 256), torch.full((256,), 1 / 256)) > ALPHA
    pairs = (u[:-1] * 16).long() * 16 + (u[1:] * 16).long()
    assert chi_square(counts_of(pairs[::2], 256), torch.full((256,), 1 / 256)) > ALPHA


@pytest.mark.parametrize("source", SOURCES)
def test_every_bit_of_a_uniform_is_fair(source):
    words = (uniforms(source, 20_000) * 2.0**52).long()
    ones = torch.stack([((words >> bit) & 1).sum() for bit in range(52)]).double()
    assert ((ones - 10_000).abs() / 5000**0.5).max() < 6.5  # 52 bits, 6.5 standard deviations: false alarm 4e-9


def test_streams_that_differ_in_one_coordinate_are_unrelated():
    number = 2000
    seeds = range(number)
    streams = []
    for first, turn, purpose, place in itertools.product((0, 1), (0, 1), (Purpose.DRAFT, Purpose.VERIFY), (0, 1)):
        rng = CounterRoundRng([seed + first for seed in seeds], [turn] * number).at(purpose, place)
        streams += [rng._next(kind, (number, 2), HOST)[:, column] for kind in _DrawKind for column in (0, 1)]
    made = torch.stack(streams)
    shifted = made[: len(made) // 2, 1:] == made[len(made) // 2 :, :-1]
    assert shifted.all()  # seed + 1 is the next row's seed: the same stream, shifted by one row
    correlation = torch.corrcoef(made) - torch.eye(len(made))
    assert correlation.abs().max() < 6 / number**0.5  # 2016 pairs: false alarm 4e-6
    assert len(made[: len(made) // 2].unique()) == made[: len(made) // 2].numel()


# --- bernoulli and categorical ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rng", [CounterRng([1]), TorchRng(1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probability_0_is_never_and_1_is_always(rng, dtype):
    certain = torch.tensor([0.0, 1.0], dtype=dtype).repeat(200_000).unsqueeze(0)
    assert torch.equal(rng.bernoulli(certain), certain.bool())


@pytest.mark.parametrize("prob", [0.001, 0.3, 0.75])
def test_bernoulli_draws_have_their_probability(prob):
    for rng in (CounterRng([17]), TorchRng(17)):
        yes = rng.bernoulli(torch.full((1, 200_000), prob)).sum()
        assert chi_square(torch.stack([200_000 - yes, yes]), torch.tensor([1 - prob, prob])) > ALPHA


def test_indices_have_the_frequency_of_their_weights():
    weights = torch.tensor([0.0, 3.0, 0.5, 0.0, 1e-3, 7.0, 0.0])
    for rng in (CounterRng([17]), TorchRng(17)):
        drawn = rng.categorical(weights.expand(1, 100_000, 7))
        assert chi_square(counts_of(drawn, 7), weights / weights.sum()) > ALPHA


EDGES = [2.0**-53, 0.5 - 2.0**-53, 0.5, 1 - 2.0**-53]
WEIGHT = st.one_of(
    st.just(0.0),
    st.floats(0, 1, width=32, allow_subnormal=True),
    st.sampled_from([1e-45, 1e-38, 1e-30, 1.0, 3e38]),
)


@settings(max_examples=300)
@given(
    weights=st.lists(WEIGHT, min_size=1, max_size=12).filter(any),
    u=st.one_of(st.sampled_from(EDGES), st.floats(2.0**-53, 1 - 2.0**-53)),
    wide=st.booleans(),
    search=st.sampled_from(["at once", "by blocks", "natively"]),
)
def test_an_index_without_weight_is_never_drawn(weights, u, wide, search):
    row = torch.tensor(weights, dtype=torch.float64 if wide else torch.float32)
    with {"at once": nullcontext(), "by blocks": searched_by_blocks_of(4), "natively": searched_natively()}[search]:
        found = int(inverse_cdf(row, torch.tensor(u, dtype=torch.float64)))
    assert row[found] > 0


@contextmanager
def searched_by_blocks_of(size):
    with patch.multiple(rng_module, _WIDE=0, _BLOCK=size), patch.dict(os.environ, {VARIABLE: "0"}):
        yield


def searched_natively():
    """By native.c if it runs on this machine."""
    return patch.object(rng_module, "_WIDE", 0)


@pytest.mark.parametrize("width", [4, 7, 8, 9, 5000, 49_155])
def test_a_search_by_blocks_finds_the_same_index_as_one_running_sum(width):
    weights = torch.rand(64, width, generator=torch.Generator().manual_seed(width)).pow(6)
    weights[:, ::3] = 0
    u = (torch.arange(64, dtype=torch.float64) + 0.5) / 64
    with patch.object(rng_module, "_WIDE", width + 1):
        plain = inverse_cdf(weights, u)
    for search in (searched_by_blocks_of(4), searched_by_blocks_of(512), searched_natively()):
        with search:
            assert torch.equal(inverse_cdf(weights, u), plain)
            assert torch.equal(inverse_cdf(weights.view(8, 8, width), u.view(8, 8)), plain.view(8, 8))


@pytest.mark.parametrize("u", EDGES)
@pytest.mark.parametrize("weight", [5e-324, 1e-323, 2.2e-308])
def test_an_index_without_weight_is_never_drawn_where_all_weights_are_subnormal(u, weight):
    row = torch.tensor([0.0, weight, 0.0, weight, 0.0], dtype=torch.float64)
    assert int(inverse_cdf(row, torch.tensor(u, dtype=torch.float64))) in (1, 3)


def test_an_index_without_weight_is_never_drawn_from_a_quarter_million():
    weights = torch.zeros(262_144)
    positive = torch.arange(5, 262_000, 997)
    weights[positive] = torch.rand(len(positive), generator=torch.Generator().manual_seed(0)) * 1e-6
    u = torch.cat([torch.tensor(EDGES, dtype=torch.float64), _uniforms([fold(1)], (1, 200), HOST)[0]])
    assert (weights[inverse_cdf(weights.expand(len(u), -1), u)] > 0).all()
    even = torch.full((1, 262_144), 1 / 262_144)
    drawn = torch.cat([CounterRng([seed]).categorical(even) for seed in range(1000)])
    assert chi_square(counts_of(drawn * 20 // 262_144, 20), torch.full((20,), 0.05)) > ALPHA


@given(
    seeds=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4),
    size=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    extra=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_a_draw_depends_on_its_coordinates_and_not_on_padding_or_batch(seeds, size, extra):
    rows, rounds = len(seeds), list(range(len(seeds)))
    padded = (rows, size[0] + extra[0], size[1] + extra[1])
    batch = CounterRoundRng(seeds, rounds).at(Purpose.VERIFY, 3)
    many = [batch._next(kind, padded, HOST)[:, : size[0], : size[1]] for kind in KINDS]
    for row in range(rows):
        single = CounterRoundRng(seeds[row : row + 1], rounds[row : row + 1]).at(Purpose.VERIFY, 3)
        picked = CounterRoundRng(seeds, rounds).at(Purpose.VERIFY, 3, [row])
        for kind, expected in zip(KINDS, many, strict=True):
            assert torch.equal(single._next(kind, (1, *size), HOST)[0], expected[row])
            assert torch.equal(picked._next(kind, (1, *size), HOST)[0], expected[row])


def test_decisions_do_not_shift_the_indices_drawn_after_them():
    weights = torch.ones(1, 1000)
    plain, decided = CounterRng([5]), CounterRng([5])
    decided.bernoulli(torch.full((1, 7), 0.5))
    assert torch.equal(plain.categorical(weights), decided.categorical(weights))


def test_rows_come_first():
    with pytest.raises(ValueError, match="requested from an rng of 2 rows"):
        CounterRng([1, 2]).bernoulli(torch.ones(3))


# --- the output distribution of decoding ------------------------------------------------------------------------------


def chain_distribution(p, length):
    """Distribution of the first `length` tokens of a chain with first row p[-1] and rows p[token], flattened."""
    found = p[-1]
    for _ in range(length - 1):
        found = (found.unsqueeze(-1) * p[:-1].repeat(found.numel() // (len(p) - 1), 1).view(*found.shape, -1)).flatten()
    return found


def peaked(vocab, seed, power):
    rows = torch.rand(vocab + 1, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) ** power
    return rows / rows.sum(-1, keepdim=True)


def decode(rule, p, q, *, rows, drafted, length, seed, by_position=False):
    """Counts of the outputs of speculative decoding; with by_position, drafts reuse the uniform of their position."""
    vocab = p.shape[1]
    at = torch.arange(rows)
    out = torch.full((rows, length + drafted + 1), vocab)
    done = torch.zeros(rows, dtype=torch.int64)
    rng = TorchRng(seed)
    fixed = _uniforms([fold(seed, -1)], (1, rows, length + drafted), HOST)[0]
    for turn in range(length):
        fresh = _uniforms([fold(seed, -2, turn)], (1, rows, drafted), HOST)[0]
        contexts, tokens = [torch.where(done > 0, out[at, done - 1], vocab)], []
        for step in range(drafted):
            u = fixed[at, (done + step).clamp(max=fixed.shape[1] - 1)] if by_position else fresh[:, step]
            tokens.append(inverse_cdf(q[contexts[-1]], u))
            contexts.append(tokens[-1])
        index = torch.stack(contexts, 1)
        found = rule(index[:, 1:], q[index[:, :-1]], p[index], rng=rng, validate=False)
        emitted = torch.cat([index[:, 1:], index[:, :1]], 1)
        emitted[at, found.accepted] = found.token
        for step in range(drafted + 1):
            active = (step <= found.accepted) & (done < length)
            out[at[active], done[active]] = emitted[active, step]
            done = done + active
    assert (done >= length).all()
    weights = vocab ** torch.arange(length - 1, -1, -1)
    return counts_of((out[:, :length] * weights).sum(-1), vocab**length)


# Chosen from 60 models: here the mistakes below change the total variation by 0.057 and 0.074.
MODEL = {"p": peaked(4, 24, 1.5), "q": peaked(4, 1024, 1.5)}
RUN = {"rows": 40_000, "drafted": 3, "length": 3}
# For the mistakes: by the noncentral chi-square distribution, with what they add to the statistic of 400,000 rows (at
# least 0.027 a row), the test misses one with probability 2e-13 at most. With 40,000 rows it was 2e-117.
FEWER = {**RUN, "rows": 10_000}


@pytest.mark.grid(1)
@pytest.mark.parametrize("rule", [token_verify, block_verify])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_decoded_tokens_have_the_targets_distribution(rule, seed):
    counts = decode(rule, **MODEL, **RUN, seed=seed)
    assert chi_square(counts, chain_distribution(MODEL["p"], 3)) > ALPHA


def test_a_token_residual_in_the_block_rule_is_detected(monkeypatch):
    right = chain.bonus_weights
    monkeypatch.setattr(chain, "bonus_weights", lambda *rest: right(*rest[:-1], torch.ones_like(rest[-1])))
    assert chi_square(decode(block_verify, **MODEL, **FEWER, seed=1), chain_distribution(MODEL["p"], 3)) < ALPHA


def test_uniforms_keyed_by_absolute_position_are_detected():
    counts = decode(block_verify, **MODEL, **FEWER, seed=1, by_position=True)
    assert chi_square(counts, chain_distribution(MODEL["p"], 3)) < ALPHA


def test_the_drafts_distribution_is_detected():
    assert chi_square(decode(block_verify, **MODEL, **FEWER, seed=1), chain_distribution(MODEL["q"], 3)) < ALPHA


@pytest.mark.grid(1)
@pytest.mark.parametrize(("verifier", "seed"), [("token", 1), ("block", 2)])
def test_the_engine_has_the_targets_distribution_on_a_trained_pair(verifier, seed):
    prompt, kept, length = tokenizer()("Once upon a time")["input_ids"], 3, 3
    paths = {(): 1.0}
    for _ in range(length):
        rows = plain_rows(embedded_model("target"), [[*prompt, *path] for path in paths])[0].topk(kept)
        ranked = dict(zip(paths, rows.indices.tolist(), strict=True))
        probs = dict(zip(paths, rows.values.softmax(-1).tolist(), strict=True))
        paths = {(*path, x): paths[path] * probs[path][i] for path in paths for i, x in enumerate(ranked[path])}
    params = SamplingParams(n=500, top_k=kept, max_tokens=length, seed=seed, ignore_eos=True)
    outputs = engine(verifier=verifier, length=2, max_batch=250).generate([prompt], params)
    place = {path: i for i, path in enumerate(paths)}
    drawn = torch.tensor([place[output.token_ids] for output in outputs])
    assert chi_square(counts_of(drawn, len(paths)), torch.tensor(list(paths.values()))) > ALPHA
