"""The drafter `feature_head`: one small trained layer that continues the target's own last hidden states.

In the first round of a request the target has not read anything, so nothing is drafted. Every later round starts from
the hidden states of the last verification (EAGLE, arXiv 2401.15077).
"""

from __future__ import annotations

from draftproof.backends.base import Session, unread
from draftproof.backends.feature_head import FeatureBackend, FeatureSession
from draftproof.backends.feature_net import FeatureNet
from draftproof.backends.slots import SlotBackend
from draftproof.drafters.base import Drafter, DraftRequest
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.sampled_tree import chains_drafter
from draftproof.stoppers.base import Stopper


class FeatureModel(DraftModel):
    """A feature head as a draft model.

    Args:
        target: the target's backend.
        net: the head, trained for this target.
        temperature: temperature of the draft; None for the request's.
        top_k: top_k of the draft; None for the request's.
        bits: of quantized weights of the head; None for weights of the target's dtype.

    Raises:
        UserError: the head was trained for another target, the temperature or top_k is out of range, or the head cannot
            be quantized here.
    """

    steady = False  # in the next round it reads the target's states of the tokens that were accepted

    def __init__(
        self,
        target: SlotBackend,
        net: FeatureNet,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        bits: int | None = None,
    ) -> None:
        self._backend = FeatureBackend(target, net, bits)
        super().__init__(self._backend, vocab_size=target.vocab_size, temperature=temperature, top_k=top_k)

    @property
    def covers(self) -> bool:
        """False: nothing is drafted in a request's first round, so the length is not constant."""
        return False

    def depth(self, request: DraftRequest, limit: int) -> int:
        """See DraftModel; 0 until the target has read all but the last token."""
        return super().depth(request, limit) if limit and self._roll_back(request) >= len(request.tokens) - 1 else 0

    def open(self, request: DraftRequest) -> Session:
        """The request's session, rolled back to the tokens that were read with the target's states."""
        self._roll_back(request)
        found = self._sessions.get(request.id)
        if found is None:
            found = self._sessions[request.id] = self._backend.follow(_owner(request))
        assert isinstance(found, FeatureSession), "made here"
        found.rewind()
        return found

    def ended(self, request_id: int, tokens: list[int]) -> None:
        """Nothing is kept: a head reads a text again in a small part of the target's time."""

    @staticmethod
    def _roll_back(request: DraftRequest) -> int:
        """Roll the target's session back to the committed tokens; return the number of states in it."""
        owner = _owner(request)
        unread(owner, request.tokens)
        return owner.stem if owner.records else 0


def _owner(request: DraftRequest) -> Session:
    assert request.session is not None, "the engine passes the target's session"
    return request.session


def feature_drafter(model: FeatureModel, stopper: Stopper, *, chains: int = 1) -> Drafter:
    """A drafter of one chain, or of K i.i.d. chains, from a feature head.

    Raises:
        UserError: the number of chains is out of range, or the stopper needs hidden states of another width.
    """
    name = "feature_head" + (f":x{chains}" if chains > 1 else "")
    return chains_drafter(model, stopper, chains=chains, name=name)
