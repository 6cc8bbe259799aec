"""The text of tokens, as log-probabilities and lists of tokens show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftproof.backends.translation.token_map import token_bytes

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


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
        return token_bytes(str(self._tokenizer.convert_ids_to_tokens(token)), self(token))

    def named(self, token: int) -> str:
        """The text of one token; OpenAI's form of its bytes where they are a part of a character."""
        text = self(token)
        if _REPLACEMENT not in text or (content := self.content(token)) == text.encode():
            return text
        return "bytes:" + "".join(f"\\x{each:02x}" for each in content)

    def joined(self, tokens: Sequence[int]) -> str:
        """Of several in a row."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))
