"""Files that are written completely or not at all, and the folder for files that are kept between runs."""

from __future__ import annotations

import errno
import functools
import glob
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar
from uuid import uuid4

from draftproof.errors import UserError, reason

_LEFTOVER = re.compile(r"\.[0-9a-f]{32}(\.download\.\w+)?$")  # ends the names of what is not whole yet
_log = logging.getLogger(__name__)
_Value = TypeVar("_Value")


def home() -> Path:
    """The folder for pulled models, builds and measurements: `$DRAFTPROOF_HOME`, else one in the user's cache."""
    if chosen := os.environ.get("DRAFTPROOF_HOME"):
        return Path(chosen).expanduser()
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # HOME is unset, and the user has no home directory
        cache = tempfile.gettempdir()
        if sys.platform != "win32":  # which has such a folder for each user
            return Path(cache) / f"draftproof-{os.getuid()}"
    return Path(cache) / "draftproof"


# --- files that another user may have written --------------------------------------------------------------------


def why_distrusted(path: Path, *, strict: bool = True) -> str | None:
    """Why a file or folder may hold what another user wrote; None where it may not.

    Links are followed, and the folders above count: whoever may write one of them can put another file in this place.
    It must be the user's own and closed to every group; where that is not `strict`, it may also be root's, and writable
    by a group that has no other member. On Windows it must be in the user's profile, which is closed to other users;
    the lists of who may do what are not read. An OSError where it is not there.
    """
    real = path.resolve(strict=True)
    if sys.platform == "win32":
        return _why_outside_profile(real)
    found = real.stat()
    if found.st_uid not in ((os.getuid(),) if strict else (0, os.getuid())):
        return "belongs to another user"
    if found.st_mode & 0o022 if strict else _others_write(found):
        return "can be written by others"
    return _why_distrusted_above(real)


def _why_outside_profile(real: Path) -> str | None:
    try:
        profile = Path.home().resolve()
    except RuntimeError:
        return "may be written by others: the folder of your profile is not known"
    return (
        None if real.is_relative_to(profile) else f"is outside your profile ({profile}): others may be able to write it"
    )


def _why_distrusted_above(real: Path) -> str | None:
    if sys.platform == "win32":
        return _why_outside_profile(real)
    for folder in real.parents:
        found = folder.stat()
        if found.st_uid not in (0, os.getuid()):
            return f"is in {folder}, which belongs to another user"
        if _others_write(found) and not found.st_mode & stat.S_ISVTX:  # nobody renames what is not his in such as /tmp
            return f"is in {folder}, which can be written by others"
    return None


def _others_write(found: os.stat_result) -> bool:
    return bool(found.st_mode & 0o002 or (found.st_mode & 0o020 and not _is_own_group(found.st_gid)))


@functools.cache
def _is_own_group(group: int) -> bool:
    """Whether a group is root's, or has the user as its only member, as many systems make one for each user."""
    if group == 0:
        return True
    if sys.platform == "win32":
        return False
    try:
        import grp
        import pwd

        user, found = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(group)
    except (ImportError, KeyError):
        return False
    return found.gr_name == user and set(found.gr_mem) <= {user}


def make_folders(folder: Path) -> None:
    """Make a folder and those above that are missing; none can be written by others, whatever the umask is."""
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(mode=0o755, exist_ok=True)


