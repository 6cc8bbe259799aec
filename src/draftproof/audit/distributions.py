"""The exact output distribution of a rule on toy models, over all drafts, choices of the rule and continuations.

There are two ways to enumerate a rule. `verdicts` runs it on all drafts at once and gives every row the same choices.
This is fast, and right for rules whose rows are independent and whose draws have one leading row for each.
`verdicts_alone` runs the rule on one draft at a time, and is right for any rule. A chain rule is enumerated as a path
rule with one chain (`as_paths`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.audit.suite import Context
from draftproof.functional.nodes import PathVerdict
from draftproof.rng import Purpose, Rng
from draftproof.testing import EnumeratedNoise, EnumeratingRng, exact_distribution, next_script, total_variation

Distribution = dict[Context, float]
PathRule = Callable[..., PathVerdict]
Outcome = TypeVar("Outcome")


@runtime_checkable
class Pair(Protocol):
    """A target and a draft model that are small enough to enumerate, as `draftproof.audit.suite.ToyPair`."""

    @property
    def vocab(self) -> int:
        """Number of tokens."""

    def p(self, context: Context, /) -> Tensor:
        """The target's next-token row."""

    def q(self, context: Context, /) -> Tensor:
        """The draft's next-token row."""


class Drafts(NamedTuple):
    """All ways to draw K i.i.d. chains of n tokens."""

    tokens: Int[Tensor, "B K n"]  # token ids, for each way of drawing and each chain
    q: Float[Tensor, "B K n V"]  # the draft's row before each token
    p: Float[Tensor, "B K m V"]  # the target's row before each token and after the last one
    weight: Float[Tensor, " B"]  # probability of each way of drawing


class WorstOutcome(NamedTuple):
    """The outcome whose probability differs most: its token ids, and its probability under the target and the rule."""

    outcome: Context
    expected: float
    found: float


class Finding(NamedTuple):
    """The result of enumerating a rule on one pair."""

    distance: float  # total variation from the target's distribution of the first n + 1 tokens
    worst: WorstOutcome  # the outcome that differs most
    accepted: float  # expected number of accepted tokens
    lost: dict[str, float]  # descriptions of failures of the rule, with their probabilities


def all_drafts(pair: Pair, chains: int, length: int) -> Drafts:
    """Every group of chains that the draft model can draw, with its probability."""
    single = _chains(pair, length)
    groups = list(itertools.product(single, repeat=chains))
    tokens = torch.tensor([[seq for seq, _ in group] for group in groups]).reshape(len(groups), chains, length)
    weight = torch.tensor([[w for _, w in group] for group in groups], dtype=torch.float64).prod(-1)
    return Drafts(tokens, *rows_along(pair, tokens), weight)


def _chains(pair: Pair, length: int) -> list[tuple[Context, float]]:
    found: list[tuple[Context, float]] = [((), 1.0)]
    for _ in range(length):
        grown = ((seq, w, normal(pair.q(seq))) for seq, w in found)
        found = [((*seq, x), w * row[x]) for seq, w, row in grown for x in range(pair.vocab) if row[x] > 0]
    return found


def normal(row: Float[Tensor, " V"]) -> list[float]:
    """A row as numbers that sum to 1 in float64, also if the row was rounded."""
    wide = row.double()
    return [float(x) for x in wide / wide.sum()]


def rows_along(pair: Pair, tokens: Int[Tensor, "B K n"]) -> tuple[Tensor, Tensor]:
    """q [B, K, n, V] and p [B, K, n + 1, V] along the chains."""
    ways, chains, n = tokens.shape
    flat = [tuple(seq) for seq in tokens.reshape(-1, n).tolist()]
    q = torch.stack([torch.stack([pair.q(seq[:i]) for i in range(n)]) for seq in flat])
    p = torch.stack([torch.stack([pair.p(seq[:i]) for i in range(n + 1)]) for seq in flat])
    return q.view(ways, chains, n, -1), p.view(ways, chains, n + 1, -1)


def as_paths(rule: Callable[..., Any]) -> PathRule:
    """A chain rule on [B, n] as a path rule on [B, 1, n]."""

    def run(
        tokens: Int[Tensor, "B K n"], q: Float[Tensor, "B K n V"] | None, p: Float[Tensor, "B K m V"], **options: Any
    ) -> PathVerdict:
        if "lengths" in options:
            options["lengths"] = options["lengths"][:, 0]
        accepted, token = rule(tokens[:, 0], None if q is None else q[:, 0], p[:, 0], **options)
        return PathVerdict(torch.zeros_like(accepted), accepted, token)

    return run


