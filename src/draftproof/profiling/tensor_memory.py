"""Memory of tensors that can be reached from an object, by storage, so that shared tensors count once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from draftproof.native.ggml import Segment
from draftproof.native.tensors import Interleaved, Quantized

_Key = tuple[str, int]


def walk(root: object) -> Iterator[tuple[str, object]]:
    """Every object that can be reached from `root` by attributes and containers, with its path; each once.

    Attributes of objects of this package and of torch modules are followed. Functions and objects of other packages are
    returned, but not followed.
    """
    seen: set[int] = set()
    pending: deque[tuple[str, object]] = deque([("", root)])
    while pending:
        path, item = pending.popleft()
        if id(item) in seen or isinstance(item, str | bytes | int | float | type(None)):
            continue
        seen.add(id(item))
        yield path, item
        pending.extend((path + step, inner) for step, inner in _inside(item))


def _inside(item: object) -> Iterator[tuple[str, object]]:
    if isinstance(item, Tensor | type):
        return
    if isinstance(item, Mapping):
        for key, value in list(item.items()):
            yield "{}", key
            yield f"[{key!r}]" if isinstance(key, str | int) else "[...]", value
    elif isinstance(item, list | tuple | deque | set | frozenset):
        for place, value in enumerate(list(item)):
            yield f"[{place}]", value
    if isinstance(item, nn.Module) or type(item).__module__.startswith("draftproof"):
        yield from ((f".{name}", value) for name, value in attributes(item).items())


def attributes(item: object) -> dict[str, Any]:
    """An object's own attributes and slots, without its properties."""
    slots = {name for kind in type(item).__mro__ for name in _slots(kind)}
    return {name: getattr(item, name) for name in slots if hasattr(item, name)} | dict(getattr(item, "__dict__", {}))


def _slots(kind: type) -> Iterable[str]:
    named = vars(kind).get("__slots__", ())
    return (named,) if isinstance(named, str) else [name for name in named if not name.startswith("__")]


@dataclass(frozen=True)
class TensorMemory:
    """Memory of a set of tensors, by storage, so that views and shared tensors count once.

    `packed` has the keys of the storages that are weights in a layout for the CPU.
    """

    nbytes: Mapping[_Key, int]
    packed: frozenset[_Key] = frozenset()

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.nbytes.values())

    @property
    def total_packed(self) -> int:
        """Bytes of packed weights."""
        return sum(self.nbytes[key] for key in self.packed)

    def __sub__(self, other: TensorMemory) -> TensorMemory:
        left = {key: size for key, size in self.nbytes.items() if key not in other.nbytes}
        return TensorMemory(left, frozenset(key for key in self.packed if key in left))

    def __and__(self, other: TensorMemory) -> TensorMemory:
        return self - (self - other)

    def __or__(self, other: TensorMemory) -> TensorMemory:
        return TensorMemory({**self.nbytes, **other.nbytes}, self.packed | other.packed)


def tensor_memory(*roots: object) -> TensorMemory:
    """The memory of the tensors reached from some objects; its keys are valid as long as those objects exist."""
    nbytes: dict[_Key, int] = {}
    packed: set[_Key] = set()
    for root in roots:
        for _, item in walk(root):
            if isinstance(item, Interleaved | Quantized | Segment):
                packed.add(_storage(item.blocks)[0])
            if not isinstance(item, Tensor):
                continue
            key, size = _storage(item)
            nbytes[key] = size
            if item.is_mkldnn:
                packed.add(key)
    return TensorMemory(nbytes, frozenset(packed))


def _storage(tensor: Tensor) -> tuple[_Key, int]:
    """A key for the memory of a tensor, and its size; oneDNN does not show the memory of its tensors."""
    if tensor.is_mkldnn:
        return ("packed", id(tensor)), tensor.nbytes
    storage = tensor.untyped_storage()
    return (str(tensor.device), storage.data_ptr()), storage.nbytes()
