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
from draftproof.reproduction.experiments import SMALL, Experiments, PairNames, PlannedRun
from draftproof.reproduction.paper_tables import paper_tables
from draftproof.reproduction.recipes.base import ANY, OTHER_SECONDS, Answers, Missing, OurNumber, Outcome, Recipe
from draftproof.reproduction.recipes.sums import RunSums, less
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


def answers_of(experiments: Experiments, run: PlannedRun) -> list[Response]:
    """The prompt and answer of each row of a run."""
    prompts = experiments.prompts(SMALL.target, run.prompts, run.dataset)
    return [Response(tuple(prompts[row["prompt"]]), tuple(row["token_ids"])) for row in experiments.runs(run)]


def likelihoods(experiments: Experiments, run: PlannedRun) -> list[float]:
    """Log-probability of each answer under the target at temperature 1, row by row of the run."""

    def score() -> list[float]:
        with torch.inference_mode():
            return model_pair(experiments, SMALL).log_likelihoods(answers_of(experiments, run))

    return experiments.cached("likelihood", run, score)


def quality_sums(experiments: Experiments, runs: Sequence[PlannedRun]) -> RunSums:
    """For each prompt, tokens and log-likelihood of every run."""
    parts = [
        [
            {**row, "likelihood": value}
            for row, value in zip(experiments.runs(run), likelihoods(experiments, run), strict=True)
        ]
        for run in runs
    ]
    return RunSums(parts, ("num_tokens", "likelihood"))


def milliseconds(sums: RunSums, run: int) -> Statistic:
    """Wall-clock time a token."""
    seconds = sums.per(run, "seconds", "num_tokens")
    return lambda totals: 1000 * seconds(totals)


def table2(experiments: Experiments) -> Outcome:
    """Calls, time and quality of each method."""
    outcome, answers = Outcome(PAPER["table2"]), Answers()
    runs = [experiments.scaled_run(SMALL, **parts) for parts in METHODS.values()]
    sums = RunSums(experiments.in_turns(runs))
    at = {name: place for place, name in enumerate(METHODS)}
    held = _counting_claims(sums, at)
    faster = [
        sums.claim(f"time: speed of SPRINTER over {name} - 1 > 0", sums.faster(at["SPRINTER"], at[name]))
        for name in ("SD", "SpecDec++", "AdaEDL", "mentored")
    ]
    outcome.claims += held.values()
    outcome.timed_claims += faster
    for name, place in at.items():
        counts = {
            "tokens": sums.estimate(sums.per(place, "num_accepted_tokens", "num_target_calls")),
            "calls a token": sums.estimate(sums.per(place, "num_target_calls", "num_tokens")),
        }
        times = {"ms": sums.estimate(milliseconds(sums, place)), "speed-up": sums.estimate(sums.speed(place, at["SD"]))}
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


def _counting_claims(sums: RunSums, at: Mapping[str, int]) -> dict[tuple[str, str], Claim]:
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
    calls = {name: sums.per(run, "num_target_calls", "num_tokens") for name, run in at.items()}
    return {
        (more, few): sums.claim(f"calls a token of {more} - of {few} > 0", less(calls[more], calls[few]), kind)
        for more, few, kind in fewer
    }


def _quality_claims(
    experiments: Experiments, runs: Sequence[PlannedRun], at: Mapping[str, int], outcome: Outcome
) -> list[Claim]:
    """Claims about SPRINTER's loss in likelihood and at a position; the draft model alone is the bound of both."""
    alone = experiments.scaled_run(PairNames(SMALL.draft, SMALL.draft), **PLAIN)
    lossy = [name for name in at if name.startswith("SPRINTER") and "lossless" not in name]
    sums = quality_sums(experiments, [runs[at["SD"]], alone, runs[at["mentored"]], *(runs[at[name]] for name in lossy)])
    each = ("SD", "the draft model by itself", "mentored", *lossy)
    likely = {name: sums.per(run, "likelihood", "num_tokens") for run, name in enumerate(each)}
    made = []
    for name in each:
        outcome.row(f"{SMALL.label}, {name}, quality", {"log-likelihood": sums.estimate(likely[name])})
    best, worst = likely["SD"], likely["the draft model by itself"]
    for name in lossy:
        text = f"a quarter of what the draft model loses on SD, in log-likelihood a token, - what {name} loses > 0"
        loss = less(best, likely[name])
        made.append(sums.claim(text, lambda totals, loss=loss: less(best, worst)(totals) / 4 - loss(totals)))  # type: ignore[misc]
    text = "log-likelihood a token of SPRINTER - of the draft model by itself > 0"
    made.append(sums.claim(text, less(likely["SPRINTER"], worst), Kind.MUST))
    text = "TV(p, q) - TV(p, SPRINTER's distribution) at the same positions > 0"
    made.append(claim(text, Kind.MUST, resample(drifts(experiments), less(column(1), column(0)))))
    return made


