"""Every lossless (drafter, stopper, rule) that composes has exactly the target's distribution, by enumeration.

By default every drafter with every rule, and every stopper with a few of them: a stopper only says where a draft ends,
and every rule is exact for drafts that end anywhere (test_rules_exact.py). The whole product: `pytest -m slow`, or
`draftproof audit compositions --full`.
"""

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from draftproof.audit.compositions import (
    DRAFTERS,
    ELSEWHERE,
    PROMPT,
    STOPPERS,
    VOCAB,
    compositions,
    markdown,
    toy_engine,
)
from draftproof.drafters.model import ModelDrafter
from draftproof.engine import drafter_parts, stopper_parts
from draftproof.engine.published_parts import PUBLISHED
from draftproof.engine.verifier_parts import LOSSY, VERIFIERS
from draftproof.functional import coupling, trie_block
from draftproof.rng import CounterRoundRng
from draftproof.sampling import SamplingParams
from draftproof.stoppers.fixed import FixedLength
from draftproof.testing import TableModel, assert_lossless, exact_distribution, target_distribution, total_variation
from support.distributions import joint_distance
from type_checks import checks_off

TESTS = Path(__file__).parents[1]
ALL = list(compositions())
RULES = [name for name in VERIFIERS if name not in LOSSY]
BRANCHING = {"chains", "tree", "wide"}
CHAINS_ONLY = {"token", "block", "match", "gumbel", "greedy_block"}


def name(made):
    return f"{made.drafter}-{made.stopper or 'none'}-{made.rule}"


def maker(drafter, stopper, rule, **options):
    return lambda round_rng: toy_engine(drafter, stopper, rule, round_rng, **options)


WITH_EVERY_STOPPER = {("model", "block"), ("chains", "trie_block")}
# One of each kind, as shared noise is slow to enumerate: by lengths, by rates, by the draft's row, by a prediction.
WITH_SHARED_NOISE = {"schedule", "auto", "confidence", "predicted"}


def often(made):
    """Whether a composition is enumerated by default."""
    pair = made.drafter, made.rule
    wanted = made.stopper in {"", "fixed"} or pair in WITH_EVERY_STOPPER
    wanted = wanted or (pair == ("model", "gumbel") and made.stopper in WITH_SHARED_NOISE)
    return wanted and not made.slow


def test_every_drafter_rule_and_stopper_is_enumerated_by_default():
    made = [each for each in ALL if each.lossless and not each.refused]
    seen = [each for each in made if often(each)]
    pairs = {(each.drafter, each.rule) for each in made if each.drafter != "wide"}  # its enumeration takes minutes
    assert pairs == {(each.drafter, each.rule) for each in seen}
    assert set(STOPPERS) == {each.stopper for each in seen} - {""}


def test_every_part_has_a_toy():
    """A new part of the library must be added to the list that is enumerated."""
    more = {"wide", "model+suffix"}  # a second shape of tree, a chain that another drafter extends
    # They have tests of their own: tables have no layers.
    whole = {"early_exit", "quantized", "feature_head", "auto", *(part.name for part in PUBLISHED)}
    assert set(DRAFTERS) - more == {spec.partition(":")[0] for spec in drafter_parts.DRAFTERS} - whole
    assert set(STOPPERS) == set(stopper_parts.STOPPERS)
    assert {made.rule for made in ALL} == set(VERIFIERS)


ENUMERATIONS = (
    "assert_output_distribution",
    "assert_lossless",
    "joint_distance",
    "engine_distribution",
    "distribution_of_three_tokens",
)


def strings(found):
    """All strings in values, in sets of parameters and in keys."""
    if isinstance(found, str):
        return {found}
    return set().union(*map(strings, found)) if isinstance(found, Iterable) else set()


