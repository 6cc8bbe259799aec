"""Draft models and feature heads with other weights than the target's: `draft_dtype`."""

import pytest
import torch
import transformers

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.heads.feature_head import FeatureBackend
from draftproof.backends.heads.feature_net import FeatureConfig, FeatureNet
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.backend import LeanBackend
from draftproof.backends.loading.options import draft_dtype
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.head import head_drafter
from draftproof.drafters.model import ModelDrafter
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.verifier_parts import make_verifier
from draftproof.stoppers.fixed import FixedLength
from support.feature_heads import model_for
from support.helpers import CONFIGS, assert_output_distribution, random_model
from support.native_levels import needs_native
from support.quantized_drafts import WIDE, tiny

PAIR = ("embedded:stories", "embedded:stories-draft")
GREEDY = SamplingParams(max_tokens=40, temperature=0)


@pytest.mark.grid(2)
@needs_native
@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("drafter", ["model", "chains:2"])
def test_greedy_output_is_the_targets_and_drafts_are_accepted(name, drafter):
    engine = Engine.load(*PAIR, drafter=drafter, stopper="fixed:3", draft_dtype=name)
    (out,) = engine.generate("Once upon a time", GREEDY)
    (plain,) = Engine.load(PAIR[0], drafter="none").generate("Once upon a time", GREEDY)
    assert out.token_ids == plain.token_ids
    assert out.stats.num_accepted_tokens > 10


@needs_native
def test_the_weights_of_the_draft_are_the_quantized_ones():
    facts = {}
    for name in ("auto", "int8", "int4"):
        engine = Engine.load(*PAIR, drafter="model", stopper="fixed:3", draft_dtype=name)
        facts[name] = engine.drafter.model.backend.facts
        assert engine.target.facts.bits is None
    assert [each.bits for each in facts.values()] == [None, 8, 4]
    assert facts["auto"].size == facts["int8"].size * 32 / 9 == facts["int4"].size * 32 / 5, "the prior of costs"


def test_a_float_type_of_the_drafts_own():
    engine = Engine.load(*PAIR, drafter="model", stopper="fixed:3", draft_dtype="bfloat16")
    assert engine.target.dtype == torch.float32
    assert engine.drafter.model.backend.dtype == torch.bfloat16
    (out,) = engine.generate("Once upon a time", GREEDY)
    (plain,) = Engine.load(PAIR[0], drafter="none").generate("Once upon a time", GREEDY)
    assert out.token_ids == plain.token_ids


@pytest.mark.grid(1)
@needs_native
@pytest.mark.parametrize(
    ("rule", "length"),
    [("token", 3), ("block", 3), ("match", 2), pytest.param("match", 3, marks=pytest.mark.slow)],  # a minute
)
def test_exact_output_distribution(rule, length):
    target, small = tiny(), tiny().quantized(4)

    def drafter():
        return ModelDrafter(DraftModel(small, vocab_size=3), FixedLength(2))

    assert_output_distribution(target, drafter, rule, length=length, tolerance=1e-5)


def head(target, bits):
    torch.manual_seed(0)
    config = FeatureConfig(
        target=target.name, vocab_size=97, hidden_size=32, heads=1, key_heads=1, inner_size=48, ids=97
    )
    return model_for(target, FeatureNet(config), bits=bits)


@needs_native
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_feature_head_drafts_nearly_the_same(bits):
    target = LeanBackend(random_model(transformers.LlamaConfig(**WIDE)), name="llama")
    assert isinstance(head(target, bits).backend, FeatureBackend)
    outs = []
    for each in (None, bits):
        drafter = head_drafter(head(target, each), FixedLength(3), "feature_head")
        engine = Engine(target, drafter, make_verifier("block"))
        (out,) = engine.generate([[5, 9, 2]], GREEDY)
        outs.append(out.token_ids)
        assert out.stats.num_draft_tokens > 0
    assert outs[0] == outs[1] == Engine(target).generate([[5, 9, 2]], GREEDY)[0].token_ids


def test_a_head_without_native_products_is_refused(monkeypatch):
    target = HFBackend(random_model(CONFIGS["gpt2"]()), name="gpt2")
    monkeypatch.setenv("DRAFTPROOF_NATIVE", "0")
    with pytest.raises(UserError, match="its products are not native"):
        head(target, 4)


def test_names_and_their_meaning():
    assert draft_dtype("auto", "bfloat16") == ("bfloat16", None)
    assert draft_dtype("float32", "bfloat16") == ("float32", None)
    assert draft_dtype("int4", "bfloat16") == ("bfloat16", 4)
    with pytest.raises(UserError, match=r"draft_dtype: expected one of auto, float32, .*int8.*, got 'int2'"):
        draft_dtype("int2", "auto")


def test_where_nothing_has_weights_of_its_own_it_is_refused():
    with pytest.raises(UserError, match="but there is no draft model"):
        Engine.load("embedded:stories", draft_dtype="bfloat16")
    with pytest.raises(UserError, match=r"choose drafter quantized:4"):
        Engine.load("embedded:stories", draft_dtype="int4")
    target = HFBackend(random_model(CONFIGS["gpt2"]()), name="gpt2")
    with pytest.raises(UserError, match=r"drafter ngram:4 has none"):
        make_drafter("ngram:4", target=target, draft=None, stopper="fixed:4", bits=8)
