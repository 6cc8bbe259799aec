"""Checks of the tensors that a verification rule is given; every error names the row and says what is legal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

SUM_TOLERANCE = 1e-3


def check_rows(name: str, rows: Float[Tensor, "*rows V"], valid: Tensor | None = None) -> None:
    """Check that rows are finite, non-negative and sum to 1 within 1e-3, wherever `valid` is true."""
    if not rows.is_floating_point() or rows.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(f"{name}: expected probabilities in float32 or float64, got {rows.dtype}")
    keep = torch.ones(rows.shape[:-1], dtype=torch.bool, device=rows.device) if valid is None else valid
    total = rows.sum(-1)
    _refuse(name, keep & ~torch.isfinite(total), lambda at: f"finite probabilities, got a sum of {total[at].item()}")
    _refuse(name, keep & (rows.amin(-1) < 0), lambda at: f"probabilities of 0 or more, got {rows[at].min().item():.3g}")
    _refuse(
        name,
        keep & ((total - 1).abs() > SUM_TOLERANCE),
        lambda at: (
            f"a row that sums to 1 within {SUM_TOLERANCE}, got {total[at].item():.6g} (softmax or divide by the "
            "sum first)"
        ),
    )


def _refuse(name: str, bad: Tensor, expected: Callable[[tuple[int, ...]], str]) -> None:
    """Refuse a tensor at the first place where it is bad; `expected` says of a place what should be there."""
    if bad.any():
        where = tuple(int(i) for i in bad.nonzero()[0])
        raise ValueError(f"{name}{list(where)}: expected {expected(where)}")


def check_tokens(tokens: Int[Tensor, "*rows"], vocab: int, valid: Tensor) -> None:
    """Check that token ids lie in [0, vocab), wherever `valid` is true."""
    bad = valid & ((tokens < 0) | (tokens >= vocab))
    _refuse("tokens", bad, lambda at: f"ids 0 to {vocab - 1}, got {tokens[at].item()}")


def check_drawn(tokens: Int[Tensor, "*rows"], q: Float[Tensor, "*rows V"], valid: Tensor) -> None:
    """Check that q(token) > 0 for every drafted token, as it must be for a token drawn from q."""
    bad = valid & (q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) <= 0)
    _refuse(
        "q",
        bad,
        lambda at: (
            f"the distribution that token {tokens[at].item()} was drawn from, got one that gives it probability 0"
        ),
    )


def check_chain(
    tokens: Int[Tensor, "*B n"],
    q: Float[Tensor, "*B n V"] | None,
    p: Float[Tensor, "*B m V"],
    lengths: Int[Tensor, "*B"] | None,
) -> None:
    """Check the inputs of a rule on chains; the leading dimensions are batch, or batch and draft.

    Raises:
        ValueError: a wrong shape or dtype, a row that is no distribution, a token out of range or not drawn from q.
    """
    *lead, n = tokens.shape
    if p.ndim != tokens.ndim + 1 or list(p.shape[:-1]) != [*lead, n + 1]:
        raise ValueError(
            f"p: expected shape {(*lead, n + 1, 'V')} for tokens of shape {tuple(tokens.shape)}, got {tuple(p.shape)}"
        )
    vocab = p.shape[-1]
    if q is not None and tuple(q.shape) != (*lead, n, vocab):
        raise ValueError(f"q: expected shape {(*lead, n, vocab)} (tokens x the vocabulary of p), got {tuple(q.shape)}")
    place = torch.arange(n + 1, device=tokens.device)
    if lengths is None:
        inside = torch.ones((*lead, n + 1), dtype=torch.bool, device=tokens.device)
    else:
        if tuple(lengths.shape) != tuple(lead):
            raise ValueError(f"lengths: expected shape {tuple(lead)}, got {tuple(lengths.shape)}")
        _refuse("lengths", (lengths < 0) | (lengths > n), lambda at: f"0 to {n}, got {lengths[at].item()}")
        inside = place <= lengths.unsqueeze(-1)
    check_rows("p", p, inside)
    drafted = inside[..., 1:]
    check_tokens(tokens, vocab, drafted)
    if q is not None:
        check_rows("q", q, drafted)
        check_drawn(tokens.masked_fill(~drafted, 0), q, drafted)
