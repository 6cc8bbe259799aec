"""Where figures and artefacts come from: commit, command, versions, machine, hashes of models and data.

No path and no host name is written, because these facts are published with the file they belong to.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from draftproof import models, native
from draftproof._version import __version__
from draftproof.native.cores import processor_time
from draftproof.native.threads import limit_threads

FILE = "provenance.json"
KEY = "provenance"  # of the facts in a JSON file with results
_PACKAGES = ("torch", "transformers", "safetensors")
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")  # flags that decide which kernels can run
_ADDRESS = re.compile(r"(https?://)(?:[^/@\s]*@)?")
_GIT_SECONDS = 10.0
_WEIGHTS = ("*.safetensors", "config.json", "tokenizer.json")


def digest(*parts: object) -> str:
    """A hash of values that can be written as JSON; the same values give the same hash on every machine."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(name: str) -> str:
    """A hash of a model, by any name: of its files, or of hub id and commit for a model in the hub's cache."""
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
    """The kind of machine: architecture, system, threads, native operations, a limit of processor time, accelerator."""
    limit_threads()
    found = {"architecture": platform.machine(), "system": platform.system(), "threads": torch.get_num_threads()}
    found["native"] = native.levels()
    if (time := processor_time()) is not None:
        found["processor time"] = time
    chosen = torch.device(device)
    if chosen.type == "cuda":
        found["accelerator"] = torch.cuda.get_device_name(chosen)
    return found


def run_facts(device: torch.device | str = "cpu") -> dict[str, Any]:
    """The facts at the beginning of every results file; call this when the run begins.

    Returns:
        commit (None if the package is not in a git checkout) and whether its files were changed since; date (UTC);
        command line; versions; machine: see `machine`, with processor, those of its flags that decide which kernels
        can run, and cores; load average over one minute (None if the system has none).
    """
    commit, modified = _commit(Path(__file__).parent)
    name, flags = _processor()
    return {
        "commit": commit,
        "modified": modified,
        "date": now(),
        "command": command(),
        "versions": versions(),
        "machine": {**machine(device), "processor": name, "flags": flags, "cores": os.cpu_count()},
        "load_average": load_average(),
    }


def header(facts: Mapping[str, Any]) -> list[str]:
    """The opening lines of a results file in Markdown, from `run_facts`.

    Files of earlier versions may have fewer facts about the machine, and a `note`.
    """
    machine = facts["machine"]
    shown = [machine.get("accelerator") or machine.get("processor") or "processor unknown", _flags(machine)]
    shown += [f"{name}: {machine[name]}" for name in ("threads", "cores", "processor time") if name in machine]
    shown += [machine["architecture"]] if "architecture" in machine else []
    shown.append(
        f"native kernels for {' and '.join(machine['native']) or 'nothing'}"
        if "native" in machine
        else "native kernels unknown"
    )
    load = facts.get("load_average")
    shown.append("load average unknown" if load is None else f"load average {load:.1f}")
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    lines = [
        f"- M{measured_at(facts)[1:]}.",
        f"- Command: `{shlex.join(facts['command'])}`",
        f"- Machine: {'; '.join(shown)}.",
        f"- Versions: {versions or 'unknown'}.",
    ]
    return lines + ([f"- Note: {facts['note']}"] if "note" in facts else [])


def _flags(machine: Mapping[str, Any]) -> str:
    """Which of _FLAGS the processor has, and which it lacks."""
    if "flags" not in machine:
        return "flags unknown"
    missing = [flag for flag in _FLAGS if flag not in machine["flags"]]
    there = f"with {', '.join(machine['flags']) or 'none of these flags'}"
    return f"{there}, without {', '.join(missing)}" if missing else there


def measured_at(facts: Mapping[str, Any]) -> str:
    """The commit and the date of a run in words."""
    commit = f"commit {facts['commit']}" if facts["commit"] else "an unknown commit (installed package)"
    changes = ", with changes that are not committed" if facts["modified"] else ""
    return f"measured at {commit}{changes}, {facts['date']}"


def now() -> str:
    """Date and time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def load_average() -> float | None:
    """Processes that ran or waited in the last minute; None if the system does not count them."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _commit(folder: Path) -> tuple[str | None, bool]:
    """The commit of a folder that git tracks, and whether files in it differ from that commit."""
    if _git(folder, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None, False  # an installed package may be inside a checkout of something else
    commit = _git(folder, "rev-parse", "--short=10", "HEAD")
    return commit, bool(_git(folder, "status", "--porcelain", "--", "."))


def _git(folder: Path, *words: str) -> str | None:
    """The output of a git command; None if there is no git, or the command fails."""
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command
            ["git", *words],  # noqa: S607 - the user's own git
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> tuple[str, list[str]]:
    """The processor's model name, and which of _FLAGS it has."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor(), []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    flags = fields.get("flags", "").split()
    return fields.get("model name", platform.processor()), [flag for flag in _FLAGS if flag in flags]


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

    The seconds are those of the run's last part if it was interrupted. `origin` has further entries: options, models
    and their fingerprints.
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
    """The command line without directories."""
    return [without_directory(word) for word in sys.argv]


def without_directory(word: str) -> str:
    """A word of a command line with an absolute path cut to its last part, also after "NAME=" and "NAME:".

    The address of a server stays whole, without a password in it.
    """
    if _ADDRESS.search(word):
        return _ADDRESS.sub(r"\1", word)
    before, mark, path = next(
        (parts for parts in (word.partition(mark) for mark in ("=", ":")) if parts[1] and os.path.isabs(parts[2])),  # noqa: PTH117
        ("", "", word),
    )
    return before + mark + (Path(path).name if os.path.isabs(path) else path)  # noqa: PTH117 - words, not paths


def shown_options(options: Any) -> dict[str, Any]:
    """The fields of a dataclass, with names and paths without directories."""
    return {name: _shown(value) for name, value in asdict(options).items()}


def _shown(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_shown(each) for each in value]
    return without_directory(str(value)) if isinstance(value, str | Path) else value


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
