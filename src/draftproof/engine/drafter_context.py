"""The declaration of a drafter, and the context that it is made from."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from draftproof.backends.base import Backend, info
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.heads.base import TargetHead
from draftproof.drafters.base import Drafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.head import HeadDraftModel, head_drafter
from draftproof.engine.composition import DrafterTraits
from draftproof.engine.parts import Part, StopperPart
from draftproof.engine.stopper_parts import DEFAULT_STOPPER, make_stopper
from draftproof.errors import UserError
from draftproof.stoppers.auto import ASSUMED, Auto
from draftproof.stoppers.base import AcceptanceRates, Stopper
from draftproof.stoppers.costs import UNKNOWN, DraftCosts, LearnedCosts
from draftproof.verifiers.base import Verifier

_HEAD_BITS = 8  # of a head's weights over a target of few bits


@dataclass(frozen=True)
class DrafterContext:
    """Everything that a drafter can be made from."""

    target: Backend
    draft: Backend | None  # the draft model, if there is one
    stopper: str  # specification of the stopper
    spec: str  # specification of the drafter
    part: DrafterPart  # the declaration that `spec` names
    argument: str  # the argument in `spec`
    changes: dict[str, Any]  # temperature and top_k of the draft, if they differ from the request's
    bits: int | None = None  # bits of a quantized head's weights; the draft model is already quantized
    whole: bool = False  # whether a head keeps its dtype, and its output layer all bits
    rule: Verifier | None = None  # the rule that will verify the drafts; None if unknown
    ready: Stopper | None = None  # the stopper, if it is already made
    budget: float = math.inf  # drafted tokens of a round, over all its requests

    def make_stopper(self) -> Stopper:
        """The stopper."""
        if self.ready is None and self.stopper == DEFAULT_STOPPER:
            return assuming(self, DraftCosts())
        return self.ready or make_stopper(self.stopper, self.spec if self.draft is None else self.draft.name)

    def model(self) -> DraftModel:
        """The draft model."""
        assert self.draft is not None, "checked by make_drafter"
        return DraftModel(self.draft, vocab_size=self.target.vocab_size, **self.changes)

    def head_drafter(self, head: TargetHead, name: str, chains: int) -> Drafter:
        """The drafter of a head on the target's hidden states."""
        model, stopper = HeadDraftModel(head, self.target_backend(name), **self.changes), self.make_stopper()
        if head.deepest is not None and isinstance(stopper, Auto):
            stopper.limit = min(stopper.limit, head.deepest)  # longer drafts never happen, so they must not be planned
        return head_drafter(model, stopper, name, chains=chains)

    def with_head_bits(self, make: Callable[[int | None], TargetHead]) -> TargetHead:
        """A head with weights of the bits that were asked for.

        Where nothing was asked for, a head of floats would read as much as a good part of a target of few bits. So on a
        CPU it has 8 bits there, if it can be rounded and need not be whole.
        """
        facts = info(self.target)
        if (
            self.bits is None
            and not self.whole
            and facts is not None
            and facts.bits is not None
            and self.target.device.type == "cpu"
        ):
            with suppress(UserError):  # no such form of it here, or a reason that is raised below, too
                return make(_HEAD_BITS)
        return make(self.bits)

    def target_backend(self, name: str) -> SlotBackend:
        """The target, for drafters that share its cache; raises UserError if it has no slot cache."""
        if not isinstance(self.target, SlotBackend):
            raise UserError(
                f"drafter {name} works inside the target's slot cache, but {self.target.name} has none: choose "
                "another drafter"
            )
        return self.target


@dataclass(frozen=True, kw_only=True)
class DrafterPart(Part):
    """The declaration of a drafter."""

    make: Callable[[DrafterContext, str], Drafter]  # from context and argument
    # Its traits, before its argument and its stopper are known.
    traits: DrafterTraits = field(default_factory=DrafterTraits)
    learns: bool = False  # whether it also drafts from earlier requests
    stops: bool = True  # whether a stopper ends its drafts
    rates: AcceptanceRates = ASSUMED  # assumed acceptance rates before anything is counted
    # From context and argument: the assumed cost of a drafted token in target passes, before anything is measured.
    share: Callable[[DrafterContext, str], float] = field(default=lambda *_: 0.1)
    all_products: bool = False  # whether it computes as many products as the target, with smaller weights
    branches: Callable[[str], bool] = field(default=lambda _: False)  # from the argument: whether its drafts may branch
    # From the argument: the number of i.i.d. chains; 1 for a tree.
    chains: Callable[[str], int] = field(default=lambda _: 1)
    # Refuses an invalid argument before the target is loaded, which `make` needs.
    check: Callable[[str], object] = field(default=lambda _: None)

    @property
    def catches_up(self) -> bool:
        """Whether it must first read what others drafted; not if it shares the target's cache."""
        return not self.traits.shares_cache or self.traits.reads_states

    @property
    def takes_length(self) -> bool:
        """Whether its argument is the draft length, which a stopper sets for other drafters."""
        return not self.stops and bool(self.argument)

    def traits_with(self, argument: str, stopper: StopperPart | None) -> DrafterTraits:
        """Its traits with an argument and a stopper."""
        return replace(
            self.traits,
            name=f"{self.name}:{argument}" if argument else self.name,
            branching=self.branches(argument),
            constant_length=self.traits.constant_length if stopper is None else stopper.constant,
        )


def assuming(parts: DrafterContext, passes: DraftCosts) -> Auto:
    """The stopper `auto` of a drafter, with assumed costs and rates."""
    share = parts.part.share(parts, parts.argument)
    costs = LearnedCosts(replace(UNKNOWN, draft=share + UNKNOWN.token), passes, all_products=parts.part.all_products)
    return Auto(costs, assumed=parts.part.rates, catches_up=parts.part.catches_up, most=parts.budget)
