"""Download of registered models at their first use, with lines and a progress bar on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from draftproof.cli._output import note

if TYPE_CHECKING:
    from draftproof.models.download import Progress, Report


def obtain(*names: str | None, quiet: bool = False) -> None:
    """Download those registered models among `names` that are not on this machine."""
    from draftproof import models

    missing = [name for name in names if name in models.REGISTRY and not models.pulled(name)]
    if not missing:
        return
    with pull_progress(quiet=quiet) as (report, progress):
        for name in missing:
            models.obtain(name, report=report, progress=progress)


def first_target(*, quiet: bool = False) -> str:
    """The target where none is named: a registered model, or the embedded one if that cannot be downloaded."""
    from draftproof import models
    from draftproof.errors import UserError, reason

    try:
        obtain(models.FIRST_TARGET, quiet=quiet)
    except UserError as cause:
        if not quiet:
            note(f"draftproof: {reason(cause)}; until then the small model {models.DEFAULT_TARGET} is used")
        return models.DEFAULT_TARGET
    return models.FIRST_TARGET


@contextmanager
def pull_progress(*, quiet: bool = False) -> Iterator[tuple[Report, Progress]]:
    """The callbacks of `models.pull`: print a line for each step, and on a terminal a progress bar below them."""
    if quiet:
        yield lambda _: None, lambda *_: None
        return
    if not sys.stderr.isatty():
        yield lambda line: note(f"draftproof: {line}"), lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("", total=None)

        def report(line: str) -> None:
            bar.reset(task, total=None)
            bar.console.print(f"draftproof: {line}", markup=False, highlight=False, soft_wrap=True)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total or None)

        yield report, progress
