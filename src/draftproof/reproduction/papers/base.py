"""A paper's table or figure: its numbers, its place in the paper, and its claims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Value = float | str | None


@dataclass(frozen=True)
class PaperTable:
    """One table or figure of a paper.

    Attributes:
        name: paper and number, as on the command line, "block-verification-table1".
        place: in the paper.
        title: in our words.
        setting: the paper's models and parameters.
        columns: names of the values in each row.
        rows: by label, one value for each column; None if the paper gives none. Empty for a picture without numbers.
        spreads: by label, the paper's standard deviations, if it gives them.
        picture: whether the paper gives it only as a picture; then `claims` are those of its text.
        claims: the paper's conclusions from it, in our words.
    """

    name: str
    place: str
    title: str
    setting: str
    columns: tuple[str, ...] = ()
    rows: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    spreads: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    picture: bool = False
    claims: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for part in (self.rows, self.spreads):
            for label, row in part.items():
                assert len(row) == len(self.columns), f"{self.name}: {label} has {len(row)} of {len(self.columns)}"

    def value(self, row: str, column: str) -> Value:
        """A cell of the table."""
        return self.rows[row][self.columns.index(column)]

    def number(self, row: str, column: str) -> float:
        """A cell of the table that is a number."""
        value = self.value(row, column)
        assert isinstance(value, float | int), f"{self.name}: {row}, {column} is no number"
        return float(value)
