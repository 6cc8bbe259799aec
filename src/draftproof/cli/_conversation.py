"""A conversation with a model: its messages, its sampling parameters, and answers that can be stopped. No terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from draftproof.cli._prompts import read_text
from draftproof.cli._sampling import merged_params
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
    """A line or more for the user, which is no part of an answer."""

    text: str


@dataclass(frozen=True)
class Answered:
    """The end of an answer, whether the user stopped it, and what the user should know about it."""

    request: Request
    stopped: bool
    note: str


Event = Notice | Chunk | Answered


class Conversation:
    """The messages so far, and what the next answer is sampled with.

    A message is kept when it has an answer: after an error, everything is as before. Messages are in OpenAI's form,
    each with a role and its content; the model's also with what it reasoned.
    """

    def __init__(self, engine: Engine, sampling: Mapping[str, Any], *, system: str | None = None) -> None:
        if not engine.prompts.has_template:
            raise UserError(
                f"{engine.target.name} has no chat template: name a file with one (--chat-template FILE), or continue "
                "a text with draftproof generate"
            )
        self.engine = engine
        self.messages: list[Message] = []
        self.sampling = dict(sampling)  # what the user has set, by name
        self.closed = False  # by the user
        self.params = self._merged(self.sampling)  # in effect: an answer is as long as the model makes it by default
        self._attempts = 0
        self._stopping = False
        self.set_system(system)

    # --- answers --------------------------------------------------------------------------------------------------

    def say(self, text: str) -> Iterator[Event]:
        """Answer a message; a UserError where the one before it has no answer, or this one cannot be answered."""
        if self.messages and self.messages[-1]["role"] == "user":
            raise UserError("the last message has no answer: /retry answers it, /undo removes it")
        self._attempts = 0
        yield from self._answer([*self.messages, {"role": "user", "content": text}], self.params)

    def retry(self) -> Iterator[Event]:
        """Answer the last message again, with another seed."""
        asked = self.messages[:-1] if self.messages and self.messages[-1]["role"] == "assistant" else self.messages
        if not asked or asked[-1]["role"] != "user":
            raise UserError("there is no message to answer again")
        params = self.params
        self._attempts += 1
        if params.seed is not None:
            params = replace(params, seed=fold(params.seed, self._attempts) >> 1)
        yield from self._answer(asked, params)

    def stop(self) -> None:
        """End the answer that is being made after the present round; may be called by a signal's handler."""
        self._stopping = True

    def _answer(self, asked: Sequence[Message], params: SamplingParams) -> Iterator[Event]:
        """Answer the last of some messages; with the answer they are the messages of the conversation."""
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
        yield Answered(request, stopped=not request.finished, note=self._end(request, text))

    def _end(self, request: Request, text: str) -> str:
        if not request.finished:
            return "stopped: what is shown is kept" if text else "stopped before the answer began: nothing is kept"
        if request.cutter.finish is not Finish.LENGTH:
            return ""
        if request.place == request.params.max_tokens:
            return f"cut off after {request.place} tokens, which is max_tokens"
        return f"cut off: the context is full with {len(request.tokens)} tokens; {_SHORTER}"

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
        """Begin anew; the system message stays."""
        self.messages = self.messages[: int(self.system is not None)]

    def undo(self) -> None:
        """Remove the last exchange: the last message of the user, and its answer."""
        places = [place for place, message in enumerate(self.messages) if message["role"] == "user"]
        if not places:
            raise UserError("there is nothing to undo")
        self.messages = self.messages[: places[-1]]

    def set(self, name: str, values: Mapping[str, Any]) -> None:
        """Set a sampling parameter to its value; without one it is the model's own."""
        changed = {each: value for each, value in self.sampling.items() if each != name} | dict(values)
        self.params = self._merged(changed)
        self.sampling = changed

    def _merged(self, sampling: Mapping[str, Any]) -> SamplingParams:
        """The parameters that the user has set, over the model's own."""
        try:
            return merged_params(sampling, replace(self.engine.default_params, max_tokens=None))
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
        """Go on with the messages of a file."""
        text = read_text(file)
        assert text is not None, "a file was named"
        found = json_value(text, str(file))
        if not isinstance(found, list):
            raise UserError(f"{file}: expected a list of messages, got {type(found).__name__}")
        messages = [_message(f"{file}, message {place}", each) for place, each in enumerate(found, 1)]
        if any(message["role"] == "system" for message in messages[1:]):
            raise UserError(f"{file}: expected no system message but the first message")
        self.messages = messages

    # --- what is left ---------------------------------------------------------------------------------------------

    def context(self) -> str:
        """The tokens of the messages, and how many are left for further ones and their answers."""
        talked = any(message["role"] == "user" for message in self.messages)
        used = len(self.engine.encode(self.messages)[1]) if talked else 0
        left = self.engine.context_left(used)
        if left + used >= UNBOUNDED:
            return f"{used} tokens in the context, which has no end"
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
            raise UserError(f"{where}: not valid Unicode: it holds lone surrogates") from None
    return {"role": found["role"], **texts}


def _short(value: Any) -> str:
    shown = printable(json.dumps(value))
    return shown if len(shown) <= 80 else shown[:77] + "..."
