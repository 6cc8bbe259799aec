"""SpecDec++, table 2 and figure 3: seconds of a pass, by regression of time on drafted tokens and target calls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from draftproof.bench.estimate import Estimate
from draftproof.bench.measures import fit_times
from draftproof.reproduction.claims import Claim, Kind, claim
from draftproof.reproduction.experiments import SMALL, Experiments, PairNames, PlannedRun, Row
from draftproof.reproduction.paper_tables import PaperTable, paper_tables
from draftproof.reproduction.recipes.base import Answers, Figure, OurNumber, Outcome, Recipe, Series
from draftproof.reproduction.recipes.specdec_pp import TOP_K
from draftproof.reproduction.recipes.sums import resampled

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
        runs_of[name] = [replace(plain, max_tokens=tokens) for tokens in (plain.max_tokens // 3, plain.max_tokens)]
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


def passes(experiments: Experiments) -> dict[str, dict[str, Estimate]]:
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


def head_costs(found: dict[str, dict[str, Estimate]]) -> Claim:
    """The claim that the acceptance head costs less than a tenth of a draft pass."""
    plain, headed = found["SpecDec"]["t_draft"], found["SpecDec++"]["t_draft"]
    ends = (headed.value / plain.value, headed.low / plain.high, headed.high / plain.low)
    gap = Estimate(*ends, headed.count, headed.level).below(1.1)
    return claim("1.1 - t_draft with the head over t_draft without > 0", Kind.MODELS, gap)


WHY = "models of 260 thousand parameters on a CPU take milliseconds where the paper's take a tenth of a second"


def _measured(experiments: Experiments, paper: PaperTable) -> Outcome:
    """The seconds of a pass in the columns of a table or figure, which has a row or several for each setting."""
    outcome, answers, found = Outcome(paper), Answers(), passes(experiments)
    for setting, values in found.items():
        text = f"R squared - 0.98 >= 0 ({setting})"
        fits = claim(text, Kind.MODELS, values["R squared"].plus(-0.98), at_least=True)
        own = {name: values[name] for name in paper.columns}
        outcome.row(f"{SMALL.label}, {setting}", own, timed=True)
        for row in paper.rows:
            for name, value in own.items():
                if row.split(",")[0] == setting:
                    tolerance = 0.02 if name == "R squared" else SECONDS
                    answers[row, name] = OurNumber(value, tolerance, (fits,), WHY, timed=True)
        outcome.timed_claims.append(fits)
    outcome.timed_claims.append(head_costs(found))
    if paper.picture:
        lines = [
            Series.of(name, range(3), (1000 * found[setting][name].value for setting in TIMED))
            for name in paper.columns
        ]
        outcome.figure = Figure("0: stand-alone, 1: SpecDec, 2: SpecDec++", "ms a pass", tuple(lines), bars=True)
    return outcome.finish(answers)


RECIPES = tuple(
    Recipe(PAPER[number], partial(_measured, paper=PAPER[number]), "times")  # the figure shows the table's averages
    for number in ("table2", "figure3")
)
