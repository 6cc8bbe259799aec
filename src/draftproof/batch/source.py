"""The input of a batch: rows with ids from a JSONL or Parquet file, prompts or lines of an OpenAI batch file."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from draftproof.errors import UserError, reason
from draftproof.files import json_value
from draftproof.provenance import file_digest
from draftproof.sampling import SamplingParams

FORMATS = ("jsonl", "parquet")
PROMPT_KEYS = ("messages", "prompt", "text")
LINE_KEYS = ("custom_id", "method", "url", "body")
_SAMPLING = tuple(each.name for each in fields(SamplingParams))
_BLOCK = 1 << 20
_AT_ONCE = 1024  # rows of a Parquet file that are read together
_NAMED = 5  # ids that an error names


@dataclass(frozen=True)
class Row:
    """A row of the input: what its output is found by, and its columns, as JSON has them."""

    id: str | int
    values: Mapping[str, Any]


class RowSource:
    """The rows of a .jsonl or .parquet file, which may be read several times and is the same each time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.form = path.suffix.lower().removeprefix(".")
        if self.form not in FORMATS:
            raise UserError(f"expected an input file that ends in .jsonl or .parquet, got {path}")
        if not path.is_file():
            raise UserError(f"cannot read {path}: {'it is not a file' if path.exists() else 'it does not exist'}")
        if self.form == "parquet":
            require_pyarrow(f"reading {path.name}")
        self._id: str | None = None
        try:
            self.digest = file_digest(path)
        except OSError as cause:
            raise UserError(f"cannot read {path}: {cause.strerror or cause}") from cause
        self._open()

    def _open(self) -> None:
        seen: Counter[str] = Counter()
        unread = dict.fromkeys(_SAMPLING, False)
        self.lines = False  # whether the rows are lines of an OpenAI batch file
        self.integers = True  # whether every id is a whole number
        for number, values in enumerate(self._values(("id", *LINE_KEYS, *PROMPT_KEYS, *_SAMPLING))):
            if number == 0:
                self.lines = "custom_id" in values and "url" in values
                self._id = "custom_id" if self.lines else "id" if "id" in values else None
            found = self._id_of(number, values)
            seen[str(found)] += 1
            unread.update((name, True) for name in values.keys() & unread)
            self.integers = self.integers and isinstance(found, int)
        self.count = seen.total()
        # columns that would be an option's, which prompts do not have
        self.unread = () if self.lines else tuple(name for name, there in unread.items() if there)
        if not self.count:
            raise UserError(f"{self.path} is empty: expected rows with id and prompt, or those of an OpenAI batch file")
        if twice := [name for name, times in seen.items() if times > 1]:
            named = ", ".join(repr(name) for name in twice[:_NAMED]) + (", ..." if len(twice) > _NAMED else "")
            raise UserError(
                f"{self.path} has {len(twice)} ids that occur more than once: {named}; give each row an id of its own"
            )

    def _id_of(self, number: int, values: Mapping[str, Any]) -> str | int:
        if self._id is None:
            if "id" in values:
                raise UserError(f"{self._where(number)} has an id, and the rows before it have none: give all or none")
            return number
        found = values.get(self._id)
        whole = isinstance(found, int) and not isinstance(found, bool) and abs(found) < 1 << 63
        text = isinstance(found, str) and found != "" and not any("\ud800" <= char <= "\udfff" for char in found)
        if not (whole or text):
            raise UserError(f"{self._where(number)}: expected {self._id} to be a text or a 64-bit integer")
        assert isinstance(found, str | int), "one of both"
        return found

    def _where(self, number: int) -> str:
        return f"{self.path}, row {number + 1}"

    def rows(self) -> Iterator[Row]:
        """The rows, in order; a UserError where the file is not what it was, or changes meanwhile."""
        columns = LINE_KEYS if self.lines else ("id", *PROMPT_KEYS, "prediction")
        for number, values in enumerate(self._values(columns)):
            found = self._id_of(number, values)
            yield Row(found if self.integers else str(found), values)

    def _values(self, columns: tuple[str, ...]) -> Iterator[Mapping[str, Any]]:
        """The rows of the file as it was at first; a row is given only while that is known."""
        try:
            with self.path.open("rb") as file:
                same = _Unchanged(file, self.digest, self.path)
                found = _json_rows(file, self.path) if self.form == "jsonl" else _parquet_rows(file, self.path, columns)
                for values in found:
                    same.check()
                    yield values
                same.check(whole=True)
        except OSError as cause:
            raise UserError(f"cannot read {self.path}: {cause.strerror or reason(cause)}") from cause


class _Unchanged:
    """Refuses to go on where an open file is not what it was."""

    def __init__(self, file: BinaryIO, digest: str, path: Path) -> None:
        self._file = file
        self._digest = digest
        self._path = path
        self._seen: tuple[int, int] | None = None
        self.check()

    def check(self, *, whole: bool = False) -> None:
        """Compare the content, where its size or time have changed, or `whole` asks for it."""
        found = os.fstat(self._file.fileno())
        now = found.st_size, found.st_mtime_ns
        if now == self._seen and not whole:
            return
        self._seen = now
        digest, place = sha256(), 0
        if sys.platform == "win32":  # where nobody exchanges a file that is open
            with self._path.open("rb") as again:
                while block := again.read(_BLOCK):
                    digest.update(block)
        else:
            while block := os.pread(self._file.fileno(), _BLOCK, place):  # the reader's place stays
                digest.update(block)
                place += len(block)
        if digest.hexdigest() != self._digest:
            raise UserError(
                f"{self._path} has changed since the run began, so its answers would be to other rows: leave it as it "
                "is while it is read, and begin again with another folder"
            )


def require_pyarrow(what: str) -> None:
    """Refuse to go on without pyarrow."""
    if find_spec("pyarrow") is None:
        raise UserError(f"{what} needs pyarrow: pip install 'draftproof[batch]', or use .jsonl")


def _json_rows(file: BinaryIO, path: Path) -> Iterator[Mapping[str, Any]]:
    """The objects of a JSONL file; lines without anything are left out."""
    for number, line in enumerate(file, 1):
        if line.strip():
            yield _json_row(line, f"{path}, line {number}")


def _json_row(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        found = json_value(line.decode("utf-8-sig"), where)
    except UnicodeDecodeError:
        raise UserError(f"{where}: not UTF-8 text") from None
    if not isinstance(found, dict):
        raise UserError(f"{where}: expected a JSON object, with id and prompt or as in an OpenAI batch file")
    return found


def _parquet_rows(opened: BinaryIO, path: Path, columns: tuple[str, ...]) -> Iterator[Mapping[str, Any]]:
    """The rows of a Parquet file, with those of `columns` that it has."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(opened) as file:
            wanted = [name for name in file.schema_arrow.names if name in columns]
            if not set(wanted).difference(_SAMPLING):
                names = ", ".join(file.schema_arrow.names[:20]) or "none"
                raise UserError(f"{path}: expected columns id and prompt, or {', '.join(LINE_KEYS)}; got {names}")
            for batch in file.iter_batches(_AT_ONCE, columns=wanted):
                yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as cause:
        raise UserError(f"cannot read {path}: {reason(cause)}") from cause
