"""Conversion of prompts (a text, token ids or chat messages) to token ids."""

from __future__ import annotations

import numbers
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable
from weakref import WeakValueDictionary

from draftproof.bad_words import BadWords, bad_word_ids
from draftproof.errors import UserError, reason
from draftproof.reasoning import MOST_BLANK, Reasoning, ReasoningMarkers, reasoning_after, reasoning_markers

_MARKS = re.compile(r"{%[-+]?\s*(?:end)?generation\s*[-+]?%}")  # transformers' own tag, around answers
_RECENT = 8  # encoded sets of bad words that are kept when no request uses them any more


@runtime_checkable
class TokenArray(Protocol):
    """An array of token ids, of numpy or torch."""

    @property
    def shape(self) -> Any:
        """The sizes of its dimensions."""

    def tolist(self) -> Any:
        """Its items as numbers of Python."""


Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | TokenArray


class PromptReader:
    """Turns prompts into token ids with a model's tokenizer; without one, all prompts must be token ids."""

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
        """Replace the model's chat template; raises UserError for one that is empty, or no template of jinja."""
        if self.tokenizer is None:
            raise UserError(f"a chat template needs a tokenizer, but {self._model} has none: leave it out")
        _check_syntax(template)
        self.tokenizer.chat_template = template

    def read(self, prompt: Prompt | Sequence[Any], what: str = "prompt") -> tuple[str | None, list[int]]:
        """Text and token ids of a prompt; the text is None for token ids. Errors call the prompt `what`."""
        if isinstance(prompt, str):
            if not prompt:
                raise UserError(f"the {what} is empty: pass some text, or token ids to start from a special token")
            return prompt, self._ids(prompt, add_special_tokens=True)
        items = _items(prompt, what, "a text, token ids, or chat messages")
        if items and isinstance(items[0], Mapping):
            text = self.chat_text(items)
            return text, self.chat_ids(text)
        if {*map(type, items)} <= {int}:  # much faster than a loop over a long prompt
            return None, items
        for place, token in enumerate(items):
            if isinstance(token, bool) or not isinstance(token, numbers.Integral):
                raise UserError(f"token {place} of the {what}: expected an integer, got {token!r}")
        return None, [int(token) for token in items]

    def plain(self, text: str) -> list[int]:
        """Token ids of a text without special tokens."""
        return self._ids(text, add_special_tokens=False)

    def chat_ids(self, text: str) -> list[int]:
        """Token ids of a chat to which the template was applied.

        A tokenizer of a GGUF file puts BOS before a chat as before a text, where the template does not.
        """
        ids = self._ids(text, add_special_tokens=False)
        begin = list(getattr(self.tokenizer, "chat_begin", ()))
        return ids if ids[: len(begin)] == begin else [*begin, *ids]

    def bad_words(self, words: Sequence[str], encode: Callable[[str], Sequence[int]] | None = None) -> BadWords:
        """Texts that must not occur in an output, encoded once for all requests with the same words.

        The result is cached as long as a caller holds it, so a server can encode words outside its engine's thread,
        with its own `encode`.
        """
        if not words:  # as in most requests; nothing is cached for them
            return BadWords()
        key = tuple(words)
        found = self._words.get(key)
        if found is None:
            own = None if self.tokenizer is None else self.plain
            self._words[key] = found = BadWords(bad_word_ids(key, encode or own))
            self._recent.append(found)
        return found

    @property
    def markers(self) -> ReasoningMarkers | None:
        """The markers around the model's reasoning; None if its chat template has none that are single tokens."""
        template = getattr(self.tokenizer, "chat_template", None)  # may be replaced at any time
        if template != self._template:
            self._markers = reasoning_markers(self.tokenizer)
            self._template = template
        return self._markers

    def reasoning(self, ids: Sequence[int]) -> Reasoning | None:
        """Whether and where the answer to these token ids of a chat reasons first; None if all of it is the answer."""
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
        """Apply the model's chat template to messages, up to the beginning of the answer.

        `tools` are described to the model, in transformers' form. `options` of the template, such as enable_thinking,
        are left out if it does not use them.
        """
        tokenizer = self._required()
        if not self.has_template:
            raise UserError(f"{self._model} has no chat template: pass the prompt as plain text")
        texts = [_text_only(place, message) for place, message in enumerate(messages)]
        try:
            given: dict[str, Any] = {} if tools is None else {"tools": list(tools)}
            template = str(tokenizer.chat_template)
            given |= {name: value for name, value in options.items() if re.search(rf"\b{re.escape(name)}\b", template)}
            text = tokenizer.apply_chat_template(texts, add_generation_prompt=True, tokenize=False, **given)
        except Exception as cause:
            raise UserError(f"the chat template of {self._model} refuses the messages: {reason(cause)}") from cause
        return str(text)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        tokenizer = self._required()
        place = next((at for at, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
        if place is not None:
            raise UserError(
                f"character {place} of the prompt is a lone surrogate (U+{ord(text[place]):04X}), which is not valid "
                "Unicode: decode the bytes it came from with errors='replace', or remove it"
            )
        return [int(token) for token in tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]]

    def _required(self) -> Any:
        if self.tokenizer is None:
            raise UserError("the engine has no tokenizer: pass prompts as token ids")
        return self.tokenizer


def _check_syntax(template: str) -> None:
    """Refuse a chat template that no message could be rendered with; nothing is rendered."""
    from jinja2 import Environment, TemplateSyntaxError
    from jinja2.ext import loopcontrols

    if not template.strip():
        raise UserError("the chat template is empty: expected a template of jinja")
    try:
        Environment(extensions=[loopcontrols]).from_string(_MARKS.sub("", template))  # noqa: S701 - no HTML
    except TemplateSyntaxError as error:
        raise UserError(f"the chat template has a mistake in line {error.lineno}: {error.message}") from error


def _text_only(place: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with its content as one text."""
    content = message.get("content")
    if isinstance(content, str) or not isinstance(content, Sequence):
        return message
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UserError(
                f"message {place}: expected parts of type text, got {kind!r} (images, sound and video are not "
                "supported, even if the model reads them)"
            )
    return {**message, "content": "\n".join(part["text"] for part in content)}


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is a list of chat messages."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list of prompts; a list of token ids or of messages is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts, "prompts", "a text, token ids, chat messages (a list), or a list of those")
    if not items:
        raise UserError("prompts: expected at least one prompt, got an empty list")
    if isinstance(items[0], numbers.Integral | Mapping):
        return [items]
    for item in items:
        if not isinstance(item, str | list | tuple | TokenArray):
            raise UserError(f"prompt: expected a text, token ids, or chat messages, got {item!r}")
    return items


def one_for_each(name: str, given: Any, single: type, count: int) -> list[Any]:
    """An argument that is one object for all prompts (or None), or a list with one for each of `count` prompts."""
    if given is None or isinstance(given, single):
        return [given] * count
    kind = "text" if single is str else single.__name__
    items = _items(given, name, f"one {kind}, or a list with one for each prompt")
    if len(items) != count:
        raise UserError(f"{name}: expected one {kind}, or {count} for as many prompts, got {len(items)}")
    return items


def _items(given: Any, name: str, expected: str) -> list[Any]:
    """The items of a list or of an array of one dimension."""
    if isinstance(given, TokenArray):
        if len(given.shape) != 1:  # rows of one length may be padded, and padding is no part of a prompt
            raise UserError(
                f"{name}: expected one dimension, got an array of shape {tuple(given.shape)} (pass a list of token "
                "ids for each prompt, without padding)"
            )
        return list(given.tolist())
    if isinstance(given, Mapping | bytes) or not isinstance(given, Iterable):  # they iterate over keys and numbers
        raise UserError(f"{name}: expected {expected}, got {type(given).__name__}")
    return list(given)
