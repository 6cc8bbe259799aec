"""UserError for mistakes of the user, further errors, and one-line messages for other exceptions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

LEAVING = (KeyboardInterrupt, SystemExit, GeneratorExit)  # exceptions that end something and are not failures


class UserError(ValueError):
    """A mistake that the user can correct; the message is one line: cause, invalid value, expected value, next step.

    The command line prints it on stderr and exits with code 1, without a traceback. Any function that takes a user's
    name, file or number may raise it, so docstrings only mention it if that says more.
    """


class UndraftableError(UserError):
    """A model cannot roll back drafts; it may still be decoded without them."""


class ContextError(UserError):
    """A prompt is too long for the model's context."""


class NoTokenError(UserError):
    """A request's own parameters allow no next token, which is found during decoding."""


class RequestError(UserError):
    """One request failed; other requests in the same rounds continue.

    Attributes:
        request_id: the failed request's `Request.id`.
        outputs: if `generate` raises it, the outputs of all requests, None for those that failed.
    """

    def __init__(self, request_id: int, message: str) -> None:
        super().__init__(f"request {request_id} failed: {message}")
        self.request_id = request_id
        self.outputs: tuple[Any, ...] = ()


@contextmanager
def blamed_on(request_id: int) -> Iterator[None]:
    """Turn an error inside into a `RequestError` of this request, except out-of-memory errors."""
    try:
        yield
    except (RequestError, MemoryError, *LEAVING):
        raise
    except BaseException as cause:  # also a panic of a Rust library, which is no Exception
        if type(cause).__name__ == "OutOfMemoryError":  # torch's, which is a RuntimeError
            raise
        raise RequestError(request_id, reason(cause)) from cause


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a Rust library: not an `Exception`, but still only a failed call."""
    return type(error).__name__ == "PanicException"


def reason(cause: BaseException) -> str:
    """The message of an exception on one line of at most 200 characters; its type if the message is empty."""
    text = " ".join(str(cause).split()) or type(cause).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def listed(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def printable(text: str) -> str:
    """A text of strangers for a terminal: characters that move the cursor, hide or turn text are written as escapes."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def refuse_unknown(what: str, value: str, legal: Iterable[str]) -> None:
    """Refuse a value that is not among the legal ones, which the message names."""
    if value not in (known := list(legal)):
        raise UserError(f"{what}: expected one of {', '.join(known)}, got {value!r}")


def refuse_below_one(**numbers: int) -> None:
    """Refuse numbers below 1; the message has the number's name with spaces in place of underscores."""
    for name, value in numbers.items():
        if value < 1:
            raise UserError(f"{name.replace('_', ' ')}: expected 1 or more, got {value}")


def refuse_outside(what: str, value: int | float, least: int, most: int, unit: str = "") -> None:  # noqa: PYI041 - an int is no float to the checks of the tests
    """Refuse a number that is not between two others, both of which are legal."""
    if not least <= value <= most:
        raise UserError(f"{what}: expected {least} to {most}{unit}, got {value}")
