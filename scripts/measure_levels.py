"""Measure products with each form of weights at each level of the native operations that this processor runs.

    python scripts/measure_levels.py [--level NAME ...] [--form NAME ...] [--out docs/results/levels]

One thread, and its processor time, so that other work on the machine counts little: the best of several turns. Weights
lie in half of the second cache, and in memory, many times the size of the last cache. "Share" is the least time that
the executed instructions allow, of the time that they took: single steps of a child process count instructions, and
their speeds are measured here (scripts/instructions.py). What does not grow with a weight's outputs (inputs that are
rounded, and the call itself) is taken off times and counts. It takes half an hour, and more beside other work.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import common
import torch
from instructions import Instruction, best, counted, least_seconds, shown

from draftproof.native import build as library
from draftproof.native.ggml import TYPES, GGMLWeight, Segment, repacked_shape
from draftproof.native.operations import Operations
from draftproof.native.structures import AttentionArguments, PassMask, ggml_inputs_size, quantized_inputs_size
from draftproof.native.tensors import LANES, Interleaved, Quantized
from draftproof.provenance import run_facts
from draftproof.results import Results, table

INS = 1024
HEAD, QUERIES = 128, 6  # of attention: numbers of a head, and query heads for a key head
ROWS = (*range(1, 9), 40)  # the last stands for a prompt
COUNTS = (1, 5)  # rows of which instructions are counted; of attention, which has more, the first
STEP = {"bfloat16": 12 * LANES}  # outputs that every tile of a form divides
COUNTED = 256  # inputs, or keys, where instructions are counted
FORMS = ("bfloat16", "Q8_0", "Q6_K", "Q5_0", "Q4_K", "Q4_0", "quantized:8", "quantized:4", "keys:16", "keys:8")
IN_MEMORY = 256 << 20
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
    """A product of some rows of bfloat16 with a weight of a form."""
    x, y = torch.randn(rows, ins).bfloat16(), torch.empty(rows, outs, dtype=torch.bfloat16)
    weight: Interleaved | Quantized | GGMLWeight
    memory, more = 0, tuple[int, ...]()
    if form == "bfloat16":
        run = loaded.draftproof_product_bfloat16
        blocks = numbers(*Interleaved.shape(outs, ins, 2)[:3], 4)
        weight = Interleaved(blocks.view(torch.bfloat16), outs, ins)
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
        kind = next(number for number, each in TYPES.items() if each.name == form)
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
        keys, values = (torch.randint(-127, 128, shape, dtype=torch.int8) for _ in range(2))
        scales = torch.full((1, 2 * heads, capacity, 1), 1 / 64)
    else:
        keys, values = (torch.randn(shape).bfloat16() for _ in range(2))
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


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def main() -> None:
    """Measure every form at every level."""
    parser = common.parser(__doc__)
    levels = [level.name for level in library.choose()]
    parser.add_argument("--level", nargs="+", default=levels, choices=levels)
    parser.add_argument("--form", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    facts, near, far, counts, raw = run_facts(), [], [], [], {}
    for name in options.level:
        loaded = library.load(library.level_named(name))
        Operations(loaded, torch.bfloat16, name)  # says what arguments C takes
        for form in options.form:
            cached = measured(loaded, form, second_cache() // 2, options.turns)
            distant = measured(loaded, form, IN_MEMORY, min(options.turns, 3))[:-1]
            known = COUNTS[:1] if form.startswith("keys") else COUNTS
            runs = {rows: instructions_of(loaded, form, rows) for rows in known}
            shares = {}
            for rows, (took, _, products) in zip(ROWS, cached, strict=True):
                if rows in runs:
                    run, counted_products = runs[rows]
                    shares[rows] = least_seconds(run) / counted_products * products / took
            speeds = [f"{speed / 1e9:.1f}" for _, speed, _ in cached[:-1]]
            took, _, products = cached[-1]
            prompt = f"{products / took / 1e9:.1f}"
            near.append([name, form, *speeds, prompt, *(_percent(shares.get(rows)) for rows in COUNTS)])
            times = [took for took, _, _ in distant]
            ratios = times[4] / times[0], five_over_one(loaded, form, threads)
            far.append([name, form, *(f"{speed / 1e9:.1f}" for _, speed, _ in distant), *(f"{r:.2f}" for r in ratios)])
            counts.append([name, form, *(shown(*runs[rows]) if rows in runs else "" for rows in COUNTS)])
            raw[f"{name}, {form}"] = {"cache": cached, "memory": distant, "share": shares, "five": ratios}
            common.say(options, *near[-1])
            common.say(options, *far[-1])
            common.say(options, *counts[-1])
    heads = ["level", "form", *map(str, ROWS[:-1])]
    lines = [
        f"One thread, processor time, the best of {options.turns} turns; rows of bfloat16. `keys:16` is",
        f"attention over keys and values of 16 bits with {QUERIES} query heads for a key head of {HEAD} numbers,",
        "by tokens.",
        "",
        f"## Weights in half of the second cache ({second_cache() >> 10} KiB): GB/s by rows",
        "",
        f"Then products a second (10^9) of {ROWS[-1]} rows, a prompt; and shares of the bound, by rows.",
        "",
        *table([*heads, "prompt", *(f"share, {rows}" for rows in COUNTS)], near),
        "",
        f"## Weights in memory ({IN_MEMORY >> 20} MiB): GB/s by rows, and the time of five rows over one",
        "",
        f"The last column is with {threads} threads, by the clock; they share the way to memory.",
        "",
        *table([*heads, "5 / 1", "5 / 1, all threads"], far),
        "",
        "## Instructions for 256 products: those that multiply, on vectors, that read memory, all",
        "",
        *table(["level", "form", *(f"rows: {rows}" for rows in COUNTS)], counts),
    ]
    common.deliver(options, Results("Levels of processors by form of weights", lines, {"levels": raw}, facts))


if __name__ == "__main__":
    main()
