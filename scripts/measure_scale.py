"""Measure what speculation gains as the batch grows, check a roofline against it, and compute larger machines by it.

    python scripts/measure_scale.py [--batch 1 2 4 ...] [--rounds 12] [--turns 4] [--price h100=2.50 ...]
        [--from FILE] --out docs/results/scale

Rounds are measured with all requests of a batch decoding, plain and speculative in turns; prompts are read before. The
roofline is fitted to plain rounds of one model only, and compared with every point that was measured. With --from, the
measurements of an earlier run are taken from its OUT.json, and only tables and pictures are made again.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import common
import numpy as np
import torch
import transformers
from measure_shapes import configs, with_random_weights
from scale_model import GAIN, Machine, Model, Setting, Speculation, layouts, pass_seconds, turned_off_at
from scipy.optimize import least_squares

from draftproof import models
from draftproof.backends.base import Feed, unread
from draftproof.backends.heads.feature_net import load_net
from draftproof.backends.lean.backend import LeanBackend
from draftproof.backends.loading.by_name import load_backend
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.tokenization import load_tokenizer
from draftproof.bench.questions import read_questions
from draftproof.embedded import feature_head_dir
from draftproof.engine.engine import Engine
from draftproof.engine.stats import Stats
from draftproof.errors import UserError
from draftproof.provenance import KEY, run_facts
from draftproof.results import Results, median_and_range, new_figure, save_figure, table
from draftproof.sampling import SamplingParams

TARGET, DTYPE, DRAFTED = "smollm2-135m", "bfloat16", 4
DRAFTERS = {"plain": "none", "quantized:4": "quantized:4", "feature head": "feature_head"}
SHAPES = {"qwen2.5-0.5b": 64, "qwen2.5-1.5b": 16}  # with random weights, and the largest number of rows
CHECKED = "qwen2.5-1.5b"  # the model that the roofline is not fitted to
CONTEXT = 64


# --- measuring --------------------------------------------------------------------------------------------------------


def decoded(engine: Engine, prompts: Sequence[list[int]], rounds: int, seed: int) -> dict[str, float]:
    """Rounds of a batch after its prompts were read: median seconds of a round and its parts, tokens of a round."""
    limits = SamplingParams(temperature=1.0, max_tokens=16 * (rounds + 8), ignore_eos=True)
    requests = [
        engine.add(prompt, replace(limits, seed=seed + place), offline=True)[0] for place, prompt in enumerate(prompts)
    ]
    while not all(request.stats.num_tokens for request in requests):
        engine.step()
    engine.step()  # a head reads the prompt's states here
    found: list[dict[str, float]] = []
    for _ in range(rounds):
        before, tokens = Stats(), sum(request.stats.num_tokens for request in requests)
        before.add(requests[0].stats)
        engine.step()
        after = requests[0].stats.seconds
        parts = {name: getattr(after, name) - getattr(before.seconds, name) for name in ("draft", "target", "verify")}
        emitted = sum(request.stats.num_tokens for request in requests) - tokens
        found.append({"seconds": after.total - before.seconds.total, **parts, "tokens": float(emitted)})
    length = sum(len(request.tokens) for request in requests) / len(requests)
    for request in requests:
        engine.abort(request)
    medians = {name: median(each[name] for each in found) for name in found[0] if name != "tokens"}
    return {**medians, "tokens": sum(each["tokens"] for each in found) / rounds, "context": length}


def measured_rounds(batches: Sequence[int], rounds: int, turns: int) -> list[dict[str, Any]]:
    """Rounds of SmolLM2-135M, every way to draft in turns."""
    backend = load_backend(TARGET, LoadOptions(dtype=DTYPE))
    tokenizer = load_tokenizer(models.resolve(TARGET))
    texts = itertools.cycle(question.prompt for question in read_questions("mt-bench"))
    engines = {
        name: Engine.assemble(
            backend,
            None,
            tokenizer,
            drafter=drafter,
            stopper=None if drafter == "none" else f"fixed:{DRAFTED}",
            max_batch=max(batches),
            prefix_reuse=False,
            generation_config="none",
        )
        for name, drafter in DRAFTERS.items()
    }
    made = []
    for turn in range(turns):
        names = list(engines) if turn % 2 else list(engines)[::-1]
        for batch in batches:
            prompts = [tokenizer.encode(next(texts))[:48] for _ in range(batch)]
            for name in names:
                row = decoded(engines[name], prompts, rounds, 1000 * turn)
                made.append({"model": TARGET, "drafter": name, "batch": batch, "turn": turn, **row})
                print(name, batch, turn, {key: round(value, 4) for key, value in row.items()}, file=sys.stderr)
    return made


@torch.inference_mode()
def measured_passes(name: str, most: int, turns: int) -> list[dict[str, Any]]:
    """Passes of a model with random weights over several requests, with 1 or DRAFTED + 1 tokens of each, in turns."""
    backend = LeanBackend(with_random_weights(configs()[name]), name=name, check=False)
    batches = [2**power for power in range(int(math.log2(most)) + 1)]
    tokens = [(place * 7919 + 11) % 31000 for place in range(CONTEXT)]
    sessions = [backend.open() for _ in range(most)]
    backend.forward([Feed(session, tokens) for session in sessions])
    made = []
    for turn in range(turns + 1):
        for batch, width in itertools.product(batches, (1, DRAFTED + 1)):
            start = time.perf_counter()
            backend.forward([Feed(session, tokens[:width]) for session in sessions[:batch]])
            seconds = time.perf_counter() - start
            for session in sessions[:batch]:
                unread(session, [*tokens, 0])
            if turn:
                made.append({"model": name, "batch": batch, "tokens": width, "turn": turn - 1, "target": seconds})
    print(name, "done", file=sys.stderr)
    return made


def measured(batches: Sequence[int], rounds: int, turns: int) -> dict[str, Any]:
    """Everything that is measured."""
    found = {"rounds": measured_rounds(batches, rounds, turns), "passes": []}
    gc.collect()
    for name, most in SHAPES.items():
        found["passes"] += measured_passes(name, most, turns)
        gc.collect()
    return found


# --- machines, models and drafts that are computed --------------------------------------------------------------------

H100 = Machine(
    "H100 SXM",
    operations=989.4e12,
    bandwidth=3.35e12,
    memory=80e9,
    link=450e9,
    reached=(0.7, 0.8),
    start=1.5e-5,
    sum=1e-5,
)
MI300X = Machine(
    "MI300X",
    operations=1307.4e12,
    bandwidth=5.3e12,
    memory=192e9,
    link=448e9,
    reached=(0.5, 0.8),
    start=1.5e-5,
    sum=1e-5,
)
XEON = Machine("Xeon 8592+", operations=124.5e12, bandwidth=358.4e9, memory=512e9, reached=(0.5, 0.8), start=1.5e-5)
MACHINES = {"h100": H100, "mi300x": MI300X, "xeon": XEON}
PRICES = {"h100": 2.5, "mi300x": 2.0, "xeon": 2.0}  # examples, for an hour of one device
SOURCES = {
    "h100": "NVIDIA, H100 Tensor Core GPU data sheet: 1,979 TFLOPS bfloat16 with sparsity, half without; 3.35 TB/s; "
    "80 GB; NVLink 900 GB/s, half in each direction",
    "mi300x": "AMD, Instinct MI300X data sheet: 1,307.4 TFLOPS bfloat16; 5.3 TB/s; 192 GB; seven links of 128 GB/s, "
    "half in each direction",
    "xeon": "Intel, Xeon Platinum 8592+ specifications: 64 cores, 1.9 GHz, eight channels of DDR5-5600; AMX makes "
    "1,024 bfloat16 operations a core and cycle, here at the base frequency",
}
LLAMA_8B = Model("Llama 3.1 8B", 7.5e9, layers=32, width=4096, cached=2 * 32 * 1024, queries=4096)
LLAMA_70B = Model("Llama 3.1 70B", 69.5e9, layers=80, width=8192, cached=2 * 80 * 1024, queries=8192)
LLAMA_1B = Model("Llama 3.2 1B", 1.24e9, layers=16, width=2048, cached=2 * 16 * 512, queries=2048)
CONTEXTS = (256, 2048, 16384)
BATCHES = (1, 4, 16, 64, 256, 1024)
SIZES = (1, 2, 4, 8)  # devices of a group


def ways(model: Model, rates: Sequence[float]) -> dict[str, Speculation]:
    """Three ways to draft, with their rates of acceptance."""
    named = {"lookup": None, "one-layer head": model.first(1 / model.layers), "1B draft model": LLAMA_1B}
    return {name: Speculation(draft, rate) for (name, draft), rate in zip(named.items(), rates, strict=True)}


def shape_of(name: str) -> Model:
    """The shape of a model that was measured."""
    config = configs()[name] if name in SHAPES else transformers.AutoConfig.from_pretrained(models.resolve(name))
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    layer = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    layers = config.num_hidden_layers
    weights = layers * layer + config.vocab_size * config.hidden_size
    return Model(name, weights, layers, config.hidden_size, cached=2 * layers * keys, queries=queries)


def drafts_of(target: Model) -> dict[str, Model | None]:
    """The models that drafted in the measurement."""
    net = load_net(feature_head_dir())
    own = sum(weights.numel() for weights in net.parameters()) + len(net.ids) * target.width
    head = Model("feature head", own, 1, target.width, target.cached // target.layers, target.queries)
    return {"plain": None, "quantized:4": target.quantized(4), "feature head": head}


# --- the roofline of this machine -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """What was measured for one batch: medians over turns.

    Attributes:
        model, drafter, batch: of the rounds; drafter is "pass" where only passes were measured.
        tokens: of a request that the target reads in a pass.
        target, verify: seconds of the pass, and of the rule.
        context: positions of a request, on average.
        emitted: tokens of all requests in a round.
        seconds: of the whole round.
    """

    model: str
    drafter: str
    batch: int
    tokens: int
    target: float
    context: int
    emitted: float = 0.0
    verify: float = 0.0
    seconds: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether the roofline is fitted to it: one token of each request, by the two smaller models."""
        return self.tokens == 1 and self.model != CHECKED


