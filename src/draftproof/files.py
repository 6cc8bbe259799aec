"""Files that are written completely or not at all, and the folder for files that are kept between runs."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from draftproof.errors import UserError, reason

_log = logging.getLogger(__name__)


def home() -> Path:
    """The folder for pulled models, builds and measurements: `$DRAFTPROOF_HOME`, else one in the user's cache."""
    if chosen := os.environ.get("DRAFTPROOF_HOME"):
        return Path(chosen).expanduser()
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # HOME is unset, and the user has no home directory
        return Path(tempfile.gettempdir()) / f"draftproof-{os.getuid()}"
    return Path(cache) / "draftproof"


def own_folder(folder: Path) -> Path | None:
    """The folder, made where it was missing, the user's own and closed to others; None where there can be none."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.lstat().st_uid != os.getuid():
            _log.warning("%s belongs to another user: nothing is taken from there or kept there", folder)
            return None
        folder.chmod(0o700)
    except OSError as error:
        _log.info("nothing can be kept in %s: %s", folder, reason(error))
        return None
    return folder


def why_distrusted(path: Path) -> str | None:
    """Why a file or folder may hold what another user wrote; None where it may not.

    Raises:
        OSError: it is not there.
    """
    found = path.lstat()
    if found.st_uid != os.getuid():
        return "belongs to another user"
    return "can be written by others" if found.st_mode & 0o022 else None


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
        UserError: the path exists.
    """
    if out.exists():
        raise UserError(f"{out} exists already: choose another path, or remove it first")
