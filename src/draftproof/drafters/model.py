"""One chain a row from a smaller model, all rows of a batch drafted together.

Knows: how a chain grows token by token. Does not know: how its tokens are verified.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.backends.base import Feed, FeedOutput, unread
from draftproof.draft import Draft, DraftStep
from draftproof.drafters.base import DraftRequest
from draftproof.drafters.draft_model import DraftModel, ModelBacked, stack_rows
from draftproof.rng import Purpose, RoundRng
from draftproof.stoppers.base import Stopper
from draftproof.tree import TokenTree


class _Chain:
    """The chain of one row while it is drafted; tokens stay on the device.

    Attributes:
        tokens, probs: drawn so far.
        signals: what the stopper saw of them, as far as it was read back.
        size: tokens that are submitted; those drawn after the stopper's word are not.
    """

    def __init__(self, row: int, request: DraftRequest, limit: int) -> None:
        self.row = row
        self.request = request
        self.tokens: list[Int[Tensor, ""]] = []
        self.probs: list[Float[Tensor, " vocab"]] = []
        self.signals: list[float] = []
        self.size = limit

    @property
    def open(self) -> bool:
        """Whether it wants another token."""
        return len(self.tokens) < self.size

    def draft(self, device: torch.device) -> Draft:
        """The finished draft."""
        if not self.size:
            return Draft.empty(device)
        return Draft(TokenTree.chain(torch.stack(self.tokens[: self.size])), torch.stack(self.probs[: self.size]))


class ModelDrafter(ModelBacked):
    """Draws chains from a draft model.

    Args:
        model: the draft model.
        stopper: when a chain ends.
        stride: tokens drawn between two looks of the stopper, each of which waits for the device; default 1 on a CPU
            and 4 elsewhere. Tokens drawn after the one that ends a chain are dropped unseen, so the draft is the same.

    Raises:
        UserError: the stopper reads hidden states that the model does not have.
    """

    name = "model"
    branching = False

    def __init__(self, model: DraftModel, stopper: Stopper, *, stride: int | None = None) -> None:
        super().__init__(model, stopper)
        self._stride = stride or (1 if model.backend.device.type == "cpu" else 4)

    def propose(self, requests: Sequence[DraftRequest], rng: RoundRng) -> list[Draft]:
        """See Drafter: one forward pass of the draft model a step, for the rows that are still drafting."""
        self.stopper.begin([request.id for request in requests])
        chains = [self._open(row, request) for row, request in enumerate(requests)]
        live = [chain for chain in chains if chain.open]
        sessions = {chain.row: self.model.session(chain.request) for chain in live}
        feeds = [Feed(sessions[chain.row], unread(sessions[chain.row], chain.request.tokens)) for chain in live]
        unseen: list[tuple[list[_Chain], Float[Tensor, " _"]]] = []
        step = 0
        while live:
            outputs = self.model.backend.forward(feeds, hidden=self.stopper.hidden_size > 0)
            signal = self._extend(live, outputs, rng, step)
            step += 1
            if signal is not None:
                unseen.append((live, signal))
                if step % self._stride == 0:
                    self._judge(unseen)
            live = [chain for chain in live if chain.open]
            feeds = [Feed(sessions[chain.row], chain.tokens[-1].reshape(1)) for chain in live]
        self._judge(unseen)
        return [chain.draft(self.model.backend.device) for chain in chains]

    def _open(self, row: int, request: DraftRequest) -> _Chain:
        return _Chain(row, request, self.model.depth(request, self.stopper.wanted(request.id)))

    def _extend(
        self, live: list[_Chain], outputs: Sequence[FeedOutput], rng: RoundRng, step: int
    ) -> Float[Tensor, " live"] | None:
        """Draw the next token of every live chain; returns what the stopper makes of them."""
        q = torch.cat([self._row(chain, output) for chain, output in zip(live, outputs, strict=True)])
        drawn = rng.at(Purpose.DRAFT, step, [chain.row for chain in live]).categorical(q)
        for chain, token, row in zip(live, drawn, q, strict=True):
            chain.tokens.append(token)
            chain.probs.append(row)
        hidden = [output.hidden[-1] for output in outputs if output.hidden is not None]
        logits = [output.logits[-1] for output in outputs if self.stopper.reads_logits]
        return self.stopper.signal(DraftStep(drawn, q, stack_rows(hidden), stack_rows(logits)))

    def _judge(self, unseen: list[tuple[list[_Chain], Float[Tensor, " _"]]]) -> None:
        """Read the unseen signals back at once and end every chain at the first token that its stopper ends it with."""
        if not unseen:
            return
        values = iter(torch.cat([signal for _, signal in unseen]).tolist())
        for live, _ in unseen:
            for chain in live:
                chain.signals.append(next(values))
                seen = len(chain.signals)
                if seen < chain.size and self.stopper.stop_after(chain.signals, chain.request.id):
                    chain.size = seen
        unseen.clear()

    def _row(self, chain: _Chain, output: FeedOutput) -> Float[Tensor, "1 vocab"]:
        """The next token's row of q; drafted ids are read back only when a transform looks at them."""
        path = [int(token) for token in chain.tokens] if self.model.path_dependent(chain.request) else []
        return self.model.rows(chain.request, output.logits[-1:], [path], output.ids)
