"""Our server beside vLLM's, llama.cpp's, or ours of another checkout: speed, first tokens, pauses of streams.

    python scripts/measure_servers.py OTHER MODEL [DTYPE] [--draft FILE ...] [--guidellm PROGRAM] [OPTION ...]

OTHER is the Python of an environment of its own, with vLLM, or the folder of another checkout of this repository, or
llama.cpp for a MODEL that is a .gguf file: a folder with the package xllamacpp (`pip install --target`), or a
llama-server. MODEL is a directory, file or name that both can read; options are those of `draftproof serve`, for our
servers. One of the servers at a time has work, in turns, for several numbers of requests at once; the other one is
stopped, since one that waits may keep a processor busy. With --draft, which is for .gguf files, each server also has
turns with each of these draft models. Prompts and numbers of tokens are the same. The load comes from this process, by
streams of /v1/completions, or from guidellm (in an environment of its own), with its synthetic prompts; its time
between tokens is the mean of a request's. Tokens a second are medians over the turns, times are of all turns together.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import common
import httpx

from draftproof import models
from draftproof.bench.engines import ENVIRONMENT
from draftproof.provenance import run_facts
from draftproof.results import Results, table

TOKENS = 48
SYNTHETIC = 32  # tokens of guidellm's prompts
START = 240  # seconds that a server may take until it is ready
TOPICS = ("a dog", "the sea", "an old clock", "bread", "a long road", "two friends", "snow", "a red kite")


class Turn(NamedTuple):
    """What one turn measured: tokens a second, seconds to the first token of each request, and between events.

    An event of a stream has one token, or several that were accepted together.
    """

    speed: float
    firsts: list[float]
    pauses: list[float]


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def started(
    command: list[str], port: int, path: str, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """A server that is ready, with further variables of its environment. Else the end of what it said."""
    said = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the server
    process = subprocess.Popen(
        [*command, "--port", str(port)],
        stdout=said,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=ENVIRONMENT | os.environ | dict(environment or {}),
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

    # A server that was stopped meanwhile may close a kept connection just when it is used again.
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        start = time.perf_counter()
        await asyncio.gather(*(one(client, place) for place in range(count)))
        seconds = time.perf_counter() - start
    return Turn(count * TOKENS / seconds, firsts, pauses)


def figures(turns: Sequence[Turn], ours: Sequence[Turn]) -> dict[str, Any]:
    """What a row of the table is made from: speeds of the turns and their ratios, times in milliseconds."""
    ratios = [own.speed / its.speed for its, own in zip(turns, ours, strict=True)]
    made: dict[str, Any] = {"speeds": [each.speed for each in turns], "ratios": ratios}
    firsts, pauses = [each for turn in turns for each in turn.firsts], [each for turn in turns for each in turn.pauses]
    for name, times in (("first", firsts), ("between", pauses)):
        made[name] = [1000 * median(times), 1000 * quantiles(times, n=100)[98]]
    return made


def cells(found: Mapping[str, Any]) -> list[str]:
    """The cells of a row."""
    speed, ratio = median(found["speeds"]), median(found["ratios"])
    span = f"{ratio:.2f} [{min(found['ratios']):.2f}, {max(found['ratios']):.2f}]"
    drafted, accepted, passes, tokens = found["counts"] or (0, 0, 0, 0)
    shares = f"{accepted / drafted:.0%}" if drafted else "", f"{tokens / passes:.2f}" if passes else ""
    return [f"{speed:.1f}", span, *(f"{time:.0f}" for time in (*found["first"], *found["between"])), *shares]


def counts_of(port: int) -> list[float]:
    """What one of our servers has counted since its start, in the order of COUNTED; nothing of other servers."""
    answer = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60)
    found = dict(re.findall(r"^draftproof:(\w+)_total\{[^}]*\} (\S+)$", answer.text, re.MULTILINE))
    return [float(found[name]) for name in COUNTED if name in found]


HEADS = ["at once", "server", "tokens a second", "the first / this one", "first token, ms", "99 of 100 below"]
HEADS += ["between events, ms", "99 of 100 below", "accepted", "tokens a pass"]
COUNTED = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "num_target_calls", "generation_tokens")
"""What is read from our servers: tokens drafted and accepted, passes of the target, and tokens of answers."""


class Server(NamedTuple):
    """How a server is started: its name, command, the path that says that it is ready, variables of its environment."""

    name: str
    command: list[str]
    ready: str
    environment: Mapping[str, str] | None = None


def other_server(other: str, own: Server, model: str, dtype: str, draft: str | None, most: int) -> Server:
    """The server that ours is compared with."""
    folder = Path(other)
    package = (folder / "xllamacpp").is_dir()
    if package or folder.name == "llama-server":
        command = [sys.executable, str(Path(__file__).with_name("serve_llama_cpp.py")), model]
        command += ["--slots", str(most), "--context", str(1024 * most)]
        environment = {"PYTHONPATH" if package else "LLAMA_SERVER": other}
        return Server("llama.cpp", command + (["--draft", draft] if draft else []), "/health", environment)
    if folder.is_dir():
        return Server("the other", own.command, "/ready", {"PYTHONPATH": str(folder / "src")})
    command = [other, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", dtype]
    command += ["--served-model-name", "model", "--max-model-len", "2048", "--generation-config", "vllm"]
    return Server("vLLM", command, "/health")


def signal_all(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a server and to what it has started."""
    with suppress(ProcessLookupError):  # it has ended
        os.killpg(process.pid, number)


