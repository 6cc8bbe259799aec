"""Prompts as token ids: the engine takes a text, token ids or chat messages."""

from __future__ import annotations

import numbers
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

from draftproof.bad_words import BadWords, bad_word_ids
from draftproof.errors import UserError, reason
from draftproof.reasoning import MOST_BLANK, Reasoning, ReasoningMarkers, reasoning_after, reasoning_markers

_RECENT = 8  # sets of bad words that are kept encoded when no request has them any more

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class PromptReader:
    """Turns prompts into token ids with a model's tokenizer, or without one where all prompts are token ids."""

    def __init__(self, tokenizer: Any, model: str) -> None:
        self.tokenizer = tokenizer
        self._model = model
        self._words: WeakValueDictionary[tuple[str, ...], BadWords] = WeakValueDictionary()
        self._recent: deque[BadWords] = deque(maxlen=_RECENT)
        self._template: object = None
        self._markers: ReasoningMarkers | None = None

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def use_template(self, template: str) -> None:
        """Apply a chat template in place of the model's."""
        if self.tokenizer is None:
            raise UserError("a chat template needs a model with a tokenizer")
        self.tokenizer.chat_template = template

    def read(self, prompt: Prompt | Sequence[Any]) -> tuple[str | None, list[int]]:
        """Text and token ids of a prompt; the text is None for token ids."""
        if isinstance(prompt, str):
            if not prompt:
                raise UserError("the prompt is empty: give some text, or token ids to start from a special token")
            return prompt, self._ids(prompt, add_special_tokens=True)
        items: list[Any] = list(prompt)
        if items and isinstance(items[0], Mapping):
            text = self.chat_text(items)
            return text, self._ids(text, add_special_tokens=False)
        if {*map(type, items)} <= {int}:  # much faster than a loop over a long prompt
            return None, items
        for place, token in enumerate(items):
            if isinstance(token, bool) or not isinstance(token, numbers.Integral):
                raise UserError(f"token {place} of the prompt: expected a whole number, got {token!r}")
        return None, [int(token) for token in items]

    def plain(self, text: str) -> list[int]:
        """Token ids of a text without special tokens."""
        return self._ids(text, add_special_tokens=False)

    def bad_words(self, words: Sequence[str], encode: Callable[[str], Sequence[int]] | None = None) -> BadWords:
        """Texts that an output never completes: encoded once for all prompts and requests that name the same.

        They are known as long as somebody holds what this returns, so a server has them encoded outside its engine's
        thread, by an `encode` of its own.
        """
        if not words:  # of most requests; nothing is kept for them
            return BadWords()
        key = tuple(words)
        found = self._words.get(key)
        if found is None:
            known = None if self.tokenizer is None else self.plain
            self._words[key] = found = BadWords(bad_word_ids(key, encode or known))
            self._recent.append(found)
        return found

    @property
    def markers(self) -> ReasoningMarkers | None:
        """Of the model's reasoning; None where its chat template has none that are tokens of their own."""
        template = getattr(self.tokenizer, "chat_template", None)  # which may be replaced
        if template != self._template:
            self._markers = reasoning_markers(self.tokenizer)
            self._template = template
        return self._markers

    def reasoning(self, ids: Sequence[int]) -> Reasoning | None:
        """How the answer to a chat, given as the prompt's token ids, begins; None where all of it is the answer."""
        if self.markers is None:
            return None
        last = ids[-MOST_BLANK:]
        return reasoning_after(ids, self.markers, {token for token in last if self._is_blank(token)})

    def _is_blank(self, token: int) -> bool:
        text = self._required().decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return not str(text).strip()

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The model's chat template applied to messages, ready for an answer.

        `tools` are shown to the model, as transformers takes them. Of the template's `options`, such as
        enable_thinking, those that it does not name are left out.
        """
        tokenizer = self._required()
        if not self.has_template:
            raise UserError(f"{self._model} has no chat template: give the prompt as plain text")
        texts = [_text_only(place, message) for place, message in enumerate(messages)]
        try:
            shown: dict[str, Any] = {} if tools is None else {"tools": list(tools)}
            template = str(tokenizer.chat_template)
            shown |= {name: value for name, value in options.items() if re.search(rf"\b{re.escape(name)}\b", template)}
            made = tokenizer.apply_chat_template(texts, add_generation_prompt=True, tokenize=False, **shown)
        except Exception as cause:
            raise UserError(f"the chat template of {self._model} refuses the messages: {reason(cause)}") from cause
        return str(made)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        tokenizer = self._required()
        place = next((at for at, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
        if place is not None:
            raise UserError(
                f"character {place} of the prompt is a lone surrogate (U+{ord(text[place]):04X}), which no text can "
                "hold: decode the bytes it came from with errors='replace', or remove it"
            )
        return [int(token) for token in tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]]

    def _required(self) -> Any:
        if self.tokenizer is None:
            raise UserError("the engine has no tokenizer: give prompts as token ids")
        return self.tokenizer


def _text_only(place: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with its content as one text."""
    content = message.get("content")
    if isinstance(content, str) or not isinstance(content, Sequence):
        return message
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UserError(
                f"message {place}: expected parts of type text, got {kind!r}: images, sound and video are not read, "
                "also where the model could"
            )
    return {**message, "content": "\n".join(part["text"] for part in content)}


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is the messages of a chat."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list: a text, a list of token ids and a list of messages are one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):  # those would give keys, and numbers
        raise UserError(
            "prompts: expected a text, token ids, chat messages (a list), or a list of those, got "
            f"{type(prompts).__name__}"
        )
    items: list[Any] = list(prompts)
    if not items:
        raise UserError("no prompt given")
    if isinstance(items[0], int | Mapping):
        return [items]
    for item in items:
        if not isinstance(item, str | list | tuple):
            raise UserError(f"prompt: expected a text, token ids, or chat messages, got {item!r}")
    return items
