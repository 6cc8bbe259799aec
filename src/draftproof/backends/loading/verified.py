"""Models that were checked before: what is kept of a check, so that the next start needs neither it nor transformers.

The first start of a model on the lean forward reads it with transformers and compares the two (`backends.hf.probe`).
What was found then is kept in `$DRAFTPROOF_HOME/checked`, under a hash of everything it depends on: the model's files,
the versions of the libraries, this package's own code, the processor's level, dtype and device. A later start reads the
weights by themselves and compares the logits of some tokens with those that transformers computed. Where anything is
missing or differs, the model is loaded and checked as the first time.

`DRAFTPROOF_CHECKED=0` turns this off. It is for directories and registered models; a hub id may have new files.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import draftproof
from draftproof import native
from draftproof.backends.base import Capabilities, Feed
from draftproof.backends.hf.probe import TOLERANCE
from draftproof.backends.lean.backend import LeanBackend, LeanForward
from draftproof.backends.lean.checkpoint import Architecture
from draftproof.backends.loading.adapters import CONFIG as ADAPTER
from draftproof.backends.loading.fast_tokenizer import Description, FastTokenizer, describe
from draftproof.backends.loading.options import LoadOptions, parse_device, parse_dtype
from draftproof.backends.model_info import ModelInfo, relative_error
from draftproof.errors import UserError
from draftproof.files import Store, read_object
from draftproof.models.found import weight_files
from draftproof.tree import TokenTree

VARIABLE = "DRAFTPROOF_CHECKED"
_FORMAT = 1
_MOST = 64  # files, two for each model; those that were used longest ago go
_MOST_BYTES = 256 << 20  # a tokenizer of 150,000 tokens takes 5 to 11 MB
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")
_READ_WHOLE = {".json", ".jinja", ".model", ".txt"}
_READ_BY = ("backends", "native", "triton")  # folders of the code that reads models, with all below them
_TOKENIZER = ".tokenizer.json"  # ends the name of a kept tokenizer
_COLUMNS = 256  # of each row of logits that are kept


@dataclass
class StoredCheck:
    """The stored result of a model's check."""

    key: dict[str, Any]  # everything that the check depends on
    row: dict[str, Any] | None  # the result of an earlier check; None if the model must be checked

    @classmethod
    def of(cls, folder: Path, options: LoadOptions) -> StoredCheck | None:
        """The check of a model in a directory; None if it cannot be stored."""
        key = _key(folder, options)
        return None if key is None else cls(key, _row(key))

    def tokenizer(self, original: Callable[[], Any]) -> FastTokenizer:
        """The model's tokenizer."""
        assert self.row is not None, "only what was checked can be read"
        store = _store()
        content = store.text(store.name(self.key, _TOKENIZER))
        if content is None:
            raise UserError("its tokenizer is not there")
        if not content:  # the model's own file says the same
            content = (Path(self.key["folder"]) / "tokenizer.json").read_text(encoding="utf-8")
        return FastTokenizer(content, Description(**self.row["tokenizer"]), original)

    def backend(self, name: str) -> LeanForward:
        """The model, its logits compared with those that were kept."""
        assert self.row is not None, "only what was checked can be read"
        dtype = parse_dtype(self.row["dtype"])
        device = torch.device(self.key["device"])
        assert isinstance(dtype, torch.dtype), "kept as the dtype of the weights"
        facts = self.row["facts"]
        facts["eos_token_ids"] = tuple(facts["eos_token_ids"])
        lean = Architecture.read(self.row["architecture"]).lean(Path(self.key["folder"]), dtype, device)
        backend = LeanForward(ModelInfo(name=name, dtype=dtype, device=device, **facts), lean)
        backend.max_positions = self.row["max_positions"]
        backend.bounded_by = self.row["bounded_by"]
        first, *others = self.row["tokens"]
        session = backend.open()
        try:
            chain = TokenTree.chain(torch.tensor(others, device=device))
            found = backend.forward([Feed(session, [first], chain)])[0].logits
        finally:
            session.close()
        error = relative_error(_some(found), torch.tensor(self.row["logits"], dtype=torch.float64))
        if not error < TOLERANCE[dtype]:
            raise UserError(f"its logits are off by {error:.2g}")
        backend.capabilities = replace(backend.capabilities, **asdict(Capabilities(**self.row["capabilities"])))
        return backend

    def keep(self, tokenizer: Any, backend: LeanBackend) -> None:
        """Keep what was found of a model that passed its check; `tokenizer` is transformers' own."""
        architecture, described = Architecture.of(backend.lean), describe(tokenizer)
        if architecture is None or described is None or backend.probe is None:
            return
        content, description = described
        facts = {name: value for name, value in vars(backend.facts).items() if name not in ("name", "dtype", "device")}
        tokens, rows = backend.probe.sample
        row = {
            "key": self.key,
            "architecture": asdict(architecture),
            "dtype": str(backend.dtype).removeprefix("torch."),
            "facts": {**facts, "sampling_defaults": dict(backend.facts.sampling_defaults)},
            "capabilities": asdict(backend.capabilities),
            "max_positions": backend.max_positions,
            "bounded_by": backend.bounded_by,
            "tokens": tokens,
            "logits": _some(rows).tolist(),
            "tokenizer": description,
        }
        try:
            text = json.dumps(row)
        except (TypeError, ValueError):  # a generation config with values that JSON has not
            return
        same, store = _same_tokenizer(Path(self.key["folder"]), content), _store()
        for suffix, made in ((_TOKENIZER, "" if same else content), (".json", text)):
            if not store.keep(store.name(self.key, suffix), partial(Path.write_text, data=made, encoding="utf-8")):
                return


