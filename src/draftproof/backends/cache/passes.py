"""The division of a call's feeds into forward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from draftproof.backends.base import Feed, FeedOutput

PREFILL_CHUNK = 512
PACKED = 2048  # tokens of a pass without padding: more would take much memory, and gain nothing
PASS = 32  # positions that take as long to read as the weights do (two CPU cores, SmolLM2-135M in bfloat16)
_Value = TypeVar("_Value")


@contextmanager
def during(variable: ContextVar[_Value | None], value: _Value) -> Iterator[None]:
    """While this is open, a variable of this thread has a value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def in_passes(
    feeds: Sequence[Feed],
    run: Callable[[Sequence[Feed]], list[FeedOutput]],
    *,
    ragged: bool = True,
    packed: bool = False,
    chunk: int = PREFILL_CHUNK,
) -> list[FeedOutput]:
    """Outputs of feeds read in several passes: long prompts one by one in chunks, then groups of similar length.

    `run` reads feeds in one pass. Rows that begin or end at different positions share it only where it may be `ragged`;
    where it is `packed`, rows of any lengths do, without padding.
    """
    left = []
    for feed in feeds:
        tokens = feed.tokens
        while len(tokens) > chunk:
            run([Feed(feed.session, tokens[:chunk])])
            feed.session.keep(feed.session.length)  # the beginning of a prompt stays
            tokens = tokens[chunk:]
        left.append(Feed(feed.session, tokens, feed.tree))
    outputs: dict[int, FeedOutput] = {}
    lengths = [len(feed) for feed in left]
    for group in _groups(left, lengths, ragged=ragged, packed=packed):
        outputs |= zip(group, run([left[row] for row in group]), strict=True)
    return [outputs[row] for row in range(len(left))]


def _groups(feeds: Sequence[Feed], lengths: Sequence[int], *, ragged: bool, packed: bool) -> list[list[int]]:
    if packed:
        return _up_to(PACKED, lengths)
    return similar_lengths(lengths) if ragged else _equal_positions(feeds)


def _up_to(most: int, lengths: Sequence[int]) -> list[list[int]]:
    """Rows in groups of not much more than so many tokens, in order."""
    groups: list[list[int]] = [[]]
    size = 0
    for row, length in enumerate(lengths):
        if groups[-1] and size + length > most:
            groups.append([])
            size = 0
        groups[-1].append(row)
        size += length
    return groups


def _equal_positions(feeds: Sequence[Feed]) -> list[list[int]]:
    """Rows in groups that begin and end at the same positions."""
    groups: dict[tuple[int, int], list[int]] = {}
    for row, feed in enumerate(feeds):
        groups.setdefault((feed.session.length, len(feed)), []).append(row)
    return list(groups.values())


def similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Rows in groups that take the least time to read if every row is padded to the longest of its group.

    A pass over the weights counts as PASS positions. The rows of a group are in ascending order.
    """
    if max(lengths, default=0) * len(lengths) - sum(lengths) <= PASS:
        return [list(range(len(lengths)))]
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    best: list[tuple[int, int]] = [(0, 0)]  # for the first rows in order: least cost, and where the last group begins
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        best.append(min((best[begin][0] + PASS + (end - begin) * longest, begin) for begin in range(end)))
    groups, end = [], len(order)
    while end:
        begin = best[end][1]
        groups.append(sorted(order[begin:end]))
        end = begin
    return groups[::-1]
