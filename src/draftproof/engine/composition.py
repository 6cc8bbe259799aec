"""Checks whether a drafter and a rule fit together, for declared names and for the parts of an engine."""

from __future__ import annotations

from dataclasses import dataclass, fields

from draftproof.backends.base import Backend, why_plain
from draftproof.drafters.base import Drafter
from draftproof.verifiers.base import Verifier


@dataclass(frozen=True, kw_only=True)
class DrafterTraits:
    """The traits by which a drafter fits models and rules: declared by its part, or read from a drafter object."""

    name: str = ""  # with its argument
    branching: bool = False  # whether its drafts may branch
    point_masses: bool = False  # whether its tokens come without probabilities
    # Whether each draft is as long as its request allows; the stopper decides it if there is one.
    constant_length: bool = False
    # Whether it can draft after every token, so that its lengths are as constant as its stopper's.
    full_vocabulary: bool = True
    stationary: bool = True  # whether its probabilities after the same text are the same in every round
    shares_cache: bool = False  # whether it works inside the target's cache
    reads_states: bool = False  # whether it reads the target's hidden states
    reads_draft: bool = False  # whether it needs a draft model
    accepts_draft_model: bool = False  # whether it uses a draft model if there is one
    depends_on_clock: bool = False  # whether its drafts depend on the time of earlier rounds; set for objects only

    @classmethod
    def of(cls, drafter: Drafter) -> DrafterTraits:
        """The traits of a drafter object."""
        return cls(
            name=drafter.name,
            branching=drafter.branching,
            point_masses=drafter.point_masses,
            constant_length=drafter.constant,
            depends_on_clock=drafter.timed,
        )

    @property
    def constant(self) -> bool:
        """Whether all drafts have the same length, and the same probabilities after the same text in every round."""
        return self.constant_length and self.full_vocabulary and self.stationary


@dataclass(frozen=True, kw_only=True)
class VerifierTraits:
    """The traits by which a rule fits drafters; `Verifier` explains the fields."""

    name: str
    branching: bool
    point_masses: bool
    constant_length: bool
    shared_noise: bool = False

    @classmethod
    def of(cls, verifier: Verifier) -> VerifierTraits:
        """The traits of a verifier object."""
        return cls(**{each.name: getattr(verifier, each.name) for each in fields(cls)})


HEAD = DrafterTraits(shares_cache=True, reads_states=True, full_vocabulary=False, stationary=False)  # drafts from one


def incompatible_reason(drafter: DrafterTraits, verifier: VerifierTraits) -> str | None:
    """Why a drafter and a rule do not fit together; None if they do."""
    if drafter.branching and verifier.shared_noise:
        return (
            f"drafter {drafter.name} draws several tokens for one position, but with rule {verifier.name} they would "
            "all be equal, since draws for one position share their noise: use one chain"
        )
    if drafter.branching and not verifier.branching:
        return f"drafter {drafter.name} drafts trees, but rule {verifier.name} verifies chains only"
    if drafter.point_masses and not verifier.point_masses:
        return f"rule {verifier.name} needs the draft's probabilities, but drafter {drafter.name} has none"
    if verifier.constant_length and not drafter.constant:
        return (
            f"rule {verifier.name} is exact only for drafts of constant length whose probabilities after a text are "
            f"the same in every round, but those of {drafter.name} are not"
        )
    return None


def unbounded_reason(drafter: Drafter, verifier: Verifier) -> str | None:
    """Why a draft budget cannot be used with these parts; None if it can."""
    if drafter.branching:
        return (
            f"draft_budget chooses among single chains, but drafter {drafter.name} drafts trees: leave it out, or use "
            "a drafter of one chain"
        )
    if verifier.constant_length:
        return (
            f"rule {verifier.name} is exact only for drafts of constant length, but draft_budget makes lengths vary: "
            "leave one of them out"
        )
    return None


def no_rollback_reason(target: Backend) -> str:
    """Why nothing can be drafted for a target; empty if drafts can be taken back."""
    if target.capabilities.rollback:
        return ""
    reason = why_plain(target)
    return f"drafted tokens cannot be taken back from {target.name}" + (f" ({reason})" if reason else "")
