"""Seed 002: SpecTr by number of drafts, length and draft model; what several draws can and do reach at one place.

Knows: which runs and which closed forms answer which cell. Does not know: how runs are made.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.backends.base import Feed
from draftproof.bench.accepted import key
from draftproof.bench.claims import Claim, Interval, Kind, bootstrap, claim, column
from draftproof.bench.laboratory import Laboratory, Names
from draftproof.bench.papers import seed002 as papers
from draftproof.bench.recipes.base import CLOSE, Answer, Draft, Figure, Missing, Outcome, Recipe, Series
from draftproof.bench.recipes.sums import AtPlaces, efficiency, several, why_other
from draftproof.bench.recipes.toys import bernoulli, rows, uniform
from draftproof.errors import UserError
from draftproof.functional.otm import otm_plan
from draftproof.sampling import SamplingParams
from draftproof.theory.acceptance import kseq_acceptance, kseq_guarantee, optimal_acceptance, uniform_acceptance
from draftproof.training.features import Pair
from draftproof.training.responses import Response
from draftproof.tree import TokenTree

Answers = dict[tuple[str, str], Answer | Missing]
DRAFTS, LENGTHS = (1, 2, 4, 8), (4, 8)
PASSES = 30  # timed, of each shape


def _column(k: int, n: int) -> str:
    return key("spectr", n, k)


def _grid(lab: Laboratory, names: Names, drafter: str = "model") -> AtPlaces:
    """SpecTr by K and n on the same drafts; at K = 1 it is token verification."""
    asked = several(lab, names, drafter)
    return AtPlaces(lab, asked, [_column(k, n) for n in LENGTHS for k in DRAFTS])


def _growth(at: AtPlaces, label: str) -> list[Claim]:
    """That efficiency grows with K and with L."""
    with_k = [
        at.at_least(f"BE at K = {b} - at K = {a} > 0 ({label}, L = {n})", _column(b, n), _column(a, n))
        for n in LENGTHS
        for a, b in itertools.pairwise(DRAFTS)
    ]
    with_n = [
        at.at_least(f"BE at L = 8 - at L = 4 > 0 ({label}, K = {k})", _column(k, 8), _column(k, 4)) for k in DRAFTS
    ]
    return [*with_k, *with_n]


def table2(lab: Laboratory) -> Outcome:
    """Tokens a call by K and L."""
    draft, answers = Draft(papers.TABLE2), Answers()
    lines = []
    for place, names in enumerate(lab.profile.pairs):
        at = _grid(lab, names)
        held = _growth(at, names.label)
        draft.claims += held
        for n in LENGTHS:
            found = [at.efficiency("spectr", n, k) for k in DRAFTS]
            draft.row(f"{names.label}, L = {n}", {f"K = {k}": value for k, value in zip(DRAFTS, found, strict=True)})
            error = tuple((each.high - each.low) / 2 for each in found)
            lines.append(
                Series(f"{names.label}, L = {n}", tuple(map(float, DRAFTS)), tuple(e.value for e in found), error)
            )
            if place > 0:
                continue
            for k, value in zip(DRAFTS, found, strict=True):
                row = f"{'speculative' if k == 1 else 'SpecTr'} K={k} L={n}"
                why = why_other(2.2 if n == 4 else 2.3, found[0], n, f"at K = 1 {names.label}")
                answers[row, "BE"] = Answer(value, CLOSE, tuple(held), why, relative=True)
    draft.figure = Figure("K", "tokens a target call", tuple(lines))
    return draft.finish(answers)


def table4(lab: Laboratory) -> Outcome:
    """Three draft models of different strength: early exits of the same target."""
    draft, answers = Draft(papers.TABLE4), Answers()
    names = lab.profile.pairs[-1] if lab.profile.pairs[-1].target == "embedded:target" else lab.profile.pairs[1]
    layers = dict(zip(("2M", "6M", "20M"), (2, 3, 4), strict=True))
    grids = {size: _grid(lab, names, f"early_exit:{count}") for size, count in layers.items()}
    held = [each for size, at in grids.items() for each in _growth(at, f"first {layers[size]} layers")]
    better = [_better(grids[a], grids[b], layers[a], layers[b]) for a, b in itertools.pairwise(grids)]
    draft.claims += [*held, *better]
    for size, at in grids.items():
        found = {f"K={k} L={n}": at.efficiency("spectr", n, k) for n in LENGTHS for k in DRAFTS}
        draft.row(f"{names.target}, first {layers[size]} of 5 layers", found)
        paper = float(papers.TABLE4.value(size, "K=1 L=8") or 0)
        why = why_other(paper, found["K=1 L=8"], 8, f"at K = 1 the exit after {layers[size]} layers")
        for name, value in found.items():
            mine = tuple(each for each in held if f"first {layers[size]} layers" in each.text)
            answers[size, name] = Answer(value, CLOSE, (*mine, *better), why, relative=True)
    draft.notes.append("Our three drafts are the first 2, 3 and 4 of the target's 5 layers, weaker to stronger.")
    return draft.finish(answers)


def _better(one: AtPlaces, other: AtPlaces, fewer: int, more: int) -> Claim:
    """That the deeper exit is the better draft, averaged over K and L; prompts are resampled together."""
    width = one.sums.shape[1]
    both = torch.cat([one.sums, other.sums], -1)

    def difference(totals: Float[Tensor, "draws columns"]) -> Float[Tensor, " draws"]:
        weak, strong = (
            torch.stack([efficiency(at)(part) for at in range(1, width)]).mean(0)
            for part in (totals[:, :width], totals[:, width:])
        )
        return strong - weak

    text = f"mean BE with {more} layers - with {fewer} > 0"
    return claim(text, Kind.MODELS, bootstrap(both, difference))


def table1(lab: Laboratory) -> Outcome:
    """The time of a pass by tokens and batch."""
    draft, answers = Draft(papers.TABLE1), Answers()
    why = "a CPU has no idle arithmetic to read more tokens with"
    for place, names in enumerate(lab.profile.pairs):
        found = _passes(lab, names)
        base = statistics.median(found["4x1"])
        for length in (4, 8):
            told: dict[str, Interval | str] = {}
            for batch in (1, 2, 4, 8):
                low, middle, high = (each / base for each in statistics.quantiles(found[f"{length}x{batch}"], n=4))
                told[f"batch {batch}"] = ours = Interval(middle, low, high, 0.5, PASSES)
                if place == 0:
                    answers[f"length {length}", f"batch {batch}"] = Answer(ours, 0.15, (), why, timed=True)
            draft.row(f"{names.target}, length {length}", told, timed=True)
        sums = torch.tensor([found["8x8"], found["4x1"]]).T
        text = f"1.5 - time of a pass over 8 x 8 tokens relative to 4 x 1 > 0 ({names.target})"
        kept = bootstrap(sums, lambda totals: 1.5 - totals[:, 0] / totals[:, 1])
        draft.timed_claims.append(claim(text, Kind.MODELS, kept))
    draft.notes.append(
        "Median of passes over new tokens after 64 known ones; brackets: quartiles. Claim: ratio of means."
    )
    return draft.finish(answers)


def _passes(lab: Laboratory, names: Names) -> dict[str, list[float]]:
    """Seconds of passes by length x batch, from the records if they are there."""
    asked = {"names": names.label, "dtype": names.dtype}
    found: dict[str, list[float]] = lab.remembered("passes", asked, lambda: _time_passes(lab, names))
    return found


def _time_passes(lab: Laboratory, names: Names) -> dict[str, list[float]]:
    """Shapes take turns, so that a machine that slows down meets all of them."""
    model = lab.backend(names.target, names.dtype)
    prompt = (lab.prompts(names.target, 8)[0] * 64)[:64]
    shapes = [(length, batch) for length in (4, 8) for batch in (1, 2, 4, 8)]
    seconds: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    for repeat in range(PASSES + 3):
        for length, batch in shapes:
            sessions = [model.open() for _ in range(batch)]
            with torch.inference_mode():
                model.forward([Feed(session, prompt) for session in sessions])
                tree = TokenTree.chain(torch.tensor(prompt[:length], device=model.device))
                start = time.perf_counter()
                model.forward([Feed(session, (), tree) for session in sessions])
                spent = time.perf_counter() - start
            for session in sessions:
                session.close()
            if repeat >= 3:
                seconds[length, batch].append(spent)
    return {f"{length}x{batch}": times for (length, batch), times in seconds.items()}


def figure1(lab: Laboratory) -> Outcome:  # noqa: ARG001 - nothing is sampled
    """Uniform pairs."""
    draft, lines, size = Draft(papers.FIGURE1), [], 120
    many = (1, 2, 4, 8, 16, 32)
    formula, reached, grown, last = [], [], [], []
    for ratio in (2, 3, 4, 10):
        p, q = rows(uniform(size // ratio, size)), rows(uniform(size, size))
        best = [float(optimal_acceptance(p, q, k)) for k in many]
        formula += [abs(a - uniform_acceptance(ratio, k)) for a, k in zip(best, many, strict=True)]
        reached += [abs(a - float(kseq_acceptance(p, q, k))) for a, k in zip(best, many, strict=True)]
        grown += [b - a for a, b in itertools.pairwise(best)]
        last.append(best[-1])
        draft.row(f"r = {ratio}", {f"k = {k}": Interval.exact(a) for k, a in zip(many, best, strict=True)})
        lines.append(Series(f"r = {ratio}", tuple(map(float, many)), tuple(best)))
    draft.claims += [
        claim("-|best - (1 - (1 - 1/r)^k)| >= 0, largest", Kind.MUST, Interval.exact(-max(formula)), at_least=True),
        claim("-|best - K-SEQ| >= 0, largest", Kind.MUST, Interval.exact(-max(reached)), at_least=True),
        claim("least growth from k to the next k > 0", Kind.MUST, Interval.exact(min(grown))),
        claim("least acceptance at k = 32 - 0.95 > 0", Kind.MUST, Interval.exact(min(last) - 0.95)),
    ]
    draft.figure = Figure("k", "best acceptance", tuple(lines))
    draft.notes.append("The text does not name the values of r.")
    return draft.finish({})


def binary(target: float, drafted: float, k: int) -> float:
    """alpha_k of Bernoulli sources: min(b, 1 - (1 - a)^k) + min(1 - b, 1 - a^k) (seed 002, appendix B.2)."""
    return min(target, 1 - (1 - drafted) ** k) + min(1 - target, 1 - drafted**k)


def _binary_best(target: float, drafted: float, k: int) -> float:
    return float(optimal_acceptance(rows(bernoulli(target)), rows(bernoulli(drafted)), k))


def _binary_apart(targets: Sequence[float], many: Sequence[int]) -> Claim:
    """That what is computed equals the paper's formula."""
    worst = max(abs(_binary_best(b, 0.25, k) - binary(b, 0.25, k)) for b in targets for k in many)
    return claim("-|best - closed form| >= 0, largest", Kind.MUST, Interval.exact(-worst), at_least=True)


