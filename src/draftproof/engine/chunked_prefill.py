"""How much of a prompt is read in a round, so that the requests that are decoded beside it do not wait long."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

EXTRA = 0.6  # time of a round beyond a usual one, as a share of it
FIRST, LEAST, MOST = 8, 2, 512  # tokens
EVEN = 512  # tokens before one at which attending to them is taken to cost as much as all else of a token
REFRESH = 32  # rounds with chunks after which one without shows what a usual round takes
_WINDOW, _CHUNKS = 5, 15  # newest rounds that count: of each number of requests, and with chunks
_FLOOR = 0.02  # least time of a chunk, as a share of a usual round


class _Added(NamedTuple):
    """What a chunk has added to a round."""

    seconds: float  # for one token
    tokens: int
    depth: int  # tokens before it


class ChunkSize:
    """Chooses the number of prompt tokens that a round reads, by what rounds with and without them have taken.

    A usual round is one of as many requests as run: those whose prompts are read will soon make it as long. What a
    round takes without chunks is known for each number of tokens in the target's pass that was seen, one of each
    request and those that are drafted, and for others by the line through two of them. A token takes the median of what
    chunks have added to such rounds, where about as many tokens stood before those of the chunk; what was measured
    at another depth counts as if the cost grew evenly with it, and twice as high EVEN tokens deep as at the beginning.
    Drafting, which may take another time in each round, counts by itself. A round with a chunk may take the share
    `extra` of a usual one beyond it.
    """

    def __init__(self, extra: float = EXTRA) -> None:
        self._extra = extra
        self._usual: dict[int, deque[float]] = {}
        self._added: dict[int, deque[_Added]] = {}  # by the order of magnitude of the depth
        self._drafting: deque[float] = deque(maxlen=_WINDOW)
        self._since = 0

    def size(self, decoded: int, running: int, depth: int = 0) -> int:
        """Tokens for the next round, in which of `running` requests those `decoded` get tokens; `depth` are read."""
        if not self._added:
            return max(FIRST * EVEN // (EVEN + depth), LEAST)
        if self._since >= REFRESH:
            return 0
        room = (1 + self._extra) * self._round(running) - self._round(decoded)
        room += self._extra * statistics.median(self._drafting)
        figures = self._added[min(self._added, key=lambda each: abs(each - _magnitude(depth)))]
        token = _middle((each.seconds * (EVEN + depth) / (EVEN + each.depth), each.tokens) for each in figures)
        largest = max(each.tokens for each in figures)  # nothing is known of much larger ones
        return int(min(max(room / token, LEAST), 2 * largest, MOST))

    def record_time(self, seconds: float, tokens: int, others: int, drafting: float = 0.0, depth: int = 0) -> None:
        """Take in the time of a round, besides `drafting`.

        It has read `tokens` of prompts, which stand `depth` tokens deep on average. `others` are in the target's pass
        too: one for each request that was decoded, and what was drafted.
        """
        self._drafting.append(drafting)
        if not tokens:
            self._since = 0
            self._usual.setdefault(others, deque(maxlen=_WINDOW)).append(seconds)
            return
        self._since = self._since + 1 if self._since < REFRESH else 0  # the ends of prompts may come in any round
        if self._usual:
            usual = self._round(others)
            added = _Added(max(seconds - usual, _FLOOR * usual) / tokens, tokens, depth)
            self._added.setdefault(_magnitude(depth), deque(maxlen=_CHUNKS)).append(added)

    def _round(self, rows: int) -> float:
        """Seconds of a round without chunks; of more tokens than were seen, at most twice those of the most."""
        known = sorted(self._usual)
        place = min(max(bisect_left(known, rows), 1), len(known) - 1)
        below, above = (known[0], known[-1]) if rows > known[-1] else (known[place - 1], known[place])
        low, high = (statistics.median(self._usual[each]) for each in (below, above))
        if rows <= below or below == above:
            return low
        found = low + (high - low) * (rows - below) / (above - below)
        return found if rows <= above else min(max(found, high), 2 * high)


def _magnitude(depth: int) -> int:
    """Depths that count together: up to EVEN tokens, up to twice as many, and so on."""
    return (depth // EVEN).bit_length()


def _middle(figures: Iterable[tuple[float, int]]) -> float:
    """The median of figures, each of which counts as often as its second number says."""
    ordered = sorted(figures)
    left = sum(weight for _, weight in ordered) / 2
    for value, weight in ordered:
        left -= weight
        if left <= 0:
            return value
    return ordered[-1][0]
