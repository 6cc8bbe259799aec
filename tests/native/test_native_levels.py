"""Builds for the levels of processors between the best one here and the portable one compute what the best one does.

Sums are added in other orders and are compared as closely as float32 allows; choices are the same bits. By default the
first and the last of these levels are compiled without optimization and compute one shape; with `pytest -m slow` all of
them do, as users have them and on all shapes. All other tests of native operations run at these levels with
`pytest -m levels`. Levels of Arm processors are emulated, where there is a cross-compiler and QEMU, with
`pytest -m slow`; scripts/check_native.py runs all other tests on them.
"""

import ctypes
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers

from draftproof import Engine, SamplingParams
from draftproof.backends.base import Feed
from draftproof.backends.lean.backend import LeanBackend
from draftproof.backends.lean.native_layers import NativeLayers
from draftproof.errors import UserError
from draftproof.native import build as library
from draftproof.native import dispatch
from draftproof.native.dispatch import VARIABLE
from draftproof.native.tensors import Interleaved
from draftproof.rng import first_arrival, fold
from support.emulated import PROCESSORS, EmulatedLibrary, cross_compile, needs_emulation
from support.helpers import ROPE, random_model
from support.native_levels import BETWEEN, DTYPES, LEVELS, OPERATIONS, close, drawn, have

SHAPES = [(1, 200, 576), (7, 49, 130), (30, 112, 66)]  # rows, outputs, inputs
TOLERANCE = {torch.bfloat16: 0.06, torch.float32: 2e-5}


def choices(dtype):
    """Outputs that do not depend on the order of additions."""
    made, single = OPERATIONS[dtype], OPERATIONS[torch.float32]
    scores = drawn(3, 6, 5001, scale=3.0, dtype=torch.float32)
    rows = [drawn(4, 2, 99, dtype=dtype), torch.full((1, 9), torch.nan, dtype=dtype)]
    return {
        "greedy": single.greedy(scores),
        "race": first_arrival(scores.exp(), [fold(9, row) for row in range(6)]),
        "legal": torch.tensor([made.legal(row) for row in rows]),
        "spread": single.spread(scores[:, :40], torch.arange(0, 120, 3), 130),
    }


def logits(dtype, weights=0):
    model = random_model(transformers.LlamaConfig(**{**ROPE, "head_dim": 32}), weights).to(dtype)
    backend = LeanBackend(model, name="llama")
    assert isinstance(backend.lean.run_layers, NativeLayers)
    return backend.forward([Feed(backend.open(), [5, 9, 2, 7, 11, 3] * 7)])[0].logits


def require_agreement(names, dtype, monkeypatch, shapes=SHAPES):
    """Each level computes exact products up to rounding, and what the first of them does."""
    for name in names:
        have(name)
        monkeypatch.setenv(VARIABLE, name)
        made = OPERATIONS[dtype]
        assert made.level == name
        for rows, outs, ins in shapes:
            sizes = (rows, ins), (outs, ins), (outs,)
            x, weight, bias = (drawn(seed, *size, dtype=dtype) for seed, size in enumerate(sizes))
            exact, slack = x.double() @ weight.double().T + bias, 1e-6 * (x.double().abs() @ weight.double().abs().T)
            assert close(made.product(x, Interleaved.of(weight), bias), exact, slack + 1e-6), name
            assert close(made.rows_product(x, weight, bias), exact, slack + 1e-6), name
            assert not close(made.product(x, Interleaved.of(weight)), exact, slack + 1e-6), "a bias left out is seen"
            for bits, group in ((2, 64), (4, 32), (8, 64)):
                packed = made.quantize(Interleaved.of(weight), bits, group)
                near, size = x.double() @ packed.to_dense().double().T, slack * 1e6
                found = made.quantized_product(x, packed).double()
                assert ((found - near).abs() <= 0.02 * size).all(), f"{name}, {bits} bits"
        if name == names[0]:
            chosen, expected = choices(dtype), logits(dtype)
            assert (logits(dtype, 1) - expected).abs().max() > 10 * TOLERANCE[dtype], "another model is seen"
        for kind, found in choices(dtype).items():
            assert torch.equal(found, chosen[kind]), f"{name}, {kind}"
        assert torch.allclose(logits(dtype), expected, rtol=0, atol=TOLERANCE[dtype]), name


@pytest.fixture
def in_use(monkeypatch):
    """Has a library in use as that of its level, without looking at this processor."""

    def use(level, loaded):
        choose, load = library.choose, library.load
        monkeypatch.setattr(library, "choose", lambda name: [level] if name == level.name else choose(name))
        monkeypatch.setattr(library, "load", lambda of: loaded if of is level else load(of))
        dispatch._operations.cache_clear()
        return level.name

    yield use
    dispatch._operations.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*BETWEEN[:1], *BETWEEN[-1:]}))
