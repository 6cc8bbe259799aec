"""SPRINTER, arXiv 2502.04557: SPRINTER beside lossless and lossy methods, in calls, time, operations and quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.bench.estimate import Estimate, Statistic, resample
from draftproof.bench.measures import pass_flops, read_shape
from draftproof.embedded import heads_dir
from draftproof.heads import load_head
from draftproof.reproduction.claims import Claim, Kind, claim, column
from draftproof.reproduction.draft_samples import model_pair
from draftproof.reproduction.experiments import SMALL, Experiments, PairNames, PlannedRun, Row
from draftproof.reproduction.paper_tables import paper_tables
from draftproof.reproduction.recipes.base import (
    ANY,
    OTHER_SECONDS,
    Answers,
    Missing,
    OurNumber,
    Outcome,
    OutcomeBuilder,
    Recipe,
)
from draftproof.reproduction.recipes.sums import less, run_sums
from draftproof.training.features import ModelPair
from draftproof.training.responses import Response
from draftproof.training.sprinter import drift

PAPER = paper_tables("sprinter")
SD = "fixed:4"  # the paper does not name its length
METHODS: dict[str, dict[str, str]] = {
    "SD": {"stopper": SD, "verifier": "token"},
    "SpecDec++": {"stopper": "acceptance:0.7", "verifier": "token"},
    "AdaEDL": {"stopper": "entropy:0.4", "verifier": "token"},
    "mentored": {"stopper": SD, "verifier": "mentored:0.1"},
    "SPRINTER": {"stopper": "approximate:0.5", "verifier": "last_token"},
    "SPRINTER, tau 0.4": {"stopper": "approximate:0.4", "verifier": "last_token"},
    "SPRINTER, tau 0.3": {"stopper": "approximate:0.3", "verifier": "last_token"},
    "SPRINTER's drafts, lossless": {"stopper": "approximate:0.5", "verifier": "token"},
}
PLAIN = {"drafter": "none", "stopper": ""}
FIELDS = ("num_tokens", "num_target_calls", "num_accepted_tokens", "num_draft_tokens", "seconds")
WIDTH = len(FIELDS)


def planned_run(experiments: Experiments, parts: Mapping[str, str]) -> PlannedRun:
    """A run of a method."""
    return experiments.scaled_run(SMALL, **parts)


def accepted(run: int) -> Statistic:
    """Draft tokens kept per target call; the paper calls this average tokens."""
    return lambda t: t[:, WIDTH * run + 2] / t[:, WIDTH * run + 1]


def calls(run: int) -> Statistic:
    """Target calls a token."""
    return lambda t: t[:, WIDTH * run + 1] / t[:, WIDTH * run]


def milliseconds(run: int) -> Statistic:
    """Wall-clock time a token."""
    return lambda t: 1000 * t[:, WIDTH * run + 4] / t[:, WIDTH * run]


def over(run: int, base: int) -> Statistic:
    """Speed over another run."""
    return lambda t: milliseconds(base)(t) / milliseconds(run)(t)


def likelihoods(experiments: Experiments, run: PlannedRun) -> list[float]:
    """Log-probability of each answer under the target at temperature 1, row by row of the run."""

    def score() -> list[float]:
        pair, rows = model_pair(experiments, SMALL), experiments.runs(run)
        prompts = experiments.prompts(SMALL.target, run.prompts, run.dataset)
        with torch.inference_mode():
            return [_likelihood(pair, prompts[row["prompt"]], row["token_ids"]) for row in rows]

    found: list[float] = experiments.cached("likelihood", run, score)
    return found


def _likelihood(pair: ModelPair, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    (p,) = pair.p([Response(tuple(prompt), tuple(tokens))])
    return float(p[:-1].gather(-1, torch.tensor(tokens).unsqueeze(-1)).double().clamp(min=1e-30).log().sum())


def quality_sums(experiments: Experiments, runs: Sequence[PlannedRun]) -> Float[Tensor, "prompts columns"]:
    """For each prompt, tokens and log-likelihood of every run, run after run."""
    parts = [
        [
            {**row, "likelihood": value}
            for row, value in zip(experiments.runs(run), likelihoods(experiments, run), strict=True)
        ]
        for run in runs
    ]
    return run_sums(parts, ("num_tokens", "likelihood"))


def per_token(run: int) -> Statistic:
    """Log-likelihood a token."""
    return lambda t: t[:, 2 * run + 1] / t[:, 2 * run]


def table2(experiments: Experiments) -> Outcome:
    """Calls, time and quality of each method."""
    outcome, answers = OutcomeBuilder(PAPER["table2"]), Answers()
    names = list(METHODS)
    runs = [planned_run(experiments, parts) for parts in METHODS.values()]
    sums = run_sums(experiments.in_turns(runs), FIELDS)
    at = {name: place for place, name in enumerate(names)}
    held = _counting_claims(sums, at)
    faster = [
        claim(
            f"time: speed of SPRINTER over {name} - 1 > 0",
            Kind.MODELS,
            resample(sums, _faster(at["SPRINTER"], at[name])),
        )
        for name in ("SD", "SpecDec++", "AdaEDL", "mentored")
    ]
    outcome.claims += held.values()
    outcome.timed_claims += faster
    for name, place in at.items():
        counts = {
            "tokens": resample(sums, accepted(place)),
            "calls a token": resample(sums, calls(place)),
        }
        times = {
            "ms": resample(sums, milliseconds(place)),
            "speed-up": resample(sums, over(place, at["SD"])),
        }
        outcome.row(f"{SMALL.label}, {name}", counts)
        outcome.row(f"{SMALL.label}, {name}, times", times, timed=True)
        mine = tuple(each for key, each in held.items() if name in key) or tuple(held.values())
        for family in ("GPT-Neo", "GPT2"):
            for data in ("Wiki", "LM1B"):
                row = f"{family} {name}"
                answers[row, f"tokens {data}"] = OurNumber(counts["tokens"], 0.25, mine, "another pair, another text")
                for kind, value in times.items():
                    answers[row, f"{kind} {data}"] = OurNumber(value, 0.05, tuple(faster), OTHER_SECONDS, timed=True)
    outcome.claims += _quality_claims(experiments, runs, at, outcome)
    outcome.notes.append(
        "Tokens: draft tokens kept a target call. SPRINTER's verifier is the shipped one (threshold 0.5, at most 20 "
        "tokens a draft). Quality is the answers' log-probability under the target at temperature 1."
    )
    return outcome.finish(answers)


def _faster(run: int, base: int) -> Statistic:
    return lambda t: over(run, base)(t) - 1


def _counting_claims(sums: Tensor, at: Mapping[str, int]) -> dict[tuple[str, str], Claim]:
    """Claims about the number of target calls."""
    fewer = [
        ("SPRINTER's drafts, lossless", "SPRINTER", Kind.MUST),
        ("SD", "SPRINTER", Kind.MODELS),
        ("SpecDec++", "SPRINTER", Kind.MODELS),
        ("AdaEDL", "SPRINTER", Kind.MODELS),
        ("mentored", "SPRINTER", Kind.MODELS),
        ("SD", "SPRINTER, tau 0.4", Kind.MODELS),
        ("SD", "SPRINTER, tau 0.3", Kind.MODELS),
        ("SD", "mentored", Kind.MUST),
    ]
    return {
        (more, few): claim(
            f"calls a token of {more} - of {few} > 0",
            kind,
            resample(sums, less(calls(at[more]), calls(at[few]))),
        )
        for more, few, kind in fewer
    }


def _quality_claims(
    experiments: Experiments, runs: Sequence[PlannedRun], at: Mapping[str, int], outcome: OutcomeBuilder
) -> list[Claim]:
    """Claims about SPRINTER's loss in likelihood and at a position; the draft model alone is the bound of both."""
    alone = experiments.scaled_run(PairNames(SMALL.draft, SMALL.draft), **PLAIN)
    lossy = [name for name in at if name.startswith("SPRINTER") and "lossless" not in name]
    sums = quality_sums(experiments, [runs[at["SD"]], alone, runs[at["mentored"]], *(runs[at[name]] for name in lossy)])
    made = []
    for place, name in enumerate(("SD", "the draft model by itself", "mentored", *lossy)):
        outcome.row(f"{SMALL.label}, {name}, quality", {"log-likelihood": resample(sums, per_token(place))})
    for place, name in enumerate(lossy, 3):
        text = f"a quarter of what the draft model loses on SD, in log-likelihood a token, - what {name} loses > 0"
        made.append(claim(text, Kind.MODELS, resample(sums, _bounded(place))))
    better = resample(sums, less(per_token(3), per_token(1)))
    made.append(claim("log-likelihood a token of SPRINTER - of the draft model by itself > 0", Kind.MUST, better))
    text = "TV(p, q) - TV(p, SPRINTER's distribution) at the same positions > 0"
    made.append(claim(text, Kind.MUST, resample(drifts(experiments), less(column(1), column(0)))))
    return made


