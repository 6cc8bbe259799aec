"""What metadata and tensors of GGUF files are in transformers' models with recurrent layers, and in Gemma 4.

What llama.cpp's converter changes in tensors is changed back: 1 is added to norms, logarithms are taken of decays,
value heads have another order (`_tiled`), and several matrices were one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.layers import Norm, gate_of
from draftproof.backends.lean.mixture import NoRouter
from draftproof.backends.lean.module_backend import LeanModulesBackend, pack_layers
from draftproof.backends.lean.snapshots import LeanSnapshotBackend
from draftproof.backends.lean.traits import UnreadError
from draftproof.backends.loading.gguf_rotary import DIVIDED, FACTORS, longest
from draftproof.backends.loading.gguf_tensors import by_layer, floats_of, named, single
from draftproof.backends.loading.stored_backends import StoredBackend, attention_name
from draftproof.backends.products.stored_modules import NativeNorm, StoredGates
from draftproof.models.gguf_file import GGUFFile
from draftproof.models.gguf_roles import end_tokens

Order = Int[Tensor, " numbers"]


@dataclass(frozen=True)
class TensorSource:
    """What a tensor of a model is in the file."""

    places: tuple[str, ...]  # names in the file's layer; outputs of several follow one another
    rows: Order | None = None  # which of them each of the model's rows is; None where they are in order
    inputs: Order | None = None  # which of the model's inputs each of the file's is; None where they are in order
    change: Callable[[Tensor], Tensor] | None = None  # of floats


_LAST = TensorSource(("output_norm.weight",))


def _leave(_: Any) -> None:
    """Change nothing."""


@dataclass(frozen=True)
class ModuleFamily:
    """What metadata do not say of a family that transformers' modules read."""

    kind: str  # transformers' name of it
    fields: Callable[[GGUFFile], dict[str, Any]]  # of its config, besides those of all architectures
    # of the tensors of a layer, by their names in transformers, with or without their last part
    sources: Callable[[Any], Mapping[str, TensorSource | str]]
    norm: tuple[str, TensorSource] = ("model.norm", _LAST)  # name of the last norm, and what it is in the file
    mixture: str = ""  # name of the layer's mixture of experts; its shared expert is part of it where it has a share
    activation: str = "silu"  # of the gates of experts
    route: Callable[[Any], None] = _leave  # changes a layer whose experts choose tokens themselves
    # what modules beside the layers are in the file, by name, if the model has them
    beside: Mapping[str, str] = field(default_factory=dict)
    backend: type[HFBackend] = LeanSnapshotBackend  # the one that `auto` takes
    # the same where transformers' modules read it, and the lean forward does not; with floats, and with few bits
    modules: tuple[type[HFBackend], type[HFBackend]] = (LeanSnapshotBackend, LeanSnapshotBackend)
    attention: Callable[[], str] = lambda: "sdpa"  # name of its attention in transformers
    # changes the model within, which has its weights, before its modules read it
    finish: Callable[[Any], None] = _leave
    spare: tuple[str, ...] = ()  # names of tensors of layers that a file may have although nothing reads them


_ATTENTION = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_GATED = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
_UNTURNED = 1e20  # divisors of frequencies from here on leave heads as they are


def _minus_one(made: Tensor) -> Tensor:
    return made - 1.0


def _logarithm(made: Tensor) -> Tensor:
    return (-made).log()


# --- fields of configs and tensors of layers --------------------------------------------------------------------------


def _attends(file: GGUFFile) -> list[bool]:
    """Whether each layer has attention: layers without it have no key heads."""
    return [bool(each) for each in by_layer(file, "attention.head_count_kv", _layers(file))]


def _key_heads(file: GGUFFile) -> int:
    return single([each for each in np.atleast_1d(named(file, "attention.head_count_kv")) if each], "key heads")


def _rope(file: GGUFFile) -> dict[str, Any]:
    of = file.of_architecture
    if (kind := of("rope.scaling.type", "none")) != "none" or any(each in file.tensors for each in FACTORS):
        raise UnreadError(f"its rotary embedding is scaled ({kind})")
    return {"rope_type": "default", "rope_theta": float(of("rope.freq_base", 10000.0))}


