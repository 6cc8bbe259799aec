"""Types of tokens in GGUF files, and tokens that end a text: what files say, and what llama.cpp knows by texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

import numpy as np

from draftproof.errors import UserError
from draftproof.models.gguf_file import GGUFFile


class TokenType(IntEnum):
    """What a token is, by the numbers that files have; those that are not here have no text."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    BYTE = 6


HIDDEN = frozenset({TokenType.UNKNOWN, TokenType.CONTROL})
"""Types of tokens that are in no text without special tokens."""

WHOLE = HIDDEN | {TokenType.USER_DEFINED}
"""Types of tokens that are found in a text before it is split."""

_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
)  # fmt: skip
"""Texts of tokens that end an answer, of whatever type, as llama.cpp collects them (llama-vocab.cpp)."""

_FILLS = {
    "pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "sep": ("<|file_sep|>",),
}
"""Likewise of tokens for code that is filled in, by the name in keys; the first one counts where no key names one."""

_PARTS = {
    "pre": (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>", "\u2581<PRE>",
        "<|code_prefix|>", "<|prefix|>",
    ),
    "suf": (
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>", "\u2581<SUF>",
        "<|code_suffix|>", "<|suffix|>",
    ),
    "mid": (
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>", "\u2581<MID>",
        "<|code_middle|>", "<|middle|>",
    ),
}  # fmt: skip
"""Likewise of tokens around such code, which end nothing."""

_DEFAULTS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {"bos": 11, "eos": 11},
}
"""Ids that llama.cpp takes where a file with such a tokenizer names none."""

_WITHOUT_BOS = ("chatglm-bpe", "glm4", "glm5")  # pre-tokenizers whose files have no default for that

_OLD_KEYS = {"pre": "prefix", "suf": "suffix", "mid": "middle"}
_SHOWN = (
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|constrain|>",
)  # of gpt-oss: texts have them, whatever their type

_NO_ENDS = {
    "<|end|>": (("<|return|>", "<|flush|>"), ("<|call|>", "<|calls|>")),
    "</s>": (("<|tool_response>", "<|plamo:eos|>"),),
}
"""Texts that end nothing where one of each of these ends is there: gpt-oss ends a channel with the first one."""


def end_tokens(file: GGUFFile) -> tuple[int, ...]:
    """Ids of the tokens that end a text: those that metadata name, and those with a text that is known for it."""
    ids = _ids(file)
    found = [role_token(file, "eos"), _named(file, "eot"), _named(file, "eom")]
    found += [ids[text] for text in _ENDS if text in ids]
    for kind, texts in _FILLS.items():
        of_key = _named(file, f"fim_{kind}")
        found.append(_first(texts, ids) if of_key is None else of_key)
    made = dict.fromkeys(each for each in found if each is not None)
    for text in _no_ends(made, ids):
        made.pop(ids[text])
    return tuple(made)


def role_token(file: GGUFFile, role: str) -> int | None:
    """The token that a file names for a role (`bos`, `eos`, `unknown`, `padding`), or that llama.cpp takes without.

    Raises:
        UserError: the file names a token that it does not have.
    """
    size = len(file.get("tokenizer.ggml.tokens", []))
    found = _named(file, role)
    if found is not None:
        if size and found >= size:
            raise UserError(
                f"{file.path}: tokenizer.ggml.{role}_token_id: expected a token below {size}, got {found} (take "
                "another conversion of the model)"
            )
        return found
    if role == "bos" and file.get("tokenizer.ggml.pre") in _WITHOUT_BOS:
        return None
    default = _DEFAULTS.get(file.get("tokenizer.ggml.model"), {}).get(role)
    return default if default is not None and default < size else None


def token_types(file: GGUFFile) -> list[int]:
    """The type of each token: that of the file, or what llama.cpp takes a token with such a text for."""
    tokens = file.get("tokenizer.ggml.tokens")
    given = file.get("tokenizer.ggml.token_type")
    found = [int(TokenType.NORMAL)] * len(tokens) if given is None else np.asarray(given).tolist()
    ids = _ids(file)
    for text in _ENDS:
        if text in ids:
            found[ids[text]] = _as_control(found[ids[text]])
    for kind, texts in {**_FILLS, **_PARTS}.items():
        if _named(file, f"fim_{kind}") is None and _named(file, _OLD_KEYS.get(kind, "")) is None:
            token = _first(texts, ids)
            if token is not None:
                found[token] = _as_control(found[token])
    for text in _SHOWN:
        if text in ids:
            found[ids[text]] = TokenType.USER_DEFINED
    ends = [ids[text] for text in _ENDS if text in ids] + [role_token(file, "eos")]
    ends += [_named(file, "eot"), _named(file, "eom")]
    for text in _no_ends(dict.fromkeys(each for each in ends if each is not None), ids):
        found[ids[text]] = TokenType.USER_DEFINED if text == "<|end|>" else TokenType.NORMAL
    return found


def _as_control(kind: int) -> int:
    """The type of a token that is one for control, too: an unknown one stays unknown, which is the same here."""
    return kind if kind in HIDDEN else TokenType.CONTROL


def _no_ends(ends: Mapping[int, object], ids: Mapping[str, int]) -> list[str]:
    """Texts of tokens among some ends that end nothing."""
    return [
        text
        for text, others in _NO_ENDS.items()
        if ids.get(text) in ends and all(any(ids.get(each) in ends for each in some) for some in others)
    ]


def _ids(file: GGUFFile) -> dict[str, int]:
    """Tokens with a text that is known here."""
    texts = (*_ENDS, *_SHOWN, *(text for group in (*_FILLS.values(), *_PARTS.values()) for text in group))
    known = {*texts, *(text for others in _NO_ENDS.values() for some in others for text in some)}
    return {text: number for number, text in enumerate(file.get("tokenizer.ggml.tokens", [])) if text in known}


def _first(texts: Sequence[str], ids: Mapping[str, int]) -> int | None:
    return next((ids[text] for text in texts if text in ids), None)


def _named(file: GGUFFile, kind: str) -> int | None:
    found = file.get(f"tokenizer.ggml.{kind}_token_id")
    return None if found is None else int(found)
