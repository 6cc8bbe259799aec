"""Discard and verification rates of stoppers in the engine, and the threshold with the least time per token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftproof.drafters.model import ModelDrafter
from draftproof.engine.engine import Engine
from draftproof.engine.request import Output
from draftproof.engine.stats import Stats, total_stats
from draftproof.engine.verifier_parts import make_verifier
from draftproof.errors import refuse_unknown
from draftproof.heads import Head
from draftproof.progress import Watch, silent
from draftproof.rng import fold
from draftproof.stoppers.base import Stopper
from draftproof.stoppers.fixed import FixedLength
from draftproof.stoppers.trained import Acceptance, Ratio
from draftproof.theory.cost import PassCosts, latency
from draftproof.training.features import ModelPair

# The values of SpecDec++, arXiv 2405.19715, section 4.1, and more values near the optimum of small pairs: lengths 1, 3
# and 5, thresholds 0.8 and 0.95.
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14)
THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
DEPTHS = (0, 1, 2, 3, 4)
WEIGHTS = (1.0, 3.0, 6.0, 12.0)


@dataclass(frozen=True)
class Trial:
    """A pair of models, and prompts on which stoppers are tried."""

    pair: ModelPair  # the models and their sampling parameters
    prompts: Sequence[Sequence[int]]  # token ids
    eos_token_ids: tuple[int, ...]  # tokens that end a response
    tokens: int = 64  # largest number of tokens in a response
    seed: int = 0  # seed of the draws; every stopper gets the same seeds

    def run(self, stopper: Stopper | None, rule: str, *, max_batch: int = 8, shift: int = 0) -> list[Output]:
        """Responses with a stopper (None decodes plainly) and a rule; `shift` changes all seeds."""
        pair = self.pair
        drafter = None if stopper is None else ModelDrafter(pair.model(), stopper)
        engine = Engine(
            pair.target, drafter, make_verifier(rule), eos_token_ids=self.eos_token_ids, max_batch=max_batch
        )
        seeds = [fold(self.seed, 3, shift, number) >> 1 for number in range(len(self.prompts))]
        each = [replace(pair.params, max_tokens=self.tokens, seed=seed) for seed in seeds]
        return engine.generate([list(prompt) for prompt in self.prompts], each)

    def rates(self, stopper: Stopper, rule: str) -> dict[str, Any]:
        """The rates of `rates` for a stopper and a verification rule."""
        return rates(self.run(stopper, rule))


def rates(outputs: Sequence[Output]) -> dict[str, Any]:
    """Discard rate, verification rate, block efficiency, drafted tokens per call, and tokens of several responses."""
    total = total_stats(output.stats for output in outputs)
    return {
        "discard_rate": total.discard_rate,
        "verification_rate": total.verification_rate,
        "block_efficiency": total.block_efficiency,
        "drafted_per_call": total.num_draft_tokens / max(total.num_target_calls, 1),
        "tokens": total.num_tokens,
    }


def measure_costs(trial: Trial) -> PassCosts:
    """Seconds of a pass of each model in the engine, with one sequence at a time and four drafted tokens per round."""
    return pass_costs(total_stats(output.stats for output in trial.run(FixedLength(4), "block", max_batch=1)))


def pass_costs(total: Stats) -> PassCosts:
    """Seconds of drafting a token and of a target call."""
    draft, target = total.seconds.draft, total.seconds.target
    return PassCosts(draft / max(total.num_draft_tokens, 1), target / max(total.num_target_calls, 1))


def fixed_table(trial: Trial, rule: str, *, watch: Watch = silent) -> list[dict[str, Any]]:
    """Rates of constant lengths, the baseline."""
    return _table(trial, rule, {("length", length): FixedLength(length) for length in LENGTHS}, watch)


def head_table(trial: Trial, head: Head, rule: str, *, watch: Watch = silent) -> list[dict[str, Any]]:
    """Rates of one head at every threshold."""
    kinds: dict[str, Callable[[Head, float], Stopper]] = {"acceptance": Acceptance, "log_ratio": Ratio}
    refuse_unknown("kind of head", head.config.kind, kinds)
    make = kinds[head.config.kind]
    return _table(trial, rule, {("threshold", h): make(head, h) for h in THRESHOLDS}, watch)


def _table(
    trial: Trial, rule: str, stoppers: Mapping[tuple[str, int | float], Stopper], watch: Watch
) -> list[dict[str, Any]]:
    made = []
    with watch(f"rates by {next(iter(stoppers))[0]}", len(stoppers), 0) as tick:
        for number, ((name, value), stopper) in enumerate(stoppers.items(), 1):
            made.append({name: value, **trial.rates(stopper, rule)})
            tick(number, tokens=int(made[-1]["tokens"]))
    return made


def with_latency(rows: Sequence[dict[str, Any]], costs: PassCosts) -> list[dict[str, Any]]:
    """The rows with their seconds per token by the cost model (SpecDec++, arXiv 2405.19715, equation (2.3))."""
    return [row | {"latency": latency(costs, row["discard_rate"], row["verification_rate"])} for row in rows]


def choose(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row with the least latency; the first of equals."""
    return min(rows, key=lambda row: float(row["latency"]))


def dominated(fixed: Sequence[dict[str, Any]], heads: Sequence[dict[str, Any]]) -> list[int]:
    """The constant lengths that are worse than some head at both rates."""
    names = ("discard_rate", "verification_rate")
    return [
        int(row["length"])
        for row in fixed
        if any(all(other[name] <= row[name] for name in names) and other != row for other in heads)
    ]


def with_fixed_drafts(fixed: Sequence[dict[str, Any]], heads: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The heads' rows with the verification rate of constant lengths at the same discard rate.

    Between two lengths it is interpolated: a random choice between them reaches it. Outside of them it is None.
    """
    points = sorted((row["discard_rate"], row["verification_rate"]) for row in fixed)

    def at(discard: float) -> float | None:
        for (x, y), (x2, y2) in itertools.pairwise(points):
            if x <= discard <= x2:
                return float(y + (y2 - y) * (discard - x) / max(x2 - x, 1e-12))
        return None

    return [row | {"fixed_verification_rate": at(row["discard_rate"])} for row in heads]


def compare_latency(
    fixed: Sequence[dict[str, Any]], heads: Sequence[dict[str, Any]], ratios: Sequence[float] = (0.05, 0.1, 0.2, 0.4)
) -> list[dict[str, Any]]:
    """Best latency of constant lengths and of heads at several ratios t_draft/t_target, in target passes per token."""
    made = []
    for ratio in ratios:
        costs = PassCosts(draft=ratio, target=1.0)
        own, head = (choose(with_latency(rows, costs)) for rows in (fixed, heads))
        best = {"fixed": own["latency"], "head": head["latency"]}
        made.append({"cost_ratio": ratio, **best, "length": own["length"], "threshold": head["threshold"]})
    return made
