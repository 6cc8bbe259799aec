"""Stoppers by the draft model's output: `confidence` (its largest probability), `entropy` and `predicted`.

The first two use the distribution at temperature 1 and before any transform. At temperature 0 q is a point mass, which
has probability 1 and entropy 0 at every token. The last one uses a draft head's own predictions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.draft import DraftStep
from draftproof.errors import UserError
from draftproof.stoppers.base import StopperBase

DEFAULT_LIMIT = 16


def probs_of(step: DraftStep) -> Float[Tensor, "drawn vocab"]:
    """The rows of q, which always exist, because drafters of point masses have no stopper."""
    assert step.probs is not None, "drafts of point masses have no rows of q"
    return step.probs


def own_probs(step: DraftStep) -> Float[Tensor, "drawn width"]:
    """The draft model's own distribution, at temperature 1 and before any transform."""
    assert step.logits is not None, "drafters pass logits to stoppers that read them"
    return step.logits.float().softmax(-1)


class ThresholdStopper(StopperBase):
    """Base class of stoppers with a threshold between 0 and 1, which is part of their name."""

    def __init__(self, name: str, threshold: float, limit: int) -> None:
        if not 0 < threshold < 1:
            raise UserError(f"stopper {name}: expected 0 < threshold < 1, got {threshold:g}")
        super().__init__(f"{name}:{threshold:g}", limit)
        self.threshold = threshold


class Confidence(ThresholdStopper):
    """Stops after a token if the draft model's largest probability for it was below a threshold."""

    reads_logits = True

    def __init__(self, threshold: float = 0.4, limit: int = DEFAULT_LIMIT) -> None:
        super().__init__("confidence", threshold, limit)

    def signal(self, step: DraftStep) -> Float[Tensor, " drawn"]:
        """The largest probability of each row."""
        return own_probs(step).amax(-1)

    def stop_after(self, signals: Sequence[float], row: int) -> bool:  # noqa: ARG002
        """Whether the largest probability of the newest row is below the threshold."""
        return signals[-1] < self.threshold


class Predicted(ThresholdStopper):
    """Stops before a token if the predicted probability that all tokens up to it are accepted is below a threshold.

    The draft head predicts each acceptance before the token is drawn, from the tokens before it (DSpark's confidence).
    """

    reads_predictions = True

    def __init__(self, threshold: float = 0.3, limit: int = DEFAULT_LIMIT) -> None:
        super().__init__("predicted", threshold, limit)

    def stop_after(self, signals: Sequence[float], row: int) -> bool:  # noqa: ARG002
        """Whether the product of all predictions, the next token's included, is below the threshold."""
        return math.prod(signals) < self.threshold


class Entropy(ThresholdStopper):
    """AdaEDL: stops when 1 - sqrt(gamma H), a lower bound on the acceptance probability, is below a moving threshold.

    H is the entropy of the draft model's distribution. The threshold follows the acceptance rate: it rises while the
    rate is below `goal`, and falls while the rate is above it. Every request has its own threshold, so its answer is
    the same alone and in any batch.

    Args:
        threshold: initial value of the moving threshold, between 0 and 1.
        limit: length of the longest chain.
        gamma: factor of the entropy in nats.
        goal: acceptance rate that the threshold is adapted to.

    Source: Agrawal et al. 2024 (AdaEDL, arXiv 2410.18351).
    """

    reads_logits = True
    _step = 0.01
    _memory = 0.5
    _inertia = 0.9

    def __init__(
        self, threshold: float = 0.4, limit: int = DEFAULT_LIMIT, *, gamma: float = 0.2, goal: float = 0.9
    ) -> None:
        super().__init__("entropy", threshold, limit)
        self._gamma = gamma
        self._goal = goal
        self._start = (threshold, goal)
        self._moving: dict[int, tuple[float, float]] = {}

    def signal(self, step: DraftStep) -> Float[Tensor, " drawn"]:
        """The lower bound on the acceptance probability of each token."""
        entropy: Tensor = torch.special.entr(own_probs(step)).sum(-1)
        return 1 - (self._gamma * entropy).sqrt()

    def stop_after(self, signals: Sequence[float], row: int) -> bool:
        """Whether the newest bound is below the row's threshold."""
        return signals[-1] < self._moving.get(row, self._start)[0]

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """Move the row's threshold by the acceptance rate of a round."""
        if drafted == 0:
            return
        threshold, rate = self._moving.get(row, self._start)
        rate = self._memory * rate + (1 - self._memory) * accepted / drafted
        moved = threshold + (self._step if rate < self._goal else -self._step)
        self._moving[row] = (self._inertia * threshold + (1 - self._inertia) * moved, rate)

    def release(self, row: int) -> None:
        """Forget the row's threshold."""
        self._moving.pop(row, None)
