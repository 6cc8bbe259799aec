"""Measure what rounds cost on models with recurrent layers, and the speed-up that follows at given acceptance rates.

    python scripts/measure_snapshots.py [--model NAME] [--tokens 96] [--lengths 4 8] [--dtype float32]

The models have about 100 million random weights. The drafter knows the target's greedy tokens and makes each of them
wrong with a given probability, so that the acceptance rate is what it should be, and drafts cost no time.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from draftproof import Engine, SamplingParams
from draftproof.backends.base import Feed, FeedOutput
from draftproof.backends.snapshots import SnapshotBackend
from draftproof.draft import Draft
from draftproof.drafters.base import DraftRequest
from draftproof.drafters.ngram import point_chain
from draftproof.drafters.none import NoDrafter
from draftproof.engine.registry import make_verifier
from draftproof.rng import RoundRng

RATES = (0.6, 0.8, 0.95)
PROMPT = 64
LINEAR, FULL = "linear_attention", "full_attention"


def configs() -> dict[str, Any]:
    """A configuration of each kind of recurrent layer, and one of attention only."""
    wide = {"vocab_size": 32000, "hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 4}
    return {
        "qwen3_5_text (linear attention)": transformers.Qwen3_5TextConfig(
            **wide,
            num_hidden_layers=12,
            intermediate_size=2048,
            head_dim=64,
            linear_num_key_heads=8,
            linear_num_value_heads=16,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            tie_word_embeddings=True,
        ),
        "lfm2 (convolutions)": transformers.Lfm2Config(
            **wide,
            num_hidden_layers=12,
            intermediate_size=3072,
            layer_types=["conv", "conv", FULL] * 4,
            tie_word_embeddings=True,
        ),
        "jamba (state space, token by token)": transformers.JambaConfig(
            **wide,
            num_hidden_layers=12,
            intermediate_size=2048,
            num_experts=1,
            num_experts_per_tok=1,
            attn_layer_period=4,
            attn_layer_offset=3,
            tie_word_embeddings=True,
        ),
    }


class Oracle(NoDrafter):
    """Drafts known tokens, each of them wrong with a probability."""

    name, point_masses = "oracle", True

    def __init__(self, known: Sequence[int], length: int, rate: float) -> None:
        self.limit = length
        self._known, self._rate, self._source = known, rate, random.Random(0)

    def propose(self, requests: Sequence[DraftRequest], rng: RoundRng) -> list[Draft]:  # noqa: ARG002
        """See Drafter."""
        (request,) = requests
        start = len(request.tokens) - request.prompt_length
        right = self._known[start : start + max(min(self.limit, request.limit), 0)]
        return [point_chain([each if self._source.random() < self._rate else each ^ 1 for each in right])]


@dataclass
class Run:
    """One request's figures: milliseconds of a round, tokens of a round, and tokens that a round read again."""

    tokens: list[int]
    round_ms: float
    per_round: float
    read_again: float


class Counted:
    """A target that counts the tokens that it reads."""

    def __init__(self, target: Any) -> None:
        self.forward, self.read = target.forward, 0
        target.forward = self

    def __call__(self, feeds: Sequence[Feed], **options: Any) -> list[FeedOutput]:
        """The target's forward pass."""
        self.read += sum(len(feed) for feed in feeds)
        return self.forward(feeds, **options)


def run(target: Any, drafter: Any, tokens: int) -> Run:
    """Decode one request."""
    counted = Counted(target)
    try:
        engine = Engine(target, drafter, make_verifier("block"), max_batch=1)
        prompt = [(place * 7919 + 11) % 31000 for place in range(PROMPT)]
        (request,) = engine.add(prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
        engine.step()
        first, before = request.stats.seconds.total, len(request.output_ids)
        while not request.finished:
            engine.step()
    finally:
        target.forward = counted.forward
    rounds, stats = request.round, request.stats
    needed = PROMPT + rounds - 1 + stats.num_draft_tokens  # every round reads one token that the last one drew
    return Run(
        tokens=request.output_ids,
        round_ms=1e3 * (stats.seconds.total - first) / (rounds - 1),
        per_round=(len(request.output_ids) - before) / (rounds - 1),
        read_again=(counted.read - needed) / (rounds - 1),
    )


def main() -> None:
    """Print a table for each model."""
    every = configs()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=sorted(name.split()[0] for name in every))
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    for name, config in every.items():
        if options.model and name.split()[0] not in options.model:
            continue
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)).eval()
        target = SnapshotBackend(model, name=name)
        weights = sum(each.numel() for each in model.parameters())
        run(target, NoDrafter(), 8)
        plain = min((run(target, NoDrafter(), options.tokens) for _ in range(2)), key=lambda each: each.round_ms)
        print(f"\n{name}: {weights / 1e6:.0f} M weights, a plain step {plain.round_ms:.1f} ms", flush=True)
        print(
            "| drafted | acceptance | tokens a round | read again | round / plain step | speed-up |\n"
            + "|---" * 6
            + "|"
        )
        for length in options.lengths:
            for rate in RATES:
                made = [run(target, Oracle(plain.tokens, length, rate), options.tokens) for _ in range(2)]
                assert all(each.tokens == plain.tokens for each in made), "the same tokens"
                best = min(made, key=lambda each: each.round_ms)
                cost = best.round_ms / plain.round_ms
                print(
                    f"| {length} | {rate} | {best.per_round:.2f} | {best.read_again:.2f} | {cost:.2f} | "
                    f"{best.per_round / cost:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
