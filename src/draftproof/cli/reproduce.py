"""`draftproof reproduce`: the papers' tables and figures, measured on the available pairs of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftproof.cli._output import Quiet, note
from draftproof.cli._quiet import quiet_libraries
from draftproof.errors import UserError, refuse_unknown

if TYPE_CHECKING:
    from draftproof.reproduction.run import Json

app = typer.Typer(add_completion=False)


@app.command()
def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE]...", help="Names of recipes (see --list); default all.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder for report, plots and records. Repeat the command to continue a stopped run."
        ),
    ] = None,
    profile: Annotated[str, typer.Option(help="How much to measure: quick (minutes) or full (hours).")] = "quick",
    as_json: Annotated[bool, typer.Option("--json", help="Print outcomes as JSON.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the recipes and exit.")] = False,
    quiet: Quiet = False,
) -> None:
    """Reproduce tables and figures of the papers on the available models, and show the papers' numbers beside ours.

    A recipe is one table or figure; --list names them all. The papers' claims are judged by intervals: they hold, are
    not distinguishable, or are violated. A finished recipe is not measured again in the same folder.
    """
    if list_:
        _list(as_json=as_json)
        return
    from draftproof.reproduction import run as recipes
    from draftproof.reproduction.experiments import ignore

    if out is None:
        raise UserError("--out: expected a folder for the report, got none")
    refuse_unknown("profile", profile, recipes.PROFILES)
    with quiet_libraries():
        made = recipes.reproduce(names or [], out, recipes.PROFILES[profile], notify=ignore if quiet else _progress)
    if as_json:
        typer.echo(json.dumps(made))
        return
    for each in made:
        typer.echo(_line(each))
    typer.echo(f"written: {out / recipes.REPORT}.md")


def _progress(line: str) -> None:
    """Show a line on stderr; the title of a recipe is brighter than its measurements."""
    note(line, dim=not line.startswith("["))


def _list(*, as_json: bool) -> None:
    from draftproof.reproduction.run import RECIPES

    if as_json:
        recipes = RECIPES.values()
        listed = [{"name": r.name, "how": r.how, "title": r.paper.title, "place": r.paper.place} for r in recipes]
        typer.echo(json.dumps(listed))
        return
    width = max(map(len, RECIPES))
    for recipe in RECIPES.values():
        typer.echo(f"{recipe.name:{width}} {recipe.how:7} {recipe.paper.title}")


def _line(made: Json) -> str:
    """The marks of a recipe, and the claims that must hold but do not."""
    cells, claims = made["cells"], made["claims"]
    marks = [sum(cell["mark"] == mark for cell in cells) for mark in ("reproduced", "direction only", "not reproduced")]
    held = sum(claim["verdict"] == "holds" for claim in claims)
    line = f"{made['name']}: {marks[0]} reproduced, {marks[1]} direction only, {marks[2]} not reproduced; "
    line += f"{held} of {len(claims)} claims hold"
    broken = [claim for claim in claims if claim["kind"] == "must hold" and claim["verdict"] != "holds"]
    return line + "".join(f"\n  {claim['verdict']}: {claim['text']}" for claim in broken)
