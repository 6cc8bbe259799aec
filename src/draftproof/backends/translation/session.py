"""What a draft model with another vocabulary has read, in the target's tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from draftproof.backends.base import Feed, Session, common_prefix, unread
from draftproof.backends.translation.token_map import TokenMap
from draftproof.tree import TokenTree


class TranslatedSession(Session):
    """Tokens of the target, and a session of the draft model for what they are translated to.

    The draft model's session is brought up to date by `unread` when something is read, so a rollback changes nothing
    in it.
    """

    def __init__(self, tokens: TokenMap, inner: Session) -> None:
        super().__init__()
        self.inner = inner
        self._map = tokens
        self._known: list[int] = []  # tokens that `_ids` translates; the first i of them end at `_ends[i]`
        self._ids: list[int] = []
        self._ends = [0]

    def _translate(self, tokens: list[int]) -> list[int]:
        known = common_prefix(self._known, tokens)
        del self._ids[self._ends[known] :]
        del self._ends[known + 1 :]
        for place in range(known, len(tokens)):
            found = self._map.spelled(tokens[place])
            if not place and found != self._map.opening:
                self._ids.extend(self._map.opening)
            self._ids.extend(found)
            self._ends.append(len(self._ids))
        self._known = tokens
        return self._ids

    def feed(self, feed: Feed) -> Feed:
        """What the draft model reads where this session reads `feed`: that, and what it has not read before it.

        The output has a row for each node, and at least one for a chain; the last rows are those of `feed`.
        """
        chain = feed.tokens.tolist() if isinstance(feed.tokens, Tensor) else list(feed.tokens)
        translated = self._translate(self.tokens[: self.stem] + chain)
        known = 0 if feed.tree is None else feed.tree.known
        left: list[int] = []
        if chain or len(self.inner.tail) != known or self.inner.tokens[: self.inner.stem] != translated:
            left = unread(self.inner, translated)
        return Feed(self.inner, left, None if feed.tree is None else self._nodes(feed.tree))

    def _nodes(self, tree: TokenTree) -> TokenTree:
        """The same tree with one token of the draft model in each node: the last one that writes it."""
        ids = [self._map.spelled(each)[-1] for each in tree.ids]
        return TokenTree(torch.tensor(ids, device=tree.tokens.device), tree.parents, tree.known)

    @override
    def fork(self, length: int) -> Session | None:
        """The draft model may have to read a part again."""
        inner = self.inner.fork(self.inner.reach(self._read(length)))
        if inner is None:
            return None
        made = TranslatedSession(self._map, inner)
        made._tokens = self.tokens[:length]
        made._length = length
        return made

    def _read(self, length: int) -> int:
        """Slots of the draft model's session that hold what the first tokens are translated to."""
        translated = self._translate(self.tokens[: self.stem])
        return common_prefix(self.inner.tokens[: self.inner.stem], translated[: self._ends[length]])

    @property
    def nbytes(self) -> int:
        """Memory of the draft model's session, in bytes."""
        return self.inner.nbytes

    @override
    def trim(self) -> None:
        self.inner.keep(self._read(self.stem))
        self.inner.trim()

    def close(self) -> None:
        """Release the draft model's session."""
        self.inner.close()
