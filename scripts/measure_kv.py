"""Measure a token after long contexts with keys and values of 8 bits beside 16, at the shapes of larger models.

    python scripts/measure_kv.py [--shape qwen2.5-0.5b ...] [--context 8192 32768] [--turns 9] [--out docs/results/kv]

Weights are random bfloat16 numbers, and so are the keys and values of the context, which are written to the cache
directly: what a pass costs does not depend on them. Both forms share one model and take turns.
"""

from __future__ import annotations

import time
from statistics import median

import common
import torch
from measure_shapes import configs, with_random_weights

from draftproof.backends.base import Feed
from draftproof.backends.cache.sessions import SlotSession
from draftproof.backends.lean.backend import LeanBackend, LeanForward
from draftproof.provenance import run_facts
from draftproof.results import Results, median_and_range, table

DRAFTED = 4  # tokens that a pass verifies beside one


@torch.inference_mode()
def filled(target: LeanForward, context: int) -> SlotSession:
    """A session of random tokens, keys and values."""
    session, cache = target.open(), target.cache
    target.forward([Feed(session, [1])])
    cache.claim([session.slot], [context + DRAFTED + 2])
    for layer in target.lean.layers:
        heads = layer.heads
        stored = cache.buffers(layer.number, heads.keys, heads.dim, target.lean.embed.weight)
        for each in stored[:2]:
            part = each[session.slot, :, :context]
            noise = torch.randn(part.shape)
            part.copy_((noise * 40).clamp(-127, 127) if cache.rounds else noise)
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


def main() -> None:
    """Measure every shape at every context."""
    parser = common.parser(__doc__)
    parser.add_argument("--shape", nargs="+", default=["qwen2.5-0.5b", "qwen2.5-1.5b"], choices=configs())
    parser.add_argument("--context", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    facts, rows, raw = run_facts(), [], {}
    for name in options.shape:
        wide = LeanBackend(with_random_weights(configs()[name]), name=name, check=False)
        wide.max_positions = None
        for context in options.context:
            eight = LeanForward(wide.facts, wide.lean)
            eight.round_kv()
            eight.max_positions = None
            forms = {"16": wide, "8": eight}
            sessions = {bits: filled(target, context) for bits, target in forms.items()}
            sizes = {bits: session.nbytes for bits, session in sessions.items()}
            for tokens in (1, 1 + DRAFTED):
                found: dict[str, list[float]] = {bits: [] for bits in forms}
                for turn in range(options.turns + 1):
                    for bits, target in forms.items():
                        found[bits].append(seconds(target, sessions[bits], tokens))
                        if not turn:
                            found[bits].clear()  # the first pass maps memory
                ratios = [a / b for a, b in zip(found["16"], found["8"], strict=True)]
                shown = [median_and_range([1000 * each for each in found[bits]], 1) for bits in forms]
                memory = [f"{sizes[bits] / 2**20:.0f}" for bits in forms]
                rows.append([name, context, tokens, *memory, *shown, f"{median(ratios):.2f}"])
                raw[f"{name}, {context}, {tokens}"] = found
                common.say(options, *rows[-1])
            for session in sessions.values():
                session.close()
    heads = ["shapes", "context", "tokens", "16 bits, MiB", "8 bits, MiB", "16 bits, ms", "8 bits, ms", "16 / 8"]
    lines = [
        "Random bfloat16 weights, one request; passes in turns on one context. MiB are those of the session's keys and",
        "values, ms those of a whole pass over so many tokens (median [least, greatest]). The last column is the",
        "median of the ratios of neighbouring passes.",
        "",
        *table(heads, rows),
    ]
    common.deliver(options, Results("Keys and values of 8 bits", lines, {"seconds": raw}, facts))


if __name__ == "__main__":
    main()