class SharedRng:
    """An Rng that gives all rows of a batch the same choices, and keeps the probability of these choices in each row.

    A row for which a choice was impossible has weight 0 from then on; its draws are not checked and count for nothing.
    """

    def __init__(self, script: tuple[int, ...], rows: int) -> None:
        self._script = script
        self.taken: list[int] = []
        self.options: list[tuple[int, ...]] = []
        self.weight = torch.ones(rows, dtype=torch.float64)

    def _choose(self, probs: Float[Tensor, "B options"]) -> int:
        possible = (probs * self.weight.unsqueeze(-1) > 0).any(0).nonzero().flatten().tolist() or [0]
        choice = possible[0]
        if len(possible) > 1:
            step = len(self.taken)
            choice = self._script[step] if step < len(self._script) else choice
            self.taken.append(choice)
            self.options.append(tuple(possible))
        self.weight = self.weight * probs[:, choice]
        return int(choice)

    def _clean(self, rows: Tensor) -> Tensor:
        """Rows in float64, with zeros in rows without weight; refuse values that are no probabilities."""
        impossible = (self.weight <= 0).reshape(-1, *[1] * (rows.ndim - 1))
        clean = rows.double().masked_fill(impossible, 0)
        if not (torch.isfinite(clean).all() and (clean >= 0).all()):
            raise ValueError(f"a draw from {clean.tolist()}: probabilities must be finite and not negative")
        return clean

    def bernoulli(self, prob: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """Each column is a choice between no and yes."""
        flat = self._clean(prob).reshape(prob.shape[0], -1)
        if (flat > 1).any():
            raise ValueError(f"probability of a decision: expected 0 to 1, got {float(flat.max())}")
        picks = [self._choose(torch.stack([1 - x, x], -1)) for x in flat.T]
        return torch.tensor(picks, dtype=torch.bool).reshape(1, *prob.shape[1:]).expand(prob.shape)

    def categorical(self, weights: Float[Tensor, "*rows vocab"]) -> Int[Tensor, "*rows"]:
        """Each column is a choice among the indices that have weight in some row."""
        rows = self._clean(weights).reshape(weights.shape[0], -1, weights.shape[-1])
        total = rows.sum(-1, keepdim=True)
        if ((total <= 0).squeeze(-1) & (self.weight > 0).unsqueeze(-1)).any():
            raise ValueError("a draw from weights without mass")
        rows = rows / total.masked_fill(total <= 0, 1)
        picks = [self._choose(rows[:, i]) for i in range(rows.shape[1])]
        shape = weights.shape[:-1]
        return torch.tensor(picks, dtype=torch.int64).reshape(1, *shape[1:]).expand(shape)


def walk(program: Callable[[Rng], Outcome], rows: int) -> Iterator[tuple[Tensor, Outcome]]:
    """Every outcome of a vectorised program: the weight of each row, and what the program returned."""
    script: tuple[int, ...] | None = ()
    while script is not None:
        rng = SharedRng(script, rows)
        outcome = program(rng)
        yield rng.weight, outcome
        script = next_script(rng.taken, rng.options)


def verdicts(rule: PathRule, drafts: Drafts, **options: Any) -> Float[Tensor, "B K m V"]:
    """The joint distribution of (draft, path, accepted, token), with all drafts enumerated together."""
    ways, chains, m, vocab = drafts.p.shape
    joint = torch.zeros(ways * chains * m * vocab, dtype=torch.float64)
    base = torch.arange(ways)
    tokens, q, p, weight = drafts
    for chance, (path, accepted, token) in walk(lambda rng: rule(tokens, q, p, rng=rng, **options), ways):
        at = ((base * chains + path) * m + accepted) * vocab + token
        joint.index_add_(0, at, chance * weight)
    return joint.view(ways, chains, m, vocab)


def verdicts_alone(rule: PathRule, drafts: Drafts) -> tuple[Float[Tensor, "B K m V"], dict[str, float]]:
    """The joint distribution of `verdicts` with one draft for each call, and the failures with their probabilities.

    All these probabilities sum to 1 if the rule's only randomness is the Rng.
    """
    joint, lost = torch.zeros(drafts.p.shape, dtype=torch.float64), dict[str, float]()
    for b in range(drafts.tokens.shape[0]):
        tokens, q, p = (x[b : b + 1] for x in drafts[:3])
        found = exact_distribution(lambda rng, inputs=(tokens, q, p): _attempt(rule, inputs, rng))  # type: ignore[misc]
        for outcome, chance in found.items():
            if isinstance(outcome, str):
                lost[outcome] = lost.get(outcome, 0.0) + chance * float(drafts.weight[b])
            else:
                joint[b][outcome] += chance * drafts.weight[b]
    return joint, lost


def verdicts_with_shared_noise(rule: PathRule, pair: Pair, drafts: Drafts) -> Float[Tensor, "B K m V"]:
    """The joint distribution of `verdicts` for one chain that is drawn with the noise of the rule's own draws."""
    ways, length = {tuple(chain[0]): way for way, chain in enumerate(drafts.tokens.tolist())}, drafts.tokens.shape[-1]

    def program(rng: EnumeratingRng) -> tuple[int, int, int, int]:
        noise, drawn = EnumeratedNoise(rng).round([0], [0]), tuple[int, ...]()
        for step in range(length):
            drawn += (int(noise.at(Purpose.DRAFT, step).categorical(pair.q(drawn).unsqueeze(0))),)
        way = ways[drawn]
        tokens, q, p = (each[way : way + 1] for each in drafts[:3])
        path, accepted, token = (int(x) for x in rule(tokens, q, p, rng=noise.at(Purpose.VERIFY), validate=False))
        return way, path, accepted, token

    joint = torch.zeros(drafts.p.shape, dtype=torch.float64)
    for outcome, chance in exact_distribution(program).items():
        joint[outcome] += chance
    return joint


def _attempt(rule: PathRule, inputs: tuple[Tensor, Tensor, Tensor], rng: Rng) -> tuple[int, int, int] | str:
    """(path, accepted, token) of a single draft, or a description of the failure."""
    tokens, q, p = (x.clone() for x in inputs)
    try:
        path, accepted, token = (int(x) for x in rule(tokens, q, p, rng=rng))
    except Exception as error:  # noqa: BLE001 - the rule can be anyone's, and what it raises is a result
        return f"raised {type(error).__name__}: {error}"
    return illegal(path, accepted, token, p.shape) or (path, accepted, token)


def illegal(path: int, accepted: int, token: int, shape: torch.Size) -> str:
    """What is wrong with a verdict, or ""; `shape` is that of p, [B, K, n + 1, V]."""
    for name, value, limit in zip(("path", "accepted", "token"), (path, accepted, token), shape[1:], strict=True):
        if not 0 <= value < limit:
            return f"returned {name} {value}, not 0 to {limit - 1}"
    return ""


def complete(pair: Pair, sequences: Distribution, length: int) -> Distribution:
    """Continue emitted sequences with the target up to a length, and cut longer ones."""
    full: Distribution = {}
    todo = [(seq[:length], weight) for seq, weight in sequences.items()]
    while todo:
        seq, weight = todo.pop()
        if len(seq) == length:
            full[seq] = full.get(seq, 0.0) + weight
            continue
        row = normal(pair.p(seq))
        todo += [((*seq, x), weight * chance) for x, chance in enumerate(row) if chance > 0]
    return full


def target_distribution(pair: Pair, length: int) -> Distribution:
    """The target's distribution of the first `length` tokens."""
    return complete(pair, {(): 1.0}, length)


def emitted(drafts: Drafts, joint: Float[Tensor, "B K m V"]) -> Distribution:
    """The distribution of the tokens that a rule emits in its round: accepted tokens and the bonus token."""
    found: Distribution = {}
    tokens = drafts.tokens.tolist()
    for at in joint.nonzero().tolist():
        b, path, accepted, token = at
        seq = (*tokens[b][path][:accepted], token)
        found[seq] = found.get(seq, 0.0) + float(joint[tuple(at)])
    return found


def expected_accepted(joint: Float[Tensor, "B K m V"]) -> float:
    """The expected number of accepted tokens."""
    return float((joint.sum((0, 1, 3)) * torch.arange(joint.shape[2])).sum())


def worst_cell(found: Distribution, expected: Distribution) -> WorstOutcome:
    """The outcome whose probability differs most between two distributions."""
    at = max({*found, *expected}, key=lambda seq: abs(found.get(seq, 0.0) - expected.get(seq, 0.0)))
    return WorstOutcome(at, expected.get(at, 0.0), found.get(at, 0.0))


def compare(
    pair: Pair, drafts: Drafts, joint: Float[Tensor, "B K m V"], lost: dict[str, float] | None = None
) -> Finding:
    """Compare the emitted tokens of a rule, continued by the target, with the target's distribution."""
    length = joint.shape[2]
    found, expected = complete(pair, emitted(drafts, joint), length), target_distribution(pair, length)
    return Finding(total_variation(found, expected), worst_cell(found, expected), expected_accepted(joint), lost or {})
