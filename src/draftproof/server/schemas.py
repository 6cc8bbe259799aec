"""Bodies of requests and answers: OpenAI's fields that are served, and vLLM's further ones. Any other field is refused.

Values are checked here for their types only; ranges are checked by SamplingParams, where they mean the same for Python
and the command line. A field with the value null counts as not given.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, PlainValidator, Tag, WrapValidator, model_validator
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

# The first wrong item ends a check: errors of a million items would be a long list, made in the event loop's thread.
_WORD = 1 << 63  # numbers of more bits are no setting of anything, and Python writes none of more than 4300 digits
Whole = Annotated[int, Field(ge=-_WORD, le=_WORD - 1)]
TokenIds = Annotated[list[Whole], Field(fail_fast=True, max_length=1_000_000)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ShortText = Annotated[str, Field(max_length=512)]
# What clients send and nobody reads: a body of 4 MB of it would take 100 MB, so that nothing of it is kept.
Unread = Annotated[Any, PlainValidator(lambda _: None, json_schema_input_type=Any)]


def nullable(schema: dict[str, Any]) -> None:
    """Say in a schema what `Body` does with nulls: fields with the value null count as not given."""
    properties = schema.get("properties", {})
    for name, found in properties.items():
        kinds = found.get("anyOf", [found])
        if name not in schema.get("required", ()) and {"type": "null"} not in kinds:
            kept = {key: found.pop(key) for key in ("title", "default", "description") if key in found}
            properties[name] = {"anyOf": [*kinds, {"type": "null"}], **kept}


def _closed(schema: dict[str, Any]) -> None:
    """Say in a schema that there are no other fields, but for nulls."""
    schema["additionalProperties"] = {"type": "null"}
    nullable(schema)


class Body(BaseModel):
    """A part of a request: its types are meant exactly, and other fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra=_closed)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        return (
            {key: value for key, value in values.items() if value is not None} if isinstance(values, dict) else values
        )


class StreamOptions(Body):
    """Options of a stream."""

    include_obfuscation: Unread = None
    include_usage: bool = False
    continuous_usage_stats: bool = False


class TextPart(Body):
    """A text among the parts of a message."""

    type: Literal["text"]
    text: str


TextParts = Annotated[list[TextPart], Field(fail_fast=True, max_length=4096)]


class Prediction(Body):
    """A text that much of the answer is expected to repeat."""

    type: Literal["content"]
    content: str | TextParts


class TextFormat(Body):
    """An answer without a form."""

    type: Literal["text"]


class ObjectFormat(Body):
    """An answer that is a JSON object."""

    type: Literal["json_object"]


class Schema(Body):
    """A JSON schema and its name, which changes nothing here."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(default={"type": "object"}, alias="schema")
    strict: bool = True


class SchemaFormat(Body):
    """An answer that fits a JSON schema; it always does, `strict` or not."""

    type: Literal["json_schema"]
    json_schema: Schema


class StructuredOutputs(Body):
    """vLLM's way to ask for a form: one of these."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: Annotated[list[str] | None, Field(fail_fast=True, min_length=1, max_length=1024)] = None
    grammar: str | None = None


class CalledFunction(Body):
    """What a message of the model called."""

    name: str
    arguments: str
    parsed_arguments: Unread = None  # the official client sends back what it has made of them; it is not read
    provider_specific_fields: Unread = None  # litellm's; not read