# --- what a check depends on ---------------------------------------------------------------------------------------


def _key(folder: Path, options: LoadOptions) -> dict[str, Any] | None:
    """Everything that a check depends on; None where none can be kept."""
    if os.environ.get(VARIABLE) == "0" or options.trust_remote_code or not options.check:
        return None
    altered = options.adapter or options.attn_implementation or options.quantization_config is not None
    if altered or (folder / ADAPTER).exists() or options.tensor_parallel != 1 or _has_towers(folder):
        return None
    if options.backend not in ("auto", "lean") or not isinstance(options.device, str | None):
        return None
    try:
        files: dict[str, Any] = {
            path.name: _state(path) for path in sorted(folder.iterdir()) if path.suffix in _READ_WHOLE
        }
        files |= {path.name: _state_of_weights(path) for path in weight_files(folder)}
        return {
            "folder": str(folder.absolute()),
            "files": files,
            "dtype": options.dtype,
            "device": str(parse_device(options.device)),
            "packages": {name: version(name) for name in _PACKAGES},
            "native": native.levels(),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no directory of a whole checkpoint
        return None


def _has_towers(folder: Path) -> bool:
    """Whether a checkpoint is multi-modal: its tensors have other names than those of its language model."""
    try:
        return "text_config" in read_object(folder / "config.json", "the config of a model")
    except UserError:
        return False


def _state(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _state_of_weights(path: Path) -> list[Any]:
    """Size, time of the last change, and a hash of the names, shapes and places of the tensors."""
    found = path.stat()
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = hashlib.sha256(file.read(min(size, found.st_size))).hexdigest()
    return [found.st_size, found.st_mtime_ns, header]


@functools.cache
def _code() -> str:
    """A hash of the code of this package that reads models."""
    package = Path(draftproof.__file__).parent
    made = hashlib.sha256()
    for path in sorted(_sources(package)):
        made.update(path.read_bytes())
    return made.hexdigest()


def _sources(package: Path) -> Iterator[Path]:
    for folder in _READ_BY:
        yield from (path for path in (package / folder).rglob("*") if path.suffix in (".py", ".c", ".h"))


def _store() -> Store:
    return Store("checked", [_FORMAT, _code()], most=_MOST, most_bytes=_MOST_BYTES)


# --- keeping and using -----------------------------------------------------------------------------------------------


def _row(key: dict[str, Any]) -> dict[str, Any] | None:
    """What was kept under a key; None where nothing was, or where another user could have written it."""
    store = _store()
    row = store.json(store.name(key, ".json"))
    return row if isinstance(row, dict) else None


def _some(rows: torch.Tensor) -> torch.Tensor:
    """Some columns of rows of logits, spread over the vocabulary."""
    width = rows.shape[-1]
    places = torch.linspace(0, width - 1, min(_COLUMNS, width), device=rows.device).long()
    return rows[:, places].double()


def _same_tokenizer(folder: Path, content: str) -> bool:
    """Whether the model's own tokenizer file says the same; then it need not be kept a second time."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    return path.exists() and Tokenizer.from_file(str(path)).to_str() == content
