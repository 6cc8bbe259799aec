"""Texts that an output never completes, as token sequences: encoded once, and found by the tokens before the last one.

Thousands of them cost no more in a round than a few: the sequences are a tree that is read backwards from the end of
the output, so that a step looks only at those that agree with it so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby

from draftproof.errors import UserError


@dataclass(slots=True)
class _Node:
    """Tokens at the end of an output: what would complete a sequence, and by the token before them the next node."""

    ends: tuple[int, ...] = ()
    before: dict[int, tuple[tuple[int, ...], _Node]] = field(default_factory=dict)


class BadWords:
    """Token sequences, each of one token or more, that no output completes."""

    def __init__(self, sequences: Sequence[Sequence[int]] = ()) -> None:
        self.sequences = tuple(dict.fromkeys(tuple(each) for each in sequences))  # each once
        self.single = tuple(sorted(each[0] for each in self.sequences if len(each) == 1))  # illegal anywhere
        longer = [each for each in self.sequences if len(each) > 1]
        self.several = bool(longer)
        self.longest = max(map(len, longer), default=1) - 1  # tokens before the last one that have to be known
        ids = set(chain.from_iterable(self.sequences))
        self.bounds = (min(ids), max(ids)) if ids else None
        self._root = _tree(longer)

    def __bool__(self) -> bool:
        return bool(self.sequences)

    def completing(self, output_ids: Sequence[int], path: Sequence[int] = ()) -> list[int]:
        """Tokens that would complete a sequence of several tokens after an output and a path below it."""
        seen = (*output_ids[-self.longest :], *path)
        node, place, found = self._root, len(seen), list[int]()
        while place and (step := node.before.get(seen[place - 1])) is not None:
            tokens, node = step
            place -= 1 + len(tokens)
            if place < 0 or seen[place : place + len(tokens)] != tokens:
                break
            found += node.ends
        return found


def _tree(sequences: Sequence[tuple[int, ...]]) -> _Node:
    """The sequences without their last tokens, backwards."""
    ends: dict[tuple[int, ...], list[int]] = {}
    for each in sequences:
        ends.setdefault(each[-2::-1], []).append(each[-1])
    root = _Node()
    left = [(root, 0, sorted(ends))]
    while left:  # sequences may be long, so this is no recursion
        node, depth, keys = left.pop()
        if keys and len(keys[0]) == depth:
            node.ends = tuple(ends[keys[0]])
            keys = keys[1:]
        for token, group in groupby(keys, key=lambda key, depth=depth: key[depth]):  # type: ignore[misc]
            same = list(group)
            size = _shared(same[0], same[-1], depth + 1)  # of all of them, as they are sorted
            child = _Node()
            node.before[token] = (same[0][depth + 1 : size][::-1], child)
            left.append((child, size, same))
    return root


def _shared(one: Sequence[int], other: Sequence[int], known: int) -> int:
    """How many tokens two sequences begin with together; `known` of them are."""
    most = min(len(one), len(other))
    while known < most and one[known] == other[known]:
        known += 1
    return known


def bad_word_ids(words: Sequence[str], encode: Callable[[str], Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
    """Token sequences of each word as it stands and after a space, where that starts with another token."""
    if words and encode is None:
        raise UserError(f"bad_words: expected none, because there is no tokenizer, got {len(words)} texts")
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        assert encode is not None, "checked above"
        bare, spaced = (tuple(encode(space + word.lstrip(" "))) for space in ("", " "))
        if not bare and not spaced:
            raise UserError(f"bad_words: expected texts of one token or more, got {word[:80]!r}, which encodes to none")
        found |= {ids: None for ids in (bare, spaced) if ids and (ids is bare or ids[0] not in bare[:1])}
    return tuple(found)
