"""The choice of native operations: whether C computes, and with the build for which level of processors.

A row's outputs are the same bits whatever other rows are in the batch, so a token's logits do not depend on the batch
in which it is verified. docs/log/processors.md has their speed. The variable DRAFTPROOF_NATIVE may be
    auto    (the default) the best build for this processor; not for bfloat16 where the processor has a matrix
            unit (AMX) and the build does not use it, since oneDNN does. Elsewhere torch's operations are used, with a
            warning where the build fails or its results are wrong;
    0       never;
    1       as auto, without that exception; an error where native operations are not available;
    LEVEL   as 1, with the build for one level of processors (`build.LEVELS`).
"""

from __future__ import annotations

import functools
import logging
import math
import os

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from draftproof.errors import UserError, reason, refuse_unknown
from draftproof.native import build as library
from draftproof.native import threads
from draftproof.native.operations import Operations
from draftproof.native.tensors import UNITS, Interleaved

VARIABLE = "DRAFTPROOF_NATIVE"
LEGAL = ("auto", "0", "1", *(level.name for level in library.LEVELS))
_log = logging.getLogger(__name__)


def operations_for(like: Tensor) -> Operations | None:
    """The operations for tensors with the dtype and device of `like`; None where there are none or they are off.

    Raises:
        UserError: an unknown value of DRAFTPROOF_NATIVE, or one that this machine cannot satisfy.
    """
    if like.device.type != "cpu" or like.dtype not in UNITS:
        return None
    return _operations(os.environ.get(VARIABLE) or "auto", like.dtype)


def levels() -> dict[str, str]:
    """The level of the build in use, by type of rows; types without native operations are left out."""
    value = os.environ.get(VARIABLE) or "auto"
    found = {dtype: _operations(value, dtype) for dtype in UNITS}
    return {str(dtype).removeprefix("torch."): made.level for dtype, made in found.items() if made is not None}


@functools.cache
def _operations(value: str, dtype: torch.dtype) -> Operations | None:
    refuse_unknown(VARIABLE, value, LEGAL)
    if value == "0":
        return None
    threads.kind()  # a wrong value is an error
    try:
        level, loaded = library.load_best(library.choose(None if value in ("auto", "1") else value))
        if value == "auto":
            _refuse_unused_matrix_unit(level, dtype)
        made = Operations(loaded, dtype, level.name)
        _require_agreement(made)
    except Exception as error:
        if value != "auto":
            raise UserError(
                f"{VARIABLE} is {value!r}, but native operations are not available: {reason(error)}"
            ) from error
        severity = logging.INFO if isinstance(error, library.UnavailableError) else logging.WARNING
        _log.log(
            severity, "no native operations, torch's slower ones serve: %s (%s=0 is quiet)", reason(error), VARIABLE
        )
        return None
    return made


def _refuse_unused_matrix_unit(level: library.Level, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and "amx_bf16" in library.processor() - level.needs:
        raise library.UnavailableError(f"oneDNN's products use the processor's matrix unit, and {level.name} does not")


def _require_products(made: Operations) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(size, generator=generator).to(made.dtype) for size in ((200, 334), (200,)))
    slack = 2 * torch.finfo(made.dtype).eps
    for rows in (1, 2, 5, 13, 40):
        x = torch.randn((rows, 334), generator=generator).to(made.dtype)
        expected = F.linear(x.double(), weight.double(), bias.double())
        for found in (made.product(x, Interleaved.of(weight), bias), made.rows_product(x, weight, bias)):
            if not torch.allclose(found.double(), expected, rtol=slack, atol=1e-4):
                raise UserError(f"its products of {rows} rows are off by {(found - expected).abs().max().item():.3g}")


def _require_agreement(made: Operations) -> None:
    """Compare operations with known results: sums up to rounding, the rest exactly.

    Whole layers are compared with those of transformers when a model is loaded (`backends.hf.probe`).
    """
    _require_products(made)
    scores = torch.randn((3, 5001), generator=torch.Generator().manual_seed(0))
    expected = scores.double().softmax(-1)
    if not torch.allclose(made.softmax(scores).double(), expected, rtol=1e-5, atol=0):
        raise UserError("its softmax differs from torch's")
    if not torch.equal(made.greedy(scores).argmax(-1), scores.argmax(-1)):
        raise UserError("its largest entries are not torch's")
    shown = [torch.full((1, 37), value, dtype=made.dtype) for value in (0.0, math.nan, math.inf, -math.inf)]
    if [made.legal(row) for row in shown] != [True, False, False, False]:
        raise UserError("it takes NaN or infinite logits for finite ones")
    ids = torch.tensor([1, 4, 9])
    if not torch.equal(made.spread(scores[:, :3], ids, 11)[:, ids], scores[:, :3]):
        raise UserError("rows spread over a vocabulary are not where they belong")
    p, q = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [1.0, 0.0, 0.0]]]), torch.tensor([[[0.2, 0.5, 0.3]] * 2])
    running, h = made.block(torch.tensor([[1, 2]]), q, p, torch.tensor([2]))
    rest = torch.empty(3)
    made.residual(p[0, 1], q[0, 1], 2, 0.6, rest)
    known = [0.6, 1.0, 0.12 / 0.52, 1.0, 0.0, 0.0, 0.12]  # by hand
    if not torch.allclose(torch.cat([running[0], h[0], rest.double()]), torch.tensor(known).double(), atol=1e-6):
        raise UserError("its block rule differs from the paper's")
    places = torch.tensor([0, 2500, 5000])  # each uniform is in the middle of its entry's share
    middle = (expected.cumsum(-1) - expected / 2).gather(-1, places.unsqueeze(-1)).squeeze(-1)
    if not torch.equal(made.inverse_cdf(expected.float(), middle), places):
        raise UserError("its draws differ from those of a running sum")
    weights = (torch.arange(20000) % 7).float().expand(3, -1)
    if made.race(weights, torch.tensor([1, 2, 3])).tolist() != [18301, 9508, 7839]:  # as rng.first_arrival in torch
        raise UserError("its races have other winners than torch's")
