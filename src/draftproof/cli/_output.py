"""What commands print: text on stdout, lines and a bar on stderr, results as a page in Markdown or a JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typing_extensions import override

from draftproof.progress import Watch, bar, silent

if TYPE_CHECKING:
    from draftproof.results import Results

Out = Annotated[Path | None, typer.Option(metavar="NAME", help="Also write NAME.md and NAME.json.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Plots = Annotated[bool, typer.Option("--plots/--no-plots", help="Draw pictures too, where matplotlib is installed.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; without it an accelerator if there is one.")]


def note(line: str, *, dim: bool = False) -> None:
    """Print a line on stderr."""
    _to_stderr(line, "\n", dim=dim)


@contextmanager
def progress(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Two functions: write a finished text to stdout, and count it on a bar on stderr where that is a terminal."""
    console = Console(stderr=True)
    if total == 1 or not console.is_terminal:
        yield write, lambda: None
        return
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Standard output is left alone: it may be a file, and rich would send it to the bar's console.
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: _write_above(bar, text), lambda: bar.advance(task)


def _write_above(bar: Progress, text: str) -> None:
    """Write with the bar out of the way: both may be on one terminal."""
    bar.stop()
    write(text)
    bar.start()


def write_dim(text: str) -> None:
    """Write to stderr at once, dim on a terminal: text that comes with an answer but is not part of it."""
    _to_stderr(text, "", dim=True)


class _Stderr(Console):
    @override
    def on_broken_pipe(self) -> None:
        """Go on without a reader, where rich would end the process."""


def _to_stderr(text: str, end: str, *, dim: bool) -> None:
    console = _Stderr(stderr=True, highlight=False, markup=False, soft_wrap=True)
    with suppress(OSError):  # such as a full disk: what the command is for can go on
        console.print(text, style="dim" if dim else None, end=end)


def write(text: str) -> None:
    """Write to stdout and flush, so that a closed pipe raises here and not at exit."""
    sys.stdout.write(text)
    sys.stdout.flush()


def progress_bar(*, quiet: bool) -> Watch:
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


def can_draw(*, plots: bool) -> bool:
    """Whether to draw plots; prints a note if they were requested and matplotlib is missing."""
    installed = plots and find_spec("matplotlib") is not None
    if plots and not installed:
        note("no pictures: they need matplotlib (pip install 'draftproof[bench]'); --no-plots leaves them out")
    return installed
