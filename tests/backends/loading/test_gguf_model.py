"""Models in GGUF files, read natively: logits of every architecture equal transformers' over the same numbers."""

import copy
import dataclasses
import math
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
import transformers

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed
from draftproof.backends.heads.self_draft import EarlyExitBackend
from draftproof.backends.lean.layers import _one_by_one
from draftproof.backends.lean.native_layers import PRODUCTS, NativeLayers
from draftproof.backends.lean.traits import UnreadError
from draftproof.backends.loading.by_name import load_backend
from draftproof.backends.loading.gguf_model import FAMILIES, in_own_numbers, read_model
from draftproof.backends.loading.options import LoadOptions
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.engine.verifier_parts import make_verifier
from draftproof.models.gguf_file import GGUFFile
from draftproof.native.dispatch import VARIABLE
from draftproof.native.ggml import TYPES
from draftproof.profiling.tensor_memory import tensor_memory
from draftproof.sampling import default_params
from draftproof.stoppers.fixed import FixedLength
from draftproof.tree import TokenTree
from support.gguf_files import BF16, F16, METADATA, write_llama, write_model
from support.helpers import random_model

BASE = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}
GEMMA3 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 50000.0},
}
SLIDES = {"sliding_window": 8, "query_pre_attn_scalar": 64, "head_dim": 64}
SEVEN = {"num_hidden_layers": 7}
GRANITE = {
    "rms_norm_eps": 1e-5,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.25,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.015625,
}
SCALED = {"logit_scale": 8.0, "residual_scale": 0.25, "embedding_scale": 12.0, "attention.scale": 0.015625}
OSS = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 64}
OSS |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
ROUTED, LOCAL = ({name: 8, "num_experts_per_tok": 3} for name in ("num_experts", "num_local_experts"))
ROUTED_KEYS = {"expert_count": 8, "expert_used_count": 3}
CASES = {
    "llama": (transformers.LlamaConfig(**BASE, **THETA, rms_norm_eps=1e-5), {}),
    "llama, tied": (transformers.LlamaConfig(**{**BASE, "tie_word_embeddings": True}, **THETA, rms_norm_eps=1e-5), {}),
    "qwen2": (transformers.Qwen2Config(**BASE, **THETA, rms_norm_eps=1e-5), {}),
    "qwen3": (
        transformers.Qwen3Config(**BASE, **THETA, rms_norm_eps=1e-5, head_dim=128),
        {"attention.key_length": 128, "attention.value_length": 128},
    ),
    "gemma2": (
        transformers.Gemma2Config(**BASE, **THETA, **SLIDES, rms_norm_eps=1e-5),
        {"attention.sliding_window": 8, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig(**{**BASE, **SEVEN}, rope_parameters=GEMMA3, **SLIDES, rms_norm_eps=1e-5),
        {"block_count": 7, "attention.sliding_window": 8, "attention.key_length": 64, "attention.value_length": 64},
    ),
    "granite": (transformers.GraniteConfig(**BASE, **THETA, **GRANITE), SCALED),
    "qwen3moe": (
        transformers.Qwen3MoeConfig(
            **BASE, **THETA, **ROUTED, rms_norm_eps=1e-5, head_dim=64, norm_topk_prob=True, moe_intermediate_size=256
        ),
        {**ROUTED_KEYS, "attention.key_length": 64, "attention.value_length": 64},
    ),
    "qwen2moe": (
        transformers.Qwen2MoeConfig(
            **BASE, **THETA, **ROUTED, rms_norm_eps=1e-5, moe_intermediate_size=256, shared_expert_intermediate_size=512
        ),
        ROUTED_KEYS,
    ),
    "gpt-oss": (
        transformers.GptOssConfig(**BASE, **LOCAL, rope_parameters=OSS, head_dim=64, sliding_window=8),
        {
            **ROUTED_KEYS,
            "attention.sliding_window": 8,
            "attention.key_length": 64,
            "attention.value_length": 64,
            "rope.freq_base": 150000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 64,
        },
    ),
    "olmoe": (transformers.OlmoeConfig(**BASE, **THETA, **ROUTED, rms_norm_eps=1e-5), ROUTED_KEYS),
    "llama, experts": (
        transformers.MixtralConfig(**BASE, **THETA, **LOCAL, rms_norm_eps=1e-5, sliding_window=None),
        ROUTED_KEYS,
    ),
    "granitemoe": (transformers.GraniteMoeConfig(**BASE, **THETA, **LOCAL, **GRANITE), {**ROUTED_KEYS, **SCALED}),
    "granitemoe, shared": (
        transformers.GraniteMoeSharedConfig(**BASE, **THETA, **LOCAL, **GRANITE, shared_intermediate_size=256),
        {**ROUTED_KEYS, **SCALED},
    ),
    "smollm3": (transformers.SmolLM3Config(**BASE, **THETA, rms_norm_eps=1e-5), {}),
    "olmo2": (transformers.Olmo2Config(**BASE, **THETA, rms_norm_eps=1e-5), {}),
    "phi3": (
        transformers.Phi3Config(**BASE, **THETA, rms_norm_eps=1e-5, sliding_window=8),
        {"attention.sliding_window": 8},
    ),
    "glm4": (
        transformers.Glm4Config(
            **BASE,
            rope_parameters={**THETA["rope_parameters"], "partial_rotary_factor": 0.5},
            rms_norm_eps=1e-5,
            head_dim=64,
            attention_bias=True,
        ),
        {"rope.dimension_count": 32},
    ),
}
IDS = [5, 9, 2, 7, 11, 3, 300, 41, 17, 8, 260, 77, 30, 31, 32]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The model and the file of a case, made once."""
    made, folder = {}, tmp_path_factory.mktemp("gguf")

    def get(name, kinds=(12, 14, 8)):
        if (name, kinds) not in made:
            config, changes = CASES[name]
            model = random_model(config, seed=3)
            source = torch.Generator().manual_seed(5)
            for part, each in model.named_parameters():
                if "bias" in part or "sinks" in part:  # they would be zeros, or nearly
                    each.data.normal_(0.0, 0.5, generator=source)
            path = folder / f"{name.replace(', ', '-')}-{len(made)}.gguf"
            write_model(path, model, name.split(",")[0], {**METADATA, **changes}, kinds=kinds)
            made[name, kinds] = model, path
        return made[name, kinds]

    return get


def logits_of(backend, ids=IDS):
    session = backend.open()
    try:
        return backend.forward([Feed(session, ids[:1], TokenTree.chain(torch.tensor(ids[1:])))])[0].logits
    finally:
        session.close()


def off(found, expected):
    return float((found - expected).norm() / expected.norm())


def test_every_architecture_has_a_case():
    assert {name.split(",")[0] for name in CASES} == set(FAMILIES)


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers_over_the_same_numbers(name, written):
    model, path = written(name)
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    exact = logits_of(read_model(GGUFFile(path), name=name, dtype=torch.float32, activations="float"))
    assert off(exact, expected) < 1e-5
    backend = read_model(GGUFFile(path), name=name, dtype=torch.float32)
    assert isinstance(backend.lean.run_layers, NativeLayers)
    assert backend.rounding == ""
    assert 1e-5 < off(logits_of(backend), expected) < 0.05, "inputs have 8 bits"


@pytest.mark.grid(8)
@pytest.mark.parametrize("kinds", [(F16,), (BF16,), (None,)], ids=["F16", "BF16", "F32"])
@pytest.mark.parametrize("name", CASES)
def test_logits_of_files_of_floats_are_those_of_transformers(name, kinds, written):
    model, path = written(name, kinds)
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    for activations in ("int8", "float"):  # nothing is rounded
        backend = read_model(GGUFFile(path), name=name, dtype=torch.float32, activations=activations)
        assert off(logits_of(backend), expected) < 1e-5
        assert isinstance(backend.lean.run_layers, NativeLayers)
        assert backend.rounding == ""
        assert backend.facts.bits == (None if kinds == (None,) else 16)


@pytest.mark.parametrize("name", ["llama, tied", pytest.param("qwen3moe", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: TYPES[kind].name)
def test_logits_of_files_of_each_type_are_those_of_transformers(kind, name, written):
    """All matrices have the type: products, experts, the output layer, and an embedding whose rows are looked up."""
    model, path = written(name, (kind,))
    assert {entry.type for entry in GGUFFile(path).tensors.values()} == {0, kind}
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    exact = read_model(GGUFFile(path), name=name, dtype=torch.float32, activations="float")
    assert off(logits_of(exact), expected) < 1e-5
    assert torch.equal(exact.embed(torch.tensor(IDS)), model.model.embed_tokens.weight[torch.tensor(IDS)])
    backend = read_model(GGUFFile(path), name=name, dtype=torch.float32)
    assert isinstance(backend.lean.run_layers, NativeLayers)
    assert backend.rounding == ""
    most = 0.15 if name == "qwen3moe" else 0.05  # of two experts that are nearly equal, the other one may be chosen
    assert 1e-5 < off(logits_of(backend), expected) < most, "inputs have 8 bits"


@pytest.mark.parametrize("kind", [F16, BF16])
def test_files_of_16_bits_are_read_in_their_own_numbers(kind, written, caplog):
    """Not by transformers, which would widen them; in bfloat16 only where that loses nothing."""
    model, path = written("llama, tied", (kind,))
    own = in_own_numbers(GGUFFile(path), "x.gguf", LoadOptions())
    assert not caplog.records
    assert own.dtype == {F16: torch.float32, BF16: torch.bfloat16}[kind]
    assert own.facts.bits == {F16: 16, BF16: None}[kind]
    with torch.inference_mode():
        expected = model.to(own.dtype)(torch.tensor([IDS])).logits[0].float()
    assert off(logits_of(own).float(), expected) < {F16: 1e-5, BF16: 0.02}[kind]
    ids = torch.tensor([3, 0, 319])
    assert torch.equal(own.embed(ids), model.model.embed_tokens.weight[ids])
    assert torch.equal(own.output_rows(ids), model.lm_head.weight[ids])


def test_a_file_of_bfloat16_can_be_quantized_for_drafts(written):
    own = in_own_numbers(GGUFFile(written("llama, tied", (BF16,))[1]), "x.gguf", LoadOptions())
    assert 1e-3 < off(logits_of(own.quantized(8)).float(), logits_of(own).float()) < 0.1
    assert off(logits_of(own.quantized(4)).float(), logits_of(own).float()) < 0.5
    half = in_own_numbers(GGUFFile(written("llama, tied", (F16,))[1]), "x.gguf", LoadOptions())
    with pytest.raises(UserError, match=r"weights stay as the file has them \(F16\)"):
        half.quantized(4)


@pytest.mark.parametrize("kinds", [(F16,), (BF16,), (12, F16), (BF16, 14, 12)], ids=str)
def test_weights_take_the_memory_of_the_file(kinds, written):
    """Also where some of the matrices are of 16 bits and others of four."""
    path = written("llama", kinds)[1]
    own = in_own_numbers(GGUFFile(path), "x.gguf", LoadOptions())
    file = GGUFFile(path)
    products = sum(entry.nbytes for name, entry in file.tensors.items() if name != "token_embd.weight")
    found = tensor_memory(own.lean.layers).total_packed + tensor_memory(own.lean.head).total_packed
    assert 0.95 * products < found < 1.15 * products


@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "glm4", "qwen3moe", "granitemoe, shared", "gpt-oss", "F16", "BF16", "mixed"]
)
@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
def test_a_row_has_the_same_bits_alone_and_among_others(name, dtype, kept, written):
    kinds = {"F16": (F16,), "BF16": (BF16,), "mixed": (12, F16, None, BF16, 14)}
    path = written("llama", kinds[name])[1] if name in kinds else written(name)[1]
    backend = read_model(GGUFFile(path), name=name, dtype=dtype)
    backend.store_kv(kept)
    assert backend.rounding == ""
    whole = logits_of(backend)
    session = backend.open()
    one_by_one = [backend.forward([Feed(session, [token])])[0].logits[-1] for token in IDS]
    assert torch.equal(torch.stack(one_by_one), whole)
    sessions = [backend.open() for _ in range(3)]
    chain = TokenTree.chain(torch.tensor(IDS[1:]))
    for output in backend.forward([Feed(each, IDS[:1], chain) for each in sessions]):
        assert torch.equal(output.logits, whole)


@pytest.mark.parametrize(
    ("kinds", "options", "kept"),
    [
        ((12, 14, 8), {}, torch.bfloat16),
        ((8,), {}, torch.bfloat16),
        ((F16,), {}, None),
        ((12, 14, 8), {"activations": "float"}, None),
        ((12, 14, 8), {"dtype": "bfloat16"}, None),
        ((12, 14, 8), {"kv_dtype": "float32"}, None),
    ],
    ids=str,
)
def test_keys_and_values_have_half_the_bits_of_hidden_states_where_weights_have_few(kinds, options, kept, written):
    backend = in_own_numbers(GGUFFile(written("llama", kinds)[1]), "x", LoadOptions(**options))
    assert backend.cache.kept == kept


@pytest.mark.grid(2)
@pytest.mark.parametrize("kv_dtype", ["auto", "float32"])
@pytest.mark.parametrize("name", ["llama", "qwen3moe", "gpt-oss"])
def test_texts_are_equal_with_and_without_drafts(name, level, kv_dtype, written):
    backend = in_own_numbers(GGUFFile(written(name)[1]), "x", LoadOptions(kv_dtype=kv_dtype))
    assert backend.cache.kept == (torch.bfloat16 if kv_dtype == "auto" else None)
    model = DraftModel(EarlyExitBackend(backend, 2), vocab_size=320)
    prompt = [5, 9, 2, 7] * 4
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=40, temperature=temperature, seed=4, ignore_eos=True)
        texts, drafted = [], []
        for drafter in (None, NgramDrafter(), ModelDrafter(model, FixedLength(3))):
            engine = Engine(backend, drafter, make_verifier("gumbel"))
            (made,) = engine.generate(prompt, params)
            texts.append(made.token_ids)
            drafted.append(made.stats.num_accepted_tokens)
            several = engine.generate([prompt[::-1], prompt, [7, 300, 41]], params)
            assert temperature or several[1].token_ids == made.token_ids, "beside others"
        assert texts[0] == texts[1] == texts[2]
        assert drafted[1] + drafted[2] > 0


def llama3():
    """A model whose angles are divided, and by how much each is."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    rope = {"rope_type": "llama3", "rope_theta": 50000.0, **scaling}
    model = random_model(transformers.LlamaConfig(**BASE, rope_parameters=rope, rms_norm_eps=1e-5))
    plain = 1.0 / 50000.0 ** (torch.arange(0, 64, 2).float() / 64)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert factors.max() == pytest.approx(8.0)
    return model, factors


def test_angles_of_llama_3_are_divided(tmp_path):
    model, factors = llama3()
    path = tmp_path / "llama.gguf"
    write_model(path, model, "llama", METADATA, extra=[("rope_freqs.weight", factors)])
    with torch.inference_mode():
        expected = model(torch.tensor([IDS * 5])).logits[0]
    found = logits_of(read_model(GGUFFile(path), name="x", dtype=torch.float32, activations="float"), IDS * 5)
    assert off(found, expected) < 1e-5


@pytest.mark.parametrize("kind", [F16, BF16, None])
def test_angles_of_a_file_of_floats_are_divided(kind, tmp_path):
    model, factors = llama3()
    path, metadata = tmp_path / "llama.gguf", {**METADATA, "vocab_size": 320}
    write_model(path, model, "llama", metadata, kinds=(kind,), extra=[("rope_freqs.weight", factors)])
    with torch.inference_mode():
        expected = model(torch.tensor([IDS * 5])).logits[0]
    own = in_own_numbers(GGUFFile(path), "x.gguf", LoadOptions(dtype="float32"))
    assert off(logits_of(own, IDS * 5), expected) < 1e-5
    with pytest.raises(UserError, match=r"ignores its rope_freqs\.weight.*without these options"):
        in_own_numbers(GGUFFile(path), "x.gguf", LoadOptions(backend="hf"))
    lossy = load_backend(str(path), LoadOptions(backend="hf", dtype="float32"))
    assert off(logits_of(lossy, IDS * 5), expected) > 1e-3, "transformers leaves them out"
    write_model(path, model, "llama", metadata, kinds=(kind,))
    without = in_own_numbers(GGUFFile(path), "x.gguf", LoadOptions(dtype="float32"))
    assert off(logits_of(without, IDS * 5), expected) > 1e-3, "divisors that are left out are seen"


YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 128}
YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}


