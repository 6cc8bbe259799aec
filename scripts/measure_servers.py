"""Our server beside vLLM's, or beside ours of another checkout: speed, time to the first token, pauses between tokens.

    python scripts/measure_servers.py OTHER MODEL [DTYPE] [--guidellm PROGRAM] [OPTION ...]

OTHER is the Python of an environment of its own, with vLLM, or the folder of another checkout of this repository; MODEL
a directory or name that both can read; options are those of `draftproof serve`, for our servers. One of the servers at
a time has work, in turns, for 1, 4, 8 and 16 requests at once; the other one is stopped, since one that waits may keep
a processor busy. Prompts and numbers of tokens are the same. The load comes from this process, by streams of
/v1/completions, or from guidellm (in an environment of its own), with its synthetic prompts; its time between tokens is
the mean of a request's. Takes less than 5 minutes on a quiet machine, with guidellm 10; prints a table in Markdown:
tokens a second as medians over the turns, times of all turns together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import httpx

from draftproof import models
from draftproof.bench.engines import ENVIRONMENT

CONCURRENCY = (1, 4, 8, 16)
TOKENS, TURNS = 48, 3
SYNTHETIC = 32  # tokens of guidellm's prompts
START = 240  # seconds that a server may take until it is ready
TOPICS = ("a dog", "the sea", "an old clock", "bread", "a long road", "two friends", "snow", "a red kite")


class Turn(NamedTuple):
    """What one turn measured: tokens a second, seconds to the first token of each request, and between tokens."""

    speed: float
    firsts: list[float]
    pauses: list[float]


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def started(command: list[str], port: int, path: str, source: Path | None = None) -> subprocess.Popen[bytes]:
    """A server that is ready; of the package in another folder, where that is given. Else the end of what it said."""
    said = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the server
    process = subprocess.Popen(
        [*command, "--port", str(port)],
        stdout=said,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=ENVIRONMENT | os.environ | ({} if source is None else {"PYTHONPATH": str(source)}),
    )
    end = time.monotonic() + START
    while True:
        code = process.poll()
        if code is not None or time.monotonic() > end:
            if code is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            said.seek(0)
            lines = said.read().decode(errors="replace").splitlines()[-20:]
            how = f"was not ready after {START} s" if code is None else f"ended with code {code}"
            sys.exit("\n".join((f"{command[0]} {how}; the end of what it said:", *lines)))
        try:
            if httpx.get(f"http://127.0.0.1:{port}{path}", timeout=2).status_code == 200:
                return process
        except httpx.HTTPError:
            time.sleep(0.5)


Load = Callable[[int, int, int], Turn]  # of a port, with so many requests at once, in a turn of this number


def own_load(port: int, concurrency: int, number: int) -> Turn:
    """A turn with the client below."""
    return asyncio.run(turn(port, "model", max(3, concurrency), concurrency, number))


def guidellm_load(program: str, tokenizer: str) -> Load:
    """A turn with guidellm; each has prompts of its own."""

    def load(port: int, concurrency: int, number: int) -> Turn:
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder) / "report.json"
            command = [program, "run", "--disable-console", "--seed", f"kind=static,value={100 * concurrency + number}"]
            backend = f"kind=openai_http,target=http://127.0.0.1:{port},model=model,request_format=/v1/completions"
            command += ["--backend", backend, "--profile", f"kind=concurrent,streams={concurrency}"]
            command += ["--constraint", f"kind=max_requests,count={max(6, 3 * concurrency)}"]
            command += [
                "--tokenizer",
                f"kind=huggingface_auto,model={tokenizer}",
                "--output",
                f"kind=json,path={found}",
            ]
            command += ["--data", f"kind=synthetic_text,prompt_tokens={SYNTHETIC},output_tokens={TOKENS}"]
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode or not found.exists():
                sys.exit(f"guidellm ended with code {made.returncode}:\n{(made.stdout + made.stderr)[-2000:]}")
            (report,) = json.loads(found.read_text(encoding="utf-8"))["benchmarks"]
        rows = report["requests"]["successful"]
        if report["requests"]["errored"] or any(row["output_tokens"] != TOKENS for row in rows):
            sys.exit(f"guidellm: {len(report['requests']['errored'])} errors, or answers of other lengths")
        seconds = max(row["request_end_time"] for row in rows) - min(row["request_start_time"] for row in rows)
        firsts, between = (
            [row[name] / 1000 for row in rows] for name in ("time_to_first_token_ms", "inter_token_latency_ms")
        )
        return Turn(TOKENS * len(rows) / seconds, firsts, between)

    return load


async def turn(port: int, model: str, count: int, concurrency: int, number: int) -> Turn:
    """All requests with so many at once."""
    places, firsts, pauses = asyncio.Semaphore(concurrency), list[float](), list[float]()

    async def one(client: httpx.AsyncClient, place: int) -> None:
        text = f"Number {place + 100 * number}. Write a story about {TOPICS[place % len(TOPICS)]}."
        body = {"model": model, "prompt": text, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
        body["stream"] = True
        async with places:
            last, times = time.perf_counter(), list[float]()
            url = f"http://127.0.0.1:{port}/v1/completions"
            async with client.stream("POST", url, json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                        now = time.perf_counter()
                        times.append(now - last)
                        last = now
            firsts.append(times[0])
            pauses.extend(times[1:])

    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=concurrency)) as client:
        start = time.perf_counter()
        await asyncio.gather(*(one(client, place) for place in range(count)))
        seconds = time.perf_counter() - start
    return Turn(count * TOKENS / seconds, firsts, pauses)


def row(concurrency: int, name: str, turns: Sequence[Turn], ours: Sequence[Turn]) -> str:
    """A row of the table."""
    speed = median(each.speed for each in turns)
    ratio = median(own.speed / its.speed for its, own in zip(turns, ours, strict=True))
    cells = [str(concurrency), name, f"{speed:.1f}", f"{ratio:.2f}"]
    for times in ([each for turn in turns for each in turn.firsts], [each for turn in turns for each in turn.pauses]):
        cells += [f"{1000 * median(times):.0f}", f"{1000 * quantiles(times, n=100)[98]:.0f}"]
    return f"| {' | '.join(cells)} |"


def signal_all(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a server and to what it has started."""
    with suppress(ProcessLookupError):  # it has ended
        os.killpg(process.pid, number)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other")
    parser.add_argument("model")
    parser.add_argument("dtype", nargs="?", default="bfloat16")
    parser.add_argument("--guidellm", metavar="PROGRAM", help="makes the load")
    given, options = parser.parse_known_args()
    other, model, dtype = given.other, given.model, given.dtype
    load = guidellm_load(given.guidellm, models.resolve(model)) if given.guidellm else own_load
    own = [sys.executable, "-c", "from draftproof.cli import main; main()", "serve", "--served-model-name", "model"]
    own += ["--target", model, "--dtype", dtype, "--max-batch", "16", "--generation-config", "none", *options]
    ports = {"ours": free_port()}
    servers = {"ours": started(own, ports["ours"], "/ready")}
    try:
        if Path(other).is_dir():
            name, command, path, source = "the other", own, "/ready", Path(other) / "src"
        else:
            name, path, source = "vLLM", "/health", None
            command = [other, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", dtype]
            command += ["--served-model-name", "model", "--max-model-len", "2048", "--generation-config", "vllm"]
        ports[name] = free_port()
        servers[name] = started(command, ports[name], path, source)
        for each, port in ports.items():
            own_load(port, 4, 99)
            signal_all(servers[each], signal.SIGSTOP)
        print(f"Load average {os.getloadavg()[0]:.1f} at the start.\n")
        heads = ("at once", "server", "tokens a second", "ours / its", "first token, ms", "99 of 100 below")
        print(f"| {' | '.join((*heads, 'between, ms', '99 of 100 below'))} |")
        print("|---" * (len(heads) + 2) + "|")
        for concurrency in CONCURRENCY:
            found: dict[str, list[Turn]] = {each: [] for each in ports}
            for number in range(TURNS):
                for each in list(ports) if number % 2 else list(ports)[::-1]:
                    signal_all(servers[each], signal.SIGCONT)
                    found[each].append(load(ports[each], concurrency, number))
                    signal_all(servers[each], signal.SIGSTOP)
            for each, turns in found.items():
                print(row(concurrency, each, turns, found["ours"]), flush=True)
    finally:
        for server in servers.values():
            signal_all(server, signal.SIGCONT)
            signal_all(server, signal.SIGTERM)
            server.wait(60)


if __name__ == "__main__":
    main()
