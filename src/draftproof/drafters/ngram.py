"""The drafter `ngram`: the tokens after an earlier occurrence of the last tokens, in the request's prompt or output.

It needs no model; its tokens are point masses. It is also known as prompt lookup decoding, and helps if the output
quotes the input (code editing, summaries).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from draftproof.draft import Draft, Origin
from draftproof.drafters.base import DraftRequest, TokenDrafter
from draftproof.errors import UserError, refuse_outside
from draftproof.rng import RoundRng
from draftproof.tree import TokenTree


class NgramDrafter(TokenDrafter):
    """Proposes the tokens after the most recent earlier occurrence of the longest matching suffix.

    Args:
        length: number of tokens to propose, 1 to 64.
        longest: length of the longest suffix to look for.
        shortest: length of the shortest suffix that counts as a match.
    """

    def __init__(self, length: int = 8, *, longest: int = 4, shortest: int = 1) -> None:
        refuse_outside("ngram draft length", length, 1, 64)
        if not 1 <= shortest <= longest:
            raise UserError(f"ngram suffixes: expected 1 <= shortest <= longest, got {shortest} and {longest}")
        self.name = f"ngram:{length}"
        self.limit = length
        self._sizes = range(longest, shortest - 1, -1)
        self._seen: dict[int, _NgramIndex] = {}

    def propose(self, requests: Sequence[DraftRequest], rng: RoundRng) -> list[Draft]:  # noqa: ARG002
        """For each request, a chain of point masses: the tokens that follow its longest known suffix."""
        return [self._lookup(request) for request in requests]

    def _lookup(self, request: DraftRequest) -> Draft:
        index = self._seen.setdefault(request.id, _NgramIndex(self._sizes))
        index.extend(request.tokens)
        start = index.find(request.tokens)
        found = [] if start is None else request.tokens[start : start + max(min(self.limit, request.limit), 0)]
        return point_chain(found)

    def release(self, request_id: int) -> None:
        """Forget the request's index."""
        self._seen.pop(request_id, None)


def point_chain(tokens: Sequence[int], origin: Origin = Origin.LOOKUP) -> Draft:
    """A draft of these tokens as one chain of point masses; an empty draft without tokens."""
    return Draft(TokenTree.chain(torch.tensor(tokens, dtype=torch.int64)), None, origin=origin)


def with_probabilities(draft: Draft, vocab_size: int, dtype: torch.dtype) -> Draft:
    """The draft with rows of q; a draft without them gets one-hot rows."""
    if draft.probs is not None or not len(draft):
        return draft
    tokens = draft.tree.tokens
    rows = torch.zeros(len(draft), vocab_size, dtype=dtype, device=tokens.device)
    return replace(draft, probs=rows.scatter_(1, tokens.unsqueeze(-1), 1.0), certain_from=0)


class _NgramIndex:
    """The position after the last occurrence of each run of tokens, updated as the sequence grows."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._after: dict[tuple[int, ...], int] = {}
        self._done = 0

    def extend(self, tokens: list[int]) -> None:
        """Add every run that is followed by a token; nothing follows the last token yet."""
        for end in range(max(self._done, 1), len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._done = len(tokens)

    def find(self, tokens: list[int]) -> int | None:
        """The position after the most recent earlier occurrence of the longest suffix; None without one."""
        for size in self._sizes:
            start = self._after.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if start is not None:
                return start
        return None
