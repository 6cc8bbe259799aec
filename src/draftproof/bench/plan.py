"""What a benchmark measures: options and profiles as cells and questions, competitors at their fastest setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from draftproof import models
from draftproof.bench.cell import ENGINES, OURS, Cell, matrix
from draftproof.bench.competitors import GRIDS, search
from draftproof.bench.model_cache import ModelCache
from draftproof.bench.questions import Question, read_questions
from draftproof.errors import refuse_unknown
from draftproof.files import remembered
from draftproof.progress import Watch, silent
from draftproof.provenance import digest

SETTINGS = "settings"  # folder with the results of searches, inside the folder of a run
SEARCH_QUESTIONS = 3  # of all data sets together
Search = Callable[[Cell, Sequence[Question]], dict[str, float]]


@dataclass(frozen=True)
class BenchOptions:
    """The options of a benchmark; None where the user gave none.

    Attributes:
        target, draft: names of the models.
        dtype: number format of all models: auto, float32, bfloat16 or float16.
        draft_dtype: another number format for drafts; int8 or int4 quantize a draft model or head.
        backend, drafter, stopper, verifier: as in `Engine.load`.
        temperature: sampling temperature; 0 is greedy.
        top_k: keep the k most likely tokens; 0 is off.
        top_p: keep the fewest tokens whose mass reaches this.
        seed: seed of the random draws; tables add up all seeds.
        competitor: another method: transformers, transformers-assisted or transformers-lookup, the last two also at
            their fastest setting.
        dataset: names that `read_questions` takes.
        questions: how many of each data set; without it 8.
        max_tokens: most tokens of an answer.
        repeats: how often each answer is measured; the methods take turns.
    """

    target: str | None = None
    draft: str | None = None
    dtype: Sequence[str] | None = None
    draft_dtype: Sequence[str] | None = None
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

    def over(self, other: BenchOptions) -> BenchOptions:
        """These options, completed by another's where a value is None."""
        given = {item.name: value for item in fields(self) if (value := getattr(self, item.name)) is not None}
        return replace(other, **given)


