"""The audit of the library's own rules: one line for each rule, and for each identity and ordering that theory states.

Lengths are accepted tokens of a round with two drafted tokens (one for selections) in two chains (one for chain rules),
averaged over the suite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof import functional
from draftproof.audit.distributions import (
    Finding,
    PathRule,
    WorstOutcome,
    all_drafts,
    as_paths,
    compare,
    expected_accepted,
    verdicts,
    verdicts_with_shared_noise,
    worst_cell,
)
from draftproof.audit.suite import VOCAB, ToyPair, suite
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.engine.engine import Engine
from draftproof.engine.loop import RoundRngFactory
from draftproof.errors import refuse_unknown
from draftproof.functional.coupling import Selection
from draftproof.functional.nodes import PathVerdict
from draftproof.rng import Rng
from draftproof.sampling import SamplingParams
from draftproof.stoppers.fixed import FixedLength
from draftproof.testing import engine_distribution, target_distribution, total_variation
from draftproof.theory.acceptance import kseq_acceptance, optimal_acceptance
from draftproof.theory.lengths import full_information_length
from draftproof.verifiers.base import Verifier
from draftproof.verifiers.chain import gumbel_verifier
from draftproof.verifiers.greedy import GreedyBlockVerifier

EXACT = 1e-12
SEARCH = 1e-4  # K-SEQ's search stops this far above the root, which costs acceptance and keeps the rule exact
DRAFTED, DRAWS = 2, 2
IN_ENGINE = ("trap", "zeros", "disjoint", "one-hot p")  # pairs for rules that are enumerated in the engine, by --quick
# a rule, an equal rule, number of chains, number of tokens
IDENTITIES = (
    ("spectr", "token", 1, DRAFTED),
    ("multi_round", "token", 1, DRAFTED),
    ("kseq", "token", 1, 1),
    ("traversal", "block", 1, 3),
    ("trie_block", "block", 1, 3),
    ("multi_path", "block", 1, 3),
    ("trie_block", "kseq", DRAWS, 1),
    ("trie_block", "kseq", 3, 1),
)
# a rule, its chains, a rule that accepts no more, the chains of that rule, tolerance
ORDERINGS = (
    ("block", 1, "token", 1, EXACT),
    ("greedy_block", 1, "block", 1, EXACT),
    ("token", 1, "gumbel", 1, EXACT),
    ("gumbel", 1, "match", 1, EXACT),
    ("trie_block", DRAWS, "block", 1, SEARCH),
    ("trie_block", DRAWS, "spectr", DRAWS, SEARCH),
    ("trie_block", DRAWS, "traversal", DRAWS, SEARCH),
)


@dataclass(frozen=True)
class Rule:
    """A rule, with the signature of a path rule, and how it is audited."""

    name: str
    verify: PathRule
    # (chains, tokens) of the drafts on which it is enumerated; lengths are reported for the first one
    shapes: tuple[tuple[int, int], ...]
    lossless: bool = True  # whether it is declared lossless
    tolerance: float = EXACT  # largest total variation of a lossless rule
    # makes the verifier of a rule whose rounds depend on each other, so that the engine is enumerated instead of one
    # call; None for other rules
    rounds: Callable[[], Verifier] | None = None
    shared_noise: bool = False  # whether target and draft draw with the same noise


@dataclass(frozen=True)
class RuleLine:
    """The result for a rule."""

    rule: str
    lossless: bool
    total_variation: float  # the largest total variation over the suite, on the pair `worst_model`
    worst_model: str
    worst_cell: WorstOutcome  # the outcome whose probability differs most on this pair
    accepted: float  # expected accepted tokens, mean over the suite
    drafted: str  # chains x tokens of the drafts for `accepted`
    against_token: float  # `accepted` divided by that of token verification, for one chain of the same length
    # `accepted` divided by an upper bound for all rules: the full-information bound for one chain, alpha_k for several
    # chains of one token.
    of_optimum: float | None
    tolerance: float | None  # the upper limit of the total variation of a lossless rule
    verdict: str  # "ok", "FAIL" or "lossy"

    def to_dict(self) -> dict[str, Any]:
        """The line as values for JSON."""
        return {"kind": "rule", **asdict(self), "worst_cell": self.worst_cell._asdict()}


@dataclass(frozen=True)
class ClaimLine:
    """The result for a statement about two rules: the largest distance of an identity, an ordering's least margin."""

    kind: str
    claim: str
    value: float
    worst_model: str
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """The line as values for JSON."""
        return asdict(self)


Line = RuleLine | ClaimLine


def _as_path(found: Selection, draws: int, p: Float[Tensor, "B K m V"], rng: Rng) -> PathVerdict:
    """A selection as a verdict on chains of one token; the bonus token comes from p, or else is the residual's."""
    none = found.accepted >= draws
    path = found.accepted.masked_fill(none, 0)
    settled = torch.nn.functional.one_hot(found.token, p.shape[-1]).to(p)
    after = p[torch.arange(p.shape[0]), path, 1]
    token = rng.categorical(torch.where(none.unsqueeze(-1), settled, after))
    return PathVerdict(path, (~none).long(), token)


