"""The contract of a stopping rule, and what most rules share.

Knows: what a stopper is asked and told. Does not know: any rule, drafter or model.

A stopper may look at everything drafted so far, the newest token included, and it may not throw that token away: what
was sampled is submitted. Then every lossless rule stays lossless; a rule that drops its last token is biased.

It looks in two steps. `signal` computes one number for each drawn token where the model is; `stop_after` decides on the
host from the numbers of a path. So a drafter may ask after every token, or draw several more first and cut at the first
token that ends its chain: the draft that is submitted is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from draftproof.draft import DraftStep
from draftproof.theory.cost import BatchCosts


@dataclass(frozen=True)
class AcceptanceRates:
    """How often drafted tokens are accepted; the defaults are hopeful, since a rate that is thought low is never seen.

    Attributes:
        first: a first token.
        later: one after an accepted one.
    """

    first: float = 0.5
    later: float = 0.7

    def or_better(self, other: AcceptanceRates) -> AcceptanceRates:
        """The higher of each."""
        return AcceptanceRates(max(self.first, other.first), max(self.later, other.later))


@runtime_checkable
class Stopper(Protocol):
    """Decides how long chains of drafted tokens get."""

    @property
    def name(self) -> str:
        """Its name in Python, on the command line and in reports."""
        ...

    @property
    def limit(self) -> int:
        """Longest chain it ever lets pass."""
        ...

    @property
    def constant(self) -> bool:
        """Whether every chain has length `limit` (some rules need that)."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states it reads from DraftStep; 0 when it reads none."""
        ...

    @property
    def reads_logits(self) -> bool:
        """Whether it reads DraftStep.logits."""
        ...

    @property
    def needs_costs(self) -> bool:
        """Whether it cannot decide before it knows what rounds cost on this machine."""
        ...

    def calibrate(self, costs: BatchCosts, rates: AcceptanceRates) -> None:
        """Take note of what rounds cost here and of how often drafted tokens are accepted, if it `needs_costs`."""
        ...

    def begin(self, rows: Sequence[int], most: int = 1) -> None:
        """Told before each round which rows draft in it, and how many drafts each can get at most."""
        ...

    def wanted(self, row: int) -> int:
        """Longest chain that a row shall draft this round, 0 to `limit`."""
        ...

    def drafts(self, row: int, most: int) -> int:
        """How many drafts a row shall get this round, 1 to `most`; asked by drafters that make several."""
        ...

    def signal(self, step: DraftStep) -> Float[Tensor, " drawn"] | None:
        """One number for each drawn token, on its device; None when `wanted` is all there is to say."""
        ...

    def stop_after(self, signals: Sequence[float], row: int) -> bool:
        """Whether the chain ends with its newest token; `signals` are those of its tokens from the first on."""
        ...

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """Told after each round how deep a row's draft went (the length of a chain), and how much was accepted."""
        ...

    def release(self, row: int) -> None:
        """The row's request has ended; forget it (unknown rows are fine)."""
        ...


class StopperBase:
    """A stopper that wants `limit` tokens, reads no hidden states, has no signal and learns nothing.

    Args:
        name: its name.
        limit: longest chain.
    """

    constant = False
    hidden_size = 0
    reads_logits = False
    needs_costs = False

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit

    def calibrate(self, costs: BatchCosts, rates: AcceptanceRates) -> None:
        """Nothing depends on costs."""

    def begin(self, rows: Sequence[int], most: int = 1) -> None:
        """Nothing that depends on company."""

    def wanted(self, row: int) -> int:  # noqa: ARG002
        """The limit."""
        return self.limit

    def drafts(self, row: int, most: int) -> int:  # noqa: ARG002
        """All of them."""
        return most

    def signal(self, step: DraftStep) -> Float[Tensor, " drawn"] | None:  # noqa: ARG002
        """Nothing to look at."""
        return None

    def stop_after(self, signals: Sequence[float], row: int) -> bool:  # noqa: ARG002
        """The length alone ends a chain."""
        return False

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """Nothing to learn."""

    def release(self, row: int) -> None:
        """Nothing to forget."""
