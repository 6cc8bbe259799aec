"""The threads that the C library runs on: those of torch's OpenMP runtime, or a pool of its own (c/pool.c).

The variable DRAFTPROOF_THREADS may be
    auto    (the default) torch's OpenMP runtime, where it offers GNU's functions, else the pool;
    openmp  an error where it does not;
    pool    always the pool.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import torch

from draftproof.errors import UserError

VARIABLE = "DRAFTPROOF_THREADS"
LEGAL = ("auto", "openmp", "pool")
_ENTRIES = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier")


def kind() -> str:
    """Whose threads are used: openmp or pool.

    Raises:
        UserError: an unknown value of DRAFTPROOF_THREADS, or one that torch cannot satisfy.
    """
    value = os.environ.get(VARIABLE) or "auto"
    if value not in LEGAL:
        raise UserError(f"{VARIABLE}: expected one of {', '.join(LEGAL)}, got {value!r}")
    if value == "pool":
        return value
    if all(openmp_function(name) for name in _ENTRIES):
        return "openmp"
    if value == "openmp":
        raise UserError(f"{VARIABLE}: expected auto or pool, got {value!r}, which this build of torch does not offer")
    return "pool"


def attach_threads(library: ctypes.CDLL) -> None:
    """Make a library run on the chosen threads.

    Raises:
        UserError: as `kind`.
    """
    library.draftproof_attach.argtypes = [ctypes.c_void_p] * len(_ENTRIES)
    if kind() == "openmp":
        library.draftproof_attach(*(ctypes.cast(openmp_function(name), ctypes.c_void_p) for name in _ENTRIES))
    else:
        library.draftproof_attach(*(None for _ in _ENTRIES))


@functools.cache
def openmp_function(name: str) -> Any:
    """A function of the OpenMP runtime that torch has loaded; None where it does not offer it."""
    try:
        return getattr(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")), name)
    except (OSError, AttributeError):
        return None
