"""One hostile client: one attack after another on a server, in a process of its own; scripts/soak_server.py starts it.

    python scripts/hostile_client.py BASE SECONDS SEED FILE [ATTACKS]

FILE gets a line of JSON when an attack begins, and one when it has ended: its name, both times (by the clock that all
processes share), and the answers. Connections of attacks that want no answer stay open for some seconds while the next
ones run.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support import hostile

WAITS = 10.0  # seconds for an answer: then this client hangs up
HELD = 15.0  # seconds that a connection stays open which wants no answer
IDLE = 1100  # connections without a request: more than a process has descriptors
LATE = "(.|\n)*[a-m](.|\n){25}"  # hot answers exhaust its lexer; others ask for this grammar too
TOKENS = 512  # of the context
WORDS = 2000  # tokens of the vocabulary


class Client:
    """Attacks of one client.

    Args:
        base: address of the server.
        seed: of its choices.
    """

    def __init__(self, base: str, seed: int) -> None:
        split = urlsplit(base)
        assert split.hostname is not None
        assert split.port is not None
        self.address = (split.hostname, split.port)
        self.rng = random.Random(seed)
        self.held: list[tuple[float, socket.socket]] = []
        self.turn = 0

    # --- connections --------------------------------------------------------------------------------------------------

    def connect(self, received: int | None = None) -> socket.socket:
        """A connection; its buffer for answers may be small."""
        made = socket.socket()
        made.settimeout(WAITS)
        if received is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received)
        made.connect(self.address)
        return made

    def send(self, path: str, body: bytes, received: int | None = None) -> socket.socket:
        """A request, and the connection on which its answer comes."""
        made = self.connect(received)
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
        with contextlib.suppress(OSError):  # an early refusal ends the sending
            made.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return made

    def ask(self, path: str, fields: dict[str, Any], seconds: float = WAITS) -> str:
        """The status of an answer, or why there is none; hangs up after some seconds."""
        return self.ask_raw(path, hostile.body_bytes(path, fields), seconds)

    def ask_raw(self, path: str, body: bytes, seconds: float = WAITS) -> str:
        """The same with a body as it stands."""
        with self.send(path, body) as made:
            made.settimeout(seconds)
            answer = b""
            try:
                while part := made.recv(1 << 16):
                    answer = (answer + part)[:64]
            except TimeoutError:
                return "hung up"
            except OSError:
                pass
        return answer[9:12].decode() if answer.startswith(b"HTTP/1.1 ") else "closed"

    def hold(self, made: socket.socket) -> None:
        """Keep a connection for some seconds."""
        self.held.append((time.monotonic() + HELD, made))

    def release(self, *, everything: bool = False) -> None:
        """Close connections that were held for long enough, every second one by a reset."""
        now = time.monotonic()
        for place, (until, made) in enumerate(self.held):
            if everything or until < now:
                if place % 2:
                    with contextlib.suppress(OSError):
                        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                made.close()
        self.held = [] if everything else [each for each in self.held if each[0] >= now]

    # --- attacks ------------------------------------------------------------------------------------------------------

    def grammar(self, kinds: dict[str, Callable[[int], Any]], name: str, size: int) -> str:
        """Ask for an answer by one of the grammars, in one of the places where it may stand."""
        made = hostile.clipped(kinds, name, size)
        completions, chat = "/v1/completions", "/v1/chat/completions"
        if kinds is hostile.LARKS:
            return self.ask(completions, {"structured_outputs": {"grammar": made}})
        if kinds is hostile.REGEXES:
            return self.ask(completions, {"structured_outputs": {"regex": made}})
        return self.rng.choice(
            (
                lambda: self.ask(completions, {"structured_outputs": {"json": made}}),
                lambda: self.ask(completions, {"response_format": hostile.schema_format(made)}),
                lambda: self.ask(chat, {"tools": [hostile.tool(made)], "tool_choice": "required"}),
            )
        )()

    def reference_chains(self) -> list[str]:
        """Recursion as deep as the chain is long."""
        size = self.rng.choice((1000, 2000, 4000, 8000))
        names = ("chain", "chain, shortest", "circle", "optional", "terminals", "brackets")
        forms = ("objects", "anyOf", "items", "allOf", "reference", "others", "pair")
        found = [self.grammar(hostile.LARKS, self.rng.choice(names), size)]
        return [*found, *(self.grammar(hostile.SCHEMAS, self.rng.choice(forms), size) for _ in range(2))]

    def heavy_regexes(self) -> list[str]:
        """Much memory, and masks that take long; each is a new one."""
        fields: list[dict[str, Any]] = [
            {"regex": f"((a{{{900 + self.turn}}}){{1000}}){{10}}"},
            {"regex": f"((a{{{700 + self.turn}}}){{1000}}){{10}}"},
            {"regex": f"a{{{50_000_000 + self.turn}}}"},
            {"json": {"type": "string", "pattern": f"^((b{{{900 + self.turn}}}){{1000}}){{10}}$"}},
            {"grammar": hostile.clipped(hostile.LARKS, "doubled", 25 + self.turn % 10)},
        ]
        return [self.ask("/v1/completions", {"structured_outputs": each, "max_tokens": 4}) for each in fields]

    def heavy_masks(self) -> list[str]:
        """Grammars that compile, with a first mask that takes long."""
        return [
            self.ask("/v1/completions", {"structured_outputs": {"json": hostile.wide(size, f"p{self.turn}x")}})
            for size in (4000, 7000)
        ]

    def bad_words(self) -> list[str]:
        """As many prompts and words as are legal."""
        words = ["".join(self.rng.choices("abcdefgh ", k=512)) for _ in range(1024)]
        few = ["".join(self.rng.choices("abcdefgh ", k=60)) for _ in range(1024)]
        return [
            self.ask("/v1/completions", {"prompt": ["a"] * 40, "bad_words": words, "max_tokens": 1}),
            self.ask("/v1/completions", {"prompt": "a", "n": 7, "bad_words": few, "max_tokens": 60, "stop": few[:64]}),
        ]

    def exhausted_lexer(self) -> list[str]:
        """Hot answers by a grammar that others use, until its lexer has too many states."""
        hot = {"structured_outputs": {"regex": LATE}, "temperature": 100.0, "max_tokens": 60, "n": 6}
        return [self.ask("/v1/completions", {**hot, "seed": each + 9 * self.turn}) for each in range(3)]

    def panics(self) -> list[str]:
        """Grammars on which a library panics."""
        for_all = {"properties": {"a": {"type": "string", "pattern": hostile.PANIC}}, "required": ["a"]}
        return [
            self.ask("/v1/completions", {"structured_outputs": {"regex": hostile.PANIC}}),
            self.ask("/v1/completions", {"structured_outputs": {"grammar": f"start: /{hostile.PANIC}/"}}),
            self.ask("/v1/completions", {"structured_outputs": {"json": {"type": "object", **for_all}}}),
            self.ask("/v1/chat/completions", {"tools": [hostile.tool({"type": "object", **for_all})]}),
        ]

    def left_compiles(self) -> list[str]:
        """Grammars that take seconds to compile, whose client leaves at once."""
        for each in range(3):
            body = hostile.body_bytes(
                "/v1/completions", {"structured_outputs": {"json": hostile.wide(8000, f"q{self.turn}x{each}x")}}
            )
            made = self.send("/v1/completions", body)
            time.sleep(0.3)
            made.close()
        return ["left"] * 3

    def ignored_fields(self) -> list[str]:
        """Bodies of 4 MB that are mostly fields which nobody reads, with long answers."""
        filled = "[" + ",".join(["{}"] * 1_300_000) + "]"
        for name in ("parsed", "provider_specific_fields"):
            body = (
                f'{{"messages": [{{"role": "user", "content": "x", "{name}": {filled}}}], "max_tokens": 400, '
                '"stream": true}'
            )
            self.hold(self.send("/v1/chat/completions", body.encode(), 4096))
        return ["held"] * 2

    def unread_answers(self) -> list[str]:
        """Large answers that are not read."""
        ids = json.dumps({"tokens": [self.rng.randrange(300, WORDS) for _ in range(500_000)]}).encode()
        shown = {"prompt": [7] * (TOKENS - 20), "prompt_logprobs": 20, "n": 4, "max_tokens": 2}
        for path, body in (
            ("/detokenize", ids),
            ("/detokenize", ids),
            ("/v1/completions", hostile.body_bytes("/v1/completions", shown)),
            ("/v1/completions", hostile.body_bytes("/v1/completions", {"stream": True, "max_tokens": 400})),
        ):
            self.hold(self.send(path, body, 4096))
        return ["held"] * 4

    def prompt_logprobs(self) -> list[str]:
        """As many positions as are legal."""
        shown = {"prompt": [[7] * (TOKENS - 20)] * 16, "prompt_logprobs": 20, "n": 4, "max_tokens": 1}
        return [self.ask("/v1/completions", shown)]

    def idle_connections(self) -> list[str]:
        """More connections than the process has descriptors."""
        made: list[socket.socket] = []
        with contextlib.suppress(OSError):
            made.extend(self.connect() for _ in range(IDLE))
        time.sleep(3)
        for each in made:
            each.close()
        return [f"{len(made)} opened"]

    def odd_bodies(self) -> list[str]:
        """Deep nesting, numbers without end, long names."""
        deep = json.dumps({"prompt": "x", "structured_outputs": {"json": hostile.nested(60_000)}}).encode()
        return [
            self.ask_raw("/v1/completions", deep),
            self.ask_raw("/v1/completions", b'{"prompt": ' + hostile.nested(900_000).encode() + b"}"),
            self.ask_raw("/v1/completions", b'{"prompt": ["x", "y"], "n": ' + b"9" * 4300 + b"}"),
            self.ask_raw("/v1/completions", b'{"prompt": "x", "n": ' + b"9" * 1_000_000 + b"}"),
            self.ask("/v1/completions", {"response_format": {"type": "x" * 100_000}}),
            self.ask("/v1/completions", {"logit_bias": {str(each): 1.5 for each in range(4096)}, "max_tokens": 50}),
            self.ask("/v1/completions", {"prompt": [["x" * 10] * 1024]}),
        ]

    def attacks(self) -> list[Callable[[], list[str]]]:
        """All of them."""
        return [
            self.reference_chains,
            self.heavy_regexes,
            self.heavy_masks,
            self.bad_words,
            self.exhausted_lexer,
            self.panics,
            self.left_compiles,
            self.ignored_fields,
            self.unread_answers,
            self.prompt_logprobs,
            self.idle_connections,
            self.odd_bodies,
        ]

    def run(self, seconds: float, file: Path, names: list[str]) -> None:
        """One attack after another, in another order each time; only those with these names, if there are any."""
        end = time.monotonic() + seconds
        with file.open("a", encoding="utf-8") as record:
            while True:
                attacks = [each for each in self.attacks() if not names or each.__name__ in names]
                self.rng.shuffle(attacks)
                for attack in attacks:
                    if time.monotonic() > end:
                        self.release(everything=True)
                        return
                    self.release()
                    start = time.monotonic()
                    line = {"name": attack.__name__, "start": start, "end": float("inf"), "answers": []}
                    record.write(json.dumps(line) + "\n")
                    record.flush()
                    try:
                        answers = attack()
                    except OSError as error:  # the server has gone, or takes no connection
                        answers = [type(error).__name__]
                        time.sleep(0.5)
                    line |= {"end": time.monotonic(), "answers": answers}
                    record.write(json.dumps(line) + "\n")
                    record.flush()
                self.turn += 1


def main() -> None:
    """Attack until the time is over."""
    base, seconds, seed, file, *names = sys.argv[1:]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    Client(base, int(seed)).run(float(seconds), Path(file), names)


if __name__ == "__main__":
    main()
