"""The C operations compute what their formulas say, beside float64; models read by them agree with transformers."""

import copy
import ctypes
import dataclasses
import gc
import hashlib
import itertools
import math
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from draftproof import Engine, SamplingParams, UserError, native, rng
from draftproof.backends.base import Feed
from draftproof.backends.cache import rounding
from draftproof.backends.heads.self_draft import EarlyExitBackend
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.attention import NativeAttention
from draftproof.backends.lean.backend import LeanBackend
from draftproof.backends.lean.native_layers import NativeLayers
from draftproof.backends.lean.traits import ACTIVATIONS
from draftproof.backends.products.packed_linear import PackedLinear, packs
from draftproof.functional import chain
from draftproof.native import build as library
from draftproof.native import dispatch
from draftproof.native import rows as native_rows
from draftproof.native.dispatch import VARIABLE
from draftproof.native.operations import Operations
from draftproof.native.structures import BY_PARTS, BY_SPANS, SPAN, AttentionArguments, PassMask
from draftproof.native.tensors import Interleaved
from draftproof.rng import first_arrival, fold
from draftproof.tree import TokenTree
from support.helpers import engine
from support.lean_models import NATIVE, exercise, lean_backend, lively_model
from support.native_levels import LEVELS, OPERATIONS, close, drawn, have
from support.native_models import MODELS
from support.programs import Program, run_program

needs_native = pytest.mark.usefixtures("level")


def softmax(x):
    return OPERATIONS[torch.float32].softmax(x)


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outs", "ins"),
    [(1, 2), (15, 6), (16, 64), (49, 130), (112, 34), (200, 576), (33, 1), (70, 43), (40, 173), (1000, 32)],
)
def test_products(outs, ins, dtype):
    product = OPERATIONS[dtype].product
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 15, 16, 25, 60):
        sizes = (rows, ins), (outs, ins), (outs,), (rows, outs)
        x, weight, bias, onto = (drawn(seed, *size, dtype=dtype) for seed, size in enumerate(sizes))
        laid = Interleaved.of(weight)
        assert torch.equal(laid.to_dense(), weight)
        exact = x.double() @ weight.double().T
        slack = 1e-6 * (x.double().abs() @ weight.double().abs().T)
        plain, biased = product(x, laid), product(x, laid, bias)
        assert close(plain, exact, slack), f"{rows} rows"
        assert close(biased, exact + bias, slack + 1e-6), f"{rows} rows"
        assert not close(plain, exact + bias, slack + 1e-6), f"{rows} rows: a bias left out is seen"
        made = product(x, laid, bias, onto)
        assert torch.equal(made, biased + onto), f"{rows} rows: rounded before it is added, as torch does"


@pytest.mark.parametrize("ins", [576, 577])
def test_a_rows_product_does_not_depend_on_the_rows_beside_it_or_the_threads(ins, dtype):
    x, laid = drawn(1, 60, ins, dtype=dtype), Interleaved.of(drawn(2, 400, ins, dtype=dtype))
    product = OPERATIONS[dtype].product
    whole, threads = product(x, laid), torch.get_num_threads()
    for size in (1, 2, 3, 5, 12, 13, 31):
        assert torch.equal(product(x[7 : 7 + size], laid), whole[7 : 7 + size])
    try:
        for some in (1, 2, 3, 5):
            torch.set_num_threads(some)
            assert torch.equal(product(x, laid), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("ins", [8198, 8199])
def test_many_rows_of_many_inputs_are_those_of_a_few(ins, dtype):
    """Rows are multiplied in portions that fit into a cache, and the last tile of rows reaches back into the others."""
    x, weight = drawn(1, 150, ins, dtype=dtype), drawn(2, 40, ins, dtype=dtype)
    onto, laid, product = drawn(3, 150, 40, dtype=dtype), Interleaved.of(weight), OPERATIONS[dtype].product
    whole = product(x, laid, None, onto)
    assert close(product(x, laid), x.double() @ weight.double().T, 1e-5 * (x.double().abs() @ weight.double().abs().T))
    for row in range(0, 150, 7):
        assert torch.equal(product(x[row : row + 5], laid, None, onto[row : row + 5]), whole[row : row + 5])


WIDENED = ["x86-64-v4-fma", "x86-64-v4"]  # levels whose bfloat16 products are made of float32 ones


@pytest.mark.builds
@pytest.mark.skipif(not set(WIDENED) <= set(LEVELS), reason="not both levels run here")
def test_levels_that_widen_products_give_the_same_bits(monkeypatch):
    made = []
    for name in WIDENED:
        monkeypatch.setenv(VARIABLE, name)
        product = OPERATIONS[torch.bfloat16].product
        made.append(product(drawn(1, 30, 576), Interleaved.of(drawn(2, 400, 576))))
    assert torch.equal(*made)


@pytest.mark.slow
@pytest.mark.builds
@pytest.mark.parametrize("name", [WIDENED[0], "x86-64-v3", "x86-64-v4-amx"])
def test_products_without_memory_for_rows(name, monkeypatch, tmp_path):
    """The sums are the same bits where nothing can be allocated."""
    if name not in LEVELS:
        pytest.skip("the level does not run here")
    monkeypatch.setenv(VARIABLE, name)
    level, out = library.choose(name)[0], tmp_path / "library.so"
    header = tmp_path / "poor.h"
    header.write_text("#include <stdlib.h>\n#define malloc(size) ((void *)0)\n")
    library.compile_library(out, level, extra=("-O1", "-include", str(header)))
    poor = Operations(ctypes.CDLL(str(out)), torch.bfloat16, level.name)
    for ins in (576, 577):
        x, weight = drawn(1, 30, ins, dtype=torch.bfloat16), drawn(2, 40, ins, dtype=torch.bfloat16)
        rich, laid = OPERATIONS[torch.bfloat16], Interleaved.of(weight)
        assert torch.equal(poor.product(x, laid), rich.product(x, laid)), ins
        assert torch.equal(poor.rows_product(x, weight), rich.rows_product(x, weight)), ins


def test_rows_that_are_not_contiguous_and_more_than_two_dimensions(dtype):
    x, laid = drawn(1, 6, 2, 40, dtype=dtype), Interleaved.of(drawn(2, 20, 20, dtype=dtype))
    product = OPERATIONS[dtype].product
    expected = product(x[..., :20].reshape(12, 20).contiguous(), laid).view(6, 2, 20)
    assert torch.equal(product(x[..., :20], laid), expected)


@pytest.mark.parametrize("ins", [64, 65])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(value, ins, dtype):
    x = drawn(1, 3, ins, dtype=dtype)
    x[1, 0] = value  # behind the last number of the row before
    made = OPERATIONS[dtype].product(x, Interleaved.of(drawn(2, 32, ins, dtype=dtype)))
    assert not made[1].isfinite().any()
    assert made[[0, 2]].isfinite().all()


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [7, 16, 172, 576])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_norms(rows, dim, dtype):
    x, scaled = (
        drawn(1, rows, dim, scale=3.0, dtype=dtype),
        torch.randn(dim, generator=torch.Generator().manual_seed(2)),
    )
    wide = x.double()
    expected = wide * scaled.double() / (wide.square().sum(-1, keepdim=True) + 0.7).sqrt()
    assert close(OPERATIONS[dtype].norm(x, scaled, 0.7), expected, 1e-6)
    assert not close(OPERATIONS[dtype].norm(x, scaled, 0.7 + dim / 4), expected, 1e-6), "another epsilon is seen"


def gelu_by_tanh(x):
    """The same as torch's in float64, which loses small results: 1 + tanh(u) is 2 / (1 + exp(-2 u))."""
    return x * torch.sigmoid((8 / math.pi) ** 0.5 * (x + 0.044715 * x**3))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "dim"), [(1, 16), (3, 43), (9, 1536), (300, 32)])
def test_gates(rows, dim, activation, dtype):
    x = drawn(1, rows, 2 * dim, scale=4.0, dtype=dtype)
    x[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -87.0])
    gate, up = x.double().chunk(2, -1)
    act = gelu_by_tanh(gate) if activation == "gelu_tanh" else F.silu(gate)
    assert torch.allclose(act, ACTIVATIONS[activation](gate), rtol=1e-9, atol=1e-12)
    made = OPERATIONS[dtype].gated(x, activation)
    # A large negative gate is an exponential of a large number, whose own rounding counts.
    assert close(made, act * up, 1e-6 if activation == "gelu_tanh" else 1e-30, roundings=2.01)
    (other,) = {*ACTIVATIONS} - {activation}
    assert not close(OPERATIONS[dtype].gated(x, other), act * up, 1e-6, roundings=2.01), "another one is seen"
    rounded = act.to(dtype) * up.to(dtype)
    assert dtype == torch.float32 or (made == rounded).double().mean() > 0.98, "rounded where torch rounds"


