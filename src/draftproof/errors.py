"""The error a user can act on.

Knows: nothing but the sentence. Does not know: who prints it.
"""

from __future__ import annotations


class UserError(ValueError):
    """A mistake the user can mend, told in one line: cause, offending value, what is legal, next step.

    The command line prints it on stderr and exits with code 1; no traceback is shown.
    """


def reason(cause: BaseException) -> str:
    """What an exception says, on one line of at most 200 characters; its type where it says nothing."""
    said = " ".join(str(cause).split()) or type(cause).__name__
    return said if len(said) <= 200 else said[:197] + "..."


def refuse_below_one(**numbers: int) -> None:
    """Refuse numbers below 1; the message has a number's name with spaces in place of underscores.

    Raises:
        UserError: for the first such number.
    """
    for name, value in numbers.items():
        if value < 1:
            raise UserError(f"{name.replace('_', ' ')} is {value}: legal is 1 or more")
