"""The time of a forward pass over chains of new tokens, tries of drafts and prompts, on several backends.

Backends and shapes take turns on the same context, and every pass is rolled back. The floor is the time to read every
weight once from memory, at the bandwidth measured with the same number of threads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from draftproof import models
from draftproof.accelerator import synchronize
from draftproof.backends.base import Feed, unread
from draftproof.backends.cache.sessions import SlotSession
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.loading.load import load
from draftproof.backends.loading.options import LoadOptions, parse_device
from draftproof.backends.loading.tokenization import load_tokenizer, refuse_different
from draftproof.drafters.base import DraftRequest
from draftproof.engine.drafter_parts import make_drafter
from draftproof.errors import UserError, refuse_below_one
from draftproof.native.dispatch import VARIABLE
from draftproof.profiling.hardware import bandwidth, weights_read
from draftproof.progress import Watch, silent
from draftproof.provenance import run_facts, shown_options, without_directory
from draftproof.results import Results, table
from draftproof.rng import CounterRoundRng
from draftproof.sampling import SamplingParams
from draftproof.tree import TokenTree

TEXT = "The old man opened the door and looked at the long road that led down to the sea. "
WARM_UP = 2  # passes of each shape that do not count
Seconds = dict[tuple[str, str], list[float]]  # of each repetition, by backend and shape


@dataclass(frozen=True)
class ForwardOptions:
    """Options of `measure_forward`.

    Attributes:
        target: the model.
        dtypes: number format of the model: auto, float32, bfloat16 or float16.
        backends: implementation of the forward pass; lean:0 is lean without native kernels, lean:LEVEL with those of
            one level of processors.
        new_tokens: tokens that a pass reads, as a chain.
        tries: also read a trie of K chains of L tokens.
        draft: model that draws the tries, with equal prefixes merged; without it only the unmerged trie is measured.
        temperature: temperature of the draws of the tries.
        prompts: also read a prompt of this many tokens, without a context.
        context: tokens that were read before.
        repeats: passes of each kind that count.
    """

    target: str = "embedded:stories"
    dtypes: Sequence[str] = ("auto",)
    backends: Sequence[str] = ("hf", "lean")
    new_tokens: Sequence[int] = (1, 2, 4, 9, 33, 65)
    tries: Sequence[tuple[int, int]] = ()
    draft: str | None = None
    temperature: Sequence[float] = (1.0,)
    prompts: Sequence[int] = ()
    context: int = 200
    repeats: int = 40

    def __post_init__(self) -> None:
        smallest = min((size for shape in self.tries for size in shape), default=1)
        refuse_below_one(
            context=self.context,
            repeats=self.repeats,
            new_tokens=min(self.new_tokens),
            size_of_a_trie=smallest,
            prompt=min(self.prompts, default=1),
        )


def measure_forward(options: ForwardOptions, *, watch: Watch = silent) -> Results:
    """Milliseconds of a pass of each shape, on each backend and in each dtype."""
    device = parse_device(None)  # where models are loaded
    facts, read = run_facts(device), bandwidth(device=device)
    tokens = _context(options)
    rows: list[dict[str, Any]] = []
    with watch("measuring", len(options.dtypes) * (options.repeats + WARM_UP), 0) as tick:
        for number, dtype in enumerate(options.dtypes):
            backends = {name: _load(options.target, dtype, name) for name in options.backends}
            shapes = _shapes(options, dtype, next(iter(backends.values())), tokens)
            prompts = {f"prompt of {count}": _text(tokens, count) for count in options.prompts}
            found: Seconds = {(name, shape): [] for name in backends for shape in (*shapes, *prompts)}
            sessions = {name: backend.open() for name, backend in backends.items()}
            for name, backend in backends.items():
                backend.forward([Feed(sessions[name], tokens[:-1])])
            for repeat in range(options.repeats + WARM_UP):
                for which, spent in _repetition(backends, sessions, tokens, shapes, prompts):
                    if repeat >= WARM_UP:
                        found[which].append(spent)
                tick(number * (options.repeats + WARM_UP) + repeat + 1)
            floor = weights_read(options.target, dtype).nbytes / read
            positions = {shape: 1 + (0 if tree is None else len(tree)) for shape, tree in shapes.items()}
            positions |= {shape: len(text) for shape, text in prompts.items()}
            rows += [
                {"dtype": dtype, "backend": name, "shape": shape, "positions": positions[shape], "floor": floor}
                | {"seconds": seconds}
                for (name, shape), seconds in found.items()
            ]
    figures = {"options": shown_options(options), "bytes_per_second": read, "rows": rows}
    return Results("The time of a forward pass", _lines(options, rows, read), figures, facts)


def _repetition(
    backends: Mapping[str, SlotBackend],
    sessions: Mapping[str, SlotSession],
    tokens: list[int],
    shapes: Mapping[str, TokenTree | None],
    prompts: Mapping[str, Sequence[int]],
) -> Iterator[tuple[tuple[str, str], float]]:
    """Backend, shape and seconds of each pass: of each shape after the context, and of each prompt, in turns."""
    for shape, tree in shapes.items():
        for name, backend in backends.items():
            pending = unread(sessions[name], tokens)
            yield (name, shape), timed_pass(backend, [Feed(sessions[name], pending, tree)])
    for shape, text in prompts.items():
        for name, backend in backends.items():
            session = backend.open()
            yield (name, shape), timed_pass(backend, [Feed(session, text)])
            session.close()


def timed_pass(backend: SlotBackend, feeds: Sequence[Feed]) -> float:
    """Seconds of a forward pass, until an accelerator has finished it."""
    start = time.perf_counter()
    backend.forward(list(feeds))
    synchronize(backend.device)
    return time.perf_counter() - start


def _context(options: ForwardOptions) -> list[int]:
    """The tokens of the context, the last of which is read by every measured pass."""
    ids = load_tokenizer(models.resolve(options.target))(TEXT * (1 + options.context // 8))["input_ids"]
    return [int(token) for token in ids][: options.context]


def _load(target: str, dtype: str, name: str) -> SlotBackend:
    """A backend; a value after a colon is that of DRAFTPROOF_NATIVE while it is loaded."""
    kind, _, native = name.partition(":")
    with _environment(VARIABLE, native or None):
        return load(target, LoadOptions(dtype=dtype, backend=kind)).backend


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """Set an environment variable for a block; None does not change it."""
    before = os.environ.get(name)
    try:
        if value is not None:
            os.environ[name] = value
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def _shapes(
    options: ForwardOptions, dtype: str, target: SlotBackend, tokens: Sequence[int]
) -> dict[str, TokenTree | None]:
    """By name, the nodes that a pass reads after the last token of the context; None for no nodes."""
    largest = max(max(options.new_tokens) - 1, *(k * n for k, n in options.tries), 0)
    most = target.max_positions
    if most is not None and max(len(tokens) + largest, *options.prompts, 0) > most:
        raise UserError(
            f"tokens of a pass: expected at most {most} together, the context of {target.name}, got a context of "
            f"{len(tokens)} with {largest} more, and prompts of {list(options.prompts)}"
        )
    text = torch.tensor(_text(tokens, max(largest, 1)), device=target.device)
    shapes: dict[str, TokenTree | None] = {
        f"{count} token{'s' if count > 1 else ''}": None if count == 1 else TokenTree.chain(text[: count - 1])
        for count in options.new_tokens
    }
    for chains, length in options.tries:
        if options.draft is not None:
            draft = _draft_model(options, dtype)
            for temperature in options.temperature:
                name = f"{chains} chains of {length}, temperature {temperature:g}"
                shapes[name] = _trie(draft, target, tokens, chains, length, temperature)
        parents = tuple(-1 if place % length == 0 else place - 1 for place in range(chains * length))
        shapes[f"{chains} chains of {length}, nothing merged"] = TokenTree(text[: chains * length], parents)
    return shapes


def _text(tokens: Sequence[int], count: int) -> list[int]:
    """So many tokens: those of the context, again and again."""
    return (list(tokens) * (1 + count // len(tokens)))[:count]


def _draft_model(options: ForwardOptions, dtype: str) -> SlotBackend:
    assert options.draft is not None, "tries are drawn only with a draft model"
    tokenizers = [load_tokenizer(models.resolve(name)) for name in (options.target, options.draft)]
    refuse_different(*tokenizers, target_name=options.target, draft_name=options.draft)
    return load(options.draft, LoadOptions(dtype=dtype)).backend


def _trie(
    draft: SlotBackend, target: SlotBackend, tokens: Sequence[int], chains: int, length: int, temperature: float
) -> TokenTree:
    """K chains of L tokens after the context, drawn by the engine's own drafter: equal prefixes are merged."""
    drafter = make_drafter(f"chains:{chains}", target=target, draft=draft, stopper=f"fixed:{length}")
    transforms = SamplingParams(temperature=temperature).bind(
        vocab_size=target.vocab_size, eos_token_ids=(), prompt_ids=tokens
    )
    request = DraftRequest(0, list(tokens), len(tokens), length, transforms)
    (made,) = drafter.propose([request], CounterRoundRng([1], [0]))
    drafter.release(0)
    return made.tree


