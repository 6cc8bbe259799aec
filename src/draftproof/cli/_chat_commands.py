"""The commands of a conversation, such as /undo: their actions, parsing and completion."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_origin

import typer

from draftproof.cli._conversation import Conversation, Event, Notice
from draftproof.cli._sampling import CHAT_SAMPLING, sampling_options
from draftproof.errors import UserError, printable, refuse_unknown
from draftproof.sampling import SHAPING, SamplingParams

QUOTES = '"""'  # around a message of several lines
_WHETHER = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}


@dataclass(frozen=True)
class Command:
    """A command of a conversation."""

    takes: str  # its argument, for /help; empty if it takes none
    about: str  # what it does, for /help
    run: Callable[[Conversation, str], Iterator[Event]]
    needs: bool = False  # whether the argument is required


def take(conversation: Conversation, line: str) -> Iterator[Event]:
    """Run an entry of the user, a command or a message to answer; raises UserError if that is impossible."""
    if not line.startswith("/"):
        yield from conversation.say(_message(line))
        return
    word, _, rest = line.partition(" ")
    name, rest = word[1:].strip(), rest.strip()
    command = COMMANDS.get(name)
    if command is None:
        raise UserError(
            f"command: expected one of {', '.join(f'/{each}' for each in COMMANDS)}, got /{name} (put a message that "
            f"begins with / between {QUOTES} and {QUOTES})"
        )
    if rest and not command.takes:
        raise UserError(f"/{name}: expected nothing after it, got {rest!r}")
    if command.needs and not rest:
        raise UserError(f"expected /{name} {command.takes}, got /{name} alone")
    yield from command.run(conversation, rest)


def is_open(text: str) -> bool:
    """Whether a multi-line message has begun but not ended."""
    return text.startswith(QUOTES) and not (len(text) >= 2 * len(QUOTES) and text.rstrip().endswith(QUOTES))


def _message(line: str) -> str:
    """The message without its quotes and the newlines next to them."""
    if not line.startswith(QUOTES) or is_open(line):
        return line
    return line.rstrip().removeprefix(QUOTES).removesuffix(QUOTES).removeprefix("\n").removesuffix("\n")


def completions(text: str) -> list[str]:
    """Completions of the last word of a line: commands, and parameter names after /set."""
    before, _, last = text.rpartition(" ")
    known = [f"/{name}" for name in COMMANDS] if not before else list(CHAT_SAMPLING.only) if before == "/set" else []
    return [word for word in known if word.startswith(last)] if text.startswith("/") else []


# --- the commands ----------------------------------------------------------------------------------------------------


def _help(_: Conversation, __: str) -> Iterator[Event]:
    lines = [(f"/{name} {command.takes}".rstrip(), command.about) for name, command in COMMANDS.items()]
    lines += [
        (f"{QUOTES}...{QUOTES}", "a message of several lines; Alt-Enter also starts a new line"),
        ("Ctrl-C", "stops the answer"),
        ("Ctrl-D", "leaves"),
    ]
    width = max(len(name) for name, _ in lines)
    yield Notice("\n".join(f"{name:{width}}  {about}" for name, about in lines))


def _exit(conversation: Conversation, _: str) -> Iterator[Event]:
    conversation.closed = True
    yield from ()


def _clear(conversation: Conversation, _: str) -> Iterator[Event]:
    conversation.clear()
    yield Notice("started a new conversation" + ("" if conversation.system is None else "; the system message stays"))


def _system(conversation: Conversation, text: str) -> Iterator[Event]:
    conversation.set_system(text or None)
    yield Notice("the system message is set" if text else "there is no system message now")


def _retry(conversation: Conversation, _: str) -> Iterator[Event]:
    if conversation.params.temperature == 0:
        yield Notice("temperature is 0, so the answer will be the same: /set temperature 0.8 allows another one")
    yield from conversation.retry()


def _undo(conversation: Conversation, _: str) -> Iterator[Event]:
    conversation.undo()
    yield Notice(f"removed the last exchange: {_messages(conversation)} left")


def _save(conversation: Conversation, name: str) -> Iterator[Event]:
    conversation.save(_file(name))
    yield Notice(f"{_messages(conversation)} written to {name}")


def _load(conversation: Conversation, name: str) -> Iterator[Event]:
    conversation.load(_file(name))
    yield Notice(f"{_messages(conversation)} read from {name}; {conversation.context()}")


def _set(conversation: Conversation, text: str) -> Iterator[Event]:
    name, _, value = text.partition(" ")
    name, value = name.replace("-", "_"), value.strip()
    refuse_unknown("parameter", name, CHAT_SAMPLING.only)
    conversation.set(name, _read(name, value) if value else {})
    yield Notice(f"{name} {_display(getattr(conversation.params, name))}")


def _show(conversation: Conversation, _: str) -> Iterator[Event]:
    usual, params = SamplingParams(), conversation.params
    names = [each.name for each in fields(SamplingParams)]
    shown = (*SHAPING, "max_tokens", "seed")
    others = [name for name in names if name not in shown and getattr(params, name) != getattr(usual, name)]
    lines = [f"{name} {_display(getattr(params, name))}" for name in (*shown, *others)]
    if conversation.system is not None:
        lines.append(f"system message: {printable(conversation.system)}")
    yield Notice("\n".join([*lines, f"{_messages(conversation)}, {conversation.context()}"]))


COMMANDS = {
    "help": Command("", "lists the commands", _help),
    "exit": Command("", "leaves; so does Ctrl-D", _exit),
    "clear": Command("", "starts a new conversation; the system message stays", _clear),
    "new": Command("", "the same as /clear", _clear),
    "system": Command("[TEXT]", "sets the system message; without TEXT removes it", _system),
    "retry": Command("", "answers the last message again, with another seed", _retry),
    "undo": Command("", "removes the last message and its answer", _undo),
    "save": Command("FILE", "writes the messages as JSON", _save, needs=True),
    "load": Command("FILE", "continues with the messages of a file", _load, needs=True),
    "set": Command("NAME [VALUE]", "sets a sampling parameter; without VALUE to its default", _set, needs=True),
    "show": Command("", "shows the sampling parameters, and how much of the context is used", _show),
}


def _file(name: str) -> Path:
    return Path(name).expanduser()


def _messages(conversation: Conversation) -> str:
    number = len(conversation.messages)
    return f"{number} message{'' if number == 1 else 's'}"


def _display(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(shlex.quote(str(each)) for each in value) or "none"
    return "none" if value is None else str(value)


# --- values of parameters, read as the command line reads them -------------------------------------------------------

_app = typer.Typer(add_completion=False)


@_app.command()
@sampling_options
def _values(*, sampling: dict[str, Any]) -> dict[str, Any]:
    return sampling


def _read(name: str, text: str) -> Mapping[str, Any]:
    """Parse the value of a sampling parameter; raises UserError if it is invalid."""
    option, kind = f"--{name.replace('_', '-')}", CHAT_SAMPLING.kind(name)
    if kind is bool:
        if text.lower() not in _WHETHER:
            raise UserError(f"{name}: expected on or off, got {text!r}")
        return {name: _WHETHER[text.lower()]}
    try:
        words = shlex.split(text) if get_origin(kind) is list else [text]
    except ValueError as error:
        raise UserError(f"{name}: {error} in {text!r}") from None
    try:
        given = typer.main.get_command(_app).main([f"{option}={word}" for word in words], standalone_mode=False)
    except typer.BadParameter as error:
        raise UserError(error.message if error.param is None else f"{name}: {error.message}, got {text!r}") from None
    return {name: given[name]}