def points(found: dict[str, Any]) -> list[Point]:
    """The measured points."""
    made = []
    for (model, drafter, batch), rows in _grouped(found["rounds"], "model", "drafter", "batch"):
        middle = {name: median(row[name] for row in rows) for name in ("target", "verify", "seconds")}
        context = round(median(row["context"] for row in rows))
        emitted = sum(row["tokens"] for row in rows) / len(rows)
        tokens = 1 if drafter == "plain" else DRAFTED + 1
        made.append(Point(model, drafter, batch, tokens, emitted=emitted, context=context, **middle))
    for (model, batch, tokens), rows in _grouped(found["passes"], "model", "batch", "tokens"):
        made.append(Point(model, "pass", batch, tokens, median(row["target"] for row in rows), CONTEXT))
    return made


def _grouped(rows: Sequence[dict[str, Any]], *keys: str) -> Iterator[tuple[tuple[Any, ...], list[dict[str, Any]]]]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    yield from groups.items()


def fitted(own: Sequence[Point]) -> Machine:
    """The roofline of this machine."""
    used = [one for one in own if one.fits]
    shapes = {one.model: shape_of(one.model) for one in used}

    def machine(logs: Any) -> Machine:
        operations, bandwidth, start = np.exp(logs).tolist()
        return Machine("this machine", operations, bandwidth, start=start)

    def errors(logs: Any) -> list[float]:
        here = machine(logs)
        return [
            math.log(pass_seconds(here, shapes[one.model], one.batch, context=one.context) / one.target) for one in used
        ]

    best = least_squares(errors, np.log([2e11, 3e10, 1e-4]), loss="soft_l1", f_scale=0.1)
    rules = [one.verify / one.batch for one in used if one.verify and one.batch >= 4]
    return replace(machine(best.x), row=median(rules))


