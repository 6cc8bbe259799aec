"""From pieces of continuations to the bodies that the API answers with, whole and as a stream."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from fastapi.sse import format_sse_event
from typing_extensions import override

from draftproof.draft import Origin
from draftproof.sampling import TokenLogprob
from draftproof.server.parse_request import ParsedRequest
from draftproof.server.schemas import (
    AnswerCall,
    AnswerFunction,
    AnswerMessage,
    ChatAnswer,
    ChatChoice,
    ChatLogprobs,
    CompletionAnswer,
    CompletionBody,
    CompletionChoice,
    CompletionDetails,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    SamplingFields,
    TokenLogprobAnswer,
    TopLogprob,
    Usage,
)
from draftproof.server.tools import CallPart, ToolReader
from draftproof.server.worker import Piece

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_LEAST = -9999.0  # JSON has no -inf; vLLM's figure
_SHOWN = (*range(33, 127), *range(161, 173), *range(174, 256))  # bytes that byte-level tokenizers write as themselves
_BYTES = {chr(each): each for each in _SHOWN} | {
    chr(256 + place): each for place, each in enumerate(sorted({*range(256)} - {*_SHOWN}))
}
END = format_sse_event(data_str="[DONE]")


@dataclass
class Continuation:
    """One continuation as far as it has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str = ""
    stop_reason: int | str | None = None
    predicted: int = 0
    characters: int = 0
    tools: ToolReader | None = None

    def add(self, piece: Piece) -> None:
        """Add a piece."""
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.prompt_logprobs += piece.prompt_logprobs
        if piece.origin is Origin.PREDICTION:
            self.predicted += piece.accepted
        if piece.finish_reason is not None:
            self.finish_reason = piece.finish_reason
            self.stop_reason = piece.stop_reason


@dataclass
class Answer:
    """What all answers to one request share, and its continuations.

    Attributes:
        id: of the answer.
        model: its name in the API.
        parsed: what was asked.
        token_text: text of a token, for log-probabilities.
        with_ids: whether token ids are asked for.
        with_drafts: whether a stream's chunks say which tokens were drafted.
        echo: whether the prompt's text comes first.
        as_ids: whether log-probabilities name tokens by their ids: texts of different tokens may be equal.
        prompt_top: the number of likeliest tokens at each place of the prompt that are wanted; None for nothing.
        prompts_shown: what is said of the tokens of each prompt, as far as it is made.
    """

    id: str
    model: str
    parsed: ParsedRequest
    token_text: TokenText
    with_ids: bool
    with_drafts: bool = False
    echo: bool = False
    as_ids: bool = False
    prompt_top: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    continuations: list[Continuation] = field(default_factory=list)
    prompts_shown: dict[int, PromptLogprobs] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def to(cls, body: SamplingFields, parsed: ParsedRequest, *, name: str, model: str, token_text: TokenText) -> Answer:
        """The answer to a body, empty yet."""
        return cls(
            name,
            model,
            parsed,
            token_text,
            body.return_token_ids,
            body.return_drafts,
            isinstance(body, CompletionBody) and body.echo,
            as_ids=body.return_tokens_as_token_ids,
            prompt_top=body.prompt_logprobs,
        )

    def __post_init__(self) -> None:
        tools = self.parsed.tools
        self.continuations = [
            Continuation(tools=None if tools is None else ToolReader(tools))
            for _ in range(len(self.parsed.prompts) * self.parsed.params.n)
        ]

    def add(self, pieces: Sequence[Piece]) -> None:
        """Add pieces."""
        for piece in pieces:
            self.continuations[piece.index].add(piece)

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        read = sum(map(len, self.parsed.prompts))
        made = sum(len(each.token_ids) for each in self.continuations)
        return Usage(
            prompt_tokens=read,
            completion_tokens=made,
            total_tokens=read + made,
            completion_tokens_details=self._details,
        )

    @property
    def _details(self) -> CompletionDetails | None:
        """How much of the prediction came true, in all continuations together."""
        size = len(self.parsed.prediction)
        if not size:
            return None
        accepted = [each.predicted for each in self.continuations]
        return CompletionDetails(
            accepted_prediction_tokens=sum(accepted),
            rejected_prediction_tokens=sum(max(size - each, 0) for each in accepted),
        )

    def name_of(self, token: int) -> str:
        """A token's name in log-probabilities: its text, or vLLM's form of its id."""
        return f"token_id:{token}" if self.as_ids else self.token_text(token)

    def key_of(self, token: int) -> str:
        """As `name_of`, but for bytes that are a part of a character, which have no text of their own."""
        return self.name_of(token) if self.as_ids else self.token_text.named(token)

    def keys_of(self, tokens: Sequence[int]) -> list[str]:
        """Names of tokens as keys of one object: no two are equal, and the first ones are those of `key_of`.

        Different tokens may have one text: bytes that are no character by themselves, or a letter and its byte.
        """
        ids: dict[str, int] = {}
        for token in tokens:
            name = self.key_of(token)
            ids.setdefault(name if ids.get(name, token) == token else f"token_id:{token}", token)
        names = {token: name for name, token in ids.items()}
        return [names[token] for token in tokens]

    def prompt_of(self, index: int) -> int:
        """The number of the prompt of a continuation."""
        return index // self.parsed.params.n

    def echoed(self, index: int) -> str:
        """What stands before a continuation's text."""
        place = self.prompt_of(index)
        if not self.echo:
            return ""
        text = self.parsed.texts[place]
        return self.token_text.joined(self.parsed.prompts[place]) if text is None else text


