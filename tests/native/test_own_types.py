"""Weights of checkpoints that are no GGUF types: bitsandbytes' levels with inputs in floats, and numbers of 8 bits."""

from statistics import NormalDist

import pytest
import torch

from draftproof.native.ggml import INT8, INT8_BY_ROW, LAYOUTS, LEVELS, GGMLWeight, StoredMatrix, why_not_joined
from support.native_levels import OPERATIONS, drawn
from support.packed_checkpoints import TABLES

pytestmark = pytest.mark.usefixtures("level")
KINDS = (INT8, INT8_BY_ROW, *LEVELS.values())
EACH = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: LAYOUTS[kind].name)


def matrix_of(kind, outs, ins, dtype=torch.float32, seed=0):
    """A matrix of random numbers and scales, and what they stand for."""
    source, layout = torch.Generator().manual_seed(seed), LAYOUTS[kind]
    blocks, is_table = ins // layout.elements, kind in LEVELS.values()
    scales = torch.rand((outs, blocks if is_table else 1), generator=source) + 0.1
    each = scales.expand(outs, blocks).contiguous()
    numbers = torch.randint(0, 256, (outs, blocks, layout.size - 4), generator=source)
    content = torch.cat((each.view(torch.uint8).view(*each.shape, 4), numbers.to(torch.uint8)), -1).flatten()
    values = numbers.to(torch.uint8).view(torch.int8).float()
    if is_table:
        table = next(TABLES[name] for name, number in LEVELS.items() if number == kind)
        values = table[torch.stack((numbers >> 4, numbers & 15), -1).flatten(-2)]
    return StoredMatrix(content, outs, ins, kind, dtype), (values * each.unsqueeze(-1)).flatten(1)


def as_read(kind, x):
    """Rows as products read them."""
    x = x.float()
    if kind in LEVELS.values():
        return x.double()
    if kind == INT8_BY_ROW:
        scales = x.abs().amax(-1, keepdim=True) / 127.5
        return (x / scales).round().clamp(-128, 127).double() * scales.double()
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    scales = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups * (1 / scales)).round().double() * scales.double()).flatten(1)[:, : x.shape[1]]


def slack_of(x, numbers, exact):
    return 2e-6 * (x.abs() @ numbers.double().abs().T) + torch.finfo(torch.float32).eps * exact.abs()


def test_the_table_of_nf4_is_the_papers():
    """Quantiles of a normal distribution, of which the largest is 1 (QLoRA, appendix E)."""
    most, quantile = 0.9677083, NormalDist().inv_cdf
    above = [quantile(most + (0.5 - most) * i / 8) for i in range(8)]
    below = [-quantile(most + (0.5 - most) * i / 7) for i in range(7)]
    expected = torch.tensor([*sorted(below), 0.0, *sorted(above)]) / quantile(most)
    assert torch.allclose(TABLES["nf4"], expected, atol=1e-6)


@EACH
def test_rows_are_the_numbers(kind):
    matrix, numbers = matrix_of(kind, 40, 512)
    ids = torch.tensor([[0, 39], [7, 7]])
    assert torch.equal(OPERATIONS[torch.float32].ggml_rows(matrix, ids), numbers[ids])
    order = torch.randperm(40)
    assert torch.equal(OPERATIONS[torch.float32].ggml_rows(matrix.in_order(order), ids), numbers[order][ids])


@EACH
@pytest.mark.parametrize(("outs", "ins"), [(1, 64), (16, 192), (33, 128), (200, 320)])
def test_products(kind, outs, ins, dtype):
    operations = OPERATIONS[dtype]
    matrix, numbers = matrix_of(kind, outs, ins, dtype)
    weight, x = operations.ggml_repacked(matrix), drawn(1, 13, ins, dtype=dtype)
    bias, onto = drawn(2, outs, scale=1e3, dtype=dtype), drawn(3, 13, outs, dtype=dtype)
    read = as_read(kind, x)
    exact = read @ numbers.double().T
    slack = slack_of(read, numbers, exact) + torch.finfo(dtype).eps * exact.abs()
    made, biased = operations.ggml_product(x, weight), operations.ggml_product(x, weight, bias)
    assert ((made.double() - exact).abs() <= slack).all()
    assert not ((biased.double() - exact).abs() <= slack).all(), "a bias is seen"
    assert torch.equal(operations.ggml_product(x, weight, bias, onto), biased + onto)


