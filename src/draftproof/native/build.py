"""The C library of native operations: the build for this processor, its source, and the checks before it is loaded.

A wheel for one system contains a build for each level of its processors. Without them, on Linux, the one that is needed
is built at first use with the machine's C compiler, and kept in `$DRAFTPROOF_HOME/native`. A kept library is code that
will run. So it is loaded only if the folder and the file belong to the user, no other user may write them, and the hash
of the file's content is the one in its name; otherwise it is built again.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from draftproof.errors import UserError, reason
from draftproof.files import Store, own_folder

SOURCES = Path(__file__).parent / "c"
PACKAGED = Path(__file__).parent / "built"  # filled when a wheel is built
SUFFIXES = {"linux": ".so", "darwin": ".dylib", "win32": ".dll"}  # of libraries, by `sys.platform`
MACHINES = {"arm64": "aarch64", "AMD64": "x86_64"}  # of macOS and of Windows, by their names on Linux
_FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared", "-pthread")
_SPACE = 32 << 20  # bytes for files that compilers pass on, twice what the largest level takes
_TIMEOUT = 900  # seconds for a compiler: portable code takes 140 of a fast processor
_KEPT = Store("native", most=16, most_bytes=256 << 20)  # libraries of earlier versions and other machines go
_log = logging.getLogger(__name__)


class UnavailableError(UserError):
    """Native operations do not exist for this kind of machine; nothing is wrong with it."""


@dataclass(frozen=True)
class Level:
    """A kind of processor that the library is built for."""

    name: str  # that of the x86-64 psABI, where there is one; with Arm, instructions that products are made of
    needs: frozenset[str]  # flags that the processor must have, or its vendor
    flags: tuple[str, ...]  # for the compiler
    machine: str | None = "x86_64"  # as in `platform.machine` on Linux; None for any


_LINUX_FLAGS = {  # of compilers' names of instructions, where they are not the same
    "avx512vnni": "avx512_vnni",
    "avx512bf16": "avx512_bf16",
    "avxvnni": "avx_vnni",
    "amx-tile": "amx_tile",
    "amx-bf16": "amx_bf16",
    "amx-int8": "amx_int8",
}


def _level(name: str, *features: str, vendor: str | None = None, defined: tuple[str, ...] = ()) -> Level:
    needs = frozenset(_LINUX_FLAGS.get(feature, feature) for feature in features)
    flags = *(f"-m{feature}" for feature in features), *(f"-D{each}" for each in defined)
    return Level(name, needs | ({vendor} if vendor else set()), flags)


def _arm(name: str, march: str, *needs: str) -> Level:
    return Level(name, frozenset(needs), (f"-march={march}", "-DWITH_NEON"), "aarch64")


_V3 = ("avx2", "fma", "f16c")
_V4 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma")
LEVELS = (  # best first
    _level("x86-64-v4-amx", *_V4, "avx512vnni", "avx512bf16", "amx-tile", "amx-bf16", "amx-int8"),
    # Intel's dot products of bfloat16 numbers are slower than float32 products (c/wide_products.h).
    _level("x86-64-v4-fma", *_V4, "avx512vnni", "avx512bf16", vendor="GenuineIntel", defined=("WIDE_PRODUCTS",)),
    # AMD's: weights that are fetched ahead go to the second cache (c/native.c).
    _level("x86-64-v4-bf16", *_V4, "avx512vnni", "avx512bf16", defined=("FETCH_INTO_SECOND_CACHE",)),
    _level("x86-64-v4", *_V4),
    _level("x86-64-v3-vnni", *_V3, "avxvnni"),
    _level("x86-64-v3", *_V3),
    _arm("neon-i8mm-bf16", "armv8.2-a+dotprod+i8mm+bf16", "asimd", "asimddp", "i8mm", "bf16"),
    _arm("neon-dotprod", "armv8.2-a+dotprod", "asimd", "asimddp"),
    _arm("neon", "armv8-a", "asimd"),
    Level("portable", frozenset(), ("-ffp-contract=fast",), None),
)


# Flags of Arm. Linux, arch/arm64/include/uapi/asm/hwcap.h: bits of the numbers 16 and 26 (AT_HWCAP, AT_HWCAP2)
# of getauxval. macOS: names for sysctlbyname (Apple, "Determining Instruction Set Characteristics").
_ARM_FLAGS = {"asimd": (16, 1), "asimddp": (16, 20), "i8mm": (26, 13), "bf16": (26, 14)}
_APPLE_FLAGS = {"asimd": "AdvSIMD", "asimddp": "arm.FEAT_DotProd", "i8mm": "arm.FEAT_I8MM", "bf16": "arm.FEAT_BF16"}
# The names of `torch.cpu.get_capabilities` where they are not those of Linux without underscores.
_TORCH_FLAGS = {"fma3": "fma"} | {name: name for name in ("avx512_vnni", "avx512_bf16", "avx_vnni")}


def machine() -> str:
    """The kind of processor, by its name on Linux."""
    return MACHINES.get(platform.machine(), platform.machine())


def processor() -> frozenset[str]:
    """The flags of this processor with their Linux names, and its vendor; empty where they are not known."""
    if sys.platform == "win32":
        import torch

        found = {name for name, has in torch.cpu.get_capabilities().items() if has is True}
        flags = (_TORCH_FLAGS.get(name, name.replace("_", "")) for name in found if not name.startswith("amx"))
        return frozenset((*flags, platform.processor().rpartition(", ")[-1]))
    if sys.platform == "darwin":
        return frozenset(flag for flag, name in _APPLE_FLAGS.items() if _apple_says(f"hw.optional.{name}"))
    if platform.machine() == "aarch64":
        ask = ctypes.CDLL(None).getauxval
        ask.argtypes = [ctypes.c_ulong]
        ask.restype = ctypes.c_ulong
        return frozenset(flag for flag, (number, bit) in _ARM_FLAGS.items() if ask(number) >> bit & 1)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = [next((line for line in lines if line.startswith(start)), "") for start in ("vendor_id", "flags")]
    return frozenset(" ".join(found).split())


def _apple_says(name: str) -> bool:
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return not failed and value.value == 1


def choose(name: str | None = None) -> list[Level]:
    """The levels that run here, best first, or only the level with this name.

    Raises:
        UnavailableError: they do not exist for this system, or this processor cannot run the level.
    """
    if sys.platform not in SUFFIXES:
        raise UnavailableError(f"they are for Linux, macOS and Windows, and this is {sys.platform}")
    if name is None:
        return [level for level in LEVELS if _why_not(level) is None]
    found = level_named(name)
    if (problem := _why_not(found)) is not None:
        raise UnavailableError(problem)
    return [found]


def level_named(name: str) -> Level:
    """The level with a name."""
    found = next((level for level in LEVELS if level.name == name), None)
    if found is None:
        raise UserError(f"expected a level of {', '.join(level.name for level in LEVELS)}, got {name!r}")
    return found


def _why_not(level: Level) -> str | None:
    """Why a level does not run here; None if it does."""
    if level.machine not in (None, machine()):
        return f"{level.name} is for {level.machine}, and this is {machine()}"
    if missing := level.needs - processor():
        return f"{level.name} needs {', '.join(sorted(missing))}, which this processor lacks"
    if "amx_tile" in level.needs and not _tiles_allowed():
        return f"{level.name} needs the tile registers, which this system does not give (Linux 5.16 or later does)"
    return None


def _tiles_allowed() -> bool:
    """Ask Linux for the registers of the matrix unit, for the whole process; whether it gave them.

    Source: Linux, Documentation/arch/x86/xstate.rst: arch_prctl (158) with ARCH_REQ_XCOMP_PERM for component 18.
    """
    return int(ctypes.CDLL(None).syscall(158, 0x1023, 18)) == 0


def load_best(levels: list[Level]) -> tuple[Level, ctypes.CDLL]:
    """Load the first of some levels that can be loaded: an old compiler may know only the later ones."""
    failures: list[UserError] = []
    for level in levels:
        try:
            return level, load(level)
        except UserError as error:
            failures.append(error)
    kind = UnavailableError if all(isinstance(each, UnavailableError) for each in failures) else UserError
    raise kind("; ".join(dict.fromkeys(map(str, failures))))


def _loaded(path: Path, then: str = "") -> ctypes.CDLL | None:
    """A library that is there; None, and a warning that says what happens then, where it cannot be loaded."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        _log.warning("the library %s cannot be loaded (%s)%s", path, reason(error), then)
        return None


