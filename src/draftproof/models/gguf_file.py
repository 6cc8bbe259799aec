"""GGUF files: their metadata and their tensors, mapped; of a model that is split into several files, all of them.

The format is described in ggml's docs/gguf.md. Metadata are read in one pass, without an object for each part of them:
a vocabulary has hundreds of thousands of texts.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from draftproof.errors import UserError, reason
from draftproof.native.ggml import TYPES

_MAGIC, _VERSIONS, _ALIGNMENT = b"GGUF", (2, 3), 32
_START = 24  # bytes before the metadata
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Types of tensors that are no blocks, by ggml's number."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}  # names in metadata and in a generation config


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file: by its ending, or else by what the file begins with."""
    if path.suffix == ".gguf":
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == _MAGIC


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies in the map of its file, its shape as torch has it, and ggml's number of its type."""

    map: mmap.mmap
    offset: int
    shape: tuple[int, ...]
    type: int

    @property
    def nbytes(self) -> int:
        """Its bytes; 0 for a type that is not known here."""
        count = math.prod(self.shape)
        if self.type in FLOATS:
            return count * FLOATS[self.type].itemsize
        layout = TYPES.get(self.type)
        return 0 if layout is None else count // layout.elements * layout.size

    @property
    def content(self) -> UInt8[Tensor, " bytes"]:
        """Its bytes, in the map."""
        return torch.frombuffer(self.map, dtype=torch.uint8, count=self.nbytes, offset=self.offset)

    def release(self) -> None:
        """Let its pages go; they are read again where they are needed. Windows takes them back by itself."""
        if sys.platform == "win32":
            return
        start = self.offset // mmap.PAGESIZE * mmap.PAGESIZE
        self.map.madvise(mmap.MADV_DONTNEED, start, self.offset + self.nbytes - start)


class GGUFFile:
    """The metadata and the tensors of a GGUF file, by key and name; of a model in several files of all of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorEntry] = {}
        for number, part in enumerate(_parts(path)):
            try:
                metadata, tensors = _read(part)
            except FileNotFoundError:
                if number:
                    raise UserError(f"{part} is missing: {path} is the first of several files of a model") from None
                raise UserError(f"expected the path of an existing .gguf file, got {str(path)!r}") from None
            except (OSError, ValueError, struct.error, UnicodeDecodeError) as error:
                raise UserError(f"cannot read {part} ({reason(error)}): is it a whole GGUF file?") from error
            if not number:
                self.metadata = metadata
            self.tensors |= tensors
        self._refuse_parts_of_others(len(_parts(path)))

    def _refuse_parts_of_others(self, parts: int) -> None:
        """Refuse a part of a model that is not named as one, and parts of different models."""
        count = int(self.get("split.count") or 1)
        if count > 1 and count != parts:
            raise UserError(
                f"{self.path} is a part of a model in {count} files: expected all of them in one directory, with names "
                f"such as MODEL-00001-of-{count:05}.gguf, got a name for {parts} (rename them, and name the first one)"
            )
        tensors = self.get("split.tensors.count")
        if count > 1 and tensors is not None and int(tensors) != len(self.tensors):
            raise UserError(
                f"{self.path} and the files beside it have {len(self.tensors)} tensors: expected {int(tensors)} (take "
                "all files from the same conversion of the model)"
            )

    @property
    def read_for_a_token(self) -> list[TensorEntry]:
        """All tensors but the embedding, where the output layer has a table of its own; of experts those of a token.

        Layers that only predict further tokens are left out: plain decoding does not read them.
        """
        left = "token_embd.weight" if "output.weight" in self.tensors else ""
        chosen = self.of_architecture("expert_used_count")
        return [
            replace(entry, shape=(chosen, *entry.shape[1:])) if chosen and "_exps." in name else entry
            for name, entry in self.tensors.items()
            if name != left and not name.startswith(self.prediction_layers)
        ]

    @property
    def prediction_layers(self) -> tuple[str, ...]:
        """What names of tensors begin with in the last layers, where these only predict further tokens (`nextn`)."""
        layers, count = (int(self.of_architecture(key, 0)) for key in ("block_count", "nextn_predict_layers"))
        return tuple(f"blk.{number}." for number in range(layers - count, layers))

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the metadata."""
        return self.metadata.get(key, default)

    def of_architecture(self, key: str, default: Any = None) -> Any:
        """A value whose key begins with the name of the model's architecture."""
        return self.get(f"{self.get('general.architecture')}.{key}", default)


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """The sampling settings that a file recommends (`general.sampling`), as fields of a generation config.

    The window of the repetition penalty is not one of them: it is the whole text, as for other checkpoints.
    """
    found = {name: file.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    # they are float32 in the file: 0.6 shall not become 0.60000002
    return {
        name: float(f"{value:.7g}") if isinstance(value, float) else value
        for name, value in found.items()
        if value is not None
    }


def _parts(path: Path) -> list[Path]:
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    name, number, count = found.groups()
    if int(number) != 1:
        raise UserError(f"{path} is part {int(number)} of a model in {int(count)} files: name the first one")
    return [path.with_name(f"{name}-{part:05}-of-{count}.gguf") for part in range(1, int(count) + 1)]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    if path.is_file() and not path.stat().st_size:
        raise ValueError("it is empty")
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch takes no memory that cannot be written
    cursor = _Cursor(content)
    if content[:4] != _MAGIC:
        raise ValueError(f"it begins with {content[:4]!r}")
    if len(content) < _START:
        raise ValueError(f"it has {len(content)} bytes")
    _, version, tensors, count = struct.unpack_from("<4sIQQ", content)
    if version not in _VERSIONS:
        raise ValueError(f"it begins with {_MAGIC!r}, version {version}")
    cursor.at = _START
    metadata = {cursor.text(): cursor.value(cursor.number("<u4")) for _ in range(count)}
    table = []
    for _ in range(tensors):
        name, dimensions = cursor.text(), cursor.number("<u4")
        shape = tuple(int(size) for size in cursor.numbers("<u8", dimensions))
        kind, offset = cursor.number("<u4"), cursor.number("<u8")
        table.append((name, shape[::-1], kind, offset))
    alignment = int(metadata.get("general.alignment", _ALIGNMENT))
    start = -(-cursor.at // alignment) * alignment
    found = {name: TensorEntry(content, start + offset, shape, kind) for name, shape, kind, offset in table}
    for name, entry in found.items():
        if entry.offset + max(entry.nbytes, 1) > len(content):
            raise ValueError(f"it ends before its tensor {name} does")
    return metadata, found


class _Cursor:
    """Reads one value of a file after another."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content = content
        self.at = 0

    def numbers(self, form: str, count: int) -> Any:
        made = np.frombuffer(self.content, form, count, self.at).copy()  # a view would keep the map open
        self.at += made.nbytes
        return made

    def number(self, form: str) -> Any:
        return self.numbers(form, 1)[0].item()

    def text(self) -> str:
        (size,) = struct.unpack_from("<Q", self.content, self.at)
        start = self.at + 8
        if size > len(self.content) - start:
            raise ValueError(f"a text of {size} bytes")
        self.at = start + size
        return self.content[start : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise ValueError(f"its metadata have a value of type {kind}")
        inner, length = self.number("<u4"), self.number("<u8")
        if length > len(self.content) - self.at:
            raise ValueError(f"an array of {length} entries")
        if inner in _NUMBERS:
            return self.numbers(_NUMBERS[inner], length)
        return [self.value(inner) for _ in range(length)]
