"""Throughput beside another engine, which runs in its own process and may have its own Python environment.

All engines continue the same prompts by the same number of tokens, and stop tokens are ignored. They take turns, and
the order is reversed from turn to turn. The first turn warms up and does not count.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import IO, Any

from draftproof import models
from draftproof.bench import worker
from draftproof.bench.cell import Cell
from draftproof.bench.estimate import geometric_mean
from draftproof.bench.model_cache import ModelCache, Stopwatch
from draftproof.bench.questions import read_questions
from draftproof.bench.report import speed
from draftproof.engine.engine import Engine
from draftproof.engine.stats import Stats, total_stats
from draftproof.errors import UserError, refuse_below_one, refuse_unknown
from draftproof.progress import Watch, silent
from draftproof.provenance import run_facts, shown_options, without_directory
from draftproof.results import Results, table
from draftproof.sampling import SamplingParams

# vLLM's build for CPUs needs these on a small machine.
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
TIMEOUT = 900.0  # seconds that the other engine may take to load, or for one request
SHUTDOWN = 10.0  # seconds that it may take to stop
PLAIN = "draftproof, plain"
Timing = tuple[float, Stats | None]  # seconds, and the counts if the engine is draftproof
Measure = Callable[[worker.Request], Timing]


@dataclass(frozen=True)
class EngineComparison:
    """Options of a comparison with another engine.

    Attributes:
        other: the other engine: vllm, transformers or llama.cpp.
        python: Python of the environment that has it; without it this one.
        model: model file for the other engine; without it the target's directory.
        target, draft, dtype: draftproof's, as in `Engine.load`.
        drafter: draftproof's, measured beside plain decoding; without it only plain decoding is measured.
        batch: prompts at a time.
        temperature: sampling temperature; 0 is greedy.
        dataset: of the prompts.
        tokens: tokens of every answer; stop tokens are ignored.
        repeats: turns that count, each with other prompts.
    """

    other: str = "vllm"
    python: Path | None = None
    model: Path | None = None
    target: str = "embedded:stories"
    draft: str | None = None
    drafter: str | None = None
    dtype: str = "auto"
    batch: Sequence[int] = (1, 8)
    temperature: Sequence[float] = (0.0, 1.0)
    dataset: str = "tinystories"
    tokens: int = 64
    repeats: int = 6

    def __post_init__(self) -> None:
        refuse_unknown("other engine", self.other, worker.WORKERS)
        refuse_below_one(batch=min(self.batch), tokens=self.tokens, repeats=self.repeats)


def compare_engines(options: EngineComparison, *, watch: Watch = silent) -> Results:
    """Tokens a second of the other engine, of plain decoding, and of a drafter, for every batch and temperature."""
    facts = run_facts()
    rows: list[dict[str, Any]] = []
    turns = len(options.batch) * len(options.temperature) * (options.repeats + 1)
    with _other_engine(options) as other, watch("measuring", turns, 0) as tick:
        for batch in options.batch:
            engines = {options.other: other, **_ours(options, batch)}
            prompts = _prompts(options, batch)
            for temperature in options.temperature:
                timings: dict[str, list[Timing]] = {name: [] for name in engines}
                for turn in range(options.repeats + 1):
                    request = _request(options, prompts, batch, turn) | {"temperature": temperature}
                    for name in list(engines)[:: -1 if turn % 2 else 1]:  # so that no engine is always the first
                        timings[name].append(engines[name](request))
                    done = (len(rows) // len(engines)) * (options.repeats + 1) + turn + 1
                    tick(done, tokens=batch * options.tokens * len(engines))
                # the first turn warms up
                rows += [_row(name, batch, temperature, options.tokens, timings[name][1:]) for name in engines]
    title = f"{without_directory(options.target)} beside {options.other}"
    return Results(title, _lines(options, rows), {"options": shown_options(options), "rows": rows}, facts)


def _row(name: str, batch: int, temperature: float, tokens: int, timings: Sequence[Timing]) -> dict[str, Any]:
    counts = total_stats(stats for _, stats in timings if stats is not None)
    return {
        "batch": batch,
        "temperature": temperature,
        "engine": name,
        "tokens_per_second": [batch * tokens / seconds for seconds, _ in timings],
        "tokens_per_call": counts.block_efficiency if counts.num_target_calls else None,
    }


def _lines(options: EngineComparison, rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table; ratios are of the same turn, with a question mark if the interval contains 1."""
    base: list[float] = []
    cells = []
    for row in rows:
        rates = row["tokens_per_second"]
        base = rates if row["engine"] == options.other else base
        ratio = geometric_mean([mine / theirs for mine, theirs in zip(rates, base, strict=True)])
        calls = row["tokens_per_call"]
        cells.append(
            (
                row["batch"],
                f"{row['temperature']:g}",
                row["engine"],
                f"{median(rates):.1f}",
                "-" if row["engine"] == options.other else speed(ratio),
                "-" if calls is None else f"{calls:.2f}",
            )
        )
    heads = ("batch", "temperature", "engine", "tokens a second", f"over {options.other}", "tokens per target call")
    return [
        f"Our dtype {options.dtype}; {options.dataset}, {options.tokens} tokens an answer, {options.repeats} turns,",
        "each with other prompts. Ratios are of the same turn: geometric mean with a 95% t interval; `?` marks",
        "an interval that contains 1.",
        "",
        *table(heads, cells),
    ]


