"""Experiments for the recipes: pairs of models, prompts and runs; records on disk, so that each is measured once.

A request's seed follows from the run's seed and the prompt's number. So the same command gives the same counts, and
only times differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.bench.cell import Cell
from draftproof.bench.model_cache import ModelCache
from draftproof.bench.questions import read_questions, shipped
from draftproof.engine.drafter_parts import make_drafter, reads_draft
from draftproof.engine.engine import Engine
from draftproof.errors import UserError, refuse_unknown
from draftproof.files import remembered
from draftproof.provenance import digest
from draftproof.reproduction.expected_accepted import Recorder
from draftproof.rng import fold
from draftproof.sampling import SamplingParams

FORMAT = 3  # of the records; raise it when a measurement or its description changes
WARM_UP = 4  # tokens that are discarded before a run counts
OPENINGS = "story-openings"  # the default data set of the recipes
PROMPT = 96  # largest number of tokens of a prompt, because small models have short contexts
COUNTS = ("num_tokens", "num_target_calls", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
Row = dict[str, Any]
Made = TypeVar("Made")
Notify = Callable[[str], None]


def ignore(line: str) -> None:
    """Drop a line about progress."""


@dataclass(frozen=True)
class PairNames:
    """A target and a draft by name, and the dtype they run in."""

    target: str
    draft: str
    dtype: str = "auto"

    @property
    def label(self) -> str:
        """Its name in reports."""
        return f"{self.target} / {self.draft}"


STORIES = PairNames("embedded:stories", "embedded:stories-draft")
SMALL = PairNames("embedded:target", "embedded:draft")
SMOLLM2 = PairNames("smollm2-135m", "smollm2-135m-draft", "bfloat16")


@dataclass(frozen=True)
class ExperimentProfile:
    """The amount of measurements."""

    name: str  # as on the command line
    pairs: tuple[PairNames, ...]  # of models; the first is compared with the paper's numbers
    prompts: int  # of each run; intervals resample them
    seeds: int  # runs of each prompt
    tokens: int  # emitted for each prompt in a run
    places: int  # positions where rules are compared on the same drafts, for each prompt and seed
    heavy: float = 1.0  # share of the work for models that take a hundred times as long


@dataclass(frozen=True)
class PlannedRun(Cell):
    """Whole runs of one composition: a cell of the benchmark on shipped prompts, in batches.

    `seed` of the cell is replaced by that of each prompt.
    """

    drafter: str = "model"
    stopper: str = "fixed:4"
    verifier: str = "block"
    temperature: float = 1.0
    dataset: str = OPENINGS
    prompts: int = 16
    seeds: int = 1
    batch: int = 8


@dataclass(frozen=True)
class RulesAtPositions:
    """Rules compared on the same drafts, at every position of the target's own text.

    Rules for single drafts are averaged over all `chains`, at least as many as the largest of `drafts`. The drafter is
    "model" (i.i.d. chains of the draft model), or "early_exit:L" of the target itself.
    """

    pair: PairNames
    lengths: tuple[int, ...]
    drafts: tuple[int, ...] = ()
    chains: int = 4
    drafter: str = "model"
    temperature: float = 1.0
    prompts: int = 16
    seeds: int = 1
    places: int = 16


class Experiments:
    """Makes the measurements of recipes, or reads them from the records in a folder, one file for each.

    `notify` is called with a line when a measurement begins.
    """

    def __init__(self, folder: Path, profile: ExperimentProfile, notify: Notify = ignore) -> None:
        self.folder = folder
        self.profile = profile
        self._notify = notify
        self._cache = ModelCache()

    # --- sizes by the profile -------------------------------------------------------------------------------------

    def scaled_run(self, pair: PairNames, **changes: Any) -> PlannedRun:
        """A run at the profile's size, with other values by name."""
        return PlannedRun(pair.target, pair.draft, dtype=pair.dtype, **self._sizes(pair, "max_tokens") | changes)

    def scaled_places(self, pair: PairNames, **changes: Any) -> RulesAtPositions:
        """Positions at the profile's size, with other values by name."""
        return RulesAtPositions(pair, **{"lengths": (4,)} | self._sizes(pair, "places") | changes)

    def _sizes(self, pair: PairNames, of: str) -> dict[str, Any]:
        """Numbers of prompts and seeds, and of tokens or places."""
        profile, share = self.profile, self._share(pair)
        sizes = {"max_tokens": profile.tokens, "places": max(int(profile.places * share), 4)}
        seeds = profile.seeds if share == 1 else 1
        return {"prompts": max(int(profile.prompts * share), 4), "seeds": seeds, of: sizes[of]}

    def _share(self, pair: PairNames) -> float:
        return 1.0 if pair.target.startswith("embedded:") else self.profile.heavy

    # --- measuring ------------------------------------------------------------------------------------------------

    def cached(self, kind: str, key: object, make: Callable[[], Made]) -> Made:
        """A value from the records; measured and written first if it is not there.

        `kind` is the first part of the file's name; `key` has values for JSON, or is a dataclass of such values.
        """
        described = asdict(key) if not isinstance(key, dict | list | tuple | str) else key  # type: ignore[call-overload]
        file = self.folder / f"{kind}-{digest(FORMAT, kind, described)[:16]}.json"
        if not file.exists():
            self._notify(_line(kind, described))
        record: dict[str, Any] = remembered(file, lambda: {"key": described, "rows": make()})
        found: Made = record["rows"]
        return found

    def runs(self, run: PlannedRun) -> list[Row]:
        """A row for each prompt and seed: counts, seconds, token ids."""
        return self.cached("run", run, lambda: self._turns([run])[0])

    def in_turns(self, runs: Sequence[PlannedRun]) -> list[list[Row]]:
        """The rows of runs whose times are compared: measured batch by batch in turns, A B A B."""
        return self.cached("turns", [asdict(run) for run in runs], lambda: self._turns(runs))

    def places(self, places: RulesAtPositions) -> list[Row]:
        """A row for each prompt: number of positions, and the sum of expected accepted tokens in every column."""
        return self.cached("places", places, lambda: self._places(places))

    def backend(self, name: str, dtype: str = "auto") -> SlotBackend:
        """A model, loaded once."""
        return self._cache.backend(name, dtype, "auto")

    def prompts(self, name: str, count: int, dataset: str = OPENINGS) -> list[list[int]]:
        """Prompts of a shipped data set as token ids of a model, cut to PROMPT tokens."""
        refuse_unknown("data set", dataset, shipped())
        texts = [question.prompt for question in read_questions(dataset, count)]
        if len(texts) < count:
            raise UserError(f"{dataset} has {len(texts)} questions: {count} are needed")
        return [[int(token) for token in self._cache.tokenizer(name)(text)["input_ids"]][:PROMPT] for text in texts]

    def _turns(self, runs: Sequence[PlannedRun]) -> list[list[Row]]:
        """Measure batch by batch, all runs in turns, so that a machine that slows down affects all of them."""
        engines = [self._engine(run) for run in runs]
        made: list[list[Row]] = [[] for _ in runs]
        for seed in range(max(run.seeds for run in runs)):
            for number in range(max(-(-run.prompts // run.batch) for run in runs)):
                for run, (engine, prompts), rows in zip(runs, engines, made, strict=True):
                    if seed < run.seeds:
                        rows.extend(_answers(run, engine, prompts, seed, number * run.batch))
        return made

    def _engine(self, run: PlannedRun) -> tuple[Engine, list[list[int]]]:
        """An engine that has warmed up, and its prompts."""
        prompts = self.prompts(run.target, run.prompts, run.dataset)
        engine = self._cache.engine(run, max_batch=run.batch)
        engine.generate(list(prompts[: run.batch]), _params(run, 0, 0, WARM_UP))
        return engine, prompts

    def _places(self, places: RulesAtPositions) -> list[Row]:
        prompts = self.prompts(places.pair.target, places.prompts)
        together = 16 if self._share(places.pair) == 1 else 4
        return [
            row
            for first in range(0, len(prompts), together)
            for row in self._some_places(places, prompts[first : first + together], first)
        ]

    def _some_places(self, places: RulesAtPositions, prompts: list[list[int]], first: int) -> list[Row]:
        """The rows of prompts that are decoded in one batch."""
        deepest, most = max(places.lengths), max((*places.drafts, places.chains))
        name = f"chains:{most}" if places.drafter == "model" else f"{places.drafter}x{most}"
        target = self.backend(places.pair.target, places.pair.dtype)
        draft = self.backend(places.pair.draft, places.pair.dtype) if reads_draft(name) else None
        sums: list[Row] = [{"prompt": first + at, "places": 0, "accepted": {}} for at in range(len(prompts))]
        for seed in range(places.seeds):
            recorder = Recorder(places.lengths, places.drafts)
            part = make_drafter(name, target=target, draft=draft, stopper=f"fixed:{deepest}")
            each = [_params(places, seed, first + at, places.places + deepest) for at in range(len(prompts))]
            Engine(target, part, recorder, max_batch=len(prompts)).generate(list(prompts), each)
            for expected in recorder.rounds:  # every row has the same number: all requests have the same length
                for at, row in enumerate(sums):
                    row["places"] += 1
                    for column, values in expected.items():
                        row["accepted"][column] = row["accepted"].get(column, 0.0) + values[at]
        return sums


def _line(kind: str, described: Any) -> str:
    """One line about a measurement that begins."""
    if isinstance(described, list):
        return f"{kind}: {len(described)} compositions on {described[0]['target']}"
    pair = described.get("pair", described)
    named = ("pair", "target", "draft", "engine", "seed")
    facts = [
        f"{name}={value}" for name, value in described.items() if name not in named and value not in ((), "", 0, "auto")
    ]
    return " ".join([f"{kind}:", pair["target"] if isinstance(pair, dict) else str(pair), *facts])


def _answers(run: PlannedRun, engine: Engine, prompts: list[list[int]], seed: int, first: int) -> list[Row]:
    """The rows of one batch of prompts."""
    some = prompts[first : first + run.batch]
    each = [_params(run, seed, first + at, run.max_tokens) for at in range(len(some))]
    rows = []
    for at, out in enumerate(engine.generate(list(some), each) if some else ()):
        stats = out.stats.to_dict()
        row = {"prompt": first + at, "seed": seed, "token_ids": list(out.token_ids)}
        rows.append(row | {name: stats[name] for name in COUNTS} | {"seconds": stats["seconds"]})
    return rows


def _params(planned: PlannedRun | RulesAtPositions, seed: int, number: int, tokens: int) -> SamplingParams:
    """The sampling parameters of one prompt; at temperature 0 the seed has no effect."""
    return SamplingParams(
        temperature=planned.temperature,
        top_k=getattr(planned, "top_k", 0),
        max_tokens=tokens,
        seed=fold(seed, number) >> 1,
        ignore_eos=True,
    )
