"""Statistics of sums over records: block efficiencies, gains, speeds, with intervals and claims about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.bench.estimate import Estimate, Item, Statistic, bootstrap, resample
from draftproof.reproduction.claims import Claim, Kind, claim
from draftproof.reproduction.expected_accepted import key
from draftproof.reproduction.experiments import Experiments, PairNames, Places, Row
from draftproof.reproduction.recipes.base import implied_acceptance

TIMED = ("num_tokens", "num_target_calls", "seconds")


def place_sums(rows: Sequence[Row], columns: Sequence[str]) -> Float[Tensor, "prompts columns"]:
    """For each prompt the number of places, then the accepted tokens of each column."""
    return torch.tensor(
        [[row["places"], *(row["accepted"][name] for name in columns)] for row in rows], dtype=torch.float64
    )


def run_sums(
    parts: Sequence[Sequence[Row]], fields: Sequence[str] = ("num_tokens", "num_target_calls")
) -> Float[Tensor, "prompts columns"]:
    """For each prompt the named counts of every run, summed over seeds; columns run after run."""
    count = 1 + max(row["prompt"] for row in parts[0])
    sums = torch.zeros(count, len(parts) * len(fields), dtype=torch.float64)
    for number, rows in enumerate(parts):
        for row in rows:
            for place, field in enumerate(fields):
                value = row["seconds"]["total"] if field == "seconds" else row[field]
                sums[row["prompt"], number * len(fields) + place] += value
    return sums


def efficiency(column: int) -> Statistic:
    """1 + accepted tokens per position; column 0 counts the positions."""
    return lambda totals: 1 + totals[:, column] / totals[:, 0]


def gain(above: int, below: int) -> Statistic:
    """Per cent by which one column's block efficiency exceeds another's."""
    return lambda totals: 100 * (efficiency(above)(totals) / efficiency(below)(totals) - 1)


def speed(run: int, plain: int) -> Statistic:
    """Tokens a second of a run over those of another; three columns a run: tokens, calls, seconds."""
    return lambda t: (t[:, 3 * run] / t[:, 3 * run + 2]) / (t[:, 3 * plain] / t[:, 3 * plain + 2])


def faster(run: int, other: int, unit: float = 1.0) -> Statistic:
    """The speed of a run over another one's, minus 1, times `unit`."""
    return lambda totals: unit * (speed(run, other)(totals) - 1)


def run_efficiency(run: int, fields: int = 2) -> Statistic:
    """Tokens a target call of a whole run."""
    return lambda totals: totals[:, fields * run] / totals[:, fields * run + 1]


def resampled(items: Sequence[Item], statistic: Callable[[Sequence[Item]], float]) -> Estimate:
    """`bootstrap` with fewer resamples, for statistics that are no functions of totals and take longer."""
    return bootstrap(items, statistic, resamples=400)


def less(one: Statistic, other: Statistic) -> Statistic:
    """The difference of two statistics."""
    return lambda totals: one(totals) - other(totals)


class AtPlaces:
    """Sums over positions of the expected accepted tokens in each column.

    Args:
        experiments: makes the measurements.
        places: the positions.
        columns: names of the columns.
    """

    def __init__(self, experiments: Experiments, places: Places, columns: Sequence[str]) -> None:
        self.columns = list(columns)
        self.sums: Float[Tensor, "prompts columns"] = place_sums(experiments.places(places), columns)

    def __getitem__(self, name: str) -> int:
        """The number of a column."""
        return 1 + self.columns.index(name)

    def efficiency(self, rule: str, n: int, drafts: int = 1) -> Estimate:
        """Block efficiency of a rule."""
        return resample(self.sums, efficiency(self[key(rule, n, drafts)]))

    def gain(self, n: int) -> Estimate:
        """Gain of block over token verification, in per cent."""
        return resample(self.sums, gain(self[key("block", n)], self[key("token", n)]))

    def at_least(self, text: str, one: str, other: str, kind: Kind = Kind.MUST, *, strict: bool = True) -> Claim:
        """The claim that one column is above another (or not below it)."""
        found = resample(self.sums, less(efficiency(self[one]), efficiency(self[other])))
        return claim(text, kind, found, at_least=not strict)


def why_other(paper: float, ours: Estimate, n: int, label: str) -> str:
    """A reason for different block efficiencies: the acceptance rates, in words."""
    return (
        f"{label} accepts as if each token passed with probability {implied_acceptance(ours.value, n):.2f}, "
        f"the paper's pair with {implied_acceptance(paper, n):.2f}"
    )


def several(experiments: Experiments, pair: PairNames, **changes: Any) -> Places:
    """Rules for several drafts, for Block Verification's table 5 and SpecTr's tables."""
    return experiments.scaled_places(pair, lengths=(4, 8), drafts=(1, 2, 4, 8), chains=8, **changes)


def between(one: AtPlaces, other: AtPlaces, of_one: Statistic, of_other: Statistic) -> Estimate:
    """The difference of two statistics of two sets of positions, paired by their common prompts."""
    width = one.sums.shape[1]
    both = torch.cat([one.sums, other.sums], -1)
    return resample(both, lambda totals: of_one(totals[:, :width]) - of_other(totals[:, width:]))


def apart(at: AtPlaces, n: int) -> Statistic:
    """Minus the distance between the efficiencies of block and token verification; 0 if they are equal."""
    one, other = efficiency(at[key("block", n)]), efficiency(at[key("token", n)])
    return lambda totals: -(one(totals) - other(totals)).abs()
