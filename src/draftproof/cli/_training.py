"""Running a job of `draftproof train`, and printing its figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import typer

from draftproof.cli._libraries import quiet_libraries
from draftproof.cli._pulling import obtain
from draftproof.cli._results import watch_for
from draftproof.training.drafter_options import DrafterJob
from draftproof.training.feature_options import FeatureJob
from draftproof.training.head_options import HeadJob

Json = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]


_Job = TypeVar("_Job", DrafterJob, FeatureJob, HeadJob)


def run(
    make: Callable[[_Job, Any], dict[str, Any]], job: _Job, models: Sequence[str | None], *, as_json: bool, quiet: bool
) -> None:
    """Run a job, which reads models of these names, and print its figures and the path of its directory."""
    with quiet_libraries():
        obtain(*models, quiet=quiet)
        summary = make(job, watch_for(quiet=quiet))
    if as_json:
        typer.echo(json.dumps({"path": str(job.out), **summary}))
        return
    for line in _lines(summary):
        typer.echo(line)
    typer.echo(f"written: {job.out}")


def _lines(summary: dict[str, Any], indent: str = "") -> list[str]:
    made = []
    for name, value in summary.items():
        words = name.replace("_", " ")
        if isinstance(value, dict):
            made += [f"{indent}{words}", *_lines(value, indent + "  ")]
        elif value is not None:
            made.append(f"{indent}{words}: {f'{value:.4g}' if isinstance(value, float) else value}")
    return made
