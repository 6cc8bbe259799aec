"""ALiBi: biases of attention by the position of each key, for families that derive them from a two-dimensional mask.

Bloom and Falcon count positions along a mask of two dimensions, and ours have four, for trees and rows of different
lengths. MPT takes a table of all positions and cuts its end off, the same for every row. So during our passes the
functions that make the biases are told where each key is. Everywhere else they compute what they always did.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from draftproof.backends.cache.layout import Layout
from draftproof.backends.cache.passes import during

_NAME = re.compile(r"build_\w*alibi_tensor")
_MASK, _HEADS = "attention_mask", "num_heads"  # first argument: where positions are counted, or of a table
_PASS: ContextVar[Layout | None] = ContextVar("_PASS", default=None)
in_pass = functools.partial(during, _PASS)  # while this is open, biases in this thread are those of a pass


def follow_passes(model: Any) -> None:
    """Let the functions that make a model's ALiBi biases take the positions of our passes (`in_pass`).

    They are replaced for good in the module of the model's class, and outside of our passes they do what they did.
    """
    for module in {sys.modules.get(type(each).__module__) for each in model.modules()}:
        for name, made in list(vars(module).items() if module is not None else ()):
            if not _NAME.fullmatch(name) or not callable(made) or hasattr(made, "__wrapped__"):
                continue
            first = next(iter(inspect.signature(made).parameters), "")
            if first in _FOLLOWING:
                setattr(module, name, _FOLLOWING[first](made))


def _from_mask(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(make)
    def made(attention_mask: Tensor, *args: Any, **options: Any) -> Tensor:
        layout = _PASS.get()
        if layout is None:
            return make(attention_mask, *args, **options)
        rows, keys = len(layout.feeds), layout.plan.horizon
        ones = torch.ones((rows, keys), dtype=torch.int64, device=attention_mask.device)
        biases = make(ones, *args, **options)  # of positions 0, 1, 2, ... in each row
        if layout.straight:
            return biases
        places = layout.key_positions.to(biases.device)[:, None, None]
        grid = biases.view(rows, -1, 1, keys)
        return grid.gather(-1, places.expand_as(grid)).reshape(biases.shape)

    return made


def _from_table(make: Callable[..., Tensor]) -> Callable[..., Tensor | _BiasesOfRows]:
    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> Tensor | _BiasesOfRows:
        layout, table = _PASS.get(), make(*args, **options)
        if layout is None or layout.straight:
            return table
        length = table.shape[-1]
        first = max(length - layout.plan.horizon, 0)  # of the end that is cut off
        places = (first + layout.key_positions).clamp(max=length - 1)  # beyond are slots that no token of the row sees
        return _BiasesOfRows(table[:, :, places.to(table.device)].permute(2, 0, 1, 3))

    return made


_FOLLOWING = {_MASK: _from_mask, _HEADS: _from_table}


class _BiasesOfRows:
    """Biases of each row's own keys, in place of one table for all rows that attention cuts to the keys' number."""

    def __init__(self, biases: Tensor) -> None:
        self._biases = biases
        self.shape = biases.shape[1:]

    def size(self, dim: int) -> int:
        """As of the table."""
        return self.shape[dim]

    def to(self, *args: Any, **options: Any) -> _BiasesOfRows:
        """Where the layers of a model are on several devices, they move what they are handed."""
        return _BiasesOfRows(self._biases.to(*args, **options))

    def __getitem__(self, _: Any) -> Tensor:
        return self._biases
