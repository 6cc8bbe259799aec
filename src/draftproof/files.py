"""Files that appear whole or not at all, and the folder for those that are kept from one run to the next.

Knows: temporary names, renaming, the variable DRAFTPROOF_HOME. Does not know: what is written.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from draftproof.errors import UserError


def home() -> Path:
    """The folder of all that is pulled, built or measured once: `$DRAFTPROOF_HOME`, else in the user's cache."""
    if chosen := os.environ.get("DRAFTPROOF_HOME"):
        return Path(chosen).expanduser()
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # HOME is unset, and the system knows no home of this user
        return Path(tempfile.gettempdir()) / f"draftproof-{os.getuid()}"
    return Path(cache) / "draftproof"


@contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """Give a temporary sibling of `out` to fill; it becomes `out` if the block ends well and vanishes if not.

    Raises:
        UserError: `out` is there already.
    """
    _refuse_existing(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.parent / f".{out.name}.{uuid4().hex}"
    work.mkdir()
    try:
        yield work
        _refuse_existing(out)
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def whole_file(out: Path, *, durable: bool = False) -> Iterator[Path]:
    """Give a temporary sibling of `out` to write; it replaces `out` if the block ends well and vanishes if not.

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


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise UserError(f"{out} exists already: name a path that does not, or remove it first")
