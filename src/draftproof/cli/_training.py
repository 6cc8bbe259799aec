"""Running a job of `draftproof train`, and printing its figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar, runtime_checkable

import typer

from draftproof.cli._libraries import quiet_libraries
from draftproof.cli._pulling import obtain

Json = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


@runtime_checkable
class Job(Protocol):
    """Options of a training run."""

    @property
    def out(self) -> Path:
        """The directory that is written."""
        ...


AnyJob = TypeVar("AnyJob", bound=Job)


def run(
    make: Callable[[AnyJob, Any], dict[str, Any]],
    job: AnyJob,
    models: Sequence[str | None],
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run a job, which reads models of these names, and print its figures and the path of its directory."""
    from draftproof.progress import bar, silent

    with quiet_libraries():
        obtain(*models, quiet=quiet)
        summary = make(job, silent if quiet else bar)
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
