"""Where measurements come from: what was run, on what, with which models and questions.

Knows: what a second run must share with the first to go on in its folder. Does not know: how anything is measured.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from draftproof import models
from draftproof.bench.cell import Cell
from draftproof.bench.flops import shape_of
from draftproof.bench.questions import Question, data_digest
from draftproof.errors import UserError
from draftproof.files import whole_file
from draftproof.profiling.peak import process_peak
from draftproof.provenance import FILE, command, digest, fingerprint, machine, versions, write_json

SAME = ("cells", "data", "repeats", "warmup", "models", "versions", "machine")


def origin(
    cells: Sequence[Cell],
    questions: Mapping[str, Sequence[Question]],
    *,
    repeats: int,
    warmup: int,
    device: str,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """What stands in a run's provenance.json before the first measurement."""
    names = dict.fromkeys(name for cell in cells for name in (cell.target, cell.draft) if name)
    return {
        "command": command(),
        "begun": _now(),
        "load": os.getloadavg()[0],
        "versions": versions(),
        "machine": {**machine(device), "processor": _processor(), "cores": os.cpu_count()},
        "models": {name: {"fingerprint": fingerprint(name), "shape": _shape(name)} for name in names},
        "data": {name: {"questions": len(own), "digest": data_digest(own)} for name, own in questions.items()},
        "repeats": repeats,
        "warmup": warmup,
        "order": "by question and repeat; the cells of one data set, temperature and seed take turns",
        "notes": list(notes),
        "cells": [cell.to_dict() for cell in cells],
    }


def known(out: Path, told: dict[str, Any]) -> dict[str, Any]:
    """The provenance of the run that goes on in a folder; what is told, where none has begun there.

    Raises:
        UserError: the folder holds a run of another kind, with what differs.
    """
    if not (out / FILE).exists():
        return told
    before = read_origin(out)
    for name in SAME:
        if digest(before.get(name)) != digest(told[name]):
            raise UserError(
                f"{out} holds a run with other {name} ({_difference(before.get(name), told[name])}): "
                "repeat its command to go on with it, or name another folder"
            )
    return before


def begin(out: Path, told: dict[str, Any]) -> None:
    """Write the provenance of a run."""
    _write(out / FILE, told)


def finish(out: Path, told: dict[str, Any]) -> None:
    """Add what is known at the end only."""
    _write(
        out / FILE,
        told | {"finished": _now(), "load_at_end": os.getloadavg()[0], "peak_memory_of_process": process_peak()},
    )


def read_origin(out: Path) -> dict[str, Any]:
    """The provenance of a run.

    Raises:
        UserError: none there.
    """
    try:
        found: dict[str, Any] = json.loads((out / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        why = getattr(cause, "strerror", None) or cause
        raise UserError(f"{out} holds no {FILE} to read ({why}); draftproof bench run makes one") from cause
    return found


def _write(file: Path, told: dict[str, Any]) -> None:
    with whole_file(file) as work:
        write_json(work, told)


def _difference(before: Any, now: Any) -> str:
    """What differs, in a few words."""
    if isinstance(before, dict) and isinstance(now, dict):
        name = next(name for name in {**before, **now} if before.get(name) != now.get(name))
        return f"{name}: {_difference(before.get(name), now.get(name))}"
    if isinstance(before, list) and isinstance(now, list):
        return f"{len(before)} there, {len(now)} now" if len(before) != len(now) else "as many, but not the same"
    return f"{before} there, {now} now"


def _shape(name: str) -> dict[str, Any] | None:
    """A model's sizes; None where its config is not to be had without its weights."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(models.resolve(name), local_files_only=True)
    except (OSError, ValueError):
        return None
    return shape_of(config.get_text_config())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _processor() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
