"""The drafters `early_exit` and `quantized`: the target drafts for itself, in its own cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import override

from draftproof.backends.base import Session, unread
from draftproof.backends.heads.self_draft import SelfDraftBackend
from draftproof.drafters.base import Drafter, DraftRequest
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.sampled_tree import chains_drafter
from draftproof.stoppers.base import Outlook, Stopper


class SelfDraftModel(DraftModel):
    """A smaller form of the target as a draft model; every round starts from the target's own cache.

    `name` is the drafter's; `temperature` and `top_k` as in `DraftModel`.
    """

    def __init__(
        self, part: SelfDraftBackend, name: str, *, temperature: float | None = None, top_k: int | None = None
    ) -> None:
        self.name = name
        self.stationary = part.stationary
        self._part = part
        super().__init__(part, vocab_size=part.vocab_size, temperature=temperature, top_k=top_k)

    def open(self, request: DraftRequest) -> Session:
        """A session in the target's slot; first rolls the target's session back to the committed tokens."""
        assert request.session is not None, "the engine passes the target's session"
        unread(request.session, request.tokens)
        return self._part.borrow(request.session)

    @override
    def outlook(self, request: DraftRequest) -> Outlook:
        return replace(super().outlook(request), unread=0)  # the target reads for both

    def read(self, requests: Sequence[DraftRequest]) -> None:
        """Does nothing: the target reads for both."""

    def ended(self, request_id: int, tokens: list[int]) -> None:
        """Does nothing: the session is the target's."""


def self_drafter(model: SelfDraftModel, stopper: Stopper, *, chains: int = 1) -> Drafter:
    """A drafter of one chain, or of K i.i.d. chains, from a smaller form of the target."""
    name = model.name + (f"x{chains}" if chains > 1 else "")
    return chains_drafter(model, stopper, chains=chains, name=name)
