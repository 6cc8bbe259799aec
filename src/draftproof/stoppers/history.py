"""Lengths known before a round is drafted: by how earlier drafts fared, or by hindsight.

Knows: lengths, accepted counts, recorded agreements. Does not know: probabilities, models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from draftproof.errors import UserError
from draftproof.stoppers.base import StopperBase
from draftproof.stoppers.fixed import MAX_LENGTH


class Schedule(StopperBase):
    """Draft two tokens more after a draft that was accepted whole, one less after any other.

    Every request has its own length, so that it is answered alike alone and in any batch.

    Args:
        length: of the first round, 1 to `limit`.
        limit: longest chain.

    Raises:
        UserError: a length out of range.

    Source: the heuristic schedule of transformers' assisted generation (constants +2 and -1).
    """

    def __init__(self, length: int = 5, limit: int = 20) -> None:
        if not 1 <= length <= limit <= MAX_LENGTH:
            raise UserError(f"schedule starts with length {length} of at most {limit}: legal are 1 to {limit}")
        super().__init__(f"schedule:{length}", limit)
        self._start = length
        self._lengths: dict[int, int] = {}

    def wanted(self, row: int) -> int:
        """The row's present length."""
        return self._lengths.get(row, self._start)

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """Lengthen or shorten by a round's outcome."""
        if drafted:
            length = self.wanted(row)
            self._lengths[row] = min(length + 2, self.limit) if accepted == drafted else max(length - 1, 1)

    def release(self, row: int) -> None:
        """Forget the row's length."""
        self._lengths.pop(row, None)


class Oracle(StopperBase):
    """Hindsight for greedy decoding: draft exactly up to the token before the next disagreement.

    It is for analysis: the fewest target calls with nothing discarded that any stopping rule could reach.

    Args:
        agreements: for each request id, whether the draft's greedy token is the target's, position by position of the
            output; what is not recorded counts as a disagreement.
        limit: longest chain.

    Source: SpecDec++, arXiv 2405.19715, Lemma 2.1.
    """

    def __init__(self, agreements: Mapping[int, Sequence[bool]], limit: int = MAX_LENGTH) -> None:
        super().__init__("oracle", limit)
        self._agreements = agreements
        self._emitted: dict[int, int] = {}

    def wanted(self, row: int) -> int:
        """Tokens up to the next disagreement."""
        start = self._emitted.get(row, 0)
        ahead = list(self._agreements.get(row, ()))[start : start + self.limit]
        return ahead.index(False) if False in ahead else len(ahead)

    def observe(self, row: int, drafted: int, accepted: int) -> None:  # noqa: ARG002
        """Move on by what was emitted: the accepted tokens and the one every round ends with."""
        self._emitted[row] = self._emitted.get(row, 0) + accepted + 1

    def release(self, row: int) -> None:
        """Forget where the row is."""
        self._emitted.pop(row, None)
