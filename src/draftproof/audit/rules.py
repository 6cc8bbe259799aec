"""The audit of the library's own rules: a line for each rule, each identity and each ordering that theory states.

Knows: the rules, the shapes of drafts they are enumerated on, what must hold. Does not know: how a rule works, how a
line is printed.

Lengths are those of a round of two drafted tokens (one for selections) in two chains (one for chain rules), averaged
over the suite.
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
    expected_accepted,
    judge,
    verdicts,
    worst_cell,
)
from draftproof.audit.suite import VOCAB, ToyPair, suite
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.engine.engine import Engine
from draftproof.engine.loop import RoundRngFactory
from draftproof.errors import UserError
from draftproof.functional.coupling import Selection
from draftproof.functional.nodes import PathVerdict
from draftproof.rng import Rng
from draftproof.sampling import SamplingParams
from draftproof.stoppers.fixed import FixedLength
from draftproof.testing import engine_distribution, total_variation
from draftproof.testing import target_distribution as output_law
from draftproof.theory.acceptance import kseq_acceptance, optimal_acceptance
from draftproof.theory.lengths import full_information_length
from draftproof.verifiers.greedy import GreedyBlockVerifier

EXACT = 1e-12
SEARCH = 1e-4  # K-SEQ's root search stops that far above the root, which costs acceptance and no exactness
DRAFTED, DRAWS = 2, 2
ENGINEWISE = ("trap", "zeros", "disjoint", "one-hot p")
# rule, the rule it is, chains, tokens
IDENTITIES = (
    ("spectr", "token", 1, DRAFTED),
    ("multi_round", "token", 1, DRAFTED),
    ("kseq", "token", 1, 1),
    ("traversal", "block", 1, 3),
    ("trie_block", "block", 1, 3),
    ("trie_block", "kseq", DRAWS, 1),
    ("trie_block", "kseq", 3, 1),
)
# rule, its chains, the rule it accepts at least as much as, that one's chains, how far rounding may put it below
ORDERINGS = (
    ("block", 1, "token", 1, EXACT),
    ("greedy_block", 1, "block", 1, EXACT),
    ("token", 1, "match", 1, EXACT),
    ("trie_block", DRAWS, "block", 1, SEARCH),
    ("trie_block", DRAWS, "spectr", DRAWS, SEARCH),
    ("trie_block", DRAWS, "traversal", DRAWS, SEARCH),
)


@dataclass(frozen=True)
class Rule:
    """A rule and how it is audited.

    Attributes:
        name: in Python, on the command line and here.
        verify: as a path rule.
        shapes: (chains, tokens) of the drafts it is enumerated on; the first one's lengths are reported.
        lossless: as declared.
        tolerance: largest total variation of a lossless rule.
        rounds: its law holds over several rounds only, so the engine is enumerated in place of one call.
    """

    name: str
    verify: PathRule
    shapes: tuple[tuple[int, int], ...]
    lossless: bool = True
    tolerance: float = EXACT
    rounds: bool = False


@dataclass(frozen=True)
class RuleLine:
    """What was found of a rule.

    Attributes:
        rule: its name.
        lossless: as declared.
        total_variation: the largest over the suite.
        worst_model: the pair it is largest on.
        worst_cell: the outcome on which the law differs most there.
        accepted: expected accepted tokens, mean over the suite.
        drafted: chains x tokens of the drafts of that number.
        against_token: as a multiple of token verification's, for one chain of as many tokens.
        of_optimum: as a share of what no rule exceeds: the full-information bound for one chain, alpha_k for several
            chains of one token.
        tolerance: the total variation that a lossless rule must stay below.
        verdict: "ok", "FAIL" or "lossy".
    """

    rule: str
    lossless: bool
    total_variation: float
    worst_model: str
    worst_cell: WorstOutcome
    accepted: float
    drafted: str
    against_token: float
    of_optimum: float | None
    tolerance: float | None
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"kind": "rule", **asdict(self), "worst_cell": self.worst_cell._asdict()}


@dataclass(frozen=True)
class ClaimLine:
    """What was found of a statement about several rules.

    Attributes:
        kind: "identity" or "ordering".
        claim: the statement.
        value: an identity's largest total variation, an ordering's smallest margin.
        worst_model: the pair it comes from.
        verdict: "ok" or "FAIL".
    """

    kind: str
    claim: str
    value: float
    worst_model: str
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


Line = RuleLine | ClaimLine


def _as_path(found: Selection, draws: int) -> PathVerdict:
    """A selection as the verdict on chains of one token: a token from the residual is the bonus token."""
    none = found.accepted >= draws
    return PathVerdict(found.accepted.masked_fill(none, 0), (~none).long(), found.token)


def kseq_rule(
    tokens: Int[Tensor, "B K n"], q: Float[Tensor, "B K n V"], p: Float[Tensor, "B K m V"], *, rng: Rng, **_: Any
) -> PathVerdict:
    """K-SEQ on chains of one token; after an accepted one the bonus token comes from p."""
    found = functional.kseq_select(tokens[:, :, 0], q[:, 0, 0], p[:, 0, 0], rng=rng, validate=False)
    return _with_bonus(_as_path(found, tokens.shape[1]), p, rng)


def otm_rule(
    tokens: Int[Tensor, "B K n"], q: Float[Tensor, "B K n V"], p: Float[Tensor, "B K m V"], *, rng: Rng, **_: Any
) -> PathVerdict:
    """The optimal coupling on chains of one token; all rows share the root's vectors."""
    plan = functional.otm_plan(p[0, 0, 0], q[0, 0, 0], tokens.shape[1])
    found = functional.otm_select(tokens[:, :, 0], plan, rng=rng)
    return _with_bonus(_as_path(found, tokens.shape[1]), p, rng)


