"""Decoder layers in one native call, because separate calls take much of a small model's step."""

from __future__ import annotations

import copy
import ctypes
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from draftproof.backends.cache.slot_cache import SlotCache
from draftproof.backends.lean.attention import Heads, NativeAttention, Pass, arguments
from draftproof.backends.lean.inputs import Joint, linear_arguments
from draftproof.backends.products.packed_linear import REORDERED
from draftproof.native.operations import ACTIVATIONS
from draftproof.native.structures import LayerArguments, LayerStack, PassMask

PRODUCTS = ("qkv", "out", "gate_up", "down")  # of a layer without experts
_NONE = (None, None, None)  # buffers of a layer without keys and values
NORMS = ("before", "mixed", "between", "made", "turned")


def native_layers(layers: Sequence[Any]) -> NativeLayers | None:
    """Consecutive lean `Layer`s as one call; None where some part of them is not native."""
    one_call = all(each.layout == "native" for layer in layers for each in layer.products.values())
    return NativeLayers(layers) if one_call and all(map(computes_natively, layers)) else None


def computes_natively(layer: Any) -> bool:
    """Whether all parts of a lean `Layer` are native, and so a row has the same bits in every pass.

    Products whose inputs change their order are so, too, although native code does not call them (`REORDERED`).
    """
    norms = (layer.before, layer.mixed, layer.between, layer.made)
    rows = layer.gates_natively and all(norm is None or norm.is_native for norm in norms)
    products = all(product.layout in ("native", REORDERED) for product in layer.products.values())
    return isinstance(layer.attention, NativeAttention) and rows and products


@dataclass(frozen=True, eq=False)
class _LayerRun:
    """Neighbouring layers with the same attention mask."""

    kind: str
    given: LayerStack
    numbers: tuple[int, ...]
    attend: tuple[bool, ...]
    attention: NativeAttention

    @classmethod
    def of(cls, layers: Sequence[Any]) -> _LayerRun:
        first = layers[0]
        return cls(
            first.kind,
            LayerStack([_given(layer) for layer in layers]),
            tuple(layer.number for layer in layers),
            tuple(layer.qkv is not None for layer in layers),
            first.attention,
        )


class _Places:
    """Addresses of the buffers of a run's layers; valid as long as the cache's extent does not change."""

    def __init__(self, run: _LayerRun, cache: SlotCache, like: Tensor) -> None:
        heads = run.attention.heads
        pairs = zip(run.numbers, run.attend, strict=True)
        stored = [cache.buffers(number, heads.keys, heads.dim, like) if attends else _NONE for number, attends in pairs]
        self.cache = cache
        self.extent = cache.extent
        self.addresses = tuple(
            (ctypes.c_void_p * len(stored))(*(None if each is None else each.data_ptr() for each in store))
            for store in zip(*stored, strict=True)
        )
        shapes = [keys.shape for keys, _, _ in stored if keys is not None]
        self.shape = shapes[0] if shapes else None
        # Slots may differ: with an early exit the first layers grow before the others.
        assert all(each[1:] == shapes[0][1:] for each in shapes), "positions are the same in all"

    def shape_for(self, heads: Heads, mask: PassMask) -> Sequence[int]:
        """The shape of the buffers; where no layer has some, one that holds a pass."""
        return self.shape or (mask.slots, heads.keys, max(mask.end, mask.horizon), heads.dim)


class NativeLayers:
    """All decoder layers of a model in C, one call for each run of layers of one kind."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        groups = itertools.groupby(layers, lambda layer: (layer.kind, layer.heads, layer.inner))
        self._runs = [_LayerRun.of(list(group)) for _, group in groups]
        self._places: list[_Places | None] = [None] * len(self._runs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeLayers:
        return NativeLayers(copy.deepcopy(self._layers, memo))  # with the addresses of the copy

    def __call__(
        self, x: Float[Tensor, "tokens dim"], at: Pass, masks: Mapping[str, PassMask]
    ) -> Float[Tensor, "tokens dim"]:
        """Run the layers one after another; x is overwritten."""
        x = x.contiguous()
        for number, run in enumerate(self._runs):
            places = self._places[number]
            if places is None or places.cache is not at.cache or places.extent != at.cache.extent:
                places = self._places[number] = _Places(run, at.cache, x)
            mask, heads = masks[run.kind], run.attention.heads
            given = arguments(heads, at, places.shape_for(heads, mask), mask)
            work = mask.buffer(run.given.work(given), x.dtype, 1)
            operations, sequences = run.attention.operations, at.sequences
            operations.layers(run.given, x, given, places.addresses, work, sequences, run.numbers[0])
        return x


def _given(layer: Any) -> LayerArguments:
    norms = {name: getattr(layer, name) for name in NORMS}
    inputs = {name: getattr(layer, name) for name in ("qkv", "gate_up")}
    outputs = {name: getattr(layer, name) for name in ("out", "down")}
    out_factor, down_factor = layer.factors
    return LayerArguments(
        size=layer.size,
        inner=layer.inner,
        whole=layer.traits.whole,
        activation=ACTIVATIONS.index(layer.traits.activation),
        gates=layer.gates,
        out_factor=out_factor,
        down_factor=down_factor,
        sinks=None if layer.sinks is None else layer.sinks.data_ptr(),
        mixture=None if layer.mixture is None else ctypes.pointer(layer.mixture.arguments),
        mixer=None if layer.mixer is None else ctypes.pointer(layer.mixer.arguments),
        **{name: Joint.of(product).arguments for name, product in inputs.items() if product is not None},
        **{name: linear_arguments(product) for name, product in outputs.items() if product is not None},
        **{name: None if norm is None else norm.scaled.data_ptr() for name, norm in norms.items()},
        **{f"{name}_least": 0.0 if norm is None else norm.added for name, norm in norms.items()},
    )
