"""The drafter `suffix`: the most frequent continuation of the longest known suffix, from all requests so far.

It needs no model. It stores the tokens of running requests, and of finished ones up to a capacity. Its tokens are point
masses; the stored counts only decide how many tokens to draft.

Source: SuffixDecoding (Oliaro et al., arXiv 2411.04975). It helps if requests resemble each other or repeat
themselves: agents, self-refinement, code editing, many samples of one prompt.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from draftproof.draft import Draft, Origin
from draftproof.drafters.base import DraftRequest, TokenDrafter
from draftproof.drafters.ngram import point_chain
from draftproof.drafters.predicted import PredictedText
from draftproof.errors import UserError, blamed_on, refuse_outside
from draftproof.rng import RoundRng

_START = -1  # precedes the first token and ends short contexts, so that no context is a prefix of another one
# From a request's id and the length of its match: how many tokens are useful. None: all.
Worth = Callable[[int, int], int] | None


class SuffixDrafter(TokenDrafter):
    """Follows the longest known suffix, from the request itself or from other requests, token by token.

    Each drafted token is the most frequent successor of the longest known suffix of the tokens before it; of two
    suffixes with the same length, the one from the request's own tokens is used. A draft ends if no suffix is known,
    if the product of the relative frequencies falls below `threshold`, or after 1 + `factor` times the length of the
    first match.

    Drafts depend on committed tokens only, so every rule that accepts point masses stays exact, under one condition:
    the drafted tokens must not have been drawn with the random numbers that verify them. Two requests with the same
    seed have the same random numbers, so the later one must not draft tokens of the earlier one. Therefore a request
    that samples with a user's seed drafts from its own tokens only, and its answer is the same alone and in any batch.
    Greedy requests and requests without a seed draft from all requests: their output distribution is the target's, but
    the sampled text depends on earlier requests.

    Args:
        length: number of tokens to propose, 1 to 64.
        context: length of the longest suffix to look for, in tokens, 1 to 64.
        factor: number of tokens to draft for each matched token.
        threshold: smallest estimated probability of a whole draft, 0 to 1.
        capacity: number of tokens of finished requests to remember, at about 400 bytes each; the oldest request is
            forgotten first, completely.
        shared: whether requests with the same `cache_salt` draft from each other's tokens, if both `share_text`.
            Drafts, and so the speed of an answer, reveal what another request wrote.
    """

    reads_predictions = True

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
        refuse_outside("suffix draft length", length, 1, 64)
        refuse_outside("suffix context", context, 1, 64, " tokens")
        if not 0 <= factor < math.inf:
            raise UserError(f"suffix factor: expected 0 or more drafted tokens for each matched one, got {factor}")
        refuse_outside("suffix threshold", threshold, 0, 1)
        if capacity < 0:
            raise UserError(f"suffix capacity: expected 0 or more tokens, got {capacity}")
        self.name = f"suffix:{length}"
        self.limit = length
        self._context = context
        self._factor = factor
        self._threshold = threshold
        self._memory = _FinishedRequests(context, capacity) if shared else None
        self._running: dict[int, _Indexed] = {}

    def propose(self, requests: Sequence[DraftRequest], rng: RoundRng) -> list[Draft]:  # noqa: ARG002
        """For each request, a chain of point masses: the likeliest continuation of its last tokens."""
        return [point_chain(found.tokens, found.origin) for found in self.matches(requests)]

    def matches(self, requests: Sequence[DraftRequest], worth: Worth = None) -> list[SuffixMatch]:
        """The match of each request's last tokens; all requests are read before the first match is made."""
        rows = [self._row(request) for request in requests]
        for row in rows:
            self._read(row)
        return [
            self._best(request, row, worth) if request.limit > 0 else SuffixMatch([], 0)
            for request, row in zip(requests, rows, strict=True)
        ]

    def extend(self, request: DraftRequest, path: Sequence[int], worth: Worth = None) -> SuffixMatch:
        """The match after the request's tokens and a drafted path below them; it depends on nothing else."""
        row = self._row(request)
        self._read(row)
        found, predicted = self._follow(request, row, worth, path), row.predicted
        if predicted is None or predicted.matched + len(path) < found.matched:
            return found
        most = min(self.limit, request.limit - len(path))
        tokens = predicted.following(len(path) + most)
        if tokens[: len(path)] != list(path) or len(tokens) == len(path):
            return found
        return SuffixMatch(tokens[len(path) :], min(predicted.matched + len(path), self._context), Origin.PREDICTION)

    def _row(self, request: DraftRequest) -> _Indexed:
        if request.id not in self._running:
            predicted = PredictedText(request.prediction, self._context) if request.prediction else None
            index = None
            if self._memory is not None and request.share_text:
                index = self._memory.index(request.cache_salt)
            self._running[request.id] = _Indexed(request.prompt_length, predicted, index)
        row = self._running[request.id]
        row.tokens = request.tokens
        return row

    def _best(self, request: DraftRequest, row: _Indexed, worth: Worth) -> SuffixMatch:
        """Tokens forced by the grammar; else the predicted text or a known suffix, whichever matches more tokens."""
        constraint = request.transforms.constraint
        forced: list[int] = []
        if constraint is not None:
            with blamed_on(request.id):
                forced = constraint.forced(request.tokens[request.prompt_length :])
        if forced:
            return SuffixMatch(forced[: min(self.limit, request.limit)], self._context, Origin.GRAMMAR)
        found, predicted = self._follow(request, row, worth), row.predicted
        if predicted is None or predicted.matched < found.matched:
            return found
        most = min(self.limit, request.limit, int(self._factor * predicted.matched) + 1)
        tokens = predicted.following(most)
        return SuffixMatch(tokens, predicted.matched, Origin.PREDICTION) if tokens else found

    def _read(self, row: _Indexed) -> None:
        """Index the tokens that the request committed since the last call."""
        start = len(row.read)
        row.read.extend(row.tokens[start:])
        for key, token in _contexts(row.read, start, self._context):
            row.own.add(key, token)
            if row.shared is not None:
                row.shared.add(key, token)
        if row.predicted is not None and len(row.read) > row.prompt_length:
            row.predicted.read(row.read[row.prompt_length :], max(start - row.prompt_length, 0))

    def _follow(self, request: DraftRequest, row: _Indexed, worth: Worth, path: Sequence[int] = ()) -> SuffixMatch:
        """Follow the most frequent successors, token by token; the result has the length of the first match."""
        others = row.shared if _may_share(request) else None
        near = tuple([*row.read[-self._context :], *path][-self._context :][::-1])
        draft: list[int] = []
        likely, most, matched = 1.0, min(self.limit, request.limit - len(path)), 0
        while len(draft) < most:
            size, known = row.own.match(near)
            further, theirs = (0, None) if others is None else others.match(near)
            if further > size:
                size, known = further, theirs
            if known is None:
                break
            if not draft:
                matched = size
                most = min(most, int(self._factor * size) + 1, self.limit if worth is None else worth(request.id, size))
                if not most:
                    break
            likely *= known.share
            if likely < self._threshold:
                break
            draft.append(known.best)
            near = (known.best, *near[: self._context - 1])
        return SuffixMatch(draft, matched)

    def release(self, request_id: int) -> None:
        """Move the tokens of an ended request, its last round included, to the finished requests."""
        row = self._running.pop(request_id, None)
        if row is not None and row.shared is not None and self._memory is not None:
            self._read(row)
            self._memory.keep(row.read, row.shared)


