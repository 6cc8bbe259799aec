"""Exact computations: Block Verification's toy pair, and the best acceptance of several draws (SpecTr's figures)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.bench.estimate import Estimate, resample
from draftproof.errors import UserError
from draftproof.functional.otm import otm_plan
from draftproof.reproduction.claims import Claim, Kind, claim, column, exact_claim
from draftproof.reproduction.draft_samples import model_pair
from draftproof.reproduction.expected_accepted import chain_ccdf
from draftproof.reproduction.experiments import Experiments, PairNames
from draftproof.reproduction.paper_tables import paper_tables
from draftproof.reproduction.recipes.base import Figure, OurNumber, Outcome, Recipe, Series
from draftproof.reproduction.recipes.toys import bernoulli, constant, rows, uniform
from draftproof.theory.acceptance import kseq_acceptance, kseq_guarantee, optimal_acceptance, uniform_acceptance
from draftproof.theory.lengths import block_length, full_information_length, token_length
from draftproof.training.responses import Response

PAPER = paper_tables("spectr")
TOY_FIGURE = paper_tables("block_verification")["figure3"]
TOY_P, TOY_Q = (1 / 3, 2 / 3), (2 / 3, 1 / 3)


def toy_ccdf(rule: str, n: int) -> list[float]:
    """Pr(accepted >= x) for x = 0..n on the toy pair, by enumeration of all drafts."""
    tokens = torch.tensor(list(itertools.product((0, 1), repeat=n)))
    q, p = (torch.tensor(row, dtype=torch.float64) for row in (TOY_Q, TOY_P))
    reach = chain_ccdf(rule, tokens, q.expand(len(tokens), n, 2), p.expand(len(tokens), n + 1, 2))
    return [1.0, *(q[tokens].prod(-1) @ reach).tolist()]


def toy_figure(experiments: Experiments) -> Outcome:  # noqa: ARG001 - nothing is sampled
    """The toy pair."""
    outcome = Outcome(TOY_FIGURE)
    ccdfs = {rule: toy_ccdf(rule, 10) for rule in ("token", "block")}
    gaps = [b - t for b, t in zip(ccdfs["block"], ccdfs["token"], strict=True)]
    outcome.claims += [
        exact_claim("Pr(block >= x) - Pr(token >= x) >= 0 at x = 1", gaps[1], at_least=True),
        exact_claim("least Pr(block >= x) - Pr(token >= x) over x = 2..10 > 0", min(gaps[2:])),
    ]
    p, q = (constant(row) for row in (TOY_P, TOY_Q))
    means = {
        "token": token_length(p, q, 2),
        "block": block_length(p, q, 2),
        "full information": full_information_length(p, q, 2),
    }
    for rule, ccdf in ccdfs.items():
        outcome.exact_row(f"Pr({rule} accepts >= x)", (f"x = {x}" for x in range(1, 11)), ccdf[1:])
    lines = tuple(Series.of(rule, range(11), ccdf) for rule, ccdf in ccdfs.items())
    outcome.figure = Figure("x", "Pr(accepted >= x), n = 10", lines)
    answers = {(row, "E[accepted] at n = 2"): OurNumber(Estimate.exact(value), 1e-12) for row, value in means.items()}
    return outcome.finish(answers)


def figure1(experiments: Experiments) -> Outcome:  # noqa: ARG001 - nothing is sampled
    """Uniform pairs."""
    outcome, lines, size = Outcome(PAPER["figure1"]), [], 120
    many = (1, 2, 4, 8, 16, 32)
    formula, reached, grown, last = [], [], [], []
    for ratio in (2, 3, 4, 10):
        p, q = rows(uniform(size // ratio, size)), rows(uniform(size, size))
        best = [float(optimal_acceptance(p, q, k)) for k in many]
        formula += [abs(a - uniform_acceptance(ratio, k)) for a, k in zip(best, many, strict=True)]
        reached += [abs(a - float(kseq_acceptance(p, q, k))) for a, k in zip(best, many, strict=True)]
        grown += [b - a for a, b in itertools.pairwise(best)]
        last.append(best[-1])
        outcome.exact_row(f"r = {ratio}", (f"k = {k}" for k in many), best)
        lines.append(Series.of(f"r = {ratio}", many, best))
    outcome.claims += [
        exact_claim("-|best - (1 - (1 - 1/r)^k)| >= 0, largest", -max(formula), at_least=True),
        exact_claim("-|best - K-SEQ| >= 0, largest", -max(reached), at_least=True),
        exact_claim("least growth from k to the next k > 0", min(grown)),
        exact_claim("least acceptance at k = 32 - 0.95 > 0", min(last) - 0.95),
    ]
    outcome.figure = Figure("k", "best acceptance", tuple(lines))
    outcome.notes.append("The text does not name the values of r.")
    return outcome.finish({})


def binary(target: float, drafted: float, k: int) -> float:
    """alpha_k of Bernoulli sources: min(b, 1 - (1 - a)^k) + min(1 - b, 1 - a^k) (SpecTr, arXiv 2310.15141, B.2)."""
    return min(target, 1 - (1 - drafted) ** k) + min(1 - target, 1 - drafted**k)


def _binary_best(target: float, drafted: float, k: int) -> float:
    return float(optimal_acceptance(rows(bernoulli(target)), rows(bernoulli(drafted)), k))


def _binary_apart(targets: Sequence[float], many: Sequence[int]) -> Claim:
    """The claim that the computed values equal the paper's formula."""
    worst = max(abs(_binary_best(b, 0.25, k) - binary(b, 0.25, k)) for b in targets for k in many)
    return exact_claim("-|best - closed form| >= 0, largest", -worst, at_least=True)


