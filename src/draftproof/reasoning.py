"""Reasoning before an answer: its markers, where it ends, and an exact limit of its tokens.

Models of many families write what they reason between two markers, such as `<think>` and `</think>`, and then the
answer. Some chat templates write the first marker into the prompt. Both markers must be single tokens of the model, so
that a text which only looks like one is none. Models that write in channels (gpt-oss) have headers of several tokens
instead, before the reasoning and before the answer.

The limit is a mask that depends on the tokens before it only, as a grammar's: at the limit the end marker is the one
legal token. Hence the output distribution is that of the target with this mask, with and without drafts, and drafts may
cross the end of the reasoning. A grammar begins after it, and after the header of the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from typing_extensions import override

from draftproof.sampling import Constraint

_log = logging.getLogger(__name__)
_MARKERS = (
    ("<think>", "</think>"),  # Qwen3, DeepSeek, GLM, Kimi, MiniMax, Granite, OLMo 3, Nemotron, SmolLM3
    ("[THINK]", "[/THINK]"),  # Magistral and Ministral 3
    ("<|channel>", "<channel|>"),  # Gemma 4
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
_FIELDS = ("reasoning_content", "thinking")  # names of the reasoning in templates of answers
MOST_BLANK = 4  # tokens that a template may write after a marker


@dataclass(frozen=True)
class ReasoningMarkers:
    """The markers of a model."""

    begin: int  # id of the token that reasoning begins with
    end: int  # id of the token that it ends with
    opening: tuple[int, ...] = ()  # ids that follow the first one and belong to it
    turn: tuple[int, ...] = ()  # ids between the end of the reasoning and what follows
    answer: tuple[int, ...] = ()  # ids of the header of an answer

    @property
    def first(self) -> tuple[int, ...]:
        """All ids that reasoning begins with."""
        return (self.begin, *self.opening)

    def header(self, *, reasoned: bool) -> tuple[int, ...]:
        """The ids before an answer, after reasoning or without it."""
        return (*self.turn, *self.answer) if reasoned else self.answer


@dataclass(frozen=True)
class Reasoning:
    """How one answer begins."""

    markers: ReasoningMarkers
    # Tokens of reasoning at the end of the prompt, after a marker there; None where it ends without one, so that the
    # model reasons if its first token is the marker.
    spent: int | None = None

    def start(self, output_ids: Sequence[int]) -> int | None:
        """The place of the first token of reasoning in an output; None where it does not begin with the marker."""
        if self.spent is not None:
            return 0
        first = self.markers.first
        return len(first) if tuple(output_ids[: len(first)]) == first else None

    def may_begin(self, output_ids: Sequence[int]) -> bool:
        """Whether an output is empty or a part of the marker that reasoning begins with."""
        first = self.markers.first
        size = len(output_ids)
        return self.spent is None and size < len(first) and tuple(output_ids) == first[:size]

    def after(self, output_ids: Sequence[int]) -> Reasoning:
        """The same for what follows an output in which the model still reasons, or that is empty."""
        start = self.start(output_ids)
        return self if start is None else replace(self, spent=(self.spent or 0) + len(output_ids) - start)

    def answer(self, output_ids: Sequence[int]) -> int | None:
        """The place where the answer or its header begins in an output; None where it reasons, or that is not known."""
        start = self.start(output_ids)
        if start is None:
            return None if self.may_begin(output_ids) else 0
        return output_ids.index(self.markers.end, start) + 1 if self.markers.end in output_ids[start:] else None


def reasoning_markers(tokenizer: Any) -> ReasoningMarkers | None:
    """The markers of a model; None where its templates have none, or they are not tokens of their own.

    A checkpoint may name them itself, in the template that transformers reads answers back with; else its chat template
    has those of a known family.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        return None
    added = {str(token.content): place for place, token in tokenizer.added_tokens_decoder.items()}
    if channels := _channels(tokenizer, template, added):
        return channels
    named = [*_declared(tokenizer), *((begin, end) for begin, end in _MARKERS if end in template)]
    found = next(((added[begin], added[end]) for begin, end in named if begin in added and end in added), None)
    if named and found is None:
        _log.warning(
            "the markers of reasoning, %s and %s, are no tokens of this model: it is left in the text", *named[0]
        )
    return None if found is None else ReasoningMarkers(*found)


