"""Parsing of request bodies into the engine's input: token ids and SamplingParams."""

from __future__ import annotations

import difflib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from draftproof.bad_words import BadWords
from draftproof.engine.loop import DecodingLoop
from draftproof.errors import UserError
from draftproof.grammar import MOST_CHARACTERS
from draftproof.grammar_check import BusyError
from draftproof.reasoning import Reasoning
from draftproof.sampling import Constraint, SamplingParams
from draftproof.server import schemas
from draftproof.server.background import TimeOver, time_limit
from draftproof.server.dialects.detection import fitted
from draftproof.server.errors import ApiError, endless_template, quoted
from draftproof.server.settings import Settings
from draftproof.server.tools import ToolParams, ToolSet, template_calls, template_tools, tool_set

_MOST_LOGPROBS = 20
_MOST_QUOTED = 40  # characters of a number in an error
_GOT_NAMED = ("missing", "too_short", "too_long", "value_error")  # messages of pydantic that say what there was
_COMPLETION_TOKENS = 16  # of /v1/completions, where the request names no number; OpenAI's default
_TEMPLATE_SECONDS = 10.0  # of a chat template, which comes with a model and may never end
_MOST_BAD_WORDS = 32_768  # characters of all of them: each is encoded twice
_MOST_SHOWN = 524_288  # entries of what an answer says of prompts: it is made at once
_MOST_LOGPROBS_MADE = 1_048_576  # entries of what an answer says of its own tokens: they come one after the other
_FIELDS = {field.name for field in fields(SamplingParams)}
_NO_OPTIONS = {  # of a chat template: arguments of transformers, and what other fields say
    "messages", "conversation", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt",
    "continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
_Read = TypeVar("_Read", bound=BaseModel)


@dataclass(frozen=True)
class ParsedRequest:
    """The engine's input for a request."""

    prompts: tuple[tuple[int, ...], ...]  # token ids of each prompt
    # Of the prompts, where they are repeated; None for one that was token ids, or is not repeated.
    texts: tuple[str | None, ...]
    params: SamplingParams
    prediction: tuple[int, ...] = ()  # token ids that the answer may repeat
    tools: ToolSet | None = None
    # The parameters' bad words, encoded: the engine finds them as long as this is there.
    words: BadWords = field(default_factory=BadWords)
    constraint: Constraint | None = None  # the grammar of `params`, compiled
    reasoning: Reasoning | None = None  # how the model reasons before it answers; None where it does not


class RequestParser:
    """Reads bodies for one engine, with the limits of settings.

    `redact` makes an engine message fit for clients. The lock is held while the tokenizer is used, but not while a
    grammar is compiled.
    """

    def __init__(
        self, engine: DecodingLoop, settings: Settings, redact: Callable[[str], str], lock: AbstractContextManager[Any]
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._redact = redact
        self._lock = lock

    def parse(self, body: schemas.SamplingFields) -> ParsedRequest:
        """Parse a request for completions; raises ApiError with the field's name for an invalid value."""
        if isinstance(body, schemas.ChatBody):
            return self.chat(body)
        assert isinstance(body, schemas.CompletionBody), "the other one of two kinds"
        return self.completion(body)

    def completion(self, body: schemas.CompletionBody) -> ParsedRequest:
        """Parse a request to /v1/completions."""
        params, constraint = self._params(body, _first(body.max_tokens, _COMPLETION_TOKENS), body.logprobs)
        if body.echo and body.logprobs is not None:
            if body.stream:
                raise ApiError("echo with logprobs needs stream false", param="echo")
            params = replace(params, prompt_logprobs=max(body.logprobs, params.prompt_logprobs or 0))
        read = [self.encode(prompt, "prompt") for prompt in _several(body.prompt)]
        texts = tuple(text if body.echo else None for text, _ in read)
        prompts = tuple(ids for _, ids in read)
        self._refuse_large(body, params, prompts, sum(map(len, prompts)) * params.n)
        prediction = self._prediction(body.prediction)
        return ParsedRequest(prompts, texts, params, prediction, words=self._words(params), constraint=constraint)

    def chat(self, body: schemas.ChatBody) -> ParsedRequest:
        """Parse a request to /v1/chat/completions."""
        if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
            raise ApiError(
                f"max_tokens is {body.max_tokens} and max_completion_tokens is {body.max_completion_tokens}: they mean "
                "the same, so give one of them",
                param="max_completion_tokens",
            )
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError("top_logprobs needs logprobs true", param="top_logprobs")
        most = _first(body.max_completion_tokens, body.max_tokens, self._settings.max_tokens_limit)
        tools = tool_set(body, self._engine.tokenizer, self._settings.tool_format)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params, constraint = self._params(body, most, logprobs, tools)
        ids = self._chat_ids(body, tools)
        self._refuse_large(body, params, (ids,), len(ids))
        prediction = self._prediction(body.prediction)
        reasoning = self._engine.prompts.reasoning(ids) if self._settings.reasoning == "auto" else None
        if reasoning is not None and tools is not None and tools.format.plain:  # their grammar has the header
            reasoning = replace(reasoning, markers=replace(reasoning.markers, answer=()))
        return ParsedRequest((ids,), (None,), params, prediction, tools, self._words(params), constraint, reasoning)

    def size(self, body: schemas.ChatBody) -> int:
        """The number of tokens of a chat's prompt; no grammar is compiled for it."""
        return len(self._chat_ids(body, tool_set(body, self._engine.tokenizer, self._settings.tool_format)))

    def _chat_ids(self, body: schemas.ChatBody, tools: ToolSet | None) -> tuple[int, ...]:
        """The token ids of a chat's prompt; tools that cannot be called are left out."""
        shown = template_tools([each.function for each in body.tools or ()] if tools else ())
        return self.chat_prompt(body.messages, shown, _template_options(body))

    def chat_prompt(
        self,
        messages: Sequence[schemas.Message],
        tools: Sequence[dict[str, Any]],
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[int, ...]:
        """Token ids of a chat, with tools for the model and options of the chat template."""
        self._refuse_long(sum(len(text_of(each.content or "")) for each in messages), "messages")
        shown = fitted(messages_of(messages), self._engine.tokenizer, self._settings.tool_format)
        try:
            with self._blamed("messages"), time_limit(_TEMPLATE_SECONDS):  # without the lock: nobody waits for it
                text = self._engine.prompts.chat_text(shown, tools or None, options)
        except TimeOver:
            raise endless_template(_TEMPLATE_SECONDS, "these messages", "messages") from None
        return self._encoded(text, "messages", self._engine.prompts.chat_ids)

    def encode(self, prompt: str | Sequence[int], param: str) -> tuple[str | None, tuple[int, ...]]:
        """Text and token ids of a prompt that is not a chat; raises ApiError if it is empty, too long, or invalid."""
        if isinstance(prompt, str):
            self._refuse_long(len(prompt), param)
        else:
            self._refuse_tokens(len(prompt), param)
        with self._blamed(param), self._lock:
            text, ids = self._engine.encode(prompt)
        self._refuse_tokens(len(ids), param)
        return text, tuple(ids)

    def plain(self, text: str, param: str) -> tuple[int, ...]:
        """Token ids of a text without special tokens."""
        return self._encoded(text, param, self._engine.prompts.plain)

    def _encoded(self, text: str, param: str, encode: Callable[[str], list[int]]) -> tuple[int, ...]:
        self._refuse_long(len(text), param)
        with self._blamed(param), self._lock:
            ids = tuple(encode(text))
        self._refuse_tokens(len(ids), param)
        return ids

    @contextmanager
    def _blamed(self, param: str) -> Iterator[None]:
        """Turn an error of the engine into one of a field."""
        try:
            yield
        except UserError as error:
            raise ApiError(self._redact(str(error)), param=param) from error

    @property
    def _most_tokens(self) -> int | None:
        """The largest number of tokens of a prompt."""
        context = self._engine.target.max_positions
        bounds = [self._settings.max_prompt_tokens, None if context is None else context - 1]
        return min((bound for bound in bounds if bound is not None), default=None)

    @cached_property
    def _longest_token(self) -> int:
        words: dict[str, int] = getattr(self._engine.tokenizer, "get_vocab", dict)()
        return max((len(str(each)) for each in words), default=1)

    def _refuse_tokens(self, size: int, param: str, got: str = "") -> None:
        most = self._most_tokens
        if most is not None and size > most:
            what = "the prediction" if param == "prediction" else "the prompt"
            message = f"{what}: expected at most {most} tokens, got {got or size}"
            raise ApiError(message, param=param, code="context_length_exceeded")

    def _refuse_long(self, size: int, param: str) -> None:
        """Refuse a text that must have too many tokens, before it is tokenized."""
        self._refuse_tokens(math.ceil(size / self._longest_token), param, f"more ({size} characters)")

    def _refuse_large(
        self, body: schemas.SamplingFields, params: SamplingParams, prompts: Sequence[Sequence[int]], shown: int
    ) -> None:
        """Refuse requests whose answers would take much more memory than their text.

        `shown` are tokens of prompts that the answer can show, each as often as it shows it.
        """
        top = params.prompt_logprobs
        for name, each in (
            ("prompt_logprobs", 0 if top is None else top + 1),
            ("return_token_ids", int(body.return_token_ids)),
            ("echo", int(isinstance(body, schemas.CompletionBody) and body.echo)),
        ):
            if shown * each > _MOST_SHOWN:
                least = f" and {name} {top}" if name == "prompt_logprobs" else ""
                raise ApiError(
                    f"{name}: expected at most {_MOST_SHOWN} entries, got {shown * each}, with {shown} tokens of "
                    f"prompts in all choices{least}: ask for fewer prompts, choices or log-probabilities",
                    param=name,
                )
        if params.logprobs is None:
            return
        context, most = self._engine.target.max_positions, params.max_tokens or 0
        sizes = [most if context is None else min(most, context - len(ids)) for ids in prompts]
        entries = params.n * sum(sizes) * (params.logprobs + 1)
        if entries > _MOST_LOGPROBS_MADE:
            raise ApiError(
                f"logprobs: expected at most {_MOST_LOGPROBS_MADE} entries, got up to {entries} (max_tokens times the "
                f"choices times {params.logprobs + 1}): lower max_tokens or n",
                param="logprobs",
            )

    def _words(self, params: SamplingParams) -> BadWords:
        """Encode the bad words one at a time, so that other requests need not wait for all of them."""

        def encode(text: str) -> Sequence[int]:
            with self._lock:
                return self._engine.prompts.plain(text)

        with self._blamed("bad_words"):
            return self._engine.prompts.bad_words(
                params.bad_words, encode if self._engine.tokenizer is not None else None
            )

    def _prediction(self, given: schemas.Prediction | None) -> tuple[int, ...]:
        if given is None:
            return ()
        if not self._engine.drafter.reads_predictions:
            raise ApiError(
                "prediction is not supported by the drafter of this server: its operator can use auto or suffix",
                param="prediction",
            )
        return self.plain(text_of(given.content), "prediction")

    def _params(
        self, body: schemas.SamplingFields, max_tokens: int, logprobs: int | None, tools: ToolSet | None = None
    ) -> tuple[SamplingParams, Constraint | None]:
        given: dict[str, Any] = {
            name: value for name in _FIELDS & set(type(body).model_fields) if (value := getattr(body, name)) is not None
        }
        given |= {"max_tokens": min(max_tokens, self._settings.max_tokens_limit), "logprobs": logprobs}
        if body.thinking_token_budget is not None and self._settings.reasoning == "none":
            raise ApiError(
                "thinking_token_budget: this server leaves reasoning in the text and does not count it, see its option "
                "--reasoning",
                param="thinking_token_budget",
            )
        if isinstance(body, schemas.ChatBody) and self._settings.reasoning_budget is not None:
            given.setdefault("thinking_token_budget", self._settings.reasoning_budget)
        if tools is not None and tools.specials:
            given["skip_special_tokens"] = False  # the marker of a call is one
        if body.logit_bias is not None:
            given["logit_bias"] = _bias(body.logit_bias)
        grammar, param = _grammar(body, tools)
        self._check_sizes(body, logprobs, param, grammar or "")
        constraint = self._constraint(given, grammar, param)
        try:
            params = replace(self._engine.default_params, **given)
            formed = not isinstance(body.response_format, schemas.TextFormat | None)
            return (params if tools is None else ToolParams.of(params, tools.form(formed=formed))), constraint
        except UserError as error:
            name = str(error).partition(":")[0]  # of a field, in messages of SamplingParams
            raised = ApiError(str(error), param=name if name in _FIELDS else None)
            if isinstance(body, schemas.ChatBody) and name == "max_tokens" and body.max_completion_tokens is not None:
                raised.rename("max_completion_tokens")
            elif name == "logprobs":
                raised.rename(_count_of_logprobs(body))
            raise raised from error

    def _check_sizes(self, body: schemas.SamplingFields, logprobs: int | None, param: str, grammar: str) -> None:
        """Refuse numbers and texts beyond the limits; `param` is the field that the grammar comes from."""
        for name, count in ((_count_of_logprobs(body), logprobs), ("prompt_logprobs", body.prompt_logprobs)):
            if count is not None and count > _MOST_LOGPROBS:
                raise ApiError(f"{name}: expected at most {_MOST_LOGPROBS}, got {count}", param=name)
        for name, kind, size, most in (
            (param, "a grammar", len(grammar), MOST_CHARACTERS),
            ("bad_words", "texts", sum(map(len, body.bad_words or ())), _MOST_BAD_WORDS),
        ):
            if size > most:
                raise ApiError(f"{name}: expected {kind} of at most {most} characters, got {size}", param=name)

    def _constraint(self, given: dict[str, Any], grammar: str | None, param: str) -> Constraint | None:
        """Compile a grammar outside the engine's thread, and add it to the given parameters."""
        if grammar is None:
            return None
        given["grammar"] = grammar
        with self._blamed(param):
            try:
                SamplingParams(grammar=grammar)
                return self._engine.grammars.constraint(grammar)
            except BusyError as error:
                raise ApiError(
                    str(error), status=429, param=param, code="rate_limit_exceeded", headers={"Retry-After": "5"}
                ) from error


def _count_of_logprobs(body: schemas.SamplingFields) -> str:
    """The field of a body that says how many log-probabilities a token has."""
    return "top_logprobs" if isinstance(body, schemas.ChatBody) else "logprobs"


def refuse_other_model(name: str | None, served: str) -> None:
    """Refuse the name of another model, with status 404."""
    if name not in (None, served):
        raise ApiError(
            f"expected model {served!r}, got {quoted(name)}", status=404, param="model", code="model_not_found"
        )


def refuse_stream_options(body: schemas.SamplingFields) -> None:
    """Refuse stream options without a stream."""
    for option in ("stream_options", "return_drafts"):
        if getattr(body, option) and not body.stream:
            raise ApiError(f"{option} needs stream true", param=option)
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError("prompt_logprobs needs stream false", param="prompt_logprobs")


def validated(kind: type[_Read], given: Any, *, lenient: bool = False) -> _Read:
    """Validate parsed JSON as a body; `lenient` drops unknown fields, which are otherwise refused."""
    try:
        return kind.model_validate(given, extra="ignore" if lenient else "forbid")
    except ValidationError as error:
        found = error.errors(include_url=False)
    raise invalid_body([{**each, "loc": ("body", *each["loc"])} for each in found])


def invalid_body(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The error for an invalid body, from pydantic's errors; of the client's values it shows numbers, no texts."""
    first = next((each for each in errors if not each["type"].endswith("_type")), errors[0])  # of a union's branches
    fields = _field_names(schemas.Body)
    names = [str(each) for each in first["loc"][1:] if isinstance(each, int) or each in fields]
    param = ".".join(name for name, _ in itertools.groupby(names)) or None  # the kind of a form stands there too
    if first["type"] == "extra_forbidden":
        field = first["loc"][-1]
        param = str(field)[:100]
        above = names[:-1] if field in fields else names  # a field of another kind of bodies
        near = [] if field in fields else difflib.get_close_matches(param, fields, 1)
        hint = f"did you mean {near[0]}?" if near else "/openapi.json lists the fields that are"
        message = f"{'.'.join([*above, param])} is not supported: {hint}"
    elif first["type"] == "union_tag_invalid":  # pydantic's own message repeats what was sent
        message = f"{param}: expected {first['ctx']['discriminator']} to be one of {first['ctx']['expected_tags']}"
    elif len(first["loc"]) == 1:
        param, message = None, "expected a JSON object as body, and the header Content-Type: application/json"
    else:
        got = "" if first["type"] in _GOT_NAMED else f", got {_without_text(first['input'])}"
        message = f"{param or 'the body'}: {first['msg']}{got}"
    return ApiError(message, param=param)


def _without_text(value: Any) -> str:
    """A number, true, false or null as it was sent; of anything else only what it is."""
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)[:_MOST_QUOTED]
    kinds = ((str, "a text"), (list, "a list"), (dict, "an object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "another value")


def _field_names(kind: type[schemas.Body]) -> set[str]:
    """Field names of a class of bodies and its nested classes, which errors may show."""
    return set(kind.model_fields).union(*map(_field_names, kind.__subclasses__()))


def _grammar(body: schemas.SamplingFields, tools: ToolSet | None) -> tuple[str | None, str]:
    """The grammar of a body for SamplingParams, and the field that it comes from."""
    wanted = None if isinstance(body.response_format, schemas.TextFormat) else body.response_format
    if body.structured_outputs is not None:
        for name, other in (("tools", tools), ("response_format", wanted)):
            if other is not None:
                raise ApiError(f"{name} and structured_outputs exclude each other", param="structured_outputs")
        return _structured(body.structured_outputs), "structured_outputs"
    schema = wanted.json_schema.schema_ if isinstance(wanted, schemas.SchemaFormat) else {"type": "object"}
    if tools is not None:
        return f"lark:{tools.grammar(None if wanted is None else schema)}", "tools"
    if isinstance(wanted, schemas.SchemaFormat):
        return f"json_schema:{as_json(schema, 'response_format')}", "response_format"
    return (None if wanted is None else "json_object"), "response_format"


def _structured(asked: schemas.StructuredOutputs) -> str:
    made, where = [], "structured_outputs"
    if asked.json_ is not None:
        schema = asked.json_
        made.append(f"json_schema:{_json_text(schema) if isinstance(schema, str) else as_json(schema, where)}")
    if asked.json_object:
        made.append("json_object")
    if asked.regex is not None:
        made.append(f"regex:{asked.regex}")
    if asked.choice is not None:
        made.append(f"regex:({'|'.join(re.escape(each) for each in asked.choice)})")
    if asked.grammar is not None:
        made.append(f"lark:{asked.grammar}")
    if len(made) != 1:
        raise ApiError(f"expected one form in structured_outputs, got {len(made)}", param=where)
    return made[0]


def as_json(value: dict[str, Any], param: str) -> str:
    """A schema or arguments as JSON text; raises ApiError for values that JSON does not have."""
    try:
        return json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        raise ApiError(f"{param} holds what JSON cannot: NaN or infinity, or too many levels", param=param) from None


def _json_text(text: str) -> str:
    """Parse a schema that was sent as text."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        raise ApiError("structured_outputs.json is a text that is not JSON", param="structured_outputs") from None
    return text


def messages_of(messages: Sequence[schemas.Message]) -> list[dict[str, Any]]:
    """Messages for chat templates; OpenAI's developer messages become system messages."""
    made = []
    for each in messages:
        one: dict[str, Any] = {
            "role": "system" if each.role == "developer" else each.role,
            "content": text_of(each.content or ""),
        }
        if each.name is not None:
            one["name"] = each.name
        if each.thoughts is not None:
            one |= dict.fromkeys(("reasoning_content", "thinking"), each.thoughts)  # templates know one of them
        if each.tool_calls:
            one["tool_calls"] = template_calls(each)
        if each.tool_call_id is not None:
            one["tool_call_id"] = each.tool_call_id
        made.append(one)
    return made


def _template_options(body: schemas.ChatBody) -> dict[str, Any]:
    """Options of the chat template: the given ones, and those that follow from an effort."""
    given = dict(body.chat_template_kwargs or {})
    if own := sorted(_NO_OPTIONS & given.keys()):
        raise ApiError(
            f"chat_template_kwargs: expected variables of the template, got {own[0]}, which the request says elsewhere",
            param="chat_template_kwargs",
        )
    if body.reasoning_effort is None:
        return given
    reasons = body.reasoning_effort != "none"
    return {"reasoning_effort": body.reasoning_effort, "enable_thinking": reasons, "thinking": reasons} | given


def text_of(content: str | Sequence[schemas.TextPart]) -> str:
    """A text, or the texts of its parts on separate lines."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _several(prompt: Any) -> list[str | list[int]]:
    """The prompts of a body: a text, token ids, or a list of either."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise ApiError("the prompt is empty: give some text, or token ids", param="prompt")
    return list(prompt)


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    try:
        return {_token_id(token): value for token, value in given.items()}
    except ValueError:
        raise ApiError(
            "logit_bias: expected token ids as keys, got a key that is not an integer", param="logit_bias"
        ) from None


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(text)
    return int(text)


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)
