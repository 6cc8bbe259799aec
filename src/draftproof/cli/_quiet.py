"""Other libraries' output: their bars and warnings kept off the screen, and our own messages shown, a line each."""

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
# What loading torchao logs, which transformers does where it is installed: of kernels for other machines, and of enums
_QUIET_LOGGERS = ("torchao", "torch.utils._pytree")


def set_quiet_variables() -> None:
    """Set variables that libraries read when they are imported (torch imports tqdm); values of the user stay."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep the progress bars and warnings of libraries off the screen; -W shows the warnings again."""
    set_quiet_variables()
    if "transformers" in sys.modules:  # it has read its variables already
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
    """Show what the library logs during long work, a line each."""
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
        """A line."""
        note(f"draftproof: {record.getMessage()}")


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    note(f"draftproof: warning: {message}")
