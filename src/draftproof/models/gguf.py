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

_CONTRACTIONS = "(?:'[sStTmMdD]|'[rR][eE]|'[vV][eE]|'[lL][lL])"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    """The expression of Llama 3 and its kin: words with a sign before them, digits in groups, signs with line ends."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"


def _cases(digits: str, ending: str) -> str:
    """The expression of GPT-4o and its kin: words are cut where capitals begin."""
    start, upper, lower = r"[^\r\n\p{L}\p{N}]?", r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
    words = rf"{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"


@dataclass(frozen=True)
class _Known:
    """What a name of a pre-tokenizer demands.

    Attributes:
        expressions: that split a text, each the pieces of the one before.
        whole_words: whether a word that is a token is taken without looking at merges.
    """

    expressions: tuple[str, ...]
    whole_words: bool = False


_THREES = _words(r"\p{N}{1,3}")
KNOWN = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), _Known((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _Known((r"\p{N}", _GPT2))),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), _Known((_THREES,), whole_words=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Known((_THREES,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _Known((_words(r"\p{N}"),))),
    **dict.fromkeys(("gpt-4o", "llama4"), _Known((_cases(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),))),
    "tekken": _Known((_cases(r"\p{N}", ""),), whole_words=True),
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

    splits = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in known.expressions]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
