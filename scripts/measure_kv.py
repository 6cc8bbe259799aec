"""Measure passes after long contexts with keys and values in several formats, at the shapes of larger models.

    python scripts/measure_kv.py [--shape qwen2.5-0.5b ...] [--gguf 1.5b FILE ...] [--context 8192 32768] [--turns 9]
        [--out docs/results/kv]

Weights of a shape are random bfloat16 numbers; those of `--gguf` are a .gguf file's, or random blocks of the types of a
Q4_K_M file (scripts/measure_gguf.py). Keys and values of the context are random and written to the cache directly: what
a pass costs does not depend on them. All formats share one model and take turns.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

import common
import torch
from measure_gguf import SHAPES, write_shape
from measure_shapes import configs, with_random_weights

from draftproof.backends.base import Feed
from draftproof.backends.cache.sessions import SlotSession
from draftproof.backends.lean.backend import LeanBackend, LeanForward
from draftproof.backends.loading.gguf_model import in_own_numbers
from draftproof.backends.loading.options import KV_DTYPES, LoadOptions
from draftproof.models.gguf_file import GGUFFile
from draftproof.provenance import run_facts
from draftproof.results import Results, median_and_range, table

TOKENS = (1, 5, 256)  # of a pass: a plain one, one that verifies four drafted tokens, and a part of a prompt


@torch.inference_mode()
def filled(target: LeanForward, context: int) -> SlotSession:
    """A session of random tokens, keys and values."""
    session, cache = target.open(), target.cache
    target.forward([Feed(session, [1])])
    cache.claim([session.slot], [context + max(TOKENS) + 2])
    for layer in target.lean.layers:
        heads = layer.heads
        stored = cache.buffers(layer.number, heads.keys, heads.dim, torch.empty(0, dtype=target.dtype))
        for each in stored[:2]:
            part = each[session.slot, :, :context]
            noise = torch.randn(part.shape)
            part.copy_((noise * 40).clamp(-127, 127) if stored.scales is not None else noise)
        if stored.scales is not None:
            stored.scales[session.slot, :, :context] = 1 / 40
    session.read([1] * (context - 1))
    return session


def seconds(target: LeanForward, session: SlotSession, tokens: int) -> float:
    """The time of a pass over some tokens, which are forgotten again."""
    base = session.length
    start = time.perf_counter()
    target.forward([Feed(session, [1] * tokens)])
    found = time.perf_counter() - start
    session.keep(base)
    return found


def model_of(name: str, folder: Path) -> LeanForward:
    """A model of random weights, or of a .gguf file."""
    if name in configs():
        return LeanBackend(with_random_weights(configs()[name]), name=name, check=False)
    path = Path(name)
    if name in SHAPES:
        path = folder / f"{name}.gguf"
        write_shape(path, name)
    made = in_own_numbers(GGUFFile(path), name, LoadOptions(kv_dtype="float32"))
    assert isinstance(made, LeanForward), "the file is read in its own numbers"
    return made


def forms_of(wide: LeanForward) -> dict[str, LeanForward]:
    """The model with keys and values of its rows' format, and of those with fewer bits."""
    found = {}
    for name, dtype in KV_DTYPES.items():
        if dtype is not None and dtype.itemsize <= wide.dtype.itemsize:
            found[name] = LeanForward(wide.facts, wide.lean)
            found[name].store_kv(dtype)
            found[name].max_positions = None
    return found


def main() -> None:
    """Measure every shape at every context."""
    parser = common.parser(__doc__)
    parser.add_argument("--shape", nargs="*", default=["qwen2.5-0.5b", "qwen2.5-1.5b"], choices=configs())
    parser.add_argument("--gguf", nargs="*", default=["1.5b"], metavar="SHAPE_OR_FILE")
    parser.add_argument("--context", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    facts, rows, raw = run_facts(), [], {}
    for name in (*options.shape, *options.gguf):
        with tempfile.TemporaryDirectory() as folder:
            forms = forms_of(model_of(name, Path(folder)))
        for context in options.context:
            sessions = {form: filled(target, context) for form, target in forms.items()}
            for tokens in TOKENS:
                found: dict[str, list[float]] = {form: [] for form in forms}
                for turn in range(options.turns + 1):
                    for form, target in forms.items():
                        found[form].append(seconds(target, sessions[form], tokens))
                        if not turn:
                            found[form].clear()  # the first pass maps memory
                widest = next(iter(found.values()))
                for form, times in found.items():
                    ratio = median(a / b for a, b in zip(widest, times, strict=True))
                    shown = median_and_range([1000 * each for each in times], 1)
                    memory = f"{sessions[form].nbytes / 2**20:.0f}"
                    shape = name if name in configs() else f"{name if name in SHAPES else Path(name).stem}, Q4_K_M"
                    rows.append([shape, context, tokens, form, memory, shown, f"{ratio:.2f}"])
                    common.say(options, *rows[-1])
                raw[f"{name}, {context}, {tokens}"] = found
            for session in sessions.values():
                session.close()
    heads = ["model", "context", "tokens", "format", "MiB", "ms", "the first / this one"]
    lines = [
        "Random weights, one request; passes in turns on one context. MiB: of the session's keys and values; ms:",
        "of a whole pass over so many tokens (median [least, greatest]). The last column is the median of the",
        "ratios of neighbouring passes. Rows of models in bfloat16 have 16 bits, those of Q4_K_M's types 32.",
        "",
        *table(heads, rows),
    ]
    common.deliver(options, Results("Formats of keys and values", lines, {"seconds": raw}, facts))


if __name__ == "__main__":
    main()
