"""What one forward pass costs: transformers' own against ours, by the number of new tokens.

    python benchmarks/forward.py --backends hf lean:0 lean --out docs/results/forward

The backends hold a copy of the model each, read the same tokens after the same context, in turn (A B A B ...), and are
rolled back after each pass; `lean:0` is the lean one with DRAFTPROOF_NATIVE=0. Ratios are the first's time over the
last's, of medians and of minima. The floor is the time to read every weight once from memory, at the bandwidth measured
with the same number of threads.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from draftproof import models
from draftproof.backends.base import Feed
from draftproof.backends.loading import load_backend
from draftproof.kernels.native import VARIABLE
from draftproof.tokenization import load_tokenizer

TEXT = "The old man opened the door and looked at the long road that led down to the sea. "


def load(target: str, dtype: str, name: str) -> Any:
    """A backend; its name may be followed by a colon and the value of DRAFTPROOF_NATIVE that it is loaded with."""
    kind, _, native = name.partition(":")
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = native or before or ""
    try:
        return load_backend(target, dtype=dtype, backend=kind)
    finally:
        os.environ[VARIABLE] = before or ""


def measure(args: argparse.Namespace, dtype: str) -> dict[tuple[str, int], list[float]]:
    """Seconds of each pass, by backend and number of new tokens."""
    made = [load(args.target, dtype, name) for name in args.backends]
    text = load_tokenizer(models.resolve(args.target))(TEXT * 40)["input_ids"]
    tokens = [int(token) for token in text][: args.context + max(args.widths)]
    sessions = [backend.open() for backend in made]
    for backend, session in zip(made, sessions, strict=True):
        backend.forward([Feed(session, tokens[: args.context])])
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for repeat in range(-2, args.repeats):  # the first two warm up
        for width in args.widths:
            for name, backend, session in zip(args.backends, made, sessions, strict=True):
                start = time.perf_counter()
                backend.forward([Feed(session, tokens[args.context : args.context + width])])
                if repeat >= 0:
                    seconds[name, width].append(time.perf_counter() - start)
                session.keep(args.context)
    return seconds


def bandwidth(size: int = 2**28, repeats: int = 10) -> float:
    """Bytes read from memory in a second, the best of several sums over more than any cache holds."""
    data = torch.ones(size // 8, dtype=torch.int64)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best


def floor(args: argparse.Namespace, dtype: str, rate: float) -> float:
    """Seconds to read each weight that a pass multiplies by once: the embedding only where it is the output layer."""
    model = load_backend(args.target, dtype=dtype, check=False, backend="hf").model
    head, rows = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    unread = 0 if head is rows else rows.nbytes
    return (sum(weights.nbytes for weights in model.parameters()) - unread) / rate


def table(args: argparse.Namespace) -> str:
    """The measurements as Markdown."""
    rate, load = bandwidth(), os.getloadavg()[0]
    lines = [
        "# One forward pass",
        "",
        (
            f"Target {args.target}, batch 1, context {args.context}; {torch.get_num_threads()} threads "
            f"({platform.machine()}, {os.cpu_count()} cores, load {load:.1f} at the start), torch {torch.__version__}; "
            f"memory reads {rate / 1e9:.0f} GB/s; {args.repeats} interleaved repetitions; ms, minimum / median."
        ),
        "",
        f"| dtype | new tokens | {' | '.join(args.backends)} | ratio of medians | ratio of minima | memory floor |",
        "|---" * (len(args.backends) + 5) + "|",
    ]
    for dtype in args.dtype:
        least = 1000 * floor(args, dtype, rate)
        seconds = measure(args, dtype)
        for width in args.widths:
            own = [seconds[name, width] for name in args.backends]
            low, middle = [min(times) for times in own], [statistics.median(times) for times in own]
            cells = [f"{1000 * a:.1f} / {1000 * b:.1f}" for a, b in zip(low, middle, strict=True)]
            ratios = [f"{middle[0] / middle[-1]:.2f}", f"{low[0] / low[-1]:.2f}"]
            lines.append(f"| {' | '.join([dtype, str(width), *cells, *ratios, f'{least:.1f}'])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--backends", nargs="+", default=["hf", "lean"])
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 9, 33, 65])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--threads", type=int, help="without it torch's own choice")
    parser.add_argument("--out", type=Path, help="where to write the table, without its ending")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    made = table(args)
    print(made)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.with_suffix(".md").write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
