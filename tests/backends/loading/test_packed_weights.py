"""Checkpoints of bitsandbytes, and of compressed-tensors with 8 bits: numbers of their formats, and of the packages."""

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from draftproof import Engine, SamplingParams
from draftproof.backends.base import Feed
from draftproof.backends.lean.native_layers import NativeLayers
from draftproof.backends.loading.load import load
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.packed_weights import PackedWeights, in_bytes
from draftproof.backends.products.packed_linear import StoredProduct, dense
from draftproof.drafters.ngram import NgramDrafter
from draftproof.native.ggml import INT8_BY_ROW
from support.packed_checkpoints import (
    CONFIGS,
    IDS,
    SHAPE,
    checkpoint,
    in_eight_bits,
    logits_of,
    off,
    read,
    round_rows,
)

EXACT = ("nf4", "nf4-nested", "fp4")  # inputs are the method's own, so only the order of sums differs
ROUNDED = ("int8", "w8a16", "w8a16-packed")
KINDS = [kind for kind in CONFIGS if kind != "llama"]
PLACE = "model.layers.0.mlp.down_proj"


def expected_of(model):
    with torch.inference_mode():
        return model(torch.tensor([IDS])).logits[0]


@pytest.mark.grid(4)
@pytest.mark.parametrize(
    ("method", "kind"), [*((method, "llama") for method in EXACT), *(("nf4", kind) for kind in KINDS)]
)
def test_logits_are_those_of_the_methods_own_products(method, kind, tmp_path):
    expected = expected_of(checkpoint(tmp_path, method, 64, kind))
    backend = read(tmp_path)
    assert isinstance(backend.lean.run_layers, NativeLayers)
    assert off(logits_of(backend), expected) < 2e-5
    assert backend.facts.bits == 4


@pytest.mark.parametrize("method", ROUNDED)
def test_logits_with_inputs_in_8_bits(method, tmp_path):
    expected = expected_of(checkpoint(tmp_path, method))
    assert 1e-5 < off(logits_of(read(tmp_path)), expected) < 0.03
    assert off(logits_of(read(tmp_path, activations="float")), expected) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_w8a8_rounds_the_inputs_of_a_row_as_its_package_does(kind, tmp_path):
    """Where sums in another order round an input otherwise, a token differs, so tokens are compared one by one."""

    def each_off(backend):
        feeds = [Feed(backend.open(), [token]) for token in IDS]
        found = torch.cat([out.logits for out in backend.forward(feeds)])
        return (found - alone).norm(dim=-1) / alone.norm(dim=-1)

    model = checkpoint(tmp_path, "w8a8", kind=kind)
    round_rows(model)
    with torch.inference_mode():
        alone = model(torch.tensor(IDS).unsqueeze(-1)).logits[:, 0]
    backend = read(tmp_path)
    assert each_off(backend).median() < 2e-6
    assert off(logits_of(backend), expected_of(model)) < 0.03
    assert backend.facts.bits == 8
    assert each_off(read(tmp_path, activations="float")).min() > 1e-3, "inputs that are not rounded are seen"
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert each_off(read(tmp_path)).min() > 1e-3, "and those that are rounded in groups"


@pytest.mark.parametrize("block", [128, 256])
def test_larger_blocks_of_levels(block, tmp_path):
    expected = expected_of(checkpoint(tmp_path, "nf4", block))
    assert off(logits_of(read(tmp_path)), expected) < 2e-5


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("method", "dtype"), [("nf4-nested", "float32"), ("nf4", "bfloat16"), ("w8a8", "bfloat16"), ("int8", "float32")]
)
def test_texts_are_equal_with_and_without_drafts_and_in_batches(method, dtype, tmp_path):
    checkpoint(tmp_path, method, 64)
    backend = load(str(tmp_path), LoadOptions(dtype=dtype)).backend
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    prompts = [IDS * 2, IDS[3:], IDS[:1]]
    together = [out.token_ids for out in Engine(backend, NgramDrafter(), max_batch=3).generate(prompts, params)]
    alone = [Engine(backend, None).generate(prompt, params)[0].token_ids for prompt in prompts]
    assert together == alone
    session = backend.open()
    each = torch.stack([backend.forward([Feed(session, [token])])[0].logits[-1] for token in IDS])
    assert torch.equal(each, logits_of(backend))


# --- what the packages make ------------------------------------------------------------------------------------------


