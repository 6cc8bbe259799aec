"""Prediction layers in a row: the first one drafts the first token, the next one reads its states and drafts the next.

Each layer has its own keys and values of the whole text. Layer k reads pairs of a token and the state that layer k - 1
made one token before, so its session follows the session of layer k - 1, without the first token of that one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from draftproof.backends.base import Feed, FeedOutput, Session, unread
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.heads.base import FollowingSession, HeadBackend, HeadSession, TargetHead


class StepsSession(HeadSession):
    """The tokens of a request, and what each layer has read of them."""

    def __init__(self, inner: Sequence[FollowingSession]) -> None:
        super().__init__()
        self.inner = list(inner)
        # number of tokens that were read before the draft; None before the first feed of a round
        self.root: int | None = None

    def rewind(self) -> None:
        """Begin a round; what differs from the committed tokens is read again by each layer when it is asked."""
        self.root = None

    def close(self) -> None:
        """Release the layers' slots."""
        for session in self.inner:
            session.close()


class StepsBackend(TargetHead):
    """Prediction layers as a draft model: as many tokens as layers, each by its own one.

    Args:
        layers: each over the states of the one before, without the first token of its session.
    """

    def __init__(self, target: SlotBackend, layers: Sequence[HeadBackend], name: str) -> None:
        first = layers[0]
        super().__init__(target, name, width=first.net.width, layers=first.layers, trees=False)
        self._layers = layers
        self.deepest = len(layers)

    @override
    def follow(self, owner: Session) -> StepsSession:
        inner: list[FollowingSession] = []
        for layer in self._layers:
            inner.append(layer.follow(inner[-1] if inner else owner))
        return StepsSession(inner)

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], *, hidden: bool = False) -> list[FeedOutput]:
        """Read every feed by the layer whose turn it is.

        Raises:
            ValueError: nothing to read, a tree, or more drafted tokens than layers.
        """
        turns: dict[int, list[int]] = {}
        for row, feed in enumerate(feeds):
            session = feed.session
            assert isinstance(session, StepsSession), "these layers read sessions of their own"
            if feed.tree is not None and len(feed.tree):
                raise ValueError(f"{self.name} reads chains only")
            session.read(feed.tokens)
            if session.root is None:
                session.root = session.stem
            turn = session.stem - session.root
            if turn >= len(self._layers):
                raise ValueError(f"{self.name} drafts {len(self._layers)} tokens at most")
            turns.setdefault(turn, []).append(row)
        outputs: dict[int, FeedOutput] = {}
        for turn, rows in turns.items():
            asked = [self._feed(feeds[row].session, turn) for row in rows]
            outputs |= zip(rows, self._layers[turn].forward(asked, hidden=hidden), strict=True)
        return [outputs[row] for row in range(len(feeds))]

    @staticmethod
    def _feed(session: Session, turn: int) -> Feed:
        assert isinstance(session, StepsSession), "checked before"
        inner = session.inner[turn]
        return Feed(inner, unread(inner, session.tokens[turn:]))
