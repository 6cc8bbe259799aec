"""Answers of /v1/responses: items, and the events of a stream, each with its name and a number.

Nothing is stored, so that an answer's id is good for nothing but logs.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import PydanticSerializationError
from typing_extensions import override

from draftproof.sampling import TokenLogprob
from draftproof.server.api import responses_schemas as schemas
from draftproof.server.api.answer import Answer, AnswerDelta, Endpoint, Form
from draftproof.server.api.chat import chat_logprobs
from draftproof.server.api.openai import json_event
from draftproof.server.api.responses_chat import FREE, chat_of, several
from draftproof.server.errors import ApiError
from draftproof.server.schemas import TokenLogprobAnswer
from draftproof.server.tools import CallPart
from draftproof.server.worker import Piece

_FREE = re.compile(rf'\s*{{\s*"{FREE}"\s*:\s*"')
_WHOLE = re.compile(r'(?:[^"\\]|\\u00[01][0-9a-fA-F]|\\[^u])*')  # letters of a JSON text as grammars make it, none cut
_Event = tuple[str, dict[str, Any]]  # its type without "response.", and what it says


class _Item(ABC):
    """One item of an answer, as far as it has come, with an id of its own: the kind's prefix, and a name."""

    prefix = ""

    def __init__(self, name: str, text: str = "") -> None:
        self.id = f"{self.prefix}_{name}"
        self.text = text

    @abstractmethod
    def shown(self, status: schemas.Status) -> schemas.OutputItem:
        """What it is; one in progress has no text yet."""

    def opening(self) -> Iterator[_Event]:
        """The events between its beginning and its first text."""
        yield from ()

    def read(self, text: str) -> str:
        """The text that a part of an answer adds."""
        return text

    @abstractmethod
    def more(self, text: str) -> _Event:
        """The event for more of its text."""

    @abstractmethod
    def closing(self) -> Iterator[_Event]:
        """The events between its last text and its end."""


class _Reasoning(_Item):
    prefix = "rs"

    @override
    def shown(self, status: schemas.Status) -> schemas.OutputReasoning:
        content = [] if status == "in_progress" else [schemas.OutputReasoningText(text=self.text)]
        return schemas.OutputReasoning(id=self.id, status=status, content=content)

    @override
    def more(self, text: str) -> _Event:
        return "reasoning_text.delta", {"content_index": 0, "delta": text}

    @override
    def closing(self) -> Iterator[_Event]:
        yield "reasoning_text.done", {"content_index": 0, "text": self.text}


class _Message(_Item):
    prefix = "msg"

    def __init__(self, name: str, text: str = "", logprobs: Sequence[TokenLogprobAnswer] = ()) -> None:
        super().__init__(name, text)
        self._logprobs = list(logprobs)

    @property
    def _part(self) -> schemas.OutputText:
        return schemas.OutputText(text=self.text, logprobs=self._logprobs)

    @override
    def shown(self, status: schemas.Status) -> schemas.OutputMessage:
        return schemas.OutputMessage(id=self.id, status=status, content=[] if status == "in_progress" else [self._part])

    @override
    def opening(self) -> Iterator[_Event]:
        yield "content_part.added", {"content_index": 0, "part": self._part.model_dump()}

    @override
    def more(self, text: str) -> _Event:
        return "output_text.delta", {"content_index": 0, "delta": text, "logprobs": []}

    @override
    def closing(self) -> Iterator[_Event]:
        yield "output_text.done", {"content_index": 0, "text": self.text, "logprobs": []}
        yield "content_part.done", {"content_index": 0, "part": self._part.model_dump()}


class _Call(_Item):
    prefix = "fc"

    def __init__(self, name: str, call: CallPart, namespace: str | None) -> None:
        super().__init__(name, self.read(call.arguments))
        self._called = {"call_id": str(call.id), "name": str(call.name), "namespace": namespace}

    @override
    def shown(self, status: schemas.Status) -> schemas.OutputCall | schemas.OutputCustomCall:
        text = "" if status == "in_progress" else self.text
        return schemas.OutputCall.model_validate({**self._called, "id": self.id, "arguments": text, "status": status})

    @override
    def more(self, text: str) -> _Event:
        return "function_call_arguments.delta", {"delta": text}

    @override
    def closing(self) -> Iterator[_Event]:
        yield "function_call_arguments.done", {"name": self._called["name"], "arguments": self.text}


