"""Options and output of the commands that measure something: a page in Markdown, or one JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftproof.cli._terminal import note
from draftproof.progress import Watch, bar, silent

if TYPE_CHECKING:
    from draftproof.results import Results

Out = Annotated[Path | None, typer.Option(metavar="NAME", help="Also write NAME.md and NAME.json.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Plots = Annotated[bool, typer.Option("--plots/--no-plots", help="Draw pictures too, where matplotlib is installed.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; without it an accelerator if there is one.")]


def watch_for(*, quiet: bool) -> Watch:
    """Progress on stderr, or none."""
    return silent if quiet else bar


def show(results: Results, out: Path | None, *, as_json: bool) -> None:
    """Write the files where a name is given, and print the page or the JSON object."""
    written = results.write(out) if out is not None else []
    if as_json:
        typer.echo(json.dumps(results.to_dict()))
        return
    typer.echo(results.markdown(), nl=False)
    for path in written:
        typer.echo(f"written: {path}")


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table with columns as wide as their longest cells."""
    from draftproof.results import columns

    for line in columns(heads, rows):
        typer.echo(line)


def drawing(*, plots: bool) -> bool:
    """Whether pictures are drawn; says so where they should be and cannot."""
    drawing = plots and find_spec("matplotlib") is not None
    if plots and not drawing:
        note("no pictures: they need matplotlib (pip install 'draftproof[bench]'); --no-plots leaves them out")
    return drawing
