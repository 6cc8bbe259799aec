"""Questions from data sets: those in the package, files in the usual formats, and data sets of the hub.

The formats are those of Spec-Bench, MT-bench, HumanEval, GSM8K and instruction files, plain text, and one prompt a
line. Nothing is downloaded unless a data set `hub:...` is named.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftproof.errors import UserError, reason, refuse_unknown
from draftproof.files import json_value
from draftproof.provenance import digest
from draftproof.training.data import FORMS, read_text

SHIPPED = Path(__file__).parent / "data"
HUB = "hub:"
OPENING = 40  # words of a plain text that are its prompt
SHORTEST = 8  # words; a shorter text is a heading


@dataclass(frozen=True)
class Question:
    """One prompt of a data set."""

    id: str  # within its data set
    dataset: str  # the data set's name
    turns: tuple[str, ...]  # messages of a user, turn by turn; the first is the question
    chat: bool = True  # whether it is a user's message to a chat model; otherwise it is a text to be continued
    category: str = ""  # in its data set, "" if there is none

    @property
    def prompt(self) -> str:
        """The first turn."""
        return self.turns[0]


def shipped() -> list[str]:
    """Names of the data sets inside the package."""
    return sorted(file.stem for file in SHIPPED.glob("*.jsonl"))


def read_questions(name: str, limit: int | None = None) -> list[Question]:
    """The questions of a data set.

    Args:
        name: one of `shipped()`; a file: .jsonl (Spec-Bench, MT-bench, HumanEval, GSM8K, instructions, or objects with
            prompt or text), .txt (one prompt a line), also .gz and .xz; FORM:FILE for plain text in one of
            training.data.FORMS, each text cut to its first OPENING words; or hub:OWNER/NAME[:SPLIT[:COLUMN]].
        limit: how many to take from the beginning; None takes all.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit of questions: expected 1 or more, got {limit}")
    found = _read(name)
    if not found:
        raise UserError(f"{name} holds no question")
    return found if limit is None else found[:limit]


def data_digest(questions: Iterable[Question]) -> str:
    """A hash of the questions' ids and texts."""
    return digest([[question.id, list(question.turns), question.chat] for question in questions])


def _read(name: str) -> list[Question]:
    if name.startswith(HUB):
        return _numbered(name, enumerate(_hub_rows(name.removeprefix(HUB))), lambda place: f"{name}, row {place}")
    form, colon, file = name.partition(":")
    if colon and form in FORMS:
        return _plain(name, FORMS[form](_text(Path(file))), cut=form != "lines")
    path = SHIPPED / f"{name}.jsonl" if name in shipped() else Path(name)
    kinds = path.suffixes
    if ".jsonl" in kinds:
        rows = enumerate(_text(path).split("\n"), 1)  # not splitlines: JSON text may contain its other line ends
        parsed = [(number, json_value(row, f"{path}, line {number}")) for number, row in rows if row.strip()]
        return _numbered(path.name.partition(".")[0], parsed, lambda number: f"{path}, line {number}")
    if ".txt" in kinds or ".raw" in kinds:
        return _plain(path.name.partition(".")[0], FORMS["lines"](_text(path)), cut=False)
    raise UserError(
        f"data set: expected {', '.join(shipped())}, a file (.jsonl or .txt, also .gz and .xz), FORM:FILE with FORM of "
        f"{', '.join(FORMS)}, or hub:OWNER/NAME[:SPLIT[:COLUMN]], got {name!r}"
    )


def _text(path: Path) -> str:
    return read_text(path)[1]


def _plain(dataset: str, texts: list[str], *, cut: bool) -> list[Question]:
    """Texts to be continued: whole lines, or the openings of longer texts."""
    if cut:
        words = [text.split() for text in texts]
        texts = [" ".join(each[:OPENING]) for each in words if len(each) >= SHORTEST]
    return [Question(str(number), dataset, (text,), chat=False) for number, text in enumerate(filter(None, texts), 1)]


def _numbered(dataset: str, rows: Iterable[tuple[int, Any]], where: Callable[[int], str]) -> list[Question]:
    """Questions from JSON objects; equal ids are refused, because they identify records."""
    found: dict[str, Question] = {}
    for place, row in rows:
        question = _of_object(dataset, row, where(place), str(place))
        if question.id in found:
            raise UserError(f"{where(place)}: the id {question.id!r} occurs twice; ids must differ")
        found[question.id] = question
    return list(found.values())


def _of_object(dataset: str, row: Any, where: str, default_id: str) -> Question:
    """A question from one object of any of the known formats."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object")
    form = next((form for form in _OBJECTS if form.key in row), None)
    if form is None:
        raise UserError(f"{where}: expected an object with one of {', '.join(form.key for form in _OBJECTS)}")
    turns = form.turns(row)
    if not turns or any(not isinstance(turn, str) or not turn.strip() for turn in turns):
        raise UserError(f"{where}: {form.key} holds no text")
    found = next((row[key] for key in ("question_id", "task_id", "id") if row.get(key) is not None), default_id)
    chat = form.chat and "task_id" not in row  # HumanEval's prompts are code to be continued
    return Question(str(found), dataset, tuple(turns), bool(row.get("chat", chat)), str(row.get("category") or ""))


@dataclass(frozen=True)
class _Form:
    """A format of objects: the key that identifies it, its turns, and whether they are a user's messages."""

    key: str
    turns: Callable[[dict[str, Any]], list[Any]]
    chat: bool = True


def _instruction(row: dict[str, Any]) -> list[Any]:
    """The instruction, followed by the first instance's input if there is one (self-instruct, Alpaca)."""
    instances = row.get("instances")
    first = instances[0] if isinstance(instances, list) and instances else row
    given = first.get("input") if isinstance(first, dict) else None
    return [f"{row['instruction']}\n\n{given}" if given else row["instruction"]]


_OBJECTS = (
    _Form("turns", lambda row: row["turns"] if isinstance(row["turns"], list) else [row["turns"]]),
    _Form("prompt", lambda row: [row["prompt"]]),
    _Form("question", lambda row: [row["question"]]),
    _Form("instruction", _instruction),
    _Form("text", lambda row: [row["text"]], chat=False),
)


def _hub_rows(spec: str) -> list[dict[str, Any]]:
    """The rows of a data set of the hub, by the `datasets` library."""
    name, split, column = (*spec.split(":"), "", "")[:3]
    try:
        library: Any = importlib.import_module("datasets")
    except ImportError:
        raise UserError(f"{HUB}{spec} needs the package datasets: pip install datasets, or name a file") from None
    try:
        loaded = library.load_dataset(name, split=split or "test")
        names = list(loaded.column_names)
    except Exception as cause:
        raise UserError(
            f"cannot load {name!r} from the hub: {reason(cause)}; a data set is named hub:OWNER/NAME[:SPLIT[:COLUMN]]"
        ) from cause
    if column:
        refuse_unknown(f"column of {name}", column, names)
    return [{"prompt": row[column]} if column else dict(row) for row in loaded]
