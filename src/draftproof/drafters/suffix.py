"""Drafts without a model from every request seen so far: the most frequent continuation of the longest known suffix.

Knows: token ids of the running requests and of finished ones, as far as there is room. Does not know: models,
probabilities - its tokens are point masses; what it counts decides only how far to draft.

After SuffixDecoding (Oliaro et al., arXiv 2411.04975). It pays where requests resemble each other or themselves:
agents, self-refinement, code editing, many samples of one prompt.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence

from draftproof.draft import Draft
from draftproof.drafters.base import DraftRequest
from draftproof.drafters.ngram import point_chain
from draftproof.errors import UserError
from draftproof.rng import RoundRng

_START = -1  # the token before the first: where a short context ends, so that no context is the beginning of another


class SuffixDrafter:
    """Follows the longest suffix known from the request itself or from others, token by token.

    Each drafted token is the most frequent successor of the longest known suffix of what stands before it; at equal
    length a request's own tokens come first. A draft ends where nothing is known, where the product of the frequencies
    falls below `threshold`, or at `factor` times the length of the first match, plus one.

    Drafts depend on committed tokens only, so every rule that takes point masses stays exact - provided the tokens were
    not drawn with the very randomness that is to verify them. Two requests of one seed share their draws: the later one
    must not draft what the earlier one drew. A request that samples from a seed the user chose therefore reads its own
    tokens only, and is answered alike alone and in any company; greedy requests and requests without a seed read
    everything. Their law is the target's, and their draws depend on what ran before.

    Args:
        length: tokens to propose, 1 to 64.
        context: longest suffix looked for, in tokens.
        factor: how far to draft for each token matched.
        threshold: least estimated probability of a whole draft, 0 to 1.
        capacity: tokens of finished requests that are remembered, at about 400 bytes each; the oldest request is
            forgotten first, and whole.
        shared: whether requests learn from each other; without, each keeps to itself, as it must where the speed of an
            answer may not tell one user what another one wrote.

    Raises:
        UserError: a number out of range.
    """

    branching = False
    point_masses = True
    constant = False
    max_positions = None
    stopper = None

    def __init__(
        self,
        length: int = 16,
        *,
        context: int = 16,
        factor: float = 4.0,
        threshold: float = 0.1,
        capacity: int = 200_000,
        shared: bool = True,
    ) -> None:
        if not 1 <= length <= 64:
            raise UserError(f"suffix draft length is {length}: legal are 1 to 64")
        if not 1 <= context <= 64:
            raise UserError(f"suffix context is {context}: legal are 1 to 64 tokens")
        if not 0 <= factor < math.inf:
            raise UserError(f"suffix factor is {factor}: legal are 0 or more drafted tokens for each matched one")
        if not 0 <= threshold <= 1:
            raise UserError(f"suffix threshold is {threshold}: legal are probabilities, 0 to 1")
        if capacity < 0:
            raise UserError(f"suffix capacity is {capacity}: legal is 0 or more tokens")
        self.name = f"suffix:{length}"
        self.limit = length
        self._context, self._factor, self._threshold = context, factor, threshold
        self._memory = _FinishedRequests(context, capacity) if shared else None
        self._running: dict[int, _Row] = {}

    def propose(self, requests: Sequence[DraftRequest], rng: RoundRng) -> list[Draft]:  # noqa: ARG002
        """See Drafter; all requests are read before the first is drafted for."""
        rows = [self._running.setdefault(request.id, _Row()) for request in requests]
        for request, row in zip(requests, rows, strict=True):
            row.tokens = request.tokens
            self._read(row)
        return [
            point_chain(self._follow(request, row) if request.limit > 0 else [])
            for request, row in zip(requests, rows, strict=True)
        ]

    def _read(self, row: _Row) -> None:
        """Count what the request committed since the last time."""
        start = len(row.read)
        row.read.extend(row.tokens[start:])
        for key, token in _contexts(row.read, start, self._context):
            row.own.add(key, token)
            if self._memory is not None:
                self._memory.index.add(key, token)

    def _follow(self, request: DraftRequest, row: _Row) -> list[int]:
        """The draft: the best successor, and its best successor, and so on."""
        others = self._memory.index if self._memory is not None and _may_share(request) else None
        near = tuple(row.read[-self._context :][::-1])
        draft: list[int] = []
        likely, most = 1.0, min(self.limit, request.limit)
        while len(draft) < most:
            size, known = row.own.match(near)
            further, theirs = (0, None) if others is None else others.match(near)
            if further > size:
                size, known = further, theirs
            if known is None:
                break
            if not draft:
                most = min(most, int(self._factor * size) + 1)
            likely *= known.share
            if likely < self._threshold:
                break
            draft.append(known.best)
            near = (known.best, *near[: self._context - 1])
        return draft

    def observe(self, request_id: int, drafted: int, accepted: int) -> None:
        """Nothing to learn: what was committed says it all."""

    def release(self, request_id: int) -> None:
        """The request has ended: its tokens, those of its last round included, go to the memory of finished ones."""
        row = self._running.pop(request_id, None)
        if row is not None and self._memory is not None:
            self._read(row)
            self._memory.keep(row.read)


def _may_share(request: DraftRequest) -> bool:
    """Whether the verifier's draws for the request are certainly not those that drew the others' tokens."""
    params = request.transforms.params
    return params.seed is None or params.temperature == 0


class _Row:
    """A running request: its tokens, which grow, those of them that are counted, and an index of its own."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.read: list[int] = []
        self.own = _ContextTree()


