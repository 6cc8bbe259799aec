"""The papers' tables and figures: numbers, place in the paper, claims; read from `papers/*.toml`, one file a paper."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

Value = float | str | None
FOLDER = Path(__file__).parent / "papers"


@dataclass(frozen=True)
class PaperTable:
    """One table or figure of a paper."""

    name: str  # as on the command line, "block-verification-table1"
    place: str  # in the paper
    title: str  # in our words
    setting: str  # the paper's models and parameters
    columns: tuple[str, ...] = ()  # names of the values in each row
    rows: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)  # by label; None without a value
    spreads: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)  # the paper's standard deviations
    picture: bool = False  # only a picture; then the claims are those of its text
    claims: tuple[str, ...] = ()  # the paper's conclusions, in our words

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
        assert isinstance(value, float | int), f"{self.name}: expected a number in {row}, {column}, got {value!r}"
        return float(value)


@cache
def paper_tables(paper: str) -> Mapping[str, PaperTable]:
    """The tables and figures of a paper by their number, "table1"; `paper` is the name of its file."""
    found = tomllib.loads((FOLDER / f"{paper}.toml").read_text(encoding="utf-8"))
    return {number: _table(f"{paper.replace('_', '-')}-{number}", fields) for number, fields in found.items()}


def _table(name: str, fields: Mapping[str, Any]) -> PaperTable:
    lists = {key: tuple(fields.get(key, ())) for key in ("columns", "claims")}
    parts = {key: {label: _row(row) for label, row in fields.get(key, {}).items()} for key in ("rows", "spreads")}
    return PaperTable(name, **{**fields, **lists, **parts})


def _row(values: list[float | str]) -> tuple[Value, ...]:
    """A row of the file, where "" stands for a cell without a value: TOML has no null."""
    return tuple(None if value == "" else value for value in values)
