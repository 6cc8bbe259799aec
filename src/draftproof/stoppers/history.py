"""Stoppers that fix the length before a round: `schedule` from earlier rounds, the oracle from a recorded run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from draftproof.errors import UserError
from draftproof.stoppers.base import StopperBase
from draftproof.stoppers.fixed import MAX_LENGTH


class Schedule(StopperBase):
    """Drafts two more tokens after a fully accepted draft, and one token less after any other draft.

    Every request has its own length, so its answer is the same alone and in any batch.

    Source: the heuristic schedule of transformers' assisted generation (constants +2 and -1).
    """

    def __init__(self, length: int = 5, limit: int = 20) -> None:
        if not 1 <= length <= limit <= MAX_LENGTH:
            raise UserError(f"stopper schedule: expected a first length of 1 to {limit}, got {length}")
        super().__init__(f"schedule:{length}", limit)
        self._start = length
        self._lengths: dict[int, int] = {}

    def length(self, row: int) -> int:
        """The row's current length."""
        return self._lengths.get(row, self._start)

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """Change the row's length by the outcome of a round."""
        if drafted:
            length = self.length(row)
            self._lengths[row] = min(length + 2, self.limit) if accepted == drafted else max(length - 1, 1)

    def release(self, row: int) -> None:
        """Forget the row's length."""
        self._lengths.pop(row, None)


class Oracle(StopperBase):
    """Drafts up to the next token at which draft and target disagree in a recorded greedy run; for analysis.

    No stopper can need fewer target calls without discarding a token.

    Args:
        agreements: by request id, for each position of the output whether the draft's greedy token is the target's;
            a position without a record counts as a disagreement.
        limit: length of the longest chain.

    Source: SpecDec++, arXiv 2405.19715, Lemma 2.1.
    """

    def __init__(self, agreements: Mapping[int, Sequence[bool]], limit: int = MAX_LENGTH) -> None:
        super().__init__("oracle", limit)
        self._agreements = agreements
        self._emitted: dict[int, int] = {}

    def length(self, row: int) -> int:
        """Number of tokens before the next disagreement."""
        start = self._emitted.get(row, 0)
        ahead = list(self._agreements.get(row, ()))[start : start + self.limit]
        return ahead.index(False) if False in ahead else len(ahead)

    def observe(self, row: int, drafted: int, accepted: int) -> None:  # noqa: ARG002
        """Move forward by the emitted tokens: the accepted ones and the bonus token."""
        self._emitted[row] = self._emitted.get(row, 0) + accepted + 1

    def release(self, row: int) -> None:
        """Forget the row's position."""
        self._emitted.pop(row, None)
