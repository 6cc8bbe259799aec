"""Weights of GGUF files: rows are the numbers of gguf-py, and products theirs with inputs in 8 bits."""

import dataclasses
import mmap

import numpy as np
import pytest
import torch

from draftproof import UserError
from draftproof.native import dispatch
from draftproof.native.ggml import LAYOUTS, SIXTEEN_BITS, TYPES, GGMLWeight, StoredMatrix, why_not_joined
from support.gguf_files import HALVES, random_blocks
from support.native_levels import OPERATIONS, drawn

quants = pytest.importorskip("gguf.quants", reason="the extra gguf is not installed")
from gguf import GGMLQuantizationType

pytestmark = pytest.mark.usefixtures("level")
EACH = pytest.mark.parametrize("kind", TYPES, ids=lambda kind: TYPES[kind].name)


def matrix_of(kind, outs, ins, dtype=torch.float32, seed=0, offset=0):
    """A matrix of random blocks in a map, from some byte on, and its numbers by gguf-py."""
    blocks = random_blocks(kind, outs, ins, seed)
    place = mmap.mmap(-1, offset + blocks.nbytes)
    place[offset:] = blocks.tobytes()
    content = torch.frombuffer(place, dtype=torch.uint8, offset=offset)
    numbers = quants.dequantize(blocks.reshape(outs, -1), kind).reshape(outs, ins)
    return StoredMatrix(content, outs, ins, kind, dtype), torch.from_numpy(np.ascontiguousarray(numbers))


def in_8_bits(x):
    """Rows as products round them."""
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    scales = groups.abs().amax(-1, keepdim=True) / 127
    by = torch.where(scales > 0, 1 / scales, 0)
    return ((groups * by).round().double() * scales.double()).flatten(1)[:, : x.shape[1]]


@EACH
def test_sizes_are_those_of_gguf(kind):
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    assert GGML_QUANT_SIZES[GGMLQuantizationType(kind)] == (TYPES[kind].elements, TYPES[kind].size)
    assert GGMLQuantizationType(kind).name == TYPES[kind].name


@EACH
def test_rows_are_the_numbers_that_gguf_makes(kind):
    matrix, numbers = matrix_of(kind, 40, 512, offset=3)
    ids = torch.tensor([[0, 39], [7, 7]])
    assert torch.equal(OPERATIONS[torch.float32].ggml_rows(matrix, ids), numbers[ids])
    order = torch.randperm(40)
    assert torch.equal(OPERATIONS[torch.float32].ggml_rows(matrix.in_order(order), ids), numbers[order][ids])
    with pytest.raises(ValueError, match="are not all of 0 to 39"):
        OPERATIONS[torch.float32].ggml_rows(matrix, torch.tensor([40]))


def test_every_exponent_of_mxfp4_is_exact(dtype):
    """Also those of the least numbers of float32, which have less than full precision."""
    blocks = random_blocks(39, 256, 32)
    blocks[:, 0] = np.arange(256)
    with np.errstate(over="ignore"):
        numbers = torch.from_numpy(quants.dequantize(blocks, 39).reshape(256, 32))
    matrix = StoredMatrix(torch.from_numpy(blocks.ravel()), 256, 32, 39, dtype)
    assert torch.equal(OPERATIONS[torch.float32].ggml_rows(matrix, torch.arange(256)), numbers)
    made = OPERATIONS[dtype].ggml_product(torch.eye(32, dtype=dtype), OPERATIONS[dtype].ggml_repacked(matrix))
    seen = slice(2, 250)  # normal numbers, whose sums are no infinity
    assert torch.allclose(made.T[seen].float(), numbers[seen].to(dtype).float(), rtol=1e-5, atol=0)


@pytest.mark.grid(115)
@EACH
@pytest.mark.parametrize(("outs", "blocks"), [(1, 1), (16, 3), (33, 2), (200, 5)])
def test_products(kind, outs, blocks, dtype):
    operations, ins = OPERATIONS[dtype], blocks * TYPES[kind].elements
    matrix, numbers = matrix_of(kind, outs, ins, dtype)
    weight = operations.ggml_repacked(matrix)
    x, bias, onto = drawn(1, 13, ins, dtype=dtype), drawn(2, outs, dtype=dtype), drawn(3, 13, outs, dtype=dtype)
    exact = in_8_bits(x) @ numbers.double().T
    slack = 1e-5 * (in_8_bits(x).abs() @ numbers.double().abs().T) + torch.finfo(dtype).eps * exact.abs() + 1e-7
    made, biased = operations.ggml_product(x, weight), operations.ggml_product(x, weight, bias)
    assert ((made.double() - exact).abs() <= slack).all()
    assert ((biased.double() - exact - bias).abs() <= slack + torch.finfo(dtype).eps * bias.abs()).all()
    assert not ((made.double() - exact - bias).abs() <= slack).all(), "a bias left out is seen"
    assert torch.equal(operations.ggml_product(x, weight, bias, onto), biased + onto)