def _uniform(file: GGUFFile) -> dict[str, Any]:
    """Fields of a config where layers of the same kind have the same sizes."""
    of, fields = file.of_architecture, {"num_key_value_heads": _key_heads(file), "rope_parameters": _rope(file)}
    if (inner := of("feed_forward_length")) is not None:
        fields["intermediate_size"] = single(inner, "widths")
    if (dim := of("attention.key_length")) is not None:
        fields["head_dim"] = int(dim)
        if of("attention.value_length", dim) != dim:
            raise UnreadError("its values have another size than its keys")
    return fields


def _lfm2(file: GGUFFile) -> dict[str, Any]:
    return {
        **_uniform(file),
        "norm_eps": float(named(file, "attention.layer_norm_rms_epsilon")),
        "conv_L_cache": int(named(file, "shortconv.l_cache")),
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["full_attention" if each else "conv" for each in _attends(file)],
    }


def _lfm2_sources(_: Any) -> dict[str, TensorSource | str]:
    gated = zip(("w1", "w3", "w2"), _GATED.values(), strict=True)
    return {
        **_ATTENTION,
        "self_attn.out_proj": "attn_output",
        "self_attn.q_layernorm": "attn_q_norm",
        "self_attn.k_layernorm": "attn_k_norm",
        "operator_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        **{f"conv.{part}": f"shortconv.{part}" for part in ("conv", "in_proj", "out_proj")},
        **{f"feed_forward.{name}": place for name, place in gated},
    }


def _delta(file: GGUFFile) -> dict[str, Any]:
    """Of layers with the gated delta rule, of Qwen3-Next and Qwen3.5."""
    of, layers, dim = file.of_architecture, _layers(file), int(named(file, "attention.key_length"))
    recurrent = of("attention.recurrent_layers")
    if recurrent is None:
        every = int(of("full_attention_interval", 4))
        recurrent = [(number + 1) % every for number in range(layers)]
    heads = int(named(file, "ssm.time_step_rank"))
    return {
        **_uniform(file),
        "rms_norm_eps": float(named(file, "attention.layer_norm_rms_epsilon")),
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent[:layers]],
        "rope_parameters": {**_rope(file), "partial_rotary_factor": int(of("rope.dimension_count", dim)) / dim},
        "linear_conv_kernel_dim": int(named(file, "ssm.conv_kernel")),
        "linear_key_head_dim": int(named(file, "ssm.state_size")),
        "linear_value_head_dim": int(named(file, "ssm.inner_size")) // heads,
        "linear_num_key_heads": int(named(file, "ssm.group_count")),
        "linear_num_value_heads": heads,
    }


def _delta_sources(_: Any) -> dict[str, TensorSource | str]:
    norms = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
    }
    return {
        **_ATTENTION,
        **{f"mlp.{name}": place for name, place in _GATED.items()},
        **{f"{name}.weight": TensorSource((f"{place}.weight",), change=_minus_one) for name, place in norms.items()},
        "linear_attn.conv1d": "ssm_conv1d",
        "linear_attn.norm": "ssm_norm",
        "linear_attn.out_proj": "ssm_out",
        "linear_attn.A_log": TensorSource(("ssm_a",), change=_logarithm),
        "linear_attn.dt_bias": TensorSource(("ssm_dt.bias",)),
    }


def _qwen35_sources(config: Any) -> dict[str, TensorSource | str]:
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    dim, before = config.linear_value_head_dim, 2 * keys * config.linear_key_head_dim
    heads, rows = _tiled(keys, values, 1), _tiled(keys, values, dim)
    every = torch.cat((torch.arange(before), before + rows))
    found = _delta_sources(config)
    return {
        **found,
        "linear_attn.in_proj_qkv.weight": TensorSource(("attn_qkv.weight",), every),
        "linear_attn.in_proj_z.weight": TensorSource(("attn_gate.weight",), rows),
        "linear_attn.in_proj_b.weight": TensorSource(("ssm_beta.weight",), heads),
        "linear_attn.in_proj_a.weight": TensorSource(("ssm_alpha.weight",), heads),
        "linear_attn.conv1d.weight": TensorSource(("ssm_conv1d.weight",), every),
        "linear_attn.A_log": TensorSource(("ssm_a",), heads, change=_logarithm),
        "linear_attn.dt_bias": TensorSource(("ssm_dt.bias",), heads),
        "linear_attn.out_proj.weight": TensorSource(("ssm_out.weight",), inputs=rows.argsort()),
    }


