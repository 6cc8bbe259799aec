"""Stopping by what the draft thinks of itself: the probability of its best token, or its entropy.

Knows: one row of q at a time, and how drafts fared so far. Does not know: models, targets.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.draft import DraftStep
from draftproof.errors import UserError

DEFAULT_LIMIT = 16


def _row(step: DraftStep) -> Float[Tensor, " vocab"]:
    assert step.probs is not None, "point masses have no confidence; drafters of point masses take no stopper"
    return step.probs


def _check(name: str, threshold: float) -> None:
    if not 0 < threshold < 1:
        raise UserError(f"stopper {name} was given {threshold:g}: legal is 0 < threshold < 1")


class Confidence:
    """Stop after a token that was drawn from an undecided row: max q below a threshold.

    Args:
        threshold: smallest max probability that goes on, between 0 and 1.
        limit: longest chain.

    Raises:
        UserError: threshold out of range.
    """

    constant = False
    needs_hidden = False

    def __init__(self, threshold: float = 0.4, limit: int = DEFAULT_LIMIT) -> None:
        _check("confidence", threshold)
        self.limit = limit
        self.name = f"confidence:{threshold:g}"
        self._threshold = threshold

    def stop_after(self, step: DraftStep) -> bool:
        """Whether the chain ends with this token."""
        return step.depth >= self.limit or float(_row(step).max()) < self._threshold

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """Nothing to learn."""

    def release(self, row: int) -> None:
        """Nothing to forget."""


class Entropy:
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

    constant = False
    needs_hidden = False
    _step = 0.01
    _memory = 0.5
    _inertia = 0.9

    def __init__(
        self, threshold: float = 0.4, limit: int = DEFAULT_LIMIT, *, gamma: float = 0.2, wanted: float = 0.9
    ) -> None:
        _check("entropy", threshold)
        self.limit = limit
        self.name = f"entropy:{threshold:g}"
        self._gamma, self._wanted = gamma, wanted
        self._start = (threshold, wanted)
        self._moving: dict[int, tuple[float, float]] = {}

    def stop_after(self, step: DraftStep) -> bool:
        """Whether the chain ends with this token."""
        entropy = float(torch.special.entr(_row(step)).sum())
        threshold, _ = self._moving.get(step.row, self._start)
        return step.depth >= self.limit or 1 - (self._gamma * entropy) ** 0.5 < threshold

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """Move the row's threshold by a round's acceptance."""
        if drafted == 0:
            return
        threshold, rate = self._moving.get(row, self._start)
        rate = self._memory * rate + (1 - self._memory) * accepted / drafted
        goal = threshold + (self._step if rate < self._wanted else -self._step)
        self._moving[row] = (self._inertia * threshold + (1 - self._inertia) * goal, rate)

    def release(self, row: int) -> None:
        """Forget the row's threshold."""
        self._moving.pop(row, None)
