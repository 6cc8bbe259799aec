"""The choice between a kernel and its torch function, and the check of a kernel at its first use.

DRAFTPROOF_TRITON may be
    auto        (the default) kernels for CUDA tensors where Triton is installed; each is compared with its torch
                function at its first use, and one that fails or differs is not used again, with a warning;
    0           never;
    1           kernels for CUDA tensors, unchecked; an error where Triton is missing;
    interpret   kernels for all tensors through Triton's interpreter: slow, for tests on machines without a GPU.
"""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from typing import Concatenate, ParamSpec, cast

import torch
from torch import Tensor

from draftproof.errors import UserError, reason, refuse_unknown

VARIABLE = "DRAFTPROOF_TRITON"
LEGAL = ("auto", "0", "1", "interpret")
# Larger than float32 rounding and the last bracket of the root search, smaller than a real error.
RELATIVE, ABSOLUTE = 1e-3, 1e-8

Rest = ParamSpec("Rest")
Rows = Callable[Concatenate[Tensor, Rest], Tensor]


@functools.cache
def installed() -> bool:
    """Whether Triton can be imported; looked up once, without importing it."""
    return importlib.util.find_spec("triton") is not None


class Implementation(enum.Enum):
    """How a marked function does its work."""

    TORCH = enum.auto()
    KERNEL = enum.auto()
    COMPARED = enum.auto()  # the kernel, if it agreed with torch at its first use


def implementation(device: torch.device) -> Implementation:
    """How functions of tensors on `device` do their work.

    Raises:
        UserError: an unknown value of DRAFTPROOF_TRITON, or one that needs kernels that are not available.
    """
    value = os.environ.get(VARIABLE) or "auto"
    refuse_unknown(VARIABLE, value, LEGAL)
    if value == "interpret":
        _require(value)
        _interpret()
        return Implementation.KERNEL
    if value == "0" or device.type != "cuda":
        return Implementation.TORCH
    if value == "1":
        _require(value)
        return Implementation.KERNEL
    return Implementation.COMPARED if installed() else Implementation.TORCH


def _require(value: str) -> None:
    if not installed():
        raise UserError(f"{VARIABLE} is {value!r}, but Triton is not installed: pip install 'draftproof[triton]'")


def _interpret() -> None:
    """Turn on Triton's interpreter; Triton reads TRITON_INTERPRET once, when it is imported."""
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    elif os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(
            f"{VARIABLE} is 'interpret', but Triton was imported to compile: set TRITON_INTERPRET=1 before the start"
        )


def fused(module: str) -> Callable[[Rows[Rest]], Rows[Rest]]:
    """Mark a torch function that the kernel of the same name in draftproof.triton.`module` can replace.

    The device of the function's first argument decides, together with DRAFTPROOF_TRITON.
    """

    def mark(plain: Rows[Rest]) -> Rows[Rest]:
        agreed: list[bool] = []  # empty until the first comparison

        @functools.wraps(plain)
        def chosen(rows: Tensor, /, *args: Rest.args, **kwargs: Rest.kwargs) -> Tensor:
            # a kernel cannot be launched for no rows
            by = implementation(rows.device) if rows.numel() else Implementation.TORCH
            if by is Implementation.COMPARED:
                if not agreed:
                    agreed.append(_agrees(module, plain, rows, *args, **kwargs))
                by = Implementation.KERNEL if agreed[0] else Implementation.TORCH
            return (_kernel(module, plain) if by is Implementation.KERNEL else plain)(rows, *args, **kwargs)

        return chosen

    return mark


def _kernel(module: str, plain: Rows[Rest]) -> Rows[Rest]:
    found = getattr(importlib.import_module(f"draftproof.triton.{module}"), plain.__name__)
    return cast("Rows[Rest]", found)


def _same(found: Tensor, expected: Tensor) -> bool:
    """Whether indices are equal, or numbers up to a share of the largest, since entries may be as small as 1/V."""
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    near = max(RELATIVE, 2 * torch.finfo(expected.dtype).eps)  # half precision may be rounded to the other neighbour
    found, expected = found.double(), expected.double()
    return float((found - expected).abs().max()) <= near * float(expected.abs().max()) + ABSOLUTE


def _agrees(module: str, plain: Rows[Rest], rows: Tensor, *args: Rest.args, **kwargs: Rest.kwargs) -> bool:
    """Whether the kernel runs here and agrees with the torch function; a warning where not."""
    expected = plain(rows, *args, **kwargs)
    try:
        found = _kernel(module, plain)(rows, *args, **kwargs)
    except Exception as error:  # noqa: BLE001 - whatever a compiler or a driver may raise
        trouble = f"failed ({reason(error)})"
    else:
        if _same(found, expected):
            return True
        trouble = "differs from the torch function"
    warnings.warn(
        f"the Triton kernel {plain.__name__} {trouble}: torch is used instead; set {VARIABLE}=0 to be rid of this",
        RuntimeWarning,
        stacklevel=4,
    )
    return False
