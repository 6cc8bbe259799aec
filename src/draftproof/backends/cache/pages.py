"""Buffers of zeros that take memory only where they were written, and give it back in pieces.

On Linux, memory that was mapped and never written has no pages behind it. So a buffer may be as large as the longest
sequence in every slot needs, and a slot takes what its own sequence has written. The idea is that of vAttention (arXiv
2405.04437), with the memory of the host. Elsewhere, and on accelerators, buffers are plain tensors.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_NO_HUGE_PAGES = getattr(mmap, "MADV_NOHUGEPAGE", 15)
_POLICY = Path("/proc/sys/vm/overcommit_memory")
_STRICT = "2"  # everything that is mapped counts


def paged(device: torch.device) -> bool:
    """Whether buffers on a device take memory only where they were written."""
    return device.type == "cpu" and sys.platform == "linux"


def addresses_are_free(device: torch.device) -> bool:
    """Whether a buffer may be mapped for more than is needed: no limit counts what is mapped and never written."""
    return paged(device) and _unlimited()


@functools.cache
def _unlimited() -> bool:
    if sys.platform == "win32":
        return False
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        return limit == resource.RLIM_INFINITY and _POLICY.read_text(encoding="ascii").strip() != _STRICT
    except (OSError, ValueError):
        return False


class Buffer:
    """A tensor of zeros.

    Args:
        mapped: raise where it would take memory at once.

    Raises:
        OSError: the system reserves what it maps, and has no room for that.
    """

    def __init__(self, shape: Sequence[int], like: Tensor, *, mapped: bool = False) -> None:
        self._pages: mmap.mmap | None = None
        size = like.dtype.itemsize
        for each in shape:
            size *= each
        if sys.platform != "win32" and paged(like.device) and size:
            try:
                self._pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
            except OSError:
                if mapped:
                    raise
        if sys.platform == "win32" or self._pages is None:
            self.tensor = like.new_zeros(tuple(shape))
        else:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._pages.madvise(_NO_HUGE_PAGES)
            self.tensor = torch.frombuffer(self._pages, dtype=like.dtype).view(tuple(shape))

    @property
    def is_paged(self) -> bool:
        """Whether it takes memory only where it was written."""
        return self._pages is not None

    def clear(self, part: Tensor) -> None:
        """Fill a part, a view of `tensor` whose elements are neighbours, with zeros and give its whole pages back."""
        if sys.platform == "win32" or self._pages is None or part.nbytes < PAGE:
            part.zero_()
            return
        start = part.data_ptr() - self.tensor.data_ptr()
        first, last = -(-start // PAGE) * PAGE, (start + part.nbytes) // PAGE * PAGE
        flat, size = part.reshape(-1), part.dtype.itemsize
        flat[: (first - start) // size].zero_()
        flat[(last - start) // size :].zero_()
        if last > first:
            self._pages.madvise(mmap.MADV_DONTNEED, first, last - first)  # reads as zeros from now on
