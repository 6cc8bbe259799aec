"""Every drafter with every stopper and every rule on toy models: which compose, and their exact output distribution."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from draftproof.drafters.base import Drafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.extended import ExtendedDrafter
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.drafters.none import NoDrafter
from draftproof.drafters.sampled_tree import SampledTreeDrafter
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.engine.drafter_parts import DRAFTERS as PARTS
from draftproof.engine.engine import Engine
from draftproof.engine.loop import RoundRngFactory
from draftproof.engine.verifier_parts import LOSSY, VERIFIERS, make_verifier
from draftproof.errors import UserError
from draftproof.heads import Head, HeadConfig
from draftproof.rng import CounterRoundRng
from draftproof.sampling import SamplingParams
from draftproof.stoppers.auto import Auto
from draftproof.stoppers.base import Stopper
from draftproof.stoppers.fixed import FixedLength
from draftproof.stoppers.history import Oracle, Schedule
from draftproof.stoppers.probability import Confidence, Entropy, Predicted
from draftproof.stoppers.trained import Acceptance, Approximate, Ratio
from draftproof.testing import TableModel, engine_distribution, target_distribution, total_variation
from draftproof.theory.cost import RoundCosts

Rows = Mapping[tuple[int, ...], Sequence[float]]
VOCAB = 3
PROMPT = (0, 1, 0, 1)
WIDTH = 4
# Zeros keep the enumeration short; every case occurs: one-sided zeros, p > q, p < q, a token that only the target has.
TARGET: Rows = {(0,): [0.6, 0.4, 0.0], (1,): [0.0, 0.3, 0.7], (2,): [0.5, 0.0, 0.5]}
DRAFT: Rows = {(0,): [0.3, 0.0, 0.7], (1,): [0.0, 0.8, 0.2], (2,): [0.6, 0.4, 0.0]}


class Toy(NamedTuple):
    """A toy drafter or stopper; the time to enumerate is exponential in its number of output tokens."""

    make: Callable[..., Any]
    tokens: int = 3
    slow: bool = False


@functools.cache  # an engine is made for every outcome
def _head(kind: str) -> Head:
    """A head whose stopper stops in some contexts and continues in others."""
    head = Head(HeadConfig(kind, WIDTH, draft="toy", target="toy", depth=1, reads_draw=kind == "verifier"))
    source = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weights in head.parameters():
            weights.copy_(torch.randn(weights.shape, generator=source))
    return head.eval()


def _lookup() -> SuffixDrafter:
    return SuffixDrafter(2, threshold=0.0, shared=False)


def _tree(*factors: int) -> Callable[..., Drafter]:
    return lambda model, stopper: SampledTreeDrafter(model, stopper, factors=factors)


# Rounds with several drafts have many more outcomes, so fewer tokens of them are enumerated.
DRAFTERS: dict[str, Toy] = {
    "none": Toy(lambda model, stopper: NoDrafter()),  # noqa: ARG005
    "ngram": Toy(lambda model, stopper: NgramDrafter(2)),  # noqa: ARG005
    "suffix": Toy(lambda model, stopper: SuffixDrafter(2)),  # noqa: ARG005
    "model": Toy(ModelDrafter, tokens=5),
    "model+suffix": Toy(
        lambda model, stopper: ExtendedDrafter(ModelDrafter(model, stopper), _lookup(), least=1), tokens=4
    ),
    "chains": Toy(lambda model, stopper: SampledTreeDrafter(model, stopper, chains=2), tokens=4),
    "tree": Toy(_tree(1, 2, 1), tokens=4),
    "wide": Toy(_tree(2, 2), tokens=4, slow=True),
}
# The length of a chain must depend on the drawn tokens: on the row of the second token, or on the head's prediction for
# the first one.
STOPPERS: dict[str, Toy] = {
    "fixed": Toy(lambda: FixedLength(2)),
    "schedule": Toy(lambda: Schedule(1, 2), tokens=5),
    "auto": Toy(lambda: Auto(RoundCosts(1.0, 0.3, more=0.15), 2), tokens=4),
    "oracle": Toy(lambda: Oracle({0: (True, False, True, True, True)}, 2), tokens=5),
    "confidence": Toy(lambda: Confidence(0.65, 3), tokens=4, slow=True),
    "entropy": Toy(lambda: Entropy(0.66, 3), tokens=4, slow=True),
    "predicted": Toy(lambda: Predicted(0.4, 3), tokens=4, slow=True),
    "acceptance": Toy(lambda: Acceptance(_head("acceptance"), 0.72, 3), tokens=4, slow=True),
    "ratio": Toy(lambda: Ratio(_head("log_ratio"), 0.6, 3), tokens=4, slow=True),
    "approximate": Toy(lambda: Approximate(_head("verifier"), 0.6, 3), tokens=4, slow=True),
}


class Elsewhere(NamedTuple):
    """What the toys above are not: what drafts, with which rules, and the tests that enumerate it."""

    what: str
    rules: str
    tests: tuple[str, ...]


def _elsewhere(what: str, rules: str, file: str, *names: str) -> Elsewhere:
    return Elsewhere(what, rules, tuple(f"{file}::test_{name}" for name in names))


ELSEWHERE = (
    _elsewhere(
        "`early_exit`",
        "block, token, trie_block",
        "engine/test_early_exit.py",
        "exact_output_distribution_on_a_real_model",
    ),
    _elsewhere(
        "`quantized`",
        "block, token, match, trie_block, spectr, traversal",
        "backends/products/test_quantized.py",
        "exact_output_distribution",
    ),
    _elsewhere(
        "`feature_head`",
        "block, token, trie_block",
        "backends/heads/test_feature_head.py",
        "exact_output_distribution_on_a_real_model",
    ),
    _elsewhere(
        "`eagle3`, `peagle`, `dflash`, `dspark`, `dflash2`, `eagle`, `medusa`",
        "block, token, trie_block",
        "backends/heads/test_published_heads.py",
        "exact_output_distribution",
    ),
    _elsewhere(
        "the same in few bits, and over an output layer in few bits",
        "block",
        "backends/heads/test_rounded_heads.py",
        "exact_output_distribution",
        "exact_output_distribution_with_a_rounded_output_layer_of_the_target",
    ),
    _elsewhere(
        "`dspark` with the stopper `predicted`; second tokens of `dspark` and `dflash2`",
        "block, token, trie_block",
        "backends/heads/test_kindred_of_dflash.py",
        "predictions_leave_the_output_distribution_exact",
        "second_tokens_are_exact_and_a_false_row_of_theirs_is_detected",
    ),
    _elsewhere(
        "`eagle3`, `peagle`, `dflash`, `dspark`, `dflash2`, `eagle`, `medusa`, `feature_head` on models with recurrent "
        "layers",
        "block, token",
        "backends/heads/test_recurrent_targets.py",
        "exact_output_distribution",
    ),
    _elsewhere(
        "`mtp`, one layer and two, and `mtp:HEAD`",
        "block, token",
        "backends/heads/test_prediction_layers.py",
        "exact_output_distribution",
        "exact_output_distribution_with_a_published_layer",
    ),
    _elsewhere(
        "`mtp` and `mtp:HEAD` of Qwen3-Next and Qwen3.5, dense and with experts",
        "block, token",
        "backends/heads/test_qwen_prediction_layer.py",
        "exact_output_distribution",
        "exact_output_distribution_with_a_rounded_output_layer",
    ),
    _elsewhere(
        "`mtp` in `.gguf` files",
        "block, token",
        "backends/loading/test_gguf_prediction.py",
        "the_output_distribution_is_that_without_drafts",
    ),
    _elsewhere(
        "`assistant`, from its own q and greedily",
        "block, token, trie_block",
        "backends/heads/test_gemma_assistants.py",
        "exact_output_distribution",
        "greedy_drafts_are_point_masses_and_exact",
    ),
    _elsewhere(
        "a draft model with another vocabulary (TLI), one chain and trees",
        "token, block, gumbel, match; trie_block, traversal, multi_round",
        "backends/translation/test_translated_draft.py",
        "the_output_distribution_is_the_targets",
        "the_output_distribution_is_the_targets_with_trees",
    ),
    _elsewhere(
        "`dspark`, `eagle3` and `mtp` with `+suffix`",
        "block, token",
        "drafters/test_extended.py",
        "an_extension_of_a_heads_chain_leaves_the_distribution",
    ),
    _elsewhere(
        "`auto` with `eagle3`, `dspark`, `medusa`, `dflash2` or `mtp`, lookups, and chains that they extend",
        "block, token, gumbel",
        "drafters/test_auto_heads.py",
        "the_distribution_with_a_head_a_lookup_and_nothing_in_turns",
    ),
    _elsewhere(
        "two requests with one budget (`--draft-budget`): their joint distribution, also while `auto` changes drafters",
        "block, token, gumbel, match, spectr, multi_round, traversal, multi_path, trie_block",
        "engine/test_draft_budget.py",
        "the_joint_distribution_of_two_requests_with_one_budget",
        "the_joint_distribution_while_drafters_change",
    ),
)
UNSTOPPED = tuple(name for name in DRAFTERS if name in PARTS and not PARTS[name].stops)  # drafters without a stopper


@dataclass(frozen=True)
class Composition:
    """One drafter, stopper and rule by their names, with the engine's message where it refuses the composition."""

    drafter: str
    stopper: str
    rule: str
    lossless: bool
    refused: str | None
    slow: bool

    def to_dict(self) -> dict[str, Any]:
        """The composition as values for JSON."""
        return asdict(self)

    def maker(
        self, target: TableModel | None = None, draft: TableModel | None = None
    ) -> Callable[[RoundRngFactory], Engine]:
        """A function that makes the engine with a given source of randomness."""

        def make(round_rng: RoundRngFactory) -> Engine:
            return toy_engine(self.drafter, self.stopper, self.rule, round_rng, target=target, draft=draft)

        return make

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters with as many tokens as its parts need."""
        limits = [DRAFTERS[self.drafter].tokens, *([STOPPERS[self.stopper].tokens] if self.stopper else [])]
        return SamplingParams(max_tokens=min(limits))

    def distance(self) -> float:
        """Total variation of the engine's output distribution from the target's, by enumeration."""
        found = engine_distribution(self.maker(), PROMPT, self.params)
        return total_variation(found, target_distribution(toy_target(), PROMPT, self.params))


def toy_target() -> TableModel:
    """The target of all compositions."""
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
    """An engine of toy parts; a UserError where they do not compose."""
    small = draft or TableModel(VOCAB, 0, order=1, rows=DRAFT, hidden=WIDTH, predicts=True)
    ends: Stopper = STOPPERS[stopper].make() if stopper else FixedLength(2)
    made: Drafter = DRAFTERS[drafter].make(DraftModel(small, vocab_size=VOCAB), ends)
    return Engine(target or toy_target(), made, make_verifier(rule), round_rng=round_rng)


def _slow(drafter: str, stopper: str, rule: str) -> bool:
    """Whether the enumeration takes about a minute: `chains` and `match` have many outcomes at every position."""
    long = bool(stopper) and STOPPERS[stopper].slow
    return DRAFTERS[drafter].slow or (long and (drafter == "chains" or rule == "match"))


def compositions() -> Iterator[Composition]:
    """Every drafter with every rule, and with every stopper if it has one."""
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
    """The page docs/compositions.md: drafters by rules, with the stoppers that compose, and the reasons of refusals."""
    rules = list(dict.fromkeys(one.rule for one in made))
    lines = [
        "# Which drafters, stoppers and rules compose",
        "",
        "This page is made by `draftproof audit compositions --markdown`. A test checks that it is up to date.",
        "",
        "- `exact`: the distribution of whole outputs is the target's to 1e-12, by enumeration, with every stopper.",
        "- `exact (fixed)`: exact, and only the stopper `fixed` composes.",
        "- `lossy`: composes, and every result says that it is lossy.",
        "- `-`: the engine refuses the composition when it is constructed.",
        "",
        f"The stoppers are {', '.join(STOPPERS)}.",
        f"The drafters {', '.join(UNSTOPPED)} have no stopper.",
        "",
        "`tree` and `wide` are two shapes of `tree:AxBxC`. `early_exit:L` composes like `model`, and `early_exit:LxK`",
        "like `chains`. So do `quantized:B` and `quantized:BxK`, but not with `greedy_block`.",
        "With a budget over the batch (`--draft-budget`) drafters of one chain compose with the same rules, but for",
        "`greedy_block`; `chains`, `tree` and `wide` are refused.",
        "",
        "Heads, prediction layers and draft models with another vocabulary compose like `model`, and `HEADxK` like",
        "`chains`, but not with `greedy_block`. They read a model's states or tokens, which tables do not have, and",
        "a budget needs two requests. So these are enumerated by tests of their own, most on models of three tokens:",
        "",
        "| what drafts | rules | enumerated by, in `tests/` |",
        "|---|---|---|",
        *(f"| {row.what} | {row.rules} | {'<br>'.join(f'`{test}`' for test in row.tests)} |" for row in ELSEWHERE),
        "",
        f"| rule | {' | '.join(DRAFTERS)} |",
        "|---" * (len(DRAFTERS) + 1) + "|",
    ]
    for rule in rules:
        cells = [_cell([one for one in made if (one.drafter, one.rule) == (drafter, rule)]) for drafter in DRAFTERS]
        lines.append(f"| {rule} | {' | '.join(cells)} |")
    lines += ["", "An example of each message with which the engine refuses a composition:", ""]
    return "\n".join([*lines, *(f"- {example}" for example in _refusals(made))]) + "\n"


def _refusals(made: Sequence[Composition]) -> Iterable[str]:
    """The first message of each kind with which the engine refuses; those of one kind differ in their names."""
    examples: dict[str, str] = {}
    for one in made:
        if one.refused:
            examples.setdefault(re.sub(r"(rule|drafter) [\w:.]+", "", one.refused), one.refused)
    return examples.values()


def _cell(own: Sequence[Composition]) -> str:
    composing = [one for one in own if one.refused is None]
    if not composing:
        return "-"
    word = "exact" if composing[0].lossless else "lossy"
    return word if len(composing) == len(own) else f"{word} ({', '.join(one.stopper for one in composing)})"
