"""Speculative against plain decoding, on one loaded target, timed in turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from draftproof.engine.engine import Engine
from draftproof.engine.loop import Prompt
from draftproof.engine.request import Output
from draftproof.sampling import SamplingParams

FEWEST, MOST, SECONDS = 3, 9, 3.0


@dataclass(frozen=True)
class Comparison:
    """What speculation gained.

    Attributes:
        pairs: tokens a second, speculative and plain, run one after the other.
        block_efficiency: tokens per target call; the speed-up, were drafting free and verifying as cheap as decoding.
        identical: whether both gave the same tokens; None when sampling, where only the law is the same.
        dtype: of the target's weights.
    """

    pairs: list[tuple[float, float]]
    block_efficiency: float
    identical: bool | None
    dtype: str

    @property
    def ratios(self) -> list[float]:
        """The speed-up of each pair."""
        return [speculative / plain for speculative, plain in self.pairs]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; rates and speed-up are medians."""
        return {
            "plain_tokens_per_second": median(plain for _, plain in self.pairs),
            "speculative_tokens_per_second": median(speculative for speculative, _ in self.pairs),
            "speed_up": median(self.ratios),
            "speed_up_low": min(self.ratios),
            "speed_up_high": max(self.ratios),
            "repeats": len(self.pairs),
            "block_efficiency": self.block_efficiency,
            "identical": self.identical,
            "dtype": self.dtype,
        }


def compare(
    engine: Engine, prompts: Sequence[Prompt], params: Sequence[SamplingParams], known: Sequence[Output]
) -> Comparison:
    """Time `engine` and plain decoding in turns, on the request that gave `known`.

    A single timing lies, and so does a machine that warms up or slows down: hence pairs, at least FEWEST of them, and
    up to MOST while they take no longer than SECONDS together. The run that made `known` has warmed up `engine`; one of
    plain decoding, not counted either, tells whether the tokens are the same.
    """
    plain = Engine(
        engine.target, tokenizer=engine.tokenizer, eos_token_ids=engine.eos_token_ids, max_batch=engine.max_batch
    )
    wanted, _ = _timed(plain, prompts, params)
    pairs: list[tuple[float, float]] = []
    start = time.perf_counter()
    while len(pairs) < FEWEST or (len(pairs) < MOST and time.perf_counter() - start < SECONDS):
        pairs.append((_timed(engine, prompts, params)[1], _timed(plain, prompts, params)[1]))
    same = [output.token_ids for output in known] == [output.token_ids for output in wanted]
    greedy = all(each.temperature == 0 for each in params)
    dtype = str(getattr(engine.target, "dtype", "unknown")).removeprefix("torch.")
    return Comparison(pairs, block_efficiency(known), same if greedy else None, dtype)


def _timed(engine: Engine, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> tuple[list[Output], float]:
    """What came out, and how many tokens a second that was, all prompts together."""
    start = time.perf_counter()
    outputs = engine.generate(list(prompts), list(params))
    return outputs, sum(len(output.token_ids) for output in outputs) / (time.perf_counter() - start)


def block_efficiency(outputs: Sequence[Output]) -> float:
    """Tokens per target call of several outputs."""
    calls = sum(output.stats.num_target_calls for output in outputs)
    return sum(output.stats.num_tokens for output in outputs) / max(calls, 1)
