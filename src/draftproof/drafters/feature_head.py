"""The drafter `feature_head`: one small trained layer that continues the target's own last hidden states."""

from __future__ import annotations

from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.heads.feature_head import FeatureBackend
from draftproof.backends.heads.feature_net import FeatureNet
from draftproof.drafters.base import Drafter
from draftproof.drafters.head import FollowingModel, following_drafter
from draftproof.stoppers.base import Stopper


class FeatureModel(FollowingModel):
    """A feature head as a draft model.

    Args:
        target: the target's backend.
        net: the head, trained for this target.
        temperature: temperature of the draft; None for the request's.
        top_k: top_k of the draft; None for the request's.
        bits: of quantized weights of the head; None for weights of the target's dtype.
    """

    def __init__(
        self,
        target: SlotBackend,
        net: FeatureNet,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        bits: int | None = None,
    ) -> None:
        super().__init__(FeatureBackend(target, net, bits), target, temperature=temperature, top_k=top_k)


def feature_drafter(model: FeatureModel, stopper: Stopper, *, chains: int = 1) -> Drafter:
    """A drafter of one chain, or of K i.i.d. chains, from a feature head."""
    return following_drafter(model, stopper, "feature_head", chains=chains)
