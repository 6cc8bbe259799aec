"""Decoder layers in one native call, because separate calls take much of a small model's step."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.backends.cache.slot_cache import SlotCache
from draftproof.backends.lean.attention import Heads, NativeAttention, Pass, arguments
from draftproof.backends.lean.inputs import FusedProducts, linear_arguments
from draftproof.backends.products.packed_linear import REORDERED
from draftproof.native.operations import ACTIVATIONS
from draftproof.native.structures import AttentionArguments, LayerArguments, LayerStack, PassMask

PRODUCTS = ("qkv", "out", "gate_up", "down")  # of a layer without experts
_NONE = (None, None, None)  # buffers of a layer without keys and values
BESIDE = ("experts_in", "experts_out", "gated_out")  # where experts and gates are added before `made`
NORMS = ("before", "mixed", "between", "made", *BESIDE, "turned")  # by the names of LayerArguments


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


class _Places:
    """Addresses of the buffers of layers; valid as long as the cache's extent does not change.

    Attributes:
        shapes: of the buffers of each attention; None where no layer has some.
        dtype: of keys; None where no layer has buffers.
    """

    def __init__(self, layers: Sequence[Any], which: Sequence[int], cache: SlotCache, like: Tensor) -> None:
        stored = [
            cache.buffers(each.source, each.heads.keys, each.heads.dim, like) if each.qkv is not None else _NONE
            for each in layers
        ]
        self.cache = cache
        self.extent = cache.extent
        self.addresses = tuple(
            (ctypes.c_void_p * len(stored))(*(None if each is None else each.data_ptr() for each in store))
            for store in zip(*stored, strict=True)
        )
        self.dtype = next((keys.dtype for keys, _, _ in stored if keys is not None), None)
        self.shapes: list[Sequence[int] | None] = [None] * (1 + max(which))
        for one, (keys, _, _) in zip(which, stored, strict=True):
            if keys is not None:
                first = self.shapes[one] = self.shapes[one] or keys.shape
                # Slots may differ: with an early exit the first layers grow before the others.
                assert keys.shape[1:] == first[1:], "positions are the same in all"


class NativeLayers:
    """All decoder layers of a model in one call of C."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        known: dict[tuple[str, Heads], int] = {}
        self._which = [known.setdefault((layer.kind, layer.heads), len(known)) for layer in layers]
        self._attentions = list(known)
        self._operations = layers[0].attention.operations
        self._stack = LayerStack([_given(layer) for layer in layers], self._which)
        self._places: _Places | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeLayers:
        return NativeLayers(copy.deepcopy(self._layers, memo))  # with the addresses of the copy

    def __call__(
        self, x: Float[Tensor, "tokens dim"], at: Pass, masks: Mapping[str, PassMask]
    ) -> Float[Tensor, "tokens dim"]:
        """Run the layers one after another; x is overwritten."""
        x, places = x.contiguous(), self._places
        if places is None or places.cache is not at.cache or places.extent != at.cache.extent:
            places = self._places = _Places(self._layers, self._which, at.cache, x)
        given = (AttentionArguments * len(self._attentions))()
        for number, ((kind, heads), shape) in enumerate(zip(self._attentions, places.shapes, strict=True)):
            mask = masks[kind]
            # where no layer has buffers, the shape of some that would hold the pass
            fits = shape or (mask.slots, heads.keys, max(mask.end, mask.horizon), heads.dim)
            given[number] = arguments(heads, at, fits, mask, places.dtype)
        for each, (kind, _) in zip(given, self._attentions, strict=True):  # the last one may have made it larger
            each.scratch = masks[kind].buffer(0, torch.float32, 0).data_ptr()
        work = masks[self._attentions[0][0]].buffer(self._stack.work(given), x.dtype, 1)
        first = self._layers[0].number
        self._operations.layers(self._stack, x, given, places.addresses, work, at.sequences, first, at.embedded)
        return x


def _given(layer: Any) -> LayerArguments:
    norms = {name: getattr(layer, name) for name in NORMS}
    inputs = {name: getattr(layer, name) for name in ("qkv", "gate_up")}
    outputs = {name: getattr(layer, name) for name in ("out", "down")}
    out_factor, down_factor = layer.factors
    embedded = layer.embedded
    return LayerArguments(
        size=layer.size,
        inner=layer.inner,
        whole=layer.traits.whole,
        activation=ACTIVATIONS.index(layer.traits.activation),
        gates=layer.gates,
        own=layer.heads.keys if layer.source == layer.number else 0,
        normed=0 if layer.turned is None else layer.turned.heads,
        leaving=layer.leaving,
        **({} if embedded is None else embedded.arguments),
        out_factor=out_factor,
        down_factor=down_factor,
        sinks=None if layer.sinks is None else layer.sinks.data_ptr(),
        mixture=None if layer.mixture is None else ctypes.pointer(layer.mixture.arguments),
        mixer=None if layer.mixer is None else ctypes.pointer(layer.mixer.arguments),
        **{name: FusedProducts.of(product).arguments for name, product in inputs.items() if product is not None},
        **{name: linear_arguments(product) for name, product in outputs.items() if product is not None},
        **{name: None if norm is None else norm.scaled.data_ptr() for name, norm in norms.items()},
        **{f"{name}_least": 0.0 if norm is None else norm.added for name, norm in norms.items()},
    )
