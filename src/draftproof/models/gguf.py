"""Tokenizers of GGUF files: the file names how text is split, and what transformers made of it is put right.

A GGUF file has the tokens and merges of a byte-level tokenizer, but only the name of its pre-tokenizer
(`tokenizer.ggml.pre`). Transformers knows some of these names and reads all others as GPT-2's. Where a name is known
here, the tokenizer gets what the name demands; where it is not, a warning says that tokens may be others than those
that the model was trained with.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftproof.models.gguf_file import GGUFFile

_MODEL, _PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
BYTE_LEVEL = "gpt2"  # the model of byte-level tokenizers; others have no pre-tokenizer to name
_log = logging.getLogger(__name__)

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    """The expression of Llama 3 and its kin: words with a sign before them, digits in groups, signs with line ends."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"


def _cases(digits: str, ending: str) -> str:
    """The expression of GPT-4o and its kin: words are cut where capitals begin."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"


@dataclass(frozen=True)
class _Known:
    """What a name of a pre-tokenizer demands.

    Attributes:
        expression: that splits a text; None for GPT-2's own.
        single_digits: whether each digit stands alone before that.
        whole_words: whether a word that is a token is taken without looking at merges.
    """

    expression: str | None = None
    single_digits: bool = False
    whole_words: bool = False


_LLAMA3, _QWEN2 = _Known(_words(r"\p{N}{1,3}"), whole_words=True), _Known(_words(r"\p{N}"))
KNOWN = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), _Known()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _Known(single_digits=True)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Known(_words(r"\p{N}{1,3}"))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _Known(_cases(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"))),
    "tekken": _Known(_cases(r"\p{N}", ""), whole_words=True),
}
"""What names demand, as llama.cpp reads them; only names whose reading is certain."""


def settle(tokenizer: Any, path: Path) -> None:
    """Give a tokenizer that transformers made of a GGUF file the pre-tokenizer that the file names, or warn.

    Args:
        tokenizer: of transformers; changed in place.
        path: the file.

    Raises:
        UserError: the file cannot be read.
    """
    file = GGUFFile(path)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if file.get(_MODEL) != BYTE_LEVEL or backend is None:
        return
    known = KNOWN.get(file.get(_PRE, ""))
    if known is None:
        _log.warning(
            "%s names the pre-tokenizer %r, which is not known here: numbers, blanks and signs may get other tokens "
            "than the model was trained with; take the model's own directory or hub id where that matters",
            path,
            file.get(_PRE, "none"),
        )
        return
    backend.pre_tokenizer = pre_tokenizer(known)
    backend.model.ignore_merges = known.whole_words


def pre_tokenizer(known: _Known) -> Any:
    """What splits a text, of the library `tokenizers`."""
    from tokenizers import Regex, pre_tokenizers

    if known.expression is None:
        bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if not known.single_digits:
            return bytes_of_words
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_of_words])
    split = pre_tokenizers.Split(Regex(known.expression), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
