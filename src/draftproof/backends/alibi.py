"""ALiBi: biases of attention by the position of each key, for families that derive them from a two-dimensional mask.

Our masks have four dimensions, for trees and rows of different lengths, and such a family cannot read positions from
them. During our passes its function is told where each key is. Everywhere else it computes what it always did.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from draftproof.backends.layout import Layout

_NAME = re.compile(r"build_\w*alibi_tensor")
_MASK = "attention_mask"
_PASS: ContextVar[Layout | None] = ContextVar("_PASS", default=None)


def follow_passes(model: Any) -> None:
    """Let the functions that make a model's ALiBi biases from a mask take positions of our passes (`in_pass`).

    They are replaced for good in the module of the model's class, and outside of our passes they do what they did.
    """
    for module in {sys.modules.get(type(each).__module__) for each in model.modules()}:
        for name, made in list(vars(module).items() if module is not None else ()):
            if _NAME.fullmatch(name) and callable(made) and _takes_mask(made):
                setattr(module, name, _following(made))


def _takes_mask(made: Callable[..., Any]) -> bool:
    return not hasattr(made, "__wrapped__") and next(iter(inspect.signature(made).parameters), "") == _MASK


@contextmanager
def in_pass(layout: Layout) -> Iterator[None]:
    """While this is open, biases in this thread are those of the pass."""
    token = _PASS.set(layout)
    try:
        yield
    finally:
        _PASS.reset(token)


def _following(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
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
