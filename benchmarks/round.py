"""Where the time of a round goes, by transformers' forward and by the lean one, and how far parts are from floors.

    python benchmarks/round.py --head artefacts/smollm2-135m-feature-head --out docs/results/round

The same prompts by plain decoding and by a feature head with four drafted tokens, on each backend, in turn. Floors: the
time to read what a part must read once (weights; for the rule logits, p and q) at the bandwidth that was measured, and
the time of a part's multiplications at the rate of a large product, both with the same number of threads.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from forward import bandwidth

from draftproof import Engine, SamplingParams, models
from draftproof.backends.feature_net import load_net
from draftproof.backends.loading import load_backend
from draftproof.bench.questions import read_questions
from draftproof.engine.registry import make_drafter, make_verifier
from draftproof.tokenization import load_tokenizer

PARTS = ("draft", "target", "verify", "other")


def rate(dtype: torch.dtype, size: int = 2048, repeats: int = 8) -> float:
    """Operations a second of a large product, the best of several."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def floors(args: argparse.Namespace, target: Any) -> dict[str, tuple[float, float]]:
    """Bytes and operations of each part of a round of the feature head, as milliseconds at the measured rates."""
    net, vocab = load_net(args.head), target.vocab_size
    head = sum(weights.numel() for weights in net.parameters()) + net.config.ids * net.config.hidden_size
    size = target.dtype.itemsize
    whole = sum(weights.numel() for weights in target.model.parameters())
    steps, read = args.length, bandwidth()
    work = rate(target.dtype)
    seen = vocab * ((steps + 1) * (size + 4) + steps * 4)
    return {
        "draft": (1000 * steps * head * size / read, 1000 * steps * 2 * head / work),
        "target": (1000 * whole * size / read, 1000 * (steps + 1) * 2 * whole / work),
        "verify": (1000 * seen / read, 0.0),
    }


def measure(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, tuple[float, float]]]:
    """Seconds of each part by backend, way and prompt."""
    tokenizer = load_tokenizer(models.resolve(args.target))
    floor = floors(args, load_backend(args.target, dtype=args.dtype, backend="hf", check=False))
    engines: dict[tuple[str, str], Engine] = {}
    for backend in args.backends:
        target = load_backend(args.target, dtype=args.dtype, backend=backend)
        ends = tuple(dict.fromkeys((*target.eos_token_ids, tokenizer.eos_token_id)))
        spec = f"feature_head:{args.head}"
        drafter = make_drafter(spec, target=target, draft=None, stopper=f"fixed:{args.length}")
        for way, part in (("plain", None), ("feature head", drafter)):
            engines[backend, way] = Engine(
                target, part, make_verifier("block"), tokenizer=tokenizer, eos_token_ids=ends, max_batch=1
            )
    texts = [question.turns[0] for question in read_questions(args.dataset)][: args.questions + 1]
    rows: list[dict[str, Any]] = []
    for number, text in enumerate(texts):  # the first warms up
        params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, seed=number, ignore_eos=True)
        for (backend, way), engine in engines.items():
            stats = engine.generate([[{"role": "user", "content": text}]], params)[0].stats
            split = stats.seconds.to_dict()
            if number:
                facts = {"prompt": number, "backend": backend, "way": way, "calls": stats.num_target_calls}
                rows.append({**facts, "tokens": stats.num_tokens, "seconds": {**split, "total": stats.seconds.total}})
    return rows, floor


def report(args: argparse.Namespace, rows: list[dict[str, Any]], floor: dict[str, tuple[float, float]]) -> str:
    """The tables as Markdown."""
    lines = [
        "# Where the time of a round goes",
        "",
        (
            f"{args.target} in {args.dtype}, {args.dataset}, {args.questions} prompts in turn, {args.tokens} tokens, "
            f"temperature {args.temperature:g}, feature head with {args.length} drafted tokens, block verification; "
            f"{torch.get_num_threads()} threads on {os.cpu_count()} cores ({platform.machine()}), "
            f"load {os.getloadavg()[0]:.1f} at the end. Milliseconds a round, medians over prompts, prompts' own pass "
            "included."
        ),
        "",
        f"| backend | way | {' | '.join(PARTS)} | round | tokens a round | tokens a second |",
        "|---" * (len(PARTS) + 5) + "|",
    ]
    for backend in args.backends:
        for way in ("plain", "feature head"):
            own = [row for row in rows if (row["backend"], row["way"]) == (backend, way)]
            parts = [statistics.median(1000 * row["seconds"][part] / row["calls"] for row in own) for part in PARTS]
            whole = statistics.median(1000 * row["seconds"]["total"] / row["calls"] for row in own)
            per = statistics.median(row["tokens"] / row["calls"] for row in own)
            speed = statistics.median(row["tokens"] / row["seconds"]["total"] for row in own)
            cells = [*(f"{value:.2f}" for value in (*parts, whole, per)), f"{speed:.1f}"]
            lines.append(f"| {backend} | {way} | {' | '.join(cells)} |")
    lines += [
        "",
        f"| floor of a round with {args.length} drafted tokens | memory, ms | arithmetic, ms |",
        "|---|---|---|",
    ]
    lines += [f"| {part} | {read:.2f} | {work:.2f} |" for part, (read, work) in floor.items()]
    base, best = args.backends[0], args.backends[-1]
    speed = {
        key: {row["prompt"]: row["tokens"] / row["seconds"]["total"] for row in rows if named(row) == key}
        for key in {named(row) for row in rows}
    }
    ratios = [speed[best, "feature head"][n] / speed[base, "plain"][n] for n in speed[base, "plain"]]
    told = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
    return "\n".join([*lines, "", f"{best} with the feature head over {base} plain, prompt by prompt: {told}."]) + "\n"


def named(row: dict[str, Any]) -> tuple[str, str]:
    """Backend and way of a measurement."""
    return row["backend"], row["way"]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backends", nargs="+", default=["hf", "lean"])
    parser.add_argument("--dataset", default="fiction")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows, floor = measure(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(
        json.dumps({"rows": rows, "floors": floor}, indent=1) + "\n", encoding="utf-8"
    )
    args.out.with_suffix(".md").write_text(report(args, rows, floor), encoding="utf-8")
    print(report(args, rows, floor))


if __name__ == "__main__":
    main()