def _lines(options: ForwardOptions, rows: Sequence[Mapping[str, Any]], read: float) -> list[str]:
    """The table: times, and ratios to the first shape and to the first backend, repetition by repetition."""
    seconds = {(row["dtype"], row["backend"], row["shape"]): row["seconds"] for row in rows}
    first_shape, first_backend = rows[0]["shape"], options.backends[0]
    cells = []
    for row in rows:
        own = row["seconds"]
        reference = seconds[row["dtype"], row["backend"], first_shape]
        other = seconds[row["dtype"], first_backend, row["shape"]]
        cells.append(
            (
                *(row[name] for name in ("dtype", "backend", "shape", "positions")),
                f"{1000 * min(own):.2f}",
                f"{1000 * median(own):.2f}",
                f"{median(a / b for a, b in zip(own, reference, strict=True)):.2f}",
                f"{median(b / a for a, b in zip(own, other, strict=True)):.2f}",
                f"{1000 * row['floor']:.2f}",
            )
        )
    heads = ("dtype", "backend", "reads", "positions", "ms, least", "ms, median", f"over {first_shape}")
    return [
        f"{without_directory(options.target)}, batch 1, context {options.context}, {options.repeats} repetitions in",
        f"turns; memory reads {read / 1e9:.1f} GB/s. Ratios are of the same repetition, medians. Floor: the time to",
        "read every weight once.",
        "",
        *table((*heads, f"speed over {first_backend}", "floor, ms"), cells),
    ]
