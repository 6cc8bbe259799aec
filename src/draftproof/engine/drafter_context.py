"""What a drafter declares of itself, and what it is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from draftproof.backends.base import Backend
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.drafters.base import Drafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.engine.composition import DrafterTraits
from draftproof.engine.parts import Part, StopperPart
from draftproof.engine.stopper_parts import DEFAULT_STOPPER, make_stopper
from draftproof.errors import UserError
from draftproof.stoppers.auto import ASSUMED, Auto
from draftproof.stoppers.base import AcceptanceRates, Stopper
from draftproof.stoppers.costs import UNKNOWN, LearnedCosts, PassCosts
from draftproof.verifiers.base import Verifier


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter can be made of.

    Attributes:
        target: the target's backend.
        draft: the draft model's, where there is one.
        stopper: its specification.
        spec: the drafter's own specification.
        part, argument: what it names.
        changes: temperature and top_k of the draft, where they differ from the request's.
        bits: of the weights of a head, where they are quantized; the draft model is quantized already.
        rule: that will verify the drafts; None where it is not known.
        ready: the stopper itself, where it is made already.
    """

    target: Backend
    draft: Backend | None
    stopper: str
    spec: str
    part: DrafterPart
    argument: str
    changes: dict[str, Any]
    bits: int | None = None
    rule: Verifier | None = None
    ready: Stopper | None = None

    def ends(self) -> Stopper:
        """The stopper."""
        if self.ready is None and self.stopper == DEFAULT_STOPPER:
            return assuming(self, PassCosts())
        return self.ready or make_stopper(self.stopper, self.spec if self.draft is None else self.draft.name)

    def model(self) -> DraftModel:
        """The draft model."""
        assert self.draft is not None, "checked by make_drafter"
        return DraftModel(self.draft, vocab_size=self.target.vocab_size, **self.changes)

    def own_model(self, name: str) -> SlotBackend:
        """The target, for drafters that work inside it.

        Raises:
            UserError: it has no slot cache.
        """
        if not isinstance(self.target, SlotBackend):
            raise UserError(f"drafter {name} works inside a model's cache, and {self.target.name} has none")
        return self.target


@dataclass(frozen=True, kw_only=True)
class DrafterPart(Part):
    """A drafter.

    Attributes:
        make: from materials and argument.
        reads_draft: whether it needs a draft model.
        takes_draft: whether it uses a draft model where there is one.
        inside: whether it works inside the target's own cache.
        reads_states: whether it reads the target's hidden states.
        learns: whether it drafts from earlier requests, too.
        stops: whether a stopper ends its drafts.
        point_masses: whether its tokens come without probabilities.
        covers: whether it can draft after every token, so that its lengths are as constant as its stopper's.
        steady: whether its probabilities after a text are the same in every round.
        rates: how often its tokens are accepted, before anything is counted.
        share: from materials and argument, what drafting a token costs in target passes, before anything is measured.
        several: from the argument, whether its drafts may branch.
        chains: from the argument, how many i.i.d. chains it draws; 1 for a tree.
        check: refuses an argument that cannot be read, for drafters that `make` needs a loaded target for.
    """

    make: Callable[[DrafterContext, str], Drafter]
    reads_draft: bool = False
    takes_draft: bool = False
    inside: bool = False
    reads_states: bool = False
    learns: bool = False
    stops: bool = True
    point_masses: bool = False
    covers: bool = True
    steady: bool = True
    rates: AcceptanceRates = ASSUMED
    share: Callable[[DrafterContext, str], float] = field(default=lambda *_: 0.1)
    several: Callable[[str], bool] = field(default=lambda _: False)
    chains: Callable[[str], int] = field(default=lambda _: 1)
    check: Callable[[str], object] = field(default=lambda _: None)

    @property
    def catches_up(self) -> bool:
        """Whether it must first read what others drafted: not where its cache is the target's own."""
        return not self.inside or self.reads_states

    @property
    def takes_length(self) -> bool:
        """Whether its argument is the length of a draft, which a stopper sets for other drafters."""
        return not self.stops and bool(self.argument)

    def traits(self, argument: str, stopper: StopperPart | None) -> DrafterTraits:
        """What a rule must know of it."""
        lengths = not self.stops if self.name == "none" else self.covers and stopper is not None and stopper.constant
        constant = lengths and self.steady
        name = f"{self.name}:{argument}" if argument else self.name
        return DrafterTraits(name, self.several(argument), self.point_masses, constant and not self.point_masses)


def assuming(parts: DrafterContext, passes: PassCosts) -> Auto:
    """The stopper `auto` of a drafter, with what can be assumed before anything is known."""
    share = parts.part.share(parts, parts.argument)
    costs = LearnedCosts(replace(UNKNOWN, draft=share + UNKNOWN.token), passes)
    return Auto(costs, assumed=parts.part.rates, catches_up=parts.part.catches_up)
