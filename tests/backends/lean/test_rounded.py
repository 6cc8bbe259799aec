"""Targets whose weights are rounded when they are loaded: near to the original, and exact as what they are."""

import pytest
import torch
import transformers

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed
from draftproof.backends.lean.backend import LeanBackend
from draftproof.backends.loading.load import load
from draftproof.backends.loading.options import LoadOptions
from draftproof.engine.options import EngineOptions
from draftproof.tree import TokenTree
from support.helpers import ROPE, random_model

IDS = [5, 9, 2, 7, 11, 3, 8, 1, 6, 4, 10, 12]
WIDE = {**ROPE, "head_dim": 32}


def rounded(bits, **changes):
    model = random_model(transformers.LlamaConfig(**{**WIDE, **changes}), 3)
    return LeanBackend(model, name="x").rounded(bits)


def logits_of(backend, ids=IDS):
    return backend.forward([Feed(backend.open(), ids[:1], TokenTree.chain(torch.tensor(ids[1:])))])[0].logits


def off(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}], ids=["two tables", "one table"])
def test_logits_are_near_those_of_the_original(changes):
    exact = logits_of(LeanBackend(random_model(transformers.LlamaConfig(**{**WIDE, **changes}), 3), name="x"))
    eight, four = (off(logits_of(rounded(bits, **changes)), exact) for bits in (8, 4))
    assert 1e-4 < eight < 0.05
    assert eight < four < 0.5


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_has_the_same_bits_alone_and_among_others(bits):
    backend = rounded(bits)
    assert backend.rounding == ""
    whole, session = logits_of(backend), backend.open()
    alone = torch.stack([backend.forward([Feed(session, [token])])[0].logits[-1] for token in IDS])
    assert torch.equal(alone, whole)


def test_the_output_layer_of_a_target_has_8_bits_everywhere():
    backend = rounded(4)
    assert backend.lean.head.weight.bits == 8
    assert {layer.down.weight.bits for layer in backend.lean.layers} == {4}
    assert backend.facts.bits == 4


def test_texts_are_equal_with_and_without_drafts():
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    plain, drafted = (
        Engine.load("embedded:target", **made, weights="int4").generate("Once upon a time", params)[0]
        for made in ({"drafter": "none"}, {"draft": "embedded:draft", "drafter": "model", "stopper": "fixed:3"})
    )
    assert plain.token_ids == drafted.token_ids
    assert drafted.stats.num_accepted_tokens > 0


def test_it_is_said(caplog):
    backend = load("embedded:target", LoadOptions(weights="int8")).backend
    assert backend.facts.bits == 8
    assert "embedded:target are rounded to 8 bits" in caplog.text


def test_it_cannot_be_rounded_twice_or_get_new_weights():
    backend = rounded(8)
    with pytest.raises(UserError, match="its weights have 8 bits already"):
        backend.quantized(4)
    with pytest.raises(UserError, match="weights of x cannot be changed"):
        backend.with_weights({})


def test_other_values_are_refused():
    with pytest.raises(UserError, match="weights: expected one of auto, int4, int8, got 'int2'"):
        EngineOptions(weights="int2")
    with pytest.raises(UserError, match="activations: expected one of int8, float, got 'int4'"):
        EngineOptions(activations="int4")
