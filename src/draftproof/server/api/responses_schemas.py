"""Bodies of requests and answers of /v1/responses: OpenAI's fields, and the further ones that chats have too.

Other fields are refused, as those of chats are. What this server has no use for is taken and not read, as long as the
answer would be the same with it: ids of items, what is stored, how tools may be called elsewhere.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, LiteralString

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, PlainValidator, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from draftproof.server.schemas import (
    Body,
    CommonFields,
    Effort,
    Function,
    FunctionName,
    ObjectFormat,
    Schema,
    ShortText,
    TextFormat,
    TokenLogprobAnswer,
    Unread,
    Whole,
)

LOGPROBS = "message.output_text.logprobs"  # among what is to be included
_NAMED = "expected"  # type of the errors below, whose messages are complete


def _field_of(given: Any, name: str) -> str | None:
    """A text in an object that has not been checked yet; None where there is none."""
    value = given.get(name) if isinstance(given, dict) else None
    return value if isinstance(value, str) else None


# --- what the model is sent ------------------------------------------------------------------------------------------

_TEXTS = ("input_text", "output_text", "text")


def _text_only(kind: Any) -> Any:
    if kind not in _TEXTS:
        raise PydanticCustomError(_NAMED, "expected input_text or output_text: this server reads text only")
    return kind


class ContentPart(Body):
    """A text among the parts of an item."""

    type: Annotated[Literal["input_text", "output_text", "text"], BeforeValidator(_text_only)]
    text: str
    annotations: Unread = None
    logprobs: Unread = None
    prompt_cache_breakpoint: Unread = None


ContentParts = Annotated[list[ContentPart], Field(fail_fast=True, max_length=4096)]


class InputItem(Body):
    """What all items have in common."""

    id: Unread = None
    status: Unread = None


class MessageItem(InputItem):
    """A message of a chat; its type may be left out."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | ContentParts
    phase: Unread = None


class CallItem(InputItem):
    """What calls that the model has made have in common."""

    call_id: str
    name: str
    namespace: Unread = None
    caller: Unread = None
    async_: Unread = Field(default=None, alias="async")


class FunctionCallItem(CallItem):
    """A call that the model has made; its arguments are JSON."""

    type: Literal["function_call"]
    arguments: str
    parsed_arguments: Unread = None  # the official client sends back what it has made of them


class CustomCallItem(CallItem):
    """A call of a custom tool that the model has made; its input is a text."""

    type: Literal["custom_tool_call"]
    input: str


class CallOutputItem(InputItem):
    """What a call of a function or of a custom tool has returned."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    name: Unread = None
    output: str | ContentParts
    caller: Unread = None


class ReasoningText(Body):
    """A text of a model's reasoning, or a summary of it."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


ReasoningTexts = Annotated[list[ReasoningText], Field(fail_fast=True, max_length=4096)]


class ReasoningItem(InputItem):
    """What the model reasoned before the items of its answer that follow."""

    type: Literal["reasoning"]
    summary: ReasoningTexts = Field(default=[])
    content: ReasoningTexts = Field(default=[])
    encrypted_content: Unread = None


_ITEMS = {
    "message": "a message",
    "function_call": "a call",
    "function_call_output": "an output",
    "custom_tool_call": "a call with a text",
    "custom_tool_call_output": "an output",
    "reasoning": "thoughts",
}


def _kind_of_item(item: Any) -> str | None:
    if isinstance(item, dict) and item.get("type") is None and "role" in item:
        return _ITEMS["message"]
    return _ITEMS.get(_field_of(item, "type") or "")


Item = Annotated[
    Annotated[MessageItem, Tag(_ITEMS["message"])]
    | Annotated[FunctionCallItem, Tag(_ITEMS["function_call"])]
    | Annotated[CustomCallItem, Tag(_ITEMS["custom_tool_call"])]
    | Annotated[CallOutputItem, Tag(_ITEMS["function_call_output"])]
    | Annotated[ReasoningItem, Tag(_ITEMS["reasoning"])],
    Discriminator(
        _kind_of_item,
        custom_error_type=_NAMED,
        custom_error_message=f"expected an item of type {', '.join(_ITEMS)}: this server stores nothing, so send items "
        "themselves in place of an item_reference (clients do with store false)",
    ),
]


# --- tools -----------------------------------------------------------------------------------------------------------


class OfferedTool(Body):
    """What tools may say that has no meaning here."""

    allowed_callers: Unread = None
    async_: Unread = Field(default=None, alias="async")
    defer_loading: Unread = None


class FunctionTool(Function, OfferedTool):
    """A function that the model may call."""

    type: Literal["function"]
    output_schema: Unread = None


class CustomGrammar(Body):
    """The grammar of a custom tool's input."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(OfferedTool):
    """A tool that the model calls with a text."""

    type: Literal["custom"]
    name: FunctionName
    description: str | None = None
    format: Annotated[TextFormat | CustomGrammar, Field(discriminator="type")] = TextFormat(type="text")


class OtherTool(BaseModel):
    """A tool that is not run or not called here; nothing but its type is kept."""

    type: str


def _kind_of_tool(tool: Any) -> str | None:
    kinds = {"function": "a function", "custom": "a custom tool", "namespace": "several functions", None: None}
    return kinds.get(_field_of(tool, "type"), "another tool")


_OTHER = {"type": "string", "not": {"enum": ["function", "custom", "namespace"]}}
_Called = Annotated[FunctionTool, Tag("a function")] | Annotated[CustomTool, Tag("a custom tool")]
_Other = Annotated[
    Any,
    PlainValidator(lambda tool: OtherTool(type=tool["type"][:100])),
    WithJsonSchema({"type": "object", "properties": {"type": _OTHER}, "required": ["type"]}),
    Tag("another tool"),
]
_TOOL = Discriminator(_kind_of_tool, custom_error_type=_NAMED, custom_error_message="expected an object with a type")


class NamespaceTool(Body):
    """Several functions under a name, which their calls show besides."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Annotated[list[Annotated[_Called | _Other, _TOOL]], Field(fail_fast=True, max_length=128)]


