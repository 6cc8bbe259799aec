"""The kernel of an inverse-CDF draw from given uniforms."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.kernels.blocks import block_of


@triton.jit
@no_type_check
def _inverse(weights, uniforms, out, vocab, row_stride, id_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([], tl.float64)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK).to(tl.int64)
        w = tl.load(weights + row * row_stride + ids * id_stride, mask=ids < vocab, other=0).to(tl.float64)
        total += tl.sum(w)
    goal = tl.load(uniforms + row) * total
    before = tl.zeros([], tl.float64)
    found, last = tl.full([], vocab, tl.int64), tl.full([], -1, tl.int64)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK).to(tl.int64)
        open_end = (ids < vocab) & (found == vocab)  # blocks behind the found index are not read
        w = tl.load(weights + row * row_stride + ids * id_stride, mask=open_end, other=0).to(tl.float64)
        hit = (w > 0) & (before + tl.cumsum(w, 0) > goal)
        found = tl.minimum(found, tl.min(tl.where(hit, ids, vocab)))
        last = tl.maximum(last, tl.max(tl.where(w > 0, ids, -1)))
        before += tl.sum(w)
    # the goal may round up to the total: then the last index with weight is taken, or without any weight the last index
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
    _inverse[(out.shape[0],)](rows, uniforms, out, vocab, *rows.stride(), BLOCK=block_of(vocab))
    return out.reshape(u.shape)
