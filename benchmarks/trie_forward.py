"""What reading a trie costs the target: 8 chains of 8 tokens in one forward pass, against a chain of 9 tokens.

    python benchmarks/trie_forward.py --out docs/results/trie_forward

The tries are drawn by the engine's own drafter (equal prefixes merged, so at most 65 positions with the root); each is
read by the target and rolled back, in turn with a root and 8 drafted tokens as one chain. Medians of the ratio to
the chain's time in the same repetition, with quartiles.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from draftproof import models
from draftproof.backends.base import Feed, unread
from draftproof.backends.loading import load_backend
from draftproof.drafters.base import DraftRequest
from draftproof.engine.registry import make_drafter
from draftproof.rng import CounterRoundRng
from draftproof.sampling import SamplingParams
from draftproof.tokenization import load_tokenizer
from draftproof.tree import TokenTree

TEXT = "The old man opened the door and looked at the long road that led down to the sea. "


def measure(args: argparse.Namespace) -> list[dict]:
    """A row a shape and repetition, in seconds."""
    target, draft = load_backend(args.target, dtype=args.dtype), load_backend(args.draft, dtype=args.dtype)
    tokens = [int(t) for t in load_tokenizer(models.resolve(args.target))(TEXT * 40)["input_ids"]][: args.context]
    session, rows = target.open(), []
    target.forward([Feed(session, tokens[:-1])])
    shapes: dict[str, TokenTree | None] = {"one token": None}
    for temperature in args.temperature:
        shapes[f"8 chains of 8, T = {temperature:g}"] = trie(draft, target, tokens, temperature)
    shapes["64 nodes, nothing merged"] = TokenTree(
        torch.tensor((tokens * 64)[:64]), tuple(-1 if i % 8 == 0 else i - 1 for i in range(64))
    )
    shapes["chain of 8"] = TokenTree.chain(torch.tensor(tokens[:8]))
    for repeat in range(args.repeats + 2):
        for name, tree in shapes.items():
            pending = unread(session, tokens)
            start = time.perf_counter()
            target.forward([Feed(session, pending, tree)])
            seconds = time.perf_counter() - start
            if repeat >= 2:  # the first two warm up
                positions = len(pending) + (0 if tree is None else len(tree))
                rows.append({"shape": name, "positions": positions, "repeat": repeat, "seconds": seconds})
    return rows


def trie(draft: object, target: object, tokens: list[int], temperature: float) -> TokenTree:
    """A draft of 8 chains of 8 tokens after the context."""
    drafter = make_drafter("chains:8", target=target, draft=draft, stopper="fixed:8")
    transforms = SamplingParams(temperature=temperature).bind(
        vocab_size=target.vocab_size, eos_token_ids=(), prompt_ids=tokens
    )
    (made,) = drafter.propose([DraftRequest(0, tokens, len(tokens), 8, transforms)], CounterRoundRng([1], [0]))
    drafter.release(0)
    assert len(made) <= 64, "8 chains of 8 tokens have at most 64 nodes"
    return made.tree


def report(args: argparse.Namespace, rows: list[dict]) -> str:
    """The table as Markdown."""
    lines = [
        "# A trie in one forward pass",
        "",
        (
            f"Target {args.target}, {args.dtype}, batch 1, context {args.context}; {torch.get_num_threads()} threads "
            f"({platform.machine()}), torch {torch.__version__}; {args.repeats} interleaved repetitions."
        ),
        "",
        "| read after the context | positions | ms, median | ratio to 9 positions of a chain, median (quartiles) |",
        "|---|---|---|---|",
    ]
    chain = {row["repeat"]: row["seconds"] for row in rows if row["shape"] == "chain of 8"}
    for name in dict.fromkeys(row["shape"] for row in rows):
        own = [row for row in rows if row["shape"] == name]
        ratios = [row["seconds"] / chain[row["repeat"]] for row in own]
        low, _, high = statistics.quantiles(ratios, n=4)
        ms = 1000 * statistics.median(row["seconds"] for row in own)
        cells = (name, own[0]["positions"], f"{ms:.1f}", f"{statistics.median(ratios):.2f} ({low:.2f}-{high:.2f})")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", default="smollm2-135m-draft")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.6, 1.0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = measure(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    args.out.with_suffix(".md").write_text(report(args, rows), encoding="utf-8")
    print(report(args, rows))


if __name__ == "__main__":
    main()
