"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from draftproof.sampling import TokenLogprob
from draftproof.server import schemas
from draftproof.server.api.answer import Answer, AnswerDelta, Endpoint, itself
from draftproof.server.api.openai import LEAST, OpenAIForm, asked_for, prompt_logprobs
from draftproof.server.worker import Piece


class CompletionForm(OpenAIForm):
    """Answers of /v1/completions."""

    object = "text_completion"

    def __init__(self, body: schemas.SamplingFields) -> None:
        super().__init__(body)
        self._characters: dict[int, int] = {}  # of the text of each continuation's tokens so far

    @override
    def whole(self, answer: Answer) -> schemas.CompletionAnswer:
        choices = [
            schemas.CompletionChoice(
                index=index,
                text=answer.echoed(index) + each.text,
                logprobs=_echoed_logprobs(answer, index) or _completion_logprobs(answer, each.logprobs, 0),
                finish_reason=each.finish_reason,
                stop_reason=each.stop_reason,
                token_ids=each.token_ids if answer.with_ids else None,
                prompt_token_ids=list(answer.parsed.prompts[answer.prompt_of(index)]) if answer.with_ids else None,
                prompt_logprobs=prompt_logprobs(answer, index),
            )
            for index, each in enumerate(answer.continuations)
        ]
        return schemas.CompletionAnswer(
            id=answer.id, created=answer.created, model=answer.model, choices=choices, usage=answer.usage
        )

    @override
    def first(self, answer: Answer) -> Iterator[dict[str, Any]]:
        for index in range(len(answer.continuations)):
            if answer.echo:
                yield {"index": index, "text": answer.echoed(index), "logprobs": None, "finish_reason": None}

    @override
    def choice(self, answer: Answer, piece: Piece, parts: AnswerDelta) -> dict[str, Any]:
        before = self._characters.get(piece.index, 0)
        found = _completion_logprobs(answer, parts.logprobs, before)
        self._characters[piece.index] = before + sum(len(answer.token_text(one.token_id)) for one in parts.logprobs)
        return {
            "index": piece.index,
            "text": parts.text,
            "logprobs": None if found is None else found.model_dump(),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            **asked_for(answer, piece),
        }


def _completion_logprobs(
    answer: Answer, found: Sequence[TokenLogprob], offset: int
) -> schemas.CompletionLogprobs | None:
    if answer.parsed.params.logprobs is None:
        return None
    texts = [answer.token_text(each.token_id) for each in found]
    offsets = [offset + sum(map(len, texts[:place])) for place in range(len(texts))]
    return schemas.CompletionLogprobs(
        tokens=[answer.key_of(each.token_id) for each in found],
        token_logprobs=[max(each.logprob, LEAST) for each in found],
        top_logprobs=[_best_of(answer, each) for each in found],
        text_offset=offsets,
    )


def _best_of(answer: Answer, each: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens at a place and the chosen one, by name."""
    best = dict(each.top) | {each.token_id: each.logprob}
    names = dict(zip([each.token_id, *best], answer.keys_of([each.token_id, *best]), strict=True))
    return {names[token]: max(value, LEAST) for token, value in best.items()}


def _echoed_logprobs(answer: Answer, index: int) -> schemas.CompletionLogprobs | None:
    """Of the prompt and of what follows it, where the prompt is repeated."""
    each, first = answer.continuations[index], answer.parsed.prompts[answer.prompt_of(index)][0]
    if not answer.echo or answer.parsed.params.logprobs is None:
        return None
    most = answer.parsed.params.logprobs
    of_prompt = [replace(one, top=one.top[:most]) for one in each.prompt_logprobs]
    found = _completion_logprobs(answer, [*of_prompt, *each.logprobs], len(answer.token_text(first)))
    assert found is not None, "logprobs are wanted"
    return schemas.CompletionLogprobs(
        tokens=[answer.key_of(first), *found.tokens],
        token_logprobs=[None, *found.token_logprobs],
        top_logprobs=[None, *found.top_logprobs],
        text_offset=[0, *found.text_offset],
    )


COMPLETIONS = Endpoint("/v1/completions", schemas.CompletionBody, "cmpl-", itself, CompletionForm)
