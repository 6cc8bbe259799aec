"""SpecDec++, table 2 and figure 3: seconds of a pass, by regression of time on drafted tokens and target calls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from draftproof.bench.measures import fit_times
from draftproof.reproduction.claims import Claim, Interval, Kind, claim, resampled, shifted
from draftproof.reproduction.experiments import SMALL, Experiments, PairNames, PlannedRun, Row
from draftproof.reproduction.paper_tables import paper_tables
from draftproof.reproduction.recipes.base import Answers, Figure, OurNumber, Outcome, OutcomeBuilder, Recipe, Series
from draftproof.reproduction.recipes.specdec_pp import TOP_K

PAPER = paper_tables("specdec_pp")
STOPPERS = {
    "SpecDec": tuple(f"fixed:{length}" for length in (2, 6, 10)),
    "SpecDec++": tuple(f"acceptance:{h}" for h in (0.3, 0.7, 0.9)),
}
TIMED = ("stand-alone", *STOPPERS)
SECONDS = 0.0005  # tolerance


Parts = Sequence[list[tuple[float, float, float]]]  # (drafted, target calls, seconds) of each prompt's answers


def _timed(experiments: Experiments) -> dict[str, Parts]:
    """Answers by setting, one sequence at a time, all settings in turns; models alone at two lengths."""
    size = {
        "batch": 1,
        "prompts": min(experiments.profile.prompts, 12),
        "seeds": 1,
        "top_k": TOP_K,
        "verifier": "token",
    }
    runs_of: dict[str, list[PlannedRun]] = {}
    for name, pair in (("draft", PairNames(SMALL.draft, SMALL.draft)), ("target", SMALL)):
        plain = experiments.scaled_run(pair, **size, drafter="none", stopper="")
        runs_of[name] = [replace(plain, tokens=tokens) for tokens in (plain.tokens // 3, plain.tokens)]
    for setting, stoppers in STOPPERS.items():
        runs_of[setting] = [experiments.scaled_run(SMALL, **size, stopper=stopper) for stopper in stoppers]
    rows = iter(experiments.in_turns([run for runs in runs_of.values() for run in runs]))
    return {name: _by_prompt([next(rows) for _ in runs]) for name, runs in runs_of.items()}


def _by_prompt(runs: Sequence[Sequence[Row]]) -> Parts:
    found: list[list[tuple[float, float, float]]] = [[] for _ in runs[0]]
    for row in itertools.chain(*runs):
        counts = (float(row["num_draft_tokens"]), float(row["num_target_calls"]), float(row["seconds"]["total"]))
        found[row["prompt"]].append(counts)
    return found


def _slope(parts: Parts, side: int) -> float:
    """Seconds of a pass of either model, by regression on both counts."""
    fitted = fit_times(list(itertools.chain(*parts)))
    return math.nan if fitted is None else (fitted.draft, fitted.target, fitted.r_squared)[side]


def _line(parts: Parts, side: int) -> float:
    """Seconds of a pass (side 0) or R squared (side 1) of a model alone, by regression on its calls."""
    rows = torch.tensor(list(itertools.chain(*parts)), dtype=torch.float64)
    calls, seconds = rows[:, 1], rows[:, 2]
    slope = float((calls * seconds).sum() / (calls**2).sum())
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    return (slope, 1 - float(((seconds - slope * calls) ** 2).sum()) / spread)[side]


def passes(experiments: Experiments) -> dict[str, dict[str, Interval]]:
    """Seconds of a pass by setting."""
    timed = _timed(experiments)
    found = {
        "stand-alone": {
            "t_draft": resampled(timed["draft"], lambda parts: _line(parts, 0)),
            "t_target": resampled(timed["target"], lambda parts: _line(parts, 0)),
            "R squared": resampled(timed["target"], lambda parts: _line(parts, 1)),
        }
    }
    for setting in STOPPERS:
        parts = timed[setting]
        found[setting] = {
            name: resampled(parts, partial(_slope, side=side))
            for side, name in enumerate(("t_draft", "t_target", "R squared"))
        }
    return found


def fits(found: dict[str, dict[str, Interval]]) -> dict[str, Claim]:
    """By setting, the claim that the cost model fits."""
    return {
        setting: claim(
            f"R squared - 0.98 >= 0 ({setting})",
            Kind.MODELS,
            shifted(found[setting]["R squared"], -0.98),
            at_least=True,
        )
        for setting in TIMED
    }


def head_costs(found: dict[str, dict[str, Interval]]) -> Claim:
    """The claim that the acceptance head costs less than a tenth of a draft pass."""
    plain, headed = found["SpecDec"]["t_draft"], found["SpecDec++"]["t_draft"]
    value, low, high = headed.value / plain.value, headed.low / plain.high, headed.high / plain.low
    gap = Interval(1.1 - value, 1.1 - high, 1.1 - low, headed.level, headed.clusters)
    return claim("1.1 - t_draft with the head over t_draft without > 0", Kind.MODELS, gap)


WHY = "models of 260 thousand parameters on a CPU take milliseconds where the paper's take a tenth of a second"


def table2(experiments: Experiments) -> Outcome:
    """Seconds of a pass."""
    outcome, answers, found = OutcomeBuilder(PAPER["table2"]), Answers(), passes(experiments)
    fitted = fits(found)
    for setting, values in found.items():
        outcome.row(f"{SMALL.label}, {setting}", values, timed=True)
        for row in PAPER["table2"].rows:
            if row.split(",")[0] == setting:
                answers |= {
                    (row, name): _answer(value, 0.02 if name == "R squared" else SECONDS, fitted[setting])
                    for name, value in values.items()
                }
    outcome.timed_claims += [*fitted.values(), head_costs(found)]
    return outcome.finish(answers)


def _answer(value: Interval, tolerance: float, fitted: Claim) -> OurNumber:
    return OurNumber(value, tolerance, (fitted,), WHY, timed=True)


def figure3(experiments: Experiments) -> Outcome:
    """The numbers of table 2 as bars."""
    outcome, answers, found = OutcomeBuilder(PAPER["figure3"]), Answers(), passes(experiments)
    fitted = fits(found)
    for setting, values in found.items():
        own = {name: values[name] for name in ("t_draft", "t_target")}
        outcome.row(f"{SMALL.label}, {setting}", own, timed=True)
        answers |= {(setting, name): _answer(value, SECONDS, fitted[setting]) for name, value in own.items()}
    outcome.timed_claims += [*fitted.values(), head_costs(found)]
    lines = [
        Series(name, tuple(map(float, range(3))), tuple(1000 * found[setting][name].value for setting in TIMED))
        for name in ("t_draft", "t_target")
    ]
    outcome.figure = Figure("0: stand-alone, 1: SpecDec, 2: SpecDec++", "ms a pass", tuple(lines), bars=True)
    return outcome.finish(answers)


RECIPES = (Recipe(PAPER["table2"], table2, "times"), Recipe(PAPER["figure3"], figure3, "times"))
