"""The output of a batch: a folder of whole files with rows, and a manifest that says what they are the answers to."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from draftproof.batch.answering import Result
from draftproof.batch.rows import Values
from draftproof.batch.source import FORMATS, require_pyarrow
from draftproof.errors import UserError, reason, refuse_below_one
from draftproof.files import locked, whole_file

MANIFEST = "_manifest.json"  # readers of folders of Parquet files pass over such names
_LOCK = ".lock"
_PART = "part-"


class AnswerFolder:
    """Takes results, writes them as whole files, and knows which rows of the input have one already.

    Args:
        path: of the folder, which is made where it is missing.
        settings: what the answers depend on; a folder with answers under other settings is refused.
        form: of the files, "jsonl" or "parquet".
        names: columns of a row.
        integers: whether ids are whole numbers.
        rows_per_file: the most results in a file, but for those of one prompt, which stay together.
        save_every: seconds after which a file is written with fewer.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        *,
        form: str,
        names: Sequence[str],
        integers: bool,
        rows_per_file: int = 1000,
        save_every: float = 60.0,
    ) -> None:
        refuse_below_one(rows_per_file=rows_per_file)
        if form not in FORMATS:
            raise UserError(f"format: expected {' or '.join(FORMATS)}, got {form!r}")
        if form == "parquet":
            require_pyarrow("writing parquet")
        self.path = path
        self._form = form
        self._names = tuple(names)
        self._integers = integers
        self._most = rows_per_file
        self._seconds = save_every
        self._rows: list[Values] = []
        self._saved = time.monotonic()
        self._settings = dict(settings)
        self.facts = self._manifest()
        self.done: set[str] = set()  # ids that have their output, as texts
        self._next = 0

    # --- the manifest ---------------------------------------------------------------------------------------------

    def _manifest(self) -> dict[str, Any]:
        """The manifest of the answers that are here; a fresh one where there are none."""
        file, fresh = self.path / MANIFEST, {"settings": self._settings, "runs": []}
        if not file.exists():
            if self.path.exists() and not self.path.is_dir():
                raise UserError(f"{self.path} is a file: name a folder for the answers")
            if self.path.is_dir() and any(not _may_precede(each.name) for each in self.path.iterdir()):
                raise UserError(f"{self.path} holds files and no {MANIFEST} of a batch: name another folder")
            return fresh
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            before = dict(found["settings"])
            found["runs"] = list(found["runs"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as cause:
            raise UserError(f"cannot read {file}: {reason(cause)}; name another folder") from cause
        now = json.loads(json.dumps(fresh["settings"]))
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name):
                was, here = (json.dumps(each.get(name)) for each in (before, now))
                option = name.removeprefix("sampling_")
                raise UserError(
                    f"{self.path} was begun with {option} {was}, and now it is {here}: go on with the same input and "
                    "options, or name another folder"
                )
        assert isinstance(found, dict), "it has settings"
        return found

    def _write_manifest(self) -> None:
        with self._writing(), whole_file(self.path / MANIFEST, durable=True) as file:
            file.write_text(json.dumps(self.facts, indent=1) + "\n", encoding="utf-8")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as cause:
            raise UserError(f"cannot write to {self.path}: {cause.strerror or cause}") from cause

    # --- a run ----------------------------------------------------------------------------------------------------

    @contextmanager
    def open(self, run: Mapping[str, Any]) -> Iterator[None]:
        """Take results inside the block, one process at a time; what has come is on the disk after it."""
        with ExitStack() as stack:
            with self._writing():
                self.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self.path / _LOCK, self._refuse_second))
                self._clear()
            self.facts = self._manifest()  # once more: another run may have begun and ended since the first time
            self.done = self._ids()
            self.facts["runs"].append({**run, "rows_before": len(self.done)})
            self._write_manifest()
            try:
                yield
            finally:
                self.flush()

    def _refuse_second(self) -> None:
        raise UserError(f"another run writes to {self.path}: wait for it, or name another folder")

    def _clear(self) -> None:
        """Remove what a run that was killed left half-written."""
        for start in (_PART, MANIFEST):
            for file in self.path.glob(f".{start}*"):
                file.unlink(missing_ok=True)

    def parts(self) -> list[Path]:
        """The files with rows, in order; others that begin so are refused: a reader would take them for rows."""
        found = sorted(self.path.glob(f"{_PART}*"))
        for file in found:
            if not re.fullmatch(rf"{_PART}[0-9]{{6,15}}\.{self._form}", file.name):
                raise UserError(
                    f"{file} is not a file of this batch (expected names like {_PART}000000.{self._form}): move it away"
                )
        return found

    def _ids(self) -> set[str]:
        parts = self.parts()
        key = "custom_id" if "custom_id" in self._names else "id"
        found: set[str] = set()
        for file in parts:
            try:
                found.update(_ids_of(file, key, self._form))
            except (ValueError, KeyError, TypeError) as cause:
                raise UserError(
                    f"cannot read {file}: {reason(cause)}; remove it, and its rows are made anew"
                ) from cause
        self._next = 1 + max((int(file.stem.removeprefix(_PART)) for file in parts), default=-1)
        return found

    def add(self, results: Sequence[Result]) -> list[Result]:
        """Take results, and write a file when there are enough; returns those that are new."""
        fresh = []
        for result in results:
            if str(result.id) not in self.done:
                self.done.add(str(result.id))
                self._rows += result.rows
                fresh.append(result)
                if len(self._rows) >= self._most:
                    self.flush()
        if time.monotonic() - self._saved >= self._seconds:
            self.flush()
        return fresh

    def flush(self) -> None:
        """Write the rows that are not in a file yet."""
        self._saved = time.monotonic()
        if not self._rows:
            return
        part = self.path / f"{_PART}{self._next:06d}.{self._form}"
        with self._writing(), whole_file(part, durable=True) as file:
            if self._form == "jsonl":
                _write_json(file, self._rows)
            else:
                _write_parquet(file, self._rows, self._names, integers=self._integers)
        self._rows = []
        self._next += 1

    def finish(self) -> None:
        """Note in the manifest that every row has its output."""
        self.flush()
        self.facts["finished"] = True
        self._write_manifest()


