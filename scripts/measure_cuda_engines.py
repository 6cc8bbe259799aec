"""Measure whole engines on CUDA, in turns: transformers, plain decoding, and drafts, for one request and for eight.

    python scripts/measure_cuda_engines.py docs/results/cuda_engines
    python scripts/measure_cuda_engines.py --out OUT --shape "8 B, as Llama 3" --batches 1

Weights are random, so how many drafted tokens are accepted is not a real model's; the time of a round is.
"""

import functools
from statistics import median
from typing import Any

import common
import torch
from measure_cuda import SHAPES, SMALL, over, turns

from draftproof import Engine, SamplingParams
from draftproof.backends.lean.backend import LeanBackend
from draftproof.backends.lean.graph_backend import GraphBackend
from draftproof.provenance import run_facts
from draftproof.results import Results, table

WAYS = {
    "plain": ("none", None),
    "quantized:4 fixed:4": ("quantized:4", "fixed:4"),
    "quantized:4 auto": ("quantized:4", None),
    "ngram:4": ("ngram:4", None),
    "auto": ("auto", None),
}
PROMPT = 128


def transformers_texts(model: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Greedy tokens of transformers' own generation of a batch."""
    given = torch.tensor(prompts, device=model.device)
    options = {"do_sample": False, "max_new_tokens": tokens, "pad_token_id": 0}
    made: list[list[int]] = model.generate(given, attention_mask=torch.ones_like(given), **options)[:, PROMPT:].tolist()
    return made


def main() -> None:
    """Measure and write."""
    parser = common.parser(__doc__, out=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="1.5 B, as Qwen2", choices=[*SHAPES, *SMALL])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    device = torch.device(options.device)
    kind, dtype = (
        (GraphBackend, torch.bfloat16) if device.type == "cuda" else (LeanBackend, torch.float32)
    )  # a CPU: to see that the script runs
    config = (SHAPES | SMALL)[options.shape]
    own, theirs = (common.random_model(config(), dtype, device) for _ in range(2))
    target = kind(own, name="target", check=False)
    gen = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 300, (PROMPT,), generator=gen).tolist() for _ in range(max(options.batches))]
    engines = {}
    for name, (drafter, stopper) in WAYS.items():
        engines[name] = Engine.assemble(target, None, None, drafter=drafter, stopper=stopper)
        engines[name].prepare()
    facts, cells, figures = run_facts(device), [], {}
    for batch in options.batches:
        for temperature in (0.0, 1.0):
            params = SamplingParams(
                temperature=temperature, seed=1 if temperature else None, max_tokens=options.tokens, ignore_eos=True
            )
            made: dict[str, Any] = {}

            def write(name: str, params: SamplingParams = params, made: Any = made, batch: int = batch) -> None:
                made[name] = engines[name].generate(prompts[:batch], params)

            calls: dict[str, Any] = {name: functools.partial(write, name) for name in engines}
            if not temperature:
                calls["transformers"] = functools.partial(transformers_texts, theirs, prompts[:batch], options.tokens)
            for warm in calls.values():  # shapes are recorded when they come for the second time
                warm()
            found = turns(calls, options.repeats, device)
            for name in calls:
                rounds = options.tokens
                if name in made:
                    rounds = sum(each.stats.num_target_calls for each in made[name]) / batch
                seconds = median(found[name])
                per_call = f"{options.tokens / rounds:.2f}"
                speed, round_time = f"{batch * options.tokens / seconds:.0f}", f"{1000 * seconds / rounds:.2f}"
                cells.append((batch, temperature, name, speed, over(found, name, "plain"), per_call, round_time))
            figures[f"{batch} requests, temperature {temperature:g}"] = found
    heads = ("requests", "temperature", "way", "tokens a second", "over plain", "tokens a call", "round, ms")
    common.deliver(options, Results(f"Engines on CUDA, {options.shape}", table(heads, cells), figures, facts))


if __name__ == "__main__":
    main()
