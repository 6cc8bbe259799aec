"""Comparison of speculative and plain decoding on one loaded target: timed in pairs, judged by an interval."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from draftproof.backends import base as backends
from draftproof.bench.estimate import LEVEL, Estimate, geometric_mean
from draftproof.engine.engine import Engine
from draftproof.engine.prompts import Prompt
from draftproof.engine.request import Output, SameText
from draftproof.engine.stats import Seconds, total_stats
from draftproof.sampling import MODEL_DEFAULTS, SamplingParams

FEWEST, MOST = 6, 20  # pairs; even, so that both engines run first equally often
ENOUGH = 4.0  # seconds after which no more than FEWEST pairs are measured
TOO_LONG = 120.0  # seconds after which two pairs are enough


@dataclass(frozen=True)
class TimedRun:
    """A timed run of an engine: tokens per second of all prompts together, and the number of drafted tokens."""

    tokens_per_second: float
    drafted: int


@dataclass(frozen=True)
class Comparison:
    """Speculative and plain decoding on the same prompts."""

    pairs: Sequence[tuple[TimedRun, TimedRun]]  # timings of speculative and plain decoding, run one after the other
    # Tokens per target call: the speed-up if drafting cost nothing and verifying as much as plain decoding.
    block_efficiency: float
    # Whether both gave the same tokens; None when sampling, where only the output distribution is the same.
    identical: bool | None
    dtype: str  # of the target's weights

    @property
    def drafted(self) -> int:
        """Number of drafted tokens in all timed runs."""
        return sum(speculative.drafted for speculative, _ in self.pairs)

    @property
    def speed_up(self) -> Estimate:
        """The geometric mean of the speed-up over all pairs, with a t interval on the logarithms."""
        return geometric_mean(
            [speculative.tokens_per_second / plain.tokens_per_second for speculative, plain in self.pairs]
        )

    @property
    def verdict(self) -> str | None:
        """Faster or slower if the interval excludes 1, else no clear difference; None without drafts."""
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

    The order alternates from pair to pair. At least FEWEST pairs are measured (2 if they take longer than TOO_LONG),
    and up to MOST as long as they take less than ENOUGH together. The run that gave `known` has warmed up `engine`. An
    untimed run of plain decoding shows whether the tokens are the same.
    """
    plain = Engine(
        engine.target, tokenizer=engine.tokenizer, eos_token_ids=engine.eos_token_ids, max_batch=engine.max_batch
    )
    reference = plain.generate(list(prompts), list(params))
    pairs: list[tuple[TimedRun, TimedRun]] = []
    start = time.perf_counter()
    while _more(len(pairs), time.perf_counter() - start):
        first, second = (plain, engine) if len(pairs) % 2 else (engine, plain)
        texts = {id(engine): prediction, id(plain): None}
        timings = {id(each): _time_run(each, prompts, params, texts[id(each)]) for each in (first, second)}
        pairs.append((timings[id(engine)], timings[id(plain)]))
    same = [output.token_ids for output in known] == [output.token_ids for output in reference]
    greedy = all(each.temperature == 0 for each in params)
    dtype = str(backends.dtype(engine.target) or "unknown").removeprefix("torch.")
    efficiency = total_stats(each.stats for each in known).block_efficiency
    return Comparison(pairs, efficiency, same if greedy else None, dtype)


def _more(pairs: int, seconds: float) -> bool:
    """Whether to measure another pair; the number of pairs is always even."""
    if pairs % 2:
        return True
    if pairs < FEWEST:
        return pairs < 2 or seconds < TOO_LONG
    return pairs < MOST and seconds < ENOUGH


def _time_run(
    engine: Engine, prompts: Sequence[Prompt], params: Sequence[SamplingParams], prediction: str | None
) -> TimedRun:
    """Time all prompts together, with an empty prefix cache."""
    engine.forget()
    start = time.perf_counter()
    outputs = engine.generate(list(prompts), list(params), predictions=prediction)
    seconds = time.perf_counter() - start
    total = total_stats(output.stats for output in outputs)
    return TimedRun(total.num_tokens / seconds, total.num_draft_tokens)