def _may_precede(name: str) -> bool:
    """Whether a file may be in a folder without a manifest: a lock, or what was left by a run that was killed."""
    return name == _LOCK or name.startswith((f".{_PART}", f".{MANIFEST}"))


def _ids_of(file: Path, key: str, form: str) -> Iterator[str]:
    if form == "jsonl":
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                yield str(json.loads(line)[key])
        return
    import pyarrow.parquet

    for found in pyarrow.parquet.read_table(file, columns=[key]).column(0).to_pylist():
        yield str(found)


def _write_json(file: Path, rows: Sequence[Values]) -> None:
    with file.open("w", encoding="utf-8") as lines:
        for row in rows:
            lines.write(json.dumps(row) + "\n")


def _write_parquet(file: Path, rows: Sequence[Values], names: Sequence[str], *, integers: bool) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(table(rows, names, integers=integers), file)


def table(rows: Sequence[Values], names: Sequence[str], *, integers: bool) -> Any:
    """Output rows as a pyarrow table; what has no type of its own is JSON there."""
    import pyarrow as pa

    score = [("token_id", pa.int64()), ("logprob", pa.float64())]
    top = pa.list_(pa.struct(score))
    whole, text = pa.int64(), pa.string()
    types = {
        **dict.fromkeys(("index", "seed", "prompt_tokens", "completion_tokens", "target_calls"), whole),
        "token_ids": pa.list_(whole),
        **dict.fromkeys(("logprobs", "prompt_logprobs"), pa.list_(pa.struct([*score, ("rank", whole), ("top", top)]))),
        ("custom_id" if "custom_id" in names else "id"): whole if integers else text,
    }
    plain = [
        {
            name: value if name in types or value is None or isinstance(value, str) else json.dumps(value)
            for name, value in row.items()
        }
        for row in rows
    ]
    return pa.Table.from_pylist(plain, schema=pa.schema([(name, types.get(name, text)) for name in names]))
