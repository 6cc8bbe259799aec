"""Compiles a grammar with llguidance; run as a script, it is the process in which grammars are tried first.

What a grammar costs shows only while it is compiled: memory, time, and a depth of recursion that ends a process with
the usual stack. So each grammar is compiled in a process that may die of it, and compiled again where it is used only
if it did well there. The script imports nothing of this package, whose imports take seconds.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

_Made = TypeVar("_Made")
# Of work: a grammar beyond these fails, alone. With more fuel, patterns of 20 characters take a second and 170 MB.
LIMITS: Any = {
    "max_grammar_size": 100_000,
    "max_lexer_states": 50_000,
    "initial_lexer_fuel": 200_000,
    "verbose_errors": False,
}
MOST_SECONDS = 2.0  # of processor time to compile a grammar
MOST_MASK_SECONDS = 0.25  # of processor time for one of the first masks
MOST_MEMORY = 128 << 20  # bytes that compiling may take beside the stack
_STACK = 512 << 20  # bytes of address space: a chain of references as long as a grammar can be takes most of it
_STEPS = 8  # masks that are computed to see what they cost
_COMPACT: Any = {"whitespace_flexible": False}
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # of a schema: schemas by name
_DATA = ("const", "enum", "default", "examples", "x-guidance")  # of a schema: values that are no schemas
_ELSEWHERE = re.compile(r"Resource '(?:json-schema://)?([^']*)' is not present in a registry")
_starting = threading.Lock()


def compiled(tokenizer: Any, kind: str, text: str) -> Any:
    """A matcher at the beginning of a grammar, with llguidance's tokenizer; call it on a large stack.

    A ValueError where the grammar, of kind regex, lark, json_schema or json_object, cannot be read or used.
    """
    from llguidance import LLMatcher, LLParserLimits

    if kind == "regex":
        source = LLMatcher.grammar_from_regex(text)
    elif kind == "lark":
        source = LLMatcher.grammar_from_lark(text)
    else:
        source = LLMatcher.grammar_from_json_schema(_schema(text), defaults=_COMPACT)
    made = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(**LIMITS))
    if made.is_error():
        problem = made.get_error()
        if kind == "json_schema" and (found := _ELSEWHERE.search(problem)):
            raise ValueError(f"expected every $ref within the schema, such as '#/$defs/NAME', got {found[1][:80]!r}")
        raise ValueError(shortened(problem))
    return made


def use_local_references(schema: dict[str, Any]) -> None:
    """Change references like `/$defs/NAME`, as LiteLLM makes them of pydantic models, to `#/$defs/NAME`, in place.

    Unchanged: a name that the schema does not define, and a schema with `$id`, relative to which they mean another one.
    """
    parts = list(_schemas_in(schema))
    if any(isinstance(each.get("$id"), str) for each in parts):
        return
    for each in parts:
        reference = each.get("$ref")
        if not isinstance(reference, str) or not reference.startswith(("/$defs/", "/definitions/")):
            continue
        where: Any = schema
        for step in reference.removeprefix("/").split("/"):
            where = where.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(where, dict) else None
        if where is not None:
            each["$ref"] = f"#{reference}"


def _schemas_in(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A schema and those within it, without recursion, since it may be as deep as JSON can be read."""
    waiting: list[Any] = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        elif isinstance(each, dict):
            yield each
            for key, value in each.items():
                if key in _NAMED and isinstance(value, dict):
                    waiting += value.values()
                elif key not in _DATA:
                    waiting.append(value)


def begin(matcher: Any) -> None:
    """Compute a matcher's first mask; copies have its lexer, and with it the work that was done.

    A ValueError where no token is allowed, or the mask is too much work.
    """
    matcher.compute_logit_bias()
    if matcher.is_error():
        raise ValueError(f"no first token can be found: {shortened(matcher.get_error())}")


def _schema(text: str) -> Any:
    """A JSON schema; without a text that of any object."""
    try:
        found = json.loads(text) if text else {"type": "object"}
    except RecursionError:
        raise ValueError("the schema has more levels than can be read: nest it less deeply") from None
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise ValueError(f"expected a schema that is an object, got {kind}")  # noqa: TRY004 - reported as a bad value
    use_local_references(found)
    return found


def shortened(problem: str) -> str:
    """What llguidance says of a grammar on one line, without the grammar that it quotes."""
    lines = [line.strip() for line in problem.splitlines() if line.strip()]
    if len(lines) > 1 and lines[1][:1] in "<0123456789":
        lines = lines[:1]  # then come lines of the grammar with their numbers, or a note on what is left out
    text = re.sub(r'"([^"]{20})[^"]{10,}"?', r'"\1..."', " ".join(" ".join(lines).split()))
    return text if len(text) <= 120 else f"{text[:117]}..."


