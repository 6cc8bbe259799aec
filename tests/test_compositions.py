"""Every lossless (drafter, stopper, rule) that composes has exactly the target's law, by enumeration."""

import pytest

from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.drafters.sampled_tree import SampledTreeDrafter
from draftproof.engine.compose import LOSSY, VERIFIERS, make_verifier
from draftproof.engine.engine import Engine
from draftproof.errors import UserError
from draftproof.rng import CounterRoundRng
from draftproof.sampling import SamplingParams
from draftproof.stoppers.fixed import FixedLength
from draftproof.stoppers.probability import Confidence, Entropy
from draftproof.testing import TableModel, assert_lossless, exact_law, target_law, total_variation

VOCAB = 3


RULES = [name for name in VERIFIERS if name not in LOSSY]


# Zeros keep the walk short; every case occurs: one-sided zeros, p > q, p < q, a token only the target has.
TARGET = {(0,): [0.6, 0.4, 0.0], (1,): [0.0, 0.3, 0.7], (2,): [0.5, 0.0, 0.5]}
DRAFT = {(0,): [0.3, 0.0, 0.7], (1,): [0.0, 0.8, 0.2], (2,): [0.6, 0.4, 0.0]}


class Moody(FixedLength):
    """Stops after a token it finds unlikely; looks at the newest token, and submits it."""

    constant = False

    def signal(self, step):
        return step.probs.gather(-1, step.tokens.unsqueeze(-1)).squeeze(-1)

    def stop_after(self, signals, row):  # noqa: ARG002
        return signals[-1] < 0.4


def model(draft, stopper):
    return ModelDrafter(DraftModel(draft, vocab_size=VOCAB), stopper)


def chains(draft, stopper):
    return SampledTreeDrafter(DraftModel(draft, vocab_size=VOCAB), stopper, chains=2)


def tree(draft, stopper):
    return SampledTreeDrafter(DraftModel(draft, vocab_size=VOCAB), stopper, factors=(1, 2))


def wide(draft, stopper):
    return SampledTreeDrafter(DraftModel(draft, vocab_size=VOCAB), stopper, factors=(2, 2))


def ngram(draft, stopper):  # noqa: ARG001
    return NgramDrafter(2)


DRAFTERS = {"model": model, "chains": chains, "tree": tree, "wide": wide, "ngram": ngram}
STOPPERS = {
    "fixed": FixedLength,
    "adaptive": Moody,
    "confidence": lambda n: Confidence(0.65, n),
    "entropy": lambda n: Entropy(0.66, n),
}


def maker(drafter, stopper, rule, *, target=None, draft=None, eos=()):
    target = target or TableModel(VOCAB, 0, order=1, rows=TARGET)
    draft = draft or TableModel(VOCAB, 0, order=1, rows=DRAFT)

    def make(round_rng):
        parts = DRAFTERS[drafter](draft, STOPPERS[stopper](2))
        return Engine(target, parts, make_verifier(rule), eos_token_ids=eos, round_rng=round_rng)

    return make


def composes(drafter, stopper, rule):
    try:
        maker(drafter, stopper, rule)(CounterRoundRng)
    except UserError:
        return False
    return True


ALL = [(d, s, r) for d in DRAFTERS for s in STOPPERS for r in RULES if s in {"fixed", "adaptive"} or d == "model"]
ALL = [triple for triple in ALL if triple[0] != "ngram" or triple[1] == "fixed"]
COMPOSING = [triple for triple in ALL if composes(*triple)]
# Every draw of a wide tree is walked: minutes. `tree` and `chains` cover its parts in seconds.
MARKED = [pytest.param(*triple, marks=[pytest.mark.slow] * (triple[0] == "wide")) for triple in COMPOSING]


def test_what_composes_is_what_theory_allows():
    refused = {triple for triple in ALL if triple not in COMPOSING}
    chains_only = {"token", "block", "match", "greedy_block"}
    for drafter, stopper, rule in ALL:
        branches = drafter in {"chains", "tree", "wide"}
        varies = stopper != "fixed" or drafter == "ngram"
        wanted = (branches and rule in chains_only) or (varies and rule == "greedy_block")
        assert ((drafter, stopper, rule) in refused) == wanted


@pytest.mark.parametrize(("drafter", "stopper", "rule"), MARKED, ids=str)
def test_law_of_every_composition(drafter, stopper, rule):
    assert_lossless(maker(drafter, stopper, rule), prompt=(0, 1, 0, 1), params=SamplingParams(max_tokens=3))


@pytest.mark.parametrize("rule", RULES)
def test_law_with_transforms_and_eos(rule):
    params = SamplingParams(max_tokens=3, temperature=0.8, repetition_penalty=1.4, top_p=0.9)
    drafter = "model" if rule in {"token", "block", "match", "greedy_block"} else "chains"
    assert_lossless(maker(drafter, "fixed", rule, eos=(1,)), params=params)


def test_greedy_block_over_several_rounds():
    """The windows of the modified target reach into later rounds: five tokens, two windows deep."""
    target, draft = TableModel(VOCAB, 21, order=1, zeros=0.5), TableModel(VOCAB, 22, order=1, zeros=0.5)
    make = maker("model", "fixed", "greedy_block", target=target, draft=draft)
    assert_lossless(make, params=SamplingParams(max_tokens=5))


def test_greedy_block_without_its_memory_is_seen():
    """Negative control: dropping the state between rounds must fail the law."""

    def forgetful(round_rng):
        engine = maker("model", "fixed", "greedy_block", target=TableModel(VOCAB, 87, order=1), draft=draft)(round_rng)
        verify = engine.verifier.verify
        engine.verifier.verify = lambda drafts, probs, rng, states: verify(drafts, probs, rng, [None] * len(states))
        return engine

    draft = TableModel(VOCAB, 1087, order=1)
    params = SamplingParams(max_tokens=3)
    found = exact_law(lambda rng: forgetful(lambda *_: rng).generate([[0]], params)[0].token_ids)
    assert total_variation(found, target_law(TableModel(VOCAB, 87, order=1), (0,), params)) > 0.01


@pytest.mark.parametrize("rule", ["trie_block", "spectr", "multi_round", "traversal"])
def test_law_of_a_batch_of_trees(rule):
    """Two rows with trees of different sizes: the joint law is the product."""
    target, draft = TableModel(VOCAB, 11, zeros=0.6, order=1), TableModel(VOCAB, 12, zeros=0.6, order=1)
    make = maker("chains", "adaptive", rule, target=target, draft=draft)
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=1)]
    prompts = [[0], [0, 2, 1]]

    def joint(rng):
        return tuple(output.token_ids for output in make(lambda *_: rng).generate(prompts, params))

    laws = [target_law(target, prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    wanted = {(a, b): x * y for a, x in laws[0].items() for b, y in laws[1].items()}
    assert total_variation(exact_law(joint), wanted) < 1e-12


def test_a_rule_that_needs_probabilities_refuses_point_masses():
    assert not composes("ngram", "fixed", "mentored")


@pytest.mark.parametrize("rule", LOSSY)
def test_lossy_rules_say_so_and_are_seen(rule):
    make = maker("model", "fixed", rule, target=TableModel(VOCAB, 1), draft=TableModel(VOCAB, 2))
    assert not make(CounterRoundRng).verifier.lossless
    with pytest.raises(AssertionError, match="total variation"):
        assert_lossless(make, params=SamplingParams(max_tokens=3))
