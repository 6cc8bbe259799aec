"""Stoppers with a trained head: `acceptance` (SpecDec++), `ratio` (its form for block verification), `approximate`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from draftproof.draft import DraftStep
from draftproof.errors import UserError
from draftproof.heads import Head
from draftproof.stoppers.probability import ThresholdStopper, probs_of

LIMIT = 20  # SpecDec++, arXiv 2405.19715, section 4.1


class _HeadStopper(ThresholdStopper):
    """Base class of stoppers with a head of the class's kind, which runs on the device of the hidden states.

    The threshold is between 0 and 1; None uses the head's own.
    """

    kind: str
    stopper: str

    def __init__(self, head: Head, threshold: float | None = None, limit: int = LIMIT) -> None:
        config = head.config
        if config.kind != self.kind:
            raise UserError(
                f"stopper {self.stopper}: expected a head of kind {self.kind}, got one of kind {config.kind} (trained "
                f"on {config.draft})"
            )
        super().__init__(self.stopper, config.threshold if threshold is None else threshold, limit)
        self.head = head
        self.hidden_size = config.hidden_size
        self.trained_on = config.draft

    def _output(self, step: DraftStep, log_q: Float[Tensor, " drawn"] | None = None) -> Float[Tensor, " drawn"]:
        assert step.hidden is not None, "drafters pass hidden states to stoppers that read them"
        made: Tensor = self.head.to(step.hidden.device)(step.hidden, log_q)
        return made


class Acceptance(_HeadStopper):
    """SpecDec++: stops when the predicted probability that some drafted token is rejected exceeds the threshold h.

    There is no prediction for the newest token yet, because its hidden state is computed only when the model reads the
    token. So the newest token is always verified, as in the published algorithm.

    Source: SpecDec++, arXiv 2405.19715, Algorithm 2.
    """

    kind = "acceptance"
    stopper = "acceptance"

    def signal(self, step: DraftStep) -> Float[Tensor, " drawn"]:
        """Log of the predicted acceptance probability of the token before each drawn one."""
        return logsigmoid(self._output(step))

    def stop_after(self, signals: Sequence[float], row: int) -> bool:  # noqa: ARG002
        """Whether 1 - prod P > h; the first signal belongs to the root, which is committed."""
        return 1 - math.exp(math.fsum(signals[1:])) > self.threshold


class Ratio(_HeadStopper):
    """SpecDec++ for block verification: stops when 1 - P > h, P being the predicted running probability of the rule.

    P_i = min(1, P_{i-1} p/q) can rise again after an unlikely token; a product of acceptance probabilities cannot.

    Source: P is from Block Verification, arXiv 2403.10444, Algorithm 2; the policy from SpecDec++, arXiv 2405.19715.
    """

    kind = "log_ratio"
    stopper = "ratio"

    def signal(self, step: DraftStep) -> Float[Tensor, " drawn"]:
        """Predicted log(p/q) of the token before each drawn one."""
        return self._output(step)

    def stop_after(self, signals: Sequence[float], row: int) -> bool:  # noqa: ARG002
        """Whether 1 - P > h, with the predicted P of the newest token that has a prediction."""
        running = 0.0
        for value in signals[1:]:
            running = min(0.0, running + value)
        return 1 - math.exp(running) > self.threshold


class Approximate(_HeadStopper):
    """SPRINTER: stops at the first token that the small verifier rejects, with a probability of at most tau.

    With the rule `last_token`, all tokens before that one are emitted without verification by the target, which is
    lossy. With a lossless rule this is a stopper like any other.

    Source: SPRINTER, arXiv 2502.04557, Algorithm 1.
    """

    kind = "verifier"
    stopper = "approximate"

    def signal(self, step: DraftStep) -> Float[Tensor, " drawn"]:
        """The verifier's probability that each drawn token is acceptable."""
        log_q = None
        if self.head.config.reads_draw:
            log_q = probs_of(step).gather(-1, step.tokens.unsqueeze(-1)).squeeze(-1).log()
        return torch.sigmoid(self._output(step, log_q))

    def stop_after(self, signals: Sequence[float], row: int) -> bool:  # noqa: ARG002
        """Whether the verifier rejects the newest token."""
        return signals[-1] <= self.threshold
