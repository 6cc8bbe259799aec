"""`draftproof profile`: what a composition holds and needs, measured by running it."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftproof.backends.loading import BACKENDS
from draftproof.cli.generate import TARGET, default_draft, quiet_libraries
from draftproof.engine.engine import Engine
from draftproof.engine.registry import DRAFTERS, VERIFIERS

if TYPE_CHECKING:
    from rich.table import Table

    from draftproof.profiling.memory import Memory

LOOKUPS = ("ngram", "suffix")  # their length is an argument of their own, not a stopper's
_WIDTH = 110

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Measure what a composition costs here.")
_model = partial(typer.Option, rich_help_panel="Models")
_speculation = partial(typer.Option, rich_help_panel="Speculation")
_load = partial(typer.Option, rich_help_panel="Load")


@app.callback()
def _group() -> None:
    """Measure what a composition costs here."""


@app.command()
def memory(
    *,
    target: Annotated[
        str | None, _model(help=f"Registered name, hub id, directory or .gguf file; without it {TARGET}.")
    ] = None,
    draft: Annotated[str | None, _model(help="Named likewise; without it the embedded one's, or none.")] = None,
    dtype: Annotated[str, _model(help="Of both models: auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, _model(help="cpu, cuda, cuda:1; without it an accelerator if there is one.")] = None,
    backend: Annotated[str, _model(help=f"Who computes them: {', '.join(BACKENDS)}.")] = "auto",
    trust_remote_code: Annotated[bool, _model("--trust-remote-code", help="Run code that comes with a model.")] = False,
    drafter: Annotated[str | None, _speculation(help=f"Where drafts come from: {', '.join(DRAFTERS)}.")] = None,
    draft_length: Annotated[int, _speculation("--draft-length", "-n", help="Tokens of a draft.")] = 4,
    verifier: Annotated[
        str | None, _speculation(help=f"The verification rule: {', '.join(VERIFIERS)}; without it the drafter's best.")
    ] = None,
    batch: Annotated[int, _load(help="Sequences decoded together.")] = 1,
    prompt_tokens: Annotated[int, _load(help="Of each prompt.")] = 128,
    new_tokens: Annotated[int, _load(help="To generate for each.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, in bytes.")] = False,
) -> None:
    """Measure weights, caches, the temporaries of a round, and the peak of really running a batch."""
    from draftproof.backends.loading import parse_device
    from draftproof.profiling.memory import Load, measure, warm_up

    load, where = Load(batch, prompt_tokens, new_tokens), parse_device(device)
    options: dict[str, Any] = {"dtype": dtype, "device": str(where), "backend": backend}
    small = draft or default_draft(target, drafter)

    def make() -> Engine:
        return Engine.load(
            target or TARGET,
            small,
            drafter=f"{drafter}:{draft_length}" if drafter in LOOKUPS else drafter,
            stopper=f"fixed:{draft_length}",
            verifier=verifier,
            max_batch=batch,
            trust_remote_code=trust_remote_code,
            **options,
        )

    with quiet_libraries():
        warm_up(**options)
        found = measure(make, load, where)
    if as_json:
        typer.echo(json.dumps({"target": target or TARGET, "draft": small, **options, **found.to_dict()}))
    else:
        _print(found)


def _print(found: Memory) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.width = max(console.width, _WIDTH)  # a cut figure would be a wrong one
    for table in (_weights(found), _caches(found), _round(found)):
        console.print(table)
        console.print()
    for line in _measured(found):
        console.print(line)


def _table(*heads: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for place, head in enumerate(heads):
        table.add_column(head, justify="right" if place else "left", no_wrap=True)
    return table


def _weights(found: Memory) -> Table:
    table = _table("weights", "own", "packed of it", "shared")
    for one in found.weights:
        table.add_row(one.part, *map(told, (one.own, one.packed, one.shared)))
    return table


def _caches(found: Memory) -> Table:
    table = _table("keys and values", "a token", "a sequence", "the batch", "reserved", "slots x positions")
    for one in found.caches:
        figures = map(told, (one.token, one.sequence, one.used, one.reserved))
        table.add_row(one.part, *figures, f"{one.slots} x {one.positions}")
    if found.states:
        table.add_row("states for the head", "", "", told(found.states))
    return table


def _round(found: Memory) -> Table:
    table = _table("held at once in a round", "first", "later", "rows handed on", "shape")
    for phase, first in found.first.items():
        rows = found.rows.get(phase)
        shown = ("", "") if rows is None else (told(rows.nbytes), f"{list(rows.shape)} {rows.dtype}")
        table.add_row(phase, told(first), told(found.later[phase]), *shown)
    return table


def _measured(found: Memory) -> list[str]:
    from draftproof.profiling.peak import HOW

    seen, load = found.resident, found.load
    parts = ", ".join(f"{kind} {name}" for kind, name in found.parts.items() if name)
    each = f"each {load.prompt_tokens} tokens and {load.new_tokens} new ones"
    lines = [f"sum of the parts {told(found.total)}, for a batch of {load.batch}, {each}; {parts}"]
    if seen.before is not None and seen.loaded is not None:
        lines.append(
            f"measured {told(seen.peak - seen.before)} at most while running, {told(seen.loaded - seen.before)} when "
            f"loaded, {told(seen.loading - seen.before)} at most while loading, over {told(seen.before)} before that"
        )
    else:
        lines.append(f"measured {told(seen.peak)} at most while running")
    return [*lines, f"measured are {HOW[seen.how]}"]


def told(size: int) -> str:
    """Bytes in decimal units, to three digits."""
    if abs(size) < 1000:
        return f"{size} B"
    amount, unit = float(size), "B"
    for unit in ("kB", "MB", "GB", "TB"):  # noqa: B007 - the last one is wanted
        amount /= 1000
        if abs(amount) < 999.5:
            break
    return f"{amount:.3g} {unit}" if abs(amount) < 99.95 else f"{amount:.0f} {unit}"
