"""Measure products with each form of weights at each level of the native operations that this processor runs.

    python scripts/measure_levels.py [--level NAME ...] [--form NAME ...] [--out docs/results/levels]

One thread, and its processor time, so that other work on the machine counts little: the best of several turns. Weights
lie in half of the second cache, and in memory, many times the size of the last cache. "Share" is the least time that
the executed instructions allow, of the time that they took: single steps of a child process count instructions, and
their speeds are measured here (scripts/instructions.py). "Time / least" is the time over that of the fewest
instructions that a form needs (scripts/least_counts.py). What does not grow with a weight's outputs (inputs that are
rounded, and the call itself) is taken off times and counts. It takes 25 minutes on a quiet machine.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import torch
from instructions import Instruction, best, counted, least_seconds, shown
from least_counts import least_count

from draftproof.native import build as library
from draftproof.native.ggml import LAYOUTS, GGMLWeight, Segment, repacked_shape
from draftproof.native.operations import Operations
from draftproof.native.structures import AttentionArguments, PassMask, ggml_inputs_size, quantized_inputs_size
from draftproof.native.tensors import LANES, UNITS, Interleaved, Quantized
from draftproof.provenance import run_facts
from draftproof.results import Results, table

INS = 1024
HEAD, QUERIES = 128, 6  # of attention: numbers of a head, and query heads for a key head
ROWS = (*range(1, 9), 40)  # the last stands for a prompt
COUNTS = (1, 5, 40)  # rows of which instructions are counted; of attention, those of five stand for the last
STEP = {"bfloat16": 12 * LANES}  # outputs that every tile of a form divides
COUNTED = 256  # inputs, or keys, where instructions are counted
FEW_FORMS = ("bfloat16", "float32", "quantized:4", "Q8_0", "Q4_K", "keys:16")
FORMS = (
    *("bfloat16", "float32", "quantized:8", "quantized:4", "Q8_0", "Q6_K", "Q5_K", "Q5_0", "Q4_K", "Q4_0", "IQ4_XS"),
    *("MXFP4", "Q3_K", "Q2_K", "NF4", "keys:16", "keys:8"),
)
IN_FULL = ("x86-64-v3", "x86-64-v3-vnni")  # levels with all forms beside the best; others have the few
IN_MEMORY = 256 << 20
MEMORY = ("memory, 1", "5 / 1", "5 / 1, all threads")
_SECOND_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")


@dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
        call: what is measured.
        size: bytes that it reads of weights, or of keys and values.
        products: how many numbers it multiplies by these.
        kept: what C has the addresses of.
    """

    call: Callable[[], object]
    size: int
    products: int
    kept: tuple[object, ...] = ()


@functools.lru_cache(maxsize=3)
def numbers(*shape: int) -> torch.Tensor:
    """Bytes that are usual numbers in every format, none of them subnormal."""
    return torch.randint(56, 60, shape, dtype=torch.uint8)


def product(loaded: ctypes.CDLL, form: str, outs: int, ins: int, rows: int, threads: int) -> Case:
    """A product of some rows with a weight of a form: of bfloat16, and of float32 with the form of that name."""
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    x, y = torch.randn(rows, ins).to(dtype), torch.empty(rows, outs, dtype=dtype)
    weight: Interleaved | Quantized | GGMLWeight
    memory, more = 0, tuple[int, ...]()
    if form in ("bfloat16", "float32"):
        run = loaded.draftproof_product_float if form == "float32" else loaded.draftproof_product_bfloat16
        blocks = numbers(*Interleaved.shape(outs, ins, UNITS[dtype])[:3], 4)
        weight = Interleaved(blocks.view(dtype), outs, ins)
    elif form.startswith("quantized"):
        bits, group = int(form[-1]), 32 if form[-1] == "4" else 64
        run, memory, more = (
            loaded.draftproof_quantized_product_bfloat16,
            quantized_inputs_size(rows, ins),
            (bits, group),
        )
        blocks = numbers(*Quantized.shape(outs, ins, bits, group))
        weight = Quantized(blocks, outs, ins, bits, group)
    else:
        kind = next(number for number, each in LAYOUTS.items() if each.name == form)
        run, memory = loaded.draftproof_ggml_product_bfloat16, ggml_inputs_size(rows, ins)
        blocks = numbers(*repacked_shape(outs, ins, kind))
        weight = GGMLWeight((Segment(blocks, outs, kind),), ins)
    work = (torch.empty(memory, dtype=torch.uint8),) if memory else ()

    def call() -> None:
        places = (each.data_ptr() for each in work)
        run(x.data_ptr(), weight.arguments[0], None, None, y.data_ptr(), rows, outs, ins, *more, *places, threads)

    return Case(call, blocks.nbytes, rows * outs * ins)


