"""The error for a user's mistakes, and the text of other errors on one line."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake that the user can correct; the message is one line: cause, offending value, what is legal, next step.

    The command line prints it on stderr and exits with code 1, without a traceback.
    """


def reason(cause: BaseException) -> str:
    """The message of an exception on one line of at most 200 characters; its type where the message is empty."""
    text = " ".join(str(cause).split()) or type(cause).__name__
    return text if len(text) <= 200 else text[:197] + "..."
