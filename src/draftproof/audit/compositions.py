"""Every drafter with every stopper and every rule, on toy models: what composes, why the rest does not, and its law.

Knows: one toy instance of each part. Does not know: how parts work, how a table is printed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from draftproof.drafters.base import Drafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.drafters.none import NoDrafter
from draftproof.drafters.sampled_tree import SampledTreeDrafter
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.engine.engine import Engine
from draftproof.engine.loop import RoundRngFactory
from draftproof.engine.registry import LOSSY, VERIFIERS, make_verifier
from draftproof.errors import UserError
from draftproof.heads import Head, HeadConfig
from draftproof.rng import CounterRoundRng
from draftproof.sampling import SamplingParams
from draftproof.stoppers.auto import Auto
from draftproof.stoppers.base import Stopper
from draftproof.stoppers.fixed import FixedLength
from draftproof.stoppers.history import Oracle, Schedule
from draftproof.stoppers.probability import Confidence, Entropy
from draftproof.stoppers.trained import Acceptance, Approximate, Ratio
from draftproof.testing import TableModel, engine_distribution, target_distribution, total_variation
from draftproof.theory.cost import RoundCosts

Rows = Mapping[tuple[int, ...], Sequence[float]]
VOCAB = 3
PROMPT = (0, 1, 0, 1)
WIDTH = 4
# Zeros keep the walk short; every case occurs: one-sided zeros, p > q, p < q, a token that only the target has.
TARGET: Rows = {(0,): [0.6, 0.4, 0.0], (1,): [0.0, 0.3, 0.7], (2,): [0.5, 0.0, 0.5]}
DRAFT: Rows = {(0,): [0.3, 0.0, 0.7], (1,): [0.0, 0.8, 0.2], (2,): [0.6, 0.4, 0.0]}


class Toy(NamedTuple):
    """A toy part.

    Attributes:
        make: builds a fresh one.
        tokens: output tokens whose law shows what the part does; the walk is exponential in it.
        slow: whether its walk is long.
    """

    make: Callable[..., Any]
    tokens: int = 3
    slow: bool = False


def _head(kind: str) -> Head:
    """A head with weights that make its stopper stop here and go on there."""
    head = Head(HeadConfig(kind, WIDTH, draft="toy", target="toy", depth=1, reads_draw=kind == "verifier"))
    source = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weights in head.parameters():
            weights.copy_(torch.randn(weights.shape, generator=source))
    return head.eval()


def _tree(*factors: int) -> Callable[..., Drafter]:
    return lambda model, stopper: SampledTreeDrafter(model, stopper, factors=factors)


DRAFTERS: dict[str, Toy] = {
    "none": Toy(lambda model, stopper: NoDrafter()),  # noqa: ARG005
    "ngram": Toy(lambda model, stopper: NgramDrafter(2)),  # noqa: ARG005
    "suffix": Toy(lambda model, stopper: SuffixDrafter(2)),  # noqa: ARG005
    "model": Toy(ModelDrafter),
    "chains": Toy(lambda model, stopper: SampledTreeDrafter(model, stopper, chains=2)),
    "tree": Toy(_tree(1, 2, 1)),
    "wide": Toy(_tree(2, 2), slow=True),
}
# A chain's length must hang on what was drawn: by the row of its second token, or by the head's word on its first.
STOPPERS: dict[str, Toy] = {
    "fixed": Toy(lambda: FixedLength(2)),
    "schedule": Toy(lambda: Schedule(1, 2), tokens=5),
    "auto": Toy(lambda: Auto(RoundCosts(1.0, 0.3, more=0.15), 2), tokens=4),
    "oracle": Toy(lambda: Oracle({0: (True, False, True, True, True)}, 2), tokens=5),
    "confidence": Toy(lambda: Confidence(0.65, 3), tokens=4, slow=True),
    "entropy": Toy(lambda: Entropy(0.66, 3), tokens=4, slow=True),
    "acceptance": Toy(lambda: Acceptance(_head("acceptance"), 0.72, 3), tokens=4, slow=True),
    "ratio": Toy(lambda: Ratio(_head("log_ratio"), 0.6, 3), tokens=4, slow=True),
    "approximate": Toy(lambda: Approximate(_head("verifier"), 0.6, 3), tokens=4, slow=True),
}
UNSTOPPED = ("none", "ngram", "suffix")  # drafters that no stopper belongs to


@dataclass(frozen=True)
class Composition:
    """One drafter, stopper and rule.

    Attributes:
        drafter, stopper, rule: names; the stopper is "" for drafters that have none.
        lossless: whether the rule promises the target's law.
        refused: why the engine refuses it; None when it composes.
        slow: whether its law takes minutes.
    """

    drafter: str
    stopper: str
    rule: str
    lossless: bool
    refused: str | None
    slow: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def maker(
        self, target: TableModel | None = None, draft: TableModel | None = None
    ) -> Callable[[RoundRngFactory], Engine]:
        """Builds the engine around given randomness."""

        def make(round_rng: RoundRngFactory) -> Engine:
            return toy_engine(self.drafter, self.stopper, self.rule, round_rng, target=target, draft=draft)

        return make

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters under which its parts have something to do."""
        return SamplingParams(max_tokens=STOPPERS[self.stopper].tokens if self.stopper else 3)

    def distance(self) -> float:
        """Total variation of the engine's law from the target's, by enumeration."""
        found = engine_distribution(self.maker(), PROMPT, self.params)
        return total_variation(found, target_distribution(toy_target(), PROMPT, self.params))


