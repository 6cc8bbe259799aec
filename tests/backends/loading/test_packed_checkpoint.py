"""Checkpoints of GPTQ, AWQ and compressed-tensors, read natively: logits over the numbers that their formats define."""

import json
import weakref

import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from draftproof import Engine, SamplingParams
from draftproof.backends.base import Feed
from draftproof.backends.lean.native_layers import NativeLayers
from draftproof.backends.lean.traits import UnreadError
from draftproof.backends.loading.load import load
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.packed_checkpoint import read_packed
from draftproof.backends.loading.packed_weights import PackedWeights, grouped
from draftproof.backends.products.packed_linear import dense
from draftproof.drafters.ngram import NgramDrafter
from support.helpers import random_model
from support.packed_checkpoints import CONFIGS, IDS, SHAPE, checkpoint, in_four_bits, logits_of, off, read

OSS = {
    **SHAPE,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 64,
    "sliding_window": 6,
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def oss_checkpoint(folder, **changes):
    """A gpt-oss checkpoint with experts in MXFP4, and the model of transformers with the weights that it stands for."""
    config = transformers.GptOssConfig(**{**OSS, **changes})
    model, source, tensors = random_model(config, seed=5), torch.Generator().manual_seed(1), {}
    for name, weight in model.state_dict().items():
        if "experts" in name and not name.endswith("bias"):
            experts, ins, outs = weight.shape
            numbers = torch.randint(0, 16, (experts, outs, ins // 32, 32), generator=source, dtype=torch.uint8)
            scales = torch.randint(119, 123, (experts, outs, ins // 32), generator=source, dtype=torch.uint8)
            exact = E2M1[numbers.long()] * torch.exp2(scales.float() - 127).unsqueeze(-1)
            weight.copy_(exact.flatten(2).transpose(1, 2))
            tensors |= {f"{name}_blocks": numbers[..., ::2] | numbers[..., 1::2] << 4, f"{name}_scales": scales}
            continue
        if "bias" in name or "sinks" in name:  # they would be zeros, or nearly
            weight.normal_(0.0, 0.5, generator=source)
        tensors[name] = weight.clone()
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    model.config.save_pretrained(folder)
    del model.config.quantization_config
    return model


@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("method", ["gptq", "gptq_v2", "awq", "compressed-tensors"])
def test_logits_are_those_of_the_numbers(method, group, tmp_path):
    model = checkpoint(tmp_path, method, group)
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    backend = read(tmp_path)
    assert isinstance(backend.lean.run_layers, NativeLayers)
    assert off(logits_of(backend), expected) < 0.03, "inputs have 8 bits"
    for name in ("q_proj", "v_proj"):
        part = getattr(model.model.layers[1].self_attn, name).weight
        found = backend.lean.layers[1].qkv.dense()
        start = 0 if name == "q_proj" else 4 * 64 + 2 * 64
        assert off(found[start : start + len(part)], part) < 1e-6


@pytest.mark.parametrize("kind", CONFIGS)
def test_architectures(kind, tmp_path):
    model = checkpoint(tmp_path, "gptq", kind=kind)
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    backend = read(tmp_path)
    assert off(logits_of(backend), expected) < 0.03
    assert backend.eos_token_ids == (3,)
    assert (backend.vocab_size, backend.max_positions, backend.facts.bits) == (97, 640, 4)
    assert backend.rounding == ""


def test_a_checkpoint_of_the_hub_is_read_likewise(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    held = tmp_path / "models--bob--x"
    (held / "refs").mkdir(parents=True)
    (held / "refs" / "main").write_text("0" * 40)
    (held / "snapshots").mkdir()
    model = checkpoint(held / "snapshots" / ("0" * 40), "gptq")
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    assert off(logits_of(read("bob/x")), expected) < 0.03
    assert read("bob/y") is None


def test_texts_are_equal_with_and_without_drafts(tmp_path):
    checkpoint(tmp_path, "awq")
    backend = load(str(tmp_path), LoadOptions(dtype="bfloat16")).backend
    assert backend.facts.bits == 4
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    plain, drafted = (Engine(backend, drafter).generate(IDS * 2, params)[0] for drafter in (None, NgramDrafter()))
    assert plain.token_ids == drafted.token_ids
    session = backend.open()
    alone = torch.stack([backend.forward([Feed(session, [token])])[0].logits[-1] for token in IDS])
    assert torch.equal(alone, logits_of(backend))


def changed(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= fields
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("method", "fields", "why"),
    [
        ("gptq", {"bits": 8}, "8 bits"),
        ("gptq", {"dynamic": {"x": {}}}, "forms of their own"),
        ("awq", {"version": "gemv"}, "in the form gemv"),
        ("compressed-tensors", {"kv_cache_scheme": {"num_bits": 8}}, "its keys and values are quantized"),
        ("compressed-tensors", {"format": "float-quantized"}, "its form is 'float-quantized'"),
        ("compressed-tensors", {"config_groups": {"x": {"weights": {"num_bits": 8}}}}, "not symmetric numbers of 4"),
    ],
)
def test_forms_that_are_not_known_are_left_to_transformers_and_said(method, fields, why, tmp_path, caplog):
    checkpoint(tmp_path, method)
    changed(tmp_path, **fields)
    assert read(tmp_path) is None
    assert why in caplog.text


def test_groups_out_of_order_and_missing_tensors_are_said(tmp_path, caplog):
    checkpoint(tmp_path, "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    place = "model.layers.0.mlp.down_proj.g_idx"
    save_file({**tensors, place: tensors[place].flip(0)}, tmp_path / "model.safetensors")
    assert read(tmp_path) is None
    assert "not in order (desc_act)" in caplog.text
    del tensors["model.layers.0.mlp.down_proj.qzeros"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert read(tmp_path) is None
    assert "it has no tensor model.layers.0.mlp.down_proj.qzeros" in caplog.text


def test_tensors_that_would_be_left_unread_and_a_config_of_another_kind_are_said(tmp_path, caplog):
    checkpoint(tmp_path, "awq")
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    save_file({**tensors, "model.layers.0.mlp.other.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert read(tmp_path) is None
    assert "have too much: model.layers.0.mlp.other.weight" in caplog.text
    save_file(tensors, tmp_path / "model.safetensors")
    for change, why in (
        ({"hidden_act": "gelu"}, "its activation is gelu"),
        ({"tie_word_embeddings": True}, "an output layer of its own"),
        ({"intermediate_size": 256}, None),
        ({"num_attention_heads": 8, "head_dim": None}, "do not fit: model.layers.0.self_attn.k_proj.weight"),
        ({"model_type": "gpt2"}, "down_proj.weight of shape (256, 512) is no linear layer of the model"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        assert (read(tmp_path) is None) == (why is not None), change
        assert why is None or why in caplog.text


def test_inputs_in_floats_are_the_reference(tmp_path):
    model = checkpoint(tmp_path, "gptq")
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    assert off(logits_of(read(tmp_path, activations="float")), expected) < 1e-5


def test_it_is_left_to_transformers_where_that_was_asked_for_or_nothing_is_packed(tmp_path):
    checkpoint(tmp_path, "gptq")
    for changes in ({"backend": "hf"}, {"dtype": "float16"}, {"device": "meta"}):
        assert read(tmp_path, **changes) is None
    changed(tmp_path, quant_method="bitsandbytes")
    assert read(tmp_path) is None
    assert read(tmp_path / "nowhere") is None


def test_layers_are_read_when_they_are_laid_out(tmp_path, monkeypatch):
    """So that only this one and the one before are in memory as they are stored."""
    checkpoint(tmp_path, "w8a8", config=transformers.LlamaConfig(**{**SHAPE, "num_hidden_layers": 4}))
    own, made, alive = PackedWeights.matrix, [], []

    def seen(weights, stem):
        matrix = own(weights, stem)
        made.append(weakref.ref(matrix))
        alive.append(sum(each() is not None for each in made))
        return matrix

    monkeypatch.setattr(PackedWeights, "matrix", seen)
    read(tmp_path, check=False)
    assert (len(made), max(alive)) == (4 * 7, 2 * 7)


@pytest.mark.parametrize("group", [32, 64, 128, 512])
def test_rows_are_the_numbers_exactly(group):
    weight = torch.randn(40, 1024, generator=torch.Generator().manual_seed(1)) / 50
    numbers, zeros, scales, expected = in_four_bits(weight, group, symmetric=False)
    matrix = grouped(numbers.to(torch.uint8), zeros.to(torch.uint8), scales, torch.float32)
    assert torch.equal(dense(matrix), expected)


def test_scales_and_groups_that_cannot_be_exact_are_refused():
    numbers, zeros = torch.zeros(16, 64, dtype=torch.uint8), torch.zeros(16, 1, dtype=torch.uint8)
    with pytest.raises(UnreadError, match="float16 does not hold its scales exactly"):
        grouped(numbers, zeros, torch.full((16, 1), 1e-9, dtype=torch.bfloat16), torch.float32)
    with pytest.raises(UnreadError, match="its groups have 16 inputs, not 32, 64, 128"):
        grouped(numbers, zeros.expand(16, 4), torch.ones(16, 4), torch.float32)


def test_gpt_oss_with_experts_in_mxfp4(tmp_path):
    model = oss_checkpoint(tmp_path)
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    options = LoadOptions(dtype="float32", activations="float")
    assert off(logits_of(read_packed(str(tmp_path), "x", options)), expected) < 1e-5
    backend = read_packed(str(tmp_path), "x", LoadOptions(dtype="float32"))
    assert isinstance(backend.lean.run_layers, NativeLayers)
    assert 1e-5 < off(logits_of(backend), expected) < 0.05, "inputs have 8 bits"
    short = read_packed(str(tmp_path), "x", LoadOptions())
    assert short.dtype == torch.bfloat16
    assert short.rounding == ""
    assert 1e-3 < off(logits_of(short).float(), expected) < 0.1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"layer_types": ["full_attention"] * 3}, "not every second one"),
        ({"swiglu_limit": 5.0}, "its gates have other numbers"),
        ({"rope_parameters": {**OSS["rope_parameters"], "truncate": True}}, "whole bounds"),
    ],
)
def test_gpt_oss_with_other_parts_is_left_to_transformers(changes, why, tmp_path, caplog):
    oss_checkpoint(tmp_path, **changes)
    assert read_packed(str(tmp_path), "x", LoadOptions()) is None
    assert why in caplog.text