def _with_bonus(found: PathVerdict, p: Float[Tensor, "B K m V"], rng: Rng) -> PathVerdict:
    """Follow an accepted token by one from p; the token of a refusal is settled."""
    settled = torch.nn.functional.one_hot(found.token, p.shape[-1]).to(p)
    after = p[torch.arange(p.shape[0]), found.path, 1]
    return found._replace(token=rng.categorical(torch.where((found.accepted > 0).unsqueeze(-1), after, settled)))


def _chain(name: str, rule: Callable[..., Any], **options: Any) -> Rule:
    return Rule(name, as_paths(rule), ((1, DRAFTED), (1, 3)), **options)


def _paths(name: str, rule: PathRule) -> Rule:
    return Rule(name, rule, ((DRAWS, DRAFTED), (DRAWS, 1), (3, 1), (1, 3)))


def all_rules() -> dict[str, Rule]:
    """Every rule by name; the optimal coupling only where its solver is installed."""
    lossy = {"lossless": False}
    found = [
        _chain("token", functional.token_verify),
        _chain("block", functional.block_verify),
        Rule("greedy_block", as_paths(functional.greedy_block_verify), ((1, DRAFTED),), rounds=True),
        _chain("match", functional.match_verify),
        Rule("kseq", kseq_rule, ((DRAWS, 1), (3, 1))),
        *([Rule("otm", otm_rule, ((DRAWS, 1), (3, 1)))] if find_spec("scipy") else []),
        _paths("spectr", functional.spectr_verify),
        _paths("multi_round", functional.multi_round_verify),
        _paths("traversal", functional.traversal_verify),
        _paths("trie_block", functional.trie_block_verify),
        _chain("last_token", functional.last_token_verify, **lossy),
        _chain("typical", functional.typical_verify, **lossy),
        _chain("mixture", partial(functional.mixture_verify, epsilon=0.1), **lossy),
        _chain("mentored", partial(functional.mentored_verify, budget=0.1), **lossy),
    ]
    return {rule.name: rule for rule in found}


