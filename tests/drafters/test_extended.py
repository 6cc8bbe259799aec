"""Chains that lookups extend: exact with every rule, longer where text repeats, within grammars and limits."""

from dataclasses import replace

import pytest
import torch

from draftproof import Engine, SamplingParams, UserError
from draftproof.audit.compositions import PROMPT, toy_engine, toy_target
from draftproof.backends.hf.backend import HFBackend
from draftproof.draft import Draft
from draftproof.drafters import extended as module
from draftproof.drafters.extended import ExtendedDrafter
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.engine.drafter_parts import find_drafter, make_drafter, why_not
from draftproof.sampling import SamplingParams as Params
from draftproof.testing import engine_distribution, target_distribution, total_variation
from draftproof.tree import TokenTree
from support import published
from support.helpers import assert_other_rows_are_seen, assert_output_distribution, tiny_llama
from type_checks import checks_off

REPEATING = "Tim had a red ball. Tim had a big dog. Tim had a red ball. Tim had a big dog. Tim had a red ball."


def distance(rule, stopper="fixed"):
    params = SamplingParams(max_tokens=4)
    with checks_off():
        found = engine_distribution(lambda rng: toy_engine("model+suffix", stopper, rule, rng), PROMPT, params)
    return total_variation(found, target_distribution(toy_target(), PROMPT, params))


def test_the_toy_of_the_compositions_extends_some_chains(monkeypatch):
    """Else the enumeration of compositions would say nothing about it."""
    sizes = []
    extended = module.extended

    def watched(draft, found, vocab_size):
        sizes.append((len(draft), len(found.tokens)))
        return extended(draft, found, vocab_size)

    monkeypatch.setattr(module, "extended", watched)
    assert distance("block") < 1e-12
    assert {own for own, _ in sizes} == {2}
    assert len(sizes) > 30


@pytest.mark.grid(1)
@pytest.mark.parametrize(("name", "rule"), [("dspark", "block"), ("eagle3", "token"), ("mtp", "block")])
def test_an_extension_of_a_heads_chain_leaves_the_distribution(name, rule, tmp_path, monkeypatch):
    """By enumeration, on models of three tokens, by the name that a user writes."""
    if name == "mtp":
        made = published.predicting(tmp_path, "deepseek_v3", monkeypatch, vocab=3, dtype=torch.float64)
        target, head = HFBackend(made, name="tiny"), name
    else:
        target = tiny_llama()
        head = f"{name}:{published.WRITERS[name](tmp_path / 'head', target)}"
    sizes = []
    extended = module.extended
    monkeypatch.setattr(module, "extended", lambda draft, *rest: sizes.append(len(draft)) or extended(draft, *rest))

    def make():
        return make_drafter(f"{head}+suffix:2", target=target, draft=None, stopper="fixed:1")

    options = {"length": 4, "prompt": (0, 2, 1, 0, 2), "learns": True}
    assert make().name == f"{name}+suffix:2"
    assert_output_distribution(target, make, rule, **options)
    assert sizes.count(1) > 30
    assert_other_rows_are_seen(target, make, rule, first=1, tolerance=1e-4, **options)


def test_an_extension_with_another_q_is_detected(monkeypatch):
    """Its tokens are certain: with the last row of the model in their place a rule takes them for drawn ones."""
    extended = module.extended

    def wrong(draft, found, vocab_size):
        made = extended(draft, found, vocab_size)
        rows = made.probs.clone()
        rows[len(draft) :] = 0.5 / vocab_size
        rows[range(len(draft), len(made)), made.tree.tokens[len(draft) :]] += 0.5
        return replace(made, probs=rows)

    monkeypatch.setattr(module, "extended", wrong)
    assert distance("block") > 0.001
    assert distance("token") > 0.001


def test_an_extension_by_what_comes_after_is_detected(monkeypatch):
    """To leave out tokens after a look at what was drawn for them is not a function of the tokens before."""
    propose = ExtendedDrafter.propose

    def peeking(self, requests, rng):
        drafts = propose(self, requests, rng)
        return [each.first(1) if len(each) > 1 and each.tree.ids[1] == 0 else each for each in drafts]

    monkeypatch.setattr(ExtendedDrafter, "propose", peeking)
    assert distance("block") > 0.001


