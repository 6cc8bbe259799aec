"""Hides progress bars and warnings of other libraries, and shows our own log messages, one line each."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from draftproof.cli._output import note

_QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
# transformers imports torchao if it is installed, which logs messages about kernels for other machines and enums
_QUIET_LOGGERS = ("torchao", "torch.utils._pytree")


def set_quiet_variables() -> None:
    """Set variables that libraries read at import (torch imports tqdm); the user's values are kept."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hide progress bars and warnings of libraries; python -W shows the warnings again."""
    set_quiet_variables()
    if "transformers" in sys.modules:  # it has already read its variables
        _silence_transformers()
    for name in _QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
            warnings.filterwarnings("default", module="draftproof")
        warnings.showwarning = _show_warning
        yield


def _silence_transformers() -> None:
    from transformers.utils import logging as library_logging

    library: Any = library_logging  # transformers is typed, but not these two
    library.set_verbosity_error()
    library.disable_progress_bar()


@contextmanager
def logged_lines(*, quiet: bool) -> Iterator[None]:
    """Show our log messages, one line each."""
    logger, handler = logging.getLogger("draftproof"), _LogLines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _LogLines(logging.Handler):
    """Prints each record on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        note(f"draftproof: {record.getMessage()}")


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    note(f"draftproof: warning: {message}")
