"""Drafts from a smaller model: one chain a row, all rows of a batch drafted together.

Knows: how a draft model is stepped and how its rows become q. Does not know: how its tokens are verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.backends.base import Backend, Feed, Output, Session, unread
from draftproof.draft import Draft, DraftStep
from draftproof.drafters.base import DraftRequest
from draftproof.errors import UserError
from draftproof.rng import Purpose, RoundRng
from draftproof.sampling import Transforms, check_logits, probabilities
from draftproof.stoppers.base import Stopper
from draftproof.tree import TokenTree


class _Chain:
    """The chain of one row while it is drafted."""

    def __init__(self, row: int, request: DraftRequest, session: Session, limit: int) -> None:
        self.row = row
        self.request = request
        self.session = session
        self.limit = limit
        self.tokens: list[Int[Tensor, ""]] = []
        self.probs: list[Float[Tensor, " vocab"]] = []
        self.open = limit > 0

    def path(self, transforms: Transforms) -> list[list[int]]:
        """The drafted ids, read back from the device only when a transform needs them."""
        return [[int(token) for token in self.tokens]] if transforms.path_dependent else [[]]

    def draft(self, device: torch.device) -> Draft:
        """The finished draft."""
        if not self.tokens:
            return Draft.empty(device)
        return Draft(TokenTree.chain(torch.stack(self.tokens)), torch.stack(self.probs))


class ModelDrafter:
    """Draws chains from a draft model.

    Args:
        backend: the draft model; its vocabulary may be padded to another width than the target's.
        stopper: when a chain ends.
        vocab_size: width of the target's logits; q has this width.
        temperature: of the draft, when it shall differ from the request's.
        top_k: of the draft, when it shall differ from the request's.

    Raises:
        UserError: the stopper needs hidden states that the backend cannot return.
    """

    name = "model"
    branching = False

    def __init__(
        self,
        backend: Backend,
        stopper: Stopper,
        *,
        vocab_size: int,
        temperature: float | None = None,
        top_k: int | None = None,
    ) -> None:
        if stopper.needs_hidden and not backend.capabilities.hidden:
            raise UserError(f"stopper {stopper.name} reads hidden states, and {backend.name} returns none")
        self.backend = backend
        self.stopper = stopper
        self._vocab_size = vocab_size
        changes = {"temperature": temperature, "top_k": top_k}
        self._changes: dict[str, Any] = {key: value for key, value in changes.items() if value is not None}
        self._sessions: dict[int, Session] = {}
        self._transforms: dict[int, Transforms] = {}

    @property
    def constant(self) -> bool:
        """As constant as its stopper."""
        return self.stopper.constant

    def propose(self, requests: Sequence[DraftRequest], rng: RoundRng) -> list[Draft]:
        """See Drafter: one forward pass of the draft model a step, for the rows that are still drafting."""
        chains = [self._open(row, request) for row, request in enumerate(requests)]
        live = [chain for chain in chains if chain.open]
        feeds = [Feed(chain.session, unread(chain.session, chain.request.tokens)) for chain in live]
        step = 0
        while live:
            outputs = self.backend.forward(feeds, hidden=self.stopper.needs_hidden)
            self._extend(live, outputs, rng, step)
            live = [chain for chain in live if chain.open]
            feeds = [Feed(chain.session, chain.tokens[-1].reshape(1)) for chain in live]
            step += 1
        return [chain.draft(self.backend.device) for chain in chains]

    def _open(self, row: int, request: DraftRequest) -> _Chain:
        """A row's chain; short or empty where the draft model's context or vocabulary ends."""
        limit = min(request.limit, self.stopper.limit)
        if self.backend.max_positions is not None:
            limit = min(limit, self.backend.max_positions - len(request.tokens))
        if self.backend.vocab_size < self._vocab_size and max(request.tokens) >= self.backend.vocab_size:
            limit = 0  # a token the draft model has no embedding for
        if request.id not in self._sessions:
            self._sessions[request.id] = self.backend.open()
            self._transforms[request.id] = self._own(request.transforms)
        return _Chain(row, request, self._sessions[request.id], limit)

    def _own(self, transforms: Transforms) -> Transforms:
        """The request's transforms with the drafter's own temperature and top-k."""
        return replace(transforms, params=replace(transforms.params, **self._changes)) if self._changes else transforms

    def _extend(self, live: Sequence[_Chain], outputs: Sequence[Output], rng: RoundRng, step: int) -> None:
        """Draw the next token of every live chain and let the stopper look at it."""
        q = torch.cat([self._row(chain, output) for chain, output in zip(live, outputs, strict=True)])
        drawn = rng.at(Purpose.DRAFT, step, [chain.row for chain in live]).categorical(q)
        for i, (chain, output) in enumerate(zip(live, outputs, strict=True)):
            chain.tokens.append(drawn[i])
            chain.probs.append(q[i])
            hidden = None if output.hidden is None else output.hidden[-1]
            seen = DraftStep(drawn[i], q[i], hidden, depth=len(chain.tokens), row=chain.request.id)
            chain.open = len(chain.tokens) < chain.limit and not self.stopper.stop_after(seen)

    def _row(self, chain: _Chain, output: Output) -> Float[Tensor, "1 vocab"]:
        """q of the next token: the draft's logits at the target's width, through the request's transforms."""
        logits = fit_width(output.logits[-1:], self._vocab_size)
        check_logits(logits, f"the drafter's ({self.backend.name}) for request {chain.request.id}")
        transforms = self._transforms[chain.request.id]
        outputs = chain.request.tokens[chain.request.prompt_length :] if transforms.path_dependent else []
        return probabilities(logits, transforms, outputs, chain.path(transforms))

    def observe(self, request_id: int, drafted: int, accepted: int) -> None:  # noqa: ARG002
        """Passed on to the stopper."""
        self.stopper.observe(drafted, accepted)

    def release(self, request_id: int) -> None:
        """Close the request's session."""
        session = self._sessions.pop(request_id, None)
        self._transforms.pop(request_id, None)
        if session is not None:
            session.close()


def fit_width(logits: Float[Tensor, "rows width"], width: int) -> Float[Tensor, "rows vocab"]:
    """Cut or pad rows of logits to the target's width; tokens the drafter does not have get probability 0.

    Vocabularies that differ by padding only agree on every real token; tokenizers are compared when models are loaded.
    """
    if logits.shape[-1] >= width:
        return logits[:, :width]
    return torch.nn.functional.pad(logits, (0, width - logits.shape[-1]), value=float("-inf"))