@pytest.mark.parametrize(
    ("rope", "keys"),
    [
        (YARN, YARN_KEYS),
        (
            {**YARN, "attention_factor": 1.5, "beta_fast": 16.0, "beta_slow": 2.0},
            {
                **YARN_KEYS,
                "rope.scaling.attn_factor": 1.5 / (0.1 * math.log(4.0) + 1.0),
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_beta_slow": 2.0,
            },
        ),
        (
            {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        ),
    ],
    ids=["yarn", "yarn, all named", "linear"],
)
def test_angles_of_scaled_embeddings(rope, keys, tmp_path):
    model = random_model(transformers.Qwen2Config(**BASE, rope_parameters=rope, rms_norm_eps=1e-5))
    path = tmp_path / "qwen2.gguf"
    write_model(path, model, "qwen2", {**METADATA, **keys})
    with torch.inference_mode():
        expected = model(torch.tensor([IDS * 10])).logits[0]
    found = logits_of(read_model(GGUFFile(path), name="x", dtype=torch.float32, activations="float"), IDS * 10)
    assert off(found, expected) < 1e-5


@pytest.fixture(scope="module", params=[1.0, 0.75], ids=["whole heads", "a part of each head"])
def phi(request, tmp_path_factory):
    """A model with two sets of factors, as Phi-3-128k, or as Phi-4-mini, and its file; they change after 64 tokens."""
    turned = int(32 * request.param)
    short, long = ([start + 0.1 * number for number in range(turned)] for start in (1.0, 2.0))
    rope = {
        "rope_type": "longrope",
        "rope_theta": 50000.0,
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": 64,
        "factor": 8.0,
        "partial_rotary_factor": request.param,
    }
    config = transformers.Phi3Config(
        **BASE, rope_parameters=rope, rms_norm_eps=1e-5, original_max_position_embeddings=64, eos_token_id=0
    )
    model, path = random_model(config), tmp_path_factory.mktemp("phi") / "phi3.gguf"
    scale = float(model.model.rotary_emb.attention_scaling)
    assert scale > 1
    keys = {
        "rope.scaling.original_context_length": 64,
        "rope.scaling.attn_factor": scale,
        "rope.dimension_count": 2 * turned,
    }
    factors = [
        (f"rope_factors_{name}.weight", np.array(each, np.float32)) for name, each in (("short", short), ("long", long))
    ]
    write_model(path, model, "phi3", {**METADATA, **keys}, extra=factors)
    return model, path


def test_angles_of_long_and_short_sequences(phi):
    model, path = phi
    backend = read_model(GGUFFile(path), name="x", dtype=torch.float32, activations="float")
    assert backend.max_positions == 512
    for count in (1, 2, 4, 5, 6, 20):  # of 15 tokens each: up to 60 the factors are the short ones
        with torch.inference_mode():
            expected = model(torch.tensor([IDS * count])).logits[0, -1]
        session = backend.open()
        (found,) = backend.forward([Feed(session, IDS * count)])
        assert off(found.logits[-1], expected) < 1e-5
        session.close()
    # negative control: the factors that a text of 75 tokens would have with the short ones everywhere
    backend._switch = None
    (found,) = backend.forward([Feed(backend.open(), IDS * 5)])
    with torch.inference_mode():
        assert off(found.logits[-1], model(torch.tensor([IDS * 5])).logits[0, -1]) > 1e-3


def test_texts_go_on_past_the_length_of_short_factors(phi):
    """Greedily, also with drafts and beside other texts, which begin on either side of the length."""
    model, path = phi
    backend = read_model(GGUFFile(path), name="x", dtype=torch.float32, activations="float")
    prompts = [IDS * 4, IDS * 2, IDS * 6]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    for drafter in (None, NgramDrafter(4)):
        for out, prompt in zip(Engine(backend, drafter).generate(prompts, params), prompts, strict=True):
            ids = list(prompt)
            for token in out.token_ids:
                with torch.inference_mode():
                    logits = model(torch.tensor([ids])).logits[0, -1]
                assert logits[token] > logits.max() - 1e-3, "but for rounding the likeliest"
                ids.append(token)


def test_short_factors_alone_end_the_context(phi, tmp_path):
    model, _ = phi
    factors = [("rope_factors_short.weight", np.ones(32, np.float32))]
    keys = {"rope.scaling.original_context_length": 64}
    write_model(tmp_path / "x.gguf", model, "phi3", {**METADATA, **keys}, extra=factors)
    assert read_model(GGUFFile(tmp_path / "x.gguf"), name="x", dtype=torch.float32).max_positions == 64


def test_matrices_in_floats_stand_beside_blocks(tmp_path):
    model, path = random_model(CASES["llama"][0]), tmp_path / "x.gguf"
    write_model(path, model, "llama", METADATA, kinds=(None, 12, 39, 6))
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    assert off(logits_of(read_model(GGUFFile(path), name="x", dtype=torch.float32)), expected) < 0.05


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rope.scaling.type": "yarn"}, "the length of its training is not named"),
        ({"rope.scaling.type": "other"}, "its rotary embedding is other"),
    ],
)
def test_angles_that_transformers_would_lose_are_an_error(changes, why, tmp_path):
    path = tmp_path / "x.gguf"
    write_model(path, random_model(CASES["llama"][0]), "llama", {**METADATA, **changes})
    with pytest.raises(
        UserError, match=rf"{why}; and transformers.*ignores its rope.scaling.type {changes.popitem()[1]}"
    ):
        in_own_numbers(GGUFFile(path), "x.gguf", LoadOptions())


