"""GGUF files by the names that people use: `OWNER/NAME:Q4_K_M` of the hub, `ollama:NAME:TAG`; and what is here.

Ollama keeps a model's file under its hash and the hash in a manifest; LM Studio keeps files under their own names; the
hub's cache has folders for repositories.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit
from urllib.request import getproxies

from draftproof.errors import UserError, reason

OLLAMA = "ollama:"
_OF_HUB = re.compile(r"(\w[\w.-]*/\w[\w.-]*):(\w[\w.-]*)")
_FIRST_PART, _LATER_PART = re.compile(r"-00001-of-\d{5}$"), re.compile(r"-\d{5}-of-\d{5}$")
_LANGUAGE_MODEL = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$")
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
# what names say at their end of the form of the weights
_STORED = re.compile(
    r"[-_.](gguf|gptq|awq|bnb|mlx|hqq|autoround|unsloth|imat|qat|ud|i1|quantized|dynamic|block|w\d+a\d+|gs?\d+|"
    r"(u?int|(nv|mx)?fp|[bn]?f)\d+|[it]?q\d\w*|\d+-?bits?)$"
)
_MODEL_LAYER = "application/vnd.ollama.image.model"


@dataclass(frozen=True)
class FoundFile:
    """A model on this disk: the name that options take, and the program (`keeper`) whose folder it is in."""

    name: str
    path: Path
    keeper: str
    nbytes: int


def is_file_name(name: str) -> bool:
    """Whether a name is one of this module's."""
    return name.startswith(OLLAMA) or _OF_HUB.fullmatch(name) is not None


def base_name(name: str) -> str:
    """A model's name in small letters, without its owner or folder, and without the form in which weights are stored.

    `OWNER/X-GGUF:Q4_K_M`, `models/X.Q4_1.gguf`, `X-AWQ` and `OWNER/X` have one.
    """
    if name.startswith(OLLAMA):
        name = name.removeprefix(OLLAMA).removesuffix(":latest").replace(":", "-")
    path = Path(name.partition(":")[0] if is_file_name(name) else name.rpartition(":")[2])
    if path.parent.name == "snapshots":  # of the hub's cache, where models--OWNER--NAME is the folder of a repository
        path = Path(path.parents[1].name.rpartition("--")[2])
    stem = _FIRST_PART.sub("", path.name.lower().removesuffix(".gguf"))
    while (shorter := _STORED.sub("", stem)) not in (stem, ""):
        stem = shorter
    return stem


def resolve_file(name: str) -> str:
    """The path of a file that is on this machine already."""
    if name.startswith(OLLAMA):
        return str(_of_ollama(name.removeprefix(OLLAMA)))
    repository, kind = _parts(name)
    held = {str(path.relative_to(folder)): path for folder in _snapshots(repository) for path in _files_in(folder)}
    chosen = _choose(held, kind)
    if chosen is None:
        raise UserError(
            f"{name} is not on this machine: loading a model downloads it, unless HF_HUB_OFFLINE or --offline forbids "
            f"that or the hub cannot be reached (files of {repository} that are here: "
            f"{', '.join(sorted(held)) or 'none'})"
        )
    return str(held[chosen])


def obtain_file(name: str, *, offline: bool) -> str:
    """The same, but a file of the hub is downloaded first where that is allowed."""
    if name.startswith(OLLAMA) or offline or hub_has_no_address():
        return resolve_file(name)
    from huggingface_hub import HfApi, hf_hub_download

    repository, kind = _parts(name)
    try:
        files = [file for file in HfApi().list_repo_files(repository) if file.endswith(".gguf")]
    except Exception as cause:  # whatever the hub's library raises
        raise UserError(f"cannot list the files of {repository} on the hub: {reason(cause)}") from cause
    chosen = _choose(files, kind)
    if chosen is None:
        raise UserError(f"files of {repository}: expected one of {', '.join(sorted(files)) or 'none'}, got {kind!r}")
    try:
        paths = [hf_hub_download(repository, file) for file in _with_parts(chosen, files)]
    except Exception as cause:  # as above
        raise UserError(f"cannot download {chosen} of {repository} from the hub: {reason(cause)}") from cause
    return paths[0]


def hub_has_no_address() -> bool:
    """Whether the name of the hub's server cannot be resolved; then its library repeats each request for a minute."""
    from huggingface_hub.constants import ENDPOINT

    if getproxies():
        return False  # the proxy resolves names
    try:
        socket.getaddrinfo(urlsplit(ENDPOINT).hostname, None)
    except socket.gaierror:
        return True
    return False


def is_kept(repository: str) -> bool:
    """Whether the hub's cache has files of a repository."""
    return bool(_snapshots(repository))


def name_in_ollama(name: str) -> str | None:
    """The name that options take of a model which is called `name` in Ollama; None where Ollama has none here."""
    named = f"{OLLAMA}{name}"
    return named if (name if ":" in name else f"{name}:latest") in _manifests() else None


def found_files() -> list[FoundFile]:
    """The GGUF files that Ollama, LM Studio and the hub's cache hold here."""
    return [*_found_of_ollama(), *_found_of_lm_studio(), *_found_of_hub()]


