"""Terminal input with history, completion and multi-line messages, by prompt_toolkit."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from typing_extensions import override

_PROMPT, _FURTHER = ">>> ", "... "


class LineReader:
    """Reads entries of the user; the arrow keys bring back earlier ones, which are not saved to a file."""

    def __init__(self, is_open: Callable[[str], bool], completions: Callable[[str], list[str]]) -> None:
        self._session: PromptSession[str] = PromptSession(
            _PROMPT,
            multiline=True,
            prompt_continuation=_FURTHER,
            key_bindings=_keys(is_open),
            completer=_Words(completions),
            complete_while_typing=False,
            output=create_output(always_prefer_tty=True),
        )

    def __call__(self) -> str:
        """The next line, or several; EOFError for Ctrl-D, KeyboardInterrupt for Ctrl-C."""
        return self._session.prompt()


class _Words(Completer):
    """Completes the last word of a line."""

    def __init__(self, completions: Callable[[str], list[str]]) -> None:
        self._completions = completions

    @override
    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        last = text.rpartition(" ")[2]
        return [Completion(word, start_position=-len(last)) for word in self._completions(text)]


def _keys(is_open: Callable[[str], bool]) -> KeyBindings:
    """Enter submits the entry unless a multi-line message is open; Alt-Enter starts a new line."""
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
