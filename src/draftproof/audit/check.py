"""The audit of a user's rule: by enumeration if it draws from our Rng, else by a statistical test with a known power.

The rule is imported by name and run, so its code must be trusted.
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
    compare,
    emitted,
    illegal,
    normal,
    target_distribution,
    verdicts_alone,
    worst_cell,
)
from draftproof.audit.statistics import chi_square_test
from draftproof.audit.suite import Context, ToyPair, plain, suite
from draftproof.errors import UserError
from draftproof.rng import TorchRng
from draftproof.testing import total_variation

Kind = Literal["chain", "path"]
EXACT = 1e-12
ROUNDED = 1e-6  # total variation that rounding to float32 may cause
POWER = 0.99
BATCH = 8192
LARGER = ("trap", "zeros", "disjoint", "near-equal")  # pairs on which path rules verify chains of two tokens
SIGNATURES = {
    "chain": "rule(tokens [B, n], q [B, n, V], p [B, n+1, V]) -> (accepted [B], token [B])",
    "path": "rule(tokens [B, K, n], q [B, K, n, V], p [B, K, n+1, V]) -> (path [B], accepted [B], token [B])",
}


@dataclass(frozen=True)
class RuleCheckOptions:
    """How a rule is checked.

    Attributes:
        samples: number of samples per model, for a rule without the keyword rng.
        alpha: false-alarm rate of all tests together.
        seed: seed of the samples, and of torch's generator while the rule runs.
        tolerance: largest total variation that passes an enumeration; use 1e-6 for float32 rules.
    """

    samples: int = 50_000
    alpha: float = 0.01
    seed: int = 0
    tolerance: float = EXACT

    def __post_init__(self) -> None:
        if self.samples < 1000:
            raise UserError(f"samples: expected 1000 or more, got {self.samples}")
        if not 0 < self.alpha < 1:
            raise UserError(f"alpha: expected a number between 0 and 1, got {self.alpha}")


@dataclass(frozen=True)
class Candidate:
    """A rule to audit.

    Attributes:
        name: the name that it was imported by.
        verify: the rule with the signature of a path rule.
        kind: its own signature, "chain" or "path".
        takes_rng: whether it has the keyword `rng`, from which all its randomness must come.
    """

    name: str
    verify: PathRule
    kind: Kind
    takes_rng: bool


@dataclass(frozen=True)
class CheckLine:
    """The result on one pair.

    Attributes:
        model: name of the pair.
        drafts: chains x tokens.
        method: "enumeration" or "statistics".
        total_variation: from the target's distribution; exact, or from counts (then it is positive by chance alone).
        p_value: p-value of the test, None for enumeration.
        detectable: total variation that the test detects with probability 0.99, None for enumeration.
        worst_cell: the outcome whose probability differs most.
        failures: what the rule raised or returned instead of a verdict, with its probability.
        verdict: "ok" or "FAIL".
    """

    model: str
    drafts: str
    method: str
    total_variation: float
    worst_cell: WorstOutcome
    failures: dict[str, float]
    verdict: str
    p_value: float | None = None
    detectable: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The line as values for JSON."""
        return {"kind": "model", **asdict(self), "worst_cell": self.worst_cell._asdict()}


def load_rule(target: str, kind: Kind | None = None) -> Candidate:
    """Import `package.module:function`, and find its signature by a trial call.

    The working directory is searched too. Importing runs the module, so its code must be trusted.

    Raises:
        UserError: it cannot be imported, or it has another signature.
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
        raise UserError(f"target: expected package.module:function, got {target!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(name)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise UserError(f"cannot import {target}: {_message(error)}") from error
    if not callable(found):
        raise UserError(f"{target}: expected a function, got one of type {type(found).__name__}")
    called: Callable[..., Any] = found
    return called


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _parameters(rule: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(rule).parameters)
    except (TypeError, ValueError):  # builtins have no signature
        return ()


def _trial(rule: Callable[..., Any], kind: str, options: dict[str, Any]) -> str:
    """Call a rule once with two rows; return what is wrong with the answer, or ""."""
    drafts = all_drafts(plain(), 2 if kind == "path" else 1, 2)
    inputs = [x[:2].clone() if kind == "path" else x[:2, 0].clone() for x in drafts[:3]]
    try:
        with torch.random.fork_rng():
            answer = rule(*inputs, **options)
    except Exception as error:  # noqa: BLE001 - anyone's code
        return f"raised {_message(error)}"
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
    """The pairs of the suite, each with the number of chains and of tokens per chain of its drafts."""
    pairs = suite(full=full)
    if candidate.kind == "chain":
        return [(pair, 1, 3 if candidate.takes_rng else 2) for pair in pairs]
    if not candidate.takes_rng:
        return [(pair, 2, 2) for pair in pairs]
    return [(pair, 2, 1) for pair in pairs] + [(pair, 2, 2) for pair in pairs if full or pair.name in LARGER]


def check(candidate: Candidate, options: RuleCheckOptions, *, full: bool = False) -> Iterator[CheckLine]:
    """Audit a rule on every pair of the suite; `full` is the larger suite."""
    places = shapes(candidate, full=full)
    for pair, chains, length in places:
        drafts = all_drafts(pair, chains, length)
        if candidate.takes_rng:
            yield enumerated(candidate.verify, pair, drafts, options.tolerance)
        else:
            level = options.alpha / len(places)  # Bonferroni
            yield tested(candidate.verify, pair, drafts, options.samples, level, options.seed)


def enumerated(rule: PathRule, pair: ToyPair, drafts: Drafts, tolerance: float = EXACT) -> CheckLine:
    """Compare the exact output distribution of a rule on one pair with the target's."""
    joint, lost = verdicts_alone(rule, drafts)
    total = float(joint.sum()) + sum(lost.values())
    if abs(total - 1) > 1e-6:
        lost = {**lost, f"is not a function of its rng: its outcomes have probability {total:.6g} together": 0.0}
    found = compare(pair, drafts, joint, lost)
    good = found.distance < tolerance and all(chance < tolerance for chance in lost.values())
    good = good and abs(total - 1) <= max(tolerance, 1e-9)
    return CheckLine(
        model=pair.name,
        drafts=_size(drafts),
        method="enumeration",
        total_variation=found.distance,
        worst_cell=found.worst,
        failures=lost,
        verdict="ok" if good else "FAIL",
    )


