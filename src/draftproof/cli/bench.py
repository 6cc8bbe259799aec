"""`draftproof bench`: measure compositions and other engines on the same questions, and report."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftproof import models
from draftproof.cli._bench_compare import batches, engines, rules, stoppers
from draftproof.cli._launch import divide
from draftproof.cli._libraries import quiet_libraries
from draftproof.cli._parts import BACKEND_HELP, DRAFTER_HELP, STOPPER_HELP, VERIFIER_HELP
from draftproof.cli._pulling import obtain
from draftproof.cli._results import Plots, Quiet, drawing, watch_for
from draftproof.cli._terminal import note

if TYPE_CHECKING:
    from draftproof.bench.estimate import Estimate
    from draftproof.bench.summary import Summary

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Measure speed and acceptance: compositions of this engine, and other engines on the same questions.",
)
_models = partial(typer.Option, rich_help_panel="Models")
_matrix = partial(typer.Option, rich_help_panel="What is compared (each option can be repeated: all combinations run)")
_questions = partial(typer.Option, rich_help_panel="Questions")
_timing = partial(typer.Option, rich_help_panel="Timing")
_SET_HELP = "A shipped data set, a file, FORM:FILE or hub:OWNER/NAME[:SPLIT[:COLUMN]]."
_NAMES = "registered name, hub id, directory or .gguf file"
Lines = Annotated[bool, typer.Option("--json", help="Print one JSON object a line for each method and setting.")]
TERMINAL_HEADS = ("method", "tokens/call", "tokens/s", "x plain", "x transformers")


@app.command("run")
def run_(
    *,
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Folder for records and report. Repeat the command to continue a stopped run."
        ),
    ],
    profile: Annotated[
        str | None, typer.Option(help="quick (minutes) or full (hours): values for the options that are not given.")
    ] = None,
    target: Annotated[str | None, _models(help=f"The target: {_NAMES}; without it {models.DEFAULT_TARGET}.")] = None,
    draft: Annotated[str | None, _models(help="The draft model; without it the one of an embedded target.")] = None,
    dtype: Annotated[
        list[str] | None, _models(help="Number format of all models: auto, float32, bfloat16 or float16.")
    ] = None,
    draft_dtype: Annotated[
        list[str] | None, _models(help="Another number format for drafts; int8 or int4 quantize a draft model or head.")
    ] = None,
    backend: Annotated[list[str] | None, _models(help=BACKEND_HELP)] = None,
    device: Annotated[str | None, _models(help="cpu, cuda, cuda:1; without it an accelerator if there is one.")] = None,
    trust_remote_code: Annotated[
        bool, _models("--trust-remote-code", help="Run code that comes with a model.")
    ] = False,
    tensor_parallel: Annotated[
        int, _models(help="Processes among which the target is divided, each with a device or a share of the cores.")
    ] = 1,
    drafter: Annotated[
        list[str] | None, _matrix(help=f"{DRAFTER_HELP} Plain decoding is always measured, too.")
    ] = None,
    stopper: Annotated[list[str] | None, _matrix(help=f"{STOPPER_HELP}; without it fixed:4.")] = None,
    n: Annotated[list[int] | None, _matrix("--n", help="Draft length: short for --stopper fixed:N.")] = None,
    verifier: Annotated[list[str] | None, _matrix(help=f"{VERIFIER_HELP}; without it the drafter's default.")] = None,
    temperature: Annotated[list[float] | None, _matrix(help="Sampling temperature; 0 is greedy.")] = None,
    top_k: Annotated[list[int] | None, _matrix(help="Keep the k most likely tokens; 0 is off.")] = None,
    top_p: Annotated[list[float] | None, _matrix(help="Keep the fewest tokens whose mass reaches this.")] = None,
    seed: Annotated[list[int] | None, _matrix(help="Seed of the random draws; tables add up all seeds.")] = None,
    competitor: Annotated[
        list[str] | None,
        _matrix(
            help="transformers, transformers-assisted, transformers-lookup; the last two also at their fastest setting."
        ),
    ] = None,
    dataset: Annotated[list[str] | None, _questions(help=_SET_HELP)] = None,
    questions: Annotated[int | None, _questions(help="How many of each data set; without it 8.")] = None,
    max_tokens: Annotated[int | None, _questions(help="Most tokens of an answer.")] = None,
    repeats: Annotated[int | None, _timing(help="How often each answer is measured; the methods take turns.")] = None,
    warmup: Annotated[int, _timing(help="Answers of each method that are discarded first.")] = 1,
    plots: Plots = True,
    as_json: Lines = False,
    quiet: Quiet = False,
) -> None:
    """Measure compositions in turns; write records.jsonl, provenance.json, report.md, figures.json and pictures.

    Without options the pair of models inside the package is measured on openings of children's stories.
    """
    from draftproof.bench.model_cache import ModelCache
    from draftproof.bench.plan import BenchOptions, plan
    from draftproof.bench.quality import score
    from draftproof.bench.run import run

    options = BenchOptions(
        target=target,
        draft=draft,
        dtype=dtype,
        draft_dtype=draft_dtype,
        backend=backend,
        drafter=drafter,
        stopper=[*(stopper or []), *(f"fixed:{length}" for length in n or [])] or None,
        verifier=verifier,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        competitor=competitor,
        dataset=dataset,
        questions=questions,
        max_tokens=max_tokens,
        repeats=repeats,
    )
    if tensor_parallel != 1:
        divide(tensor_parallel)
    with quiet_libraries():
        obtain(target, draft, quiet=quiet)
        cache = ModelCache(device=device, trust_remote_code=trust_remote_code, tensor_parallel=tensor_parallel)
        watch = watch_for(quiet=quiet)
        made = plan(options, out, cache, profile=profile, watch=watch)
        notes = [*made.notes, *([f"the target is divided among {cache.processes} processes"] * (cache.processes > 1))]
        if not quiet:
            for line in notes:
                note(line, dim=True)
        timing: dict[str, Any] = {"repeats": made.repeats, "warmup": warmup, "notes": notes}
        records = run(made.cells, made.questions, out, **timing, watch=watch, cache=cache)
        score(records, made.questions, out, cache, watch=watch)
    _finish(out, as_json=as_json, plots=plots)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run, finished or not.")],
    *,
    plots: Plots = True,
    as_json: Lines = False,
) -> None:
    """Write report.md, figures.json and the pictures of a run again, from its records."""
    _finish(folder, as_json=as_json, plots=plots)


app.command()(batches)
app.command()(engines)
app.command()(rules)
app.command()(stoppers)


def _finish(out: Path, *, as_json: bool, plots: bool) -> None:
    """Write the report, and print its figures and its path."""
    from draftproof.bench.report import REPORT, by_setting, write_report

    found = write_report(out, plots=drawing(plots=plots))
    if as_json:
        for one in found:
            typer.echo(json.dumps(one.to_dict()))
        return
    for setting, own in by_setting(found).items():
        _print_table(setting.title, own)
    typer.echo(f"written: {out / REPORT}")


def _print_table(title: str, own: list[Summary]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from draftproof.bench import measures

    shown = Table(title=title, title_justify="left")
    for place, head in enumerate(TERMINAL_HEADS):
        options: dict[str, Any] = {"overflow": "fold"} if place == 0 else {"justify": "right", "no_wrap": True}
        shown.add_column(head, **options)
    for one in own:  # as Text, since rich takes words in brackets for markup
        calls = measures.block_efficiency(one.records).value
        rate = measures.tokens_per_second(one.records).value
        ratios = (_short(one.speed.get(base)) for base in ("plain", "transformers"))
        shown.add_row(Text(one.method), f"{calls:.2f}", f"{rate:.1f}", *ratios)
    Console().print(shown)


def _short(found: Estimate | None) -> str:
    """A speed-up for the terminal; the report has its interval."""
    return "-" if found is None else f"{found.value:.2f}{'' if found.sure else ' ?'}"
