"""Ten clients of a server, of which one is hostile: what the other nine get; for scripts/soak_server.py.

The nine ask for fixed prompts, greedily, so that each answer is the one that they got before the hostile client came:
whole answers and streams, by a pattern, by a grammar that the hostile client exhausts, with a tool, and by a pattern
that nobody has used before. The hostile client is scripts/hostile_client.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from hostile_client import LATE

from support.served_process import ServedProcess

HONEST = 9
PAUSE = 1.0  # seconds between tokens of a stream
WAIT = 20.0  # seconds in which everything is answered, waiting for a place included
ANSWERED = 60.0  # seconds after which nobody waits any more
KEPT = 200.0  # MiB that may be left
SETTLES = 90.0  # seconds until memory is back
PROMPTS = ("Once upon a time", "The little dog", "Lily and Tom went", "In the garden", "One day, a boy")
TOKENS = 48
PATTERN = "[A-Z][a-z]{2,6} [0-9]{3}"
TOOL = {
    "type": "function",
    "function": {
        "name": "give",
        "parameters": {
            "type": "object",
            "properties": {"what": {"enum": ["ball", "book"]}, "count": {"type": "integer", "maximum": 99}},
            "required": ["what", "count"],
            "additionalProperties": False,
        },
    },
}
KINDS = ("stream", "stream", "stream", "plain", "pattern", "late", "tool", "new")
# Clients that read their answers are not given up while the machine is busy; connections that are not used are.
OPTIONS = ("--write-timeout", "10", "--read-timeout", "10")


def body_of(kind: str, prompt: str, number: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a request."""
    common: dict[str, Any] = {"temperature": 0.0, "max_tokens": TOKENS}
    if kind == "tool":
        asked = {"messages": [{"role": "user", "content": prompt}], "tools": [TOOL], "tool_choice": "required"}
        return "/v1/chat/completions", {**asked, **common, "parallel_tool_calls": False}
    common["prompt"] = prompt
    if kind == "stream":
        common |= {"stream": True, "max_tokens": 3 * TOKENS, "ignore_eos": True}
    elif kind == "pattern":
        common["structured_outputs"] = {"regex": PATTERN}
    elif kind == "late":
        common |= {"structured_outputs": {"regex": LATE}, "max_tokens": 12}
    elif kind == "new":
        common["structured_outputs"] = {"regex": f"[a-f]{{3}} {number:x}"}
    return "/v1/completions", common


class Ended(Exception):  # noqa: N818 - no error of this program
    """The process has ended."""


