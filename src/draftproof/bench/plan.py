"""What is wanted, made into cells and questions: compositions that run, competitors at their best.

Knows: how wishes become cells, which grid a competitor is searched on. Does not know: the order of measurements,
reports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from draftproof.bench.cell import ENGINES, OURS, Cell, matrix
from draftproof.bench.competitors import GRIDS, search
from draftproof.bench.model_cache import ModelCache
from draftproof.bench.options import BenchOptions, parts
from draftproof.bench.questions import Question, read_questions
from draftproof.errors import UserError
from draftproof.progress import Watch, silent
from draftproof.provenance import digest
from draftproof.training.sweep import remembered

SEARCHED = "settings"  # folder of what searches found, within a run's
SEARCH_QUESTIONS = 3  # of all data sets together
Search = Callable[[Cell, Sequence[Question]], dict[str, float]]


@dataclass(frozen=True)
class BenchPlan:
    """What `run` is given.

    Attributes:
        cells, questions, repeats: as in `run`.
        notes: what was left out, and what searches found, a line each.
    """

    cells: list[Cell]
    questions: dict[str, list[Question]]
    repeats: int
    notes: list[str]


def plan(
    wanted: BenchOptions, out: Path, bench: ModelCache, *, profile: str | None = None, watch: Watch = silent
) -> BenchPlan:
    """Cells and questions for what is wanted.

    Args:
        wanted: what was said.
        out: the run's folder; the best settings of competitors are kept there, so that a repeated command finds them.
        bench: for the search of those.
        profile: what to do where nothing was said.
        watch: shows progress.

    Raises:
        UserError: something that does not exist or does not fit.
    """
    asked, notes = parts(wanted, profile)
    limits: dict[str, int] = {}
    for part in asked:
        for name in part.dataset or ():
            limits[name] = max(limits.get(name, 0), _said(part.questions))
    questions = {name: read_questions(name, limit) for name, limit in limits.items()}
    ours: dict[Cell, None] = {}
    theirs: dict[Cell, None] = {}
    for part in asked:
        cells, left_out = matrix(**_lists(part), **_own(part))
        ours |= dict.fromkeys(cells)
        notes += [f"left out {cell.method}: {why}" for cell, why in left_out]
        for engine in part.competitor or ():
            if engine not in ENGINES or engine == OURS:
                legal = ", ".join(name for name in ENGINES if name != OURS)
                raise UserError(f"competitor is {engine!r}: legal are {legal}")
            theirs |= dict.fromkeys(matrix(**_lists(part), draft=part.draft, engine=engine, strict=True).cells)
    best, found = _tuned(list(theirs), questions, out, partial(search, bench, watch=watch))
    repeats = max(_said(part.repeats) for part in asked)
    return BenchPlan([*ours, *theirs, *best], questions, repeats, list(dict.fromkeys([*notes, *found])))


def _said(number: int | None) -> int:
    assert number is not None, "parts are complete"
    return number


def _lists(part: BenchOptions) -> dict[str, Any]:
    """What our engine and others share."""
    names = ("target", "dtype", "temperature", "top_k", "top_p", "seed", "dataset", "max_tokens")
    return {name: getattr(part, name) for name in names}


def _own(part: BenchOptions) -> dict[str, Any]:
    """What is ours alone; plain decoding always runs."""
    names = ("draft", "backend", "stopper", "verifier")
    return {"drafter": ["none", *(part.drafter or ())], **{name: getattr(part, name) for name in names}}


def _tuned(
    cells: Sequence[Cell], questions: Mapping[str, Sequence[Question]], out: Path, search_one: Search
) -> tuple[list[Cell], list[str]]:
    """Competitors' cells at the setting that was fastest in a small search, and what the searches found.

    One search serves all data sets, temperatures and seeds: at the first temperature, over the first questions of the
    data sets in turns.
    """
    made, notes = [], []
    searches: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        if cell.engine in GRIDS:
            searches.setdefault((cell.engine, cell.target, cell.draft, cell.dtype, cell.max_tokens), []).append(cell)
    for own in searches.values():
        names = dict.fromkeys(cell.dataset for cell in own)
        rows = zip(*(questions[name][:SEARCH_QUESTIONS] for name in names), strict=False)
        few = [question for row in rows for question in row][:SEARCH_QUESTIONS]
        one = replace(own[0], dataset="", seed=0)
        key = digest(one.to_dict(), [[question.dataset, question.id] for question in few])[:16]
        rates = remembered(out / SEARCHED / f"{key}.json", partial(search_one, one, few))
        best = max(rates, key=lambda setting: float(rates[setting]))
        names_of = ", ".join(GRIDS[one.engine])
        told = "; ".join(
            f"{replace(one, setting=setting).values or 'defaults'} {rate:.1f}" for setting, rate in rates.items()
        )
        where = f"{one.target} at temperature {one.temperature:g}"
        notes.append(f"{one.engine} on {where}, tokens a second by {names_of}: {told}")
        made += [replace(cell, setting=best) for cell in own if best]
    return made, notes