def _channels(tokenizer: Any, template: str, added: Mapping[str, int]) -> ReasoningMarkers | None:
    """The markers of a model that writes in channels, as OpenAI's format "harmony" has them."""
    end, *others = ("<|end|>", "<|start|>", "<|channel|>", "<|message|>")
    if f"{others[1]}analysis" not in template or not {end, *others} <= added.keys():
        return None
    first, turn, answer = (
        tuple(int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"])
        for text in ("<|channel|>analysis<|message|>", "<|start|>assistant", "<|channel|>final<|message|>")
    )
    return ReasoningMarkers(first[0], added[end], first[1:], turn, answer)


def _declared(tokenizer: Any) -> Iterator[tuple[str, str]]:
    """The markers in a checkpoint's template of answers (`response_template`)."""
    template = getattr(tokenizer, "response_template", None)  # of newer versions of transformers
    fields = template.get("fields") if isinstance(template, dict) else None
    for name in _FIELDS:
        field = fields.get(name) if isinstance(fields, dict) else None
        begin, end = (field.get("open"), field.get("close")) if isinstance(field, dict) else (None, None)
        if isinstance(begin, str) and isinstance(end, str):
            yield begin.strip(), end.strip()


def reasoning_after(prompt_ids: Sequence[int], markers: ReasoningMarkers, blank: set[int]) -> Reasoning | None:
    """How the answer to a prompt begins; None where the prompt says that the model is not to reason.

    Only the prompt's end counts, so that nothing in a message is taken for a marker. `blank` are ids among the last
    ones that are blanks only.
    """
    first = markers.first
    for spent, token in enumerate(reversed(prompt_ids[-MOST_BLANK - 1 :])):
        end = len(prompt_ids) - spent
        if tuple(prompt_ids[max(end - len(first), 0) : end]) == first:
            return Reasoning(markers, spent)
        if token == markers.end:
            return None
        if token not in blank:
            break
    return Reasoning(markers)


class ReasoningConstraint(Constraint):
    """A limit of the reasoning, and what the answer after it has to fit.

    While the model reasons every token is legal up to the limit; EOS is not where the answer has a form, since it would
    be missing. A marker that the model writes by itself counts as the first token of the output, and not to the limit.
    Where answers have a header, that follows, so that a model which reasons again after the end cannot. The budget
    counts tokens of the prompt, and no markers; without one, or without a constraint of the answer, anything goes.
    """

    def __init__(
        self,
        reasoning: Reasoning,
        vocab_size: int,
        budget: int | None = None,
        answer: Constraint | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self._reasoning = reasoning
        self._vocab_size = vocab_size
        self._budget = budget
        self._answer = answer
        self._eos = [token for token in eos_token_ids if 0 <= token < vocab_size]

    @override
    def fresh(self) -> ReasoningConstraint:
        answer = None if self._answer is None else self._answer.fresh()
        return ReasoningConstraint(self._reasoning, self._vocab_size, self._budget, answer, self._eos)

    @override
    def allowed(self, output_ids: Sequence[int], paths: Sequence[Sequence[int]]) -> Bool[Tensor, "rows vocab"]:
        begun = self._reasoning.answer(output_ids)
        if begun is not None:
            return self._fitting(output_ids[begun:], paths, reasoned=begun > 0)
        if self._reasoning.may_begin(output_ids):
            paths = [(*output_ids, *path) for path in paths]
            output_ids = ()
        reasoning = self._reasoning.after(output_ids)
        masks = torch.ones(len(paths), self._vocab_size, dtype=torch.bool)
        answers: dict[bool, dict[int, Sequence[int]]] = {True: {}, False: {}}  # of some rows, after reasoning or not
        for row, path in enumerate(paths):
            begun = reasoning.answer(path)
            if begun is not None or (reasoning.may_begin(path) and self._fits(path)):
                answers[bool(begun)][row] = path[begun or 0 :]
            elif reasoning.may_begin(path):
                masks[row] = False
            else:
                self._limit(masks[row], reasoning.after(path))
        for reasoned, rows in answers.items():
            if rows:
                masks[list(rows)] = self._fitting((), list(rows.values()), reasoned=reasoned)
        for row, path in enumerate(paths):
            if reasoning.may_begin(path):
                masks[row, reasoning.markers.first[len(path)]] = True
        return masks

    def _fits(self, path: Sequence[int]) -> bool:
        """Whether an answer without reasoning may begin so, as the first tokens of the marker do."""
        places = range(len(path))
        return all(self._fitting((), [path[:place]], reasoned=False)[0, path[place]] for place in places)

    def _limit(self, mask: Bool[Tensor, " vocab"], reasoning: Reasoning) -> None:
        """Mask what may not follow where the model reasons."""
        if self._budget is not None and (reasoning.spent or 0) >= self._budget:
            mask[:] = False
            mask[reasoning.markers.end] = True
        elif self._answer is not None:
            mask[self._eos] = False

    def _fitting(
        self, answer_ids: Sequence[int], paths: Sequence[Sequence[int]], *, reasoned: bool
    ) -> Bool[Tensor, "rows vocab"]:
        """What may follow each path in an answer, its header before it."""
        header = self._reasoning.markers.header(reasoned=reasoned)
        if len(answer_ids) >= len(header):
            return self._after_header(answer_ids[len(header) :], paths)
        masks = torch.zeros(len(paths), self._vocab_size, dtype=torch.bool)
        complete = dict[int, Sequence[int]]()
        for row, path in enumerate(paths):
            given = (*answer_ids, *path)
            if len(given) < len(header):
                masks[row, header[len(given)]] = True
            else:
                complete[row] = given[len(header) :]
        if complete:
            masks[list(complete)] = self._after_header((), list(complete.values()))
        return masks

    def _after_header(self, answer_ids: Sequence[int], paths: Sequence[Sequence[int]]) -> Bool[Tensor, "rows vocab"]:
        if self._answer is None:
            return torch.ones(len(paths), self._vocab_size, dtype=torch.bool)
        return self._answer.allowed(answer_ids, paths)

    @override
    def forced(self, output_ids: Sequence[int]) -> list[int]:
        begun = self._reasoning.answer(output_ids)
        markers = self._reasoning.markers
        if begun is not None:
            return self._forced_in_answer(output_ids[begun:], markers.header(reasoned=begun > 0))
        spent = self._reasoning.after(output_ids).spent
        if spent is None or self._budget is None or spent < self._budget:
            return []
        return [markers.end, *self._forced_in_answer((), markers.header(reasoned=True))]

    def _forced_in_answer(self, answer_ids: Sequence[int], header: Sequence[int]) -> list[int]:
        left = header[len(answer_ids) :]
        return [*left, *([] if self._answer is None else self._answer.forced(answer_ids[len(header) :]))]
