"""The contract of a stopping rule.

Knows: what a stopper is asked and told. Does not know: any rule, drafter or model.

A stopper may look at everything drafted so far, the newest token included, and it may not throw that token away: what
was sampled is submitted. Then every lossless rule stays lossless; a rule that drops its last token is biased.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from draftproof.draft import DraftStep


@runtime_checkable
class Stopper(Protocol):
    """Decides after each drafted token whether its chain ends there."""

    @property
    def name(self) -> str:
        """Its name in Python, on the command line and in reports."""
        ...

    @property
    def limit(self) -> int:
        """Longest chain it lets pass."""
        ...

    @property
    def constant(self) -> bool:
        """Whether every chain has length `limit` (some rules need that)."""
        ...

    @property
    def needs_hidden(self) -> bool:
        """Whether it reads DraftStep.hidden."""
        ...

    def stop_after(self, step: DraftStep) -> bool:
        """Whether the row's chain ends with this token."""
        ...

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """Told after each round how much of a row's draft was accepted."""
        ...

    def release(self, row: int) -> None:
        """The row's request has ended; forget it (unknown rows are fine)."""
        ...
