"""`draftproof models`: list, fetch, find and cut the models that have names.

Knows: what is printed. Does not know: how a model is fetched, converted or cut.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from draftproof.errors import UserError

app = typer.Typer(add_completion=False, no_args_is_help=True, help="List, fetch, find and cut models.")
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Name = Annotated[str, typer.Argument(help="A name that `draftproof models list` shows.")]


@app.command("list")
def list_models(*, as_json: Json = False) -> None:
    """Show the models that have names, and which of them are on this machine."""
    from draftproof import models

    rows = [_row(name, models.resolve(name), *models.ABOUT_EMBEDDED[name]) for name in models.EMBEDDED]
    for name, entry in models.REGISTRY.items():
        where = models.resolve(name) if models.pulled(name) else None
        rows.append(_row(name, where, entry.licence, f"{entry.about}; {entry.megabytes} MB on disk"))
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        _print_table(rows)


@app.command()
def pull(name: Name, *, as_json: Json = False) -> None:
    """Fetch and convert a model, unless it is here already, and print its directory."""
    from draftproof import models

    with _progress() as report:
        where = models.pull(name, report=report)
    _print_place(name, str(where), as_json=as_json)


@app.command()
def path(name: Name, *, as_json: Json = False) -> None:
    """Print the directory of a model that is on this machine."""
    from draftproof import models

    if name not in models.EMBEDDED and name not in models.REGISTRY:
        raise UserError(f"no model {name!r}: legal are {', '.join([*models.EMBEDDED, *models.REGISTRY])}")
    _print_place(name, models.resolve(name), as_json=as_json)


@app.command()
def derive(
    source: Annotated[str, typer.Argument(help="A model's name or directory.")],
    *,
    keep_layers: Annotated[str, typer.Option(metavar="RANGES", help="Layers to keep, from 0, as in 0-11,18-29.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory to write; it must not exist.")],
    as_json: Json = False,
) -> None:
    """Write a shallower copy of a Llama-shaped model: a draft that speaks the same tokens."""
    from draftproof import models

    where = models.truncated_copy(models.resolve(source), models.parse_layers(keep_layers), out)
    _print_place(source, str(where), as_json=as_json)


def _row(name: str, where: str | None, licence: str, about: str) -> dict[str, Any]:
    return {"name": name, "here": where is not None, "path": where, "licence": licence, "about": about}


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "here", "licence", "about", box=None)
    for row in rows:
        table.add_row(row["name"], "yes" if row["here"] else "no", row["licence"], row["about"])
    Console().print(table)


def _print_place(name: str, where: str, *, as_json: bool) -> None:
    typer.echo(json.dumps({"name": name, "path": where}) if as_json else where)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A spinner on stderr that says the step; plain lines where stderr is no terminal."""
    from rich.console import Console
    from transformers.utils import logging

    console = Console(stderr=True)
    silence: Callable[[], None] = logging.disable_progress_bar  # its bars would break the spinner's line
    silence()
    if not sys.stderr.isatty():
        yield lambda line: console.print(line, markup=False, highlight=False)
        return
    with console.status("looking") as status:
        yield status.update
