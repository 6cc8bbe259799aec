"""`draftproof models`: lists and fetches registered models, prints their directories, and cuts shallower copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftproof.cli._download import obtain, pull_progress
from draftproof.cli._output import note
from draftproof.cli._quiet import quiet_libraries
from draftproof.errors import UserError

if TYPE_CHECKING:
    from draftproof.backends.loading.match import Match

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="List and fetch models, print their directories, and cut shallower copies.",
)
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Name = Annotated[str, typer.Argument(help="A name that `draftproof models list` shows.")]


@app.command("list")
def list_models(
    *,
    found: Annotated[
        bool, typer.Option("--found", help="Show the .gguf files of Ollama, LM Studio and the hub's cache.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the registered models, and which of them are on this machine."""
    from draftproof import models

    if found:
        _print_found(as_json=as_json)
        return
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
    """Fetch and convert a model, unless it is already on this machine, and print its directory."""
    from draftproof import models

    with quiet_libraries(), pull_progress() as (report, progress):
        where = models.pull(name, report=report, progress=progress)
    _print_place(name, str(where), as_json=as_json)


@app.command()
def path(name: Name, *, as_json: Json = False) -> None:
    """Print the directory of a model that is on this machine."""
    from draftproof import models

    if name not in models.EMBEDDED and name not in models.REGISTRY:
        raise UserError(f"name: expected one of {', '.join([*models.EMBEDDED, *models.REGISTRY])}, got {name!r}")
    _print_place(name, models.resolve(name), as_json=as_json)


@app.command()
def match(
    target: Annotated[str, typer.Argument(help="The target: registered name, hub id, directory or .gguf file.")],
    *,
    folder: Annotated[
        list[Path] | None, typer.Option("--in", metavar="DIR", help="Also search this directory; can be repeated.")
    ] = None,
    accepted: Annotated[
        float, typer.Option(help="Assumed acceptance rate of a drafted token after an accepted one, for the gain.")
    ] = 0.7,
    as_json: Json = False,
) -> None:
    """Show which models on this disk can draft for a target, and the estimated gain by the bytes that they read."""
    if not 0 < accepted < 1:
        raise UserError(f"accepted: expected a number between 0 and 1, got {accepted}")
    from draftproof.backends.loading.load import load
    from draftproof.backends.loading.match import matches, own_layer

    obtain(target)
    with quiet_libraries():
        own = own_layer(target)
        found = [*filter(None, [own]), *matches(load(target), folder or ())]
    if as_json:
        rows = [
            {**vars(each), "share": each.share if each.nbytes else None}  # JSON has no infinity
            | {"gain": None if each.why_not else each.gain(accepted)[0]}
            for each in found
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    for each in found:
        name = "its own prediction layer (--drafter mtp; auto uses it)" if each is own else each.name
        typer.echo(f"{name}  {f'no: {each.why_not}' if each.why_not else _fits(each, accepted)}")
    if not found:
        note(f"no models found: search more folders with --in DIR, or look for a small model of {target}'s family")


def _fits(each: Match, accepted: float) -> str:
    """What a model that can draft reads and gains."""
    gain, length = each.gain(accepted)
    shared = "" if each.shared is None else f"; other vocabulary: {100 * each.shared:.0f}% shared"
    return (
        f"{each.nbytes / 1e9:.2f} GB per token, {each.share:.2f} of the target's; {gain:.2f} times as fast with "
        f"{length} drafted{shared}"
    )


@app.command()
def derive(
    source: Annotated[str, typer.Argument(help="A model's name or directory.")],
    *,
    keep_layers: Annotated[str, typer.Option(metavar="RANGES", help="Layers to keep, from 0, for example 0-11,18-29.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory to write; it must not exist.")],
    as_json: Json = False,
) -> None:
    """Write a shallower copy of a Llama-shaped model: a draft model with the same tokens."""
    from draftproof import models
    from draftproof.models.layers import parse_layers, truncated_copy

    layers = parse_layers(keep_layers)
    obtain(source)
    where = truncated_copy(models.resolve(source), layers, out)
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


def _print_found(*, as_json: bool) -> None:
    from draftproof.models.found import found_files

    files = found_files()
    if as_json:
        rows = [
            {"name": each.name, "path": str(each.path), "keeper": each.keeper, "bytes": each.nbytes} for each in files
        ]
        typer.echo(json.dumps(rows, indent=2))
    for each in () if as_json else files:
        typer.echo(f"{each.name}  ({each.keeper}, {each.nbytes / 1e9:.2f} GB)")
    if not files and not as_json:
        note("no .gguf files found in the folders of Ollama and LM Studio or in the hub's cache")


def _print_place(name: str, where: str, *, as_json: bool) -> None:
    typer.echo(json.dumps({"name": name, "path": where}) if as_json else where)
