"""A text that a request's answer is expected to repeat, and where in it the answer stands.

Its tokens are drafted as point masses. It is what OpenAI's API calls a predicted output: an edited file is mostly the
file before the edit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

_NEAREST = 32  # occurrences that are looked at on each side, when the answer has departed from the text


@lru_cache(maxsize=4)
def _places(tokens: tuple[int, ...]) -> dict[int, list[int]]:
    """The places after each token of a text: found once for all prompts and continuations that have the same text."""
    found: dict[int, list[int]] = defaultdict(list)
    for place, token in enumerate(tokens):
        found[token].append(place + 1)
    return dict(found)


class PredictedText:
    """Follows an answer through the text that was predicted for it; runs are compared up to `longest` tokens.

    The answer is expected to begin as the text does. Where it departs, the place after the longest run of tokens that
    also ends the answer so far is taken; of several such places the one that is nearest to the last one, and of two
    that are as near the later one.
    """

    def __init__(self, tokens: Sequence[int], longest: int) -> None:
        self._tokens = tuple(tokens)
        self._longest = longest
        self._after = _places(self._tokens)
        self._place = 0
        self.matched = longest  # the length of the run before the place; the beginning is trusted as much as any

    def read(self, answer: Sequence[int], start: int) -> None:
        """Follow the tokens of an answer from `start` on."""
        for end in range(start + 1, len(answer) + 1):
            if self._place < len(self._tokens) and self._tokens[self._place] == answer[end - 1]:
                self._place += 1
                self.matched = min(self.matched + 1, self._longest)
            else:
                self._find(answer[max(end - self._longest, 0) : end])

    def following(self, most: int) -> list[int]:
        """Up to `most` tokens that come next in the text; none where the answer is not in it."""
        return list(self._tokens[self._place : self._place + most]) if self.matched else []

    def _find(self, tail: Sequence[int]) -> None:
        """Find the place of the answer whose last tokens these are; without one the last place is kept in mind."""
        places = self._after.get(tail[-1], [])
        middle = bisect_left(places, self._place)
        near = places[max(middle - _NEAREST, 0) : middle + _NEAREST]
        found = [(self._run(place, tail), -abs(place - self._place), place) for place in near]
        self.matched, _, place = max(found, default=(0, 0, self._place))
        self._place = place

    def _run(self, place: int, tail: Sequence[int]) -> int:
        """How many tokens before a place are also the last ones of the answer."""
        size = 0
        while size < min(place, len(tail)) and self._tokens[place - 1 - size] == tail[-1 - size]:
            size += 1
        return size
