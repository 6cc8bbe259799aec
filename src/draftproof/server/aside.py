"""Work beside the event loop: calls that may take long, or never end, in threads that keep nothing else from going on.

Whoever waits for such a call may stop waiting. The thread then goes on alone and keeps its place, so that there are
never more threads than places; a process may end while it runs.
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


class Aside:
    """Threads for calls that others do not wait for; beyond `most` of them, calls wait for one."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._asked: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._threads = self._busy = 0
        self._lock = threading.Lock()

    @property
    def busy(self) -> int:
        """Calls that run or wait."""
        return self._busy

    async def run(self, call: Callable[[], _Made]) -> _Made:
        """What a call returns or raises; a caller that is cancelled leaves it alone."""
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

    The lock is one of C, whose `with` cannot be interrupted between taking it and knowing that it is taken.
    """

    def __init__(self) -> None:
        self._ends: dict[int, float] = {}
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, seconds: float) -> None:
        """Give the present thread some seconds."""
        with self._lock:
            self._ends[threading.get_ident()] = time.monotonic() + seconds
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="time limits", daemon=True)
                self._thread.start()
        self._changed.set()

    def end(self) -> bool:
        """The present thread is done; whether it still had time, or else has been told."""
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
    """Give the Python code inside some seconds, then raise TimeOver: between calls of libraries, not within one."""
    _watch.begin(seconds)
    try:
        yield
    finally:
        if not _watch.end():
            _raise_in(threading.get_ident(), None)  # it may have ended before it was told


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an exception in a thread, between two of its instructions; None takes back one that was not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error and ctypes.py_object(error))