def test_what_is_not_known_is_left_to_transformers_and_said(tmp_path, caplog):
    path, why = tmp_path / "x.gguf", "another size than its keys"
    write_model(path, random_model(CASES["llama"][0]), "llama", {**METADATA, "attention.value_length": 32})
    with pytest.raises(UnreadError, match=why):
        read_model(GGUFFile(path), name="x", dtype=torch.float32)
    assert in_own_numbers(GGUFFile(path), "x.gguf", LoadOptions()) is None
    (line,) = [record.getMessage() for record in caplog.records if "full ones" in record.getMessage()]
    assert "x.gguf" in line
    assert why in line


@pytest.mark.parametrize(
    ("architecture", "changes", "why"),
    [
        ("llama", {"expert_count": 8}, "it does not name its expert_used_count"),
        ("llama", {**ROUTED_KEYS, "expert_gating_func": 2}, "not chosen by a softmax"),
        ("llama", {**ROUTED_KEYS, "expert_group_count": 4}, "chosen from groups"),
        ("llama", {**ROUTED_KEYS, "expert_used_count": 9}, "chooses 9 of 8 experts"),
        ("llama", {**ROUTED_KEYS, "expert_count": 2000}, "of at most 1024"),
        ("llama", ROUTED_KEYS, "its tensors lack model.layers.0.mlp.experts.down_proj.weight"),
        ("glm4moe", ROUTED_KEYS, "its architecture is 'glm4moe', not one of llama"),
    ],
)
def test_a_mixture_that_is_not_known_is_refused_by_name(architecture, changes, why, tmp_path):
    path = tmp_path / "x.gguf"
    write_model(path, random_model(CASES["llama"][0]), architecture, {**METADATA, **changes})
    with pytest.raises(UserError, match=rf"experts in x\.gguf is not read here: .*{why}.*take the model's own"):
        in_own_numbers(GGUFFile(path), "x.gguf", LoadOptions())