def main() -> None:
    """Measure and print."""
    parser = common.parser(__doc__)
    parser.add_argument("other")
    parser.add_argument("model")
    parser.add_argument("dtype", nargs="?", default="bfloat16")
    parser.add_argument(
        "--draft", metavar="FILE", nargs="+", default=[], help=".gguf files that draft, for both servers"
    )
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 8, 16], help="requests at once")
    parser.add_argument("--turns", type=int, default=3, help="of each server for each number of requests")
    parser.add_argument("--guidellm", metavar="PROGRAM", help="makes the load")
    given, options = parser.parse_known_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the servers would outlive it
    model, dtype = given.model, given.dtype
    load = guidellm_load(given.guidellm, models.resolve(model)) if given.guidellm else own_load
    command = [sys.executable, "-c", "from draftproof.cli import main; main()", "serve", "--served-model-name", "model"]
    command += ["--target", model, "--max-batch", "16", "--generation-config", "none"]
    command += [] if model.endswith(".gguf") else ["--dtype", dtype]
    ours = Server("ours", command + options, "/ready")
    most = max(given.at_once)
    plan = [ours, other_server(given.other, ours, model, dtype, None, most)]
    for draft in reversed(given.draft):
        name = "draft" if len(given.draft) == 1 else Path(draft).stem
        drafted = Server(f"ours, {name}", [*ours.command, "--draft", draft], "/ready")
        other = other_server(given.other, ours, model, dtype, draft, most)
        plan = [drafted, *plan, other._replace(name=f"{other.name}, {name}")]
    servers, ports = dict[str, subprocess.Popen[bytes]](), {each.name: free_port() for each in plan}
    facts, found = run_facts(), dict[str, dict[str, Any]]()
    try:
        for each in plan:
            common.say(given, "starting", each.name)
            servers[each.name] = started(each.command, ports[each.name], each.ready, each.environment)
            own_load(ports[each.name], 4, 99)
            signal_all(servers[each.name], signal.SIGSTOP)
        for concurrency in given.at_once:
            turns: dict[str, list[Turn]] = {name: [] for name in ports}
            counts: dict[str, list[list[float]]] = {name: [] for name in ports}
            for number in range(given.turns):
                for name in list(ports) if number % 2 else list(ports)[::-1]:
                    signal_all(servers[name], signal.SIGCONT)
                    before = counts_of(ports[name])
                    turns[name].append(load(ports[name], concurrency, number))
                    pairs = zip(counts_of(ports[name]), before, strict=True)
                    counts[name].append([after - earlier for after, earlier in pairs])
                    signal_all(servers[name], signal.SIGSTOP)
            found[str(concurrency)] = {
                name: {
                    **figures(made, turns[plan[0].name]),
                    "counts": [sum(each) for each in zip(*counts[name], strict=True)],
                }
                for name, made in turns.items()
            }
            common.say(given, concurrency, *(f"{name}: {median(t.speed for t in turns[name]):.1f}" for name in turns))
    finally:
        for server in servers.values():
            signal_all(server, signal.SIGCONT)
            signal_all(server, signal.SIGTERM)
            server.wait(60)
    rows = [[count, name, *cells(made)] for count, each in found.items() for name, made in each.items()]
    about = [
        f"{given.turns} turns for each number of requests at once, {TOKENS} tokens an answer, temperature 0, streams.",
        "Speeds and ratios: medians; ratios with the least and the greatest of the turns. Of our servers: the share of",
        "drafted tokens that were accepted, and tokens of answers for each pass of the target and continuation.",
        "",
    ]
    names = " and ".join(dict.fromkeys(each.name.split(",")[0] for each in plan))
    common.deliver(given, Results(f"Servers: {names}", [*about, *table(HEADS, rows)], found, facts))


if __name__ == "__main__":
    main()
