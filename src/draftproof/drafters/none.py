"""No drafts: plain decoding as a composition of the same engine, so that a speed-up is measured against ourselves.

Knows: nothing. Does not know: anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.draft import Draft
from draftproof.drafters.base import DraftRequest
from draftproof.rng import RoundRng


class NoDrafter:
    """Proposes nothing; every round is one target step."""

    name = "none"
    branching = False
    point_masses = False
    constant = True
    limit = 0
    max_positions = None
    stopper = None

    def propose(self, requests: Sequence[DraftRequest], rng: RoundRng) -> list[Draft]:  # noqa: ARG002
        """Empty drafts."""
        return [Draft.empty() for _ in requests]

    def observe(self, request_id: int, drafted: int, accepted: int) -> None:
        """Nothing to learn."""

    def release(self, request_id: int) -> None:
        """Nothing to forget."""
