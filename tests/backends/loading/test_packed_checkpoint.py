"""Checkpoints of GPTQ, AWQ and compressed-tensors, read natively: logits over the numbers that their formats define."""

import json
import weakref
from dataclasses import replace

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
from draftproof.backends.products.packed_linear import REORDERED, dense, of_stored
from draftproof.drafters.ngram import NgramDrafter
from draftproof.tree import TokenTree
from support.helpers import random_model
from support.packed_checkpoints import CONFIGS, IDS, SHAPE, checkpoint, in_four_bits, logits_of, off, read, words

FOUR_BITS = ["gptq", "gptq_v2", "gptq-act-order", "awq", "compressed-tensors", "compressed-tensors, zeros"]
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


@pytest.mark.grid(9)
@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("method", FOUR_BITS)
def test_logits_are_those_of_the_numbers(method, group, tmp_path):
    model = checkpoint(tmp_path, method, group)
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    backend = read(tmp_path)
    assert isinstance(backend.lean.run_layers, NativeLayers) is (method != "gptq-act-order")
    assert backend.rounding == ""
    assert off(logits_of(backend), expected) < 0.03, "inputs have 8 bits"
    for name in ("q_proj", "v_proj"):
        part = getattr(model.model.layers[1].self_attn, name).weight
        found = backend.lean.layers[1].qkv.dense()
        start = 0 if name == "q_proj" else 4 * 64 + 2 * 64
        assert off(found[start : start + len(part)], part) < 1e-6


MIXTURES = [kind for kind in CONFIGS if "mo" in kind or "mix" in kind]


@pytest.mark.grid(8)
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *((kind, "gptq") for kind in CONFIGS),
        *((kind, "gptq-act-order") for kind in CONFIGS if kind not in MIXTURES),
        *((kind, method) for kind in MIXTURES for method in ("awq", "compressed-tensors, zeros", "w8a16")),
    ],
)
def test_architectures(kind, method, tmp_path):
    model = checkpoint(tmp_path, method, 64, kind=kind)
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    assert off(logits_of(read(tmp_path, activations="float")), expected) < 2e-5
    backend = read(tmp_path)
    assert off(logits_of(backend), expected) < (0.15 if kind in MIXTURES else 0.03), "a token may choose another expert"
    assert backend.eos_token_ids == (3,)
    bits = 8 if method == "w8a16" else 4
    assert (backend.vocab_size, backend.max_positions, backend.facts.bits) == (97, 640, bits)
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


@pytest.mark.grid(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("awq", "llama"),
        ("compressed-tensors, zeros", "llama"),
        ("gptq-act-order", "llama"),
        ("gptq-act-order", "qwen3"),
        ("gptq", "qwen2_moe"),
        ("awq", "mixtral"),
    ],
)
def test_texts_are_equal_with_and_without_drafts_and_in_batches(method, kind, dtype, tmp_path):
    checkpoint(tmp_path, method, kind=kind)
    backend = load(str(tmp_path), LoadOptions(dtype=dtype)).backend
    assert backend.facts.bits == 4
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    prompts = [IDS * 2, IDS[3:], IDS[:1]]
    together = [out.token_ids for out in Engine(backend, NgramDrafter(), max_batch=3).generate(prompts, params)]
    assert together == [Engine(backend, None).generate(prompt, params)[0].token_ids for prompt in prompts]
    session, whole = backend.open(), logits_of(backend)
    alone = torch.stack([backend.forward([Feed(session, [token])])[0].logits[-1] for token in IDS])
    assert torch.equal(alone, whole)
    chain = TokenTree.chain(torch.tensor(IDS[1:]))
    for output in backend.forward([Feed(backend.open(), IDS[:1], chain) for _ in range(3)]):
        assert torch.equal(output.logits, whole)


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
        ("compressed-tensors", {"config_groups": {"x": {"weights": {"num_bits": 8}}}}, "not whole numbers of 4 or 8"),
    ],
)
def test_forms_that_are_not_known_are_left_to_transformers_and_said(method, fields, why, tmp_path, caplog):
    checkpoint(tmp_path, method)
    changed(tmp_path, **fields)
    assert read(tmp_path) is None
    assert why in caplog.text


def test_groups_of_other_sizes_and_missing_tensors_are_said(tmp_path, caplog):
    checkpoint(tmp_path, "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    place = "model.layers.0.mlp.down_proj.g_idx"
    for groups in (tensors[place].clamp(max=2), tensors[place] + 1, tensors[place] - 1):
        save_file({**tensors, place: groups}, tmp_path / "model.safetensors")
        assert read(tmp_path) is None
        assert "its 512 inputs are not in 4 groups of one size" in caplog.text
        caplog.clear()
    del tensors["model.layers.0.mlp.down_proj.qzeros"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert read(tmp_path) is None
    assert "it has no tensor model.layers.0.mlp.down_proj.qzeros" in caplog.text


def test_mixtures_that_are_not_whole_or_have_other_orders_are_said(tmp_path, caplog):
    checkpoint(tmp_path, "gptq", kind="qwen3_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    at = "model.layers.1.mlp.experts"
    less = {name: each for name, each in tensors.items() if not name.startswith(f"{at}.2.up_proj")}
    save_file(less, tmp_path / "model.safetensors")
    assert read(tmp_path) is None
    assert f"its {at}.up_proj lacks experts before number 3" in caplog.text
    turned = {f"{at}.2.up_proj.g_idx": tensors[f"{at}.2.up_proj.g_idx"].flip(0)}
    save_file({**tensors, **turned}, tmp_path / "model.safetensors")
    assert read(tmp_path) is None
    assert f"its {at}.up_proj has several forms or orders of inputs" in caplog.text
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "mlp_only_layers": [0]}))
    assert read(tmp_path) is None
    assert "some of its layers have no experts" in caplog.text


