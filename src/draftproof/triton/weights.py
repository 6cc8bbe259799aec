"""Products with weights of 4 and 8 bits on a CUDA device: the weights that a draft reads.

On a CPU the products are those of `native`. Here the numbers are made by torch and multiplied by Triton kernels. A few
rows are multiplied while the numbers are read, without tensor cores: reading is the bound then, if a number takes few
instructions. So none is converted: its bits are put into the mantissa of a float between 1 and 2, and the sum of the
inputs corrects for the 1. More rows are multiplied by torch, with the weights that the numbers stand for. Sums are the
same in every run, and those of a few rows do not depend on how many there are.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import no_type_check

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
import triton.language as tl
from jaxtyping import Float, Float32, Int32, UInt8
from torch import Tensor

import triton
from draftproof.native.tensors import BITS, MeasuredInputs

MOST = 8  # rows that are multiplied while the numbers are read
_ROWS = (1, 2, 4)  # of one program
_PIECE = 32  # inputs whose numbers a thread reads at once
GROUPS = (32, 64, 128)  # inputs that share a scale: whole pieces
_WARPS = 4
_FEW, _MANY = 4096, 65536  # outputs up to which many threads share an output
_SIZE = 1024  # weights that a program expands
_RANGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # shares of a group's range of which the best is taken
_AT_ONCE = 1 << 24  # weights that are quantized at once, because the search takes several times their memory
_EXPANDED = 1 << 27  # weights that are expanded at once
_NEAR = 0.02  # of the largest output: rounding to bfloat16 is below, a wrong number is far above
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class DeviceWeight:
    """A weight of 4 or 8 bits: offset + scale * number, where a group of neighbouring inputs has its own two."""

    # [outputs, words] of 32 bits. A piece of 32 inputs has 4 words where numbers have 4 bits, and 8 where they have 8.
    # Word j of four neighbouring ones has the numbers of every fourth input, from input j on, the first in its lowest
    # bits: what several words have at the same place are neighbours
    words: Int32[Tensor, "outs words"]
    # [outputs, groups], each a scale in bfloat16 in the lower half, and an offset in the upper one
    scales: Int32[Tensor, "outs groups"]
    ins: int
    bits: int
    group: int
    # mean of what the outputs lack, where the mean of the inputs was known
    lost: Float32[Tensor, " outs"] | None = None

    def to_dense(self) -> Float[Tensor, "out in"]:
        """The weights that the numbers stand for, in float32."""
        shifts = torch.arange(0, 32, self.bits, device=self.words.device).view(-1, 1)
        words = self.words.view(len(self.words), -1, 1, 4)  # [outs, runs, places, 4]
        numbers = ((words >> shifts) & (2**self.bits - 1)).flatten(1).float()
        both = self.scales.view(torch.bfloat16).view(*self.scales.shape, 2).float()
        whole = F.pad(numbers, (0, -numbers.shape[1] % self.group)).view(*self.scales.shape, self.group)
        return (both[..., 1:] + both[..., :1] * whole).flatten(1)[:, : self.ins]


def _words(numbers: UInt8[Tensor, "outs wide"], bits: int) -> Int32[Tensor, "outs words"]:
    """Numbers as words of 32 bits, in the order of DeviceWeight."""
    runs = numbers.view(len(numbers), -1, 32 // bits, 4)
    made = torch.zeros_like(runs[:, :, 0], dtype=torch.int64)
    for place in range(32 // bits):
        made |= runs[:, :, place].long() << (bits * place)
    return made.flatten(1).to(torch.int32)  # the same 32 bits


@torch.no_grad()
def quantize(
    weight: Float[Tensor, "out in"], bits: int, group: int, inputs: MeasuredInputs | None = None
) -> DeviceWeight:
    """Quantize a weight: in each group the best of several ranges, by squared error.

    By default the errors of all weights count alike.

    Raises:
        ValueError: another type, or bits or a group that are not supported.
    """
    ins = weight.shape[1]
    if bits not in BITS or group not in GROUPS or weight.dtype not in DTYPES:
        raise ValueError(
            f"packed weight: expected a dtype of {DTYPES}, bits of {BITS} and groups of {GROUPS}, got "
            f"{weight.dtype}, {bits} and {group}"
        )
    padding = (0, -ins % max(group, _PIECE))
    pieces = torch.split(F.pad(weight, padding), max(1, _AT_ONCE // max(ins, 1)))
    counts, mean = (
        (weight.new_ones(ins, dtype=torch.float32), weight.new_zeros(ins, dtype=torch.float32))
        if inputs is None
        else (inputs.counts.to(weight.device), inputs.mean.to(weight.device))
    )
    made = [_quantized(rows, F.pad(counts, padding), F.pad(mean, padding), bits, group) for rows in pieces]
    words, scales, lost = (torch.cat(each).contiguous() for each in zip(*made, strict=True))
    return DeviceWeight(words, scales, ins, bits, group, None if inputs is None else lost)


def _quantized(
    weight: Float[Tensor, "out in"], counts: Float[Tensor, " in"], mean: Float[Tensor, " in"], bits: int, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Words and scales of some outputs, and the mean of what they lack."""
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
    both = torch.cat((scale, offset), -1).bfloat16().contiguous().view(torch.int32)
    return _words(numbers.flatten(1).to(torch.uint8), bits), both.squeeze(-1), lost


