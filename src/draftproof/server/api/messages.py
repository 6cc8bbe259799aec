"""Answers of Anthropic's Messages API: blocks of content, whole or as named events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import from_json
from typing_extensions import override

from draftproof.server.api.answer import Answer, AnswerDelta, Continuation, Endpoint, Form
from draftproof.server.api.messages_request import MessagesBody, chat_to_answer
from draftproof.server.api.openai import json_event
from draftproof.server.errors import ApiError, anthropic_body
from draftproof.server.worker import Piece

_SIGNATURE = "draftproof"  # of reasoning, which clients send back with it; nobody checks it


class AnswerText(BaseModel):
    """A text."""

    type: Literal["text"] = "text"
    text: str


class AnswerThinking(BaseModel):
    """What the model reasoned."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class AnswerToolUse(BaseModel):
    """A call of a tool."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class ThinkingTokens(BaseModel):
    """How many tokens were reasoning."""

    thinking_tokens: int


class MessagesUsage(BaseModel):
    """Counts of tokens; those of the prompt that were known from earlier requests are not among `input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | None


class MessagesAnswer(BaseModel):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerThinking | AnswerText | AnswerToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(BaseModel):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class MessagesErrorDetail(BaseModel):
    """What went wrong."""

    type: str
    message: str


class MessagesError(BaseModel):
    """The body of answers that are errors."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str


class MessagesForm(Form):
    """Answers of /v1/messages."""

    def __init__(self) -> None:
        self._begun = False
        self._blocks = 0  # that have begun
        self._open: str | int | None = None  # what is in the block that has not ended: a kind, or the number of a call

    @override
    def whole(self, answer: Answer) -> MessagesAnswer:
        each = answer.continuations[0]
        content: list[AnswerThinking | AnswerText | AnswerToolUse] = []
        if each.reasoning:
            content.append(AnswerThinking(thinking=each.reasoning, signature=_SIGNATURE))
        if each.text:
            content.append(AnswerText(text=each.text))
        content += [
            AnswerToolUse(id=str(call.id), name=str(call.name), input=_input(call.arguments)) for call in each.calls
        ]
        return _message(answer, content)

    @override
    def opening(self, answer: Answer) -> bytes:
        return b""  # the first piece says how much of the prompt was known, which the first event tells

    @override
    def piece(self, answer: Answer, piece: Piece, parts: AnswerDelta) -> bytes:
        return b"".join(self._events(answer, parts))

    @override
    def closing(self, answer: Answer) -> bytes:
        message = _message(answer, [])
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        usage = message.usage.model_dump(exclude_none=True)
        return b"".join([*self._close(), _event("message_delta", delta=delta, usage=usage), _event("message_stop")])

    @override
    def failure(self, answer: Answer, error: ApiError) -> bytes:
        return json_event(anthropic_body(error), "error")

    def _events(self, answer: Answer, parts: AnswerDelta) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            message = _message(answer, []).model_dump() | {"stop_reason": None, "stop_sequence": None}
            yield _event("message_start", message=message)
        if parts.reasoning:
            block: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}
            yield from self._add("thinking", block, {"type": "thinking_delta", "thinking": parts.reasoning})
        if parts.text:
            yield from self._add("text", {"type": "text", "text": ""}, {"type": "text_delta", "text": parts.text})
        for call in parts.calls:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": call.arguments}
            yield from self._add(call.place, block, delta)

    def _add(self, kind: str | int, block: dict[str, Any], delta: dict[str, Any]) -> Iterator[bytes]:
        """Add to the open block, or begin one where that is of another kind."""
        if kind != self._open:
            yield from self._close()
            self._open = kind
            self._blocks += 1
            yield _event("content_block_start", index=self._blocks - 1, content_block=block)
        yield _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open == "thinking":
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            yield _event("content_block_delta", index=self._blocks - 1, delta=delta)
        self._open = None
        yield _event("content_block_stop", index=self._blocks - 1)


def _event(name: str, **content: Any) -> bytes:
    return json_event({"type": name, **content}, name)


def _message(answer: Answer, content: list[AnswerThinking | AnswerText | AnswerToolUse]) -> MessagesAnswer:
    each, used = answer.continuations[0], answer.usage
    reasons = answer.parsed.reasoning is not None
    return MessagesAnswer(
        id=answer.id,
        model=answer.model,
        content=content,
        stop_reason=_stop_reason(answer, each) if each.finish_reason else None,
        stop_sequence=each.stop_reason if isinstance(each.stop_reason, str) else None,
        usage=MessagesUsage(
            input_tokens=used.prompt_tokens - answer.reused,
            cache_read_input_tokens=answer.reused,
            output_tokens=used.completion_tokens,
            output_tokens_details=ThinkingTokens(thinking_tokens=each.reasoning_tokens) if reasons else None,
        ),
    )


def _stop_reason(
    answer: Answer, each: Continuation
) -> Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]:
    if each.finish_reason == "length":
        most = answer.parsed.params.max_tokens
        full = most is not None and len(each.token_ids) < most
        return "model_context_window_exceeded" if full else "max_tokens"
    if isinstance(each.stop_reason, str):
        return "stop_sequence"
    return "tool_use" if each.calls else "end_turn"


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call; where the answer was cut off before or within them, as much as is there."""
    try:
        found: dict[str, Any] = from_json(arguments.strip() or "{", allow_partial=True)
    except ValueError:
        message = "the arguments of a call cannot be read: ask for a stream, which sends them as they are"
        raise ApiError(message, status=500) from None
    return found


MESSAGES = Endpoint(
    "/v1/messages",
    MessagesBody,
    "msg_",
    chat_to_answer,
    form=lambda _: MessagesForm(),
    lenient=True,
    names={
        "response_format": "output_config.format",
        "stop": "stop_sequences",
        "thinking_token_budget": "thinking.budget_tokens",
    },
)