class Store:
    """Files that are kept between runs in a folder of `$DRAFTPROOF_HOME`, for the user alone.

    A file is believed only where nobody else could have written it. Losing one costs time only, so nothing here is an
    error: what cannot be read or kept is done again, and the log says why. What was used last stays longest: `most`
    files, and `most_bytes` of all together. All contents depend on the version, such as a format and the code that
    writes it: it is part of every name.
    """

    def __init__(self, folder: str, version: object = "", *, most: int = 64, most_bytes: int = 1 << 30) -> None:
        self._name = folder
        self._version = version
        self._most = most
        self._most_bytes = most_bytes

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return home() / self._name

    def name(self, key: object, suffix: str) -> str:
        """The name of the file of a key, which JSON must be able to hold."""
        text = json.dumps([self._version, key], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32] + suffix

    def find(self, name: str) -> Path | None:
        """The file with a name, if it is there and can be believed."""
        path = self.folder / name
        try:
            if (problem := why_distrusted(path.parent) or why_distrusted(path)) is not None:
                _warn(path, f"{problem}: it is not used")
                return None
            real = path.resolve()
            with suppress(OSError):
                os.utime(real)
        except (OSError, RuntimeError):  # it is not there; Python 3.11 raises RuntimeError for links in a circle
            return None
        return real

    def names(self, pattern: str) -> list[str]:
        """The names of files that match a pattern of `Path.glob`, believed or not."""
        try:
            return sorted(path.name for path in self.folder.glob(pattern))
        except OSError:
            return []

    def text(self, name: str) -> str | None:
        """The content of a file as text; None where it cannot be had."""
        if (path := self.find(name)) is None:
            return None
        try:
            return path.read_text(encoding="utf-8") if path.stat().st_size <= self._most_bytes else None
        except (OSError, ValueError) as error:
            _log.info("%s cannot be used: %s", path, reason(error))
            return None

    def json(self, name: str) -> Any:
        """The content of a file of JSON; None where it cannot be had."""
        text = self.text(name)
        try:
            return None if text is None else json.loads(text)
        except (ValueError, RecursionError) as error:
            _log.info("%s cannot be used: %s", self.folder / name, reason(error))
            return None

    def keep(
        self, name: str, write: Callable[[Path], object], *, mode: int = 0o600, durable: bool = False
    ) -> Path | None:
        """Keep a file, in place of one with its name; its path without links, or None where that was not possible.

        `write` writes the content to a path; an OSError of it means that nothing is kept.
        """
        folder = own_folder(self.folder)
        if folder is None:
            return None
        try:
            with whole_file(folder / name, durable=durable) as work:
                write(work)
                work.chmod(mode)
            self._tidy(folder, name)
        except OSError as error:
            _warn(folder, _not_kept(error))
            return None
        return folder / name

    def remove(self, name: str) -> None:
        """Remove a file, if it is the user's to remove."""
        with suppress(OSError):
            (self.folder / name).unlink()

    def _tidy(self, folder: Path, newest: str) -> None:
        """Remove what killed processes left, and the files that were used longest ago beyond what may be kept."""
        remove_leftovers(folder, "")
        found = []
        for path in folder.iterdir():
            with suppress(OSError):  # another process removes files, too
                state = path.lstat()
                if stat.S_ISREG(state.st_mode) and not _LEFTOVER.search(path.name):
                    found.append((path.name == newest, state.st_mtime, state.st_size, path))
        total = 0
        for number, (_, _, size, path) in enumerate(sorted(found, reverse=True)):
            total += size
            if number >= self._most or (total > self._most_bytes and number):
                path.unlink(missing_ok=True)


def own_folder(folder: Path) -> Path | None:
    """The folder without links, made where it was missing, the user's own and closed to others; None where it is not.

    What it holds cannot be exchanged by another user, so a check of a file in it stays true.
    """
    try:
        make_folders(folder.parent)
        folder.mkdir(exist_ok=True, mode=0o700)
        real = folder.resolve()
        others = sys.platform != "win32" and real.stat().st_uid != os.getuid()
        problem = "belongs to another user" if others else _why_distrusted_above(real)
        if problem is not None:
            nothing = "nothing is taken from there or kept there; set DRAFTPROOF_HOME to a folder of your own"
            _warn(folder, f"{problem}: {nothing}")
            return None
        real.chmod(0o700)
    except (OSError, RuntimeError) as error:
        _warn(folder, _not_kept(error))
        return None
    return real


def _not_kept(error: Exception) -> str:
    why = getattr(error, "strerror", None) or error  # the file's name is a new one each time
    return (
        f"cannot be written ({why}), so every start builds, checks and measures again: set DRAFTPROOF_HOME to a "
        "writable folder"
    )


_warned: set[tuple[Path, str]] = set()


