"""Measure what a round with drafter `quantized:4` costs at the shapes of larger models, with random bfloat16 weights.

    python scripts/measure_shapes.py [--shape NAME ...] [--context 64 2048] [--repeats 9] [--out docs/results/shapes]

What a pass costs does not depend on what the weights say. The speed-ups in the table follow from these costs, for given
shares of accepted tokens: they are computed, not measured, and leave out the rule (see round.md).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import transformers

from draftproof.backends.base import Feed, unread
from draftproof.backends.hf import HFBackend
from draftproof.backends.lean import LeanBackend
from draftproof.backends.slots import SlotBackend
from draftproof.kernels.native import VARIABLE
from draftproof.provenance import run_facts
from draftproof.results import Results, median_and_range, table
from draftproof.theory.lengths import iid_block_efficiency

RATES = (0.9, 0.95, 0.97)
LENGTHS = range(1, 13)
VERIFIED = 5  # drafted tokens that the measured verification reads
_RANDOM = 1 << 20  # different random weights; the rest repeats them


def configs() -> dict[str, Any]:
    """Configurations with the shapes of models that people run."""
    qwen = {
        "vocab_size": 151936,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    }
    return {
        "qwen2.5-0.5b": transformers.Qwen2Config(
            **qwen, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14
        ),
        "qwen2.5-1.5b": transformers.Qwen2Config(
            **qwen, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12
        ),
        "qwen2.5-3b": transformers.Qwen2Config(
            **qwen, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16
        ),
        "gemma3-1b": transformers.Gemma3TextConfig(
            vocab_size=262144,
            hidden_size=1152,
            intermediate_size=6912,
            num_hidden_layers=26,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
            tie_word_embeddings=True,
        ),
        "mixture-1.7b": transformers.Qwen3MoeConfig(
            vocab_size=151936,
            hidden_size=1024,
            intermediate_size=3072,
            moe_intermediate_size=512,
            num_hidden_layers=20,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=64,
            num_experts=48,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            tie_word_embeddings=True,
            max_position_embeddings=32768,
        ),
    }


def with_random_weights(config: Any) -> SlotBackend:
    """A backend of `random_model`."""
    kind = LeanBackend if isinstance(config, transformers.Qwen2Config) else HFBackend
    return kind(random_model(config), name=config.model_type, check=False)


def both_products(config: Any) -> tuple[SlotBackend, SlotBackend | None]:
    """The same, and the same model on torch's own products where the backend shares its weights."""
    if isinstance(config, transformers.Qwen2Config):
        return with_random_weights(config), None
    with mock.patch.dict("os.environ", {VARIABLE: "0"}):
        other = HFBackend(random_model(config), name=config.model_type, check=False)
    return HFBackend(other.model, name=other.name, check=False, cache=other.cache), other


def random_model(config: Any) -> Any:
    """A model whose weights repeat a block of random numbers, which is made in no time."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    rotary = model.model.rotary_emb
    model = model.to_empty(device="cpu").eval()
    model.model.rotary_emb = type(rotary)(config)
    model.tie_weights()
    block = (torch.randn(_RANDOM, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.fill_(0.0 if "Gemma" in type(config).__name__ else 1.0)
            else:
                flat = weight.view(-1)
                whole = flat.numel() // _RANDOM * _RANDOM
                flat[:whole].view(-1, _RANDOM).copy_(block)
                flat[whole:].copy_(block[: flat.numel() - whole])
    return model


@torch.inference_mode()
def measured(
    target: SlotBackend, draft: SlotBackend, other: SlotBackend | None, context: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds of a plain pass, of one drafted token and of a verification, in turns on one context.

    And of a plain pass and a verification on torch's own products, where there is such a backend.
    """
    session = target.open()
    tokens = [(place * 7919 + 11) % 31000 for place in range(context)]
    target.forward([Feed(session, tokens)])
    passes = {"plain": (target, 1), "draft": (draft, 1), "verify": (target, VERIFIED + 1)}
    if other is not None:
        passes |= {"torch": (other, 1), "torch verify": (other, VERIFIED + 1)}
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(repeats + 2):
        for name, (backend, width) in passes.items():
            start = time.perf_counter()
            backend.forward([Feed(session, tokens[:width])])
            if turn > 1:
                seconds[name].append(time.perf_counter() - start)
            unread(session, [*tokens, 0])
    session.close()
    return seconds


def row(name: str, context: int, seconds: dict[str, list[float]]) -> list[object]:
    """A row of the table: times, their ratios, and the best length and the speed-up at each rate."""
    draft = [one / other for one, other in zip(seconds["draft"], seconds["plain"], strict=True)]
    verify = [one / other for one, other in zip(seconds["verify"], seconds["plain"], strict=True)]
    more = (median(verify) - 1) / VERIFIED
    found = []
    for rate in RATES:
        speeds = {n: iid_block_efficiency(rate, n) / (n * median(draft) + 1 + n * more) for n in LENGTHS}
        best = max(speeds, key=lambda n: speeds[n])
        found.append(f"{speeds[best]:.2f} ({best})")
    times = f"{1e3 * median(seconds['plain']):.0f}"
    shared = ["", ""]
    if "torch" in seconds:
        both = zip(("torch", "torch verify"), ("plain", "verify"), strict=True)
        pairs = [zip(seconds[torchs], seconds[own], strict=True) for torchs, own in both]
        shared = [median_and_range([one / other for one, other in pair]) for pair in pairs]
    return [name, context, times, *shared, median_and_range(draft), median_and_range(verify), *found]


def main() -> None:
    """Measure, print the table and write it."""
    every = configs()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape",
        nargs="+",
        choices=sorted(every),
        default=["qwen2.5-0.5b", "qwen2.5-1.5b", "gemma3-1b", "mixture-1.7b"],
    )
    parser.add_argument("--context", type=int, nargs="+", default=[64, 2048])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="writes OUT.md and OUT.json")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    facts, rows, raw = run_facts(), [], {}
    for name in options.shape:
        target, other = both_products(every[name])
        draft = target.quantized(4)
        for context in options.context:
            seconds = measured(target, draft, other, context, options.repeats)
            raw[f"{name}, {context}"] = seconds
            rows.append(row(name, context, seconds))
            print(*rows[-1], file=sys.stderr)
        del target, draft, other
    torchs = "on torch's products / plain", f"verifying {VERIFIED} on them / verifying {VERIFIED}"
    heads = ["shapes", "context", "plain token, ms", *torchs, "drafted token / plain", f"verifying {VERIFIED} / plain"]
    results = Results(
        title="Costs of a round at the shapes of larger models",
        lines=[
            "Random bfloat16 weights, drafter `quantized:4`, one request; passes in turns on one context. Ratios are",
            "the median [least, greatest] over turns. Where a backend shares the model's weights, the same passes are",
            "made on torch's own products, too (DRAFTPROOF_NATIVE=0). The last columns are computed from the ratios:",
            "the time of plain decoding over that of rounds, for a share of drafted tokens that are accepted after an",
            "accepted one, at the best draft length (in brackets).",
            "",
            *table([*heads, *(f"speed-up at {rate}" for rate in RATES)], rows),
        ],
        figures={"seconds": raw},
        facts=facts,
    )
    print(results.markdown())
    if options.out is not None:
        results.write(options.out)


if __name__ == "__main__":
    main()