def attention(loaded: ctypes.CDLL, form: str, context: int, heads: int, tokens: int, threads: int) -> Case:
    """Attention of some tokens after others, over keys and values of 16 or 8 bits."""
    capacity = context + max(ROWS)
    shape = (1, heads, capacity, HEAD)
    scales = None
    if form.endswith("8"):
        keys, values = numbers(2, *shape).view(torch.int8)
        scales = torch.full((1, 2 * heads, capacity, 1), 1 / 64)
    else:
        keys, values = numbers(2, *shape, 2).view(torch.bfloat16).squeeze(-1)
    given = torch.randn(tokens, QUERIES * heads + 2 * heads, HEAD).bfloat16()
    fused, out = given.clone(), torch.empty(tokens, QUERIES * heads * HEAD, dtype=torch.bfloat16)
    cos, sin = (torch.ones(tokens, 1, HEAD, dtype=torch.bfloat16) for _ in range(2))
    mask = PassMask([(0, context, tokens)], [range(context + 1, context + 1 + tokens)], None)
    made = AttentionArguments.of(cos, sin, shape, mask, heads=QUERIES * heads, scale=HEAD**-0.5)
    made.fused, made.out = fused.data_ptr(), out.data_ptr()
    made.keys, made.values = keys.data_ptr(), values.data_ptr()
    made.scales = None if scales is None else scales.data_ptr()

    def call() -> None:
        fused.copy_(given)  # queries are turned in place
        loaded.draftproof_attend_bfloat16(ctypes.addressof(made), threads)

    size = 2 * heads * context * HEAD
    kept = mask, cos, sin, keys, values, scales, out
    return Case(call, size * keys.element_size(), size * QUERIES * tokens, kept)


