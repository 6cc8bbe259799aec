"""GGUF files of models that transformers' modules read, as llama.cpp's converter writes them."""

import copy
import math

import numpy as np
import torch
import transformers

from support.gguf_files import SCALES, random_blocks
from support.helpers import random_model

VOCAB = 320
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
_ROPE = {"rope_type": "default", "rope_theta": 50000.0}
_PART = {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25}}
_DELTA = {
    "rms_norm_eps": 1e-5,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_ROUTED = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 256}
_ROUTED |= {"shared_expert_intermediate_size": 512}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 2, "mamba_d_state": 32, "rms_norm_eps": 1e-5}
_FALCON = {
    "lm_head_multiplier": 0.5,
    "embedding_multiplier": 3.0,
    "mlp_multipliers": [0.8, 1.3],
    "key_multiplier": 0.7,
    "attention_out_multiplier": 1.2,
    "attention_in_multiplier": 0.9,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.6,
}
_GRANITE = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "mamba_expand": 2,
    "shared_intermediate_size": 512,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.25,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.015625,
    "tie_word_embeddings": True,
}
_GEMMA = {
    "head_dim": 64,
    "global_head_dim": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size_per_layer_input": VOCAB,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 50000.0},
    },
}
CONFIGS = {
    "lfm2": transformers.Lfm2Config(
        **_BASE,
        norm_eps=1e-5,
        rope_parameters=_ROPE,
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", "conv", "full_attention", "conv"],
    ),
    "qwen35": transformers.Qwen3_5TextConfig(**_BASE, **_DELTA, **_PART),
    "qwen35, tied": transformers.Qwen3_5TextConfig(
        **_BASE, **{**_DELTA, "linear_num_key_heads": 4}, **_PART, tie_word_embeddings=True
    ),
    "qwen35moe": transformers.Qwen3_5MoeTextConfig(**_BASE, **_DELTA, **_PART, **_ROUTED),
    "qwen3next": transformers.Qwen3NextConfig(**_BASE, **_DELTA, **_PART, **_ROUTED),
    "falcon-h1": transformers.FalconH1Config(
        **_BASE, **_MAMBA, **_FALCON, rope_parameters=_ROPE, mamba_d_ssm=512, mamba_norm_before_gate=False
    ),
    "falcon-h1, norm": transformers.FalconH1Config(
        **_BASE,
        **_MAMBA,
        **_FALCON,
        rope_parameters=_ROPE,
        mamba_d_ssm=512,
        mamba_norm_before_gate=False,
        mamba_rms_norm=True,
    ),
    "granitehybrid": transformers.GraniteMoeHybridConfig(**_BASE, **_MAMBA, **_GRANITE, num_local_experts=0),
    "granitehybrid, experts": transformers.GraniteMoeHybridConfig(
        **{**_BASE, "intermediate_size": 256}, **_MAMBA, **_GRANITE, num_local_experts=8, num_experts_per_tok=3
    ),
    "gemma4": transformers.Gemma4TextConfig(
        **_BASE, **_GEMMA, hidden_size_per_layer_input=256, num_kv_shared_layers=2, use_double_wide_mlp=True
    ),
    "gemma4, experts": transformers.Gemma4TextConfig(
        **_BASE,
        **_GEMMA,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=3,
        moe_intermediate_size=256,
    ),
    "gemma4, keys are values": transformers.Gemma4TextConfig(
        **_BASE, **_GEMMA, hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1
    ),
}
"""Models by the name of their architecture in GGUF, and what is special."""

WITHOUT_FILES = {
    "lfm2moe": transformers.Lfm2MoeConfig(
        **_BASE,
        norm_eps=1e-5,
        rope_parameters=_ROPE,
        layer_types=["conv", "conv", "full_attention", "conv"],
        num_dense_layers=1,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=256,
        routed_scaling_factor=1.5,
        tie_word_embeddings=False,
    ),
}
"""Further models, whose files are not read in their own numbers."""

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "pre_ff_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
_FLOATS = (
    "per_layer_model_proj",
    "ffn_gate_inp",
    "ffn_gate_inp_shexp",
    "ssm_conv1d",
    "shortconv.conv",
    "ssm_norm",
)  # never in blocks
_VALUES = {"in_proj_z": (0, 64), "in_proj_a": (0, 1), "in_proj_b": (0, 1), "A_log": (0, 1), "dt_bias": (0, 1)}
_VALUES |= {"in_proj_qkv": (0, 64), "conv1d": (0, 64), "out_proj": (1, 64)}  # dimension of value heads, and their size


