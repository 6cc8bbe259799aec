"""The contract of a stopper, which decides how long drafts get, and a base class with the usual defaults.

A stopper may look at everything that was drafted so far, including the newest token. It must not discard that token: a
sampled token must be verified. Under this condition every lossless rule stays lossless; a stopper that dropped its
newest token would change the output distribution.

A stopper works in two steps. `signal` computes one number for each drawn token on the model's device. `stop_after`
decides on the host from the numbers of a path. So a drafter may ask after every token, or draw several tokens first and
then cut the chain at the first token that ends it: the verified draft is the same.

A stopper that `reads_predictions` is asked before a token is drawn, with a prediction of its acceptance. It does not
know that token, so the chain may end before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        first: acceptance rate of the first token.
        later: acceptance rate of a token after an accepted one.
    """

    first: float = 0.5
    later: float = 0.7

    def at_least(self, other: AcceptanceRates) -> AcceptanceRates:
        """The higher of the two rates, for the first token and for later ones."""
        return AcceptanceRates(max(self.first, other.first), max(self.later, other.later))


Mean = int | float  # the type checks of the tests do not take an int for a float


@dataclass(frozen=True)
class RoundTime:
    """The time of a round and its amount of work.

    Attributes:
        draft: seconds of drafting.
        rest: seconds of everything else.
        rows: number of requests in the round.
        depth: length of the longest draft in tokens; 0 for a plain round.
        nodes: mean number of drafted tokens of a request; above `depth` if drafts branch, below it if some requests
            have short drafts or none.
        reads: largest number of tokens of a request that the target read besides its draft.
        prompt: tokens that the target read besides drafts and the newest token of each request, over all requests.
    """

    draft: float
    rest: float
    rows: int
    depth: int
    nodes: Mean
    reads: int = 1
    prompt: int = 0


@dataclass(frozen=True)
class Outlook:
    """What a drafter knows of a request before a round.

    Attributes:
        unread: tokens that the draft model has not read, the newest one not counted.
        limit: the most tokens that a draft may have; the request ends after one more.
        fresh: whether the target reads the request's prompt in this round.
    """

    unread: int
    limit: int
    fresh: bool


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
        """Width of the hidden states that it reads from DraftStep; 0 if it reads none."""

    @property
    def reads_logits(self) -> bool:
        """Whether it reads DraftStep.logits."""

    @property
    def reads_predictions(self) -> bool:
        """Whether its signals are the draft model's predictions of acceptance, so that it is asked before a draw."""

    @property
    def timed(self) -> bool:
        """Whether its decisions depend on the time of earlier rounds."""

    @property
    def reads_ahead(self) -> bool:
        """Whether the draft model should read parts of a prompt with the target, since drafts are likely."""

    def expect(self, outlooks: Mapping[int, Outlook]) -> None:
        """Called before `begin` with what is known of each row."""

    def begin(self, rows: Sequence[int], most: int = 1) -> None:
        """Called before each round, with the rows that draft in it and the largest number of drafts for each row."""

    def length(self, row: int) -> int:
        """Largest number of tokens that the row may draft this round, 0 to `limit`."""

    def drafts(self, row: int, most: int) -> int:
        """Number of drafts for the row this round, 1 to `most`; called by drafters that make several drafts."""

    def signal(self, step: DraftStep) -> Float[Tensor, " drawn"] | None:
        """One number for each drawn token, on the token's device; None if only `length` ends chains."""

    def stop_after(self, signals: Sequence[float], row: int) -> bool:
        """Whether the chain ends with its newest token, given the signals of all its tokens so far.

        If the stopper `reads_predictions`, the last signal is that of the next token, which is not drawn yet.
        """

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """Called after each round with the depth of the row's draft (a chain's length) and the accepted tokens."""

    def spent(self, time: RoundTime) -> None:
        """Called after each round, after `observe`, with the time of the round."""

    def release(self, row: int) -> None:
        """Called when the row's request has ended; unknown rows are ignored."""


class StopperBase:
    """Base class: a stopper that always allows `limit` tokens, reads nothing, has no signal and learns nothing."""

    constant = False
    hidden_size = 0
    reads_logits = False
    reads_predictions = False
    timed = False
    reads_ahead = True

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit

    def expect(self, outlooks: Mapping[int, Outlook]) -> None:
        """Does nothing: the decision does not depend on what drafts cost."""

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