@pytest.mark.grid(9)
@EACH
def test_a_rows_product_does_not_depend_on_the_rows_beside_it_or_the_threads(kind, dtype):
    operations = OPERATIONS[dtype]
    matrix, _ = matrix_of(kind, 200, 1280, dtype)
    weight, x = operations.ggml_repacked(matrix), drawn(1, 300, 1280, dtype=dtype)
    whole, threads = operations.ggml_product(x, weight), torch.get_num_threads()
    for size in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 15, 17, 33, 120):
        assert torch.equal(operations.ggml_product(x[7 : 7 + size], weight), whole[7 : 7 + size])
    try:
        torch.set_num_threads(1)
        assert torch.equal(operations.ggml_product(x, weight), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kinds", [(12, 14, 8), (8, 14, 12)], ids=["bytes last", "bytes first"])
def test_several_types_are_one_product(kinds, dtype):
    operations = OPERATIONS[dtype]
    matrices = [matrix_of(kind, outs, 256, dtype, seed=kind)[0] for kind, outs in zip(kinds, (48, 16, 37), strict=True)]
    assert why_not_joined(matrices) is None
    parts = [operations.ggml_repacked(each) for each in matrices]
    for rows in (1, 3, 20):
        x = drawn(1, rows, 256, dtype=dtype)
        found = operations.ggml_product(x, GGMLWeight.joined(parts))
        assert torch.equal(found, torch.cat([operations.ggml_product(x, part) for part in parts], -1))
    assert "multiple of 16" in why_not_joined(matrices[::-1])
    assert "at most 4" in why_not_joined(matrices[:1] * 5)


@pytest.mark.parametrize("kind", SIXTEEN_BITS, ids=lambda kind: SIXTEEN_BITS[kind].name)
@pytest.mark.parametrize(("outs", "ins"), [(1, 1), (16, 32), (33, 100), (200, 333), (48, 512)])
def test_floats_of_16_bits(kind, outs, ins, dtype):
    operations, given = OPERATIONS[dtype], drawn(4, outs, ins, dtype=torch.float32)
    given[0, 0] = 3e-7  # less than float16 has with full precision
    blocks = quants.quantize(given.numpy(), GGMLQuantizationType(kind))
    numbers = torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType(kind)).reshape(outs, ins))
    assert 0 < numbers[0, 0] != given[0, 0]
    matrix = StoredMatrix(torch.from_numpy(blocks.view(np.uint8).ravel()), outs, ins, kind, dtype)
    assert torch.equal(OPERATIONS[torch.float32].ggml_rows(matrix, torch.arange(outs)), numbers)
    order = torch.randperm(outs)
    weight = operations.ggml_repacked(matrix.in_order(order))
    assert weight.nbytes == -(-outs // 16) * 16 * -(-ins // 32) * 32 * 2
    x, bias, onto = drawn(1, 13, ins, dtype=dtype), drawn(2, outs, dtype=dtype), drawn(3, 13, outs, dtype=dtype)
    exact = x.double() @ numbers[order].double().T
    slack = 1e-6 * (x.double().abs() @ numbers[order].double().abs().T) + torch.finfo(dtype).eps * exact.abs()
    made = operations.ggml_product(x, weight)
    assert ((made.double() - exact).abs() <= slack).all()
    assert torch.equal(operations.ggml_product(x, weight, bias, onto), operations.ggml_product(x, weight, bias) + onto)
    for first, size in ((12, 1), (3, 2), (5, 4), (2, 7)):
        assert torch.equal(operations.ggml_product(x[first : first + size], weight), made[first : first + size])


@pytest.mark.parametrize("kind", [20, 23, 39, 11], ids=lambda kind: TYPES[kind].name)
def test_types_with_few_bits_have_the_bits_of_their_numbers_in_bytes(kind, dtype):
    """A table of places, or fewer bits, change no sum: the same numbers and scales in Q8_0 give the same outputs."""
    operations, outs, ins = OPERATIONS[dtype], 48, 512
    matrix, _ = matrix_of(kind, outs, ins, dtype)
    blocks = matrix.content.numpy().reshape(-1, TYPES[kind].size)
    for at in HALVES[kind]:  # powers of two, which times whole numbers are float16 numbers
        blocks[:, at : at + 2] = np.full((len(blocks), 1), 2.0**-9, np.float16).view(np.uint8)
    numbers = quants.dequantize(blocks.reshape(outs, -1), kind).reshape(outs, -1, 32 if kind != 11 else 16)
    scales = scales_of(kind, blocks).reshape(outs, -1, 1)
    whole = numbers / np.where(scales, scales, 1)
    assert (whole == whole.round()).all()
    assert np.abs(whole).max() <= 127
    if kind == 11:  # Q8_0 has scales for 32: each 16 inputs become 32, and half of the weights are 0
        whole = np.concatenate([whole, 0 * whole], -1)
    bytes_of = np.concatenate([scales.astype(np.float16).view(np.int8), whole.astype(np.int8)], -1)
    content = torch.from_numpy(bytes_of.view(np.uint8).ravel())
    x = drawn(1, 13, ins, dtype=dtype).clamp_(-3, 3)
    x.view(13, -1, 16)[..., 0] = 3.0  # so that 16 inputs are rounded as the 32 are of which they are a half
    spread = x if kind != 11 else torch.cat([x.view(13, -1, 16), torch.zeros_like(x).view(13, -1, 16)], -1).flatten(1)
    other = StoredMatrix(content, outs, whole.shape[1] * 32, 8, dtype)
    made = operations.ggml_product(x, operations.ggml_repacked(matrix))
    assert torch.equal(made, operations.ggml_product(spread, operations.ggml_repacked(other)))
    assert made.abs().min() > 0


def scales_of(kind, blocks):
    """What numbers are multiplied by, of each group; float32."""
    step = np.float32(2.0**-9)
    if kind == 20:
        return np.full(len(blocks), step)
    if kind == 39:
        return np.exp2(blocks[:, 0].astype(np.float32) - 128)
    if kind == 23:
        high, low = blocks[:, 2:4].copy().view(np.uint16), blocks[:, 4:8]
        each = [(low[:, k // 2] >> 4 * (k % 2) & 15) | (high[:, 0] >> 2 * k & 3) << 4 for k in range(8)]
        return step * (np.stack(each, -1).astype(np.float32) - 32)
    s = blocks[:, 96:108]
    each = [(s[:, j % 8] >> 4 * (j // 8) & 15) | (s[:, 8 + j % 4] >> 2 * (j // 4) & 3) << 4 for j in range(16)]
    return step * (np.stack(each, -1).astype(np.float32) - 32)


@EACH
def test_sizes_in_memory_are_nearly_those_of_the_file(kind):
    layout = TYPES[kind]
    in_file, here = layout.size / layout.elements, layout.piece_size / layout.piece / 16
    assert here / in_file < {"Q3_K": 1.35, "Q2_K": 1.2}.get(layout.name, 1.06)


@EACH
def test_inputs_of_zero_and_large_ones(kind, dtype):
    operations = OPERATIONS[dtype]
    matrix, numbers = matrix_of(kind, 32, 256, dtype)
    weight = operations.ggml_repacked(matrix)
    x = torch.zeros(2, 256, dtype=dtype)
    assert not operations.ggml_product(x, weight).any()
    x[0, 3] = 1e30
    exact = 1e30 * numbers[:, 3].double()
    found = operations.ggml_product(x, weight)[0].double()
    assert ((found - exact).abs() <= 1e-2 * exact.abs() + 1e23).all()


def test_what_no_matrix_can_be_is_refused():
    matrix, _ = matrix_of(12, 16, 256)
    fields = {"content": matrix.content, "outs": 16, "ins": 256, "type": 12, "dtype": torch.float32}
    beyond = {"rows": torch.arange(1, 17)}
    for change in ({"ins": 250}, {"type": 1}, {"outs": 0}, {"content": matrix.content[1:]}, {"outs": 17}, beyond):
        with pytest.raises(ValueError, match=r"matrix|content|rows"):
            StoredMatrix(**{**fields, **change})
    operations = OPERATIONS[torch.float32]
    weight = operations.ggml_repacked(matrix)
    for x in (torch.zeros(1, 255), torch.zeros(1, 256, dtype=torch.float64)):
        with pytest.raises(ValueError, match="expected x"):
            operations.ggml_product(x, weight)
    (segment,) = weight.segments
    for segments, ins in (((segment,), 512), ((segment,) * 5, 256), ((), 256)):
        with pytest.raises(ValueError, match=r"expected blocks|segments of"):
            GGMLWeight(segments, ins)
    with pytest.raises(ValueError, match="expected blocks"):
        GGMLWeight((dataclasses.replace(segment, outs=17),), 256)


def test_sizes_that_differ_from_those_of_c_are_found(monkeypatch):
    layout = dataclasses.replace(LAYOUTS[12], piece_size=2369)
    monkeypatch.setitem(LAYOUTS, 12, layout)
    dispatch._operations.cache_clear()
    with pytest.raises(UserError, match="sizes of Q4_K"):
        dispatch._operations("1", torch.float32)
    dispatch._operations.cache_clear()