class TokenText:
    """The text of single tokens and of several."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        """Of one token inside a text, special ones included: some tokenizers leave out a blank at the start."""
        if token not in self._known:
            self._known[token] = self.joined([token, token])[len(self.joined([token])) :]
        return self._known[token]

    def content(self, token: int) -> bytes:
        """The bytes of a token, also where they are a part of a character."""
        text = self(token)
        if _REPLACEMENT not in text:
            return text.encode()
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if found := _BYTE.fullmatch(piece):
            return bytes([int(found[1], 16)])
        if all(letter in _BYTES for letter in piece):
            return bytes(_BYTES[letter] for letter in piece)
        return text.encode()

    def named(self, token: int) -> str:
        """The text of one token; OpenAI's form of its bytes where they are a part of a character."""
        text = self(token)
        if _REPLACEMENT not in text or (content := self.content(token)) == text.encode():
            return text
        return "bytes:" + "".join(f"\\x{each:02x}" for each in content)

    def joined(self, tokens: Sequence[int]) -> str:
        """Of several in a row."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))


@runtime_checkable
class Form(Protocol):
    """How one of the two endpoints words its answers."""

    def whole(self, answer: Answer) -> CompletionAnswer | ChatAnswer:
        """The body of an answer that is not streamed."""
        ...

    def opening(self, answer: Answer) -> Iterator[dict[str, Any]]:
        """The chunks before the first piece."""
        ...

    def chunk(self, answer: Answer, piece: Piece) -> dict[str, Any]:
        """The choice of the chunk for a piece; it is added to the answer afterwards."""
        ...

    @property
    def object(self) -> str:
        """OpenAI's name of a chunk."""
        ...


class CompletionForm(Form):
    """Answers of /v1/completions."""

    object = "text_completion"

    @override
    def whole(self, answer: Answer) -> CompletionAnswer:
        choices = [
            CompletionChoice(
                index=index,
                text=answer.echoed(index) + each.text,
                logprobs=_echoed_logprobs(answer, index) or _completion_logprobs(answer, each.logprobs, 0),
                finish_reason=each.finish_reason,
                stop_reason=each.stop_reason,
                token_ids=each.token_ids if answer.with_ids else None,
                prompt_token_ids=list(answer.parsed.prompts[answer.prompt_of(index)]) if answer.with_ids else None,
                prompt_logprobs=_prompt_logprobs(answer, index),
            )
            for index, each in enumerate(answer.continuations)
        ]
        return CompletionAnswer(
            id=answer.id, created=answer.created, model=answer.model, choices=choices, usage=answer.usage
        )

    @override
    def opening(self, answer: Answer) -> Iterator[dict[str, Any]]:
        for index in range(len(answer.continuations)):
            if answer.echo:
                yield {"index": index, "text": answer.echoed(index), "logprobs": None, "finish_reason": None}

    @override
    def chunk(self, answer: Answer, piece: Piece) -> dict[str, Any]:
        each = answer.continuations[piece.index]
        found = _completion_logprobs(answer, piece.logprobs, each.characters)
        each.characters += sum(len(answer.token_text(one.token_id)) for one in piece.logprobs)
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": None if found is None else found.model_dump(),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            **_asked_for(answer, piece),
        }


class ChatForm(Form):
    """Answers of /v1/chat/completions."""

    object = "chat.completion.chunk"

    @override
    def whole(self, answer: Answer) -> ChatAnswer:
        choices = []
        for index, each in enumerate(answer.continuations):
            text, calls = (each.text, []) if each.tools is None else each.tools.read(each.text, last=True)
            choices.append(
                ChatChoice(
                    index=index,
                    message=_message(text, calls),
                    logprobs=_chat_logprobs(answer, each.logprobs),
                    finish_reason=str(_reason(each, each.finish_reason)),
                    stop_reason=each.stop_reason,
                    token_ids=each.token_ids if answer.with_ids else None,
                )
            )
        return ChatAnswer(
            id=answer.id,
            created=answer.created,
            model=answer.model,
            choices=choices,
            usage=answer.usage,
            prompt_token_ids=list(answer.parsed.prompts[0]) if answer.with_ids else None,
            prompt_logprobs=_prompt_logprobs(answer, 0),
        )

    @override
    def opening(self, answer: Answer) -> Iterator[dict[str, Any]]:
        for index in range(len(answer.continuations)):
            tools = answer.parsed.tools
            delta = {"role": "assistant", "content": None if tools is not None and tools.must else ""}
            yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    @override
    def chunk(self, answer: Answer, piece: Piece) -> dict[str, Any]:
        found = _chat_logprobs(answer, piece.logprobs)
        each = answer.continuations[piece.index]
        text, calls = piece.text, list[CallPart]()
        if each.tools is not None:
            text, calls = each.tools.read(piece.text, last=piece.finish_reason is not None)
        delta: dict[str, Any] = {"content": text} if text or (found is not None and each.tools is None) else {}
        if calls:
            delta["tool_calls"] = [_call_delta(call) for call in calls]
        return {
            "index": piece.index,
            "delta": delta,
            "logprobs": None if found is None else found.model_dump(),
            "finish_reason": _reason(each, piece.finish_reason),
            "stop_reason": piece.stop_reason,
            **_asked_for(answer, piece),
        }


