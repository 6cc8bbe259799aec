"""P-EAGLE heads in the layout of `speculators`: an EAGLE-3 head that drafts all tokens in one pass.

After the committed tokens come masked places: a mask token, and one learned vector in place of the states. Each
sees the committed tokens and the masked places before it; the row of each is that of one drafted token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from draftproof.backends.base import Feed, Session, unread
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.cache.slot_cache import SlotCache
from draftproof.backends.heads.base import FollowingSession, HeadBackend, PrecedingStates
from draftproof.backends.heads.published.eagle3 import Eagle3Net
from draftproof.backends.heads.published.files import cast, mask_token_of, places_of, read_head
from draftproof.backends.heads.published.parallel import ParallelHeadBackend, ParallelLogits, ParallelSession
from draftproof.tree import TokenTree


class _MaskedSession(FollowingSession):
    """What the head has read of a sequence; the nodes of a feed are masked places.

    Args:
        mask: the state before every masked place.
    """

    def __init__(self, cache: SlotCache, owner: Session, layers: tuple[int, ...], mask: Float[Tensor, "1 dim"]) -> None:
        super().__init__(cache, owner, layers, back=0)
        self._mask = mask

    def above(self, feed: Feed) -> PrecedingStates:
        found = super().above(Feed(feed.session, feed.tokens))
        nodes = 0 if feed.tree is None else len(feed.tree)
        return found._replace(own=self._mask.expand(nodes, -1)) if nodes else found


class _MaskedBackend(HeadBackend):
    """The head as a model that reads committed tokens and masked places."""

    def __init__(self, target: SlotBackend, net: Eagle3Net, name: str, mask: Float[Tensor, "1 inner"]) -> None:
        super().__init__(target, net, name, back=0)
        self._mask = net.fuse(mask)

    def follow(self, owner: Session) -> FollowingSession:
        return _MaskedSession(self._cache, owner, self.layers, self._mask)


class PEagleBackend(ParallelHeadBackend):
    """A P-EAGLE head over the target it was made for."""

    def __init__(self, source: str, target: SlotBackend) -> None:
        files = read_head(source, "peagle")
        token = mask_token_of(files, files.config.get("mask_token_id"), target)
        net = Eagle3Net(files, target)
        mask = cast(files.take("mask_hidden", [1, 1, None]), target)[0]
        files.refuse_left()
        self._model = _MaskedBackend(target, net, f"peagle head {source}", mask)
        places = places_of(files)
        self._masks = TokenTree.chain(torch.full((places - 1,), token, device=target.device))
        super().__init__(target, self._model.name, places=places, width=net.width, layers=net.layers, ids=net.ids)

    @override
    def follow(self, owner: Session) -> ParallelSession:
        return ParallelSession(owner, self._model.follow(owner))

    def _compute(self, sessions: Sequence[ParallelSession]) -> list[ParallelLogits]:
        feeds = []
        for session in sessions:
            inner = session.inner
            assert isinstance(inner, FollowingSession), "made here"
            inner.rewind()
            feeds.append(Feed(inner, unread(inner, session.tokens), self._masks))
        outputs = self._model.forward(feeds, hidden=True)
        for feed in feeds:
            assert isinstance(feed.session, FollowingSession), "made here"
            feed.session.rewind()
        return [ParallelLogits(out.logits, out.hidden) for out in outputs if out.hidden is not None]