def _bounded(place: int) -> Statistic:
    return lambda t: (per_token(0)(t) - per_token(1)(t)) / 4 - (per_token(0)(t) - per_token(place)(t))


def drifts(experiments: Experiments) -> Float[Tensor, "prompts columns"]:
    """For each prompt the mean total variation of SPRINTER's distribution and of q from p, along the target's text."""
    run = experiments.scaled_run(SMALL, **PLAIN)
    head, pair, prompts = (
        load_head(heads_dir() / "approximate"),
        model_pair(experiments, SMALL),
        experiments.prompts(SMALL.target, run.prompts),
    )

    def measure() -> list[dict[str, float]]:
        rows: list[Row] = experiments.runs(run)
        texts: dict[int, list[Response]] = {}
        for row in rows:
            texts.setdefault(row["prompt"], []).append(Response(tuple(prompts[row["prompt"]]), tuple(row["token_ids"])))
        return [drift(head, pair, texts[number]) for number in sorted(texts)]

    found = experiments.cached("drift", run, measure)
    return torch.tensor([[each["position_tv"], each["draft_tv"]] for each in found], dtype=torch.float64) / len(found)


# --- against each method ----------------------------------------------------------------------------------------------


def table3(experiments: Experiments) -> Outcome:
    """Preference, speed and operations against each method."""
    outcome, answers = OutcomeBuilder(PAPER["table3"]), Answers()
    ours = planned_run(experiments, METHODS["SPRINTER"])
    for name in ("SD", "mentored"):
        other = planned_run(experiments, METHODS[name])
        wins = wins_over(experiments, ours, other)
        sums = run_sums(experiments.in_turns([ours, other]), FIELDS)
        speed = resample(sums, over(0, 1))
        work = _work()
        timed = claim(f"time: speed of SPRINTER over {name} - 1 > 0", Kind.MODELS, resample(sums, _faster(0, 1)))
        close = claim(
            f"win-tie rate against {name} - 30 > 0",
            Kind.MODELS,
            wins.plus(-30.0),
        )
        outcome.claims += [close, *(claim(text, kind, found) for text, kind, found in _work_claims(name, work, sums))]
        outcome.timed_claims.append(timed)
        outcome.row(
            f"{SMALL.label}, against {name}",
            {"win-tie %": wins, **{text: resample(sums, each) for text, each in work.items()}},
        )
        outcome.row(f"{SMALL.label}, against {name}, times", {"speed-up": speed}, timed=True)
        why = "the judge is the target's own log-likelihood, not a language model"
        answers[name, "win-tie %"] = OurNumber(wins, 3.0, (close,), why)
        answers[name, "FLOPs of the method"] = Missing("a formula; what both took is counted below")
        answers[name, "speed-up"] = OurNumber(speed, 0.05, (timed,), "seconds of this machine", timed=True)
    for name in ("Medusa", "Eagle2"):
        answers[name, ANY] = Missing(f"no {name} heads for a pair at hand: they would have to be trained")
    outcome.notes.append(
        "A win is an answer of higher log-probability under the target, a tie counts half; where SPRINTER is no worse "
        "the rate is 50%. Operations are counted as in appendix A.8, with a cache, in millions a token. By the paper's "
        "count SPRINTER's target reads one position a round; the unseen tokens must be read as well, or the next "
        "position has nothing to attend to, and they are in `target, all positions`."
    )
    return outcome.finish(answers)


