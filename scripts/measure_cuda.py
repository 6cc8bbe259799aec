"""Measure the CUDA path: kernels against torch, plain decoding against transformers, the cost of wider passes.

    python scripts/measure_cuda.py --out docs/results/cuda           everything, in about eight minutes
    python scripts/measure_cuda.py --out OUT --small --device cpu    tiny models, to see that the script runs

Models have random weights, made on the device: costs do not depend on what weights say, but how many drafted tokens are
accepted does, so those figures are not a real model's. What is compared takes turns in one process, every time ends
with a wait for the device, and the tables have ratios to the same turn's base. It writes OUT.md and OUT.json.
"""

import argparse
import functools
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import common
import torch
import transformers

from draftproof import Engine, SamplingParams
from draftproof.accelerator import synchronize
from draftproof.backends.base import Feed
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.backend import LeanBackend
from draftproof.backends.lean.graph_backend import GraphBackend
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.loop import DecodingLoop
from draftproof.engine.verifier_parts import make_verifier
from draftproof.functional import chain, coupling
from draftproof.provenance import run_facts
from draftproof.results import Results, median_and_range, table
from draftproof.rng import inverse_cdf
from draftproof.tree import TokenTree
from draftproof.triton import choose

BACKENDS = {"hf": HFBackend, "lean": LeanBackend, "graphs": GraphBackend}
WIDTHS = (1, 5, 9)
DRAFTED = 4
Calls = Mapping[Any, Callable[[], object]]
Seconds = dict[Any, list[float]]  # of each turn
SHAPES = {
    "1.5 B, as Qwen2": lambda: transformers.Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    ),
    "8 B, as Llama 3": lambda: transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    ),
}
SMALL = {
    "tiny, as Qwen2": lambda: transformers.Qwen2Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
}


def turns(calls: Calls, repeats: int, device: torch.device) -> Seconds:
    """Seconds of each call in each turn, after one turn that warms up."""
    found: Seconds = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            if repeat:
                found[name].append(time.perf_counter() - start)
    return found


def over(found: Seconds, name: Any, base: Any) -> str:
    """Speed relative to the base, turn by turn: the median with the smallest and largest."""
    return median_and_range([theirs / mine for mine, theirs in zip(found[name], found[base], strict=True)])


def with_kernels(value: str, call: Callable[[], object]) -> Callable[[], object]:
    """The call with DRAFTPROOF_TRITON set."""

    def made() -> object:
        os.environ[choose.VARIABLE] = value
        try:
            return call()
        finally:
            os.environ[choose.VARIABLE] = "0"

    return made


def kernels(
    vocabs: Sequence[int], rows: Sequence[int], repeats: int, device: torch.device
) -> tuple[list[str], list[dict[str, Any]]]:
    """Every function that a kernel stands in for, by torch and by its kernel."""
    cells, figures = [], []
    for vocab in vocabs:
        for count in rows:
            p, q = (torch.rand(count, 5, vocab, device=device).pow(8) for _ in range(2))
            p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
            tokens = q[:, :4].argmax(-1)
            scale = torch.rand(count, 4, device=device, dtype=torch.float64)
            kept = torch.arange(count, device=device) % 5
            size = torch.full((count,), 4, device=device)
            functions = {
                "surplus_mass": lambda a=(p[:, 1:], q[:, 1:], scale): chain.surplus_mass(*a),
                "bonus_weights": lambda a=(p, q[:, :4], tokens, kept, size, scale[:, 0]): chain.bonus_weights(*a),
                "capped_mass": lambda a=(p[:, 0], q[:, 0], scale[:, 0] * 4): coupling.capped_mass(*a),
                "kseq_gamma": lambda a=(p[:, 0], q[:, 0], 4): coupling.kseq_gamma(*a),
                "inverse_cdf": lambda a=(p[:, 0], scale[:, 0]): inverse_cdf(*a),
            }
            for name, call in functions.items():
                ways = {"torch": with_kernels("0", call)}
                if device.type == "cuda" and choose.installed():
                    ways["kernel"] = with_kernels("1", call)
                found = turns(ways, repeats, device)
                figures.append({"function": name, "vocab": vocab, "rows": count, "seconds": found})
                micro = [f"{1e6 * median(seconds):.0f}" for seconds in found.values()]
                cells.append((name, vocab, count, *micro, over(found, "kernel", "torch") if len(found) > 1 else "-"))
    heads = (
        "function",
        "V",
        "rows",
        "torch, µs",
        *(("kernel, µs",) if len(cells[0]) == 6 else ()),
        "kernel over torch",
    )
    return table(heads, cells), figures


def generate(model: Any, ids: list[int], tokens: int) -> list[int]:
    """Greedy tokens of transformers' own generation."""
    prompt = torch.tensor([ids], device=model.device)
    options = {"do_sample": False, "max_new_tokens": tokens, "pad_token_id": 0}
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    return [int(token) for token in made[0, len(ids) :]]


def launches(call: Callable[[], object], device: torch.device) -> tuple[int | None, float | None]:
    """Launches of a call and the milliseconds that the device works for it; None without a device."""
    if device.type != "cuda":
        return None, None
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as seen:
        call()
        synchronize(device)
    own = [event for event in seen.events() if event.device_type.name == "CUDA"]
    return len(own), sum(event.time_range.elapsed_us() for event in own) / 1000


