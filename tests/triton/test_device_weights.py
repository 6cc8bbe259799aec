"""Products with rounded weights on a device: through Triton's interpreter, beside float64; and they compile for CUDA.

Where there is a GPU, tests/triton/test_cuda.py runs them on it. As a script this file compiles every kernel.
"""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install 'draftproof[triton]' (Linux only)", allow_module_level=True)

from draftproof.backends.products.packed_linear import PackedLinear, RescoredProduct
from draftproof.native.tensors import MeasuredInputs
from draftproof.triton import weights

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the tensors are on the CPU")
GROUP = 32


@pytest.mark.parametrize(("bits", "most"), [(4, 0.085), (8, 0.006)])
@pytest.mark.parametrize("ins", [32, 40, 96, 328])
def test_weights_are_near_their_numbers(bits, most, ins):
    plain = torch.randn(50, ins, generator=torch.Generator().manual_seed(ins))
    made = weights.quantize(plain, bits, GROUP)
    assert made.to_dense().shape == plain.shape
    assert (made.to_dense() - plain).norm() < most * plain.norm()


def test_rows_of_one_value_and_a_grid_of_4_bits_are_kept():
    grid = torch.arange(16).repeat(4, 4) - 8.0
    for plain in (torch.full((3, 64), 0.5), torch.zeros(3, 64), grid, -grid / 4):
        assert torch.equal(weights.quantize(plain, 4, GROUP).to_dense(), plain)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("ins", [40, 96])
def test_what_outputs_lack_on_the_mean(ins, bits):
    gen = torch.Generator().manual_seed(ins)
    plain, mean = torch.randn(50, ins, generator=gen), torch.randn(ins, generator=gen)
    assert weights.quantize(plain, bits, GROUP).lost is None
    made = weights.quantize(plain, bits, GROUP, MeasuredInputs(torch.ones(ins), mean))
    expected = (plain - made.to_dense()) @ mean
    assert torch.allclose(made.lost, expected, atol=1e-5)
    assert not torch.allclose(made.lost, 1.1 * expected, atol=1e-5)


@pytest.mark.grid(2)
@interpreted
@pytest.mark.parametrize(
    ("outs", "ins", "bits", "dtype"),
    [
        pytest.param(*shape, bits, dtype, marks=[pytest.mark.slow] * ((row + column + place) % 2))
        for row, shape in enumerate([(40, 328), (7, 640)])
        for column, bits in enumerate([4, 8])
        for place, dtype in enumerate([torch.float32, torch.float16])  # the interpreter has no bfloat16 tiles
    ],
    ids=str,
)
def test_products(outs, ins, bits, dtype):
    gen = torch.Generator().manual_seed(outs)
    made = weights.quantize(torch.randn(outs, ins, generator=gen), bits, GROUP)
    bias = torch.randn(outs, generator=gen).to(dtype)
    near = {torch.float32: 4e-6, torch.float16: 2e-3}[dtype]
    for rows in (0, 1, 3, 5, 9):
        x = torch.randn(rows, ins, generator=gen).to(dtype)
        wanted = x.double() @ made.to_dense().double().T + bias.double()
        found = weights.product(x, made, bias)
        assert found.dtype == dtype
        assert (found.double() - wanted).norm() <= near * wanted.norm(), rows
        if rows == 5:
            wrong = replace(made, words=made.words ^ (1 << 12))  # the lowest bit of one number
            assert (weights.product(x, wrong, bias).double() - wanted).norm() > near * wanted.norm(), rows


@interpreted
def test_a_kernel_that_is_wrong_or_fails_is_not_used(monkeypatch):
    assert weights.why_not(torch.float32, torch.device("cpu"), 4, GROUP) is None
    assert "float64" in weights.why_not(torch.float64, torch.device("cpu"), 4, GROUP)
    weights.why_not.cache_clear()
    plain = weights.product
    monkeypatch.setattr(weights, "product", lambda x, made: plain(x, made) * 1.2)
    assert "is wrong on this device" in weights.why_not(torch.float32, torch.device("cpu"), 4, GROUP)
    weights.why_not.cache_clear()
    monkeypatch.setattr(weights, "product", lambda *_: 1 / 0)
    assert "fails (division by zero)" in weights.why_not(torch.float32, torch.device("cpu"), 4, GROUP)
    weights.why_not.cache_clear()


@pytest.mark.slow
@interpreted
def test_an_output_layer_is_computed_again_where_it_matters():
    gen = torch.Generator().manual_seed(0)
    whole = PackedLinear(torch.randn(300, 64, generator=gen), pack=False)
    made, x = whole.quantized_output(4), torch.randn(3, 64, generator=gen)
    assert isinstance(made, RescoredProduct)
    best = whole(x).topk(8, -1)
    found = made(x)
    assert torch.allclose(found.gather(-1, best.indices), best.values, atol=1e-5)
    assert not torch.allclose(found, whole(x), atol=1e-2)


@pytest.mark.slow
def test_kernels_compile_for_cuda(tmp_path):
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(Path(__file__))], env=env, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines()} == {"_multiply", "_expand"}


def compile_all():
    """Compile both kernels to machine code, for every type of rows."""
    from triton.backends.compiler import GPUTarget

    import triton

    fixed = {"GROUP": GROUP, "OUTS": 4, "SHARED": 2, "PIECES": 32, "SIZE": 1024, "BIASED": True}
    for kernel in (weights._multiply, weights._expand):
        for dtype, bits, rows in (("bf16", 4, 1), ("bf16", 8, 1), ("bf16", 4, 4), ("fp16", 4, 2), ("fp32", 4, 2)):
            constants, names = fixed | {"BITS": bits, "ROWS": rows}, kernel.arg_names
            given = {"words": "*i32", "scales": "*i32", "x": f"*{dtype}", "bias": f"*{dtype}", "out": f"*{dtype}"}
            signature = {name: "constexpr" if name in constants else given.get(name, "i32") for name in names}
            places = {(names.index(name),): value for name, value in constants.items() if name in names}
            even = {(names.index(name),): [["tt.divisibility", 16]] for name in (*given, "ins") if name in names}
            source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=even)
            made = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": 4})
            moved = made.asm["ttgir"].count("convert_layout")
            print(kernel.__name__, dtype, bits, rows, len(made.asm["cubin"]), moved)  # noqa: T201 - read by the test


if __name__ == "__main__":
    compile_all()
