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
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import draftproof
from draftproof import models, native
from draftproof.backends.base import Capabilities, Feed
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.hf.probe import TOLERANCE, distance
from draftproof.backends.lean.backend import LeanBackend, LeanForward
from draftproof.backends.lean.checkpoint import Architecture, weight_files
from draftproof.backends.loading.adapters import CONFIG as ADAPTER
from draftproof.backends.loading.adapters import tokenizer_of
from draftproof.backends.loading.by_name import load_backend, parse_device, parse_dtype
from draftproof.backends.loading.fast_tokenizer import Description, FastTokenizer, describe
from draftproof.backends.loading.tokenization import load_tokenizer
from draftproof.backends.model_info import ModelInfo
from draftproof.errors import UserError, reason
from draftproof.files import Store
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
_log = logging.getLogger(__name__)


class VerifiedModel:
    """A model by name, its tokenizer and its backend: without transformers where it was checked before.

    Args:
        source: as for `load_backend`.
        **options: as for `load_backend`.
    """

    def __init__(self, source: str, **options: Any) -> None:
        self._source, self._options = source, options
        self._where = models.obtain(source)
        self._words = tokenizer_of(self._where)
        self._key = _key(Path(self._where), options)
        self._row = None if self._key is None else _row(self._key)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer: transformers' own, or one that does the same.

        Raises:
            UserError: it has none.
        """
        if self._row is not None and self._key is not None:
            try:
                return self._fast_tokenizer(self._row, self._key)
            except Exception as cause:  # noqa: BLE001 - whatever is wrong with what was kept, the model is there
                self._forget(cause)
        return self._original_tokenizer()

    def backend(self) -> SlotBackend:
        """The model.

        Raises:
            UserError: as `load_backend`.
        """
        if self._row is not None and self._key is not None:
            try:
                return _backend(self._row, self._source, self._key)
            except Exception as cause:  # noqa: BLE001 - as above
                self._forget(cause)
        made = load_backend(self._source, **self._options)
        if self._key is not None and type(made) is LeanBackend:
            known = self.tokenizer
            _keep(self._key, self._original_tokenizer() if isinstance(known, FastTokenizer) else known, made)
        return made

    def _original_tokenizer(self) -> Any:
        return load_tokenizer(self._words, trust_remote_code=self._options["trust_remote_code"])

    def _fast_tokenizer(self, row: dict[str, Any], key: dict[str, Any]) -> FastTokenizer:
        store = _store()
        content = store.text(store.name(key, _TOKENIZER))
        if content is None:
            raise UserError("its tokenizer is not there")
        if not content:
            content = (Path(self._where) / "tokenizer.json").read_text(encoding="utf-8")
        return FastTokenizer(content, Description(**row["tokenizer"]), self._original_tokenizer)

    def _forget(self, cause: Exception) -> None:
        _log.info("what was kept of %s cannot be used (%s): it is checked again", self._source, reason(cause))
        self._row = None


# --- what a check depends on ---------------------------------------------------------------------------------------


def _key(folder: Path, options: dict[str, Any]) -> dict[str, Any] | None:
    """Everything that a check depends on; None where none can be kept."""
    if os.environ.get(VARIABLE) == "0" or options["trust_remote_code"] or not options["check"]:
        return None
    altered = (
        options["adapter"]
        or options["attn_implementation"]
        or options.get("quantization_config") is not None
        or (folder / ADAPTER).exists()
    )
    if (
        altered
        or options.get("tensor_parallel", 1) != 1
        or _has_towers(folder)
        or options["backend"] not in ("auto", "lean")
    ):
        return None
    try:
        files: dict[str, Any] = {
            path.name: _state(path) for path in sorted(folder.iterdir()) if path.suffix in _READ_WHOLE
        }
        files |= {path.name: _state_of_weights(path) for path in weight_files(folder)}
        return {
            "folder": str(folder.absolute()),
            "files": files,
            "dtype": options["dtype"],
            "device": str(parse_device(options["device"])),
            "packages": {name: version(name) for name in _PACKAGES},
            "native": native.levels(),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no directory of a whole checkpoint
        return None


def _has_towers(folder: Path) -> bool:
    """Whether a checkpoint is multi-modal: its tensors have other names than those of its language model."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "text_config" in config


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


def _keep(key: dict[str, Any], tokenizer: Any, backend: LeanBackend) -> None:
    """Keep what was found of a model that passed its check."""
    architecture, described = Architecture.of(backend.lean), describe(tokenizer)
    if architecture is None or described is None or backend.probe is None:
        return
    content, description = described
    facts = {name: value for name, value in vars(backend.facts).items() if name not in ("name", "dtype", "device")}
    tokens, rows = backend.probe.sample
    row = {
        "key": key,
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
    same, store = _same_tokenizer(Path(key["folder"]), content), _store()
    for suffix, made in ((_TOKENIZER, "" if same else content), (".json", text)):
        if not store.keep(store.name(key, suffix), partial(Path.write_text, data=made, encoding="utf-8")):
            return


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


def _backend(row: dict[str, Any], source: str, key: dict[str, Any]) -> LeanForward:
    """The model, its logits compared with those that were kept.

    Raises:
        UserError: they differ.
    """
    dtype, device = parse_dtype(row["dtype"]), torch.device(key["device"])
    assert isinstance(dtype, torch.dtype), "kept as the dtype of the weights"
    facts = row["facts"]
    facts["eos_token_ids"] = tuple(facts["eos_token_ids"])
    lean = Architecture.read(row["architecture"]).lean(Path(key["folder"]), dtype, device)
    backend = LeanForward(ModelInfo(name=source, dtype=dtype, device=device, **facts), lean)
    backend.max_positions, backend.bounded_by = row["max_positions"], row["bounded_by"]
    first, *others = row["tokens"]
    session = backend.open()
    try:
        chain = TokenTree.chain(torch.tensor(others, device=device))
        found = backend.forward([Feed(session, [first], chain)])[0].logits
    finally:
        session.close()
    error = distance(_some(found), torch.tensor(row["logits"], dtype=torch.float64))
    if not error < TOLERANCE[dtype]:
        raise UserError(f"its logits are off by {error:.2g}")
    backend.capabilities = replace(backend.capabilities, **asdict(Capabilities(**row["capabilities"])))
    return backend