class _FinishedRequests:
    """The index of all requests, running and finished, and which finished ones are still in it."""

    def __init__(self, context: int, capacity: int) -> None:
        self.index = _ContextTree()
        self.finished: deque[list[int]] = deque()
        self.size = 0
        self._context, self._capacity = context, capacity

    def keep(self, tokens: list[int]) -> None:
        """Remember a finished request, and forget the oldest ones when there are too many tokens."""
        self.finished.append(tokens)
        self.size += len(tokens)
        while self.size > self._capacity:
            oldest = self.finished.popleft()
            self.size -= len(oldest)
            for key, token in _contexts(oldest, 0, self._context):
                self.index.remove(key, token)


def _contexts(tokens: list[int], start: int, size: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Each token from `start` on, with the (at most) `size` tokens before it, newest first."""
    base = max(start - size, 0)
    back = tuple(tokens[base:][::-1]) + (() if base else (_START,))
    for place in range(max(start, 1), len(tokens)):
        newest = len(tokens) - place
        yield back[newest : newest + size], tokens[place]


class _ContextTree:
    """Which tokens followed each context of up to `size` tokens, and how often: a path-compressed tree of contexts.

    A context is written newest token first, so what followed its shorter suffixes stands on the way from the root; a
    token of text adds at most two nodes, whatever the size. Counts are exact under removal: the tree depends on the
    multiset of what it holds and not on what it once held. Only ties are broken by history: the latest token to reach
    the highest count wins.
    """

    def __init__(self) -> None:
        self.root: dict[int, _Node] = {}

    def add(self, key: tuple[int, ...], token: int) -> None:
        """Count a token after a context; contexts are never each other's beginning."""
        level: dict[int, _Node] | None = self.root
        at = 0
        while level is not None:
            node = level.get(key[at])
            if node is None:
                level[key[at]] = _Node(key[at:], token)
                return
            end = at + len(node.label)
            if key[at:end] != node.label:
                node = level[key[at]] = node.split(_common(node.label, key, at))
                end = at + len(node.label)
            node.add(token)
            at, level = end, node.children

    def remove(self, key: tuple[int, ...], token: int) -> None:
        """Undo one `add` of the same."""
        level: dict[int, _Node] | None = self.root
        above: dict[int, _Node] = {}
        at = up = 0
        while level is not None:
            node = level[key[at]]
            if node.total == 1:  # nobody else came here, so this is a leaf
                del level[key[at]]
                if len(level) == 1 and level is not self.root:
                    (last,) = level.values()
                    last.label = above[key[up]].label + last.label
                    above[key[up]] = last
                return
            node.remove(token)
            above, up = level, at
            at, level = at + len(node.label), node.children

    def match(self, near: tuple[int, ...]) -> tuple[int, _Node | None]:
        """How many of the nearest tokens are a known context, and what followed it; (0, None) when nothing did."""
        level: dict[int, _Node] | None = self.root
        found, at = None, 0
        while level is not None and at < len(near):
            node = level.get(near[at])
            if node is None:
                break
            found, end = node, at + len(node.label)
            if near[at:end] != node.label:
                return at + _common(node.label, near, at), found
            at, level = end, node.children
        return at, found


class _Node:
    """Contexts that occurred at the same places: the tokens they add to the node above, and what followed them.

    Attributes:
        label: the tokens from the node above to here.
        children: nodes below by the first token of their label; None for a leaf.
        total: how often a token followed.
        best: the one that did most often.
        counts: how often each did; None while there is but one.
    """

    __slots__ = ("best", "children", "counts", "label", "total")

    def __init__(self, label: tuple[int, ...], token: int) -> None:
        self.label = label
        self.children: dict[int, _Node] | None = None
        self.total = 1
        self.best = token
        self.counts: dict[int, int] | None = None

    @property
    def share(self) -> float:
        """Of all that followed, how much the best makes."""
        return 1.0 if self.counts is None else self.counts[self.best] / self.total

    def add(self, token: int) -> None:
        """Count a token."""
        self.total += 1
        if self.counts is None:
            if token == self.best:
                return
            self.counts = {self.best: self.total - 1}
        self.counts[token] = self.counts.get(token, 0) + 1
        if self.counts[token] >= self.counts[self.best]:
            self.best = token

    def remove(self, token: int) -> None:
        """Count a token no longer."""
        self.total -= 1
        if self.counts is None:
            return
        self.counts[token] -= 1
        if not self.counts[token]:
            del self.counts[token]
        if token == self.best:
            self.best = max(self.counts, key=self.counts.__getitem__)
        if len(self.counts) == 1:
            self.counts = None

    def split(self, size: int) -> _Node:
        """A node for the first tokens of the label, above this one, which keeps the rest."""
        upper = _Node(self.label[:size], self.best)
        upper.total = self.total
        upper.counts = None if self.counts is None else dict(self.counts)
        upper.children = {self.label[size]: self}
        self.label = self.label[size:]
        return upper


def _common(label: tuple[int, ...], tokens: tuple[int, ...], at: int) -> int:
    """How many tokens of a label stand at a place."""
    for size, token in enumerate(label[: len(tokens) - at]):
        if tokens[at + size] != token:
            return size
    return min(len(label), len(tokens) - at)
