"""Which tokens of a draft model are tokens of a target, and how the draft model's tokens write all others.

Tokens are compared by their bytes, as they stand inside a text. So it does not matter how a tokenizer writes a blank or
a part of a character, nor which ids it gives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch

WIDEST = 16  # tokens of the draft model for one of the target; of a longer text, the last ones
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_SHOWN = (*range(33, 127), *range(161, 173), *range(174, 256))  # bytes that byte-level tokenizers write as themselves
_BYTES = {chr(each): each for each in _SHOWN} | {
    chr(256 + place): each for place, each in enumerate(sorted({*range(256)} - {*_SHOWN}))
}


class _Spellings(dict[int, tuple[int, ...]]):
    """The draft model's tokens by token of the target, made when first asked for."""

    def __init__(self, known: Mapping[int, tuple[int, ...]], spell: Callable[[int], Sequence[int]]) -> None:
        super().__init__(known)
        self._spell = spell

    def __missing__(self, token: int) -> tuple[int, ...]:
        found = self[token] = tuple(self._spell(token))[-WIDEST:]
        assert found, "every token is written by at least one"
        return found


class TokenMap:
    """A map from some tokens of a draft model to tokens of a target, of which no two have one target token.

    Args:
        pairs: the target's token for each of the draft model's that has one.
        spell: the draft model's tokens for any token of the target; asked only for those without a pair.
        opening: the draft model's tokens before a text.

    Raises:
        ValueError: no pairs, or two of them with one target token.
    """

    def __init__(
        self, pairs: Mapping[int, int], spell: Callable[[int], Sequence[int]], *, opening: Sequence[int] = ()
    ) -> None:
        back: dict[int, tuple[int, ...]] = {target: (draft,) for draft, target in pairs.items()}
        if not 0 < len(back) == len(pairs):
            raise ValueError(f"expected pairs with as many different target tokens, got {len(pairs)} and {len(back)}")
        self.target_ids = torch.tensor(sorted(back))
        # draft_ids, target_ids: the pairs, by ascending id of the target
        self.draft_ids = torch.tensor([back[each][0] for each in sorted(back)])
        self.opening = tuple(opening)
        self._shared = back.keys()
        self._spelled = _Spellings(back, spell)

    def __len__(self) -> int:
        return len(self._shared)

    def share(self, tokens: Sequence[int]) -> float:
        """The share of some tokens of the target that have a pair."""
        return sum(each in self._shared for each in tokens) / len(tokens)

    def spelled(self, token: int) -> tuple[int, ...]:
        """The draft model's tokens for a token of the target, 1 to WIDEST; one where there is a pair."""
        return self._spelled[token]

    def positions(self, tokens: Sequence[int]) -> int:
        """How many tokens of the draft model write some of the target's, in any order."""
        return sum(map(len, map(self._spelled.__getitem__, tokens)))

    def within(self, size: int) -> TokenMap:
        """The part of the map that uses draft tokens below `size` only: a model may have fewer than its tokenizer."""
        pairs = zip(self.draft_ids.tolist(), self.target_ids.tolist(), strict=True)
        return TokenMap(
            {draft: target for draft, target in pairs if draft < size},
            lambda token: [each for each in self.spelled(token) if each < size] or [0],
            opening=[each for each in self.opening if each < size],
        )


class TokenContents:
    """What the tokens of a tokenizer stand for."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self.vocab: dict[str, int] = tokenizer.get_vocab()  # ids by token
        anchor = next((index for token, index in self.vocab.items() if token.isascii() and token.isalnum()), None)
        if self._backend is None or anchor is None:
            raise ValueError("a tokenizer that is not made by the library tokenizers, or has no ordinary token")
        self.eos: int | None = tokenizer.eos_token_id
        self.bos: int | None = tokenizer.bos_token_id
        # ids of special tokens
        self.special = {index for index, each in tokenizer.added_tokens_decoder.items() if each.special}
        self.opening = list(takewhile(self.special.__contains__, self._backend.encode("a").ids))
        pieces = sorted(self.vocab.items(), key=lambda item: (_BYTE.fullmatch(item[0]) is not None, item[1]))
        before = len(self._decoded([[anchor]])[0])
        texts = self._decoded([[anchor, index] for _, index in pieces])
        self.bytes_of: dict[int, bytes] = {}  # by id; of special tokens their text
        # the token of each content; of several tokens with one content the one that texts are encoded with
        self.ordinary: dict[bytes, int] = {}
        for (piece, index), text in zip(pieces, texts, strict=True):
            content = piece.encode() if index in self.special else token_bytes(piece, text[before:])
            self.bytes_of[index] = content
            if content and index not in self.special:
                self.ordinary.setdefault(content, index)
        self._longest = max(map(len, self.ordinary))

    def _decoded(self, rows: list[list[int]]) -> list[str]:
        texts: list[str] = self._backend.decode_batch(rows, skip_special_tokens=False)
        return texts

    def spelled(self, content: bytes) -> list[int]:
        """The tokens that write some bytes; bytes that no token writes are left out."""
        if content in self.ordinary:
            return [self.ordinary[content]]
        try:
            found: list[int] = self._backend.encode(content.decode(), add_special_tokens=False).ids
        except UnicodeDecodeError:  # a part of a character
            found = []
        if b"".join(self.bytes_of.get(each, b"") for each in found) == content:
            return found
        return self._longest_first(content)

    def _longest_first(self, content: bytes) -> list[int]:
        found, at = [], 0
        while at < len(content):
            sizes = range(min(self._longest, len(content) - at), 0, -1)
            size = next((size for size in sizes if content[at : at + size] in self.ordinary), 0)
            if size:
                found.append(self.ordinary[content[at : at + size]])
            at += size or 1
        return found


def map_tokens(target: TokenContents, draft: TokenContents) -> TokenMap:
    """The map between two tokenizers: ordinary tokens by bytes, special ones by text, and else those of one role."""
    pairs = {draft.ordinary[each]: target.ordinary[each] for each in draft.ordinary.keys() & target.ordinary.keys()}
    found = set(pairs.values())

    def pair(ours: int | None, theirs: int | None) -> None:
        if ours is not None and theirs is not None and ours not in pairs and theirs not in found:
            pairs[ours] = theirs
            found.add(theirs)

    for piece in draft.vocab.keys() & target.vocab.keys():
        ours, theirs = draft.vocab[piece], target.vocab[piece]
        same = draft.bytes_of[ours] == target.bytes_of[theirs]
        if same and (ours in draft.special) == (theirs in target.special):
            pair(ours, theirs)
    pair(draft.eos, target.eos)
    pair(draft.bos, target.bos)
    unknown = 0 if draft.eos is None else draft.eos
    return TokenMap(
        pairs, lambda token: draft.spelled(target.bytes_of.get(token, b"")) or [unknown], opening=draft.opening
    )


def token_bytes(piece: str, text: str) -> bytes:
    """The bytes of a token, also where they are a part of a character."""
    if _REPLACEMENT not in text:
        return text.encode()
    if found := _BYTE.fullmatch(piece):
        return bytes([int(found[1], 16)])
    if all(letter in _BYTES for letter in piece):
        return bytes(_BYTES[letter] for letter in piece)
    return text.encode()
