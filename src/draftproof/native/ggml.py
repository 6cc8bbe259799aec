"""Matrices of few bits in their own numbers: as a checkpoint stores them, and as C reads them (c/ggml.h).

A GGUF file keeps a row in blocks of 32 or 256 numbers with scales of their own, by one of ggml's types; GPTQ, AWQ and
others keep groups with a scale. Nothing is rounded again here: a product reads the same numbers in another order.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from draftproof.native import numa
from draftproof.native.structures import GGML_SEGMENTS, GGMLArguments
from draftproof.native.tensors import CPU, LANES, Immutable, require

BY_GROUP, BY_ROW, AS_FLOATS = INPUTS = ("a scale for each 32", "a scale for a row", "floats")
"""How a product reads its inputs: in 8 bits with one of the two kinds of scales, or as they are."""


@dataclass(frozen=True)
class GGMLType:
    """One of ggml's types of blocks."""

    name: str
    elements: int  # numbers of a block in a file
    size: int  # its bytes there
    piece: int  # inputs of a piece in C's order; others are padded
    piece_size: int  # bytes of the piece, for 16 outputs
    inputs: str = BY_GROUP  # one of INPUTS


TYPES = {
    2: GGMLType("Q4_0", 32, 18, 64, 576),
    3: GGMLType("Q4_1", 32, 20, 64, 640),
    6: GGMLType("Q5_0", 32, 22, 64, 704),
    7: GGMLType("Q5_1", 32, 24, 64, 768),
    8: GGMLType("Q8_0", 32, 34, 64, 1088),
    10: GGMLType("Q2_K", 256, 84, 256, 1600),
    11: GGMLType("Q3_K", 256, 110, 256, 2368),
    12: GGMLType("Q4_K", 256, 144, 256, 2368),
    13: GGMLType("Q5_K", 256, 176, 256, 2880),
    14: GGMLType("Q6_K", 256, 210, 256, 3392),
    20: GGMLType("IQ4_NL", 32, 18, 64, 576),
    23: GGMLType("IQ4_XS", 256, 136, 256, 2240),
    39: GGMLType("MXFP4", 32, 17, 64, 576),
}
"""By the number that files have for a type (gguf.GGMLQuantizationType)."""

Q8_0, MXFP4 = 8, 39
"""Types of rounded experts of 8 bits, and of gpt-oss's experts."""

SIXTEEN_BITS = {1: GGMLType("F16", 1, 2, 32, 1024, AS_FLOATS), 30: GGMLType("BF16", 1, 2, 32, 1024, AS_FLOATS)}
"""Floats of 16 bits, by the number that files have for them."""
_FLOATS = {1: torch.float16, 30: torch.bfloat16}

WORDS = {32: 1032, 64: 1064, 128: 1128}
"""Types of our own for GPTQ and AWQ, by the inputs of a group: 4 bits, a float16 scale, the number for 0."""

INT8, INT8_BY_ROW = 1208, 1209
"""Types of our own: signed numbers of 8 bits, a float32 scale for each 128; a row of the second's inputs has one."""

LEVELS = {"nf4": 1304, "fp4": 1305}
"""Types of bitsandbytes' checkpoints: places in a table of 16 floats, a float32 scale for each 64, inputs in floats."""

LAYOUTS = {
    **TYPES,
    **SIXTEEN_BITS,
    1032: GGMLType("4 bits in groups of 32", 32, 19, 32, 384),
    1064: GGMLType("4 bits in groups of 64", 64, 35, 64, 640),
    1128: GGMLType("4 bits in groups of 128", 128, 67, 128, 1216),
    INT8: GGMLType("int8", 32, 36, 128, 2112),
    INT8_BY_ROW: GGMLType("int8 with inputs of 8 bits", 32, 36, 128, 2112, BY_ROW),
    LEVELS["nf4"]: GGMLType("NF4", 64, 36, 64, 576, AS_FLOATS),
    LEVELS["fp4"]: GGMLType("FP4", 64, 36, 64, 576, AS_FLOATS),
}
"""All that C reads."""


