"""Send an agent's recorded editing session to a server, one request after the other, and measure each.

    python scripts/replay_session.py URL [--compare OTHER] [--processes PID [PID]] [--require-calls] [--out OUT]

URL and OTHER are addresses of OpenAI-compatible servers, without /v1. Each request has the recorded history, so all
servers read the same prompts, whatever they answered; temperature is 0 and the most tokens are as recorded. A server of
draftproof is asked twice, with drafts and with `"speculation": false`, and both answers must be equal: else the exit
status is 1. Ways take turns request by request in an order that alternates, and each pass begins with words of its own,
so that nothing is left in a cache from the pass before. A key is read from the variable OPENAI_API_KEY.
On a machine with other work, --processes gives the process ids of the servers, whose processor time is shown besides.
With --require-calls the model has to call a tool where the recorded agent called one; else it may.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import common
import httpx

from draftproof.provenance import run_facts
from draftproof.results import Results, median_and_range, table

SESSION = Path(__file__).parent / "data" / "session.jsonl"
OURS, PLAIN, OTHER = "drafts", "plain", "other"
_COUNTERS = {"calls": "num_target_calls_total", "drafted": "spec_decode_num_draft_tokens_total"}
_COUNTERS["accepted"] = "spec_decode_num_accepted_tokens_total"


@dataclass(frozen=True)
class Request:
    """A request of the session.

    Attributes:
        messages: its whole history.
        tools: that the agent offers.
        max_tokens: of its answer.
        answer: what the recorded agent answered.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    max_tokens: int
    answer: dict[str, Any]

    @property
    def turn(self) -> str:
        """What the agent did, in a word or two."""
        names = [call["function"]["name"] for call in self.answer.get("tool_calls", ())]
        return ", ".join(dict.fromkeys(names)) or "answer"


def read_session(path: Path) -> list[Request]:
    """The requests of a file."""
    history: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        each = json.loads(line)
        tools = each.get("tools", tools)
        history = [*history, *each["messages"]]
        found.append(Request(history, tools, each["max_tokens"], each["answer"]))
        history = [*history, each["answer"]]
    return found


@dataclass(frozen=True)
class Measured:
    """One answer.

    Attributes:
        seconds: until its end.
        first: seconds to the first token.
        processor: seconds of the server's processor time until the end; None where its process is not known.
        tokens: of the answer.
        prompt: tokens of the prompt.
        cached: how many of them the server knew; None where it does not say.
        text: of the answer with its calls, and why it ended.
        counted: what the server's counters gained: calls of the target, drafted and accepted tokens; empty for others.
    """

    seconds: float
    first: float
    processor: float | None
    tokens: int
    prompt: int
    cached: int | None
    text: str
    counted: Mapping[str, float]

    @property
    def speed(self) -> float:
        """Tokens a second after the first one."""
        return (self.tokens - 1) / (self.seconds - self.first) if self.tokens > 1 else 0.0


