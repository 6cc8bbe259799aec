"""A feature head as a draft model: its target reads the first feed of a session, the head reads all later tokens.

A draft of the head begins at a target's last state. In a session opened here, the first feed is taken as the committed
tokens, and all later tokens as drafted ones. So code that reads or samples from a draft model also works with a
feature head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from draftproof.backends.base import Feed, FeedOutput
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.heads.base import FollowingSession
from draftproof.backends.heads.feature_head import FeatureBackend
from draftproof.backends.heads.feature_net import FeatureNet


class _Followed(FollowingSession):
    """A head's session that owns the target's."""

    def close(self) -> None:
        """Release both slots."""
        super().close()
        self.owner.close()


class StandaloneHead(FeatureBackend):
    """A feature head as a model of its own, which reads chains."""

    def __init__(self, target: SlotBackend, net: FeatureNet) -> None:
        super().__init__(target, net)
        self._target = target
        self.capabilities = replace(self.capabilities, trees=False)

    def open(self) -> FollowingSession:
        """A session whose draft begins where its first feed ends."""
        return _Followed(self._cache, self._target.open())

    def forward(self, feeds: Sequence[Feed], *, hidden: bool = False) -> list[FeedOutput]:
        """Read every feed: rows for the last chain token of each, and for the nodes of a chain below it.

        Raises:
            ValueError: nothing to read, or a tree that branches.
        """
        if any(feed.tree is not None and not feed.tree.is_chain for feed in feeds):
            raise ValueError("a feature head that reads by itself reads chains only")
        self._begin([feed for feed in feeds if not feed.session.length])
        found = [[output] for output in super().forward([replace(feed, tree=None) for feed in feeds], hidden=hidden)]
        drafted = [() if feed.tree is None else feed.tree.ids for feed in feeds]
        for place in range(max(map(len, drafted), default=0)):
            active = [row for row, tokens in enumerate(drafted) if place < len(tokens)]
            read = super().forward([Feed(feeds[row].session, [drafted[row][place]]) for row in active], hidden=hidden)
            for row, output in zip(active, read, strict=True):
                found[row].append(output)
        return [_joined(parts) for parts in found]

    def _begin(self, feeds: Sequence[Feed]) -> None:
        """Let the target read the first tokens of new sessions, except the last one, which the head reads."""
        sessions = [feed.session for feed in feeds if len(feed.tokens) > 1 and isinstance(feed.session, _Followed)]
        parts = [feed.tokens[:-1] for feed in feeds if len(feed.tokens) > 1]
        if sessions:
            self._target.forward([Feed(each.owner, part) for each, part in zip(sessions, parts, strict=True)])


def _joined(parts: Sequence[FeedOutput]) -> FeedOutput:
    states = [part.hidden for part in parts if part.hidden is not None]
    logits = torch.cat([part.logits for part in parts])
    return FeedOutput(logits, torch.cat(states) if states else None, parts[0].ids)
