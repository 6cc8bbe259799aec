"""The tokenizer of a GGUF file as one of transformers, with llama.cpp's tokens and texts; imports transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast
from typing_extensions import override

from draftproof.errors import UserError
from draftproof.models.gguf_text import TextRules

_LIBRARY_ONLY = (
    "text_pair", "is_split_into_words", "return_offsets_mapping", "return_overflowing_tokens",
    "return_special_tokens_mask", "split_special_tokens", "sanitize_control_tokens",
)  # fmt: skip
"""Arguments that only the library `tokenizers` can answer."""


class TransformersTokenizer(PreTrainedTokenizerFast):
    """What transformers asks of a tokenizer; texts and tokens follow the rules that its library does not have.

    Args:
        rules: of the file.
        named: arguments of transformers' class.
    """

    def __init__(self, *, rules: TextRules, **named: Any) -> None:
        begin: Any = super().__init__
        begin(**named)
        self._rules = rules

    @override
    def _encode_plus(self, *given: Any, **named: Any) -> Any:
        if self._rules.wholes is None:  # the library has the same tokens
            return super()._encode_plus(*given, **named)
        return self._encode_by_rules(*given, **named)

    def _encode_by_rules(
        self,
        text: str | Sequence[str],
        text_pair: Any = None,
        add_special_tokens: bool = True,
        padding_strategy: Any = False,
        truncation_strategy: Any = "do_not_truncate",
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_tensors: Any = None,
        return_token_type_ids: bool | None = None,
        return_attention_mask: bool | None = None,
        return_length: bool = False,
        **more: Any,
    ) -> Any:
        """As transformers' method, whose arguments these are."""
        asked = [name for name in _LIBRARY_ONLY if {"text_pair": text_pair, **more}.get(name)]
        if asked:
            raise UserError(
                f"the tokenizer of this .gguf file has rules that transformers' has not: expected texts alone, got "
                f"{', '.join(asked)} (take the tokenizer of the model's own directory or hub id)"
            )
        cut = (
            max_length if str(getattr(truncation_strategy, "value", truncation_strategy)) != "do_not_truncate" else None
        )
        rows = [
            self._row(each, cut, special=add_special_tokens) for each in ([text] if isinstance(text, str) else text)
        ]
        made: dict[str, Any] = {"input_ids": rows}
        if return_token_type_ids or (return_token_type_ids is None and "token_type_ids" in self.model_input_names):
            made["token_type_ids"] = [[0] * len(row) for row in rows]
        if return_length:
            made["length"] = [len(row) for row in rows]
        alone = isinstance(text, str) and return_tensors is None
        return self.pad(
            {name: each[0] for name, each in made.items()} if alone else made,
            padding=padding_strategy,
            max_length=max_length,
            pad_to_multiple_of=pad_to_multiple_of,
            padding_side=padding_side,
            return_attention_mask=return_attention_mask,
            return_tensors=return_tensors,
            verbose=False,
        )

    def _row(self, text: str, most: int | None, *, special: bool) -> list[int]:
        """The tokens of a text, of which at most so many are left with those at its ends."""

        def plain(part: str) -> list[int]:
            return list(self.backend_tokenizer.encode(part, add_special_tokens=False).ids)

        ids = self._rules.ids(text, plain)
        begin, end = (self._rules.begin, self._rules.end) if special else ((), ())
        if most is not None:
            room = max(most - len(begin) - len(end), 0)
            ids = ids[:room] if self.truncation_side == "right" else ids[len(ids) - min(room, len(ids)) :]
        return [*begin, *ids, *end]

    @override
    def tokenize(self, *given: Any, **named: Any) -> list[str]:
        if self._rules.wholes is None:
            return list(super().tokenize(*given, **named))
        found = self._encode_by_rules(*given, **{"add_special_tokens": False, **named})
        return list(self.convert_ids_to_tokens(found["input_ids"]))

    @override
    def _decode(self, *given: Any, **named: Any) -> str:
        return self._text(*given, **named)

    def _text(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = token_ids["input_ids"] if isinstance(token_ids, dict) else token_ids
        return self._rules.text([ids] if isinstance(ids, int) else ids, skip=skip_special_tokens)

    @override
    def save_pretrained(self, *given: Any, **named: Any) -> Any:
        """Save what the library can express, as transformers' own class.

        Raises:
            UserError: that would have other tokens.
        """
        if self._rules.wholes is not None:
            raise UserError(
                "the tokenizer of this .gguf file has rules that transformers cannot save: expected one whose tokens "
                "the library `tokenizers` makes, too (take that of the model's own directory or hub id)"
            )
        kind: Any = PreTrainedTokenizerFast
        plain = kind(tokenizer_object=self.backend_tokenizer, **self.special_tokens_map)
        plain.chat_template = self.chat_template
        plain.model_max_length = self.model_max_length
        return plain.save_pretrained(*given, **named)