def _may_share(request: DraftRequest) -> bool:
    """Whether the request's random numbers certainly differ from those that drew other requests' tokens."""
    params = request.transforms.params
    return params.seed is None or params.temperature == 0


@dataclass(frozen=True)
class SuffixMatch:
    """The result of a lookup: tokens to draft, and the length of the known suffix that they follow.

    The tokens are from known text, from the request's prediction, or forced by its grammar (`origin`).
    """

    tokens: list[int]
    matched: int
    origin: Origin = Origin.LOOKUP


class _Indexed:
    """A running request: its tokens, those that are indexed, its own index, and its predicted text."""

    def __init__(self, prompt_length: int, predicted: PredictedText | None, shared: _ContextTree | None) -> None:
        self.prompt_length = prompt_length
        self.predicted = predicted
        self.shared = shared
        self.tokens: list[int] = []
        self.read: list[int] = []
        self.own = _ContextTree()


class _FinishedRequests:
    """One index of running and finished requests for each salt, and the finished requests that are still indexed."""

    def __init__(self, context: int, capacity: int) -> None:
        self.finished: deque[tuple[_ContextTree, list[int]]] = deque()
        self.size = 0
        self._context = context
        self._capacity = capacity
        # An index lives as long as a request in it does, running or finished.
        self._indexes: WeakValueDictionary[str, _ContextTree] = WeakValueDictionary()

    def index(self, salt: str) -> _ContextTree:
        """The index of the requests with this salt; a new one where there are none."""
        found = self._indexes.get(salt)
        if found is None:
            found = self._indexes[salt] = _ContextTree()
        return found

    def keep(self, tokens: list[int], index: _ContextTree) -> None:
        """Add a finished request, and remove the oldest ones while there are too many tokens."""
        self.finished.append((index, tokens))
        self.size += len(tokens)
        while self.size > self._capacity:
            index, oldest = self.finished.popleft()
            self.size -= len(oldest)
            for key, token in _contexts(oldest, 0, self._context):
                index.remove(key, token)


