"""A drafter beside plain decoding as the number of requests grows: speed, and the time to the first token.

Questions of a data set wait in a queue, of which so many are decoded together. Plain decoding and the drafter take
turns on the same questions, each turn has another data set, and the order is reversed from turn to turn. The first
turn of each number of requests warms up; its ratio is shown, and does not count.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from draftproof.bench.cell import Cell
from draftproof.bench.estimate import Estimate, geometric_mean
from draftproof.bench.model_cache import ModelCache
from draftproof.bench.questions import read_questions
from draftproof.bench.report import speed
from draftproof.engine.engine import Engine
from draftproof.engine.stats import total_stats
from draftproof.errors import UserError, refuse_below_one
from draftproof.progress import Watch, silent
from draftproof.provenance import load_average, run_facts, shown_options, without_directory
from draftproof.results import Results, table
from draftproof.sampling import SamplingParams

PLAIN = "plain"


@dataclass(frozen=True)
class BatchComparison:
    """Options of a comparison for several numbers of requests.

    Attributes:
        target, draft, dtype: as in `Engine.load`.
        drafter: measured beside plain decoding.
        batch: requests at once.
        temperature: sampling temperature; 0 is greedy.
        dataset: data sets, which take turns.
        tokens: most tokens of an answer; stop tokens end it earlier.
        least_tokens: with it, the most tokens of each answer are drawn from this number to `tokens`, alike for both;
            else answers that reach the limit end together, and the next prompts are read together.
        repeats: turns of each data set that count, each with other questions.
        queue: questions of a turn for each request that is decoded at once; at least `fewest` questions.
        fewest: questions of a turn.
    """

    target: str = "embedded:stories"
    draft: str | None = None
    drafter: str = "auto"
    dtype: str = "auto"
    batch: Sequence[int] = (1, 2, 4, 8, 16)
    temperature: Sequence[float] = (0.0,)
    dataset: Sequence[str] = ("tinystories",)
    tokens: int = 96
    least_tokens: int | None = None
    repeats: int = 2
    queue: int = 2
    fewest: int = 4

    def __post_init__(self) -> None:
        refuse_below_one(batch=min(self.batch), tokens=self.tokens, repeats=self.repeats, queue=self.queue)
        if self.least_tokens is not None and not 1 <= self.least_tokens <= self.tokens:
            raise UserError(f"least_tokens is {self.least_tokens}: expected 1 to tokens, which is {self.tokens}")
        if self.drafter == "none":
            raise UserError("drafter none is plain decoding, which is always measured: name another one, such as auto")


class BatchTiming(NamedTuple):
    """What a turn of one engine gave: seconds and tokens of all answers, and rounds of the target.

    `processor` is the processor time of all threads, which other programs on the machine disturb less than seconds.
    `first` is the median of the seconds until the first token, of the requests that were decoded first.
    """

    seconds: float
    processor: float
    first: float
    tokens: int
    rounds: int


def compare_batches(options: BatchComparison, *, watch: Watch = silent) -> Results:
    """Tokens a second and seconds to the first token, plain and with the drafter, for every number of requests."""
    facts = run_facts()
    cache, cell = ModelCache(), Cell(options.target, dtype=options.dtype, max_tokens=options.tokens)
    prompts = {name: [cache.encode(cell, one) for one in read_questions(name)] for name in options.dataset}
    shared: dict[str, Any] = {"dtype": options.dtype, "prefix_reuse": False}  # prompts come again
    engines = {
        PLAIN: Engine.load(options.target, drafter="none", **shared),
        options.drafter: Engine.load(options.target, options.draft, drafter=options.drafter, **shared),
    }
    settings = [(batch, temperature) for batch in options.batch for temperature in options.temperature]
    turns = [name for _ in range(options.repeats) for name in options.dataset]
    rows: list[dict[str, Any]] = []
    with watch("measuring", len(settings) * (len(turns) + 1), 0) as tick:
        for batch, temperature in settings:
            for number, name in enumerate([turns[0], *turns]):
                size = max(options.queue * batch, options.fewest)
                first = number // len(options.dataset) * size
                asked = [prompts[name][(first + place) % len(prompts[name])] for place in range(size)]
                order = list(engines)[:: -1 if number % 2 else 1]
                draws = random.Random(first)
                limits = [draws.randint(options.least_tokens or options.tokens, options.tokens) for _ in asked]
                found = {each: _measured(engines[each], asked, batch, temperature, limits) for each in order}
                times = {each: timing._asdict() for each, timing in found.items()}
                setting = {"batch": batch, "temperature": temperature, "dataset": name, "warmup": number == 0}
                rows.append({**setting, "load": load_average(), "times": times})
                tick(len(rows), tokens=sum(timing.tokens for timing in found.values()))
    title = f"{without_directory(options.target)}: {options.drafter} beside plain decoding"
    return Results(title, _lines(options, rows), {"options": shown_options(options), "rows": rows}, facts)


def _measured(
    engine: Engine, prompts: Sequence[list[int]], batch: int, temperature: float, limits: Sequence[int]
) -> BatchTiming:
    engine.max_batch = batch
    start, processor, first = time.perf_counter(), time.process_time(), []
    requests = [
        engine.add(prompt, SamplingParams(temperature=temperature, max_tokens=limit, seed=seed), offline=True)[0]
        for seed, (prompt, limit) in enumerate(zip(prompts, limits, strict=True), 1)
    ]
    waited = list(requests[:batch])
    while not all(request.finished for request in requests):
        engine.step()
        for request in [request for request in waited if request.stats.num_tokens]:
            first.append(time.perf_counter() - start)
            waited.remove(request)
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    total = total_stats(engine.output(request).stats for request in requests)  # raises what a request failed with
    return BatchTiming(seconds, processor, median(first), total.num_tokens, total.num_target_calls)


def _overall(own: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """The figures of one setting, from its turns."""
    counted = [row["times"] for row in rows if not row["warmup"]]
    calls = [_rate(each[own], "rounds") / _rate(each[PLAIN], "rounds") for each in counted]
    return [
        f"{median(_rate(each[PLAIN]) for each in counted):.0f}",
        f"{median(_rate(each[own]) for each in counted):.0f}",
        *(speed(_over_plain(own, counted, per)) for per in ("seconds", "processor")),
        f"{median(calls):.2f}",
        f"{median(each[PLAIN]['first'] for each in counted):.3f}",
        speed(geometric_mean([each[own]["first"] / each[PLAIN]["first"] for each in counted])),
        f"{_rate(rows[0]['times'][own]) / _rate(rows[0]['times'][PLAIN]):.2f}",
    ]


def _by_kind(own: str, rows: Sequence[dict[str, Any]], dataset: str) -> str:
    """The speed over plain decoding in one setting and data set, by processor time."""
    times = [row["times"] for row in rows if row["dataset"] == dataset and not row["warmup"]]
    return f"{_over_plain(own, times, 'processor').value:.2f}"


def _lines(options: BatchComparison, rows: Sequence[dict[str, Any]]) -> list[str]:
    """The tables; ratios are of the same turn."""
    own = options.drafter
    overall, kinds = [], []
    for batch in options.batch:
        for temperature in options.temperature:
            mine = [row for row in rows if (row["batch"], row["temperature"]) == (batch, temperature)]
            setting = (batch, f"{temperature:g}")
            overall.append((*setting, *_overall(own, mine)))
            kinds.append((*setting, *(_by_kind(own, mine, name) for name in options.dataset)))
    loads = [row["load"] for row in rows]
    least, most = options.least_tokens, options.tokens
    answer = f"up to {most}" if least is None else f"limits of {least} to {most}"
    heads = ("requests", "temperature", "plain, tokens/s", f"{own}, tokens/s", "over plain", "by processor time")
    later = ("tokens a target call", "first token, plain, s", "over plain", "speed in the first turn")
    return [
        f"Data sets {', '.join(options.dataset)}, dtype {options.dtype}, {answer} tokens an answer. Up",
        f"to `requests` are decoded at once, from a queue of {options.queue} questions for each of them",
        f"({options.fewest} at least). Ratios are of the same turn: geometric mean over turns with a 95% interval; `?`",
        "marks an interval that contains 1. Processor time is that of all threads: other programs disturb it less.",
        "The time to the first token is that of the requests that are decoded first; a ratio above 1 is later than",
        "plain decoding. The last column is the turn that warms up: weights for drafts are made in it, and costs are",
        "learned where no earlier run did.",
        f"Load average {min(loads):.1f} to {max(loads):.1f}.",
        "",
        *table((*heads, *later), overall),
        "",
        "By data set, over plain by processor time:",
        "",
        *table(("requests", "temperature", *options.dataset), kinds),
    ]


def _over_plain(own: str, turns: Sequence[dict[str, Any]], per: str) -> Estimate:
    """The speed of a drafter relative to plain decoding."""
    return geometric_mean([_rate(each[own], per) / _rate(each[PLAIN], per) for each in turns])


def _rate(times: dict[str, Any], per: str = "seconds") -> float:
    """Tokens for each second, second of processor time, or round."""
    return float(times["tokens"] / times[per])
