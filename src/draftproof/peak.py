"""Memory of the process and of an accelerator: its peak between two moments, and freed memory handed back."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from pathlib import Path

import torch

_PROC = Path("/proc/self")
_PAUSE = 0.002  # seconds between two samples, where the system keeps no peak
HOW = {
    "cuda": "bytes of tensors on the accelerator, by its allocator",
    "mark": "resident bytes of the process, by the kernel's high-water mark",
    "sampled": f"resident bytes of the process, sampled every {1000 * _PAUSE:g} ms: short peaks may be missed",
    "whole": "resident bytes of the process since it began: this system keeps no other peak",
}


def process_peak() -> int:
    """Peak bytes of this process in memory since it began."""
    if sys.platform == "win32":
        return int(_windows_memory().peak_working_set)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def resident() -> int | None:
    """Bytes of this process in memory now; None where the system does not report them."""
    if sys.platform == "win32":
        return int(_windows_memory().working_set)
    return _status("VmRSS")


class _ProcessMemory(ctypes.Structure):
    """PROCESS_MEMORY_COUNTERS of Windows' psapi.h."""

    _fields_ = (
        ("size", ctypes.c_uint32),  # of this structure
        ("page_faults", ctypes.c_uint32),
        ("peak_working_set", ctypes.c_size_t),
        ("working_set", ctypes.c_size_t),
        *((f"other_{number}", ctypes.c_size_t) for number in range(6)),  # of pools and the page file
    )


class _SystemMemory(ctypes.Structure):
    """MEMORYSTATUSEX of Windows' sysinfoapi.h."""

    _fields_ = (
        ("size", ctypes.c_uint32),  # of this structure
        ("percent_used", ctypes.c_uint32),
        ("physical", ctypes.c_uint64),
        ("free", ctypes.c_uint64),
        *((f"other_{number}", ctypes.c_uint64) for number in range(5)),  # of the page file and of addresses
    )


if sys.platform == "win32":

    def _windows_memory() -> _ProcessMemory:
        kernel = ctypes.WinDLL("kernel32", use_last_error=True)
        kernel.GetCurrentProcess.restype = ctypes.c_void_p
        found = _ProcessMemory(size=ctypes.sizeof(_ProcessMemory))
        process = ctypes.c_void_p(kernel.GetCurrentProcess())
        if not kernel.K32GetProcessMemoryInfo(process, ctypes.byref(found), found.size):
            raise ctypes.WinError(ctypes.get_last_error())
        return found

    def _windows_free() -> int | None:
        found = _SystemMemory(size=ctypes.sizeof(_SystemMemory))
        return int(found.free) if ctypes.WinDLL("kernel32").GlobalMemoryStatusEx(ctypes.byref(found)) else None


def release_freed_memory() -> None:
    """Make the C library return freed memory to the system, which it would keep for later (glibc; else nothing)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class FilePages:
    """Where this process has safetensors mapped, at the moment when this is made (on Linux; elsewhere nowhere)."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []
        maps = _PROC / "maps"
        for line in maps.read_text().splitlines() if maps.exists() else ():
            span, _, rest = line.partition(" ")
            if rest.startswith(("r--p", "rw-p")) and rest.endswith(".safetensors"):
                first, _, end = span.partition("-")
                self._spans.append((int(first, 16), int(end, 16)))

    def release(self, tensor: torch.Tensor) -> None:
        """Let whole pages go that hold a tensor which nobody reads any more.

        They would be read from the file again, without what was changed since.
        """
        if sys.platform != "linux":
            return
        first, size = tensor.data_ptr(), tensor.nbytes
        if not any(start <= first and first + size <= end for start, end in self._spans):
            return
        start, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, (first + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


class ReleaseTimes:
    """When freed memory is handed back: while the process is larger than it was, and less often where that is no use.

    What a process has grown by may be freed long after it was taken, without a change of its size. So growth since the
    last time says nothing.
    """

    worth, most = 32 << 20, 12  # bytes above the smallest size; looks that are left out at most

    def __init__(self) -> None:
        self._smallest: int | None = None
        self._pause = self._left = 0

    def due(self, size: int) -> bool:
        """Whether to hand memory back now, with a process of this size in bytes."""
        self._smallest = size if self._smallest is None else min(self._smallest, size)
        if size <= self._smallest + self.worth:
            self._pause = self._left = 0
            return False
        self._left -= 1
        return self._left < 0

    def released(self, before: int, after: int) -> None:
        """Note what it brought."""
        useless = before - after < self.worth // 8
        self._pause = min(max(2 * self._pause, 1), self.most) if useless else 0
        self._left = self._pause


class Peak:
    """Peak memory of a device (for a CPU, of the whole process) from its construction to `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sampler: _Sampler | None = None
        if device.type == "cuda":
            self.how = "cuda"  # a key of HOW
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self.before: int | None = torch.cuda.memory_allocated(device)  # None where the system does not say
            return
        self.before = resident()
        self.how = "mark" if _reset_mark() else "whole" if self.before is None else "sampled"
        if self.how == "sampled":
            self._sampler = _Sampler()

    def stop(self) -> int:
        """The peak in bytes."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return int(torch.cuda.max_memory_allocated(self._device))
        if self._sampler is not None:
            return self._sampler.stop()
        mark = _status("VmHWM") if self.how == "mark" else None
        return process_peak() if mark is None else mark


def _status(name: str) -> int | None:
    """A figure of /proc/self/status in bytes."""
    try:
        lines = (_PROC / "status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(found[0]) * 1024 if found else None


def _reset_mark() -> bool:
    """Reset the kernel's high-water mark to the current size; returns whether that is allowed here."""
    try:
        (_PROC / "clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return _status("VmHWM") is not None


class _Sampler:
    """Samples the resident size in a thread."""

    def __init__(self) -> None:
        self._most = resident() or 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(_PAUSE):
            self._most = max(self._most, resident() or 0)

    def stop(self) -> int:
        """The largest size sampled."""
        self._done.set()
        self._thread.join()
        return max(self._most, resident() or 0)


def available(device: torch.device) -> int | None:
    """Bytes that new tensors on a device can have, on a CPU without swapping; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if sys.platform == "win32":
        return _windows_free()
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("MemAvailable:")), None)
    if found is None:
        return None
    free, left = 1024 * int(found.split()[1]), _left_of_limit(Path("/sys/fs/cgroup"))
    return free if left is None else min(free, left)


def _left_of_limit(group: Path) -> int | None:
    """Bytes that a container's limit leaves to the processes of a control group; None where there is no limit."""
    try:
        most, used = (int((group / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # a group without a limit has the word max there
        return None
    return max(most - used, 0)