def _by_second_key(weight, dim, size, config):
    """Value heads, that are the last in a dimension, in another order: the first of each key head, then the second."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    rest = weight.shape[dim] - values * size
    before, heads = weight.split([rest, values * size], dim)
    heads = heads.unflatten(dim, (keys, values // keys, size)).transpose(dim, dim + 1).flatten(dim, dim + 2)
    return torch.cat([before, heads], dim)


def _one_after_another(weight, config):
    """Queries, keys, values and gates of all key heads, where each key head had its own; [keys and all, gates]."""
    keys, size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // keys * config.linear_value_head_dim
    parts = [part.flatten(0, 1) for part in weight.unflatten(0, (keys, -1)).split([size, size, values, values], 1)]
    return torch.cat(parts[:3]), parts[3]


def _multiplied(weight, part, config):
    """Weights of Falcon-H1 with the multipliers that its layers have."""
    if part == "mamba.in_proj":
        inner, groups = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        sizes = [inner, inner, groups, groups, config.mamba_n_heads]
        factors = torch.cat([torch.full((n,), by) for n, by in zip(sizes, config.ssm_multipliers, strict=True)])
        return weight * config.ssm_in_multiplier * factors[:, None]
    by = {
        "self_attn.q_proj": config.attention_in_multiplier,
        "self_attn.k_proj": config.attention_in_multiplier * config.key_multiplier,
        "self_attn.v_proj": config.attention_in_multiplier,
        "self_attn.o_proj": config.attention_out_multiplier,
        "mamba.out_proj": config.ssm_out_multiplier,
        "feed_forward.gate_proj": config.mlp_multipliers[0],
        "feed_forward.down_proj": config.mlp_multipliers[1],
        "lm_head": config.lm_head_multiplier,
        "model.embed_tokens": config.embedding_multiplier,
    }
    return weight * by.get(part, 1.0)


def _changed(stem, suffix, weight, architecture, config):
    """A tensor of a layer with the numbers that a file has."""
    part = f"{stem}.{suffix}"
    if architecture == "falcon-h1" and suffix == "weight":
        return _multiplied(weight, stem, config)
    if architecture.startswith("qwen35") and "linear_attn." in part and (last := part.split(".")[1]) in _VALUES:
        weight = _by_second_key(weight, *_VALUES[last], config)
    if architecture.startswith("qwen3") and stem.endswith("norm") and stem != "linear_attn.norm":
        return weight + 1.0
    return -weight.exp() if suffix == "A_log" else weight


def _taken_apart(stem, suffix, weight, config):
    """Tensors of a layer that are several in a file, or have another name, by name; nothing for all others."""
    if f"{stem}.{suffix}" in _OF_GEMMA:
        return {_OF_GEMMA[f"{stem}.{suffix}"]: weight}
    if suffix in _SPECIAL:
        return {_SPECIAL[suffix]: weight if suffix == "dt_bias" or stem == "linear_attn" else weight.unsqueeze(-1)}
    if stem.endswith("in_proj_qkvz"):
        return dict(zip(("attn_qkv.weight", "attn_gate.weight"), _one_after_another(weight, config), strict=True))
    if stem in ("mlp.experts", "block_sparse_moe.experts"):
        halves = (
            {"down": weight} if suffix == "down_proj" else dict(zip(("gate", "up"), weight.chunk(2, 1), strict=True))
        )
        return {f"ffn_{half}_exps.weight": view for half, view in halves.items()}
    if stem.startswith("shared_mlp."):
        kind = "_shexp" if config.num_local_experts else ""
        halves = {"down": weight} if "output" in stem else dict(zip(("gate", "up"), weight.chunk(2), strict=True))
        return {f"ffn_{half}{kind}.weight": view for half, view in halves.items()}
    return {}


_OF_GEMMA = {
    ".layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
_SPECIAL = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias"}


def tensors_of(model, architecture):
    """The tensors of a file, by name."""
    config, found = model.config, {}
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    between = "ffn_norm" if architecture == "granitehybrid" else "post_attention_norm"
    names = {**_NAMES, "post_attention_layernorm": between}
    if architecture == "gemma4":
        found["rope_freqs.weight"] = torch.tensor([1.0] * 16 + [1e30] * 48)
    for name, own in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        inside = name.startswith("model.layers.")
        _, _, number, part = name.split(".", 3) if inside else ("", "", "", name)
        at, (stem, _, suffix) = f"blk.{number}." if inside else "", part.rpartition(".")
        weight = _changed(stem, suffix, own, architecture, config)
        several = _taken_apart(stem, suffix, weight, config)
        if not several:
            if stem == "mamba.norm":
                weight = weight.view(config.mamba_n_groups, -1)
            weight = weight.squeeze(1) if weight.dim() == 3 else weight  # of a convolution
            several = {f"{names[stem]}.{suffix}": weight[0] if stem == "mlp.shared_expert_gate" else weight}
        if architecture == "falcon-h1" and stem == "pre_ff_layernorm":
            several = {"ffn_norm": weight}
        found |= {at + place: view for place, view in several.items()}
    return found


def metadata_of(config, architecture):
    """What a file says of a model, without the architecture before the keys."""
    made = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": _BASE["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 50000.0,
        "vocab_size": config.vocab_size,
    }
    if architecture == "gemma4":
        return made | _of_gemma(config)
    kinds = config.layer_types if architecture in ("lfm2", "granitehybrid") else []
    if kinds:
        made["attention.head_count_kv"] = [2 if kind == "full_attention" else 0 for kind in kinds]
    if architecture == "lfm2":
        return {**made, "shortconv.l_cache": config.conv_L_cache}
    if architecture.startswith("qwen3"):
        made |= {
            "attention.key_length": 64,
            "attention.value_length": 64,
            "rope.dimension_count": 16,
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": 64,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": 64 * config.linear_num_value_heads,
            "full_attention_interval": 4,
        }
        if architecture.startswith("qwen35"):
            made["rope.dimension_sections"] = [3, 3, 2, 0]
        if architecture != "qwen35":
            made |= {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 256}
            made |= {"expert_shared_feed_forward_length": 512}
        return made
    made |= {
        "ssm.conv_kernel": 4,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.time_step_rank": config.mamba_n_heads,
        "ssm.inner_size": 64 * config.mamba_n_heads,
    }
    if architecture == "granitehybrid":
        made |= {"logit_scale": 8.0, "residual_scale": 0.25, "embedding_scale": 12.0, "attention.scale": 0.015625}
        made |= {"rope.scaling.finetuned": False}
        if config.num_local_experts:
            made |= {"expert_count": 8, "expert_used_count": 3, "expert_shared_feed_forward_length": 512}
    else:
        made |= {"attention.key_length": 64, "attention.value_length": 64}
    return made


def _of_gemma(config):
    """What a file says of Gemma 4's layers."""
    windowed = [kind == "sliding_attention" for kind in config.layer_types]
    experts = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 256}
    layers, shared, width = config.num_hidden_layers, config.num_kv_shared_layers, config.intermediate_size
    return (experts if config.enable_moe_block else {}) | {
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.key_length_swa": 64,
        "attention.value_length_swa": 64,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": windowed,
        "attention.shared_kv_layers": shared,
        "attention.head_count_kv": [2 if each else 1 for each in windowed] if config.attention_k_eq_v else 2,
        "feed_forward_length": [width * (1 + (number >= layers - shared)) for number in range(layers)],
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "final_logit_softcapping": config.final_logit_softcapping,
        "rope.freq_base_swa": 10000.0,
        "rope.dimension_count": 128,
        "rope.dimension_count_swa": 64,
    }


