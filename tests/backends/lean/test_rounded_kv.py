"""Targets whose keys and values have fewer bits: what they compute, and that drafts and batches change nothing."""

import copy
import functools

import pytest
import torch
import transformers

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed, rounding
from draftproof.backends.cache import rounding as of_cache
from draftproof.backends.heads.self_draft import EarlyExitBackend
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.backend import LeanBackend
from draftproof.backends.lean.graph_backend import GraphForward
from draftproof.backends.loading.load import load
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.model_info import cache_name
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.none import NoDrafter
from draftproof.engine.options import EngineOptions
from draftproof.engine.verifier_parts import make_verifier
from draftproof.native.dispatch import VARIABLE
from draftproof.stoppers.fixed import FixedLength
from draftproof.testing import TableModel, engine_distribution, total_variation
from draftproof.tree import TokenTree
from support.helpers import ROPE, random_model
from support.lean_models import BOTH, lively_model
from support.native_levels import LEVELS, needs_native
from support.rounding_attention import RoundingCache, with_rounding_attention
from type_checks import checks_off

KEPT = [torch.int8, torch.bfloat16]
FORMATS = [(torch.float32, torch.int8), (torch.bfloat16, torch.int8), (torch.float32, torch.bfloat16)]
WIDE = {**ROPE, "head_dim": 32}
MODELS = {
    "heads of 32": lambda: transformers.LlamaConfig(**WIDE),
    "heads of 20, biases": lambda: transformers.LlamaConfig(**ROPE, head_dim=20, attention_bias=True),
    "window": lambda: transformers.MistralConfig(**ROPE, head_dim=18, sliding_window=7),
    "limits of scores": lambda: transformers.Gemma2Config(
        **ROPE, head_dim=24, sliding_window=6, query_pre_attn_scalar=24, attn_logit_softcapping=2.0
    ),
    "two kinds of layers": lambda: transformers.Gemma3TextConfig(**ROPE, head_dim=10, **BOTH),
}
TOKENS = [(7 * i * i) % 97 for i in range(60)]


@functools.cache
def model(name, dtype):
    return lively_model(MODELS[name](), dtype)


def rounded(name, dtype=torch.float32, kept=torch.int8):
    made = LeanBackend(copy.deepcopy(model(name, dtype)))
    made.store_kv(kept)
    return made


IDS = TOKENS[:24]


def own_logits(name, kept):
    made, tree = rounded(name, kept=kept), TokenTree.chain(torch.tensor(IDS[1:]))
    return made.forward([Feed(made.open(), IDS[:1], tree)])[0].logits


