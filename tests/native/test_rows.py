"""Products with weights as torch keeps them are those of float64, rounded, whatever rows and matrices are near."""

import inspect
from functools import partial

import pytest
import torch

from draftproof.backends.products.packed_linear import GROUP
from draftproof.native.operations import Operations
from draftproof.native.tensors import Interleaved, Quantized
from support.native_levels import OPERATIONS, close, drawn

SIZES = [(1, 1), (3, 2), (15, 33), (16, 64), (49, 131), (200, 576), (1000, 31)]
LAYOUTS = ("inputs are neighbours", "outputs are neighbours")
GROUPS = [(2, 0, 3), (0, 3, 1), (4, 4, 7)]  # matrix, first row, rows


def laid(weight, layout):
    """The same numbers with another order in memory."""
    return weight if layout == LAYOUTS[0] else weight.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("outs", "ins"), SIZES)
def test_products(outs, ins, layout, dtype):
    product = OPERATIONS[dtype].rows_product
    for rows in (1, 2, 3, 5, 6, 7, 16, 23, 40):
        sizes = (rows, ins), (outs, ins), (outs,)
        x, weight, bias = (drawn(seed, *size, dtype=dtype) for seed, size in enumerate(sizes))
        exact = x.double() @ weight.double().T
        slack = 1e-6 * (x.double().abs() @ weight.double().abs().T)
        plain = product(x, laid(weight, layout))
        assert close(plain, exact, slack), f"{rows} rows"
        assert close(product(x, laid(weight, layout), bias), exact + bias, slack + 1e-6), f"{rows} rows"
        assert not close(plain, exact + bias, slack + 1e-6), f"{rows} rows: a bias left out is seen"
        wrong = weight.clone()
        wrong[-1, -1] += 1
        made = product(x, laid(wrong, layout))
        assert not close(made, exact, slack), f"{rows} rows: one wrong number at the end of a weight is seen"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rows_product_does_not_depend_on_the_rows_beside_it_or_the_threads(layout, dtype):
    x, weight = drawn(1, 40, 577, dtype=dtype), laid(drawn(2, 400, 577, dtype=dtype), layout)
    product = OPERATIONS[dtype].rows_product
    whole, threads = product(x, weight), torch.get_num_threads()
    for size in (1, 2, 3, 5, 12, 13, 31):
        assert torch.equal(product(x[7 : 7 + size], weight), whole[7 : 7 + size])
    try:
        for some in (1, 2, 3, 5):
            torch.set_num_threads(some)
            assert torch.equal(product(x, weight), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("outs", "ins"), [(49, 131), (200, 576)])
def test_groups_of_rows_have_matrices_of_their_own(outs, ins, layout, dtype):
    rows = sum(count for _, _, count in GROUPS)
    x, weights, bias = (
        drawn(1, rows, ins, dtype=dtype),
        drawn(2, 5, outs, ins, dtype=dtype),
        drawn(3, 5, outs, dtype=dtype),
    )
    product = OPERATIONS[dtype].rows_product
    made = product(x, laid(weights, layout), bias, GROUPS)
    for matrix, first, count in GROUPS:
        alone = product(x[first : first + count], laid(weights[matrix], layout), bias[matrix])
        assert torch.equal(made[first : first + count], alone)
        other = product(x[first : first + count], laid(weights[1], layout), bias[1])
        assert not torch.equal(made[first : first + count], other)


@pytest.mark.parametrize(("outs", "ins"), [(16, 64), (200, 576), (7, 32)])
def test_many_rows_have_the_bits_of_packed_weights_where_both_are_as_fast(outs, ins, dtype):
    """Where inputs fill the last step, 32 of them; else packed weights multiply the last ones by other instructions."""
    operations = OPERATIONS[dtype]
    if not operations.in_place:
        pytest.skip("here packed weights are faster, with sums in another order")
    x, weight = drawn(1, 300, ins, dtype=dtype), drawn(2, outs, ins, dtype=dtype)
    assert torch.equal(operations.rows_product(x, weight), operations.product(x, Interleaved.of(weight)))


