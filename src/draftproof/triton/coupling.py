"""Kernels of K-SEQ: the mass of a capped draft, and the whole search for the division factor in one launch."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton.language as tl
from jaxtyping import Float, Shaped
from torch import Tensor

import triton
from draftproof.triton.blocks import block_of, partials

PASSES = 12


@triton.jit
@no_type_check
def _capped(p, q, ratio, sums, vocab, p_row, p_id, q_row, q_id, MOST: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(p + row * p_row + ids * p_id, mask=ids < vocab, other=0)
    b = tl.load(q + row * q_row + ids * q_id, mask=ids < vocab, other=0)
    b *= tl.minimum(tl.load(ratio + row), MOST).to(b.dtype)
    tl.store(sums + row * tl.num_programs(1) + block, tl.sum(tl.minimum(b, a).to(tl.float64)))


def _most(q: Tensor) -> float:
    """The largest ratio used: multiplied by a probability it stays finite."""
    return torch.finfo(q.dtype).max / 4


def capped_mass(p: Float[Tensor, "R V"], q: Float[Tensor, "R V"], ratio: Float[Tensor, " R"]) -> Float[Tensor, " R"]:
    """sum_x min(ratio q(x), p(x)), summed in float64; see functional.coupling.capped_mass."""
    rows, vocab = p.shape
    sums = partials(rows, vocab, p.device)
    _capped[sums.shape](
        p, q, ratio.double().contiguous(), sums, vocab, *p.stride(), *q.stride(), MOST=_most(q), BLOCK=block_of(vocab)
    )
    return sums.sum(-1)


@triton.jit
@no_type_check
def _log1p(x):
    """log(1 + x) in float64 for x > -1, exact to rounding near 0: the error of 1 + x cancels in the quotient."""
    y = 1 + x
    return tl.where(y == 1, x, tl.log(y) * x / tl.where(y == 1, 1, y - 1))


@triton.jit
@no_type_check
def _expm1(x):
    """exp(x) - 1 in float64 for x <= 0, by the same cancellation."""
    y = tl.exp(x)
    inner = (y > 0) & (y < 1)
    found = tl.where(inner, (y - 1) * x / tl.log(tl.where(inner, y, 0.5)), y - 1)
    return tl.where(y == 1, x, found)


@triton.jit
@no_type_check
def _gamma(
    p, q, draws, weight, out, vocab, p_row, p_id, q_row, q_id,
    MOST: tl.constexpr, PASSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k, whole = tl.load(draws + row), tl.load(weight + row)
    low = tl.full([], 1, tl.float64)
    high = tl.maximum(k, low)
    used = tl.where(k > 1, vocab, 0)  # the bracket of one draw is a point
    for _ in range(PASSES):
        at = (low + high) / 2
        ratio = tl.minimum(at / tl.where(whole <= 0, 1, whole), MOST)
        mass = tl.zeros([BLOCK], tl.float64)
        for start in range(0, used, BLOCK):
            ids = start + tl.arange(0, BLOCK).to(tl.int64)
            a = tl.load(p + row * p_row + ids * p_id, mask=ids < vocab, other=0)
            b = tl.load(q + row * q_row + ids * q_id, mask=ids < vocab, other=0)
            mass += tl.minimum(b * ratio.to(b.dtype), a).to(tl.float64)
        beta = tl.minimum(tl.sum(mass) * whole / at, 1)
        missed = tl.where(beta < 1, k * _log1p(-tl.where(beta < 1, beta, 0)), float("-inf"))
        value = tl.where(beta > 0, -_expm1(missed) / tl.where(beta > 0, beta, 1), k)
        value = tl.maximum(value, 1)
        above = value <= at
        low = tl.where(above, low, tl.minimum(value, high))
        high = tl.where(above, value, high)
    tl.store(out + row, high)


def kseq_gamma(
    p: Float[Tensor, "R V"],
    q: Float[Tensor, "R V"],
    k: int | Shaped[Tensor, " R"],
    weight: Float[Tensor, " R"] | None = None,
    *,
    passes: int = PASSES,
) -> Float[Tensor, " R"]:
    """The upper end of the bracket around K-SEQ's division factor after `passes`; see functional.coupling.kseq_gamma.

    There is one program for each row: it reads the row once a pass, in blocks, and keeps the bracket in registers.
    """
    rows, vocab = p.shape
    draws = torch.as_tensor(k, dtype=torch.float64, device=p.device).expand(rows).contiguous()
    whole = torch.ones_like(draws) if weight is None else weight.double().contiguous()
    high = torch.empty_like(draws)
    _gamma[(rows,)](
        p, q, draws, whole, high, vocab, *p.stride(), *q.stride(),
        MOST=_most(q), PASSES=passes, BLOCK=block_of(vocab),
    )  # fmt: skip
    return high
