"""Memory for weights in huge pages, where the system gives them.

A pass reads every weight once, so it needs the address of each page. With pages of 4 KB most are not in the
processor's cache of addresses, and in a virtual machine each one is looked up in the tables of two systems. Linux only.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

_LEAST = 1 << 16  # bytes of a weight: neighbours on the heap fill a huge page together
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None) if sys.platform == "linux" else None


def empty_weight(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory that a weight is written to, which is not set to anything.

    Linux uses huge pages for it if its setting `transparent_hugepage/enabled` is `madvise` or `always`; otherwise the
    memory is that of `torch.empty`.
    """
    made = torch.empty(shape, dtype=dtype)
    if _ADVICE is not None and made.nbytes >= _LEAST:
        # Whole pages, with what else is on the first and the last one: a gap between two weights would end a huge page.
        start = made.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        size = made.data_ptr() + made.nbytes - start
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _ADVICE)  # a refusal changes nothing
    return made
