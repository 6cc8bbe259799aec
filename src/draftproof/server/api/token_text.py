"""The text of tokens, as log-probabilities and lists of tokens show it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_SHOWN = (*range(33, 127), *range(161, 173), *range(174, 256))  # bytes that byte-level tokenizers write as themselves
_BYTES = {chr(each): each for each in _SHOWN} | {
    chr(256 + place): each for place, each in enumerate(sorted({*range(256)} - {*_SHOWN}))
}


class TokenText:
    """The text of single tokens and of several."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        """Of one token inside a text, special ones included: some tokenizers leave out a blank at the start."""
        if token not in self._known:
            self._known[token] = self.joined([token, token])[len(self.joined([token])) :]
        return self._known[token]

    def content(self, token: int) -> bytes:
        """The bytes of a token, also where they are a part of a character."""
        text = self(token)
        if _REPLACEMENT not in text:
            return text.encode()
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if found := _BYTE.fullmatch(piece):
            return bytes([int(found[1], 16)])
        if all(letter in _BYTES for letter in piece):
            return bytes(_BYTES[letter] for letter in piece)
        return text.encode()

    def named(self, token: int) -> str:
        """The text of one token; OpenAI's form of its bytes where they are a part of a character."""
        text = self(token)
        if _REPLACEMENT not in text or (content := self.content(token)) == text.encode():
            return text
        return "bytes:" + "".join(f"\\x{each:02x}" for each in content)

    def joined(self, tokens: Sequence[int]) -> str:
        """Of several in a row."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))