@dataclass(frozen=True, eq=False)
class StoredMatrix(Immutable):
    """A matrix of few bits, or of floats of 16 bits, as a checkpoint stores it."""

    content: UInt8[Tensor, " bytes"]  # its bytes, in memory or in the map of a file
    outs: int
    ins: int
    type: int
    dtype: torch.dtype  # of what products make
    rows: Int64[Tensor, " outs"] | None = None  # which stored row each output is; None where they are in order
    # which of the layer's inputs each stored number of a row is multiplied with; None where they are in order
    inputs: Int64[Tensor, " ins"] | None = None
    # lets the pages of the file go that hold it, to be read again where they are needed; None where the content is in
    # memory only
    release: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        kind = LAYOUTS.get(self.type)
        if kind is None or self.ins % kind.elements or self.outs < 1 or self.ins < 1:
            raise ValueError(f"no matrix of {self.outs} x {self.ins} of ggml's type {self.type} can be read")
        require("content", self.content, torch.uint8, (self.outs * (self.ins // kind.elements) * kind.size,))
        for name, order, count in (("rows", self.rows, self.outs), ("inputs", self.inputs, self.ins)):
            if order is not None:
                require(name, order, torch.int64, (count,))
                if not 0 <= int(order.min()) <= int(order.max()) < count:
                    raise ValueError(f"an order of {name} that are not all of 0 to {count - 1}")

    def __len__(self) -> int:
        return self.outs

    @property
    def shape(self) -> torch.Size:
        """Outputs and inputs."""
        return torch.Size((self.outs, self.ins))

    @property
    def device(self) -> torch.device:
        """Where products with it are made."""
        return CPU

    @property
    def is_plain(self) -> bool:
        """Whether its numbers are floats of its dtype, so that products need no other form of it."""
        return _FLOATS.get(self.type) == self.dtype

    @property
    def is_in_order(self) -> bool:
        """Whether its outputs and inputs are in the order of its bytes."""
        return self.rows is None and self.inputs is None

    def plain(self) -> Float[Tensor, "outs ins"]:
        """Its numbers where they are, if it is plain; a copy where its rows have another order."""
        made = self.content.view(self.dtype).view(self.outs, self.ins)
        return made if self.rows is None else made[self.rows]

    def first(self, outs: int) -> StoredMatrix:
        """Its first stored rows, or all where there are fewer."""
        outs = min(outs, self.outs)
        return replace(self, content=self.content[: len(self.content) // self.outs * outs], outs=outs, rows=None)

    def in_order(self, rows: Int64[Tensor, " outs"]) -> StoredMatrix:
        """The same with its outputs in another order."""
        return replace(self, rows=rows if self.rows is None else self.rows[rows])


def repacked_shape(outs: int, ins: int, kind: int) -> tuple[int, int]:
    """Blocks of 16 outputs, and bytes of each, of a matrix in C's order; `kind` is a key of LAYOUTS."""
    layout = LAYOUTS[kind]
    return -(-outs // LANES), -(-ins // layout.piece) * layout.piece_size


@dataclass(frozen=True, eq=False)
class Segment:
    """Neighbouring outputs of a weight, of one type."""

    blocks: UInt8[Tensor, "blocks bytes"]
    outs: int
    type: int


@dataclass(frozen=True, eq=False)
class GGMLWeight(Immutable):
    """A weight of few bits in the order in which C reads it."""

    # of outputs that follow one another; types may differ, and all but the last have multiples of 16
    segments: tuple[Segment, ...]
    ins: int  # number of inputs
    matrices: int = 1  # how many of this form lie behind one another in the blocks of each segment

    def __post_init__(self) -> None:
        if not 1 <= len(self.segments) <= GGML_SEGMENTS or any(each.outs % LANES for each in self.segments[:-1]):
            raise ValueError(f"{len(self.segments)} segments of {[each.outs for each in self.segments]} outputs")
        if len({LAYOUTS[each.type].inputs for each in self.segments}) > 1:
            raise ValueError("segments whose products read inputs in several ways")
        for each in self.segments:
            count, size = repacked_shape(each.outs, self.ins, each.type)
            require("blocks", each.blocks, torch.uint8, (self.matrices * count, size))

    @property
    def outs(self) -> int:
        """Number of outputs."""
        return sum(each.outs for each in self.segments)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(each.blocks.nbytes for each in self.segments)

    @functools.cached_property
    def _given(self) -> GGMLArguments:
        blocks = [each.blocks for each in self.segments]
        if self.matrices == 1:
            numa.place(*blocks)
        else:
            for several in blocks:
                numa.interleave(several)
        made = GGMLArguments(len(self.segments))
        for place, each in zip(made.of, self.segments, strict=False):
            place.weight = each.blocks.data_ptr()
            place.outs = each.outs
            place.type = each.type
        return made

    @property
    def arguments(self) -> tuple[int, int, int]:
        """As `Interleaved.arguments`: address of a ggml_matrix, which this object keeps, and -1 in place of bits."""
        return ctypes.addressof(self._given), -1, 0

    def by_group(self) -> GGMLWeight:
        """The same numbers, whose inputs have no scale for a whole row."""
        segments = (replace(each, type=INT8) if each.type == INT8_BY_ROW else each for each in self.segments)
        return replace(self, segments=tuple(segments))

    @classmethod
    def joined(cls, parts: Sequence[GGMLWeight], matrices: int = 1) -> GGMLWeight:
        """Several weights with the same inputs as one, or as several of one form; `why_not_joined` must be None.

        Each part holds so many `matrices` behind one another.
        """
        segments = (replace(each, outs=each.outs // matrices) for part in parts for each in part.segments)
        return cls(tuple(segments), parts[0].ins, matrices)


def why_not_joined(matrices: Sequence[StoredMatrix]) -> str | None:
    """Why some matrices cannot be one weight; None where they can."""
    if len(matrices) > GGML_SEGMENTS:
        return f"{len(matrices)} matrices, of at most {GGML_SEGMENTS}"
    if any(each.outs % LANES for each in matrices[:-1]):
        return f"a matrix before the last has a number of outputs that is no multiple of {LANES}"
    if len({LAYOUTS[each.type].inputs for each in matrices}) > 1:
        return "matrices whose products read inputs in several ways"
    if any(not _same(each.inputs, matrices[0].inputs) for each in matrices[1:]):
        return "matrices whose inputs have several orders"
    return None


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)
