"""Heads that draft all tokens in one pass: the rows of all places are computed at once, and handed out by depth.

The row of a place does not depend on the tokens that are drafted before it, so a chain, several chains and their tree
all read the same rows. Some heads correct a row by those tokens when they hand it out.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from draftproof.backends.base import Feed, FeedOutput, Session
from draftproof.backends.cache.layout import feed_depths
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.heads.base import HeadSession, TargetHead


class ParallelLogits(NamedTuple):
    """Rows of logits for all places after the last committed token, and the states that they were computed from."""

    logits: Float[Tensor, "places ids"]
    states: Float[Tensor, "places dim"]


class FeedRows(NamedTuple):
    """What a feed gets."""

    # logits, states: rows of `ParallelLogits`, the logits corrected by the drafted tokens where a head does that
    logits: Float[Tensor, "rows ids"]
    states: Float[Tensor, "rows dim"]
    accepted: Float[Tensor, " rows"] | None = None  # see `FeedOutput`


class ParallelSession(HeadSession):
    """The tokens of a request, and the rows of this round.

    Args:
        inner: what the head itself has read, where it has a cache.
    """

    def __init__(self, owner: Session, inner: Session | None = None) -> None:
        super().__init__()
        self.owner = owner
        self.inner = inner
        self.places: ParallelLogits | None = None  # the rows; None before the first feed of a round
        self.root = 0  # number of tokens that were read before the draft

    def rewind(self) -> None:
        """Forget the rows of the last round, and what was drafted."""
        self.places = None
        self.keep(min(self.root, self.stem))

    def depths(self, feed: Feed) -> list[int]:
        """How many drafted tokens come before each row that a feed of drafted tokens asks for."""
        drafted = self.stem + len(feed.tokens) - self.root
        return ([drafted] if len(feed.tokens) else []) + [drafted + depth for depth in feed_depths(feed)]

    def rows(self, depths: Sequence[int]) -> FeedRows:
        """The rows of places with so many drafted tokens before them."""
        assert self.places is not None, "computed with the first feed of a round"
        return FeedRows(self.places.logits[depths], self.places.states[depths])

    def paths(self, rows: int) -> list[list[int]]:
        """The tokens before each of the last rows, from the last committed one on."""
        stem, tail = self.tokens[self.root - 1 : self.stem], self.tokens[self.stem :]
        found = []
        for last in range(len(tail) - rows, len(tail)):
            path, node = [], last
            while node >= 0:
                path.append(tail[node])
                node = self.tail[node]
            found.append(stem + path[::-1])
        return found

    def close(self) -> None:
        """Release the head's own slot."""
        if self.inner is not None:
            self.inner.close()


class ParallelHeadBackend(TargetHead):
    """A head that drafts all tokens in one pass; subclasses compute the rows.

    Args:
        places: number of tokens that are drafted.
        ids: the tokens that it can draft, ascending; None for all.
    """

    def __init__(
        self,
        target: SlotBackend,
        name: str,
        *,
        places: int,
        width: int,
        layers: tuple[int, ...] = (),
        ids: Int[Tensor, " ids"] | None = None,
    ) -> None:
        super().__init__(target, name, width=width, layers=layers)
        self._ids = ids
        self.deepest = places

    @override
    def follow(self, owner: Session) -> ParallelSession:
        return ParallelSession(owner)

    @abstractmethod
    def _compute(self, sessions: Sequence[ParallelSession]) -> list[ParallelLogits]:
        """The rows of all places after the tokens of each session, in one pass."""

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], *, hidden: bool = False) -> list[FeedOutput]:
        """Read committed tokens, and compute the rows of all places; or drafted tokens, whose rows are there.

        Raises:
            ValueError: nothing to read, or more drafted tokens than the head has places.
        """
        sessions = [feed.session for feed in feeds if isinstance(feed.session, ParallelSession)]
        assert len(sessions) == len(feeds), "a head reads sessions of its own"
        asked: list[list[int]] = []
        fresh = []
        for session, feed in zip(sessions, feeds, strict=True):
            asked.append([0] if session.places is None else session.depths(feed))
            if asked[-1][-1:] and max(asked[-1]) >= (self.deepest or 0):
                raise ValueError(f"{self.name} drafts {self.deepest} tokens at most")
            session.read(feed.tokens, feed.tree)
            if session.places is None:
                fresh.append(session)
        for session, places in zip(fresh, self._compute(fresh) if fresh else [], strict=True):
            session.places = places
            session.root = session.stem
        rows = self._rows(sessions, asked)
        return [FeedOutput(row.logits, row.states if hidden else None, self._ids, row.accepted) for row in rows]

    def _rows(self, sessions: Sequence[ParallelSession], asked: Sequence[list[int]]) -> list[FeedRows]:
        """Rows of each session with so many drafted tokens before them; here they depend on the number only."""
        return [session.rows(depths) for session, depths in zip(sessions, asked, strict=True)]
