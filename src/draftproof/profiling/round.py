"""The time of a round by its parts, of plain decoding and of a composition, beside the limits of the hardware.

All engines answer the same questions in turns. A part takes at least the time to read its weights once (the rule reads
logits, p and q), and the time of its operations at the rate of a large product. These least times are the floors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from draftproof.backends.heads.feature_net import load_net
from draftproof.bench.cell import Cell, matrix
from draftproof.bench.estimate import geometric_mean
from draftproof.bench.model_cache import ModelCache
from draftproof.bench.questions import read_questions
from draftproof.bench.report import speed
from draftproof.engine.drafter_parts import find_drafter
from draftproof.engine.engine import Engine
from draftproof.engine.stats import PARTS
from draftproof.errors import refuse_below_one
from draftproof.profiling.hardware import ReadWeights, bandwidth, product_rate, weights_read
from draftproof.progress import Watch, silent
from draftproof.provenance import run_facts, shown_options, without_directory
from draftproof.results import Results, table
from draftproof.sampling import SamplingParams

SHARES = (*PARTS, "other")


@dataclass(frozen=True)
class RoundOptions:
    """Options of `measure_round`.

    Attributes:
        target, draft, drafter, verifier, dtype: a composition, as in `Cell`; "" is the drafter's default rule.
        draft_length: drafted tokens of a round.
        backends: implementation of the forward pass.
        dataset, questions: of the prompts.
        tokens: tokens of every answer; stop tokens are ignored.
        temperature: sampling temperature; 0 is greedy.
    """

    target: str = "embedded:stories"
    draft: str | None = "embedded:stories-draft"
    drafter: str = "model"
    verifier: str = ""
    dtype: str = "auto"
    draft_length: int = 4
    backends: Sequence[str] = ("hf", "lean")
    dataset: str = "tinystories"
    questions: int = 8
    tokens: int = 64
    temperature: float = 1.0

    def __post_init__(self) -> None:
        refuse_below_one(draft_length=self.draft_length, questions=self.questions, tokens=self.tokens)

    def cells(self) -> list[Cell]:
        """Plain decoding and the composition on each backend."""
        part, argument = find_drafter(self.drafter)
        return matrix(
            strict=True,
            target=self.target,
            draft=self.draft,
            backend=list(self.backends),
            drafter=[
                "none",
                f"{part.name}:{self.draft_length}" if part.takes_length and not argument else self.drafter,
            ],
            stopper=f"fixed:{self.draft_length}",
            verifier=self.verifier,
            dtype=self.dtype,
            max_tokens=self.tokens,
            temperature=self.temperature,
        ).cells


def measure_round(options: RoundOptions, *, watch: Watch = silent) -> Results:
    """Milliseconds of each part of a round, and the floors of the parts."""
    facts = run_facts()
    cache, cells = ModelCache(device="cpu"), options.cells()
    questions = read_questions(options.dataset, options.questions)
    prompts = [cache.encode(cells[0], question) for question in questions]
    engines = {cell: cache.engine(cell) for cell in cells}
    rows: list[dict[str, Any]] = []
    with watch("measuring", len(prompts) + 1, 0) as tick:
        for number, prompt in enumerate([prompts[0], *prompts]):  # the first warms up
            for cell, engine in engines.items():
                row = _row(engine, prompt, options, seed=number)
                if number:
                    rows.append({"question": number, "backend": cell.backend, "method": cell.method, **row})
            tick(number + 1, tokens=options.tokens * len(engines))
    floors = _floors(options, vocab_size=next(iter(engines.values())).target.vocab_size)
    figures = {"options": shown_options(options), "rows": rows, "floors": floors}
    return Results("The time of a round", _lines(options, rows, floors), figures, facts)


def _row(engine: Engine, prompt: Sequence[int], options: RoundOptions, *, seed: int) -> dict[str, Any]:
    params = SamplingParams(max_tokens=options.tokens, temperature=options.temperature, seed=seed, ignore_eos=True)
    stats = engine.generate([list(prompt)], params)[0].stats
    seconds = {**stats.seconds.to_dict(), "total": stats.seconds.total}
    return {"tokens": stats.num_tokens, "calls": stats.num_target_calls, "seconds": seconds}


def _floors(options: RoundOptions, *, vocab_size: int) -> dict[str, dict[str, float]]:
    """Least milliseconds of each part by memory and by arithmetic; parts without their own weights are left out."""
    read, target = bandwidth(), weights_read(options.target, options.dtype)
    rate, steps, size = product_rate(target.dtype), options.draft_length, target.dtype.itemsize
    floors = {"target": {"memory": target.nbytes / read, "arithmetic": (steps + 1) * _operations(target) / rate}}
    if (draft := _draft_weights(options, target.dtype)) is not None:
        floors["draft"] = {"memory": steps * draft.nbytes / read, "arithmetic": steps * _operations(draft) / rate}
    logits_and_p, q = (steps + 1) * (size + 4), steps * 4
    floors["verify"] = {"memory": vocab_size * (logits_and_p + q) / read, "arithmetic": 0.0}
    return {part: {kind: 1000 * seconds for kind, seconds in floors[part].items()} for part in PARTS if part in floors}


def _operations(weights: ReadWeights) -> int:
    """Of a pass over one token; 0 for weights of few bits, whose products of whole numbers have another rate."""
    return 2 * weights.entries if weights.nbytes >= weights.entries * weights.dtype.itemsize else 0


def _draft_weights(options: RoundOptions, dtype: torch.dtype) -> ReadWeights | None:
    """The weights that are read for a drafted token; None for drafters without their own weights."""
    kind, _, argument = options.drafter.partition(":")
    if kind == "feature_head":
        net = load_net(Path(argument))
        count = sum(weights.numel() for weights in net.parameters()) + net.config.ids * net.config.hidden_size
        return ReadWeights(count, count * dtype.itemsize, dtype)
    return weights_read(options.draft, options.dtype) if kind == "model" and options.draft else None


def _lines(
    options: RoundOptions, rows: Sequence[dict[str, Any]], floors: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """The tables: parts of a round, then the floors."""
    cells = []
    for backend in dict.fromkeys(row["backend"] for row in rows):
        methods: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row["backend"] == backend:
                methods.setdefault(row["method"], []).append(row)
        plain = [_speed(row) for row in methods["plain"]]
        for method, own in methods.items():
            parts = [median(1000 * row["seconds"][part] / row["calls"] for row in own) for part in (*SHARES, "total")]
            tokens = median(row["tokens"] / row["calls"] for row in own)
            rates = [_speed(row) for row in own]
            ratio = geometric_mean([mine / base for mine, base in zip(rates, plain, strict=True)])
            shown = "-" if method == "plain" else speed(ratio)
            cells.append((backend, method, *(f"{x:.2f}" for x in (*parts, tokens)), f"{median(rates):.1f}", shown))
    heads = ("backend", "method", *SHARES, "round", "tokens a round", "tokens a second", "over plain")
    return [
        f"{without_directory(options.target)}, dtype {options.dtype}; {options.dataset}, {options.questions} questions",
        f"in turns, {options.tokens} tokens, temperature {options.temperature:g}. Milliseconds per round, medians over",
        "questions; the pass that reads the prompt counts as a round. Ratios: geometric mean over questions with a 95%",
        "t interval; `?` marks an interval that contains 1.",
        "",
        *table(heads, cells),
        "",
        f"The least that a round with {options.draft_length} drafted tokens can take, by the measured memory bandwidth",
        "and the measured rate of a large product:",
        "",
        *table(
            ("part", "memory, ms", "arithmetic, ms"),
            [(part, *(f"{floor[kind]:.2f}" for kind in ("memory", "arithmetic"))) for part, floor in floors.items()],
        ),
    ]


def _speed(row: Mapping[str, Any]) -> float:
    return float(row["tokens"] / row["seconds"]["total"])
