"""Sums of products of bytes at the ends of their ranges: no level adds up more than its numbers hold."""

import ctypes
import shutil

import pytest
import torch

from draftproof.native import build as library
from draftproof.native.ggml import LAYOUTS, SIXTEEN_BITS, GGMLWeight, Segment, repacked_shape
from draftproof.native.operations import Operations
from draftproof.native.tensors import GROUPS, STORED_BITS, Interleaved
from support.native_levels import OPERATIONS, runs_here

INS = 256
WHOLE_NUMBERS = [kind for kind in LAYOUTS if kind not in SIXTEEN_BITS]  # floats have no numbers at their ends
HALVES = ("return 32767 / (2 * 127 * ((1 << bits) - 1));", "return 32767 / (127 * ((1 << bits) - 1));")


def require_largest(made, bits, group, sign):
    weight = torch.ones(16, INS)
    weight[:, ::group] = 0  # all others are the largest number
    packed = made.quantize(Interleaved.of(weight), bits, group)
    x = torch.full((6, INS), float(sign))
    expected = x.double() @ packed.to_dense().double().T
    assert expected.abs().min() > 0.9 * INS * (1 - 1 / group), "numbers are large"
    assert torch.allclose(made.quantized_product(x, packed).double(), expected, rtol=1e-4, atol=0)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", STORED_BITS)
def test_largest_numbers_of_quantized_weights(bits, group, sign):
    require_largest(OPERATIONS[torch.float32], bits, group, sign)


@pytest.mark.slow
@pytest.mark.skipif(not runs_here("x86-64-v3"), reason="the level that adds in 16 bits does not run here")
def test_twice_the_steps_in_16_bits_are_seen(tmp_path):
    sources = shutil.copytree(library.SOURCES, tmp_path / "c")
    right = (sources / "lanes.h").read_text(encoding="utf-8")
    assert right.count(HALVES[0]) == 1
    (sources / "lanes.h").write_text(right.replace(*HALVES), encoding="utf-8")
    library.compile_library(tmp_path / "library.so", library.level_named("x86-64-v3"), source=sources)
    made = Operations(ctypes.CDLL(str(tmp_path / "library.so")), torch.float32, "x86-64-v3")
    with pytest.raises(AssertionError):
        require_largest(made, 4, 128, 1)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("byte", [0, 255])
@pytest.mark.parametrize("kind", WHOLE_NUMBERS, ids=lambda kind: LAYOUTS[kind].name)
def test_ends_of_ranges_of_ggml_types(kind, byte, sign):
    """The sum of all weights is that of single ones, whose sums are small."""
    made, blocks = OPERATIONS[torch.float32], torch.full(repacked_shape(16, INS, kind), 0x38, dtype=torch.uint8)
    layout = LAYOUTS[kind]
    pieces = blocks.view(-1, layout.piece_size)
    pieces[:, -steps_end(layout) :] = byte
    weight = GGMLWeight((Segment(blocks, 16, kind),), INS)
    single = made.ggml_product(torch.eye(INS), weight).double()
    found = made.ggml_product(torch.full((6, INS), float(sign)), weight).double()
    assert torch.allclose(
        found, sign * single.sum(0).expand(6, -1), rtol=1e-4, atol=1e-4 * float(single.abs().sum(0).max())
    )


def steps_end(layout):
    """Bytes of numbers at the end of a piece: at least so many bits for each of its inputs."""
    return 16 * layout.piece * (2 if layout.name == "Q2_K" else 4) // 8