SMALL = np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"extra": [("blk.1.attn_sub_norm.weight", SMALL)]}, "its tensors have too much: blk.1.attn_sub_norm.weight"),
        ({"extra": [("blk.1.attn_q.bias", SMALL)]}, r"do not fit: model.layers.1.self_attn.q_proj.bias is \[4\]"),
        ({"without": ["blk.2.ffn_up.weight"]}, "lack model.layers.2.mlp.up_proj.weight"),
        ({"without": ["token_embd.weight"]}, "it has no token_embd.weight"),
        ({"metadata": {**METADATA, "block_count": 3}}, "have too much: blk.3"),
        ({"metadata": {"block_count": 4, "embedding_length": 256}}, "it does not name its attention.head_count"),
        ({"metadata": {**METADATA, "attention.head_count_kv": [2, 2, 1, 2]}}, r"\[1, 2\] key heads"),
    ],
)
def test_a_tensor_that_would_be_left_unread_and_one_that_is_missing_are_refused(options, why, tmp_path):
    path, options = tmp_path / "x.gguf", {"metadata": METADATA, **options}
    write_model(path, random_model(CASES["llama"][0]), "llama", **options)
    with pytest.raises(UnreadError, match=why):
        read_model(GGUFFile(path), name="x", dtype=torch.float32)


