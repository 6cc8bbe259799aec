"""The stopper `fixed`: a constant number of drafted tokens."""

from __future__ import annotations

from draftproof.errors import UserError
from draftproof.stoppers.base import StopperBase

MAX_LENGTH = 64


class FixedLength(StopperBase):
    """Drafts exactly `length` tokens, 1 to 64, in every round."""

    constant = True

    def __init__(self, length: int) -> None:
        if not 1 <= length <= MAX_LENGTH:
            raise UserError(f"stopper fixed: expected a draft length of 1 to {MAX_LENGTH}, got {length}")
        super().__init__(f"fixed:{length}", length)