def kseq_rule(
    tokens: Int[Tensor, "B K n"], q: Float[Tensor, "B K n V"], p: Float[Tensor, "B K m V"], *, rng: Rng, **_: Any
) -> PathVerdict:
    """K-SEQ on chains of one token; after an accepted token the bonus token comes from p."""
    found = functional.kseq_select(tokens[:, :, 0], q[:, 0, 0], p[:, 0, 0], rng=rng, validate=False)
    return _as_path(found, tokens.shape[1], p, rng)


def otm_rule(
    tokens: Int[Tensor, "B K n"], q: Float[Tensor, "B K n V"], p: Float[Tensor, "B K m V"], *, rng: Rng, **_: Any
) -> PathVerdict:
    """The optimal coupling on chains of one token; all drafts have the same p and q."""
    plan = functional.otm_plan(p[0, 0, 0], q[0, 0, 0], tokens.shape[1])
    found = functional.otm_select(tokens[:, :, 0], plan, rng=rng)
    return _as_path(found, tokens.shape[1], p, rng)


def _chain(name: str, rule: Callable[..., Any], **options: Any) -> Rule:
    return Rule(name, as_paths(rule), ((1, DRAFTED), (1, 3)), **options)


def _paths(name: str, rule: PathRule) -> Rule:
    return Rule(name, rule, ((DRAWS, DRAFTED), (DRAWS, 1), (3, 1), (1, 3)))


def all_rules() -> dict[str, Rule]:
    """Every rule by name; the optimal coupling only if its solver is installed."""
    lossy = {"lossless": False}
    found = [
        _chain("token", functional.token_verify),
        _chain("block", functional.block_verify),
        Rule("greedy_block", as_paths(functional.greedy_block_verify), ((1, DRAFTED),), rounds=GreedyBlockVerifier),
        _chain("match", functional.match_verify),
        _chain("gumbel", functional.match_verify, rounds=gumbel_verifier, shared_noise=True),
        Rule("kseq", kseq_rule, ((DRAWS, 1), (3, 1))),
        *([Rule("otm", otm_rule, ((DRAWS, 1), (3, 1)))] if find_spec("scipy") else []),
        _paths("spectr", functional.spectr_verify),
        _paths("multi_round", functional.multi_round_verify),
        _paths("traversal", functional.traversal_verify),
        _paths("trie_block", functional.trie_block_verify),
        _paths("multi_path", functional.multi_path_verify),
        _chain("last_token", functional.last_token_verify, **lossy),
        _chain("typical", functional.typical_verify, **lossy),
        _chain("mixture", partial(functional.mixture_verify, epsilon=0.1), **lossy),
        _chain("mentored", partial(functional.mentored_verify, budget=0.1), **lossy),
    ]
    return {rule.name: rule for rule in found}


