"""Requests to Anthropic's Messages API: their bodies, and what they ask in the words of OpenAI's chats.

Fields that are not known here are left out, as the clients of this API expect.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from draftproof.server.errors import ApiError, quoted
from draftproof.server.parse_request import as_json, validated
from draftproof.server.schemas import Body, ChatBody, Effort, ShortText, Whole, nullable

_log = logging.getLogger(__name__)


class MessagesPart(Body):
    """A part of a request in Anthropic's form: other fields are left out."""

    model_config = ConfigDict(extra="ignore", json_schema_extra=nullable)


class TextBlock(MessagesPart):
    """A text."""

    type: Literal["text"]
    text: str


class UnreadBlock(MessagesPart):
    """What only other models read; it is refused."""

    type: Literal["image", "document", "search_result"]


class ToolUseBlock(MessagesPart):
    """A call in a message of the model."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Result = Annotated[TextBlock | UnreadBlock, Field(discriminator="type")]


class ToolResultBlock(MessagesPart):
    """The result of a call; one that is an error is a text, too."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[Result], Field(fail_fast=True, max_length=4096)] = ""


class ThinkingBlock(MessagesPart):
    """What the model reasoned before it wrote the message; its signature is not read."""

    type: Literal["thinking"]
    thinking: str


class RedactedBlock(MessagesPart):
    """Reasoning that only Anthropic can read; it is left out."""

    type: Literal["redacted_thinking"]


Block = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedBlock | UnreadBlock,
    Field(discriminator="type"),
]
_TYPES = {  # of blocks, by role
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}


class MessagesTurn(MessagesPart):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True, max_length=4096)]


class MessagesTool(MessagesPart):
    """A tool that the model may call; one of a type that Anthropic defines may come without a schema."""

    type: str = "custom"
    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_described(self) -> MessagesTool:
        if self.type == "custom" and self.input_schema is None:
            raise ValueError("input_schema is missing")
        return self


class MessagesToolChoice(MessagesPart):
    """Whether the model calls tools, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _has_its_name(self) -> MessagesToolChoice:
        if (self.name is None) == (self.type == "tool"):
            raise ValueError("name belongs to type tool, which needs it")
        return self


class ThinkingWithBudget(MessagesPart):
    """Reasoning with a limit."""

    type: Literal["enabled"]
    budget_tokens: Whole


class ThinkingMode(MessagesPart):
    """Reasoning as the model does it by itself, or none; a limit has no meaning here."""

    type: Literal["adaptive", "between_tools", "disabled"]


class OutputFormat(MessagesPart):
    """An answer that fits a JSON schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(MessagesPart):
    """How much the model reasons, and the form of its answer."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class CountBody(MessagesPart):
    """A request to /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[list[MessagesTurn], Field(fail_fast=True, min_length=1, max_length=4096)]
    system: str | Annotated[list[TextBlock], Field(fail_fast=True, max_length=4096)] | None = None
    tools: Annotated[list[MessagesTool] | None, Field(fail_fast=True, max_length=128)] = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Annotated[ThinkingWithBudget | ThinkingMode, Field(discriminator="type")] | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountBody):
    """A request to /v1/messages; the last three fields are this server's own."""

    max_tokens: Whole
    stream: bool = False
    stop_sequences: Annotated[list[ShortText] | None, Field(fail_fast=True, max_length=64)] = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    seed: Whole | None = None
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=512)] = None
    speculation: bool = True


