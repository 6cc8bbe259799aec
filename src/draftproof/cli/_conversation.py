"""A conversation with a model, independent of the terminal: messages, sampling parameters, interruptible answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from draftproof.cli._prompts import read_text
from draftproof.cli._sampling import CHAT_TOKENS, merged_params
from draftproof.engine.engine import Engine
from draftproof.engine.intake import UNBOUNDED
from draftproof.engine.request import Chunk, Request
from draftproof.engine.threads import release_team
from draftproof.errors import ContextError, UserError, printable
from draftproof.files import json_value, whole_file
from draftproof.finish import Finish
from draftproof.rng import fold
from draftproof.sampling import SamplingParams

ROLES = ("system", "user", "assistant")
_SHORTER = "/undo removes the last exchange, /clear all of them"

Message = dict[str, str]


@dataclass(frozen=True)
class Notice:
    """Text for the user that is not part of an answer."""

    text: str


@dataclass(frozen=True)
class AnswerEnd:
    """The end of an answer: whether the user stopped it, and a note for the user."""

    request: Request
    stopped: bool
    note: str


Event = Notice | Chunk | AnswerEnd


class Conversation:
    """The messages so far, and the sampling parameters of the next answer.

    A message is kept when it is answered; after an error, everything is as before. Messages are in OpenAI's form, with
    a role and content; the model's messages may also have reasoning.
    """

    def __init__(self, engine: Engine, sampling: Mapping[str, Any], *, system: str | None = None) -> None:
        if not engine.prompts.has_template:
            raise UserError(
                f"{engine.target.name} has no chat template: name a file with one (--chat-template FILE), or use "
                "draftproof generate to continue a text"
            )
        self.engine = engine
        self.messages: list[Message] = []
        self.sampling = dict(sampling)  # parameters set by the user
        self.closed = False  # whether the user has left
        self.params = self._merged(self.sampling)  # in effect
        self._attempts = 0
        self._stopping = False
        self.set_system(system)

    # --- answers --------------------------------------------------------------------------------------------------

    def say(self, text: str) -> Iterator[Event]:
        """Answer a message; raises UserError if the last message is unanswered, or this one cannot be answered."""
        if self.messages and self.messages[-1]["role"] == "user":
            raise UserError("the last message has no answer: /retry answers it, /undo removes it")
        self._attempts = 0
        yield from self._answer([*self.messages, {"role": "user", "content": text}], self.params)

    def retry(self) -> Iterator[Event]:
        """Answer the last message again, with another seed."""
        asked = self.messages[:-1] if self.messages and self.messages[-1]["role"] == "assistant" else self.messages
        if not asked or asked[-1]["role"] != "user":
            raise UserError("there is no message to answer again: enter one first")
        params = self.params
        self._attempts += 1
        if params.seed is not None:
            params = replace(params, seed=fold(params.seed, self._attempts) >> 1)
        yield from self._answer(asked, params)

    def stop(self) -> None:
        """Stop the current answer after the current round; may be called from a signal handler."""
        self._stopping = True

    def _answer(self, asked: Sequence[Message], params: SamplingParams) -> Iterator[Event]:
        """Answer the last of these messages; with the answer they become the conversation."""
        try:
            (request,) = self.engine.add(asked, params)
        except ContextError as error:
            raise UserError(f"{error}; {_SHORTER}") from error
        self._stopping = False
        text = reasoning = ""
        try:
            while not (request.finished or self._stopping):
                self.engine.step()
                while request.chunks:
                    chunk = request.chunks.popleft()
                    text += chunk.text
                    reasoning += chunk.reasoning
                    yield chunk
        finally:
            self.engine.abort(request)
            release_team()
        if request.error is not None:
            raise request.error
        if text or request.finished:
            thoughts = {"reasoning_content": reasoning} if reasoning else {}
            self.messages = [*asked, {"role": "assistant", "content": text, **thoughts}]
        yield AnswerEnd(request, stopped=not request.finished, note=self._end(request, text))

    def _end(self, request: Request, text: str) -> str:
        if not request.finished:
            return "stopped: the text so far is kept" if text else "stopped before the answer began: nothing is kept"
        if request.cutter.finish is not Finish.LENGTH:
            return ""
        if request.place == request.params.max_tokens:
            return f"cut off after {request.place} tokens (max_tokens)"
        return f"cut off: the context is full ({len(request.tokens)} tokens); {_SHORTER}"

    # --- changes --------------------------------------------------------------------------------------------------

    @property
    def system(self) -> str | None:
        """The system message."""
        first = self.messages[:1]
        return first[0]["content"] if first and first[0]["role"] == "system" else None

    def set_system(self, text: str | None) -> None:
        """Change the system message, or remove it with None."""
        rest = self.messages if self.system is None else self.messages[1:]
        self.messages = [*([] if text is None else [{"role": "system", "content": text}]), *rest]

    def clear(self) -> None:
        """Start a new conversation; the system message stays."""
        self.messages = self.messages[: int(self.system is not None)]

    def undo(self) -> None:
        """Remove the last exchange: the user's last message and its answer."""
        places = [place for place, message in enumerate(self.messages) if message["role"] == "user"]
        if not places:
            raise UserError("there is nothing to undo: the conversation has no messages")
        self.messages = self.messages[: places[-1]]

    def set(self, name: str, values: Mapping[str, Any]) -> None:
        """Set a sampling parameter; with no values, reset it to the model's default."""
        changed = {each: value for each, value in self.sampling.items() if each != name} | dict(values)
        self.params = self._merged(changed)
        self.sampling = changed

    def _merged(self, sampling: Mapping[str, Any]) -> SamplingParams:
        """The model's default parameters, overridden by the user's."""
        try:
            return merged_params(sampling, replace(self.engine.default_params, max_tokens=CHAT_TOKENS))
        except typer.BadParameter as error:
            raise UserError(error.message) from error

    # --- files ----------------------------------------------------------------------------------------------------

    def save(self, file: Path) -> None:
        """Write the messages as a JSON list, in OpenAI's form."""
        try:
            with whole_file(file) as work:
                work.write_text(json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {file}: {error.strerror or error}") from error

    def load(self, file: Path) -> None:
        """Continue with the messages of a file."""
        text = read_text(file)
        assert text is not None, "a file was named"
        found = json_value(text, str(file))
        if not isinstance(found, list):
            raise UserError(f"{file}: expected a list of messages, got {type(found).__name__}")
        messages = [_message(f"{file}, message {place}", each) for place, each in enumerate(found, 1)]
        if any(message["role"] == "system" for message in messages[1:]):
            raise UserError(f"{file}: expected a system message only as the first message")
        self.messages = messages

    # --- the context ----------------------------------------------------------------------------------------------

    def context(self) -> str:
        """The number of tokens of the messages, and how many are left for further messages and answers."""
        started = any(message["role"] == "user" for message in self.messages)
        used = len(self.engine.encode(self.messages)[1]) if started else 0
        left = self.engine.context_left(used)
        if left + used >= UNBOUNDED:
            return f"{used} tokens in the context, which is unlimited"
        return f"{used} tokens in the context, {max(left, 0)} left"


def _message(where: str, found: Any) -> Message:
    if not isinstance(found, dict) or found.get("role") not in ROLES:
        shown = found.get("role") if isinstance(found, dict) else found
        raise UserError(f"{where}: expected an object with a role ({', '.join(ROLES)}), got {_short(shown)}")
    thoughts = {"reasoning_content": found["reasoning_content"]} if found.get("reasoning_content") else {}
    texts = {"content": found.get("content"), **thoughts}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise UserError(f"{where}: expected a text in {name}, got {_short(text)}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{where}: expected valid Unicode, got lone surrogates in {name}") from None
    return {"role": found["role"], **texts}


def _short(value: Any) -> str:
    shown = printable(json.dumps(value))
    return shown if len(shown) <= 80 else shown[:77] + "..."
