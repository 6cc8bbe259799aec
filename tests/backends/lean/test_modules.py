"""Gemma 4 by the lean forward: transformers' logits, the same bits however a chain is read, drafts, forms, refusals."""

import copy
import functools
import re

import pytest
import torch
import transformers
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed, rounding, unread
from draftproof.backends.heads.published.assistant import AssistantBackend
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.hybrid import HybridLayer, HybridLean
from draftproof.backends.lean.module_backend import LeanModulesBackend, why_unread
from draftproof.backends.loading.by_name import load_backend
from draftproof.backends.loading.in_memory import backend_in_memory
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.stored_backends import rounded
from draftproof.drafters.ngram import NgramDrafter
from draftproof.tree import TokenTree
from support.architectures.check import disturbed
from support.chain_rows import assert_same_bits, off, read
from support.head_references import ASSISTANT_DATA
from support.helpers import engine, random_model
from support.native_levels import needs_native
from support.rounding_attention import RoundingCache, with_rounding_attention

pytestmark = needs_native
IDS = [5, 9, 2, 7, 11, 3, 80, 41, 17, 8, 26, 77, 30, 31, 32]
KINDS = ["sliding_attention", "full_attention"]
SIZES = {
    "vocab_size": 97,
    "vocab_size_per_layer_input": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": KINDS * 2,
    "sliding_window": 6,
    "max_position_embeddings": 256,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "pad_token_id": 0,
    "eos_token_id": None,
    "initializer_range": 0.1,
    "final_logit_softcapping": 2.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
    },
}
VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "tie_word_embeddings": False}
SHARED = {"num_hidden_layers": 6, "layer_types": KINDS * 3, "num_kv_shared_layers": 3}
FORMS = {
    "plain": {},  # heads of two sizes
    "keys are values": VALUES,
    "embeddings": {"hidden_size_per_layer_input": 24},
    # transformers fails where keys are shared without embeddings in layers
    "shared keys": {**SHARED, "num_key_value_heads": 1, "hidden_size_per_layer_input": 8},
    "E2B": {**SHARED, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 24, "tie_word_embeddings": False},
    "one size": {"global_head_dim": 16, "final_logit_softcapping": None},
    "26B": {**VALUES, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32},
}
FAST = ("keys are values", "E2B", "26B")
DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def model(name, dtype=torch.float32):
    """Of the form, with norms and factors that are not ones, so that leaving one out shows."""
    made = random_model(transformers.Gemma4TextConfig(**{**SIZES, **FORMS[name]}))
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for place, weights in made.named_parameters():
            if "norm" in place or place.endswith("scale"):
                weights.add_(0.3 * torch.randn(weights.shape, generator=source))
            if place.endswith("post_feedforward_layernorm_2.weight"):
                weights.mul_(0.2)  # rounding to 16 bits decides which expert is the last: its share should be small
        for number, layer in enumerate(made.model.layers):
            layer.layer_scalar.fill_(0.75 + 0.125 * number)
    return made.to(dtype)


packed = functools.partial(LeanModulesBackend, pack=True)


@functools.cache
def backend(name, dtype=torch.float32):
    return packed(copy.deepcopy(model(name, dtype)), name=name)


