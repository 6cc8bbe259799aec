"""A predicted text, which an answer is expected to repeat, and the position of the answer in it.

Its tokens are drafted as point masses. OpenAI's API calls this a predicted output; an edited file, for example, mostly
repeats the file before the edit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

_NEAREST = 32  # occurrences to compare on each side when the answer has left the text


@lru_cache(maxsize=4)
def _places(tokens: tuple[int, ...]) -> dict[int, list[int]]:
    """The positions after each token of a text; cached for all requests with the same text."""
    found: dict[int, list[int]] = defaultdict(list)
    for place, token in enumerate(tokens):
        found[token].append(place + 1)
    return dict(found)


class PredictedText:
    """Follows an answer through its predicted text; matching runs are compared up to `longest` tokens.

    The answer is expected to begin like the text. Where it departs, it continues after the longest run of the text that
    equals the end of the answer so far; among equal runs, after the nearest one, and among equally near ones after the
    later one.
    """

    def __init__(self, tokens: Sequence[int], longest: int) -> None:
        self._tokens = tuple(tokens)
        self._longest = longest
        self._after = _places(self._tokens)
        self._place = 0
        self.matched = longest  # length of the run before the position; the beginning counts as a longest run

    def read(self, answer: Sequence[int], start: int) -> None:
        """Follow the tokens of an answer from `start` on."""
        for end in range(start + 1, len(answer) + 1):
            if self._place < len(self._tokens) and self._tokens[self._place] == answer[end - 1]:
                self._place += 1
                self.matched = min(self.matched + 1, self._longest)
            else:
                self._find(answer[max(end - self._longest, 0) : end])

    def following(self, most: int) -> list[int]:
        """Up to `most` tokens that come next in the text; none if the answer has left it."""
        return list(self._tokens[self._place : self._place + most]) if self.matched else []

    def _find(self, tail: Sequence[int]) -> None:
        """Find the position after these last tokens of the answer; without a match the old position is remembered."""
        places = self._after.get(tail[-1], [])
        middle = bisect_left(places, self._place)
        near = places[max(middle - _NEAREST, 0) : middle + _NEAREST]
        found = [(self._run(place, tail), -abs(place - self._place), place) for place in near]
        self.matched, _, place = max(found, default=(0, 0, self._place))
        self._place = place

    def _run(self, place: int, tail: Sequence[int]) -> int:
        """Number of tokens before a position that equal the end of the answer."""
        size = 0
        while size < min(place, len(tail)) and self._tokens[place - 1 - size] == tail[-1 - size]:
            size += 1
        return size
