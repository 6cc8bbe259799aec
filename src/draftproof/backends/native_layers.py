"""Decoder layers in one native call, where all their parts are native: calls are a good part of a small model's step.

Knows: the parts of a lean layer, native.c's structures. Does not know: models, sessions.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from draftproof.backends.attention import NativeAttention, Pass
from draftproof.backends.slot_cache import SlotCache
from draftproof.kernels import native

_PRODUCTS = ("qkv", "out", "gate_up", "down")


class _Linear(ctypes.Structure):
    """As native.c has it."""

    _fields_: ClassVar = [("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p)]


class _Layer(ctypes.Structure):
    """As native.c has it."""

    _fields_: ClassVar = [
        *((name, _Linear) for name in _PRODUCTS),
        *((name, ctypes.c_void_p) for name in ("before", "between", "turned")),
        *((name, ctypes.c_long) for name in ("size", "inner")),
        *((name, ctypes.c_float) for name in ("before_least", "between_least", "turned_least")),
    ]


def native_layers(layers: Sequence[Any]) -> NativeLayers | None:
    """One call for lean `Layer`s that follow one another; None where some part of them is not native."""
    return NativeLayers(layers) if all(_is_native(layer) for layer in layers) else None


def _is_native(layer: Any) -> bool:
    rows = layer.before.is_native and layer.between.is_native and layer.gates_natively
    products = all(getattr(layer, name).layout == "native" for name in _PRODUCTS)
    return isinstance(layer.attention, NativeAttention) and rows and products


@dataclass(frozen=True, eq=False)
class _LayerRun:
    """Neighbouring layers that see the same slots.

    Attributes:
        kind: of their attention mask.
        given: for native.c.
        numbers: in the cache.
        attention: of each of them.
        room: elements of work for a token.
    """

    kind: str
    given: ctypes.Array[_Layer]
    numbers: tuple[int, ...]
    attention: NativeAttention
    room: int

    @classmethod
    def of(cls, layers: Sequence[Any]) -> _LayerRun:
        first = layers[0]
        heads, size, inner = first.heads, first.out.weight.outs, first.down.weight.ins
        return cls(
            first.kind,
            (_Layer * len(layers))(*map(_given, layers)),
            tuple(layer.number for layer in layers),
            first.attention,
            size + 2 * (heads.queries + heads.keys) * heads.dim + 3 * inner,
        )


class _Places:
    """Where the buffers of a run's layers lie; they stay there while the cache's extent stays.

    Args:
        run: the layers.
        cache: theirs.
        like: a tensor of the keys' dtype.
    """

    def __init__(self, run: _LayerRun, cache: SlotCache, like: Tensor) -> None:
        heads = run.attention.heads
        self.cache, self.extent = cache, cache.extent
        pairs = [cache.buffers(number, heads.keys, heads.dim, like) for number in run.numbers]
        self.keys, self.values = (
            (ctypes.c_void_p * len(pairs))(*(pair[which].data_ptr() for pair in pairs)) for which in (0, 1)
        )
        self.shape = pairs[0][0].shape
        # Slots may differ: an early exit has the first layers grow before the others.
        assert all(each.shape[1:] == self.shape[1:] for pair in pairs for each in pair), "as many positions in each"


class NativeLayers:
    """See `native_layers`.

    Args:
        layers: all native.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        groups = itertools.groupby(layers, lambda layer: (layer.kind, layer.heads, layer.down.weight.ins))
        self._runs = [_LayerRun.of(list(group)) for _, group in groups]
        self._places: list[_Places | None] = [None] * len(self._runs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeLayers:
        return NativeLayers(copy.deepcopy(self._layers, memo))  # addresses are those of the copy

    def __call__(
        self, x: Float[Tensor, "tokens dim"], at: Pass, sights: Mapping[str, native.Sight]
    ) -> Float[Tensor, "tokens dim"]:
        """As the layers one after another; x is overwritten."""
        x = x.contiguous()
        for number, run in enumerate(self._runs):
            places = self._places[number]
            if places is None or places.cache is not at.cache or places.extent != at.cache.extent:
                places = self._places[number] = _Places(run, at.cache, x)
            heads, sight = run.attention.heads, sights[run.kind]
            given = native.Reading.of(at.cos, at.sin, places.shape, sight, heads=heads.queries, scale=heads.scale)
            work = sight.room(x.shape[0] * run.room, x.dtype, 1)
            run.attention.operations.layers(run.given, x, given, (places.keys, places.values), work)
        return x


def _given(layer: Any) -> _Layer:
    norms = {"before": layer.before, "between": layer.between, "turned": layer.qk_norm}
    return _Layer(
        size=layer.out.weight.outs,
        inner=layer.down.weight.ins,
        **{name: _linear(getattr(layer, name)) for name in _PRODUCTS},
        **{name: None if norm is None else norm.scaled.data_ptr() for name, norm in norms.items()},
        **{f"{name}_least": 0.0 if norm is None else norm.added for name, norm in norms.items()},
    )


def _linear(product: Any) -> _Linear:
    bias = None if product.bias is None else product.bias.data_ptr()
    return _Linear(product.weight.blocks.data_ptr(), bias)
