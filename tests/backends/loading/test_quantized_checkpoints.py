"""Quantized checkpoints that transformers reads on a CPU: greedy texts are transformers' own, with and without drafts.

Each test is skipped where its package is missing. FP8 needs none. GPTQ and AWQ need gptqmodel (and GPTQ optimum), whose
metadata want a newer torch than ours: they are installed without dependencies, with what they then ask for.
"""

import importlib.util
import json
import sys
import warnings
from importlib import metadata

import pytest
import torch
import transformers

from draftproof import Engine, UserError
from draftproof.backends.loading.by_name import load_backend
from draftproof.backends.loading.options import LoadOptions
from draftproof.drafters.ngram import NgramDrafter
from draftproof.engine.drafter_parts import make_drafter
from support.quantized_models import GREEDY, PROMPTS, fp8, generated, original, saved


def quantized(folder, config):
    """The same, quantized by transformers while it is loaded, and saved."""
    original(folder)
    made = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    made.save_pretrained(folder)


def bitsandbytes(folder, bits):
    options = {"load_in_8bit": True} if bits == 8 else {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
    quantized(folder, transformers.BitsAndBytesConfig(**options))


def torchao(folder, kind):
    import torchao.quantization as kinds

    quantized(folder, transformers.TorchAoConfig(getattr(kinds, kind)()))


def compressed_tensors(folder, preset):
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    model = original(folder)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if scheme.weights.group_size:
        scheme.weights.group_size = 32
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        format={"W4A16": "pack-quantized", "W8A8": "int-quantized", "FP8_DYNAMIC": "float-quantized"}[preset],
        quantization_status=QuantizationStatus.COMPRESSED,
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            weight = module.weight.data
            groups = weight.view(weight.shape[0], -1, scheme.weights.group_size or weight.shape[1])
            scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
            module.weight_scale.data.copy_(scale.view_as(module.weight_scale))
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zero.view_as(module.weight_zero_point))
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def four_bits(folder, method, group=32):
    """Weights rounded to 4 bits with a scale for each group of inputs, in the layout of GPTQ or AWQ."""

    def converted(weight):
        outs, ins = weight.shape
        grid = weight.t().reshape(ins // group, group, outs)
        scales = (grid.abs().amax(1) / 7).half()
        numbers = (grid / scales[:, None].float()).round().clamp(-8, 7).view(ins, outs) + 8
        zeros = torch.full((ins // group, outs), 8)
        if method == "gptq":  # packed along the inputs, and zeros are stored minus one
            places = (torch.arange(ins) // group).int()
            made = {"qweight": packed(numbers.t()).t().contiguous(), "qzeros": packed(zeros - 1), "g_idx": places}
        else:
            made = {"qweight": packed(mixed(numbers)), "qzeros": packed(mixed(zeros))}
        return made | {"scales": scales}

    own = {"gptq": {"sym": True, "desc_act": False}, "awq": {"version": "gemm", "zero_point": True}}[method]
    saved(folder, converted, {"quant_method": method, "bits": 4, "group_size": group, **own})


def packed(numbers):
    """Eight numbers of 4 bits in each int32, along the last axis."""
    words = (numbers.to(torch.int64).unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1)
    return (words - ((words >> 31) << 32)).to(torch.int32)


def mixed(numbers):
    """AWQ's order of the outputs in a word."""
    return numbers.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(-2)


METHODS = {  # package, function, its argument; the backend; whether `quantized` has something left to quantize
    "bitsandbytes, 8 bits": ("bitsandbytes", bitsandbytes, 8, "generate", False),
    "bitsandbytes, 4 bits": ("bitsandbytes", bitsandbytes, 4, "hf", False),
    "torchao, int8 weights": ("torchao", torchao, "Int8WeightOnlyConfig", "hf", False),
    "torchao, int8 products": ("torchao", torchao, "Int8DynamicActivationInt8WeightConfig", "hf", False),
    "compressed-tensors, W4A16": ("compressed_tensors", compressed_tensors, "W4A16", "hf", True),
    "compressed-tensors, W8A8": ("compressed_tensors", compressed_tensors, "W8A8", "hf", True),
    "compressed-tensors, FP8": ("compressed_tensors", compressed_tensors, "FP8_DYNAMIC", "hf", True),
    "fp8": ("torch", fp8, 32, "lean", True),
    "gptq": ("gptqmodel", four_bits, "gptq", "hf", False),
    "awq": ("gptqmodel", four_bits, "awq", "hf", False),
}


@pytest.mark.parametrize("method", METHODS)
def test_texts_are_what_transformers_generates(method, tmp_path):
    package, make, argument, backend, left = METHODS[method]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(tmp_path, argument)
        made = load_backend(str(tmp_path), LoadOptions(dtype="float32", plainly=True))
        assert made.kind == backend, getattr(made, "because", "")
        expected = generated(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
        drafters = [None] if backend == "generate" else [None, NgramDrafter(4)]
        if left:
            drafters.append(make_drafter("quantized:8", target=made, draft=None, stopper="fixed:3"))
        elif backend != "generate":
            with pytest.raises(
                UserError, match=f"weights are quantized already .({package}|{argument}).*another drafter"
            ):
                make_drafter("quantized:8", target=made, draft=None, stopper="fixed:3")
        for drafter in drafters:
            outs = Engine(made, drafter, max_batch=2).generate(PROMPTS, GREEDY)
            assert [list(out.token_ids) for out in outs] == expected


NEEDED = {  # of a checkpoint's quantization_config: the packages that its error names
    "gptq": ({"bits": 4}, "optimum", "gptqmodel"),
    "awq": ({"bits": 4}, "gptqmodel"),
    "bitsandbytes": ({"load_in_4bit": True}, "bitsandbytes"),
    "compressed-tensors": ({}, "compressed-tensors"),
    "torchao": ({"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}}, "torchao"),
    "hqq": ({"quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}}, "hqq"),
    "quanto": ({}, "optimum-quanto"),
    "aqlm": ({}, "aqlm"),
    "auto-round": ({"bits": 4}, "auto-round"),
}


@pytest.mark.parametrize("method", NEEDED)
def test_a_missing_package_is_named_in_one_line(method, tmp_path):
    fields, *packages = NEEDED[method]
    missing = set(packages) - {each.name for each in metadata.distributions()}
    if not missing:
        pytest.skip(f"installed: {packages}")
    original(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": method, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_backend(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert all(package in str(caught.value) for package in missing)


def test_what_a_package_prints_while_weights_are_read_is_no_output(monkeypatch, tmp_path, capsys):
    """gptqmodel logs to stdout, where `generate --json` writes."""
    original(tmp_path)
    whole = transformers.AutoModelForCausalLM.from_pretrained

    def chatting(*args, **options):
        sys.stdout.write("INFO  Kernel: selected\n")
        return whole(*args, **options)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", chatting)
    load_backend(str(tmp_path))
    out, err = capsys.readouterr()
    assert not out
    assert "Kernel: selected" in err