_SURE = [SameText.BY_DRAFTS, SameText.BUT_FOR_ROUNDING, SameText.YES]  # the least sure first


def summary(outputs: Sequence[Output], seconds: float) -> str:
    """One line: speed, acceptance, the parts in effect, whether the run was lossless, and the time of each part."""
    total = total_stats(output.stats for output in outputs)
    drafted, accepted = total.num_draft_tokens, total.num_accepted_tokens
    parts = [
        f"{total.num_tokens} tokens in {seconds:.2f} s",
        f"{total.num_tokens / seconds:.1f} tokens/s" if seconds > 0 else "",
        f"{total.block_efficiency:.2f} tokens per target call",
        f"accepted {accepted} of {drafted} drafted ({accepted / drafted:.0%})" if drafted else "nothing drafted",
        _composition(outputs[0]),
        "lossless"
        if all(output.lossless for output in outputs)
        else "LOSSY: the output distribution is not the target's",
        f"same text for a seed: {min((output.same_text for output in outputs), key=_SURE.index)}",
        _time_split(total.seconds),
    ]
    return " | ".join(part for part in parts if part)


def sampling_note(params: SamplingParams, given: Collection[str]) -> str:
    """One line on the parameters that come from the model's generation config, except those in `given`."""
    usual = SamplingParams()
    values = {name: getattr(params, name) for name in MODEL_DEFAULTS if name not in given}
    shown = [
        f"{name} {value:g}" for name, value in values.items() if value is not None and value != getattr(usual, name)
    ]
    return f"sampling: {', '.join(shown)} (from the model's generation config)" if shown else ""


def _composition(output: Output) -> str:
    """The parts in effect; without a drafter the others do nothing."""
    if output.drafter == "none":
        return "drafter none"
    return f"drafter {output.drafter}, stopper {output.stopper or 'none'}, verifier {output.verifier}"


def _time_split(whole: Seconds) -> str:
    if whole.total <= 0:
        return ""
    shares = {part: spent / whole.total for part, spent in whole.to_dict().items() if part != "total"}
    return "time: " + ", ".join(f"{part} {share:.0%}" for part, share in shares.items())


def comparison(found: Comparison) -> list[str]:
    """The speed-up with its interval and a verdict, its upper bound, and at temperature 0 whether the tokens agree."""
    values = found.to_dict()
    rates = f"{values['speculative_tokens_per_second']:.1f} against {values['plain_tokens_per_second']:.1f} tokens/s"
    bound = "if drafting were free and a verifying call cost as much as a plain one"
    lines = [_speed_up(found, rates)]
    if found.drafted:
        lines.append(f"at best {found.block_efficiency:.2f}x with these drafts: {bound}")
    lines += [] if found.identical is None else [_agreement(found)]
    return [f"compare: {line}" for line in lines]


def _speed_up(found: Comparison, rates: str) -> str:
    """The verdict in words, with its figures."""
    if found.verdict is None:
        return f"nothing was drafted, so both runs were plain decoding; there is no speed-up to measure ({rates})"
    verdict = {
        "faster": "faster than plain decoding",
        "slower": "SLOWER than plain decoding",
        "no clear difference": "no clear difference from plain decoding",
    }[found.verdict]
    speed = found.speed_up
    interval = f"95% interval {speed.low:.2f}x to {speed.high:.2f}x, {speed.count} pairs in alternating order"
    return f"{verdict}: {speed.value:.2f}x its speed ({interval}), {rates}"


def _agreement(found: Comparison) -> str:
    if found.identical:
        return f"tokens identical to plain decoding (temperature 0, {found.dtype})"
    cause = "this should not happen" if found.dtype == "float32" else f"near ties round differently in {found.dtype}"
    return f"tokens DIFFER from plain decoding at temperature 0: {cause}; try --dtype float32"
