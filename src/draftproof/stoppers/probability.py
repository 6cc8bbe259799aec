"""Stopping by what the draft thinks of itself: the probability of its best token, or its entropy.

Knows: the draft model's rows, and how drafts fared so far. Does not know: models, targets.

Both look at the model's own distribution, at temperature 1 and before any transform: q itself is a point mass at
temperature 0, and would then always be sure of itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.draft import DraftStep
from draftproof.errors import UserError
from draftproof.stoppers.base import StopperBase

DEFAULT_LIMIT = 16


def probs_of(step: DraftStep) -> Float[Tensor, "drawn vocab"]:
    """Rows of q; drafters of point masses take no stopper."""
    assert step.probs is not None, "point masses have no probabilities to look at"
    return step.probs


def own_probs(step: DraftStep) -> Float[Tensor, "drawn width"]:
    """The draft model's own distribution."""
    assert step.logits is not None, "drafters hand over logits to stoppers that read them"
    return step.logits.float().softmax(-1)


def check_threshold(name: str, threshold: float) -> None:
    """Refuse thresholds outside (0, 1).

    Raises:
        UserError: naming stopper and value.
    """
    if not 0 < threshold < 1:
        raise UserError(f"stopper {name} was given {threshold:g}: legal is 0 < threshold < 1")


class Confidence(StopperBase):
    """Stop after a token that was drawn from an undecided row: the model's largest probability is below a threshold.

    Args:
        threshold: smallest max probability that goes on, between 0 and 1.
        limit: longest chain.

    Raises:
        UserError: threshold out of range.
    """

    reads_logits = True

    def __init__(self, threshold: float = 0.4, limit: int = DEFAULT_LIMIT) -> None:
        check_threshold("confidence", threshold)
        super().__init__(f"confidence:{threshold:g}", limit)
        self._threshold = threshold

    def signal(self, step: DraftStep) -> Float[Tensor, " drawn"]:
        """The largest probability of each row."""
        return own_probs(step).amax(-1)

    def stop_after(self, signals: Sequence[float], row: int) -> bool:  # noqa: ARG002
        """Whether the newest row was undecided."""
        return signals[-1] < self._threshold


class Entropy(StopperBase):
    """AdaEDL: stop when the entropy's lower bound on acceptance, 1 - sqrt(gamma H(q)), falls below a moving threshold.

    The threshold follows the acceptance rate: it rises while fewer tokens are accepted than wished for, and falls while
    more are. Every request has its own, so that it is answered alike alone and in any batch.

    Args:
        threshold: where the moving threshold starts, between 0 and 1.
        limit: longest chain.
        gamma: factor of the entropy in nats.
        wanted: acceptance rate the threshold steers to.

    Raises:
        UserError: threshold out of range.

    Source: Agrawal et al. 2024 (AdaEDL, arXiv 2410.18351).
    """

    reads_logits = True
    _step = 0.01
    _memory = 0.5
    _inertia = 0.9

    def __init__(
        self, threshold: float = 0.4, limit: int = DEFAULT_LIMIT, *, gamma: float = 0.2, wanted: float = 0.9
    ) -> None:
        check_threshold("entropy", threshold)
        super().__init__(f"entropy:{threshold:g}", limit)
        self._gamma, self._goal = gamma, wanted
        self._start = (threshold, wanted)
        self._moving: dict[int, tuple[float, float]] = {}

    def signal(self, step: DraftStep) -> Float[Tensor, " drawn"]:
        """The bound on acceptance."""
        entropy: Tensor = torch.special.entr(own_probs(step)).sum(-1)
        return 1 - (self._gamma * entropy).sqrt()

    def stop_after(self, signals: Sequence[float], row: int) -> bool:
        """Whether the newest bound is below the row's threshold."""
        return signals[-1] < self._moving.get(row, self._start)[0]

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """Move the row's threshold by a round's acceptance."""
        if drafted == 0:
            return
        threshold, rate = self._moving.get(row, self._start)
        rate = self._memory * rate + (1 - self._memory) * accepted / drafted
        goal = threshold + (self._step if rate < self._goal else -self._step)
        self._moving[row] = (self._inertia * threshold + (1 - self._inertia) * goal, rate)

    def release(self, row: int) -> None:
        """Forget the row's threshold."""
        self._moving.pop(row, None)
