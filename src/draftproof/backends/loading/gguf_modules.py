"""Models with recurrent layers, and Gemma 4, in GGUF files, in the file's own numbers on transformers' modules.

A model is built without memory from the metadata. Then its matrices become products of the file's blocks, and its small
tensors floats. What llama.cpp's converter changes in tensors is changed back: 1 is added to norms, logarithms are
taken of decays, value heads have another order (`_tiled`), and several matrices were one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from draftproof.backends.heads.published.mtp_qwen import TYPES as PREDICTING
from draftproof.backends.heads.published.mtp_qwen import empty_layer
from draftproof.backends.hf.backend import HFBackend, StoredPrediction
from draftproof.backends.lean.layers import Norm, gate_of
from draftproof.backends.lean.mixture import Mixture, NoRouter, StoredMixture, behind_norm
from draftproof.backends.lean.module_backend import LeanModulesBackend, pack_layers, packing, why_unread
from draftproof.backends.lean.snapshots import LeanSnapshotBackend
from draftproof.backends.lean.traits import LLAMA, Experts, UnreadError
from draftproof.backends.loading.gguf_rotary import DIVIDED, FACTORS, longest
from draftproof.backends.loading.gguf_tensors import (
    FileTensors,
    by_layer,
    end_tokens,
    experts_of,
    floats_of,
    named,
    single,
)
from draftproof.backends.loading.options import ACTIVATIONS
from draftproof.backends.loading.stored_backends import (
    StoredBackend,
    attention_name,
)
from draftproof.backends.products.packed_linear import StoredProduct, dense, plain_of, release_pages
from draftproof.backends.products.stored_modules import NativeNorm, StoredEmbedding, StoredGates, StoredLinear
from draftproof.errors import UserError, reason
from draftproof.models.gguf_file import GGUFFile, generation_config
from draftproof.native.ggml import StoredMatrix, why_not_joined

_log = logging.getLogger(__name__)
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
_SAME_INPUTS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
)
"""Linear layers of one module that are called with the same inputs, in this order."""

_FIRST = "nextn.eh_proj.weight"  # every prediction layer has it
_PREDICTION_NORMS = {
    "enorm.weight": "nextn.enorm.weight",
    "hnorm.weight": "nextn.hnorm.weight",
    "post_norm.weight": "nextn.shared_head_norm.weight",
}
"""Norms of transformers' class of prediction layers, beside those of its decoder layer."""

_UNTURNED = 1e20  # divisors of frequencies from here on leave heads as they are


def _minus_one(made: Tensor) -> Tensor:
    return made - 1.0


def _logarithm(made: Tensor) -> Tensor:
    return (-made).log()


# --- the architectures ------------------------------------------------------------------------------------------------


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


_QWEN_NORM = ("model.norm", replace(_LAST, change=_minus_one))
_ARCHITECTURES = {
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
    for name, family in _ARCHITECTURES.items()
}
"""The backends of each architecture."""


# --- reading ----------------------------------------------------------------------------------------------------------


def read_modules(
    file: GGUFFile,
    *,
    name: str,
    dtype: torch.dtype,
    activations: str = ACTIVATIONS[0],
    check: bool = True,
    tick: Callable[[int], object] | None = None,
    backend: str = "auto",
) -> HFBackend:
    """The model in a file, with its own numbers; arguments as of `gguf_model.read_model`.

    `backend` is one of the architecture's, or "auto", which takes the first one that reads the model.
    """
    tensors = FileTensors(file, dtype, dense=activations == "float")
    if check:
        tensors.check()
    tensors.tick = tick
    family = _ARCHITECTURES[file.get("general.architecture")]
    loader = _ModuleLoader(tensors, family, dtype)
    model = loader.model
    for key, value in generation_config(file).items():
        setattr(model.generation_config, key, value)
    made = _backend(model, family, backend, few=tensors.bits is not None, name=name, check=check)
    made.facts = replace(made.facts, bits=tensors.bits)
    if family.kind in PREDICTING:
        made.prediction = _prediction(loader, file, name)
    return made


def _backend(model: Any, family: ModuleFamily, asked: str, *, few: bool, name: str, check: bool) -> HFBackend:
    """The backend of a model that has the weights of a file, whether these have few bits or are floats."""
    kind = family.backend
    if asked in ("auto", kind.kind) and kind is not family.modules[0]:
        why = why_unread(model)
        if why is None:
            try:
                return kind(model, name=name, check=check, **packing(kind))
            except UserError as cause:
                why = str(cause)
        if asked != "auto":
            raise UnreadError(f"it has no lean forward: {why}")
        _log.info("%s is read by transformers' own modules: %s", name, why)
    family.finish(model.model)
    kind = family.modules[few]
    return kind(model, name=name, check=check, **packing(kind))


