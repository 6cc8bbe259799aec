"""Files that are written whole or not at all, and the folder for files that are kept from one run to the next."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from draftproof.errors import UserError


def home() -> Path:
    """The folder for pulled models, builds and measurements: `$DRAFTPROOF_HOME`, else one in the user's cache."""
    if chosen := os.environ.get("DRAFTPROOF_HOME"):
        return Path(chosen).expanduser()
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # HOME is unset, and the system knows no home of this user
        return Path(tempfile.gettempdir()) / f"draftproof-{os.getuid()}"
    return Path(cache) / "draftproof"


@contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """Yield a temporary directory next to `out`; it is renamed to `out` if the block succeeds, and removed if not.

    Raises:
        UserError: `out` exists already.
    """
    refuse_existing(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.parent / f".{out.name}.{uuid4().hex}"
    work.mkdir()
    try:
        yield work
        refuse_existing(out)
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def whole_file(out: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path next to `out`; the file replaces `out` if the block succeeds, and is removed if not.

    Args:
        out: the file.
        durable: wait until the content is on the disk, so that a crash of the machine cannot leave half of it.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.parent / f".{out.name}.{uuid4().hex}"
    try:
        yield work
        if durable:
            with work.open("rb") as written:
                os.fsync(written.fileno())
        os.replace(work, out)  # noqa: PTH105 - replaces atomically on every system
    finally:
        work.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of the file `path`: of several processes or threads, one is in the block at a time.

    The system releases the lock of a process that dies. Where the system or the disk has no such locks, nothing is
    locked.

    Args:
        path: a file that is made for this purpose, and stays.
        waiting: called once if another process holds the lock.
    """
    try:
        import fcntl
    except ImportError:  # not on this system
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a disk without locks
            pass
        yield


def refuse_existing(out: Path) -> None:
    """Refuse a path that exists, before work on it begins.

    Raises:
        UserError: naming the path.
    """
    if out.exists():
        raise UserError(f"{out} exists already: choose another path, or remove it first")