def drifts(experiments: Experiments) -> Float[Tensor, "prompts columns"]:
    """For each prompt the mean total variation of SPRINTER's distribution and of q from p, along the target's text."""
    run = experiments.scaled_run(SMALL, **PLAIN)
    head, pair = load_head(heads_dir() / "approximate"), model_pair(experiments, SMALL)

    def measure() -> list[dict[str, float]]:
        texts: dict[tuple[int, ...], list[Response]] = {}
        for answer in answers_of(experiments, run):
            texts.setdefault(answer.prompt, []).append(answer)
        return [drift(head, pair, own) for own in texts.values()]

    found = experiments.cached("drift", run, measure)
    return torch.tensor([[each["position_tv"], each["draft_tv"]] for each in found], dtype=torch.float64) / len(found)


# --- against each method ----------------------------------------------------------------------------------------------


def table3(experiments: Experiments) -> Outcome:
    """Preference, speed and operations against each method."""
    outcome, answers = Outcome(PAPER["table3"]), Answers()
    ours = experiments.scaled_run(SMALL, **METHODS["SPRINTER"])
    for name in ("SD", "mentored"):
        other = experiments.scaled_run(SMALL, **METHODS[name])
        wins = wins_over(experiments, ours, other)
        sums = RunSums(experiments.in_turns([ours, other]))
        speed = sums.estimate(sums.speed(0, 1))
        work = _work(sums)
        timed = sums.claim(f"time: speed of SPRINTER over {name} - 1 > 0", sums.faster(0, 1))
        close = claim(f"win-tie rate against {name} - 30 > 0", Kind.MODELS, wins.plus(-30.0))
        paper, whole, theirs = list(work.values())[:3]
        outcome.claims += [
            close,
            sums.claim(
                f"target's operations of {name} - of SPRINTER by the paper's count > 0", less(theirs, paper), Kind.MUST
            ),
            sums.claim(f"target's operations of {name} - of SPRINTER with all positions > 0", less(theirs, whole)),
        ]
        outcome.timed_claims.append(timed)
        counted = {text: sums.estimate(each) for text, each in work.items()}
        outcome.row(f"{SMALL.label}, against {name}", {"win-tie %": wins, **counted})
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


def _work(sums: RunSums) -> dict[str, Statistic]:
    """Millions of operations a token: of SPRINTER (run 0) and the other method (run 1)."""
    sizes = {"target": read_shape(SMALL.target), "draft": read_shape(SMALL.draft)}
    cost = {side: pass_flops(shape, 1.0, 32.0) / 1e6 for side, shape in sizes.items() if shape is not None}
    seen, unseen = (
        [sums.per(run, name, "num_tokens") for run in (0, 1)] for name in ("num_target_calls", "num_draft_tokens")
    )
    return {
        "SPRINTER, target, one position a round": lambda t: cost["target"] * seen[0](t),
        "SPRINTER, target, all positions": lambda t: cost["target"] * (seen[0](t) + unseen[0](t)),
        "other, target, all positions": lambda t: cost["target"] * (seen[1](t) + unseen[1](t)),
        "SPRINTER, draft": lambda t: cost["draft"] * unseen[0](t),
        "other, draft": lambda t: cost["draft"] * unseen[1](t),
    }


RECIPES = (Recipe(PAPER["table2"], table2), Recipe(PAPER["table3"], table3))
