"""Mamba 2's state space in C, with the arguments of transformers' functions.

They are compared with transformers' functions before they stand for them, and leave to those what C does not compute.
A state of transformers is that of C with its last two dimensions exchanged: it is kept as such a view.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from draftproof import native
from draftproof.backends.recurrent.even import evenly
from draftproof.native.structures import MOST_STATE

STEP = "mamba2_selective_state_update"
"""Transformers' function of one token, which changes the state that it is given."""

_REFUSALS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)  # of functions of other kinds
_NO_LIMIT = (0.0, float("inf"))


def _scanned(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor | None,
    *,
    softplus: bool,
    limit: tuple[float, float] = _NO_LIMIT,
) -> tuple[Tensor, Tensor]:
    """Outputs [rows, tokens, heads, size] and the state at the end [rows, heads, size, dim], in float32."""
    operations = native.operations_for(torch.empty(0, dtype=torch.float32))
    assert operations is not None, "the caller looked"
    x, steps, B, C = (each.float() for each in (x, dt, B, C))
    steps = steps if dt_bias is None else steps + dt_bias.float()
    steps = (evenly(steps, F.softplus) if softplus else steps).clamp(*limit)
    before = None if state is None else state.float().transpose(-1, -2)
    made, end = operations.delta_rule(C, B, x * steps.unsqueeze(-1), steps * A.float(), None, before, unit=False)
    return made if D is None else made + x * D.float().unsqueeze(-1), end.transpose(-1, -2)


def _computes(*given: Any, dim: int) -> bool:
    """Whether C can stand for a call with these tensors."""
    tensors = [each for each in given if isinstance(each, Tensor)]
    known = all(each.device.type == "cpu" and each.dtype != torch.float64 for each in tensors)
    return known and dim <= MOST_STATE and not torch.is_grad_enabled()


@dataclass(frozen=True)
class NativeScan:
    """The state space for several tokens."""

    own: Callable[..., Any]  # transformers' function; it computes what C does not

    @classmethod
    def of(cls, own: Callable[..., Any]) -> NativeScan | None:
        """C in place of a function; None where there is no C, or the function is another one."""
        made = cls(own)
        x, dt, A, B, C, D, bias, state = _drawn()
        options = {"chunk_size": 4, "D": D, "dt_bias": bias, "dt_softplus": True, "return_final_states": True}
        alike = _alike(own, made, lambda: ((x, dt, A, B, C), {**options, "initial_states": state.clone()}))
        return made if alike else None

    def __call__(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = _NO_LIMIT,
        return_final_states: bool = False,
        **others: Any,
    ) -> Any:
        """The outputs [rows, tokens, heads, size], and the state at the end where it is wanted."""
        others_are_none = z is None and not any(isinstance(each, Tensor) for each in others.values())
        if not others_are_none or not _computes(x, dt, A, B, C, D, dt_bias, initial_states, dim=B.shape[-1]):
            others |= {"D": D, "z": z, "dt_bias": dt_bias, "initial_states": initial_states}
            others |= {"dt_softplus": dt_softplus, "dt_limit": dt_limit, "return_final_states": return_final_states}
            return self.own(x, dt, A, B, C, chunk_size, **others)
        made, end = _scanned(x, dt, A, B, C, D, dt_bias, initial_states, softplus=dt_softplus, limit=dt_limit)
        return (made.to(x.dtype), end) if return_final_states else made.to(x.dtype)


@dataclass(frozen=True)
class NativeStep:
    """The state space for one token, whose arguments are repeated for the numbers of a head and of a state."""

    own: Callable[..., Tensor]  # transformers' function; it computes what C does not

    @classmethod
    def of(cls, own: Callable[..., Tensor]) -> NativeStep | None:
        """C in place of a function; None where there is no C, or the function is another one."""
        made = cls(own)
        x, dt, A, B, C, D, bias, state = _drawn()
        size, dim = state.shape[2:]
        repeated = dt[:, 0, :, None].expand(-1, -1, size), A[:, None, None].expand(-1, size, dim)
        more = {"D": D[:, None].expand(-1, size), "dt_bias": bias[:, None].expand(-1, size), "dt_softplus": True}
        alike = _alike(own, made, lambda: ((state.clone(), x[:, 0], *repeated, B[:, 0], C[:, 0]), more))
        return made if alike else None

    def __call__(
        self,
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """The outputs [rows, heads, size]; the state is changed."""
        given = (x, dt, A, B, C, D, dt_bias, z)
        if any(isinstance(each, Tensor) for each in others.values()) or not _computes(*given, dim=B.shape[-1]):
            options = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "z": z}
            return self.own(state, x, dt, A, B, C, **options, **others)
        skip, bias = (None if each is None else each[..., 0] for each in (D, dt_bias))
        token = (each.unsqueeze(1) for each in (x, dt[..., 0], B, C))
        hidden, steps, keys, queries = token
        made, end = _scanned(hidden, steps, A[..., 0, 0], keys, queries, skip, bias, state, softplus=dt_softplus)
        state.copy_(end)
        out = made[:, 0].to(x.dtype)
        return out if z is None else out * F.silu(z)


def _drawn() -> tuple[Tensor, ...]:
    """Some inputs: x, dt, A, B, C, D, a bias of dt, and a state."""
    source = torch.Generator().manual_seed(0)
    rows, tokens, heads, size, groups, dim = 2, 3, 4, 6, 2, 8

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, dtype=torch.float32)

    A = -drawn(heads).exp()
    keys = [drawn(rows, tokens, groups, dim) for _ in range(2)]
    state = drawn(rows, heads, size, dim)
    return drawn(rows, tokens, heads, size), drawn(rows, tokens, heads), A, *keys, drawn(heads), drawn(heads), state


@torch.inference_mode()
def _alike(own: Callable[..., Any], made: Callable[..., Any], inputs: Callable[[], tuple[Any, Any]]) -> bool:
    """Whether two functions compute the same, and change their first argument in the same way."""
    if native.operations_for(torch.empty(0, dtype=torch.float32)) is None:
        return False
    found = []
    for form in (own, made):
        args, options = inputs()
        try:
            result = form(*args, **options)
        except _REFUSALS:
            return False
        found.append([*(result if isinstance(result, tuple) else (result,)), args[0]])
    pairs = zip(*found, strict=True)
    return all(one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in pairs)
