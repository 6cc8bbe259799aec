"""Bytes of the tensors that torch's operations allocate, until they are released.

An allocation is counted by the output of an operation. Memory that an operation allocates and releases inside is not
seen, and packed tensors are not counted. So the figures are the same on every device and exact for small tensors, which
an allocator serves from memory that it already has.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorAllocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes allocated and not yet released while it is entered, and their peak since `reset_peak`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocated = self.peak = 0
        self._known: set[int] = set()

    def reset_peak(self) -> None:
        """Set the peak to what is allocated now."""
        self.peak = self.allocated

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and count its outputs; an output that shares the memory of an input is not new."""
        given = {storage._cdata for storage in _storages((args, kwargs))}  # noqa: SLF001 - the storage's identity
        made = func(*args, **(kwargs or {}))
        for storage in _storages(made):
            key = storage._cdata  # noqa: SLF001
            if key not in given and key not in self._known:
                self._known.add(key)
                size = storage.nbytes()
                self.allocated += size
                weakref.finalize(storage, self._release, key, size).atexit = False
        self.peak = max(self.peak, self.allocated)
        return made

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.allocated -= size


def _storages(tree: Any) -> Iterator[Any]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and not leaf.is_mkldnn:
            yield leaf.untyped_storage()
