"""Where drafts without a model pay: code editing and quoting, with ordinary prompts beside them.

    python benchmarks/lookup.py --out docs/results/lookup

Every drafter answers every prompt on the same loaded target, in turn within each prompt. Greedy answers must equal the
plain ones. Writes OUT.jsonl (a line an answer) and OUT.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from pathlib import Path

import torch

from draftproof import Engine, SamplingParams
from draftproof.engine.registry import make_drafter

DRAFTERS = ("none", "ngram:4", "ngram:8", "ngram:16", "suffix:16")


def measure(args: argparse.Namespace) -> list[dict]:
    """Every prompt by every drafter."""
    first = Engine.load(args.target, dtype=args.dtype)
    engines = {
        spec: Engine(
            first.target,
            make_drafter(spec, target=first.target, draft=None, stopper="fixed:4"),
            tokenizer=first.tokenizer,
            eos_token_ids=first.eos_token_ids,
        )
        for spec in DRAFTERS
    }
    prompts = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    first.generate(prompts[0]["prompt"], SamplingParams(max_tokens=8, temperature=0))  # warms up
    rows = []
    for place, prompt in enumerate(prompts):
        for temperature in args.temperature:
            params = SamplingParams(temperature=temperature, max_tokens=args.max_tokens, seed=args.seed)
            for spec, engine in engines.items():
                (out,) = engine.generate([[{"role": "user", "content": prompt["prompt"]}]], params)
                answer = {"token_ids": list(out.token_ids), "stats": out.stats.to_dict()}
                rows.append({"set": prompt["set"], "id": prompt["id"], "T": temperature, "drafter": spec, **answer})
            print(f"{place + 1}/{len(prompts)} T={temperature:g}", file=sys.stderr)
    return rows


def report(args: argparse.Namespace, rows: list[dict]) -> str:
    """The tables as Markdown."""
    lines = [
        "# Drafts without a model",
        "",
        (
            f"Target {args.target}, {args.dtype}, rule block, batch 1, up to {args.max_tokens} tokens, "
            f"seed {args.seed}; {torch.get_num_threads()} threads ({platform.machine()})."
        ),
        "",
        "Tokens per target call count the prompt's call. Speed: median over prompts of the ratio to plain decoding of",
        "the same prompt in the same run, with its range. suffix reads earlier requests: greedy ones, in this order.",
    ]
    for temperature in args.temperature:
        lines += ["", f"## Temperature {temperature:g}", ""]
        heads = ("prompts", "drafter", "tokens per target call", "drafted per emitted", "speed", "same tokens as plain")
        lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        at = [row for row in rows if row["T"] == temperature]
        plain = {row["id"]: row for row in at if row["drafter"] == "none"}
        for kind in dict.fromkeys(row["set"] for row in at):
            for spec in DRAFTERS:
                own = [row for row in at if (row["set"], row["drafter"]) == (kind, spec)]
                lines.append(f"| {' | '.join((kind, spec, *cells(own, plain, temperature)))} |")
    return "\n".join(lines) + "\n"


def cells(own: list[dict], plain: dict[str, dict], temperature: float) -> tuple[str, ...]:
    """Figures of one drafter on one set of prompts."""
    tokens = sum(row["stats"]["num_tokens"] for row in own)
    calls = sum(row["stats"]["num_target_calls"] for row in own)
    drafted = sum(row["stats"]["num_draft_tokens"] for row in own)
    ratios = [row["stats"]["tokens_per_second"] / plain[row["id"]]["stats"]["tokens_per_second"] for row in own]
    same = sum(row["token_ids"] == plain[row["id"]]["token_ids"] for row in own)
    speed = f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})"
    equal = f"{same} of {len(own)}" if temperature == 0 else "sampled"
    return f"{tokens / calls:.2f}", f"{drafted / tokens:.2f}", speed, equal


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent / "prompts" / "lookup.jsonl")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-tokens", type=int, default=64)
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
