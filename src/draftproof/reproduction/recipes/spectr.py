"""SpecTr: SpecTr by number of drafts, length and draft model, and the time of a pass over more tokens."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.backends.base import Feed
from draftproof.bench.estimate import Estimate, resample
from draftproof.profiling.forward import timed_pass
from draftproof.reproduction.claims import Claim, Kind, claim
from draftproof.reproduction.expected_accepted import key
from draftproof.reproduction.experiments import SMALL, Experiments, PairNames
from draftproof.reproduction.paper_tables import paper_tables
from draftproof.reproduction.recipes.base import CLOSE, Answers, Figure, OurNumber, Outcome, Recipe, Series
from draftproof.reproduction.recipes.sums import AtPlaces, between, efficiency, several, why_other
from draftproof.tree import TokenTree

PAPER = paper_tables("spectr")
DRAFTS, LENGTHS = (1, 2, 4, 8), (4, 8)
PASSES = 30  # timed passes of each shape


def _column(k: int, n: int) -> str:
    return key("spectr", n, k)


def _grid(experiments: Experiments, pair: PairNames, **changes: Any) -> AtPlaces:
    """SpecTr by K and n on the same drafts; at K = 1 it is token verification."""
    return AtPlaces(
        experiments, several(experiments, pair, **changes), [_column(k, n) for n in LENGTHS for k in DRAFTS]
    )


def _growth(at: AtPlaces, label: str) -> list[Claim]:
    """The claims that efficiency grows with K and with L."""
    with_k = [
        at.at_least(f"BE at K = {b} - at K = {a} > 0 ({label}, L = {n})", _column(b, n), _column(a, n))
        for n in LENGTHS
        for a, b in itertools.pairwise(DRAFTS)
    ]
    with_n = [
        at.at_least(f"BE at L = 8 - at L = 4 > 0 ({label}, K = {k})", _column(k, 8), _column(k, 4)) for k in DRAFTS
    ]
    return [*with_k, *with_n]


def table2(experiments: Experiments) -> Outcome:
    """Tokens a call by K and L."""
    outcome, answers = Outcome(PAPER["table2"]), Answers()
    lines = []
    for place, pair in enumerate(experiments.profile.pairs):
        at = _grid(experiments, pair)
        held = _growth(at, pair.label)
        outcome.claims += held
        for n in LENGTHS:
            found = [at.efficiency("spectr", n, k) for k in DRAFTS]
            outcome.row(f"{pair.label}, L = {n}", {f"K = {k}": value for k, value in zip(DRAFTS, found, strict=True)})
            lines.append(Series.through(f"{pair.label}, L = {n}", DRAFTS, found))
            if place > 0:
                continue
            for k, value in zip(DRAFTS, found, strict=True):
                row = f"{'speculative' if k == 1 else 'SpecTr'} K={k} L={n}"
                why = why_other(2.2 if n == 4 else 2.3, found[0], n, f"at K = 1 {pair.label}")
                answers[row, "BE"] = OurNumber(value, CLOSE, tuple(held), why, relative=True)
    outcome.figure = Figure("K", "tokens a target call", tuple(lines))
    return outcome.finish(answers)


def table4(experiments: Experiments) -> Outcome:
    """Three draft models of different strength: early exits of the same target."""
    outcome, answers = Outcome(PAPER["table4"]), Answers()
    pair = SMALL
    layers = dict(zip(("2M", "6M", "20M"), (2, 3, 4), strict=True))
    grids = {size: _grid(experiments, pair, drafter=f"early_exit:{count}", seeds=1) for size, count in layers.items()}
    held = [each for size, at in grids.items() for each in _growth(at, f"first {layers[size]} layers")]
    better = [_better(grids[a], grids[b], layers[a], layers[b]) for a, b in itertools.pairwise(grids)]
    outcome.claims += [*held, *better]
    for size, at in grids.items():
        found = {f"K={k} L={n}": at.efficiency("spectr", n, k) for n in LENGTHS for k in DRAFTS}
        outcome.row(f"{pair.target}, first {layers[size]} of 5 layers", found)
        paper = PAPER["table4"].number(size, "K=1 L=8")
        why = why_other(paper, found["K=1 L=8"], 8, f"at K = 1 the exit after {layers[size]} layers")
        for name, value in found.items():
            mine = tuple(each for each in held if f"first {layers[size]} layers" in each.text)
            answers[size, name] = OurNumber(value, CLOSE, (*mine, *better), why, relative=True)
    outcome.notes.append("Our three drafts are the first 2, 3 and 4 of the target's 5 layers, weaker to stronger.")
    return outcome.finish(answers)


def _better(weak: AtPlaces, strong: AtPlaces, fewer: int, more: int) -> Claim:
    """The claim that the deeper exit is the better draft, averaged over K and L."""
    columns = range(1, weak.sums.shape[1])

    def mean(totals: Float[Tensor, "draws columns"]) -> Float[Tensor, " draws"]:
        return torch.stack([efficiency(at)(totals) for at in columns]).mean(0)

    text = f"mean BE with {more} layers - with {fewer} > 0"
    return claim(text, Kind.MODELS, between(strong, weak, mean, mean))


def table1(experiments: Experiments) -> Outcome:
    """The time of a pass by tokens and batch."""
    outcome, answers = Outcome(PAPER["table1"]), Answers()
    why = "a CPU has no idle arithmetic to read more tokens with"
    for place, pair in enumerate(experiments.profile.pairs):
        found = _passes(experiments, pair)
        base = statistics.median(found["4x1"])
        for length in (4, 8):
            values: dict[str, Estimate | str] = {}
            for batch in (1, 2, 4, 8):
                low, middle, high = (each / base for each in statistics.quantiles(found[f"{length}x{batch}"], n=4))
                values[f"batch {batch}"] = ours = Estimate(middle, low, high, PASSES, 0.5)
                if place == 0:
                    answers[f"length {length}", f"batch {batch}"] = OurNumber(ours, 0.15, (), why, timed=True)
            outcome.row(f"{pair.target}, length {length}", values, timed=True)
        sums = torch.tensor([found["8x8"], found["4x1"]]).T
        text = f"1.5 - time of a pass over 8 x 8 tokens relative to 4 x 1 > 0 ({pair.target})"
        kept = resample(sums, lambda totals: 1.5 - totals[:, 0] / totals[:, 1])
        outcome.timed_claims.append(claim(text, Kind.MODELS, kept))
    outcome.notes.append(
        "Median of passes over new tokens after 64 known ones; brackets: quartiles. Claim: ratio of means."
    )
    return outcome.finish(answers)


def _passes(experiments: Experiments, pair: PairNames) -> dict[str, list[float]]:
    """Seconds of passes by length x batch, from the records if they exist."""
    key = {"pair": pair.label, "dtype": pair.dtype}
    return experiments.cached("passes", key, lambda: _time_passes(experiments, pair))


def _time_passes(experiments: Experiments, pair: PairNames) -> dict[str, list[float]]:
    """Measure the shapes in turns, so that a machine that slows down affects all of them."""
    model = experiments.backend(pair.target, pair.dtype)
    prompt = (experiments.prompts(pair.target, 8)[0] * 64)[:64]
    shapes = [(length, batch) for length in (4, 8) for batch in (1, 2, 4, 8)]
    seconds: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    for repeat in range(PASSES + 3):
        for length, batch in shapes:
            sessions = [model.open() for _ in range(batch)]
            with torch.inference_mode():
                model.forward([Feed(session, prompt) for session in sessions])
                tree = TokenTree.chain(torch.tensor(prompt[:length], device=model.device))
                spent = timed_pass(model, [Feed(session, (), tree) for session in sessions])
            for session in sessions:
                session.close()
            if repeat >= 3:
                seconds[length, batch].append(spent)
    return {f"{length}x{batch}": times for (length, batch), times in seconds.items()}


RECIPES = (Recipe(PAPER["table1"], table1, "times"), Recipe(PAPER["table2"], table2), Recipe(PAPER["table4"], table4))
