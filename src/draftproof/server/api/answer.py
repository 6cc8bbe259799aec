"""The answer to one request as far as it has come, and what tells one API from another: how that is worded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel

from draftproof.backends.translation.token_map import token_bytes
from draftproof.draft import Origin
from draftproof.sampling import TokenLogprob
from draftproof.server.errors import ApiError
from draftproof.server.parse_request import ParsedRequest
from draftproof.server.schemas import (
    Body,
    CompletionBody,
    CompletionDetails,
    PromptDetails,
    PromptLogprobs,
    SamplingFields,
    Usage,
)
from draftproof.server.tools import CallPart, ToolReader
from draftproof.server.worker import Piece

_Body = TypeVar("_Body", bound=Body)


@dataclass(frozen=True)
class AnswerDelta:
    """What a piece adds to an answer; log-probabilities are of the answer itself, without its reasoning."""

    reasoning: str
    text: str
    calls: list[CallPart]
    logprobs: tuple[TokenLogprob, ...]


@dataclass
class Continuation:
    """One continuation as far as it has come, with what each new piece adds."""

    reasoning: str = ""
    text: str = ""
    calls: list[CallPart] = field(default_factory=list)
    # All tokens, of which the first `reasoning_tokens` belong to the reasoning.
    token_ids: list[int] = field(default_factory=list)
    reasoning_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of the tokens of the answer itself
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str = ""  # why it ended; empty while it goes on
    stop_reason: int | str | None = None
    predicted: int = 0  # accepted tokens of the prediction
    reused: int = 0  # tokens of the prompt that were taken over from other requests
    tools: ToolReader | None = None  # divides text and calls; None where no tool can be called

    def add(self, piece: Piece) -> AnswerDelta:
        """Add a piece, and say what it adds."""
        text, calls = piece.text, list[CallPart]()
        if self.tools is not None:
            text, calls = self.tools.read(piece.text, last=piece.finish_reason is not None)
        parts = AnswerDelta(piece.reasoning, text, calls, piece.logprobs[piece.reasoning_tokens :])
        self.reasoning += parts.reasoning
        self.text += parts.text
        for call in calls:
            if call.name is None:
                self.calls[call.place].arguments += call.arguments
            else:
                self.calls.append(replace(call))
        self.token_ids += piece.token_ids
        self.reasoning_tokens += piece.reasoning_tokens
        self.logprobs += parts.logprobs
        self.prompt_logprobs += piece.prompt_logprobs
        self.reused = piece.reused
        if piece.origin is Origin.PREDICTION:
            self.predicted += piece.accepted
        if piece.finish_reason is not None:
            self.finish_reason = piece.finish_reason
            self.stop_reason = piece.stop_reason
        return parts


@dataclass
class Answer:
    """What all answers to one request share, and its continuations."""

    id: str
    model: str
    parsed: ParsedRequest  # what was asked
    token_text: TokenText  # text of a token, for log-probabilities
    with_ids: bool
    with_drafts: bool = False  # whether a stream's chunks say which tokens were drafted
    echo: bool = False  # whether the prompt's text comes first
    as_ids: bool = False  # whether log-probabilities name tokens by their ids: texts of different tokens may be equal
    # The number of likeliest tokens at each place of the prompt that are wanted; None for nothing.
    prompt_top: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    continuations: list[Continuation] = field(default_factory=list)
    # What is said of the tokens of each prompt, as far as it is made.
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

    def add(self, piece: Piece) -> AnswerDelta:
        """Add a piece, and say what it adds."""
        return self.continuations[piece.index].add(piece)

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        read = sum(map(len, self.parsed.prompts))
        made = sum(len(each.token_ids) for each in self.continuations)
        return Usage(
            prompt_tokens=read,
            completion_tokens=made,
            total_tokens=read + made,
            prompt_tokens_details=PromptDetails(cached_tokens=self.reused),
            completion_tokens_details=self._details,
        )

    @property
    def reused(self) -> int:
        """Tokens of the prompts that were taken over from other requests; each prompt counts once."""
        size = self.parsed.params.n
        return sum(self.continuations[first].reused for first in range(0, len(self.continuations), size))

    @property
    def _details(self) -> CompletionDetails | None:
        """How much was reasoning, and how much of the prediction came true, in all continuations together."""
        size = len(self.parsed.prediction)
        thought = sum(each.reasoning_tokens for each in self.continuations)
        if not size and self.parsed.reasoning is None:
            return None
        accepted = [each.predicted for each in self.continuations]
        return CompletionDetails(
            reasoning_tokens=thought,
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


# --- how it is worded ------------------------------------------------------------------------------------------------


@runtime_checkable
class Form(Protocol):
    """How one answer is worded, whole or as the events of a stream. It keeps nothing large of the request's body."""

    def whole(self, answer: Answer) -> BaseModel:
        """The body of an answer that is not streamed."""

    def opening(self, answer: Answer) -> bytes:
        """The events before the first piece."""

    def piece(self, answer: Answer, piece: Piece, parts: AnswerDelta) -> bytes:
        """The events for a piece, whose parts have been added to the answer."""

    def closing(self, answer: Answer) -> bytes:
        """The events after the last piece."""

    def failure(self, answer: Answer, error: ApiError) -> bytes:
        """The events at the end of a stream that cannot go on."""


@dataclass(frozen=True)
class Endpoint(Generic[_Body]):
    """A path that requests for answers are sent to, with the kind of their body."""

    path: str
    body: type[_Body]
    prefix: str  # what the answer's id begins with
    asked: Callable[[_Body], SamplingFields]  # what a body asks, in the words of OpenAI's endpoints
    form: Callable[[_Body], Form]  # of the answer to a body
    lenient: bool = False  # whether fields that are not known are left out, as the clients of this API expect
    names: Mapping[str, str] = field(default_factory=dict)  # from fields of `asked` to this API's, where they differ

    @contextmanager
    def own_names(self) -> Iterator[None]:
        """Errors within the block name fields as this API does."""
        try:
            yield
        except ApiError as error:
            if (name := self.names.get(error.param or "")) is not None:
                error.rename(name)
            raise


def itself(body: Any) -> Any:
    """What a body asks where it is OpenAI's."""
    return body


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


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
        return token_bytes(str(self._tokenizer.convert_ids_to_tokens(token)), self(token))

    def named(self, token: int) -> str:
        """The text of one token; OpenAI's form of its bytes where they are a part of a character."""
        text = self(token)
        if _REPLACEMENT not in text or (content := self.content(token)) == text.encode():
            return text
        return "bytes:" + "".join(f"\\x{each:02x}" for each in content)

    def joined(self, tokens: Sequence[int]) -> str:
        """Of several in a row."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))
