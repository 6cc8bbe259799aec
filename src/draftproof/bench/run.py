"""The run: every cell on every question, in turns, each measurement on disk before the next begins.

Knows: order, warm-up, what makes two runs the same, resuming. Does not know: how anything is generated or summed up.

Cells that are compared (one group: the same questions, sampling and seed) take turns within each question and repeat,
A B A B, so that a machine that slows down or warms up meets all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from draftproof.bench.cell import OURS, Cell, datasets
from draftproof.bench.competitors import COMPETITORS
from draftproof.bench.model_cache import Answerer, ModelCache, Ours
from draftproof.bench.origin import begin, finish, known, origin
from draftproof.bench.questions import Question
from draftproof.bench.record import Log, Record
from draftproof.errors import UserError
from draftproof.progress import Watch, silent
from draftproof.provenance import digest
from draftproof.rng import fold

Questions = Mapping[str, Sequence[Question]]


class Turn(NamedTuple):
    """One measurement to make."""

    cell: Cell
    question: Question
    repeat: int

    @property
    def key(self) -> tuple[str, str, int]:
        """As a record's."""
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
    bench: ModelCache | None = None,
) -> list[Record]:
    """Measure what is not measured yet, and write `records.jsonl` and `provenance.json` into a folder.

    Args:
        cells: from `matrix`.
        questions: for each data set that the cells name.
        out: a folder; a run that was killed goes on where it was.
        repeats: times that each answer is measured; draws are the same every time, only clocks differ.
        warmup: answers of each composition that are thrown away before its first one counts, in every process.
        notes: lines for the report.
        watch: shows progress.
        bench: loaded models, to be shared with other runs.

    Returns:
        All records of the folder, those of earlier processes first.

    Raises:
        UserError: no questions for a data set, a prompt without room for an answer, or `out` holds another run.
    """
    if repeats < 1 or warmup < 0:
        raise UserError(f"repeats is {repeats} and warmup {warmup}: legal are 1 or more, and 0 or more")
    asked = {name: _questions_of(name, questions) for name in datasets(cells)}
    bench = bench or ModelCache()
    begun = known(out, origin(cells, asked, repeats=repeats, warmup=warmup, device=bench.device, notes=notes))
    log = Log(out)
    done = {record.key for record in log.records}
    left = [turn for turn in turns(cells, asked, repeats) if turn.key not in done]
    stage = _Stage(bench, warmup)
    for cell, question in {(turn.cell, turn.question): None for turn in left}:
        stage.prepare(cell, question)  # all prompts are read before the first clock starts, and mistakes found
    begin(out, begun)
    with watch("measuring", len(done) + len(left), len(done)) as tick:
        for number, turn in enumerate(left, len(done) + 1):
            record = stage.measure(turn)
            log.add(record)
            tick(number, tokens=record.answer.tokens)
    if left or "finished" not in begun:
        finish(out, begun)
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
    """The seed of one answer: every cell of a group has the same, every question its own."""
    return fold(cell.seed, int(digest(question.dataset, question.id)[:15], 16)) >> 1


class _Stage:
    """Answerers, prompts and what is warm already."""

    def __init__(self, bench: ModelCache, warmup: int) -> None:
        self._bench, self._warmup = bench, warmup
        self._prompts: dict[tuple[str, Question], list[int]] = {}
        self._warm: set[Cell] = set()

    def prepare(self, cell: Cell, question: Question) -> None:
        """Read a prompt, and find out now whether it can be answered and by what."""
        self._prompts[cell.target, question] = self._bench.encode(cell, question)
        self._answerer(cell)

    def _answerer(self, cell: Cell) -> Answerer:
        if cell.engine == OURS:
            return Ours(self._bench.engine(cell))
        return COMPETITORS[cell.engine](self._bench, cell)

    def measure(self, turn: Turn) -> Record:
        """One answer, after the composition is warm."""
        cell, question = turn.cell, turn.question
        prompt = self._prompts[cell.target, question]
        params = replace(cell.params, seed=question_seed(cell, question))
        composition = replace(cell, dataset="", temperature=0.0, top_k=0, top_p=1.0, seed=0)
        if composition not in self._warm:
            for _ in range(self._warmup):
                self._answerer(cell).answer(prompt, params)
            self._warm.add(composition)
        answer = self._answerer(cell).answer(prompt, params)
        return Record(cell, question.id, question.category, turn.repeat, len(prompt), answer)
