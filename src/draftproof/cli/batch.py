"""`draftproof batch`: answers a file of prompts or an OpenAI batch file into a folder; interrupted runs resume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from draftproof.batch.answering import Answerer, require_server
from draftproof.batch.folder import AnswerFolder
from draftproof.batch.rows import RowOptions, columns
from draftproof.batch.run import Answers, RunSummary, answer_all, settings_of
from draftproof.batch.source import FORMATS, RowSource
from draftproof.cli import _output
from draftproof.cli._download import first_target, obtain
from draftproof.cli._engine import engine_options, load_engine, named_target
from draftproof.cli._options import NONE, Options, with_options
from draftproof.cli._output import Quiet, progress_bar
from draftproof.cli._parts import default_draft
from draftproof.cli._prompts import read_text
from draftproof.cli._quiet import logged_lines, quiet_libraries
from draftproof.cli._sampling import sampling_options
from draftproof.errors import UserError
from draftproof.provenance import run_facts
from draftproof.sampling import MODEL_DEFAULTS, SamplingParams
from draftproof.server.settings import Settings, served_name

app = typer.Typer(add_completion=False)
_SERVED = Options(
    Settings,
    "Lines of OpenAI batch files",
    only=("served_model_name", "max_tokens_limit", "chat_template", "tool_format"),
    metavars={"chat_template": "FILE"},
)
_LEFT = {each.name: each.default for each in fields(SamplingParams) if each.name not in MODEL_DEFAULTS}


@app.command()
@sampling_options
@engine_options
@with_options(served=(_SERVED,))
def batch(
    source: Annotated[
        Path,
        typer.Option(
            "--in",
            metavar="FILE",
            help="Rows with id and prompt (or messages), or an OpenAI batch file; .jsonl or .parquet.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for the answers. Repeat the command to continue a stopped run.")
    ],
    form: Annotated[
        str | None, typer.Option("--format", help=f"Of the answers: {' or '.join(FORMATS)}; default the input's.")
    ] = None,
    rows_per_file: Annotated[int, typer.Option(help="Largest number of rows in a file.")] = 1000,
    save_every: Annotated[float, typer.Option(help="Write a file with fewer rows after this many seconds.")] = 60.0,
    chat: Annotated[
        bool | None, typer.Option(help="Apply the chat template; without this option it is applied if there is one.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message of the chats.")] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run on a Ray cluster: auto, local, HOST:PORT.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Number of engines on the cluster; default one per GPU, or per node.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as a JSON object.")] = False,
    quiet: Quiet = False,
    *,
    served: dict[str, Any],
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Answer a file of prompts, one output for each id, on this machine or on a Ray cluster.

    Repeat the command to resume an interrupted run. The output of a row that cannot be answered is its error.
    Without a target, smollm2-135m is downloaded at the first use; if that fails, a tiny model of the package is used.
    """
    _refuse_workers(ray, workers, engine["tensor_parallel"])
    rows = RowSource(source)
    target = named_target(engine) or first_target(quiet=quiet)
    engine = {**engine, "target": target, "draft": engine["draft"] or default_draft(target, engine["drafter"])}
    options = _row_options(rows, target, sampling, served, chat=chat, system=system)
    with quiet_libraries(), logged_lines(quiet=quiet):
        if ray is None:
            obtain(target, engine["draft"], quiet=quiet)
        folder = AnswerFolder(
            out,
            settings_of(rows, engine, options),
            form=form or rows.form,
            names=columns(options),
            integers=rows.integers,
            rows_per_file=rows_per_file,
            save_every=save_every,
        )
        answers: Answers
        if ray is None:
            answers = Answerer(load_engine(target, engine, quiet=quiet), options)
        else:
            answers = _on_ray(ray, engine, options, workers, rows.count)
        summary = answer_all(rows, folder, answers, run=run_facts(), watch=progress_bar(quiet=quiet))
    _show(summary, out, as_json=as_json, quiet=quiet)


def _refuse_workers(ray: str | None, workers: int | None, processes: int) -> None:
    if workers is not None and ray is None:
        raise typer.BadParameter("--workers needs a Ray cluster: name it with --ray")
    if ray is not None and processes != 1:
        raise UserError(
            f"--tensor-parallel: expected 1 with --ray, since workers have whole models, got {processes} (leave one of "
            "them out)"
        )


def _row_options(
    rows: RowSource, target: str, sampling: Mapping[str, Any], served: Mapping[str, Any], **chats: Any
) -> RowOptions:
    if rows.lines:
        require_server()
    return RowOptions(
        lines=rows.lines,
        sampling={name: value for name, value in sampling.items() if value != _LEFT.get(name, NONE)},
        chat_template=read_text(served["chat_template"]),
        model=served_name(target, served["served_model_name"]),
        max_tokens_limit=served["max_tokens_limit"],
        tool_format=served["tool_format"],
        **chats,
    )


def _on_ray(address: str, engine: Mapping[str, Any], options: RowOptions, workers: int | None, rows: int) -> Answers:
    if find_spec("ray") is None or find_spec("pyarrow") is None:
        raise UserError("--ray needs Ray: pip install 'draftproof[ray]'")
    from draftproof.integrations.ray import cluster_answers

    return cluster_answers(address, engine, options, workers=workers, rows=rows)


def _show(summary: RunSummary, out: Path, *, as_json: bool, quiet: bool) -> None:
    found = summary.to_dict()
    if as_json:
        typer.echo(json.dumps({"out": str(out), **found}))
    if as_json or quiet:
        return
    words = [f"{summary.answered} of {summary.rows} rows answered in {summary.seconds:.1f} s"]
    if summary.before:
        words.append(f"{summary.before} were answered before")
    words.append(f"{summary.failed} with an error")
    if found["tokens_per_second"]:
        words.append(f"{found['tokens_per_second']:.0f} tokens/s")
    if found["block_efficiency"]:
        words.append(f"{found['block_efficiency']:.2f} tokens per target call")
    _output.note(f"draftproof: {', '.join(words)}: {out}", dim=True)
