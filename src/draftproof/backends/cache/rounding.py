"""Keys and values of 8 bits: how the numbers of a head's position are rounded, and what they stand for.

Each position of each head is rounded alone, to whole numbers from -127 to 127 times a scale of its own. So what is
stored does not depend on other positions, heads or rows. A key is multiplied by a Hadamard matrix before: a few of its
numbers are far larger than the others, and the scale follows the largest one (QuaRot, arXiv 2404.00456). `native` does
the same (c/cache_bytes.h), and multiplies queries too instead of turning keys back.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32, Int8
from torch import Tensor

_LEAST = 1e-30  # numbers that are all smaller are stored as zeros


def hadamard(x: Float[Tensor, "*some dim"]) -> Float[Tensor, "*some dim"]:
    """x times the matrix of ones and minus ones, in blocks of the largest power of two that divides `dim`.

    Its square is the size of these blocks (`hadamard_size`).
    """
    shape, half = x.shape, 1
    while half < hadamard_size(shape[-1]):
        one, other = x.reshape(*shape[:-1], -1, 2, half).unbind(-2)
        x = torch.stack((one + other, one - other), -2).view(shape)
        half *= 2
    return x


def hadamard_size(dim: int) -> int:
    """Size of the blocks of `hadamard`."""
    return dim & -dim


def rounded(x: Float[Tensor, "*some dim"]) -> tuple[Int8[Tensor, "*some dim"], Float32[Tensor, "*some 1"]]:
    """Numbers of 8 bits, and the scale of each head's position; it is NaN where a number is not finite."""
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True) + (x * 0.0).sum(-1, keepdim=True)
    scales = torch.where(largest < _LEAST, 0.0, largest / 127)
    numbers = (x * torch.where(scales > 0, 1 / scales, 0.0)).round().nan_to_num(0.0)
    return numbers.to(torch.int8), scales


def rounded_keys(keys: Float[Tensor, "*some dim"]) -> tuple[Int8[Tensor, "*some dim"], Float32[Tensor, "*some 1"]]:
    """The same of keys, multiplied by the matrix."""
    return rounded(hadamard(keys.float()))


def restored(
    numbers: Int8[Tensor, "*some dim"], scales: Float32[Tensor, "*some 1"], dtype: torch.dtype
) -> Float[Tensor, "*some dim"]:
    """What the numbers of values stand for."""
    return (numbers * scales).to(dtype)


def restored_keys(
    numbers: Int8[Tensor, "*some dim"], scales: Float32[Tensor, "*some 1"], dtype: torch.dtype
) -> Float[Tensor, "*some dim"]:
    """What the numbers of keys stand for."""
    return (hadamard(numbers * scales) / hadamard_size(numbers.shape[-1])).to(dtype)
