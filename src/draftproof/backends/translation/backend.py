"""A draft model with another vocabulary, as a model that reads and predicts the target's tokens.

After a text, a token that both models have gets the draft model's probability among all such tokens, and every other
one 0 (token-level intersection, Timor et al. 2025, arXiv 2502.05202). That is a distribution which depends on the text
alone, however well the text is translated, and drafts are drawn from it: so the rules stay exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Int
from torch import Tensor, nn

from draftproof.backends.base import Backend, Feed, FeedOutput
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.translation.session import TranslatedSession
from draftproof.backends.translation.token_map import WIDEST, TokenMap

_WIDER = 1.25  # positions for a token of a text; SmolLM2 takes 1.04 for one of Gemma's in English


class TranslatedBackend:
    """A backend whose sessions and rows are over the target's vocabulary."""

    def __init__(self, inner: Backend, tokens: TokenMap) -> None:
        self.inner = inner
        self.name = inner.name
        self.device = inner.device
        self.capabilities = inner.capabilities
        # as many tokens of the target at most; `room` says how many after a text
        self.max_positions = inner.max_positions
        self._map = tokens.within(inner.vocab_size)
        self.vocab_size = len(self._map)  # how many tokens are shared
        self._ids: Int[Tensor, " width"] = self._map.target_ids.to(inner.device)
        self._columns: Int[Tensor, " width"] = self._map.draft_ids.to(inner.device)

    def open(self) -> TranslatedSession:
        """A fresh session."""
        return TranslatedSession(self._map, self.inner.open())

    def room(self, tokens: Sequence[int], *, edits: bool) -> int | None:
        """Target's tokens that still fit; each may take several of the draft model's positions."""
        if self.max_positions is None or self.inner.max_positions is None:
            return None
        used = len(self._map.opening) + self._map.positions(tokens)
        left = self.inner.max_positions - used
        return min(left // WIDEST if edits else left, self.max_positions - len(tokens))

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], *, hidden: bool = False) -> list[FeedOutput]:
        """Outputs over the target's tokens, of the draft model's own pass.

        Raises:
            ValueError: nothing to read, longer than the draft model's context, or a session of another backend.
        """
        outputs = self.inner.forward([self._translated(feed) for feed in feeds], hidden=hidden)
        for feed in feeds:
            feed.session.read(feed.tokens, feed.tree)
        return [self._shared(feed, output) for feed, output in zip(feeds, outputs, strict=True)]

    def _translated(self, feed: Feed) -> Feed:
        if not isinstance(feed.session, TranslatedSession):
            raise ValueError(f"a session of another backend was fed to {self.name}")  # noqa: TRY004 - as other backends
        feed.session.admit(len(feed.tokens), feed.tree)
        return feed.session.feed(feed)

    def _shared(self, feed: Feed, output: FeedOutput) -> FeedOutput:
        """The rows that were asked for, and in them the columns of shared tokens."""
        rows = min(len(feed.tokens), 1) + (0 if feed.tree is None else len(feed.tree))
        logits = output.logits[-rows:].index_select(1, self._columns)
        return FeedOutput(logits, None if output.hidden is None else output.hidden[-rows:], self._ids)


class TranslatedSlotBackend(TranslatedBackend):
    """The same around a model that is loaded."""

    def __init__(self, inner: SlotBackend, tokens: TokenMap) -> None:
        super().__init__(inner, tokens)
        self.facts = inner.facts
        self._slots = inner

    def sequences_nbytes(self, lengths: Sequence[int]) -> int:
        """About what sessions of these lengths take together, in bytes: it depends on their tokens."""
        return self._slots.sequences_nbytes([round(_WIDER * length) for length in lengths])

    def use_context(self, positions: int) -> None:
        """From now on, read at most this many tokens of the target."""
        self.max_positions = positions

    def quantized(self, bits: int) -> TranslatedSlotBackend:
        """The same translation of a draft model with quantized weights."""
        return TranslatedSlotBackend(self._slots.quantized(bits), self._map)

    def for_drafts(self) -> TranslatedSlotBackend:
        """The same translation of a draft model as it drafts."""
        return TranslatedSlotBackend(self._slots.for_drafts(), self._map)

    def with_weights(self, weights: nn.Module | Mapping[str, Tensor]) -> TranslatedSlotBackend:
        """The same translation of a draft model with other weights."""
        return TranslatedSlotBackend(self._slots.with_weights(weights), self._map)


DraftBackend = SlotBackend | TranslatedSlotBackend


def over_target(draft: SlotBackend, tokens: TokenMap | None) -> DraftBackend:
    """A draft model over the target's tokens; as it is where these are its own."""
    return draft if tokens is None else TranslatedSlotBackend(draft, tokens)
