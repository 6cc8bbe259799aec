"""Other engines on the same .gguf file, in turns with ours, each with its own ways of drafting.

    python scripts/measure_beside.py [FILE ...] [--shape 1.5b ...] [--draft FILE DRAFT] [--repeats 3] [--out OUT]
        [--program NAME=LLAMA_SERVER ...] [--openvino FOLDER]

A program is a llama-server that was built for this processor, named `llama.cpp` or `ik_llama.cpp`; FOLDER is where
`pip install --target FOLDER openvino-genai` has put that package. DRAFT is a smaller file that drafts for FILE. Shapes
have random blocks (scripts/measure_gguf.py), so nothing is drafted for them. For files, answers to questions and to
requests that copy are measured, too, by every engine with each of its ways of drafting; all tokens are the most likely
ones, and each turn has other prompts. Tokens a second of answers are
those of 64 tokens less those of one, with the same prompt.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import common
import httpx
from measure_gguf import ON_MODULES, PROMPTS, SHAPES, SPINNING, TOKENS, Worker, ids_of, speeds, write_shape
from measure_servers import free_port, started

from draftproof.bench import worker
from draftproof.bench.questions import read_questions
from draftproof.engine.engine import Engine
from draftproof.provenance import run_facts
from draftproof.results import Results, median_and_range, table
from draftproof.sampling import SamplingParams
from draftproof.training.responses import instruction_ids

NOTHING, REPEATS, MODEL = "nothing", "repeated passages", "a draft model"
SETS, EACH = {"questions": "mt-bench", "copying": "copying"}, 2  # prompts of a turn
OURS = "ours"
CONTEXT = 2304


class Measured(Protocol):
    """An engine that was started."""

    def ask(self, **asked: Any) -> Any:
        """Seconds for the tokens after the prompts."""

    def end(self) -> None:
        """Stop it."""


class Way(NamedTuple):
    """An engine with one way of drafting.

    Attributes:
        engine: its name.
        drafts: from where.
        start: starts it on a file, with a file that drafts.
    """

    engine: str
    drafts: str
    start: Callable[[Path, Path | None], Measured]


class Program:
    """A llama-server, in a process of its own.

    Args:
        command: that starts it, but for the port.
    """

    def __init__(self, command: list[str]) -> None:
        port = free_port()
        self._process = started(command, port, "/health")
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600)

    def ask(self, **asked: Any) -> float:
        """Seconds for one prompt."""
        (ids,), tokens = asked["prompts"], asked["tokens"]
        body = worker.completion(asked, ids)
        start = time.perf_counter()
        answer = self._client.post("/v1/completions", json=body).raise_for_status()
        seconds = time.perf_counter() - start
        made = answer.json()["usage"]["completion_tokens"]
        assert made == tokens, f"expected {tokens} tokens, got {made}"
        return seconds

    def end(self) -> None:
        """Stop it."""
        self._client.close()
        self._process.kill()
        self._process.wait()


def program(command: Sequence[str], arguments: Sequence[str], path: Path, draft: Path | None) -> Measured:
    """A llama-server with one slot; DRAFT in its arguments is the file that drafts."""
    shared = ["-m", str(path), "-np", "1", "-c", str(CONTEXT), "-t", str(len(os.sched_getaffinity(0)))]
    return Program(
        [
            *command,
            *shared,
            "--cache-ram",
            "0",
            "--log-disable",
            *(str(draft) if each == "DRAFT" else each for each in arguments),
        ]
    )


def openvino(folder: str, arguments: Sequence[str], path: Path, draft: Path | None) -> Measured:  # noqa: ARG001 - as others
    """OpenVINO GenAI."""
    command = [sys.executable, str(Path(__file__).with_name("serve_openvino.py")), str(path), *arguments]
    return Worker(command, {"PYTHONPATH": folder})


def ours(options: Mapping[str, Any], path: Path, draft: Path | None) -> Measured:
    """Our engine; an option `draft` is replaced by the file that drafts."""
    named = {name: str(draft) if name == "draft" else value for name, value in options.items()}
    return Worker([sys.executable, __file__, "--serve", str(path), json.dumps(named)])


_OURS: dict[str, dict[str, Any]] = {NOTHING: {"drafter": "none"}, "auto": {}, f"auto, {MODEL}": {"draft": ""}}
_SHORT = ["--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "8"]
_PROGRAMS = {  # a lookup begins where the last 12 tokens come again, unless told otherwise
    "llama.cpp": {
        NOTHING: [],
        REPEATS: ["--spec-type", "ngram-simple"],
        f"{REPEATS}, 4": ["--spec-type", "ngram-simple", *_SHORT],
        MODEL: ["-md", "DRAFT", "--spec-type", "draft-simple"],
    },
    "ik_llama.cpp": {
        NOTHING: [],
        REPEATS: ["--spec-type", "ngram-simple"],
        f"{REPEATS}, 4": ["--spec-type", "ngram-simple:ngram_size_n=4,ngram_size_m=8"],
        MODEL: ["-md", "DRAFT", "--spec-type", "draft"],
    },
}
_OPENVINO: dict[str, list[str]] = {NOTHING: [], REPEATS: ["--lookup"]}  # its draft models are no .gguf files


def ways(options: Any) -> list[Way]:
    """All that were asked for."""
    made = [Way(OURS, drafts, partial(ours, each)) for drafts, each in _OURS.items()]
    for name, _, path in (each.partition("=") for each in options.program):
        if name not in _PROGRAMS:
            sys.exit(f"--program: expected one of {', '.join(_PROGRAMS)} before =, got {name!r}")
        made += [Way(name, drafts, partial(program, [path], each)) for drafts, each in _PROGRAMS[name].items()]
    if options.openvino:
        made += [
            Way("OpenVINO", drafts, partial(openvino, options.openvino, each)) for drafts, each in _OPENVINO.items()
        ]
    return made


# --- ours, in a process of its own ------------------------------------------------------------------------------------


def serve(path: str, options: str) -> None:
    """Answer on stdin with seconds, or with the token ids of questions."""
    engine = Engine.load(path, prefix_reuse=False, max_batch=1, **json.loads(options))
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "set" in asked:
            chosen = read_questions(asked["set"])[asked["first"] :][:EACH]
            print(json.dumps([instruction_ids(engine, each.prompt) for each in chosen]), flush=True)
            continue
        params = SamplingParams(max_tokens=asked["tokens"], temperature=0, ignore_eos=True)
        start = time.perf_counter()
        engine.generate(asked["prompts"], params)
        print(json.dumps(time.perf_counter() - start), flush=True)


# --- measuring --------------------------------------------------------------------------------------------------------


def answering(seconds: Callable[..., float], prompts: Sequence[list[int]]) -> float:
    """Tokens a second after prompts."""
    spent = [
        seconds(prompts=[ids], tokens=TOKENS + 1, temperature=0.0) - seconds(prompts=[ids], tokens=1, temperature=0.0)
        for ids in prompts
    ]
    return TOKENS * len(spent) / sum(spent)


def prompts_of(path: Path, turns: int) -> list[dict[str, list[list[int]]]]:
    """Token ids of the questions of each turn, after one turn that warms up, with the file's own tokenizer."""
    engine = ours(_OURS[NOTHING], path, None)
    firsts = range(0, (turns + 1) * EACH, EACH)
    made = [{name: engine.ask(set=each, first=first) for name, each in SETS.items()} for first in firsts]
    engine.end()
    return made


