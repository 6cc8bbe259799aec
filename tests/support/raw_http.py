"""Raw connections to a server, and an engine that is slow."""

import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from support.commands import environment


class Slow:
    """Lets the rounds of an engine begin one at a time, when they may, or each after some time."""

    def __init__(self, engine, seconds=0.0):
        self.rounds, self.seconds, self.may = 0, seconds, threading.Event()
        self.may.set()
        self.step, engine.step = engine.step, self

    def __call__(self):
        assert self.may.wait(30)
        time.sleep(self.seconds)
        self.rounds += 1
        self.step()


def connected(base):
    """A connection with a small buffer."""
    host, port = base.removeprefix("http://").split(":")
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    made.connect((host, int(port)))
    return made


def raw(**fields):
    """A request for a completion as bytes."""
    body = json.dumps(fields).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


def descriptors():
    """Number of open files of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def held(connection):
    """Whether a process holds the other side of a connection; what was closed has no owner."""
    ours, theirs = connection.getsockname()[1], connection.getpeername()[1]
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    ends = [[int(row[place].rpartition(":")[2], 16) for place in (1, 2)] for row in rows]
    return any(each == [theirs, ours] and row[9] != "0" for each, row in zip(ends, rows, strict=True))


KEY, OTHER = "sk-0123456789abcdef", "sk-fedcba9876543210"


def serve(*options, before="", **variables):
    """A server in a process of its own, which may run some code before."""
    code = f"{before}\nfrom draftproof.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", "--port", "0", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment(**variables), **pipes)


def address(process):
    for line in process.stderr:
        if "serving" in line:
            return line.split()[-1].removesuffix("/v1")
    raise AssertionError("it did not start")
