"""Measure the memory of keys and values, pauses while long prompts are read, and what reuse of prefixes saves.

    python scripts/measure_memory.py [--target smollm2-135m] [--parts memory speed pauses reuse] [--out NAME]

`--out docs/results/memory` writes the page and its figures. The pauses are the times of rounds while some requests are
decoded and a prompt arrives; beside them those of reading the prompt at once. Speeds are compared in turns. With
`--processor-time` other processes disturb the figures little.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import common
import torch

from draftproof import Engine, SamplingParams
from draftproof.backends.base import Feed, unread
from draftproof.backends.cache import pages
from draftproof.backends.cache.slot_cache import SlotCache
from draftproof.engine.request import Request
from draftproof.provenance import run_facts
from draftproof.results import Results, table

SHORT, OTHERS = 200, 31
STREAMS = 4
ROUNDS = 60
PARTS = ("memory", "speed", "pauses", "reuse")


def words(length: int, seed: int) -> list[int]:
    """A prompt of random tokens."""
    source = random.Random(seed)
    return [source.randrange(1000, 20000) for _ in range(length)]


def resident() -> int:
    """Bytes of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def settled(length: int, *, tokens: int = 100_000) -> SamplingParams:
    """Greedy decoding that does not end by itself."""
    return SamplingParams(temperature=0, max_tokens=min(tokens, 8190 - length), ignore_eos=True)


# --- memory -------------------------------------------------------------------------------------------------------


def memory(engine: Engine, figures: dict[str, Any], long: int) -> list[str]:
    """Sequences of very different lengths: what they take, and what is left when they end."""
    target: Any = engine.target  # of a kind that has slots
    cache, lengths = target.cache, [long, *[SHORT] * OTHERS]
    before = resident()
    sessions = [target.open() for _ in lengths]
    for session, length in zip(sessions, lengths, strict=True):
        target.forward([Feed(session, words(length, session.slot))])
    own, taken, grown = cache.token_nbytes * sum(lengths), cache.nbytes, resident() - before
    block = cache.token_nbytes * len(lengths) * max(lengths)
    sessions[0].close()
    without, after_long = cache.nbytes, resident() - before
    for session in sessions[1:]:
        session.close()
    left, after_all = cache.nbytes, resident() - before
    figures["memory"] = {
        "lengths": lengths, "own": own, "taken": taken, "resident": grown, "block": block,
        "without_long": without, "resident_without_long": after_long, "left": left, "resident_left": after_all,
    }  # fmt: skip
    rows = [
        ("the sequences' own keys and values", _mb(own), "1", ""),
        ("one block, slots times the longest", _mb(block), f"{block / own:.2f}", ""),
        ("taken", _mb(taken), f"{taken / own:.2f}", _mb(grown)),
        ("when the long one has ended", _mb(without), f"{without / own:.2f}", _mb(after_long)),
        ("when all have ended", _mb(left), f"{left / own:.2f}", _mb(after_all)),
    ]
    intro = f"{len(lengths)} sequences, one of {long} tokens and {OTHERS} of {SHORT}; resident size beyond before:"
    return ["## Memory", "", intro, "", *table(("", "MB", "of their own", "resident, MB"), rows), ""]


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f}"


def use_cache(engine: Engine, cache: SlotCache) -> SlotCache:
    """Let new sessions be in this cache."""
    target: Any = engine.target
    target._cache = cache  # noqa: SLF001 - nobody else changes it
    return cache


# --- the speed of decoding ----------------------------------------------------------------------------------------


def speed(engine: Engine, figures: dict[str, Any], _: int) -> list[str]:
    """Rounds of plain decoding on paged buffers and on one block, in turns."""
    rows = []
    for batch in (1, 8):
        times: dict[bool, list[float]] = {True: [], False: []}
        feeds = {paged: _decoded(engine, batch, paged=paged) for paged in (True, False)}
        for number in range(2 * ROUNDS):
            for paged in (True, False) if number % 2 else (False, True):
                times[paged].append(feeds[paged]())
        ratio = [one / other for one, other in zip(times[True], times[False], strict=True)]
        ms = {paged: 1e3 * median(times[paged]) for paged in times}
        figures[f"speed_{batch}"] = {"paged_ms": ms[True], "block_ms": ms[False], "ratio": median(ratio)}
        rows.append((batch, f"{ms[False]:.2f}", f"{ms[True]:.2f}", f"{median(ratio):.3f}"))
    heads = ("sequences", "one block, ms", "pages, ms", "pages / block, median of pairs")
    return ["## A pass of one token each, at 200 tokens", "", *table(heads, rows), ""]