AnyTool = Annotated[_Called | Annotated[NamespaceTool, Tag("several functions")] | _Other, _TOOL]


class NamedFunctionTool(Body):
    """The function or custom tool that the model has to call."""

    type: Literal["function", "custom"]
    name: str


class AllowedTools(Body):
    """The tools that the model may or must call, some of those that are given."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1, max_length=128)]


def _kind_of_choice(choice: Any) -> str | None:
    if isinstance(choice, str):
        return "a word"
    return {"function": "a function", "custom": "a function", "allowed_tools": "some tools"}.get(
        _field_of(choice, "type") or ""
    )


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a word")]
    | Annotated[NamedFunctionTool, Tag("a function")]
    | Annotated[AllowedTools, Tag("some tools")],
    Discriminator(
        _kind_of_choice,
        custom_error_type=_NAMED,
        custom_error_message="expected none, auto, required, or an object of type function, custom or allowed_tools: "
        "other tools cannot be called here",
    ),
]


# --- the request -----------------------------------------------------------------------------------------------------


class FlatSchemaFormat(Schema):
    """An answer that fits a JSON schema."""

    type: Literal["json_schema"]


class TextOptions(Body):
    """The form of the answer."""

    format: Annotated[TextFormat | ObjectFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Unread = None  # a wish that no open model was trained for


class ReasoningOptions(Body):
    """How the model reasons."""

    effort: Effort | None = None
    context: Unread = None
    generate_summary: Unread = None
    mode: Unread = None
    summary: Unread = None


def _refused(why: LiteralString) -> BeforeValidator:
    """Refuses a field that asks for something."""

    def refuse(given: Any) -> Any:
        if given is None or given is False:
            return given
        raise PydanticCustomError(_NAMED, why)

    return BeforeValidator(refuse)


_STATELESS = "this server stores no answers: send all earlier items as input"


class ResponsesBody(CommonFields):
    """A request to /v1/responses."""

    input: str | Annotated[list[Item], Field(fail_fast=True, min_length=1, max_length=4096)]
    instructions: str | None = None
    tools: Annotated[list[AnyTool] | None, Field(fail_fast=True, max_length=128)] = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: Whole | None = None
    top_logprobs: Whole | None = None
    include: Annotated[list[ShortText], Field(fail_fast=True, max_length=64)] = Field(default=[])
    metadata: Annotated[dict[ShortText, ShortText], Field(max_length=16)] = Field(default={})
    truncation: Literal["auto", "disabled"] = "disabled"  # an input that is too long is an error with both
    chat_template_kwargs: Annotated[dict[str, Any] | None, Field(max_length=64)] = None
    client_metadata: Unread = None
    max_tool_calls: Unread = None  # of tools that OpenAI runs
    background: Annotated[Literal[False], _refused("this server stores no answers: leave it out")] = False
    conversation: Annotated[None, _refused(_STATELESS)] = None
    previous_response_id: Annotated[None, _refused(_STATELESS)] = None
    prompt: Annotated[None, _refused("this server stores no prompts: send input and instructions")] = None


# --- answers ---------------------------------------------------------------------------------------------------------

Status = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Status | Literal["failed"]


class OutputText(BaseModel):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprobAnswer] = []


class OutputMessage(BaseModel):
    """A message that the model wrote."""

    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class OutputCall(BaseModel):
    """A call that the model makes."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    status: Status


class OutputCustomCall(BaseModel):
    """A call of a custom tool that the model makes."""

    type: Literal["custom_tool_call"] = "custom_tool_call"
    id: str
    call_id: str
    name: str
    namespace: str | None = None
    input: str
    status: Status


class OutputReasoningText(BaseModel):
    """A text of the model's reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(BaseModel):
    """What the model reasoned."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    status: Status
    summary: list[Any] = []
    content: list[OutputReasoningText]


OutputItem = OutputReasoning | OutputMessage | OutputCall | OutputCustomCall


class InputDetails(BaseModel):
    """How many tokens of the prompt were known from earlier requests."""

    cached_tokens: int


class OutputDetails(BaseModel):
    """How many tokens were reasoning."""

    reasoning_tokens: int


class ResponsesUsage(BaseModel):
    """Counts of tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    """Why an answer is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseError(BaseModel):
    """Why there is no answer."""

    code: str
    message: str


class Repeated(BaseModel):
    """What an answer repeats of its request, as it took effect: `tools` are those that the model was shown."""

    instructions: str | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    metadata: dict[str, str]


class ResponsesAnswer(Repeated):
    """The answer of /v1/responses."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    model: str
    output: list[OutputItem]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponsesUsage | None = None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    truncation: Literal["disabled"] = "disabled"
    service_tier: Literal["default"] = "default"
    background: Literal[False] = False
    store: Literal[False] = False
    previous_response_id: None = None
