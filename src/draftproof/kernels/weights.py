"""Products with weights of 4 and 8 bits on a CUDA device: the weights that a draft reads.

On a CPU the products are those of `native`. Here the numbers are made by torch and multiplied by one Triton kernel: it
reads the numbers in order and multiplies them as they arrive. Sums are the same in every run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import no_type_check

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
import triton
import triton.language as tl
from jaxtyping import BFloat16, Float, Float32, UInt8
from torch import Tensor

from draftproof.kernels.operations import BITS, GROUPS, MeasuredInputs

_ROWS = 16  # fewest rows of a product of tiles
_ONE, _SEVERAL = (8, 256, 4), (16, 256, 4)  # outputs, most bytes of an output, warps: of one row, of several
_RANGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # shares of a group's range of which the best is taken
_AT_ONCE = 1 << 24  # weights that are quantized at once, because the search takes several times their memory
_NEAR = 0.02  # of the largest output: rounding to bfloat16 is below, a wrong number is far above
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class DeviceWeight:
    """A weight of 4 or 8 bits: offset + scale * number, where a group of neighbouring inputs has its own two.

    Attributes:
        numbers: [outputs, bytes]; with 4 bits, byte k of an output has input k in its lower half and input k + bytes in
            its upper one. Inputs are padded to whole groups in both halves.
        scales, offsets: [outputs, groups].
        ins: number of inputs.
        bits: of a number.
        group: inputs of a group.
        lost: mean of what the outputs lack, where the mean of the inputs was known.
    """

    numbers: UInt8[Tensor, "outs bytes"]
    scales: BFloat16[Tensor, "outs groups"]
    offsets: BFloat16[Tensor, "outs groups"]
    ins: int
    bits: int
    group: int
    lost: Float32[Tensor, " outs"] | None = None

    def to_dense(self) -> Float[Tensor, "out in"]:
        """The weights that the numbers stand for, in float32."""
        found = self.numbers
        if self.bits == 4:
            found = torch.cat((found & 15, found >> 4), -1)
        whole = found.float().view(*self.scales.shape, self.group)
        return (self.offsets.float().unsqueeze(-1) + self.scales.float().unsqueeze(-1) * whole).flatten(1)[
            :, : self.ins
        ]


@torch.no_grad()
def quantize(
    weight: Float[Tensor, "out in"], bits: int, group: int, inputs: MeasuredInputs | None = None
) -> DeviceWeight:
    """Quantize a weight: in each group the best of several ranges, by squared error.

    Args:
        weight: of DTYPES.
        bits: of BITS.
        group: of GROUPS.
        inputs: what is known of them; by default the errors of all weights count alike.

    Raises:
        ValueError: another type, or bits or a group that are not supported.
    """
    ins = weight.shape[1]
    if bits not in BITS or group not in GROUPS or weight.dtype not in DTYPES:
        raise ValueError(
            f"a {weight.dtype} weight to {bits} bits in groups of {group}: legal are {DTYPES}, {BITS} and {GROUPS}"
        )
    padding = (0, -ins % (group * 8 // bits))
    pieces = torch.split(F.pad(weight, padding), max(1, _AT_ONCE // max(ins, 1)))
    counts, mean = (
        (weight.new_ones(ins, dtype=torch.float32), weight.new_zeros(ins, dtype=torch.float32))
        if inputs is None
        else (inputs.counts.to(weight.device), inputs.mean.to(weight.device))
    )
    made = [_quantized(rows, F.pad(counts, padding), F.pad(mean, padding), bits, group) for rows in pieces]
    numbers, scales, offsets, lost = (torch.cat(each).contiguous() for each in zip(*made, strict=True))
    return DeviceWeight(numbers, scales, offsets, ins, bits, group, None if inputs is None else lost)


def _quantized(
    weight: Float[Tensor, "out in"], counts: Float[Tensor, " in"], mean: Float[Tensor, " in"], bits: int, group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers, scales and offsets of some outputs, and the mean of what they lack."""
    most = 2**bits - 1
    groups = weight.float().reshape(len(weight), -1, group)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    middle, half = (low + high) / 2, (high - low) / 2
    best: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    for share in _RANGES:
        offset = (middle - share * half).bfloat16().float()
        scale = (2 * share * half / most).bfloat16().float()
        numbers = ((groups - offset) / scale.where(scale > 0, torch.ones_like(scale))).round_().clamp_(0, most)
        error = (offset + scale * numbers - groups).square_().mul_(counts.view(-1, group)).sum(-1, keepdim=True)
        if best is None:
            best = error, numbers, scale, offset
        else:
            better = error < best[0]
            best = tuple(new.where(better, old) for new, old in zip((error, numbers, scale, offset), best, strict=True))
    assert best is not None, "there are ranges"
    _, numbers, scale, offset = best
    lost = (groups - (offset + scale * numbers)).flatten(1) @ mean
    flat = numbers.flatten(1).to(torch.uint8)
    if bits == 4:
        first, second = flat.chunk(2, -1)
        flat = first | (second << 4)
    return flat, scale.squeeze(-1).bfloat16(), offset.squeeze(-1).bfloat16(), lost