def tokens(count):
    """A tokenizer of bytes, and of tokens without a use, as metadata; the first ones of them."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    words = [*letters, letters[0] + letters[1]]
    words = [*words, *(f"token {number}" for number in range(len(words), VOCAB))][:count]
    found = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": words,
        "token_type": [1] * count,
        "merges": [f"{letters[0]} {letters[1]}"],
        "eos_token_id": count - 1,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def module_model(name, **changes):
    """A random model of CONFIGS or WITHOUT_FILES, all of whose parts count; `changes` of its config."""
    config = copy.deepcopy((CONFIGS | WITHOUT_FILES)[name])
    for key, value in changes.items():
        setattr(config, key, value)
    model = random_model(config, seed=3)
    source = torch.Generator().manual_seed(7)
    for part, each in model.named_parameters():
        if part.endswith(("dt_bias", "conv1d.bias", ".D")):
            each.data.normal_(0.0, 0.5, generator=source)
        elif part.endswith("A_log"):
            each.data.uniform_(-2.0, 1.0, generator=source)
        elif part.endswith(("router.scale", "per_expert_scale")):
            each.data.uniform_(0.5, 1.5, generator=source)
        elif "norm" in part:
            each.data.add_(torch.randn(each.shape, generator=source) * 0.2)
    for part, each in model.named_buffers():
        if part.endswith("layer_scalar"):
            each.uniform_(0.7, 1.3, generator=source)
        elif part.endswith("expert_bias"):
            each.uniform_(-0.2, 0.2, generator=source)
    return model


_PREDICTION = {
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}


def prediction_names(own):
    """Where a file has the tensors `mtp.*`, by their names; experts of a mixture are one tensor, in this order."""
    found, experts = {}, {}
    for name in own:
        part = name.removeprefix("mtp.layers.0.").removesuffix(".weight")
        if name in _PREDICTION:
            found[name] = _PREDICTION[name]
        elif part.startswith("mlp.experts."):
            *_, number, kind = part.split(".")
            experts.setdefault(f"ffn_{kind.removesuffix('_proj')}_exps.weight", {})[int(number)] = name
        else:
            between = {"post_attention_layernorm": "post_attention_norm"}
            found[name] = f"{(_NAMES | between)[part]}.weight"
    return found, {place: [names[number] for number in sorted(names)] for place, names in experts.items()}


def prediction_tensors(own, number):
    """The tensors of a file that `mtp.*` become, in the layer with a number: 1 is added to norms."""
    found, experts = prediction_names(own)
    made = {place: own[name] + 1.0 if own[name].dim() == 1 else own[name] for name, place in found.items()}
    made |= {place: torch.stack([own[name] for name in names]) for place, names in experts.items()}
    shares = "ffn_gate_inp_shexp.weight"
    return {f"blk.{number}.{place}": each[0] if place == shares else each for place, each in made.items()}


def prediction_read(path, own, number):
    """The tensors `mtp.*` with the numbers of a file, read by gguf-py."""
    from gguf import GGUFReader, quants

    def floats(place):
        entry = entries[f"blk.{number}.{place}"]
        made = quants.dequantize(entry.data, entry.tensor_type)
        return torch.from_numpy(made.reshape(entry.shape[::-1].tolist()).copy())

    entries = {each.name: each for each in GGUFReader(path).tensors}
    found, experts = prediction_names(own)
    made = {name: floats(place).view(own[name].shape) for name, place in found.items()}
    made = {name: each - 1.0 if each.dim() == 1 else each for name, each in made.items()}
    for place, names in experts.items():
        made |= {name: each.clone() for name, each in zip(names, floats(place), strict=True)}
    return made


def write_modules(path, model, name, kinds=(None,), changes=None, extra=(), without=(), own=None):
    """Write a model of transformers as a GGUF file.

    Args:
        path: of the file.
        model: as it is; blocks are random but for Q8_0, which holds the model's own weights.
        name: of CONFIGS.
        kinds: types of matrices in turn; None keeps a matrix in float32.
        changes: of metadata.
        extra: further tensors, by name.
        without: names of tensors that are left out.
        own: the tensors `mtp.*` of a prediction layer, which follows the others.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    architecture, layers = name.split(",")[0], model.config.num_hidden_layers
    writer = GGUFWriter(path, architecture)
    for key, value in {
        **metadata_of(model.config, architecture),
        **({} if own is None else {"block_count": layers + 1, "nextn_predict_layers": 1}),
        **tokens(model.config.vocab_size),
        **(changes or {}),
    }.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[list] = writer.add_array
        add[type(value)](key if key.split(".")[0] in ("tokenizer", "general") else f"{architecture}.{key}", value)
    number = 0
    predicting = {} if own is None else prediction_tensors(own, layers)
    for place, weight in {**tensors_of(model, architecture), **predicting}.items():
        if place in without:
            continue
        content = np.ascontiguousarray(weight.detach().float().numpy())
        is_matrix = weight.dim() > 1 and place.endswith("weight") and not any(each in place for each in _FLOATS)
        kind = kinds[number % len(kinds)] if is_matrix else None
        number += is_matrix
        if kind is None:
            writer.add_tensor(place, content)
        else:
            type_of, (*outs, ins) = GGMLQuantizationType(kind), weight.shape
            own = kind in (GGMLQuantizationType.Q8_0, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
            blocks = None if own else random_blocks(kind, math.prod(outs), ins, seed=number, scale=SCALES[kind])
            blocks = quants.quantize(content, type_of) if blocks is None else blocks.reshape(*outs, -1)
            writer.add_tensor(place, blocks, raw_dtype=type_of)
    for place, content in extra:
        writer.add_tensor(place, content)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
