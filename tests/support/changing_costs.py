"""Costs of rounds that change."""

from draftproof.drafters.auto import AutoDrafter, CandidateDrafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.stoppers.auto import Auto
from draftproof.stoppers.base import AcceptanceRates
from draftproof.stoppers.costs import DraftCosts
from draftproof.testing import TableModel
from draftproof.theory.cost import RoundCosts


def source(seed, costs, limit=2, *, drafter=ModelDrafter, rates=(0.5, 0.5)):
    """A source over a table model, with fixed costs."""
    stopper = Auto(costs, limit, assumed=AcceptanceRates(*rates))
    made = drafter(DraftModel(TableModel(3, seed, order=2), vocab_size=3), stopper)
    found = CandidateDrafter(f"table {seed}", stopper, iter(()))
    found.drafter = made
    return found


def changing(costs=(0.3, 0.25), **options):
    """A drafter that changes its mind between two sources and a lookup within a few tokens."""
    lookup = SuffixDrafter(3, threshold=0.0, shared=False)
    sources = [source(2 + place, RoundCosts(1.0, cost), **options) for place, cost in enumerate(costs)]
    return AutoDrafter(sources, lookup, DraftCosts())