def own(name, ids=IDS):
    with torch.inference_mode():
        return model(name)(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("name", FORMS)
def test_logits_are_those_of_transformers(name):
    target = backend(name)
    assert (target.kind, rounding(target)) == ("lean", "")
    assert off(read(target, target.open(), IDS[:1], IDS[1:]), own(name)) < 1e-5
    double = copy.deepcopy(model(name)).double()
    double.set_experts_implementation("eager")
    with torch.inference_mode():
        right = double(torch.tensor([IDS])).logits[0]
    assert off(read(target, target.open(), IDS[:1], IDS[1:]), right) < 1e-5


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("keys are values", "turned"),
        ("keys are values", "source"),
        ("plain", "leaving"),
        ("plain", "kind"),
        ("embeddings", "embedded"),
        ("E2B", "source"),
        ("26B", "experts_in"),
        ("26B", "experts_out"),
        ("26B", "gated_out"),
        ("26B", "scales"),
    ],
)
def test_other_layers_have_other_logits(name, part, monkeypatch):
    """Negative control of the comparison with transformers: a part is left out, or another layer's keys are read."""
    begin = HybridLayer.__init__

    def changed(self, layer, number, *given, **more):
        begin(self, layer, number, *given, **more)
        if part == "source" and number > 1:
            self.source = number - 2
        elif part == "turned" and self.turned is not None:
            self.turned.heads -= self.heads.keys  # values are not normed
        elif part == "leaving":
            self.leaving = 1.0
        elif part == "kind":
            self.kind = "full_attention"
        elif part == "scales":
            self.mixture.arguments.scales = None  # of the shares of experts
        elif part == "experts_in":
            self.experts_in = self.between
        elif part in ("experts_out", "gated_out"):
            getattr(self, part).scaled.fill_(8.0)  # that of weights of ones

    if part == "embedded":
        make = HybridLean.embedded
        monkeypatch.setattr(HybridLean, "embedded", lambda *given: make(*given).roll(1, -1))
    monkeypatch.setattr(HybridLayer, "__init__", changed)
    target = packed(copy.deepcopy(model(name)), name=name, check=False)
    found = off(read(target, target.open(), IDS[:1], IDS[1:]), own(name))
    assert found > 1e-4
    with pytest.raises(UserError, match="does not reproduce its own logits"):
        packed(copy.deepcopy(model(name)), name=name)


@pytest.mark.grid(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_a_chain_has_the_same_bits_however_it_is_read(name, dtype):
    target = backend(name, dtype)
    assert rounding(target) == ""
    assert_same_bits(target, IDS)


@pytest.mark.parametrize("name", FAST)
def test_sessions_fork_and_refused_drafts_leave_no_trace(name):
    target = backend(name)
    whole = read(target, target.open(), IDS[:1], IDS[1:])
    session = target.open()
    read(target, session, IDS[:4], [*IDS[4:6], 90, 91])
    left = unread(session, IDS[:12])
    assert left == IDS[6:12]
    twin = session.fork(6)
    for each in (session, twin):
        assert torch.equal(read(target, each, IDS[6:12], IDS[12:]), whole[11:])
    nodes = TokenTree(torch.tensor([90, IDS[5], IDS[6]]), (-1, -1, 1))
    session = target.open()
    found = target.forward([Feed(session, IDS[:5], nodes)])[0].logits
    torch.testing.assert_close(found[[0, 2, 3]], whole[4:7], rtol=1e-4, atol=1e-4)
    session.keep(5, (1, 2))
    torch.testing.assert_close(read(target, session, IDS[7:9]), whole[8:9], rtol=1e-4, atol=1e-4)


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", FORMS)
def test_texts_are_those_of_transformers_with_and_without_drafts(name):
    prompts = [IDS * 2, IDS[:3]]
    expected = []
    for prompt in prompts:
        with torch.inference_mode():
            made = model(name).generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24, min_new_tokens=24)
        expected.append(made[0, len(prompt) :].tolist())
    assert len(set(expected[0])) > 4
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    for drafter in (None, NgramDrafter()):
        outputs = Engine(backend(name), drafter, eos_token_ids=()).generate(prompts, params)
        assert [list(output.token_ids) for output in outputs] == expected
        assert all(output.same_bits for output in outputs)
    few = backend(name).quantized(4)
    assert isinstance(few, LeanModulesBackend)
    outputs = engine(backend(name), few, length=3, tokenizer=None, eos_token_ids=()).generate(prompts, params)
    assert [list(output.token_ids) for output in outputs] == expected
    assert sum(output.stats.num_accepted_tokens for output in outputs) > 0


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", FAST)
def test_weights_of_few_bits_are_those_of_the_modules(name, bits):
    target = rounded(packed(copy.deepcopy(model(name)), name=name), bits)
    assert isinstance(target, LeanModulesBackend)
    assert target.few_bits
    assert (target.facts.bits, rounding(target)) == (bits, "")
    found = read(target, target.open(), IDS[:1], IDS[1:])
    with torch.inference_mode():
        few = target.model(torch.tensor([IDS])).logits[0]
    assert off(found, few) < 0.05, "inputs of 8 bits may be rounded to the next number"
    most = {("26B", 8): 0.3, ("26B", 4): 1.0}.get(
        (name, bits), 0.1 if bits == 8 else 0.6
    )  # tokens choose other experts
    assert 1e-3 < off(found, own(name)) < most