def figure2(experiments: Experiments) -> Outcome:  # noqa: ARG001 - nothing is sampled
    """Bernoulli pairs by k."""
    outcome, lines = Outcome(PAPER["figure2"]), []
    many, targets = tuple(range(1, 11)), (0.05, 0.1, 0.25, 0.5, 0.75, 0.95)
    found = {b: [_binary_best(b, 0.25, k) for k in many] for b in targets}
    for b, values in found.items():
        outcome.exact_row(f"target Ber({b})", (f"k = {k}" for k in many), values)
        lines.append(Series.of(f"target Ber({b})", many, values))
    falls = [
        a - b
        for place in range(len(many))
        for a, b in itertools.pairwise(found[b][place] for b in (0.25, 0.5, 0.75, 0.95))
    ]
    falls += [found[0.25][place] - found[0.05][place] for place in range(len(many))]
    outcome.claims += [
        exact_claim("least acceptance of equal sources - 1 >= 0", min(found[0.25]) - 1, at_least=True),
        exact_claim("least fall as the target moves away >= 0", min(falls), at_least=True),
        _binary_apart(targets, many),
    ]
    outcome.figure = Figure("k", "best acceptance, draft Ber(0.25)", tuple(lines))
    return outcome.finish({})


def figure3(experiments: Experiments) -> Outcome:  # noqa: ARG001 - nothing is sampled
    """Bernoulli pairs by the target's parameter."""
    outcome, lines = Outcome(PAPER["figure3"]), []
    targets, many = [b / 20 for b in range(21)], (1, 2, 4, 8)
    found = {k: [_binary_best(b, 0.25, k) for b in targets] for k in many}
    for k, values in found.items():
        outcome.exact_row(f"k = {k}", (f"target {b:g}" for b in targets[::2]), values[::2])
        lines.append(Series.of(f"k = {k}", targets, values))
    ones = {k: sum(a > 1 - 1e-9 for a in values) / len(values) for k, values in found.items()}
    widest = {k: max(values) - min(values) for k, values in found.items()}
    outcome.claims += [
        exact_claim("share of targets with acceptance 1 at k = 8, - 1/2 > 0", ones[8] - 0.5),
        exact_claim("spread over targets at k = 1 - at k = 8 > 0", widest[1] - widest[8]),
        _binary_apart(targets, many),
    ]
    outcome.figure = Figure("target's parameter", "best acceptance, draft Ber(0.25)", tuple(lines))
    return outcome.finish({})


def compressed(p: Float[Tensor, " V"], q: Float[Tensor, " V"], top: int = 10) -> tuple[Tensor, Tensor]:
    """Both distributions on the union of their likeliest tokens, renormalised (SpecTr, arXiv 2310.15141, D.2)."""
    kept = torch.tensor(sorted({*p.topk(top).indices.tolist(), *q.topk(top).indices.tolist()}))
    return p[kept].double() / p[kept].double().sum(), q[kept].double() / q[kept].double().sum()


