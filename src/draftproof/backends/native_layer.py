"""A decoder layer in one native call, where each of its parts is native: calls are a fifth of a small model's step.

Knows: the parts of a lean layer, native.c's structures. Does not know: models, sessions.
"""

from __future__ import annotations

import copy
import ctypes
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.backends.attention import NativeAttention, Pass
from draftproof.kernels import native


class _Linear(ctypes.Structure):
    """As native.c has it."""

    _fields_: ClassVar = [("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p)]


class _Layer(ctypes.Structure):
    """As native.c has it."""

    _fields_: ClassVar = [
        *((name, _Linear) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("before", "between", "turned")),
        *((name, ctypes.c_long) for name in ("size", "inner")),
        *((name, ctypes.c_float) for name in ("before_least", "between_least", "turned_least")),
    ]


def native_layer(layer: Any) -> NativeLayer | None:
    """One call for a lean `Layer`; None where some part of it is not native."""
    products = (layer.qkv, layer.out, layer.gate_up, layer.down)
    rows = layer.before.is_native and layer.between.is_native and layer.gates_natively
    if not rows or not isinstance(layer.attention, NativeAttention) or any(p.layout != "native" for p in products):
        return None
    return NativeLayer(layer)


class NativeLayer:
    """See `native_layer`.

    Args:
        layer: whose weights are used; it must live as long as this.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeLayer:
        return NativeLayer(copy.deepcopy(self._layer, memo))  # addresses are those of the copy

    @cached_property  # at the first call: a layer that is being copied has no weights yet
    def _given(self) -> _Layer:
        layer = self._layer
        norms = {"before": layer.before, "between": layer.between, "turned": layer.qk_norm}
        return _Layer(
            size=layer.out.weight.outs,
            inner=self._inner,
            **{name: _linear(getattr(layer, name)) for name in ("qkv", "out", "gate_up", "down")},
            **{name: None if norm is None else norm.scaled.data_ptr() for name, norm in norms.items()},
            **{f"{name}_least": 0.0 if norm is None else norm.added for name, norm in norms.items()},
        )

    @cached_property
    def _inner(self) -> int:
        return int(self._layer.down.weight.ins)

    def __call__(self, x: Float[Tensor, "tokens dim"], at: Pass, sight: native.Sight) -> Float[Tensor, "tokens dim"]:
        """As `Layer`."""
        layer, heads = self._layer, self._layer.heads
        keys, values = at.cache.buffers(layer.number, heads.keys, heads.dim, x)
        x = x.contiguous()
        y = torch.empty_like(x)
        layer.attention.operations.layer(
            ctypes.addressof(self._given),
            x,
            y,
            at.cos,
            at.sin,
            keys,
            values,
            sight,
            heads=heads.queries,
            scale=heads.scale,
            work=x.shape[0] * (x.shape[1] + 2 * (heads.queries + heads.keys) * heads.dim + 3 * self._inner),
        )
        return y


def _linear(product: Any) -> _Linear:
    bias = None if product.bias is None else product.bias.data_ptr()
    return _Linear(product.weight.blocks.data_ptr(), bias)