def test_what_lies_around_a_part_of_a_weight_is_not_read(dtype):
    whole = torch.full((60, 100), torch.nan, dtype=dtype)
    whole[3:40, 3:43] = drawn(1, 37, 40, dtype=dtype)
    for outs in (5, 16, 20, 37):
        for rows in (1, 20, 40):
            x, weight = drawn(2, rows, 40, dtype=dtype), whole[3 : 3 + outs, 3:43]
            made = OPERATIONS[dtype].rows_product(x, weight)
            assert torch.equal(made, OPERATIONS[dtype].rows_product(x, weight.contiguous()))
            assert made.isfinite().all()


def test_weights_that_are_parts_of_others_and_rows_of_more_dimensions(dtype):
    whole, x = drawn(1, 30, 96, dtype=dtype), drawn(2, 2, 3, 40, dtype=dtype)
    product = OPERATIONS[dtype].rows_product
    for weight in (whole[5:25, 3:43], whole[:, 3:43], drawn(3, 96, 30, dtype=dtype)[3:43].t()):
        expected = product(x.reshape(6, 40), weight.contiguous())
        found = product(x, weight)
        assert found.shape == (2, 3, len(weight))
        assert close(found.view(6, -1), expected.double(), 1e-4, roundings=2)
    assert product(x[:0], whole[:, :40]).shape == (0, 3, 30)


def test_wrong_arguments_are_refused_before_c_sees_them(dtype):
    operations = OPERATIONS[dtype]
    x, weight, weights = (drawn(1, *size, dtype=dtype) for size in ((3, 8), (5, 8), (2, 5, 8)))
    product = partial(
        inspect.unwrap(Operations.rows_product), operations
    )  # types say so too, but only tests check them
    for words, arguments in {
        "expected x to be": (x.double(), weight),
        "expected weight to be": (x, weight.double()),
        "expected a weight of one or several matrices": (x, drawn(1, 10, 16, dtype=dtype)[::2, ::2]),
        "expected bias to be": (x, weight, x[0]),
        r"group \(2, 0, 1\): there are 2 matrices and 3 rows": (x, weights, None, [(2, 0, 1)]),
        r"group \(1, 1, 3\)": (x, weights, None, [(1, 1, 3)]),
        r"group \(1, -1, 3\)": (x, weights, None, [(1, -1, 3)]),
    }.items():
        with pytest.raises(ValueError, match=words):
            product(*arguments)
    with pytest.raises(ValueError, match="expected x to be"):
        product(x[:, :6].contiguous(), weight)
    with pytest.raises(ValueError, match="expected a weight of one or several matrices"):
        product(x, weights[None])


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_rows_have_quantized_matrices_of_their_own(bits, dtype):
    operations = OPERATIONS[dtype]
    x, weights, bias = drawn(1, 11, 96, dtype=dtype), drawn(2, 5, 50, 96, dtype=dtype), drawn(3, 5, 50, dtype=dtype)
    each = [operations.quantize(Interleaved.of(weight), bits, GROUP) for weight in weights]
    together = Quantized(torch.stack([one.blocks for one in each]), 50, 96, bits, GROUP)
    made = operations.quantized_rows_product(x, together, bias, GROUPS)
    for matrix, first, count in GROUPS:
        alone = operations.quantized_product(x[first : first + count], each[matrix], bias[matrix])
        assert torch.equal(made[first : first + count], alone)
    with pytest.raises(ValueError, match="there are 5 matrices"):
        operations.quantized_rows_product(x, together, bias, [(5, 0, 1)])
    with pytest.raises(ValueError, match="expected weight to be"):
        operations.quantized_rows_product(x, Quantized(together.blocks, 80, 96, bits, GROUP), None, GROUPS)
