"""The fewest instructions that a product with a form of weights needs on x86-64: for measure_levels.py.

They are counted as the table of forms says, for 256 products, with vectors of V bits (256, or 512 with AVX-512), that
is V / 32 outputs side by side:

- each four inputs of these outputs (two of bfloat16, one of float32) are a vector to multiply. Bytes take one
  `vpdpbusd`; without it `vpmaddubsw` and an addition, and for each full sum of 16 bits `vpmaddwd` and an addition in
  32, where the first of each sum is none; 8 bits also the weight's size, and the input with its sign. Floats take one
  multiplication, those of bfloat16 two where no `vdpbf16ps` is used.
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

Counters, addresses, sums across groups, roundings and stores are left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from instructions import Instruction

_SCALE_OF_BYTE = 3


@dataclass(frozen=True)
class Form:
    """What a product with a form of weights reads.

    Attributes:
        bits: of a number.
        group: inputs that share a scale; None where there are no scales.
        size: bits of a weight with its part of scales.
        scale: instructions for a group's scale, and its least value.
        sums: what a row's group takes beside its products.
        table: a look-up for each number: "bytes", or "floats".
    """

    bits: int
    group: int | None
    size: float
    scale: int = 1
    sums: int = 3
    table: str | None = None


FORMS = {
    "bfloat16": Form(16, None, 16),
    "float32": Form(32, None, 32),
    "quantized:8": Form(8, 64, 8.5, scale=4, sums=4),
    "quantized:4": Form(4, 32, 5, scale=4, sums=4),
    "Q8_0": Form(8, 32, 8.5),
    "Q6_K": Form(6, 16, 6.625, scale=_SCALE_OF_BYTE),
    "Q5_K": Form(5, 32, 5.625, scale=2 * _SCALE_OF_BYTE, sums=4),
    "Q5_0": Form(5, 32, 5.5),
    "Q4_K": Form(4, 32, 4.625, scale=2 * _SCALE_OF_BYTE, sums=4),
    "Q4_0": Form(4, 32, 4.5),
    "IQ4_XS": Form(4, 32, 4.375, scale=_SCALE_OF_BYTE, table="bytes"),
    "MXFP4": Form(4, 32, 4.5, scale=2, table="bytes"),
    "Q3_K": Form(4, 16, 4.625, scale=_SCALE_OF_BYTE),
    "Q2_K": Form(2, 16, 3.125, scale=2 * _SCALE_OF_BYTE, sums=4),
    "NF4": Form(4, 64, 4.5, scale=0, sums=1, table="floats"),
}


def _unpacking(form: Form, *, wide: bool, dots: bool) -> float:
    """Instructions on a vector to multiply, once for all rows."""
    if form.table == "floats":
        return 2 - 1 / 8 if wide else 5 - 2 / 8
    if form.bits == 16:
        return 0 if dots else 2
    higher = 2 if wide else 3
    made = {2: 7 / 4, 4: 3 / 2, 5: 3 / 2 + higher - 1 / 8, 6: 3 / 2 + higher - 1 / 4}.get(form.bits, 0)
    return made + (form.table == "bytes")


def least_count(level: str, form: str, rows: int) -> Counter[Instruction] | None:
    """The fewest instructions for 256 products at a level; None for a form or a level without a formula."""
    of, wide = FORMS.get(form), level.startswith("x86-64-v4")
    if of is None or level not in ("x86-64-v4-fma", "x86-64-v4-bf16", "x86-64-v4", "x86-64-v3-vnni", "x86-64-v3"):
        return None
    byte_dots, float_dots = level not in ("x86-64-v4", "x86-64-v3"), level == "x86-64-v4-bf16"
    outs = 16 if wide else 8
    made = Counter[Instruction]()

    def add(count: float, multiply: str | None = None, *, vector: bool = True, loads: bool = False) -> None:
        made[Instruction(multiply, vector=vector, loads=loads, wide=wide)] += count  # type: ignore[assignment]

    floats = of.bits > 8 or of.table == "floats"
    vectors = 256 / outs / (1 if of.bits == 32 or of.table == "floats" else 2 if of.bits == 16 else 4)
    if floats:
        pairs = of.bits == 16
        add(vectors * (1 if float_dots or not pairs else 2), "vdpbf16ps" if pairs and float_dots else "vfmadd231ps")
    elif byte_dots:
        add(vectors, "vpdpbusd")
    else:
        number = 8 if of.bits == 8 or form == "IQ4_XS" else 5 if of.table else 3 if form == "Q3_K" else of.bits
        steps = 1 if number == 8 else min(32767 // (2 * 127 * (2**number - 1)), (of.group or 0) // 4)
        add(vectors, "vpmaddubsw")
        add(vectors * (1 - 1 / steps))  # additions in 16 bits
        add(vectors / steps, "vpmaddwd")
        add(vectors / steps - (256 / outs / (of.group or 1)))  # additions in 32 bits, but the first
        if number == 8:
            add(vectors * (1 + 1 / rows))  # the input with the weight's sign, and the weight's size
    add(vectors * _unpacking(of, wide=wide, dots=float_dots) / rows)
    if of.group:
        groups = 256 / outs / of.group
        add(groups * (of.scale / rows + of.sums - 2))
        add(groups * 2, "vfmadd231ps") if of.sums > 1 else add(groups * of.sums, "vfmadd231ps")
    add(256 * of.size / 8 / (64 if wide else 32) / rows, vector=False, loads=True)
    return made
