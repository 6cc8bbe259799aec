"""Measure what speculation gains as the batch grows, check a roofline against it, and compute larger machines by it.

    python scripts/measure_scale.py [--batch 1 2 4 ...] [--rounds 12] [--turns 4] [--price h100=2.50 ...]
        [--from FILE] --out docs/results/scale

Rounds are measured with all requests of a batch decoding, plain and speculative in turns; prompts are read before. The
roofline is fitted to plain rounds of one model only, and compared with every point that was measured. With --from, the
measurements of an earlier run are taken from its OUT.json, and only tables and pictures are made again.
"""

from __future__ import annotations

import gc
import itertools
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from measure_shapes import configs, with_random_weights

from draftproof import models
from draftproof.backends.base import Feed, unread
from draftproof.backends.loading import load_backend
from draftproof.bench.questions import read_questions
from draftproof.engine.engine import Engine
from draftproof.engine.stats import Stats
from draftproof.sampling import SamplingParams
from draftproof.tokenization import load_tokenizer

TARGET, DTYPE, DRAFTED = "smollm2-135m", "bfloat16", 4
DRAFTERS = {"plain": "none", "quantized:4": "quantized:4", "feature head": "feature_head"}
SHAPES = {"qwen2.5-0.5b": 64, "qwen2.5-1.5b": 16}  # with random weights, and the largest number of rows
CONTEXT = 64


# --- measuring --------------------------------------------------------------------------------------------------------


def decoded(engine: Engine, prompts: Sequence[list[int]], rounds: int, seed: int) -> dict[str, float]:
    """Rounds of a batch after its prompts were read: median seconds of a round and its parts, tokens of a round."""
    limits = SamplingParams(temperature=1.0, max_tokens=16 * (rounds + 8), ignore_eos=True)
    requests = [
        engine.add(prompt, replace(limits, seed=seed + place), patient=True)[0] for place, prompt in enumerate(prompts)
    ]
    while not all(request.stats.num_tokens for request in requests):
        engine.step()
    engine.step()  # a head reads the prompt's states here
    found: list[dict[str, float]] = []
    for _ in range(rounds):
        before, tokens = Stats(), sum(request.stats.num_tokens for request in requests)
        before.add(requests[0].stats)
        engine.step()
        after = requests[0].stats.seconds
        parts = {name: getattr(after, name) - getattr(before.seconds, name) for name in ("draft", "target", "verify")}
        emitted = sum(request.stats.num_tokens for request in requests) - tokens
        found.append({"seconds": after.total - before.seconds.total, **parts, "tokens": float(emitted)})
    length = sum(len(request.tokens) for request in requests) / len(requests)
    for request in requests:
        engine.abort(request)
    medians = {name: median(each[name] for each in found) for name in found[0] if name != "tokens"}
    return {**medians, "tokens": sum(each["tokens"] for each in found) / rounds, "context": length}


def measured_rounds(batches: Sequence[int], rounds: int, turns: int) -> list[dict[str, Any]]:
    """Rounds of SmolLM2-135M, every way to draft in turns."""
    backend = load_backend(TARGET, dtype=DTYPE)
    tokenizer = load_tokenizer(models.resolve(TARGET))
    texts = itertools.cycle(question.prompt for question in read_questions("mt-bench"))
    engines = {
        name: Engine.assemble(
            backend,
            None,
            tokenizer,
            drafter=drafter,
            stopper=None if drafter == "none" else f"fixed:{DRAFTED}",
            max_batch=max(batches),
            prefix_reuse=False,
            generation_config="none",
        )
        for name, drafter in DRAFTERS.items()
    }
    made = []
    for turn in range(turns):
        names = list(engines) if turn % 2 else list(engines)[::-1]
        for batch in batches:
            prompts = [tokenizer.encode(next(texts))[:128] for _ in range(batch)]
            for name in names:
                row = decoded(engines[name], prompts, rounds, 1000 * turn)
                made.append({"model": TARGET, "drafter": name, "batch": batch, "turn": turn, **row})
                print(name, batch, turn, {key: round(value, 4) for key, value in row.items()}, file=sys.stderr)
    return made


@torch.inference_mode()
def measured_passes(name: str, most: int, turns: int) -> list[dict[str, Any]]:
    """Passes of a model with random weights over several requests, with 1 and with DRAFTED + 1 tokens each, in turns."""
    backend = with_random_weights(configs()[name])
    batches = [2**power for power in range(int(math.log2(most)) + 1)]
    tokens = [(place * 7919 + 11) % 31000 for place in range(CONTEXT)]
    sessions = [backend.open() for _ in range(most)]
    backend.forward([Feed(session, tokens) for session in sessions])
    made = []
    for turn in range(turns + 1):
        for batch, width in itertools.product(batches, (1, DRAFTED + 1)):
            start = time.perf_counter()
            backend.forward([Feed(session, tokens[:width]) for session in sessions[:batch]])
            seconds = time.perf_counter() - start
            for session in sessions[:batch]:
                unread(session, [*tokens, 0])
            if turn:
                made.append({"model": name, "batch": batch, "tokens": width, "turn": turn - 1, "target": seconds})
    print(name, "done", file=sys.stderr)
    return made


def measured(batches: Sequence[int], rounds: int, turns: int) -> dict[str, Any]:
    """Everything that is measured."""
    found = {"rounds": measured_rounds(batches, rounds, turns), "passes": []}
    gc.collect()
    for name, most in SHAPES.items():
        found["passes"] += measured_passes(name, most, turns)
        gc.collect()
    return found
