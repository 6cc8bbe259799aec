"""`draftproof bench`: measures compositions and other engines on the same questions, and writes reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from draftproof import models
from draftproof.bench import measures
from draftproof.bench.batches import BatchComparison, compare_batches
from draftproof.bench.engines import EngineComparison, compare_engines
from draftproof.bench.estimate import Estimate
from draftproof.bench.model_cache import ModelCache
from draftproof.bench.plan import BenchOptions, plan
from draftproof.bench.quality import score
from draftproof.bench.report import REPORT, by_setting, write_report
from draftproof.bench.rules import RuleComparison, compare_rules
from draftproof.bench.run import run
from draftproof.bench.stoppers import StopperComparison, compare_stoppers, draw
from draftproof.bench.summary import Summary
from draftproof.cli._download import obtain
from draftproof.cli._launch import divide
from draftproof.cli._measurement import DATASET, NAMES, measurement
from draftproof.cli._options import Options, with_options
from draftproof.cli._output import Device, Plots, Quiet, can_draw, note, progress_bar
from draftproof.cli._parts import BACKEND_HELP, DRAFTER_HELP, STOPPER_HELP, VERIFIER_HELP
from draftproof.cli._quiet import quiet_libraries
from draftproof.results import columns

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Measure speed and acceptance: compositions of this engine, and other engines on the same questions.",
)
Lines = Annotated[bool, typer.Option("--json", help="Print one JSON object a line for each method and setting.")]
TERMINAL_HEADS = ("method", "tokens/call", "tokens/s", "x plain", "x transformers")


_LISTS = "What is compared (options can be repeated; all combinations run)"
_PANELS = {
    "Models": ("target", "draft", "dtype", "draft_dtype", "backend"),
    _LISTS: ("drafter", "stopper", "verifier", "temperature", "top_k", "top_p", "seed", "competitor"),
    "Questions": ("dataset", "questions", "max_tokens"),
    "Timing": ("repeats",),
}
_HELP = {
    "target": f"The target: {NAMES}; without it {models.DEFAULT_TARGET}.",
    "draft": "The draft model; without it that of an embedded target.",
    "backend": BACKEND_HELP,
    "drafter": f"{DRAFTER_HELP} Plain decoding is always measured, too.",
    "stopper": f"{STOPPER_HELP}; without it fixed:4.",
    "verifier": f"{VERIFIER_HELP}; without it the drafter's default.",
    "dataset": f"{DATASET[0].upper()}{DATASET[1:]}.",
}
_OPTIONS = [Options(BenchOptions, panel, only=only, help=_HELP) for panel, only in _PANELS.items()]


@app.command("run")
@with_options(options=_OPTIONS)
def run_(
    *,
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Folder for records and report. Repeat the command to continue a stopped run."
        ),
    ],
    profile: Annotated[
        str | None, typer.Option(help="quick (minutes) or full (hours): defaults for options that are not given.")
    ] = None,
    options: Any,
    n: Annotated[
        list[int] | None, typer.Option("--n", help="Draft length: short for --stopper fixed:N.", rich_help_panel=_LISTS)
    ] = None,
    device: Device = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with a model.")
    ] = False,
    tensor_parallel: Annotated[
        int, typer.Option(help="Number of processes that share the target, each with a device or a share of the cores.")
    ] = 1,
    warmup: Annotated[
        int, typer.Option(help="Number of first answers of each method to discard.", rich_help_panel="Timing")
    ] = 1,
    plots: Plots = True,
    as_json: Lines = False,
    quiet: Quiet = False,
) -> None:
    """Measure compositions in turns; write records.jsonl, provenance.json, report.md, figures.json and plots.

    Without options, the pair of models in the package is measured on the openings of children's stories.
    """
    lengths = tuple(f"fixed:{length}" for length in n or ())
    chosen = BenchOptions(**{**options, "stopper": (*(options.get("stopper") or ()), *lengths) or None})
    if tensor_parallel != 1:
        divide(tensor_parallel)
    with quiet_libraries():
        obtain(chosen.target, chosen.draft, quiet=quiet)
        cache = ModelCache(device=device, trust_remote_code=trust_remote_code, tensor_parallel=tensor_parallel)
        watch = progress_bar(quiet=quiet)
        made = plan(chosen, out, cache, profile=profile, watch=watch)
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
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a finished or unfinished run.")],
    *,
    plots: Plots = True,
    as_json: Lines = False,
) -> None:
    """Rewrite report.md, figures.json and the plots of a run from its records."""
    _finish(folder, as_json=as_json, plots=plots)


_TARGET = {"target": models.DEFAULT_TARGET}
_NO_DRAFT = "A draft model; without it none."

app.command("batches")(
    measurement(
        BatchComparison,
        compare_batches,
        "Compare a drafter with plain decoding for several numbers of requests at once, in turns on the same "
        "questions.",
        defaults=_TARGET,
        texts={"draft": _NO_DRAFT, "drafter": f"Measured beside plain decoding. {DRAFTER_HELP}"},
        leave=("queue", "fewest"),
    )
)
app.command("engines")(
    measurement(
        EngineComparison,
        compare_engines,
        """Compare tokens per second with another engine in a separate process, in turns on the same prompts.

        The other engine may be installed in its own environment: name its Python with --python.
        """,
        defaults=_TARGET,
        metavars={"python": "FILE", "model": "PATH"},
        texts={
            "draft": _NO_DRAFT,
            "drafter": f"A drafter, measured beside plain decoding; without it none. {DRAFTER_HELP}",
        },
    )
)
app.command("rules")(
    measurement(
        RuleComparison,
        compare_rules,
        "Compare verification rules by tokens per target call, for draft lengths and numbers of drafts.",
        names={"seeds": None},
        metavars={"synthetic": "SIZE"},
        texts={"rules": f"{VERIFIER_HELP}; without it all lossless rules that need a draft model"},
    )
)
app.command("stoppers")(
    measurement(
        StopperComparison,
        compare_stoppers,
        "Compare stoppers with fixed draft lengths: discarded tokens and target calls per token, and their cost.",
        names={"seeds": None},
        texts={"stoppers": f"{STOPPER_HELP}; without it a range of all kinds"},
        draw=draw,
    )
)


def _finish(out: Path, *, as_json: bool, plots: bool) -> None:
    """Write the report, and print its figures and its path."""
    found = write_report(out, plots=can_draw(plots=plots))
    if as_json:
        for one in found:
            typer.echo(json.dumps(one.to_dict()))
        return
    for setting, own in by_setting(found).items():
        lines = columns(TERMINAL_HEADS, map(_row, own), numbers=range(1, len(TERMINAL_HEADS)))
        typer.echo("\n".join([setting.title, *lines, ""]))
    typer.echo(f"written: {out / REPORT}")


def _row(one: Summary) -> tuple[str, ...]:
    calls = measures.block_efficiency(one.records).value
    rate = measures.tokens_per_second(one.records).value
    ratios = (_short(one.speed.get(base)) for base in ("plain", "transformers"))
    return (one.method, f"{calls:.2f}", f"{rate:.1f}", *ratios)


def _short(found: Estimate | None) -> str:
    """A speed-up for the terminal; the report has its interval."""
    return "-" if found is None else f"{found.value:.2f}{'' if found.sure else ' ?'}"
