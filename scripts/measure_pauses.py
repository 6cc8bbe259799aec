"""Pauses between the tokens of running streams while long prompts arrive.

    python scripts/measure_pauses.py [TARGET] [DTYPE] [OPTION ...]

A server of its own (with further options of `draftproof serve`) answers four streams; meanwhile nothing arrives, then
prompts of 2000 tokens, then of 8000 (or as many as the context holds), one every three seconds, each for one token.
Takes about two minutes; prints a table in Markdown: time from one chunk of a stream to the next.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from statistics import quantiles

import httpx
from measure_servers import free_port, started

STREAMS, SECONDS, EVERY = 4, 25.0, 3.0


async def stream(client: httpx.AsyncClient, base: str, end: float, pauses: list[float]) -> None:
    """One stream after another until the end; only pauses after a stream's first chunk count."""
    while time.perf_counter() < end:
        body = {"prompt": f"Story {random.random()}: once", "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with client.stream("POST", f"{base}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            last = 0.0
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter()
                if last:
                    pauses.append(now - last)
                last = now
                if now > end:
                    return


async def prompts(client: httpx.AsyncClient, base: str, end: float, size: int, firsts: list[float]) -> None:
    """Prompts of this size, none of which begins as another one."""
    while size and time.perf_counter() < end:
        ids = [random.randrange(300, 1900) for _ in range(size)]
        start = time.perf_counter()
        answer = await client.post(f"{base}/v1/completions", json={"prompt": ids, "max_tokens": 1})
        answer.raise_for_status()
        firsts.append(time.perf_counter() - start)
        await asyncio.sleep(max(EVERY - firsts[-1], 0))


async def measure(base: str, size: int) -> str:
    """A row of the table."""
    pauses, firsts = list[float](), list[float]()
    async with httpx.AsyncClient(timeout=600) as client:
        end = time.perf_counter() + SECONDS
        streams = (stream(client, base, end, pauses) for _ in range(STREAMS))
        await asyncio.gather(prompts(client, base, end, size, firsts), *streams)
    cuts = quantiles(pauses, n=1000)
    times = [f"{1000 * each:.0f}" for each in (cuts[499], cuts[989], max(pauses))]
    first = f"{1000 * sorted(firsts)[len(firsts) // 2]:.0f}" if firsts else ""
    return f"| {size or 'none'} | {len(pauses)} | {' | '.join(times)} | {first} |"


def main() -> None:
    """Measure and print."""
    target, dtype = (*sys.argv[1:3], *("smollm2-135m", "bfloat16")[len(sys.argv[1:3]) :])
    own = [sys.executable, "-c", "from draftproof.cli import main; main()", "serve"]
    port = free_port()
    server = started([*own, "--target", target, "--dtype", dtype, *sys.argv[3:]], port, "/ready")
    base = f"http://127.0.0.1:{port}"
    try:
        context = httpx.get(f"{base}/v1/models").json()["data"][0]["max_model_len"] or 8192
        print("| prompts that arrive | pauses | median, ms | 99 of 100 below | longest | first token of them, ms |")
        print("|---|---|---|---|---|---|")
        for size in (0, 2000, 8000):
            if size == 0 or context > 100:
                print(asyncio.run(measure(base, min(size, context - 100))), flush=True)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


if __name__ == "__main__":
    main()
