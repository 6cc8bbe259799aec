"""Prompts from the argument, stdin or a file. Errors name the place, but show no prompt."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from draftproof.errors import UserError
from draftproof.files import json_value, read_bytes

_KEYS = ("prompt", "text", "turns", "instruction")


@dataclass(frozen=True)
class PromptText:
    """A prompt, and its place for errors ("FILE, line 3"; empty for the argument and stdin)."""

    text: str
    where: str = ""


def one_argument(words: Sequence[str] | None, name: str) -> str | None:
    """The only argument of a command; None without one. Several words are refused here: typer would print them."""
    if words and len(words) > 1:
        raise typer.BadParameter(f"expected one {name}, got {len(words)} words (put them in quotes)")
    return words[0] if words else None


def gather(argument: str | None, file: Path | None) -> list[PromptText]:
    """The prompts of a command: those of the file, or the one in the argument or on stdin."""
    if file is not None:
        if argument is not None:
            raise typer.BadParameter("expected PROMPT or --prompts, got both (leave one out)")
        return read_prompts(file)
    if argument is None and (sys.stdin is None or sys.stdin.isatty()):
        raise typer.BadParameter("no prompt: give PROMPT, --prompts FILE, or text on stdin")
    return [_checked(_stdin() if argument in (None, "-") else str(argument))]


def _stdin() -> str:
    """All of stdin, without the newline that echo and editors add."""
    text = _decode(sys.stdin.buffer.read(), "stdin")
    return text.removesuffix("\n").removesuffix("\r")


def read_prompts(file: Path) -> list[PromptText]:
    """The prompts of a file: one per line; in .jsonl the prompt, text, first turn, or instruction of each object."""
    # not splitlines, since JSON text may contain other line separators
    lines = enumerate(_decode(read_bytes(file), str(file)).split("\n"), 1)
    places = [(f"{file}, line {number}", line.removesuffix("\r")) for number, line in lines if line.strip()]
    if not places:
        raise UserError(f"{file}: expected one prompt per line, or objects with {', '.join(_KEYS)} in .jsonl; got none")
    json_lines = file.suffix == ".jsonl"
    return [_checked(_of_json(line, where) if json_lines else line, where) for where, line in places]


def read_text(file: Path | None) -> str | None:
    """The text of a file; None without one."""
    return None if file is None else _decode(read_bytes(file), str(file))


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{where}, line {line}: expected UTF-8 text, got byte 0x{raw[error.start]:02x} (convert it, for example by "
            "iconv)"
        ) from None


def _of_json(line: str, where: str) -> str:
    record = json_value(line, where)
    key = next((key for key in _KEYS if isinstance(record, dict) and key in record), None)
    if key is None:
        raise UserError(f"{where}: expected an object with one of {', '.join(_KEYS)}, got {_form(record)}")
    value: Any = record[key]
    if key == "turns":
        value = value[0] if isinstance(value, list) and value else None
    if not isinstance(value, str):
        raise UserError(f"{where}: expected text in {key}, got {_form(value)}")
    return value


def _form(value: Any) -> str:
    """A description of a JSON value for an error: the fields of an object, the type of other values."""
    if isinstance(value, dict):
        return f"one with {', '.join(map(repr, value))}" if value else "one without fields"
    return "nothing" if value is None else type(value).__name__


def _checked(text: str, where: str = "") -> PromptText:
    """The prompt, if it can be tokenized."""
    problem = None if text else "is empty: enter some text"
    try:
        text.encode()
    except UnicodeEncodeError:
        problem = "is not valid Unicode: it contains lone surrogates (remove them)"
    if problem:
        raise UserError(f"{where}{': ' if where else ''}the prompt {problem}")
    return PromptText(text, where)