def test_numbers_that_are_named_for_each_layer(written, tmp_path):
    model, _ = written("llama")
    path, lists = tmp_path / "x.gguf", {"attention.head_count": [4] * 4, "attention.head_count_kv": [2] * 4}
    write_model(path, random_model(CASES["llama"][0], seed=3), "llama", {**METADATA, **lists})
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    found = read_model(GGUFFile(path), name="x", dtype=torch.float32, activations="float")
    assert off(logits_of(found), expected) < 1e-5


def test_it_is_left_to_transformers_where_that_was_asked_for(written, monkeypatch, caplog):
    file = GGUFFile(written("llama")[1])
    for changes in ({"backend": "hf"}, {"dtype": "float16"}, {"device": "meta"}, {"quantization_config": {}}):
        caplog.clear()
        assert in_own_numbers(file, "x", dataclasses.replace(LoadOptions(), **changes)) is None
        assert "the weights of x are read as full ones, by transformers: its own numbers need a CPU" in caplog.text
    monkeypatch.setenv(VARIABLE, "0")
    with pytest.raises(UnreadError, match="native operations are off"):
        read_model(file, name="x", dtype=torch.float32)


@pytest.mark.parametrize("kind", ["llama", "llama, tied"])
def test_a_bar_counts_the_tensors_of_a_large_file_on_a_terminal(kind, written, monkeypatch):
    file, seen = GGUFFile(written(kind)[1]), []

    @contextmanager
    def watch(title, total, done):
        seen.append((title, total, done))
        yield seen.append

    monkeypatch.setattr("draftproof.backends.loading.gguf_model.bar", watch)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    in_own_numbers(file, "x.gguf", LoadOptions())
    assert not seen, "a small file is read at once"
    monkeypatch.setattr("draftproof.backends.loading.gguf_model._LARGE", 0)
    in_own_numbers(file, "x.gguf", LoadOptions())
    assert seen == [("reading x.gguf", len(file.tensors), 0), *range(1, len(file.tensors) + 1)]
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    in_own_numbers(file, "x.gguf", LoadOptions())
    assert len(seen) == len(file.tensors) + 1, "elsewhere it shows nothing"