class Audit:
    """Findings of rules on the suite, made once each.

    Args:
        pairs: the suite.
        enginewise: names of the pairs on which rules with a state are audited, through the engine; all when None.
    """

    def __init__(self, pairs: Sequence[ToyPair], enginewise: Collection[str] | None = None) -> None:
        self.pairs = pairs
        self.rules = all_rules()
        self.law = cache(self._law)
        self._enginewise = enginewise

    def _law(self, name: str, place: int, chains: int, length: int) -> Float[Tensor, "B K m V"]:
        """The joint law of (draft, path, accepted, token) of a rule on a pair."""
        drafts = all_drafts(self.pairs[place], chains, length)
        return verdicts(self.rules[name].verify, drafts, validate=False)

    def length(self, name: str, place: int, chains: int, length: int) -> float:
        """Expected accepted tokens."""
        return expected_accepted(self.law(name, place, chains, length))

    def _findings(self, rule: Rule) -> Iterator[tuple[ToyPair, Finding]]:
        """The laws of a rule on every pair and shape."""
        for place, pair in enumerate(self.pairs):
            if rule.rounds and (self._enginewise is None or pair.name in self._enginewise):
                yield pair, engine_finding(pair)
            for chains, length in () if rule.rounds else rule.shapes:
                yield pair, judge(pair, all_drafts(pair, chains, length), self.law(rule.name, place, chains, length))

    def line(self, rule: Rule) -> RuleLine:
        """Law and lengths of a rule."""
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
        """Accepted tokens as a share of what no lossless rule exceeds."""
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
        """Rules that must be one rule where drafts are single chains, or chains of one token."""
        for one, other, chains, length in IDENTITIES:
            drafts = f"one chain of {length}" if chains == 1 else f"{chains} chains of {length}"
            yield self._identity(f"{one} = {other} for {drafts}", one, other, chains, length)

    def _identity(self, claim: str, one: str, other: str, chains: int, length: int) -> ClaimLine:
        """Compare the joint laws of draft, accepted tokens and bonus token; which of equal chains won is left open."""

        def distance(place: int) -> float:
            a, b = (self.law(name, place, chains, length).sum(1) for name in (one, other))
            return 0.5 * float((a - b).abs().sum())

        worst = max(range(len(self.pairs)), key=distance)
        found = distance(worst)
        verdict = "ok" if found < EXACT else "FAIL"
        return ClaimLine("identity", claim, found, self.pairs[worst].name, verdict)

    def orderings(self) -> Iterator[ClaimLine]:
        """Expected lengths in the order that theory states, on every pair."""
        for more, chains, less, fewer, slack in ORDERINGS:
            margin = partial(self._margin, more, chains, less, fewer)
            yield self._ordering(f"{more} accepts at least what {less} does", margin, slack)
        yield self._ordering("kseq accepts what its closed form says", self._kseq_gap, SEARCH)

    def _margin(self, more: str, chains: int, less: str, fewer: int, place: int) -> float:
        return self.length(more, place, chains, DRAFTED) - self.length(less, place, fewer, DRAFTED)

    def _kseq_gap(self, place: int) -> float:
        p, q = _root(self.pairs[place])
        return -abs(self.length("kseq", place, DRAWS, 1) - float(kseq_acceptance(p, q, DRAWS)))

    def _ordering(self, claim: str, margin: Callable[[int], float], slack: float) -> ClaimLine:
        worst = min(range(len(self.pairs)), key=margin)
        found = margin(worst)
        return ClaimLine("ordering", claim, found, self.pairs[worst].name, "ok" if found > -slack else "FAIL")


def _root(pair: ToyPair) -> tuple[Float[Tensor, "1 V"], Float[Tensor, "1 V"]]:
    return pair.p(()).unsqueeze(0), pair.q(()).unsqueeze(0)


def engine_finding(pair: ToyPair, most: int = DRAFTED + 1) -> Finding:
    """The law of whole outputs of an engine under greedy block verification, whose state travels between rounds."""

    def make(round_rng: RoundRngFactory) -> Engine:
        drafter = ModelDrafter(DraftModel(pair.draft, vocab_size=VOCAB), FixedLength(DRAFTED))
        return Engine(pair.target, drafter, GreedyBlockVerifier(), round_rng=round_rng)

    params = SamplingParams(max_tokens=most)
    found, wanted = engine_distribution(make, (0,), params), output_law(pair.target, (0,), params)
    return Finding(total_variation(found, wanted), worst_cell(found, wanted), math.nan, {})


def audit_rules(names: Sequence[str] = (), *, full: bool = False) -> Iterator[Line]:
    """Audit rules by name, or all of them and with them the identities and orderings between them.

    Args:
        names: of rules; all when empty.
        full: the larger suite.

    Raises:
        UserError: an unknown name.
    """
    audit = Audit(suite(full=full), None if full else ENGINEWISE)
    for name in names:
        if name not in audit.rules:
            raise UserError(f"no rule {name!r} to audit: legal are {', '.join(audit.rules)}")
    return _lines(audit, names)


def _lines(audit: Audit, names: Sequence[str]) -> Iterator[Line]:
    for name in dict.fromkeys(names or audit.rules):
        yield audit.line(audit.rules[name])
    if not names:
        yield from audit.identities()
        yield from audit.orderings()


def count_lines(names: Sequence[str] = ()) -> int:
    """How many lines `audit_rules` makes."""
    return len(set(names)) if names else len(all_rules()) + len(IDENTITIES) + len(ORDERINGS) + 1
