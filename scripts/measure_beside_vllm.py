"""Our server beside vLLM's on one machine: tokens a second, time to the first token, time between tokens.

    python scripts/measure_beside_vllm.py PYTHON MODEL [DTYPE]

PYTHON is that of an environment of its own, with vLLM; MODEL a directory that both can read. Both servers run all the
time, and one of them at a time has work: in turns, for 1, 4, 8 and 16 requests at once. Prompts and numbers of tokens
are the same. The load comes from this process, by streams of /v1/completions. Takes less than 5 minutes on a quiet
machine; prints a table in Markdown: medians over the turns.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from statistics import median
from typing import NamedTuple

import httpx

CONCURRENCY = (1, 4, 8, 16)
TOKENS, TURNS = 48, 2
TOPICS = ("a dog", "the sea", "an old clock", "bread", "a long road", "two friends", "snow", "a red kite")


class Turn(NamedTuple):
    """What one turn measured: tokens a second, and medians of milliseconds."""

    speed: float
    first: float
    between: float


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def started(command: list[str], port: int, path: str) -> subprocess.Popen[bytes]:
    """A server that is ready."""
    process = subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    end = time.monotonic() + 240
    while True:
        if process.poll() is not None or time.monotonic() > end:
            sys.exit(f"{command[0]} did not start")
        try:
            if httpx.get(f"http://127.0.0.1:{port}{path}", timeout=2).status_code == 200:
                return process
        except httpx.HTTPError:
            time.sleep(0.5)


async def turn(port: int, model: str, count: int, concurrency: int, number: int) -> Turn:
    """All requests with so many at once."""
    places, firsts, between = asyncio.Semaphore(concurrency), list[float](), list[float]()

    async def one(client: httpx.AsyncClient, place: int) -> None:
        text = f"Number {place + 100 * number}. Write a story about {TOPICS[place % len(TOPICS)]}."
        body = {"model": model, "prompt": text, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
        body["stream"] = True
        async with places:
            start, first = time.perf_counter(), 0.0
            url = f"http://127.0.0.1:{port}/v1/completions"
            async with client.stream("POST", url, json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {") and not first and json.loads(line[6:])["choices"]:
                        first = time.perf_counter()
            firsts.append(first - start)
            between.append((time.perf_counter() - first) / (TOKENS - 1))

    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=concurrency)) as client:
        start = time.perf_counter()
        await asyncio.gather(*(one(client, place) for place in range(count)))
        seconds = time.perf_counter() - start
    return Turn(count * TOKENS / seconds, 1000 * median(firsts), 1000 * median(between))


def main() -> None:
    """Measure and print."""
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    python, model, dtype = (*sys.argv[1:], "bfloat16")[:3]
    ours, theirs = free_port(), free_port()
    own = [sys.executable, "-c", "from draftproof.cli import main; main()", "serve", "--served-model-name", "model"]
    commands = {
        ours: (
            [*own, "--target", model, "--dtype", dtype, "--max-batch", "16", "--generation-config", "none"],
            "/ready",
        ),
        theirs: (
            [
                *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", dtype),
                *("--served-model-name", "model", "--max-model-len", "2048", "--generation-config", "vllm"),
            ],
            "/health",
        ),
    }
    servers = [started(command, port, path) for port, (command, path) in commands.items()]
    try:
        for port in (ours, theirs):
            asyncio.run(turn(port, "model", 4, 4, 99))
        heads = ("at once", "tokens a second", "vLLM's", "ratio", "first token, ms", "vLLM's", "between, ms", "vLLM's")
        print(f"| {' | '.join(heads)} |")
        print("|---" * len(heads) + "|")
        for concurrency in CONCURRENCY:
            found: dict[int, list[Turn]] = {ours: [], theirs: []}
            for number in range(TURNS):
                for port in (ours, theirs) if number % 2 else (theirs, ours):
                    count = max(3, concurrency)
                    found[port].append(asyncio.run(turn(port, "model", count, concurrency, number)))
            own_turn, other = (Turn(*map(median, zip(*found[port], strict=True))) for port in (ours, theirs))
            speeds = f"{own_turn.speed:.1f} | {other.speed:.1f} | {own_turn.speed / other.speed:.2f}"
            times = f"{own_turn.first:.0f} | {other.first:.0f} | {own_turn.between:.1f} | {other.between:.1f}"
            print(f"| {concurrency} | {speeds} | {times} |", flush=True)
    finally:
        for server in servers:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(60)


if __name__ == "__main__":
    main()