def named_by(test):
    """The strings in a test's code and parameters; none where it enumerates nothing."""
    file, _, name = test.partition("::")
    spec = importlib.util.spec_from_file_location(f"read_{Path(file).stem}", TESTS / file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name)
    nodes = list(ast.walk(ast.parse(inspect.getsource(function))))
    if not {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)} & set(
        ENUMERATIONS
    ):
        return set()
    parameters = [mark.args[1] for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
    return strings(parameters) | {node.value for node in nodes if isinstance(node, ast.Constant)} - {None}


def unproved(row):
    """The rules and published drafters of a row that none of its tests names."""
    own = [named_by(test) for test in row.tests]
    if not all(own):
        return [test for test, found in zip(row.tests, own, strict=True) if not found]
    seen = strings(own)
    heads = {re.split(r"[:+]", each)[0] for each in seen}
    wanted = {part.name for part in PUBLISHED} & set(re.findall(r"`(\w+)", row.what))
    return [*(set(re.findall(r"\w+", row.rules)) - seen), *(wanted - heads)]


@pytest.mark.parametrize("row", ELSEWHERE, ids=lambda row: row.what)
def test_what_tables_do_not_show_is_enumerated_by_the_tests_that_are_named(row):
    assert not unproved(row)


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ({"rules": "block, traversal"}, ["traversal"]),
        ({"what": "`eagle3` and `mtp`"}, ["mtp"]),
        ({"tests": ("backends/heads/test_published_heads.py::test_output_is_the_same_alone_and_in_a_batch",)}, None),
    ],
)
def test_a_row_without_its_proof_is_seen(change, left):
    """Negative control: a rule and a drafter that the test does not have, and a test that enumerates nothing."""
    row = next(each for each in ELSEWHERE if each.what.startswith("`eagle3`") and each.rules.endswith("trie_block"))
    assert unproved(row._replace(**change)) == (left or [*change["tests"]])


def test_a_row_whose_test_is_gone_is_seen():
    with pytest.raises(AttributeError, match="test_gone"):
        unproved(ELSEWHERE[0]._replace(tests=("engine/test_early_exit.py::test_gone",)))


def test_every_published_head_has_a_row():
    named = " ".join(row.what for row in ELSEWHERE)
    assert {f"`{part.name}`" in named for part in PUBLISHED} == {True}


def test_the_engine_accepts_exactly_what_theory_allows():
    for made in ALL:
        branches = made.drafter in BRANCHING and made.rule in {*CHAINS_ONLY, "last_token", "typical", "mixture"}
        points = made.drafter in {"ngram", "suffix"}
        varied = made.drafter == "model+suffix"
        varies = made.rule == "greedy_block" and (points or varied or made.stopper not in {"", "fixed"})
        unknown = made.rule == "mentored" and (points or made.drafter in BRANCHING)
        assert (made.refused is not None) == (branches or varies or unknown), f"{name(made)}: {made.refused}"


def test_the_page_is_generated_from_this_list():
    page = TESTS.parent / "docs" / "compositions.md"
    assert page.read_text(encoding="utf-8") == markdown(ALL), "run: draftproof audit compositions --markdown"


LOSSLESS = [
    pytest.param(made, id=name(made), marks=[pytest.mark.slow] * (not often(made)))
    for made in ALL
    if made.lossless and not made.refused
]


@pytest.fixture
def remembered_factors(monkeypatch):
    """K-SEQ's division factors, searched once for equal rows: an enumeration asks for the same ones again and again."""
    search, known = coupling.kseq_gamma, {}

    def gamma(p, q, k, weight=None, **options):
        key = tuple(each.numpy().tobytes() if isinstance(each, torch.Tensor) else each for each in (p, q, k, weight))
        if key not in known:
            known[key] = search(p, q, k, weight, **options)
        return known[key].clone()

    for module in (coupling, trie_block):
        monkeypatch.setattr(module, "kseq_gamma", gamma)


@pytest.mark.grid(12)
@pytest.mark.usefixtures("remembered_factors")
@pytest.mark.parametrize("made", LOSSLESS)
def test_output_distribution_of_every_composition(made):
    made.maker()(CounterRoundRng).generate([list(PROMPT)], made.params)  # once with shapes and types checked
    with checks_off():
        assert made.distance() < 1e-12