def _tiled(keys: int, values: int, dim: int) -> Order:
    """Where the file has each number of value heads: first the first head of every key head, then the second ones."""
    return torch.arange(values * dim).view(values // keys, keys, dim).transpose(0, 1).flatten()


def _qwen3next_sources(config: Any) -> dict[str, TensorSource | str]:
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, values // keys * config.linear_value_head_dim
    sizes = (key_dim, key_dim, value_dim, value_dim)  # of a key head: query, key, values and gates
    starts = np.cumsum([0, *(keys * size for size in sizes)])
    parts = [torch.arange(keys * size).view(keys, size) + start for size, start in zip(sizes, starts, strict=False)]
    return {
        **_delta_sources(config),
        "linear_attn.in_proj_qkvz.weight": TensorSource(
            ("attn_qkv.weight", "attn_gate.weight"), torch.cat(parts, 1).flatten()
        ),
        "linear_attn.in_proj_ba": "ssm_ba",
    }


def _mamba(file: GGUFFile) -> dict[str, Any]:
    """Of layers with Mamba 2's state space."""
    heads, inner = int(named(file, "ssm.time_step_rank")), int(named(file, "ssm.inner_size"))
    return {
        **_uniform(file),
        "rms_norm_eps": float(named(file, "attention.layer_norm_rms_epsilon")),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": int(named(file, "ssm.group_count")),
        "mamba_d_state": int(named(file, "ssm.state_size")),
        "mamba_d_conv": int(named(file, "ssm.conv_kernel")),
        "mamba_conv_bias": "blk.0.ssm_conv1d.bias" in file.tensors,
    }


def _mamba_sources() -> dict[str, TensorSource | str]:
    return {
        "input_layernorm": "attn_norm",
        "mamba.in_proj": "ssm_in",
        "mamba.conv1d": "ssm_conv1d",
        "mamba.norm": "ssm_norm",
        "mamba.out_proj": "ssm_out",
        "mamba.A_log": TensorSource(("ssm_a",), change=_logarithm),
        "mamba.D": TensorSource(("ssm_d",)),
        "mamba.dt_bias": TensorSource(("ssm_dt.bias",)),
    }


def _falcon_h1(file: GGUFFile) -> dict[str, Any]:
    """Its multipliers are part of the weights in a file."""
    return {
        **_mamba(file),
        "mamba_d_ssm": int(named(file, "ssm.inner_size")),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in file.tensors,
        "mamba_norm_before_gate": False,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _falcon_h1_sources(_: Any) -> dict[str, TensorSource | str]:
    return {
        **_ATTENTION,
        **_mamba_sources(),
        "pre_ff_layernorm.weight": TensorSource(("ffn_norm",)),
        **{f"feed_forward.{name}": place for name, place in _GATED.items()},
    }


def _granite(file: GGUFFile) -> dict[str, Any]:
    of, hidden, inner = file.of_architecture, int(named(file, "embedding_length")), int(named(file, "ssm.inner_size"))
    if of("rope.scaling.finetuned", False):
        raise UnreadError("its attention turns queries and keys")
    if inner % hidden:
        raise UnreadError(f"its state spaces have {inner} channels, no multiple of {hidden}")
    heads = single(named(file, "attention.head_count"), "heads")
    shared = int(of("expert_shared_feed_forward_length", 0)) or single(named(file, "feed_forward_length"), "widths")
    return {
        **_mamba(file),
        "layer_types": ["full_attention" if each else "linear_attention" for each in _attends(file)],
        "mamba_expand": inner // hidden,
        "shared_intermediate_size": shared,
        "num_local_experts": int(of("expert_count", 0)),
        "num_experts_per_tok": int(of("expert_used_count", 0)),
        "embedding_multiplier": float(of("embedding_scale", 1.0)),
        "residual_multiplier": float(of("residual_scale", 1.0)),
        "logits_scaling": float(of("logit_scale", 1.0)),
        "attention_multiplier": float(of("attention.scale", 0.0)) or (hidden // heads) ** -0.5,
    }


def _granite_sources(config: Any) -> dict[str, TensorSource | str]:
    of = "_shexp" if config.num_local_experts else ""
    return {
        **_ATTENTION,
        **_mamba_sources(),
        "post_attention_layernorm": "ffn_norm",
        "shared_mlp.input_linear.weight": TensorSource((f"ffn_gate{of}.weight", f"ffn_up{of}.weight")),
        "shared_mlp.output_linear": f"ffn_down{of}",
    }


def _gemma4(file: GGUFFile) -> dict[str, Any]:
    """Layers with a window have other heads than those without; the last ones read keys and values of earlier ones."""
    of, layers = file.of_architecture, _layers(file)
    windowed = [bool(each) for each in by_layer(file, "attention.sliding_window_pattern", layers)]
    heads = by_layer(file, "attention.head_count_kv", layers)
    widths = by_layer(file, "feed_forward_length", layers)
    if all(windowed):
        raise UnreadError("all its layers have a window")
    local, whole = (heads[np.asarray(windowed) == kind] for kind in (True, False))
    dims = {end: int(named(file, f"attention.key_length{end}")) for end in ("", "_swa")}
    if any(int(named(file, f"attention.value_length{end}")) != dim for end, dim in dims.items()):
        raise UnreadError("its values have another size than its keys")
    if int(of("rope.dimension_count_swa", dims["_swa"])) != dims["_swa"]:
        raise UnreadError("its layers with a window turn a part of their heads")
    table = file.tensors.get("per_layer_token_embd.weight")
    return {
        "rms_norm_eps": float(named(file, "attention.layer_norm_rms_epsilon")),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed],
        "sliding_window": int(named(file, "attention.sliding_window")),
        "enable_moe_block": bool(experts := int(of("expert_count", 0))),
        "num_experts": experts or None,
        "top_k_experts": int(of("expert_used_count", 0)) or None,
        "moe_intermediate_size": int(of("expert_feed_forward_length", 0)) or None,
        "head_dim": dims["_swa"],
        "global_head_dim": dims[""],
        "num_key_value_heads": single(local if len(local) else whole, "key heads"),
        "num_global_key_value_heads": single(whole, "key heads"),
        "attention_k_eq_v": f"blk.{windowed.index(False)}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": int(of("attention.shared_kv_layers", 0)),
        "intermediate_size": int(widths[0]),
        "use_double_wide_mlp": len(set(widths.tolist())) > 1,  # other widths than twice the first one do not fit
        "hidden_size_per_layer_input": int(of("embedding_length_per_layer_input", 0)),
        "vocab_size_per_layer_input": 1 if table is None else table.shape[0],
        "final_logit_softcapping": float(of("final_logit_softcapping", 0.0)) or None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": float(of("rope.freq_base_swa", 10000.0))},
            "full_attention": _proportional(file),
        },
    }


def _proportional(file: GGUFFile) -> dict[str, Any]:
    """The rotary embedding of heads of which only the first pairs are turned: the others have huge divisors."""
    of = file.of_architecture
    plain = DIVIDED in file.tensors and of("rope.scaling.type", "none") == "none"
    divisors = floats_of(file, DIVIDED) if plain else torch.zeros(1)
    turned = int((divisors == 1.0).sum())
    if not (bool((divisors[:turned] == 1.0).all()) and bool((divisors[turned:] > _UNTURNED).all())):
        raise UnreadError("its rotary embedding is not that of Gemma 4")
    theta = float(of("rope.freq_base", 1000000.0))
    return {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": turned / len(divisors)}


def _gemma4_sources(_: Any) -> dict[str, TensorSource | str]:
    return {
        **_ATTENTION,
        **{f"mlp.{name}": place for name, place in _GATED.items()},
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "layer_scalar": TensorSource(("layer_output_scale.weight",)),
    }


def _without_router(layer: Any) -> None:
    layer.router = NoRouter()


def _natively(inner: Any) -> None:
    """Norms, gates and products of floats whose last digits do not depend on what else is in a pass."""
    if isinstance(inner.layers[0].mlp.down_proj, nn.Linear):  # of floats: backend hf multiplies them
        return
    kind, dtype = type(inner.norm), inner.norm.weight.dtype
    pack_layers(inner)
    for module in list(inner.modules()):
        for name, each in list(module.named_children()):
            if isinstance(each, kind):
                like = each.weight if each.with_scale else torch.ones(module.head_dim, dtype=dtype)
                setattr(module, name, NativeNorm(Norm(SimpleNamespace(weight=like, eps=each.eps)), like))
    for layer in inner.layers:
        mlp = layer.mlp
        if mlp.gate_proj.product is mlp.up_proj.product:
            gated = gate_of(layer.layer_scalar, "gelu_tanh", pack=True)
            layer.mlp = StoredGates(mlp.gate_proj.product, gated, mlp.down_proj)


def _layers(file: GGUFFile) -> int:
    """Number of layers, without those that only predict further tokens."""
    return int(named(file, "block_count")) - len(file.prediction_layers)


def common_fields(file: GGUFFile) -> dict[str, Any]:
    """Fields of a config that all architectures have."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise UnreadError("it has no token_embd.weight")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": int(named(file, "embedding_length")),
        "num_hidden_layers": _layers(file),
        "num_attention_heads": single(named(file, "attention.head_count"), "heads"),
        "max_position_embeddings": longest(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(end_tokens(file)) or None,
        "pad_token_id": None,
    }


# --- the architectures ------------------------------------------------------------------------------------------------

_PREDICTION_NORMS = {
    "enorm.weight": "nextn.enorm.weight",
    "hnorm.weight": "nextn.hnorm.weight",
    "post_norm.weight": "nextn.shared_head_norm.weight",
}
FIRST_PREDICTING = "nextn.eh_proj"  # every prediction layer has it
PREDICTION: Mapping[str, TensorSource | str] = {
    "eh_proj": FIRST_PREDICTING,
    **{name: TensorSource((place,), change=_minus_one) for name, place in _PREDICTION_NORMS.items()},
}
"""Tensors of transformers' class of prediction layers, beside those of its decoder layer."""

_QWEN_NORM = ("model.norm", replace(_LAST, change=_minus_one))
FAMILIES = {
    "lfm2": ModuleFamily(
        "lfm2", _lfm2, _lfm2_sources, ("model.embedding_norm", TensorSource(("token_embd_norm.weight",)))
    ),
    "qwen35": ModuleFamily("qwen3_5_text", _delta, _qwen35_sources, _QWEN_NORM),
    "qwen35moe": ModuleFamily("qwen3_5_moe_text", _delta, _qwen35_sources, _QWEN_NORM, mixture="mlp"),
    "qwen3next": ModuleFamily("qwen3_next", _delta, _qwen3next_sources, _QWEN_NORM, mixture="mlp"),
    "falcon-h1": ModuleFamily("falcon_h1", _falcon_h1, _falcon_h1_sources, ("model.final_layernorm", _LAST)),
    "gemma4": ModuleFamily(
        "gemma4_text",
        _gemma4,
        _gemma4_sources,
        mixture="experts",
        activation="gelu_tanh",
        route=_without_router,
        beside={
            "embed_tokens_per_layer": "per_layer_token_embd",
            "per_layer_model_projection": "per_layer_model_proj",
            "per_layer_projection_norm": "per_layer_proj_norm",
        },
        backend=LeanModulesBackend,
        modules=(HFBackend, StoredBackend),
        attention=attention_name,
        finish=_natively,
        spare=(DIVIDED, "attn_k.weight", "attn_v.weight", "attn_k_norm.weight"),
    ),
    "granitehybrid": ModuleFamily("granitemoehybrid", _granite, _granite_sources, mixture="block_sparse_moe"),
}
ARCHITECTURES = {
    name: tuple(dict.fromkeys(each.kind for each in (family.backend, family.modules[0])))
    for name, family in FAMILIES.items()
}
"""The backends of each architecture."""
