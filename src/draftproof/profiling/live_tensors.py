"""Bytes of the tensors that torch's operations make and that nobody has let go yet.

Memory that an operation takes and gives back inside is not
seen, nor are packed tensors; so it is the same on every device, and small tensors are counted that an allocator serves
from what it has.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered.

    Attributes:
        now: bytes made since then and still held.
        most: the largest `now` since `mark`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: set[int] = set()

    def mark(self) -> None:
        """Begin a new largest."""
        self.most = self.now

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and count what it made: what shares the memory of an input is not new."""
        given = {storage._cdata for storage in _storages((args, kwargs))}  # noqa: SLF001 - the storage's identity
        made = func(*args, **(kwargs or {}))
        for storage in _storages(made):
            key = storage._cdata  # noqa: SLF001
            if key not in given and key not in self._known:
                self._known.add(key)
                size = storage.nbytes()
                self.now += size
                weakref.finalize(storage, self._gone, key, size).atexit = False
        self.most = max(self.most, self.now)
        return made

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _storages(tree: Any) -> Iterator[Any]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and not leaf.is_mkldnn:
            yield leaf.untyped_storage()
