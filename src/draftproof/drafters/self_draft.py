"""The drafter `early_exit`: the first layers of the target draft, with the target's weights and in its cache."""

from __future__ import annotations

from typing import cast

from draftproof.backends.base import Session, unread
from draftproof.backends.early_exit import EarlyExitBackend
from draftproof.backends.slots import SlotBackend
from draftproof.drafters.base import Drafter, DraftRequest
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.sampled_tree import chains_drafter
from draftproof.stoppers.base import Stopper


class EarlyExitModel(DraftModel):
    """The first layers of the target as a draft model; every round starts from the target's own cache.

    Args:
        target: the target's backend.
        layers: number of layers that draft.
        temperature: temperature of the draft; None for the request's.
        top_k: top_k of the draft; None for the request's.

    Raises:
        UserError: the number of layers, the temperature or top_k is out of range.
    """

    def __init__(
        self, target: SlotBackend, layers: int, *, temperature: float | None = None, top_k: int | None = None
    ) -> None:
        self.layers = layers
        backend = EarlyExitBackend(target, layers)
        super().__init__(backend, vocab_size=target.vocab_size, temperature=temperature, top_k=top_k)

    def open(self, request: DraftRequest) -> Session:
        """A session in the target's slot, after rolling the target's session back to the committed tokens."""
        assert request.session is not None, "the engine passes the target's session"
        unread(request.session, request.tokens)
        return cast("EarlyExitBackend", self.backend).borrow(request.session)


def early_exit_drafter(model: EarlyExitModel, stopper: Stopper, *, chains: int = 1) -> Drafter:
    """A drafter of one chain, or of K i.i.d. chains, from the first layers of the target.

    Raises:
        UserError: the number of chains is out of range, or the stopper needs hidden states of another width.
    """
    name = f"early_exit:{model.layers}" + (f"x{chains}" if chains > 1 else "")
    return chains_drafter(model, stopper, chains=chains, name=name)
