"""Chunked prefill: how many prompt tokens a round reads, so that requests in decoding do not wait long."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

EXTRA = 0.6  # time of a round beyond a usual one, as a share of it
FIRST, LEAST, MOST = 8, 2, 512  # tokens
EVEN = 512  # depth at which attention is assumed to cost as much as everything else of a token
REFRESH = 32  # rounds with chunks after which one without shows what a usual round takes
_WINDOW, _CHUNKS = 5, 15  # newest rounds that count: of each number of requests, and with chunks
_FLOOR = 0.02  # least time of a chunk, as a share of a usual round


class _Added(NamedTuple):
    """The time that a chunk added to a round."""

    seconds: float  # for one token
    tokens: int
    depth: int  # tokens before it


class ChunkSize:
    """Chooses the number of prompt tokens of a round from the measured times of rounds with and without chunks.

    The reference is a usual round of all running requests, since those that read their prompts will soon be decoded
    too. The time of a round without chunks is known for each number of tokens in the target's pass that occurred (one
    for each request, plus drafted tokens), and interpolated linearly for others. The time of a prompt token is the
    median of what chunks added to such rounds at a similar depth. A figure from another depth is scaled: the cost is
    assumed to grow linearly with the depth, and to be twice as high at depth EVEN as at the beginning. Drafting time
    varies from round to round and is counted separately. A round with a chunk may take `extra` of a usual round longer.
    """

    def __init__(self, extra: float = EXTRA) -> None:
        self._extra = extra
        self._usual: dict[int, deque[float]] = {}
        self._added: dict[int, deque[_Added]] = {}  # by the order of magnitude of the depth
        self._drafting: deque[float] = deque(maxlen=_WINDOW)
        self._since = 0

    def size(self, decoded: int, running: int, depth: int = 0) -> int:
        """Chunk size for the next round, in which `decoded` of the `running` requests are decoded, at this depth."""
        if not self._added:
            return max(FIRST * EVEN // (EVEN + depth), LEAST)
        if self._since >= REFRESH:
            return 0
        room = (1 + self._extra) * self._round(running) - self._round(decoded)
        room += self._extra * statistics.median(self._drafting)
        figures = self._added[min(self._added, key=lambda each: abs(each - _magnitude(depth)))]
        token = _middle((each.seconds * (EVEN + depth) / (EVEN + each.depth), each.tokens) for each in figures)
        largest = max(each.tokens for each in figures)  # the cost of much larger chunks is unknown
        return int(min(max(room / token, LEAST), 2 * largest, MOST))

    def record_time(self, seconds: float, tokens: int, others: int, drafting: float = 0.0, depth: int = 0) -> None:
        """Record the time of a round, without its `drafting`.

        The round read `tokens` of prompts, at a mean depth of `depth`. The target's pass had `others` besides: one
        token for each decoded request, and the drafted ones.
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
        """Seconds of a round without chunks; beyond the largest measured size, at most twice the time of that size."""
        known = sorted(self._usual)
        place = min(max(bisect_left(known, rows), 1), len(known) - 1)
        below, above = (known[0], known[-1]) if rows > known[-1] else (known[place - 1], known[place])
        low, high = (statistics.median(self._usual[each]) for each in (below, above))
        if rows <= below or below == above:
            return low
        found = low + (high - low) * (rows - below) / (above - below)
        return found if rows <= above else min(max(found, high), 2 * high)


def _magnitude(depth: int) -> int:
    """The bucket of a depth: up to EVEN tokens, up to twice as many, and so on."""
    return (depth // EVEN).bit_length()


def _middle(figures: Iterable[tuple[float, int]]) -> float:
    """The weighted median of (figure, weight) pairs."""
    ordered = sorted(figures)
    left = sum(weight for _, weight in ordered) / 2
    for value, weight in ordered:
        left -= weight
        if left <= 0:
            return value
    return ordered[-1][0]
