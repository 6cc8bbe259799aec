"""A server in a process of its own, as people start it: what kills it does not kill who asks."""

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from support.commands import environment

TEMPLATE = "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.content }} {% endfor %}"
DESCRIPTORS = 1024  # the usual limit of a process


class ServedProcess:
    """`draftproof serve` at a free port, with the embedded pair unless options say otherwise.

    Its end is not hidden: `returncode` is None as long as it runs.
    """

    def __init__(self, *options, target="embedded:stories", draft="embedded:stories-draft"):
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        (self.folder / "template").write_text(TEMPLATE, encoding="utf-8")
        self._options = ["--target", target, "--draft", draft, "--chat-template", self.folder / "template", *options]
        self.start()

    def start(self):
        """Start it, again where it has ended, and wait until it is ready."""
        log = self.folder / "log"
        log.write_bytes(b"")
        command = [sys.executable, "-m", "draftproof", "serve", "--port", "0", *map(str, self._options)]

        def limited():
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(DESCRIPTORS, hard), hard))

        with log.open("ab") as file:
            pipes = {"stdout": file, "stderr": file, "env": environment()}
            self.process = subprocess.Popen(command, preexec_fn=limited, **pipes)  # noqa: PLW1509
        end = time.monotonic() + 300
        while not (found := re.search(r"serving \S+ at (http://\S+)/v1", self.log())):
            assert self.returncode is None, self.log()
            assert time.monotonic() < end, "the server did not start"
            time.sleep(0.05)
        self.base = found[1]
        while True:
            assert time.monotonic() < end, "the server did not become ready"
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.base}/ready", timeout=5).status_code == 200:
                    return
            time.sleep(0.05)

    def log(self):
        """The last lines of what it wrote."""
        with (self.folder / "log").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 20_000))
            return file.read().decode(errors="replace")

    @property
    def returncode(self):
        return self.process.poll()

    @property
    def memory(self):
        """MiB of the process and of those that it started; memory that they share counts once."""
        return sum(_memory(each) for each in (self.process.pid, *_children(self.process.pid)))

    @property
    def resident(self):
        """The same of the process alone, cheaply: looking at all of its pages holds it up."""
        return _memory(self.process.pid, _STATUS)

    def threads(self):
        """Files about the thread of the event loop and the one that has run longest besides: the engine's."""
        files = {int(file.parent.name): file for file in Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")}
        loop = files.pop(self.process.pid, None)
        return loop, max(files.values(), key=lambda file: int(file.read_text().split()[0]), default=None)

    def end(self, seconds=60):
        """SIGTERM; the exit code, or None where it does not end in time and is killed."""
        children = _children(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        for each in (*children, *_children(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        return code

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.returncode is None:
            self.end(10)
        self._folder.cleanup()


def _children(pid):
    """Processes that one has started, and those that they started."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for each in found:  # it grows
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


_ROLLUP, _STATUS = ("smaps_rollup", r"^Pss:\s+(\d+)"), ("status", r"^VmRSS:\s+(\d+)")


def _memory(pid, *sources):
    """MiB; a share of what is shared with others."""
    for file, line in sources or (_ROLLUP, _STATUS):
        with contextlib.suppress(OSError):
            if found := re.search(line, Path(f"/proc/{pid}/{file}").read_text(), re.MULTILINE):
                return int(found[1]) / 1024
    return 0.0