@functools.cache
def load(level: Level) -> ctypes.CDLL:
    """Load the library of a level: from the package, else from an earlier build, else built now.

    Raises:
        UnavailableError: there is no C compiler, or the system is not Linux and the package has no library for it.
        UserError: no compiler could build it, or the build cannot be loaded.
    """
    packaged = PACKAGED / f"{level.name}{SUFFIXES[sys.platform]}"
    if packaged.exists() and (found := _loaded(packaged)):
        return found
    if sys.platform != "linux":
        raise UnavailableError(f"the package has no library for {level.name} on {sys.platform}: install its wheel")
    for kept in _kept(level):
        if found := _loaded(kept, ": it is built again"):
            return found
    name, content = build(level)
    written = _KEPT.keep(name, partial(Path.write_bytes, data=content), mode=0o700, durable=True)
    if written is not None and (found := _loaded(written, ": it is built at every start")):  # code may not run there
        return found
    with tempfile.TemporaryDirectory(prefix="draftproof-") as passing:
        out = Path(passing) / name
        try:
            out.write_bytes(content)
            return ctypes.CDLL(str(out))  # a loaded library outlives its file
        except OSError as error:
            raise UserError(f"what was built cannot be loaded: {reason(error)}") from error


# --- kept libraries ------------------------------------------------------------------------------------------------


