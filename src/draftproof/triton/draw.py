"""The kernel of an inverse-CDF draw from given uniforms."""

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
def _sums(weights, sums, vocab, row_stride, id_stride, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(weights + row * row_stride + ids * id_stride, mask=ids < vocab, other=0).to(tl.float64)
    tl.store(sums + row * tl.num_programs(1) + block, tl.sum(w))


@triton.jit
@no_type_check
def _inverse(
    weights, uniforms, sums, out, vocab, blocks, row_stride, id_stride, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """The block in which the goal lies by the sums of blocks, and the index inside it."""
    row = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, BLOCKS)
    each = tl.load(sums + row * blocks + numbers, mask=numbers < blocks, other=0)
    goal = tl.load(uniforms + row) * tl.sum(each)
    reached = (each > 0) & (tl.cumsum(each, 0) > goal)
    block = tl.min(tl.where(reached, numbers, BLOCKS))
    # the goal may round up to the total: then the last index with weight is taken, or without any weight the last index
    end = tl.max(tl.where(each > 0, numbers, -1))
    block = tl.where(block < BLOCKS, block, tl.where(end < 0, blocks - 1, end))
    before = tl.sum(tl.where(numbers < block, each, 0))
    ids = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(weights + row * row_stride + ids * id_stride, mask=ids < vocab, other=0).to(tl.float64)
    hit = (w > 0) & (before + tl.cumsum(w, 0) > goal)
    found = tl.min(tl.where(hit, ids, vocab))
    last = tl.max(tl.where(w > 0, ids, -1))
    last = tl.where(last < 0, vocab - 1, last)
    tl.store(out + row, tl.where(found < vocab, found, last))


def inverse_cdf(weights: Float[Tensor, "*rows vocab"], u: Float[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
    """The first index whose cumulative weight exceeds u times the total, never one of zero weight; see rng.inverse_cdf.

    Sums are float64; a goal that is equal to a step up to rounding may give the other index than in torch.
    """
    vocab = weights.shape[-1]
    rows = weights.reshape(-1, vocab)
    out = torch.empty(rows.shape[0], dtype=torch.int64, device=weights.device)
    uniforms = u.double().reshape(-1).contiguous()
    sums, block = partials(len(rows), vocab, weights.device), block_of(vocab)
    _sums[sums.shape](rows, sums, vocab, *rows.stride(), BLOCK=block)
    blocks = sums.shape[1]
    most = triton.next_power_of_2(blocks)
    _inverse[out.shape](rows, uniforms, sums, out, vocab, blocks, *rows.stride(), BLOCK=block, BLOCKS=most)
    return out.reshape(u.shape)
