"""A decoder layer in one native call, where each of its parts is native: calls are a fifth of a small model's step.

Knows: the parts of a lean layer, native.c's structures. Does not know: models, sessions.
"""

from __future__ import annotations

import copy
import ctypes
from typing import Any, ClassVar

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
    products = {name: getattr(layer, name) for name in ("qkv", "out", "gate_up", "down")}
    norms = {"before": layer.before, "between": layer.between, "turned": layer.qk_norm}
    rows = layer.before.is_native and layer.between.is_native and layer.gates_natively
    if not isinstance(layer.attention, NativeAttention) or not rows:
        return None
    if any(product.layout != "native" for product in products.values()):
        return None
    return NativeLayer(layer.number, layer.attention, products, norms)


class NativeLayer:
    """See `native_layer`; it shares the layer's parts and does not hold the layer, which holds it.

    Args:
        number: of the layer in the cache.
        attention: native.
        products: a `Product` each, by the names that native.c has for them.
        norms: likewise; None for one that the layer has not.
    """

    def __init__(
        self, number: int, attention: NativeAttention, products: dict[str, Any], norms: dict[str, Any]
    ) -> None:
        self._parts = number, attention, products, norms
        self._heads, self._operations = attention.heads, attention.operations
        self._inner = products["down"].weight.ins
        self._given = _Layer(
            size=products["out"].weight.outs,
            inner=self._inner,
            **{name: _linear(product) for name, product in products.items()},
            **{name: None if norm is None else norm.scaled.data_ptr() for name, norm in norms.items()},
            **{f"{name}_least": 0.0 if norm is None else norm.added for name, norm in norms.items()},
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeLayer:
        return NativeLayer(*copy.deepcopy(self._parts, memo))  # addresses are those of the copy

    def __call__(self, x: Float[Tensor, "tokens dim"], at: Pass, sight: native.Sight) -> Float[Tensor, "tokens dim"]:
        """As `Layer`."""
        heads = self._heads
        keys, values = at.cache.buffers(self._parts[0], heads.keys, heads.dim, x)
        given = native.Reading.of(at.cos, at.sin, keys, values, sight, heads=heads.queries, scale=heads.scale)
        work = x.shape[0] * (x.shape[1] + 2 * (heads.queries + heads.keys) * heads.dim + 3 * self._inner)
        return self._operations.layer(self._given, x, given, sight.room(work, x.dtype, 1))


def _linear(product: Any) -> _Linear:
    bias = None if product.bias is None else product.bias.data_ptr()
    return _Linear(product.weight.blocks.data_ptr(), bias)
