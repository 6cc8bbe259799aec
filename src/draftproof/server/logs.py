"""The server's log on stderr: a line of text or a JSON object for each record. No prompt and no answer is in it.

A thread of its own writes the lines, so that whoever does not read them stops neither the engine nor the event loop.
Lines beyond a number are dropped, and counted.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime

_MOST_LINES = 10_000


class JsonLines(logging.Formatter):
    """A JSON object for each record."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        made = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            made["traceback"] = self.formatException(record.exc_info)
        return json.dumps(made)


class TextLines(logging.Formatter):
    """A line of text for each record."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback of an error below it."""
        line = super().format(record)
        facts = " ".join(f"{name}={value}" for name, value in getattr(record, "facts", {}).items())
        return f"{line} {facts}" if facts else line


class Unblocked(logging.Handler):
    """Hands lines to a thread that writes them to a descriptor; emitting never waits, and drops lines beyond `most`."""

    def __init__(self, where: int, most: int = _MOST_LINES) -> None:
        super().__init__()
        self._where = where
        self._most = most
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._writing = False
        self._wake = threading.Event()
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Add a line; the handler's lock is held."""
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - a record that cannot be shown stops nothing
            line = f"a record of {record.name} that cannot be shown"
        if len(self._lines) < self._most:
            self._lines.append(line)
            self._wake.set()
        else:
            self._dropped += 1

    def flush(self, seconds: float = 2.0) -> None:
        """Wait until everything is written, but not for long."""
        end = time.monotonic() + seconds
        while (self._lines or self._writing) and time.monotonic() < end:
            time.sleep(0.005)

    def _write(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while self._lines:
                self._writing = True  # before the line is taken, so that `flush` sees one or the other
                line = self._lines.popleft()
                dropped = self._dropped
                self._dropped = 0
                if dropped:  # they came after the lines that waited then, and the next one has room again
                    line = f"{line}\n{self._said(dropped)}"
                with suppress(OSError, ValueError):  # nobody is there to read it
                    self._put(line + "\n")
                self._writing = False

    def _put(self, text: str) -> None:
        """Write past the buffer of `sys.stderr`, whose lock would hold up the end of the process, too."""
        left = text.encode(errors="backslashreplace")
        while left:
            left = left[os.write(self._where, left) :]

    def _said(self, dropped: int) -> str:
        text = f"{dropped} lines of the log are missing here or below: they were not read fast enough"
        return self.format(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None))


def start_logging(*, as_json: bool) -> None:
    """Send what the server and its engine log to stderr."""
    try:
        where = sys.stderr.fileno()
    except (OSError, ValueError):  # it is no file
        where = 2
    handler = Unblocked(where)
    handler.setFormatter(JsonLines() if as_json else TextLines("draftproof: %(message)s"))
    for name in ("draftproof", "uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    logging.getLogger("draftproof").setLevel(logging.INFO)
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)


def flush_logs() -> None:
    """Wait a short time until the log is written."""
    for handler in logging.getLogger("draftproof").handlers:
        handler.flush()