def test_levels_between_compute_what_the_best_does(name, in_use, monkeypatch, tmp_path):
    """Compiled without optimization, in a quarter of the time: what is compared is our code."""
    level = library.level_named(name)
    try:
        library.compile_library(tmp_path / "library.so", level, extra=("-O0",))
    except UserError as error:  # an old compiler knows fewer levels
        pytest.skip(f"{name} cannot be built here: {error}")
    in_use(level, ctypes.CDLL(str(tmp_path / "library.so")))
    for dtype in DTYPES:
        require_agreement([LEVELS[0], name], dtype, monkeypatch, shapes=SHAPES[1:2])


@pytest.mark.slow
@pytest.mark.skipif(not BETWEEN, reason="no level between runs here")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_levels_between_compute_what_the_best_does_as_they_are_built(dtype, monkeypatch):
    require_agreement(LEVELS[:1] + BETWEEN, dtype, monkeypatch)


# --- levels of Arm processors, on an emulated one -------------------------------------------------------------------

WRONG = ("= (bits_part)vtrn1q_u64(ba, dc);", "= (bits_part)vtrn2q_u64(ba, dc);")  # two lanes of keys side by side


@pytest.fixture(scope="module", params=PROCESSORS)
def arm(request, tmp_path_factory):
    """The library of a level, on a processor that has no more than the level needs."""
    folder, level = tmp_path_factory.mktemp(request.param), library.level_named(request.param)
    cross_compile(level, folder / "library.so")
    loaded = EmulatedLibrary(folder / "library.so", PROCESSORS[level.name])
    yield level, loaded
    loaded.close()


@needs_emulation
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arm_levels_compute_what_the_portable_one_does(arm, dtype, in_use, monkeypatch):
    require_agreement(["portable", in_use(*arm)], dtype, monkeypatch)


@needs_emulation
def test_text_is_the_same_on_arm(arm, in_use, monkeypatch):
    """Greedily, with a draft model, in float32."""
    made = {}
    for name in ("portable", in_use(*arm)):
        monkeypatch.setenv(VARIABLE, name)
        pair = Engine.load("embedded:stories", "embedded:stories-draft", check=False)
        assert dispatch.levels()["float32"] == name
        (made[name],) = pair.generate(["Once upon a time"], SamplingParams(max_tokens=24, temperature=0.0))
    portable, emulated = made.values()
    assert emulated.token_ids == portable.token_ids
    assert len(portable.token_ids) == 24


@needs_emulation
def test_a_wrong_operation_on_lanes_is_seen(in_use, monkeypatch, tmp_path):
    sources = shutil.copytree(library.SOURCES, tmp_path / "c")
    lanes = sources / "lanes_parts.h"
    right = lanes.read_text(encoding="utf-8")
    assert right.count(WRONG[0]) == 1
    lanes.write_text(right.replace(*WRONG), encoding="utf-8")
    level = library.level_named("neon")
    cross_compile(level, tmp_path / "library.so", "-O1", source=sources)
    loaded = EmulatedLibrary(tmp_path / "library.so", PROCESSORS["neon"])
    monkeypatch.setattr(dispatch, "_require_agreement", lambda _: None)  # which refuses it before
    with pytest.raises(AssertionError):
        require_agreement(["portable", in_use(level, loaded)], torch.float32, monkeypatch)
    loaded.close()


@needs_emulation
def test_linux_says_what_an_arm_processor_has(arm, monkeypatch):
    level, loaded = arm
    assert chosen_on_arm(loaded.getauxval, monkeypatch)[0] == level.name


@pytest.mark.parametrize(
    ("first", "second", "best"),
    [(2, 0, "neon"), (1 << 20 | 2, 0, "neon-dotprod"), (1 << 20 | 2, 3 << 13, "neon-i8mm-bf16"), (2, 3 << 13, "neon")],
)
def test_the_level_of_an_arm_processor_follows_from_its_flags(first, second, best, monkeypatch):
    names = chosen_on_arm(lambda number: {16: first, 26: second}[number], monkeypatch)
    assert (names[0], names[-1]) == (best, "portable")


def chosen_on_arm(getauxval, monkeypatch):
    pretended = SimpleNamespace(c_ulong=ctypes.c_ulong, CDLL=lambda _: SimpleNamespace(getauxval=getauxval))
    monkeypatch.setattr(library.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(library, "ctypes", pretended)
    return [level.name for level in library.choose()]
