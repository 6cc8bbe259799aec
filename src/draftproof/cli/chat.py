"""`draftproof chat`: a conversation in the terminal; without a terminal, it answers one message from stdin."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from draftproof import models
from draftproof.cli import _output
from draftproof.cli._chat_commands import completions, is_open, take
from draftproof.cli._compare import sampling_note
from draftproof.cli._conversation import Conversation, Event, Notice
from draftproof.cli._engine import engine_options, load_engine, named_target
from draftproof.cli._prompts import gather, one_argument, read_text
from draftproof.cli._quiet import logged_lines, quiet_libraries
from draftproof.cli._sampling import CHAT_SAMPLING, sampling_options
from draftproof.draft import Origin
from draftproof.engine.request import Chunk, Request
from draftproof.errors import printable
from draftproof.finish import TextDecoder

app = typer.Typer(add_completion=False)
_COLOURS = {Origin.DRAFTER: "green", Origin.LOOKUP: "cyan", Origin.PREDICTION: "magenta", Origin.GRAMMAR: "yellow"}
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a model's text must not move the cursor, or worse
_AGAIN = "Ctrl-D or /exit leaves"


@app.command()
@partial(sampling_options, options=CHAT_SAMPLING)
@engine_options
def chat(
    message: Annotated[
        list[str] | None, typer.Argument(metavar="[MESSAGE]", help="The first message; - reads stdin.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with a chat template that replaces the model's.")
    ] = None,
    show_drafts: Annotated[bool, typer.Option("--show-drafts", help="Colour drafted tokens by their source.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Leave out the line after each answer.")] = False,
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Chat with a model.

    Ctrl-C stops an answer, /help lists the commands. If stdin is not a terminal, one message is answered.
    Without a target, smollm2-135m is downloaded at the first use.
    """
    first, here = one_argument(message, "MESSAGE"), sys.stdin is not None and sys.stdin.isatty()
    if first is not None or not here:
        first = gather(first, None)[0].text
    template = read_text(chat_template)
    with quiet_libraries(), logged_lines(quiet=quiet):
        loaded = load_engine(named_target(engine) or models.FIRST_TARGET, engine | {"max_batch": 1}, quiet=quiet)
        if template is not None:
            loaded.prompts.use_template(template)
        conversation = Conversation(loaded, sampling, system=system)
        screen = Screen(conversation, show_drafts=show_drafts, quiet=quiet)
        if (line := sampling_note(conversation.params, sampling)) and not quiet:
            _output.note(line, dim=True)
        if here:
            converse(conversation, screen, first, quiet=quiet)
        else:
            assert first is not None, "read from stdin"
            screen.show(conversation.say(first))


class Screen:
    """Shows the events of a conversation: answers on stdout, everything else on stderr."""

    def __init__(self, conversation: Conversation, *, show_drafts: bool, quiet: bool) -> None:
        self._conversation = conversation
        self._show_drafts = show_drafts
        self._quiet = quiet
        self._console = Console(highlight=False)
        self._drafted: DraftedText | None = None
        self._within_line = False
        self._reasons = False

    def show(self, events: Iterable[Event]) -> None:
        """Show events as they come; after an error, end an unfinished line."""
        try:
            for event in events:
                self._show(event)
        finally:
            self._end_line()

    def _show(self, event: Event) -> None:
        if isinstance(event, Chunk):
            self._write(event)
            return
        self._end_line()
        if isinstance(event, Notice):
            _output.note(event.text)
            return
        if event.note:
            _output.note(f"draftproof: {event.note}")
        if not self._quiet:
            _output.note(status(event.request), dim=True)

    def _write(self, chunk: Chunk) -> None:
        """Write a piece of an answer; all its text goes to the terminal here."""
        if chunk.reasoning:
            self._console.out(self._safe(chunk.reasoning), style="dim", end="")
            self._reasons = self._within_line = True
        if chunk.text and self._reasons:
            self._reasons = False
            _output.write("\n\n")
        if self._show_drafts:
            self._drafted = self._drafted or DraftedText(self._conversation)
            for text, drafted in self._drafted.split(chunk):
                self._console.out(self._safe(text), style=_COLOURS[chunk.origin] if drafted else None, end="")
        else:
            _output.write(self._safe(chunk.text))
        if chunk.text:
            self._within_line = not chunk.text.endswith("\n")

    def _safe(self, text: str) -> str:
        return _CONTROLS.sub(lambda found: printable(found[0]), text) if sys.stdout.isatty() else text

    def _end_line(self) -> None:
        self._drafted = None
        self._reasons = False
        if self._within_line:
            self._within_line = False
            _output.write("\n")


class DraftedText:
    """Divides the text of an answer into drafted text and text that the target added.

    Text that later tokens may change is held back, so a chunk may have text of tokens from an earlier one.
    """

    def __init__(self, conversation: Conversation) -> None:
        skip = conversation.params.skip_special_tokens
        self._decoder = TextDecoder(conversation.engine.tokenizer, skip_special_tokens=skip)
        self._ahead: list[tuple[int, bool]] = []  # number of characters, whether they were drafted

    def split(self, chunk: Chunk) -> list[tuple[str, bool]]:
        """The text of a chunk as pieces, each with whether it was drafted."""
        for at, token in enumerate(chunk.token_ids):
            if at >= chunk.reasoning_tokens:
                self._ahead.append((len(self._decoder.push(token)), at < chunk.accepted))
        found, text = list[tuple[str, bool]](), chunk.text
        while text:
            size, drafted = self._ahead.pop(0) if self._ahead else (len(text), False)  # the decoder holds the end back
            if size > len(text):
                self._ahead.insert(0, (size - len(text), drafted))
            found.append((text[:size], drafted))
            text = text[size:]
        return found


def status(request: Request) -> str:
    """One line about an answer: its speed, and how many tokens of its prompt were reused."""
    stats = request.stats
    parts = [
        f"{stats.num_tokens} tokens",
        f"{stats.tokens_per_second:.1f} tokens/s",
        f"{stats.block_efficiency:.2f} tokens per target call",
        f"{request.reused} of {request.prompt_length} prompt tokens reused",
        "" if request.rule.lossless else "LOSSY: the output distribution is not the target's",
    ]
    return " | ".join(part for part in parts if part)


def converse(conversation: Conversation, screen: Screen, first: str | None, *, quiet: bool) -> None:
    """Read messages and commands from the terminal until the user leaves; `first` is answered at once."""
    from draftproof.cli._chat_input import LineReader  # prompt_toolkit is needed on terminals only

    read = LineReader(is_open, completions)
    if not quiet:
        _output.note(f"{conversation.engine.target.name}: /help lists the commands; {_AGAIN}", dim=True)
    if first is not None:
        _do(conversation, screen, conversation.say(first))
    interrupted = False
    while not conversation.closed:
        try:
            line = read()
        except EOFError:
            return
        except KeyboardInterrupt:
            if interrupted:
                _output.note(_AGAIN)
            interrupted = True
            continue
        interrupted = False
        if line.strip():
            _do(conversation, screen, take(conversation, line))


def _do(conversation: Conversation, screen: Screen, events: Iterator[Event]) -> None:
    """Show the events of an entry; an error is one line, and Ctrl-C stops an answer."""
    try:
        with _on_interrupt(conversation.stop):
            screen.show(events)
    except ValueError as error:  # those of the engine's parts are written for users
        _output.note(f"draftproof: error: {printable(str(error))}")


@contextmanager
def _on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C within the block calls `stop`; a second one ends the program as usual."""

    def once(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    before = signal.signal(signal.SIGINT, once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