class RuleAudit:
    """Enumerations of rules on the suite, each made once; rules with a state in the engine, on some of the pairs."""

    def __init__(self, pairs: Sequence[ToyPair], in_engine: Collection[str] | None = None) -> None:
        self.pairs = pairs
        self.rules = all_rules()
        self.joint = cache(self._joint)
        self._in_engine = in_engine

    def _joint(self, name: str, place: int, chains: int, length: int) -> Float[Tensor, "B K m V"]:
        drafts = all_drafts(self.pairs[place], chains, length)
        if self.rules[name].shared_noise:
            return verdicts_with_shared_noise(self.rules[name].verify, self.pairs[place], drafts)
        return verdicts(self.rules[name].verify, drafts, validate=False)

    def length(self, name: str, place: int, chains: int, length: int) -> float:
        """Expected accepted tokens."""
        return expected_accepted(self.joint(name, place, chains, length))

    def _findings(self, rule: Rule) -> Iterator[tuple[ToyPair, Finding]]:
        for place, pair in enumerate(self.pairs):
            if rule.rounds and (self._in_engine is None or pair.name in self._in_engine):
                yield pair, engine_finding(pair, rule.rounds)
            for chains, length in () if rule.rounds else rule.shapes:
                joint = self.joint(rule.name, place, chains, length)
                yield pair, compare(pair, all_drafts(pair, chains, length), joint)

    def line(self, rule: Rule) -> RuleLine:
        """Total variation and lengths of a rule."""
        pair, worst = max(self._findings(rule), key=lambda found: found[1].distance)
        chains, length = rule.shapes[0]
        accepted = self._mean(partial(self.length, rule.name, chains=chains, length=length))
        token = self._mean(partial(self.length, "token", chains=1, length=length))
        good = worst.distance < rule.tolerance
        return RuleLine(
            rule=rule.name,
            lossless=rule.lossless,
            total_variation=worst.distance,
            worst_model=pair.name,
            worst_cell=worst.worst,
            accepted=accepted,
            drafted=f"{chains}x{length}",
            against_token=accepted / token,
            of_optimum=self._share(rule),
            tolerance=rule.tolerance if rule.lossless else None,
            verdict="lossy" if not rule.lossless else "ok" if good else "FAIL",
        )

    def _mean(self, of_pair: Callable[..., float]) -> float:
        return math.fsum(of_pair(place=place) for place in range(len(self.pairs))) / len(self.pairs)

    def _share(self, rule: Rule) -> float | None:
        """Accepted tokens divided by the upper bound for lossless rules."""
        if not rule.lossless:
            return None
        chains, length = rule.shapes[0]
        if chains == 1:
            best = self._mean(lambda place: full_information_length(self.pairs[place].p, self.pairs[place].q, length))
        else:
            length = 1
            best = self._mean(lambda place: float(optimal_acceptance(*_root(self.pairs[place]), chains)))
        return self._mean(partial(self.length, rule.name, chains=chains, length=length)) / best

    def identities(self) -> Iterator[ClaimLine]:
        """Rules that must be equal for single chains, or for chains of one token."""
        for one, other, chains, length in IDENTITIES:
            drafts = f"one chain of {length}" if chains == 1 else f"{chains} chains of {length}"
            distances = [self._distance(one, other, place, chains, length) for place in range(len(self.pairs))]
            found = max(distances)
            worst = self.pairs[distances.index(found)].name
            yield ClaimLine(
                "identity", f"{one} = {other} for {drafts}", found, worst, "ok" if found < EXACT else "FAIL"
            )

    def _distance(self, one: str, other: str, place: int, chains: int, length: int) -> float:
        """Total variation of two joint distributions of draft, accepted tokens and bonus token; the path may differ."""
        a, b = (self.joint(name, place, chains, length).sum(1) for name in (one, other))
        return 0.5 * float((a - b).abs().sum())

    def orderings(self) -> Iterator[ClaimLine]:
        """Expected accepted tokens in the order that theory states, on every pair."""
        places = range(len(self.pairs))
        for more, chains, less, fewer, slack in ORDERINGS:
            lengths = ((self.length(more, at, chains, DRAFTED), self.length(less, at, fewer, DRAFTED)) for at in places)
            yield self._ordering(f"{more} accepts at least as much as {less}", [a - b for a, b in lengths], slack)
        closed = [float(kseq_acceptance(*_root(pair), DRAWS)) for pair in self.pairs]
        gaps = [-abs(self.length("kseq", at, DRAWS, 1) - closed[at]) for at in places]
        yield self._ordering("kseq accepts as much as its closed form", gaps, SEARCH)

    def _ordering(self, claim: str, margins: Sequence[float], slack: float) -> ClaimLine:
        found = min(margins)
        worst = self.pairs[margins.index(found)].name
        return ClaimLine("ordering", claim, found, worst, "ok" if found > -slack else "FAIL")


def _root(pair: ToyPair) -> tuple[Float[Tensor, "1 V"], Float[Tensor, "1 V"]]:
    return pair.p(()).unsqueeze(0), pair.q(()).unsqueeze(0)


def engine_finding(pair: ToyPair, verifier: Callable[[], Verifier], most: int = DRAFTED + 1) -> Finding:
    """Compare the distribution of whole outputs of an engine with a rule with the target's."""

    def make(round_rng: RoundRngFactory) -> Engine:
        drafter = ModelDrafter(DraftModel(pair.draft, vocab_size=VOCAB), FixedLength(DRAFTED))
        return Engine(pair.target, drafter, verifier(), round_rng=round_rng)

    params = SamplingParams(max_tokens=most)
    found, expected = engine_distribution(make, (0,), params), target_distribution(pair.target, (0,), params)
    return Finding(total_variation(found, expected), worst_cell(found, expected), math.nan, {})


def audit_rules(names: Sequence[str] = (), *, full: bool = False) -> Iterator[Line]:
    """Audit some rules by name, or all rules with the identities and orderings between them."""
    audit = RuleAudit(suite(full=full), None if full else IN_ENGINE)
    for name in names:
        refuse_unknown("rule", name, audit.rules)
    return _lines(audit, names)


def _lines(audit: RuleAudit, names: Sequence[str]) -> Iterator[Line]:
    for name in dict.fromkeys(names or audit.rules):
        yield audit.line(audit.rules[name])
    if not names:
        yield from audit.identities()
        yield from audit.orderings()


def count_lines(names: Sequence[str] = ()) -> int:
    """Number of lines of `audit_rules`."""
    return len(set(names)) if names else len(all_rules()) + len(IDENTITIES) + len(ORDERINGS) + 1