def test_an_unknown_tokenizer_is_said_before_weights_are_read(tmp_path, monkeypatch):
    path = tmp_path / "x.gguf"
    write_llama(path, **{"tokenizer.ggml.pre": "of-nobody"})
    monkeypatch.setattr("draftproof.backends.loading.load.in_own_numbers", pytest.fail)
    with pytest.raises(UserError, match="names the pre-tokenizer 'of-nobody'"):
        Engine.load(str(path))


def test_sampling_settings_in_the_file_are_its_defaults(tmp_path, written):
    path = tmp_path / "x.gguf"
    named = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1, "mirostat": 1}
    metadata = {**METADATA, "vocab_size": 320, **{f"general.sampling.{key}": value for key, value in named.items()}}
    write_model(path, random_model(CASES["llama"][0]), "llama", metadata)
    own = read_model(GGUFFile(path), name="x", dtype=torch.float32)
    expected = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.1)
    for backend in (own, load_backend(str(path), LoadOptions(backend="hf"))):
        assert default_params(backend.facts.sampling_defaults) == expected
    without = read_model(GGUFFile(written("llama")[1]), name="x", dtype=torch.float32)
    assert default_params(without.facts.sampling_defaults) == SamplingParams()


def test_a_copy_shares_the_file(written):
    backend = read_model(GGUFFile(written("llama")[1]), name="x", dtype=torch.float32)
    twin = copy.deepcopy(backend.lean)
    assert twin.layers[0].down.weight is backend.lean.layers[0].down.weight
    assert twin.embed.weight is backend.embed.weight


