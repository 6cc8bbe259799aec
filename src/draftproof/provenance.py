"""Where an artefact comes from: command, versions, data, seed, metrics, time, machine.

Knows: hashes of files and models, what may be told about a machine. Does not know: what was trained.

No path and no host name is written: a provenance file travels with its artefact.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from draftproof import models
from draftproof._version import __version__
from draftproof.kernels import native

FILE = "provenance.json"
_PACKAGES = ("torch", "transformers", "safetensors")
_WEIGHTS = ("*.safetensors", "config.json", "tokenizer.json")


def digest(*parts: object) -> str:
    """A hash of values that JSON can carry; the same values give the same hash on every machine."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(name: str) -> str:
    """A hash of the model that a name stands for: its files, or the hub id and commit of one that is not a directory.

    Args:
        name: a registered name, hub id, directory or .gguf file.
    """
    where = Path(models.resolve(name))
    if where.is_file():
        return digest(file_digest(where))
    if where.is_dir():
        files = sorted({path for pattern in _WEIGHTS for path in where.glob(pattern)})
        return digest([[path.name, file_digest(path)] for path in files])
    from transformers.utils.hub import cached_file

    config = Path(str(cached_file(name, "config.json", local_files_only=True)))
    return digest(name, config.parent.name)  # snapshots/<commit>


def machine(device: torch.device | str = "cpu") -> dict[str, Any]:
    """The kind of machine, not which one: architecture, system, threads, native operations, accelerator."""
    found = {"architecture": platform.machine(), "system": platform.system(), "threads": torch.get_num_threads()}
    found["native"] = native.levels()
    chosen = torch.device(device)
    if chosen.type == "cuda":
        found["accelerator"] = torch.cuda.get_device_name(chosen)
    return found


def provenance(
    *,
    data: Sequence[dict[str, Any]],
    seed: int,
    metrics: dict[str, Any],
    seconds: float,
    device: torch.device | str = "cpu",
    **origin: Any,
) -> dict[str, Any]:
    """What stands in an artefact's provenance.json.

    Args:
        data: for each file its name, hash and size.
        seed: of everything.
        metrics: the figures that sum the artefact up.
        seconds: wall clock of the run, of its last part where it was resumed.
        device: where it was trained.
        origin: further facts: options, models and their fingerprints.
    """
    return {
        "command": command(),
        "versions": versions(),
        **origin,
        "data": list(data),
        "seed": seed,
        "metrics": metrics,
        "seconds": round(seconds, 1),
        "machine": machine(device),
    }


def command() -> list[str]:
    """The command line, as `told` has its words."""
    return [told(word) for word in sys.argv]


def told(word: str) -> str:
    """A word whose absolute path is cut to its last part, behind a word and a colon or an equals sign too."""
    before, mark, path = next(
        (parts for parts in (word.partition(mark) for mark in ("=", ":")) if parts[1] and os.path.isabs(parts[2])),  # noqa: PTH117
        ("", "", word),
    )
    return before + mark + (Path(path).name if os.path.isabs(path) else path)  # noqa: PTH117 - words, not paths


def versions() -> dict[str, str]:
    """Versions of this package, of Python and of what computes."""
    found = {"draftproof": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write_json(path: Path, content: Any) -> None:
    """Write JSON for people and programs."""
    path.write_text(json.dumps(content, indent=2, sort_keys=False) + "\n", encoding="utf-8")
