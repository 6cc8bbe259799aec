"""The attention of a lean layer: rotary embedding, writes to the slot cache and attention, by torch or `native`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from draftproof import native
from draftproof.backends.cache.layout import Layout, additive
from draftproof.backends.cache.slot_cache import WritePlan
from draftproof.native.operations import Operations
from draftproof.native.structures import AttentionArguments, PassMask, Sequences
from draftproof.triton.choose import fused as replaceable

_FOLDED = 128  # passes up to this width fold the query heads of a key head, and their mask, into rows


@dataclass(frozen=True)
class Heads:
    """Number and size of a layer's heads."""

    # queries, keys: number of heads; each key head serves `group` neighbouring query heads
    queries: int
    keys: int
    dim: int  # of each head
    scale: float  # factor of the scores
    angles: int = 0  # the first of a pass's rotary angles that turn them, where layers differ
    cap: float = 0.0  # soft limit of the scores (cap tanh(score / cap)); 0 for none

    @property
    def group(self) -> int:
        """Number of query heads for each key head."""
        return self.queries // self.keys


@dataclass(frozen=True, eq=False)
class Pass:
    """The inputs that all layers of one forward pass share."""

    # rows, width: of the padded feeds; hidden states are [rows * width, dim]
    rows: int
    width: int
    # cos, sin: rotary angles, [rows * width, 1, dim]; sin with the sign of `rotate_half`. Where layers differ, those of
    # each kind one after another in the last dimension
    cos: Tensor
    sin: Tensor
    # cache, plan: where keys and values are written: a slot cache, or what has its `write` and needs no plan
    cache: Any
    plan: WritePlan | None
    sequences: Sequences | None = None  # with their recurrent states, where layers keep some
    embedded: Tensor | None = None  # embeddings of every token in all layers, one after another, where layers have some

    def angles(self, heads: Heads) -> tuple[Tensor, Tensor]:
        """Cosines and sines of a layer, each [rows * width, 1, dim]."""
        if self.cos.shape[-1] == heads.dim:
            return self.cos, self.sin
        return self.cos.narrow(-1, heads.angles, heads.dim), self.sin.narrow(-1, heads.angles, heads.dim)


