"""A run: every cell on every question, in turns, each measurement on disk before the next begins.

Cells that are compared (one group: the same questions, sampling and seed) take turns within each question and repeat,
A B A B. So a machine that slows down affects all of them equally.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from draftproof.bench.cell import OURS, Cell, datasets
from draftproof.bench.competitors import COMPETITORS
from draftproof.bench.measures import read_shape
from draftproof.bench.model_cache import Answerer, ModelCache, answer
from draftproof.bench.questions import Question, data_digest
from draftproof.bench.record import Log, Record
from draftproof.errors import UserError
from draftproof.files import write_json
from draftproof.peak import process_peak
from draftproof.progress import Watch, silent
from draftproof.provenance import FILE, KEY, digest, fingerprint, load_average, now, run_facts
from draftproof.rng import fold

Questions = Mapping[str, Sequence[Question]]
# Metadata that must be equal for a second run to continue in the folder; the last two are facts of the run.
SAME = ("cells", "data", "repeats", "warmup", "models", "processes", "versions", "machine")


class Turn(NamedTuple):
    """One measurement to make."""

    cell: Cell
    question: Question
    repeat: int

    @property
    def key(self) -> tuple[str, str, int]:
        """The key of the record that it will give."""
        return self.cell.key, self.question.id, self.repeat


def run(
    cells: Sequence[Cell],
    questions: Questions,
    out: Path,
    *,
    repeats: int = 1,
    warmup: int = 1,
    notes: Sequence[str] = (),
    watch: Watch = silent,
    cache: ModelCache | None = None,
) -> list[Record]:
    """Measure what is not measured yet, and write `records.jsonl` and `provenance.json` into a folder.

    Args:
        cells: from `matrix`.
        questions: for each data set that the cells name.
        out: a folder; a run that was killed continues there.
        repeats: measurements of each answer; the draws are the same, only times differ.
        warmup: answers of each composition that are discarded first, in every process.
        notes: lines for the report.
        watch: shows progress.
        cache: loaded models, to be shared with other runs.

    Returns:
        All records of the folder, those of earlier processes first.
    """
    if repeats < 1 or warmup < 0:
        raise UserError(f"expected 1 repeat or more and a warmup of 0 or more, got {repeats} and {warmup}")
    chosen = {name: _questions_of(name, questions) for name in datasets(cells)}
    cache = cache or ModelCache()
    counts = {"repeats": repeats, "warmup": warmup, "processes": cache.processes}
    metadata = resumed(out, {**_described(cells, chosen, cache.device), **counts, "notes": list(notes)})
    log = Log(out)
    done = {record.key for record in log.records}
    left = [turn for turn in turns(cells, chosen, repeats) if turn.key not in done]
    stage = _Stage(cache, warmup)
    for cell, question in {(turn.cell, turn.question): None for turn in left}:
        stage.prepare(cell, question)  # all prompts are read before the first measurement, so errors are seen early
    write_json(out / FILE, metadata)
    with watch("measuring", len(done) + len(left), len(done)) as tick:
        for number, turn in enumerate(left, len(done) + 1):
            record = stage.measure(turn)
            log.add(record)
            tick(number, tokens=record.answer.tokens)
    if left or "finished" not in metadata:
        at_end = {"finished": now(), "load_at_end": load_average(), "peak_memory_of_process": process_peak()}
        write_json(out / FILE, metadata | at_end)
    return log.records


def _questions_of(name: str, questions: Questions) -> Sequence[Question]:
    if not questions.get(name):
        raise UserError(f"there are no questions for data set {name!r}: given are {', '.join(questions) or 'none'}")
    return questions[name]


def turns(cells: Sequence[Cell], questions: Questions, repeats: int) -> Iterator[Turn]:
    """Every measurement in the order it is made: by group, question and repeat, the cells of the group in turns."""
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.group, []).append(cell)
    for together in groups.values():
        for question in questions[together[0].dataset]:
            for repeat in range(repeats):
                yield from (Turn(cell, question, repeat) for cell in together)


def question_seed(cell: Cell, question: Question) -> int:
    """The seed of one answer: the same for every cell of a group, different for every question."""
    return fold(cell.seed, int(digest(question.dataset, question.id)[:15], 16)) >> 1


class _Stage:
    """The answerers, the prompts, and the compositions that have warmed up."""

    def __init__(self, cache: ModelCache, warmup: int) -> None:
        self._cache = cache
        self._warmup = warmup
        self._prompts: dict[tuple[str, Question], list[int]] = {}
        self._warm: set[Cell] = set()

    def prepare(self, cell: Cell, question: Question) -> None:
        """Encode a prompt and make its answerer, so that errors are seen now."""
        self._prompts[cell.target, question] = self._cache.encode(cell, question)
        self._answerer(cell)

    def _answerer(self, cell: Cell) -> Answerer:
        if cell.engine == OURS:
            return partial(answer, self._cache.engine(cell))
        return COMPETITORS[cell.engine](self._cache, cell)

    def measure(self, turn: Turn) -> Record:
        """One answer, after the composition has warmed up."""
        cell, question = turn.cell, turn.question
        prompt = self._prompts[cell.target, question]
        params = replace(cell.params, seed=question_seed(cell, question))
        composition = replace(cell, dataset="", temperature=0.0, top_k=0, top_p=1.0, seed=0)
        if composition not in self._warm:
            for _ in range(self._warmup):
                self._answerer(cell)(prompt, params)
            self._warm.add(composition)
        made = self._answerer(cell)(prompt, params)
        return Record(cell, question.id, question.category, turn.repeat, len(prompt), made)


# --- the metadata of a run: provenance.json ---------------------------------------------------------------------------


def _described(cells: Sequence[Cell], questions: Questions, device: str) -> dict[str, Any]:
    """The metadata of a run before its first measurement: facts of the run, models, data, cells."""
    names = dict.fromkeys(name for cell in cells for name in (cell.target, cell.draft) if name)
    return {
        KEY: run_facts(device),
        "models": {name: {"fingerprint": fingerprint(name), "shape": read_shape(name)} for name in names},
        "data": {name: {"questions": len(own), "digest": data_digest(own)} for name, own in questions.items()},
        "order": "by question and repeat; the cells of one data set, temperature and seed take turns",
        "cells": [cell.to_dict() for cell in cells],
    }


def resumed(out: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    """The metadata of the run that is resumed in a folder; `metadata` if no run has begun there."""
    if not (out / FILE).exists():
        return metadata
    before = read_metadata(out)
    for name in SAME:
        there, here = (each.get(name, each[KEY].get(name)) for each in (before, metadata))
        if digest(there) != digest(here):
            raise UserError(
                f"{out} holds a run with other {name} ({_difference(there, here)}): "
                "repeat its command to continue it, or name another folder"
            )
    return before


def read_metadata(out: Path) -> dict[str, Any]:
    """The metadata of a run."""
    try:
        found: dict[str, Any] = json.loads((out / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        why = getattr(cause, "strerror", None) or cause
        raise UserError(f"{out} holds no {FILE} to read ({why}); draftproof bench run makes one") from cause
    if not isinstance(found, dict) or not {KEY, "cells", "models"} <= set(found):
        raise UserError(f"{out / FILE} is not of a run of this version: run the benchmark again in another folder")
    return found


def _difference(before: Any, now: Any) -> str:
    """The difference in a few words."""
    if isinstance(before, dict) and isinstance(now, dict):
        name = next(name for name in {**before, **now} if before.get(name) != now.get(name))
        return f"{name}: {_difference(before.get(name), now.get(name))}"
    if isinstance(before, list) and isinstance(now, list):
        return f"{len(before)} there, {len(now)} now" if len(before) != len(now) else "as many, but not the same"
    return f"{before} there, {now} now"
