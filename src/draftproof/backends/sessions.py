"""Sessions whose keys and values are in one slot of a cache."""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.backends.base import Session
from draftproof.backends.slot_cache import SlotCache


class SlotSession(Session):
    """A session with its keys and values in one slot of the model's cache.

    Args:
        cache: of the backend; its lock is held while a slot is acquired, moved or released.
    """

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self.cache = cache
        with cache.lock:
            self.slot = cache.acquire()

    def _gather(self, base: int, slots: Sequence[int]) -> None:
        with self.cache.lock:
            self.cache.gather(self.slot, base, slots)

    def close(self) -> None:
        """Release the slot."""
        with self.cache.lock:
            if self.slot >= 0:
                self.cache.release(self.slot)
            self.slot = -1
