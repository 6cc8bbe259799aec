"""Lines on stderr, text on stdout, and a progress bar that stays out of both."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def note(line: str, *, dim: bool = False) -> None:
    """Print a line on stderr."""
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    console.print(line, style="dim" if dim else None)


@contextmanager
def progress(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Two functions: write a finished text to stdout, and count it on a bar on stderr where that is a terminal."""
    console = Console(stderr=True)
    if total == 1 or not console.is_terminal:
        yield write, lambda: None
        return
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Standard output is left alone: it may be a file, and rich would send it to the bar's console.
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: _write_above(bar, text), lambda: bar.advance(task)


def _write_above(bar: Progress, text: str) -> None:
    """Write with the bar out of the way: both may be on one terminal."""
    bar.stop()
    write(text)
    bar.start()


def write_aside(text: str) -> None:
    """Write to stderr now, dim on a terminal: what belongs to an answer and is no part of it."""
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(text, style="dim", end="")


def write(text: str) -> None:
    """Write to stdout now: a closed pipe is noticed here, and not at exit."""
    sys.stdout.write(text)
    sys.stdout.flush()
