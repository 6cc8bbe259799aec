"""Measure what a round with drafter `quantized:4` costs at the shapes of larger models, with random bfloat16 weights.

    python scripts/measure_shapes.py [--shape NAME ...] [--context 64 2048] [--repeats 9] [--out docs/results/shapes]

Beside them stand transformers' own step with its cache, and the same pass on backend hf. What a pass costs does not
depend on what the weights say. The speed-ups in the table follow from these costs, for given shares of accepted tokens:
they are computed, not measured, and leave out the rule (see round.md).
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import common
import torch
import transformers

from draftproof.backends.base import Feed, unread
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.backend import LeanBackend, supports
from draftproof.backends.model_info import cache_name
from draftproof.provenance import run_facts
from draftproof.results import Results, median_and_range, table
from draftproof.theory.lengths import iid_block_efficiency
from draftproof.tree import TokenTree

RATES = (0.9, 0.95, 0.97)
LENGTHS = range(1, 13)
VERIFIED = 5  # drafted tokens that the measured verification reads
_RANDOM = 1 << 20  # different random weights; the rest repeats them


def configs() -> dict[str, Any]:
    """Configurations with the shapes of models that people run."""
    qwen: dict[str, Any] = {
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
            head_dim=64,  # type: ignore[call-arg] # taken with further fields
            num_experts=48,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            tie_word_embeddings=True,
            max_position_embeddings=32768,
        ),
        "olmo2-1b": transformers.Olmo2Config(
            vocab_size=100352,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=16,
            max_position_embeddings=4096,
        ),
        "granite3-2b": transformers.GraniteConfig(
            vocab_size=49159,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=40,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.015625,
            logits_scaling=8.0,
        ),
        "phi4-mini, default rope": transformers.Phi3Config(
            vocab_size=200064,
            hidden_size=3072,
            intermediate_size=8192,
            num_hidden_layers=32,
            num_attention_heads=24,
            num_key_value_heads=8,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
        ),
    }


def with_random_weights(config: Any) -> Any:
    """A model whose weights repeat a block of random numbers, which is made in no time."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    rotary = model.model.rotary_emb
    model = model.to_empty(device="cpu").eval()
    model.model.rotary_emb = type(rotary)(config)
    if hasattr(model.model.embed_tokens, "scalar_embed_scale"):
        model.model.embed_tokens.embed_scale.fill_(model.model.embed_tokens.scalar_embed_scale)
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


class OwnSteps:
    """Transformers' own steps with its cache, which grows by a token each.

    Args:
        model: of transformers.
        tokens: of the context.
    """

    def __init__(self, model: Any, tokens: list[int]) -> None:
        self._model, self._name = model, str(cache_name(model))
        self._cache = model(input_ids=torch.tensor([tokens]), use_cache=True, logits_to_keep=1)[self._name]

    def step(self) -> None:
        """One token."""
        self._model(input_ids=torch.tensor([[7]]), use_cache=True, **{self._name: self._cache})


@torch.inference_mode()
def measured(target: SlotBackend, draft: SlotBackend, own: Any, context: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of passes in turns on one context.

    They are transformers' own step, a plain pass on backend hf and on the target's, a drafted token, a verification.
    """
    tokens = [(place * 7919 + 11) % min(31000, target.vocab_size) for place in range(context)]
    theirs = OwnSteps(own, tokens)
    hf = HFBackend(own, name="hf", check=False)
    passes = {"hf": (hf, 1), "plain": (target, 1), "draft": (draft, 1), "verify": (target, VERIFIED + 1)}
    sessions = {"hf": hf.open(), "lean": target.open()}
    for backend, session in zip((hf, target), sessions.values(), strict=True):
        backend.forward([Feed(session, tokens)])
    seconds: dict[str, list[float]] = {name: [] for name in ("transformers", *passes)}
    for turn in range(repeats + 2):
        start = time.perf_counter()
        theirs.step()
        spent = {"transformers": time.perf_counter() - start}
        for name, (backend, width) in passes.items():
            session = sessions["hf" if name == "hf" else "lean"]
            start = time.perf_counter()
            backend.forward(
                [Feed(session, tokens[:1], TokenTree.chain(torch.tensor(tokens[1:width], dtype=torch.long)))]
            )
            spent[name] = time.perf_counter() - start
            unread(session, [*tokens, 0])
        if turn > 1:
            for name, each in spent.items():
                seconds[name].append(each)
    for session in sessions.values():
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
    times = [f"{1e3 * median(seconds[each]):.0f}" for each in ("transformers", "hf", "plain")]
    faster = [one / other for one, other in zip(seconds["transformers"], seconds["plain"], strict=True)]
    return [name, context, *times, median_and_range(faster), median_and_range(draft), median_and_range(verify), *found]


def main() -> None:
    """Measure, print the table and write it."""
    every = configs()
    parser = common.parser(__doc__)
    parser.add_argument(
        "--shape", nargs="+", choices=sorted(every), default=["qwen2.5-0.5b", "qwen2.5-1.5b", "gemma3-1b"]
    )
    parser.add_argument("--context", type=int, nargs="+", default=[64, 2048])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    facts, rows, raw = run_facts(), [], {}
    for name in options.shape:
        own, model = (with_random_weights(every[name]) for _ in range(2))
        kind = LeanBackend if supports(model) is None else HFBackend
        target = kind(model, name=name, check=False)
        draft = target.quantized(4)
        for context in options.context:
            seconds = measured(target, draft, own, context, options.repeats)
            raw[f"{name}, {context}"] = seconds
            rows.append(row(name, context, seconds))
            common.say(options, *rows[-1])
        del target, draft, own, model
    heads = ["shapes", "context", "transformers, ms", "backend hf, ms", "plain token, ms", "transformers / plain"]
    heads += ["drafted token / plain", f"verifying {VERIFIED} / plain"]
    results = Results(
        title="Costs of a round at the shapes of larger models",
        lines=[
            "Random bfloat16 weights, drafter `quantized:4`, one request; passes in turns on one context. Columns in",
            "ms are one token: transformers' own step with its cache, backend `hf`, and the backend that `auto` takes",
            "(plain). Ratios are the median [least, greatest] over turns. The last columns are computed from them: the",
            "time of plain decoding over that of rounds, for a share of drafted tokens that are accepted after an",
            "accepted one, at the best draft length (in brackets).",
            "",
            *table([*heads, *(f"speed-up at {rate}" for rate in RATES)], rows),
        ],
        figures={"seconds": raw},
        facts=facts,
    )
    common.deliver(options, results)


if __name__ == "__main__":
    main()
