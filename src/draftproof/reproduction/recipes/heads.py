"""SpecDec++, arXiv 2405.19715, table 3: acceptance heads by the weight of rejections and by depth."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.bench.estimate import Estimate, Statistic, resample
from draftproof.heads import Head
from draftproof.reproduction.claims import Claim, Kind, claim
from draftproof.reproduction.draft_samples import STEPS, DraftSamples, round_sums, trained_head
from draftproof.reproduction.experiments import OPENINGS, SMALL, Experiments
from draftproof.reproduction.paper_tables import paper_tables
from draftproof.reproduction.recipes.base import CLOSE, Answers, OurNumber, Outcome, Recipe
from draftproof.reproduction.recipes.specdec_pp import SETS, THRESHOLDS, adaptive, best, samples_of, throughput
from draftproof.reproduction.recipes.sums import less
from draftproof.training.heads import Labels, run_head
from draftproof.training.metrics import kl_rows

PAPER = paper_tables("specdec_pp")
WEIGHTS, DEPTHS = (1.0, 3.0, 6.0, 12.0), (0, 1, 2, 3, 4)


def heads_of(experiments: Experiments) -> dict[str, Head]:
    """A head for each weight and depth, trained on drafts of other texts with the same beginnings."""
    known, valid = (samples_of(experiments, OPENINGS, seed).at_token for seed in (1, 2))
    return {
        f"w_rej {weight:g}, D {depth}": trained_head("acceptance", known, valid, Labels(w_rej=weight), depth)
        for weight, depth in itertools.product(WEIGHTS, DEPTHS)
    }


def kl_sums(samples: DraftSamples, heads: Sequence[Head]) -> Float[Tensor, "prompts columns"]:
    """For each prompt the number of rows, then the summed binary KL of each head."""
    rows = samples.at_token
    with torch.no_grad():
        found = [kl_rows(rows.accept, run_head(head, rows).sigmoid()) for head in heads]
    columns = [torch.ones(len(rows), dtype=torch.float64), *found]
    return torch.stack([samples.by_prompt(column) for column in columns], -1)


def _mean(columns: Sequence[int]) -> Statistic:
    """Mean KL a row over several heads."""
    return lambda totals: torch.stack([totals[:, 1 + at] / totals[:, 0] for at in columns]).mean(0)


def chosen_threshold(columns: Sequence[int]) -> Statistic:
    """The threshold with the best throughput, chosen separately in every resample."""
    grid = torch.tensor(THRESHOLDS, dtype=torch.float64)
    return lambda totals: grid[torch.stack([throughput(at)(totals) for at in columns]).argmax(0)]


def table3(experiments: Experiments) -> Outcome:
    """Weights and depths."""
    outcome, answers = Outcome(PAPER["table3"]), Answers()
    heads = heads_of(experiments)
    names = list(heads)
    known, fresh = (samples_of(experiments, OPENINGS, seed) for seed in (1, 0))
    train, held = (kl_sums(samples, list(heads.values())) for samples in (known, fresh))
    of_weight = {w: [names.index(f"w_rej {w:g}, D {d}") for d in DEPTHS] for w in WEIGHTS}
    kl = [
        claim(
            f"mean eval KL at w_rej {b:g} - at {a:g} > 0",
            Kind.MUST,
            resample(held, less(_mean(of_weight[b]), _mean(of_weight[a]))),
        )
        for a, b in itertools.pairwise(WEIGHTS)
    ]
    shallow, deep = ([names.index(f"w_rej {w:g}, D {d}") for w in WEIGHTS] for d in (DEPTHS[0], DEPTHS[-1]))
    deeper = claim("mean eval KL at D 0 - at D 4 > 0", Kind.MODELS, resample(held, less(_mean(shallow), _mean(deep))))
    outcome.claims += [*kl, deeper]
    found: dict[str, dict[str, Estimate | str]] = {
        name: {"train KL": resample(train, _mean([at])), "eval KL": resample(held, _mean([at]))}
        for at, name in enumerate(names)
    }
    higher = {}
    for paper, own in SETS.items():
        samples = samples_of(experiments, own)
        sums = round_sums(samples, [lengths for head in heads.values() for lengths in adaptive(samples, head)])
        mine = {name: range(at * len(THRESHOLDS), (at + 1) * len(THRESHOLDS)) for at, name in enumerate(names)}
        for name, columns in mine.items():
            found[name][paper] = resample(sums, best(columns))
            found[name][f"h {paper}"] = resample(sums, chosen_threshold(columns))
        spread = less(_mean_threshold(mine, WEIGHTS[-1]), _mean_threshold(mine, WEIGHTS[0]))
        higher[paper] = claim(f"mean best h at w_rej 12 - at 1 > 0 ({own})", Kind.MODELS, resample(sums, spread))
    outcome.claims += higher.values()
    for name, values in found.items():
        outcome.row(name, values)
        for column, value in values.items():
            if isinstance(value, Estimate):
                answers[name, column] = _head_answer(column, value, kl, higher)
    outcome.notes.append(
        f"Our heads: {STEPS} steps on {len(known.at_token)} drafted tokens of {SMALL.label}; evaluated on other texts "
        "after the same openings. Throughput by the paper's seconds, as in specdec-pp-table1."
    )
    return outcome.finish(answers)


def _mean_threshold(mine: Mapping[str, Sequence[int]], weight: float) -> Statistic:
    """Mean best threshold of the heads of one weight."""
    own = [chosen_threshold(columns) for name, columns in mine.items() if name.startswith(f"w_rej {weight:g},")]
    return lambda totals: torch.stack([each(totals) for each in own]).mean(0)


def _head_answer(column: str, value: Estimate, kl: Sequence[Claim], higher: Mapping[str, Claim]) -> OurNumber:
    if "KL" in column:
        return OurNumber(value, 0.05, tuple(kl), "another pair, other drafts to predict")
    if column.startswith("h "):
        return OurNumber(
            value,
            1e-9,
            (higher[column.removeprefix("h ")],),
            "the best threshold depends on what a discarded token costs",
        )
    return OurNumber(value, CLOSE, tuple(kl), "by the same two seconds, another pair", relative=True)


RECIPES = (Recipe(PAPER["table3"], table3),)
