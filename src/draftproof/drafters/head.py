"""Heads on the target's hidden states as draft models: the common part of `feature_head` and the published formats.

In the first round of a request the target has not read anything, so nothing is drafted. Every later round starts from
the hidden states of the last verification (EAGLE, arXiv 2401.15077).
"""

from __future__ import annotations

from typing_extensions import override

from draftproof.backends.base import Session, unread
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.heads.base import HeadSession, TargetHead
from draftproof.drafters.base import Drafter, DraftRequest
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.sampled_tree import chains_drafter
from draftproof.stoppers.base import Stopper


class HeadDraftModel(DraftModel):
    """A head of this target as a draft model; `temperature` and `top_k` as in `DraftModel`."""

    stationary = False  # in the next round it reads the target's states of the accepted tokens instead of its own

    def __init__(
        self, head: TargetHead, target: SlotBackend, *, temperature: float | None = None, top_k: int | None = None
    ) -> None:
        self._head = head
        super().__init__(head, vocab_size=target.vocab_size, temperature=temperature, top_k=top_k)

    @property
    def full_vocabulary(self) -> bool:
        """False: nothing is drafted in a request's first round, so the length is not constant."""
        return False

    @override
    def depth(self, request: DraftRequest, limit: int) -> int:
        """0 until the target has read all but the last token."""
        most = super().depth(request, limit)
        if not most or len(request.tokens) < 2 - self._head.back:
            return 0
        if self._roll_back(request) < len(request.tokens) - 1:
            return 0
        return most if self._head.deepest is None else min(most, self._head.deepest)

    def open(self, request: DraftRequest) -> Session:
        """The request's session, rolled back to the tokens that it read with the target's states."""
        self._roll_back(request)
        found = self._sessions.get(request.id)
        if found is None:
            found = self._sessions[request.id] = self._head.follow(_owner(request))
        assert isinstance(found, HeadSession), "made by the head"
        found.rewind()
        return found

    def ended(self, request_id: int, tokens: list[int]) -> None:
        """Keeps nothing: a head reads a text again in a small part of the target's time."""

    @override
    def unread(self, session: Session, request: DraftRequest) -> list[int]:
        return unread(session, request.tokens[1 - self._head.back :])

    def _roll_back(self, request: DraftRequest) -> int:
        """Roll the target's session back to the committed tokens; return how many of them have recorded states."""
        owner = _owner(request)
        unread(owner, request.tokens)
        return owner.recorded(self._head.layers)


def _owner(request: DraftRequest) -> Session:
    assert request.session is not None, "the engine passes the target's session"
    return request.session


def head_drafter(model: HeadDraftModel, stopper: Stopper, name: str, *, chains: int = 1) -> Drafter:
    """A drafter of one chain, or of K i.i.d. chains, from a head."""
    return chains_drafter(model, stopper, chains=chains, name=name + (f":x{chains}" if chains > 1 else ""))