def predicted(here: Machine, one: Point) -> float:
    """Seconds of a round, or of a pass where only that was measured."""
    shape = shape_of(one.model)
    if one.drafter == "pass":
        return pass_seconds(here, shape, one.batch, one.tokens, context=one.context)
    setting = Setting(here, shape, one.context)
    return setting.round_seconds(one.batch, drafts_of(shape)[one.drafter], one.tokens - 1)


# --- the page ---------------------------------------------------------------------------------------------------------


def gains(found: dict[str, Any]) -> dict[tuple[str, int], list[float]]:
    """Speed relative to plain decoding in the same turn, by drafter and batch."""
    speeds = {(row["drafter"], row["batch"], row["turn"]): row["tokens"] / row["seconds"] for row in found["rounds"]}
    made: dict[tuple[str, int], list[float]] = {}
    for (drafter, batch, turn), speed in speeds.items():
        if drafter != "plain":
            made.setdefault((drafter, batch), []).append(speed / speeds["plain", batch, turn])
    return made


def predicted_gain(here: Machine, own: Sequence[Point], drafter: str, batch: int) -> float:
    """The same by the roofline, with the tokens of a round as they were measured."""
    named = {(one.drafter, one.batch): one for one in own}
    plain, other = named["plain", batch], named[drafter, batch]
    return other.emitted / predicted(here, other) / (batch / predicted(here, plain))


