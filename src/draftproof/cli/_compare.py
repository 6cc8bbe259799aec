"""Speculative against plain decoding on one loaded target: timed in pairs, judged by an interval."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from draftproof.bench.estimate import LEVEL, Estimate, geometric_mean
from draftproof.engine.engine import Engine
from draftproof.engine.prompts import Prompt
from draftproof.engine.request import Output
from draftproof.sampling import SamplingParams

FEWEST, MOST = 6, 20  # pairs; even, so that both engines are first equally often
ENOUGH = 4.0  # seconds after which no more than FEWEST pairs are measured
TOO_LONG = 120.0  # seconds after which two pairs are enough


@dataclass(frozen=True)
class Timing:
    """One timed run of an engine: tokens a second of all prompts together, and the number of drafted tokens."""

    tokens_per_second: float
    drafted: int


@dataclass(frozen=True)
class Comparison:
    """Speculative and plain decoding on the same prompts."""

    pairs: Sequence[tuple[Timing, Timing]]  # timings of speculative and plain decoding, run one after the other
    # Tokens per target call: the speed-up if drafting cost nothing and verifying as much as plain decoding.
    block_efficiency: float
    # Whether both gave the same tokens; None when sampling, where only the output distribution is the same.
    identical: bool | None
    dtype: str  # of the target's weights

    @property
    def drafted(self) -> int:
        """Number of tokens that were drafted in all timed runs."""
        return sum(speculative.drafted for speculative, _ in self.pairs)

    @property
    def speed_up(self) -> Estimate:
        """The geometric mean of the speed-up over all pairs, with a t interval on the logarithms."""
        return geometric_mean(
            [speculative.tokens_per_second / plain.tokens_per_second for speculative, plain in self.pairs]
        )

    @property
    def verdict(self) -> str | None:
        """The words faster or slower where the interval excludes 1, else no clear difference; None without drafts."""
        if not self.drafted:
            return None
        return {1: "faster", -1: "slower", 0: "no clear difference"}[self.speed_up.sure]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; speeds are medians."""
        found = self.speed_up.to_dict()
        return {
            "verdict": self.verdict,
            "speed_up": found["value"],
            "speed_up_low": found["low"],
            "speed_up_high": found["high"],
            "confidence": LEVEL,
            "pairs": len(self.pairs),
            "plain_tokens_per_second": median(plain.tokens_per_second for _, plain in self.pairs),
            "speculative_tokens_per_second": median(timing.tokens_per_second for timing, _ in self.pairs),
            "drafted_tokens": self.drafted,
            "block_efficiency": self.block_efficiency,
            "identical": self.identical,
            "dtype": self.dtype,
        }


def compare(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    known: Sequence[Output],
    prediction: str | None = None,
) -> Comparison:
    """Time `engine` and plain decoding in pairs, on the prompts and parameters that gave `known`.

    The order changes from pair to pair: the engine first, plain decoding first, and so on. At least FEWEST pairs are
    measured (2 where they take longer than TOO_LONG), and up to MOST while they take less than ENOUGH together. The run
    that gave `known` has warmed up `engine`. One run of plain decoding, which is not timed, shows whether the tokens
    are the same.
    """
    plain = Engine(
        engine.target, tokenizer=engine.tokenizer, eos_token_ids=engine.eos_token_ids, max_batch=engine.max_batch
    )
    reference = plain.generate(list(prompts), list(params))
    pairs: list[tuple[Timing, Timing]] = []
    start = time.perf_counter()
    while _more(len(pairs), time.perf_counter() - start):
        first, second = (plain, engine) if len(pairs) % 2 else (engine, plain)
        texts = {id(engine): prediction, id(plain): None}
        timings = {id(each): _timed(each, prompts, params, texts[id(each)]) for each in (first, second)}
        pairs.append((timings[id(engine)], timings[id(plain)]))
    same = [output.token_ids for output in known] == [output.token_ids for output in reference]
    greedy = all(each.temperature == 0 for each in params)
    dtype = str(getattr(engine.target, "dtype", "unknown")).removeprefix("torch.")
    return Comparison(pairs, block_efficiency(known), same if greedy else None, dtype)


def _more(pairs: int, seconds: float) -> bool:
    """Whether another pair is measured; the number of pairs is always even."""
    if pairs % 2:
        return True
    if pairs < FEWEST:
        return pairs < 2 or seconds < TOO_LONG
    return pairs < MOST and seconds < ENOUGH


def _timed(
    engine: Engine, prompts: Sequence[Prompt], params: Sequence[SamplingParams], prediction: str | None
) -> Timing:
    """Time all prompts together, as if they came first."""
    engine.forget()
    start = time.perf_counter()
    outputs = engine.generate(list(prompts), list(params), predictions=prediction)
    seconds = time.perf_counter() - start
    tokens = sum(len(output.token_ids) for output in outputs)
    return Timing(tokens / seconds, sum(output.stats.num_draft_tokens for output in outputs))


def block_efficiency(outputs: Sequence[Output]) -> float:
    """Tokens per target call of several outputs."""
    calls = sum(output.stats.num_target_calls for output in outputs)
    return sum(output.stats.num_tokens for output in outputs) / max(calls, 1)
