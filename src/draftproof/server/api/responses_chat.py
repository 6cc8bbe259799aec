"""From requests to /v1/responses to chats: what the model is shown is the same as for /v1/chat/completions."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Sequence
from typing import Any

from draftproof.server.api import responses_schemas as schemas
from draftproof.server.errors import ApiError, quoted
from draftproof.server.parse_request import validated
from draftproof.server.schemas import (
    CalledFunction,
    ChatBody,
    CommonFields,
    Function,
    Message,
    SchemaFormat,
    TextPart,
    Tool,
    ToolCall,
)

FREE = "input"  # name of the argument that holds the text of a custom tool
_log = logging.getLogger(__name__)


class FreeFunction(Function):
    """A function whose one argument is a text that fits a grammar; only custom tools become one."""

    lark: str


def chat_of(body: schemas.ResponsesBody) -> ChatBody:
    """What a request asks, as a chat; ApiError for a field that cannot be met."""
    given: dict[str, Any] = {
        name: getattr(body, name) for name in CommonFields.model_fields if name in body.model_fields_set
    }
    given |= {
        "messages": _messages(body),
        "max_completion_tokens": body.max_output_tokens,
        "chat_template_kwargs": body.chat_template_kwargs,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "response_format": _response_format(body),
        **_tools(body),
    }
    if schemas.LOGPROBS in body.include or body.top_logprobs:
        given |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return validated(ChatBody, given)


# --- messages --------------------------------------------------------------------------------------------------------


def _messages(body: schemas.ResponsesBody) -> list[Message]:
    """The messages of a chat.

    Instructions, and the system messages that follow them, are one system message: many templates take no second one.
    What the model wrote between two other items, its reasoning, texts and calls, is one message of it.
    """
    items: list[schemas.Item] = (
        [schemas.MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    )
    first = list(itertools.takewhile(_is_system, items))
    made = []
    texts = [*([] if body.instructions is None else [body.instructions]), *_texts_of(first)]
    if texts:
        made.append(Message(role="system", content=_content(texts)))
    for own, found in itertools.groupby(items[len(first) :], _is_of_model):
        several = list(found)
        made += [_of_model(several)] if own else map(_of_others, several)
    return made


def _is_system(item: schemas.Item) -> bool:
    return isinstance(item, schemas.MessageItem) and item.role in ("system", "developer")


def _is_of_model(item: schemas.Item) -> bool:
    if isinstance(item, schemas.MessageItem):
        return item.role == "assistant"
    return isinstance(item, schemas.CallItem | schemas.ReasoningItem)


def _of_others(item: schemas.Item) -> Message:
    """The message for an item that the model did not write."""
    if isinstance(item, schemas.CallOutputItem):
        return Message(role="tool", tool_call_id=item.call_id, content=_content(_texts(item.output)))
    assert isinstance(item, schemas.MessageItem), "the model wrote all others"
    return Message(role=item.role, content=_content(_texts(item.content)))


def _of_model(items: Sequence[schemas.Item]) -> Message:
    """The one message for items of the model."""
    thoughts = [
        part.text for each in items if isinstance(each, schemas.ReasoningItem) for part in each.content or each.summary
    ]
    calls = [
        ToolCall(id=each.call_id, function=CalledFunction(name=each.name, arguments=_arguments(each)))
        for each in items
        if isinstance(each, schemas.CallItem)
    ]
    return Message(
        role="assistant",
        reasoning_content="\n".join(thoughts) if thoughts else None,
        content=_content(_texts_of(items)),
        tool_calls=calls or None,
    )


def _arguments(call: schemas.FunctionCallItem | schemas.CustomCallItem) -> str:
    return call.arguments if isinstance(call, schemas.FunctionCallItem) else json.dumps({FREE: call.input})


def _texts_of(items: Sequence[schemas.Item]) -> list[str]:
    return [text for each in items if isinstance(each, schemas.MessageItem) for text in _texts(each.content)]


def _texts(content: str | Sequence[schemas.ContentPart]) -> list[str]:
    return [content] if isinstance(content, str) else [part.text for part in content]


def _content(texts: Sequence[str]) -> str | list[TextPart]:
    return "".join(texts) if len(texts) < 2 else [TextPart(type="text", text=text) for text in texts]


# --- form and tools --------------------------------------------------------------------------------------------------


def _response_format(body: schemas.ResponsesBody) -> Any:
    found = None if body.text is None else body.text.format
    return SchemaFormat(type="json_schema", json_schema=found) if isinstance(found, schemas.FlatSchemaFormat) else found


def _tools(body: schemas.ResponsesBody) -> dict[str, Any]:
    """The fields of a chat that concern tools; ApiError for a choice among tools that are not there."""
    choice: Any = body.tool_choice
    functions = functions_of(body)
    names = {each.name for each in functions}
    if isinstance(choice, schemas.AllowedTools):
        wanted = {str(each.get("name")) for each in choice.tools if each.get("type") in ("function", "custom")}
        if (choice.mode == "required" and not wanted) or not wanted <= names:
            raise ApiError("tool_choice names a function that is not among the tools", param="tool_choice")
        functions = [each for each in functions if each.name in wanted]
        choice = choice.mode
    if isinstance(choice, schemas.NamedFunctionTool):
        choice = {"type": "function", "function": {"name": choice.name}}
    _log_others(body)
    if not functions:
        if choice not in (None, "none", "auto"):
            raise ApiError("tool_choice needs tools of type function or custom", param="tool_choice")
        return {}
    tools = [Tool(type="function", function=each) for each in functions]
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": body.parallel_tool_calls}


def functions_of(body: schemas.ResponsesBody) -> list[Function]:
    """The functions among the tools of a request; custom tools are functions of one text."""
    tools = [each for tool in body.tools or () for each in several(tool)]
    return [
        each if isinstance(each, schemas.FunctionTool) else _function(each)
        for each in tools
        if isinstance(each, schemas.FunctionTool | schemas.CustomTool)
    ]


def _function(tool: schemas.CustomTool) -> Function:
    """The function of one text that a custom tool is."""
    text: dict[str, Any] = {"type": "string"}
    form = tool.format
    if isinstance(form, schemas.CustomGrammar):
        text["description"] = f"A text that fits this {form.syntax}:\n{form.definition}"
        if form.syntax == "regex":
            text["pattern"] = f"^(?:{form.definition})$"
    parameters = {"type": "object", "properties": {FREE: text}, "required": [FREE], "additionalProperties": False}
    fields: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": parameters}
    if isinstance(form, schemas.CustomGrammar) and form.syntax == "lark":
        return FreeFunction(lark=form.definition, **fields)
    return Function(**fields)


def several(tool: Any) -> list[Any]:
    """A tool alone, or those of a namespace."""
    return tool.tools if isinstance(tool, schemas.NamespaceTool) else [tool]


def _log_others(body: schemas.ResponsesBody) -> None:
    """Say which tools the model is not shown."""
    kinds = {each.type for tool in body.tools or () for each in several(tool) if isinstance(each, schemas.OtherTool)}
    if kinds:
        _log.info("the model is not shown tools of type %s", quoted(", ".join(sorted(kinds))))
