"""Results files: Markdown tables, the same figures as JSON, pictures; each begins with the facts of its run."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from draftproof.errors import UserError
from draftproof.files import whole_file, write_json, write_text
from draftproof.provenance import KEY, header


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [_row(heads), "|---" * len(heads) + "|"]
    return lines + [_row([str(cell) for cell in row]) for row in rows]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def columns(heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Container[int] = ()) -> list[str]:
    """The lines of a table for a terminal or a file: columns two spaces apart, each as wide as its longest cell.

    The cells of columns in `numbers` stand to the right.
    """
    lines = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [">" if at in numbers else "<" for at in range(len(heads))]
    return ["  ".join(map("{:{}{}}".format, line, sides, widths)).rstrip() for line in lines]


def median_and_range(values: Sequence[float], digits: int = 2) -> str:
    """The median with the smallest and the largest value: "1.50 [1.20, 1.80]"."""
    return f"{median(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def mean_and_deviation(values: Sequence[float], digits: int = 3) -> str:
    """The mean with the standard deviation of several values; large whole numbers without digits or deviation."""
    if all(float(value).is_integer() and abs(value) > 10 for value in values):
        return f"{fmean(values):.0f}"
    shown = f"{fmean(values):.{digits}f}"
    return shown if len(values) < 2 else f"{shown} ± {stdev(values):.{digits}f}"


def mean_and_error(values: Sequence[float], digits: int) -> str:
    """The mean with its standard error, where there are several values."""
    error = f" ± {stdev(values) / math.sqrt(len(values)):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{error}"


@dataclass(frozen=True)
class Results:
    """The results of a measurement, ready to be printed and written."""

    title: str  # of the page
    lines: Sequence[str]  # Markdown below the header: remarks and tables
    figures: Mapping[str, Any]  # the same figures with the raw measurements, as values for JSON
    facts: Mapping[str, Any]  # from `draftproof.provenance.run_facts`, at the beginning of the run

    def markdown(self) -> str:
        """The whole page."""
        return "\n".join([f"# {self.title}", "", *header(self.facts), "", *self.lines]) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None for numbers that are not finite."""
        made: dict[str, Any] = finite({KEY: self.facts, "title": self.title, **self.figures})
        return made

    def write(self, out: Path) -> list[Path]:
        """Write OUT.md and OUT.json; returns both paths."""
        page, figures = (out.parent / f"{out.name}{ending}" for ending in (".md", ".json"))
        write_text(page, self.markdown())
        write_json(figures, self.to_dict())
        return [page, figures]


def finite(value: Any) -> Any:
    """The same values, with None in place of numbers that are not finite, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure of a size in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("pictures need matplotlib: pip install 'draftproof[bench]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, out: Path, *, dpi: int = 80) -> None:
    """Write a figure as PNG without matplotlib's version, so that equal figures are equal bytes."""
    with whole_file(out) as work:
        figure.savefig(work, dpi=dpi, format="png", metadata={"Software": None})