class SlotSpan:
    """Keys and values of neighbouring slots, and where the tokens of a pass are written.

    Args:
        keys, values: of each layer, [slots heads capacity dim].
        slots, places: slot and position of each token.
        horizon: number of positions that are read.
        rows: the slot of each row; None where the slots are the rows.
    """

    def __init__(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        slots: Int[Tensor, " tokens"],
        places: Int[Tensor, " tokens"],
        horizon: int,
        rows: Int[Tensor, " rows"] | None = None,
    ) -> None:
        self._stores = (keys, values)
        self.slots = slots
        self.places = places
        self._horizon = horizon
        self._rows = rows

    def stores(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, at full capacity."""
        keys, values = self._stores
        return keys[layer], values[layer]

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that are read."""
        keys, values = (each.narrow(2, 0, self._horizon) for each in self.stores(layer))
        if self._rows is None:
            return keys, values
        return keys.index_select(0, self._rows), values.index_select(0, self._rows)


@runtime_checkable
class Attention(Protocol):
    """An implementation of attention."""

    def mask(self, layout: Layout, window: int | None, dtype: torch.dtype) -> Any:
        """The mask of all layers with the same window, in the form that `__call__` takes."""
        ...

    def masked(self, layout: Layout, allowed: Bool[Tensor, "tokens horizon"], dtype: torch.dtype) -> Any:
        """The mask where each token, in the order of padded rows, may read the slots that are true, at least one."""
        ...

    def __call__(
        self, layer: int, fused: Float[Tensor, "tokens heads dim"], at: Pass, mask: Any
    ) -> Float[Tensor, "tokens inner"]:
        """The outputs of all heads, concatenated.

        Args:
            layer: its number in the cache, where the new keys and values are written.
            fused: queries, keys and values of every token; may be overwritten.
            at: the pass.
            mask: returned by `mask`.
        """
        ...


def attention(heads: Heads, like: Tensor, sinks: Float[Tensor, " queries"] | None = None, *, pack: bool) -> Attention:
    """The fastest implementation; with `pack`, also one that needs a memory layout for the CPU.

    `like` is a weight of the layer. Only the native implementation knows `sinks`.
    """
    operations = native.operations_for(like) if pack else None
    if operations is not None and operations.attends(heads.dim):
        return NativeAttention(heads, operations, sinks)
    assert sinks is None, "whoever reads sinks wants native operations"
    return TorchAttention(heads)


@replaceable("layers")
def turned_and_written(
    fused: Float[Tensor, "tokens heads dim"],
    cos: Float[Tensor, "tokens 1 dim"],
    sin: Float[Tensor, "tokens 1 dim"],
    keys: Float[Tensor, "rows key_heads capacity dim"],
    values: Float[Tensor, "rows key_heads capacity dim"],
    slots: Int[Tensor, " tokens"],
    places: Int[Tensor, " tokens"],
) -> Float[Tensor, "tokens turned dim"]:
    """Turned queries and keys; keys and values are written to their slots and places.

    Cosines and sines are those of every token; sines have the sign of `rotate_half`.
    """
    heads = keys.shape[1]
    turned = _turned(fused.narrow(1, 0, fused.shape[1] - heads), cos, sin)
    for store, new in ((keys, turned), (values, fused)):
        store.transpose(1, 2).index_put_((slots, places), new.narrow(1, new.shape[1] - heads, heads))
    return turned


def _turned(heads: Float[Tensor, "tokens heads dim"], cos: Tensor, sin: Tensor) -> Float[Tensor, "tokens heads dim"]:
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


class TorchAttention(Attention):
    """Attention by torch's operations."""

    def __init__(self, heads: Heads) -> None:
        self.heads = heads

    def mask(self, layout: Layout, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """An additive mask, each row repeated for the query heads of a key head; None where every slot is seen."""
        return None if sees_all(layout, window) else self._folded(layout.mask(window, dtype))

    @override
    def masked(self, layout: Layout, allowed: Bool[Tensor, "tokens horizon"], dtype: torch.dtype) -> Tensor:
        return self._folded(additive(allowed, dtype).view(len(layout.feeds), 1, layout.width, -1))

    def _folded(self, mask: Float[Tensor, "rows 1 width horizon"]) -> Tensor:
        return mask if mask.shape[2] > _FOLDED else mask.repeat_interleave(self.heads.group, 2)

    @override
    def __call__(
        self, layer: int, fused: Float[Tensor, "tokens heads dim"], at: Pass, mask: Tensor | None
    ) -> Float[Tensor, "tokens inner"]:
        heads = self.heads
        cos, sin = at.angles(heads)
        if isinstance(at.cache, SlotSpan):
            keys, values = at.cache.stores(layer)
            turned = turned_and_written(fused, cos, sin, keys, values, at.cache.slots, at.cache.places)
            keys, values = at.cache.read(layer)
            return self._attend(turned.narrow(1, 0, heads.queries), keys, values, at, mask)
        turned = _turned(fused.narrow(1, 0, heads.queries + heads.keys), cos, sin)
        grid = (at.rows, at.width, heads.keys, heads.dim)
        keys, values = at.cache.write(
            layer,
            at.plan,
            turned.narrow(1, heads.queries, heads.keys).view(grid).transpose(1, 2),
            fused.narrow(1, heads.queries + heads.keys, heads.keys).view(grid).transpose(1, 2),
        )
        return self._attend(turned.narrow(1, 0, heads.queries), keys, values, at, mask)

    def _attend(
        self,
        queries: Float[Tensor, "tokens heads dim"],
        keys: Float[Tensor, "rows key_heads horizon dim"],
        values: Float[Tensor, "rows key_heads horizon dim"],
        at: Pass,
        mask: Tensor | None,
    ) -> Float[Tensor, "tokens inner"]:
        """Attention; the query heads of one key head are rows of one product, so that keys are read once."""
        heads = self.heads
        if heads.cap:
            return self._attend_capped(queries, keys, values, at, mask)
        if at.width > _FOLDED:  # a folded mask would be large, and little time would be saved
            wide = queries.view(at.rows, at.width, heads.queries, heads.dim).transpose(1, 2)
            made = F.scaled_dot_product_attention(
                wide, keys, values, attn_mask=mask, scale=heads.scale, enable_gqa=True
            )
            return made.transpose(1, 2).reshape(queries.shape[0], -1)
        split = (at.rows, at.width, heads.keys, heads.group, heads.dim)
        folded = queries.view(split).transpose(1, 2).reshape(at.rows, heads.keys, -1, heads.dim)
        made = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=heads.scale)
        made = made.view(at.rows, heads.keys, at.width, heads.group, heads.dim).transpose(1, 2)
        return made.reshape(queries.shape[0], -1)

    def _attend_capped(
        self, queries: Tensor, keys: Tensor, values: Tensor, at: Pass, mask: Tensor | None
    ) -> Float[Tensor, "tokens inner"]:
        """The same by separate operations, since torch's own has no soft limit of scores."""
        heads = self.heads
        split = queries.view(at.rows, at.width, heads.keys, heads.group, heads.dim).transpose(1, 2)
        scores = split.reshape(at.rows, heads.keys, -1, heads.dim) @ keys.transpose(2, 3) * heads.scale
        scores = (scores / heads.cap).tanh_().mul_(heads.cap)
        if mask is not None:
            scores += mask if at.width <= _FOLDED else mask.repeat_interleave(heads.group, 2)
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
        made = (weights @ values).view(at.rows, heads.keys, at.width, heads.group, heads.dim).transpose(1, 2)
        return made.reshape(queries.shape[0], -1)


def sees_all(layout: Layout, window: int | None) -> bool:
    """Whether each row's only new token sees every slot that is read."""
    plan = layout.plan
    alone = layout.width == 1 and plan.aligned and (window is None or plan.horizon <= window)
    return alone and not any(feed.session.tail for feed in layout.feeds)


def arguments(
    heads: Heads, at: Pass, shape: Sequence[int], mask: PassMask, dtype: torch.dtype | None
) -> AttentionArguments:
    """What C's attention is told of a layer in a pass; `shape` and `dtype` are those of its keys' buffer."""
    cos, sin = at.angles(heads)
    halved = cos.dtype == torch.float32 and dtype in (torch.bfloat16, torch.int8)
    given = cos, sin, shape, mask
    return AttentionArguments.of(*given, heads=heads.queries, scale=heads.scale, cap=heads.cap, halved=halved)


class NativeAttention(Attention):
    """Attention by `native`: no mask for chains, padding is not read, each row is read up to its own length.

    Args:
        sinks: of each query head a score that takes a share without giving a value.
    """

    def __init__(self, heads: Heads, operations: Operations, sinks: Float[Tensor, " queries"] | None = None) -> None:
        self.heads = heads
        self.operations = operations
        self._sinks = sinks

    def mask(self, layout: Layout, window: int | None, dtype: torch.dtype) -> PassMask:
        """The number of leading slots that each token may read, and a mask over them where that is not enough."""
        plan = layout.plan
        places = list(zip(plan.slots, plan.bases, plan.widths, strict=True))
        if layout.straight and (window is None or plan.horizon <= window):
            return PassMask(places, [[last + 1 for last in row] for row in layout.host_limits], None)
        return PassMask(places, self._every(layout), layout.mask(window, dtype))

    @override
    def masked(self, layout: Layout, allowed: Bool[Tensor, "tokens horizon"], dtype: torch.dtype) -> PassMask:
        plan = layout.plan
        places = list(zip(plan.slots, plan.bases, plan.widths, strict=True))
        return PassMask(places, self._every(layout), additive(allowed, dtype))

    @staticmethod
    def _every(layout: Layout) -> list[list[int]]:
        """For each token, how many slots its row has after this pass."""
        return [[end] * size for end, size in zip(layout.plan.ends, layout.sizes, strict=True)]

    @override
    def __call__(
        self, layer: int, fused: Float[Tensor, "tokens heads dim"], at: Pass, mask: PassMask
    ) -> Float[Tensor, "tokens inner"]:
        heads = self.heads
        stored = at.cache.buffers(layer, heads.keys, heads.dim, fused)
        given = arguments(heads, at, stored.keys.shape, mask, stored.keys.dtype)
        given.sinks = None if self._sinks is None else self._sinks.data_ptr()
        return self.operations.attend(fused, given, *stored)
