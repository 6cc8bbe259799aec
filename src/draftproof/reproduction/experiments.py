"""Pairs of models, prompts and runs for the recipes; what was measured is kept, so that nothing is measured twice.

Every request's seed comes from the run's seed and the prompt's number, so the same command gives the same counts;
seconds alone differ.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from draftproof.backends.hf import HFBackend
from draftproof.bench.model_cache import ModelCache
from draftproof.bench.questions import read_questions, shipped
from draftproof.drafters.base import Drafter
from draftproof.engine.engine import Engine
from draftproof.engine.registry import make_drafter, make_verifier
from draftproof.errors import UserError
from draftproof.files import whole_file
from draftproof.provenance import digest
from draftproof.reproduction.expected_accepted import Recorder
from draftproof.rng import fold
from draftproof.sampling import SamplingParams

FORMAT = 1  # of the records; raise it where what is measured changes
WARM_UP = 4  # tokens thrown away before a run counts
OPENINGS = "stories"  # the laboratory's own prompts
PROMPT = 96  # tokens of a prompt at most: small models have short contexts
Row = dict[str, Any]
Tell = Callable[[str], None]
COUNTS = ("num_tokens", "num_target_calls", "num_drafts", "num_draft_tokens", "num_accepted_tokens")

_BEGINNINGS = (
    "Once upon a time there was a",
    "The old man opened the door and",
    "One day, a little girl named",
    "In the morning they walked to the",
    "Tom had a red ball. He",
    "The cat looked at the bird and said",
    "It was raining, so Lily and her mom",
    "At the park, a big dog",
)
_BEFORE = ("", "It was a sunny day. ", "There was a small house near the lake. ", "Everyone was asleep. ")


def openings(count: int) -> list[str]:
    """Beginnings of short stories: the prompts of the recipes.

    Raises:
        UserError: more than there are.
    """
    every = [before + beginning for before, beginning in itertools.product(_BEFORE, _BEGINNINGS)]
    if not 2 <= count <= len(every):
        raise UserError(f"{count} prompts: legal are 2 to {len(every)}")
    return every[:count]


@dataclass(frozen=True)
class Names:
    """A target and a draft by name, and the dtype they run in."""

    target: str
    draft: str
    dtype: str = "auto"

    @property
    def label(self) -> str:
        """As reports call it."""
        return f"{self.target} / {self.draft}"


STORIES = Names("embedded:stories", "embedded:stories-draft")
SMALL = Names("embedded:target", "embedded:draft")
SMOLLM2 = Names("smollm2-135m", "smollm2-135m-draft", "bfloat16")


@dataclass(frozen=True)
class ExperimentProfile:
    """How much is measured.

    Attributes:
        name: as on the command line.
        pairs: the pairs of models; the first is the one that stands beside the paper's numbers.
        prompts: of each run; what intervals resample.
        seeds: runs of each prompt.
        tokens: emitted in a run of each prompt.
        places: where rules are compared on the same drafts, for each prompt and seed.
        heavy: parts of the work for models that take a hundred times as long.
    """

    name: str
    pairs: tuple[Names, ...]
    prompts: int
    seeds: int
    tokens: int
    places: int
    heavy: float = 1.0


@dataclass(frozen=True)
class PlannedRun:
    """Whole runs of one composition.

    Attributes:
        names: the models.
        drafter, stopper, verifier: the parts; drafter "none" is plain decoding.
        temperature, top_k: of the sampling.
        prompts, seeds, tokens: how many.
        batch: requests decoded together.
        dataset: OPENINGS, or a data set that ships.
    """

    names: Names
    verifier: str = "block"
    stopper: str = "fixed:4"
    drafter: str = "model"
    temperature: float = 1.0
    top_k: int = 0
    prompts: int = 16
    seeds: int = 1
    tokens: int = 64
    batch: int = 8
    dataset: str = OPENINGS


@dataclass(frozen=True)
class Places:
    """Rules compared on the same drafts, at every place of the target's own text.

    Attributes:
        names: the models.
        lengths: draft lengths to note.
        drafts: numbers of drafts to note for rules on tries.
        chains: chains drafted at each place, as many as the most of `drafts` or more; single-draft rules are averaged
            over all of them.
        drafter: "model" (i.i.d. chains of the draft model), or "early_exit:L" of the target itself.
        temperature: of the sampling.
        prompts, seeds, places: how many.
    """

    names: Names
    lengths: tuple[int, ...]
    drafts: tuple[int, ...] = ()
    chains: int = 4
    drafter: str = "model"
    temperature: float = 1.0
    prompts: int = 16
    seeds: int = 1
    places: int = 16


class Experiments:
    """Measures what recipes ask for, or reads it from the records.

    Args:
        folder: where records are kept, one file for each thing asked.
        profile: how much is measured.
        tell: told of each measurement that is begun.
    """

    def __init__(self, folder: Path, profile: ExperimentProfile, tell: Tell = lambda _: None) -> None:
        self.folder = folder
        self.profile = profile
        self._tell = tell
        self._bench = ModelCache()

    # --- what a profile makes of a wish ---------------------------------------------------------------------------

    def scaled_run(self, names: Names, **asked: Any) -> PlannedRun:
        """A run at the profile's size."""
        profile, share = self.profile, self._share(names)
        sized = PlannedRun(
            names,
            prompts=max(int(profile.prompts * share), 4),
            seeds=profile.seeds if share == 1 else 1,
            tokens=profile.tokens,
        )
        return replace(sized, **asked)

    def scaled_places(self, names: Names, **asked: Any) -> Places:
        """Places at the profile's size."""
        profile, share = self.profile, self._share(names)
        sized = Places(
            names,
            lengths=(4,),
            prompts=max(int(profile.prompts * share), 4),
            seeds=profile.seeds if share == 1 else 1,
            places=max(int(profile.places * share), 4),
        )
        return replace(sized, **asked)

    def _share(self, names: Names) -> float:
        return 1.0 if names.target.startswith("embedded:") else self.profile.heavy

    # --- measuring ------------------------------------------------------------------------------------------------

    def remembered(self, kind: str, asked: object, make: Callable[[], Any]) -> Any:
        """What the records hold of something asked; made and written first if they do not.

        Args:
            kind: names the file.
            asked: what decides the answer; a value that JSON can carry, or a dataclass of such.
            make: measures it.
        """
        told = asdict(asked) if not isinstance(asked, dict | list | tuple | str) else asked  # type: ignore[call-overload]
        file = self.folder / f"{kind}-{digest(FORMAT, kind, told)[:16]}.json"
        if not file.exists():
            self._tell(_words(kind, told))
            made = make()
            with whole_file(file) as work:
                work.write_text(json.dumps({"asked": told, "rows": made}) + "\n", encoding="utf-8")
        return json.loads(file.read_text(encoding="utf-8"))["rows"]

    def runs(self, asked: PlannedRun) -> list[Row]:
        """A row for each prompt and seed: counts, seconds, token ids."""
        found: list[Row] = self.remembered("run", asked, lambda: self._turns([asked])[0])
        return found

    def in_turns(self, asked: Sequence[PlannedRun]) -> list[list[Row]]:
        """The rows of runs whose seconds are compared: measured batch by batch in turns, A B A B."""
        found: list[list[Row]] = self.remembered("turns", [asdict(run) for run in asked], lambda: self._turns(asked))
        return found

    def places(self, asked: Places) -> list[Row]:
        """A row for each prompt: places, and the expected accepted tokens of every column summed over them."""
        found: list[Row] = self.remembered("places", asked, lambda: self._places(asked))
        return found

    def backend(self, name: str, dtype: str = "auto") -> HFBackend:
        """A model, loaded once."""
        return self._bench.backend(name, dtype, "auto")

    def tokenizer(self, name: str) -> Any:
        """A model's tokenizer."""
        return self._bench.tokenizer(name)

    def prompts(self, name: str, count: int, dataset: str = OPENINGS) -> list[list[int]]:
        """Prompts as token ids: beginnings of stories, or questions of a shipped data set, cut where they are long.

        Raises:
            UserError: no such data set, or fewer questions than that.
        """
        if dataset == OPENINGS:
            texts = openings(count)
        elif dataset in shipped():
            texts = [question.prompt for question in read_questions(dataset, count)]
        else:
            raise UserError(f"data set is {dataset!r}: legal are {OPENINGS}, {', '.join(shipped())}")
        if len(texts) < count:
            raise UserError(f"{dataset} has {len(texts)} questions: {count} were asked for")
        return [[int(token) for token in self.tokenizer(name)(text)["input_ids"]][:PROMPT] for text in texts]

    def drafter(self, asked: PlannedRun | Places, name: str, stopper: str) -> Drafter:
        """A drafter by name, with the draft model where it reads one."""
        names = asked.names
        reads = name.partition(":")[0] in {"model", "chains", "tree"}
        draft = self.backend(names.draft, names.dtype) if reads else None
        return make_drafter(name, target=self.backend(names.target, names.dtype), draft=draft, stopper=stopper)

    def _turns(self, asked: Sequence[PlannedRun]) -> list[list[Row]]:
        """Batch by batch, every run in its turn: a machine that slows down meets all of them."""
        benches = [self._bench_of(run) for run in asked]
        made: list[list[Row]] = [[] for _ in asked]
        for seed in range(max(run.seeds for run in asked)):
            for number in range(max(-(-run.prompts // run.batch) for run in asked)):
                for run, (engine, prompts), rows in zip(asked, benches, made, strict=True):
                    if seed < run.seeds:
                        rows.extend(_answers(run, engine, prompts, seed, number * run.batch))
        return made

    def _bench_of(self, run: PlannedRun) -> tuple[Engine, list[list[int]]]:
        """An engine that has warmed up, and its prompts."""
        prompts = self.prompts(run.names.target, run.prompts, run.dataset)
        part = self.drafter(run, run.drafter, run.stopper)
        target = self.backend(run.names.target, run.names.dtype)
        engine = Engine(target, part, make_verifier(run.verifier), max_batch=run.batch)
        engine.generate(list(prompts[: run.batch]), _params(run, 0, 0, WARM_UP))
        return engine, prompts

    def _places(self, asked: Places) -> list[Row]:
        prompts = self.prompts(asked.names.target, asked.prompts)
        together = 16 if self._share(asked.names) == 1 else 4
        return [
            row
            for first in range(0, len(prompts), together)
            for row in self._some_places(asked, prompts[first : first + together], first)
        ]

    def _some_places(self, asked: Places, prompts: list[list[int]], first: int) -> list[Row]:
        """The rows of prompts that are decoded in one batch."""
        deepest, most = max(asked.lengths), max((*asked.drafts, asked.chains))
        name = f"chains:{most}" if asked.drafter == "model" else f"{asked.drafter}x{most}"
        sums: list[Row] = [{"prompt": first + at, "places": 0, "accepted": {}} for at in range(len(prompts))]
        for seed in range(asked.seeds):
            recorder = Recorder(asked.lengths, asked.drafts)
            part = self.drafter(asked, name, f"fixed:{deepest}")
            target = self.backend(asked.names.target, asked.names.dtype)
            each = [_params(asked, seed, first + at, asked.places + deepest) for at in range(len(prompts))]
            Engine(target, part, recorder, max_batch=len(prompts)).generate(list(prompts), each)
            for noted in recorder.rounds:
                _add(sums, noted)
        return sums


def _words(kind: str, told: Any) -> str:
    """What is being measured, in a line."""
    if isinstance(told, list):
        return f"{kind}: {len(told)} compositions on {told[0]['names']['target']}"
    names = told.get("names", "")
    facts = [f"{name}={value}" for name, value in told.items() if name != "names" and value not in ((), "", 0)]
    return " ".join([f"{kind}:", names["target"] if isinstance(names, dict) else str(names), *facts])


def _answers(run: PlannedRun, engine: Engine, prompts: list[list[int]], seed: int, first: int) -> list[Row]:
    """The rows of one batch of prompts."""
    some = prompts[first : first + run.batch]
    each = [_params(run, seed, first + at, run.tokens) for at in range(len(some))]
    rows = []
    for at, out in enumerate(engine.generate(list(some), each) if some else ()):
        told = out.stats.to_dict()
        facts = {"prompt": first + at, "seed": seed, "token_ids": list(out.token_ids)}
        rows.append(facts | {name: told[name] for name in COUNTS} | {"seconds": told["seconds"]})
    return rows


def _params(asked: PlannedRun | Places, seed: int, number: int, tokens: int) -> SamplingParams:
    """Temperature 0 keeps its seed: it changes nothing then."""
    return SamplingParams(
        temperature=asked.temperature,
        top_k=getattr(asked, "top_k", 0),
        max_tokens=tokens,
        seed=fold(seed, number) >> 1,
        ignore_eos=True,
    )


def _add(sums: list[Row], noted: dict[str, list[float]]) -> None:
    """Add one round of all rows; they run in step, for every request has the same length."""
    for at, row in enumerate(sums):
        row["places"] += 1
        for name, values in noted.items():
            row["accepted"][name] = row["accepted"].get(name, 0.0) + values[at]
