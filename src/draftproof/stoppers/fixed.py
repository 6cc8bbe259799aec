"""A constant number of drafted tokens.

Knows: the number. Does not know: anything else.
"""

from __future__ import annotations

from draftproof.draft import DraftStep
from draftproof.errors import UserError

MAX_LENGTH = 64


class FixedLength:
    """Draft exactly `length` tokens every round.

    Args:
        length: 1 to 64.

    Raises:
        UserError: length out of range.
    """

    constant = True
    needs_hidden = False

    def __init__(self, length: int) -> None:
        if not 1 <= length <= MAX_LENGTH:
            raise UserError(f"fixed draft length is {length}: legal are 1 to {MAX_LENGTH}")
        self.limit = length
        self.name = f"fixed:{length}"

    def stop_after(self, step: DraftStep) -> bool:
        """True at the last token of the chain."""
        return step.depth >= self.limit

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """Nothing to learn."""

    def release(self, row: int) -> None:
        """Nothing to forget."""
