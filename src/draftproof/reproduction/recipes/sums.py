"""Statistics of sums over records: block efficiencies, gains, speeds, with intervals and claims about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.bench.estimate import Estimate, Item, Statistic, bootstrap, resample
from draftproof.reproduction.claims import Claim, Kind, claim, column
from draftproof.reproduction.expected_accepted import key
from draftproof.reproduction.experiments import COUNTS, Experiments, PairNames, Row, RulesAtPositions
from draftproof.reproduction.recipes.base import implied_acceptance


class RunSums:
    """For each prompt the counts of several runs, summed over seeds; columns run after run.

    The field "seconds" is the time of a whole answer.
    """

    def __init__(self, parts: Sequence[Sequence[Row]], fields: Sequence[str] = (*COUNTS, "seconds")) -> None:
        self._fields = list(fields)
        count = 1 + max(row["prompt"] for row in parts[0])
        self._sums = torch.zeros(count, len(parts) * len(fields), dtype=torch.float64)
        for number, rows in enumerate(parts):
            for row in rows:
                values = [row[field]["total"] if field == "seconds" else row[field] for field in fields]
                at = slice(number * len(fields), (number + 1) * len(fields))
                self._sums[row["prompt"], at] += torch.tensor(values, dtype=torch.float64)

    def column(self, run: int, field: str) -> Statistic:
        """The total of one count of a run."""
        return column(run * len(self._fields) + self._fields.index(field))

    def per(self, run: int, over: str, under: str) -> Statistic:
        """The ratio of two counts of a run."""
        top, bottom = self.column(run, over), self.column(run, under)
        return lambda totals: top(totals) / bottom(totals)

    def efficiency(self, run: int) -> Statistic:
        """Tokens a target call."""
        return self.per(run, "num_tokens", "num_target_calls")

    def speed(self, run: int, base: int) -> Statistic:
        """Tokens a second of a run over those of another."""
        mine, theirs = (self.per(each, "num_tokens", "seconds") for each in (run, base))
        return lambda totals: mine(totals) / theirs(totals)

    def faster(self, run: int, base: int, unit: float = 1.0) -> Statistic:
        """The speed of a run over another one's, minus 1, times `unit`."""
        return lambda totals: unit * (self.speed(run, base)(totals) - 1)

    def estimate(self, statistic: Statistic) -> Estimate:
        """A statistic of these sums."""
        return resample(self._sums, statistic)

    def claim(self, text: str, statistic: Statistic, kind: Kind = Kind.MODELS) -> Claim:
        """The claim that a statistic is above 0."""
        return claim(text, kind, self.estimate(statistic))


def efficiency(column: int) -> Statistic:
    """1 + accepted tokens per position; column 0 counts the positions."""
    return lambda totals: 1 + totals[:, column] / totals[:, 0]


def resampled(items: Sequence[Item], statistic: Callable[[Sequence[Item]], float]) -> Estimate:
    """`bootstrap` with fewer resamples, for statistics that are no functions of totals and take longer."""
    return bootstrap(items, statistic, resamples=400)


def less(one: Statistic, other: Statistic) -> Statistic:
    """The difference of two statistics."""
    return lambda totals: one(totals) - other(totals)


class AtPlaces:
    """Sums over positions of the expected accepted tokens in each column."""

    def __init__(self, experiments: Experiments, places: RulesAtPositions, columns: Sequence[str]) -> None:
        self.columns = list(columns)
        rows = [[row["places"], *(row["accepted"][name] for name in columns)] for row in experiments.places(places)]
        self.sums: Float[Tensor, "prompts columns"] = torch.tensor(rows, dtype=torch.float64)

    def __getitem__(self, name: str) -> int:
        """The number of a column."""
        return 1 + self.columns.index(name)

    def efficiency(self, rule: str, n: int, drafts: int = 1) -> Estimate:
        """Block efficiency of a rule."""
        return resample(self.sums, efficiency(self[key(rule, n, drafts)]))

    def gain(self, n: int) -> Statistic:
        """Per cent by which the block efficiency of block verification exceeds that of token verification."""
        block, token = (efficiency(self[key(rule, n)]) for rule in ("block", "token"))
        return lambda totals: 100 * (block(totals) / token(totals) - 1)

    def efficiencies(self, n: int) -> dict[str, Estimate]:
        """Block efficiencies of token and block verification, and the gain."""
        found = {f"BE {rule}": self.efficiency(rule, n) for rule in ("token", "block")}
        return {**found, "BE gain %": resample(self.sums, self.gain(n))}

    def apart(self, n: int) -> Statistic:
        """Minus the distance between the efficiencies of block and token verification; 0 if they are equal."""
        one, other = (efficiency(self[key(rule, n)]) for rule in ("block", "token"))
        return lambda totals: -(one(totals) - other(totals)).abs()

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


def several(experiments: Experiments, pair: PairNames, **changes: Any) -> RulesAtPositions:
    """Rules for several drafts, for Block Verification's table 5 and SpecTr's tables."""
    return experiments.scaled_places(pair, lengths=(4, 8), drafts=(1, 2, 4, 8), chains=8, **changes)


def between(one: AtPlaces, other: AtPlaces, of_one: Statistic, of_other: Statistic) -> Estimate:
    """The difference of two statistics of two sets of positions, paired by their common prompts."""
    width = one.sums.shape[1]
    both = torch.cat([one.sums, other.sums], -1)
    return resample(both, lambda totals: of_one(totals[:, :width]) - of_other(totals[:, width:]))