def _decoded(engine: Engine, batch: int, *, paged: bool) -> Any:
    """Does one pass of plain decoding over sequences in a cache of its own; returns seconds."""
    target, right = engine.target, pages.paged
    paging: Any = pages
    cache = use_cache(engine, SlotCache(engine.target.max_positions))
    paging.paged = right if paged else lambda _: False
    sessions = [target.open() for _ in range(batch)]
    tokens = [words(200, number) for number in range(batch)]
    target.forward([Feed(session, known) for session, known in zip(sessions, tokens, strict=True)])
    paging.paged = right

    def step() -> float:
        use_cache(engine, cache)
        for known, session in zip(tokens, sessions, strict=True):
            unread(session, known)
        start = time.perf_counter()
        target.forward([Feed(session, [7]) for session in sessions])
        return time.perf_counter() - start

    for known in tokens:
        known.append(7)
    return step


# --- pauses -------------------------------------------------------------------------------------------------------


def pauses(engine: Engine, figures: dict[str, Any], long: int, known: int) -> list[str]:
    """Times of rounds while prompts of several lengths arrive, read in chunks and at once.

    Of the longest prompt, `known` tokens are taken over from an earlier request, so that only its end is read.
    """
    rows = []
    if known:
        engine.generate([words(long, long)[:known]], settled(known, tokens=1))
    streams = [engine.add(words(100, 50 + number), settled(100))[0] for number in range(STREAMS)]
    _rounds(engine, 20)
    for length in (long // 4, long):
        usual = _rounds(engine, ROUNDS)
        start = time.perf_counter()
        (request,) = engine.add(words(length, length), settled(length, tokens=1))
        mixed, tokens = [], sum(len(each.tokens) for each in streams)
        while not request.finished:
            mixed += _rounds(engine, 1)
        seconds, made = time.perf_counter() - start, sum(len(each.tokens) for each in streams) - tokens
        after = _rounds(engine, ROUNDS)
        alone = _first_token(engine, words(length, length + 1), streams)
        figures[f"pauses_{length}"] = {
            "usual": usual, "mixed": mixed, "after": after, "seconds": seconds, "alone": alone, "tokens": made,
            "known": request.reused,
        }  # fmt: skip
        ratios = _over_usual(mixed, _percentile(usual, 0.5), _percentile(after, 0.5))
        rows.append(
            (
                length,
                length - request.reused,
                *(f"{1e3 * _percentile(each, 0.5):.1f}" for each in (usual, after)),
                *(f"{1e3 * _percentile(mixed, share):.1f}" for share in (0.5, 0.99)),
                *(f"{_percentile(ratios, share):.2f}" for share in (0.5, 0.99)),
                f"{1e3 * alone:.0f}",
                f"{seconds:.1f}",
                made,
            )
        )
    for each in streams:
        engine.abort(each)
    engine.forget()
    heads = (
        "prompt", "of which are read", "usual p50 before", "after", "while it is read p50", "p99", "over usual p50",
        "p99", "pause if read at once", "until its first token, s", "tokens of the others meanwhile",
    )  # fmt: skip
    intro = (
        f"Time between tokens of {STREAMS} requests that are decoded, in ms, drafter {engine.drafter.name}. Their "
        "texts grow meanwhile, so a usual round is one between those before and after:"
    )
    return [f"## Pauses, drafter {engine.drafter.name}", "", intro, "", *table(heads, rows), ""]


def _over_usual(mixed: Sequence[float], before: float, after: float) -> list[float]:
    """Each round over a usual one of its time, on the line from those before to those after."""
    return [each / (before + (after - before) * place / len(mixed)) for place, each in enumerate(mixed)]


def _first_token(engine: Engine, prompt: Sequence[int], streams: Sequence[Request]) -> float:
    """Seconds until a prompt is read that is read at once, in a session of its own."""
    assert streams, "they are not stepped meanwhile"
    session = engine.target.open()
    start = time.perf_counter()
    engine.target.forward([Feed(session, list(prompt))])
    seconds = time.perf_counter() - start
    session.close()
    return seconds


def _rounds(engine: Engine, number: int) -> list[float]:
    found = []
    for _ in range(number):
        start = time.perf_counter()
        engine.step()
        found.append(time.perf_counter() - start)
    return found


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


# --- reuse --------------------------------------------------------------------------------------------------------


def reuse(engine: Engine, figures: dict[str, Any], _: int) -> list[str]:
    """Time to the first token: the second turn of a chat, a shared system prompt, several continuations."""
    kept, rows = engine.scheduler.prefix_cache, []
    most = kept.most
    for name, work in WORK.items():
        times: dict[int, list[float]] = {most: [], 0: []}
        for number in range(3):
            for kept.most in (most, 0) if number % 2 else (0, most):
                engine.forget()
                times[kept.most].append(work(engine, 10 * number))
        kept.most = most
        with_, without = (median(times[each]) for each in (most, 0))
        figures[f"reuse: {name}"] = {"with": times[most], "without": times[0]}
        rows.append((name, f"{1e3 * without:.0f}", f"{1e3 * with_:.0f}", f"{without / with_:.1f}"))
    engine.forget()
    heads = ("", "without, ms", "with reuse, ms", "times shorter")
    return ["## Reuse: time to the first token", "", *table(heads, rows), ""]


def _second_turn(engine: Engine, seed: int) -> float:
    prompt = words(2000, seed + 1)
    (answer,) = engine.generate([prompt], settled(2000, tokens=16))
    return _seconds(engine, [*prompt, *answer.token_ids, *words(30, seed + 2)], 1)


def _shared(engine: Engine, seed: int) -> float:
    system = words(1000, seed + 3)
    engine.generate([[*system, *words(50, seed + 4)]], settled(1050, tokens=4))
    return _seconds(engine, [*system, *words(50, seed + 5)], 1)


def _several(engine: Engine, seed: int) -> float:
    return _seconds(engine, words(1000, seed + 6), 4)


def _seconds(engine: Engine, prompt: list[int], number: int) -> float:
    """Seconds until all continuations of a prompt have their first token."""
    start = time.perf_counter()
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=1, ignore_eos=True, n=number)
    requests = engine.add(prompt, params)
    while not all(request.finished for request in requests):
        engine.step()
    return time.perf_counter() - start


