"""The drafter `none`: plain decoding by the same engine, which is what speed-ups are measured against."""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.draft import Draft
from draftproof.drafters.base import DraftRequest
from draftproof.rng import RoundRng
from draftproof.stoppers.base import RoundTime


class NoDrafter:
    """Proposes nothing; every round is one target step."""

    name = "none"
    branching = False
    point_masses = False
    constant = True
    limit = 0
    max_positions = None
    timed = False
    reads_predictions = False
    stopper = None

    def propose(self, requests: Sequence[DraftRequest], rng: RoundRng) -> list[Draft]:  # noqa: ARG002
        """An empty draft for each request."""
        return [Draft.empty() for _ in requests]

    def observe(self, request_id: int, drafted: int, accepted: int) -> None:
        """Does nothing."""

    def spent(self, time: RoundTime) -> None:
        """Does nothing."""

    def release(self, request_id: int) -> None:
        """Does nothing."""
