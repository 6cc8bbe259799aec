"""Kernels of what stands between two products of a layer, each in place of several small launches.

A launch takes longer than the work of one row, and the layers of a model are hundreds of them. Every rounding of
torch's operations is made here, too.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

import triton


@triton.jit
@no_type_check
def _norm(x, weight, out, dim, eps, WHOLE: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, SIZE)
    found = tl.load(x + row * dim + places, mask=places < dim, other=0).to(tl.float32)
    length = tl.rsqrt(tl.sum(found * found) / dim + eps)
    scale = tl.load(weight + places, mask=places < dim, other=0).to(tl.float32)
    made = found * length
    if not WHOLE:  # rounded before it is scaled
        made = made.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * dim + places, (made * scale).to(out.dtype.element_ty), mask=places < dim)


def scaled_norm(
    x: Float[Tensor, "*rows dim"], weight: Float[Tensor, " dim"], eps: float, whole: bool
) -> Float[Tensor, "*rows dim"]:
    """The RMS norm of `backends/lean/layers.py`, in one kernel."""
    given = x.contiguous()
    made, dim = torch.empty_like(given), x.shape[-1]
    size = triton.next_power_of_2(dim)
    _norm[(given.numel() // dim,)](
        given, weight, made, dim, eps, WHOLE=whole, SIZE=size, num_warps=min(max(size // 512, 1), 8)
    )
    return made


@triton.jit
@no_type_check
def _gate(x, out, dim, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    gate = tl.load(x + row * 2 * dim + places, mask=places < dim, other=0).to(tl.float32)
    up = tl.load(x + row * 2 * dim + dim + places, mask=places < dim, other=0).to(tl.float32)
    gate = (gate / (1 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * dim + places, (gate * up).to(out.dtype.element_ty), mask=places < dim)


def gated_silu(x: Float[Tensor, "*rows both"]) -> Float[Tensor, "*rows dim"]:
    """silu(gate) * up of `backends/lean/layers.py`, in one kernel."""
    given, dim = x.contiguous(), x.shape[-1] // 2
    made = given.new_empty((*x.shape[:-1], dim))
    _gate[given.numel() // (2 * dim), triton.cdiv(dim, 512)](given, made, dim, SIZE=512, num_warps=4)
    return made


@triton.jit
@no_type_check
def _turn(
    fused, cos, sin, keys, values, slots, places, out, queries, key_heads, dim, angle_stride,
    slot_stride, head_stride, SIZE: tl.constexpr,
):  # fmt: skip
    """One head of one token: a query is turned, a key turned and written, a value written."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    each = tl.arange(0, SIZE)
    here = each < dim
    turned = queries + key_heads
    start = fused + (token * (turned + key_heads) + head) * dim
    found = tl.load(start + each, mask=here, other=0)
    slot, place = tl.load(slots + token), tl.load(places + token)
    if head < turned:
        other = tl.load(start + (each + dim // 2) % dim, mask=here, other=0).to(tl.float32)
        straight = tl.load(cos + token * angle_stride + each, mask=here, other=0).to(tl.float32)
        across = tl.load(sin + token * angle_stride + each, mask=here, other=0).to(tl.float32)
        first = (found.to(tl.float32) * straight).to(out.dtype.element_ty).to(tl.float32)
        made = (first + other * across).to(out.dtype.element_ty)
        tl.store(out + (token * turned + head) * dim + each, made, mask=here)
        if head >= queries:
            tl.store(keys + slot * slot_stride + (head - queries) * head_stride + place * dim + each, made, mask=here)
    else:
        tl.store(values + slot * slot_stride + (head - turned) * head_stride + place * dim + each, found, mask=here)


def turned_and_written(
    fused: Float[Tensor, "tokens heads dim"],
    cos: Float[Tensor, "tokens 1 dim"],
    sin: Float[Tensor, "tokens 1 dim"],
    keys: Float[Tensor, "rows key_heads capacity dim"],
    values: Float[Tensor, "rows key_heads capacity dim"],
    slots: Int[Tensor, " tokens"],
    places: Int[Tensor, " tokens"],
) -> Float[Tensor, "tokens turned dim"]:
    """`turned_and_written` of `backends/lean/attention.py`, in one kernel."""
    tokens, heads, dim = fused.shape
    given, key_heads = fused.contiguous(), keys.shape[1]
    made = given.new_empty((tokens, heads - key_heads, dim))
    _turn[tokens, heads](
        given, cos, sin, keys, values, slots, places, made, heads - 2 * key_heads, key_heads, dim, cos.stride(0),
        keys.stride(0), keys.stride(1), SIZE=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip
    return made
