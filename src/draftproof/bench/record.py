"""Records: one answer of one cell to one question with its counts and times, and the file with one record a line."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftproof.bench.cell import Cell
from draftproof.engine.stats import Stats
from draftproof.errors import UserError
from draftproof.files import read_bytes

FILE = "records.jsonl"


@dataclass(frozen=True)
class Generation:
    """The answer of an engine, draftproof or another, to one prompt."""

    token_ids: tuple[int, ...]  # with the stop token that ended them
    text: str  # of them, without special tokens
    finish_reason: str  # "stop" or "length"
    method: str  # in effect, as the engine itself reports it
    tokens: int  # number of them
    target_calls: int  # forward passes of the target, including those that read the prompt
    rounds: int  # target calls that verified at least one drafted token
    draft_tokens: int  # number of them
    accepted: int  # number of those that were emitted
    accepted_per_position: tuple[int, ...] = ()  # the same at each position of a draft
    drafted_per_position: tuple[int, ...] = ()  # rounds whose draft reached each position; () if not reported
    seconds: dict[str, float] = field(default_factory=dict)  # "total"; ours also "draft", "target", "verify", "other"
    first_tokens: int = 0  # that the first round emitted; 0 where that was not measured
    # Until that round ended, which includes reading the prompt; of transformers, until its second target call begins,
    # so that assisted generation has drafted for that one, too.
    first_seconds: float = 0.0
    peak_memory: int | None = None  # bytes on the accelerator; None on a CPU, where only the whole process has one


@dataclass(frozen=True)
class Record:
    """One measurement: the answer of a cell to the question of its data set with this id.

    `repeat` is 0 for the first one, and `category` "" where the question has none.
    """

    cell: Cell
    question: str
    category: str
    repeat: int
    prompt_tokens: int
    answer: Generation

    @property
    def key(self) -> tuple[str, str, int]:
        """Cell, question and repeat: each is measured once."""
        return self.cell.key, self.question, self.repeat

    @property
    def accepted_lengths(self) -> list[int]:
        """Number of rounds by accepted tokens, from 0 on."""
        reached = [self.answer.rounds, *self.answer.accepted_per_position, 0]
        return [here - there for here, there in itertools.pairwise(reached)]

    @property
    def stats(self) -> Stats:
        """The counts as the engine's statistics, with their rates."""
        answer = self.answer
        made = Stats(
            num_tokens=answer.tokens,
            num_target_calls=answer.target_calls,
            num_drafts=answer.rounds,
            num_draft_tokens=answer.draft_tokens,
            num_accepted_tokens=answer.accepted,
            num_accepted_tokens_per_pos=list(answer.accepted_per_position),
            num_drafts_per_pos=list(answer.drafted_per_position),
        )
        for part in ("draft", "target", "verify", "total"):
            setattr(made.seconds, part, answer.seconds.get(part, 0.0))
        return made

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        made: dict[str, Any] = {"cell": self.cell.to_dict(), "question": self.question, "category": self.category}
        made |= {"repeat": self.repeat, "prompt_tokens": self.prompt_tokens}
        return made | {"accepted_lengths": self.accepted_lengths, **asdict(self.answer)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Record:
        """The record from the values of `to_dict`.

        Raises:
            KeyError, TypeError: these values are no record.
        """
        rest = dict(values)
        del rest["accepted_lengths"]
        own = {name: rest.pop(name) for name in ("question", "category", "repeat", "prompt_tokens")}
        cell = Cell.from_dict(rest.pop("cell"))
        for name in ("token_ids", "accepted_per_position", "drafted_per_position"):
            rest[name] = tuple(rest[name])
        return cls(cell=cell, answer=Generation(**rest), **own)


def read_records(out: Path) -> list[Record]:
    """The records of a folder, in the order they were measured; a half-written last line is skipped."""
    found, _ = _read(out / FILE)
    return found


def _read(file: Path) -> tuple[list[Record], int]:
    """The records of a file, and how many bytes of it they take."""
    raw = read_bytes(file, "; draftproof bench run makes one")
    whole = raw[: raw.rfind(b"\n") + 1]
    records = []
    for number, line in enumerate(whole.split(b"\n")[:-1], 1):
        try:
            records.append(Record.from_dict(json.loads(line)))
        except (ValueError, KeyError, TypeError) as cause:
            raise UserError(f"{file}, line {number}: no record of this version ({cause})") from None
    return records, len(whole)


class Log:
    """The records of a folder during a run: each one is on disk before the next measurement begins.

    A last line that a killed run left incomplete is cut off.
    """

    def __init__(self, out: Path) -> None:
        self._file = out / FILE
        self.records: list[Record] = []
        if self._file.exists():
            self.records, size = _read(self._file)
            os.truncate(self._file, size)

    def add(self, record: Record) -> None:
        """Write a record."""
        with self._file.open("ab") as file:
            file.write(json.dumps(record.to_dict()).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.records.append(record)


def by_cell(records: Iterable[Record]) -> dict[Cell, list[Record]]:
    """Records of each cell, cells in the order of their first record."""
    found: dict[Cell, list[Record]] = {}
    for record in records:
        found.setdefault(record.cell, []).append(record)
    return found
