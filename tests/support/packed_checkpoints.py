"""Tiny checkpoints of GPTQ, AWQ, compressed-tensors and bitsandbytes, and models of what they stand for."""

import json

import torch
import transformers
from safetensors.torch import load_file, save_file

from draftproof.backends.base import Feed
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.packed_checkpoint import read_packed
from draftproof.tree import TokenTree
from support.helpers import random_model

IDS = [5, 9, 2, 7, 11, 3, 30, 41, 17, 8, 26, 77, 30, 31, 32]
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
    "eos_token_id": 3,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.06,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 50000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, sliding_window=6),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SHAPE, head_dim=64, **EXPERTS),
    "qwen3_moe, shares as they are": lambda: transformers.Qwen3MoeConfig(
        **SHAPE, head_dim=64, **EXPERTS, norm_topk_prob=False
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**SHAPE, **EXPERTS, shared_expert_intermediate_size=256),
    "mixtral": lambda: transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=64, tie_word_embeddings=True),
}


def words(numbers, bits=4):
    """Numbers of few bits in each int32, along the last axis."""
    shifts = torch.arange(0, 32, bits)
    found = (numbers.to(torch.int64).unflatten(-1, (-1, len(shifts))) << shifts).sum(-1)
    return (found - ((found >> 31) << 32)).to(torch.int32)


def mixed(numbers):
    """AWQ's order of the outputs in a word."""
    return numbers.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(-2)


def in_four_bits(weight, group, *, symmetric):
    """Numbers [out, in], zeros and scales [out, groups] of a weight, and the weight that they stand for."""
    grid = weight.unflatten(1, (-1, group))
    low, high = grid.amin(-1).clamp(max=0), grid.amax(-1).clamp(min=0)
    scales = (grid.abs().amax(-1) / 7 if symmetric else (high - low) / 15).half()
    zeros = torch.full(scales.shape, 8.0) if symmetric else (-low / scales.float()).round().clamp(0, 15)
    numbers = (grid / scales[..., None].float() + zeros[..., None]).round().clamp(0, 15)
    exact = (numbers - zeros[..., None]) * scales[..., None].float()
    return numbers.flatten(1), zeros, scales, exact.flatten(1)