@triton.jit
@no_type_check
def _add(total, x, numbers, scales, offsets, rows, outs, ins, wide, start, m, n,
         GROUP: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr):  # fmt: skip
    """Add the product of some inputs; `numbers` are theirs, [OUTS, INS]."""
    groups = start // GROUP + tl.arange(0, INS // GROUP)
    at = n[:, None] * (wide // GROUP) + groups[None, :]
    scale = tl.load(scales + at, mask=n[:, None] < outs, other=0).to(tl.float32)
    offset = tl.load(offsets + at, mask=n[:, None] < outs, other=0).to(tl.float32)
    whole = tl.reshape(numbers.to(tl.float32), [OUTS, INS // GROUP, GROUP])
    weight = tl.reshape(offset[:, :, None] + scale[:, :, None] * whole, [OUTS, INS])
    inputs = start + tl.arange(0, INS)
    given = tl.load(x + m[:, None] * ins + inputs[None, :], mask=(m[:, None] < rows) & (inputs[None, :] < ins), other=0)
    return tl.dot(given, tl.trans(weight.to(given.dtype)), total, input_precision="ieee")


@triton.jit
@no_type_check
def _multiply(
    x, numbers, scales, offsets, out, rows, outs, ins, wide,
    BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * OUTS + tl.arange(0, OUTS)
    m = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    held = wide * BITS // 8
    total = tl.zeros([ROWS, OUTS], tl.float32)
    for start in range(0, held, INS):
        places = start + tl.arange(0, INS)
        found = tl.load(numbers + n[:, None] * held + places[None, :], mask=n[:, None] < outs, other=0)
        if BITS == 4:
            total = _add(total, x, found & 15, scales, offsets, rows, outs, ins, wide, start, m, n, GROUP, OUTS, INS)
            total = _add(
                total, x, found >> 4, scales, offsets, rows, outs, ins, wide, start + held, m, n, GROUP, OUTS, INS
            )
        else:
            total = _add(total, x, found, scales, offsets, rows, outs, ins, wide, start, m, n, GROUP, OUTS, INS)
    places = m[:, None] * outs + n[None, :]
    tl.store(out + places, total.to(out.dtype.element_ty), mask=(m[:, None] < rows) & (n[None, :] < outs))


@triton.jit
@no_type_check
def _multiply_one(
    x, numbers, scales, offsets, out, outs, ins, wide,
    BITS: tl.constexpr, GROUP: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr,
):  # fmt: skip
    """`_multiply` for one row: products are kept apart until the end, so nothing waits between two reads."""
    n = tl.program_id(0).to(tl.int64) * OUTS + tl.arange(0, OUTS)
    held = wide * BITS // 8
    total = tl.zeros([OUTS, INS // GROUP, GROUP], tl.float32)
    for start in range(0, held, INS):
        places = start + tl.arange(0, INS)
        found = tl.load(numbers + n[:, None] * held + places[None, :], mask=n[:, None] < outs, other=0)
        for half in tl.static_range(8 // BITS):
            part = found if BITS == 8 else (found >> (4 * half)) & 15
            groups = (start + half * held) // GROUP + tl.arange(0, INS // GROUP)
            at = n[:, None] * (wide // GROUP) + groups[None, :]
            scale = tl.load(scales + at, mask=n[:, None] < outs, other=0).to(tl.float32)
            offset = tl.load(offsets + at, mask=n[:, None] < outs, other=0).to(tl.float32)
            inputs = half * held + places
            given = tl.load(x + inputs, mask=inputs < ins, other=0).to(tl.float32)
            whole = tl.reshape(part.to(tl.float32), [OUTS, INS // GROUP, GROUP])
            total += (offset[:, :, None] + scale[:, :, None] * whole) * tl.reshape(given, [1, INS // GROUP, GROUP])
    found = tl.sum(tl.sum(total, 2), 1)
    tl.store(out + n, found.to(out.dtype.element_ty), mask=n < outs)


def tile(weight: DeviceWeight, rows: int) -> dict[str, int]:
    """Outputs and bytes of an output that one program reads at once, and its warps, for a number of rows."""
    held, (outs, most, warps) = weight.numbers.shape[1], _ONE if rows == 1 else _SEVERAL
    fits = (most >> step for step in range(most.bit_length()))
    ins = next(size for size in fits if held % size == 0 and size % weight.group == 0)
    return {"OUTS": outs, "INS": ins, "num_warps": warps}


def product(
    x: Float[Tensor, "*rows in"], weight: DeviceWeight, bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "*rows out"]:
    """x W^T + b, summed in float32 and rounded once.

    Args:
        x: rows of inputs, of DTYPES.
        weight: on the same device.
        bias: if there is one.
    """
    outs, ins, wide = len(weight.numbers), weight.ins, weight.numbers.shape[1] * 8 // weight.bits
    given = x.reshape(-1, ins).contiguous()
    made = given.new_empty((len(given), outs))
    rows = len(given)
    sizes = {"BITS": weight.bits, "GROUP": weight.group} | tile(weight, rows)
    tensors = given, weight.numbers, weight.scales, weight.offsets, made
    programs = triton.cdiv(outs, sizes["OUTS"])
    if rows == 1:
        _multiply_one[programs,](*tensors, outs, ins, wide, **sizes)
    elif rows:
        _multiply[programs, triton.cdiv(rows, _ROWS)](*tensors, rows, outs, ins, wide, ROWS=_ROWS, **sizes)
    if bias is not None:
        made += bias
    return made.view(*x.shape[:-1], outs)


@functools.cache
def why_not(dtype: torch.dtype, device: torch.device, bits: int, group: int) -> str | None:
    """Why products of a type do not work on a device; None where they do: tried once, beside torch's.

    Args:
        dtype: of rows.
        device: of rows and weights.
        bits: of BITS.
        group: of GROUPS.
    """
    if dtype not in DTYPES:
        return f"its weights are {dtype}"
    maker = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 8 * group, generator=maker).to(device, dtype)
    x = torch.randn(3, 8 * group, generator=maker).to(device, dtype)
    try:
        made = quantize(weight, bits, group)
        found = torch.cat((product(x, made), product(x[:1], made))).float()
        expected = torch.cat((x, x[:1])).float() @ made.to_dense().T
    except Exception as cause:  # noqa: BLE001 - whatever a compiler or a driver may raise
        return f"the kernel of its products fails ({' '.join(str(cause).split())[:200]})"
    wrong = float((found - expected).abs().max()) > _NEAR * float(expected.abs().max())
    return "the kernel of its products is wrong on this device" if wrong else None
