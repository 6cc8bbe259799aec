"""Hidden states of the tokens that a session has read, for drafters that read them.

A write of one row costs as much as one of many. So short additions wait, as views of what their passes made, until
somebody reads states or many have come.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

_FIRST = 256  # rows that there is space for at first
_MOST_WAITING = 32  # rows
_SHARE = 64  # a view that would keep more than so many times its own memory is copied at once


class HiddenStates:
    """States by slot, of some layers."""

    def __init__(self) -> None:
        self._written: Tensor | None = None
        self._waiting: list[tuple[int, Tensor]] = []  # first slot and states; later ones write over earlier ones
        self._rows = 0  # that wait

    def add(self, start: int, states: Float[Tensor, "tokens dim"]) -> None:
        """Record the states of the slots from `start` on, over what was there; all slots before are recorded."""
        self._waiting.append((start, states))
        self._rows += len(states)
        if self._rows > _MOST_WAITING or states.untyped_storage().nbytes() > _SHARE * states.nbytes:
            self._write()

    def first(self, length: int) -> Float[Tensor, "slots dim"]:
        """The states of the first slots."""
        self._write()
        assert self._written is not None, "states were added"
        return self._written[:length]

    @torch.inference_mode()
    def move(self, base: int, slots: Sequence[int]) -> None:
        """Move the states of some slots to base, base + 1, ..."""
        self._write()
        assert self._written is not None, "states were added"
        self._written[base : base + len(slots)] = self._written[list(slots)]

    def copy(self, length: int) -> HiddenStates:
        """A copy of the states of the first slots."""
        made = HiddenStates()
        made._written = self.first(length).clone()
        return made

    def trim(self, length: int) -> None:
        """Give back the memory of all slots but the first ones."""
        self._write()
        if self._written is not None and len(self._written) > length:
            self._written = self._written[:length].clone()

    @property
    def nbytes(self) -> int:
        """Memory in bytes; views count as if they were copies."""
        written = 0 if self._written is None else self._written.nbytes
        return written + sum(states.nbytes for _, states in self._waiting)

    @torch.inference_mode()
    def _write(self) -> None:
        if not self._waiting:
            return
        size = max(start + len(states) for start, states in self._waiting)
        old = self._written
        if old is None or size > len(old):
            like = self._waiting[0][1]
            self._written = like.new_empty((max(size + size // 4, _FIRST), like.shape[1]))
            if old is not None:
                self._written[: len(old)] = old
        assert self._written is not None, "made above"
        begin, parts, end = 0, list[Tensor](), 0
        for start, states in [*self._waiting, (-1, self._waiting[0][1][:0])]:
            if start != end or not parts:  # neighbours are written together
                if parts:
                    self._written[begin:end] = torch.cat(parts)
                begin, parts = start, []
            parts.append(states)
            end = start + len(states)
        self._waiting.clear()
        self._rows = 0
