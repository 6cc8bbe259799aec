"""Answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from typing_extensions import override

from draftproof.sampling import TokenLogprob
from draftproof.server import schemas
from draftproof.server.api.answer import Answer, AnswerDelta, Continuation, Endpoint, itself
from draftproof.server.api.openai import LEAST, OpenAIForm, asked_for, prompt_logprobs
from draftproof.server.tools import CallPart
from draftproof.server.worker import Piece


class ChatForm(OpenAIForm):
    """Answers of /v1/chat/completions."""

    object = "chat.completion.chunk"

    @override
    def whole(self, answer: Answer) -> schemas.ChatAnswer:
        choices = []
        for index, each in enumerate(answer.continuations):
            choices.append(
                schemas.ChatChoice(
                    index=index,
                    message=_message(each),
                    logprobs=chat_logprobs(answer, each.logprobs),
                    finish_reason=str(_reason(each, each.finish_reason)),
                    stop_reason=each.stop_reason,
                    token_ids=each.token_ids if answer.with_ids else None,
                )
            )
        return schemas.ChatAnswer(
            id=answer.id,
            created=answer.created,
            model=answer.model,
            choices=choices,
            usage=answer.usage,
            prompt_token_ids=list(answer.parsed.prompts[0]) if answer.with_ids else None,
            prompt_logprobs=prompt_logprobs(answer, 0),
        )

    @override
    def first(self, answer: Answer) -> Iterator[dict[str, Any]]:
        for index in range(len(answer.continuations)):
            tools = answer.parsed.tools
            delta = {"role": "assistant", "content": None if tools is not None and tools.must else ""}
            yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    @override
    def choice(self, answer: Answer, piece: Piece, parts: AnswerDelta) -> dict[str, Any]:
        found = chat_logprobs(answer, parts.logprobs)
        each = answer.continuations[piece.index]
        delta: dict[str, Any] = {}
        if parts.reasoning:
            delta["reasoning_content"] = parts.reasoning
        if parts.text or (found is not None and each.tools is None):
            delta["content"] = parts.text
        if parts.calls:
            delta["tool_calls"] = [_call_delta(call) for call in parts.calls]
        return {
            "index": piece.index,
            "delta": delta,
            "logprobs": None if found is None else found.model_dump(),
            "finish_reason": _reason(each, piece.finish_reason),
            "stop_reason": piece.stop_reason,
            **asked_for(answer, piece),
        }


def _message(each: Continuation) -> schemas.AnswerMessage:
    calls = [
        schemas.AnswerCall(
            id=str(call.id), function=schemas.AnswerFunction(name=str(call.name), arguments=call.arguments)
        )
        for call in each.calls
    ]
    return schemas.AnswerMessage(
        content=(each.text or None) if calls else each.text,
        reasoning_content=each.reasoning or None,
        tool_calls=calls or None,
    )


def _call_delta(call: CallPart) -> dict[str, Any]:
    """What a chunk adds to a call."""
    if call.name is None:
        return {"index": call.place, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.place, "id": call.id, "type": "function", "function": function}


def _reason(each: Continuation, reason: str | None) -> str | None:
    """Why an answer ended; where it ended by itself after calls, they are why."""
    return "tool_calls" if reason == "stop" and each.tools is not None and each.tools.count else reason


def chat_logprobs(answer: Answer, found: Sequence[TokenLogprob]) -> schemas.ChatLogprobs | None:
    """Log-probabilities of some tokens of an answer; None where they are not asked for."""
    if answer.parsed.params.logprobs is None:
        return None
    return schemas.ChatLogprobs(
        content=[
            schemas.TokenLogprobAnswer(
                **_entry(answer, each.token_id, each.logprob),
                top_logprobs=[schemas.TopLogprob(**_entry(answer, token, value)) for token, value in each.top],
            )
            for each in found
        ]
    )


def _entry(answer: Answer, token: int, logprob: float) -> dict[str, Any]:
    content = list(answer.token_text.content(token))
    return {"token": answer.name_of(token), "logprob": max(logprob, LEAST), "bytes": content}


CHAT = Endpoint("/v1/chat/completions", schemas.ChatBody, "chatcmpl-", itself, ChatForm)