def _kept(level: Level) -> Iterator[Path]:
    """Earlier builds of this source that are complete and belong to the user."""
    if own_folder(_KEPT.folder) is None:  # closes it to others where it was open
        return
    for name in _KEPT.names(f"{_digest(level)}-*.so"):
        path = _KEPT.find(name)
        if path is not None and _is_what_was_built(path):
            yield path
        else:
            _log.warning("the kept library %s is not what was built, or not by you: building it again", name)
            _KEPT.remove(name)


def _is_what_was_built(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()[:32]
    except OSError:
        return False
    return path.stem.endswith(f"-{content}")


def _digest(level: Level) -> str:
    """A hash of the sources and the compiler's flags."""
    made = hashlib.sha256(" ".join((*_FLAGS, *level.flags)).encode())
    for path in sorted(SOURCES.rglob("*")):
        if path.is_file():
            made.update(path.read_bytes())
    return f"{level.name}-{made.hexdigest()[:16]}"


# --- building ------------------------------------------------------------------------------------------------------


def build(level: Level) -> tuple[str, bytes]:
    """Build a library: its name, which contains the hash of its content, and the content."""
    with tempfile.TemporaryDirectory(prefix="draftproof-") as passing:
        if (free := shutil.disk_usage(passing).free) < _SPACE:  # a compiler would notice only after minutes
            raise UserError(
                f"expected {_SPACE >> 20} MiB for compiling in {tempfile.gettempdir()}, got {free >> 20} MiB: "
                "free some, or name another folder in the variable TMPDIR"
            )
        built = Path(passing) / "library.so"
        compile_library(built, level)
        content = built.read_bytes()
    return f"{_digest(level)}-{hashlib.sha256(content).hexdigest()[:32]}.so", content


def compile_library(
    out: Path,
    level: Level,
    *,
    extra: tuple[str, ...] = (),
    compilers: Sequence[list[str]] | None = None,
    source: Path = SOURCES,
) -> None:
    """Compile the library of a level with the first C compiler that can.

    Raises:
        UnavailableError: no C compiler was found.
        UserError: all of them failed, with their messages.
    """
    found, failures = list(_compilers() if compilers is None else compilers), []
    if not found:
        raise UnavailableError("no C compiler was found (CC, cc, gcc, clang)")
    _log.info("compiling native code for this kind of processor (%s): up to some minutes, once", level.name)
    for compiler in found:
        sources = map(str, sorted(source.glob("*.c")))
        command = [*compiler, *_FLAGS, *level.flags, *extra, *sources, "-lm", "-o", str(out)]
        try:
            done = subprocess.run(  # noqa: S603 - the user's own compiler on our own source
                command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT, check=False
            )
        except (OSError, subprocess.SubprocessError) as error:
            failures.append(f"{shlex.join(compiler)}: {reason(error)}")
            continue
        if done.returncode == 0 and out.exists():
            return
        failures.append(f"{shlex.join(compiler)} failed: {done.stderr.strip()[-300:]}")
    raise UserError("; ".join(failures))


def _compilers() -> Iterator[list[str]]:
    """Commands of C compilers, the user's choice first, each once."""
    seen = set()
    for words in (shlex.split(os.environ.get("CC") or ""), ["cc"], ["gcc"], ["clang"]):
        where = shutil.which(words[0]) if words else None
        if where is not None and (where, *words[1:]) not in seen:
            seen.add((where, *words[1:]))
            yield [where, *words[1:]]
