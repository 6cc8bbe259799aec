"""A server under load: with a hostile client among ten, or with faults of its own engine.

    python scripts/soak_server.py --minutes MINUTES [--json] [-- OPTIONS OF THE SERVER]
    python scripts/soak_server.py [REQUESTS] [CONCURRENCY]

With `--minutes`: nine clients ask for answers that are known, and a tenth one attacks: chains of references, heavy
regexes, bad words, grammars that exhaust a lexer, panics, fields that are not read, answers that are not read, idle
connections, clients that leave while their grammar is compiled. The process does not end; no stream of the nine pauses
for more than a second, and /health is always answered within one, everything else within 20; the memory comes back
within 200 MiB; every answer of the nine is the one from before the attacks. Prints a report, and exits with 1 if one of
these is not so.

Without: every answer that is completed is the engine's own, and everything is given back. Of ten requests one is
cancelled (its connection closed or reset), one malformed, one structured, one calls a tool, one is streamed, one is
read slowly, one has logits that are not numbers, three are plain. Rounds of the engine raise from time to time. The
server is a process of its own with the embedded pair; expected answers come from an engine in this process. Then:
SIGTERM while streams run, kill -9 while streams run, a restart at the same port, and a quarter of the requests again.
The load generator is this script, on httpx: load tools measure time, and do not compare answers.
Prints a summary as JSON; exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from soak_hostile import HostileSoak, shown

from draftproof import Engine, SamplingParams

TEMPLATE = "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.content }} {% endfor %}"
FAULTS = """
import json, os, signal, sys, threading
import torch
from draftproof.engine.loop import DecodingLoop
from draftproof.server import app

step, probs, made, rounds = DecodingLoop.step, DecodingLoop._target_probs, [], [0]

def failing_step(self):
    rounds[0] += 1
    if rounds[0] % 97 == 0:
        raise RuntimeError("injected")
    step(self)

def failing_probs(self, row, draft, output):
    if row.params.presence_penalty == 0.123:
        output.logits[:] = float("nan")
    return probs(self, row, draft, output)

class Server(app.Server):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        made.append(self)

def state(*_):
    worker, engine = made[0].worker, made[0].engine
    found = {"rows": len(worker._rows), "open": len(worker._open), "busy": engine.busy, "rounds": rounds[0]}
    cached = sum(each.backend is engine.target for each in engine.scheduler.prefix_cache._entries)
    found["slots"] = engine.target.cache.in_use - cached
    with open(os.environ["SOAK_STATE"] + ".new", "w") as file:
        json.dump(found, file)
    os.replace(os.environ["SOAK_STATE"] + ".new", os.environ["SOAK_STATE"])

