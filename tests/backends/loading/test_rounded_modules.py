"""Targets on transformers' modules whose weights are rounded when they are loaded: dense, hybrid, and with experts."""

import copy

import pytest
import torch
import transformers

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.hf.quantized_modules import QuantizedLinear
from draftproof.backends.lean.mixture import StoredMixture
from draftproof.backends.lean.module_backend import LeanModulesBackend
from draftproof.backends.lean.snapshots import LeanSnapshotBackend
from draftproof.backends.loading.load import load
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.stored_backends import StoredBackend, rounded
from draftproof.backends.loading.stored_mixtures import rounded_matrix
from draftproof.backends.products.packed_linear import dense
from draftproof.drafters.ngram import NgramDrafter
from draftproof.native.ggml import WORDS
from draftproof.tree import TokenTree
from support.gguf_modules import module_model
from support.helpers import random_model
from support.packed_checkpoints import IDS, SHAPE, logits_of, off

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
HYBRIDS = ("lfm2", "qwen35", "falcon-h1", "granitehybrid")
DENSE = {
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SHAPE,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "phi": lambda: transformers.PhiConfig(**SHAPE, tie_word_embeddings=False),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=97, n_embd=256, n_layer=2, n_head=4, n_positions=640, eos_token_id=3, bos_token_id=1
    ),
}
MIXTURES = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SHAPE, head_dim=64, **EXPERTS),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**SHAPE, shared_expert_intermediate_size=128, **EXPERTS),
    "mixtral": lambda: transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
}
BESIDE = "gemma4, experts"  # beside the gated part of a layer
RECURRENT = (*HYBRIDS, "qwen35moe", "lfm2moe", "granitehybrid, experts")
ALL = (*RECURRENT, *DENSE, *MIXTURES, BESIDE)


def model_of(name):
    if name == BESIDE:  # all experts are chosen: where each is a large share, another choice is another model
        return module_model(name, top_k_experts=8)
    return module_model(name) if name in RECURRENT else random_model({**DENSE, **MIXTURES}[name](), seed=5)


def rounded_of(name, bits):
    if name == BESIDE:
        return rounded(LeanModulesBackend(model_of(name), pack=True, name=name), bits)
    kind = LeanSnapshotBackend if name in RECURRENT else HFBackend
    return rounded(kind(model_of(name), name=name), bits)


@pytest.fixture(scope="module")
def made():
    """The rounded backends, each made once."""
    held = {}

    def get(name, bits):
        if (name, bits) not in held:
            held[name, bits] = rounded_of(name, bits)
        return held[name, bits]

    return get


def with_numbers_of(backend, name):
    """The original model in floats, with the weights that a backend's numbers stand for."""
    model = copy.deepcopy(model_of(name))
    for path, module in backend.model.named_modules():
        if isinstance(module, QuantizedLinear):
            layer, product = model.get_submodule(path), module.product
            weight = product.dense()
            if isinstance(layer, transformers.pytorch_utils.Conv1D):
                weight = weight.t()
            layer.weight = torch.nn.Parameter(weight.contiguous(), requires_grad=False)
            layer.bias = None if product.bias is None else torch.nn.Parameter(product.bias, requires_grad=False)
        elif isinstance(module, StoredMixture):
            block, bits = model.get_submodule(path), backend.facts.bits
            experts = block if name == BESIDE else block.experts
            for weight in (experts.gate_up_proj, experts.down_proj):
                weight.data.copy_(dense(rounded_matrix(weight.flatten(0, 1), bits)).view_as(weight))
            for each in getattr(block, "shared_expert", torch.nn.Module()).children():
                if isinstance(each, torch.nn.Linear):
                    each.weight.data.copy_(dense(rounded_matrix(each.weight, bits)))
    return model


@pytest.mark.grid(6)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ALL)
def test_logits_are_those_of_the_rounded_weights(name, bits, made):
    """Up to the inputs, which have 8 bits; a token may choose another expert then."""
    backend = made(name, bits)
    with torch.inference_mode():
        expected = with_numbers_of(backend, name)(torch.tensor([IDS])).logits[0]
        exact = model_of(name)(torch.tensor([IDS])).logits[0]
    found = logits_of(backend)
    assert off(found, expected) < (0.05 if name in DENSE else 0.15)
    assert off(found, expected) < off(found, exact) or bits == 8, "of 4 bits the weights matter more than the inputs"
    assert backend.facts.bits == bits


@pytest.mark.grid(4)
@pytest.mark.parametrize("name", ALL)
def test_texts_are_equal_with_and_without_drafts_and_in_batches(name, made):
    backend = made(name, 4)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    prompts = [IDS * 2, IDS[3:], IDS[:1]]
    together = [out.token_ids for out in Engine(backend, NgramDrafter(), max_batch=3).generate(prompts, params)]
    assert together == [Engine(backend, None).generate(prompt, params)[0].token_ids for prompt in prompts]