def figure5(experiments: Experiments) -> Outcome:
    """OTM-k and K-SEQ on the distributions of a pair after its prompts."""
    outcome, lines = Outcome(PAPER["figure5"]), []
    many = (1, 2, 3, 4, 8, 16, 40)
    for place, pair in enumerate(experiments.profile.pairs):
        pairs = _distributions(experiments, pair)
        p, q = (_padded([each[side] for each in pairs]) for side in (0, 1))
        best = torch.stack([optimal_acceptance(p, q, k) for k in many], -1)
        ours = torch.stack([kseq_acceptance(p, q, k) for k in many], -1)
        means = {
            name: [resample(values, column(i)) for i in range(len(many))]
            for name, values in (("OTM-k", best / len(best)), ("K-SEQ", ours / len(ours)))
        }
        for name, values in means.items():
            outcome.row(f"{pair.label}, {name}", {f"k = {k}": value for k, value in zip(many, values, strict=True)})
            if place == 0:
                lines.append(Series.of(f"{name}, {pair.label}", many, (value.value for value in values)))
        shares = ours / best
        outcome.exact_row(f"{pair.label}, least K-SEQ / OTM-k", (f"k = {k}" for k in many), shares.amin(0).tolist())
        outcome.claims += _otm_claims(best, ours, many, pair.label)
        if place == 0:
            outcome.claims.append(_solved(pairs))
    outcome.figure = Figure("k", "acceptance", tuple(lines))
    outcome.notes.append(
        f"After {len(pairs)} prompts of ours instead of the paper's one. OTM-k by the exact formula; the linear "
        "program agrees where it is small enough to be solved."
    )
    return outcome.finish({})


def _otm_claims(
    best: Float[Tensor, "prompts many"], ours: Float[Tensor, "prompts many"], many: Sequence[int], label: str
) -> list[Claim]:
    """The paper's claims about the acceptance of OTM-k (`best`) and of K-SEQ (`ours`)."""
    least = min(float(each.diff(dim=-1).min()) for each in (best, ours))
    floor = torch.tensor([kseq_guarantee(k) for k in many], dtype=torch.float64)
    difference = best - ours
    return [
        exact_claim(
            f"-|K-SEQ - OTM-k| >= 0 at k = 1, largest ({label})", -float(difference[:, 0].abs().max()), at_least=True
        ),
        exact_claim(f"least growth of either with k >= 0 ({label})", least, at_least=True),
        exact_claim(f"least OTM-k - K-SEQ >= 0 ({label})", float(difference.min()), at_least=True),
        exact_claim(
            f"least K-SEQ / OTM-k - (1 - (1 - 1/k)^k) >= 0 ({label})", float((ours / best - floor).min()), at_least=True
        ),
        claim(f"mean OTM-k - K-SEQ > 0 at k = 4 ({label})", Kind.MODELS, resample(difference / len(best), column(3))),
    ]


def _distributions(experiments: Experiments, pair: PairNames) -> list[tuple[Tensor, Tensor]]:
    """Compressed p and q after each prompt."""
    models = model_pair(experiments, pair)
    found = []
    with torch.inference_mode():
        for prompt in experiments.prompts(pair.target, experiments.profile.prompts):
            response = [Response(tuple(prompt[:-1]), (prompt[-1],))]
            found.append(compressed(models.p(response)[0][-1], models.q(response)[0][0][-1]))
    return found


def _padded(parts: Sequence[Float[Tensor, " _"]]) -> Float[Tensor, "R V"]:
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def _solved(pairs: Sequence[tuple[Tensor, Tensor]], most: int = 8) -> Claim:
    """The claim that the linear program (equation (4)) gives the same optimum; it needs scipy."""
    text = "-|linear program - formula| >= 0 at k = 1, 2, largest of 8 prompts"
    try:
        worst = max(
            abs(otm_plan(p, q, k).value - float(optimal_acceptance(p[None], q[None], k)))
            for p, q in pairs[:most]
            for k in (1, 2)
        )
    except ImportError as missing:
        raise UserError(str(missing)) from missing
    return exact_claim(text, -worst if worst > 1e-7 else 0.0, at_least=True)


RECIPES = (
    Recipe(TOY_FIGURE, toy_figure, "exact"),
    Recipe(PAPER["figure1"], figure1, "exact"),
    Recipe(PAPER["figure2"], figure2, "exact"),
    Recipe(PAPER["figure3"], figure3, "exact"),
    Recipe(PAPER["figure5"], figure5, "exact"),
)