def group_of_each(ins, group):
    """The group of each input as GPTQ's act-order has it: the same for all matrices of so many inputs."""
    places = torch.empty(ins, dtype=torch.int32)
    places[torch.randperm(ins, generator=torch.Generator().manual_seed(ins))] = (torch.arange(ins) // group).int()
    return places


def stored(method, numbers, zeros, scales, group):
    """Tensors of a matrix by a method."""
    outs, ins = numbers.shape
    if method.startswith("gptq"):
        less = 0 if method == "gptq_v2" else 1
        places = group_of_each(ins, group) if method == "gptq-act-order" else (torch.arange(ins) // group).int()
        made = {"qweight": words(numbers).t().contiguous(), "qzeros": words((zeros - less).t()), "g_idx": places}
        return {**made, "scales": scales.t().contiguous()}
    if method == "awq":
        made = {"qweight": words(mixed(numbers.t())), "qzeros": words(mixed(zeros.t()))}
        return {**made, "scales": scales.t().contiguous()}
    made = {"weight_packed": words(numbers), "weight_scale": scales, "weight_shape": torch.tensor([outs, ins])}
    if method == "compressed-tensors":
        return made
    padded = torch.nn.functional.pad(zeros.t(), (0, -outs % 8))
    return {**made, "weight_zero_point": words(padded).t().contiguous()}


# --- bitsandbytes, and numbers of 8 bits -----------------------------------------------------------------------------

NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334]
NF4 += [-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
NF4 += [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
FP4 = [0.0, 0.0052083334, 0.6666667, 1.0, 0.33333334, 0.5, 0.16666667, 0.25]
FP4 += [0.0, *(-each for each in FP4[1:])]
TABLES = {"nf4": torch.tensor(NF4), "fp4": torch.tensor(FP4)}


def in_levels(weight, kind, block=64, *, nested=False):
    """Tensors of a matrix as bitsandbytes stores it, and the weight that they stand for."""
    table, grid = TABLES[kind], weight.reshape(-1, block)
    state = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
    made = {"weight.quant_map": table.clone(), "weight.absmax": grid.abs().amax(-1)}
    scales = made["weight.absmax"]
    if nested:
        offset, steps = float(scales.mean()), torch.linspace(-1, 1, 256).clone()
        apart = torch.nn.functional.pad(scales - offset, (0, -len(scales) % 256)).view(-1, 256)
        among = apart.abs().amax(-1)
        numbers = (apart / among[:, None] * 127.5 + 127.5).round().to(torch.uint8)
        made |= {"weight.absmax": numbers.flatten()[: len(scales)].clone()}
        made |= {"weight.nested_absmax": among, "weight.nested_quant_map": steps}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        scales = (steps[numbers.long()] * among[:, None]).flatten()[: len(scales)] + offset
    places = (grid[..., None] / scales[:, None, None] - table).abs().argmin(-1)
    exact = (table[places] * scales[:, None]).view_as(weight)
    pairs = places.view(-1, 2).to(torch.uint8)
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    made |= {"weight": pairs[:, :1] << 4 | pairs[:, 1:], f"weight.quant_state.bitsandbytes__{kind}": text}
    return made, exact


def in_eight_bits(weight, method):
    """Tensors of a matrix of numbers of 8 bits, and the weight that they stand for."""
    top = weight.abs().amax(-1, keepdim=True)
    if method == "int8":
        numbers = (weight / top * 127).round().to(torch.int8)
        made = {"weight": numbers, "SCB": top[:, 0].clone(), "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return made, numbers * (top / 127)
    scales = top / 127.5
    numbers = (weight / scales).round().clamp(-128, 127)
    if method == "w8a16-packed":
        shape = torch.tensor(list(weight.shape))
        made = {"weight_packed": words(numbers + 128, 8), "weight_scale": scales, "weight_shape": shape}
    else:
        made = {"weight": numbers.to(torch.int8), "weight_scale": scales}
    return made, numbers * scales


def round_rows(model):
    """Let the linear layers of a decoder round their inputs as W8A8 of compressed-tensors does."""

    def rounded(_, given):
        (x,) = given
        scales = x.abs().amax(-1, keepdim=True) / 127.5
        return ((x / scales).round().clamp(-128, 127) * scales,)

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(rounded)


def tensors_of(method, weight, group):
    """Tensors of a matrix by a method, and the weight that they stand for."""
    if method == "float":
        return {"weight": weight.clone()}, weight
    if method in ("nf4", "fp4", "nf4-nested"):
        return in_levels(weight, method[:3], group, nested=method.endswith("nested"))
    if "8" in method:
        return in_eight_bits(weight, method)
    if method == "gptq-act-order":
        order = group_of_each(weight.shape[1], group).argsort(stable=True)
        numbers, *parts, exact = in_four_bits(weight[:, order], group, symmetric=False)
        back = order.argsort()
        return stored(method, numbers[:, back], *parts, group), exact[:, back]
    *parts, exact = in_four_bits(weight, group, symmetric=method == "compressed-tensors")
    return stored(method, *parts, group), exact


def fields_of(method, group):
    if method in ("nf4", "fp4", "nf4-nested", "int8"):
        return {"quant_method": "bitsandbytes", "load_in_4bit": method != "int8", "load_in_8bit": method == "int8"}
    if method.startswith("compressed-tensors"):
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
        weights["symmetric"] = method == "compressed-tensors"
        groups = {"group_0": {"weights": weights, "input_activations": None, "targets": ["Linear"]}}
        return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    if "8" in method:
        numbers = {"num_bits": 8, "type": "int", "symmetric": True}
        inputs = {**numbers, "strategy": "token", "dynamic": True} if method == "w8a8" else None
        groups = {"group_0": {"weights": {**numbers, "strategy": "channel"}, "input_activations": inputs}}
        form = "pack-quantized" if method == "w8a16-packed" else "int-quantized"
        return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    if method == "awq":
        own = {"version": "gemm"}
    else:
        own = {"desc_act": "order" in method, "checkpoint_format": method.removesuffix("-act-order")}
    return {"quant_method": method[:4].strip("_"), "bits": 4, "group_size": group, **own}


def checkpoint(folder, method, group=128, kind="llama", config=None):
    """A checkpoint, and the model of transformers with the weights that it stands for."""
    model = random_model(config or CONFIGS[kind](), seed=5)
    tensors = {}
    for name, weight in model.state_dict().items():
        if "_proj.weight" in name:
            made, exact = tensors_of(method, weight, group)
            tensors |= {name.removesuffix("weight") + each: value for each, value in made.items()}
            weight.copy_(exact)
        elif ".experts." in name:
            tensors |= of_experts(method, name, weight, group, config=model.config)
        elif ".mlp.gate." in name and model.config.model_type == "mixtral":
            tensors[name.replace(".mlp.", ".block_sparse_moe.")] = weight.clone()
        elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
            tensors[name] = weight.clone()
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if method != "float":
        model.config.quantization_config = fields_of(method, group)
    model.config.save_pretrained(folder)
    if method != "float":
        del model.config.quantization_config
    return model


def with_prediction(folder, method, own, group=64):
    """Add the tensors `mtp.*` of a prediction layer to a checkpoint, packed, and return those that they stand for."""
    tensors, stands = load_file(folder / "model.safetensors"), {}
    for name, weight in own.items():
        if "_proj.weight" in name:
            made, stands[name] = tensors_of(method, weight, group)
            tensors |= {name.removesuffix("weight") + each: value.contiguous() for each, value in made.items()}
        else:
            tensors[name] = stands[name] = weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return stands


def of_experts(method, name, weight, group, config):
    """Tensors of all experts of a layer, each for itself as their authors have them; the weights are changed."""
    owner, _, kind = name.rpartition(".")
    mixtral = config.model_type == "mixtral"
    owner = owner.replace(".mlp.", ".block_sparse_moe.") if mixtral else owner
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
    short = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    tensors = {}
    for number, expert in enumerate(weight):
        for part, matrix in zip(parts, expert.chunk(len(parts)), strict=True):
            made, exact = tensors_of(method, matrix.contiguous(), group)
            at = f"{owner}.{number}.{short[part] if mixtral else part}"
            tensors |= {f"{at}.{each}": value for each, value in made.items()}
            matrix.copy_(exact)
    return tensors


def logits_of(backend):
    session = backend.open()
    return backend.forward([Feed(session, IDS[:1], TokenTree.chain(torch.tensor(IDS[1:])))])[0].logits


def off(found, expected):
    return float((found - expected).norm() / expected.norm())


def read(folder, **changes):
    return read_packed(str(folder), "x", LoadOptions(**{"dtype": "float32", **changes}))