def their_logits(name, cache, *, digits=None):
    """Logits of transformers over a cache; with `digits` true or false, what meets its keys is rounded, too."""
    whole = copy.deepcopy(model(name, torch.float32))
    if digits is not None:
        with_rounding_attention(whole, cache.kept, digits=digits)
    with torch.inference_mode():
        return whole(torch.tensor([IDS]), **{cache_name(whole): cache}).logits[0]


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_over_rounded_keys_and_values(name, kept, monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")
    found, theirs = own_logits(name, kept), their_logits(name, RoundingCache(kept))
    plain = their_logits(name, transformers.DynamicCache())
    # a number on the border of two steps may be rounded to either side
    assert (found - theirs).abs().max() < 0.3 * (plain - theirs).abs().max()
    assert (found - theirs).abs().mean() < 0.03 * (plain - theirs).abs().mean()


@needs_native
@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_native_attention_rounds_to_bfloat16_what_meets_such_keys(name, level, kept, monkeypatch):
    monkeypatch.setenv(VARIABLE, level)
    found, theirs = own_logits(name, kept), their_logits(name, RoundingCache(kept))
    digits = (False, True) if kept == torch.int8 else (False,)  # by the level
    plain = their_logits(name, transformers.DynamicCache())
    shown = (plain - theirs).abs().mean()
    off = min((found - their_logits(name, RoundingCache(kept), digits=each)).abs().mean() for each in digits)
    # queries and weights are on borders of two steps, too
    assert off < 0.06 * shown
    assert (found - theirs).abs().mean() > 0.3 * shown, "negative control: only keys and values are rounded"


@pytest.mark.grid(10)
@needs_native
@pytest.mark.parametrize(("dtype", "kept"), FORMATS, ids=str)
@pytest.mark.parametrize("level", dict.fromkeys((*LEVELS[:1], *LEVELS[-1:])))
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_same_bits_however_a_chain_is_read(name, level, dtype, kept, monkeypatch):
    monkeypatch.setenv(VARIABLE, level)
    made = rounded(name, dtype, kept)
    assert rounding(made) == ""

    def start(size):
        session = made.open()
        made.forward([Feed(session, TOKENS[:size])])
        return session

    alone = start(40)
    expected = torch.cat([made.forward([Feed(alone, [token])])[0].logits for token in TOKENS[40:50]])
    drafted = TokenTree.chain(torch.tensor(TOKENS[41:50]))
    threads = torch.get_num_threads()
    try:
        for some in (1, 2):
            torch.set_num_threads(some)
            assert torch.equal(made.forward([Feed(start(40), TOKENS[40:41], drafted)])[0].logits, expected)
            pieces = start(17)
            made.forward([Feed(pieces, TOKENS[17:40])])
            beside = [Feed(start(size), TOKENS[:3]) for size in (3, 25, 55)]
            last = made.forward([beside[0], Feed(pieces, TOKENS[40:44]), *beside[1:]])[1].logits
            assert torch.equal(last[-1], expected[3])
            assert not torch.equal(last[-1], expected[4]), "other tokens have other logits"
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("name", ["heads of 32", "window"])
def test_a_branch_of_a_tree_and_a_copy_of_a_session_are_the_chain(name, kept):
    made = rounded(name, kept=kept)
    session = made.open()
    made.forward([Feed(session, TOKENS[:20])])
    copied = session.fork(15)
    tree = TokenTree(torch.tensor([1, 2, 3, 4]), (-1, 0, -1, 2))
    made.forward([Feed(session, [9], tree)])
    session.keep(21, (2, 3))  # the second branch
    found = made.forward([Feed(session, [5])])[0].logits
    made.forward([Feed(copied, TOKENS[15:20])])
    for branch, same in (([9, 3, 4], True), ([9, 1, 2], False)):
        chain = copied.fork(20)
        made.forward([Feed(chain, branch)])
        other = made.forward([Feed(chain, [5])])[0].logits
        assert torch.allclose(other, found, atol=1e-4) is same  # sums of a branch are taken in another order


# --- engines ------------------------------------------------------------------------------------------------------

PROMPTS = ["Once upon a time", "The little dog was very", "One day, Tim and his mom went to the park. " * 6]
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
DRAFTERS = (
    {"draft": "embedded:stories-draft", "drafter": "model", "stopper": "fixed:4"},
    {"draft": "embedded:stories-draft", "drafter": "tree:2x2", "stopper": "fixed:2"},
    {"drafter": "early_exit:2", "stopper": "fixed:4"},
    {"drafter": "quantized", "stopper": "fixed:4"},
    {"drafter": "ngram:4"},
)


def texts(batch, kv_dtype, **made):
    with_options = Engine.load("embedded:stories", kv_dtype=kv_dtype, check=False, **made)
    first = [out for group in batch for out in with_options.generate(group, GREEDY)]
    again = [out for group in batch for out in with_options.generate(group, GREEDY)]  # sessions are reused
    assert [out.token_ids for out in again] == [out.token_ids for out in first]
    if made["drafter"] != "none":
        assert sum(out.stats.num_accepted_tokens for out in first) > 0
    return [out.token_ids for out in first]


@pytest.mark.parametrize("kv_dtype", ["int8", "bfloat16"])
def test_texts_are_equal_with_and_without_drafts_alone_and_in_batches(kv_dtype):
    expected = texts([[prompt] for prompt in PROMPTS], kv_dtype, drafter="none")
    assert texts([PROMPTS], kv_dtype, drafter="none") == expected
    for made in DRAFTERS:
        assert texts([PROMPTS], kv_dtype, **made) == expected, made


def small(dtype, *, shares=False, kept=torch.int8, monkeypatch):
    """A model of three tokens; the scale of its keys and values may be one for all positions of a pass."""
    monkeypatch.setenv(VARIABLE, "auto" if dtype == torch.float32 else "0")
    if shares:

        def of_a_pass(x):
            scales = (x.abs().amax((0, 2, 3), keepdim=True) / 7).expand(*x.shape[:-1], 1).float()
            return (x / scales).round().to(torch.int8), scales

        monkeypatch.setattr(of_cache, "rounded", of_a_pass)
        monkeypatch.setattr(of_cache, "rounded_keys", lambda keys: of_a_pass(of_cache.hadamard(keys)))
    config = transformers.LlamaConfig(**{**WIDE, "vocab_size": 3, "bos_token_id": None, "eos_token_id": None})
    made = LeanBackend(lively_model(config, dtype), check=False)
    made.store_kv(kept)
    return made


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("verifier", "dtype", "kept", "tolerance"),
    [
        ("token", torch.float32, torch.int8, 1e-5),
        ("block", torch.float32, torch.int8, 1e-5),
        ("block", torch.float64, torch.int8, 1e-9),
        ("token", torch.float32, torch.bfloat16, 1e-5),
        ("block", torch.float32, torch.bfloat16, 1e-5),
    ],
)
def test_the_output_distribution_is_that_of_the_target_alone(verifier, dtype, kept, tolerance, monkeypatch):
    assert distance(verifier, small(dtype, kept=kept, monkeypatch=monkeypatch)) < tolerance


