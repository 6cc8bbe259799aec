"""Short causal convolutions of recurrent layers on a CPU, with the arguments of transformers' functions.

torch's convolution takes longer to begin than these few products take. Here each output is the same sum of products in
the same order, whatever the number of tokens: its last digits do not depend on the pass. A function of transformers is
compared with this before it is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from draftproof.backends.recurrent.even import evenly

ALL, AFTER_STATE = "causal_conv1d_fn", "causal_conv1d_update"
"""Names of transformers' functions: of all tokens, after zeros; and of tokens after a state, which is changed."""

_ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {None: lambda x: x, "silu": F.silu, "swish": F.silu}
_REFUSALS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)  # of functions of other kinds


@dataclass(frozen=True)
class Convolution:
    """A convolution of the last tokens of each channel; what it does not compute, transformers' function does."""

    own: Callable[..., Tensor]  # transformers' function
    states: bool  # whether it reads tokens after a state, which it changes

    @classmethod
    def of(cls, name: str, own: Callable[..., Tensor]) -> Convolution | None:
        """In place of a function; None where that computes something else."""
        made = cls(own, name == AFTER_STATE)
        return made if _same(own, made) else None

    def __call__(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """The outputs [rows, channels, tokens]."""
        others = any(isinstance(each, Tensor) for each in options.values())  # as bounds of packed sequences
        if x.device.type != "cpu" or x.dtype == torch.float64 or torch.is_grad_enabled() or others:
            return self.own(x, *args, **options)
        state, *rest = args if self.states else (None, *args)
        return self._convolved(x, state, *rest, **options)

    @staticmethod
    def _convolved(
        x: Tensor,
        state: Tensor | None,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: object,
    ) -> Tensor:
        size, tokens = weight.shape[-1], x.shape[-1]
        if state is None:
            every = F.pad(x, (size - 1, 0))
        else:
            every = torch.cat([state, x], -1)
            state.copy_(every[..., every.shape[-1] - state.shape[-1] :])
        rows = every[..., every.shape[-1] - tokens - size + 1 :].transpose(1, 2).to(torch.float32).contiguous()
        taps = weight.t().to(torch.float32).contiguous()
        made = rows[:, :tokens] * taps[0]
        for number in range(1, size):
            made += rows[:, number : number + tokens] * taps[number]
        if bias is not None:
            made += bias
        return evenly(made, _ACTIVATIONS[activation]).to(x.dtype).transpose(1, 2)


@torch.inference_mode()
def _same(own: Callable[..., Tensor], made: Convolution) -> bool:
    """Whether both compute the same from some inputs."""
    source = torch.Generator().manual_seed(0)
    x, weight, bias, state = (
        torch.randn(shape, generator=source, dtype=torch.float32) for shape in ((2, 8, 5), (8, 4), (8,), (2, 8, 4))
    )
    for activation in _ACTIVATIONS:
        found = []
        for form in (own, made):
            before = (state.clone(),) if made.states else ()
            try:
                found.append([form(x, *before, weight, bias, activation=activation), *before])
            except _REFUSALS:
                return False
        for one, other in zip(*found, strict=True):
            if one.shape != other.shape or not torch.allclose(one, other, atol=1e-5):
                return False
    return True
