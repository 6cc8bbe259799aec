"""The audit of a rule that is given as a callable: by enumeration where it draws from our Rng, else by a powered test.

Knows: the two signatures, how to find out which one a callable has, what is reported. Does not know: where the callable
comes from beyond its name; it is imported and run, so it must be trusted.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.audit.distributions import (
    Drafts,
    PathRule,
    WorstOutcome,
    all_drafts,
    as_paths,
    emitted,
    illegal,
    judge,
    normal,
    target_law,
    verdicts_alone,
    worst_cell,
)
from draftproof.audit.statistics import chi_square_test
from draftproof.audit.suite import Context, ToyPair, plain, suite
from draftproof.errors import UserError
from draftproof.rng import TorchRng

Kind = Literal["chain", "path"]
EXACT = 1e-12
POWER = 0.99
BATCH = 8192
LARGER = ("trap", "zeros", "disjoint", "near-equal")  # pairs on which path rules verify two tokens a chain
SIGNATURES = {
    "chain": "rule(tokens [B, n], q [B, n, V], p [B, n+1, V]) -> (accepted [B], token [B])",
    "path": "rule(tokens [B, K, n], q [B, K, n, V], p [B, K, n+1, V]) -> (path [B], accepted [B], token [B])",
}


@dataclass(frozen=True)
class Candidate:
    """A rule to audit.

    Attributes:
        name: as given.
        verify: as a path rule.
        kind: which signature it has.
        takes_rng: whether all its randomness is the keyword `rng`.
    """

    name: str
    verify: PathRule
    kind: Kind
    takes_rng: bool


@dataclass(frozen=True)
class CheckLine:
    """What was found on one pair.

    Attributes:
        model: the pair.
        drafts: chains x tokens.
        method: "enumeration" or "statistics".
        total_variation: exact, or as counted (sampling alone makes it positive).
        p_value: of the test, None under enumeration.
        detectable: total variation that the test catches with probability 0.99, None under enumeration.
        worst_cell: the outcome on which found and expected differ most.
        failures: what the rule raised or returned in place of a verdict, with its probability.
        verdict: "ok" or "FAIL".
    """

    model: str
    drafts: str
    method: str
    total_variation: float
    p_value: float | None
    detectable: float | None
    worst_cell: WorstOutcome
    failures: dict[str, float]
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"kind": "model", **asdict(self), "worst_cell": self.worst_cell._asdict()}


def load_rule(target: str, kind: Kind | None = None) -> Candidate:
    """Import `package.module:function` and find out its signature by a trial call.

    The working directory is searched too. Importing runs the module: name code that is trusted.

    Raises:
        UserError: nothing to import there, or another signature.
    """
    rule = _imported(target)
    takes_rng = "rng" in _parameters(rule)
    options: dict[str, Any] = {"rng": TorchRng(0)} if takes_rng else {}
    reasons = []
    for guess in (kind,) if kind else ("chain", "path"):
        why = _trial(rule, guess, options)
        if not why:
            return Candidate(target, as_paths(rule) if guess == "chain" else rule, guess, takes_rng)
        reasons.append(f"as {SIGNATURES[guess]} it {why}")
    raise UserError(f"{target} has another signature: {'; '.join(reasons)}")


def _imported(target: str) -> Callable[..., Any]:
    name, _, path = target.partition(":")
    if not name or not path:
        raise UserError(f"target is {target!r}: legal is package.module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(name)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise UserError(f"cannot import {target}: {_said(error)}") from error
    if not callable(found):
        raise UserError(f"{target} is a {type(found).__name__}: a rule is a function")
    called: Callable[..., Any] = found
    return called


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _parameters(rule: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(rule).parameters)
    except (TypeError, ValueError):  # builtins have none
        return ()


def _trial(rule: Callable[..., Any], kind: str, options: dict[str, Any]) -> str:
    """Call a rule once with two rows; says what is wrong with the answer, "" for nothing."""
    drafts = all_drafts(plain(), 2 if kind == "path" else 1, 2)
    inputs = [x[:2].clone() if kind == "path" else x[:2, 0].clone() for x in drafts[:3]]
    try:
        with torch.random.fork_rng():
            answer = rule(*inputs, **options)
    except Exception as error:  # noqa: BLE001 - anyone's code
        return f"raised {_said(error)}"
    names = ("path", "accepted", "token")[-3 if kind == "path" else -2 :]
    if not isinstance(answer, tuple) or len(answer) != len(names):
        size = f" of {len(answer)}" if isinstance(answer, tuple) else ""
        return f"returned a {type(answer).__name__}{size}, not ({', '.join(names)})"
    for name, value in zip(names, answer, strict=True):
        if not isinstance(value, Tensor) or tuple(value.shape) != (2,) or value.is_floating_point():
            shape = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.40}"
            return f"returned {name} as {shape}, not integers of shape [B]"
    return ""


def shapes(candidate: Candidate, *, full: bool = False) -> list[tuple[ToyPair, int, int]]:
    """The pairs of the suite with the chains and tokens of the drafts on each."""
    pairs = suite(full=full)
    if candidate.kind == "chain":
        return [(pair, 1, 3 if candidate.takes_rng else 2) for pair in pairs]
    if not candidate.takes_rng:
        return [(pair, 2, 2) for pair in pairs]
    return [(pair, 2, 1) for pair in pairs] + [(pair, 2, 2) for pair in pairs if full or pair.name in LARGER]


def check(
    candidate: Candidate,
    *,
    full: bool = False,
    samples: int = 50_000,
    alpha: float = 0.01,
    seed: int = 0,
    tolerance: float = EXACT,
) -> Iterator[CheckLine]:
    """Audit a rule on every pair of the suite.

    Args:
        candidate: the rule.
        full: the larger suite.
        samples: on each pair, where the rule brings its own randomness.
        alpha: false-alarm rate of all tests together (Bonferroni).
        seed: of the drafts, and of torch's global generator while the rule runs.
        tolerance: largest total variation that passes enumeration.

    Raises:
        UserError: options out of range.
    """
    if samples < 1000:
        raise UserError(f"samples is {samples}: legal are 1000 and more")
    if not 0 < alpha < 1:
        raise UserError(f"alpha is {alpha}: legal are numbers between 0 and 1")
    places = shapes(candidate, full=full)
    for pair, chains, length in places:
        drafts = all_drafts(pair, chains, length)
        if candidate.takes_rng:
            yield enumerated(candidate.verify, pair, drafts, tolerance)
        else:
            yield tested(candidate.verify, pair, drafts, samples, alpha / len(places), seed)


def enumerated(rule: PathRule, pair: ToyPair, drafts: Drafts, tolerance: float = EXACT) -> CheckLine:
    """The exact law of a rule on one pair, against the target's."""
    law, lost = verdicts_alone(rule, drafts)
    total = float(law.sum()) + sum(lost.values())
    if abs(total - 1) > 1e-6:
        lost = {**lost, f"is not a function of its rng: its outcomes have probability {total:.6g} together": 0.0}
    found = judge(pair, drafts, law, lost)
    good = found.distance < tolerance and all(chance < tolerance for chance in lost.values())
    good = good and abs(total - 1) <= max(tolerance, 1e-9)
    return CheckLine(
        model=pair.name,
        drafts=_size(drafts),
        method="enumeration",
        total_variation=found.distance,
        p_value=None,
        detectable=None,
        worst_cell=found.worst,
        failures=lost,
        verdict="ok" if good else "FAIL",
    )


