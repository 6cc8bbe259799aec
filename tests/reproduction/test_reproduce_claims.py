"""Claims are judged by intervals: made-up clusters for which they hold, are undecided, or are violated."""

import math

import pytest
import torch

from draftproof.bench.estimate import Estimate, bootstrap, resample
from draftproof.errors import UserError
from draftproof.reproduction.claims import Judgement, Kind, claim, column, judge
from draftproof.reproduction.paper_tables import PaperTable
from draftproof.reproduction.recipes.base import (
    ANY,
    Mark,
    Missing,
    OurNumber,
    implied_acceptance,
    mark_cells,
    picture_cells,
)
from draftproof.theory.lengths import iid_block_efficiency


def sums(*means, clusters=40, noise=1.0):
    """Columns with a mean each and noise of their own."""
    generator = torch.Generator().manual_seed(7)
    return torch.stack([mean + noise * torch.randn(clusters, generator=generator) for mean in means], -1).double()


def gap(totals):
    return totals[:, 0] - totals[:, 1]


@pytest.mark.parametrize(
    ("means", "verdict"),
    [((5.0, 3.0), Judgement.HOLDS), ((3.0, 3.0), Judgement.UNDECIDED), ((3.0, 5.0), Judgement.VIOLATED)],
)
def test_made_up_records_are_judged_by_their_interval(means, verdict):
    assert claim("a - b > 0", Kind.MUST, resample(sums(*means), gap)).verdict is verdict


def test_pairing_decides_what_unpaired_columns_could_not():
    noise = sums(0.0, noise=10.0)
    paired = torch.cat([noise + 0.1, noise], -1)  # the same noise in both columns
    alone = torch.cat([noise + 0.1, sums(0.0, 0.0, noise=10.0)[:, 1:]], -1)
    assert judge(resample(paired, gap)) is Judgement.HOLDS
    assert judge(resample(alone, gap)) is Judgement.UNDECIDED


def test_a_bare_mean_is_never_enough():
    values = torch.tensor([[10.0], *([[-0.1]] * 20)])  # the mean is above 0, by one cluster
    found = resample(values, column(0))
    assert found.value > 0
    assert judge(found) is Judgement.UNDECIDED


@pytest.mark.parametrize(
    ("value", "at_least", "verdict"),
    [
        (0.0, True, Judgement.HOLDS),
        (0.0, False, Judgement.VIOLATED),
        (-1e-12, True, Judgement.HOLDS),
        (-1e-3, True, Judgement.VIOLATED),
        (1e-3, False, Judgement.HOLDS),
        (math.nan, True, Judgement.UNDECIDED),
    ],
)
def test_computed_values_are_judged_as_they_are(value, at_least, verdict):
    assert judge(Estimate.exact(value), at_least=at_least) is verdict


def test_intervals_cover_at_their_level():
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for trial in range(200):
        values = torch.randn(10, 1, generator=generator) + 1.0
        found = resample(values / 10, column(0), resamples=300, seed=trial)
        inside += found.low <= 1.0 <= found.high
    assert 0.9 <= inside / 200 <= 0.99


def test_ratios_are_of_totals():
    values = torch.tensor([[1.0, 1.0], [9.0, 3.0]])  # two clusters have a value and no interval
    assert judge(resample(values, column(0))) is Judgement.UNDECIDED
    assert resample(values, lambda t: t[:, 0] / t[:, 1]).value == pytest.approx(2.5)  # 10 / 4, not the mean of 1 and 3


def test_the_slow_bootstrap_agrees_with_the_fast_one():
    values = sums(1.0)
    fast = resample(values / len(values), column(0))
    slow = bootstrap(values[:, 0].tolist(), lambda some: sum(some) / len(some), resamples=2000)
    assert slow.value == pytest.approx(fast.value)
    assert slow.low == pytest.approx(fast.low, abs=0.05)
    assert slow.plus(-1.0).high == pytest.approx(slow.high - 1.0)
    assert slow.below(2.0).low == pytest.approx(2.0 - slow.high)


def test_one_prompt_has_no_interval():
    with pytest.raises(UserError, match="expected at least 2 prompts for an interval, got 1"):
        resample(torch.ones(1, 1), column(0))
    with pytest.raises(UserError, match=r"expected a level of confidence between 0 and 1, got 1.5"):
        resample(torch.ones(3, 1), column(0), level=1.5)


PAPER = PaperTable(
    name="x", place="p", title="t", setting="s", columns=("BE", "gain %"), rows={"A": (3.0, 5.0), "B": (None, 8.0)}
)
HELD = claim("held", Kind.MUST, Estimate.exact(1.0))
OPEN = claim("open", Kind.MUST, Estimate(0.5, -1.0, 2.0, 10))
BROKEN = claim("broken", Kind.MUST, Estimate.exact(-1.0))


def marks(**answers):
    return {(cell.row, cell.column): cell for cell in mark_cells(PAPER, {(ANY, k): v for k, v in answers.items()})}


def test_cells_are_marked_by_tolerance_then_by_claims():
    close = OurNumber(Estimate.exact(3.1), 0.05, (BROKEN,), relative=True)
    assert marks(BE=close)["A", "BE"].mark is Mark.REPRODUCED  # within 0.15, whatever the claims
    far = {
        name: OurNumber(Estimate.exact(4.0), 0.05, (HELD, other), "why", relative=True)
        for name, other in (("held", HELD), ("open", OPEN), ("broken", BROKEN))
    }
    assert marks(BE=far["held"])["A", "BE"].mark is Mark.DIRECTION
    assert marks(BE=far["held"])["A", "BE"].reason == "why"
    for name in ("open", "broken"):
        cell = marks(BE=far[name])["A", "BE"]
        assert cell.mark is Mark.NOT
        assert name in cell.reason


def test_cells_without_counterpart_say_so_and_empty_ones_are_none():
    found = marks(BE=Missing("no such heads"))
    assert found["A", "BE"].mark is Mark.NOT
    assert found["A", "BE"].reason == "no such heads"
    assert found["A", "gain %"].mark is Mark.NOT
    assert ("B", "BE") not in found


def test_a_number_without_claims_is_not_reproduced_by_being_there():
    assert marks(BE=OurNumber(Estimate.exact(9.0), 0.1, (), "other seconds"))["A", "BE"].mark is Mark.NOT


def test_pictures_are_marked_by_their_claims():
    sampled = claim("sampled", Kind.MODELS, Estimate(1.0, 0.5, 1.5, 10))
    found = [cell.mark for cell in picture_cells([HELD, sampled, OPEN, BROKEN])]
    assert found == [Mark.REPRODUCED, Mark.DIRECTION, Mark.NOT, Mark.NOT]


def test_implied_acceptance_undoes_the_iid_formula():
    assert implied_acceptance(iid_block_efficiency(0.7, 8), 8) == pytest.approx(0.7)
