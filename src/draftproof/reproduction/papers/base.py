"""What is kept of a paper's table or figure: its numbers, where they stand, what it claims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Value = float | str | None


@dataclass(frozen=True)
class PaperTable:
    """One table or figure of a paper.

    Attributes:
        name: paper and number, as on the command line, "block-verification-table1".
        place: where it stands in the paper.
        title: what it shows, in our words.
        setting: the paper's models and parameters.
        columns: what is given of each row.
        rows: by label, a value a column; None where the paper gives none. Empty for a picture without numbers.
        spreads: by label, the paper's standard deviations, where it gives them.
        picture: whether the text gives it as a picture only; then `claims` say what the text says of it.
        claims: what the paper concludes from it, in our words.
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