DEFAULTS = BenchOptions(
    target=models.DEFAULT_TARGET,
    dtype=("auto",),
    draft_dtype=("auto",),
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


@dataclass(frozen=True)
class BenchProfile:
    """A prepared set of options; `about` says how long it takes."""

    about: str
    sizes: BenchOptions  # for a target that the user names, and for SmolLM2-135M, measured where it was pulled
    embedded: BenchOptions  # other values of these options for the pair inside the package
    embedded_parts: tuple[BenchOptions, ...]  # the parts of both
    pulled_parts: tuple[BenchOptions, ...]


def _parts(lengths: Sequence[int], drafts: Sequence[int]) -> tuple[BenchOptions, ...]:
    """Rules by draft length, rules by number of drafts, stoppers with heads that ship, and a lossy rule."""
    fixed = tuple(f"fixed:{length}" for length in lengths)
    chains = tuple(f"chains:{count}" for count in drafts)
    return (
        BenchOptions(drafter=("model",), stopper=fixed, verifier=("token", "block")),
        BenchOptions(drafter=chains, stopper=("fixed:4",), verifier=("spectr", "trie_block")),
        BenchOptions(drafter=("model",), stopper=("fixed:2", "acceptance"), verifier=("block",)),
        BenchOptions(drafter=("model",), stopper=("approximate",), verifier=("block", "last_token")),
    )


_SMOL = BenchOptions(target="smollm2-135m", draft="smollm2-135m-draft", dtype=("bfloat16",))
_EMBEDDED = BenchOptions(target="embedded:target", draft="embedded:draft", dataset=("tinystories",))
_OTHERS = ("transformers", "transformers-assisted")
_SMOL_PARTS = (
    BenchOptions(drafter=("model",), stopper=("fixed:4",), verifier=("token", "block")),
    BenchOptions(drafter=("ngram:8",), verifier=("block",)),
)
PROFILES = {
    "quick": BenchProfile(
        "under ten minutes on two quiet cores",
        BenchOptions(dataset=("mt-bench", "gsm8k"), questions=6, max_tokens=32, repeats=1, competitor=_OTHERS),
        BenchOptions(temperature=(1.0,), seed=(1, 2), questions=12, max_tokens=64),
        _parts((4, 8), (2, 4)),
        _SMOL_PARTS,
    ),
    "full": BenchProfile(
        "all data sets, lengths, numbers of drafts and temperatures: hours",
        BenchOptions(
            dataset=("mt-bench", "gsm8k", "humaneval", "self-instruct", "vicuna-bench", "fiction"),
            temperature=(0.0, 0.6, 1.0),
            questions=16,
            max_tokens=128,
            repeats=3,
            competitor=(*_OTHERS, "transformers-lookup"),
        ),
        BenchOptions(temperature=(0.0, 0.2, 0.6, 1.0), seed=(1, 2, 3, 4)),
        _parts((4, 6, 8), (2, 4, 8)),
        (*_SMOL_PARTS, BenchOptions(drafter=("chains:2", "chains:4"), verifier=("spectr", "trie_block"))),
    ),
}


def parts(options: BenchOptions, profile: str | None) -> tuple[list[BenchOptions], list[str]]:
    """Complete options for each part of a benchmark, the user's first, and notes on what was left out."""
    if profile is not None:
        refuse_unknown("profile", profile, PROFILES)
    sizes = BenchOptions() if profile is None else PROFILES[profile].sizes
    if profile is None or options.target is not None:
        return [_complete(options.over(sizes))], []
    chosen, notes = PROFILES[profile], []
    made = [options.over(part).over(chosen.embedded).over(_EMBEDDED) for part in chosen.embedded_parts]
    missing = [name for name in (_SMOL.target, _SMOL.draft) if not models.pulled(str(name))]
    if missing:
        notes.append(f"left out {_SMOL.target}: draftproof models pull {missing[0]} has not been run")
    else:
        made += [options.over(part).over(_SMOL) for part in chosen.pulled_parts]
    return [_complete(part.over(sizes)) for part in made], notes


def _complete(options: BenchOptions) -> BenchOptions:
    made = options.over(DEFAULTS)
    return replace(made, draft=made.draft or models.EMBEDDED_DRAFTS.get(made.target or ""))


@dataclass(frozen=True)
class BenchPlan:
    """The arguments of `run`; the notes say what was left out, and what searches found."""

    cells: list[Cell]
    questions: dict[str, list[Question]]
    repeats: int
    notes: list[str]


def plan(
    options: BenchOptions, out: Path, cache: ModelCache, *, profile: str | None = None, watch: Watch = silent
) -> BenchPlan:
    """Cells and questions for the options of a benchmark.

    The best settings of competitors are kept in `out`, the run's folder, so that a repeated command finds them.
    """
    every, notes = parts(options, profile)
    limits: dict[str, int] = {}
    for part in every:
        for name in part.dataset or ():
            limits[name] = max(limits.get(name, 0), _required(part.questions))
    questions = {name: read_questions(name, limit) for name, limit in limits.items()}
    ours: dict[Cell, None] = {}
    theirs: dict[Cell, None] = {}
    for part in every:
        cells, left_out = matrix(**_shared_lists(part), **_own_lists(part))
        ours |= dict.fromkeys(cells)
        notes += [f"left out {cell.method}: {why}" for cell, why in left_out]
        for engine in part.competitor or ():
            refuse_unknown("competitor", engine, (name for name in ENGINES if name != OURS))
            lists = _shared_lists(part)
            theirs |= dict.fromkeys(matrix(**lists, draft=part.draft, engine=engine, strict=True).cells)
    tuned, found = _tuned(list(theirs), questions, out, partial(search, cache, watch=watch))
    repeats = max(_required(part.repeats) for part in every)
    return BenchPlan([*ours, *theirs, *tuned], questions, repeats, list(dict.fromkeys([*notes, *found])))


def _required(number: int | None) -> int:
    assert number is not None, "parts are complete"
    return number


def _shared_lists(part: BenchOptions) -> dict[str, Any]:
    """Lists of values that our engine and competitors share."""
    names = ("target", "dtype", "temperature", "top_k", "top_p", "seed", "dataset", "max_tokens")
    return {name: getattr(part, name) for name in names}


def _own_lists(part: BenchOptions) -> dict[str, Any]:
    """Lists of values for our engine alone; plain decoding is always among them."""
    names = ("draft", "draft_dtype", "backend", "stopper", "verifier")
    return {"drafter": ["none", *(part.drafter or ())], **{name: getattr(part, name) for name in names}}


def _tuned(
    cells: Sequence[Cell], questions: Mapping[str, Sequence[Question]], out: Path, search_one: Search
) -> tuple[list[Cell], list[str]]:
    """Competitors' cells at the setting that was fastest in a small search, and a note on each search.

    One search serves all data sets, temperatures and seeds. It runs at the first temperature, on the first questions of
    the data sets in turns.
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
        rates = remembered(out / SETTINGS / f"{key}.json", partial(search_one, one, few))
        best = max(rates, key=lambda setting: float(rates[setting]))
        shown = "; ".join(
            f"{replace(one, setting=setting).values or 'defaults'} {rate:.1f}" for setting, rate in rates.items()
        )
        where = f"{one.target} at temperature {one.temperature:g}"
        notes.append(f"{one.engine} on {where}, tokens a second by {', '.join(GRIDS[one.engine])}: {shown}")
        made += [replace(cell, setting=best) for cell in own if best]
    return made, notes
