"""The delta rule of linear attention (Qwen3-Next, Qwen3.5, OLMo hybrid, Kimi Linear, ...) for few tokens.

Transformers has it in two forms that take the same arguments: in chunks, which pads every piece to 64 tokens, and token
by token, which the layers call with a single one. Pieces of our passes are a root and its drafts, so they are far
shorter than a chunk. During our passes on a CPU they are read token by token, inside one call of the layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

FEW = 16  # tokens; with heads of 128 both forms take as long at 20 to 24, and chunks are faster from there
_CHUNKED, _RECURRENT = "chunk_", "recurrent_"  # in the names of the two forms
_IN_PASS: ContextVar[bool] = ContextVar("_IN_PASS", default=False)


def follow_passes(mixers: Sequence[nn.Module]) -> None:
    """Let layers with a rule in two forms take the recurrent one for few tokens of our passes (`in_pass`).

    The form in chunks is replaced for good among the names that the layer's forward pass looks up, and outside of our
    passes it does what it did.

    Args:
        mixers: see `mixers.mixers_of`.
    """
    for each in mixers:
        names = inspect.unwrap(type(each).forward).__globals__
        pairs = {name: name.replace(_CHUNKED, _RECURRENT) for name in names if _CHUNKED in name}
        for name, other in pairs.items():
            if callable(names.get(other)) and not isinstance(names[name], _Either):
                names[name] = _Either(names[name], names[other])


@contextmanager
def in_pass() -> Iterator[None]:
    """While this is open, layers in this thread read few tokens with the recurrent form of their rule."""
    token = _IN_PASS.set(True)
    try:
        yield
    finally:
        _IN_PASS.reset(token)


@dataclass(frozen=True)
class _Either:
    """Both forms of a rule as one function.

    Attributes:
        chunked, recurrent: each takes queries of [rows, tokens, ...] first.
    """

    chunked: Callable[..., Any]
    recurrent: Callable[..., Any]

    def __call__(self, query: Tensor, *args: Any, **options: Any) -> Any:
        few = _IN_PASS.get() and query.shape[1] <= FEW and query.device.type == "cpu"
        return (self.recurrent if few else self.chunked)(query, *args, **options)