def test_it_cannot_be_quantized_again(written):
    backend = read_model(GGUFFile(written("llama")[1]), name="x", dtype=torch.float32)
    with pytest.raises(UserError, match=r"few bits already \(Q4_K.*\)"):
        backend.quantized(4)


def test_output_rows_and_embeddings_are_the_files_numbers(written):
    for name in ("llama", "llama, tied"):
        model, path = written(name)
        backend = read_model(GGUFFile(path), name="x", dtype=torch.float32)
        ids = torch.tensor([3, 0, 319])
        assert torch.equal(backend.output_rows(ids), model.lm_head.weight[ids])
        assert torch.equal(backend.embed(ids), model.model.embed_tokens.weight[ids])


@pytest.mark.parametrize("name", ["qwen3moe", "qwen2moe", "granitemoe", "gpt-oss"])
def test_layers_of_experts_in_one_call_are_those_one_by_one(name, written):
    """As where a part of them is not native; norms of heads are then rounded otherwise, which 8 bits make larger."""
    for activations, most in (("int8", 0.02), ("float", 1e-5)):
        backend = read_model(GGUFFile(written(name)[1]), name=name, dtype=torch.float32, activations=activations)
        whole = logits_of(backend)
        assert backend.rounding == ""
        backend.lean.run_layers = partial(_one_by_one, backend.lean.layers)
        assert off(logits_of(backend), whole) < most