def measured_lines(here: Machine, found: dict[str, Any]) -> list[str]:
    """What was measured, beside the roofline."""
    own, ratios = points(found), gains(found)
    named = {(one.drafter, one.batch): one for one in own if one.drafter != "pass"}
    others = list(DRAFTERS)[1:]
    rows = []
    for batch in sorted({batch for _, batch in named}):
        row: list[object] = [batch, f"{batch / named['plain', batch].seconds:.0f}"]
        for drafter in others:
            row.append(f"{named[drafter, batch].emitted / batch:.2f}")
            row.append(median_and_range(ratios[drafter, batch]))
            row.append(f"{predicted_gain(here, own, drafter, batch):.2f}")
        rows.append(row)
    heads = [head for drafter in others for head in (f"{drafter}: tokens a round", "gain", "by the roofline")]
    return table(["requests", "plain, tokens/s", *heads], rows)


def error_lines(here: Machine, own: Sequence[Point]) -> list[str]:
    """How far the roofline is from every point."""
    groups: dict[tuple[str, str, bool], list[float]] = {}
    for one in own:
        kind = f"passes of {one.tokens} a request" if one.drafter == "pass" else f"rounds, {one.drafter}"
        error = predicted(here, one) / (one.seconds or one.target) - 1
        groups.setdefault((one.model, kind, one.fits), []).append(error)
    rows = [
        [model, kind, len(errors), "yes" if fits else "no", _percent(median(errors)), _percent(max(errors, key=abs))]
        for (model, kind, fits), errors in groups.items()
    ]
    free = [abs(error) for (_, _, fits), errors in groups.items() for error in errors if not fits]
    return [
        *table(["model", "what", "points", "fitted to", "error, median", "error, largest"], rows),
        "",
        f"Over the {len(free)} points that the roofline was not fitted to, the median size of the error is",
        f"{100 * median(free):.0f} %, and the largest {100 * max(free):.0f} %.",
    ]


def _percent(share: float) -> str:
    return f"{100 * share:+.0f} %"


def limit(setting: Setting, how: Speculation) -> str:
    """From how many requests on speculation does not pay."""
    most = setting.capacity(how.draft)
    off = turned_off_at(lambda rows: setting.best(rows, how)[1])
    return f"never: {most} fit" if off is None or off > most else str(off)


