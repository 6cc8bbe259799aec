"""Requests that schemathesis makes from a server's /openapi.json, and those of a hostile client, for some minutes.

    python scripts/fuzz_server.py [--minutes MINUTES] [--json] [--keep FOLDER]

The server is a process of its own, with a small embedded pair. Legal bodies get fields of every size, from empty ones
to those beyond the limits: grammars, regexes, schemas and tools (chains of references, deep nesting, heavy counts), bad
words, stop strings, biases, numbers of 4300 digits. Beside them a client asks the same question again and again.

A fault is: a status of 500 or more, an answer that is not as /openapi.json describes it, no answer within 60 seconds,
the end of the process, another answer for the client beside, or none within the time of --longest-wait. After a fault
the fuzz goes on, with a new server where the old one ended; each kind of fault is shown once. Exits with 1 if there was
any.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support import schema_checks
from support.served_process import ServedProcess

SECONDS = 60.0  # until a request is answered
QUESTION = {"prompt": "Once upon a time", "temperature": 0.0, "max_tokens": 16}


class Fuzz:
    """A server, what it was sent, and what went wrong.

    Args:
        minutes: how long.
        longest_wait: seconds in which a client beside is answered.
        keep: a folder for bodies that show a fault.
        options: further options of the server.
    """

    def __init__(self, minutes: float, longest_wait: float, keep: Path | None, options: list[str]) -> None:
        self.end, self.longest_wait, self.keep = time.monotonic() + 60 * minutes, longest_wait, keep
        self.server = ServedProcess(*options, target="embedded:target", draft="embedded:draft")
        self.seen: Counter[str] = Counter()
        self.faults: dict[str, dict[str, Any]] = {}
        self.now, self.waited, self.over, self.answered = "", (0.0, ""), threading.Event(), 0
        self.expected = httpx.post(f"{self.server.base}/v1/completions", json=QUESTION).json()["choices"][0]["text"]

    def note(self, what: str, name: str, body: Any = None, **facts: Any) -> None:
        """Remember a fault, once for what was seen and the kind of its request."""
        kind = f"{what} {''.join(each for each in name if not each.isdigit())}"
        if kind in self.faults:
            self.faults[kind]["times"] += 1
            return
        self.faults[kind] = {"what": what, "request": name, "times": 1, **facts}
        print(f"fault: {what}: {name[:200]} {json.dumps(facts)[:600]}", file=sys.stderr, flush=True)
        if self.keep is not None and body is not None:
            self.keep.mkdir(parents=True, exist_ok=True)
            file = self.keep / f"fault-{len(self.faults)}.json"
            with contextlib.suppress(TypeError, ValueError, RecursionError):
                file.write_text(json.dumps(body))
                self.faults[kind]["body"] = file.name

    def noted(self, name: str, case: Any, answer: Any, error: BaseException) -> None:
        """A mistake that schemathesis has found."""
        time.sleep(0.2)  # so that a process that ends has ended
        code = self.server.returncode
        text = " ".join(str(each) for each in getattr(error, "exceptions", [error]))
        if code is not None:
            what = f"the process ended with {code}"
        elif answer is not None and answer.status_code >= 500:
            what = f"status {answer.status_code}"
        elif "timed out" in text.lower() or "Timeout" in type(error).__name__:
            what = f"no answer within {SECONDS:g} s"
        else:
            what = text.strip().partition("\n")[0][:100]
        log = self.server.log()[-600:] if code is not None else ""
        self.note(what, name, case.body, error=f"{type(error).__name__}: {text[:300]}", log=log)

    def beside(self) -> None:
        """Ask the same question until the end, and check its answer."""
        with httpx.Client() as client:
            while not self.over.wait(0.2):
                start, running = time.monotonic(), self.now
                try:
                    answer = client.post(f"{self.server.base}/v1/completions", json=QUESTION, timeout=SECONDS)
                except httpx.TimeoutException:
                    self.note("another client has no answer", self.now)
                    continue
                except httpx.HTTPError:
                    time.sleep(0.5)  # a server that ends is noted elsewhere
                    continue
                took = time.monotonic() - start
                self.answered += 1
                self.waited = max(self.waited, (took, running if running == self.now else f"{running}, {self.now}"))
                if took > self.longest_wait:
                    self.note(f"another client waits more than {self.longest_wait:g} s", self.now, waits=round(took, 1))
                if answer.status_code != 200:
                    self.note(f"another client gets status {answer.status_code}", self.now, error=answer.text[:300])
                elif answer.json()["choices"][0]["text"] != self.expected:
                    self.note("another client gets another answer", self.now, error=answer.text[:300])

    def go_on(self) -> bool:
        """Whether to send another request."""
        return self.server.returncode is None and time.monotonic() < self.end

    def run(self) -> None:
        """Send requests until the time is over."""
        client = threading.Thread(target=self.beside, daemon=True)
        client.start()
        while time.monotonic() < self.end:
            if self.server.returncode is not None:
                self.server.start()
            operations = schema_checks.operations(self.server.base)
            for name, operation in operations.items():
                self.now = name
                posts = name.startswith("POST")
                fields = self.watched(schema_checks.hostile_fields(operation.path)) if posts else None
                sent = schema_checks.check(
                    operation,
                    (100 if "completions" in name else 30) if posts else 2,
                    at_random=True,
                    fields=fields,
                    noted=self.noted,
                    go_on=self.go_on,
                    seconds=SECONDS,
                )
                self.seen.update(f"{name} {status}" for status in sent)
        self.over.set()
        client.join(SECONDS + 5)
        self.memory = self.server.memory if self.server.returncode is None else 0.0
        if self.server.returncode is None and (code := self.server.end()) != 0:
            self.note(f"the code after SIGTERM is {code}", "")

    def watched(self, fields: Any) -> Any:
        """The same fields; their name is known while they are sent."""

        def known(made: tuple[str, Any]) -> tuple[str, Any]:
            self.now = made[0]
            return made

        return fields.map(known)


def main() -> None:
    """Send requests until the time is over, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--longest-wait", type=float, default=10.0, help="seconds in which another client is answered")
    parser.add_argument("--keep", type=Path, help="a folder for bodies that show a fault")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("options", nargs="*", help="options of the server, after --")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server ends too
    fuzz = Fuzz(asked.minutes, asked.longest_wait, asked.keep, asked.options)
    with fuzz.server:
        fuzz.run()
    found = {
        "minutes": asked.minutes,
        "requests": sum(fuzz.seen.values()),
        "seen": dict(sorted(fuzz.seen.items())),
        "answers for another client": fuzz.answered,
        "longest wait of another client": {"seconds": round(fuzz.waited[0], 2), "beside": fuzz.waited[1][:200]},
        "memory at the end, MiB": round(fuzz.memory),
        "faults": list(fuzz.faults.values()),
    }
    if asked.json:
        print(json.dumps(found, indent=1))
    else:
        for name, count in found.pop("seen").items():
            print(f"{name}: {count}")
        faults = found.pop("faults")
        for name, value in found.items():
            print(f"{name}: {value}")
        print(f"faults: {len(faults)}")
        for each in faults:
            print(f"- {each['what']}: {each['request'][:200]} ({each['times']} times)")
    sys.exit(bool(fuzz.faults))


if __name__ == "__main__":
    main()