def toy_target() -> TableModel:
    """The target all compositions share."""
    return TableModel(VOCAB, 0, order=1, rows=TARGET)


def toy_engine(
    drafter: str,
    stopper: str,
    rule: str,
    round_rng: RoundRngFactory,
    *,
    target: TableModel | None = None,
    draft: TableModel | None = None,
) -> Engine:
    """An engine of toy parts.

    Raises:
        UserError: they do not compose.
    """
    small = draft or TableModel(VOCAB, 0, order=1, rows=DRAFT, hidden=WIDTH)
    ends: Stopper = STOPPERS[stopper].make() if stopper else FixedLength(2)
    made: Drafter = DRAFTERS[drafter].make(DraftModel(small, vocab_size=VOCAB), ends)
    return Engine(target or toy_target(), made, make_verifier(rule), round_rng=round_rng)


def _slow(drafter: str, stopper: str, rule: str) -> bool:
    """Whether a walk takes a minute or so: K chains branch everywhere, and match draws from the target everywhere."""
    long = bool(stopper) and STOPPERS[stopper].slow
    return DRAFTERS[drafter].slow or (long and (drafter == "chains" or rule == "match"))


def compositions() -> Iterator[Composition]:
    """Every drafter with every stopper that belongs to it and every rule."""
    for drafter in DRAFTERS:
        for stopper in ("",) if drafter in UNSTOPPED else STOPPERS:
            for rule in VERIFIERS:
                refused = None
                try:
                    toy_engine(drafter, stopper, rule, CounterRoundRng)
                except UserError as cause:
                    refused = str(cause)
                yield Composition(drafter, stopper, rule, rule not in LOSSY, refused, _slow(drafter, stopper, rule))


def markdown(made: Sequence[Composition]) -> str:
    """The page of the docs: drafters by rules, the stoppers under which they compose, and why the rest does not."""
    rules = list(dict.fromkeys(one.rule for one in made))
    lines = [
        "# What composes",
        "",
        "Made by `draftproof audit compositions --markdown`; a test holds it to the list that is enumerated.",
        "",
        "`exact`: the law of whole outputs is the target's to 1e-12, by enumeration, under every stopper:",
        f"{', '.join(STOPPERS)} ({', '.join(UNSTOPPED)} take none). `exact (fixed)`: under that stopper only.",
        "`lossy`: composes, and says so in every result. `-`: the engine refuses it at construction.",
        "",
        "`tree` and `wide` are two shapes of `tree:AxBxC`; `early_exit:L` composes as `model` and `early_exit:LxK` as",
        "`chains`.",
        "",
        f"| rule | {' | '.join(DRAFTERS)} |",
        "|---" * (len(DRAFTERS) + 1) + "|",
    ]
    for rule in rules:
        cells = [_cell([one for one in made if (one.drafter, one.rule) == (drafter, rule)]) for drafter in DRAFTERS]
        lines.append(f"| {rule} | {' | '.join(cells)} |")
    lines += ["", "Why the rest is refused, with an example of each message:", ""]
    examples: dict[str, str] = {}
    for one in made:
        if one.refused:  # messages differ in the names they quote
            kind = re.sub(r"(rule|drafter) [\w:.]+", "", one.refused)
            examples.setdefault(kind, one.refused)
    return "\n".join([*lines, *(f"- {example}" for example in examples.values())]) + "\n"


def _cell(own: Sequence[Composition]) -> str:
    there = [one for one in own if one.refused is None]
    if not there:
        return "-"
    word = "exact" if there[0].lossless else "lossy"
    return word if len(there) == len(own) else f"{word} ({', '.join(one.stopper for one in there)})"