def found_checkpoints() -> list[FoundFile]:
    """The language models in safetensors that the hub's cache holds whole; their paths are directories."""
    return list(_checkpoints_of_hub())


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint.

    Raises:
        OSError, ValueError, KeyError: there are none, or their index cannot be read.
    """
    index = folder / _INDEX
    if not index.exists():
        return [folder / _WEIGHTS]
    named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [folder / name for name in sorted(set(named))]


# --- files on this disk ---------------------------------------------------------------------------------------------


def _files_in(folder: Path) -> list[Path]:
    """Models among the GGUF files in a folder and below it; of a model in several files the first."""
    return sorted(path for path in folder.rglob("*.gguf") if _is_of_model(path.stem) and path.is_file())


def _is_of_model(stem: str) -> bool:
    """Whether a name is that of a model or of its first part: not of a projector for images, or of a later part."""
    later = _LATER_PART.search(stem) and not _FIRST_PART.search(stem)
    return not later and not stem.lower().startswith("mmproj")


def _nbytes(first: Path) -> int:
    parts = _with_parts(first.name, (path.name for path in first.parent.iterdir()))
    return sum((first.parent / part).stat().st_size for part in parts)


# --- the hub ---------------------------------------------------------------------------------------------------------


def _parts(name: str) -> tuple[str, str]:
    found = _OF_HUB.fullmatch(name)
    assert found is not None, "is_file_name is asked first"
    return found[1], found[2]


def _choose(files: Iterable[str], kind: str) -> str | None:
    """The one file whose name has the kind as a word; of a model in several files the first part."""
    word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(kind)}(?![A-Za-z0-9_])", re.IGNORECASE)
    stems = {file: PurePosixPath(file).name.removesuffix(".gguf") for file in files}
    fitting = sorted(file for file, stem in stems.items() if word.search(stem) and _is_of_model(stem))
    if len(fitting) > 1:
        raise UserError(f"several files are {kind!r}: {', '.join(fitting)}; name one by its path")
    return fitting[0] if fitting else None


def _with_parts(first: str, files: Iterable[str]) -> list[str]:
    stem = first.removesuffix(".gguf")
    found = _FIRST_PART.search(stem)
    if found is None:
        return [first]
    ending = found[0][len("-00001") :]
    parts = re.compile(rf"{re.escape(stem[: found.start()])}-\d{{5}}{re.escape(ending)}\.gguf")
    return sorted(file for file in files if parts.fullmatch(file))


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _folder_of(repository: str) -> Path:
    return _hub_cache() / f"models--{repository.replace('/', '--')}"


def _snapshots(repository: str) -> list[Path]:
    """The folders of a repository in the hub's cache, the newest last."""
    folder = _folder_of(repository) / "snapshots"
    found = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return sorted(found, key=lambda path: path.stat().st_mtime)


def _repositories() -> list[str]:
    folders = sorted(_hub_cache().glob("models--*--*"))
    return [folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders]


def _checkpoints_of_hub() -> Iterator[FoundFile]:
    for repository in _repositories():
        snapshots = {path.name: path for path in _snapshots(repository)}
        try:  # what a hub id stands for
            named = (_folder_of(repository) / "refs" / "main").read_text(encoding="utf-8").strip()
            config = json.loads((snapshots[named] / "config.json").read_text(encoding="utf-8"))
            nbytes = sum(path.stat().st_size for path in weight_files(snapshots[named]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
        kinds = config.get("architectures") or () if isinstance(config, dict) else ()
        if any(_LANGUAGE_MODEL.search(str(kind)) for kind in kinds):
            yield FoundFile(repository, snapshots[named], "hub cache", nbytes)


def _found_of_hub() -> Iterator[FoundFile]:
    for repository in _repositories():
        for snapshot in _snapshots(repository)[-1:]:
            for path in _files_in(snapshot):
                yield FoundFile(str(path), path, "hub cache", _nbytes(path))


# --- other programs --------------------------------------------------------------------------------------------------


def _ollama_folder() -> Path:
    return Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models")


def _manifests() -> dict[str, Path]:
    """Manifests by the name that Ollama's users write."""
    folder = _ollama_folder() / "manifests"
    found = {}
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and len(parts) >= 3:
            host, *names, tag = parts
            shown = [name for name in names if name != "library"] if host == "registry.ollama.ai" else [host, *names]
            found[f"{'/'.join(shown)}:{tag}"] = path
    return found


def _of_ollama(name: str) -> Path:
    manifests, full = _manifests(), name if ":" in name else f"{name}:latest"
    if full not in manifests:
        whole = sorted(each for each, manifest in manifests.items() if _blob(manifest) is not None)
        raise UserError(
            f"models of Ollama in {_ollama_folder()}: expected {full!r}, found {', '.join(whole) or 'none'}"
        )
    path = _blob(manifests[full])
    if path is None:
        raise UserError(f"Ollama's manifest {manifests[full]} names no model file that is there")
    return path


def _blob(manifest: Path) -> Path | None:
    """The model's file that a manifest names; None where there is none."""
    try:
        layers = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == _MODEL_LAYER]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    paths = [_ollama_folder() / "blobs" / digest.replace(":", "-") for digest in digests]
    return next((path for path in paths if path.is_file()), None)


def _found_of_ollama() -> Iterator[FoundFile]:
    for name, manifest in _manifests().items():
        if (path := _blob(manifest)) is not None:
            yield FoundFile(f"{OLLAMA}{name}", path, "Ollama", path.stat().st_size)


def _found_of_lm_studio() -> Iterator[FoundFile]:
    for folder in (Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models"):
        for path in _files_in(folder):
            yield FoundFile(str(path), path, "LM Studio", _nbytes(path))
