"""Slot cache: static key/value buffers written by slot and position, for ragged batches and trees.

Rollback needs no work here: the entries up to a session's length are valid, and later writes overwrite the rest. Only
keeping a path of a tree moves data (`gather`). Capacity and slots grow by doubling when needed, and never shrink.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.accelerator import sent

_FIRST_CAPACITY = 256


class Cells(NamedTuple):
    """Where the tokens of a forward pass are written, as tensors on the device of a buffer.

    Attributes:
        rows: slot of each row.
        slots, positions: of each token, rows after one another.
        source: index of each among the padded tokens; None where there is no padding.
    """

    rows: Int[Tensor, " rows"]
    slots: Int[Tensor, " tokens"]
    positions: Int[Tensor, " tokens"]
    source: Int[Tensor, " tokens"] | None


@dataclass(frozen=True, eq=False)
class WritePlan:
    """The positions that one forward pass writes and reads.

    Attributes:
        slots: slot of each row.
        bases: first position each row writes.
        widths: tokens each row writes; rows are padded on the right to the widest.
        horizon: positions read back, the largest base + width.
    """

    slots: tuple[int, ...]
    bases: tuple[int, ...]
    widths: tuple[int, ...]

    @cached_property  # every layer reads it
    def horizon(self) -> int:
        """Positions that attention may see in some row."""
        return max(base + width for base, width in zip(self.bases, self.widths, strict=True))

    @cached_property
    def aligned(self) -> bool:
        """Whether every row writes the same positions, so that one slice assignment is enough."""
        return len(set(self.bases)) == 1 and len(set(self.widths)) == 1

    @cached_property
    def contiguous(self) -> bool:
        """Whether the rows are neighbouring slots in order, so that reading is a view."""
        return self.slots == tuple(range(self.slots[0], self.slots[0] + len(self.slots)))

    @cached_property
    def _cells(self) -> dict[torch.device, Cells]:
        return {}

    def cells(self, device: torch.device) -> Cells:
        """Where the tokens are written; computed once for each device."""
        if device not in self._cells:
            widest = max(self.widths)
            every = [(row, place) for row, width in enumerate(self.widths) for place in range(width)]
            source = [row * widest + place for row, place in every]
            padded = len(source) < widest * len(self.slots)
            self._cells[device] = Cells(
                rows=sent(self.slots, device),
                slots=sent([self.slots[row] for row, _ in every], device),
                positions=sent([self.bases[row] + place for row, place in every], device),
                source=sent(source, device) if padded else None,
            )
        return self._cells[device]


class SlotCache:
    """Key and value buffers [slots, heads, capacity, dim] for each layer, allocated when the first keys arrive.

    Attributes:
        lock: must be held to read, write or grow buffers: C code uses their memory without Python's own lock.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._free: list[int] = []
        self._slots = 0
        self._capacity = 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.RLock())  # a copy has its own

    def acquire(self) -> int:
        """Take the lowest free slot: low numbers keep a batch contiguous."""
        if not self._free:
            self._free.append(self._slots)
            self._slots += 1
        self._free.sort()
        return self._free.pop(0)

    @torch.inference_mode()
    def release(self, slot: int) -> None:
        """Make a slot available again, filled with zeros.

        A NaN would reach the next sequence: a masked value has weight 0, and 0 * NaN is NaN.
        """
        for buffer in self._buffers():
            buffer[slot : slot + 1].zero_()
        self._free.append(slot)

    @property
    def in_use(self) -> int:
        """Slots that were acquired and not released."""
        return self._slots - len(self._free)

    @property
    def nbytes(self) -> int:
        """Memory of the buffers, in bytes."""
        return sum(t.nbytes for t in self._buffers())

    @property
    def shape(self) -> tuple[int, int]:
        """Slots and positions of the buffers; (0, 0) before anything was read."""
        made = next(self._buffers(), None)
        return (0, 0) if made is None else (made.shape[0], made.shape[2])

    @property
    def token_nbytes(self) -> int:
        """Bytes that one position of one slot takes in all layers, keys and values."""
        return sum(t.nbytes // (t.shape[0] * t.shape[2]) for t in self._buffers())

    @property
    def extent(self) -> tuple[int, int]:
        """Slots and positions of new buffers; a buffer that was returned stays valid until this changes."""
        return self._slots, self._capacity

    def _buffers(self) -> Iterator[Tensor]:
        return (buffer for store in (self._keys, self._values) for buffer in store.values())

    def reserve(self, positions: int) -> None:
        """Raise the capacity of every slot to at least `positions`."""
        if positions > self._capacity:
            self._capacity = max(positions, 2 * self._capacity, _FIRST_CAPACITY)

    def _fit(self, store: dict[int, Tensor], layer: int, heads: int, dim: int, like: Tensor) -> Tensor:
        """The layer's buffer, grown to the current number of slots and capacity."""
        old = store.get(layer)
        if old is not None and old.shape[0] >= self._slots and old.shape[2] >= self._capacity:
            return old
        slots = self._slots
        if old is not None:
            slots = old.shape[0] if old.shape[0] >= slots else max(slots, 2 * old.shape[0])
        grown = like.new_zeros((slots, heads, self._capacity, dim))
        if old is not None:
            grown[: old.shape[0], :, : old.shape[2]] = old
        store[layer] = grown
        return grown

    def views(self, first: int, rows: int) -> tuple[list[Tensor], list[Tensor]] | None:
        """Keys and values of neighbouring slots, layer by layer, at full capacity.

        None before anything was read, because the shape of keys is not known then.
        """
        if not self._keys:
            return None
        stores = (self._keys, self._values)
        keys, values = (
            [self._fit(store, layer, made.shape[1], made.shape[3], made) for layer, made in sorted(store.items())]
            for store in stores
        )
        return [each.narrow(0, first, rows) for each in keys], [each.narrow(0, first, rows) for each in values]

    def buffers(self, layer: int, heads: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, [slots, heads, capacity, dim], for callers that follow a write plan themselves.

        Args:
            layer: its number.
            heads: key heads.
            dim: of each.
            like: a tensor of the keys' dtype and on their device.
        """
        return self._fit(self._keys, layer, heads, dim, like), self._fit(self._values, layer, heads, dim, like)

    def write(
        self,
        layer: int,
        plan: WritePlan,
        keys: Float[Tensor, "rows heads width dim"],
        values: Float[Tensor, "rows heads width vdim"],
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values and return everything up to the plan's horizon for its rows."""
        return self._exchange(self._keys, layer, plan, keys), self._exchange(self._values, layer, plan, values)

    def _exchange(self, store: dict[int, Tensor], layer: int, plan: WritePlan, new: Tensor) -> Tensor:
        buffer = self._fit(store, layer, new.shape[1], new.shape[3], new)
        seen = buffer.narrow(0, plan.slots[0], len(plan.slots)).narrow(2, 0, plan.horizon) if plan.contiguous else None
        if seen is not None and plan.aligned:
            seen.narrow(2, plan.bases[0], plan.widths[0]).copy_(new)
            return seen
        cells = plan.cells(buffer.device)
        tokens = new.transpose(1, 2).flatten(0, 1)
        if cells.source is not None:
            tokens = tokens.index_select(0, cells.source)
        buffer.transpose(1, 2).index_put_((cells.slots, cells.positions), tokens)
        return buffer.narrow(2, 0, plan.horizon).index_select(0, cells.rows) if seen is None else seen

    @torch.inference_mode()
    def gather(self, slot: int, base: int, positions: Sequence[int]) -> None:
        """Move the entries at `positions` of a slot to base, base + 1, ... in every layer."""
        for buffer in self._buffers():
            index = sent(positions, buffer.device)
            buffer[slot, :, base : base + len(positions)] = buffer[slot].index_select(1, index)


class CacheView:
    """A slot cache and a plan as transformers' `past_key_values` for one forward pass.

    It has the methods of transformers' Cache: `update` writes and returns; lengths are reported as 0, because positions
    and mask are passed explicitly.

    Args:
        cache: the cache.
        plan: of the pass.
        counts: whether a length is reported all the same, that of the first row: for families that scale attention by a
            position that they count from it. Rows that share a pass must begin at the same position then.
    """

    is_compileable = False
    is_sliding = (False,)

    def __init__(self, cache: SlotCache, plan: WritePlan, *, counts: bool = False) -> None:
        self._cache = cache
        self._plan = plan
        self._counts = counts

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values; returns all that its attention reads (called by attention layers)."""
        return self._cache.write(layer_idx, self._plan, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """By default always 0: positions are explicit, so nothing may be derived from a length."""
        return self._plan.bases[0] if self._counts else 0

    def get_mask_sizes(self, query_length: object, layer_idx: int = 0) -> tuple[int, int]:  # noqa: ARG002
        """Length and offset of the keys a mask must cover."""
        return self._plan.horizon, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Always -1: there is no fixed maximum."""
        return -1

    def __len__(self) -> int:
        return 0