def figure2(lab: Laboratory) -> Outcome:  # noqa: ARG001 - nothing is sampled
    """Bernoulli pairs by k."""
    draft, lines = Draft(papers.FIGURE2), []
    many, targets = tuple(range(1, 11)), (0.05, 0.1, 0.25, 0.5, 0.75, 0.95)
    found = {b: [_binary_best(b, 0.25, k) for k in many] for b in targets}
    for b, values in found.items():
        draft.row(f"target Ber({b})", {f"k = {k}": Interval.exact(a) for k, a in zip(many, values, strict=True)})
        lines.append(Series(f"target Ber({b})", tuple(map(float, many)), tuple(values)))
    falls = [
        a - b
        for place in range(len(many))
        for a, b in itertools.pairwise(found[b][place] for b in (0.25, 0.5, 0.75, 0.95))
    ]
    falls += [found[0.25][place] - found[0.05][place] for place in range(len(many))]
    draft.claims += [
        claim(
            "least acceptance of equal sources - 1 >= 0", Kind.MUST, Interval.exact(min(found[0.25]) - 1), at_least=True
        ),
        claim("least fall as the target moves away >= 0", Kind.MUST, Interval.exact(min(falls)), at_least=True),
        _binary_apart(targets, many),
    ]
    draft.figure = Figure("k", "best acceptance, draft Ber(0.25)", tuple(lines))
    return draft.finish({})