def _warn(path: Path, problem: str) -> None:
    """Warn once of what several files or folders of one folder have in common."""
    if (path.parent, problem) not in _warned:
        _warned.add((path.parent, problem))
        _log.warning("%s %s", path, problem)


# --- whole files and folders --------------------------------------------------------------------------------------


def remove_leftovers(folder: Path, name: str, *, seconds: float = 3600.0) -> None:
    """Remove temporary files and folders that processes left which were killed in `whole_file` or `whole_directory`.

    They would have had the name, or any where it is empty. Those that were changed in the last seconds may belong to a
    process that runs.
    """
    for path in folder.glob(f".{glob.escape(name)}*"):
        found = _LEFTOVER.search(path.name)
        if found is None or (name and path.name[: found.start()] != f".{name}"):
            continue
        with suppress(OSError):
            state = path.lstat()
            if time.time() - state.st_mtime < seconds:
                continue
            if stat.S_ISDIR(state.st_mode):
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


@contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """Yield a temporary directory next to `out`; it is renamed to `out` if the block succeeds, and removed if not."""
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

    `durable` waits until the content is on the disk, so that a crash of the machine cannot leave half of it.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.parent / f".{out.name}.{uuid4().hex}"
    try:
        yield work
        if durable:
            with work.open("r+b") as written:  # Windows waits only for a file that may be written
                os.fsync(written.fileno())
        os.replace(work, out)  # noqa: PTH105 - replaces atomically on every system
    finally:
        work.unlink(missing_ok=True)


def read_bytes(file: Path, hint: str = "") -> bytes:
    """The content of a file that the user names; `hint` says what to do where it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as cause:
        raise UserError(f"cannot read {file}: {cause.strerror or cause}{hint}") from cause


def json_value(text: str, where: str) -> Any:
    """The value of a JSON text that stands in a user's file."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise UserError(f"{where}: not JSON ({getattr(cause, 'msg', 'nested too deeply')})") from None


def write_text(out: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with whole_file(out) as work:
        work.write_text(text, encoding="utf-8")


def write_json(out: Path, content: Any) -> None:
    """Write indented JSON, whole or not at all."""
    write_text(out, json.dumps(content, indent=2) + "\n")


def read_object(path: Path, expected: str) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: it cannot be read, or is something else than what is `expected`.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise UserError(f"{str(path)!r} cannot be read ({reason(cause)}): expected {expected}") from cause
    if not isinstance(found, dict):
        raise UserError(f"{str(path)!r} is no JSON object: expected {expected}")
    return found


def remembered(file: Path, make: Callable[[], _Value]) -> _Value:
    """The value of a JSON file, which is made and written if it does not exist; so a resumed run repeats nothing."""
    if not file.exists():
        write_text(file, json.dumps(make()) + "\n")
    found: _Value = json.loads(file.read_text(encoding="utf-8"))
    return found


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of the file `path`: of several processes or threads, one is in the block at a time.

    The system releases the lock of a process that dies. Where the disk has no such locks, nothing is locked. The file
    is made for this purpose, and stays; its content is left as it is. `waiting` is called once if another process
    holds the lock.
    """
    make_folders(path.parent)
    with _lock_file(path) as file:
        try:
            if not _take(file):
                waiting()
                while not _take(file, wait=True):
                    pass
        except OSError:  # a disk without locks
            pass
        yield


def _take(file: IO[bytes], *, wait: bool = False) -> bool:
    """Take the lock of a file; whether it was free, or became so while this waited."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)  # waits for 10 s
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            return False
        raise
    return True


def _lock_file(path: Path) -> IO[bytes]:
    """Open a file to lock it; what a link leads to is not touched, and nothing is emptied."""
    flags = os.O_RDWR | os.O_CREAT
    if sys.platform != "win32":
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        file = os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise UserError(f"{path} is no file, and it is needed as a lock: remove it") from error
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise UserError(f"{path} is no file, and it is needed as a lock: remove it")
    return file


def refuse_existing(out: Path) -> None:
    """Refuse a path that exists, before work on it begins."""
    if out.exists():
        raise UserError(f"{out} exists already: choose another path, or remove it first")
