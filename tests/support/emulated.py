"""Libraries of native operations for Arm, in a process of QEMU's user emulation that works on this process's memory."""

import ctypes
import os
import shutil
import struct
import subprocess
import threading
from pathlib import Path
from unittest import mock

import pytest

from draftproof.native import build as library

COMPILER, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64"
SYSTEM = Path("/usr/aarch64-linux-gnu")  # the libraries of Debian's cross-compiler
PROCESSORS = {
    "neon": "cortex-a57",
    "neon-dotprod": "neoverse-n1",
    "neon-i8mm-bf16": "max",
}  # none has what the next needs
SOURCE = Path(__file__).parents[2] / "scripts" / "emulate" / "remote.c"
_NUMBERS, _NAME = 20, 64  # as in remote.c
_APART = 16 << 30  # bytes that memory mappings of both processes may still grow by
_TRIES = 20


def missing() -> str | None:
    """Why nothing can be emulated here; None if it can."""
    absent = [each for each in (COMPILER, QEMU) if shutil.which(each) is None]
    return f"{' and '.join(absent)} not found (Debian's gcc-aarch64-linux-gnu, qemu-user)" if absent else None


def needs_emulation(test):
    """Mark a slow test that is skipped where nothing can be emulated."""
    return pytest.mark.slow(pytest.mark.skipif(missing() is not None, reason=str(missing()))(test))


def cross_compile(level: library.Level, out: Path, *extra: str, source: Path = library.SOURCES) -> None:
    """Compile the library of a level of Arm processors, with the flags that it has on these."""
    with mock.patch.dict(os.environ, CC=COMPILER):
        library.compile_library(out, level, extra=extra, source=source)


def _mapped(process: int | str) -> list[tuple[int, int]]:
    """The memory of a process, but not what Linux places near the end of every process."""
    lines = Path(f"/proc/{process}/maps").read_text(encoding="utf-8").splitlines()
    spans = (
        line.split()[0].split("-") for line in lines if not line.endswith(("[stack]", "[vvar]", "[vdso]", "[vsyscall]"))
    )
    return [(int(start, 16), int(end, 16)) for start, end in spans]


class EmulatedLibrary(ctypes.CDLL):
    """A library whose functions run on an emulated processor.

    QEMU's own memory lies at the same addresses as that of its program. So it is started again until it has none near
    the memory of this process.

    Args:
        path: of the library.
        processor: a name of QEMU's `-cpu`.
    """

    def __init__(self, path: Path, processor: str) -> None:
        super().__init__(None)
        program = path.with_name("remote")
        command = [COMPILER, "-O2", "-o", str(program), str(SOURCE), "-ldl", "-lpthread"]
        subprocess.run(command, check=True)
        self._owner = os.getpid()
        self._calling = threading.Lock()  # one call at a time
        self._command = [
            QEMU,
            "-cpu",
            processor,
            "-L",
            str(SYSTEM),
            str(program),
            str(path),
            f"/proc/{self._owner}/mem",
        ]
        for _ in range(_TRIES):
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            ctypes.CDLL(None).prctl(0x59616D61, self._process.pid, 0, 0, 0)  # PR_SET_PTRACER: it may read this memory
            self.call("getpid", [])  # it runs now, with all of its memory
            if self._is_apart():
                return
            self.close()
        raise RuntimeError(f"QEMU's memory was near that of this process {_TRIES} times")

    def _is_apart(self) -> bool:
        own = _mapped("self")
        return not any(
            start < stop + _APART and first < end + _APART
            for first, stop in _mapped(self._process.pid)
            for start, end in own
        )

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def call(self, name: str, numbers: list[int], real: float = 0.0) -> int:
        """Call a function with integers and addresses, in order, and at most one float."""
        assert os.getpid() == self._owner, "a forked process has other memory"
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        padded = numbers + [0] * (_NUMBERS - len(numbers))
        with self._calling:
            self._process.stdin.write(struct.pack(f"<{_NAME}s{_NUMBERS}qff", name.encode(), *padded, real, 0.0))
            self._process.stdin.flush()
            try:
                answer = self._process.stdout.read(8)
            except (
                BaseException
            ):  # a test's time is over: what still runs would write to memory that others have by then
                self._process.kill()
                raise
        if len(answer) < 8:
            raise RuntimeError(f"{name} ended its process: status {self._process.wait()}")
        return int(struct.unpack("<q", answer)[0])

    def __getattr__(self, name: str) -> "_Function":
        return _Function(self, name)


class _Function:
    """A function of an emulated library, with the types that its caller gives it."""

    def __init__(self, of: EmulatedLibrary, name: str) -> None:
        self._library = of
        self._name = name
        self.argtypes: list[type] = []
        self.restype: type | None = None

    def __call__(self, *given: object) -> int | None:
        if self._name == "draftproof_attach":  # it has its own threads in its own process
            return None
        numbers, reals = [], [0.0]
        for kind, value in zip(self.argtypes, given, strict=True):
            if kind is ctypes.c_float:
                reals.append(value)
            else:
                numbers.append(ctypes.cast(value, ctypes.c_void_p).value or 0 if kind is ctypes.c_void_p else value)
        answer = self._library.call(self._name, numbers, reals[-1])
        return None if self.restype is None else self.restype(answer).value