def machine_lines(rates: Sequence[float]) -> list[str]:
    """What speculation gains on other machines."""
    rows = []
    for machine, context in itertools.product(MACHINES.values(), CONTEXTS):
        setting = Setting(machine, LLAMA_8B, context)
        for name, how in ways(LLAMA_8B, rates).items():
            most = setting.capacity(how.draft)
            found = [setting.best(batch, how) for batch in BATCHES]
            cells = [f"{gain:.2f} ({length})" for length, gain in found]
            cells = [cell if batch <= most else "-" for batch, cell in zip(BATCHES, cells, strict=True)]
            rows.append([machine.name, context, f"{name}, {how.rate:g}", *cells, limit(setting, how)])
    return table(["machine", "context", "drafts, rate", *map(str, BATCHES), "turn it off at"], rows)


def cluster_lines(options: argparse.Namespace, prices: dict[str, float]) -> list[str]:
    """What a cluster costs, by layout and load."""
    rows = []
    for key, machine in MACHINES.items():
        model, sizes = (LLAMA_70B, SIZES) if machine.link else (LLAMA_8B, (1,))
        how = ways(model, options.rate)["one-layer head"]
        for load in options.load:
            for one in layouts(Setting(machine, model, CONTEXTS[1]), how, options.devices, load, sizes):
                price = one.price(prices[key])
                shape = f"{one.replicas} x {one.devices}"
                times = [f"{1e3 * one.seconds:.1f}", f"{one.speed:.0f}", f"{one.gain:.2f} ({one.length})"]
                rows.append([machine.name, model.name, load, shape, *times, f"{price * one.gain:.2f}", f"{price:.2f}"])
    heads = ["machine", "model", "requests", "replicas x devices", "ms a token", "tokens/s", "gain (length)"]
    return table([*heads, "a million, plain", "a million"], rows)


def draw_measured(here: Machine, found: dict[str, Any], out: Path) -> None:
    """Gains over the number of requests: measured, and by the roofline."""
    figure = new_figure(7.0, 4.5)
    panel = figure.subplots()
    own, ratios = points(found), gains(found)
    for drafter, colour in zip(list(DRAFTERS)[1:], ("tab:blue", "tab:orange"), strict=True):
        batches = sorted(batch for name, batch in ratios if name == drafter)
        middles = [median(ratios[drafter, batch]) for batch in batches]
        bars = [
            [middle - min(ratios[drafter, batch]) for batch, middle in zip(batches, middles, strict=True)],
            [max(ratios[drafter, batch]) - middle for batch, middle in zip(batches, middles, strict=True)],
        ]
        panel.errorbar(batches, middles, bars, fmt="o", color=colour, capsize=3, label=f"{drafter}, measured")
        lines = [predicted_gain(here, own, drafter, batch) for batch in batches]
        panel.plot(batches, lines, "--", color=colour, label=f"{drafter}, by the roofline")
    _finish_gains(panel, f"{TARGET}, {DTYPE}, this machine")
    save_figure(figure, out, dpi=110)


def _finish_gains(panel: Any, title: str) -> None:
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.set_xscale("log", base=2)
    panel.set_xlabel("requests decoded together")
    panel.set_ylabel("speed / plain decoding")
    panel.set_title(title, fontsize=10)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)


def draw_machines(rates: Sequence[float], out: Path) -> None:
    """Gains over the number of requests, by the roofline, one panel for each machine."""
    figure = new_figure(15.0, 4.5)
    for panel, machine in zip(figure.subplots(1, len(MACHINES), sharey=True), MACHINES.values(), strict=True):
        for context, style in zip(CONTEXTS, ("-", "--", ":"), strict=True):
            setting = Setting(machine, LLAMA_8B, context)
            for place, (name, how) in enumerate(ways(LLAMA_8B, rates).items()):
                most = min(setting.capacity(how.draft), 2048)
                batches = [rows for rows in (round(2 ** (step / 4)) for step in range(45)) if rows <= most]
                values = [setting.best(rows, how)[1] for rows in batches]
                panel.plot(batches, values, style, color=f"C{place}", label=f"{name}, context {context}")
        _finish_gains(panel, f"{LLAMA_8B.name}, {machine.name}")
    save_figure(figure, out, dpi=90)