def weights_in(folder, tensors, **fields):
    save_file({f"x.{name}": each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    return PackedWeights(folder, {"quant_method": "bitsandbytes"} | fields, torch.float32, dense=False)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_levels_are_the_floats_that_bitsandbytes_makes(kind, nested, tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(96, 512, generator=torch.Generator().manual_seed(1))
    packed, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested, blocksize=64)
    beside = {f"weight.{name}": each for name, each in state.as_dict(packed=True).items()}
    weights = weights_in(tmp_path, {"weight": packed, **beside}, load_in_4bit=True)
    assert ("weight.nested_absmax" in beside) is nested
    assert torch.equal(dense(weights.matrix("x")), functional.dequantize_4bit(packed, state))


def test_numbers_of_8_bits_are_the_floats_that_bitsandbytes_makes(tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(96, 512, generator=torch.Generator().manual_seed(1)).half()
    numbers, scales, _ = functional.int8_vectorwise_quant(weight)
    weights = weights_in(tmp_path, {"weight": numbers, "SCB": scales}, load_in_8bit=True)
    expected = functional.int8_vectorwise_dequant(numbers, scales)
    assert torch.allclose(dense(weights.matrix("x")), expected.float(), rtol=2e-7, atol=0)


def test_w8a8_is_the_product_of_compressed_tensors(tmp_path):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    inputs = quantization.QuantizationArgs(num_bits=8, strategy="token", dynamic=True, symmetric=True)
    x = torch.randn(1, 7, 256, generator=torch.Generator().manual_seed(1))  # rows alone would have one scale
    scale, zero = helpers.compute_dynamic_scales_and_zp(x, inputs, None)
    rounded = forward.fake_quantize(x, scale, zero, inputs)
    made, weight = in_eight_bits(torch.randn(64, 256, generator=torch.Generator().manual_seed(2)), "w8a8")
    matrix = in_bytes(made["weight"], made["weight_scale"], INT8_BY_ROW, torch.float32)
    assert off(StoredProduct([matrix])(x), rounded @ weight.T) < 1e-6
    assert off(StoredProduct([matrix]).dense(), weight) < 1e-6
    assert off(x @ weight.T, rounded @ weight.T) > 1e-3


@pytest.mark.parametrize("symmetric", [False, True])
def test_w4a16_is_what_compressed_tensors_decompresses(symmetric, tmp_path):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    base = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    args = quantization.QuantizationArgs(num_bits=4, strategy="group", group_size=64, symmetric=symmetric)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.randn(100, 256, generator=torch.Generator().manual_seed(1)) + 0.5
    groups = weight.view(100, -1, 64)
    scale, zero = utils.calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    given = {"weight": weight, "weight_scale": scale.half(), "weight_zero_point": zero}
    packed = base.PackedQuantizationCompressor.compress(given, scheme)
    assert ("weight_zero_point" in packed) is not symmetric
    fields = {"format": "pack-quantized", "config_groups": {"group_0": {"weights": args.model_dump(mode="json")}}}
    weights = weights_in(tmp_path, packed, **fields, quant_method="compressed-tensors")
    expected = base.PackedQuantizationCompressor.decompress({**packed, "weight_scale": scale.half().float()}, scheme)
    assert torch.equal(dense(weights.matrix("x")), expected["weight"])


@pytest.mark.parametrize("nested", [False, True])
def test_a_checkpoint_that_transformers_saved_with_bitsandbytes(nested, tmp_path):
    pytest.importorskip("bitsandbytes")
    checkpoint(tmp_path, "float")
    options = {"bnb_4bit_compute_dtype": torch.float32, "bnb_4bit_use_double_quant": nested}
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **options)
    saved, by_name = tmp_path / "saved", transformers.AutoModelForCausalLM.from_pretrained
    by_name(tmp_path, quantization_config=config, dtype=torch.float32).save_pretrained(saved)
    found = logits_of(read(saved))
    assert off(found, expected_of(by_name(saved, dtype=torch.float32).dequantize(dtype=torch.float32))) < 2e-5
    own = expected_of(by_name(saved, dtype=torch.float32))
    assert off(found, own) < 0.03, "its products may round inputs and scales to bfloat16"


# --- forms that are not read here ------------------------------------------------------------------------------------


def changed(folder, kind, change):
    """Change a tensor of a matrix; None takes it away."""
    held, name = load_file(folder / "model.safetensors"), f"{PLACE}.{kind}"
    made = change(held.pop(name))
    save_file(held if made is None else {**held, name: made}, folder / "model.safetensors")


def state(**changes):
    """A change of what a checkpoint of bitsandbytes says of a matrix."""

    def change(text):
        fields = {**json.loads(bytes(text.tolist())), **changes}
        return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)

    return change


STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.grid(9)
@pytest.mark.parametrize(
    ("method", "kind", "change", "why"),
    [
        ("nf4", STATE, lambda _: None, "it has no tensor .*bitsandbytes__nf4 or fp4"),
        ("nf4", STATE, lambda text: text[:9], "is no state of bitsandbytes"),
        ("nf4", STATE, state(blocksize=32), "blocks of 32, which are not whole ones"),
        (
            "nf4",
            "weight.quant_state.bitsandbytes__nf4",
            state(blocksize=128),
            "absmax has 2048 numbers .*expected 1024",
        ),
        ("nf4", STATE, state(shape=[256, 256]), "absmax has 2048 numbers .*expected 1024"),
        ("nf4", "weight.quant_map", lambda table: table.roll(1), "quant_map is not the table nf4"),
        ("nf4", "weight.absmax", lambda scales: scales[1:], "absmax has 2047 numbers .*expected 2048"),
        ("nf4", "weight", lambda places: places[1:], "has 65535 bytes, expected 65536"),
        ("nf4-nested", "weight.nested_quant_map", lambda table: table[:9], "has 9 numbers"),
        ("nf4-nested", "weight.nested_absmax", lambda scales: scales.half(), "float16, expected torch.float32"),
        ("int8", "weight_format", lambda form: form + 2, "weight_format is not that of plain rows"),
        ("int8", "weight", lambda numbers: numbers.float(), "torch.float32, expected torch.int8"),
        ("int8", "weight", lambda _: None, "down_proj.weight' is missing or odd"),
        ("int8", "SCB", lambda scales: scales[1:], "has 255 numbers .*expected 256 numbers"),
        ("w8a8", "weight_scale", lambda scales: scales[:1], "has 1 numbers .*expected 256 numbers"),
    ],
)
def test_odd_tensors_are_said(method, kind, change, why, tmp_path, caplog):
    checkpoint(tmp_path, method, 64)
    changed(tmp_path, kind, change)
    assert read(tmp_path) is None
    assert len(caplog.records) == 1
    assert re.search(why, caplog.text), caplog.text


def test_whole_weights_beside_a_config_of_quantized_ones_are_said(tmp_path, caplog):
    checkpoint(tmp_path, "float")
    config = json.loads((tmp_path / "config.json").read_text())
    fields = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": fields}))
    assert read(tmp_path) is None
    assert "none of its matrices is packed" in caplog.text


def test_zero_points_of_symmetric_numbers(tmp_path, caplog):
    checkpoint(tmp_path, "w8a8")
    tensors, zeros = load_file(tmp_path / "model.safetensors"), torch.zeros(256, 1, dtype=torch.int8)
    save_file({**tensors, f"{PLACE}.weight_zero_point": zeros}, tmp_path / "model.safetensors")
    assert read(tmp_path) is not None
    save_file({**tensors, f"{PLACE}.weight_zero_point": zeros + 1}, tmp_path / "model.safetensors")
    assert read(tmp_path) is None
    assert "weight_zero_point is not 0" in caplog.text


@pytest.mark.parametrize(
    ("method", "part", "change", "why"),
    [
        ("w8a8", "input_activations", {"dynamic": False}, "its inputs are rounded otherwise"),
        ("w8a8", "input_activations", {"strategy": "tensor"}, "its inputs are rounded otherwise"),
        ("w8a16-packed", "input_activations", {"num_bits": 8}, "its inputs are rounded otherwise"),
        ("w8a8", "weights", {"symmetric": False}, "its weights of 8 bits are not symmetric"),
        ("w8a16-packed", "weights", {"symmetric": False}, "its weights of 8 bits are not symmetric"),
        ("w8a8", "weights", {"num_bits": 4}, "not whole numbers of 8 bits"),
        ("w8a8", "weights", {"type": "float"}, "not whole numbers of 8 bits"),
        ("w8a16-packed", "weights", {"num_bits": 3}, "not whole numbers of 4 or 8 bits"),
    ],
)
def test_other_numbers_of_compressed_tensors_are_said(method, part, change, why, tmp_path, caplog):
    checkpoint(tmp_path, method)
    config = json.loads((tmp_path / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group[part] = {**(group[part] or {}), **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read(tmp_path) is None
    assert why in caplog.text


def test_rows_that_blocks_do_not_divide_are_said(tmp_path, caplog):
    config = transformers.LlamaConfig(**{**SHAPE, "intermediate_size": 480})
    checkpoint(tmp_path, "nf4", 32, config=config)
    assert read(tmp_path) is None
    assert "which are not whole ones of 64" in caplog.text
