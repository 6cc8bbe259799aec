"""The error a user can act on.

Knows: nothing but the sentence. Does not know: who prints it.
"""

from __future__ import annotations


class UserError(ValueError):
    """A mistake the user can mend, told in one line: cause, offending value, what is legal, next step.

    The command line prints it on stderr and exits with code 1; no traceback is shown.
    """
