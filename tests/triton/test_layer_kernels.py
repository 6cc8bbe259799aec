"""Kernels of what stands between two products of a layer, beside torch's operations.

They run through Triton's interpreter, or where there is a GPU on it, as in tests/triton/test_kernels.py.
"""

import importlib.util
import os

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install 'draftproof[triton]' (Linux only)", allow_module_level=True)

from draftproof.backends.lean import attention
from draftproof.backends.lean import layers as lean_layers
from draftproof.triton import choose

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)

pytestmark = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="no CUDA device here")


def both(function, *args, written=()):
    """What the kernel gives, and what torch gives; the latter changes copies of some arguments."""
    found = {}
    for value in ("interpret" if INTERPRETED else "1", "0"):
        given = [each.clone() if isinstance(each, torch.Tensor) else each for each in args]
        with pytest.MonkeyPatch.context() as now:
            now.setenv(choose.VARIABLE, value)
            found[value] = (function(*given), *(given[place] for place in written))
    return found.values()


def assert_near(found, wanted, dtype):
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        near = 2 * torch.finfo(dtype).eps * theirs.abs().max().item()
        assert (mine.double() - theirs.double()).abs().max() <= near


def numbers(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 48, 1536])
@pytest.mark.parametrize("whole", [False, True])
def test_norms(whole, dim, dtype):
    x, weight = numbers(3, 2, dim, dtype=dtype), numbers(dim, dtype=torch.float32 if whole else dtype, seed=1)
    found, wanted = both(lean_layers.scaled_norm, x, weight, 1e-5, whole)
    assert_near(found, wanted, dtype)
    with pytest.raises(AssertionError):
        assert_near((found[0] * 1.02,), wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [24, 600])
def test_gates(dim, dtype):
    assert_near(*both(lean_layers.gated_silu, numbers(3, 2 * dim, dtype=dtype)), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("queries", "keys", "dim"), [(4, 2, 16), (3, 1, 48)])
def test_heads_are_turned_and_written(queries, keys, dim, dtype):
    fused = numbers(5, queries + 2 * keys, dim, dtype=dtype)
    angles = numbers(5, 1, 2 * dim, dtype=dtype, seed=1)
    cos, sin = angles.chunk(2, -1)
    stores = [numbers(4, keys, 8, dim, dtype=dtype, seed=2 + number) for number in range(2)]
    slots, places = torch.tensor([0, 0, 1, 2, 1]), torch.tensor([0, 7, 3, 3, 2])
    args = (fused, cos, sin, *(store[1:] for store in stores), slots.to(DEVICE), places.to(DEVICE))
    found, wanted = both(attention.turned_and_written, *args, written=(3, 4))
    assert_near(found, wanted, dtype)
    assert not torch.equal(wanted[1], args[3])


@pytest.mark.parametrize("wrong", [lambda x: x * 1.02, lambda x: x.float(), lambda x: x[..., :-1]])
def test_what_differs_is_not_taken(wrong):
    made = numbers(3, 8, dtype=torch.float16)
    assert choose._same(made.clone(), made)
    assert not choose._same(wrong(made), made)