@pytest.mark.parametrize("name", FAST)
def test_shared_keys_take_no_memory_and_states_between_layers_are_those_of_transformers(name):
    target = packed(copy.deepcopy(model(name)), name=name, check=False)
    modules = HFBackend(copy.deepcopy(model(name)), name=name, check=False)
    last = len(target.lean.layers)
    for each in (target, modules):
        each.record_states((0, 2, last))
        session = each.open()
        each.forward([Feed(session, IDS)])
        states = session.states_of((0, 2, last))
        if each is target:
            found = states
    torch.testing.assert_close(found, states, rtol=1e-4, atol=1e-4)
    assert target.cache.token_nbytes == modules.cache.token_nbytes


@pytest.mark.parametrize("name", ["E2B", "26B"])
def test_new_weights_are_read(name):
    target, other = packed(copy.deepcopy(model(name)), name="x", check=False), disturbed(model(name))
    with torch.inference_mode():
        expected = other(torch.tensor([IDS])).logits[0]
    assert off(read(target, target.open(), IDS[:1], IDS[1:]), expected) > 1e-3
    made = target.with_weights(other)
    assert off(read(made, made.open(), IDS[:1], IDS[1:]), expected) < 1e-5
    assert rounding(made) == ""
    again = LeanModulesBackend(copy.deepcopy(model(name)), name="x").with_weights(other.state_dict())
    assert off(read(again, again.open(), IDS[:1], IDS[1:]), expected) < 1e-5
    lacking = {name: each for name, each in other.state_dict().items() if "layers.1.mlp" not in name}
    with pytest.raises(UserError, match=r"the new weights lack model\.layers\.1\.mlp"):
        made.with_weights(lacking)


def over_bytes(name, *, digits):
    """Logits of transformers over keys and values of 8 bits, with the roundings of native attention."""
    whole = copy.deepcopy(model(name))
    with_rounding_attention(whole, torch.int8, digits=digits)
    with torch.inference_mode():
        return whole(torch.tensor([IDS]), past_key_values=RoundingCache(torch.int8)).logits[0]


@pytest.mark.parametrize("name", FAST)
def test_keys_and_values_may_have_8_bits(name):
    target = packed(copy.deepcopy(model(name)), name=name, check=False)
    target.store_kv(torch.int8)
    whole = read(target, target.open(), IDS[:1], IDS[1:])
    assert min(off(whole, over_bytes(name, digits=each)) for each in (False, True)) < 0.01  # by the level
    assert off(whole, own(name)) > 0.02, "the rounding shows"
    session = target.open()
    assert torch.equal(torch.cat([read(target, session, [token]) for token in IDS]), whole)
    with pytest.raises(UserError, match="without kv_dtype int8"):
        AssistantBackend(str(ASSISTANT_DATA / "shared" / "assistant"), target)
    with pytest.raises(UserError, match="kv_dtype: expected auto"):
        LeanModulesBackend(model(name), name=name, check=False).store_kv(torch.int8)


@pytest.mark.parametrize("name", ["plain", "26B"])
def test_the_first_layers_may_draft(name):
    target, modules = backend(name), HFBackend(copy.deepcopy(model(name)), name=name, check=False)
    first, expected = target.first_layers(2), modules.first_layers(2)
    assert (type(first), first.cache) == (LeanModulesBackend, target.cache)
    found, right = (read(each, each.open(), IDS[:1], IDS[1:]) for each in (first, expected))
    assert off(found, right) < 1e-5
    assert off(found, own(name)) > 1e-2


@pytest.mark.parametrize("name", FAST)
def test_weights_are_kept_once(name):
    """Packed linear layers have no plain weights beside them; a tied table is read where it is."""
    target = packed(copy.deepcopy(model(name)), name=name, check=False)
    plain = [each for each in target.model.modules() if isinstance(each, torch.nn.Linear)]
    assert not plain
    head, table = target.model.get_output_embeddings().product, target.model.get_input_embeddings().weight
    tied = model(name).config.tie_word_embeddings
    assert (head.numbers.data_ptr() == table.data_ptr()) is tied
    assert torch.equal(target.output_rows(torch.tensor([3, 5])), model(name).get_output_embeddings().weight[[3, 5]])


