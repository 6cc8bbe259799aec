"""Slot cache: key/value buffers written by slot and position, for ragged batches and trees.

Rollback needs no work here: the entries up to a session's length are valid, and later writes overwrite the rest. Only
keeping a path of a tree moves data (`gather`). A slot takes memory for what its sequence has written (`pages`).
"""

from __future__ import annotations

import bisect
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.accelerator import to_device
from draftproof.backends.cache import rounding
from draftproof.backends.cache.pages import PAGE, Buffer, addresses_are_free

_FIRST_CAPACITY = 256
_MAPPED = 64, 1 << 17  # slots, and most positions, of buffers that are mapped at once; larger ones grow
_NOTED = 16  # the peak is looked at when a sequence has grown by so many positions
_STEPS = 8  # capacities that are not paged are multiples of a power of two near this part of them


def _rounded(positions: int) -> int:
    """Capacity for a number of positions where every position takes memory."""
    step = max(_FIRST_CAPACITY, 1 << max(positions // _STEPS - 1, 0).bit_length())
    return -(-positions // step) * step


Views = tuple[list[Tensor], list[Tensor]]  # keys and values, layer by layer


class Stored(NamedTuple):
    """The buffers of a layer, [slots, heads, capacity, dim]."""

    # keys, values: numbers, of 8 bits where there are scales
    keys: Tensor
    values: Tensor
    scales: Tensor | None  # of each position's keys, and behind them of its values: [slots, 2 heads, capacity, 1]


class Cells(NamedTuple):
    """Where the tokens of a forward pass are written, as tensors on the device of a buffer."""

    rows: Int[Tensor, " rows"]
    # slots, positions: of each token, rows after one another
    slots: Int[Tensor, " tokens"]
    positions: Int[Tensor, " tokens"]
    source: Int[Tensor, " tokens"] | None  # index of each among the padded tokens; None where there is no padding


@dataclass(frozen=True, eq=False)
class WritePlan:
    """The positions that one forward pass writes and reads."""

    slots: tuple[int, ...]  # slot of each row
    bases: tuple[int, ...]  # first position each row writes
    widths: tuple[int, ...]  # tokens each row writes; rows are padded on the right to the widest

    @cached_property
    def ends(self) -> list[int]:
        """First position after those that each row writes."""
        return [base + width for base, width in zip(self.bases, self.widths, strict=True)]

    @cached_property  # every layer reads it
    def horizon(self) -> int:
        """Positions that attention may see in some row."""
        return max(self.ends)

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
                rows=to_device(self.slots, device),
                slots=to_device([self.slots[row] for row, _ in every], device),
                positions=to_device([self.bases[row] + place for row, place in every], device),
                source=to_device(source, device) if padded else None,
            )
        return self._cells[device]


class SlotCache:
    """Key and value buffers [slots, heads, capacity, dim] for each layer, made when the first keys arrive.

    Where buffers are paged (`pages`), a slot takes memory for the positions that its own sequence has written, whatever
    the capacity. So they are mapped for the longest sequence in many slots at once: buffers that grow are copied, which
    all requests wait for. Elsewhere every slot takes as much as the longest sequence that is there.

    Args:
        longest: positions that a sequence may have, where that is known.
        kept: number format of keys and values: int8 (`rounding`), another one, or None for that of the rows.
    """

    def __init__(self, longest: int | None = None, *, kept: torch.dtype | None = None) -> None:
        self.kept = kept
        # must be held to read, write or grow buffers: C code uses their memory without Python's own lock
        self.lock = threading.RLock()
        self._mapped = -(-min(longest or 0, _MAPPED[1]) // _FIRST_CAPACITY) * _FIRST_CAPACITY
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._scales: dict[int, Tensor] = {}
        self._memory: dict[int, Buffer] = {}  # of each tensor, by its address
        self._free: list[int] = []
        self._abandoned: deque[int] = deque()
        self._used: list[int] = []  # positions of each slot that were written
        self._slots = 0
        self._capacity = 0
        self._replaced = 0  # buffers
        self._units: Counter[tuple[int, int]] = Counter()  # buffers by heads, and bytes of a head's position
        self._is_paged = False
        # by first slot and rows, with what they hold for
        self._views: dict[tuple[int, int | None], tuple[object, Views]] = {}
        # whether buffers shall move as seldom as possible, because programs were recorded with their addresses: the
        # capacity grows by doubling then, and never shrinks
        self.pinned = False
        self.peak = 0  # the largest `nbytes` so far; may be set to 0

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name not in ("lock", "_memory", "_views")}
        if self._is_paged:  # a copy takes memory for all that it has
            state["_capacity"] = most = max(self._used, default=0)
            for name in ("_keys", "_values", "_scales"):
                state[name] = {layer: made[: self._slots, :, :most].clone() for layer, made in state[name].items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        # a copy has plain tensors
        vars(self).update(state, lock=threading.RLock(), _memory={}, _views={}, _is_paged=False)

    # --- slots ------------------------------------------------------------------------------------------------------

    def acquire(self) -> int:
        """Take the lowest free slot: low numbers keep a batch contiguous."""
        while self._abandoned:
            self.release(self._abandoned.popleft())
        if not self._free:
            self._free.append(self._slots)
            self._used.append(0)
            self._slots += 1
        self._free.sort()
        return self._free.pop(0)

    @torch.inference_mode()
    def release(self, slot: int) -> None:
        """Make a slot available again, filled with zeros, and give its memory back.

        A NaN would reach the next sequence: a masked value has weight 0, and 0 * NaN is NaN.
        """
        if self._used[slot]:
            for buffer in self._buffers_with(slot):
                self._clear(buffer, buffer[slot])
        self._used[slot] = 0
        self._free.append(slot)
        if not self._is_paged:
            while self._slots - 1 in self._free:  # else buffers that grow for a long sequence would have its slots, too
                self._free.remove(self._slots - 1)
                self._used.pop()
                self._slots -= 1
        self._shrink()

    def abandon(self, slot: int) -> None:
        """Release a slot later; may be called at any time in any thread, also while buffers are in use."""
        self._abandoned.append(slot)

    @torch.inference_mode()
    def trim(self, slot: int, length: int) -> None:
        """Fill a slot with zeros from position `length` on, and give that memory back."""
        used = self._used[slot]
        if used <= length:
            return
        for buffer in self._buffers_with(slot):
            for head in buffer[slot]:
                self._clear(buffer, head[length:used])
        self._used[slot] = length

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot to an empty one."""
        for store in self._stores:
            for layer, made in list(store.items()):
                buffer = self._fit(store, layer, made.shape[1], made.shape[3], made)
                buffer[target, :, :length].copy_(buffer[source, :, :length])
        self._use(target, length)

    def _clear(self, buffer: Tensor, part: Tensor) -> None:
        memory = self._memory.get(buffer.data_ptr())
        if memory is None:
            part.zero_()
        else:
            memory.clear(part)

    # --- sizes ------------------------------------------------------------------------------------------------------

    @property
    def in_use(self) -> int:
        """Slots that were acquired and not released."""
        return self._slots - len(self._free) - len(self._abandoned)

    @property
    def is_paged(self) -> bool:
        """Whether a slot takes memory only for what its own sequence has written."""
        return self._is_paged

    @property
    def nbytes(self) -> int:
        """Memory that sequences take, in bytes."""
        if self.is_paged:
            return sum(self.sequence_nbytes(used) for used in self._used if used)
        return sum(t.nbytes for t in self._buffers())

    def slot_nbytes(self, slot: int) -> int:
        """Memory that the sequence of a slot takes, in bytes."""
        return self.sequence_nbytes(self._used[slot])

    def sequence_nbytes(self, positions: int) -> int:
        """Bytes that a sequence of this length takes; 0 before anything was read, as the size of keys is unknown."""
        if not self.is_paged:
            return positions * self.token_nbytes
        size = 0
        for (heads, unit), number in self._units.items():
            size += number * heads * -(-positions * unit // PAGE) * PAGE
        return size

    def batch_nbytes(self, lengths: Sequence[int]) -> int:
        """Bytes that sequences of these lengths take together."""
        if self.is_paged:
            return sum(map(self.sequence_nbytes, lengths))
        return len(lengths) * self.token_nbytes * self._capacity_of(max(lengths, default=0))

    @property
    def shape(self) -> tuple[int, int]:
        """Slots and positions of the buffers; (0, 0) before anything was read."""
        made = next(self._buffers(), None)
        return (0, 0) if made is None else (made.shape[0], made.shape[2])

    @property
    def token_nbytes(self) -> int:
        """Bytes that one position of one slot takes in all layers, keys and values."""
        return sum(number * heads * unit for (heads, unit), number in self._units.items())

    @property
    def extent(self) -> tuple[int, int, int]:
        """Slots and positions of new buffers, and how many were replaced: a returned buffer is valid until it changes.

        Slots and positions alone would not do: a capacity that shrinks may grow back to what it was, in other memory.
        """
        return self._slots, self._capacity, self._replaced

    @property
    def _stores(self) -> tuple[dict[int, Tensor], ...]:
        return self._keys, self._values, self._scales

    def _buffers(self) -> Iterator[Tensor]:
        return (buffer for store in self._stores for buffer in store.values())

    def _buffers_with(self, slot: int) -> Iterator[Tensor]:
        """The buffers that have a slot.

        Buffers grow when their layer is read, and a self-draft reads the first layers alone: those of the others may
        have fewer slots and positions.
        """
        return (buffer for buffer in self._buffers() if slot < buffer.shape[0])

    # --- growth -----------------------------------------------------------------------------------------------------

    def claim(self, slots: Sequence[int], ends: Sequence[int]) -> None:
        """Make space for positions that are about to be written: of each slot those below its end."""
        self.reserve(max(ends))
        for slot, end in zip(slots, ends, strict=True):
            self._use(slot, end)

    def _use(self, slot: int, end: int) -> None:
        before = self._used[slot]
        if end > before:
            self._used[slot] = end
            if not before or end // _NOTED > before // _NOTED:
                self._note()

    def _note(self) -> None:
        self.peak = max(self.peak, self.nbytes)

    def reserve(self, positions: int) -> None:
        """Raise the capacity of every slot to at least `positions`."""
        if positions > self._capacity:
            if self.is_paged or not (self.pinned or self._memory):
                positions = max(positions, 2 * self._capacity)
                self._capacity = -(-positions // _FIRST_CAPACITY) * _FIRST_CAPACITY
            else:
                self._capacity = self._capacity_of(positions)

    def _capacity_of(self, positions: int) -> int:
        """The capacity for the longest sequence, where every slot has it."""
        if not self.pinned:
            return _rounded(positions)
        blocks = -(-positions // _FIRST_CAPACITY)
        return max(self._capacity, _FIRST_CAPACITY << (blocks - 1).bit_length() if blocks else 0)

    def _shrink(self) -> None:
        """Where every slot has the capacity of the longest sequence: let it follow, when that sequence has ended."""
        if self._memory and not (self.is_paged or self.pinned):
            needed = _rounded(max(self._used, default=0))
            if 2 * needed <= self._capacity:
                self._capacity = needed
                for store in self._stores:
                    for layer, made in list(store.items()):
                        self._fit(store, layer, made.shape[1], made.shape[3], made)

    def _fit(self, store: dict[int, Tensor], layer: int, heads: int, dim: int, like: Tensor) -> Tensor:
        """The layer's buffer with the current number of slots and capacity."""
        old = store.get(layer)
        if old is not None and old.shape[0] >= self._slots and old.shape[2] == self._capacity:
            return old
        slots = self._slots
        if old is not None and old.shape[0] < slots:
            slots = max(slots, 2 * old.shape[0])
        elif old is not None and self._is_paged:
            slots = old.shape[0]
        memory = self._buffer(slots, heads, dim, like)
        made = memory.tensor
        if old is not None:
            most = min(old.shape[2], self._capacity)
            for slot, used in enumerate(self._used[: old.shape[0]]):  # no more than was written: the rest has no memory
                if end := min(used, most):
                    made[slot, :, :end] = old[slot, :, :end]
            self._memory.pop(old.data_ptr(), None)
            self._replaced += 1
        self._is_paged = memory.is_paged and (self._is_paged or not self._memory)
        self._memory[made.data_ptr()] = memory
        store[layer] = made
        self._units = Counter((t.shape[1], t.shape[3] * t.dtype.itemsize) for t in self._buffers())
        self._note()
        return made

    def _buffer(self, slots: int, heads: int, dim: int, like: Tensor) -> Buffer:
        if self._mapped and addresses_are_free(like.device):
            shape = max(slots, _MAPPED[0]), heads, max(self._capacity, self._mapped), dim
            try:
                made = Buffer(shape, like, mapped=True)
            except OSError:  # there is another limit
                self._mapped = 0
            else:
                self._capacity = shape[2]
                return made
        return Buffer((slots, heads, self._capacity, dim), like)

    def views(self, first: int = 0, rows: int | None = None) -> Views | None:
        """Keys and values of neighbouring slots, or of all, layer by layer, at full capacity.

        They are the same lists while they are valid.

        None before anything was read, because the shape of keys is not known then.
        """
        if not self._keys:
            return None
        state = self.extent, len(self._keys), len(self._values)
        known = self._views.get((first, rows))
        if known is None or known[0] != state:
            made = self._viewed(first, rows)
            state = self.extent, len(self._keys), len(self._values)  # buffers may have grown
            kept = {key: each for key, each in self._views.items() if each[0] == state}
            self._views = {**kept, (first, rows): (state, made)}
            return made
        return known[1]

    def _viewed(self, first: int, rows: int | None) -> Views:
        stores = (self._keys, self._values)
        keys, values = (
            [self._fit(store, layer, made.shape[1], made.shape[3], made) for layer, made in sorted(store.items())]
            for store in stores
        )
        end = None if rows is None else first + rows
        return [each[first:end] for each in keys], [each[first:end] for each in values]

    def buffers(self, layer: int, heads: int, dim: int, like: Tensor) -> Stored:
        """A layer's buffers, for callers that follow a write plan.

        `like` is a row, on their device.
        """
        numbers = like if self.kept is None else like.new_empty(0, dtype=self.kept)
        keys, values = (self._fit(store, layer, heads, dim, numbers) for store in (self._keys, self._values))
        if self.kept != torch.int8:
            return Stored(keys, values, None)
        scales = like.new_empty(0, dtype=torch.float32)
        return Stored(keys, values, self._fit(self._scales, layer, 2 * heads, 1, scales))

    def write(
        self,
        layer: int,
        plan: WritePlan,
        keys: Float[Tensor, "rows heads width dim"],
        values: Float[Tensor, "rows heads width vdim"],
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values and return everything up to the plan's horizon for its rows."""
        if self.kept != torch.int8:
            dtype = self.kept or keys.dtype
            of_keys = self._exchange(self._keys, layer, plan, keys.to(dtype))
            return of_keys.to(keys.dtype), self._exchange(self._values, layer, plan, values.to(dtype)).to(values.dtype)
        (of_keys, key_scales), (of_values, value_scales) = rounding.rounded_keys(keys), rounding.rounded(values)
        of_keys = self._exchange(self._keys, layer, plan, of_keys)
        of_values = self._exchange(self._values, layer, plan, of_values)
        scales = self._exchange(self._scales, layer, plan, torch.cat((key_scales, value_scales), 1))
        key_scales, value_scales = scales.chunk(2, 1)
        return (
            rounding.restored_keys(of_keys, key_scales, keys.dtype),
            rounding.restored(of_values, value_scales, values.dtype),
        )

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
        """Move entries of a slot, ascending and none below `base`, to base, base + 1, ... in every layer."""
        indices: dict[tuple[int, torch.device], Tensor] = {}  # a copy to a device for each layer would take longer
        for buffer in self._buffers_with(slot):
            there = bisect.bisect_left(positions, buffer.shape[2])
            if there:
                which = there, buffer.device
                if which not in indices:
                    indices[which] = to_device(positions[:there], buffer.device)
                buffer[slot, :, base : base + there] = buffer[slot].index_select(1, indices[which])


class CacheView:
    """A slot cache and a plan as transformers' `past_key_values` for one forward pass.

    It has the methods of transformers' Cache: `update` writes and returns; lengths are reported as 0, because positions
    and mask are passed explicitly.

    Args:
        counts: whether a length is reported all the same, that of the first row: for families that scale attention by a
            position that they count from it. Rows that share a pass must begin at the same position then.
    """

    is_compileable = False
    is_sliding = (False,)
    layers = ()  # families that read some layers several times append copies where they find one for each layer

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