class _CustomCall(_Call):
    """The call of a custom tool; its text comes as JSON, in an object."""

    prefix = "ctc"

    def __init__(self, name: str, call: CallPart, namespace: str | None) -> None:
        self._rest = ""
        self._begun = False
        super().__init__(name, call, namespace)

    @override
    def shown(self, status: schemas.Status) -> schemas.OutputCustomCall:
        text = "" if status == "in_progress" else self.text
        return schemas.OutputCustomCall.model_validate({**self._called, "id": self.id, "input": text, "status": status})

    @override
    def read(self, text: str) -> str:
        self._rest += text
        if not self._begun:
            found = _FREE.match(self._rest)
            if not found:
                return ""
            self._begun = True
            self._rest = self._rest[found.end() :]
        whole = _WHOLE.match(self._rest)
        assert whole is not None, "which may be empty"
        self._rest = self._rest[whole.end() :]  # of the object's end nothing is read
        made: str = json.loads(f'"{whole[0]}"', strict=False)
        return made

    @override
    def more(self, text: str) -> _Event:
        return "custom_tool_call_input.delta", {"delta": text}

    @override
    def closing(self) -> Iterator[_Event]:
        yield "custom_tool_call_input.done", {"input": self.text}


class ResponseForm(Form):
    """Answers of /v1/responses.

    The last item of an answer that `max_output_tokens` has ended is incomplete, too. A stream has log-probabilities in
    the events that add text; those that repeat the text would take too long to make with them. What answers repeat of
    the request's body is kept as JSON, which takes less than the prompt's token ids.
    """

    def __init__(self, body: schemas.ResponsesBody) -> None:
        self._repeated = _repeated(body)
        self._namespaces = {
            each.name: tool.name
            for tool in body.tools or ()
            if isinstance(tool, schemas.NamespaceTool)
            for each in tool.tools
            if isinstance(each, schemas.FunctionTool | schemas.CustomTool)
        }
        self._custom = {
            each.name for tool in body.tools or () for each in several(tool) if isinstance(each, schemas.CustomTool)
        }
        self._events_sent = 0
        self._done: list[schemas.OutputItem] = []
        self._open: _Item | None = None

    @override
    def whole(self, answer: Answer) -> schemas.ResponsesAnswer:
        items = list(self._items(answer))
        *first, last = items
        ended = [each.shown("completed") for each in first]
        return self._ended(answer, [*ended, last.shown(_status(answer))])

    def _items(self, answer: Answer) -> Iterator[_Item]:
        made = answer.continuations[0]
        place = 0
        if made.reasoning:
            yield _Reasoning(_name(answer, place), made.reasoning)
            place += 1
        if made.text or not (made.reasoning or made.calls):
            yield _Message(_name(answer, place), made.text, _logprobs(answer, made.logprobs))
            place += 1
        for number, call in enumerate(made.calls, place):
            yield self._call(answer, number, call)

    def _call(self, answer: Answer, place: int, call: CallPart) -> _Call:
        kind = _CustomCall if call.name in self._custom else _Call
        return kind(_name(answer, place), call, self._namespaces.get(str(call.name)))

    @override
    def opening(self, answer: Answer) -> bytes:
        begun = {"response": self._response(answer, "in_progress", []).model_dump()}
        return self._sent([("created", begun), ("in_progress", begun)])

    @override
    def piece(self, answer: Answer, piece: Piece, parts: AnswerDelta) -> bytes:
        events = list[_Event]()
        if parts.reasoning:
            events += self._more(answer, _Reasoning, parts.reasoning)
        found = _logprobs(answer, parts.logprobs)
        if parts.text or (found and answer.parsed.tools is None):
            events += self._more(answer, _Message, parts.text)
            events[-1][1]["logprobs"] = [each.model_dump() for each in found]
        for part in parts.calls:
            if part.name is not None:
                call = CallPart(part.place, part.id, part.name)
                events += self._begin(self._call(answer, self._next, call))
            if part.arguments:
                events += self._added(part.arguments)
        return self._sent(events)

    @override
    def closing(self, answer: Answer) -> bytes:
        events = list[_Event]()
        if not self._next:
            events += self._begin(_Message(_name(answer, 0)))
        events += self._end(_status(answer))
        response = self._ended(answer, self._done)
        events.append((response.status, {"response": response.model_dump()}))
        return self._sent(events)

    @override
    def failure(self, answer: Answer, error: ApiError) -> bytes:
        response = self._response(answer, "failed", self._done)
        code = error.code or ("server_error" if error.status >= 500 else "invalid_prompt")
        response.error = schemas.ResponseError(code=code, message=error.message)
        return self._sent([("failed", {"response": response.model_dump()})])

    # --- items of a stream ----------------------------------------------------------------------------------------

    @property
    def _next(self) -> int:
        return len(self._done) + (self._open is not None)

    def _begin(self, item: _Item) -> Iterator[_Event]:
        """End the item that is open, if there is one, and begin another."""
        yield from self._end("completed")
        self._open = item
        yield "output_item.added", {"output_index": len(self._done), "item": item.shown("in_progress").model_dump()}
        for kind, facts in item.opening():
            yield self._of_item(kind, facts)

    def _more(self, answer: Answer, kind: type[_Item], text: str) -> Iterator[_Event]:
        """Add text to an item of a kind, which begins where none is open."""
        if not isinstance(self._open, kind):
            yield from self._begin(kind(_name(answer, self._next)))
        yield from self._added(text)

    def _added(self, given: str) -> Iterator[_Event]:
        """Add a part of an answer to the item that is open."""
        assert self._open is not None, "begun before"
        text = self._open.read(given)
        self._open.text += text
        if text or not given:
            yield self._of_item(*self._open.more(text))

    def _end(self, status: schemas.Status) -> Iterator[_Event]:
        item = self._open
        if item is None:
            return
        for kind, facts in item.closing():
            yield self._of_item(kind, facts)
        made = item.shown(status)
        yield "output_item.done", {"output_index": len(self._done), "item": made.model_dump()}
        self._done.append(made)
        self._open = None

    def _of_item(self, kind: str, facts: dict[str, Any]) -> _Event:
        """An event that concerns the item that is open."""
        assert self._open is not None, "begun before"
        return kind, {"item_id": self._open.id, "output_index": len(self._done), **facts}

    def _sent(self, events: Sequence[_Event]) -> bytes:
        made = []
        for kind, facts in events:
            name = f"response.{kind}"
            made.append(json_event({"type": name, "sequence_number": self._events_sent, **facts}, name))
            self._events_sent += 1
        return b"".join(made)

    # --- the answer around them -----------------------------------------------------------------------------------

    def _response(
        self, answer: Answer, status: schemas.ResponseStatus, items: Sequence[schemas.OutputItem]
    ) -> schemas.ResponsesAnswer:
        params = answer.parsed.params
        return schemas.ResponsesAnswer(
            id=answer.id,
            created_at=answer.created,
            status=status,
            model=answer.model,
            output=list(items),
            max_output_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_logprobs=params.logprobs or 0,
            **json.loads(self._repeated),
        )

    def _ended(self, answer: Answer, items: Sequence[schemas.OutputItem]) -> schemas.ResponsesAnswer:
        """An answer that has come to its end."""
        status = _status(answer)
        response = self._response(answer, status, items)
        if status == "incomplete":
            response.incomplete_details = schemas.IncompleteDetails(reason="max_output_tokens")
        used = answer.usage
        response.usage = schemas.ResponsesUsage(
            input_tokens=used.prompt_tokens,
            input_tokens_details=schemas.InputDetails(cached_tokens=answer.reused),
            output_tokens=used.completion_tokens,
            output_tokens_details=schemas.OutputDetails(reasoning_tokens=answer.continuations[0].reasoning_tokens),
            total_tokens=used.total_tokens,
        )
        return response