WORK = {
    "second turn of a chat of 2000 tokens": _second_turn,
    "system prompt of 1000 tokens, shared": _shared,
    "4 continuations of a prompt of 1000 tokens, all": _several,
}


def main() -> None:
    """Measure and print."""
    parser = common.parser(__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--long", type=int, default=8000, help="tokens of the longest prompt")
    parser.add_argument("--known", type=int, default=0, help="tokens of it that are not read again, for the pauses")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--drafters", nargs="+", default=["none", "auto"], help="for the pauses")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument(
        "--processor-time", action="store_true", help="one thread, by whose processor time everything is timed"
    )
    options = parser.parse_args()
    if options.processor_time:
        torch.set_num_threads(1)
        time.perf_counter = time.process_time  # also for the engine, which chooses chunks by it
    facts = run_facts(torch.device("cpu"))
    start, figures, lines = time.perf_counter(), dict[str, Any](), list[str]()
    engine = Engine.load(options.target, dtype=options.dtype, device="cpu", drafter="none", max_batch=40)
    for part, measured in (("memory", memory), ("speed", speed), ("reuse", reuse)):
        if part in options.parts:
            lines += measured(engine, figures, options.long)
            use_cache(engine, SlotCache(engine.target.max_positions))
    for drafter in options.drafters if "pauses" in options.parts else ():
        made = Engine.load(options.target, dtype=options.dtype, device="cpu", drafter=drafter, max_batch=40)
        lines += pauses(made, figures.setdefault(drafter, {}), options.long, options.known)
        del made
    seconds, threads = time.perf_counter() - start, torch.get_num_threads()
    clock = ", processor time" if options.processor_time else ""
    lines.append(f"Target {options.target}, {options.dtype}, {threads} threads{clock}; all in {seconds:.0f} s.")
    results = Results("Memory and prompts", lines, figures, facts)
    common.deliver(options, results)


if __name__ == "__main__":
    main()