def test_a_scale_that_a_pass_shares_changes_the_distribution(monkeypatch):
    assert distance("block", small(torch.float64, shares=True, monkeypatch=monkeypatch)) > 1e-4


def distance(verifier, target):
    """Total variation between outputs with drafts and without, by enumerating every draw."""
    draft = TableModel(3, 2, order=2)

    def with_drafter(part):
        return lambda rng: Engine(target, part(), make_verifier(verifier), round_rng=rng)

    params = SamplingParams(max_tokens=3, ignore_eos=True)
    drafted = with_drafter(lambda: ModelDrafter(DraftModel(draft, vocab_size=3), FixedLength(2)))
    with checks_off():
        found, plain = (engine_distribution(made, [0, 2, 1], params) for made in (drafted, with_drafter(NoDrafter)))
    assert len(plain) == 3**3
    return total_variation(found, plain)


# --- the option ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype", "bits"), [("int8", torch.int8, 8), ("bfloat16", torch.bfloat16, 16)])
def test_it_is_said(name, dtype, bits, caplog):
    made = load("embedded:target", LoadOptions(kv_dtype=name)).backend
    assert made.cache.kept == dtype
    assert f"keys and values of embedded:target are rounded to {bits} bits" in caplog.text


def test_the_format_of_the_rows_changes_nothing(caplog):
    made = load("embedded:target", LoadOptions(kv_dtype="float32")).backend
    assert made.cache.kept is None
    assert "keys and values" not in caplog.text
    HFBackend(random_model(transformers.LlamaConfig(**WIDE)), name="x").store_kv(torch.float32)  # as it stores them
    with pytest.raises(
        UserError, match=r"kv_dtype: expected one of auto, bfloat16, int8 for .* dtype is bfloat16, got float32"
    ):
        _ = load("embedded:target", LoadOptions(dtype="bfloat16", kv_dtype="float32")).backend


def test_parts_of_the_model_and_new_weights_have_them_too():
    made = rounded("heads of 32")
    assert EarlyExitBackend(made, 1).cache is made.cache
    assert made.quantized(8).cache is made.cache
    assert made.with_weights(model("heads of 32", torch.float32)).cache.kept == torch.int8
    assert LeanBackend(copy.deepcopy(model("heads of 32", torch.float32))).rounded(8).cache.kept is None


def test_other_values_and_backends_are_refused():
    with pytest.raises(UserError, match="kv_dtype: expected one of auto, float32, bfloat16, int8, got 'fp8'"):
        EngineOptions(kv_dtype="fp8")
    plain = random_model(transformers.LlamaConfig(**WIDE))
    for backend in (HFBackend(plain, name="x"), GraphForward(rounded("heads of 32").facts, LeanBackend(plain).lean)):
        with pytest.raises(UserError, match=r"expected auto for .* on backend .* and cpu, got int8: only backend lean"):
            backend.store_kv(torch.int8)
