"""The outcome of a recipe: our rows, judged claims, and a mark for every cell of the paper.

A cell is `reproduced` if our number equals the paper's within the stated tolerance, `direction only` if it does not and
every claim that the cell is part of holds here, and `not reproduced` otherwise, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from draftproof.bench.estimate import Estimate
from draftproof.reproduction.claims import Claim, Judgement
from draftproof.reproduction.experiments import Experiments
from draftproof.reproduction.paper_tables import PaperTable, Value
from draftproof.results import finite
from draftproof.theory.lengths import iid_block_efficiency

ANY = "*"  # every row of a column
CLOSE = 0.05  # tolerance of a block efficiency, as a share of the paper's
POINTS = 1.5  # tolerance of a gain, in percentage points
OTHER_SECONDS = "times of this machine and these models"  # the reason for different times


class Mark(StrEnum):
    """The result for a cell."""

    REPRODUCED = "reproduced"
    DIRECTION = "direction only"
    NOT = "not reproduced"


@dataclass(frozen=True)
class PaperCell:
    """A number of the paper beside ours, with a mark and its reason (see the module).

    `tolerance` is the largest difference for the mark `reproduced`. Timed numbers are computed from times, which differ
    between runs.
    """

    row: str
    column: str
    paper: Value
    ours: Estimate | None
    tolerance: float
    mark: Mark
    reason: str
    timed: bool = False


@dataclass(frozen=True)
class OurNumber:
    """Our number for a cell, the claims that the cell is part of, and why it differs from the paper's.

    The tolerance is in the cell's unit, or a share of the paper's number if `relative`.
    """

    ours: Estimate
    tolerance: float
    claims: tuple[Claim, ...] = ()
    why: str = ""
    relative: bool = False
    timed: bool = False


@dataclass(frozen=True)
class Missing:
    """Why there is no number for a cell."""

    reason: str


Answers = dict[tuple[str, str], OurNumber | Missing]  # by row and column; a row of ANY is for the whole column


@dataclass(frozen=True)
class OurRow:
    """A row of our table."""

    label: str
    values: dict[str, Estimate | str]
    timed: bool = False


@dataclass(frozen=True)
class Series:
    """A line of a figure; `error` has the intervals below and above the points, if all points have one."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    error: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def of(cls, label: str, x: Iterable[int | float], y: Iterable[float]) -> Series:
        """A line through points."""
        return cls(label, tuple(map(float, x)), tuple(map(float, y)))

    @classmethod
    def through(cls, label: str, x: Iterable[int], found: Sequence[Estimate]) -> Series:
        """A line through estimates, with their intervals if every estimate has one."""
        below = tuple(max(each.value - each.low, 0.0) for each in found)
        above = tuple(max(each.high - each.value, 0.0) for each in found)
        known = all(math.isfinite(reach) for each in found for reach in (each.value - each.low, each.high - each.value))
        return replace(cls.of(label, x, [each.value for each in found]), error=(below, above) if known else ())


@dataclass(frozen=True)
class Figure:
    """The data of a picture: labels of the axes, and lines or bars."""

    x: str
    y: str
    series: tuple[Series, ...]
    bars: bool = False


@dataclass
class Outcome:
    """The outcome of a recipe, made row by row: ours, and the paper's cells with their marks."""

    paper: PaperTable
    rows: list[OurRow] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    cells: list[PaperCell] = field(default_factory=list)
    figure: Figure | None = None
    notes: list[str] = field(default_factory=list)
    timed_claims: list[Claim] = field(default_factory=list)

    def row(self, label: str, values: Mapping[str, Estimate | str], *, timed: bool = False) -> None:
        """Add one of our rows."""
        self.rows.append(OurRow(label, dict(values), timed))

    def exact_row(self, label: str, names: Iterable[str], values: Iterable[float]) -> None:
        """Add one of our rows, of computed numbers."""
        self.row(label, dict(zip(names, map(Estimate.exact, values), strict=True)))

    def finish(self, answers: Mapping[tuple[str, str], OurNumber | Missing]) -> Outcome:
        """The same outcome, with a mark for every cell of the paper."""
        self.cells = mark_cells(self.paper, answers) + (picture_cells(self.claims) if self.paper.picture else [])
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the paper's; None for numbers that are not finite."""
        made: dict[str, Any] = finite({name: value for name, value in asdict(self).items() if name != "paper"})
        return made


@dataclass(frozen=True)
class Recipe:
    """A table or figure of a paper, and the function that measures our numbers for it.

    `how` is "exact", "counts" (of sampled tokens) or "times".
    """

    paper: PaperTable
    measure: Callable[[Experiments], Outcome]
    how: str = "counts"

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return self.paper.name


def mark_cells(paper: PaperTable, answers: Mapping[tuple[str, str], OurNumber | Missing]) -> list[PaperCell]:
    """A marked cell for every value of a paper's table."""
    cells = []
    for row, values in paper.rows.items():
        for name, value in zip(paper.columns, values, strict=True):
            if value is None:
                continue
            found = answers.get((row, name), answers.get((ANY, name), answers.get((row, ANY))))
            cells.append(_cell(row, name, value, found or Missing("no counterpart is measured here")))
    return cells


def _cell(row: str, column: str, value: float | str, found: OurNumber | Missing) -> PaperCell:
    if isinstance(found, Missing) or isinstance(value, str):
        reason = found.reason if isinstance(found, Missing) else "a formula: nothing to compare with"
        return PaperCell(row, column, value, None, 0.0, Mark.NOT, reason)
    tolerance = abs(value) * found.tolerance if found.relative else found.tolerance
    if abs(found.ours.value - value) <= tolerance:
        share = f"{found.tolerance:.0%} of the paper's" if found.relative else f"{tolerance:.3g}"
        mark, reason = Mark.REPRODUCED, f"within {share}"
    elif broken := [each for each in found.claims if each.verdict is not Judgement.HOLDS]:
        mark = Mark.NOT
        reason = "; ".join(f"{each.text}: {each.verdict} ({each.interval})" for each in broken)
    else:
        mark, reason = Mark.DIRECTION if found.claims else Mark.NOT, found.why or "our models and data are others"
    return PaperCell(row, column, value, found.ours, tolerance, mark, reason, found.timed)


def picture_cells(claims: Iterable[Claim]) -> list[PaperCell]:
    """A cell for each claim about a picture: reproduced if it was computed exactly."""
    made = []
    for each in claims:
        exact = each.interval.count == 0
        if each.verdict is Judgement.HOLDS:
            mark = Mark.REPRODUCED if exact else Mark.DIRECTION
            reason = "computed exactly" if exact else "by an interval, on models of ours"
        else:
            mark, reason = Mark.NOT, f"{each.verdict}: {each.interval}"
        made.append(PaperCell("picture", each.text, "picture", each.interval, 0.0, mark, reason))
    return made


def implied_acceptance(efficiency: float, n: int) -> float:
    """The constant acceptance rate that gives a block efficiency with drafts of n tokens (Leviathan et al. 2023)."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if iid_block_efficiency(middle, n) < efficiency else (low, middle)
    return low