def wins_over(experiments: Experiments, ours: PlannedRun, other: PlannedRun) -> Estimate:
    """Per cent of answers with a higher likelihood under the target than another method's, by prompt and seed."""
    mine, theirs = likelihoods(experiments, ours), likelihoods(experiments, other)
    rows = experiments.runs(ours)
    sums = torch.zeros(ours.prompts, 2, dtype=torch.float64)
    for row, a, b in zip(rows, mine, theirs, strict=True):
        sums[row["prompt"]] += torch.tensor([100.0 if a > b else 50.0 if a == b else 0.0, 1.0], dtype=torch.float64)
    return resample(sums, lambda t: t[:, 0] / t[:, 1])


def _work() -> dict[str, Statistic]:
    """Millions of operations a token: of SPRINTER (run 0) and the other method (run 1); the columns are FIELDS."""
    sizes = {"target": read_shape(SMALL.target), "draft": read_shape(SMALL.draft)}
    per = {side: pass_flops(shape, 1.0, 32.0) / 1e6 for side, shape in sizes.items() if shape is not None}

    def target(run: int, *, unseen: bool) -> Statistic:
        def of(t: Tensor) -> Tensor:
            read = t[:, WIDTH * run + 1] + (t[:, WIDTH * run + 3] if unseen else 0)
            return per["target"] * read / t[:, WIDTH * run]

        return of

    def drafting(run: int) -> Statistic:
        return lambda t: per["draft"] * t[:, WIDTH * run + 3] / t[:, WIDTH * run]

    return {
        "SPRINTER, target, one position a round": target(0, unseen=False),
        "SPRINTER, target, all positions": target(0, unseen=True),
        "other, target, all positions": target(1, unseen=True),
        "SPRINTER, draft": drafting(0),
        "other, draft": drafting(1),
    }


def _work_claims(name: str, work: Mapping[str, Statistic], sums: Tensor) -> list[tuple[str, Kind, Estimate]]:
    paper, whole, other = (work[key] for key in list(work)[:3])
    return [
        (
            f"target's operations of {name} - of SPRINTER by the paper's count > 0",
            Kind.MUST,
            resample(sums, less(other, paper)),
        ),
        (
            f"target's operations of {name} - of SPRINTER with all positions > 0",
            Kind.MODELS,
            resample(sums, less(other, whole)),
        ),
    ]


RECIPES = (Recipe(PAPER["table2"], table2), Recipe(PAPER["table3"], table3))