_SAME = {"max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "cache_salt", "speculation"}


def chat_to_answer(body: MessagesBody) -> ChatBody:
    """The chat that a request asks to be answered."""
    if body.messages[-1].role == "assistant":
        raise ApiError(
            "messages: expected a message of the user at the end, got one of the assistant: an answer that has begun "
            "is not continued here",
            param="messages",
        )
    return validated(ChatBody, {**_chat(body), **body.model_dump(include=_SAME), "stop": body.stop_sequences})


def chat_to_count(body: CountBody) -> ChatBody:
    """The chat whose tokens are counted."""
    return validated(ChatBody, _chat(body))


def _chat(body: CountBody) -> dict[str, Any]:
    """Fields of a chat, as JSON has them."""
    system = body.system if isinstance(body.system, str) else _text(body.system or ())
    turns = [one for place, each in enumerate(body.messages) for one in _messages(each, f"messages.{place}.content")]
    config = body.output_config or OutputConfig()
    made: dict[str, Any] = {
        "model": body.model,
        "messages": [*([{"role": "system", "content": system}] if system else ()), *turns],
        "reasoning_effort": config.effort,
        **_tool_fields(body),
    }
    if isinstance(body.thinking, ThinkingWithBudget):
        made["thinking_token_budget"] = body.thinking.budget_tokens
    if body.thinking is not None and body.thinking.type in ("enabled", "disabled"):
        reasons = body.thinking.type == "enabled"
        made["chat_template_kwargs"] = {"enable_thinking": reasons, "thinking": reasons}
    if config.format is not None:
        form = {"name": "answer", "schema": config.format.schema_}
        made["response_format"] = {"type": "json_schema", "json_schema": form}
    return made


def _text(blocks: Sequence[MessagesPart]) -> str:
    """The texts among some blocks, a line each."""
    return "\n".join(each.text for each in blocks if isinstance(each, TextBlock))


def _messages(turn: MessagesTurn, where: str) -> Iterator[dict[str, Any]]:
    """The messages of a chat that one of Anthropic's becomes: results of calls are messages of their own."""
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    _refuse_others(turn.content, _TYPES[turn.role], where)
    results = [each for each in turn.content if isinstance(each, ToolResultBlock)]
    for each in results:
        content = each.content
        if not isinstance(content, str):
            _refuse_others(content, ("text",), where)
            content = _text(content)
        yield {"role": "tool", "tool_call_id": each.tool_use_id, "content": content}
    text = _text(turn.content)
    if text or not results:
        yield {"role": turn.role, "content": text, **_assistant_fields(turn.content)}


def _refuse_others(blocks: Sequence[Block], legal: Sequence[str], where: str) -> None:
    """Refuse blocks of other types: only text is read."""
    wrong = next((each for each in blocks if each.type not in legal), None)
    if wrong is not None:
        why = "only text is read here" if isinstance(wrong, UnreadBlock) else "it belongs to messages of another role"
        raise ApiError(f"{where}: expected blocks of type {', '.join(legal)}, got {wrong.type}: {why}", param=where)


def _assistant_fields(blocks: Sequence[MessagesPart]) -> dict[str, Any]:
    thoughts = [each.thinking for each in blocks if isinstance(each, ThinkingBlock)]
    calls = [
        {
            "id": each.id,
            "type": "function",
            "function": {"name": each.name, "arguments": as_json(each.input, "messages")},
        }
        for each in blocks
        if isinstance(each, ToolUseBlock)
    ]
    return {"reasoning_content": "\n".join(thoughts) if thoughts else None, "tool_calls": calls or None}


def _tool_fields(body: CountBody) -> dict[str, Any]:
    """Tools, and what is said of their choice; those without a schema are left out where the model may choose."""
    given, choice = body.tools or [], body.tool_choice or MessagesToolChoice(type="auto")
    left_out = [each for each in given if each.input_schema is None]
    tools = [
        {
            "type": "function",
            "function": {"name": each.name, "description": each.description, "parameters": each.input_schema},
        }
        for each in given
        if each.input_schema is not None
    ]
    if left_out:
        if choice.name in {each.name for each in left_out} or (choice.type == "any" and not tools):
            raise ApiError(
                f"tool_choice: expected a tool with an input_schema, got only one of type {quoted(left_out[0].type)}, "
                "which this server cannot describe to the model: give its schema and leave out its type",
                param="tool_choice",
            )
        _log.info("tools without a schema are left out: %s", ", ".join(quoted(each.type) for each in left_out))
    made: dict[str, Any] = {"tools": tools} if tools else {}
    if tools:
        made["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        made["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif tools or choice.type == "any":
        made["tool_choice"] = {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    return made
