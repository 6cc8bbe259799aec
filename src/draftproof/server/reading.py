"""From bodies of requests to what the engine takes: prompts as token ids, and SamplingParams."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from draftproof.engine.loop import DecodingLoop
from draftproof.engine.prompts import Prompt
from draftproof.errors import UserError
from draftproof.sampling import SamplingParams
from draftproof.server.errors import ApiError
from draftproof.server.schemas import (
    ChatBody,
    CompletionBody,
    Message,
    ObjectFormat,
    Prediction,
    SamplingFields,
    SchemaFormat,
    TextFormat,
    TextPart,
)
from draftproof.server.settings import Settings

_MOST_LOGPROBS = 20
_COMPLETION_TOKENS = 16  # of /v1/completions, where the request names no number; OpenAI's default
_FIELDS = {field.name for field in fields(SamplingParams)}


@dataclass(frozen=True)
class Question:
    """What a request asks of the engine.

    Attributes:
        prompts: token ids of each prompt.
        texts: of the prompts; None for one that was token ids.
        params: of all of them.
        prediction: token ids that the answer may repeat.
    """

    prompts: tuple[tuple[int, ...], ...]
    texts: tuple[str | None, ...]
    params: SamplingParams
    prediction: tuple[int, ...] = ()


class Reader:
    """Reads bodies for one engine.

    Args:
        engine: its tokenizer and its defaults are used, from one thread at a time.
        settings: with the limits.
        shown: makes a message of the engine fit for clients.
    """

    def __init__(self, engine: DecodingLoop, settings: Settings, shown: Callable[[str], str]) -> None:
        self._engine, self._settings, self._shown = engine, settings, shown

    def completion(self, body: CompletionBody) -> Question:
        """The question of a request to /v1/completions.

        Raises:
            ApiError: a value that cannot be used; it names the field.
        """
        params = self._params(body, _first(body.max_tokens, _COMPLETION_TOKENS), body.logprobs)
        if body.echo and body.logprobs is not None:
            raise ApiError("echo with logprobs is not supported: leave one of them out", param="echo")
        read = [self.encode(prompt, "prompt") for prompt in _several(body.prompt)]
        texts = tuple(text for text, _ in read)
        return Question(tuple(ids for _, ids in read), texts, params, self._prediction(body.prediction))

    def chat(self, body: ChatBody) -> Question:
        """The question of a request to /v1/chat/completions.

        Raises:
            ApiError: as above.
        """
        if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
            raise ApiError(
                f"max_tokens is {body.max_tokens} and max_completion_tokens is {body.max_completion_tokens}: they mean "
                "the same, so give one of them",
                param="max_completion_tokens",
            )
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError("top_logprobs needs logprobs true", param="top_logprobs")
        most = _first(body.max_completion_tokens, body.max_tokens, self._settings.max_tokens_limit)
        params = self._params(body, most, (body.top_logprobs or 0) if body.logprobs else None)
        text, ids = self.encode(messages_of(body.messages), "messages")
        return Question((ids,), (text,), params, self._prediction(body.prediction))

    def encode(self, prompt: Prompt, param: str) -> tuple[str | None, tuple[int, ...]]:
        """Text and token ids of a prompt.

        Raises:
            ApiError: it is empty, too long, or not to be read.
        """
        try:
            text, ids = self._engine.encode(prompt)
        except UserError as error:
            raise ApiError(self._shown(str(error)), param=param) from error
        most = self._settings.max_prompt_tokens
        if most is not None and len(ids) > most:
            raise ApiError(
                f"the prompt has {len(ids)} tokens: legal are up to {most} here",
                param=param,
                code="context_length_exceeded",
            )
        return text, tuple(ids)

    def _prediction(self, given: Prediction | None) -> tuple[int, ...]:
        """The token ids of a prediction."""
        if given is None:
            return ()
        if not self._engine.drafter.reads_predictions:
            raise ApiError(
                "prediction is not supported by the drafter of this server: its operator can use auto or suffix",
                param="prediction",
            )
        return tuple(self._engine.prompts.plain(text_of(given.content)))

    def _params(self, body: SamplingFields, max_tokens: int, logprobs: int | None) -> SamplingParams:
        given: dict[str, Any] = {
            name: value for name in _FIELDS & set(type(body).model_fields) if (value := getattr(body, name)) is not None
        }
        given |= {"max_tokens": max_tokens, "logprobs": logprobs}
        grammar, param = _grammar(body)
        if grammar is not None:
            given["grammar"] = grammar
        if body.logit_bias is not None:
            given["logit_bias"] = _bias(body.logit_bias)
        _refuse_above("max_tokens", max_tokens, self._settings.max_tokens_limit)
        if logprobs is not None:
            _refuse_above("logprobs", logprobs, _MOST_LOGPROBS)
        try:
            if grammar is not None:
                SamplingParams(grammar=grammar)
                self._engine.grammars.constraint(grammar)  # it takes time, and the engine's thread has none
            return replace(self._engine.default_params, **given)
        except UserError as error:
            name = str(error).partition(" ")[0]
            if name in ("grammar", "grammars", "a"):
                raise ApiError(self._shown(str(error)), param=param) from error
            raise ApiError(str(error), param=name if name in _FIELDS else None) from error


def _grammar(body: SamplingFields) -> tuple[str | None, str]:
    """The grammar that a body asks for, as SamplingParams take it, and the field that it comes from."""
    wanted, asked = body.response_format, body.structured_outputs
    if asked is None:
        if isinstance(wanted, SchemaFormat):
            return f"json_schema:{json.dumps(wanted.json_schema.schema_)}", "response_format"
        return ("json_object" if isinstance(wanted, ObjectFormat) else None), "response_format"
    if not (wanted is None or isinstance(wanted, TextFormat)):
        raise ApiError("response_format and structured_outputs exclude each other", param="structured_outputs")
    made = []
    if asked.json_ is not None:
        made.append(f"json_schema:{asked.json_ if isinstance(asked.json_, str) else json.dumps(asked.json_)}")
    if asked.json_object:
        made.append("json_object")
    if asked.regex is not None:
        made.append(f"regex:{asked.regex}")
    if asked.choice is not None:
        made.append(f"regex:({'|'.join(re.escape(each) for each in asked.choice)})")
    if asked.grammar is not None:
        made.append(f"lark:{asked.grammar}")
    if len(made) != 1:
        raise ApiError(f"structured_outputs has {len(made)} forms: legal is one", param="structured_outputs")
    return made[0], "structured_outputs"


def messages_of(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as chat templates take them; OpenAI's developer messages are what others call system messages."""
    return [
        {"role": "system" if each.role == "developer" else each.role, "content": text_of(each.content)}
        for each in messages
    ]


def text_of(content: str | Sequence[TextPart]) -> str:
    """A text, or the texts of its parts, a line each."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _several(prompt: Any) -> list[Prompt]:
    """The prompts of a body: one text, the token ids of one, or a list of either."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise ApiError("the prompt is empty: give some text, or token ids", param="prompt")
    return list(prompt)


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in given.items()}
    except ValueError:
        raise ApiError(
            "logit_bias has a key that is no token id: legal are whole numbers", param="logit_bias"
        ) from None


def _first(*values: int | None) -> int:
    """The first of these that is given."""
    return next(value for value in values if value is not None)


def _refuse_above(name: str, value: int, most: int) -> None:
    if value > most:
        raise ApiError(f"{name} is {value}: legal are up to {most} here", param=name)
