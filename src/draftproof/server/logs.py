"""The server's log on stderr: a line of text or a JSON object for each record. No prompt and no answer is in it."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime


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


def start_logging(*, as_json: bool) -> None:
    """Send what the server and its engine log to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else TextLines("draftproof: %(message)s"))
    for name in ("draftproof", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    logging.getLogger("draftproof").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
