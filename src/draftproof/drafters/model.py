"""The drafter `model`: one chain per row from a draft model, for all rows of a batch together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.backends.base import Feed, FeedOutput
from draftproof.draft import Draft, DraftStep
from draftproof.drafters.base import DraftRequest
from draftproof.drafters.draft_model import DraftModel, ModelBacked, stack_rows
from draftproof.rng import Purpose, RoundRng
from draftproof.stoppers.base import Stopper
from draftproof.tree import TokenTree


class _Chain:
    """The chain of one row while it is drafted; its tokens stay on the device."""

    def __init__(self, row: int, request: DraftRequest, limit: int) -> None:
        self.row = row
        self.request = request
        self.tokens: list[Int[Tensor, ""]] = []
        self.probs: list[Float[Tensor, " vocab"]] = []  # rows of q that the tokens were drawn from
        self.signals: list[float] = []  # the stopper's signals that were copied to the host so far
        self.size = limit  # tokens to submit; tokens drawn after the end of the chain are dropped

    @property
    def open(self) -> bool:
        """Whether another token will be drawn."""
        return len(self.tokens) < self.size

    def draft(self, device: torch.device) -> Draft:
        if not self.size:
            return Draft.empty(device)
        return Draft(TokenTree.chain(torch.stack(self.tokens[: self.size])), torch.stack(self.probs[: self.size]))


class ModelDrafter(ModelBacked):
    """Draws chains from a draft model.

    Args:
        model: the draft model.
        stopper: decides how long chains get.
        stride: number of tokens to draw before the stopper is asked, since asking waits for the device; default 1 on
            a CPU and 4 elsewhere. Tokens drawn after the end of a chain are dropped unseen, so the draft does not
            depend on the stride.
    """

    name = "model"
    branching = False

    def __init__(self, model: DraftModel, stopper: Stopper, *, stride: int | None = None) -> None:
        super().__init__(model, stopper)
        self._stride = stride or (1 if model.backend.device.type == "cpu" else 4)

    def propose(self, requests: Sequence[DraftRequest], rng: RoundRng) -> list[Draft]:
        """Draft all rows together: each step is one forward pass of the draft model for the rows that still draft."""
        self.begin(requests)
        bounded = any(request.budget.most is not None for request in requests)
        stride = 1 if bounded else self._stride  # a budget waits for the device anyway
        self.model.checks.clear()
        chains = [self._open(row, request) for row, request in enumerate(requests)]
        active = [chain for chain in chains if chain.open]
        sessions = {chain.row: self.model.session(chain.request) for chain in active}
        feeds = [Feed(sessions[chain.row], self.model.unread(sessions[chain.row], chain.request)) for chain in active]
        queued: list[tuple[list[_Chain], Float[Tensor, " _"]]] = []
        step = 0
        while active:
            outputs = self.model.backend.forward(feeds, hidden=self.stopper.hidden_size > 0)
            if self.stopper.reads_predictions:
                active, outputs = self._promising(active, outputs)
            active, outputs = self._admitted(active, outputs)
            signal = self._extend(active, outputs, rng, step) if active else None
            step += 1
            if signal is not None:
                queued.append((active, signal))
                if step % stride == 0:
                    self._judge(queued)
            active = [chain for chain in active if chain.open]
            feeds = [Feed(sessions[chain.row], chain.tokens[-1].reshape(1)) for chain in active]
        self._judge(queued)
        self.model.checks.finish()
        return [chain.draft(self.model.backend.device) for chain in chains]

    def _open(self, row: int, request: DraftRequest) -> _Chain:
        return _Chain(row, request, request.budget.within(self.model.depth(request, self.stopper.length(request.id))))

    def _promising(self, active: list[_Chain], outputs: Sequence[FeedOutput]) -> tuple[list[_Chain], list[FeedOutput]]:
        """End chains by the predictions for their next tokens, before these are drawn; return the other chains."""
        going = []
        for chain, output in zip(active, outputs, strict=True):
            assert output.accepted is not None, "the model predicts"
            chain.signals.append(float(output.accepted[-1]))
            if self.stopper.stop_after(chain.signals, chain.request.id):
                chain.size = len(chain.tokens)
            else:
                going.append((chain, output))
        return [chain for chain, _ in going], [output for _, output in going]

    @staticmethod
    def _admitted(active: list[_Chain], outputs: list[FeedOutput]) -> tuple[list[_Chain], list[FeedOutput]]:
        """End chains whose next tokens exceed the round's budget, before these are drawn; return the other chains."""
        if not active:
            return active, outputs
        going = active[0].request.budget.admit(
            [chain.request.id for chain in active],
            [chain.size - len(chain.tokens) for chain in active],
            [output.logits[-1] for output in outputs],
        )
        for chain, goes in zip(active, going, strict=True):
            if not goes:
                chain.size = len(chain.tokens)
        return list(compress(active, going)), list(compress(outputs, going))

    def _extend(
        self, active: list[_Chain], outputs: Sequence[FeedOutput], rng: RoundRng, step: int
    ) -> Float[Tensor, " active"] | None:
        """Draw the next token of every active chain; return the stopper's signals for them."""
        rows = [self._row(chain, output) for chain, output in zip(active, outputs, strict=True)]
        q = torch.cat(rows) if len(rows) > 1 else rows[0]  # a copy of a row takes as long as its softmax
        drawn = rng.at(Purpose.DRAFT, step, [chain.row for chain in active]).categorical(q)
        for chain, token, row in zip(active, drawn, q, strict=True):
            chain.tokens.append(token)
            chain.probs.append(row)
        hidden = [output.hidden[-1] for output in outputs if output.hidden is not None]
        logits = [output.logits[-1] for output in outputs if self.stopper.reads_logits]
        return self.stopper.signal(DraftStep(drawn, q, stack_rows(hidden), stack_rows(logits)))

    def _judge(self, queued: list[tuple[list[_Chain], Float[Tensor, " _"]]]) -> None:
        """Copy the new signals to the host at once, and end each chain at the first token where the stopper stops."""
        if not queued:
            return
        values = iter(torch.cat([signal for _, signal in queued]).tolist())
        for active, _ in queued:
            for chain in active:
                chain.signals.append(next(values))
                size = len(chain.signals)
                if size < chain.size and self.stopper.stop_after(chain.signals, chain.request.id):
                    chain.size = size
        queued.clear()

    def _row(self, chain: _Chain, output: FeedOutput) -> Float[Tensor, "1 vocab"]:
        """The row of q of the next token; drafted ids are copied to the host only if a transform needs them."""
        path = [int(token) for token in chain.tokens] if self.model.path_dependent(chain.request) else []
        return self.model.rows(chain.request, output.logits[-1:], [path], output.ids)
