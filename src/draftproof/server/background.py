"""Slow calls in daemon threads beside the event loop, and time limits for Python code.

A caller may stop waiting for such a call. The thread then goes on alone and keeps its place, so there are never more
threads than places; the process may exit while it runs.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

_Made = TypeVar("_Made")


class BackgroundCalls:
    """A pool of at most `most` daemon threads; further calls wait for a free thread."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._asked: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._threads = self._busy = 0
        self._lock = threading.Lock()

    @property
    def busy(self) -> int:
        """Number of calls that run or wait."""
        return self._busy

    async def run(self, call: Callable[[], _Made]) -> _Made:
        """Run a call in a thread, and return or raise what it does; cancelling the caller does not stop the thread."""
        future: Future[_Made] = Future()
        with self._lock:
            self._busy += 1
            if self._busy > self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
        self._asked.put((future, call))
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        while True:
            future, call = self._asked.get()
            try:
                if future.set_running_or_notify_cancel():
                    try:
                        made = call()
                    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the caller's
                        future.set_exception(error)
                        del error
                    else:
                        future.set_result(made)
                        del made
            finally:
                with self._lock:
                    self._busy -= 1
            del future, call  # an idle thread holds no request


class TimeOver(BaseException):
    """The call took too long; raised in its thread."""


class _TimeWatch:
    """Raises `TimeOver` in threads whose time is over.

    The lock is implemented in C, so `TimeOver` cannot be raised between acquiring it and entering the `with` block.
    """

    def __init__(self) -> None:
        self._ends: dict[int, float] = {}
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, seconds: float) -> None:
        """Start a time limit for the current thread."""
        with self._lock:
            self._ends[threading.get_ident()] = time.monotonic() + seconds
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="time limits", daemon=True)
                self._thread.start()
        self._changed.set()

    def end(self) -> bool:
        """End the time limit of the current thread; returns False if `TimeOver` was already sent to it."""
        with self._lock:
            return self._ends.pop(threading.get_ident(), None) is not None

    def _run(self) -> None:
        while True:
            with self._lock:
                self._changed.clear()
                now = time.monotonic()
                for thread in [each for each, end in self._ends.items() if end <= now]:
                    del self._ends[thread]
                    _raise_in(thread, TimeOver)
                pause = max(min(self._ends.values()) - now, 0.0) if self._ends else None
            self._changed.wait(pause)


_watch = _TimeWatch()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeOver in the Python code inside after some seconds; a call into C is not interrupted."""
    _watch.begin(seconds)
    try:
        yield
    finally:
        if not _watch.end():
            _raise_in(threading.get_ident(), None)  # the block may have ended before the exception was raised


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an exception in a thread, between two bytecode instructions; None cancels one that was not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error and ctypes.py_object(error))