def draw_clusters(options: argparse.Namespace, prices: dict[str, float], out: Path) -> None:
    """Price over time of a token, for each layout of the devices, as the load grows."""
    keys = [key for key, machine in MACHINES.items() if machine.link]
    figure = new_figure(6.0 * len(keys), 4.5)
    for panel, key in zip(figure.subplots(1, len(keys), sharey=True), keys, strict=True):
        how = ways(LLAMA_70B, options.rate)["one-layer head"]
        setting = Setting(MACHINES[key], LLAMA_70B, CONTEXTS[1])
        loads = [round(2 ** (step / 2)) for step in range(23)]
        for place, devices in enumerate(SIZES):
            for drafts, style in ((how, "o-"), (replace(how, longest=0), "x--")):
                made = [one for load in loads for one in layouts(setting, drafts, options.devices, load, (devices,))]
                if made:
                    shown = f"{made[0].replicas} x {devices}, {'drafts' if drafts is how else 'plain'}"
                    x, y = [1e3 * one.seconds for one in made], [one.price(prices[key]) for one in made]
                    panel.plot(x, y, style, color=f"C{place}", markersize=3, linewidth=1, label=shown)
        panel.set_yscale("log")
        panel.set_xscale("log")
        panel.set_xlabel("ms between two tokens of a request")
        panel.set_ylabel("price of a million tokens")
        title = f"{LLAMA_70B.name}, {options.devices} x {MACHINES[key].name} at {prices[key]:g} an hour each"
        panel.set_title(title, fontsize=10)
        panel.grid(alpha=0.3, which="both")
        panel.legend(fontsize=8)
    save_figure(figure, out, dpi=90)


def assumptions(options: argparse.Namespace, prices: dict[str, float]) -> list[str]:
    """The numbers of the machines, with their sources, and everything that is assumed."""
    rows = [
        [
            machine.name,
            f"{machine.operations / 1e12:.4g}",
            f"{machine.bandwidth / 1e12:.3g}",
            f"{machine.memory / 1e9:.0f}",
            f"{machine.link / 1e9:.0f}" if machine.link else "-",
            f"{machine.reached[0]:.0%}, {machine.reached[1]:.0%}",
            f"{machine.ridge:.0f}",
            f"{prices[key]:g}",
            SOURCES[key],
        ]
        for key, machine in MACHINES.items()
    ]
    heads = ["machine", "TFLOP/s, bfloat16", "TB/s", "GB", "link, GB/s", "reached", "operations a byte", "an hour"]
    named = ", ".join(f"{name} {how.rate:g}" for name, how in ways(LLAMA_8B, options.rate).items())
    return [
        *table([*heads, "source"], rows),
        "",
        "Assumed, not measured: the shares that programs reach; 15 µs for every layer beside both times; 10 µs for",
        "each sum over devices beside its bytes; weights and keys in bfloat16; no time for the rule. A drafted token",
        f"is accepted with a fixed rate after accepted ones ({named}). Each number of requests gets its best length, 0",
        "to 16. The draft model is on one device of a group. A tenth of the memory stays free. Prices are examples",
        "(`--price`), in any currency.",
    ]


