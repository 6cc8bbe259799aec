"""One chain a row from a smaller model, all rows of a batch drafted together.

Knows: how a chain grows token by token. Does not know: how its tokens are verified.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.backends.base import Backend, Feed, Output, Session, unread
from draftproof.draft import Draft, DraftStep
from draftproof.drafters.base import DraftRequest
from draftproof.drafters.draft_model import DraftModel
from draftproof.errors import UserError
from draftproof.rng import Purpose, RoundRng
from draftproof.stoppers.base import Stopper
from draftproof.tree import TokenTree


class _Chain:
    """The chain of one row while it is drafted; tokens stay on the device."""

    def __init__(self, row: int, request: DraftRequest, session: Session, limit: int) -> None:
        self.row = row
        self.request = request
        self.session = session
        self.limit = limit
        self.tokens: list[Int[Tensor, ""]] = []
        self.probs: list[Float[Tensor, " vocab"]] = []
        self.open = limit > 0

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
    point_masses = False

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
        self.model = DraftModel(backend, vocab_size=vocab_size, temperature=temperature, top_k=top_k)
        self.stopper = stopper

    @property
    def constant(self) -> bool:
        """As constant as its stopper, if the model knows every token: it cannot draft after one that it does not."""
        return self.stopper.constant and self.model.covers

    @property
    def limit(self) -> int:
        """As long as its stopper lets it."""
        return self.stopper.limit

    @property
    def max_positions(self) -> int | None:
        """The draft model's context."""
        return self.model.backend.max_positions

    def propose(self, requests: Sequence[DraftRequest], rng: RoundRng) -> list[Draft]:
        """See Drafter: one forward pass of the draft model a step, for the rows that are still drafting."""
        chains = [self._open(row, request) for row, request in enumerate(requests)]
        live = [chain for chain in chains if chain.open]
        feeds = [Feed(chain.session, unread(chain.session, chain.request.tokens)) for chain in live]
        step = 0
        while live:
            outputs = self.model.backend.forward(feeds, hidden=self.stopper.needs_hidden)
            self._extend(live, outputs, rng, step)
            live = [chain for chain in live if chain.open]
            feeds = [Feed(chain.session, chain.tokens[-1].reshape(1)) for chain in live]
            step += 1
        return [chain.draft(self.model.backend.device) for chain in chains]

    def _open(self, row: int, request: DraftRequest) -> _Chain:
        depth = self.model.depth(request, self.stopper.limit)
        return _Chain(row, request, self.model.session(request), depth)

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
        """The next token's row of q; drafted ids are read back only when a transform looks at them."""
        path = [int(token) for token in chain.tokens] if self.model.path_dependent(chain.request) else []
        return self.model.rows(chain.request, output.logits[-1:], [path])

    def observe(self, request_id: int, drafted: int, accepted: int) -> None:
        """Passed on to the stopper."""
        self.stopper.observe(request_id, drafted, accepted)

    def release(self, request_id: int) -> None:
        """Close the request's session."""
        self.stopper.release(request_id)
        self.model.release(request_id)