def nibble(words, place):
    return int(words[place // 8]) >> 4 * (place % 8) & 15


@pytest.mark.parametrize("method", ["gptq", "gptq-act-order"])
def test_weights_of_gptq_are_those_of_its_definition(method, tmp_path):
    """w[o, i] = s[g(i), o] (q[i, o] - z[g(i), o] - 1), number by number in float64, as gptqmodel dequantizes."""
    checkpoint(tmp_path, method, 64)
    tensors, place = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.down_proj"
    numbers, zeros, scales, groups = (tensors[f"{place}.{each}"] for each in ("qweight", "qzeros", "scales", "g_idx"))
    found = dense(packed_weights(tmp_path).matrix(place)).double()
    for out in range(0, 256, 37):
        for i in range(512):
            group = int(groups[i])
            zero = nibble(zeros[group], out) + 1
            assert found[out, i] == scales[group, out].double() * (nibble(numbers[:, out], i) - zero)


def test_zeros_of_compressed_tensors_are_those_of_its_definition(tmp_path):
    """w[o, i] = s[o, g] (q[o, i] - z[o, g]), both packed with 8 added, zeros along outputs."""
    checkpoint(tmp_path, "compressed-tensors, zeros", 64)
    tensors, place = load_file(tmp_path / "model.safetensors"), "model.layers.1.self_attn.k_proj"
    kinds = ("weight_packed", "weight_zero_point", "weight_scale")
    numbers, zeros, scales = (tensors[f"{place}.{each}"] for each in kinds)
    found = dense(packed_weights(tmp_path).matrix(place)).double()
    for out in range(0, 128, 7):
        for i in range(256):
            zero = nibble(zeros[:, i // 64], out)
            assert found[out, i] == scales[out, i // 64].double() * (nibble(numbers[out], i) - zero)


def packed_weights(folder):
    fields = json.loads((folder / "config.json").read_text())["quantization_config"]
    return PackedWeights(folder, fields, torch.float32, dense=False)


def test_groups_of_compressed_tensors_by_input(tmp_path):
    """The act-order of compressed-tensors is that of GPTQ: an input's group, and numbers in the layer's order."""
    checkpoint(tmp_path, "compressed-tensors, zeros", 64)
    tensors, place = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.down_proj"
    before, groups = dense(packed_weights(tmp_path).matrix(place)), torch.arange(512) // 64
    moved = torch.randperm(512, generator=torch.Generator().manual_seed(1))
    numbers = torch.tensor([[nibble(row, i) for i in range(512)] for row in tensors[f"{place}.weight_packed"]])
    changes = {f"{place}.weight_g_idx": groups[moved].int(), f"{place}.weight_packed": words(numbers[:, moved])}
    save_file({**tensors, **changes}, tmp_path / "model.safetensors")
    matrix = packed_weights(tmp_path).matrix(place)
    assert matrix.inputs is not None
    assert torch.equal(dense(matrix), before[:, moved])


def test_products_of_reordered_inputs_are_those_of_the_weights(tmp_path):
    """Of one matrix, of two with the same order as one product, and of two with several orders, which are two."""
    checkpoint(tmp_path, "gptq-act-order", 64)
    weights, at = packed_weights(tmp_path), "model.layers.0.self_attn"
    one, other = (weights.matrix(f"{at}.{name}") for name in ("q_proj", "k_proj"))
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    both = torch.cat([dense(one), dense(other)]).double()
    joined = of_stored([one, other], None)
    assert off(joined(x).double(), x.double() @ both.T) < 0.01
    assert torch.equal(joined(x)[2:3], joined(x[2:3])), "alone and among others"
    assert torch.equal(joined.onto(x, joined(x)), 2 * joined(x))
    assert off(joined.dense(), both) < 1e-6
    assert off(replace_inputs(joined)(x).double(), x.double() @ both.T) > 0.5, "without the order it is another product"
    apart = of_stored([one, replace(other, inputs=other.inputs.flip(0))], None)
    turned = dense(replace(other, inputs=other.inputs.flip(0))).double()
    assert apart.layout == REORDERED
    assert off(apart(x).double(), x.double() @ torch.cat([dense(one).double(), turned]).T) < 0.01
    assert torch.equal(apart(x)[2:3], apart(x[2:3])), "alone and among others"


def replace_inputs(product):
    """Negative control: the same numbers with the inputs in the layer's order."""
    return lambda x: product._operations.ggml_product(x, product.weight)


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
