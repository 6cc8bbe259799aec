"""Drafts from the first layers of the target itself: no second model, no second cache, nothing to catch up on.

Knows: how a draft's session follows from the target's. Does not know: how layers are cut off, how chains grow.
"""

from __future__ import annotations

from typing import cast

from draftproof.backends.base import Session, unread
from draftproof.backends.early_exit import EarlyExitBackend
from draftproof.backends.slots import SlotBackend
from draftproof.drafters.base import Drafter, DraftRequest
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.sampled_tree import SampledTreeDrafter
from draftproof.stoppers.base import Stopper


class EarlyExitModel(DraftModel):
    """The first layers of the target as a draft model; every round it starts where the target stands.

    Args:
        target: the target's backend.
        layers: how many of its layers draft.
        temperature: of the draft, when it shall differ from the request's.
        top_k: of the draft, when it shall differ from the request's.

    Raises:
        UserError: a number of layers, temperature or top_k out of range.
    """

    def __init__(
        self, target: SlotBackend, layers: int, *, temperature: float | None = None, top_k: int | None = None
    ) -> None:
        self.layers = layers
        backend = EarlyExitBackend(target, layers)
        super().__init__(backend, vocab_size=target.vocab_size, temperature=temperature, top_k=top_k)

    def open(self, request: DraftRequest) -> Session:
        """A session in the target's slot, after rolling the target's back to what is committed."""
        assert request.session is not None, "the engine hands over the target's session"
        unread(request.session, request.tokens)
        return cast("EarlyExitBackend", self.backend).borrow(request.session)


def early_exit_drafter(model: EarlyExitModel, stopper: Stopper, *, chains: int = 1) -> Drafter:
    """A drafter of one chain, or of K i.i.d. chains, from the first layers of the target.

    Raises:
        UserError: chains out of range, or a stopper that needs hidden states of another width.
    """
    made: ModelDrafter | SampledTreeDrafter = (
        ModelDrafter(model, stopper) if chains == 1 else SampledTreeDrafter(model, stopper, chains=chains)
    )
    made.name = f"early_exit:{model.layers}" + (f"x{chains}" if chains > 1 else "")
    return made