def measured(way: Way, path: Path, draft: Path | None, sets: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """The figures of one turn; None where the engine does not read the file."""
    try:
        engine = way.start(path, draft)
    except SystemExit as error:
        print(f"{way.engine}, {way.drafts}: {error}", file=sys.stderr)
        return None
    try:
        engine.ask(prompts=[ids_of(32)], tokens=16, temperature=0.0)
        found = speeds(engine.ask) if way.drafts == NOTHING else {}
        if sets:
            for prompts in sets[0].values():
                answering(engine.ask, prompts[:1])
            found |= {name: answering(engine.ask, prompts) for name, prompts in sets[1].items()}
    finally:
        engine.end()
    return found


def measure(
    path: Path, chosen: Sequence[Way], options: Any, draft: Path | None, *, texts: bool
) -> list[dict[str, Any]]:
    """All figures of one file, a row for each way. Each turn starts an engine anew: all at once may be too large."""
    rows: list[dict[str, Any]] = [
        {"engine": way.engine, "drafts": way.drafts, "file": path.name, "texts": texts, "turns": []} for way in chosen
    ]
    sets = prompts_of(path, options.repeats) if texts else []
    for number in range(options.repeats):
        pairs = list(zip(rows, chosen, strict=True))
        for row, way in pairs[::-1] if number % 2 else pairs:
            if number and not row["turns"]:
                continue  # it is not read
            turn = measured(way, path, draft, [sets[0], sets[number + 1]] if texts else [])
            row["turns"] += [] if turn is None else [turn]
            common.say(options, way.engine, way.drafts, {name: round(value, 1) for name, value in (turn or {}).items()})
        time.sleep(options.rest)
    return rows


def cells(row: Mapping[str, Any], parts: Sequence[str]) -> list[str]:
    """Figures of a row."""
    if not row["turns"]:
        return ["not read", *[""] * (len(parts) - 1)]
    return [median_and_range([turn[part] for turn in row["turns"]], 1) for part in parts]


def page(rows: Sequence[Mapping[str, Any]], options: Any, facts: dict[str, Any]) -> Results:
    """The results as a page."""
    plain, parts = (
        [row for row in rows if row["drafts"] == NOTHING],
        (*(f"prompt {size}" for size in PROMPTS), "after it"),
    )
    texts = [row for row in rows if row["texts"]]
    lines = [
        f"Tokens a second, median of {options.repeats} turns [least, greatest]; nothing is drafted:",
        "",
        *table(
            ["file", "engine", *(f"prompt {size} tokens" for size in PROMPTS), "after the prompt"],
            [[row["file"], row["engine"], *cells(row, parts)] for row in plain],
        ),
        "",
        "Tokens a second of answers, with what each engine has for drafting, by its own settings:",
        "",
        *table(
            ["file", "engine", "drafts from", *SETS],
            [[row["file"], row["engine"], row["drafts"], *cells(row, list(SETS))] for row in texts],
        ),
    ]
    return Results("Other engines on the same GGUF file", lines, {"rows": list(rows)}, facts)


def main() -> None:
    """Measure files and shapes."""
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
        return
    parser = common.parser(__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--shape", nargs="*", choices=(*SHAPES, *ON_MODULES), default=[])
    parser.add_argument("--draft", nargs=2, action="append", type=Path, default=[], metavar=("FILE", "DRAFT"))
    parser.add_argument("--program", nargs="*", default=[], metavar="NAME=LLAMA_SERVER")
    parser.add_argument("--openvino", metavar="FOLDER")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rest", type=float, default=0.0, help="seconds after each turn, for others on the machine")
    options = parser.parse_args()
    for name in SPINNING:
        os.environ.pop(name, None)
    facts, every, drafts = run_facts(), ways(options), dict(options.draft)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.shape:
            path = Path(folder) / f"random {name}.gguf"
            write_shape(path, name)
            common.say(options, "measuring", name)
            chosen = [way for way in every if way.drafts == NOTHING]
            rows += measure(path, chosen, options, None, texts=False)
            path.unlink()
    for path in dict.fromkeys((*options.files, *drafts)):
        common.say(options, "measuring", path.name)
        chosen = [way for way in every if MODEL not in way.drafts or path in drafts]
        rows += measure(path, chosen, options, drafts.get(path), texts=True)
    common.deliver(options, page(rows, options, facts))


if __name__ == "__main__":
    main()
