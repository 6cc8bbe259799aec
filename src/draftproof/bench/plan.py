"""What a command asks for, made into cells and questions: profiles, defaults, competitors at their best.

Knows: profiles, what is measured where no option says so, which grid a competitor is searched on. Does not know: the
order of measurements, reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from draftproof.bench.cell import ENGINES, OURS, Cell, matrix
from draftproof.bench.competitors import GRIDS, search
from draftproof.bench.questions import Question, read_questions
from draftproof.bench.workbench import Workbench
from draftproof.errors import UserError
from draftproof.training.provenance import digest
from draftproof.training.sweep import remembered

SEARCHED = "settings"  # folder of what searches found, within a run's
SEARCH_QUESTIONS = 3
_DRAFTS = {"embedded:target": "embedded:draft", "embedded:stories": "embedded:stories-draft"}


@dataclass(frozen=True)
class Wanted:
    """What a command was given; None where it was not.

    Attributes:
        target, draft: models.
        dtype, backend, drafter, stopper, verifier, temperature, top_k, top_p, seed: lists, of `Cell`'s fields.
        competitor: other engines.
        dataset: names that `read_questions` knows.
        questions: of each data set.
        max_tokens: of an answer.
        repeats: of each answer.
    """

    target: str | None = None
    draft: str | None = None
    dtype: Sequence[str] | None = None
    backend: Sequence[str] | None = None
    drafter: Sequence[str] | None = None
    stopper: Sequence[str] | None = None
    verifier: Sequence[str] | None = None
    temperature: Sequence[float] | None = None
    top_k: Sequence[int] | None = None
    top_p: Sequence[float] | None = None
    seed: Sequence[int] | None = None
    competitor: Sequence[str] | None = None
    dataset: Sequence[str] | None = None
    questions: int | None = None
    max_tokens: int | None = None
    repeats: int | None = None

    def over(self, other: Wanted) -> Wanted:
        """These wishes, and another's where these are silent."""
        given = {item.name: value for item in fields(self) if (value := getattr(self, item.name)) is not None}
        return replace(other, **given)


@dataclass(frozen=True)
class Plan:
    """What `run` is given.

    Attributes:
        cells, questions, repeats: as in `run`.
        notes: what was chosen or left out, a line each.
    """

    cells: list[Cell]
    questions: dict[str, list[Question]]
    repeats: int
    notes: list[str] = field(default_factory=list)


DEFAULTS = Wanted(
    target="embedded:target",
    dtype=("auto",),
    backend=("auto",),
    drafter=("model",),
    stopper=("fixed:4",),
    verifier=("",),
    temperature=(0.0, 1.0),
    top_k=(0,),
    top_p=(1.0,),
    seed=(1,),
    competitor=(),
    dataset=("tinystories",),
    questions=8,
    max_tokens=48,
    repeats=3,
)


def plan(wanted: Wanted, out: Path, bench: Workbench, *, profile: str | None = None) -> Plan:
    """Cells and questions for a command.

    Args:
        wanted: what was said.
        out: the run's folder; the best settings of competitors are kept there, so that a repeated command finds them.
        bench: for the search of those.
        profile: what to do where nothing was said.

    Raises:
        UserError: something that does not exist or does not fit.
    """
    if profile is not None and profile not in PROFILES:
        raise UserError(f"profile is {profile!r}: legal are {', '.join(PROFILES)}")
    full = wanted.over(DEFAULTS)
    if wanted.draft is None and full.target in _DRAFTS:
        full = replace(full, draft=_DRAFTS[full.target])
    assert full.dataset is not None, "DEFAULTS say everything"
    questions = {name: read_questions(name, full.questions) for name in full.dataset}
    common = {name: getattr(full, name) for name in ("temperature", "top_k", "top_p", "seed", "dtype", "max_tokens")}
    common |= {"target": full.target, "dataset": full.dataset}
    ours = matrix(
        **common,
        draft=full.draft,
        backend=full.backend,
        drafter=["none", *(full.drafter or ())],
        stopper=full.stopper,
        verifier=full.verifier,
    )
    notes = [f"left out {cell.method}: {why}" for cell, why in _once(ours.left_out)]
    theirs: list[Cell] = []
    for engine in full.competitor or ():
        if engine not in ENGINES or engine == OURS:
            raise UserError(
                f"competitor is {engine!r}: legal are {', '.join(name for name in ENGINES if name != OURS)}"
            )
        theirs += _competitor(
            matrix(**common, draft=full.draft, engine=engine, strict=True).cells, questions, out, bench
        )
    assert full.repeats is not None, "DEFAULTS say everything"
    return Plan([*ours.cells, *theirs], questions, full.repeats, notes)


def _once(left_out: Sequence[tuple[Cell, str]]) -> list[tuple[Cell, str]]:
    """Each refused composition once, whatever the questions and sampling."""
    return list({(cell.method, why): (cell, why) for cell, why in left_out}.values())


def _competitor(cells: Sequence[Cell], questions: dict[str, list[Question]], out: Path, bench: Workbench) -> list[Cell]:
    """Cells of a competitor at its defaults, and at the setting that was fastest in a small search."""
    made = list(cells)
    for cell in cells:
        if cell.engine not in GRIDS:
            continue
        name = digest(replace(cell, seed=0).to_dict(), "search")[:16]
        few = questions[cell.dataset][:SEARCH_QUESTIONS]
        rates = remembered(out / SEARCHED / f"{name}.json", partial(search, bench, cell, few))
        best = max(rates, key=lambda setting: float(rates[setting]))
        if best:
            made.append(replace(cell, setting=best))
    return made


PROFILES: dict[str, Any] = {}
