"""The contract of a drafter.

Knows: what a drafter is asked and told. Does not know: any drafter, rule or the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from draftproof.backends.base import Session
from draftproof.draft import Draft
from draftproof.rng import RoundRng
from draftproof.sampling import Transforms
from draftproof.stoppers.base import Stopper


@dataclass(frozen=True)
class DraftRequest:
    """What a drafter learns about one row.

    Attributes:
        id: names the request for as long as it lives.
        tokens: prompt and committed tokens; do not change.
        prompt_length: how many of them are the prompt.
        limit: longest chain that is of use this round; 0 asks for nothing.
        transforms: the request's sampling parameters, to be applied to the draft as well.
        session: what the target has read of it, for drafters that share the target's cache.
    """

    id: int
    tokens: list[int]
    prompt_length: int
    limit: int
    transforms: Transforms
    session: Session | None = None


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens for the rows of a batch."""

    @property
    def name(self) -> str:
        """Its name in Python, on the command line and in reports."""
        ...

    @property
    def branching(self) -> bool:
        """Whether its drafts may branch."""
        ...

    @property
    def point_masses(self) -> bool:
        """Whether its tokens come without probabilities."""
        ...

    @property
    def constant(self) -> bool:
        """Whether its drafts have one constant length (limits of requests aside)."""
        ...

    @property
    def limit(self) -> int:
        """Deepest draft it makes; 0 for none."""
        ...

    @property
    def max_positions(self) -> int | None:
        """Longest sequence it can draft for; None when unbounded."""
        ...

    @property
    def stopper(self) -> Stopper | None:
        """What ends its drafts; None where it has no stopper."""
        ...

    def propose(self, requests: Sequence[DraftRequest], rng: RoundRng) -> list[Draft]:
        """A draft for each request; a row that wants or gets none has an empty draft."""
        ...

    def observe(self, request_id: int, drafted: int, accepted: int) -> None:
        """Told after each round how deep a row's draft went, and how much of it was accepted."""
        ...

    def release(self, request_id: int) -> None:
        """The request has ended; forget it (unknown ids are fine)."""
        ...
