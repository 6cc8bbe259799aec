"""A drafter that extends chains by a lookup: the draft of a model or head, then tokens that are known to follow it.

The tokens of the lookup are point masses. Whether and how far a chain is extended depends only on the tokens before,
drafted ones included, so every lossless rule stays lossless. The extra tokens cost no pass of the draft model, only
positions in the target's pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from typing_extensions import override

from draftproof.backends.base import Backend
from draftproof.backends.cache.prefix_cache import PrefixCache
from draftproof.draft import Draft
from draftproof.drafters.base import Drafter, DraftRequest, SessionDrafter
from draftproof.drafters.ngram import point_chain, with_probabilities
from draftproof.drafters.suffix import SuffixDrafter, SuffixMatch
from draftproof.errors import UserError
from draftproof.rng import RoundRng
from draftproof.stoppers.base import RoundTime, Stopper
from draftproof.tree import TokenTree

LEAST = 2  # tokens before an extension that must match: a single token has too many successors


def extended(draft: Draft, found: SuffixMatch, vocab_size: int) -> Draft:
    """A chain (with rows of q, or empty), followed by the tokens that a lookup found for its end, at least one."""
    dtype = torch.float32 if draft.probs is None else draft.probs.dtype
    more = with_probabilities(point_chain(found.tokens, found.origin).to(draft.tree.tokens.device), vocab_size, dtype)
    if draft.probs is None:
        return more
    assert more.probs is not None, "it has at least one token"
    tree = TokenTree.chain(torch.cat([draft.tree.tokens, more.tree.tokens]))
    return replace(draft, tree=tree, probs=torch.cat([draft.probs, more.probs]), certain_from=draft.drawn)


class ExtendedDrafter(SessionDrafter):
    """Extends the chains of another drafter, which have rows of q, by lookups.

    At least `least` tokens before an extension must match.
    """

    branching = False
    point_masses = False
    constant = False
    reads_predictions = True

    def __init__(self, first: Drafter, lookup: SuffixDrafter, *, least: int = LEAST) -> None:
        if first.branching or first.point_masses or not isinstance(first, SessionDrafter):
            raise UserError(
                f"drafter {first.name}+{lookup.name}: expected a drafter with one chain of drawn tokens before the +, "
                f"got {first.name}"
            )
        self.name = f"{first.name}+{lookup.name}"
        self._first = first
        self._sessions: SessionDrafter = first
        self._lookup = lookup
        self._least = least
        self._own: dict[int, int] = {}  # number of tokens of each draft that the first drafter drew

    @property
    def timed(self) -> bool:
        """Whether the first drafter's drafts depend on the time of earlier rounds."""
        return self._first.timed

    @property
    def limit(self) -> int:
        """Depth of the deepest draft."""
        return self._first.limit + self._lookup.limit

    @property
    def max_positions(self) -> int | None:
        """The lookup's: beyond the first drafter's context, it drafts alone."""
        return self._lookup.max_positions

    @property
    def stopper(self) -> Stopper | None:
        """The first drafter's stopper."""
        return self._first.stopper

    @property
    def backends(self) -> Sequence[Backend]:
        """The first drafter's models."""
        return self._sessions.backends

    @override
    def reuse(self, kept: PrefixCache) -> None:
        self._sessions.reuse(kept)

    @override
    def read(self, parts: Sequence[DraftRequest]) -> None:
        self._sessions.read(parts)

    @override
    def ended(self, request_id: int, tokens: list[int]) -> None:
        self._sessions.ended(request_id, tokens)

    def propose(self, requests: Sequence[DraftRequest], rng: RoundRng) -> list[Draft]:
        """The first drafter's drafts, each extended by the lookup."""
        drafts = self._first.propose(requests, rng)
        self._own = {request.id: len(draft) for request, draft in zip(requests, drafts, strict=True)}
        return [self._extended(draft, request) for draft, request in zip(drafts, requests, strict=True)]

    def _extended(self, draft: Draft, request: DraftRequest) -> Draft:
        if request.limit <= len(draft):
            return draft
        found = self._lookup.extend(request, draft.tree.ids)
        if found.matched < self._least or not found.tokens:
            return draft
        return extended(draft, found, request.transforms.vocab_size)

    def observe(self, request_id: int, drafted: int, accepted: int) -> None:
        """Pass the outcome of its own tokens to the first drafter."""
        own = self._own.get(request_id, 0)
        self._first.observe(request_id, min(drafted, own), min(accepted, own))

    def spent(self, time: RoundTime) -> None:
        """Pass the time to the first drafter, with the depth of its own drafts."""
        deepest = max(self._own.values(), default=0)
        if deepest or not time.depth:
            self._first.spent(replace(time, depth=min(deepest, time.depth)))

    def release(self, request_id: int) -> None:
        """Forget the request."""
        self._own.pop(request_id, None)
        self._first.release(request_id)
        self._lookup.release(request_id)
