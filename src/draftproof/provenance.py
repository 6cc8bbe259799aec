"""The origin of an artefact: command, versions, data, seed, metrics, time, machine.

A provenance file is distributed with its artefact, so it contains no path and no host name.
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
    """A hash of values that can be written as JSON; the same values give the same hash on every machine."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(name: str) -> str:
    """A hash of a model: of its files, or of hub id and commit for a model in the hub's cache.

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
    """The kind of machine: architecture, system, threads, native operations, accelerator."""
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
    """The content of an artefact's provenance.json.

    Args:
        data: name, hash and size of each data file.
        seed: seed of all random choices.
        metrics: the main figures of the artefact.
        seconds: wall-clock seconds of the run; of its last part where it was interrupted.
        device: the device of the training.
        origin: further entries: options, models and their fingerprints.
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
    """The words of the command line, with absolute paths shortened."""
    return [without_folders(word) for word in sys.argv]


def without_folders(word: str) -> str:
    """A word of a command line; an absolute path, alone or after `=` or `:`, is cut to its last part."""
    before, mark, path = next(
        (parts for parts in (word.partition(mark) for mark in ("=", ":")) if parts[1] and os.path.isabs(parts[2])),  # noqa: PTH117
        ("", "", word),
    )
    return before + mark + (Path(path).name if os.path.isabs(path) else path)  # noqa: PTH117 - words, not paths


def model_name(name: str) -> str:
    """The name of a model, or the last part of its path if it is an absolute path or `feature_head:PATH`."""
    if Path(name).is_absolute():
        return Path(name).name
    kind, colon, where = name.rpartition(":")
    return f"{kind}{colon}{Path(where).name}" if Path(where).is_absolute() or kind == "feature_head" else name


def versions() -> dict[str, str]:
    """Versions of this package, of Python and of the packages that compute."""
    found = {"draftproof": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON."""
    path.write_text(json.dumps(content, indent=2, sort_keys=False) + "\n", encoding="utf-8")
