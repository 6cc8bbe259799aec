"""The delta rule of linear attention in C, with the arguments of transformers' functions.

It is compared with transformers' function before it stands for it, and leaves to that what C does not compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftproof import native
from draftproof.native.structures import MOST_STATE

_REFUSALS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)  # of functions of other kinds


@dataclass(frozen=True)
class NativeRule:
    """The delta rule in C, with the arguments of transformers' functions."""

    own: Callable[..., Any]  # transformers' function; it computes what C does not
    # the inputs for which both agree: the dimensions of the decays, and whether heads share keys
    known: frozenset[tuple[int, bool]]

    @classmethod
    def of(cls, own: Callable[..., Any]) -> NativeRule | None:
        """C in place of a function; None where there is no C, or the function is another rule."""
        if native.operations_for(torch.zeros(1, dtype=torch.float32)) is None:
            return None
        every = frozenset((dims, shared) for dims in (3, 4) for shared in (False, True))
        known = frozenset(kind for kind in every if _same_rule(own, cls(own, every), *kind))
        return cls(own, known) if known else None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The outputs [rows, tokens, heads, size], and the state at the end where it is wanted."""
        inputs, dim = (query, key, value, g, beta), key.shape[-1]
        operations = native.operations_for(torch.empty(0, device=query.device, dtype=torch.float32))
        if (
            operations is None
            or (g.dim(), key.shape[2] != value.shape[2]) not in self.known
            or dim > MOST_STATE
            or torch.is_grad_enabled()
            or any(each.dtype == torch.float64 for each in inputs)
            or any(isinstance(each, Tensor) for each in others.values())  # as bounds of packed sequences
        ):
            options = {"initial_state": initial_state, "output_final_state": output_final_state, **others}
            made: tuple[Tensor, Tensor | None] = self.own(
                query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **options
            )
            return made
        state = None if initial_state is None else initial_state.float()
        q, k, v, decays, betas = (x.float() for x in inputs)
        out, end = operations.delta_rule(q, k, v, decays, betas, state, unit=use_qk_l2norm_in_kernel)
        return out.to(query.dtype), end if output_final_state else None


@torch.inference_mode()
def _same_rule(own: Callable[..., Any], rule: NativeRule, dims: int, shared: bool) -> bool:
    """Whether C and a function of transformers compute the same from some inputs, with a state and without."""
    source = torch.Generator().manual_seed(0)
    heads, sizes = (2 if shared else 4, 4), (2, 3, 8)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, dtype=torch.float32)

    query, key = (drawn(*sizes[:2], heads[0], sizes[2]) for _ in range(2))
    value, beta = drawn(*sizes[:2], heads[1], 6), drawn(*sizes[:2], heads[1]).sigmoid()
    g = -drawn(*(*sizes[:2], heads[1], sizes[2])[:dims]).abs()
    state = drawn(sizes[0], heads[1], sizes[2], 6)
    for unit, before in ((True, state), (False, state), (True, None)):
        options: dict[str, Any] = {"initial_state": before, "output_final_state": True, "use_qk_l2norm_in_kernel": unit}
        try:
            expected, found = (form(query, key, value, g=g, beta=beta, **options) for form in (own, rule))
        except _REFUSALS:
            return False
        for one, other in zip(expected, found, strict=True):
            if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-4, atol=1e-5):
                return False
    return True
