"""Builds for the levels of processors between the best one here and the portable one compute what the best one does.

Sums are added in other orders and are compared as closely as float32 allows; choices are the same bits. All other tests
of native operations run at these levels with `pytest -m levels`.
"""

import pytest
import torch
import transformers

from draftproof.backends.base import Feed
from draftproof.backends.lean.backend import LeanBackend
from draftproof.backends.lean.native_layers import NativeLayers
from draftproof.native.dispatch import VARIABLE
from draftproof.native.tensors import Interleaved
from draftproof.rng import first_arrival, fold
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


@pytest.mark.skipif(not BETWEEN, reason="no level between runs here")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_levels_between_compute_what_the_best_does(dtype, monkeypatch):
    for name in LEVELS[:1] + BETWEEN:
        have(name)
        monkeypatch.setenv(VARIABLE, name)
        made = OPERATIONS[dtype]
        assert made.level == name
        for rows, outs, ins in SHAPES:
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
        if name == LEVELS[0]:
            chosen, expected = choices(dtype), logits(dtype)
            assert (logits(dtype, 1) - expected).abs().max() > 10 * TOLERANCE[dtype], "another model is seen"
        for kind, found in choices(dtype).items():
            assert torch.equal(found, chosen[kind]), f"{name}, {kind}"
        assert torch.allclose(logits(dtype), expected, rtol=0, atol=TOLERANCE[dtype]), name
