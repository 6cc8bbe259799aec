"""Weights in the order in which C reads them, plain or quantized, and the check that C can read a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from jaxtyping import Float, Float32, Int, UInt8
from torch import Tensor

from draftproof.native import numa
from draftproof.native.huge_pages import empty_weight

LANES = 16  # neighbouring outputs
BITS, GROUPS = (4, 8), (16, 32, 64, 128)  # of quantized weights: bits, and inputs that share a scale
STORED_BITS = (2, *BITS)  # 2 bits are enough for an output layer whose largest outputs are computed again
UNITS = {torch.float32: 1, torch.bfloat16: 2}  # elements in four bytes, by type of rows
AS_THEY_ARE = 1  # in place of bits: a weight as torch keeps it
CPU = torch.device("cpu")


class Immutable:
    """What nothing changes, so that a deep copy is the object itself: C may have its address."""

    def __deepcopy__(self, memo: object) -> Immutable:
        return self


def require(
    name: str, found: Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None, *, packed: bool = True
) -> None:
    """Check that C can read a tensor; None stands for any shape.

    Raises:
        ValueError: with the argument's name, what it is and what it must be.
    """
    if found.device == CPU and found.dtype == dtype and (shape is None or tuple(found.shape) == tuple(shape)):
        if not packed or found.is_contiguous():
            return
        raise ValueError(f"expected {name} to be contiguous, got strides {found.stride()}")
    expected = f"{dtype} on cpu" + ("" if shape is None else f" of shape {tuple(shape)}")
    got = f"{found.dtype} on {found.device} of shape {tuple(found.shape)}"
    raise ValueError(f"expected {name} to be {expected}, got {got}")


def require_quantizable(bits: int, group: int) -> None:
    """Check that C has products of such a quantized weight."""
    if bits not in STORED_BITS or group not in GROUPS:
        raise ValueError(f"expected bits of {STORED_BITS} in groups of {GROUPS}, got {bits} bits in groups of {group}")


def _has_rest(weight: Tensor) -> bool:
    return bool(weight.shape[0] % LANES or weight.shape[1] % UNITS[weight.dtype])


@dataclass(frozen=True, eq=False)
class Interleaved:
    """A weight in the order in which C reads it."""

    # [outputs / 16, inputs / unit, 16, unit]; outputs and inputs are padded with zeros
    blocks: Float[Tensor, "blocks units lanes unit"]
    outs: int
    ins: int

    def __post_init__(self) -> None:
        numa.place(self.blocks)

    @classmethod
    def of(cls, *parts: Float[Tensor, "_ in"]) -> Interleaved:
        """Interleave plain weights of one of the types, whose outputs follow one another."""
        ins, dtype, outs = parts[0].shape[1], parts[0].dtype, sum(map(len, parts))
        if any(len(each) % LANES for each in parts[:-1]):
            parts = (torch.cat(parts),)
        blocks, start = empty_weight(cls.shape(outs, ins, UNITS[dtype]), dtype), 0
        words = blocks.view(torch.int32).squeeze(-1)  # units move whole, and nothing else is copied
        for part in parts:
            padded = F.pad(part, (0, -ins % UNITS[dtype], 0, -len(part) % LANES)) if _has_rest(part) else part
            units = padded.detach().contiguous().view(torch.int32).view(-1, LANES, words.shape[1]).transpose(1, 2)
            words[start : start + len(units)].copy_(units)
            start += len(units)
        return cls(blocks, outs, ins)

    @staticmethod
    def shape(outs: int, ins: int, unit: int) -> tuple[int, int, int, int]:
        """The shape of `blocks`; `unit` is that of the type."""
        return -(-outs // LANES), -(-ins // unit), LANES, unit

    @property
    def arguments(self) -> tuple[int, int, int]:
        """Address, bits of a quantized weight (0: it is not), and inputs of a group, as `LinearArguments` has them."""
        return self.blocks.data_ptr(), 0, 0

    def rows(self, chosen: Int[Tensor, "*some"]) -> Float[Tensor, "*some in"]:
        """Plain copies of some rows."""
        return self.blocks[chosen // LANES, :, chosen % LANES].flatten(-2)[..., : self.ins]

    def to_dense(self) -> Float[Tensor, "out in"]:
        """A plain copy."""
        units = self.blocks.transpose(1, 2)
        return units.reshape(-1, units.shape[-2:].numel())[: self.outs, : self.ins]


@dataclass(frozen=True, eq=False)
class Plain:
    """A weight as torch keeps it, read where it is."""

    weight: Float[Tensor, "out in"]  # contiguous

    def __post_init__(self) -> None:
        require("weight", self.weight, self.weight.dtype)
        numa.place(self.weight)

    @property
    def outs(self) -> int:
        """Number of outputs."""
        return self.weight.shape[0]

    @property
    def ins(self) -> int:
        """Number of inputs."""
        return self.weight.shape[1]

    @property
    def arguments(self) -> tuple[int, int, int]:
        """Address, bits and inputs of a group, as `LinearArguments` has them."""
        return self.weight.data_ptr(), AS_THEY_ARE, 0


@dataclass(frozen=True, eq=False)
class MeasuredInputs:
    """What is known of the inputs of a weight that is to be quantized, from rows that a model has read."""

    counts: Float32[Tensor, " ins"]  # how much the error of each input's weights counts, positive
    mean: Float32[Tensor, " ins"]  # of each input


@dataclass(frozen=True, eq=False)
class Quantized:
    """A weight of 2, 4 or 8 bits, in the order in which C reads it (quantized.h).

    A weight is offset + scale * number. Each group of neighbouring inputs of an output has its own scale and offset:
    below 8 bits a byte each, in steps of the output's own, so that 4 bits in groups of 32 take 4.5.
    """

    # [outputs / 16, bytes]; outputs and inputs are padded. With one dimension more, several weights
    blocks: UInt8[Tensor, "*matrices blocks bytes"]
    outs: int
    ins: int
    bits: int
    group: int
    # mean of what the outputs lack, where the mean of the inputs was known
    lost: Float32[Tensor, " outs"] | None = None

    def __post_init__(self) -> None:
        (numa.place if self.blocks.dim() == 2 else numa.interleave)(self.blocks)

    @property
    def arguments(self) -> tuple[int, int, int]:
        """Address, bits and inputs of a group, as `LinearArguments` has them."""
        return self.blocks.data_ptr(), self.bits, self.group

    @staticmethod
    def shape(outs: int, ins: int, bits: int, group: int) -> tuple[int, int]:
        """The shape of `blocks`."""
        pieces = -(-ins // (group * _together(bits)))
        return -(-outs // LANES), _head(bits) + pieces * (4 * LANES + _together(bits) * 2 * bits * group)

    def to_dense(self) -> Float32[Tensor, "out in"]:
        """The weights that the numbers stand for."""
        head, together = _head(self.bits), _together(self.bits)
        pieces = self.blocks[:, head:].reshape(len(self.blocks), -1, 4 * LANES + together * 2 * self.bits * self.group)
        ranges = pieces[..., : 4 * LANES].contiguous()
        found = pieces[..., 4 * LANES :].reshape(*pieces.shape[:2], together, -1, LANES, 4)
        if self.bits < 8:
            steps = self.blocks[:, :head].contiguous().view(torch.float32).view(-1, 1, 2, LANES)
            each = ranges.view(*ranges.shape[:2], 2, 2, LANES)  # [blocks, pieces, groups, scale or offset, lanes]
            parts = torch.stack((each[..., 0, :].float(), each[..., 1, :].view(torch.int8).float()), -2)
            ranges = (parts * steps.unsqueeze(2)).flatten(1, 2)
            of_bytes = [(found >> start) % 2**self.bits for start in range(0, 8, self.bits)]
            found = torch.stack(of_bytes, -2).flatten(-2)
        else:
            ranges = ranges.view(torch.bfloat16).float().view(*ranges.shape[:2], 2, LANES)
        scales, offsets = ranges[..., 0, :].unsqueeze(-1), ranges[..., 1, :].unsqueeze(-1)
        numbers = found.flatten(1, 2).transpose(2, 3).flatten(3).float()  # [blocks, groups, lanes, inputs]
        dense: Tensor = (offsets + scales * numbers).transpose(1, 2).flatten(2).flatten(0, 1)
        return dense[: self.outs, : self.ins]


def _head(bits: int) -> int:
    """Bytes of a block's steps, before its pieces."""
    return 8 * LANES if bits < 8 else 0


def _together(bits: int) -> int:
    """Groups of a piece."""
    return 2 if bits < 8 else 1