DecodingLoop.step, DecodingLoop._target_probs, app.Server = failing_step, failing_probs, Server
signal.signal(signal.SIGUSR1, state)
from draftproof.cli import main
main()
"""
OPTIONS = ["--target", "embedded:stories", "--draft", "embedded:stories-draft", "--max-batch", "8"]
PROMPTS = ("Once upon a time", "The little dog", "Lily and Tom went", "In the garden")
SEEDS, TOKENS = 6, 24
REGEX = "[A-Z][a-z]{2,6} [0-9]{3}"
TOOL = {
    "type": "function",
    "function": {
        "name": "give",
        "parameters": {
            "type": "object",
            "properties": {
                "what": {"enum": ["ball", "book"]},
                "count": {"type": "integer", "minimum": 1, "maximum": 99},
            },
            "required": ["what", "count"],
            "additionalProperties": False,
        },
    },
}
MALFORMED: tuple[bytes, ...] = (
    b"{",
    b"[]",
    b'{"prompt": 5}',
    b'{"prompt": "x", "temperature": -1}',
    b'{"prompt": "x", "best_of": 2}',
    b'{"prompt": "x", "structured_outputs": {"regex": "("}}',
    b'{"prompt": "' + b"a" * 200_000 + b'"}',
    b'{"prompt": [' + b"1.5," * 50_000 + b"1]}",
    b"\xff\xfe",
)


class Soak:
    """One server after another at one port, and what was seen.

    Args:
        folder: for files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.state_file = folder, folder / "state.json"
        (folder / "template").write_text(TEMPLATE, encoding="utf-8")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.base = f"http://127.0.0.1:{self.port}"
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.expected: dict[tuple[str, int, str | None], str] = {}

    def prepare(self) -> None:
        """Find the expected answers, by an engine in this process."""
        engine = Engine.load("embedded:stories", "embedded:stories-draft")
        for grammar in (None, f"regex:{REGEX}"):
            keys = [(prompt, seed) for prompt in PROMPTS for seed in range(SEEDS)]
            params = [SamplingParams(seed=seed, max_tokens=TOKENS, grammar=grammar) for _, seed in keys]
            for (prompt, seed), output in zip(keys, engine.generate([key[0] for key in keys], params), strict=True):
                self.expected[prompt, seed, grammar] = output.text

    def start(self) -> subprocess.Popen[bytes]:
        """A server that is ready."""
        log = (self.folder / "log").open("ab")
        command = [sys.executable, "-c", FAULTS, "serve", "--port", str(self.port), *OPTIONS]
        command += ["--chat-template", str(self.folder / "template"), "--write-timeout", "20"]
        process = subprocess.Popen(command, stderr=log, env=os.environ | {"SOAK_STATE": str(self.state_file)})
        end = time.monotonic() + 120
        while True:
            assert process.poll() is None, (self.folder / "log").read_text()[-2000:]
            assert time.monotonic() < end, "the server did not start"
            try:
                if httpx.get(f"{self.base}/ready").status_code == 200:
                    return process
            except httpx.HTTPError:
                time.sleep(0.1)

    def state(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        """What the server holds: from inside, and its descriptors and memory (MiB) from outside."""
        self.state_file.unlink(missing_ok=True)
        process.send_signal(signal.SIGUSR1)
        httpx.get(f"{self.base}/health")  # Python runs the handler of a signal in its main thread, which this wakes
        end = time.monotonic() + 20
        while not self.state_file.exists():
            assert time.monotonic() < end, "the server does not answer a signal"
            time.sleep(0.05)
        found: dict[str, Any] = json.loads(self.state_file.read_text())
        found["descriptors"] = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
        status = Path(f"/proc/{process.pid}/status").read_text()
        found["memory"] = int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) // 1024
        return found

    def settled(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        """The state when nothing runs any more, or after some time."""
        for _ in range(60):
            found = self.state(process)
            if not (found["rows"] or found["open"] or found["busy"] or found["slots"]):
                time.sleep(6)  # uvicorn closes idle connections after 5 s
                return self.state(process)
            time.sleep(0.5)
        return found

    def check(self, number: int, what: str, found: object, expected: object) -> None:
        """Note an answer."""
        if found == expected:
            self.seen[what] += 1
        else:
            self.wrong.append(f"{what} {number}: {str(found)[:200]!r}, expected {str(expected)[:200]!r}")

    # --- kinds of requests --------------------------------------------------------------------------------------------

    async def plain(self, client: httpx.AsyncClient, number: int, body: dict[str, Any]) -> None:
        """A whole answer."""
        made = await self.served(client, "completions", body)
        text = self.expected[body["prompt"], body["seed"], None]
        self.check(number, "plain", made["choices"][0]["text"], text)

    async def structured(self, client: httpx.AsyncClient, number: int, body: dict[str, Any]) -> None:
        """An answer with a form."""
        made = await self.served(client, "completions", {**body, "structured_outputs": {"regex": REGEX}})
        text = made["choices"][0]["text"]
        self.check(number, "structured", text, self.expected[body["prompt"], body["seed"], f"regex:{REGEX}"])
        assert re.fullmatch(REGEX, text), text

    async def tool(self, client: httpx.AsyncClient, number: int, body: dict[str, Any]) -> None:
        """A call of a tool."""
        asked = [{"role": "user", "content": body["prompt"]}]
        ask: dict[str, Any] = {"messages": asked, "tools": [TOOL], "tool_choice": "required"}
        ask |= {"seed": body["seed"], "max_tokens": 60, "parallel_tool_calls": False}
        made = await self.served(client, "chat/completions", ask)
        (call,) = made["choices"][0]["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        fits = arguments["what"] in ("ball", "book") and 1 <= arguments["count"] <= 99 and len(arguments) == 2
        self.check(number, "tool", fits, expected=True)

    async def stream(
        self, client: httpx.AsyncClient, number: int, body: dict[str, Any], pause: float = 0, what: str = "stream"
    ) -> None:
        """A stream, read at once or slowly."""
        text, ended = "", False
        for _ in range(100):
            async with client.stream("POST", f"{self.base}/v1/completions", json={**body, "stream": True}) as answer:
                if answer.status_code == 429:
                    self.seen["429"] += 1
                    await asyncio.sleep(0.2)
                    continue
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        chunk = json.loads(line[6:])
                        if "error" in chunk:
                            raise RuntimeError(chunk["error"]["message"])
                        text += chunk["choices"][0]["text"]
                        await asyncio.sleep(pause)
                    ended |= line == "data: [DONE]"
            break
        self.check(number, what, (text, ended), (self.expected[body["prompt"], body["seed"], None], True))

    async def slow(self, client: httpx.AsyncClient, number: int, body: dict[str, Any]) -> None:
        """A stream that is read slowly."""
        await self.stream(client, number, body, 0.05, "slow")

    async def cancelled(self, _: httpx.AsyncClient, number: int, body: dict[str, Any]) -> None:
        """A request whose client leaves: before its answer, in it, or by a reset."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        content = json.dumps({**body, "max_tokens": 300, "ignore_eos": True, "stream": number % 20 < 10}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()
        if number % 20 < 10:
            await reader.read(300)
        if number % 3 == 0:  # closing sends a reset
            own = writer.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        self.seen["cancelled"] += 1

    async def malformed(self, client: httpx.AsyncClient, number: int, _: dict[str, Any]) -> None:
        """A body that is none."""
        content = MALFORMED[number // 10 % len(MALFORMED)]
        answer = await client.post(
            f"{self.base}/v1/completions", content=content, headers={"Content-Type": "application/json"}
        )
        legal = answer.status_code == 400 and list(answer.json()) == ["error"]
        self.check(number, "malformed", legal or answer.status_code == 429, expected=True)

    async def failing(self, client: httpx.AsyncClient, number: int, body: dict[str, Any]) -> None:
        """A request whose logits are not numbers."""
        answer = await client.post(f"{self.base}/v1/completions", json={**body, "presence_penalty": 0.123})
        self.check(number, "failing", answer.status_code in (500, 429), expected=True)

    async def served(self, client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """An answer with status 200, asked for again while the queue is full."""
        for _ in range(200):
            answer = await client.post(f"{self.base}/v1/{path}", json=body)
            if answer.status_code != 429:
                break
            self.seen["429"] += 1
            await asyncio.sleep(0.2)
        if answer.status_code != 200:
            raise RuntimeError(f"status {answer.status_code}: {answer.text[:200]}")
        made: dict[str, Any] = answer.json()
        return made

    # --- phases -----------------------------------------------------------------------------------------------------

    async def load(self, count: int, concurrency: int) -> float:
        """All kinds of requests; seconds that they took."""
        kinds: tuple[Callable[..., Awaitable[None]], ...] = (
            self.cancelled,
            self.malformed,
            self.structured,
            self.tool,
            self.stream,
            self.slow,
            self.failing,
            self.plain,
            self.plain,
            self.plain,
        )
        places, rng = asyncio.Semaphore(concurrency), random.Random(1)

        async def one(client: httpx.AsyncClient, number: int, body: dict[str, Any]) -> None:
            async with places:
                try:
                    await kinds[number % 10](client, number, body)
                except Exception as error:  # noqa: BLE001 - noted, and the others go on
                    self.wrong.append(f"{kinds[number % 10].__name__} {number}: {type(error).__name__} {error}"[:300])

        start = time.perf_counter()
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=concurrency)) as client:
            bodies = [self.body(rng) for _ in range(count)]
            await asyncio.gather(*(one(client, number, body) for number, body in enumerate(bodies)))
        return time.perf_counter() - start

    @staticmethod
    def body(rng: random.Random) -> dict[str, Any]:
        """A prompt and a seed."""
        return {"prompt": rng.choice(PROMPTS), "seed": rng.randrange(SEEDS), "max_tokens": TOKENS}

    async def ended_by(self, process: subprocess.Popen[bytes], number: int, what: str) -> int:
        """Send a signal while streams run; how many of them were completed, each rightly."""
        rng, done = random.Random(number), self.seen[what]

        async def one(client: httpx.AsyncClient, place: int) -> None:
            try:
                await self.stream(client, place, self.body(rng), 0.01, what)
            except (httpx.HTTPError, RuntimeError):
                self.seen[f"{what}, cut off"] += 1

        async with httpx.AsyncClient(timeout=60) as client:
            asked = [asyncio.create_task(one(client, place)) for place in range(16)]
            await asyncio.sleep(1.0)
            process.send_signal(number)
            await asyncio.gather(*asked)
        process.wait(60)
        return self.seen[what] - done

    def phase(self, count: int, concurrency: int) -> dict[str, Any]:
        """A server from its start, under load, until nothing runs any more."""
        process = self.start()
        asyncio.run(self.load(min(200, count), concurrency))  # what is made once: threads, buffers, compiled grammars
        before = self.settled(process)
        seconds = asyncio.run(self.load(count, concurrency))
        after = self.settled(process)
        for name in ("rows", "open", "slots"):
            self.check(0, f"{name} given back", after[name], 0)
        self.check(0, "descriptors given back", after["descriptors"] <= before["descriptors"] + 2, expected=True)
        self.check(0, "memory given back", after["memory"] <= before["memory"] + 64, expected=True)
        made = {"requests": count, "seconds": round(seconds, 1), "before": before, "after": after}
        return made | {"process": process}


def main() -> None:
    """Run a soak and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("requests", nargs="?", type=int, default=2000)
    parser.add_argument("concurrency", nargs="?", type=int, default=16)
    parser.add_argument("--minutes", type=float, help="with a hostile client, so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--attacks", default="", help="names of attacks, with commas; without it all")
    parser.add_argument(
        "--busy",
        action="store_true",
        help="other programs use the machine: what the server waited for a processor is no pause",
    )
    parser.add_argument("--json", action="store_true")
    words = sys.argv[1:]
    place = words.index("--") if "--" in words else len(words)
    asked = parser.parse_args(words[:place])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # servers end too
    if asked.minutes is not None:
        attacks = asked.attacks.split(",") if asked.attacks else ()
        report = HostileSoak(asked.minutes, asked.seed, attacks, words[place + 1 :], busy=asked.busy).run()
        print(json.dumps(report, indent=1) if asked.json else shown(report))
        sys.exit(bool(report["broken"]))
    count, concurrency = asked.requests, asked.concurrency
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder))
        soak.prepare()
        found = {}
        for name, size, number in (
            ("load, SIGTERM", count, signal.SIGTERM),
            ("again, kill -9", count // 4, signal.SIGKILL),
        ):
            made = soak.phase(size, concurrency)
            process = made.pop("process")
            made["streams completed"] = asyncio.run(soak.ended_by(process, number, f"stream at {number.name}"))
            made["code"] = process.returncode
            soak.check(0, f"code after {number.name}", process.returncode, 0 if number == signal.SIGTERM else -9)
            found[name] = made
        again = soak.phase(count // 4, concurrency)
        process = again.pop("process")
        process.terminate()
        soak.check(0, "code after a restart", process.wait(60), 0)
        found["after a restart"] = again
        print(
            json.dumps(
                {"phases": found, "seen": soak.seen, "wrong": soak.wrong[:20], "mistakes": len(soak.wrong)}, indent=1
            )
        )
    sys.exit(bool(soak.wrong))


if __name__ == "__main__":
    main()
