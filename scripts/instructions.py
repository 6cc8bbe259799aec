"""Which instructions of a library a call runs, and how long each kind takes on this processor: for measure_levels.py.

A child process makes the call one instruction at a time (ptrace), and objdump says which instruction stands at each
address. For Linux on x86-64.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import os
import re
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_TRACEME, _PEEKUSER, _STEP, _RIP = 0, 3, 9, 128  # of ptrace; RIP's place in `struct user`
_LINE = re.compile(r"^\s*([0-9a-f]+):\s+((?:\{\w+\} )?\S+)\s*([^#<]*)")
_MULTIPLIES = ("vpmaddubsw", "vpmaddwd", "vpdpbusd", "vdpbf16ps", "vfmadd231ps")
_REGISTERS, _REPEATS = 15, 8  # registers are written in turn, so that no instruction waits for another
_TURNS, _SECONDS = 40, 0.001


@dataclass(frozen=True)
class Instruction:
    """What an instruction keeps busy.

    Attributes:
        multiply: the name of one that multiplies, which those of the same speed share; None for others.
        vector: whether vectors are computed: neither moved, loaded nor stored.
        loads: whether a vector, or a number for all its lanes, is read from memory.
        wide: whether registers have 512 bits.
    """

    multiply: str | None
    vector: bool
    loads: bool
    wide: bool


def _read(name: str, operands: str) -> Instruction:
    name, operands = name.rpartition(" ")[2], operands.strip()
    memory = "(" in operands and not name.startswith(("lea", "nop"))
    stores = operands.endswith(")") and name.startswith(("mov", "vmov"))  # the last operand is what is written
    moves = name.startswith(("vmov", "vbroadcast", "vpbroadcast", "vzero"))
    alike = "vfmadd231ps" if name.startswith(("vfmadd", "vfnmadd", "vfmsub", "vmulp")) else name
    return Instruction(
        multiply=alike if alike in _MULTIPLIES else None,
        vector=name.startswith("v") and not moves,
        loads=memory and not stores and name.startswith("v"),
        wide="%zmm" in operands,
    )


@functools.cache
def _instructions(library: Path) -> tuple[list[int], list[Instruction]]:
    """All of a library, by their addresses in order."""
    command = ["objdump", "-d", "--no-show-raw-insn", str(library)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [line for line in map(_LINE.match, shown.splitlines()) if line]
    return [int(line[1], 16) for line in found], [_read(line[2], line[3]) for line in found]


def _first_address(library: Path) -> int:
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if words[-1] == str(library) and int(words[2], 16) == 0:
            return int(words[0].partition("-")[0], 16)
    raise ValueError(f"{library} is not loaded")


def counted(library: Path, call: Callable[[], object]) -> Counter[Instruction]:
    """The instructions of a loaded library that a call runs."""
    trace = ctypes.CDLL(None, use_errno=True).ptrace
    trace.restype = ctypes.c_long
    trace.argtypes = [ctypes.c_long] * 4
    child = os.fork()
    if not child:
        trace(_TRACEME, 0, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        call()
        os.kill(os.getpid(), signal.SIGKILL)
    first, (addresses, instructions) = _first_address(library), _instructions(library)
    last, seen = first + addresses[-1], Counter[int]()
    os.waitpid(child, 0)
    while True:
        if trace(_STEP, child, 0, 0) < 0:
            raise OSError(ctypes.get_errno(), "ptrace cannot step")
        if not os.WIFSTOPPED(os.waitpid(child, 0)[1]):
            break
        at = trace(_PEEKUSER, child, _RIP, 0)
        if first <= at <= last:
            seen[at - first] += 1
    made = Counter[Instruction]()
    for at, times in seen.items():
        made[instructions[bisect.bisect_left(addresses, at)]] += times
    return made


_END = '.section .note.GNU-stack,"",@progbits\n'  # the stack holds no code
_TEXTS = {
    "vector": "vpaddd {r}15, {r}15, {r}{n}",
    "vfmadd231ps": "vfmadd231ps {r}15, {r}15, {r}{n}",
    "vpmaddubsw": "vpmaddubsw {r}15, {r}15, {r}{n}",
    "vpmaddwd": "vpmaddwd {r}15, {r}15, {r}{n}",
    "vpdpbusd": "{vex}vpdpbusd {r}15, {r}15, {r}{n}",
    "vdpbf16ps": "vdpbf16ps {r}15, {r}15, {r}{n}",
    "load": "vbroadcastss (%rsp), {r}{n}",
    "all": "nop",
}


@functools.cache
def seconds(kind: str, *, wide: bool) -> float:
    """Processor time of one instruction of a kind, where many follow one another: the best of several turns."""
    names = {"r": "%zmm" if wide else "%ymm", "vex": "" if wide else "{vex} "}
    lines = [_TEXTS[kind].format(n=n, **names) for n in range(_REGISTERS)] * _REPEATS
    source = "\n".join([".globl run", "run: vzeroall", "1:", *lines, "dec %rdi", "jnz 1b", "vzeroall", "ret", _END])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.so"
        command = [os.environ.get("CC") or "cc", "-shared", "-x", "assembler", "-", "-o", str(out)]
        subprocess.run(command, input=source, text=True, check=True)
        run = ctypes.CDLL(str(out)).run
    run.argtypes = [ctypes.c_long]
    return best(lambda: run(1000)) / (1000 * len(lines))


def best(call: Callable[[], object], turns: int = _TURNS, clock: Callable[[], float] = time.process_time) -> float:
    """Seconds of a call by a clock, by default that of the processor.

    They are the least of several turns, each of so many calls that the clock is fine enough.
    """
    times, took = 1, 0.0
    least = float("inf")
    while turns:
        start = clock()
        for _ in range(times):
            call()
        took = clock() - start
        if took < _SECONDS:
            times *= 2
            continue
        least = min(least, took / times)
        turns -= 1
    return least


def least_seconds(run: Counter[Instruction]) -> float:
    """What some instructions take at least, by what keeps the processor busy for the longest time.

    That is multiplications, all that compute on vectors, reads of memory, or all instructions.
    """
    times = dict.fromkeys(("multiply", "vector", "load", "all"), 0.0)
    for each, count in run.items():
        if each.multiply:
            times["multiply"] += count * seconds(each.multiply, wide=each.wide)
        if each.vector:
            times["vector"] += count * seconds("vector", wide=each.wide)
        if each.loads:
            times["load"] += count * seconds("load", wide=each.wide)
        times["all"] += count * seconds("all", wide=False)
    return max(times.values())


def shown(run: Counter[Instruction], products: int) -> str:
    """Instructions for 256 products: those that multiply, on vectors, that read memory, all."""
    kinds = (
        sum(count for each, count in run.items() if each.multiply),
        sum(count for each, count in run.items() if each.vector),
        sum(count for each, count in run.items() if each.loads),
        run.total(),
    )
    return " / ".join(f"{256 * count / products:.1f}" for count in kinds)
