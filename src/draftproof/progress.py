"""Progress of long jobs on stderr: a bar with loss, speed and time left, or without a terminal a line at times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

INTERVAL = 30.0  # seconds between two lines where a bar cannot be drawn


class Tick(Protocol):
    """Called after each piece of a job."""

    def __call__(self, done: int, *, tokens: int = 0, loss: float | None = None) -> None:
        """`done` pieces of the job are finished; `tokens` were processed since the last call."""


Watch = Callable[[str, int, int], AbstractContextManager[Tick]]  # title, total, already done


def _ignore(done: int, *, tokens: int = 0, loss: float | None = None) -> None:
    """Show nothing."""


@contextmanager
def silent(title: str, total: int, done: int) -> Iterator[Tick]:  # noqa: ARG001
    """A watch that shows nothing."""
    yield _ignore


@contextmanager
def bar(title: str, total: int, done: int) -> Iterator[Tick]:
    """A watch on stderr: title, bar, count, loss, tokens/s, time left."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(console, title, total, done)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    facts = TextColumn("{task.fields[facts]}")
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), facts, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as shown:
        task = shown.add_task(title, total=total, completed=done, facts="")
        meter = _Meter()

        def tick(done: int, *, tokens: int = 0, loss: float | None = None) -> None:
            shown.update(task, completed=done, facts=meter(tokens, loss))

        yield tick


class _Meter:
    """Loss and tokens/s as text; the speed is that of this process, without the work before a checkpoint."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._tokens = 0

    def __call__(self, tokens: int, loss: float | None) -> str:
        self._tokens += tokens
        seconds = time.perf_counter() - self._start
        words = [] if loss is None else [f"loss {loss:.4f}"]
        if self._tokens and seconds > 0:
            words.append(f"{self._tokens / seconds:,.0f} tokens/s")
        return " ".join(words)


class _Lines:
    """A tick that writes a line at most every INTERVAL seconds, and one at the end."""

    def __init__(self, console: object, title: str, total: int, done: int) -> None:
        self._console = console
        self._title = title
        self._total = total
        self._first = done
        self._meter = _Meter()
        self._start = self._last = time.perf_counter()

    def __call__(self, done: int, *, tokens: int = 0, loss: float | None = None) -> None:
        facts, now = self._meter(tokens, loss), time.perf_counter()
        if now - self._last < (INTERVAL if done < self._total else 1.0):
            return  # also when there was nothing to do
        self._last = now
        left = (now - self._start) / max(done - self._first, 1) * (self._total - done)
        line = f"{self._title}: {done} of {self._total} {facts}".rstrip() + f", {left:.0f} s left"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)  # type: ignore[attr-defined]
