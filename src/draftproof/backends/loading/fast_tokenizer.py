"""A model's tokenizer without transformers: what the engine asks of one, by the library `tokenizers` alone.

Importing transformers and making its tokenizer takes longer than loading a small model. So what `describe` has compared
with transformers' tokenizer once is done here, and transformers' is loaded as soon as anything else is asked.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from draftproof.models.gguf_text import TextRules

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TEXTS = (
    "Once upon a time, there was a cat.\n\n  It's 12345.67 € – “naïve” 東京\t🙂\u200d",
    " leading and  double  blanks \n",
    "def f(x):\n    return {'a': [x, -1e9]}  # <s> </s> <|im_start|>user<|im_end|>",
)
_CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": " What is 2 + 2? <b>&amp;</b>\n"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!\n"},
        {"role": "user", "content": "Who?"},
    ],
)
LEFT_TO_TRANSFORMERS = ("strftime_now", "tojson", "generation %", "generation-%")  # in chat templates
_IDS = 200  # how many single ids `describe` compares


@dataclass(frozen=True)
class Description:
    """What a tokenizer's file does not say."""

    eos_token_id: int | None
    bos_token_id: int | None
    special_tokens: dict[str, Any]  # as chat templates get them, by name
    chat_template: str | None  # in Jinja's language; None where there is none
    renders: bool  # whether the template makes the same text here
    # how answers are read back, as transformers has it; None where there is none
    response_template: dict[str, Any] | None = None


