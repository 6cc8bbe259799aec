"""Memory of keys, values and states: the option `kv_memory`, and the memory that sequences of given lengths need."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from draftproof.backends.base import Backend, Feed
from draftproof.errors import UserError

_UNITS = {"": 1, "b": 1, **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}}
_UNITS |= {f"{letter}{end}": 1024**power for power, letter in enumerate("kmgt", 1) for end in ("ib", "i")}
_LONGEST = 1 << 24


@dataclass(frozen=True)
class MemoryUse:
    """Memory of keys, values and states, and the number of reused tokens, at one moment."""

    used: int  # bytes that running requests need, drafted tokens included
    kept: int  # bytes of sessions in the prefix cache
    capacity: int | None  # `kv_memory` in bytes; None without a limit
    reused_tokens: int  # tokens reused from other requests so far, instead of being read


@runtime_checkable
class Measured(Protocol):
    """A backend that knows the memory of its sessions."""

    def sequences_nbytes(self, lengths: Sequence[int]) -> int:
        """Bytes that sessions of these lengths need together."""


def read_bytes(value: int | str | None, name: str = "kv_memory") -> int | None:
    """A number of bytes, from a number or a text such as "2GiB" or "500 MB"; None stays."""
    if value is None:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(value))
    if isinstance(value, bool) or found is None or found[2].lower() not in _UNITS or not float(found[1]):
        raise UserError(f"{name}: expected a number of bytes above 0, or a text such as 2GiB or 500MB, got {value!r}")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def in_units(size: int) -> str:
    """Bytes for a message."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.3g} {unit}"
    return f"{size} bytes"


class MemoryBudget:
    """A limit of `most` bytes (None: no limit) for the sessions of all requests in all models.

    `spare` returns the number of drafted tokens that a request needs space for.
    """

    def __init__(self, most: int | None, backends: Callable[[], Sequence[Backend]], spare: Callable[[], int]) -> None:
        self.most = most
        self._backends = backends
        self._spare = spare
        if most is None:
            return
        for each in self._measured():
            if not each.sequences_nbytes([1]):  # the size of its keys is unknown before it has read a token
                _read_one_token(each)
        if self.needed([1]) > most:
            raise UserError(
                f"kv_memory: expected at least {in_units(self.needed([1]))}, for one token and its draft, got "
                f"{in_units(most)}"
            )

    def _measured(self) -> list[Measured]:
        return [each for each in self._backends() if isinstance(each, Measured)]

    def needed(self, lengths: Sequence[int]) -> int:
        """Bytes that requests of these lengths need."""
        ends = [length + self._spare() for length in lengths]
        return sum(each.sequences_nbytes(ends) for each in self._measured())

    def fits(self, lengths: Sequence[int], kept: int = 0) -> bool:
        """Whether requests of these lengths fit, beside cached sessions of `kept` bytes."""
        return self.most is None or self.needed(lengths) + kept <= self.most

    @property
    def longest(self) -> int | None:
        """Length of the longest request that fits alone, in tokens; None without a limit."""
        if self.most is None:
            return None
        low, high = 1, _LONGEST
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits([middle]) else (low, middle)
        return low

    def refusal(self, tokens: int, what: str) -> str:
        """Why a request of this length is refused."""
        assert self.most is not None, "without a limit nothing is refused"
        return (
            f"{what} needs up to {in_units(self.needed([tokens]))} of keys and values for {tokens} tokens, but "
            f"kv_memory is {in_units(self.most)}, enough for {self.longest} tokens: ask for fewer, or raise kv_memory"
        )


def _read_one_token(backend: Backend | Measured) -> None:
    assert isinstance(backend, Backend), "Measured objects are backends"
    session = backend.open()
    try:
        backend.forward([Feed(session, [0])])
    finally:
        session.close()
