"""What a row asks of the engine, and the output rows of its answer: prompts by themselves here, OpenAI's in `lines`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from typing_extensions import override

from draftproof.batch.source import PROMPT_KEYS, Row
from draftproof.engine.loop import DecodingLoop
from draftproof.engine.prompts import Prompt
from draftproof.engine.request import Request
from draftproof.errors import UserError
from draftproof.reasoning import Reasoning
from draftproof.rng import fold
from draftproof.sampling import Constraint, SamplingParams, TokenLogprob

Values = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """How rows are asked and answered, besides the engine. Plain values, which can be sent to another machine.

    Attributes:
        lines: whether rows are lines of an OpenAI batch file.
        sampling: fields of SamplingParams over the model's own defaults; for lines at most a seed.
        chat: whether texts are sent in the chat template; None sends them so where the model has one.
        system: a system message before texts.
        chat_template: a chat template, in place of the model's.
        model: the name that lines may give as their model.
        max_tokens_limit: the most tokens that a line may ask for, and a chat's default.
        tool_format: how the model writes calls of tools.
    """

    lines: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    chat: bool | None = None
    system: str | None = None
    chat_template: str | None = None
    model: str = "draftproof"
    max_tokens_limit: int = 16_384
    tool_format: str = "auto"

    def __post_init__(self) -> None:
        if self.chat is False and self.system is not None:
            raise UserError("a system message needs the chat template: leave out one of --system and --no-chat")
        wrong = sorted(set(self.sampling) - {"seed"}) if self.lines else []
        if wrong:
            raise UserError(f"lines of an OpenAI batch file say themselves how they are sampled: leave out {wrong[0]}")
        if self.lines and (self.chat is not None or self.system is not None):
            raise UserError("lines of an OpenAI batch file are chats or none by their url: leave out chat and system")

    @property
    def seed(self) -> int | None:
        """Of the batch; None leaves each row's to the engine."""
        return self.sampling.get("seed")


@dataclass(frozen=True)
class RowRequest:
    """What a row asks of the engine, as `DecodingLoop.add` takes it, and what the form of the rows needs besides."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    prediction: str | Sequence[int] | None = None
    speculates: bool = True
    constraint: Constraint | None = None
    reasoning: Reasoning | None = None
    more: object = None


@runtime_checkable
class RowForm(Protocol):
    """One of the two forms of rows, for one engine."""

    def ask(self, row: Row) -> RowRequest:
        """What a row asks; whatever it raises, `refused` says in the row's output."""

    def answer(self, row: Row, asked: RowRequest, requests: Sequence[Request]) -> tuple[list[Values], bool]:
        """The output rows of finished requests, and whether one of them failed."""

    def refused(self, row: Row, error: BaseException) -> Values:
        """The output row of a row that could not be asked."""


def row_seed(seed: int, name: str | int) -> int:
    """The seed of a row: a hash of the batch's seed and the row's id, so that neither order nor company matters."""
    return fold(seed, int.from_bytes(hashlib.sha256(str(name).encode()).digest()[:8])) >> 1


class PromptRows(RowForm):
    """Rows with a prompt: a text, token ids, or the messages of a chat."""

    def __init__(self, engine: DecodingLoop, options: RowOptions) -> None:
        self._engine = engine
        self._options = options
        self._params = replace(engine.default_params, **dict(options.sampling))
        template = engine.prompts.has_template
        self._chats = options.system is not None or (template if options.chat is None else options.chat)
        if self._chats and not template:
            raise UserError("the model has no chat template: leave out --chat and --system, or name a --chat-template")

    @override
    def ask(self, row: Row) -> RowRequest:
        given = [key for key in PROMPT_KEYS if row.values.get(key) is not None]
        if len(given) != 1:
            raise UserError(
                f"expected a row with one of {', '.join(PROMPT_KEYS)}, got {' and '.join(given) or 'no prompt'}"
            )
        params, seed = self._params, self._options.seed
        if seed is not None:
            params = replace(params, seed=row_seed(seed, row.id))
        prediction = row.values.get("prediction")
        if prediction is not None and not isinstance(prediction, str):
            raise UserError("the row's prediction: expected a text")
        return RowRequest([self._prompt(given[0], row.values[given[0]])], params, prediction)

    def _prompt(self, key: str, value: Any) -> Prompt:
        if key == "messages":
            if not isinstance(value, list) or not value or not all(isinstance(each, Mapping) for each in value):
                raise UserError("the row's messages: expected a list of objects with role and content")
            return [{name: part for name, part in each.items() if part is not None} for each in value]
        if isinstance(value, str):
            if not value:
                raise UserError(f"the row's {key} is empty: give some text, or token ids")
            first = [] if self._options.system is None else [{"role": "system", "content": self._options.system}]
            return [*first, {"role": "user", "content": value}] if self._chats else value
        if isinstance(value, list):
            return value
        raise UserError(f"the row's {key}: expected a text or a list of token ids")

    @override
    def answer(self, row: Row, asked: RowRequest, requests: Sequence[Request]) -> tuple[list[Values], bool]:
        """A row for each continuation."""
        return [self._output(row, each) for each in requests], any(each.error is not None for each in requests)

    def _output(self, row: Row, request: Request) -> Values:
        if request.error is not None:
            return self._row(row, index=request.index, prompt_tokens=request.prompt_length, error=str(request.error))
        made = self._row(
            row,
            index=request.index,
            text=request.cutter.text,
            token_ids=request.output_ids,
            finish_reason=str(request.cutter.finish),
            stop_reason=request.cutter.stop_reason,
            seed=request.seed,
            prompt_tokens=request.prompt_length,
            completion_tokens=request.stats.num_tokens,
            reasoning=request.cutter.reasoning or None,
            target_calls=request.stats.num_target_calls,
        )
        if self._params.logprobs is not None:
            made["logprobs"] = [_score(each) for each in request.logprobs]
        if self._params.prompt_logprobs is not None:
            made["prompt_logprobs"] = [None, *map(_score, request.prompt_logprobs)]
        return made

    @override
    def refused(self, row: Row, error: BaseException) -> Values:
        return self._row(row, error=str(error) if isinstance(error, UserError) else f"unexpected {error!r}")

    def _row(self, row: Row, index: int = 0, **values: Any) -> Values:
        names = [name for name in columns(self._options) if name not in ("id", "index")]
        return {"id": row.id, "index": index, **{name: values.get(name) for name in names}}


def _score(each: TokenLogprob) -> Values:
    return {**vars(each), "top": [{"token_id": token, "logprob": value} for token, value in each.top]}


def columns(options: RowOptions) -> tuple[str, ...]:
    """The names of an output row's columns; types are in `folder`."""
    if options.lines:
        return ("id", "custom_id", "response", "error")
    more = [name for name in ("logprobs", "prompt_logprobs") if options.sampling.get(name) is not None]
    return (
        *("id", "index", "text", "reasoning", "token_ids", "finish_reason", "stop_reason", "seed"),
        *("prompt_tokens", "completion_tokens", "target_calls", "error"),
        *more,
    )
