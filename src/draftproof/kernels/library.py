"""The C library of native operations: the build for this processor, its source, and the checks before it is loaded.

A wheel contains a build for each level of processor. A source install builds the one it needs at first use, with the
machine's C compiler, and keeps it in `$DRAFTPROOF_HOME/native`. A kept library is code that will run. So it is loaded
only if the folder and the file belong to the user, no other user may write them, and the hash of the file's content is
the one in its name; otherwise it is built again.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from draftproof.errors import UserError, reason
from draftproof.files import home, own_folder, whole_file, why_distrusted

SOURCES = Path(__file__).parent / "c"
PACKAGED = Path(__file__).parent / "built"  # filled when a wheel is built
_FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared")
_TIMEOUT = 300  # seconds for a compiler
_log = logging.getLogger(__name__)


class UnavailableError(UserError):
    """Native operations do not exist for this kind of machine; nothing is wrong with it."""


@dataclass(frozen=True)
class Level:
    """A kind of processor that the library is built for.

    Attributes:
        name: that of the x86-64 psABI, where there is one.
        needs: flags that the processor must have.
        flags: for the compiler.
        machine: as in `platform.machine`; None for any.
    """

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]
    machine: str | None = "x86_64"


def _level(name: str, *features: str) -> Level:
    needs = frozenset(feature.replace("avx512bf16", "avx512_bf16") for feature in features)
    return Level(name, needs, tuple(f"-m{feature}" for feature in features))


_V4 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma")
LEVELS = (  # best first
    _level("x86-64-v4-bf16", *_V4, "avx512bf16"),
    _level("x86-64-v4", *_V4),
    _level("x86-64-v3", "avx2", "fma"),
    Level("portable", frozenset(), ("-ffp-contract=fast",), None),
)


def processor() -> frozenset[str]:
    """The flags of this processor with their Linux names; empty where they are not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split()) for line in lines if line.startswith(("flags", "Features"))), frozenset())


def choose(name: str | None = None) -> Level:
    """The best level that runs here, or the level with this name.

    Raises:
        UnavailableError: the system is not Linux, or this processor cannot run the level.
    """
    if sys.platform != "linux":
        raise UnavailableError(f"they are for Linux, and this is {sys.platform}")
    flags, machine = processor(), platform.machine()
    for level in LEVELS:
        fits = level.machine in (None, machine)
        if name is None and fits and level.needs <= flags:
            return level
        if level.name == name:
            if not fits:
                raise UnavailableError(f"{name} is for {level.machine}, and this is {machine}")
            if missing := level.needs - flags:
                raise UnavailableError(f"{name} needs {', '.join(sorted(missing))}, which this processor lacks")
            return level
    raise UserError(f"no level {name!r}: legal are {', '.join(level.name for level in LEVELS)}")


@functools.cache
def load(level: Level) -> ctypes.CDLL:
    """Load the library of a level: from the package, else from an earlier build, else built now.

    Raises:
        UnavailableError: there is no C compiler.
        UserError: no compiler could build it, or the build cannot be loaded.
    """
    packaged = PACKAGED / f"{level.name}.so"
    if packaged.exists():
        try:
            return ctypes.CDLL(str(packaged))
        except OSError as error:
            _log.warning("the packaged library %s cannot be loaded (%s): building another", packaged, reason(error))
    folder = own_folder(home() / "native")
    for kept in _kept(folder, level):
        try:
            return ctypes.CDLL(str(kept))
        except OSError as error:
            _log.warning("the kept library %s cannot be loaded (%s): building it again", kept, reason(error))
    if folder is not None:
        try:
            return ctypes.CDLL(str(_build_into(folder, level)))
        except OSError as error:  # the disk is full, or code may not run from there
            _log.warning("no library can be kept in %s (%s): building one for this process", folder, reason(error))
    with tempfile.TemporaryDirectory(prefix="draftproof-") as passing:
        try:
            return ctypes.CDLL(str(_build_into(Path(passing), level)))  # a loaded library outlives its file
        except OSError as error:
            raise UserError(f"what was built cannot be loaded: {reason(error)}") from error


# --- kept libraries ------------------------------------------------------------------------------------------------


def _kept(folder: Path | None, level: Level) -> Iterator[Path]:
    """Earlier builds of this source that are complete and belong to the user."""
    for path in sorted(folder.glob(f"{_digest(level)}-*.so")) if folder is not None else ():
        problem = _why_distrusted(path)
        if problem is None:
            yield path
        else:
            _log.warning("the kept library %s %s: building it again", path, problem)
            path.unlink(missing_ok=True)


def _why_distrusted(path: Path) -> str | None:
    if (problem := why_distrusted(path)) is not None:
        return problem
    with path.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()[:32]
    return None if path.stem.endswith(f"-{content}") else "is not what was built (its checksum differs)"


def _digest(level: Level) -> str:
    """A hash of the sources and the compiler's flags."""
    made = hashlib.sha256(" ".join((*_FLAGS, *level.flags)).encode())
    for path in sorted(SOURCES.iterdir()):
        made.update(path.read_bytes())
    return f"{level.name}-{made.hexdigest()[:16]}"


# --- building ------------------------------------------------------------------------------------------------------


def _build_into(folder: Path, level: Level) -> Path:
    """Build a library into a folder; its name contains the hash of its content."""
    with tempfile.TemporaryDirectory(prefix="draftproof-") as passing:
        built = Path(passing) / "library.so"
        compile_library(built, level)
        content = built.read_bytes()
    out = folder / f"{_digest(level)}-{hashlib.sha256(content).hexdigest()[:32]}.so"
    with whole_file(out, durable=True) as work:
        work.write_bytes(content)
        work.chmod(0o700)
    return out


def compile_library(out: Path, level: Level, *, extra: tuple[str, ...] = ()) -> None:
    """Compile the library of a level with the first C compiler that can.

    Args:
        out: the file to write.
        level: of the processors that it is for.
        extra: further flags for the compiler.

    Raises:
        UnavailableError: no C compiler was found.
        UserError: all of them failed, with their messages.
    """
    found, failures = list(_compilers()), []
    if not found:
        raise UnavailableError("no C compiler was found (CC, cc, gcc, clang)")
    for compiler in found:
        source = str(SOURCES / "native.c")
        command = [*compiler, *_FLAGS, *level.flags, *extra, source, "-lm", "-o", str(out)]
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