def _message(text: str, calls: Sequence[CallPart]) -> AnswerMessage:
    if not calls:
        return AnswerMessage(content=text)
    made = [
        AnswerCall(id=str(call.id), function=AnswerFunction(name=str(call.name), arguments=call.arguments))
        for call in calls
    ]
    return AnswerMessage(content=text or None, tool_calls=made)


def _call_delta(call: CallPart) -> dict[str, Any]:
    """What a chunk adds to a call."""
    if call.name is None:
        return {"index": call.place, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.place, "id": call.id, "type": "function", "function": function}


def _reason(each: Continuation, reason: str | None) -> str | None:
    """Why an answer ended; where it ended by itself after calls, they are why."""
    return "tool_calls" if reason == "stop" and each.tools is not None and each.tools.count else reason


def event(answer: Answer, form: Form, choices: Sequence[dict[str, Any]], usage: Usage | None = None) -> bytes:
    """A chunk of a stream as a server-sent event."""
    chunk: dict[str, Any] = {
        "id": answer.id,
        "object": form.object,
        "created": answer.created,
        "model": answer.model,
        "choices": choices,
    }
    if usage is not None:
        chunk["usage"] = usage.model_dump(exclude_none=True)
    return format_sse_event(data_str=json.dumps(chunk, ensure_ascii=False, separators=(",", ":")))


def _asked_for(answer: Answer, piece: Piece) -> dict[str, Any]:
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


def _completion_logprobs(answer: Answer, found: Sequence[TokenLogprob], offset: int) -> CompletionLogprobs | None:
    if answer.parsed.params.logprobs is None:
        return None
    texts = [answer.token_text(each.token_id) for each in found]
    offsets = [offset + sum(map(len, texts[:place])) for place in range(len(texts))]
    return CompletionLogprobs(
        tokens=[answer.key_of(each.token_id) for each in found],
        token_logprobs=[max(each.logprob, _LEAST) for each in found],
        top_logprobs=[_best_of(answer, each) for each in found],
        text_offset=offsets,
    )


def _best_of(answer: Answer, each: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens at a place and the chosen one, by name."""
    best = dict(each.top) | {each.token_id: each.logprob}
    names = dict(zip([each.token_id, *best], answer.keys_of([each.token_id, *best]), strict=True))
    return {names[token]: max(value, _LEAST) for token, value in best.items()}


def _echoed_logprobs(answer: Answer, index: int) -> CompletionLogprobs | None:
    """Of the prompt and of what follows it, where the prompt is repeated."""
    each, first = answer.continuations[index], answer.parsed.prompts[answer.prompt_of(index)][0]
    if not answer.echo or answer.parsed.params.logprobs is None:
        return None
    most = answer.parsed.params.logprobs
    of_prompt = [replace(one, top=one.top[:most]) for one in each.prompt_logprobs]
    found = _completion_logprobs(answer, [*of_prompt, *each.logprobs], len(answer.token_text(first)))
    assert found is not None, "logprobs are wanted"
    return CompletionLogprobs(
        tokens=[answer.key_of(first), *found.tokens],
        token_logprobs=[None, *found.token_logprobs],
        top_logprobs=[None, *found.top_logprobs],
        text_offset=[0, *found.text_offset],
    )


def _prompt_logprobs(answer: Answer, index: int) -> PromptLogprobs | None:
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
                str(token): PromptLogprob(logprob=max(value, _LEAST), rank=rank, decoded_token=answer.token_text(token))
                for token, (value, rank) in entries.items()
            }
        )
    answer.prompts_shown[place] = found
    return found


def _chat_logprobs(answer: Answer, found: Sequence[TokenLogprob]) -> ChatLogprobs | None:
    if answer.parsed.params.logprobs is None:
        return None
    return ChatLogprobs(
        content=[
            TokenLogprobAnswer(
                **_entry(answer, each.token_id, each.logprob),
                top_logprobs=[TopLogprob(**_entry(answer, token, value)) for token, value in each.top],
            )
            for each in found
        ]
    )


def _entry(answer: Answer, token: int, logprob: float) -> dict[str, Any]:
    content = list(answer.token_text.content(token))
    return {"token": answer.name_of(token), "logprob": max(logprob, _LEAST), "bytes": content}
