"""The contract of a verification rule: what the engine gives it and what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from draftproof.draft import Draft, Verdict
from draftproof.rng import Rng


@runtime_checkable
class Verifier(Protocol):
    """Decides which drafted tokens are accepted, and draws the bonus token."""

    @property
    def name(self) -> str:
        """The rule's name in Python, on the command line and in reports."""

    @property
    def lossless(self) -> bool:
        """Whether the output distribution is exactly the target's."""

    @property
    def branching(self) -> bool:
        """Whether the rule accepts drafts that branch."""

    @property
    def point_masses(self) -> bool:
        """Whether the rule accepts drafts without probabilities."""

    @property
    def constant_length(self) -> bool:
        """Whether the rule is exact only for drafts of one constant length."""

    @property
    def shared_noise(self) -> bool:
        """Whether target and draft draw with the same noise (`draftproof.rng.NoiseRoundRng`)."""

    def verify(
        self,
        drafts: Sequence[Draft],
        target_probs: Sequence[Float[Tensor, "_ vocab"]],
        rng: Rng,
        states: Sequence[object],
    ) -> list[Verdict]:
        """Return one verdict for each draft.

        Args:
            drafts: one draft for each row of the batch; lengths may differ.
            target_probs: p at the root and after each node of each draft, [1 + nodes, vocab].
            rng: the source of randomness; its draws have one leading row for each draft.
            states: the `state` of each row's last verdict; None in its first round.
        """
