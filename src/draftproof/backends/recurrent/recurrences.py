"""The recurrences inside layers: divided at the root of a pass, and in a form that is fast for its tokens.

Transformers' layers with linear attention (Qwen3-Next, Qwen3.5, OLMo hybrid, Kimi Linear, ...) and state spaces
(Mamba 2, Bamba, Falcon-H1, Granite hybrids, ...) call one function for the tokens of a pass after their projections. It
takes a state and returns the one at the end. Here such a function is called twice where the state at the root is
wanted, so the layer around it still reads the pass, and its weights, once.

On a CPU the delta rule is computed natively. Where it is not, and for state spaces, few tokens take another form of
transformers' own: that for several tokens is made for prompts and pads them to a chunk, and the pieces of our passes
are far shorter.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftproof.backends.recurrent.native_rule import NativeRule
from draftproof.backends.recurrent.states import StateView

FEW = 16  # tokens; with heads of 128 both forms take as long at 20 to 24, and chunks are faster from there
_CHUNKED, _RECURRENT = "chunk_", "recurrent_"  # in the names of the delta rule's two forms
_SCAN = "mamba2_chunk_scan"
_STATES = ("initial_state", "initial_states")
_PASS: ContextVar[StateView | None] = ContextVar("_PASS", default=None)


def follow_passes(mixers: Sequence[nn.Module]) -> None:
    """Let the recurrences of layers follow our passes (`in_pass`).

    They are replaced for good among the names that the layer's forward pass looks up, and outside of our passes they do
    what they did.

    Args:
        mixers: see `mixers.mixers_of`.
    """
    for each in mixers:
        names = inspect.unwrap(type(each).forward).__globals__
        for name, found in list(names.items()):
            if isinstance(found, Recurrence | _InPasses):
                continue
            other = name.replace(_CHUNKED, _RECURRENT)
            if name == _SCAN:
                names[name] = Recurrence(found, _one_chunk(found), FEW)
            elif _CHUNKED in name and callable(single := names.get(other)):
                rule = NativeRule.of(single)
                names[name] = Recurrence(found, rule or single, sys.maxsize if rule else FEW)
                if rule is not None:
                    names[other] = _InPasses(single, rule)


def _one_chunk(scan: Callable[..., Any]) -> Callable[..., Any]:
    """Mamba 2's scan for few tokens: a chunk of their own number, in place of one that is padded."""

    def few(hidden: Tensor, *args: Any, **options: Any) -> Any:
        return scan(hidden, *args, **{**options, "chunk_size": hidden.shape[1]})

    return few


@contextmanager
def in_pass(view: StateView) -> Iterator[None]:
    """While this is open, recurrences of this thread follow a pass: where it is divided, and how few tokens it has."""
    token = _PASS.set(view)
    try:
        yield
    finally:
        _PASS.reset(token)


@dataclass(frozen=True)
class _InPasses:
    """A function of transformers that is another one, which computes the same, in our passes."""

    own: Callable[..., Any]
    other: Callable[..., Any]

    def __call__(self, *args: Any, **options: Any) -> Any:
        return (self.own if _PASS.get() is None else self.other)(*args, **options)


@dataclass(frozen=True)
class Recurrence:
    """A recurrence of transformers that can be divided.

    Attributes:
        many: the form of several tokens; takes inputs of [rows, tokens, ...] and a state, returns outputs and a state.
        few: another form of the same function, for passes on a CPU.
        most: tokens that it is taken for.
    """

    many: Callable[..., Any]
    few: Callable[..., Any]
    most: int

    def __call__(self, first: Tensor, *args: Any, **options: Any) -> Any:
        """The outputs and the state at the end; see `many`."""
        view = _PASS.get()
        if view is None:
            return self.many(first, *args, **options)
        if view.divide is None:
            return self._read(first, *args, **options)
        size, (name,) = first.shape[1], [name for name in _STATES if name in options]

        def part(given: Any, start: int, stop: int) -> Any:
            tokens = isinstance(given, Tensor) and given.dim() > 1 and given.shape[1] == size
            return given[:, start:stop] if tokens else given

        state, outputs = options.pop(name), list[Tensor]()
        for start, stop in ((0, view.divide), (view.divide, size)):
            mine = [part(each, start, stop) for each in (first, *args)]
            named = {key: part(each, start, stop) for key, each in options.items()}
            output, state = self._read(*mine, **named, **{name: state})
            outputs.append(output)
            if start == 0:
                view.state_at_root = state
        return torch.cat(outputs, dim=1), state

    def _read(self, first: Tensor, *args: Any, **options: Any) -> Any:
        few = first.shape[1] <= self.most and first.device.type == "cpu"
        return (self.few if few else self.many)(first, *args, **options)
