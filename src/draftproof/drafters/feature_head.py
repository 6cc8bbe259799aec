"""Drafts from a feature head: one small layer that continues the target's own last hidden states.

Knows: how a draft's session follows the target's. Does not know: where states come from, how chains grow.

In a request's first round the target has read nothing, so nothing is drafted; from then on every round starts from the
states that the last verification left behind (EAGLE, arXiv 2401.15077).
"""

from __future__ import annotations

from draftproof.backends.base import Session, unread
from draftproof.backends.feature_head import FeatureBackend, FeatureSession
from draftproof.backends.feature_net import FeatureNet
from draftproof.backends.slots import SlotBackend
from draftproof.drafters.base import Drafter, DraftRequest
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.sampled_tree import SampledTreeDrafter
from draftproof.stoppers.base import Stopper


class FeatureModel(DraftModel):
    """A feature head as a draft model.

    Args:
        target: the target's backend.
        net: the head, made for this target.
        temperature: of the draft, when it shall differ from the request's.
        top_k: of the draft, when it shall differ from the request's.

    Raises:
        UserError: a head that was made for another target; a temperature or top_k out of range.
    """

    def __init__(
        self, target: SlotBackend, net: FeatureNet, *, temperature: float | None = None, top_k: int | None = None
    ) -> None:
        self._backend = FeatureBackend(target, net)
        super().__init__(self._backend, vocab_size=target.vocab_size, temperature=temperature, top_k=top_k)

    @property
    def covers(self) -> bool:
        """False: in a request's first round there is nothing to draft from, so drafts vary in length."""
        return False

    def depth(self, request: DraftRequest, limit: int) -> int:
        """As for any draft model; 0 until the target has read all but the last token."""
        return super().depth(request, limit) if limit and self._settled(request) >= len(request.tokens) - 1 else 0

    def open(self, request: DraftRequest) -> Session:
        """The request's session, rolled back to what was read with the target's states."""
        self._settled(request)
        found = self._sessions.get(request.id)
        if found is None:
            found = self._sessions[request.id] = self._backend.follow(_owner(request))
        assert isinstance(found, FeatureSession), "made here"
        found.rewind()
        return found

    @staticmethod
    def _settled(request: DraftRequest) -> int:
        """Roll the target's session back to what is committed; returns how many states it holds."""
        owner = _owner(request)
        unread(owner, request.tokens)
        return owner.stem if owner.records else 0


def _owner(request: DraftRequest) -> Session:
    assert request.session is not None, "the engine hands over the target's session"
    return request.session


def feature_drafter(model: FeatureModel, stopper: Stopper, *, chains: int = 1) -> Drafter:
    """A drafter of one chain, or of K i.i.d. chains, from a feature head.

    Raises:
        UserError: chains out of range, or a stopper that needs hidden states of another width.
    """
    made: ModelDrafter | SampledTreeDrafter = (
        ModelDrafter(model, stopper) if chains == 1 else SampledTreeDrafter(model, stopper, chains=chains)
    )
    made.name = "feature_head" + (f":x{chains}" if chains > 1 else "")
    return made