@EACH
def test_a_scale_of_the_next_block_and_another_table_are_found(kind):
    """The tolerance of the test before would not take them."""
    operations = OPERATIONS[torch.float32]
    matrix, numbers = matrix_of(kind, 48, 256)
    x = drawn(1, 5, 256, dtype=torch.float32)
    read = as_read(kind, x)
    exact = read @ numbers.double().T
    blocks = matrix.content.view(-1, LAYOUTS[kind].size)
    shifted = torch.cat((blocks[:, :4].roll(256 // LAYOUTS[kind].elements, 0), blocks[:, 4:]), -1)
    wrong = {"scales": shifted}
    if kind in LEVELS.values():
        halves = blocks[:, 4:]
        wrong["places"] = torch.cat((blocks[:, :4], halves >> 4 | halves << 4), -1)
        wrong["table"] = torch.cat((blocks[:, :4], halves ^ 17), -1)
        wrong["block"] = torch.cat((blocks[:, :4].roll(1, 0), halves), -1)
    for name, content in wrong.items():
        changed = StoredMatrix(content.flatten().contiguous(), 48, 256, kind, torch.float32)
        found = operations.ggml_product(x, operations.ggml_repacked(changed)).double()
        assert not ((found - exact).abs() <= slack_of(read, numbers, exact)).all(), name


@EACH
def test_a_rows_product_does_not_depend_on_the_rows_beside_it_or_the_threads(kind, dtype):
    operations = OPERATIONS[dtype]
    matrix, _ = matrix_of(kind, 400, 512, dtype)
    weight, x = operations.ggml_repacked(matrix), drawn(1, 300, 512, dtype=dtype)
    whole, threads = operations.ggml_product(x, weight), torch.get_num_threads()
    for size in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 15, 17, 120):
        assert torch.equal(operations.ggml_product(x[7 : 7 + size], weight), whole[7 : 7 + size])
    try:
        torch.set_num_threads(1)
        assert torch.equal(operations.ggml_product(x, weight), whole)
    finally:
        torch.set_num_threads(threads)


@EACH
def test_rows_of_zeros_and_large_inputs(kind, dtype):
    operations = OPERATIONS[dtype]
    matrix, numbers = matrix_of(kind, 32, 256, dtype)
    weight, x = operations.ggml_repacked(matrix), torch.zeros(2, 256, dtype=dtype)
    assert not operations.ggml_product(x, weight).any()
    for large in (1e30, -1e30):
        x[0, 3] = large
        exact = large * numbers[:, 3].double()
        found = operations.ggml_product(x, weight)
        assert ((found[0].double() - exact).abs() <= 1e-2 * exact.abs()).all()
        assert not found[1].any()


def test_weights_with_other_inputs_are_not_one_product():
    kinds = LEVELS["nf4"], INT8
    matrices = [matrix_of(kind, 16, 128)[0] for kind in kinds]
    assert "read inputs in several ways" in why_not_joined(matrices)
    assert why_not_joined([matrices[0], matrix_of(LEVELS["fp4"], 16, 128)[0]]) is None
    with pytest.raises(ValueError, match="read inputs in several ways"):
        GGMLWeight.joined([OPERATIONS[torch.float32].ggml_repacked(each) for each in matrices])


def test_a_row_is_rounded_by_its_largest_number_alone():
    """Halves of the scale go to the even number, and 128 is no signed byte."""
    operations = OPERATIONS[torch.float32]
    content = torch.cat((torch.ones(1).view(torch.uint8), torch.eye(32, dtype=torch.uint8)[0]))
    weight = operations.ggml_repacked(StoredMatrix(content, 1, 32, INT8_BY_ROW, torch.float32))
    x = torch.zeros(4, 32)
    x[:, 0] = torch.tensor([127.5, -127.5, 2.5, 3.5])
    x[2:, 1] = 127.5
    assert operations.ggml_product(x, weight)[:, 0].tolist() == [127, -128, 2, 4]