def on_large_stack(call: Callable[[], _Made]) -> _Made:
    """What a call returns or raises in a thread with a stack for deep recursion.

    A ValueError where there is no address space for the stack, or the call panicked.
    """
    made: list[_Made] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            made.append(call())
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name="grammar", daemon=True)
    with _starting:  # the size is one for all threads that start
        usual = threading.stack_size(_STACK)
        try:
            thread.start()
        except RuntimeError:
            raise ValueError(
                f"compiling needs a stack of {_STACK >> 20} MiB, and there is no address space for it: raise ulimit -v"
            ) from None
        finally:
            threading.stack_size(usual)
    thread.join()
    if errors:
        if type(errors[0]).__name__ == "PanicException":  # of Rust, and no Exception
            raise ValueError(f"the compiler failed: {shortened(str(errors[0]))}") from errors[0]
        raise errors[0]
    return made[0]


# --- the process -----------------------------------------------------------------------------------------------------


def _tried(tokenizer: Any, kind: str, text: str) -> dict[str, Any]:
    """What a grammar costs; called in a process of its own, on a large stack."""
    before, start = _status("VmRSS"), time.thread_time()
    matcher = compiled(tokenizer, kind, text)
    seconds = time.thread_time() - start
    start = time.thread_time()
    begin(matcher)
    worst, steps = time.thread_time() - start, 0
    while steps < _STEPS and not matcher.is_stopped():
        start = time.thread_time()
        mask = matcher.compute_logit_bias()
        if matcher.is_error():
            break  # it is an answer's mistake if it gets here
        worst = max(worst, time.thread_time() - start)
        allowed = [token for token, bit in enumerate(mask) if bit]
        start = time.thread_time()
        matcher.try_consume_tokens([allowed[(7919 * (steps + 1)) % len(allowed)]])
        worst = max(worst, time.thread_time() - start)
        steps += 1
    return {"seconds": seconds, "mask": worst, "bytes": max(0, _status("VmRSS") - before)}


def _status(name: str) -> int:
    """A number of bytes that the kernel keeps of this process; 0 where it keeps none."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:  # noqa: PTH123 - no more imports than needed
            return next((int(line.split()[1]) << 10 for line in file if line.startswith(f"{name}:")), 0)
    except OSError:
        return 0


def _found(tokenizer: Any, kind: str, text: str) -> dict[str, Any]:
    """What a grammar costs, or why it cannot be read."""
    try:
        return on_large_stack(lambda: _tried(tokenizer, kind, text))
    except ValueError as error:
        return {"error": str(error)}


def _limit() -> None:
    """Let this process end where it takes more than a grammar may."""
    if sys.platform == "win32":
        return
    import resource

    seconds = int(MOST_SECONDS) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = _status("VmSize")
    if used:
        most = used + _STACK + (160 << 20) + MOST_MEMORY  # an arena of the allocator for the thread takes some
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _answer(tokenizer: Any, kind: str, text: str, seconds: float) -> dict[str, Any]:
    """Try a grammar in a fork of this process; on Windows in this one, which the asking process ends if need be."""
    if sys.platform == "win32":
        return _found(tokenizer, kind, text)
    import os
    import select
    import signal

    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(ours)
            _limit()
            try:
                found = _found(tokenizer, kind, text)
            except MemoryError:
                os._exit(1)
            os.write(theirs, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    try:
        ready = select.select([ours], [], [], seconds)[0]
        told = os.read(ours, 1 << 16) if ready else b""
    finally:
        os.close(ours)
    if not ready:
        os.kill(child, signal.SIGKILL)
    _, _, used = os.wait4(child, 0)
    if told:
        answer: dict[str, Any] = json.loads(told)
        return answer
    slow = used.ru_utime + used.ru_stime > MOST_SECONDS
    if not ready and not slow:  # for which others are to blame, who use the processor
        return {"excess": "it takes too long to compile here and now: try again", "late": True}
    return {"excess": "it takes too long to compile" if slow else "it takes too much memory, or refers too deep"}


def main() -> None:
    """Read a tokenizer, then grammars, one a line in JSON; write what was found of each."""
    import os

    first = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = first["path"]
    from llguidance import LLTokenizer

    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what others print is no answer
    tokenizer = LLTokenizer(first["tokenizer"], n_vocab=first["vocab_size"], eos_token=first["ends"])
    answers.write(b"{}\n")
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        found = _answer(tokenizer, asked["kind"], asked["text"], asked["seconds"])
        answers.write(json.dumps(found).encode() + b"\n")


if __name__ == "__main__":
    main()
