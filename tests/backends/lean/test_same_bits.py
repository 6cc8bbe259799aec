"""Models of any width have the same bits alone, in every batch and in every draft; engines say where that is not so."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
import transformers

from draftproof import Engine, SamplingParams
from draftproof.backends.base import Feed, rounding
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.backend import LeanBackend
from draftproof.backends.lean.native_layers import NativeLayers
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.sampled_tree import SampledTreeDrafter
from draftproof.engine.request import SameText
from draftproof.engine.verifier_parts import make_verifier
from draftproof.native.dispatch import VARIABLE
from draftproof.stoppers.fixed import FixedLength
from draftproof.testing import TableModel
from draftproof.tree import TokenTree
from support.helpers import ROPE, backend, engine
from support.lean_models import BOTH, lively_model
from support.native_levels import LEVELS
from support.recurrent_models import backend as recurrent

DTYPES = [torch.float32, torch.bfloat16]
NARROW = {**ROPE, "intermediate_size": 43}
SIZES = {
    "heads of 8": lambda: transformers.LlamaConfig(**{**NARROW, "vocab_size": 131}),
    "heads of 12": lambda: transformers.LlamaConfig(**{**NARROW, "intermediate_size": 172}, head_dim=12),
    "heads of 20, biases": lambda: transformers.LlamaConfig(
        **NARROW, head_dim=20, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "heads of 80": lambda: transformers.LlamaConfig(**{**NARROW, "num_key_value_heads": 1}, head_dim=80),
    "heads of 250": lambda: transformers.LlamaConfig(**{**NARROW, "num_attention_heads": 2}, head_dim=250),
    "odd hidden states": lambda: transformers.LlamaConfig(
        **{**NARROW, "hidden_size": 35, "num_attention_heads": 5, "num_key_value_heads": 1}, head_dim=10
    ),
    "window": lambda: transformers.MistralConfig(**NARROW, head_dim=18, sliding_window=7),
    "norms of heads": lambda: transformers.Qwen3Config(**NARROW, head_dim=12),
    "norms of all heads": lambda: transformers.Olmo2Config(**NARROW),
    "limits of scores and logits": lambda: transformers.Gemma2Config(
        **NARROW,
        head_dim=24,
        sliding_window=6,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "two kinds of angles": lambda: transformers.Gemma3TextConfig(**NARROW, head_dim=10, **BOTH),
    "part of a head turned": lambda: transformers.GlmConfig(**NARROW, head_dim=20, pad_token_id=0, attention_bias=True),
}
needs_native = pytest.mark.skipif(not LEVELS, reason="no native operations here")


@pytest.fixture(params=dict.fromkeys((*LEVELS[:1], *LEVELS[-1:])))
def level(request, monkeypatch):
    """The best build that runs here, and the one for any processor."""
    monkeypatch.setenv(VARIABLE, request.param)
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request, level):
    return request.param


@functools.cache
def model(name, dtype):
    return lively_model(SIZES[name](), dtype)


def lean(name, dtype):
    return LeanBackend(copy.deepcopy(model(name, dtype)))


@pytest.mark.grid(13)
@pytest.mark.parametrize("name", SIZES)
def test_logits_are_the_same_bits_however_a_chain_is_read(name, dtype):
    made = lean(name, dtype)
    assert isinstance(made.lean.run_layers, NativeLayers)
    assert rounding(made) == ""
    tokens = [(7 * i * i) % 97 for i in range(60)]

    def start(size):
        session = made.open()
        made.forward([Feed(session, tokens[:size])])
        return session

    alone = start(40)
    expected = torch.cat([made.forward([Feed(alone, [token])])[0].logits for token in tokens[40:50]])
    drafted = TokenTree.chain(torch.tensor(tokens[41:50]))
    threads = torch.get_num_threads()
    try:
        for some in (1, 2):
            torch.set_num_threads(some)
            assert torch.equal(made.forward([Feed(start(40), tokens[40:41], drafted)])[0].logits, expected)
            pieces = start(17)
            made.forward([Feed(pieces, tokens[17:40])])
            beside = [Feed(start(size), tokens[:3]) for size in (3, 25, 55)]
            last = made.forward([beside[0], Feed(pieces, tokens[40:44]), *beside[1:]])[1].logits
            assert torch.equal(last[-1], expected[3])
            assert not torch.equal(last[-1], expected[4]), "other tokens have other logits"
    finally:
        torch.set_num_threads(threads)


PROMPTS = [[1, 2, 3], [4, 4, 4, 4, 9, 4, 4], [11] * 20, [(5 * i) % 97 for i in range(33)]]


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    ("level", "dtype"),
    [
        pytest.param(level, dtype, marks=[pytest.mark.slow] * (place > 0))
        for place, level in enumerate(dict.fromkeys((*LEVELS[:1], *LEVELS[-1:])))
        for dtype in DTYPES
    ],
    indirect=True,
)
def test_texts_and_log_probabilities_are_the_same_alone_in_a_batch_and_with_drafts(name, dtype):
    """By rule gumbel, whose texts do not depend on drafts; that logits do not, is tested for both levels above."""
    params = SamplingParams(seed=5, max_tokens=12, ignore_eos=True, logprobs=2)

    def answers(drafter, batch):
        made = drafter(lean(name, dtype), batch)
        assert not made.rounding
        outputs = [
            output
            for start in range(0, len(PROMPTS), batch)
            for output in made.generate(PROMPTS[start : start + batch], params)
        ]
        assert all((output.same_bits, output.same_text) == (True, SameText.YES) for output in outputs)
        return [(output.token_ids, output.logprobs) for output in outputs], outputs

    def plain(target, batch):
        return engine(target, None, "gumbel", tokenizer=None, eos_token_ids=(), max_batch=batch)

    def drafting(target, batch):
        draft = HFBackend(copy.deepcopy(model(name, dtype)).float(), check=False)
        return engine(target, draft, "gumbel", length=5, tokenizer=None, eos_token_ids=(), max_batch=batch)

    expected, _ = answers(plain, 1)
    assert answers(plain, 4)[0] == expected
    for batch in (1, 4):
        found, outputs = answers(drafting, batch)
        assert found == expected
        assert sum(output.stats.num_accepted_tokens for output in outputs) > 0
    other = plain(lean(name, dtype), 4).generate(PROMPTS, replace(params, seed=6))
    assert [output.token_ids for output in other] != [ids for ids, _ in expected], "another seed is seen"


# --- what engines say -------------------------------------------------------------------------------------------------


def said(target, drafter=None, **options):
    """What an engine says of its logits, and its outputs of their texts."""
    made = Engine(target, drafter, eos_token_ids=(), **options)
    (output,) = made.generate([[1, 2, 3]], SamplingParams(max_tokens=2, seed=1, ignore_eos=True))
    assert output.same_bits == (not made.rounding)
    assert output.to_dict()["same_bits"] == output.same_bits
    assert output.to_dict()["same_text"] == output.same_text
    return made.rounding, output.same_text


@needs_native
def test_lean_models_are_the_same_bits_in_float32_and_bfloat16_only(monkeypatch):
    for dtype in DTYPES:
        monkeypatch.setenv(VARIABLE, "1")
        assert said(lean("heads of 8", dtype)) == ("", SameText.YES)
        monkeypatch.setenv(VARIABLE, "0")
        why, text = said(lean("heads of 8", dtype))
        assert "DRAFTPROOF_NATIVE" in why
        assert text == SameText.BUT_FOR_ROUNDING
    monkeypatch.setenv(VARIABLE, "1")
    why, text = said(LeanBackend(lively_model(SIZES["heads of 8"](), torch.float16), check=False))
    assert "no native operations on float16" in why
    assert text == SameText.BUT_FOR_ROUNDING
    large = transformers.LlamaConfig(**ROPE, head_dim=514)
    assert "514" in rounding(LeanBackend(lively_model(large), check=False))


@pytest.mark.parametrize("make", [lambda: backend("llama"), lambda: recurrent("mamba")])
def test_transformers_own_forward_pass_is_not(make):
    made = make()
    why, text = said(made)
    assert f"backend {made.kind}" in why
    assert text == SameText.BUT_FOR_ROUNDING


def test_a_backend_that_says_nothing_is_not_known_to_be():
    assert rounding(TableModel(5, 1)) == ""
    silent = TableModel(5, 1)
    del silent.rounding
    assert "table:1 does not say" in rounding(silent)


def test_trees_are_summed_in_another_order():
    drafter = SampledTreeDrafter(DraftModel(TableModel(5, 2), vocab_size=5), FixedLength(2), chains=2)
    why, _ = said(TableModel(5, 1), drafter, verifier=make_verifier("trie_block"))
    assert "trees" in why


@pytest.mark.parametrize(
    ("rule", "temperature", "text"),
    [
        ("gumbel", 1.0, SameText.YES),
        ("block", 1.0, SameText.BY_DRAFTS),
        ("block", 0.0, SameText.YES),
        ("mixture:0.5", 0.0, SameText.BY_DRAFTS),
    ],
)
def test_whether_texts_depend_on_drafts(rule, temperature, text):
    made = engine(TableModel(5, 1), TableModel(5, 2), rule, tokenizer=None, eos_token_ids=())
    params = SamplingParams(max_tokens=3, temperature=temperature, seed=1, ignore_eos=True)
    assert made.generate([[1, 2]], params)[0].same_text == text
    plain = engine(TableModel(5, 1), None, rule, tokenizer=None, eos_token_ids=())
    assert plain.generate([[1, 2]], params)[0].same_text == SameText.YES
