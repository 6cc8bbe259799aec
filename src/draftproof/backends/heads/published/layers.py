"""Llama-shaped layers of published heads as lean layers: their shape from a config, their weights from files."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.heads.base import Passes
from draftproof.backends.heads.published.files import HeadFiles, cast
from draftproof.backends.heads.published.rounding import rounded_layer, rounded_product
from draftproof.backends.lean.layers import Layer, Norm
from draftproof.backends.lean.rotary import Rope
from draftproof.backends.lean.traits import ROPES
from draftproof.backends.products.packed_linear import PackedLinear

FAMILIES = ("llama", "qwen3")
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class LayerShape:
    """The shape of a head's layers."""

    size: int
    inner: int
    heads: int
    key_heads: int
    head_dim: int
    eps: float
    vocab: int  # number of tokens of its embedding, the target's
    windows: tuple[int | None, ...]  # of each layer, the number of last positions that it sees; None for all
    config: Any  # transformers' own, for the rotary embedding

    @classmethod
    def of(cls, files: HeadFiles, family: str | None = None) -> LayerShape:
        """From a head's config."""
        config = files.made(family or files.layer.get("model_type"), FAMILIES, files.layer)
        shape = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        size, inner, heads, keys, dim = (int(n) for n in (config.hidden_size, config.intermediate_size, *shape))
        if config.hidden_act != "silu":
            raise files.refused(f"has the activation {config.hidden_act!r}: expected silu")
        rope = (config.rope_parameters or {}).get("rope_type", "default")
        if rope not in ROPES:
            raise files.refused(f"has the rotary embedding {rope!r}: expected {', '.join(ROPES)}")
        kinds = list(getattr(config, "layer_types", None) or [_FULL] * config.num_hidden_layers)
        if set(kinds) - {_FULL, _SLIDING}:
            raise files.refused(f"has layers of kinds {kinds}: expected {_FULL} and {_SLIDING}")
        windows = tuple(config.sliding_window if kind == _SLIDING else None for kind in kinds)
        return cls(size, inner, heads, keys, dim, float(config.rms_norm_eps), int(config.vocab_size), windows, config)


def make_layer(
    files: HeadFiles, shape: LayerShape, at: str, number: int, target: SlotBackend, *, wide: int = 1, first: bool = True
) -> Layer:
    """A lean layer from the weights of a head whose names begin with `at`.

    Its attention reads `wide` inputs side by side. Without a norm before that, which only the `first` layer may lack,
    one without effect stands in, and is not applied.
    """
    size, inner, queries, keys = shape.size, shape.inner, shape.heads * shape.head_dim, shape.key_heads * shape.head_dim

    def linear(name: str, outs: int, ins: int) -> SimpleNamespace:
        weight = cast(files.take(f"{at}{name}.weight", [outs, ins]), target)
        bias = files.optional(f"{at}{name}.bias", [outs])
        return SimpleNamespace(weight=weight, bias=None if bias is None else cast(bias, target))

    outs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    attention = SimpleNamespace(
        head_dim=shape.head_dim,
        scaling=shape.head_dim**-0.5,
        config=SimpleNamespace(num_attention_heads=shape.heads, num_key_value_heads=shape.key_heads),
        o_proj=linear("self_attn.o_proj", size, queries),
        **{name: linear(f"self_attn.{name}", outs[name], wide * size) for name in _ATTENTION[:3]},
    )
    for name in ("q_norm", "k_norm"):
        if f"{at}self_attn.{name}.weight" in files.tensors:
            setattr(attention, name, raw_norm(files, shape, f"{at}self_attn.{name}", target, shape.head_dim))
    after = raw_norm(files, shape, f"{at}post_attention_layernorm", target)
    before = raw_norm(files, shape, f"{at}input_layernorm", target) if first else after
    parts = SimpleNamespace(
        input_layernorm=before,
        post_attention_layernorm=after,
        self_attn=attention,
        mlp=SimpleNamespace(
            **{name: linear(f"mlp.{name}", inner, size) for name in _MLP[:2]},
            down_proj=linear("mlp.down_proj", size, inner),
        ),
    )
    return rounded_layer(Layer(parts, number, kind_of(shape.windows[number])))


def make_layers(
    files: HeadFiles, shape: LayerShape, target: SlotBackend, at: str = "layers.0.", **first: Any
) -> list[Layer]:
    """All layers of a head; names of the first one begin with `at`, and `first` is how it differs (`make_layer`)."""
    others = (make_layer(files, shape, f"layers.{number}.", number, target) for number in range(1, len(shape.windows)))
    return [make_layer(files, shape, at, 0, target, **first), *others]


def make_product(files: HeadFiles, name: str, outs: int, ins: int, target: SlotBackend) -> PackedLinear:
    """A linear layer, with a bias where the head has one."""
    weight, bias = files.take(f"{name}.weight", [outs, ins]), files.optional(f"{name}.bias", [outs])
    return rounded_product(PackedLinear(cast(weight, target), None if bias is None else cast(bias, target)))


def raw_norm(
    files: HeadFiles, shape: LayerShape, name: str, target: SlotBackend, size: int | None = None
) -> SimpleNamespace:
    """The weight of a norm and its epsilon, under the names that `Norm` reads."""
    weight = cast(files.take(f"{name}.weight", [size or shape.size]), target)
    return SimpleNamespace(weight=weight, variance_epsilon=shape.eps)


def make_norm(files: HeadFiles, shape: LayerShape, name: str, target: SlotBackend, size: int | None = None) -> Norm:
    """A norm from the weights of a head."""
    return Norm(raw_norm(files, shape, name, target, size))


def kind_of(window: int | None) -> str:
    """A name for the mask of a layer with this window."""
    return _FULL if window is None else f"{_SLIDING}:{window}"


def passes_of(shape: LayerShape, layers: list[Layer], target: SlotBackend) -> Passes:
    """What all layers of a head share in a pass."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    like = torch.empty(0, dtype=target.dtype, device=target.device)
    rope = Rope(LlamaRotaryEmbedding(shape.config).to(target.device), like)
    return Passes(rope, layers[0].attention, {kind_of(window): window for window in shape.windows})
