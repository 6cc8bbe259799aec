"""The fewest instructions that a product with a form of weights needs on x86-64: for measure_levels.py.

They are counted as the table of forms says, for 256 products, with vectors of V bits (256, or 512 with AVX-512), that
is V / 32 outputs side by side:

- each four inputs of these outputs (two of bfloat16, one of float32) are a vector to multiply. Bytes take one
  `vpdpbusd`; without it `vpmaddubsw` and an addition, and for each full sum of 16 bits `vpmaddwd` and an addition in
  32, where the first of each sum is none; 8 bits two `vpmaddwd` and two additions, with a mask and a shift of the
  weights for all rows. Floats take one multiplication, those of bfloat16 two where no `vdpbf16ps` is used.
- such a vector is unpacked once for all rows: 4 bits by a mask for the lower halves, a shift and a mask for the upper
  ones; 5 and 6 bits by a shift, a mask and an `or` more (the last two are one with AVX-512), but one shift of a group;
  2 bits by masks and three shifts for four; places in a table of bytes by `vpshufb` more; in one of floats by a shift
  and a permutation (AVX2: two, and a shift and a choice between them), but a shift at each end; bfloat16 by a shift and
  a mask.
- a group's scale and least value are made once for all rows: `vcvtph2ps` for a float16; a byte is widened, converted,
  and multiplied by the step, which `quantized:4` leaves to the end; bfloat16 is widened and shifted.
- a group of a row is converted, multiplied by its inputs' scale, and multiplied and added; with least values, or
  offsets, once more. Groups of floats are multiplied and added.
- weights are read once for all rows, and inputs stay in registers.
- attention over 16 bits, of float32 numbers (not with `vdpbf16ps`): a key and a value of 128 numbers are 256 products,
  each number is widened once for six query heads, and a score takes 17 for its power of e.

Counters, addresses, sums across groups, roundings and stores are left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from instructions import Instruction

_LEVELS = ("x86-64-v4-fma", "x86-64-v4-bf16", "x86-64-v4", "x86-64-v3-vnni", "x86-64-v3")
_OF_BYTE, _OF_EXPONENT, _QUERIES = 3, 17, 6


@dataclass(frozen=True)
class Form:
    """What a product with a form of weights reads.

    Attributes:
        bits: of a number, once it is looked up in a table of bytes; 32 in one of floats.
        size: bits of a weight with its part of scales.
        group: inputs that share a scale; None where there are no scales.
        scale: instructions for a group's scale, and its least value, once for all rows.
        sums: those for a group of a row beside its products.
        unpacking: those for a vector to multiply, once for all rows; and with AVX-512, where these are others.
        queries: readers of a row.
    """

    bits: int
    size: float
    group: int | None = None
    scale: float = 1
    sums: int = 3
    unpacking: float = 0
    wide_unpacking: float | None = None
    queries: int = 1


FORMS = {
    "bfloat16": Form(16, 16, unpacking=2),
    "float32": Form(32, 32),
    "quantized:8": Form(8, 8.5, 64, scale=4, sums=4),
    "quantized:4": Form(4, 5, 32, scale=4, sums=4, unpacking=3 / 2),
    "Q8_0": Form(8, 8.5, 32),
    "Q6_K": Form(6, 6.625, 16, scale=_OF_BYTE, unpacking=9 / 2 - 1 / 4, wide_unpacking=7 / 2 - 1 / 4),
    "Q5_K": Form(5, 5.625, 32, scale=2 * _OF_BYTE, sums=4, unpacking=9 / 2 - 1 / 8, wide_unpacking=7 / 2 - 1 / 8),
    "Q5_0": Form(5, 5.5, 32, unpacking=9 / 2 - 1 / 8, wide_unpacking=7 / 2 - 1 / 8),
    "Q4_K": Form(4, 4.625, 32, scale=2 * _OF_BYTE, sums=4, unpacking=3 / 2),
    "Q4_0": Form(4, 4.5, 32, unpacking=3 / 2),
    "IQ4_XS": Form(8, 4.375, 32, scale=_OF_BYTE, unpacking=5 / 2),
    "MXFP4": Form(5, 4.5, 32, scale=2, unpacking=5 / 2),
    "Q3_K": Form(3, 4.625, 16, scale=_OF_BYTE, unpacking=3 / 2),
    "Q2_K": Form(2, 3.125, 16, scale=2 * _OF_BYTE, sums=4, unpacking=7 / 4),
    "NF4": Form(32, 4.5, 64, scale=0, sums=1, unpacking=5 - 2 / 8, wide_unpacking=2 - 1 / 8),
    "keys:16": Form(16, 16, unpacking=2, queries=_QUERIES),
}


def least_count(level: str, form: str, rows: int) -> Counter[Instruction] | None:
    """The fewest instructions for 256 products at a level; None for a form or a level without a formula."""
    of, wide, dots = FORMS.get(form), level.startswith("x86-64-v4"), level == "x86-64-v4-bf16"
    if of is None or level not in _LEVELS or (of.queries > 1 and dots):
        return None
    outs, readers, made = 16 if wide else 8, rows * of.queries, Counter[Instruction]()

    def add(count: float, multiply: str | None = None, *, vector: bool = True, loads: bool = False) -> None:
        made[Instruction(multiply, vector=vector, loads=loads, wide=wide)] += count  # type: ignore[assignment]

    vectors, groups = 256 / outs / max(32 // max(of.bits, 8), 1), 256 / outs / of.group if of.group else 0
    if of.bits == 16 and dots:
        add(vectors, "vdpbf16ps")
    elif of.bits > 8:
        add(256 / outs, "vfmadd231ps")
    elif level not in ("x86-64-v4", "x86-64-v3"):
        add(vectors, "vpdpbusd")
    elif of.bits == 8:
        add(2 * vectors, "vpmaddwd")
        add(2 * vectors - groups)  # additions, but the first
        add(2 * vectors / rows)  # a mask and a shift
    else:
        steps = min(32767 // (2 * 127 * (2**of.bits - 1)), vectors / groups)
        add(vectors, "vpmaddubsw")
        add(vectors - vectors / steps)  # additions in 16 bits
        add(vectors / steps, "vpmaddwd")
        add(vectors / steps - groups)  # additions in 32 bits, but the first
    unpacking = of.unpacking if not wide or of.wide_unpacking is None else of.wide_unpacking
    add(0 if of.bits == 16 and dots else vectors * unpacking / readers)
    if groups:
        floats = min(of.sums, 2 + (of.sums > 3))  # multiplications of a group of a row; the other one converts
        add(groups * floats, "vfmadd231ps")
        add(groups * (of.sums - floats + of.scale / rows))
    if of.queries > 1:
        add(_OF_EXPONENT / outs)
    add(256 * of.size / 8 / (64 if wide else 32) / readers, vector=False, loads=True)
    return made