def predicts(file: GGUFFile) -> bool:
    """Whether a file has a prediction layer of a kind that is read here, whatever its metadata say."""
    family = _ARCHITECTURES.get(file.get("general.architecture"))
    known = family is not None and family.kind in PREDICTING
    return known and any(at + _FIRST in file.tensors for at in file.prediction_layers)


def _prediction(loader: _ModuleLoader, file: GGUFFile, name: str) -> StoredPrediction:
    """The prediction layer of a file, which is read when it is asked for."""

    def read(model: Any) -> Any:
        try:
            return loader.prediction_layer(model)
        except UnreadError as cause:
            raise UserError(
                f"drafter mtp: the prediction layer of {name} cannot be read: {cause}; many files are written without "
                "it, or hold it alone: take one that has it, or another drafter"
            ) from cause

    return StoredPrediction(predicts(file), read)


def _layers(file: GGUFFile) -> int:
    """Number of layers, without those that only predict further tokens."""
    return int(named(file, "block_count")) - len(file.prediction_layers)


def _common(file: GGUFFile) -> dict[str, Any]:
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


class _ModuleLoader:
    """A model of transformers with the tensors of a file."""

    def __init__(self, tensors: FileTensors, family: ModuleFamily, dtype: torch.dtype) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        kind: Any = AutoModelForCausalLM
        file = tensors.file
        self._tensors = tensors
        self._family = family
        self._dtype = dtype
        self._unread = set(file.tensors)
        fields = {**_common(file), **family.fields(file)}
        try:
            config: Any = AutoConfig.for_model(family.kind, **fields)
            with torch.device("meta"):
                model = kind.from_config(config, dtype=dtype, attn_implementation=family.attention())
        except Exception as cause:  # whatever transformers raises for numbers that do not belong together
            raise UnreadError(f"transformers makes no model of its metadata ({reason(cause)})") from cause
        self.model = model.eval()
        self._sources = family.sources(config)
        inner, (last, source) = model.model, family.norm
        if inner.rotary_emb is not None:
            inner.rotary_emb = type(inner.rotary_emb)(config)
        inner.embed_tokens = self._embedding(inner.embed_tokens, "token_embd.weight")
        self._beside(inner, family.beside)
        self._output(tied=config.tie_word_embeddings)
        norm = model.get_submodule(last)
        norm.weight = self._parameter(source, "", norm.weight.shape)
        self._experts = experts_of(file, whole=True) if file.of_architecture("expert_count") else None
        for number, layer in enumerate(inner.layers):
            self._mix(layer, f"blk.{number}.")
            self._layer(layer, f"blk.{number}.")
        self._refuse_left(each for each in self._unread if not each.startswith(file.prediction_layers))

    def prediction_layer(self, model: Any) -> Any:
        """transformers' class of the file's prediction layer, over the model that was made here or a form of it.

        Raises:
            UnreadError: there is none, there are several, or tensors that do not fit.
        """
        file, places = self._tensors.file, self._tensors.file.prediction_layers
        if not predicts(file) or len(places) > 1:
            there = f"{len(places)} layers (nextn_predict_layers)" if predicts(file) else f"no tensor {_FIRST}"
            raise UnreadError(f"expected one layer behind the others, and the file has {there}")
        (at,), made = places, empty_layer(model)
        (layer,) = made.layers
        own = {name: TensorSource((place,), change=_minus_one) for name, place in _PREDICTION_NORMS.items()}
        inner = {f"mtp_block.{name}": source for name, source in self._family.sources(model.config).items()}
        self._sources = {"eh_proj": "nextn.eh_proj", **own, **inner}
        self._mix(layer.mtp_block, at)
        self._layer(layer, at)
        self._refuse_left(each for each in self._unread if each.startswith(at))
        return made.requires_grad_(requires_grad=False).train(mode=False)

    def _refuse_left(self, names: Iterable[str]) -> None:
        left = sorted(each for each in names if not each.endswith(self._family.spare))
        if left:
            raise UnreadError(f"its tensors have too much: {', '.join(left[:3])}")

    def _mix(self, layer: nn.Module, at: str) -> None:
        """Fill the mixture of experts of a layer, if there is one."""
        if self._experts is not None:
            setattr(layer, self._family.mixture, self._mixture(at, self._experts, self._family.activation))
            self._family.route(layer)

    def _embedding(self, module: Any, place: str) -> nn.Module:
        table, factor = self._matrix(place), float(getattr(module, "scalar_embed_scale", 1.0))
        if isinstance(table, StoredMatrix):
            return StoredEmbedding(table, factor)
        plain: nn.Embedding = module
        plain.weight = nn.Parameter(table, requires_grad=False)
        if factor != 1.0:
            module.embed_scale = torch.tensor(factor)
        return plain

    def _beside(self, inner: nn.Module, places: Mapping[str, str]) -> None:
        """Fill the modules beside the layers."""
        for name, module in list(inner.named_children()):
            if name not in places:
                continue
            source = TensorSource((f"{places[name]}.weight",))
            if isinstance(module, nn.Embedding):
                setattr(inner, name, self._embedding(module, *source.places))
            elif isinstance(module, nn.Linear):
                self._linear(inner, {name: self._loaded(name, module, source, "")})
            else:
                module.weight = self._parameter(source, "", module.get_parameter("weight").shape)

    def _output(self, *, tied: bool) -> None:
        embedding = self.model.model.embed_tokens
        if tied and isinstance(embedding, nn.Embedding):
            self.model.lm_head.weight = embedding.weight
            return
        source = TensorSource((f"{'token_embd' if tied else 'output'}.weight",))
        self._linear(self.model, {"lm_head": self._loaded("lm_head", self.model.lm_head, source, "")})

    def _layer(self, layer: nn.Module, at: str) -> None:
        """Fill the modules of a layer, whose tensors have names that begin with `at` in the file."""
        for path, module in list(layer.named_modules()):
            stem = f"{path}." if path else ""
            linear = {name: each for name, each in module.named_children() if type(each) is nn.Linear}
            for names in _groups(linear):
                found = {name: self._loaded(stem + name, linear[name], None, at) for name in names}
                self._linear(module, found)
            if isinstance(module, nn.Linear | StoredMixture):
                continue
            for name, each in list(module.named_parameters(recurse=False)):
                module.register_parameter(name, self._parameter(self._source(stem + name), at, each.shape))
            for name, each in list(module.named_buffers(recurse=False)):
                if stem + name in self._sources:
                    made: Tensor = self._parameter(self._source(stem + name), at, each.shape)
                elif name == "mup_vector":  # factors, which a file has in its weights
                    made = torch.ones(each.shape, dtype=self._dtype)
                else:
                    raise UnreadError(f"its layers have {stem}{name}")
                module.register_buffer(name, made.detach(), persistent=False)

    def _source(self, name: str) -> TensorSource:
        """What a tensor of a layer is in the file."""
        found = self._sources.get(name)
        if found is None:
            stem, _, suffix = name.rpartition(".")
            if stem not in self._sources:
                raise UnreadError(f"its layers have {name}")
            found = f"{self._sources[stem]}.{suffix}"
        return TensorSource((found,)) if isinstance(found, str) else found

    def _loaded(self, name: str, layer: nn.Linear, source: TensorSource | None, at: str) -> _Loaded:
        """The weights of a linear layer; by its name in the layer where no source is given."""
        source = source or self._source(f"{name}.weight")
        alone, rows = len(source.places) == 1, _unless_in_order(source.rows)
        parts = [self._matrix(at + place, rows if alone else None) for place in source.places]
        shape = [sum(len(each) for each in parts), parts[0].shape[-1]]
        if shape != list(layer.weight.shape):
            raise UnreadError(f"its {at}{source.places[0]} is {shape}, not {list(layer.weight.shape)}")
        bias = None if layer.bias is None else self._parameter(self._source(f"{name}.bias"), at, layer.bias.shape)
        return _Loaded(parts, None if alone else rows, _unless_in_order(source.inputs), bias)

    def _linear(self, module: nn.Module, found: Mapping[str, _Loaded]) -> None:
        """Fill linear layers that read the same inputs; those of few bits are one product, as far as they join."""
        few = [name for name, each in found.items() if each.matrices]
        joined = next((count for count in range(len(few), 1, -1) if _join(found[name] for name in few[:count])), 0)
        for names in filter(None, (few[:joined], *([name] for name in few[joined:]))):
            matrices = [matrix for name in names for matrix in found[name].matrices]
            product, start = StoredProduct(matrices, found[names[0]].bias), 0
            for name in names:
                stop = start + sum(len(matrix) for matrix in found[name].matrices)
                setattr(module, name, StoredLinear(product, start, stop, found[name].rows, found[name].inputs))
                start = stop
        for name, each in found.items():
            if not each.matrices:
                layer: Any = module.get_submodule(name)
                layer.weight = nn.Parameter(each.dense(), requires_grad=False)
                layer.bias = each.bias

    def _mixture(self, at: str, experts: Experts, activation: str) -> StoredMixture:
        def linear(name: str) -> SimpleNamespace:
            return SimpleNamespace(weight=self._matrix(f"{at}ffn_{name}.weight"), bias=None)

        def gated(kind: str) -> SimpleNamespace:
            return SimpleNamespace(**{f"{name}_proj": linear(f"{name}_{kind}") for name in (*gate_up, "down")})

        gate_up = ("gate_up",) if f"{at}ffn_gate_up_exps.weight" in self._tensors.file.tensors else ("gate", "up")
        mlp = SimpleNamespace(gate=linear("gate_inp"), experts=gated("exps"))
        if experts.weighed:
            mlp.shared_expert = gated("shexp")
            mlp.shared_expert_gate = linear("gate_inp_shexp")
        traits = replace(
            LLAMA,
            experts=replace(experts, shared=experts.weighed),
            activation=activation,
            gate_up=tuple(f"{name}_proj" for name in gate_up),
        )
        scales = None
        if self._scaled(at, mlp.gate):
            self._take(f"{at}ffn_down_exps.scale")
            scales = self._tensors.floats(f"{at}ffn_down_exps.scale")
        return StoredMixture(Mixture(mlp, traits, torch.empty(0, dtype=self._dtype), scales))

    def _scaled(self, at: str, router: SimpleNamespace) -> bool:
        """Whether a router has scales of its inputs, which are those of experts without the scales of these."""
        scale, norm = f"{at}ffn_gate_inp.scale", f"{at}pre_ffw_norm_2.weight"
        if scale not in self._tensors.file.tensors:
            return False
        self._take(scale)
        own, of_experts = self._tensors.floats(scale), self._tensors.floats(norm)
        router.weight = behind_norm(plain_of(router.weight), own * len(own) ** -0.5, of_experts, self._dtype)
        return True

    def _matrix(self, place: str, rows: Order | None = None) -> StoredMatrix | Tensor:
        """A matrix; where its numbers are floats of the model's dtype, a copy that the model's own modules read."""
        self._take(place)
        made = self._tensors.matrix(place, rows)
        if not isinstance(made, StoredMatrix) or not made.is_plain:
            return made
        copied = made.plain().clone().view(self._tensors.file.tensors[place].shape)
        release_pages([made])
        return copied

    def _parameter(self, source: TensorSource, at: str, shape: torch.Size) -> nn.Parameter:
        """A small tensor; in the file it may have other dimensions."""
        (place,) = source.places
        self._take(at + place)
        made = self._tensors.floats(at + place)
        if made.numel() != math.prod(shape):
            raise UnreadError(f"its {at}{place} is {list(made.shape)}, not {list(shape)}")
        made = made if source.rows is None else made[source.rows]
        made = made if source.change is None else source.change(made)
        return nn.Parameter(made.reshape(shape).to(self._dtype), requires_grad=False)

    def _take(self, place: str) -> None:
        if place not in self._tensors.file.tensors:
            raise UnreadError(f"its tensors lack {place}")
        self._unread.discard(place)


