"""Functions on rows of scores and of probabilities: in C for float32 rows on the CPU, where it is available.

The first ones fall back to torch. Those that return None have their torch form at the caller, since it is the rule or
the draw itself: None says that the caller must compute.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from draftproof.native.dispatch import operations_for
from draftproof.native.operations import Operations


def softmax(x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
    """Softmax of each row."""
    found = _operations(x)
    return x.softmax(-1) if found is None else found.softmax(x)


def greedy(x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
    """1 at the first largest entry of each row, 0 elsewhere."""
    found = _operations(x)
    if found is not None:
        return found.greedy(x)
    return torch.zeros_like(x).scatter_(-1, x.argmax(-1, keepdim=True), 1.0)


def legal(x: Float[Tensor, "*rows dim"]) -> bool:
    """Whether no entry is NaN or +inf, and no row all -inf."""
    found = operations_for(x)
    return bool(x.amax(-1).isfinite().all()) if found is None else found.legal(x)


def spread(x: Float[Tensor, "rows width"], ids: Int[Tensor, " width"], dim: int) -> Float[Tensor, "rows dim"]:
    """Rows of width `dim` with x at the columns `ids`, which all differ, and zeros elsewhere."""
    found = _operations(x)
    return x.new_zeros((x.shape[0], dim)).index_copy_(1, ids, x) if found is None else found.spread(x, ids, dim)


def draw(weights: Float[Tensor, "*rows vocab"], u: Float[Tensor, "*rows"]) -> Int[Tensor, "*rows"] | None:
    """The first index of each row whose cumulative weight exceeds u times the total; see `rng.inverse_cdf`."""
    found = _operations(weights)
    return None if found is None else found.inverse_cdf(weights, u)


def race(weights: Float[Tensor, "*rows vocab"], keys: Sequence[int]) -> Int[Tensor, "*rows"] | None:
    """The winner of an exponential race in each row, by a key of 64 bits each; see `rng.first_arrival`."""
    found = _operations(weights)
    if found is None:
        return None
    signed = torch.tensor([key - (1 << 64) if key >= 1 << 63 else key for key in keys], dtype=torch.int64)
    return found.race(weights, signed.reshape(weights.shape[:-1]))


def block_plan(
    tokens: Int[Tensor, "B n"], q: Float[Tensor, "B n V"] | None, p: Float[Tensor, "B m V"], lengths: Int[Tensor, " B"]
) -> tuple[Float64[Tensor, "B n"], Float64[Tensor, "B n"]] | None:
    """P_i and h_i of block verification; see `functional.chain.block_acceptance`."""
    found = _operations(p)
    return None if found is None or not _alike(q, p) else found.block(tokens, q, p, lengths)


def bonus_weights(
    p: Float[Tensor, "B m V"],
    q: Float[Tensor, "B n V"] | None,
    tokens: Int[Tensor, "B n"],
    accepted: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    scale: Float[Tensor, " B"],
) -> Float[Tensor, "B V"] | None:
    """Weights of each row's bonus token; see `functional.chain.bonus_weights`."""
    found = _operations(p)
    if found is None or not _alike(q, p):
        return None
    if q is not None and q.shape[-1] != p.shape[-1]:  # C would read past its rows
        raise ValueError(f"expected p and q of one width, got {p.shape[-1]} and {q.shape[-1]} columns")
    p = p.contiguous()
    q = None if q is None else q.contiguous()
    out = p.new_empty((p.shape[0], p.shape[2]))
    for row, (kept, length, by) in enumerate(zip(accepted.tolist(), lengths.tolist(), scale.tolist(), strict=True)):
        if kept >= length:  # everything was accepted
            out[row] = p[row, kept]
        elif q is None:
            found.residual(p[row, kept], None, int(tokens[row, kept]), by, out[row])
        else:
            found.residual(p[row, kept], q[row, kept], 0, by, out[row])
    return out


def _operations(rows: Tensor) -> Operations | None:
    """The operations for rows that are float32 and need no gradient."""
    if rows.dtype != torch.float32 or (rows.requires_grad and torch.is_grad_enabled()):
        return None
    return operations_for(rows)


def _alike(q: Tensor | None, p: Tensor) -> bool:
    return q is None or q.dtype == p.dtype