def page(options: argparse.Namespace, found: dict[str, Any], facts: dict[str, Any]) -> Results:
    """Tables and pictures of what was measured and computed."""
    prices = {**PRICES, **options.price}
    own = points(found)
    here = fitted(own)
    name = options.out.name
    draw_measured(here, found, options.out.with_name(f"{name}_measured.png"))
    draw_machines(options.rate, options.out.with_name(f"{name}_machines.png"))
    draw_clusters(options, prices, options.out.with_name(f"{name}_clusters.png"))
    lines = [
        "What speculation gains when many requests are decoded together, when to turn it off, and how to use several",
        "devices. The [guide](../guide/scale.md) says what follows from it.",
        "",
        "## Measured",
        "",
        f"{TARGET} in {DTYPE}, temperature 1, drafts of {DRAFTED} tokens, rule `block`; rounds with all requests",
        "decoding, plain and speculative in turns. Gains are speeds over plain decoding in the same turn: median",
        "[least, greatest] over turns. `by the roofline` takes the tokens of a round as they were measured.",
        "",
        *measured_lines(here, found),
        "",
        f"![Gains as the batch grows.]({name}_measured.png)",
        "",
        "## The roofline against every measured point",
        "",
        f"Fitted: {here.operations / 1e9:.0f} GFLOP/s, {here.bandwidth / 1e9:.1f} GB/s, {1e3 * here.start:.2f} ms for",
        f"every layer, {1e3 * here.row:.2f} ms of sampling and verifying for each token. It is fitted to passes with",
        f"one token of each request, of {TARGET} and qwen2.5-0.5b; every other point is a prediction. The qwen models",
        "have random weights, which take the same time.",
        "",
        *error_lines(here, own),
        "",
        "## Other machines, by the roofline",
        "",
        f"{LLAMA_8B.name} on one device: speed over plain decoding, and in brackets the best draft length (0: none).",
        f"The last column is the number of requests from which on it gains less than {100 * (GAIN - 1):.0f} %; a `-`",
        "is more than the memory holds.",
        "",
        *machine_lines(options.rate),
        "",
        f"![Gains on three machines.]({name}_machines.png)",
        "",
        *assumptions(options, prices),
        "",
        "## Replicas or tensor parallelism",
        "",
        f"{options.devices} devices, contexts of {CONTEXTS[1]} tokens, drafts of the one-layer head. `2 x 4`: two",
        "replicas, each of which divides the target among four devices. `ms a token` is the time between two tokens of",
        "one request; the prices are of a million tokens, without and with speculation.",
        "",
        *cluster_lines(options, prices),
        "",
        f"![Price over time of a token.]({name}_clusters.png)",
    ]
    return Results("Speculation at scale", lines, {"rounds": found["rounds"], "passes": found["passes"]}, facts)


def _price(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in MACHINES or not value.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"expected NAME=PRICE with one of {', '.join(MACHINES)}, got {text!r}")
    return name, float(value)


def _rate(text: str) -> float:
    if not text.replace(".", "", 1).isdigit() or not 0 <= float(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a rate from 0 to below 1, got {text!r}")
    return float(text)


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected an integer of 1 or more, got {text!r}")
    return int(text)


def main() -> None:
    """Measure or read, and write the page."""
    parser = common.parser(__doc__, out=True)
    parser.add_argument("--batch", type=_positive, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=_positive, default=10, help="rounds of a batch that are measured in a turn")
    parser.add_argument("--turns", type=_positive, default=4)
    parser.add_argument(
        "--price", type=_price, nargs="+", default=[], metavar="NAME=PRICE", help="of a device, an hour"
    )
    parser.add_argument("--rate", type=_rate, nargs=3, default=[0.5, 0.7, 0.8], help="accepted: lookup, head, 1B model")
    parser.add_argument("--devices", type=_positive, default=8, help="of the cluster")
    parser.add_argument("--load", type=_positive, nargs="+", default=[8, 64, 512], help="requests at a time")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="a JSON file of an earlier run")
    parser.add_argument("--note", metavar="TEXT", help="on the machine during the measurement, for the page's header")
    options = parser.parse_args()
    options.price = dict(options.price)
    try:
        if options.source is None:
            facts = run_facts()
            found = measured(options.batch, options.rounds, options.turns)
        else:
            found = json.loads(options.source.read_text(encoding="utf-8"))
            facts = found[KEY]
        facts |= {} if options.note is None else {"note": options.note}
        common.deliver(options, page(options, found, facts))
    except (UserError, OSError, KeyError, json.JSONDecodeError) as error:
        sys.exit(
            f"measure_scale: error: {error!r}" if isinstance(error, KeyError) else f"measure_scale: error: {error}"
        )


if __name__ == "__main__":
    main()