def _size(drafts: Drafts) -> str:
    return f"{drafts.tokens.shape[1]}x{drafts.tokens.shape[2]}"


def tested(rule: PathRule, pair: ToyPair, drafts: Drafts, samples: int, level: float, seed: int) -> CheckLine:
    """Counts of what a rule emits on one pair, continued by the target, against the target's law."""
    source = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        seen, why = _sampled(rule, drafts, samples, source)
    length = drafts.p.shape[2]
    counts, law = _completed(pair, emitted(drafts, seen.double()), length, source), target_law(pair, length)
    shares = {outcome: count / samples for outcome, count in counts.items()}
    outcome = chi_square_test(counts, law, level=level, power=POWER) if counts else None
    good = not why and outcome is not None and outcome.p_value > level
    return CheckLine(
        model=pair.name,
        drafts=_size(drafts),
        method="statistics",
        total_variation=0.5 * sum(abs(shares.get(key, 0.0) - law.get(key, 0.0)) for key in {*shares, *law}),
        p_value=outcome.p_value if outcome else None,
        detectable=outcome.detectable if outcome else None,
        worst_cell=worst_cell(shares, law),
        failures={why: 1.0} if why else {},
        verdict="ok" if good else "FAIL",
    )


def _sampled(
    rule: PathRule, drafts: Drafts, samples: int, source: torch.Generator
) -> tuple[Int[Tensor, "B K m V"], str]:
    """How often each (draft, path, accepted, token) came out; stops at the first failure and says which."""
    ways, chains, m, vocab = drafts.p.shape
    seen = torch.zeros(ways * chains * m * vocab, dtype=torch.int64)
    drawn = torch.multinomial(drafts.weight, samples, replacement=True, generator=source)
    for rows in torch.split(drawn, BATCH):
        try:
            verdict = rule(*(x[rows].clone() for x in drafts[:3]))
            answer = torch.stack([x.long() for x in verdict], -1)
        except Exception as error:  # noqa: BLE001 - anyone's code
            return seen.view(drafts.p.shape), f"raised {_said(error)}"
        limits = torch.tensor(drafts.p.shape[1:])
        bad = ((answer < 0) | (answer >= limits)).any(-1)
        if bad.any():
            path, accepted, token = (int(x) for x in answer[bad][0])
            return seen.view(drafts.p.shape), illegal(path, accepted, token, drafts.p.shape)
        at = ((rows * chains + answer[:, 0]) * m + answer[:, 1]) * vocab + answer[:, 2]
        seen += torch.bincount(at, minlength=seen.shape[0])
    return seen.view(drafts.p.shape), ""


def _completed(pair: ToyPair, law: dict[Context, float], length: int, source: torch.Generator) -> Counter[Context]:
    """Counts of emitted sequences continued by draws from the target."""
    full: Counter[Context] = Counter()
    todo = [(seq, round(count)) for seq, count in law.items()]
    while todo:
        seq, count = todo.pop()
        if len(seq) == length:
            full[seq] += count
            continue
        row: Float[Tensor, " V"] = torch.tensor(normal(pair.p(seq)), dtype=torch.float64)
        split = torch.multinomial(row, count, replacement=True, generator=source).bincount(minlength=pair.vocab)
        todo += [((*seq, x), int(n)) for x, n in enumerate(split) if n > 0]
    return full