def figure3(lab: Laboratory) -> Outcome:  # noqa: ARG001 - nothing is sampled
    """Bernoulli pairs by the target's parameter."""
    draft, lines = Draft(papers.FIGURE3), []
    targets, many = [b / 20 for b in range(21)], (1, 2, 4, 8)
    found = {k: [_binary_best(b, 0.25, k) for b in targets] for k in many}
    for k, values in found.items():
        draft.row(
            f"k = {k}",
            {f"target {b:g}": Interval.exact(a) for b, a in zip(targets, values, strict=True) if b * 10 % 1 == 0},
        )
        lines.append(Series(f"k = {k}", tuple(targets), tuple(values)))
    ones = {k: sum(a > 1 - 1e-9 for a in values) / len(values) for k, values in found.items()}
    widest = {k: max(values) - min(values) for k, values in found.items()}
    draft.claims += [
        claim("share of targets with acceptance 1 at k = 8, - 1/2 > 0", Kind.MUST, Interval.exact(ones[8] - 0.5)),
        claim("spread over targets at k = 1 - at k = 8 > 0", Kind.MUST, Interval.exact(widest[1] - widest[8])),
        _binary_apart(targets, many),
    ]
    draft.figure = Figure("target's parameter", "best acceptance, draft Ber(0.25)", tuple(lines))
    return draft.finish({})


def compressed(p: Float[Tensor, " V"], q: Float[Tensor, " V"], top: int = 10) -> tuple[Tensor, Tensor]:
    """Both distributions on the union of their likeliest tokens, renormalised (seed 002, appendix D.2)."""
    kept = torch.tensor(sorted({*p.topk(top).indices.tolist(), *q.topk(top).indices.tolist()}))
    return p[kept].double() / p[kept].double().sum(), q[kept].double() / q[kept].double().sum()


