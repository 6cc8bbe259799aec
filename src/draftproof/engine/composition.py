"""The check whether a drafter and a rule fit together, for declared names and for the parts of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from draftproof.backends.base import Backend


class _Part(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def branching(self) -> bool: ...
    @property
    def point_masses(self) -> bool: ...


@runtime_checkable
class DrafterLike(_Part, Protocol):
    """The properties of a drafter that decide which rules it fits."""

    @property
    def constant(self) -> bool: ...  # noqa: D102


@runtime_checkable
class VerifierLike(_Part, Protocol):
    """The properties of a rule that decide which drafters it fits."""

    @property
    def constant_length(self) -> bool: ...  # noqa: D102
    @property
    def shared_noise(self) -> bool: ...  # noqa: D102


@dataclass(frozen=True)
class DrafterTraits:
    """The declared properties of a drafter; see `Drafter` for the fields."""

    name: str
    branching: bool
    point_masses: bool
    constant: bool


@dataclass(frozen=True)
class VerifierTraits:
    """The declared properties of a rule; see `Verifier` for the fields."""

    name: str
    branching: bool
    point_masses: bool
    constant_length: bool
    shared_noise: bool = False


def misfit(drafter: DrafterLike, verifier: VerifierLike) -> str | None:
    """Why a drafter and a rule do not fit together; None if they do."""
    if drafter.branching and verifier.shared_noise:
        return (
            f"drafter {drafter.name} draws several tokens for one place, and with rule {verifier.name} they would all "
            "be equal, since draws for one place share their noise: use one chain"
        )
    if drafter.branching and not verifier.branching:
        return f"drafter {drafter.name} drafts trees, and rule {verifier.name} verifies chains only"
    if drafter.point_masses and not verifier.point_masses:
        return f"rule {verifier.name} needs the draft's probabilities, and drafter {drafter.name} has none"
    if verifier.constant_length and not drafter.constant:
        return (
            f"rule {verifier.name} is exact only for drafts of constant length whose probabilities after a text are "
            f"the same in every round, and those of {drafter.name} are not"
        )
    return None


def undraftable(target: Backend) -> str:
    """Why nothing can be drafted for a target, in words; empty where drafts can be taken back."""
    if target.capabilities.rollback:
        return ""
    because = getattr(target, "because", "")
    return f"drafted tokens cannot be taken back from {target.name}" + (f" ({because})" if because else "")