def test_gates_of_gpt_oss(dtype):
    x = drawn(1, 9, 2 * 43, scale=8.0, dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    assert min(gate.max(), up.max(), -up.min()) > 7
    low = gate.clamp(max=7.0)
    exact = low * torch.sigmoid(1.702 * low) * (up.clamp(-7.0, 7.0) + 1)
    found = OPERATIONS[dtype].gated(x, "clamped")
    assert close(found, exact, 1e-6, roundings=2.01)
    assert not close(found, low * torch.sigmoid(1.702 * low) * (up + 1), 1e-6, roundings=2.01), "a bound is seen"


@needs_native
@pytest.mark.parametrize(("rows", "dim"), [(1, 1), (3, 15), (5, 512), (2, 513), (9, 49152)])
def test_softmax(rows, dim):
    x = 4 * torch.randn((rows, dim), generator=torch.Generator().manual_seed(1))
    x[:, dim // 2 + 1 :: 3] = float("-inf")
    made, exact = softmax(x), x.double().softmax(-1)
    assert torch.equal(made == 0, exact == 0)
    assert (made.double() - exact).abs().le(3e-6 * exact + 1e-45).all()
    assert not (made.double() - (x.double() / 1.001).softmax(-1)).abs().le(3e-6 * exact + 1e-45).all() or dim < 15
    assert torch.equal(softmax(x[:1]), made[:1])


@needs_native
def test_softmax_of_what_is_not_finite_and_of_far_apart_scores():
    x = torch.zeros(4, 40)
    x[1, 39], x[2, 3], x[3, :20] = float("nan"), float("inf"), -1e4
    made = softmax(x)
    assert made[1:3].isnan().all()
    assert made[3].tolist() == pytest.approx([0.0] * 20 + [0.05] * 20)
    assert (made[3, :20] == 0).all()


@needs_native
@pytest.mark.parametrize(("rows", "dim"), [(1, 1), (3, 15), (5, 512), (2, 513), (9, 49152)])
def test_greedy_rows_have_one_at_the_first_largest_entry(rows, dim):
    made = OPERATIONS[torch.float32].greedy
    draw = torch.Generator().manual_seed(1)
    for x in (
        torch.randn((rows, dim), generator=draw),
        torch.randint(-3, 3, (rows, dim), generator=draw).float(),  # many largest entries
        torch.full((rows, dim), -2.0).index_fill_(1, torch.tensor([dim - 1]), -1.0),
        torch.full((rows, dim), float("-inf")).index_fill_(1, torch.tensor([dim // 2]), -5.0),
        torch.tensor([-0.0, 0.0]).repeat(dim).expand(rows, -1)[:, dim % 2 : dim % 2 + dim],
    ):
        expected = torch.zeros(rows, dim).scatter_(-1, x.argmax(-1, keepdim=True), 1.0)
        assert torch.equal(made(x), expected)
        assert torch.equal(native.greedy(x.double()), expected.double()), "by torch"


@pytest.mark.parametrize(("rows", "dim"), [(1, 1), (3, 15), (2, 64), (5, 515)])
def test_legal_logits_are_told_from_others(rows, dim, dtype):
    legal = OPERATIONS[dtype].legal
    x = drawn(1, rows, dim, dtype=dtype)
    assert legal(x)
    for row, place in {(0, 0), (rows - 1, dim - 1), (rows // 2, dim // 2)}:
        for value, fine in ((float("nan"), False), (float("inf"), False), (float("-inf"), dim > 1)):
            broken = x.clone()
            broken[row, place] = value
            assert legal(broken) == fine
            assert bool(broken.amax(-1).isfinite().all()) == fine, "as torch says"
    x[rows // 2] = float("-inf")
    assert not legal(x)


@needs_native
def test_rows_spread_over_a_vocabulary():
    narrow, ids = drawn(1, 3, 40, dtype=torch.float32), torch.randperm(100)[:40].sort().values
    expected = torch.zeros(3, 100)
    expected[:, ids] = narrow
    assert torch.equal(native.spread(narrow, ids, 100), expected)
    assert torch.equal(native.spread(narrow.double(), ids, 100), expected.double()), "by torch"


# --- the block rule ---------------------------------------------------------------------------------------------------


def chains(seed, batch, n, vocab):
    """Ragged chains with rows of p that are peaked, equal to q, or without mass where q has some."""
    draw = torch.Generator().manual_seed(seed)
    p = (3 * torch.randn((batch, n + 1, vocab), generator=draw)).softmax(-1)
    q = (2 * torch.randn((batch, n, vocab), generator=draw)).softmax(-1)
    q[1::4], p[2::4, :, ::2] = p[1::4, :n], 0.0
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=draw).view(batch, n)
    lengths = torch.randint(0, n + 1, (batch,), generator=draw)
    for row, length in enumerate(lengths.tolist()):
        tokens[row, length:], q[row, length:] = 0, 0.0
    return tokens, q, p, lengths


@needs_native
@pytest.mark.parametrize("masses", [False, True])
@pytest.mark.parametrize(("n", "vocab"), [(1, 2), (3, 5), (4, 40), (8, 700)])
def test_the_block_rules_plan_and_its_residual(n, vocab, masses):
    tokens, q, p, lengths = chains(n, 24, n, vocab)
    q = None if masses else q
    wide = None if q is None else q.double()
    found = chain.block_acceptance(tokens, q, p, lengths)
    expected = chain.block_acceptance(tokens, wide, p.double(), lengths)  # float64 is torch's
    inside = torch.arange(n) < lengths.unsqueeze(-1)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine[inside], theirs[inside], rtol=0, atol=3e-6)
    assert (found[1][~inside] == 0).all()
    unscaled = chain.block_acceptance(tokens, wide, (p * 1.01).double(), lengths)
    assert not torch.allclose(found[1][inside], unscaled[1][inside], rtol=0, atol=3e-6), "another p is seen"
    for kept in range(n + 1):
        accepted = lengths.clamp(max=kept)
        scale = torch.linspace(0.05, 1, 24, dtype=torch.float64)
        made = chain.bonus_weights(p, q, tokens, accepted, lengths, scale)
        exact = chain.bonus_weights(p.double(), wide, tokens, accepted, lengths, scale)
        assert torch.allclose(made.double(), exact, rtol=0, atol=2e-7)
        assert made.dtype == torch.float32


@needs_native
def test_what_does_not_belong_together_is_refused_and_narrow_integers_are_not():
    tokens, q, p, lengths = chains(1, 6, 3, 40)
    expected = chain.block_acceptance(tokens, q, p, lengths)
    found = chain.block_acceptance(tokens.int(), q, p, lengths.int())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    for broken in (
        (tokens + 40, q, p, torch.full_like(lengths, 3)),
        (tokens, q, p, lengths + 4),
        (tokens, q, p[:, :2], lengths),
    ):
        with pytest.raises(ValueError, match=r"drafted tokens|expected p to be torch.float32"):
            OPERATIONS[torch.float32].block(*broken)
    with pytest.raises(ValueError, match="are not all of 0 to 8"):
        native.spread(torch.zeros(1, 3), torch.tensor([1, 4, 9]), 9)


@needs_native
def test_where_no_residual_is_left_it_is_the_targets_row():
    p = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
    made = chain.bonus_weights(p, p[:, :1].clone(), *(torch.tensor(x) for x in ([[1]], [0], [1], [1.0])))
    assert made.tolist() == [[0.25, 0.75]]


# --- races ------------------------------------------------------------------------------------------------------------


def by_definition(weights, keys):
    """The race in Python's own integers and floats."""
    found = []
    for row, key in zip(weights.tolist(), keys, strict=True):
        times = {}
        for x, weight in enumerate(row):
            if weight > 0:
                hashed = key + (x + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
                hashed = (hashed ^ hashed >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
                hashed = (hashed ^ hashed >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
                u = ((hashed ^ hashed >> 31) // 4096 + 0.5) / 2**52
                times[x] = -math.log1p(-u) / weight
        found.append(min(times, key=times.get, default=0))
    return torch.tensor(found)


def some_rows(width, kind, rows=6):
    source = torch.Generator().manual_seed(width)
    made = (4 * torch.randn(rows, width, generator=source)).softmax(-1)
    if kind == "few":
        made[made < made.topk(min(width, 20)).values[:, -1:]] = 0
    if kind == "one":
        made = torch.zeros(rows, width).scatter_(-1, made.argmax(-1, keepdim=True), 1.0)
    if kind == "equal":
        made = torch.ones(rows, width)
    return made


KEYS = [fold(9, number) for number in range(6)]


@needs_native
@pytest.mark.parametrize("kind", ["all", "few", "one", "equal"])
@pytest.mark.parametrize("width", [1, 2, 15, 63, 64, 65, 1000, 16384, 16385, 50001])
def test_native_races_and_torchs_have_the_winners_of_the_definition(width, kind, monkeypatch):
    rows = some_rows(width, kind)
    found = first_arrival(rows, KEYS)
    assert torch.equal(found, first_arrival(rows.double(), KEYS)), "float64 is torch's"
    monkeypatch.setattr(rng, "_TOGETHER", 3 * width)
    assert torch.equal(found, first_arrival(rows.double(), KEYS)), "in two portions"
    assert (rows.gather(-1, found.unsqueeze(-1)) > 0).all()
    if width <= 1000:
        assert torch.equal(found, by_definition(rows, KEYS))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            assert torch.equal(first_arrival(rows, KEYS), found)
            alone = [first_arrival(row.unsqueeze(0), [key]) for row, key in zip(rows, KEYS, strict=True)]
        finally:
            torch.set_num_threads(1)
        assert torch.equal(torch.cat(alone), found), "no row depends on the others"


@needs_native
@pytest.mark.parametrize("factor", [2.0**-60, 3.7, 1e30])
def test_scale_padding_and_gaps_change_nothing(factor):
    rows = some_rows(3000, "all")
    found = first_arrival(rows, KEYS)
    assert torch.equal(first_arrival(rows * factor, KEYS), found)
    padded = torch.nn.functional.pad(rows, (0, 777))
    for wide in (padded, padded.double(), torch.stack([padded, padded], -1)[..., 0]):
        assert torch.equal(first_arrival(wide, KEYS), found)
    assert not torch.equal(first_arrival(rows, [key + 1 for key in KEYS]), found)


@needs_native
def test_what_has_no_winner():
    assert first_arrival(torch.zeros(2, 70), KEYS[:2]).tolist() == [0, 0]
    for dtype in (torch.float32, torch.float64):
        assert first_arrival(torch.zeros(0, 70, dtype=dtype), []).tolist() == []
    torch.testing.assert_close(first_arrival(torch.zeros(2, 70).double(), KEYS[:2]), torch.tensor([0, 0]))


# --- attention --------------------------------------------------------------------------------------------------------


class Case:
    """A ragged pass over random keys, and what comes of it in float64."""

    def __init__(self, seed, *, dim, group, width, masked, dtype=torch.bfloat16, cap=0.0):
        self.cap = cap
        self.sinks = None
        draw, self.dtype = torch.Generator().manual_seed(seed), dtype

        def some(low, high):
            return int(torch.randint(low, high + 1, (), generator=draw))

        self.rows, self.width, self.dim, self.group, self.key_heads = some(1, 4), width, dim, group, some(1, 3)
        self.capacity, slots = width + 90, self.rows + 2
        order = torch.randperm(slots, generator=draw)[: self.rows]
        bases = [some(0, 90) for _ in range(self.rows)]
        widths = [width if row == 0 else some(1, width) for row in range(self.rows)]
        self.places = torch.tensor([[int(order[row]), bases[row], widths[row]] for row in range(self.rows)])
        shape = (slots, self.key_heads, self.capacity, dim)
        self.keys, self.values = (drawn(some(0, 999), *shape, dtype=dtype) for _ in range(2))
        heads = self.key_heads * (group + 2)
        self.fused = drawn(some(0, 999), self.rows * width, heads, dim, dtype=dtype)
        angles = drawn(some(0, 999), self.rows * width, 2 * dim, dtype=dtype)
        self.cos, self.sin = angles.unsqueeze(1).chunk(2, -1)
        self.sin[..., dim // 2 * 2 :] = 0.0  # the last number of an odd head has no partner
        every = self.places[:, 1:].sum(-1, keepdim=True)
        steps = self.places[:, 1:2] + torch.arange(width) + 1
        self.seen, self.mask = torch.minimum(steps, every), None
        if masked:
            horizon = int(every.max())
            hidden = torch.rand((self.rows, 1, width, horizon), generator=draw) < 0.4
            hidden[..., 0] = False
            self.mask = torch.zeros(hidden.shape, dtype=dtype)
            self.mask.masked_fill_(hidden, torch.finfo(dtype).min)
            self.seen = every.expand(-1, width).contiguous()

    @property
    def stored(self):
        """The buffers of the cache."""
        return self.keys, self.values

    def run(self):
        """The operation's outputs, and the buffers after it; the case stays as it is."""
        stored = [each.clone() for each in self.stored]
        mask = PassMask([tuple(place) for place in self.places.tolist()], self.seen.tolist(), self.mask)
        heads = self.group * self.key_heads
        scale = {"scale": self.dim**-0.5, "cap": self.cap}
        given = AttentionArguments.of(self.cos, self.sin, self.keys.shape, mask, heads=heads, **scale)
        given.sinks = None if self.sinks is None else self.sinks.data_ptr()
        return OPERATIONS[self.dtype].attend(self.fused.clone(), given, *stored), *stored

    def fill_the_last_slot(self):
        """Let the first row be in the last slot, up to its end, where nothing may be read behind it."""
        slots = [slot for slot in range(len(self.keys) - 1) if slot not in self.places[1:, 0]]
        self.places[0, 0], last = len(self.keys) - 1, len(self.keys) - 1
        for row in range(1, self.rows):
            if self.places[row, 0] == last:
                self.places[row, 0] = slots[0]
        end = int(self.places[0, 1:].sum())
        self.capacity = max(int(self.places[:, 1:].sum(-1).max()), end)
        moved = self.capacity - end
        self.places[0, 1] += moved
        self.seen[0] += moved
        self.keys, self.values = (each[:, :, : self.capacity].contiguous() for each in (self.keys, self.values))
        if self.mask is not None:
            self.mask = F.pad(self.mask, (0, self.capacity - self.mask.shape[-1]))
            self.seen[:] = self.places[:, 1:].sum(-1, keepdim=True)

    def run_alone(self):
        """The outputs of all rows, each read alone and token by token; of rows with a mask, each alone."""
        stored = [each.clone() for each in self.stored]
        out = torch.zeros(self.rows * self.width, self.group * self.key_heads * self.dim, dtype=self.dtype)
        for row, (slot, base, width) in enumerate(self.places.tolist()):
            step = 1 if self.mask is None else width
            for column in range(0, width, step):
                at = slice(row * self.width + column, row * self.width + column + step)
                columns = slice(column, column + step)
                mask = None if self.mask is None else self.mask[row : row + 1, :, columns].contiguous()
                passed = PassMask([(slot, base + column, step)], [self.seen[row, columns].tolist()], mask)
                scale = {"scale": self.dim**-0.5, "cap": self.cap, "heads": self.group * self.key_heads}
                given = AttentionArguments.of(self.cos[at], self.sin[at], self.keys.shape, passed, **scale)
                given.sinks = None if self.sinks is None else self.sinks.data_ptr()
                out[at] = OPERATIONS[self.dtype].attend(self.fused[at].clone(), given, *stored)
        return out

    def turned(self, x):
        """Rotary turn as transformers rounds it."""
        low, high, last = x.tensor_split([self.dim // 2, self.dim // 2 * 2], -1)
        return torch.addcmul(x * self.cos, torch.cat((high, low, last), -1), self.sin)

    def written(self):
        """Keys and values with those of the pass."""
        keys, values = self.keys.clone(), self.values.clone()
        inner, last = self.group * self.key_heads, (self.group + 1) * self.key_heads
        turned = self.turned(self.fused[:, :last])
        for row, (slot, base, width) in enumerate(self.places.tolist()):
            at = slice(row * self.width, row * self.width + width)
            keys[slot, :, base : base + width] = turned[at, inner:].transpose(0, 1)
            values[slot, :, base : base + width] = self.fused[at, last:].transpose(0, 1)
        return keys, values

    def expected(self):
        """The same by plain loops."""
        keys, values = self.written()
        inner = self.group * self.key_heads
        turned = self.turned(self.fused[:, :inner])
        out = torch.zeros(self.rows * self.width, inner, self.dim, dtype=torch.float64)
        for row, (slot, _, width) in enumerate(self.places.tolist()):
            for column, head in itertools.product(range(width), range(inner)):
                token, count = row * self.width + column, int(self.seen[row, column])
                read = (slot, head // self.group, slice(0, count))
                scores = keys[read].double() @ turned[token, head].double() * self.dim**-0.5
                if self.cap:
                    scores = self.cap * (scores / self.cap).tanh()
                if self.mask is not None:
                    scores += self.mask[row, 0, column, :count]
                if self.sinks is not None:
                    scores = torch.cat((scores, self.sinks[head : head + 1].double()))
                out[token, head] = scores.softmax(-1)[:count] @ values[read].double()
        return out.flatten(1), keys, values


class RoundedCase(Case):
    """The same over keys and values of 8 bits."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        (keys, of_keys), (values, of_values) = rounding.rounded_keys(self.keys), rounding.rounded(self.values)
        self.keys, self.values, self.scales = keys, values, torch.cat((of_keys, of_values), 1)

    @property
    def stored(self):
        return self.keys, self.values, self.scales

    def fill_the_last_slot(self):
        super().fill_the_last_slot()
        self.scales = self.scales[:, :, : self.capacity].contiguous()

    def written(self):
        """What the numbers of the operation stand for."""
        _, keys, values, scales = self.run()
        of_keys, of_values = scales.chunk(2, 1)
        return rounding.restored_keys(keys, of_keys, torch.float64), rounding.restored(values, of_values, torch.float64)


CASES = [
    (dtype, dim, group, width, masked)
    for dtype, dim, group in (
        *(
            (torch.bfloat16, dim, group)
            for dim, group in ((8, 2), (32, 1), (64, 3), (80, 1), (96, 4), (128, 2), (512, 1))
        ),
        *(
            (torch.float32, dim, group)
            for dim, group in ((12, 1), (16, 2), (48, 2), (64, 3), (80, 1), (128, 2), (512, 1))
        ),
    )
    for width in (1, 2, 8, 19)
    for masked in (False, True)
]


@pytest.mark.grid(61)
@needs_native
@pytest.mark.parametrize(("dtype", "dim", "group", "width", "masked"), CASES)
def test_attention(dtype, dim, group, width, masked):
    assert OPERATIONS[dtype].attends(dim)
    for seed in range(3):
        case = Case(seed, dim=dim, group=group, width=width, masked=masked, dtype=dtype, cap=1.5 * (seed == 2))
        (out, keys, values), (expected, expected_keys, expected_values) = case.run(), case.expected()
        assert torch.allclose(keys, expected_keys, rtol=0, atol=1e-6 if dtype == torch.float32 else 0)
        assert torch.equal(values, expected_values)
        assert agrees(out, expected)


@pytest.mark.grid(4)
@pytest.mark.parametrize("masked", [False, True])
def test_attention_over_keys_and_values_of_8_bits(masked, dtype):
    """Values beside float64; the same bits alone, token by token, in a batch, and for every number of threads."""
    threads = torch.get_num_threads()
    for dim in (1, 5, 8, 12, 20, 31, 32, 48, 63, 64, 65, 80, 96, 100, 128, 160, 250, 256, 512):
        group, cap = 1 + dim % 8, 1.5 * (dim % 5 == 0)
        case = RoundedCase(dim, dim=dim, group=group, width=4, masked=masked, dtype=dtype, cap=cap)
        case.fill_the_last_slot()
        if dim % 3 == 0:
            case.sinks = drawn(dim, group * case.key_heads, dtype=torch.float32)
        out, *stored = case.run()
        assert agrees(out, case.expected()[0]), dim
        assert torch.equal(out, case.run_alone()), dim
        try:
            torch.set_num_threads(2)
            assert all(torch.equal(*pair) for pair in zip((out, *stored), case.run(), strict=True)), dim
        finally:
            torch.set_num_threads(threads)


def test_8_bits_are_written_as_torch_rounds_them(dtype):
    for dim in (1, 12, 64, 96, 250):
        case = RoundedCase(dim, dim=dim, group=2, width=9, masked=False, dtype=dtype)
        _, keys, values, scales = case.run()
        plain = copy.copy(case)
        plain.keys, plain.values = (torch.zeros(case.keys.shape, dtype=dtype) for _ in range(2))
        plain = Case.written(plain)
        (of_keys, key_scales), (of_values, value_scales) = rounding.rounded_keys(plain[0]), rounding.rounded(plain[1])
        for slot, base, width in case.places.tolist():
            at = slot, slice(None), slice(base, base + width)
            assert torch.equal(values[at], of_values[at]), dim
            assert (keys[at].int() - of_keys[at].int()).abs().max() <= (dtype == torch.float32), dim
            both = torch.cat((key_scales[at], value_scales[at]))
            assert torch.allclose(scales[at], both, rtol=1e-6 if dtype == torch.float32 else 0, atol=0), dim
            assert not torch.equal(scales[at], both.roll(1, 0)), "scales of another head are seen"


def test_attention_over_8_bits_in_several_pieces(dtype):
    for seed, masked in ((1, False), (2, True), (8, True)):
        case = RoundedCase(seed, dim=64, group=3, width=70, masked=masked, dtype=dtype)
        expected = case.expected()[0]
        assert agrees(case.run()[0], expected)
        case.scales = case.scales.roll(1, 2)
        assert not agrees(case.run()[0], expected), "scales of the position before are seen"


@pytest.mark.parametrize("dim", [5, 12, 80, 250])
def test_8_bits_behind_a_head_are_not_used(dim, dtype):
    case = RoundedCase(1, dim=dim, group=2, width=3, masked=False, dtype=dtype)
    expected = case.run()[0]
    used = torch.zeros(case.keys.shape[0], case.capacity, dtype=torch.bool)
    for slot, base, width in case.places.tolist():
        used[slot, : base + width] = True
    case.scales[~used[:, None, :, None].expand_as(case.scales)] = float("nan")
    case.keys[~used[:, None, :, None].expand_as(case.keys)] = -128
    assert torch.equal(case.run()[0], expected)


def test_numbers_that_are_not_finite_are_seen_in_8_bits(dtype):
    for wrong, place in ((float("nan"), 0), (float("inf"), 5), (float("nan"), 63)):
        case = RoundedCase(1, dim=64, group=2, width=1, masked=False, dtype=dtype)
        for head in (2 * case.key_heads, 3 * case.key_heads):  # the first key, and the first value
            given = copy.copy(case)
            given.fused = case.fused.clone()
            given.fused[0, head, place] = wrong
            assert given.run()[0].isnan().any()


def test_sinks_take_a_share_of_attention(dtype):
    for seed, scale in ((1, 1.0), (2, 30.0)):  # also where the sink is far above all scores, or below
        case = Case(seed, dim=64, group=3, width=9, masked=seed == 2, dtype=dtype)
        without = case.run()[0]
        case.sinks = drawn(seed, 3 * case.key_heads, scale=scale, dtype=torch.float32)
        assert agrees(case.run()[0], case.expected()[0])
        assert not agrees(without, case.expected()[0]), "sinks that are left out are seen"


@pytest.mark.grid(5)
@pytest.mark.parametrize("masked", [False, True])
def test_attention_in_several_pieces(masked, dtype):
    for seed in (1, 2, 8):
        case = Case(seed, dim=64, group=3, width=70, masked=masked, dtype=dtype)
        assert agrees(case.run()[0], case.expected()[0])


@pytest.mark.grid(2)
@pytest.mark.parametrize("masked", [False, True])
def test_heads_of_every_size(masked, dtype):
    """Values beside float64; the same bits alone, token by token, in a batch, and for every number of threads.

    Odd sizes read all that is before them, even ones have a mask.
    """
    threads = torch.get_num_threads()
    for dim in (*range(1 + masked, 257, 2), 300 + masked, 512):
        case = Case(dim, dim=dim, group=1 + dim % 3, width=4, masked=masked, dtype=dtype, cap=1.5 * (dim % 5 == 0))
        case.fill_the_last_slot()
        out, keys, values = case.run()
        expected, expected_keys, expected_values = case.expected()
        assert agrees(out, expected), dim
        assert torch.allclose(keys, expected_keys, rtol=0, atol=1e-6 if dtype == torch.float32 else 0), dim
        assert torch.equal(values, expected_values), dim
        assert torch.equal(out, case.run_alone()), dim
        try:
            torch.set_num_threads(2)
            assert torch.equal(out, case.run()[0]), dim
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("dim", [5, 8, 12, 20, 80, 250])
def test_numbers_behind_a_head_are_not_used(dim, dtype):
    """Whole vectors are read, so beyond a head's end, too: what is there must not matter, finite or not."""
    case = Case(1, dim=dim, group=2, width=3, masked=False, dtype=dtype)
    expected = case.run()[0]
    used = torch.zeros(case.keys.shape[0], case.capacity, dtype=torch.bool)
    for slot, base, width in case.places.tolist():
        used[slot, : base + width] = True
    unused = ~used[:, None, :, None].expand_as(case.keys)
    case.keys[unused] = case.values[unused] = float("nan")
    assert torch.equal(case.run()[0], expected)
    for row, (_, _, width) in enumerate(case.places.tolist()):  # and the queries, keys and values of padding
        case.fused[row * case.width + width : (row + 1) * case.width] = float("nan")
    assert torch.equal(case.run()[0], expected)


@needs_native
def test_larger_heads_are_torchs():
    for dtype in (torch.bfloat16, torch.float32):
        assert [dim for dim in range(600) if OPERATIONS[dtype].attends(dim)] == list(range(1, 513))


def agrees(out, expected):
    """Weights are rounded before values are weighed, and the sum is rounded: of values of size 1."""
    slack = {torch.bfloat16: 0.05, torch.float32: 2e-5}[out.dtype]
    return bool((out.double() - expected).abs().max() < slack)


class Mistakes:
    """Ways to ask for something else; the comparison sees each."""

    @staticmethod
    def one_slot_too_many(case):
        case.seen = case.seen + 1

    @staticmethod
    def heads_of_another_key(case):
        case.fused = torch.cat(
            [case.fused[:, : -2 * case.key_heads].roll(1, 1), case.fused[:, -2 * case.key_heads :]], 1
        )

    @staticmethod
    def sine_without_its_sign(case):
        case.cos, case.sin = case.cos.contiguous(), case.sin.abs()

    @staticmethod
    def no_soft_limit(case):
        case.cap = 0.0

    @staticmethod
    def rows_in_each_others_slots(case):
        case.places = torch.cat([case.places[:, :1].roll(1, 0), case.places[:, 1:]], 1)


@pytest.mark.parametrize("mistake", [name for name in vars(Mistakes) if not name.startswith("_")])
def test_the_comparison_sees_the_mistake(mistake, dtype):
    case = Case(5, dim=64, group=3, width=4, masked=False, dtype=dtype, cap=1.5)
    assert case.rows > 1
    expected = case.expected()[0]
    assert agrees(case.run()[0], expected)
    getattr(Mistakes, mistake)(case)
    assert not agrees(case.run()[0], expected)


@needs_native
def test_attention_over_many_slots_and_one():
    case = Case(1, dim=64, group=3, width=1, masked=False)
    long = drawn(3, 1, case.key_heads, 3000, 64)
    case.keys = case.values = long
    case.rows, case.places, case.seen = 1, torch.tensor([[0, 2998, 1]]), torch.tensor([[2999]])
    case.fused, case.cos, case.sin = case.fused[:1], case.cos[:1], case.sin[:1]
    assert agrees(case.run()[0], case.expected()[0])
    case.places, case.seen = torch.tensor([[0, 0, 1]]), torch.tensor([[1]])
    assert agrees(case.run()[0], case.expected()[0])


def far_case(dtype, base, window=None):
    """Five tokens after many others; with a window each sees the newest positions only."""
    case = Case(4, dim=16, group=2, width=5, masked=False, dtype=dtype)
    case.rows, case.key_heads, case.capacity = 1, 1, base + 5
    case.keys, case.values = (drawn(seed, 1, 1, base + 5, 16, dtype=dtype) for seed in (1, 2))
    case.fused = drawn(3, 5, 4, 16, dtype=dtype)
    case.cos, case.sin = case.cos[:5], case.sin[:5]
    case.places, case.seen = torch.tensor([[0, base, 5]]), base + 1 + torch.arange(5).unsqueeze(0)
    if window is not None:
        distance = (base + torch.arange(5)).unsqueeze(1) - torch.arange(base + 5)
        hidden = (distance < 0) | (distance >= window)
        case.mask = torch.zeros(1, 1, 5, base + 5, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
        case.seen = torch.full((1, 5), base + 5)
    return case


def is_near(out, expected):
    """Closer than `agrees`: outputs over many keys are small."""
    return bool((out.double() - expected).abs().max() < {torch.bfloat16: 1e-3, torch.float32: 1e-5}[out.dtype])


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, SPAN + 40])
def test_outcomes_of_several_spans_become_one(window, sinks, dtype):
    """Values beside float64; the same bits token by token, and however threads divide the spans."""
    threads, divisions = torch.get_num_threads(), set()
    for base in (SPAN - 3, 2 * SPAN + 100, 16 * SPAN):
        case = far_case(dtype, base, window)
        if sinks:
            case.sinks = drawn(5, 2, scale=8.0, dtype=torch.float32)
        out, expected = case.run()[0], case.expected()[0]
        assert is_near(out, expected)
        assert torch.equal(out, case.run_alone())
        try:
            for some in (2, 3):
                torch.set_num_threads(some)
                mask = PassMask([(0, base, 5)], case.seen.tolist(), case.mask)
                given = AttentionArguments.of(case.cos, case.sin, case.keys.shape, mask, heads=2, scale=1.0)
                divisions.add(given.divided)
                assert torch.equal(out, case.run()[0]), some
        finally:
            torch.set_num_threads(threads)
        case.values[:, :, base - 40 : base - 10] += 1
        assert not is_near(case.run()[0], expected), "values of a span are seen"
    assert divisions == {BY_PARTS, BY_SPANS}


def test_spans_behind_a_window_are_not_read(dtype):
    case = far_case(dtype, 2 * SPAN + 100, window=200)
    case.values[:, :, 7] = float("nan")
    assert torch.equal(case.run()[0], far_case(dtype, 2 * SPAN + 100, window=200).run()[0])
    case.mask[..., 3, 8] = 0.0  # one token sees a neighbour
    assert case.run()[0].isnan().any(), "a span that is read is seen"


@pytest.mark.grid(43)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("key_heads", [1, 3, 5])
@pytest.mark.parametrize(("dim", "group"), [(96, 4), (64, 3), (83, 2)])
def test_threads_that_share_each_tile_give_the_same_bits(key_heads, dim, group, masked, dtype):
    """Fewer tiles than two for each thread are divided: by keys, by queries, by dimensions."""
    dim += 16 * (dtype == torch.float32)  # no multiple of the 32 dimensions that a thread takes at least
    case = Case(4, dim=dim, group=group, width=5, masked=masked, dtype=dtype, cap=1.5 * (key_heads == 3))
    case.rows, case.key_heads, case.capacity = 1, key_heads, 800
    case.keys, case.values = (drawn(seed, 1, key_heads, 800, dim, dtype=dtype) for seed in (1, 2))
    case.fused = drawn(3, case.width, key_heads * (group + 2), dim, dtype=dtype)
    case.cos, case.sin = case.cos[: case.width], case.sin[: case.width]
    case.places, case.seen = torch.tensor([[0, 700, 5]]), 701 + torch.arange(5).unsqueeze(0)
    if masked:
        case.mask = torch.zeros(1, 1, 5, 705, dtype=dtype)
        case.mask[..., 3::7] = torch.finfo(dtype).min
        case.seen = torch.full((1, 5), 705)
    expected, found = case.expected()[0], {}
    threads = torch.get_num_threads()
    try:
        for some in (1, 2, 3, 8):
            torch.set_num_threads(some)
            heads, mask = group * key_heads, PassMask([(0, 700, 5)], case.seen.tolist(), case.mask)
            given = AttentionArguments.of(case.cos, case.sin, case.keys.shape, mask, heads=heads, scale=1.0)
            assert bool(given.divided) == (key_heads % some > 0 and key_heads < 2 * some)
            found[some] = case.run()[0]
    finally:
        torch.set_num_threads(threads)
    assert agrees(found[1], expected)
    assert all(torch.equal(found[1], each) for each in found.values())


# --- models -----------------------------------------------------------------------------------------------------------

TOLERANCE = {torch.bfloat16: 0.12, torch.float32: 2e-5}
# Times that: transformers' own bfloat16 rows of this model are on average 3.6 times as far from float32 as Llama's.
ROUGH = {"phi3, partial": 3.0}


@pytest.mark.grid(19)
@needs_native
@pytest.mark.parametrize("name", NATIVE)
def test_other_families_layers_are_one_call(name, dtype):
    made = LeanBackend(lively_model(MODELS[name](), dtype))
    assert isinstance(made.lean.run_layers, NativeLayers)


@pytest.mark.grid(12)
@pytest.mark.parametrize("name", MODELS)
def test_models_read_natively_agree_with_transformers(name, dtype):
    model = lively_model(MODELS[name](), dtype)
    made = lean_backend(model)
    assert made.products == "native"
    assert isinstance(made.lean.layers[0].attention, NativeAttention)
    tolerance = TOLERANCE[dtype] * (ROUGH.get(name, 1.0) if dtype == torch.bfloat16 else 1.0)
    exercise(Program(made, tolerance=tolerance))
    assert run_program(0, made, tolerance=tolerance) > 0


@pytest.mark.grid(13)
@pytest.mark.parametrize("name", MODELS)
def test_chains_are_read_to_the_same_bits_however_they_are_batched(name, dtype):
    made = LeanBackend(lively_model(MODELS[name](), dtype))
    tokens = [(7 * i * i) % 97 for i in range(60)]

    def start(size):
        session = made.open()
        made.forward([Feed(session, tokens[:size])])
        return session

    alone = start(40)
    expected = torch.cat([made.forward([Feed(alone, [token])])[0].logits for token in tokens[40:50]])
    drafted = TokenTree.chain(torch.tensor(tokens[41:50]))
    assert torch.equal(made.forward([Feed(start(40), tokens[40:41], drafted)])[0].logits, expected)
    pieces = start(17)
    made.forward([Feed(pieces, tokens[17:40])])
    beside = [Feed(start(size), tokens[:3]) for size in (3, 25, 55)]
    last = made.forward([beside[0], Feed(pieces, tokens[40:44]), *beside[1:]])[1].logits
    assert torch.equal(last[-1], expected[3])
    assert not torch.equal(last[-1], expected[4]), "other tokens have other logits"


@needs_native
def test_greedy_text_is_plain_decodings_to_the_bit_with_any_chain_drafted():
    model = lively_model(MODELS["llama"](), torch.bfloat16)
    prompts = [[1, 2, 3], [4, 4, 4, 4, 9, 4, 4], [11] * 20]
    plain = Engine(LeanBackend(copy.deepcopy(model)), max_batch=1)
    expected = [plain.generate([prompt], PARAMS)[0].token_ids for prompt in prompts]
    draft = HFBackend(copy.deepcopy(model).float())
    for rule in ("token", "block", "match"):
        drafting = engine(
            LeanBackend(copy.deepcopy(model)), draft, rule, length=6, max_batch=3, tokenizer=None, eos_token_ids=()
        )
        made = drafting.generate(prompts, PARAMS)
        assert [one.token_ids for one in made] == expected
        assert all(one.stats.num_accepted_tokens > one.stats.num_target_calls for one in made)


@needs_native
def test_a_copy_reads_its_own_weights():
    made = LeanBackend(lively_model(MODELS["qwen3"](), torch.bfloat16))
    before = Engine(made, max_batch=1).generate([[1, 2, 3]], PARAMS)
    copied = copy.deepcopy(made)
    for layer in made.lean.layers:
        layer.down.weight.blocks.fill_(float("nan"))
    assert Engine(copied, max_batch=1).generate([[1, 2, 3]], PARAMS)[0].token_ids == before[0].token_ids


@needs_native
def test_first_layers_that_grew_before_the_others():
    made = LeanBackend(lively_model(MODELS["llama"](), torch.float32))
    early = EarlyExitBackend(made, 1)
    expected = Engine(made, max_batch=1).generate([[1, 2, 3]], PARAMS)[0].token_ids
    for number in (1, 2, 3):  # slots double: four for the first layer, then, and one for the others
        open_ = [early.open() for _ in range(number)]
        early.forward([Feed(session, [4, 5]) for session in open_])
        for session in open_:
            session.close()
    sessions = [made.open() for _ in range(3)]
    rows = made.forward([Feed(session, [1, 2, 3]) for session in sessions])
    assert [int(row.logits[-1].argmax()) for row in rows] == [expected[0]] * 3


@needs_native
def test_a_model_that_is_let_go_is_gone_at_once():
    made = LeanBackend(lively_model(MODELS["llama"](), torch.bfloat16))
    weights = weakref.ref(made.lean.layers[0].down.weight)
    gc.collect()
    gc.disable()
    try:
        del made
        assert weights() is None, "a cycle holds it until the next collection"
    finally:
        gc.enable()


@needs_native
def test_the_same_text_in_a_batch_as_alone():
    model = lively_model(MODELS["llama"](), torch.bfloat16)
    prompts = [[1, 2, 3], [4] * 30, [9, 8, 7, 6], [5]]
    alone = [Engine(LeanBackend(copy.deepcopy(model)), max_batch=1).generate([one], PARAMS)[0] for one in prompts]
    together = Engine(LeanBackend(copy.deepcopy(model)), max_batch=4).generate(prompts, PARAMS)
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]


PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


# --- what C is given --------------------------------------------------------------------------------------------------

UNCHECKED = """
from dataclasses import replace

import torch
from draftproof.functional import block_verify
from draftproof import native
from draftproof.native.structures import BY_PARTS, BY_SPANS, SPAN, AttentionArguments, PassMask
from draftproof.native.tensors import Interleaved
from draftproof.rng import TorchRng, inverse_cdf

made = native.operations_for(torch.zeros(1))
rows = torch.rand(2, 3, 5000).softmax(-1)
tokens, lengths = torch.zeros(2, 3, dtype=torch.int64), torch.full((2,), 3)
weight, x = Interleaved.of(torch.rand(20, 8)), torch.rand(3, 8)
chain = {"rng": TorchRng(0), "validate": False}
p = torch.cat([rows, rows[:, :1]], 1)
numbers, logits = made.quantize(weight, 4, 32), torch.rand(3, 20)
mask = PassMask([(0, 0, 1)], [[1]], None)
angles, buffer = torch.rand(1, 1, 32), torch.zeros(1, 1, 4, 32)


def attend(
    fused=torch.rand(1, 3, 32), cos=angles, shape=buffer.shape, mask=mask, keys=buffer, values=buffer, scales=None
):
    return made.attend(fused, AttentionArguments.of(cos, cos, shape, mask, heads=1, scale=1.0), keys, values, scales)


eight = buffer.to(torch.int8)
def delta_rule(q=(1, 3, 2, 8), k=(1, 3, 2, 8), v=(1, 3, 4, 5), g=(1, 3, 4), beta=(1, 3, 4), state=(1, 4, 8, 5), **to):
    return made.delta_rule(*(torch.zeros(each, **to) for each in (q, k, v, g, beta, state)))


delta_rule()
attend()
attend(keys=eight, values=eight, scales=torch.zeros(1, 2, 4, 1))
attend(torch.rand(1, 3, 5), torch.rand(1, 1, 5), (1, 1, 4, 5), mask, *torch.zeros(2, 1, 1, 4, 5))
cases = {
    "a smaller batch of p": lambda: block_verify(tokens, rows, p[:1], **chain),
    "short lengths": lambda: block_verify(tokens, rows, p, lengths=lengths[:1], **chain),
    "long lengths": lambda: block_verify(tokens, rows, p, lengths=lengths + 1, **chain),
    "fewer rows of p": lambda: block_verify(tokens, rows, p[:, :2], **chain),
    "a narrower q": lambda: block_verify(tokens, rows[..., :7], p, **chain),
    "tokens outside": lambda: block_verify(tokens + 5000, rows, p, **chain),
    "q of another type": lambda: made.block(tokens, rows.half(), p, lengths),
    "more uniforms than rows": lambda: inverse_cdf(rows[0], torch.rand(4)),
    "fewer keys than rows": lambda: made.race(rows, torch.zeros(2, 2, dtype=torch.int64)),
    "keys of another type": lambda: made.race(rows, torch.zeros(2, 3, dtype=torch.int32)),
    "weights of another type": lambda: made.race(rows.double(), torch.zeros(2, 3, dtype=torch.int64)),
    "a bias of another size": lambda: made.product(x, weight, torch.rand(19)),
    "a bias of another type": lambda: made.product(x, weight, torch.rand(20).double()),
    "a bias with gaps": lambda: made.product(x, weight, torch.rand(40)[::2]),
    "x of another type": lambda: made.product(x.bfloat16(), weight),
    "x of another width": lambda: made.product(torch.rand(3, 6), weight),
    "onto of another shape": lambda: made.product(x, weight, None, torch.rand(2, 20)),
    "quantized inputs of another width": lambda: made.quantized_product(torch.rand(3, 6), numbers),
    "quantized inputs of another type": lambda: made.quantized_product(x.bfloat16(), numbers),
    "a bias of another size for numbers": lambda: made.quantized_product(x, numbers, torch.rand(19)),
    "onto of another shape for numbers": lambda: made.quantized_product(x, numbers, None, torch.rand(2, 20)),
    "fewer numbers than outputs": lambda: made.quantized_product(x, replace(numbers, outs=33)),
    "numbers of other bits": lambda: made.quantized_product(x, replace(numbers, bits=8)),
    "numbers of three bits": lambda: made.quantized_product(x, replace(numbers, bits=3)),
    "numbers in other groups": lambda: made.quantized_product(x, replace(numbers, group=64)),
    "a weight to three bits": lambda: made.quantize(weight, 3, 32),
    "a weight in groups of 48": lambda: made.quantize(weight, 4, 48),
    "a weight of another type": lambda: made.quantize(Interleaved.of(torch.rand(20, 8).bfloat16()), 4, 32),
    "fewer weights than outputs to compute again": lambda: made.rescore(logits, x, torch.rand(19, 8), count=4),
    "weights with gaps": lambda: made.rescore(logits, x, torch.rand(20, 16)[:, ::2], count=4),
    "weights of other outputs": lambda: made.rescore(logits, x, Interleaved.of(torch.rand(40, 8)), count=4),
    "fewer inputs than logits": lambda: made.rescore(logits, x[:1], torch.rand(20, 8), count=4),
    "logits of another type": lambda: made.rescore(logits.double(), x, torch.rand(20, 8), count=4),
    "logits with gaps": lambda: made.rescore(logits.t().contiguous().t(), x, torch.rand(20, 8), count=4),
    "a short bias of logits": lambda: made.rescore(logits, x, torch.rand(20, 8), torch.rand(19), count=4),
    "no outputs to compute again": lambda: made.rescore(logits, x, torch.rand(20, 8), count=0),
    "more outputs than there are": lambda: made.rescore(logits, x, torch.rand(20, 8), count=21),
    "queries of fewer tokens": lambda: delta_rule(q=(1, 2, 2, 8)),
    "keys of 257 numbers": lambda: delta_rule(*[(1, 3, 2, 257)] * 2, state=(1, 4, 257, 5)),
    "heads that key heads do not divide": lambda: delta_rule(*[(1, 3, 3, 8)] * 2),
    "values of fewer tokens": lambda: delta_rule(v=(1, 2, 4, 5)),
    "decays of fewer heads": lambda: delta_rule(g=(1, 3, 2)),
    "decays of fewer channels": lambda: delta_rule(g=(1, 3, 4, 7)),
    "fewer betas": lambda: delta_rule(beta=(1, 3, 3)),
    "a state of other heads": lambda: delta_rule(state=(1, 2, 8, 5)),
    "a delta rule in 64 bits": lambda: delta_rule(dtype=torch.float64),
    "a short norm": lambda: made.norm(x, torch.rand(7), 0.1),
    "rows of double in a softmax": lambda: made.softmax(x.double()),
    "rows of an odd width": lambda: made.gated(torch.rand(3, 7)),
    "columns outside": lambda: made.spread(x, torch.arange(8) + 1, 8),
    "columns for other rows": lambda: made.spread(x, torch.arange(7), 9),
    "a shorter row of q": lambda: made.residual(rows[0, 0], rows[0, 0, :9], 0, 1.0, torch.empty(5000)),
    "a shorter row to write": lambda: made.residual(rows[0, 0], rows[0, 1], 0, 1.0, torch.empty(4999)),
    "a slot that is not there": lambda: attend(mask=PassMask([(1, 0, 1)], [[1]], None)),
    "a position that is not there": lambda: attend(mask=PassMask([(0, 4, 1)], [[5]], None)),
    "more to read than there is": lambda: attend(mask=PassMask([(0, 0, 1)], [[5]], None)),
    "a negative slot": lambda: attend(mask=PassMask([(-1, 0, 1)], [[1]], None)),
    "a row wider than the pass": lambda: attend(mask=PassMask([(0, 0, 2)], [[1]], None)),
    "a mask of another width": lambda: attend(mask=PassMask([(0, 0, 1)], [[1]], torch.zeros(1, 1, 2, 1))),
    "fewer heads": lambda: attend(fused=torch.rand(1, 2, 32)),
    "fewer angles": lambda: attend(cos=torch.rand(1, 1, 16)),
    "other keys": lambda: attend(keys=torch.zeros(1, 1, 3, 32)),
    "values of another type": lambda: attend(values=buffer.double()),
    "8 bits without scales": lambda: attend(keys=eight, values=eight),
    "scales of keys alone": lambda: attend(keys=eight, values=eight, scales=torch.zeros(1, 1, 4, 1)),
    "scales of plain keys": lambda: attend(scales=torch.zeros(1, 2, 4, 1)),
    "keys with gaps": lambda: attend(torch.rand(1, 3, 8), angles[..., :8], (1, 1, 4, 8), keys=buffer[..., :8]),
    "heads of size 513": lambda: attend(
        torch.rand(1, 3, 513), *[torch.rand(1, 1, 513), (1, 1, 4, 513)], keys=torch.zeros(1, 1, 4, 513)
    ),
}
for name, call in cases.items():
    try:
        call()
    except ValueError as error:
        assert str(error), name
    else:
        raise SystemExit(f"{name}: taken")
print(len(cases))
"""


@pytest.mark.builds  # its process chooses a build of its own
@needs_native
def test_no_wrong_argument_reaches_c():
    """In a process without the tests' own shape checks, which would refuse most of these first."""
    done = subprocess.run([sys.executable, "-c", UNCHECKED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert int(done.stdout) > 30


@needs_native
def test_where_a_gradient_is_asked_for_torch_computes():
    logits = torch.randn(3, 5001, requires_grad=True)
    native.softmax(logits)[:, 0].sum().backward()
    assert logits.grad.abs().sum() > 0
    with torch.no_grad():
        assert native_rows._operations(logits) is not None


def test_a_wheel_is_built_without_torch():
    code = "import sys; from draftproof.native import build; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert all(hasattr(native, name) for name in native.__all__)
    with pytest.raises(AttributeError, match="no attribute 'products'"):
        native.products  # noqa: B018


# --- when -------------------------------------------------------------------------------------------------------------

PLACE = library.choose()[0] if LEVELS else None  # the best one, whatever level the other tests are forced to


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """A copy of the library that all tests use, by the name that it has where it is kept."""
    have(PLACE.name)
    content = Path(library.load(PLACE)._name).read_bytes()
    made = tmp_path_factory.mktemp("built") / f"{library._digest(PLACE)}-{hashlib.sha256(content).hexdigest()[:32]}.so"
    made.write_bytes(content)
    return made


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Nothing built, nothing remembered."""
    monkeypatch.setenv("DRAFTPROOF_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(library, "PACKAGED", tmp_path / "none")
    dispatch._operations.cache_clear()
    library.load.cache_clear()
    yield monkeypatch
    dispatch._operations.cache_clear()
    library.load.cache_clear()


@pytest.fixture
def kept(fresh, built, tmp_path):
    """A kept library, and nothing remembered."""
    folder = tmp_path / "native"
    folder.mkdir(mode=0o700)
    copied = folder / built.name
    copied.write_bytes(built.read_bytes())
    copied.chmod(0o700)
    return copied


def layout(dtype=torch.float32):
    return PackedLinear(torch.zeros(32, 32, dtype=dtype)).layout


def forget():
    dispatch._operations.cache_clear()
    library.load.cache_clear()


needs_a_build = pytest.mark.skipif(not LEVELS, reason="no native operations on this machine")


@pytest.mark.slow
@needs_a_build
@pytest.mark.builds
def test_the_library_is_built_once_and_kept(fresh, tmp_path, caplog):
    caplog.set_level("INFO", logger="draftproof")
    fresh.setattr(
        library, "_FLAGS", ("-O0", *(flag for flag in library._FLAGS if flag != "-O3"))
    )  # a third of the time
    assert layout() == "native"
    assert "compiling native code" in caplog.text, "it takes a while"
    (made,) = (tmp_path / "native").iterdir()
    assert made.stat().st_mode & 0o077 == 0
    assert made.parent.stat().st_mode & 0o077 == 0
    forget()
    fresh.setattr(subprocess, "run", None)
    assert layout() == "native"
    assert list((tmp_path / "native").iterdir()) == [made]


@pytest.fixture
def builds(fresh, built):
    """Counts builds, each a copy of one that was made before."""
    made = []

    def compile_library(out, level, **_):
        made.append(level.name)
        out.write_bytes(built.read_bytes())

    fresh.setattr(library, "compile_library", compile_library)
    return made


DAMAGE = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:5000]),
    "empty": lambda path: path.write_bytes(b""),
    "another content": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"),
    "writable by others": lambda path: path.chmod(0o722),
}


@pytest.mark.slow
@needs_a_build
@pytest.mark.builds
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_kept_library_that_cannot_be_trusted_is_built_again(kept, builds, damage, caplog):
    DAMAGE[damage](kept)
    assert layout() == "native"
    assert len(builds) == 1
    assert "building it again" in caplog.text
    assert kept.stat().st_mode & 0o077 == 0
    forget()
    assert layout() == "native"
    assert len(builds) == 1, "and kept"


@needs_a_build
@pytest.mark.builds
def test_another_users_folder_and_file_are_left_alone(kept, builds, monkeypatch, caplog):
    real = library.os.getuid()
    monkeypatch.setattr(library.os, "getuid", lambda: real + 1)
    assert layout() == "native"
    assert len(builds) == 1
    assert "belongs to another user" in caplog.text
    assert list(kept.parent.iterdir()) == [kept]


@needs_a_build
@pytest.mark.builds
def test_a_folder_that_others_may_write_is_closed(kept, builds):
    kept.parent.chmod(0o777)
    assert layout() == "native"
    assert kept.parent.stat().st_mode & 0o077 == 0


@needs_a_build
@pytest.mark.builds
def test_where_kept_code_may_not_run_it_is_built_elsewhere(kept, builds, monkeypatch):
    real = library.ctypes.CDLL

    def noexec(name, *rest):
        if str(kept.parent) in str(name):
            raise OSError("failed to map segment from shared object: operation not permitted")
        return real(name, *rest)

    monkeypatch.setattr(library.ctypes, "CDLL", noexec)
    assert layout() == "native"


@needs_a_build
@pytest.mark.builds
def test_where_nothing_can_be_kept_it_is_built_elsewhere_and_nothing_is_left(fresh, builds, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "passing").mkdir()
    fresh.setenv("DRAFTPROOF_HOME", str(tmp_path / "file"))
    fresh.setattr(library.tempfile, "tempdir", str(tmp_path / "passing"))
    assert layout() == "native"
    assert not list((tmp_path / "passing").iterdir())
    x = drawn(1, 60, 576, dtype=torch.float32)
    assert close(
        PackedLinear(drawn(2, 400, 576, dtype=torch.float32))(x),
        x.double() @ drawn(2, 400, 576, dtype=torch.float32).double().T,
        1e-3,
    )


@needs_a_build
@pytest.mark.builds
def test_without_a_home_the_temporary_folder_serves(fresh, builds, tmp_path):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("DRAFTPROOF_HOME", "XDG_CACHE_HOME", "HOME"):
        fresh.delenv(name, raising=False)
    fresh.setattr(library.Path, "home", no_home)
    fresh.setattr(library.tempfile, "tempdir", str(tmp_path))
    assert layout() == "native"


@pytest.mark.builds
def test_a_compiler_that_fails_is_followed_by_the_next(fresh, tmp_path):
    broken = tmp_path / "broken-cc"
    broken.write_bytes(b"#!/bin/sh\nprintf 'caf\\351: no' >&2\nexit 1\n")
    broken.chmod(0o755)
    fresh.setenv("CC", f"{broken} -some -flags")
    fresh.setattr(library, "_FLAGS", ("--version",))
    tried = []
    real = subprocess.run

    def run(command, **options):
        tried.append(command[0])
        if command[0] == str(broken):
            return real(command, **options)
        (tmp_path / "out.so").write_bytes(b"made")
        return subprocess.CompletedProcess(command, 0, "", "")

    fresh.setattr(library.subprocess, "run", run)
    library.compile_library(tmp_path / "out.so", library.LEVELS[-1])
    assert tried[0] == str(broken)
    assert len(tried) == 2
    fresh.setattr(library.shutil, "which", lambda name: str(broken) if "broken" in name else None)
    with pytest.raises(UserError, match=r"broken-cc -some -flags failed: caf.: no"):
        library.compile_library(tmp_path / "other.so", library.LEVELS[-1])


def wrong(name, made):
    """An operation that is off."""
    return lambda patch: patch.setattr(Operations, name, made)


def full_disk(patch):
    """Nothing kept, and no space to compile in: no compiler may start."""
    patch.setattr(library, "_FLAGS", ("--no-such-flag",))
    patch.setattr(library.shutil, "disk_usage", lambda _: SimpleNamespace(free=3 << 20))


LACKING = {
    "no compiler": (lambda patch: patch.setattr(library.shutil, "which", lambda _: None), "no C compiler"),
    "system": (lambda patch: patch.setattr(library.sys, "platform", "beos"), "this is beos"),
}
BROKEN = {
    "compiler": (lambda patch: patch.setattr(library, "_FLAGS", ("--no-such-flag",)), "failed"),
    "space": (full_disk, "got 3 MiB: free some, or name another folder in the variable TMPDIR"),
    "products": (wrong("product", lambda _, x, w, b=None: 1.1 * x @ w.to_dense().T + b), "off by"),
    "legal": (wrong("legal", lambda *_: True), "NaN or infinite logits"),
    "spread": (wrong("spread", lambda _, x, *rest: F.pad(x, (0, rest[-1] - x.shape[1]))), "not where they belong"),
    "block": (wrong("block", lambda *_: torch.ones(2, 1, 2).double().unbind()), "block rule differs"),
    "residual": (wrong("residual", lambda *given: given[-1].copy_((given[1] - given[2]).clamp(min=0))), "block rule"),
    "softmax": (wrong("softmax", lambda _, x: (1.001 * x).softmax(-1)), "softmax differs"),
    "races": (wrong("race", lambda _, w, keys: w.argmax(-1) + 0 * keys), "races have other winners"),
    "draws": (wrong("inverse_cdf", lambda _, w, u: (w.cumsum(-1) < u[:, None] - 1e-3).sum(-1)), "draws differ"),
    "anything else": (wrong("softmax", lambda *_: {}["gone"]), "gone"),
}


def torch_serves(fresh, said):
    assert layout() == ("oneDNN" if packs(torch.float32, "cpu") else "plain")
    fresh.setenv("DRAFTPROOF_NATIVE", "1")
    with pytest.raises(UserError, match=f"native operations are not available: .*{said}"):
        layout()


@pytest.mark.builds
@pytest.mark.parametrize("kind", LACKING)
def test_where_it_is_missing_torch_serves_quietly_and_1_says_why(fresh, kind, caplog):
    hinder, said = LACKING[kind]
    hinder(fresh)
    torch_serves(fresh, said)
    assert not caplog.text


@needs_a_build
@pytest.mark.builds
@pytest.mark.parametrize("kind", BROKEN)
def test_where_it_is_broken_torch_serves_and_a_warning_says_so(kept, fresh, kind, caplog):
    hinder, said = BROKEN[kind]
    hinder(fresh)
    torch_serves(fresh, said)
    assert said in caplog.text
    assert "DRAFTPROOF_NATIVE=0" in caplog.text


@pytest.mark.builds
def test_the_best_level_that_the_processor_runs_is_chosen(monkeypatch):
    all_of_v4 = set(next(level.needs for level in library.LEVELS if level.name == "x86-64-v4"))
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(library, "_tiles_allowed", lambda: True)
    for flags, name in (
        (all_of_v4 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"}, "x86-64-v4-amx"),
        (all_of_v4 | {"avx512_vnni", "avx512_bf16", "amx_tile"}, "x86-64-v4-bf16"),
        (all_of_v4 | {"avx512_vnni", "avx512_bf16", "AuthenticAMD"}, "x86-64-v4-bf16"),
        (all_of_v4 | {"avx512_vnni", "avx512_bf16", "GenuineIntel"}, "x86-64-v4-fma"),
        (all_of_v4, "x86-64-v4"),
        ({"avx2", "fma", "f16c", "sse2", "avx_vnni"}, "x86-64-v3-vnni"),
        ({"avx2", "fma", "f16c", "sse2"}, "x86-64-v3"),
        ({"avx2", "fma", "sse2"}, "portable"),
        ({"sse2"}, "portable"),
    ):
        monkeypatch.setattr(library, "processor", lambda flags=flags: frozenset(flags))
        assert library.choose()[0].name == name
    with pytest.raises(UserError, match="x86-64-v3 needs avx2, f16c, fma, which this processor lacks"):
        library.choose("x86-64-v3")
    with pytest.raises(UserError, match="expected a level of x86-64-v4-amx"):
        library.choose("x86-64-v5")
    monkeypatch.setattr(library.platform, "machine", lambda: "aarch64")
    assert library.choose()[0].name == "portable"
    with pytest.raises(UserError, match="is for x86_64, and this is aarch64"):
        library.choose("x86-64-v3")


@pytest.mark.builds
def test_without_leave_to_use_tile_registers_another_level_serves(monkeypatch):
    flags = frozenset().union(*(level.needs for level in library.LEVELS))
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(library, "processor", lambda: flags)
    monkeypatch.setattr(library, "_tiles_allowed", lambda: False)
    assert library.choose()[0].name == "x86-64-v4-fma"
    with pytest.raises(UserError, match="x86-64-v4-amx needs the tile registers, which this system does not give"):
        library.choose("x86-64-v4-amx")


@needs_a_build
@pytest.mark.builds
def test_a_matrix_unit_that_the_build_does_not_use_is_left_to_onednn(kept, fresh):
    flags, best = library.processor() | {"amx_bf16"}, PLACE
    without = dataclasses.replace(best, needs=best.needs - {"amx_tile", "amx_bf16", "amx_int8"})
    fresh.setattr(library, "processor", lambda: flags)
    fresh.setattr(library, "LEVELS", (without,))
    assert layout(torch.bfloat16) != "native"
    assert layout(torch.float32) == "native"
    fresh.setenv("DRAFTPROOF_NATIVE", "1")
    assert layout(torch.bfloat16) == "native"


@pytest.mark.slow
@needs_a_build
@pytest.mark.builds
def test_a_level_that_the_compiler_does_not_know_is_followed_by_the_next(fresh):
    unknown = dataclasses.replace(PLACE, name="newer", flags=("-mno-such-unit",))
    fresh.setattr(library, "LEVELS", (unknown, PLACE))
    assert layout() == "native"
    assert native.levels()["float32"] == PLACE.name


def test_it_can_be_switched_off(fresh):
    fresh.setenv("DRAFTPROOF_NATIVE", "0")
    assert layout() != "native"
    fresh.setenv("DRAFTPROOF_NATIVE", "yes")
    with pytest.raises(UserError, match=r"DRAFTPROOF_NATIVE: expected one of auto, 0, 1, x86-64-v4-amx.*got 'yes'"):
        layout()


def test_other_dtypes_are_left_to_torch():
    for dtype in (torch.float16, torch.float64):
        assert native.operations_for(torch.zeros(1, dtype=dtype)) is None