def _contexts(tokens: list[int], start: int, size: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Pairs of context and token for each token from `start` on; contexts have up to `size` tokens, newest first."""
    base = max(start - size, 0)
    back = tuple(tokens[base:][::-1]) + (() if base else (_START,))
    for place in range(max(start, 1), len(tokens)):
        newest = len(tokens) - place
        yield back[newest : newest + size], tokens[place]


class _ContextTree:
    """How often each token followed each context of up to `size` tokens: a path-compressed tree of contexts.

    A context is stored with its newest token first, so the counts of its shorter suffixes are on the path from the
    root. Each token of text adds at most two nodes, for any size. Counts stay exact after a removal: the tree depends
    only on the contexts that are in it now, and not on removed ones. Only ties depend on history: the token that
    reached the highest count last wins.
    """

    def __init__(self) -> None:
        self.root: dict[int, _ContextNode] = {}

    def add(self, key: tuple[int, ...], token: int) -> None:
        """Count a token after a context; no context is a prefix of another one."""
        level: dict[int, _ContextNode] | None = self.root
        at = 0
        while level is not None:
            node = level.get(key[at])
            if node is None:
                level[key[at]] = _ContextNode(key[at:], token)
                return
            end = at + len(node.label)
            if key[at:end] != node.label:
                node = level[key[at]] = node.split(_common(node.label, key, at))
                end = at + len(node.label)
            node.add(token)
            at, level = end, node.children

    def remove(self, key: tuple[int, ...], token: int) -> None:
        """Undo one `add` of the same context and token."""
        level: dict[int, _ContextNode] | None = self.root
        above: dict[int, _ContextNode] = {}
        at = up = 0
        while level is not None:
            node = level[key[at]]
            if node.total == 1:  # this was the only context here, so the node is a leaf
                del level[key[at]]
                if len(level) == 1 and level is not self.root:
                    (last,) = level.values()
                    last.label = above[key[up]].label + last.label
                    above[key[up]] = last
                return
            node.remove(token)
            above, up = level, at
            at, level = at + len(node.label), node.children

    def match(self, near: tuple[int, ...]) -> tuple[int, _ContextNode | None]:
        """Length of the longest known context among the nearest tokens, and its node; (0, None) without one."""
        level: dict[int, _ContextNode] | None = self.root
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


class _ContextNode:
    """Contexts that occurred at the same places: the tokens they add to the parent node, and what followed them."""

    __slots__ = ("best", "children", "counts", "label", "total")

    def __init__(self, label: tuple[int, ...], token: int) -> None:
        self.label = label  # the tokens from the parent node to this one
        # the child nodes by the first token of their label; None for a leaf
        self.children: dict[int, _ContextNode] | None = None
        self.total = 1  # how often any token followed
        self.best = token  # the token that followed most often
        self.counts: dict[int, int] | None = None  # how often each token followed; None while there is only one

    @property
    def share(self) -> float:
        """Relative frequency of the most frequent token."""
        return 1.0 if self.counts is None else self.counts[self.best] / self.total

    def add(self, token: int) -> None:
        self.total += 1
        if self.counts is None:
            if token == self.best:
                return
            self.counts = {self.best: self.total - 1}
        self.counts[token] = self.counts.get(token, 0) + 1
        if self.counts[token] >= self.counts[self.best]:
            self.best = token

    def remove(self, token: int) -> None:
        """Undo one `add` of the same token."""
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

    def split(self, size: int) -> _ContextNode:
        """Make a parent node with the first tokens of the label; this node keeps the rest."""
        upper = _ContextNode(self.label[:size], self.best)
        upper.total = self.total
        upper.counts = None if self.counts is None else dict(self.counts)
        upper.children = {self.label[size]: self}
        self.label = self.label[size:]
        return upper


def _common(label: tuple[int, ...], tokens: tuple[int, ...], at: int) -> int:
    """Length of the common prefix of a label and the tokens from a position on."""
    for size, token in enumerate(label[: len(tokens) - at]):
        if tokens[at + size] != token:
            return size
    return min(len(label), len(tokens) - at)
