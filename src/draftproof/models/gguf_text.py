"""What the library `tokenizers` cannot express of llama.cpp's rules for texts: whole tokens, ties of scores, bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

SPACE = "\u2581"  # a blank, in tokens that are not byte-level
_BLANKS = " \t\n\v\f\r"  # what C takes for blanks
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_LINES = re.compile(r"(\n+)")
_SHOWN = (*range(33, 127), *range(161, 173), *range(174, 256))  # bytes that byte-level tokens write as themselves
BYTES = {chr(each): each for each in _SHOWN} | {
    chr(256 + place): each for place, each in enumerate(sorted({*range(256)} - {*_SHOWN}))
}
"""The byte that a letter of a byte-level token stands for."""


@dataclass(frozen=True)
class Whole:
    """A token that is found in a text before it is split, and whether blanks beside it belong to it."""

    text: str
    token: int
    blanks_before: bool = False
    blanks_after: bool = False


class Wholes:
    """Finds whole tokens in texts as llama.cpp does: everywhere the one of most bytes, then the next one."""

    def __init__(self, tokens: Iterable[Whole]) -> None:
        self._tokens = sorted(tokens, key=lambda each: (-len(each.text.encode()), each.token))

    def parts(self, text: str) -> list[str | int]:
        """A text as whole tokens and the texts between them, of which none is empty."""
        found: list[str | int] = [text] if text else []
        for each in self._tokens:
            if each.text in text:
                found = [piece for part in found for piece in _around(each, part)]
        return found

    @property
    def special(self) -> bool:
        """Whether they are other than tokens of which the first one in a text counts, and of those the longest.

        So it is where one may begin inside another one, or where blanks belong to one. Tokens of one letter alone, such
        as line ends, do not count: of a run the longest ones are taken from its beginning by either rule.
        """
        if any(each.blanks_before or each.blanks_after for each in self._tokens):
            return True
        texts = [each.text for each in self._tokens]
        firsts, lasts = {text[0] for text in texts}, {text[-1] for text in texts}
        before = [text for text in texts if not firsts.isdisjoint(text[1:])]
        after = [text for text in texts if not lasts.isdisjoint(text[:-1])]
        return any(len(set(one + two)) > 1 and _meet(one, two) for one in before for two in after)


def _around(each: Whole, part: str | int) -> list[str | int]:
    if isinstance(part, int):
        return [part]
    found: list[str | int] = []
    start = 0
    while (at := part.find(each.text, start)) >= 0:
        left, start = part[start:at], at + len(each.text)
        left = left.rstrip(_BLANKS) if each.blanks_before else left
        while each.blanks_after and start < len(part) and part[start] in _BLANKS:
            start += 1
        found += [left, each.token] if left else [each.token]
    return [*found, part[start:]] if start < len(part) else found


def _meet(one: str, two: str) -> bool:
    """Whether the end of a text, but not all of it, is the beginning of another one, but not all of that."""
    return any(one.endswith(two[:size]) for size in range(1, min(len(one), len(two))))


class Scored:
    """SentencePiece's tokens by scores: of neighbours that are a token together, those with the best score are joined.

    Of equal scores the first ones in the text come first.

    Args:
        scores: of each token, by id.
    """

    def __init__(self, vocab: Mapping[str, int], scores: Sequence[float]) -> None:
        self._vocab = vocab
        self._scores = scores
        self._bytes = [vocab.get(f"<0x{byte:02X}>") for byte in range(256)]

    def ids(self, text: str) -> list[int]:
        """The tokens of a text in which blanks are `SPACE`; what is no token is bytes."""
        symbols, after = list(text), [*range(1, len(text)), -1]
        before = [*range(-1, len(text) - 1)]
        queue: list[tuple[float, int, int, str]] = []
        for left in range(len(text) - 1):
            self._add(queue, symbols, left, left + 1)
        heapify(queue)
        while queue:
            _, left, right, joined = heappop(queue)
            if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != joined:
                continue
            symbols[left], symbols[right] = joined, ""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            self._add(queue, symbols, before[left], left)
            self._add(queue, symbols, left, after[left])
        found: list[int] = []
        for symbol in filter(None, symbols):
            token = self._vocab.get(symbol)
            known = [self._bytes[byte] for byte in symbol.encode()] if token is None else [token]
            found += [each for each in known if each is not None]
        return found

    def _add(self, queue: list[tuple[float, int, int, str]], symbols: Sequence[str], left: int, right: int) -> None:
        if left < 0 or right < 0:
            return
        joined = symbols[left] + symbols[right]
        token = self._vocab.get(joined)
        if token is not None:
            heappush(queue, (-self._scores[token], left, right, joined))


@dataclass(frozen=True)
class TextRules:
    """How texts become tokens and tokens texts, beyond what the library's tokenizer does.

    Attributes:
        piece: the bytes of a token.
        hidden: tokens that are in no text without special tokens.
        prefixed: whether a text begins with a blank in its tokens; texts of tokens are without it.
        wholes: None where the library finds whole tokens as llama.cpp does, and there is no other rule.
        scored: the rule of scores, where some are equal.
        lines: line ends that are a token together though no merges make it.
    """

    piece: Callable[[int], bytes]
    hidden: frozenset[int]
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    prefixed: bool = False
    wholes: Wholes | None = None
    scored: Scored | None = None
    lines: Mapping[str, int] | None = None

    def ids(self, text: str, plain: Callable[[str], list[int]]) -> list[int]:
        """The tokens of a text without those at its ends; `plain` are those of a text by the library."""
        if self.wholes is None:
            return plain(text)
        found: list[int] = []
        for part in self.wholes.parts(text):
            found += [part] if isinstance(part, int) else self._between(part, plain)
        return found

    def _between(self, text: str, plain: Callable[[str], list[int]]) -> list[int]:
        if self.scored is not None:
            return self.scored.ids((SPACE * self.prefixed + text).replace(" ", SPACE))
        if not self.lines:
            return plain(text)
        found: list[int] = []
        for line in filter(None, _LINES.split(text)):
            found += [self.lines[line]] if line in self.lines else plain(line)
        return found

    def text(self, tokens: Iterable[int], *, skip: bool) -> str:
        """The text of tokens; bytes that are no character are replaced."""
        content = b"".join(self.piece(each) for each in tokens if not (skip and each in self.hidden))
        found = content.decode(errors="replace")
        return found.removeprefix(" ") if self.prefixed else found


def byte_level_piece(text: str) -> bytes:
    """The bytes of a byte-level token; of one with other letters its text, where llama.cpp writes an error."""
    found = [BYTES.get(letter) for letter in text]
    return text.encode() if None in found else bytes(each for each in found if each is not None)


def byte_piece(text: str) -> bytes:
    """The byte of a token such as `<0x0A>`."""
    found = _BYTE.fullmatch(text)
    return text.encode() if found is None else bytes([int(found[1], 16)])