def test_passes_of_many_tokens_are_left_to_the_modules_where_weights_stay(monkeypatch):
    target = LeanModulesBackend(model("E2B"), name="x")
    assert "passes of more than 16 tokens are those of transformers' own modules" in rounding(target)
    passes = []
    monkeypatch.setattr(HybridLean, "__call__", counted(HybridLean.__call__, passes))
    session, expected = target.open(), own("E2B", IDS * 2)
    assert off(read(target, session, IDS + IDS[:5]), expected[19:20]) < 1e-5
    assert not passes
    assert off(read(target, session, [IDS[5]], IDS[6:]), expected[20:]) < 1e-5
    assert passes


def counted(run, passes):
    def noted(*given, **more):
        passes.append(1)
        return run(*given, **more)

    return noted


def test_loading_takes_it_by_itself_and_hf_may_be_named(tmp_path, caplog):
    model("E2B").save_pretrained(tmp_path)
    for asked, kind in (("auto", LeanModulesBackend), ("lean", LeanModulesBackend), ("hf", HFBackend)):
        made = load_backend(str(tmp_path), LoadOptions(backend=asked, dtype="float32"))
        assert type(made) is kind
        assert off(read(made, made.open(), IDS[:1], IDS[1:]), own("E2B")) < 1e-5
    whole = model("E2B")
    mine = backend_in_memory(whole)
    assert type(mine) is LeanModulesBackend
    assert {each.data_ptr() for each in mine.model.parameters()} == {each.data_ptr() for each in whole.parameters()}


class OddRouter(type(model("26B").model.layers[0].router)):
    """One that does something else with logits, shares or experts."""

    how = ""

    def forward(self, x):
        probabilities, shares, chosen = super().forward(x)
        if self.how == "shares":
            return probabilities, shares * 1.5, chosen
        if self.how == "experts":
            return probabilities, shares, chosen.flip(-1)
        return (probabilities**2 / (probabilities**2).sum(-1, keepdim=True)), shares, chosen


@pytest.mark.parametrize("how", ["shares", "experts", "logits"])
def test_another_router_is_seen(how):
    odd = copy.deepcopy(model("26B"))
    odd.model.layers[2].router.__class__ = OddRouter
    odd.model.layers[2].router.how = how
    assert "a native mixture like its Gemma4TextExperts computes something else" in why_unread(odd)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda layer: layer.router.register_buffer("bias", torch.zeros(8)), "its router has the parts bias, "),
        (lambda layer: setattr(layer.router.norm, "eps", 0.5), "read rows with different norms"),
        (lambda layer: layer.pre_feedforward_layernorm_2.weight.data[3:5].zero_(), "norm of .* experts read has zeros"),
        (lambda layer: delattr(layer, "post_feedforward_layernorm_2"), "only a part of what experts .* need"),
        (lambda layer: layer.add_module("mixer", torch.nn.Identity()), "have parts that are not known .*mixer"),
    ],
)
def test_what_is_not_known_is_read_by_transformers_own_modules(change, why):
    odd = copy.deepcopy(model("26B"))
    change(odd.model.layers[1])
    assert re.search(why, why_unread(odd))


def test_what_is_not_known_may_not_be_named_lean():
    odd = copy.deepcopy(model("26B"))
    odd.model.layers[1].router.register_buffer("bias", torch.zeros(8))
    assert type(backend_in_memory(odd)) is HFBackend
    with pytest.raises(UserError, match=r"x has no lean forward: its router has the parts bias, .*; use backend hf"):
        packed(odd, name="x")


def test_a_last_norm_without_weights_is_not_known():
    bare = copy.deepcopy(model("E2B"))
    bare.model.norm = OlmoLayerNorm(SIZES["hidden_size"]).eval()
    assert type(backend_in_memory(bare)) is HFBackend
    with pytest.raises(UserError, match="its OlmoLayerNorm is not a norm with weights only"):
        packed(bare, name="x")


def test_without_native_operations_transformers_own_modules_read_it(monkeypatch):
    monkeypatch.setenv("DRAFTPROOF_NATIVE", "0")
    assert type(backend_in_memory(copy.deepcopy(model("E2B")))) is HFBackend