@pytest.mark.grid(3)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ALL)
def test_a_row_has_the_same_bits_alone_and_among_others(name, bits, made):
    backend = made(name, bits)
    whole, session = logits_of(backend), backend.open()
    alone = torch.stack([backend.forward([Feed(session, [token])])[0].logits[-1] for token in IDS])
    assert torch.equal(alone, whole)
    chain = TokenTree.chain(torch.tensor(IDS[1:]))
    for output in backend.forward([Feed(backend.open(), IDS[:1], chain) for _ in range(3)]):
        assert torch.equal(output.logits, whole)
    assert (backend.rounding == "") is (name not in DENSE), "by construction where all is native"


def test_attention_of_torch_would_be_seen(made):
    """Negative control: sums of other orders reach the logits."""
    model = made("gemma3", 8).model
    plain = copy.copy(model)
    plain.set_attn_implementation("sdpa")
    backend = HFBackend(plain, name="x")
    session = backend.open()
    alone = torch.stack([backend.forward([Feed(session, [token])])[0].logits[-1] for token in IDS])
    assert not torch.equal(alone, logits_of(backend))


@pytest.mark.parametrize("name", ["phi", "qwen3_moe", "lfm2"])
def test_weights_are_not_kept_twice(name, made):
    backend, whole = made(name, 4), sum(each.nbytes for each in model_of(name).parameters())
    held = sum(each.nbytes for each in backend.model.parameters() if not each.is_meta)
    embedding = backend.model.get_input_embeddings().weight.nbytes
    assert held - embedding < 0.1 * whole


def test_routers_stay_as_they_are_and_the_output_layer_has_8_bits(made):
    model = made("qwen2_moe", 4).model
    mixture = model.model.layers[0].mlp.mixture
    assert torch.equal(mixture.router.dense(), model_of("qwen2_moe").model.layers[0].mlp.gate.weight)
    assert {segment.type for each in mixture.experts for segment in each.weight.segments} == {WORDS[32]}
    assert model.model.layers[0].self_attn.q_proj.product.weight.bits == 4
    assert model.lm_head.product.weight.bits == 8


def test_experts_that_have_no_native_form_are_refused():
    """gpt-oss has biases and clamped gates; a router that adds something computes something else."""
    config = transformers.GptOssConfig(
        **SHAPE, head_dim=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=6
    )
    with pytest.raises(UserError, match=r"its model\.layers\.0\.mlp is no mixture .* with a native form \(.*biases"):
        rounded(HFBackend(random_model(config), name="x"), 4)
    model = model_of("qwen3_moe")
    model.model.layers[1].mlp.gate.register_forward_hook(lambda _, __, made: (made[0], 1.5 * made[1], made[2]))
    with pytest.raises(UserError, match=r"its model\.layers\.1\.mlp .* computes something else"):
        rounded(HFBackend(model, name="x"), 4)


def test_rounding_of_experts_is_near_and_4_bits_are_no_better_than_8():
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    weight[3, 5], weight[7, :32] = 20.0, 0.0
    eight, four = (dense(rounded_matrix(weight, bits)) for bits in (8, 4))
    assert off(eight, weight) < 0.01 < off(four, weight) < 0.12
    assert torch.equal(four[7, :32], weight[7, :32])
    plain = weight.view(64, 4, 32)
    low, high = plain.amin(-1, keepdim=True), plain.amax(-1, keepdim=True)
    scale = (high - low).clamp(min=1e-6) / 15
    nearest = ((plain - low) / scale).round() * scale + low
    assert off(four, weight) < 1.1 * off(nearest.view_as(weight), weight), "zeros are whole numbers, scales of 16 bits"
    with pytest.raises(ValueError, match="got 4 bits and 40 inputs"):
        rounded_matrix(torch.zeros(16, 40), 4)


def test_it_cannot_be_rounded_twice_or_get_new_weights(made):
    for name in ("phi", "lfm2"):
        with pytest.raises(UserError, match="its weights have few bits already"):
            made(name, 8).quantized(4)
        with pytest.raises(UserError, match="its weights have few bits already"):
            rounded(made(name, 8), 4)
        with pytest.raises(UserError, match=f"weights of {name} cannot be changed"):
            made(name, 8).with_weights({})


def test_options_load_it(caplog):
    options = LoadOptions(weights="int4", backend="hf", dtype="float32")
    backend = load("embedded:target", options).backend
    assert isinstance(backend, StoredBackend)
    assert backend.facts.bits == 4
    assert "embedded:target are rounded to 4 bits" in caplog.text
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    plain, drafted = (
        Engine.load("embedded:target", **made, weights="int4", backend="hf").generate("Once upon a time", params)[0]
        for made in ({"drafter": "none"}, {"draft": "embedded:draft", "drafter": "model", "stopper": "fixed:3"})
    )
    assert plain.token_ids == drafted.token_ids
    assert drafted.stats.num_accepted_tokens > 0


def test_without_a_check_attention_is_that_of_transformers():
    backend = load("embedded:target", LoadOptions(weights="int8", backend="hf", check=False)).backend
    assert type(backend) is HFBackend


def test_backends_without_such_a_form_are_refused():
    with pytest.raises(UserError, match=r"expected backend lean, hf or snapshot, got .* on backend generate"):
        load("embedded:target", LoadOptions(weights="int4", backend="generate")).backend  # noqa: B018