@dataclass(frozen=True)
class _Loaded:
    """The weights of a linear layer."""

    parts: Sequence[StoredMatrix | Tensor]  # matrices, whose outputs follow one another
    rows: Order | None  # which of their outputs each of the layer's is; None where they have the same order
    inputs: Order | None  # which of the layer's inputs each of theirs is; None where they have the same order
    bias: nn.Parameter | None  # if there is one

    @property
    def matrices(self) -> list[StoredMatrix]:
        """The parts, where they can be a product of few bits."""
        found = [each for each in self.parts if isinstance(each, StoredMatrix)]
        return found if len(found) == len(self.parts) and why_not_joined(found) is None else []

    def dense(self) -> Float[Tensor, "out in"]:
        """What the numbers stand for."""
        made = torch.cat([each if isinstance(each, Tensor) else dense(each) for each in self.parts])
        made = made if self.rows is None else made[self.rows]
        return made if self.inputs is None else made[:, self.inputs.argsort()]


def _join(layers: Iterable[_Loaded]) -> bool:
    """Whether linear layers can be one product."""
    every = list(layers)
    matrices = [matrix for each in every for matrix in each.matrices]
    return all(each.bias is None for each in every) and why_not_joined(matrices) is None


def _groups(names: Collection[str]) -> Iterator[Sequence[str]]:
    """Names of linear layers of a module by what they read."""
    groups = [[name for name in group if name in names] for group in _SAME_INPUTS]
    grouped = {name for group in groups for name in group}
    yield from filter(None, groups)
    yield from ([name] for name in names if name not in grouped)


def _unless_in_order(order: Order | None) -> Order | None:
    return None if order is None or torch.equal(order, torch.arange(len(order))) else order
