"""Weights rounded to 4 or 8 bits in the forms of stored matrices, in groups of 32 inputs."""

from __future__ import annotations

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from draftproof.native.ggml import Q8_0, WORDS, StoredMatrix

GROUP = 32  # inputs that share a scale
_SHARES = (1.0, 0.92, 0.84)  # of a group's range, that are tried with 4 bits: what lies beyond is cut off
_TOGETHER = 1 << 22  # numbers that are rounded together, which bounds the memory beside


def rounded_matrix(weight: Float[Tensor, "out in"], bits: int) -> StoredMatrix:
    """A weight in the nearest numbers of 8 bits, or of 4 with a scale and a zero for each group by least squared error.

    Raises:
        ValueError: other bits, or a number of inputs that groups do not divide.
    """
    outs, ins = weight.shape
    if bits not in (4, 8) or ins % GROUP:
        raise ValueError(f"expected 4 or 8 bits and inputs in groups of {GROUP}, got {bits} bits and {ins} inputs")
    rows = max(1, _TOGETHER // ins)
    blocks = _of_eight if bits == 8 else _of_four
    content = torch.cat([blocks(part.float().view(-1, GROUP)).flatten() for part in torch.split(weight, rows)])
    return StoredMatrix(content, outs, ins, Q8_0 if bits == 8 else WORDS[GROUP], weight.dtype)


def _of_eight(groups: Float[Tensor, "groups 32"]) -> UInt8[Tensor, "groups bytes"]:
    scales = _held(groups.abs().amax(-1, keepdim=True) / 127)
    numbers = (groups / scales).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat((scales.half().view(torch.uint8), numbers.view(torch.uint8)), -1)


def _of_four(groups: Float[Tensor, "groups 32"]) -> UInt8[Tensor, "groups bytes"]:
    low, high = groups.amin(-1, keepdim=True).clamp_(max=0), groups.amax(-1, keepdim=True).clamp_(min=0)
    best = torch.full_like(low, torch.inf)
    chosen = [torch.empty_like(low), torch.empty_like(low), torch.empty_like(groups)]
    for share in _SHARES:
        scales = _held((high - low) * (share / 15))
        zeros = (-low * share / scales).round_().clamp_(0, 15)
        numbers = (groups / scales + zeros).round_().clamp_(0, 15)
        error = ((numbers - zeros) * scales - groups).square_().sum(-1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        chosen = [torch.where(better, new, old) for new, old in zip((scales, zeros, numbers), chosen, strict=True)]
    scales, zeros, numbers = chosen
    pairs = numbers.to(torch.uint8).view(len(groups), -1, 2)
    return torch.cat((scales.half().view(torch.uint8), zeros.to(torch.uint8), pairs[..., 0] | pairs[..., 1] << 4), -1)


def _held(scales: Tensor) -> Tensor:
    """Scales that float16 holds, and that something can be divided by."""
    return scales.half().float().clamp_(min=2.0**-24)