def _prompts(options: EngineComparison, batch: int) -> list[list[int]]:
    """Token ids of the first questions: as many as all turns need, or fewer if the data set is smaller."""
    cache, cell = ModelCache(), Cell(options.target, dtype=options.dtype, max_tokens=options.tokens)
    return [cache.encode(cell, question) for question in read_questions(options.dataset)[: batch * options.repeats]]


def _request(options: EngineComparison, prompts: Sequence[list[int]], batch: int, turn: int) -> worker.Request:
    """The prompts of a turn; the first two turns have the same prompts, because the first does not count."""
    first = max(turn - 1, 0) * batch
    return {"prompts": [prompts[(first + place) % len(prompts)] for place in range(batch)], "tokens": options.tokens}


def _ours(options: EngineComparison, batch: int) -> dict[str, Measure]:
    """Plain decoding by draftproof, and the drafter if one is named."""
    shared: dict[str, Any] = {"dtype": options.dtype, "max_batch": batch, "prefix_reuse": False}  # prompts come again
    made = {PLAIN: _measure(Engine.load(options.target, drafter="none", **shared))}
    if options.drafter is not None or options.draft is not None:
        engine = Engine.load(options.target, options.draft, drafter=options.drafter, **shared)
        made[f"draftproof, {engine.drafter.name}"] = _measure(engine)
    return made


def _measure(engine: Engine) -> Measure:
    def measure(request: worker.Request) -> Timing:
        base = SamplingParams(temperature=request["temperature"], max_tokens=request["tokens"], ignore_eos=True)
        params = [replace(base, seed=1 + number) for number in range(len(request["prompts"]))]
        watch = Stopwatch(engine.target.device)
        outputs = engine.generate(request["prompts"], params)
        seconds, _ = watch.stop()
        return seconds, total_stats(output.stats for output in outputs)

    return measure


# --- the other engine -------------------------------------------------------------------------------------------------


_NO_SIGNALS = "expected Linux or macOS for a comparison with another engine: Windows stops no process for a time"


@contextmanager
def _other_engine(options: EngineComparison) -> Iterator[Measure]:
    """Start the other engine's process, and end it and all processes that it started afterwards.

    They are stopped while it has nothing to do: an engine that waits for requests may keep a processor busy.
    """
    if sys.platform == "win32":
        raise UserError(_NO_SIGNALS)
    python = str(options.python or sys.executable)
    model = str(options.model or models.resolve(options.target))
    command = [python, worker.__file__, options.other, model, options.dtype, str(max(options.batch))]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        try:
            process = subprocess.Popen(  # noqa: S603 - a command of our own
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**clean, **ENVIRONMENT},
                start_new_session=True,
            )
        except OSError as cause:
            raise UserError(f"cannot run {python}: {cause.strerror or cause}; name a Python with --python") from cause
        other = _OtherEngine(process, errors, f"{options.other} failed in {python}")
        try:
            other.read()  # worker.READY
            other.send(signal.SIGSTOP)
            yield other.measure
        finally:
            other.send(signal.SIGKILL)
            process.communicate()


class _OtherEngine:
    """The process of another engine, which is stopped but for the time of a request."""

    def __init__(self, process: subprocess.Popen[str], errors: IO[str], failed: str) -> None:
        self._process = process
        self._errors = errors
        self._failed = failed  # the beginning of an error's message

    def measure(self, request: worker.Request) -> Timing:
        """The seconds of a request."""
        if sys.platform == "win32":
            raise UserError(_NO_SIGNALS)
        assert self._process.stdin is not None, "its input is a pipe"
        self.send(signal.SIGCONT)
        with suppress(OSError):  # if it has stopped, `read` reports why
            print(json.dumps(request), file=self._process.stdin, flush=True)
        seconds = float(self.read())
        self.send(signal.SIGSTOP)
        return seconds, None

    def read(self) -> str:
        """The next line of its output; a UserError with its last message if there is none."""
        assert self._process.stdout is not None, "its output is a pipe"
        ready, _, _ = select.select([self._process.stdout], [], [], TIMEOUT)
        line = self._process.stdout.readline().strip() if ready else ""
        if not line:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(SHUTDOWN)  # its last lines on stderr come after the end of its output
            self._errors.seek(0)
            last = [line.strip() for line in self._errors if line.strip()][-1:]
            why = last[0] if last else f"no answer in {TIMEOUT:g} s, or it ended without a message"
            raise UserError(f"{self._failed}: {why}")
        return line

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it and all processes that it started."""
        if sys.platform == "win32":
            raise UserError(_NO_SIGNALS)
        with suppress(OSError):  # it has ended
            os.killpg(self._process.pid, number)
