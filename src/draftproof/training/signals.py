"""SIGINT and SIGTERM, delayed until the current piece of work is saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Yield a list that collects SIGINT and SIGTERM until the block ends; outside the main thread it stays empty."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.signal(kind, lambda number, _: caught.append(number)) for kind in kinds}
    try:
        yield caught
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def raise_for(caught: list[int]) -> None:
    """Raise what the first of the caught signals would have raised.

    Raises:
        KeyboardInterrupt: SIGINT.
        SystemExit: SIGTERM.
    """
    if caught and caught[0] == signal.SIGINT:
        raise KeyboardInterrupt
    if caught:
        raise SystemExit(128 + caught[0])