@triton.jit
@no_type_check
def _multiply(  # noqa: C901, PLR0912, PLR0915 - loops that the compiler unrolls
    x, words, scales, bias, out, rows, outs, ins, pieces, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BIASED: tl.constexpr,
    OUTS: tl.constexpr, SHARED: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Rows by some outputs. A thread has one piece of SHARED outputs at a time; nothing is exchanged until the end.

    All tiles have the shape [OUTS, PIECES, 4] of the words, also those of inputs: a smaller tile would be spread over
    the threads in another way, and exchanged.
    """
    n = tl.program_id(0).to(tl.int64) * (OUTS * SHARED) + tl.arange(0, OUTS)
    first = tl.program_id(1) * ROWS
    here = tl.arange(0, PIECES)
    word = tl.arange(0, 4)
    totals = ()
    for _ in tl.static_range(ROWS * SHARED):
        totals += (tl.zeros([OUTS, PIECES], tl.float32),)
    for start in range(0, pieces, PIECES):
        piece = start + here
        real = (n[:, None] < outs) & (piece[None, :] < pieces)
        for run in tl.static_range(BITS // 4):
            found = ()
            factors = ()
            for each in tl.static_range(SHARED):
                mine = n + each * OUTS
                real = (mine[:, None] < outs) & (piece[None, :] < pieces)
                at = (piece * BITS + 4 * run)[None, :, None] + word[None, None, :]
                at = mine[:, None, None] * (pieces * BITS) + at
                found += (tl.load(words + at, mask=real[:, :, None], other=0),)
                group = (piece * 32 // GROUP)[None, :]
                factors += (tl.load(scales + mine[:, None] * groups + group, mask=real, other=0),)
            sums = ()
            plain = ()
            for _ in tl.static_range(ROWS * SHARED):
                sums += (tl.zeros([OUTS, PIECES, 4], tl.float32),)
            for _ in tl.static_range(ROWS):
                plain += (tl.zeros([OUTS, PIECES, 4], tl.float32),)
            for place in tl.static_range(32 // BITS):
                numbers = ()
                for each in tl.static_range(SHARED):
                    # the number goes to the upper end of the mantissa
                    if BITS * place <= 23 - BITS:
                        bits = found[each] << (23 - BITS - BITS * place)
                    else:
                        bits = found[each] >> (BITS * place + BITS - 23)
                    bits = (bits & (((1 << BITS) - 1) << (23 - BITS))) | 0x3F800000
                    numbers += (bits.to(tl.float32, bitcast=True),)
                inputs = (piece * 32 + run * (128 // BITS) + place * 4)[None, :, None] + word[None, None, :]
                inputs = tl.broadcast_to(inputs, [OUTS, PIECES, 4])
                more = ()
                bare = ()
                for m in tl.static_range(ROWS):
                    there = (inputs < ins) & (first + m < rows)
                    given = tl.load(x + (first + m) * ins + inputs, mask=there, other=0).to(tl.float32)
                    bare += (plain[m] + given,)
                    for each in tl.static_range(SHARED):
                        more += (sums[m * SHARED + each] + numbers[each] * given,)
                sums = more
                plain = bare
            added = ()
            for m in tl.static_range(ROWS):
                whole = tl.sum(plain[m], 2)
                for each in tl.static_range(SHARED):
                    scale = (factors[each] << 16).to(tl.float32, bitcast=True) * (1 << BITS)
                    offset = (factors[each] & -65536).to(tl.float32, bitcast=True) - scale
                    now = scale * tl.sum(sums[m * SHARED + each], 2) + offset * whole
                    added += (totals[m * SHARED + each] + now,)
            totals = added
    for m in tl.static_range(ROWS):
        for each in tl.static_range(SHARED):
            mine = n + each * OUTS
            made = tl.sum(totals[m * SHARED + each], 1)
            if BIASED:
                made += tl.load(bias + mine, mask=mine < outs, other=0).to(tl.float32)
            there = (mine < outs) & (first + m < rows)
            tl.store(out + (first + m) * outs + mine, made.to(out.dtype.element_ty), mask=there)


@triton.jit
@no_type_check
def _expand(
    words, scales, out, ins, pieces, groups, BITS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """The weights that numbers stand for, in the order in which they are written."""
    n = tl.program_id(0).to(tl.int64)
    inputs = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    real = inputs < ins
    run: tl.constexpr = 128 // BITS  # inputs of four words
    at = inputs // run * 4 + inputs % 4
    found = tl.load(words + n * (pieces * BITS) + at, mask=real, other=0)
    number = ((found >> (inputs % run // 4 * BITS)) & ((1 << BITS) - 1)).to(tl.float32)
    both = tl.load(scales + n * groups + inputs // GROUP, mask=real, other=0)
    scale = (both << 16).to(tl.float32, bitcast=True)
    offset = (both & -65536).to(tl.float32, bitcast=True)
    tl.store(out + n * ins + inputs, (offset + scale * number).to(out.dtype.element_ty), mask=real)


def tile(outs: int, rows: int) -> dict[str, int]:
    """The constants of `_multiply`, by what was fastest on an H200; a row's sums depend on its outputs alone."""
    pieces = 32 if outs <= _FEW else 16 if outs <= _MANY else 8
    shared = 1 if outs <= _FEW else 2 if outs <= _MANY or rows > 1 else 4
    most = next((size for size in _ROWS if size >= rows), _ROWS[-1])
    return {"ROWS": most, "OUTS": 32 * _WARPS // pieces, "SHARED": shared, "PIECES": pieces, "num_warps": _WARPS}


def _sizes(weight: DeviceWeight) -> tuple[tuple[int, ...], dict[str, int]]:
    """The numbers that both kernels take, and their constants."""
    pieces = weight.words.shape[1] // weight.bits
    return (weight.ins, pieces, weight.scales.shape[1]), {"BITS": weight.bits, "GROUP": weight.group}


def expanded(weight: DeviceWeight, dtype: torch.dtype, outs: slice) -> Float[Tensor, "some in"]:
    """The weights that the numbers of some outputs stand for, rounded."""
    words, scales = weight.words[outs], weight.scales[outs]
    made = torch.empty((len(words), weight.ins), dtype=dtype, device=words.device)
    (ins, pieces, groups), constants = _sizes(weight)
    programs = len(words), triton.cdiv(ins, _SIZE)
    _expand[programs](words, scales, made, ins, pieces, groups, SIZE=_SIZE, **constants)
    return made


def product(
    x: Float[Tensor, "*rows in"], weight: DeviceWeight, bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "*rows out"]:
    """x W^T + b; of up to MOST rows summed in float32 and rounded once, of more with weights rounded to x's type."""
    outs = len(weight.words)
    given = x.reshape(-1, weight.ins).contiguous()
    rows = len(given)
    made = given.new_empty((rows, outs))
    if rows > MOST:
        step = max(1, _EXPANDED // weight.ins)
        for start in range(0, outs, step):
            part = slice(start, start + step)
            made[:, part] = F.linear(given, expanded(weight, x.dtype, part), None if bias is None else bias[part])
    elif rows:
        (ins, pieces, groups), constants = _sizes(weight)
        sizes = tile(outs, rows)
        programs = triton.cdiv(outs, sizes["OUTS"] * sizes["SHARED"]), triton.cdiv(rows, sizes["ROWS"])
        biased = bias is not None
        tensors = given, weight.words, weight.scales, bias if biased else made, made
        _multiply[programs](*tensors, rows, outs, ins, pieces, groups, BIASED=biased, **constants, **sizes)
    return made.view(*x.shape[:-1], outs)


@functools.cache
def why_not(dtype: torch.dtype, device: torch.device, bits: int, group: int) -> str | None:
    """Why products of a type do not work on a device; None where they do: tried once, beside torch's."""
    if dtype not in DTYPES:
        return f"its weights are {dtype}"
    if group not in GROUPS:
        return f"its groups have {group} inputs, not {', '.join(map(str, GROUPS))}"
    maker = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 8 * group, generator=maker).to(device, dtype)
    x = torch.randn(MOST + 1, 8 * group, generator=maker).to(device, dtype)
    try:
        made = quantize(weight, bits, group)
        found = torch.cat([product(x[:rows], made) for rows in (*_ROWS, MOST, MOST + 1)]).float()
        expected = torch.cat([x[:rows] for rows in (*_ROWS, MOST, MOST + 1)]).float() @ made.to_dense().T
    except Exception as cause:  # noqa: BLE001 - whatever a compiler or a driver may raise
        return f"the kernel of its products fails ({' '.join(str(cause).split())[:200]})"
    wrong = float((found - expected).abs().max()) > _NEAR * float(expected.abs().max())
    return "the kernel of its products is wrong on this device" if wrong else None