def case(loaded: ctypes.CDLL, form: str, size: int, rows: int, ins: int, threads: int = 1) -> tuple[Case, Case]:
    """A large case of about so many bytes, and a small one, which has what is to be taken off."""
    torch.set_num_threads(threads)  # attention has memory for so many
    if form.startswith("keys"):
        bytes_of_key = 2 * HEAD * int(form.removeprefix("keys:")) // 8
        heads = 1 if size < IN_MEMORY else 8
        context = max(size // (bytes_of_key * heads) // 64, 2) * 64
        large, small = (attention(loaded, form, length, heads, rows, threads) for length in (context, 64))
        return large, small
    small, step = product(loaded, form, LANES, ins, rows, threads), STEP.get(form, 4 * LANES)
    outs = max(size // small.size * LANES // step, 1) * step + LANES
    return product(loaded, form, outs, ins, rows, threads), small


def instructions_of(loaded: ctypes.CDLL, form: str, rows: int) -> tuple[Counter[Instruction], int]:
    """What a case runs more than the small one, and for how many products."""
    large, small = case(loaded, form, 0, rows, COUNTED)
    path = Path(loaded._name)  # noqa: SLF001 - ctypes has no other name for it
    found = counted(path, large.call)
    found.subtract(counted(path, small.call))
    return found, large.products - small.products


def second_cache() -> int:
    """Bytes of the processor's second cache."""
    return int(_SECOND_CACHE.read_text(encoding="utf-8").strip().removesuffix("K")) << 10


def measured(loaded: ctypes.CDLL, form: str, size: int, turns: int) -> list[tuple[float, float, int]]:
    """For each number of rows: seconds, bytes a second, and products, without those of the small case."""
    found = []
    for rows in ROWS:
        large, small = case(loaded, form, size, rows, INS)
        took = best(large.call, turns) - best(small.call, turns)
        found.append((took, (large.size - small.size) / took, large.products - small.products))
    return found


def five_over_one(loaded: ctypes.CDLL, form: str, threads: int) -> float:
    """How long five rows take with all threads and weights in memory, as a multiple of one row."""

    def seconds(rows: int) -> float:
        large, small = (
            best(each.call, 3, time.perf_counter) for each in case(loaded, form, IN_MEMORY, rows, INS, threads)
        )
        return large - small

    return seconds(5) / seconds(1)


@dataclass(frozen=True)
class Bound:
    """What instructions allow, for some rows of a form at a level.

    Attributes:
        executed: instructions for 256 products, as counted: those that multiply, on vectors, that read memory, all.
        least: the same of the fewest that the form needs; None where no formula is known.
        share: the least time of the executed instructions, of the time that they took.
        over_least: the time, as a multiple of that of the fewest; None where no formula is known.
    """

    executed: str
    least: str | None
    share: float
    over_least: float | None


def bounds(loaded: ctypes.CDLL, level: str, form: str, cached: list[tuple[float, float, int]]) -> list[Bound]:
    """The bounds for the rows of `COUNTS`."""
    made, run, of = [], Counter[Instruction](), 1
    for rows in COUNTS:
        if rows == COUNTS[0] or rows != max(ROWS) or not form.startswith("keys"):
            run, of = instructions_of(loaded, form, rows)
        took, _, products = cached[ROWS.index(rows)]
        least, share = least_count(level, form, rows), least_seconds(run) / of * products / took
        over = took / products * 256 / least_seconds(least) if least else None
        made.append(Bound(shown(run, of), shown(least, 256) if least else None, share, over))
    return made


def line(form: str, found: Mapping[str, Any]) -> list[str]:
    """The cells of a form in the table of a level."""
    (took, _, products), known = found["cache"][-1], found["bounds"]
    vectors = (text.split(" / ")[1] if text else "?" for each in known for text in (each.executed, each.least))
    return [
        form,
        *(f"{speed / 1e9:.1f}" for _, speed, _ in found["cache"][:-1]),
        f"{products / took / 1e9:.0f}",
        " / ".join(f"{each.share:.0%}" for each in known),
        " / ".join("?" if each.over_least is None else f"{each.over_least:.2f}" for each in known),
        " / ".join(f"{executed} ({least})" for executed, least in zip(vectors, vectors, strict=True)),
        f"{found['memory'][0][1] / 1e9:.1f}",
        *(f"{ratio:.2f}" for ratio in found["five"]),
    ]


def main() -> None:
    """Measure every form at every level."""
    parser = common.parser(__doc__)
    levels = [level.name for level in library.choose()]
    parser.add_argument("--level", nargs="+", default=levels, choices=levels)
    parser.add_argument("--form", nargs="+", choices=FORMS, help="default: all, and a few at some levels")
    parser.add_argument("--turns", type=int, default=60, help="few are too few on a busy machine")
    options = parser.parse_args()
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    facts, raw, tables = run_facts(), {}, []
    forms = {name: options.form or (FORMS if name in (levels[0], *IN_FULL) else FEW_FORMS) for name in options.level}
    libraries = {name: library.load(library.level_named(name)) for name in options.level}
    for (name, loaded), dtype in itertools.product(libraries.items(), UNITS):
        Operations(loaded, dtype, name)  # says what arguments C takes
    # first, since this is by the clock, and needs a quiet machine
    together = {(name, form): five_over_one(libraries[name], form, threads) for name in forms for form in forms[name]}
    common.say(options, f"all {threads} threads: done")
    for name, loaded in libraries.items():
        level, rows = library.level_named(name), []
        for form in forms[name]:
            cached = measured(loaded, form, second_cache() // 2, options.turns)
            distant = measured(loaded, form, IN_MEMORY, min(options.turns, 3))[:-1]
            found = {
                "cache": cached,
                "memory": distant,
                "five": (distant[4][0] / distant[0][0], together[name, form]),
                "bounds": bounds(loaded, name, form, cached) if level.machine == "x86_64" else [],
            }
            rows.append(line(form, found))
            raw[f"{name}, {form}"] = found | {"bounds": [vars(each) for each in found["bounds"]]}
            common.say(options, name, *rows[-1])
        heads = ("form", *map(str, ROWS[:-1]), "prompt", "share", "time / least", "instructions", *MEMORY)
        tables += ["", f"## {name}", "", *table(heads, rows)]
    lines = [
        f"One thread, processor time, the best of {options.turns} turns; rows of bfloat16, and of float32 with weights",
        "of float32. `keys:16` and `keys:8` are attention over keys and values of 16 and 8 bits, by tokens, with",
        f"{QUERIES} query heads for a key head of {HEAD} numbers. Columns:",
        "",
        f"- **1 to 8**: GB/s by rows, with weights in half of the second cache ({second_cache() >> 10} KiB).",
        f"- **prompt**: 10^9 products a second of {ROWS[-1]} rows, the same weights.",
        "- **share**: the least time of the executed instructions, of the time that they took: one row, five, prompt.",
        "- **time / least**: the time, as a multiple of that of the fewest instructions that the form needs (formulas",
        "  in `scripts/least_counts.py`): one row, five, prompt.",
        "- **instructions**: those on vectors for 256 products as counted, and the fewest: one row, five, prompt.",
        f"- **{MEMORY[0]}**: GB/s of one row, with weights in memory ({IN_MEMORY >> 20} MiB).",
        f"- **{MEMORY[1]}**: how long five rows take there, as a multiple of one row; then by the clock with {threads}",
        "  threads, which share the way to memory.",
        *tables,
    ]
    common.deliver(options, Results("Levels of processors by form of weights", lines, {"levels": raw}, facts))


if __name__ == "__main__":
    main()
