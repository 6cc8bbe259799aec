"""Stopping by a trained head: SpecDec++, its block-aware variant, and SPRINTER's small verifier.

Knows: how a head's numbers become a decision. Does not know: how heads are trained, which model they read.
"""

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
from draftproof.stoppers.base import StopperBase
from draftproof.stoppers.probability import check_threshold, probs_of

LIMIT = 20  # SpecDec++, arXiv 2405.19715, section 4.1


class _HeadStopper(StopperBase):
    """What the three share: a head of one kind, moved to where the hidden states are.

    Args:
        head: of kind `kind`.
        threshold: default the head's own.
        limit: longest chain.

    Raises:
        UserError: a head of another kind, or a threshold out of range.
    """

    kind: str
    stopper: str

    def __init__(self, head: Head, threshold: float | None = None, limit: int = LIMIT) -> None:
        config = head.config
        if config.kind != self.kind:
            raise UserError(
                f"stopper {self.stopper} takes a head of kind {self.kind}, and was given one of kind {config.kind} "
                f"(trained on {config.draft})"
            )
        self.threshold = config.threshold if threshold is None else threshold
        check_threshold(self.stopper, self.threshold)
        super().__init__(f"{self.stopper}:{self.threshold:g}", limit)
        self.head = head
        self.hidden_size = config.hidden_size
        self.trained_on = config.draft

    def _output(self, step: DraftStep, log_q: Float[Tensor, " drawn"] | None = None) -> Float[Tensor, " drawn"]:
        assert step.hidden is not None, "drafters hand over hidden states to stoppers that read them"
        made: Tensor = self.head.to(step.hidden.device)(step.hidden, log_q)
        return made


class Acceptance(_HeadStopper):
    """SpecDec++: stop when the predicted probability that some drafted token is rejected exceeds a threshold.

    The newest token is not judged yet (its own hidden state is computed when it is read), so it is submitted with the
    tokens before it, as in the published algorithm.

    Args:
        head: of kind acceptance.
        threshold: h, between 0 and 1; default the head's own.
        limit: longest chain; the paper's 20.

    Raises:
        UserError: a head of another kind, or a threshold out of range.

    Source: SpecDec++, arXiv 2405.19715, Algorithm 2.
    """

    kind = "acceptance"
    stopper = "acceptance"

    def signal(self, step: DraftStep) -> Float[Tensor, " drawn"]:
        """Log of the predicted probability that the token above each drawn one is accepted."""
        return logsigmoid(self._output(step))

    def stop_after(self, signals: Sequence[float], row: int) -> bool:  # noqa: ARG002
        """Whether 1 - prod P > h; the first signal is about the root, which is committed."""
        return 1 - math.exp(math.fsum(signals[1:])) > self.threshold


class Ratio(_HeadStopper):
    """Block-aware SpecDec++: stop when the predicted running probability P of block verification is small.

    P_i = min(1, P_{i-1} p/q) can recover after an unlikely token where a product of acceptance probabilities cannot.

    Args:
        head: of kind log_ratio.
        threshold: h, between 0 and 1: stop when 1 - P > h; default the head's own.
        limit: longest chain.

    Raises:
        UserError: a head of another kind, or a threshold out of range.

    Source: Block Verification, arXiv 2403.10444, Algorithm 2 for P; SpecDec++, arXiv 2405.19715 for the policy.
    """

    kind = "log_ratio"
    stopper = "ratio"

    def signal(self, step: DraftStep) -> Float[Tensor, " drawn"]:
        """Predicted log(p/q) of the token above each drawn one."""
        return self._output(step)

    def stop_after(self, signals: Sequence[float], row: int) -> bool:  # noqa: ARG002
        """Whether 1 - P > h for the predicted P of the newest judged token."""
        running = 0.0
        for value in signals[1:]:
            running = min(0.0, running + value)
        return 1 - math.exp(running) > self.threshold


class Approximate(_HeadStopper):
    """SPRINTER: stop at the first token that the small verifier refuses.

    With the rule `last_token` the tokens before it are emitted unseen by the target, which is lossy; with a lossless
    rule it is a stopper like any other.

    Args:
        head: of kind verifier.
        threshold: tau, between 0 and 1: tokens above it are accepted; default the head's own.
        limit: longest chain.

    Raises:
        UserError: a head of another kind, or a threshold out of range.

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
        """Whether the newest token is refused."""
        return signals[-1] <= self.threshold
