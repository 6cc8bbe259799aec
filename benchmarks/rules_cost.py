"""What each rule costs, as a ratio to one softmax over the target's rows, and the memory it takes.

    python benchmarks/rules_cost.py --out docs/results/rules_cost

Within a repetition the softmax and all rules run one after another on the same rows; ratios are taken within a
repetition, their median and range reported. Memory is the growth of the process's peak during one call, in units of the
rows of p.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from draftproof.functional import (
    block_verify,
    match_verify,
    multi_round_verify,
    spectr_verify,
    token_verify,
    traversal_verify,
    trie_block_verify,
)
from draftproof.functional.lossy import last_token_verify, typical_verify
from draftproof.rng import TorchRng

CHAIN = {
    "token": token_verify,
    "block": block_verify,
    "match": match_verify,
    "last_token (lossy)": last_token_verify,
    "typical (lossy)": typical_verify,
}
PATH = {
    "spectr": spectr_verify,
    "multi_round": multi_round_verify,
    "traversal": traversal_verify,
    "trie_block": trie_block_verify,
}


def rows(batch: int, drafts: int, n: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of the target, q and tokens of a round: peaked rows, the draft a noisy copy of the target."""
    source = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(batch, drafts, n + 1, vocab, generator=source)
    q = logits[:, :, :n] + torch.randn(batch, drafts, n, vocab, generator=source)
    q = q.softmax(-1)
    q[:, :, 0] = q[:, :1, 0]  # all drafts begin in one context
    logits[:, :, 0] = logits[:, :1, 0]
    tokens = TorchRng(0).categorical(q)
    return logits, q, tokens


def peak_growth(call: Callable[[], object]) -> int:
    """Bytes by which the process's peak memory grows during a call (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    call()
    return max(_status("VmHWM") - before, 0)


def _status(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def calls(batch: int, drafts: int, n: int, vocab: int) -> dict[str, Callable[[], object]]:
    """The softmax and every rule on the same rows."""
    logits, q, tokens = rows(batch, drafts, n, vocab)
    p = logits.softmax(-1)
    made: dict[str, Callable[[], object]] = {"softmax": lambda: logits.softmax(-1)}
    if drafts == 1:
        flat = (tokens[:, 0], q[:, 0], p[:, 0])
        for name, rule in CHAIN.items():
            made[name] = lambda rule=rule: rule(*flat, rng=TorchRng(1), validate=False)
    for name, rule in PATH.items():
        made[name] = lambda rule=rule: rule(tokens, q, p, rng=TorchRng(1), validate=False)
    return made


def measure(args: argparse.Namespace) -> list[dict]:
    """All sizes."""
    found = []
    for vocab in args.vocab:
        for batch in args.batch:
            for drafts in args.drafts:
                print(f"V={vocab} B={batch} K={drafts}", file=sys.stderr)
                found.extend(one_size(batch, drafts, args.n, vocab, args.repeats))
    return found


def one_size(batch: int, drafts: int, n: int, vocab: int, repeats: int) -> list[dict]:
    """Times and memory at one size."""
    made = calls(batch, drafts, n, vocab)
    memory = {name: peak_growth(call) for name, call in made.items()}  # warms up as well
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(repeats):
        for name, call in made.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    unit = batch * drafts * (n + 1) * vocab * 4
    return [
        {
            "vocab": vocab,
            "batch": batch,
            "drafts": drafts,
            "rule": name,
            "ms": statistics.median(times[name]) * 1e3,
            "ratios": [own / base for own, base in zip(times[name], times["softmax"], strict=True)],
            "over_token": [own / base for own, base in zip(times[name], times.get("token", times[name]), strict=True)],
            "memory": memory[name] / unit,
        }
        for name in made
    ]


def report(args: argparse.Namespace, found: list[dict]) -> str:
    """The table as Markdown."""
    machine = f"{torch.get_num_threads()} threads on {os.cpu_count()} cores ({platform.machine()})"
    lines = [
        "# What each rule costs",
        "",
        f"n = {args.n}, float32, {args.repeats} repetitions, torch {torch.__version__}, {machine}.",
        "Ratios to one softmax over the target's rows: median (range). Memory: growth of the process' peak in a call,",
        "in units of the target's rows (the softmax makes one copy of them: 1.0). Rules for several drafts are given",
        "K chains; reading their tokens and merging them is included.",
        "",
        "| V | B | K | rule | ms | ratio to softmax | ratio to token | memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        ratios, over = row["ratios"], row["over_token"]
        token = f"{statistics.median(over):.2f}" if row["drafts"] == 1 and row["rule"] != "softmax" else "-"
        lines.append(
            f"| {row['vocab']} | {row['batch']} | {row['drafts']} | {row['rule']} | {row['ms']:.2f} | "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) | {token} | {row['memory']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vocab", type=int, nargs="+", default=[32000, 151936, 262144])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = measure(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    args.out.with_suffix(".md").write_text(report(args, found), encoding="utf-8")
    print(report(args, found))


if __name__ == "__main__":
    main()
