"""Products of bytes on the matrix unit (AMX), by plain loops where a processor has none: the bits of vector code.

The level is compiled without optimization, since what is compared is our code, and its vector code for eight rows only,
since compiling takes longest. The whole list of tests runs on it with `scripts/check_native.py emulate x86-64-v4-amx`.
"""

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

from draftproof.native import build as library
from draftproof.native.dispatch import VARIABLE
from draftproof.native.ggml import LAYOUTS, SIXTEEN_BITS, GGMLWeight, Segment, repacked_shape
from draftproof.native.ggml import LEVELS as TABLES
from draftproof.native.operations import Operations
from support.native_levels import DTYPES, OPERATIONS, drawn, have, runs_here

LEVEL, VECTORS = library.level_named("x86-64-v4-amx"), "x86-64-v4-bf16"
EMULATE = Path(__file__).parents[2] / "scripts" / "emulate"
KINDS = [kind for kind in LAYOUTS if kind not in SIXTEEN_BITS and kind not in TABLES.values()]
FEW = 24  # rows that are still multiplied by vectors (OPENED_LEAST)
OUTS, INS = 48, 768
ROWS = (32, 40, 11 * FEW)  # two tiles, a part of a third one, and more than take turns with what is opened
TILES = """DO(form, 1, 1) DO(form, 1, 4) DO(form, 2, 1) DO(form, 2, 2) DO(form, 3, 1) DO(form, 4, 1) \\
  DO(form, 5, 1) DO(form, 6, 1) DO(form, 7, 1) DO(form, 8, 1)"""
pytestmark = [
    pytest.mark.skipif(
        bool({need for need in LEVEL.needs if "amx" not in need} - library.processor()),
        reason="the level's vectors do not run here",
    ),
    pytest.mark.skipif(next(library._compilers(), None) is None, reason="no C compiler"),
]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("amx")
    sources, out = shutil.copytree(library.SOURCES, folder / "c"), folder / "library.so"
    all_tiles = (sources / "ggml.h").read_text(encoding="utf-8")
    assert all_tiles.count(TILES) == 1
    (sources / "ggml.h").write_text(all_tiles.replace(TILES, "DO(form, 8, 1)"), encoding="utf-8")
    library.compile_library(out, LEVEL, extra=("-O0", "-DEMULATE_AMX", f"-I{EMULATE}"), source=sources)
    return ctypes.CDLL(str(out))


def weight_of(kind):
    """Random numbers, and scales that are no infinity in any format."""
    source, layout = torch.Generator().manual_seed(kind), LAYOUTS[kind]
    blocks = torch.randint(52, 60, repacked_shape(OUTS, INS, kind), generator=source, dtype=torch.uint8)
    numbers = blocks.view(-1, layout.piece_size)[:, -layout.piece * (4 if layout.name == "Q2_K" else 8) :]
    numbers.copy_(torch.randint(0, 256, numbers.shape, generator=source))
    return GGMLWeight((Segment(blocks, OUTS, kind),), INS)


def used(emulated):
    return ctypes.c_long.in_dll(emulated, "draftproof_tile_products").value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: LAYOUTS[kind].name)
def test_prompts_and_batches_have_the_bits_of_single_rows(emulated, kind, dtype, monkeypatch):
    made, weight = Operations(emulated, dtype, LEVEL.name), weight_of(kind)
    x = drawn(1, max(ROWS), INS, dtype=dtype)
    before = used(emulated)
    rows = torch.cat([made.ggml_product(part.contiguous(), weight) for part in x.split(FEW)])
    assert used(emulated) == before, "few rows are multiplied by vectors"
    assert rows.float().abs().min(0).values.max() > 0
    for count in ROWS:
        before = used(emulated)
        assert torch.equal(made.ggml_product(x[:count].contiguous(), weight), rows[:count])
        assert used(emulated) > before, "the unit was used"
    other = x.clone()
    other[5, 7] += 1
    changed = (made.ggml_product(other, weight) != rows).any(-1)
    assert changed.nonzero().flatten().tolist() == [5], "another input is seen, in its row alone"
    if runs_here(VECTORS):
        have(VECTORS)
        monkeypatch.setenv(VARIABLE, VECTORS)
        assert OPERATIONS[dtype].level == VECTORS
        assert torch.equal(OPERATIONS[dtype].ggml_product(x, weight), rows)
