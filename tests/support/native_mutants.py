"""Faults that are put into the C code on purpose: its tests must see each of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from draftproof.native import build


class CodeMutant(NamedTuple):
    """One expression of the C code replaced by another one.

    Attributes:
        file: of the C code.
        old: the expression; it is there once.
        new: what stands in its place.
        tests: a file of tests that must fail then.
        level: the only level whose code this is, of those here; None where the best one runs it.
    """

    file: str
    old: str
    new: str
    tests: str
    level: str | None = None

    @property
    def name(self) -> str:
        """Its name in reports."""
        return f"{self.file}: {self.old} -> {self.new}"

    def write(self, folder: Path) -> None:
        """Write the C code with the fault into a new folder."""
        shutil.copytree(build.SOURCES, folder)
        path = folder / self.file
        code = path.read_text(encoding="utf-8")
        assert code.count(self.old) == 1, f"{self.name}: it is there {code.count(self.old)} times: write it again"
        path.write_text(code.replace(self.old, self.new), encoding="utf-8")


_NATIVE, _GGML, _OWN = "native/test_native.py", "native/test_ggml.py", "native/test_own_types.py"
_MIXTURE = "backends/lean/test_mixture.py"
_STATES, _QUANTIZED = "native/test_native_recurrent.py", "backends/products/test_quantized.py"
_OUTPUT = "backends/products/test_drafting_output.py"
_HYBRID, _KEYS = "backends/lean/test_hybrid.py", "backends/lean/test_rounded_kv.py"
MUTANTS = (
    CodeMutant("typed.h", "sqrtf(sum_of(squares) + least)", "sqrtf(sum_of(squares))", _NATIVE),
    CodeMutant("typed.h", "splat(0.0713548163f)", "splat(0.0733548163f)", _NATIVE),
    CodeMutant(
        "typed.h",
        "const long token = t->token + query / t->group, seen = a->visible[token] - t->start;",
        "const long token = t->token + query / t->group, seen = a->visible[token] + 1 - t->start;",
        _NATIVE,
    ),
    CodeMutant("typed.h", "(token * a->heads + head) * a->dim, a->dim)", "(token * a->heads) * a->dim, a->dim)", _KEYS),
    CodeMutant("typed.h", "first = a->tokens * thread_number() / thread_count();", "first = 1;", _KEYS),
    CodeMutant(
        "matrix_rows.h", "_tile_dpbf16ps(3, 5, 7)", "_tile_dpbf16ps(3, 4, 7)", "native/test_rows.py", "x86-64-v4-amx"
    ),
    CodeMutant("ggml.h", "chosen_bits(higher, 4 - t, 0x10)", "chosen_bits(higher, 3 - t, 0x10)", _GGML),
    CodeMutant(
        "ggml.h", "load_half(steps + 32 * (f.groups + g))", "load_half(steps + 32 * (f.groups + (g ^ 1)))", _GGML
    ),
    CodeMutant("ggml.h", "up = 4 * (c / 2 % 2)", "up = 4 * (c % 2)", _GGML),
    CodeMutant("ggml.h", "(b[2 + i] ^ 128)", "(b[2 + (i ^ 1)] ^ 128)", _GGML),
    CodeMutant("ggml.h", "{1, 24, 45, 63, 79,", "{1, 24, 45, 63, 78,", _GGML),
    CodeMutant("ggml.h", "{16, 17, 18, 19, 20, 22, 24, 28,", "{16, 17, 18, 19, 20, 22, 24, 26,", _GGML),
    CodeMutant("ggml.h", ">> (i % 2 ? 0 : 4) & 15", ">> (i % 2 ? 4 : 0) & 15", _OWN),
    CodeMutant(
        "ggml.h", "ggml_sixteen_steps(f, steps + b * next, 0)", "ggml_sixteen_steps(f, steps + 0 * next, 0)", _OWN
    ),
    CodeMutant("ggml.h", "x->whole + (row + m) * x->padded;", "x->whole + m * x->padded;", _GGML),
    CodeMutant(
        "lanes_parts.h", "_mm256_shuffle_epi32((__m256i)made.p[1], 0xd8)", "(__m256i)made.p[1]", _GGML, "x86-64-v3"
    ),
    CodeMutant(
        "lanes_parts.h",
        "step ? (bits_part)_mm256_srli_epi16((__m256i)w.p[i], 8)",
        "step ? w.p[i]",
        _QUANTIZED,
        "x86-64-v3",
    ),
    CodeMutant(
        "lanes_avx512.h",
        "_mm512_shuffle_epi32(_mm512_cvtps_epi32(v), 0xd8)",
        "_mm512_cvtps_epi32(v)",
        _GGML,
        "x86-64-v4",
    ),
    CodeMutant("ggml_product.h", "has_bytes |= HALVES && ", "has_bytes = HALVES && ", _GGML, "x86-64-v3"),
    CodeMutant("ggml_product.h", "largest_of(top) / 127, by", "largest_of(top) / 120, by", _GGML),
    CodeMutant(
        "matrix_bytes.h",
        "own = g % (2 * GROUPS_AHEAD)",
        "own = (g + 1) % (2 * GROUPS_AHEAD)",
        _GGML,
        level="x86-64-v4-amx",
    ),
    CodeMutant("quantized.h", "splat(1.0f / 255)", "splat(1.0f / 250)", _QUANTIZED),
    CodeMutant("quantized.h", "tiles[end - row][1](p, row, block);", "tiles[end - row][1](p, 0, block);", _QUANTIZED),
    CodeMutant(
        "rescore.h", "multiply_add(splat(least), inputs, sum)", "multiply_add(splat(least), dots, sum)", _OUTPUT
    ),
    CodeMutant(
        "ggml.h", "store_units(to + (k + i) * LANES, turned[i])", "store_units(to + k * LANES, turned[i])", _OUTPUT
    ),
    CodeMutant("rescore.h", "if (passes(kept[i], &least))", "if (i && passes(kept[i], &least))", _QUANTIZED),
    CodeMutant(
        "rows.h",
        "NAME(dots)(p, x, from + n * p->stride, made, rows, 1);",
        "NAME(dots)(p, x, from, made, rows, 1);",
        "native/test_rows.py",
    ),
    CodeMutant("mixture.h", "m->is_whole ? m->least : all", "m->is_whole ? 0 : all", _HYBRID),
    CodeMutant("mixture.h", "left[e] > left[best] ? e", "left[e] < left[best] ? e", _MIXTURE),
    CodeMutant("mixers.h", "if (t + 1 == span[2])", "if (span[2] && t == span[2])", _HYBRID),
    CodeMutant("mixers.h", "const long at = k + span[3];", "const long at = k;", _HYBRID),
    CodeMutant("mixers.h", "(t - span[2]) * held_size", "0 * held_size", _HYBRID),
    CodeMutant("recurrent.h", "if (t + 1 == s->mark)", "if (s->mark && t == s->mark)", _HYBRID),
    CodeMutant("recurrent.h", "(s->replayed + t) * held_size(r)", "0 * held_size(r)", _HYBRID),
    CodeMutant(
        "recurrent.h",
        "known[odd][c] = multiply_add(block[i + odd][c]",
        "known[odd][c] = multiply_add(block[i][c]",
        _STATES,
    ),
    CodeMutant("cache_bytes.h", "scale_for(largest_size(x, dim), 127)", "scale_for(largest_size(x, dim), 120)", _KEYS),
)
"""At least one for each kind of product, for attention, norms, gates, experts, states, and rounded keys."""
