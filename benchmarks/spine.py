"""What speculation gains on a real model today: block efficiency, acceptance, and where the time goes.

    python benchmarks/spine.py --target smollm2-135m --draft smollm2-135m-draft --out docs/results/spine

Every composition answers the same prompts on the same loaded target, the compositions in turn within each prompt, so
that a change of the machine's speed meets all of them. Writes OUT.jsonl (a line an answer) and OUT.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from pathlib import Path

import torch
import transformers

import draftproof
from draftproof import Engine, SamplingParams
from draftproof.backends.loading import load_backend
from draftproof.engine.registry import make_drafter, make_verifier
from draftproof.engine.stats import Stats

COMPOSITIONS = {
    "plain": (None, "block"),
    "model, token": ("model", "token"),
    "model, block": ("model", "block"),
    "chains:2, spectr": ("chains:2", "spectr"),
    "chains:2, trie_block": ("chains:2", "trie_block"),
    "chains:4, trie_block": ("chains:4", "trie_block"),
    "ngram:8, block": ("ngram:8", "block"),
}


def engines(args: argparse.Namespace) -> dict[str, Engine]:
    """One engine a composition, all on the same loaded models."""
    first = Engine.load(args.target, dtype=args.dtype)
    draft = load_backend(args.draft, dtype=args.dtype)
    made = {}
    for name, (drafter, rule) in COMPOSITIONS.items():
        reads = drafter is not None and not drafter.startswith("ngram")
        part = make_drafter(drafter, draft=draft if reads else None, stopper=args.stopper, target=first.target)
        made[name] = Engine(
            first.target, part, make_verifier(rule), tokenizer=first.tokenizer, eos_token_ids=first.eos_token_ids
        )
    return made


def measure(args: argparse.Namespace) -> list[dict]:
    """Every prompt at every temperature by every composition."""
    made = engines(args)
    prompts = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    rows = []
    for place, prompt in enumerate(prompts):
        for temperature in args.temperature:
            params = SamplingParams(temperature=temperature, max_tokens=args.max_tokens, seed=args.seed)
            for name, engine in made.items():
                (out,) = engine.generate([[{"role": "user", "content": prompt["prompt"]}]], params)
                print(
                    f"{place + 1}/{len(prompts)} T={temperature:g} {name}: {out.stats.block_efficiency:.2f}",
                    file=sys.stderr,
                )
                answer = {"token_ids": list(out.token_ids), "text": out.text, "stats": out.stats.to_dict()}
                rows.append({"set": prompt["set"], "id": prompt["id"], "T": temperature, "composition": name, **answer})
    return rows


def total(rows: list[dict]) -> Stats:
    """Statistics of several answers added up."""
    added = Stats()
    for row in rows:
        stats = row["stats"]
        for name in ("num_tokens", "num_target_calls", "num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            setattr(added, name, getattr(added, name) + stats[name])
        for part in ("draft", "target", "verify", "total"):
            setattr(added.seconds, part, getattr(added.seconds, part) + stats["seconds"][part])
    return added


def report(args: argparse.Namespace, rows: list[dict]) -> str:
    """The table as Markdown."""
    machine = f"{torch.get_num_threads()} threads on {os.cpu_count()} cores ({platform.machine()})"
    versions = (
        f"draftproof {draftproof.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    setting = f"{args.dtype}, {args.stopper}, {args.max_tokens} tokens, batch 1, seed {args.seed}"
    lines = [
        "# Speculation on a real model: what it gains today",
        "",
        f"Target {args.target}, draft {args.draft}, {setting}; {versions}, {machine}.",
        "",
        "Tokens per target call count all calls, prompts included. Speed is the median over prompts of the ratio to",
        "plain decoding of the same prompt in the same run, with its range; seconds are sums over prompts.",
    ]
    for temperature in args.temperature:
        at = [row for row in rows if row["T"] == temperature]
        plain = {row["id"]: row for row in at if row["composition"] == "plain"}
        lines += ["", f"## Temperature {temperature:g}", ""]
        head = ("composition", "tokens per target call", "accepted of drafted", "speed", "draft s", "target s")
        head = (*head, "verify s", "other s", "same tokens as plain")
        lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for name in COMPOSITIONS:
            own = [row for row in at if row["composition"] == name]
            stats = total(own)
            speeds = [row["stats"]["tokens_per_second"] / plain[row["id"]]["stats"]["tokens_per_second"] for row in own]
            same = sum(row["token_ids"] == plain[row["id"]]["token_ids"] for row in own)
            accepted = f"{stats.num_accepted_tokens / stats.num_draft_tokens:.0%}" if stats.num_draft_tokens else "-"
            speed = f"{statistics.median(speeds):.2f}x ({min(speeds):.2f}-{max(speeds):.2f})"
            parts = [f"{stats.seconds.to_dict()[part]:.1f}" for part in ("draft", "target", "verify", "other")]
            equal = f"{same} of {len(own)}" if temperature == 0 else "sampled"
            cells = (name, f"{stats.block_efficiency:.2f}", accepted, speed, *parts, equal)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", default="smollm2-135m-draft")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--stopper", default="fixed:4")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent / "prompts" / "spine.jsonl")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = measure(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    args.out.with_suffix(".md").write_text(report(args, rows), encoding="utf-8")
    print(report(args, rows))


if __name__ == "__main__":
    main()
