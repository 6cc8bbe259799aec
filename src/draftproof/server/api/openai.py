"""What the two completion endpoints of OpenAI have in common: chunks as events, and what a choice can hold besides."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi.sse import format_sse_event
from typing_extensions import override

from draftproof.server.api.answer import Answer, AnswerDelta, Form
from draftproof.server.errors import ApiError
from draftproof.server.schemas import PromptLogprob, PromptLogprobs, SamplingFields, StreamOptions, Usage
from draftproof.server.worker import Piece

LEAST = -9999.0  # JSON has no -inf; vLLM's figure


class OpenAIForm(Form):
    """Answers of one of the two endpoints; `object` is OpenAI's name of a chunk."""

    object = ""

    def __init__(self, body: SamplingFields) -> None:
        self._options = body.stream_options or StreamOptions()

    @abstractmethod
    def first(self, answer: Answer) -> Iterator[dict[str, Any]]:
        """The choices of the chunks before the first piece."""

    @abstractmethod
    def choice(self, answer: Answer, piece: Piece, parts: AnswerDelta) -> dict[str, Any]:
        """The choice of the chunk for a piece."""

    @override
    def opening(self, answer: Answer) -> bytes:
        return b"".join(self._event(answer, [choice]) for choice in self.first(answer))

    @override
    def piece(self, answer: Answer, piece: Piece, parts: AnswerDelta) -> bytes:
        usage = answer.usage if self._options.continuous_usage_stats else None
        return self._event(answer, [self.choice(answer, piece, parts)], usage)

    @override
    def closing(self, answer: Answer) -> bytes:
        used = self._event(answer, [], answer.usage) if self._options.include_usage else b""
        return used + format_sse_event(data_str="[DONE]")

    @override
    def failure(self, answer: Answer, error: ApiError) -> bytes:
        return json_event(error.body())

    def _event(self, answer: Answer, choices: Sequence[dict[str, Any]], usage: Usage | None = None) -> bytes:
        chunk: dict[str, Any] = {
            "id": answer.id,
            "object": self.object,
            "created": answer.created,
            "model": answer.model,
            "choices": choices,
        }
        if usage is not None:
            chunk["usage"] = usage.model_dump(exclude_none=True)
        return json_event(chunk)


def json_event(content: Mapping[str, Any], event: str | None = None) -> bytes:
    """A server-sent event whose data is JSON, with or without a name."""
    return format_sse_event(data_str=json.dumps(content, ensure_ascii=False, separators=(",", ":")), event=event)


def asked_for(answer: Answer, piece: Piece) -> dict[str, Any]:
    """What a chunk has only where the request asks for it."""
    made: dict[str, Any] = {}
    if answer.with_ids:
        made["token_ids"] = piece.token_ids
    if answer.with_drafts:
        made["draft"] = {
            "drafted": piece.drafted,
            "accepted": piece.accepted,
            "origin": str(piece.origin),
            "tokens": [answer.token_text(token) for token in piece.token_ids],
        }
    return made


def prompt_logprobs(answer: Answer, index: int) -> PromptLogprobs | None:
    """In vLLM's form: for each place the likeliest tokens and the prompt's own; made once for all choices."""
    if answer.prompt_top is None:
        return None
    place = answer.prompt_of(index)
    if place in answer.prompts_shown:
        return answer.prompts_shown[place]
    found: PromptLogprobs = [None]
    for each in answer.continuations[index].prompt_logprobs:
        best = [(token, value, rank) for rank, (token, value) in enumerate(each.top[: answer.prompt_top], 1)]
        entries = {token: (value, rank) for token, value, rank in [*best, (each.token_id, each.logprob, each.rank)]}
        found.append(
            {
                str(token): PromptLogprob(logprob=max(value, LEAST), rank=rank, decoded_token=answer.token_text(token))
                for token, (value, rank) in entries.items()
            }
        )
    answer.prompts_shown[place] = found
    return found