def _size(drafts: Drafts) -> str:
    return f"{drafts.tokens.shape[1]}x{drafts.tokens.shape[2]}"


def tested(rule: PathRule, pair: ToyPair, drafts: Drafts, samples: int, level: float, seed: int) -> CheckLine:
    """Test the counts of emitted tokens on one pair, continued by the target, against the target's distribution."""
    source = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        seen, why = _sampled(rule, drafts, samples, source)
    length = drafts.p.shape[2]
    counts = _completed(pair, emitted(drafts, seen.double()), length, source)
    expected = target_distribution(pair, length)
    shares = {outcome: count / samples for outcome, count in counts.items()}
    outcome = chi_square_test(counts, expected, level=level, power=POWER) if counts else None
    good = not why and outcome is not None and outcome.p_value > level
    return CheckLine(
        model=pair.name,
        drafts=_size(drafts),
        method="statistics",
        total_variation=total_variation(shares, expected),
        p_value=outcome.p_value if outcome else None,
        detectable=outcome.detectable if outcome else None,
        worst_cell=worst_cell(shares, expected),
        failures={why: 1.0} if why else {},
        verdict="ok" if good else "FAIL",
    )


def _sampled(
    rule: PathRule, drafts: Drafts, samples: int, source: torch.Generator
) -> tuple[Int[Tensor, "B K m V"], str]:
    """How often each (draft, path, accepted, token) occurred; after a failure of the rule, also its description."""
    ways, chains, m, vocab = drafts.p.shape
    seen = torch.zeros(ways * chains * m * vocab, dtype=torch.int64)
    drawn = torch.multinomial(drafts.weight, samples, replacement=True, generator=source)
    for rows in torch.split(drawn, BATCH):
        try:
            verdict = rule(*(x[rows].clone() for x in drafts[:3]))
            answer = torch.stack([x.long() for x in verdict], -1)
        except Exception as error:  # noqa: BLE001 - anyone's code
            return seen.view(drafts.p.shape), f"raised {_message(error)}"
        limits = torch.tensor(drafts.p.shape[1:])
        bad = ((answer < 0) | (answer >= limits)).any(-1)
        if bad.any():
            path, accepted, token = (int(x) for x in answer[bad][0])
            return seen.view(drafts.p.shape), illegal(path, accepted, token, drafts.p.shape)
        at = ((rows * chains + answer[:, 0]) * m + answer[:, 1]) * vocab + answer[:, 2]
        seen += torch.bincount(at, minlength=seen.shape[0])
    return seen.view(drafts.p.shape), ""


def _completed(pair: ToyPair, counts: dict[Context, float], length: int, source: torch.Generator) -> Counter[Context]:
    """Counts of emitted sequences, continued by draws from the target."""
    full: Counter[Context] = Counter()
    todo = [(seq, round(count)) for seq, count in counts.items()]
    while todo:
        seq, count = todo.pop()
        if len(seq) == length:
            full[seq] += count
            continue
        row: Float[Tensor, " V"] = torch.tensor(normal(pair.p(seq)), dtype=torch.float64)
        split = torch.multinomial(row, count, replacement=True, generator=source).bincount(minlength=pair.vocab)
        todo += [((*seq, x), int(n)) for x, n in enumerate(split) if n > 0]
    return full
