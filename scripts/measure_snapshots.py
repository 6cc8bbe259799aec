"""Measure what rounds cost on models with recurrent layers, and the speed-up that follows at given acceptance rates.

    python scripts/measure_snapshots.py [--model NAME] [--tokens 96] [--lengths 2 4 8] [--dtype float32] [--out NAME]

The models have 100 to 530 million random weights; the last one has no recurrent layers. The drafter knows the target's
greedy tokens and makes each of them wrong with a given probability, so that the acceptance rate is what it should be,
and drafts cost no time. Requests with and without drafts are decoded in turns, then transformers' own generation
decodes the same prompt. `--out docs/results/snapshots` writes the page and its figures.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import common
import torch
import transformers
from typing_extensions import override

from draftproof import Engine, SamplingParams
from draftproof.backends.base import Feed, FeedOutput
from draftproof.backends.loading.in_memory import backend_in_memory
from draftproof.draft import Draft
from draftproof.drafters.base import DraftRequest
from draftproof.drafters.ngram import point_chain
from draftproof.drafters.none import NoDrafter
from draftproof.engine.verifier_parts import make_verifier
from draftproof.provenance import run_facts
from draftproof.results import Results, median_and_range, table
from draftproof.rng import RoundRng

RATES = (0.6, 0.8, 0.95)
PROMPT = 64
LINEAR, FULL = "linear_attention", "full_attention"


def configs() -> dict[str, Any]:
    """A configuration of each kind of recurrent layer."""
    wide: dict[str, Any] = {
        "vocab_size": 32000,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    }
    falcon: dict[str, Any] = {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "mamba_d_ssm": 1536,
        "mamba_n_heads": 24,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
    }
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
        "qwen3.5-0.8b (its shapes, 8 of 24 layers, a small vocabulary)": transformers.Qwen3_5TextConfig(
            vocab_size=32000,
            hidden_size=1024,
            intermediate_size=3584,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=16,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            tie_word_embeddings=True,
        ),
        "qwen3.5-wide (2560 hidden numbers, 4 layers, a small vocabulary)": transformers.Qwen3_5TextConfig(
            vocab_size=32000,
            hidden_size=2560,
            intermediate_size=9216,
            num_hidden_layers=4,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            tie_word_embeddings=True,
        ),
        "lfm2 (convolutions)": transformers.Lfm2Config(
            **wide,
            num_hidden_layers=12,
            intermediate_size=3072,
            layer_types=["conv", "conv", FULL] * 4,
            tie_word_embeddings=True,
        ),
        "falcon-h1-0.5b (its shapes, 8 of 36 layers: Mamba 2 beside attention, a small vocabulary)": (
            transformers.FalconH1Config(**falcon)
        ),
        "jamba (state space)": transformers.JambaConfig(
            **wide,
            num_hidden_layers=12,
            intermediate_size=2048,
            num_experts=1,
            num_experts_per_tok=1,
            attn_layer_period=4,
            attn_layer_offset=3,
            tie_word_embeddings=True,
        ),
        "gemma4 (1536 hidden numbers as E2B has, 6 layers, a small vocabulary)": transformers.Gemma4TextConfig(
            vocab_size=32000,
            vocab_size_per_layer_input=32000,
            hidden_size=1536,
            intermediate_size=6144,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        ),
    }


class Oracle(NoDrafter):
    """Drafts known tokens, each of them wrong with a probability."""

    name, point_masses = "oracle", True

    def __init__(self, known: Sequence[int], length: int, rate: float) -> None:
        self.limit = length
        self._known, self._rate, self._source = known, rate, random.Random(0)

    @override
    def propose(self, requests: Sequence[DraftRequest], rng: RoundRng) -> list[Draft]:
        (request,) = requests
        start = len(request.tokens) - request.prompt_length
        right = self._known[start : start + max(min(self.limit, request.limit), 0)]
        return [point_chain([each if self._source.random() < self._rate else each ^ 1 for each in right])]


@dataclass
class Run:
    """One request: processor time of a round in ms, tokens of a round, and tokens that a round read again."""

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
        made: list[FeedOutput] = self.forward(feeds, **options)
        return made


def run(target: Any, drafter: Any, tokens: int) -> Run:
    """Decode one request."""
    counted = Counted(target)
    try:
        engine = Engine(target, drafter, make_verifier("block"), max_batch=1)
        prompt = [(place * 7919 + 11) % 31000 for place in range(PROMPT)]
        (request,) = engine.add(prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
        engine.step()
        first, before = time.process_time(), len(request.output_ids)
        while not request.finished:
            engine.step()
        seconds = time.process_time() - first
    finally:
        target.forward = counted.forward
    rounds, stats = request.round, request.stats
    needed = PROMPT + rounds - 1 + stats.num_draft_tokens  # every round reads one token that the last one drew
    return Run(
        tokens=request.output_ids,
        round_ms=1e3 * seconds / (rounds - 1),
        per_round=(len(request.output_ids) - before) / (rounds - 1),
        read_again=(counted.read - needed) / (rounds - 1),
    )


def transformers_ms(model: Any, tokens: int) -> float:
    """Processor time of a token of transformers' own generation, in ms."""
    ids = torch.tensor([[(place * 7919 + 11) % 31000 for place in range(PROMPT)]])
    mask = torch.ones_like(ids)

    def seconds(count: int) -> float:
        start = time.process_time()
        model.generate(
            ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return time.process_time() - start

    first = seconds(1)
    return 1e3 * (seconds(tokens + 1) - first) / tokens


def turns(target: Any, plain: Run, drafter: Callable[[], Oracle], options: argparse.Namespace) -> dict[str, Any]:
    """Requests with drafts and without, in turns: figures of a round, and raw times."""
    pairs = []
    for number in range(options.repeats):
        made: dict[bool, Run] = {}
        for drafts in (True, False) if number % 2 else (False, True):
            made[drafts] = run(target, drafter() if drafts else NoDrafter(), options.tokens)
        assert all(each.tokens == plain.tokens for each in made.values()), "the same tokens"
        pairs.append(made)
    costs = [made[True].round_ms / made[False].round_ms for made in pairs]
    last = pairs[-1][True]
    return {
        "tokens_a_round": last.per_round,
        "read_again": last.read_again,
        "round_ms": [made[True].round_ms for made in pairs],
        "plain_ms": [made[False].round_ms for made in pairs],
        "costs": costs,
        "speed_ups": [last.per_round / cost for cost in costs],
    }


HEADS = ("drafted", "acceptance", "tokens a round", "read again", "round / plain step", "speed-up")
INTRO = (
    "One request, greedy, one thread, processor time; a prompt of {prompt} tokens and {tokens} new ones. Drafts cost "
    "no time, and each drafted token is right with the probability in the second column. Read again: tokens a round "
    "that the target had read before. A round over a plain step, and the speed-up (tokens a round over that): median "
    "[least, greatest] of {repeats} pairs of requests with and without drafts, in turns."
)


def main() -> None:
    """Measure and print a table for each model."""
    every = configs()
    parser = common.parser(__doc__)
    parser.add_argument("--model", action="append", choices=sorted(name.split()[0] for name in every))
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts, figures = run_facts("cpu"), dict[str, Any]()
    lines = [INTRO.format(prompt=PROMPT, tokens=options.tokens, repeats=options.repeats), ""]
    for name, config in every.items():
        if options.model and name.split()[0] not in options.model:
            continue
        model = common.random_model(config, getattr(torch, options.dtype))
        target = backend_in_memory(model, name=name)
        weights = sum(each.numel() for each in model.parameters())
        run(target, NoDrafter(), 8)
        plain = run(target, NoDrafter(), options.tokens)
        found = {
            (length, rate): turns(target, plain, partial(Oracle, plain.tokens, length, rate), options)
            for length in options.lengths
            for rate in RATES
        }
        step = median(ms for each in found.values() for ms in each["plain_ms"])
        own = transformers_ms(model, options.tokens)
        figures[name] = [{"transformers_ms": own}]
        figures[name] += [{"drafted": key[0], "acceptance": key[1], **each} for key, each in found.items()]
        rows = [
            (
                *key,
                f"{each['tokens_a_round']:.2f}",
                f"{each['read_again']:.2f}",
                *(median_and_range(each[figure]) for figure in ("costs", "speed_ups")),
            )
            for key, each in found.items()
        ]
        title = f"## {name}: {weights / 1e6:.0f} M weights, {options.dtype}"
        steps = f"Backend {target.kind}. A plain step: {step:.1f} ms; of transformers' generation: {own:.1f} ms."
        section = [title, "", steps, "", *table(HEADS, rows), ""]
        common.say(options, *section)
        lines += section
        results = Results("Costs of a round on models with recurrent layers", lines, figures, facts)
        if options.out is not None:  # after each model: the next one may be interrupted
            results.write(options.out)
    common.deliver(options, results)


if __name__ == "__main__":
    main()
