"""The recurrences inside layers: divided at the root of a pass, and in a form that is fast for its tokens.

Transformers' layers with linear attention (Qwen3-Next, Qwen3.5, OLMo hybrid, Kimi Linear, ...) and state spaces
(Mamba 2, Bamba, Falcon-H1, Granite hybrids, ...) call one function for the tokens of a pass after their projections. It
takes a state and returns the one at the end. Here such a function is called twice where the state at the root is
wanted, so the layer around it still reads the pass, and its weights, once. That of Mamba and Jamba takes no state,
which is made up for.

On a CPU the delta rule and Mamba 2's state space are computed natively. Where they are not, few tokens take another
form of transformers' own: that for several tokens is made for prompts and pads them to a chunk, and the pieces of our
passes are far shorter.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from draftproof.backends.cache.passes import during
from draftproof.backends.recurrent.convolutions import AFTER_STATE, ALL, Convolution
from draftproof.backends.recurrent.native_rule import NativeRule
from draftproof.backends.recurrent.native_scan import STEP, NativeScan, NativeStep
from draftproof.backends.recurrent.states import StateView

FEW = 16  # tokens; with heads of 128 both forms take as long at 20 to 24, and chunks are faster from there
_CHUNKED, _RECURRENT = "chunk_", "recurrent_"  # in the names of the delta rule's two forms
_SCAN, _STATELESS_SCAN = "mamba2_chunk_scan", "mamba_selective_scan"
_ALONE: dict[str, Callable[[Any], Callable[..., Any] | None]] = {
    STEP: NativeStep.of,
    ALL: partial(Convolution.of, ALL),
    AFTER_STATE: partial(Convolution.of, AFTER_STATE),
}
"""What stands for functions that need not be divided, by their names."""
_STATES = ("initial_state", "initial_states")
_PASS: ContextVar[StateView | None] = ContextVar("_PASS", default=None)
# While this is open, recurrences of this thread follow a pass: where it is divided, and how few tokens it has.
in_pass = partial(during, _PASS)


def follow_passes(mixers: Sequence[nn.Module]) -> None:
    """Let the recurrences of layers follow our passes (`in_pass`); mixers are those of `mixers_of`.

    They are replaced for good among the names that the layer's forward pass looks up, and outside of our passes they do
    what they did.
    """
    for kind in {kind for each in mixers for kind in type(each).__mro__ if "forward" in vars(kind)}:
        names: dict[str, Any] = inspect.unwrap(vars(kind)["forward"]).__globals__
        for name, found in list(names.items()):
            if callable(found) and not isinstance(found, Recurrence | _InPasses | StatelessScan):
                _replace(names, name, found)


def _replace(names: dict[str, Any], name: str, found: Callable[..., Any]) -> None:
    """Let one of the functions that layers call follow our passes, where it is one that is known here."""
    other = name.replace(_CHUNKED, _RECURRENT)
    if name == _SCAN:
        scan = NativeScan.of(found)
        names[name] = Recurrence(found, scan or _one_chunk(found), sys.maxsize if scan else FEW)
    elif name == _STATELESS_SCAN:
        names[name] = StatelessScan(found)
    elif name in _ALONE:
        own = _ALONE[name](found)
        if own is not None:
            names[name] = _InPasses(found, own)
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


@dataclass(frozen=True)
class _InPasses:
    """A function of transformers that is another one, which computes the same, in our passes."""

    own: Callable[..., Any]
    other: Callable[..., Any]

    def __call__(self, *args: Any, **options: Any) -> Any:
        return (self.own if _PASS.get() is None else self.other)(*args, **options)


@dataclass(frozen=True)
class Recurrence:
    """A recurrence of transformers that can be divided."""

    # the form of several tokens; takes inputs of [rows, tokens, ...] and a state, returns outputs and a state
    many: Callable[..., Any]
    few: Callable[..., Any]  # another form of the same function, for passes on a CPU
    most: int  # tokens that it is taken for

    def __call__(self, first: Tensor, *args: Any, **options: Any) -> Any:
        """The outputs and the state at the end; see `many`."""
        view = _PASS.get()
        if view is None:
            return self.many(first, *args, **options)
        name = next((name for name in _STATES if name in options), None)
        if view.divide is None or name is None:  # without a state at the root the layer is found to be indivisible
            return self._read(first, *args, **options)

        def part(given: Any, start: int, stop: int) -> Any:
            tokens = isinstance(given, Tensor) and given.shape[:2] == first.shape[:2]
            return given[:, start:stop] if tokens else given

        state, outputs = options.pop(name), list[Tensor]()
        for start, stop in ((0, view.divide), (view.divide, first.shape[1])):
            mine = [part(each, start, stop) for each in args]
            named = {key: part(each, start, stop) for key, each in options.items()}
            output, state = self._read(first[:, start:stop], *mine, **{**named, name: state})
            outputs.append(output)
            if start == 0:
                view.state_at_root = state
        return torch.cat(outputs, dim=1), state

    def _read(self, first: Tensor, *args: Any, **options: Any) -> Any:
        few = first.shape[1] <= self.most and first.device.type == "cpu"
        return (self.few if few else self.many)(first, *args, **options)


@dataclass(frozen=True)
class StatelessScan:
    """The scan of Mamba's and Jamba's layers, which begins without a state, made to begin with one.

    It is linear in the state: what a state adds is computed beside it, before the gate.

    Attributes:
        own: transformers' function; its tokens are the last dimension, and gates and biases are applied inside.
    """

    own: Callable[..., Any]

    def __call__(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *args: Any,
        z: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """The outputs [rows, channels, tokens] and the state at the end; see `own`."""
        view, shape = _PASS.get(), (*x.shape[:2], A.shape[-1])
        state = None if view is None else view.recurrent_state
        if (
            view is None
            or args
            or (state is None and view.divide is None)
            or (state is not None and state.shape != shape)
        ):
            return self.own(x, dt, A, B, C, *args, z=z, **options)
        outputs, size = list[Tensor](), x.shape[-1]
        for start, stop in ((0, view.divide or 0), (view.divide or 0, size)):
            if start < stop:
                some = slice(start, stop)
                output, state = self._read(x[..., some], dt[..., some], B[..., some], C[..., some], A, state, options)
                outputs.append(output)
            if view.divide and stop < size:
                view.state_at_root = state
        made = torch.cat(outputs, dim=-1)
        return made if z is None else made * F.silu(z), state

    def _read(
        self, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, state: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Some tokens after a state, without the gate."""
        made, end = self.own(x, dt, A, B, C, **options)
        if state is None:
            return made, end
        bias = options.get("delta_bias")
        steps = dt if bias is None else dt + bias.to(dt.dtype)[..., None]
        steps = F.softplus(steps) if options.get("delta_softplus") else steps
        carried = (A[None, :, None] * steps.cumsum(-1).unsqueeze(-1)).exp() * state.unsqueeze(2)
        added = torch.einsum("rctn,rnt->rct", carried.to(C.dtype), C)
        return made + added.to(made.dtype), end + carried[:, :, -1].to(end.dtype)