class HostileSoak:
    """Nine clients, one hostile one, and what was seen.

    Args:
        minutes: how long the hostile client attacks.
        seed: of everybody's choices.
        attacks: names of those that are used; empty uses all.
        options: further options of the server.
        busy: whether other programs use the machine: what the server waited for a processor does not count.
    """

    def __init__(
        self, minutes: float, seed: int, attacks: Sequence[str] = (), options: Sequence[str] = (), *, busy: bool = False
    ) -> None:
        self.seconds, self.seed, self.chosen, self.busy = 60 * minutes, seed, attacks, busy
        self.server = ServedProcess(*OPTIONS, *options)
        self.record = self.server.folder / "attacks"
        self.expected: dict[tuple[str, str], str] = {}
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.waits: dict[str, tuple[float, float]] = {}  # the longest one of each kind, and when it ended
        self.slowest: dict[str, tuple[float, float]] = {}  # the same of the last phase
        self.numbers = itertools.count()
        # When, and the seconds that the thread of the event loop and the engine's have waited for a processor.
        self.delays: list[tuple[float, float]] = []
        self.own_pause = self.memory_peak = 0.0
        self.over = False

    # --- one client ---------------------------------------------------------------------------------------------------

    async def answer(self, client: httpx.AsyncClient, kind: str, prompt: str) -> str | None:
        """The text of an answer; None where the server has no place for it."""
        number = next(self.numbers)
        path, body = body_of(kind, prompt, number)
        start = time.monotonic()
        if kind == "stream":
            text = await self.streamed(client, path, body, start)
        else:
            made = await client.post(self.server.base + path, json=body)
            if self.full(made):
                return None
            if made.status_code != 200:
                return f"status {made.status_code}: {made.text[:200]}"
            choice = made.json()["choices"][0]
            if kind == "tool":
                text = json.dumps([each["function"] for each in choice["message"]["tool_calls"]])
            else:
                text = choice["text"]
            self.wait(kind, start)
        if kind == "new" and text is not None:  # a new one each time: its text is known but for three letters
            return "fits" if re.fullmatch(f"[a-f]{{3}} {number:x}", text) else text
        return text

    async def streamed(self, client: httpx.AsyncClient, path: str, body: dict[str, Any], start: float) -> str | None:
        """The text of a stream, whose pauses are noted."""
        parts, last, ended = [], None, False
        async with client.stream("POST", self.server.base + path, json=body) as answer:
            if self.full(answer):
                await answer.aread()
                return None
            if answer.status_code != 200:
                return f"status {answer.status_code}: {(await answer.aread())[:200]!r}"
            async for line in answer.aiter_lines():
                if not line.startswith("data:"):
                    continue
                now = time.monotonic()
                self.wait("first token" if last is None else "pause of a stream", start if last is None else last)
                last = now
                ended = line == "data: [DONE]"
                if not ended:
                    chunk = json.loads(line[5:])
                    if "error" in chunk:
                        return f"error in a stream: {chunk['error']['message'][:200]}"
                    parts.append(chunk["choices"][0]["text"])
        return "".join(parts) if ended else "a stream without its end"

    def full(self, answer: httpx.Response) -> bool:
        """Whether the server has no place now, which is no mistake."""
        if answer.status_code in (429, 503):
            self.seen[f"status {answer.status_code}, asked again"] += 1
        return answer.status_code in (429, 503)

    def wait(self, kind: str, start: float) -> None:
        """Note how long something took."""
        now = time.monotonic()
        self.waits[kind] = max(self.waits.get(kind, (0.0, 0.0)), (now - start, now))

    async def asked(self, client: httpx.AsyncClient, kind: str, prompt: str) -> str:
        """An answer, asked for again where there is no place, or no connection."""
        start = time.monotonic()
        while time.monotonic() < start + ANSWERED:
            if self.server.returncode is not None:
                raise Ended
            try:
                found = await self.answer(client, kind, prompt)
            except httpx.TimeoutException:
                return f"no answer within {ANSWERED:g} s"
            except httpx.HTTPError as error:
                self.seen[f"{type(error).__name__}, asked again"] += 1
                found = None
            if found is not None:
                self.wait("any answer", start)
                return found
            await asyncio.sleep(0.2)
        return f"no place within {ANSWERED:g} s"

    async def honest(self, place: int) -> None:
        """One client: requests one after the other, each answer as before."""
        rng = random.Random(self.seed * 100 + place)
        async with httpx.AsyncClient(timeout=ANSWERED, verify=False) as client:  # noqa: S501 - no TLS here
            while not self.over:
                kind, prompt = rng.choice(KINDS), rng.choice(PROMPTS)
                expected = self.expected[kind, prompt]
                if kind == "late" and expected.startswith("status 4"):
                    continue  # more than this server follows, whoever asks
                try:
                    found = await self.asked(client, kind, prompt)
                except Ended:
                    return
                if found == expected:
                    self.seen[f"{kind}, right"] += 1
                else:
                    self.wrong.append(f"{kind} {prompt!r}: {found[:200]!r}, expected {expected[:200]!r}")
                await asyncio.sleep(0.02)

    # --- what is watched ----------------------------------------------------------------------------------------------

    async def clock(self) -> None:
        """How late this process itself is: others on the machine hold it up too."""
        threads = self.server.threads()
        while not self.over:
            start = time.monotonic()
            with contextlib.suppress(OSError, AttributeError):  # it has ended, or this system does not say it
                self.delays.append((start, sum(int(each.read_text().split()[1]) for each in threads) / 1e9))
            await asyncio.sleep(0.02)
            self.own_pause = max(self.own_pause, time.monotonic() - start - 0.02)

    def starved(self, seconds: float, now: float) -> float:
        """Seconds that the server's two threads waited for a processor within some time before `now`."""
        delays = [delay for when, delay in self.delays if now - seconds - 0.05 <= when <= now + 0.05]
        return delays[-1] - delays[0] if delays else 0.0

    async def health(self) -> None:
        """Ask /health as an orchestrator does, with a new connection each time."""
        while not self.over:
            start = time.monotonic()
            try:
                async with httpx.AsyncClient(timeout=ANSWERED, verify=False) as client:  # noqa: S501 - no TLS here
                    answer = await client.get(f"{self.server.base}/health")
                what = f"/health {answer.status_code}"
            except httpx.HTTPError as error:
                what = f"/health {type(error).__name__}"
            if self.server.returncode is not None:
                return
            self.seen[what] += 1
            self.wait("/health", start)
            self.memory_peak = max(self.memory_peak, self.server.resident)
            await asyncio.sleep(0.25)

    async def together(self, seconds: float) -> None:
        """The honest clients, and everything that watches, for some time."""
        self.over = False
        asked = [asyncio.create_task(self.honest(place)) for place in range(HONEST)]
        asked += [asyncio.create_task(self.clock()), asyncio.create_task(self.health())]
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.server.returncode is None:  # noqa: ASYNC110 - a process, not a task
            await asyncio.sleep(0.1)
        self.over = True
        await asyncio.gather(*asked)

    async def prepare(self) -> None:
        """The answers as they are before the hostile client comes."""
        async with httpx.AsyncClient(timeout=ANSWERED, verify=False) as client:  # noqa: S501 - no TLS here
            for kind, prompt in sorted({(kind, prompt) for kind in KINDS for prompt in PROMPTS}):
                self.expected[kind, prompt] = await self.asked(client, kind, prompt)
        refused = {kind for (kind, _), text in self.expected.items() if text.startswith("status")}
        assert refused <= {"late"}, {key: text for key, text in self.expected.items() if text.startswith("status")}
        if refused:
            self.seen["the grammar that can be exhausted is refused, whoever asks"] += 1

    # --- the whole ----------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """Figures of the time since the last ones, in milliseconds."""
        found: dict[str, Any] = {
            "longest waits, ms": {name: round(1000 * wait) for name, (wait, _) in sorted(self.waits.items())},
            "of this script, ms": round(1000 * self.own_pause),
        }
        for name in {"pause of a stream", "/health"} & set(self.waits):
            starved = min(self.waits[name][0], self.starved(*self.waits[name]))
            found[f"of {name} the server waited for a processor, ms"] = round(1000 * starved)
        self.slowest, self.waits, self.own_pause = self.waits, {}, 0.0
        return found

    def attacks(self) -> list[dict[str, Any]]:
        """What the hostile client did."""
        if not self.record.exists():
            return []
        found = [json.loads(line) for line in self.record.read_text(encoding="utf-8").splitlines()]
        return list({each["start"]: each for each in found}.values())  # a line when it begins, and one when it ends

    def beside(self, seconds: float, now: float) -> str:
        """Attacks that ran in the seconds before a time."""
        names = [each["name"] for each in self.attacks() if each["start"] < now and each["end"] > now - seconds]
        return ", ".join(dict.fromkeys(names)) or "none"

    def cached(self) -> float:
        """MiB of keys and values that the server keeps for later requests, up to the limit that it was given."""
        text = httpx.get(f"{self.server.base}/metrics", timeout=10).text
        found = re.search(r"^draftproof:kv_cache_kept_bytes\S* (\S+)", text, re.MULTILINE)
        assert found is not None, text
        return float(found[1]) / 2**20

    def settled(self, before: float) -> float:
        """The memory after the soak, when it is back or has had its time."""
        end = time.monotonic() + SETTLES
        found: float
        while (found := self.server.memory) > before + KEPT / 2 and time.monotonic() < end:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"{self.server.base}/health", timeout=5)
            time.sleep(1)
        return found

    def run(self) -> dict[str, Any]:
        """Everything; the report, in which `broken` lists promises that were not kept."""
        broken: list[str] = []
        report: dict[str, Any] = {"minutes": self.seconds / 60}
        with self.server as server:
            asyncio.run(self.prepare())
            asyncio.run(self.together(min(10.0, max(3.0, self.seconds / 10))))
            report["without a hostile client"] = self.figures()
            before, cached = server.memory, self.cached()
            command = [sys.executable, str(Path(__file__).parent / "hostile_client.py"), server.base]
            words = [str(self.seconds), str(self.seed), str(self.record), *self.chosen]
            with subprocess.Popen([*command, *words]) as attacker:
                asyncio.run(self.together(self.seconds))
                if server.returncode is not None:
                    attacker.kill()
                attacker.wait()
            report["with it"] = self.figures()
            report["beside what"] = {name: self.beside(*wait) for name, wait in self.slowest.items()}
            memory = {"before": round(before), "highest": round(self.memory_peak)}
            if (code := server.returncode) is not None:
                last = self.attacks()[-1]["name"] if self.attacks() else "nothing"
                broken.append(f"the process ended with {code}; the last attack was {last}")
            else:
                memory["after"] = round(self.settled(before + self.cached() - cached))
                memory["cached before"], memory["cached after"] = round(cached), round(self.cached())
                asyncio.run(self.together(2.0))
                if (code := server.end()) != 0:
                    broken.append(f"the code after SIGTERM is {code}")
            report["memory, MiB"], report["attacks"] = memory, self.counted()
        broken += self.broken(report)
        return {**report, "seen": dict(sorted(self.seen.items())), "wrong": self.wrong[:10], "broken": broken}

    def counted(self) -> dict[str, dict[str, int]]:
        """How many answers each attack got."""
        found: dict[str, Counter[str]] = {}
        for each in self.attacks():
            found.setdefault(each["name"], Counter()).update(each["answers"])
        return {name: dict(answers) for name, answers in sorted(found.items())}

    def broken(self, report: dict[str, Any]) -> list[str]:
        """Promises that were not kept, besides the process's end."""
        waits = dict(report["with it"]["longest waits, ms"])
        for name in waits if self.busy else ():
            waits[name] -= report["with it"].get(f"of {name} the server waited for a processor, ms", 0)
        found = [
            f"{name}: {waits[name]} ms beside {report['beside what'][name]}"
            for name, most in (("pause of a stream", PAUSE), ("/health", PAUSE), ("any answer", WAIT))
            if waits.get(name, 0) > 1000 * most
        ]
        found += [f"{what}: {count} times" for what, count in self.seen.items() if re.match(r"/health (?!200)", what)]
        memory = report["memory, MiB"]
        if "after" in memory:
            kept = memory["after"] - memory["cached after"] - memory["before"] + memory["cached before"]
            found += [f"{kept} MiB are kept besides the cached keys and values"] if kept > KEPT else []
        if self.wrong:
            found.append(f"{len(self.wrong)} answers were wrong")
        for name, answers in report["attacks"].items():
            found += [f"{name} gets status {each}: {count} times" for each, count in answers.items() if each == "500"]
        return found


def shown(report: dict[str, Any]) -> str:
    """The report as a few lines."""
    lines = [f"{report['minutes']:g} minutes, {HONEST} clients and a hostile one"]
    for name in ("without a hostile client", "with it"):
        waits = ", ".join(f"{kind} {wait}" for kind, wait in report[name]["longest waits, ms"].items())
        rest = ", ".join(f"{what} {value}" for what, value in report[name].items() if not isinstance(value, dict))
        lines.append(f"{name}, longest waits in ms: {waits} ({rest})")
    lines.append("memory, MiB: " + ", ".join(f"{name} {value}" for name, value in report["memory, MiB"].items()))
    lines.append("answers: " + ", ".join(f"{name}: {count}" for name, count in report["seen"].items()))
    lines += [
        f"  {name}: {', '.join(f'{answer} x {count}' for answer, count in answers.items())}"
        for name, answers in report["attacks"].items()
    ]
    lines += [f"wrong: {each}" for each in report["wrong"]]
    lines += [f"broken: {each}" for each in report["broken"]] or ["every promise was kept"]
    return "\n".join(lines)