class Way:
    """A server, and what requests to it have besides.

    Args:
        client: with the server's address.
        more: fields of each request.
        counts: whether the server has the counters of draftproof.
        process: the server's process id, where it is known.
    """

    def __init__(
        self, client: httpx.Client, more: Mapping[str, Any], *, counts: bool, process: int | None = None
    ) -> None:
        self._client = client
        self._process = process
        self._more = more
        self._counts = counts
        self._model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]

    def _counters(self) -> dict[str, float]:
        if not self._counts:
            return {}
        page = self._client.get("/metrics").text
        return {name: _sample(page, each) for name, each in _COUNTERS.items()}

    def _processor(self) -> float | None:
        """Seconds of processor time of the server's process so far."""
        if self._process is None:
            return None
        fields = Path(f"/proc/{self._process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def ask(self, request: Request, number: int, *, require_calls: bool) -> Measured:
        """Send one request in a pass of this number."""
        system, *rest = request.messages
        messages = [{**system, "content": f"Session {number}.\n{system['content']}"}, *rest]
        must = require_calls and "tool_calls" in request.answer
        body = {
            "model": self._model,
            "messages": messages,
            "tools": request.tools,
            "tool_choice": "required" if must else "auto",
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._more,
        }
        before, used = self._counters(), self._processor()
        usage: dict[str, Any] = {}
        parts: list[str] = []
        end = ""
        start = time.perf_counter()
        began = 0.0
        with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                sys.exit(f"{self._client.base_url} answered {answer.status_code}: {answer.read().decode()[:500]}")
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    sys.exit(f"{self._client.base_url}: {event['error']}")
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    said = _said(choice["delta"])
                    if said and not began:
                        began = time.perf_counter()
                    parts.append(said)
                    end = choice["finish_reason"] or end
        finish, after = time.perf_counter(), self._processor()
        gained = {name: value - before[name] for name, value in self._counters().items()}
        details = usage.get("prompt_tokens_details") or {}
        return Measured(
            finish - start,
            (began or finish) - start,
            None if used is None or after is None else after - used,
            usage["completion_tokens"],
            usage["prompt_tokens"],
            details.get("cached_tokens"),
            f"{''.join(parts)}\n[{end}]",
            gained,
        )


def _sample(page: str, name: str) -> float:
    """A counter on a page of metrics; those that nobody has counted yet are missing."""
    found = re.search(rf"^draftproof:{name}\S* (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


def _said(delta: Mapping[str, Any]) -> str:
    """Text, and calls as text."""
    said = delta.get("content") or ""
    for call in delta.get("tool_calls") or ():
        function = call["function"]
        said += (f"\n{function['name']} " if function.get("name") else "") + (function.get("arguments") or "")
    return said


def ways(url: str, other: str | None, processes: Sequence[int]) -> dict[str, Way]:
    """Servers by name; with drafts and plain, where the first one is draftproof's."""
    first, second = [*processes, None, None][:2]
    key = os.environ.get("OPENAI_API_KEY", "none")

    def client(address: str) -> httpx.Client:
        return httpx.Client(base_url=address, timeout=600, headers={"authorization": f"Bearer {key}"})

    metrics = client(url).get("/metrics")
    if metrics.status_code == 200 and "draftproof:" in metrics.text:
        # Salts keep the two from taking over each other's prompts.
        plain = {"speculation": False, "cache_salt": PLAIN}
        made = {
            OURS: Way(client(url), {"cache_salt": OURS}, counts=True, process=first),
            PLAIN: Way(client(url), plain, counts=True, process=first),
        }
    else:
        made = {url: Way(client(url), {}, counts=False, process=first)}
    if other is not None:
        made[OTHER] = Way(client(other), {}, counts=False, process=second)
    return made


def differences(found: Mapping[str, Sequence[Sequence[Measured]]], one: str, two: str) -> list[int]:
    """Numbers of the requests whose answers differ in any pass, from 1 on."""
    pairs = [list(zip(*each, strict=True)) for each in zip(found[one], found[two], strict=True)]
    return sorted({at for each in pairs for at, (mine, its) in enumerate(each, start=1) if mine.text != its.text})


def _total(answers: Sequence[Measured]) -> dict[str, float]:
    """Figures of one pass."""
    calls = sum(each.counted.get("calls", 0) for each in answers)
    drafted = sum(each.counted.get("drafted", 0) for each in answers)
    tokens = sum(each.tokens for each in answers)
    decoding = sum(each.seconds - each.first for each in answers)
    return {
        "tokens": tokens,
        "seconds": sum(each.seconds for each in answers),
        "processor": sum(each.processor or 0 for each in answers),
        "first": 1000 * median(each.first for each in answers),
        "speed": sum(each.tokens - 1 for each in answers) / decoding,
        "per call": tokens / calls if calls else 0.0,
        "accepted": 100 * sum(each.counted.get("accepted", 0) for each in answers) / drafted if drafted else 0.0,
        "cached": 100 * sum(each.cached or 0 for each in answers) / sum(each.prompt for each in answers),
    }


def page(requests: Sequence[Request], found: Mapping[str, Sequence[Sequence[Measured]]], facts: Any) -> Results:
    """The results as a page."""
    heads = {
        "tokens": 0,
        "seconds": 1,
        "processor": 1,
        "first": 0,
        "speed": 1,
        "per call": 2,
        "accepted": 0,
        "cached": 0,
    }
    rows = []
    for name, passes in found.items():
        totals = [_total(each) for each in passes]
        cells = [median_and_range([float(each[head]) for each in totals], digits) for head, digits in heads.items()]
        rows.append([name, *(cell if totals[0][head] else "-" for head, cell in zip(heads, cells, strict=True))])
    leading, first = next(iter(found.items()))
    single = []
    for at, request in enumerate(requests):
        answers = {name: [each[at] for each in turns] for name, turns in found.items()}
        mine = first[0][at]
        calls = mine.counted.get("calls")
        single.append(
            [
                at + 1,
                request.turn,
                mine.prompt,
                "-" if mine.cached is None else mine.cached,
                mine.tokens,
                f"{mine.tokens / calls:.2f}" if calls else "-",
                *(f"{median(each.seconds for each in turns):.2f}" for turns in answers.values()),
                *(f"{median(each.processor or 0 for each in turns):.2f}" for turns in answers.values()),
            ]
        )
    lines = [
        f"{len(requests)} requests, one after the other; {len(first)} passes in turns, median [least, greatest]:",
        "",
        *table(
            [
                "way",
                "tokens of the answers",
                "all requests, s",
                "processor time, s",
                "first token, ms",
                "tokens a second after it",
                "tokens per target call",
                "accepted drafts, %",
                "cached prompt tokens, %",
            ],
            rows,
        ),
        "",
    ]
    for name in list(found)[1:]:
        differ = differences(found, leading, name)
        said = f"differ in requests {', '.join(map(str, differ))}" if differ else "are equal in all passes"
        lines += [f"Answers of {leading} and {name} {said}.", ""]
    names = [*(f"{name}, s" for name in found), *(f"{name}, processor, s" for name in found)]
    lines += [
        "Each request; tokens and calls are those of the first way in its first pass:",
        "",
        *table(["", "agent's turn", "prompt", "cached", "answer", "tokens per target call", *names], single),
    ]
    figures = {name: [[asdict(answer) for answer in each] for each in turns] for name, turns in found.items()}
    return Results("An editing session", lines, figures, facts)


def main() -> None:
    """Replay, print, compare."""
    parser = common.parser(__doc__)
    parser.add_argument("url", help="address of the server, without /v1")
    parser.add_argument("--compare", metavar="OTHER", help="address of another server")
    parser.add_argument("--processes", type=int, nargs="*", default=[], metavar="PID", help="of URL, and of OTHER")
    parser.add_argument("--session", type=Path, default=SESSION)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--require-calls", action="store_true", help="a tool must be called where the agent called one")
    options = parser.parse_args()
    facts, requests = run_facts(), read_session(options.session)
    by_name = ways(options.url, options.compare, options.processes)
    for way in by_name.values():
        way.ask(requests[0], -1, require_calls=options.require_calls)  # a server's first request takes longer
    found: dict[str, list[list[Measured]]] = {name: [] for name in by_name}
    for number in range(options.passes):
        for each in found.values():
            each.append([])
        for at, request in enumerate(requests):
            for name in sorted(by_name, reverse=bool((number + at) % 2)):
                answer = by_name[name].ask(request, number, require_calls=options.require_calls)
                found[name][-1].append(answer)
                common.say(options, number + 1, at + 1, name, f"{answer.tokens} tokens in {answer.seconds:.2f} s")
    common.deliver(options, page(requests, found, facts))
    if PLAIN in found and (differ := differences(found, OURS, PLAIN)):
        sys.exit(f"with drafts the answers to requests {', '.join(map(str, differ))} differ from plain ones")


if __name__ == "__main__":
    main()