def decoding(
    name: str, config: Any, options: argparse.Namespace, device: torch.device
) -> tuple[list[str], dict[str, Any]]:
    """Plain decoding of one model by transformers and by each backend, and passes of several widths."""
    dtype = torch.float32 if options.small else torch.bfloat16
    plain = common.random_model(config, dtype, device)
    ids = torch.randint(0, 300, (128,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = generate(plain, ids, options.tokens)
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    calls: dict[str, Callable[[], object]] = {"transformers": lambda: generate(plain, ids, options.tokens)}
    backends, same, lines = {}, {}, []
    for kind, make in BACKENDS.items():
        try:
            model = plain if kind == "hf" else common.random_model(config, dtype, device)
            backends[kind] = make(model, name=name, check=kind != "hf")
            loop = DecodingLoop(backends[kind])
            made = loop.generate([ids], params)[0].token_ids
        except Exception as error:  # noqa: BLE001 - the others are measured all the same
            traceback.print_exc()
            lines += [f"- {kind} failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"]
            backends.pop(kind, None)
            continue
        same[kind] = next((i for i, (a, b) in enumerate(zip(made, expected, strict=True)) if a != b), len(expected))
        calls[kind] = functools.partial(loop.generate, [ids], params)
    found = turns(calls, options.repeats, device)
    cells = [
        (
            kind,
            f"{options.tokens / median(found[kind]):.1f}",
            over(found, kind, "transformers"),
            "-" if kind == "transformers" else f"{same[kind]} of {options.tokens}",
        )
        for kind in calls
    ]
    lines += table(("way", "tokens a second", "over transformers", "equal tokens at the beginning"), cells)
    found_wide, rows = passes(backends, ids, 5 * options.repeats, device)
    lines += ["", *rows]
    found_rounds: Any = {}
    if "graphs" in backends:
        found_rounds, rows = rounds(backends["graphs"], ids, options, device)
        lines += ["", *rows]
    return lines, {"decoding": found, "passes": found_wide, "rounds": found_rounds, "equal": same}


def rounds(
    target: Any, ids: list[int], options: argparse.Namespace, device: torch.device
) -> tuple[dict[str, Any], list[str]]:
    """Rounds of plain decoding and of drafts from the target's own rounded weights, by graphs, greedy."""
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    engines, made, lines = {"none": Engine(target)}, {}, []
    for spec in ("quantized:8", "quantized:4"):
        try:
            drafter = make_drafter(spec, target=target, draft=None, stopper=f"fixed:{DRAFTED}")
            engines[spec] = Engine(target, drafter, make_verifier("block"))
        except Exception as error:  # noqa: BLE001 - the others are measured all the same
            traceback.print_exc()
            lines += [f"- {spec} failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"]

    def decode(spec: str) -> None:
        (made[spec],) = engines[spec].generate([ids], params)

    found = turns({spec: functools.partial(decode, spec) for spec in engines}, options.repeats, device)
    cells = []
    for spec in engines:
        calls = made[spec].stats.num_target_calls
        rows = ([seconds / calls for seconds in found[spec]], [seconds / options.tokens for seconds in found["none"]])
        cost = median_and_range([mine / plain for mine, plain in zip(*rows, strict=True)])
        tokens = f"{options.tokens / calls:.2f}"
        cells.append((spec, f"{1000 * median(rows[0]):.2f}", cost, tokens, over(found, spec, "none")))
    heads = (f"drafter, fixed:{DRAFTED}", "round, ms", "over a plain one", "tokens a call", "speed over plain")
    figures = {"seconds": found, "calls": {spec: each.stats.num_target_calls for spec, each in made.items()}}
    return figures, [*lines, *table(heads, cells)]


def passes(
    backends: Mapping[str, Any], ids: list[int], repeats: int, device: torch.device
) -> tuple[dict[str, Seconds], list[str]]:
    """Passes of several widths on each backend."""
    wide, rows = {}, []
    for kind, backend in backends.items():
        session = backend.open()
        backend.forward([Feed(session, ids)])
        calls = {width: functools.partial(one_pass, backend, session, len(ids), width) for width in WIDTHS}
        wide[kind] = turns(calls, repeats, device)
        for width, call in calls.items():
            count, busy = launches(call, device)
            milliseconds = 1000 * median(wide[kind][width])
            share = "-" if busy is None else f"{busy:.2f}"
            cost = median_and_range([a / b for a, b in zip(wide[kind][width], wide[kind][1], strict=True)])
            rows.append((kind, width, f"{milliseconds:.2f}", cost, "-" if count is None else count, share))
    heads = ("backend", "tokens", "pass, ms", "over one token", "launches and copies", "device busy, ms")
    return wide, table(heads, rows)


def one_pass(backend: Any, session: Any, length: int, width: int) -> None:
    """Read one token and a chain of drafted ones, and forget them again."""
    drafted = torch.zeros(width - 1, dtype=torch.int64, device=backend.device)
    backend.forward([Feed(session, [5], TokenTree.chain(drafted) if width > 1 else None)])
    session.keep(length)


def main() -> None:
    """Measure and write."""
    parser = common.parser(__doc__, out=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    device = torch.device(options.device)
    facts = run_facts(device)
    vocabs, rows = ((50,), (1, 2)) if options.small else ((32000, 151936, 262144), (1, 8, 32))
    torch.manual_seed(0)
    lines, figures = kernels(vocabs, rows, options.repeats, device)
    lines = ["## Kernels against torch's functions", "", *lines]
    models = {}
    for name, config in (SMALL if options.small else SHAPES).items():
        try:
            found, models[name] = decoding(name, config(), options, device)
        except Exception as error:  # noqa: BLE001 - what was measured before is written
            traceback.print_exc()
            found = [f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"]
        lines += ["", f"## Plain decoding, {name}", "", *found]
        Results("CUDA", lines, {"kernels": figures, "models": models}, facts).write(options.out)
        common.say(options, *found)


if __name__ == "__main__":
    main()
