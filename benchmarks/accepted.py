"""Tokens per target call of every rule, 1 + E[accepted], on synthetic pairs and on real ones, by number of drafts.

    python benchmarks/accepted.py --out docs/results/accepted

The engine generates with drafts of n tokens; every rule gets the same pair, prompts and seeds. Values are means over
seeds with their standard error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof import Engine, SamplingParams, models
from draftproof.backends.base import Backend
from draftproof.backends.loading import load_backend
from draftproof.engine.registry import make_drafter, make_verifier
from draftproof.rng import fold
from draftproof.testing import TableModel
from draftproof.tokenization import load_tokenizer

SINGLE = ("match", "token", "block")
SEVERAL = ("multi_round", "spectr", "traversal", "trie_block")
TEXTS = (
    "Once upon a time there was a",
    "The old man opened the door and",
    "One day, a little girl named",
    "In the morning they walked to the",
)


class NoisyTable(TableModel):
    """Rows softmax(3 common + noise own): pairs with one `common` seed resemble each other, the less the more noise."""

    def __init__(self, vocab: int, common: int, own: int, noise: float) -> None:
        super().__init__(vocab, own, order=1)
        self._common, self._noise = common, noise

    def logits(self, context: Sequence[int]) -> Float[Tensor, " vocab"]:
        """A row after a context; few are kept, since those of a large vocabulary fill the memory."""
        if len(self._rows) * self.vocab_size > 1 << 25:
            self._rows.clear()
        return super().logits(context)

    def _random_row(self, key: tuple[int, ...]) -> Float[Tensor, " vocab"]:
        shared = torch.Generator().manual_seed(fold(self._common, *key) >> 1)
        own = torch.Generator().manual_seed(fold(self._seed, *key) >> 1)
        scores = 3 * torch.randn(self.vocab_size, dtype=torch.float64, generator=shared)
        scores += self._noise * torch.randn(self.vocab_size, dtype=torch.float64, generator=own)
        return scores.log_softmax(-1)


def synthetic(vocab: int) -> tuple[Backend, Backend, list[list[int]]]:
    """A table pair of a size, with prompts of one token."""
    return NoisyTable(vocab, 1, 2, 0.0), NoisyTable(vocab, 1, 3, 1.0), [[i] for i in range(4)]


def real(target: str, draft: str, dtype: str) -> tuple[Backend, Backend, list[list[int]]]:
    """A pair of named models, with prompts of plain text."""
    tokenizer = load_tokenizer(models.resolve(target))
    prompts = [[int(token) for token in tokenizer(text)["input_ids"]] for text in TEXTS]
    return load_backend(target, dtype=dtype), load_backend(draft, dtype=dtype), prompts


def efficiency(engine: Engine, prompts: list[list[int]], seeds: int, length: int) -> list[float]:
    """Tokens per target call of each seed, all prompts together."""
    found = []
    for seed in range(seeds):
        outs = engine.generate(prompts, SamplingParams(max_tokens=length, seed=seed, ignore_eos=True))
        found.append(sum(o.stats.num_tokens for o in outs) / sum(o.stats.num_target_calls for o in outs))
    return found


def measure(args: argparse.Namespace) -> list[dict]:
    """Every pair, rule and number of drafts."""
    pairs = {
        f"{t} / {d}": (lambda t=t, d=d: real(t, d, args.dtype)) for t, d in (pair.split("/") for pair in args.pairs)
    }
    pairs |= {f"synthetic V={vocab}": (lambda vocab=vocab: synthetic(vocab)) for vocab in args.vocab}
    found: list[dict] = []
    for name, make in pairs.items():
        target, draft, prompts = make()
        for n, rule, drafts in itertools.product(args.n, args.rules, args.drafts):
            if rule in SINGLE and drafts > 1:
                continue
            kind = "model" if rule in SINGLE else f"chains:{drafts}"
            part = make_drafter(kind, target=target, draft=draft, stopper=f"fixed:{n}")
            engine = Engine(target, part, make_verifier(rule))
            slow = "smollm2" in name or "50000" in name
            values = efficiency(engine, prompts, args.seeds if not slow else max(args.seeds // 4, 2), args.length)
            found.append({"pair": name, "n": n, "rule": rule, "drafts": drafts, "values": values})
            print(f"{name} n={n} {rule} K={drafts}: {statistics.mean(values):.2f}", file=sys.stderr)
        write(args, found)
    return found


def write(args: argparse.Namespace, found: list[dict]) -> None:
    """What is measured so far; called after each pair, for the last ones take minutes."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    args.out.with_suffix(".md").write_text(report(args, found), encoding="utf-8")


def report(args: argparse.Namespace, found: list[dict]) -> str:
    """A table a pair as Markdown: rules down, drafts across."""
    lines = [
        "# Tokens per target call by rule and number of drafts",
        "",
        "1 + E[accepted] at temperature 1, drafts of n tokens; mean over seeds with its standard error.",
        "Synthetic pairs: rows softmax(3 a + noise b) by the last token, a common to both, b the draft's own, noise 1.",
    ]
    for pair, n in itertools.product(dict.fromkeys(row["pair"] for row in found), args.n):
        lines += ["", f"## {pair}, n = {n}", "", f"| rule | {' | '.join(f'K = {k}' for k in args.drafts)} |"]
        lines += ["|---" * (len(args.drafts) + 1) + "|"]
        at = [row for row in found if (row["pair"], row["n"]) == (pair, n)]
        for rule in args.rules:
            own = {row["drafts"]: _cell(row["values"]) for row in at if row["rule"] == rule}
            lines.append(f"| {rule} | {' | '.join(own.get(drafts, '') for drafts in args.drafts)} |")
    return "\n".join(lines) + "\n"


def _cell(values: list[float]) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.mean(values):.2f} ± {error:.2f}"


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vocab", type=int, nargs="*", default=[50, 1000, 50000])
    parser.add_argument(
        "--pairs", nargs="*", default=["embedded:target/embedded:draft", "smollm2-135m/smollm2-135m-draft"]
    )
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--n", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rules", nargs="+", default=[*SINGLE, *SEVERAL])
    parser.add_argument("--dtype", default="auto", help="of real models")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    print(report(args, measure(args)))


if __name__ == "__main__":
    main()
