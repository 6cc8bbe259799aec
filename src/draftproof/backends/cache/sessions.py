"""Sessions whose keys and values are in one slot of a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from draftproof.backends.base import Session
from draftproof.backends.cache.slot_cache import SlotCache


class SlotSession(Session):
    """A session with its keys and values in one slot of the model's cache.

    Args:
        cache: of the backend; its lock is held while a slot is acquired, moved or released.
        lender: a session without a tail that this one continues in its slot; by default, it has a slot of its own.
    """

    def __init__(self, cache: SlotCache, lender: SlotSession | None = None) -> None:
        super().__init__()
        self.cache = cache
        self._is_lent = lender is not None
        self.slot = -1
        if lender is not None:
            assert lender.stem == lender.length, "a lent session continues a chain"
            self.slot = lender.slot
            self._tokens = list(lender.tokens)
            self._length = lender.length
            return
        with cache.lock:
            self.slot = cache.acquire()

    def __del__(self) -> None:
        """A session that nobody closed gives its slot back."""
        if getattr(self, "slot", -1) >= 0 and not self._is_lent:
            self.cache.abandon(self.slot)

    def lend(self) -> SlotSession:
        """A session that continues this one in its slot; valid until this one reads or rolls back.

        Call `unread` on this one first: it must have no tail.
        """
        return SlotSession(self.cache, self)

    @torch.inference_mode()
    @override
    def fork(self, length: int) -> Session | None:
        made = super().fork(length)
        if isinstance(made, SlotSession):
            with self.cache.lock:
                self.cache.copy(self.slot, made.slot, length)
        return made

    def _empty(self) -> Session | None:
        return SlotSession(self.cache)

    @property
    def nbytes(self) -> int:
        """Memory of its keys, values and states, in bytes."""
        return super().nbytes + (0 if self._is_lent or self.slot < 0 else self.cache.slot_nbytes(self.slot))

    @torch.inference_mode()
    @override
    def trim(self) -> None:
        super().trim()
        with self.cache.lock:
            self.cache.trim(self.slot, self.length)

    def _gather(self, base: int, slots: Sequence[int]) -> None:
        with self.cache.lock:
            self.cache.gather(self.slot, base, slots)

    def close(self) -> None:
        """Release the slot; a lent one stays with its owner."""
        with self.cache.lock:
            if self.slot >= 0 and not self._is_lent:
                self.cache.release(self.slot)
            self.slot = -1