class ToolCall(Body):
    """One call in a message of the model."""

    provider_specific_fields: Unread = None  # litellm's; not read
    index: Unread = None  # of a stream's deltas, which the official client keeps in the message it puts together
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One message of a chat; the model's may hold its reasoning and calls, and those of role tool their results."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | TextParts | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of the same
    tool_calls: Annotated[list[ToolCall] | None, Field(fail_fast=True, max_length=128)] = None
    tool_call_id: str | None = None
    parsed: Unread = None  # as parsed_arguments
    annotations: Unread = None  # of answers with a search on the web
    refusal: Unread = None
    audio: Unread = None
    provider_specific_fields: Unread = None  # litellm's; not read

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        if self.role != "assistant" and (self.reasoning_content is not None or self.reasoning is not None):
            raise ValueError("reasoning_content belongs to messages of the assistant")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to messages of the assistant")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise ValueError("tool_call_id belongs to messages of role tool, which need it")
        if self.content is None and not self.tool_calls and self.thoughts is None:
            raise ValueError("content is missing")
        return self

    @property
    def thoughts(self) -> str | None:
        """What the model reasoned before it wrote the message."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content


FunctionName = Annotated[str, Field(pattern=r"^[\w.:/-]{1,128}$")]


class Function(Body):
    """A function that the model may call; its parameters are a JSON schema, and arguments always fit it."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] = Field(default={"type": "object", "properties": {}, "additionalProperties": False})
    strict: bool = True


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=128)]  # an empty list is as good as none


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The tool that the model has to call."""

    type: Literal["function"]
    function: NamedFunction


class CommonFields(Body):
    """What all requests for answers have in common: names and meanings of SamplingParams, and how it is answered."""

    model: str | None = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, Field(max_length=4096)] = None
    bad_words: Annotated[list[ShortText] | None, Field(fail_fast=True, max_length=1024)] = None
    stop: ShortText | Annotated[list[ShortText], Field(fail_fast=True, max_length=64)] | None = None
    stop_token_ids: Annotated[list[Whole] | None, Field(fail_fast=True, max_length=1024)] = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Whole | None = None
    seed: Whole | None = None
    skip_special_tokens: bool | None = None
    logprobs_mode: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    prediction: Prediction | None = None
    structured_outputs: StructuredOutputs | None = None
    return_tokens_as_token_ids: bool = False
    speculation: bool = True
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=512)] = None
    thinking_token_budget: Whole | None = None
    # Without effect on the text, in whatever form: who asks, how it is billed, what is stored elsewhere.
    user: Unread = None
    store: Unread = None
    metadata: Unread = None
    service_tier: Unread = None
    safety_identifier: Unread = None
    prompt_cache_key: Unread = None
    prompt_cache_retention: Unread = None
    prompt_cache_options: Unread = None


class SamplingFields(CommonFields):
    """What both kinds of completions have besides."""

    n: Whole | None = None
    max_tokens: Whole | None = None
    prompt_logprobs: Whole | None = None
    response_format: Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    return_token_ids: bool = False
    return_drafts: bool = False


def _kind_of_prompt(prompt: Any) -> str:
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if isinstance(first, list):
        return "lists of ids"
    if isinstance(first, int):
        return "list of ids"
    return "list of texts" if isinstance(prompt, list) else "one text"


class CompletionBody(SamplingFields):
    """A request to /v1/completions."""

    prompt: Annotated[
        Annotated[str, Tag("one text")]
        | Annotated[TokenIds, Tag("list of ids")]
        | Annotated[list[str], Field(fail_fast=True, max_length=1024), Tag("list of texts")]
        | Annotated[list[TokenIds], Field(fail_fast=True, max_length=1024), Tag("lists of ids")],
        Discriminator(_kind_of_prompt),
    ]
    logprobs: Whole | None = None
    echo: bool = False


class ChatBody(SamplingFields):
    """A request to /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=4096)]
    max_completion_tokens: Whole | None = None
    logprobs: bool = False
    top_logprobs: Whole | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Field(max_length=64)] = None
    verbosity: Unread = None  # a wish that no open model was trained for


class TokenizeBody(Body):
    """A request to /tokenize: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message] | None, Field(fail_fast=True, min_length=1, max_length=4096)] = None
    tools: Tools | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """A request to /detokenize."""

    model: str | None = None
    tokens: TokenIds


# --- answers ---------------------------------------------------------------------------------------------------------


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


class CompletionDetails(BaseModel):
    """How many tokens were reasoning, and how many of a prediction were used."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class PromptDetails(BaseModel):
    """How many tokens of the prompt were known from earlier requests."""

    cached_tokens: int


class Usage(BaseModel):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a completion's tokens; with `echo` the prompt's come first, the first without one."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(TypedDict):
    """The log-probability of a token at a place of the prompt, its rank there and its text; as in vLLM.

    A dictionary, as an answer may have a hundred thousand of them.
    """

    logprob: float
    rank: int
    decoded_token: str


# By token id, for each place; None for the first. Checking what the server made itself would hold up all its threads.
PromptLogprobs = Annotated[list[dict[str, PromptLogprob] | None], WrapValidator(lambda made, _: made)]


class CompletionChoice(BaseModel):
    """One continuation of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionAnswer(BaseModel):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(BaseModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobAnswer(TopLogprob):
    """An emitted token with the likeliest ones at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of the tokens of an answer."""

    content: list[TokenLogprobAnswer]


class AnswerFunction(BaseModel):
    """A function and the arguments that the model calls it with, as JSON."""

    name: str
    arguments: str


class AnswerCall(BaseModel):
    """A call that the model makes."""

    id: str
    type: Literal["function"] = "function"
    function: AnswerFunction


class AnswerMessage(BaseModel):
    """The message that the model wrote; without content where it only calls tools."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    refusal: None = None
    tool_calls: list[AnswerCall] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatAnswer(BaseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ModelCard(BaseModel):
    """A model that is served.

    `max_output_tokens`: the most that an answer has, whatever a request names; `reasoning`: whether what the model
    reasons is divided from its answer; `weight_bits`: of a weight on the mean, rounded down, where they are quantized;
    `same_bits`: whether its logits are the same bits in every batch and draft, by construction; `rounding`: why not.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "draftproof"
    max_model_len: int | None
    max_output_tokens: int
    reasoning: bool
    weight_bits: int | None
    same_bits: bool
    rounding: str


class ModelList(BaseModel):
    """The models that are served."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(BaseModel):
    """The answer of /tokenize."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(BaseModel):
    """The answer of /detokenize."""

    prompt: str