@pytest.mark.grid(2)
@pytest.mark.parametrize("stopper", [key for key in STOPPERS if key != "fixed"])
def test_adaptive_toys_stop_in_some_rounds_and_not_in_others(stopper):
    """With a toy that always stops or never stops, the tests above would prove nothing about its stopper."""
    seen = set()

    def run(rng):
        engine = toy_engine("model", stopper, "block", lambda *_: rng)
        propose = engine.drafter.propose

        def watched(requests, rng):
            drafts = propose(requests, rng)
            most = [min(request.limit, engine.drafter.limit) for request in requests]
            seen.update(len(draft) == size for draft, size in zip(drafts, most, strict=True) if size > 1)
            return drafts

        engine.drafter.propose = watched
        params = SamplingParams(max_tokens=STOPPERS[stopper].tokens)
        return engine.generate([list(PROMPT)], params)[0].token_ids

    with checks_off():
        exact_distribution(run)
    assert seen == {True, False}, f"{stopper}: full drafts {seen}"


@pytest.mark.grid(2)
@pytest.mark.parametrize("rule", RULES)
def test_output_distribution_with_transforms_and_eos(rule):
    params = SamplingParams(max_tokens=3, temperature=0.8, repetition_penalty=1.4, top_p=0.9)
    drafter = "model" if rule in CHAINS_ONLY else "chains"

    def make(round_rng):
        engine = toy_engine(drafter, "fixed", rule, round_rng)
        engine.eos_token_ids = (1,)
        return engine

    assert_lossless(make, params=params)


def test_a_drafter_that_drops_its_last_token_is_detected():
    """Negative control: a token that was drawn must be verified."""

    class Dropping(ModelDrafter):
        def propose(self, requests, rng):
            return [self._without_unlikely(draft) for draft in super().propose(requests, rng)]

        @staticmethod
        def _without_unlikely(draft):
            last = len(draft) - 1
            if last < 0 or draft.probs[last, draft.tree.ids[last]] > 0.5:
                return draft
            return type(draft)(type(draft.tree).chain(draft.tree.tokens[:last]), draft.probs[:last])

    def make(round_rng):
        engine = toy_engine("model", "fixed", "block", round_rng)
        engine.drafter = Dropping(engine.drafter.model, FixedLength(2))
        return engine

    with pytest.raises(AssertionError, match="total variation"):
        assert_lossless(make, params=SamplingParams(max_tokens=3))


def test_greedy_block_over_several_rounds():
    """The windows of the modified target reach into later rounds: five tokens, with up to two open windows."""
    target, draft = TableModel(VOCAB, 21, order=1, zeros=0.5), TableModel(VOCAB, 22, order=1, zeros=0.5)
    make = maker("model", "fixed", "greedy_block", target=target, draft=draft)
    assert_lossless(make, params=SamplingParams(max_tokens=5))


def test_greedy_block_without_its_state_is_detected():
    """Negative control: without the state between rounds the distribution must be wrong."""

    def stateless(round_rng):
        engine = maker("model", "fixed", "greedy_block", target=TableModel(VOCAB, 87, order=1), draft=draft)(round_rng)
        verify = engine.verifier.verify
        engine.verifier.verify = lambda drafts, probs, rng, states: verify(drafts, probs, rng, [None] * len(states))
        return engine

    draft = TableModel(VOCAB, 1087, order=1)
    params = SamplingParams(max_tokens=3)
    found = exact_distribution(lambda rng: stateless(lambda *_: rng).generate([[0]], params)[0].token_ids)
    assert total_variation(found, target_distribution(TableModel(VOCAB, 87, order=1), (0,), params)) > 0.01


@pytest.mark.parametrize("rule", ["trie_block", "spectr", "multi_round", "traversal"])
def test_output_distribution_of_a_batch_of_trees(rule):
    """Two rows with trees of different sizes: the joint distribution is the product."""
    target, draft = TableModel(VOCAB, 11, zeros=0.6, order=1), TableModel(VOCAB, 12, zeros=0.6, order=1)
    make = maker("chains", "confidence", rule, target=target, draft=draft)
    assert joint_distance(make, [[0], [0, 2, 1]], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=1)]) < 1e-12


@pytest.mark.grid(2)
@pytest.mark.parametrize("rule", LOSSY)
def test_lossy_rules_are_marked_and_detected(rule):
    make = maker("model", "fixed", rule, target=TableModel(VOCAB, 1), draft=TableModel(VOCAB, 2))
    assert not make(CounterRoundRng).verifier.lossless
    with pytest.raises(AssertionError, match="total variation"):
        assert_lossless(make, params=SamplingParams(max_tokens=3))