def _name(answer: Answer, place: int) -> str:
    return f"{answer.id.removeprefix(RESPONSES.prefix)}_{place}"


def _status(answer: Answer) -> schemas.Status:
    return "incomplete" if answer.continuations[0].finish_reason == "length" else "completed"


def _logprobs(answer: Answer, found: Sequence[TokenLogprob]) -> list[TokenLogprobAnswer]:
    made = chat_logprobs(answer, found)
    return [] if made is None else made.content


def _repeated(body: schemas.ResponsesBody) -> str:
    """What an answer repeats of its request, as JSON; ApiError where a tool or a schema cannot be written."""
    reasoning, text = body.reasoning or schemas.ReasoningOptions(), body.text or schemas.TextOptions()
    choice = body.tool_choice or "auto"
    made = schemas.Repeated(
        instructions=body.instructions,
        tools=_repeated_tools(body.tools or ()),
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
        parallel_tool_calls=body.parallel_tool_calls,
        text={"format": {"type": "text"} if text.format is None else text.format.model_dump(by_alias=True)},
        reasoning={"effort": reasoning.effort, "summary": None},
        metadata=body.metadata,
    )
    try:
        return made.model_dump_json()
    except (PydanticSerializationError, ValueError):  # as JSON was read; it may be nested more than can be written
        raise ApiError("tools or text.format: expected at most 200 levels of valid text, got others") from None


_SHOWN = {"type", "name", "description", "parameters", "strict", "format"}


def _repeated_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Those that the model was shown."""
    made = []
    for each in tools:
        if isinstance(each, schemas.FunctionTool | schemas.CustomTool | schemas.NamespaceTool):
            inner = {"tools": _repeated_tools(each.tools)} if isinstance(each, schemas.NamespaceTool) else {}
            made.append({**each.model_dump(include=_SHOWN), **inner})
    return made


RESPONSES = Endpoint(
    "/v1/responses",
    schemas.ResponsesBody,
    "resp_",
    chat_of,
    ResponseForm,
    names={"max_completion_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"},
)
