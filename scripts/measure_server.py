"""What HTTP costs: tokens a second of the server beside `Engine.generate`, on the same engine with the same prompts.

    python scripts/measure_server.py [TARGET] [REQUESTS] [TOKENS]

Clients are in a process of their own, on the same cores. Each concurrency is measured in turns of changing order: the
engine alone, in a thread as the server has it, the server with whole answers, the server with streams. Decoding is
plain, so that every turn does the same work. Prints a table in Markdown: the medians, and the medians of the ratios of
neighbouring turns.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import threading
import time
from multiprocessing.connection import Connection
from statistics import median

import httpx

from draftproof import Engine, SamplingParams
from draftproof.server.app import Server, make_app
from draftproof.server.run import bind, prepared
from draftproof.server.settings import Settings

ROUNDS = 4
TOPICS = ("a dog", "the sea", "an old clock", "bread", "a long road", "two friends", "snow", "a red kite")


def prompts(count: int) -> list[str]:
    """Different prompts of about the same length."""
    return [f"Number {place}. Write a story about {TOPICS[place % len(TOPICS)]}." for place in range(count)]


async def ask(base: str, texts: list[str], concurrency: int, tokens: int, *, stream: bool) -> float:
    """Seconds that all prompts take with so many requests at once."""
    places = asyncio.Semaphore(concurrency)

    async def one(client: httpx.AsyncClient, place: int, text: str) -> None:
        body = {"prompt": text, "max_tokens": tokens, "ignore_eos": True, "seed": place, "stream": stream}
        async with places, client.stream("POST", f"{base}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for _ in answer.aiter_raw():
                pass

    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=concurrency)) as client:
        start = time.perf_counter()
        await asyncio.gather(*(one(client, place, text) for place, text in enumerate(texts)))
        return time.perf_counter() - start


def clients(pipe: Connection) -> None:
    """The other process: does what it is sent, and answers with the seconds that it took."""
    while (task := pipe.recv()) is not None:
        base, texts, concurrency, tokens, stream = task
        pipe.send(asyncio.run(ask(base, texts, concurrency, tokens, stream=stream)))


def in_a_thread(engine: Engine, texts: list[str], params: list[SamplingParams]) -> float:
    """Seconds of the engine alone, not in the main thread."""
    start = time.perf_counter()
    thread = threading.Thread(target=engine.generate, args=(texts, params))
    thread.start()
    thread.join()
    return time.perf_counter() - start


def measure(target: str, count: int, tokens: int, concurrency: int, pipe: Connection) -> str:
    """A row of the table."""
    engine = Engine.load(target, dtype="bfloat16", drafter="none", max_batch=concurrency)
    settings = Settings(port=0)
    listener = bind(settings)
    speaks = prepared(make_app(Server(engine, settings, "model"), ()), settings)
    thread = threading.Thread(target=speaks.run, kwargs={"sockets": [listener]})
    thread.start()
    while not speaks.started:
        time.sleep(0.01)
    base = f"http://127.0.0.1:{listener.getsockname()[1]}"
    texts = prompts(count)
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True, seed=place) for place in range(count)]
    engine.generate(texts[:concurrency], params[:concurrency])
    found: dict[str, list[float]] = {"engine": [], "whole": [], "stream": []}
    for turn in range(ROUNDS):
        for name in list(found) if turn % 2 else list(found)[::-1]:
            if name == "engine":
                found[name].append(in_a_thread(engine, texts, params))
            else:
                pipe.send((base, texts, concurrency, tokens, name == "stream"))
                found[name].append(pipe.recv())
    speaks.should_exit = True
    thread.join()
    speeds = {name: count * tokens / median(seconds) for name, seconds in found.items()}
    ratios = [
        f"{median(alone / served for alone, served in zip(found['engine'], found[name], strict=True)):.3f}"
        for name in ("whole", "stream")
    ]
    return f"| {concurrency} | {' | '.join(f'{speed:.0f}' for speed in speeds.values())} | {' | '.join(ratios)} |"


def main() -> None:
    """Measure and print."""
    target, count, tokens = (sys.argv[1:] + ["smollm2-135m", "16", "64"][len(sys.argv) - 1 :])[:3]
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=clients, args=(theirs,))
    process.start()
    print("| at once | engine | server | server, streams | server / engine | streams / engine |")
    print("|---|---|---|---|---|---|")
    for concurrency in (1, 4, 16):
        print(measure(target, max(int(count), concurrency), int(tokens), concurrency, ours), flush=True)
    ours.send(None)
    process.join()


if __name__ == "__main__":
    main()
