"""The contract of a stopper, which decides how long drafts get, and a base class with the usual defaults.

A stopper may look at everything that was drafted so far, the newest token included. It may not discard that token: a
token that was sampled must be verified. Under this condition every lossless rule stays lossless; a stopper that drops
its newest token would change the output distribution.

A stopper works in two steps. `signal` computes one number for each drawn token on the model's device. `stop_after`
decides on the host, from the numbers of a path. So a drafter may ask after every token, or it may draw several tokens
first and then cut the chain at the first token that ends it: the verified draft is the same.

A stopper that `reads_predictions` is asked before a token is drawn, with a prediction of its acceptance. It knows
nothing of that token, so the chain may end before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from draftproof.draft import DraftStep


@dataclass(frozen=True)
class AcceptanceRates:
    """How often drafted tokens are accepted, as probabilities.

    The defaults are optimistic: with a low rate nothing is drafted, so a rate that is too low would never be corrected.

    Attributes:
        first: rate of the first token.
        later: rate of a token after an accepted one.
    """

    first: float = 0.5
    later: float = 0.7

    def at_least(self, other: AcceptanceRates) -> AcceptanceRates:
        """The higher of the two rates, for the first token and for later ones."""
        return AcceptanceRates(max(self.first, other.first), max(self.later, other.later))


Mean = int | float  # the type checks of the tests do not take an int for a float


@dataclass(frozen=True)
class RoundTime:
    """How long a round took, and what was done in it.

    Attributes:
        draft: seconds of drafting.
        rest: seconds of everything else.
        rows: number of requests in the round.
        depth: tokens of the longest draft; 0 for a plain round.
        nodes: drafted tokens of a request, the mean over all; more than `depth` where drafts branch, and less where
            some requests have short drafts or none.
        reads: the largest number of tokens of a request that the target read besides its draft.
    """

    draft: float
    rest: float
    rows: int
    depth: int
    nodes: Mean
    reads: int = 1


@runtime_checkable
class Stopper(Protocol):
    """Decides how long chains of drafted tokens get. A row is the id of a request."""

    @property
    def name(self) -> str:
        """The stopper's name in Python, on the command line and in reports."""

    @property
    def limit(self) -> int:
        """Length of the longest chain that it allows."""

    @property
    def constant(self) -> bool:
        """Whether every chain has length `limit`, which some rules need."""

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states that it reads from DraftStep; 0 when it reads none."""

    @property
    def reads_logits(self) -> bool:
        """Whether it reads DraftStep.logits."""

    @property
    def reads_predictions(self) -> bool:
        """Whether its signals are the draft model's predictions of acceptance, so that it is asked before a draw."""

    @property
    def timed(self) -> bool:
        """Whether its decisions depend on the time of earlier rounds."""

    def begin(self, rows: Sequence[int], most: int = 1) -> None:
        """Called before each round, with the rows that draft in it and the largest number of drafts for each row."""

    def length(self, row: int) -> int:
        """Largest number of tokens that the row may draft this round, 0 to `limit`."""

    def drafts(self, row: int, most: int) -> int:
        """Number of drafts for the row this round, 1 to `most`; called by drafters that make several drafts."""

    def signal(self, step: DraftStep) -> Float[Tensor, " drawn"] | None:
        """One number for each drawn token, on the token's device; None when only `length` ends chains."""

    def stop_after(self, signals: Sequence[float], row: int) -> bool:
        """Whether the chain ends with its newest token, given the signals of all its tokens so far.

        Where it `reads_predictions`, the last signal is that of the next token, which is not drawn yet.
        """

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """Called after each round with the depth of the row's draft (a chain's length) and the accepted tokens."""

    def spent(self, time: RoundTime) -> None:
        """Called after each round, after `observe`, with the time that it took."""

    def release(self, row: int) -> None:
        """Called when the row's request has ended; unknown rows are ignored."""


class StopperBase:
    """A stopper that always allows `limit` tokens, reads no hidden states, has no signal and learns nothing."""

    constant = False
    hidden_size = 0
    reads_logits = False
    reads_predictions = False
    timed = False

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit

    def begin(self, rows: Sequence[int], most: int = 1) -> None:
        """Does nothing: the decision does not depend on the other rows."""

    def length(self, row: int) -> int:  # noqa: ARG002
        """The limit."""
        return self.limit

    def drafts(self, row: int, most: int) -> int:  # noqa: ARG002
        """The largest number allowed."""
        return most

    def signal(self, step: DraftStep) -> Float[Tensor, " drawn"] | None:  # noqa: ARG002
        """None: there is no signal."""
        return None

    def stop_after(self, signals: Sequence[float], row: int) -> bool:  # noqa: ARG002
        """False: only `length` ends a chain."""
        return False

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """Does nothing."""

    def spent(self, time: RoundTime) -> None:
        """Does nothing."""

    def release(self, row: int) -> None:
        """Does nothing."""
