"""How `draftproof train` prints what came of a run.

Knows: figures in nested dictionaries. Does not know: what was trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer


def show(summary: dict[str, Any], out: Path, *, as_json: bool) -> None:
    """Print the figures and where the artefact is."""
    if as_json:
        typer.echo(json.dumps({"path": str(out), **summary}))
        return
    for line in _lines(summary):
        typer.echo(line)
    typer.echo(f"written: {out}")


def _lines(summary: dict[str, Any], indent: str = "") -> list[str]:
    """Figures, one a line; nested ones further in."""
    made = []
    for name, value in summary.items():
        words = name.replace("_", " ")
        if isinstance(value, dict):
            made += [f"{indent}{words}", *_lines(value, indent + "  ")]
        elif value is not None:
            made.append(f"{indent}{words}: {f'{value:.4g}' if isinstance(value, float) else value}")
    return made
