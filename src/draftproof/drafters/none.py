"""The drafter `none`: plain decoding by the same engine, the baseline of all speed-ups."""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.draft import Draft
from draftproof.drafters.base import DraftRequest, TokenDrafter
from draftproof.rng import RoundRng


class NoDrafter(TokenDrafter):
    """Proposes nothing; every round is one step of plain decoding."""

    name = "none"
    point_masses = False
    constant = True
    limit = 0

    def propose(self, requests: Sequence[DraftRequest], rng: RoundRng) -> list[Draft]:  # noqa: ARG002
        """An empty draft for each request."""
        return [Draft.empty() for _ in requests]
