"""Kernels of token and block verification: the surplus of each place, and the weights of the round's last token.

They make one pass over the vocabulary, without a temporary tensor of the size of p: places are reduced in place, and
one row for each chain is written.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

import triton
from draftproof.triton.blocks import block_of, partials


@triton.jit
@no_type_check
def _surplus(
    p, q, scale, sums, vocab, places, p_row, p_place, p_id, q_row, q_place, q_id, BLOCK: tl.constexpr
):  # fmt: skip
    at, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, place = at // places, at % places
    ids = block * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(p + row * p_row + place * p_place + ids * p_id, mask=ids < vocab, other=0)
    b = tl.load(q + row * q_row + place * q_place + ids * q_id, mask=ids < vocab, other=0)
    left = a * tl.load(scale + at).to(a.dtype) - b
    left = tl.where(left < 0, 0, left)  # not maximum, which would hide NaN
    tl.store(sums + at * tl.num_programs(1) + block, tl.sum(left.to(tl.float64)))


def surplus_mass(
    p: Float[Tensor, "B m V"], q: Float[Tensor, "B m V"], scale: Float[Tensor, "B m"]
) -> Float[Tensor, "B m"]:
    """sum_x max(scale p(x) - q(x), 0) of each row, summed in float64; see functional.chain.surplus_mass."""
    rows, places, vocab = p.shape
    sums = partials(rows * places, vocab, p.device)
    _surplus[sums.shape](p, q, scale.contiguous(), sums, vocab, places, *p.stride(), *q.stride(), BLOCK=block_of(vocab))
    return sums.sum(-1).reshape(scale.shape).to(scale.dtype)


@triton.jit
@no_type_check
def _residual(
    p, q, tokens, accepted, lengths, scale, out, sums, vocab, places,
    p_row, p_place, p_id, q_row, q_place, q_id, token_row, token_place,
    POINT_MASSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    kept = tl.load(accepted + row)
    place = tl.minimum(kept, places - 1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    a = tl.load(p + row * p_row + kept * p_place + ids * p_id, mask=inside, other=0)
    if POINT_MASSES:
        b = (ids == tl.load(tokens + row * token_row + place * token_place)).to(a.dtype)
    else:
        b = tl.load(q + row * q_row + place * q_place + ids * q_id, mask=inside, other=0)
    left = a * tl.load(scale + row).to(a.dtype) - b.to(a.dtype)
    left = tl.where(left < 0, 0, left)
    left = tl.where(kept < tl.load(lengths + row), left, a)
    tl.store(out + row * vocab + ids, left, mask=inside)
    tl.store(sums + row * tl.num_programs(1) + block, tl.sum(left.to(tl.float64)))


@triton.jit
@no_type_check
def _fall_back(p, accepted, mass, out, vocab, p_row, p_place, p_id, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    empty = ids < tl.where(tl.load(mass + row) == 0, vocab, 0)  # other rows are neither read nor written
    a = tl.load(p + row * p_row + tl.load(accepted + row) * p_place + ids * p_id, mask=empty, other=0)
    tl.store(out + row * vocab + ids, a, mask=empty)


def bonus_weights(
    p: Float[Tensor, "B m V"],
    q: Float[Tensor, "B n V"] | None,
    tokens: Int[Tensor, "B n"],
    accepted: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    scale: Float[Tensor, " B"],
) -> Float[Tensor, "B V"]:
    """max(scale p - q, 0) at the first place not accepted, p after a full chain; see functional.chain.bonus_weights."""
    rows, _, vocab = p.shape
    accepted = accepted.contiguous()
    sums = partials(rows, vocab, p.device)
    out = torch.empty(rows, vocab, dtype=p.dtype, device=p.device)
    grid, block = sums.shape, block_of(vocab)
    if tokens.shape[1] == 0:  # nothing was drafted: every row falls back
        mass = sums.new_zeros(rows)
    else:
        _residual[grid](
            p, p if q is None else q, tokens, accepted, lengths.contiguous(), scale.contiguous(), out, sums,
            vocab, tokens.shape[1], *p.stride(), *(p if q is None else q).stride(), *tokens.stride(),
            POINT_MASSES=q is None, BLOCK=block,
        )  # fmt: skip
        mass = sums.sum(-1)
    _fall_back[grid](p, accepted, mass, out, vocab, *p.stride(), BLOCK=block)
    return out
