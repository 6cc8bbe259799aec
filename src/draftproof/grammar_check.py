"""Tries grammars in processes of their own, which may be ended, before they are compiled in this one."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from draftproof import grammar_compile
from draftproof.errors import UserError
from draftproof.grammar_compile import MOST_MASK_SECONDS, MOST_MEMORY, MOST_SECONDS

_SHORT = 4096  # characters: longer grammars have processes of their own, and others do not wait for them
_AT_ONCE = 2  # processes for long grammars, and as many for short ones
_WAIT = 10.0  # seconds for a process to be free
_COMPILE = 10.0  # seconds for a grammar, on a machine that is busy; `MOST_SECONDS` are of its processor
_START = 60.0  # seconds for a process to read the tokenizer
_REMEMBERED = 4096  # grammars that were tried


class BusyError(UserError):
    """Too many grammars are being compiled; the same request may succeed later."""


@dataclass(frozen=True)
class Cost:
    """What a grammar took when it was tried: seconds of processor time to compile it, and bytes that it holds."""

    seconds: float
    size: int


class Checker:
    """Tries grammars for one tokenizer, the JSON of a fast one; threads may share it. Processes start when needed."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        first = {"path": sys.path, "tokenizer": tokenizer, "vocab_size": vocab_size, "ends": list(eos_token_ids)}
        self._lanes = _Lane(first), _Lane(first)
        self._lock = threading.Lock()
        self._known: dict[bytes, Future[Cost | _Refusal]] = {}

    def cost(self, kind: str, text: str) -> Cost:
        """What a grammar takes; it is tried once, and only those who ask for the very same one wait for it."""
        name = hashlib.sha256(f"{kind}:{text}".encode(errors="surrogatepass")).digest()
        with self._lock:
            found = self._known.pop(name, None)
            mine = found is None
            if found is None:
                found = Future()
            self._known[name] = found
            while len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
        if mine:
            self._try(name, found, kind, text)
        told = found.result()
        if isinstance(told, _Refusal):
            raise (BusyError if told.busy else UserError)(told.why)
        return told

    def _try(self, name: bytes, found: Future[Cost | _Refusal], kind: str, text: str) -> None:
        told: Cost | _Refusal = _Refusal("grammar: the process that compiles grammars ended: try again", busy=True)
        try:
            told = self._tried(kind, text)
        finally:
            if isinstance(told, _Refusal) and told.busy:
                with self._lock:  # another time it may be different
                    self._known.pop(name, None)
            found.set_result(told)

    def _tried(self, kind: str, text: str) -> Cost | _Refusal:
        try:
            told = self._lanes[len(text) > _SHORT].ask(kind, text)
        except queue.Empty:
            return _Refusal("grammar: too many others are being compiled: try again later", busy=True)
        except (OSError, ValueError):
            return _Refusal("grammar: the process that compiles grammars ended: try again", busy=True)
        if problem := _problem(told):
            return _Refusal(f"grammar {kind} cannot be {problem}", busy="late" in told)
        return Cost(told["seconds"], told["bytes"])


def _problem(told: dict[str, Any]) -> str:
    """Why a grammar that was tried is not used; empty where it is."""
    if "error" in told:
        return f"read: {told['error']}"
    if "excess" in told:
        return f"used: {told['excess']}"
    if told["seconds"] > MOST_SECONDS:
        return f"used: expected at most {MOST_SECONDS:g} s to compile it, got {told['seconds']:.1f} s"
    if told["mask"] > MOST_MASK_SECONDS:
        return f"used: expected at most {MOST_MASK_SECONDS:g} s to find the allowed tokens, got {told['mask']:.2f} s"
    if told["bytes"] > MOST_MEMORY:
        return f"used: expected at most {MOST_MEMORY >> 20} MiB of memory, got {told['bytes'] >> 20} MiB"
    return ""


@dataclass(frozen=True)
class _Refusal:
    """Why a grammar is not used."""

    why: str
    busy: bool = False


class _Lane:
    """A few processes that try one grammar after the other."""

    def __init__(self, first: dict[str, object]) -> None:
        self._first = first
        self._free: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(_AT_ONCE):
            self._free.put(None)

    def ask(self, kind: str, text: str) -> dict[str, Any]:
        """What a process found of a grammar; queue.Empty where none was free, else the errors of `_Process.ask`."""
        process = self._free.get(timeout=_WAIT)
        try:
            if process is None or not process.usable:
                process = _Process(self._first)
            return process.ask(kind, text)
        finally:
            self._free.put(process)


class _Process:
    """A process that tries grammars."""

    def __init__(self, first: dict[str, object]) -> None:
        script = str(Path(grammar_compile.__file__))
        self._owner = os.getpid()
        self._process = subprocess.Popen(  # noqa: S603 - our own script
            [sys.executable, "-I", script],  # isolated: nothing of the current folder is run
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl+C is for this process, which ends it
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # the same on Windows
            bufsize=0,
        )
        assert self._process.stdout is not None, "a pipe"
        self._replies: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        reads = threading.Thread(target=_read, args=(self._process.stdout, self._replies), name="grammars", daemon=True)
        reads.start()  # Windows cannot wait for a pipe for some time only
        self._ends = weakref.finalize(self, _end, self._process, self._owner)
        self._say(first)
        self._line(_START)

    @property
    def usable(self) -> bool:
        """Whether it runs, and is this process's own and not a fork's."""
        return self._ends.alive and self._owner == os.getpid() and self._process.poll() is None

    def ask(self, kind: str, text: str) -> dict[str, Any]:
        """What was found of a grammar; an OSError or ValueError where the process ends, or does not answer."""
        try:
            self._say({"kind": kind, "text": text, "seconds": _COMPILE})
            try:
                found: dict[str, Any] = json.loads(self._line(2 * _COMPILE))
            except OSError:
                if sys.platform != "win32":
                    raise
                self._ends()  # the grammar was tried in the process itself, which has no fork
                return {"excess": "it takes too long or too much memory to compile, or refers too deep"}
        except BaseException:
            self._ends()
            raise
        return found

    def _say(self, what: object) -> None:
        assert self._process.stdin is not None, "a pipe"
        left = memoryview(json.dumps(what).encode() + b"\n")
        while left:
            left = left[self._process.stdin.write(left) or 0 :]

    def _line(self, seconds: float) -> bytes:
        """The next line that it writes; nothing follows before it is asked again."""
        told = b""
        while not told.endswith(b"\n"):
            try:
                part = self._replies.get(timeout=seconds)
            except queue.Empty:
                raise OSError("no answer") from None
            if not part:
                raise OSError("it has ended")
            told += part
        return told


def _read(pipe: IO[bytes], told: queue.SimpleQueue[bytes]) -> None:
    """Read a pipe to its end, which is an empty part."""
    part = b" "
    while part:
        try:
            part = pipe.read(1 << 16)
        except (OSError, ValueError):  # it was closed
            part = b""
        told.put(part)


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a process, where this is not a fork of the one that started it."""
    if owner == os.getpid():  # before its pipe is closed: a thread may read it
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
