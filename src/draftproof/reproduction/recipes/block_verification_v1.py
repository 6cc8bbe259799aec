"""Block Verification v1, arXiv 2403.10444v1: two memoryless binary sources, in closed form and by enumeration."""

from __future__ import annotations

import itertools
import math

from draftproof.reproduction.claims import exact_claim
from draftproof.reproduction.experiments import Experiments
from draftproof.reproduction.paper_tables import paper_tables
from draftproof.reproduction.recipes.base import Figure, Outcome, Recipe, Series
from draftproof.reproduction.recipes.toys import bernoulli, constant
from draftproof.theory.lengths import block_length, full_information_length, token_length

PAPER = paper_tables("block_verification_v1")
TARGET = 0.75
DRAFTS = (0.25, 0.5, 0.65, 0.75, 0.9)
LENGTHS = tuple(range(1, 11))


def token_level(draft: float, length: int) -> float:
    """sum over i >= 1 of (1 - TV)^i (Theorem 2); the paper's sum begins at 0, which counts one token more."""
    return math.fsum((1 - abs(draft - TARGET)) ** i for i in range(1, length + 1))


def block_level(draft: float, length: int) -> float:
    """sum over i >= 1 of 1 - TV(Bin(i, p), Bin(i, q)) (Block Verification v1, Theorem 1)."""
    return math.fsum(
        math.comb(i, k) * min(a**k * (1 - a) ** (i - k) for a in (draft, TARGET))
        for i in range(1, length + 1)
        for k in range(i + 1)
    )


def figure2(experiments: Experiments) -> Outcome:  # noqa: ARG001 - nothing is sampled
    """Both couplings by length, and block verification, which sees only the drafted tokens."""
    outcome, lines, apart = Outcome(PAPER["figure2"]), [], []
    p = constant(bernoulli(TARGET))
    for chance in DRAFTS:
        q = constant(bernoulli(chance))
        token, block = ([level(chance, n) for n in LENGTHS] for level in (token_level, block_level))
        apart += [
            max(abs(token[n - 1] - token_length(p, q, n)), abs(block[n - 1] - full_information_length(p, q, n)))
            for n in LENGTHS
        ]
        shipped = [block_length(p, q, n) for n in LENGTHS]
        for name, values in (("token level", token), ("block level", block), ("block verification", shipped)):
            outcome.exact_row(f"draft Ber({chance}), {name}", (f"L = {n}" for n in LENGTHS), values)
            if chance != TARGET and name != "block verification":
                lines.append(Series.of(f"{name}, p = {chance}", LENGTHS, values))
        if chance == TARGET:
            same = max(abs(b - t) for b, t in zip(block, token, strict=True))
            outcome.claims.append(
                exact_claim(f"-|block level - token level| >= 0 at p = {chance}", -same, at_least=True)
            )
            continue
        gaps = [b - t for b, t in zip(block, token, strict=True)]
        grown = min(b - a for a, b in itertools.pairwise(gaps))
        between = min(min(b - s, s - t) for b, s, t in zip(block, shipped, token, strict=True))
        outcome.claims += [
            exact_claim(f"least gap over L = 2..10 > 0 at p = {chance}", min(gaps[1:])),
            exact_claim(f"least growth of the gap with L > 0 at p = {chance}", grown),
            exact_claim(f"block verification lies between the two, p = {chance}", between, at_least=True),
        ]
    outcome.claims.append(exact_claim("-|formula - enumeration| >= 0, largest of all", -max(apart), at_least=True))
    outcome.figure = Figure("L", f"expected accepted tokens, target Ber({TARGET})", tuple(lines))
    outcome.notes.append(
        "The text names no values of p, so these are ours. The paper's sums run from i = 0; from 1, as here, they "
        "count accepted tokens. The block-level coupling needs the whole distribution of blocks (greedy block "
        "verification reaches it in one round); block verification sees the drafted path only and lies between."
    )
    return outcome.finish({})


RECIPES = (Recipe(PAPER["figure2"], figure2, "exact"),)