def test_a_token_reads_the_experts_that_it_chooses(written):
    file = GGUFFile(written("qwen3moe")[1])
    read = {name for name in file.tensors if name != "token_embd.weight"}
    experts = [file.tensors[name].nbytes for name in read if "_exps." in name]
    others = [file.tensors[name].nbytes for name in read if "_exps." not in name]
    assert sum(each.nbytes for each in file.read_for_a_token) == sum(others) + sum(experts) * 3 // 8


def test_a_mixture_cannot_be_quantized_for_drafts(written):
    backend = read_model(GGUFFile(written("qwen3moe")[1]), name="x", dtype=torch.float32, activations="float")
    with pytest.raises(UserError, match="mixtures of experts"):
        backend.quantized(4)


def test_its_memory_is_counted_as_packed(written):
    backend = read_model(GGUFFile(written("llama")[1]), name="x", dtype=torch.float32)
    found = tensor_memory(backend.lean.layers)
    weights = [getattr(layer, name).weight for layer in backend.lean.layers for name in PRODUCTS]
    assert sum(found.nbytes[key] for key in found.packed) == sum(weight.nbytes for weight in weights)


def test_a_process_that_reads_a_file_needs_no_transformers(tmp_path):
    """Its import takes a second of those until the first token."""
    path = tmp_path / "x.gguf"
    write_llama(path)
    code = """
import sys
from draftproof import Engine, SamplingParams
engine = Engine.load(sys.argv[1], drafter="suffix")
engine.generate(["abc"], SamplingParams(max_tokens=4, temperature=0))
print("transformers" in sys.modules)
"""
    command = [sys.executable, "-c", code, str(path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["False"]