class FastTokenizer:
    """Encodes, decodes and applies the chat template as transformers' tokenizer does, and asks that for all else."""

    chat_begin: tuple[int, ...] = ()  # tokens that a chat begins with, even if its template does not

    def __init__(self, content: str, description: Description, original: Callable[[], Any]) -> None:
        self._tokenizer = _plain(content)
        self._description = description
        self._original = functools.cache(original)
        self.eos_token_id = description.eos_token_id
        self.bos_token_id = description.bos_token_id
        self._template = description.chat_template

    @property
    def chat_template(self) -> str | None:
        """In Jinja's language; it may be replaced."""
        return self._template

    @chat_template.setter
    def chat_template(self, template: str | None) -> None:
        self._template = template
        self._original().chat_template = template

    @property
    def response_template(self) -> dict[str, Any] | None:
        """How answers are read back."""
        return self._description.response_template

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """The template for chats with such tools."""
        if chat_template is None and self._template is not None:
            return self._template
        return str(self._original().get_chat_template(chat_template, tools))

    def __call__(self, text: Any, *args: Any, add_special_tokens: bool = True, **options: Any) -> Any:
        """The token ids of a text, as `input_ids`; other arguments than these two are transformers' own."""
        if args or options or not isinstance(text, str):
            return self._original()(text, *args, add_special_tokens=add_special_tokens, **options)
        return {"input_ids": self._encode(text, special=add_special_tokens)}

    def _encode(self, text: str, *, special: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **options: Any,
    ) -> Any:
        """The text of token ids; other arguments than a list without clean-up are transformers' own."""
        if clean_up_tokenization_spaces is not False or options or not isinstance(token_ids, list):
            return self._original().decode(
                token_ids,
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=clean_up_tokenization_spaces,
                **options,
            )
        return self._decode(token_ids, skip=skip_special_tokens)

    def _decode(self, token_ids: list[int], *, skip: bool) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip))

    def convert_ids_to_tokens(self, ids: Any, **options: Any) -> Any:
        """The token of an id; other arguments are transformers' own."""
        if options or not isinstance(ids, int):
            return self._original().convert_ids_to_tokens(ids, **options)
        return self._tokenizer.id_to_token(ids)

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """The tokenizer of the library `tokenizers`, as transformers' class calls it."""
        return self._tokenizer

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Added tokens by id, as transformers' class calls them."""
        return dict(self._tokenizer.get_added_tokens_decoder())

    def get_vocab(self) -> dict[str, int]:
        """Ids by token, added tokens among them."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        """The prompt of chat messages; messages or options out of the ordinary are left to transformers."""
        plain = options == {"add_generation_prompt": True, "tokenize": False}
        if plain and self._given and _is_plain(messages):
            try:
                return _render(self._description, messages)
            except Exception:  # noqa: BLE001 - transformers' own error is the one to show
                return self._original().apply_chat_template(messages, **options)
        return self._original().apply_chat_template(messages, **options)

    @property
    def _given(self) -> bool:
        """Whether the template makes the same text here, and is still the one that was described."""
        return self._description.renders and self._template == self._description.chat_template

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._original(), name)


class RuledTokenizer(FastTokenizer):
    """A tokenizer whose tokens and texts follow rules that the library does not have."""

    def __init__(self, content: str, description: Description, original: Callable[[], Any], rules: TextRules) -> None:
        super().__init__(content, description, original)
        self._rules = rules
        self.chat_begin = rules.begin

    @override
    def _encode(self, text: str, *, special: bool) -> list[int]:
        ids = self._rules.ids(text, lambda part: super(RuledTokenizer, self)._encode(part, special=False))
        return [*self._rules.begin, *ids, *self._rules.end] if special else ids

    @override
    def _decode(self, token_ids: list[int], *, skip: bool) -> str:
        return self._rules.text(token_ids, skip=skip)


def describe(tokenizer: Any) -> tuple[str, dict[str, Any]] | None:
    """What a `FastTokenizer` that does the same as a tokenizer is made of; None where there is no such one."""
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer) or getattr(tokenizer, "split_special_tokens", False):
        return None
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
    if template is None and tokenizer.chat_template:
        return None
    special = {name: value for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str | list)}
    reads = getattr(tokenizer, "response_template", None)  # of newer versions of transformers
    found = Description(tokenizer.eos_token_id, tokenizer.bos_token_id, special, template, False, reads)
    try:
        content, row = backend.to_str(), asdict(found)
        json.dumps(row)
    except Exception:  # noqa: BLE001 - a tokenizer with parts written in Python cannot be saved
        return None
    if not _agrees(FastTokenizer(content, found, lambda: tokenizer), tokenizer):
        return None
    return content, {**row, "renders": template is not None and _renders(found, tokenizer)}


def _agrees(ours: FastTokenizer, theirs: Any) -> bool:
    size = len(ours)
    encoded = [list(theirs(text, add_special_tokens=on)["input_ids"]) for text in _TEXTS for on in (True, False)]
    if encoded != [ours(text, add_special_tokens=on)["input_ids"] for text in _TEXTS for on in (True, False)]:
        return False
    ids = [place * (size - 1) // _IDS for place in range(_IDS + 1)]
    rows = [*encoded, *([each] for each in ids), ids]
    options = [{"skip_special_tokens": skip, "clean_up_tokenization_spaces": False} for skip in (True, False)]
    return (
        all(ours.decode(row, **option) == theirs.decode(row, **option) for row in rows for option in options)
        and all(ours.convert_ids_to_tokens(each) == theirs.convert_ids_to_tokens(each) for each in ids)
        and ours.get_vocab() == theirs.get_vocab()
    )


def _renders(found: Description, tokenizer: Any) -> bool:
    """Whether the chat template makes the same text with and without transformers."""
    if any(word in (found.chat_template or "") for word in LEFT_TO_TRANSFORMERS):
        return False
    return all(
        _outcome(functools.partial(_render, found, chat))
        == _outcome(functools.partial(tokenizer.apply_chat_template, chat, add_generation_prompt=True, tokenize=False))
        for chat in _CHATS
    )


def _outcome(make: Callable[[], str]) -> str | None:
    try:
        return make()
    except Exception:  # noqa: BLE001 - templates may refuse a chat
        return None


def _is_plain(messages: Any) -> bool:
    """Whether messages have a role and a text, and nothing else."""
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(
            isinstance(each, Mapping)
            and set(each) == {"role", "content"}
            and all(isinstance(value, str) for value in each.values())
            for each in messages
        )
    )


def _render(found: Description, messages: Sequence[Mapping[str, str]]) -> str:
    assert found.chat_template is not None, "only descriptions with a template render"
    chat = [dict(each) for each in messages]
    text = _template(found.chat_template).render(messages=chat, add_generation_prompt=True, **found.special_tokens)
    return str(text)


@functools.lru_cache(maxsize=8)
def _template(text: str) -> Any:
    """A chat template, in the environment that transformers documents for them."""
    from jinja2.exceptions import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals.update(raise_exception=refuse, tools=None, documents=None)
    return environment.from_string(text)


def _plain(content: str) -> Tokenizer:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