def drawn(tokens, vocab=8):
    return Draft(TokenTree.chain(torch.tensor(tokens)), torch.full((len(tokens), vocab), 1 / vocab))


def test_a_draft_says_which_tokens_were_drawn():
    point = Draft(TokenTree.chain(torch.tensor([1, 2])), None)
    assert (point.drawn, drawn([1, 2, 3]).drawn) == (0, 3)
    made = module.extended(drawn([1, 2]), module.SuffixMatch([5, 6], 2), 8)
    assert (made.drawn, made.tree.ids) == (2, (1, 2, 5, 6))
    assert made.probs[2:].tolist() == torch.eye(8)[[5, 6]].tolist()
    assert made.first(3).tree.ids == (1, 2, 5)
    assert made.first(3).probs.shape == (3, 8)
    assert len(made.first(0)) == 0
    alone = module.extended(Draft.empty(), module.SuffixMatch([5], 2), 8)
    assert (alone.drawn, alone.probs.tolist()) == (0, torch.eye(8)[[5]].tolist())


@pytest.fixture(scope="module")
def texts():
    """The greedy text of each drafter, and tokens for each call of the target."""
    made = {}
    for name in ("none", "suffix:8", "model", "model+suffix:8"):
        options = {} if name in ("none", "suffix:8") else {"stopper": "fixed:2"}
        draft = "embedded:stories-draft" if "model" in name else None
        engine = Engine.load("embedded:stories", draft, drafter=name, **options)
        output = engine.generate(REPEATING, SamplingParams(max_tokens=60, temperature=0))[0]
        made[name] = output.text, output.stats.block_efficiency, output.drafter
    return made


def test_the_greedy_text_is_the_targets(texts):
    assert len({text for text, *_ in texts.values()}) == 1
    assert texts["model+suffix:8"][2] == "model+suffix:8"


def test_it_accepts_more_than_either_part(texts):
    assert texts["model+suffix:8"][1] > max(texts["model"][1], texts["suffix:8"][1]) + 0.2


@pytest.mark.parametrize("rule", ["block", "mixture:0.5", "typical"])
def test_a_grammar_holds_also_under_rules_that_accept_more(rule):
    engine = Engine.load(
        "embedded:stories", "embedded:stories-draft", drafter="model+suffix:8", stopper="fixed:2", verifier=rule
    )
    params = SamplingParams(max_tokens=24, seed=2, n=4, grammar="regex:([a-z]{1,3} )*")
    for made in engine.generate(REPEATING, params):
        assert all(each.isalpha() and len(each) <= 3 for each in made.text.split())


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_drafts_keep_to_the_limit_of_a_request(limit):
    engine = Engine.load("embedded:stories", "embedded:stories-draft", drafter="model+suffix:8", stopper="fixed:2")
    output = engine.generate(REPEATING, Params(max_tokens=limit, temperature=0))[0]
    assert len(output.token_ids) == limit


def test_a_prediction_extends_a_chain():
    lookup = SuffixDrafter(4, shared=False)
    engine = Engine.load("embedded:stories", drafter="none")
    request = engine.add([5, 6], SamplingParams(max_tokens=8), prediction=None)[0]
    asked = replace(request.draft_request(8), prediction=(11, 12, 13, 14))
    assert lookup.extend(asked, [11, 12]).tokens == [13, 14]
    assert lookup.extend(asked, [11, 13]).tokens == []
    assert lookup.extend(replace(asked, limit=3), [11, 12]).tokens == [13]


@pytest.mark.parametrize("name", ["chains:2+suffix:4", "auto+suffix", "none+suffix", "suffix:4+suffix:4", "x+suffix:2"])
def test_what_cannot_be_extended_is_refused(name):
    with pytest.raises(UserError, match=r"expected a drafter of one drawn chain|got 'x'"):
        find_drafter(name)


def test_rules_for_drafts_of_constant_length_refuse_it():
    assert "constant length" in why_not("model+suffix:4", "fixed:2", "greedy_block")
    assert why_not("model+suffix:4", "fixed:2", "block") is None
