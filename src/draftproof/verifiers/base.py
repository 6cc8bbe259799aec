"""The contract of a verification rule.

Knows: what a verifier is given and returns. Does not know: any rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from draftproof.draft import Draft, Verdict
from draftproof.rng import Rng


@runtime_checkable
class Verifier(Protocol):
    """Decides which drafted tokens are kept and draws the bonus token."""

    @property
    def name(self) -> str:
        """Its name in Python, on the command line and in reports."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether the output law is exactly the target's."""
        ...

    @property
    def branching(self) -> bool:
        """Whether it can use drafts that branch."""
        ...

    @property
    def point_masses(self) -> bool:
        """Whether it can use drafts that come without probabilities."""
        ...

    @property
    def constant_length(self) -> bool:
        """Whether it is exact for drafts of one constant length only."""
        ...

    def verify(
        self,
        drafts: Sequence[Draft],
        target_probs: Sequence[Float[Tensor, "_ vocab"]],
        rng: Rng,
        states: Sequence[object],
    ) -> list[Verdict]:
        """One verdict for each draft.

        Args:
            drafts: one for each row of the batch; lengths may differ.
            target_probs: for each draft, p at the root and after each node, [1 + nodes, vocab].
            rng: draws with one leading row for each draft.
            states: the `state` of each row's last verdict, None in its first round.
        """
        ...