def figure5(lab: Laboratory) -> Outcome:
    """OTM-k and K-SEQ on the distributions of a pair after its prompts."""
    draft, lines = Draft(papers.FIGURE5), []
    many = (1, 2, 3, 4, 8, 16, 40)
    for place, names in enumerate(lab.profile.pairs):
        pairs = _distributions(lab, names)
        p, q = (_padded([each[side] for each in pairs]) for side in (0, 1))
        best = torch.stack([optimal_acceptance(p, q, k) for k in many], -1)
        ours = torch.stack([kseq_acceptance(p, q, k) for k in many], -1)
        means = {
            name: [bootstrap(values, column(i)) for i in range(len(many))]
            for name, values in (("OTM-k", best / len(best)), ("K-SEQ", ours / len(ours)))
        }
        for name, values in means.items():
            draft.row(f"{names.label}, {name}", {f"k = {k}": value for k, value in zip(many, values, strict=True)})
            if place == 0:
                lines.append(Series(f"{name}, {names.label}", tuple(map(float, many)), tuple(v.value for v in values)))
        floor = torch.tensor([kseq_guarantee(k) for k in many], dtype=torch.float64)
        shares = ours / best
        told = {f"k = {k}": Interval.exact(float(shares[:, i].min())) for i, k in enumerate(many)}
        draft.row(f"{names.label}, least K-SEQ / OTM-k", told)
        draft.claims += [
            claim(
                f"-|K-SEQ - OTM-k| >= 0 at k = 1, largest ({names.label})",
                Kind.MUST,
                Interval.exact(-float((best - ours)[:, 0].abs().max())),
                at_least=True,
            ),
            claim(
                f"least growth of either with k >= 0 ({names.label})",
                Kind.MUST,
                Interval.exact(min(float(each.diff(dim=-1).min()) for each in (best, ours))),
                at_least=True,
            ),
            claim(
                f"least OTM-k - K-SEQ >= 0 ({names.label})",
                Kind.MUST,
                Interval.exact(float((best - ours).min())),
                at_least=True,
            ),
            claim(
                f"least K-SEQ / OTM-k - (1 - (1 - 1/k)^k) >= 0 ({names.label})",
                Kind.MUST,
                Interval.exact(float((shares - floor).min())),
                at_least=True,
            ),
            claim(
                f"mean OTM-k - K-SEQ > 0 at k = 4 ({names.label})",
                Kind.MODELS,
                bootstrap((best - ours) / len(best), column(3)),
            ),
        ]
        if place == 0:
            draft.claims.append(_solved(pairs))
    draft.figure = Figure("k", "acceptance", tuple(lines))
    draft.notes.append(
        f"After {len(pairs)} prompts of ours instead of the paper's one. OTM-k by the exact formula; the linear "
        "program agrees where it is small enough to be solved."
    )
    return draft.finish({})


def _distributions(lab: Laboratory, names: Names) -> list[tuple[Tensor, Tensor]]:
    """Compressed p and q after each prompt."""
    pair = Pair(lab.backend(names.target, names.dtype), lab.backend(names.draft, names.dtype), SamplingParams())
    found = []
    with torch.inference_mode():
        for prompt in lab.prompts(names.target, lab.profile.prompts):
            asked = [Response(tuple(prompt[:-1]), (prompt[-1],))]
            found.append(compressed(pair.p(asked)[0][-1], pair.q(asked)[0][0][-1]))
    return found


def _padded(parts: Sequence[Float[Tensor, " _"]]) -> Float[Tensor, "R V"]:
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def _solved(pairs: Sequence[tuple[Tensor, Tensor]], most: int = 8) -> Claim:
    """That the linear program (equation (4)) gives the same optimum; without scipy the claim cannot be judged."""
    text = "-|linear program - formula| >= 0 at k = 1, 2, largest of 8 prompts"
    try:
        worst = max(
            abs(otm_plan(p, q, k).value - float(optimal_acceptance(p[None], q[None], k)))
            for p, q in pairs[:most]
            for k in (1, 2)
        )
    except ImportError as missing:
        raise UserError(str(missing)) from missing
    return claim(text, Kind.MUST, Interval.exact(-worst if worst > 1e-7 else 0.0), at_least=True)


RECIPES = (
    Recipe(papers.TABLE1, table1, "times"),
    Recipe(papers.TABLE2, table2),
    Recipe(papers.TABLE4, table4),
    Recipe(papers.FIGURE1, figure1, "exact"),
    Recipe(papers.FIGURE2, figure2, "exact"),
    Recipe(papers.FIGURE3, figure3, "exact"),
    Recipe(papers.FIGURE5, figure5, "exact"),
)
