"""Tokenizers of GGUF files: byte-level ones, SentencePiece's with scores, and Gemma 4's, as llama.cpp reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from draftproof.errors import UserError, reason
from draftproof.models.gguf import BYTE_LEVEL, known_of, pre_tokenizer
from draftproof.models.gguf_file import GGUFFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SCORED = "llama"  # the model of SentencePiece's tokenizers with scores, whose words begin with _SPACE
_SPACE = "\u2581"
_MERGED = "gemma4"  # the model of tokenizers with merges of characters, where blanks are _SPACE
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # types of tokens that are never split
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # names in chat templates and in the file


@dataclass(frozen=True)
class FileTokenizer:
    """The tokenizer of a file."""

    tokenizer: Tokenizer  # of the library `tokenizers`
    eos_token_id: int | None  # as the file names them
    bos_token_id: int | None
    special_tokens: dict[str, str]  # as chat templates get them, `bos_token` and others that are never split
    chat_template: str | None  # in Jinja's language; None where there is none

    def for_transformers(self) -> Any:
        """The same as a tokenizer of transformers."""
        from transformers import PreTrainedTokenizerFast

        kind: Any = PreTrainedTokenizerFast
        made = kind(tokenizer_object=self.tokenizer, **self.special_tokens)
        made.chat_template = self.chat_template
        return made


def read_file_tokenizer(file: GGUFFile) -> FileTokenizer | None:
    """The tokenizer of a file; None where it is of a kind that is not read here."""
    kinds = {BYTE_LEVEL: _byte_level, _SCORED: _scored, _MERGED: _merged}
    make = kinds.get(file.get("tokenizer.ggml.model"))
    if make is None:
        return None
    try:
        return _described(make(file), file)
    except UserError:
        raise
    except Exception as cause:  # the library raises no narrower one
        raise UserError(f"cannot make the tokenizer of {file.path}: {reason(cause)}") from cause


def _byte_level(file: GGUFFile) -> Tokenizer:
    """Byte-pair encoding of bytes, whose texts are split by an expression that the file names."""
    from tokenizers import Tokenizer, decoders, models

    known = known_of(file)
    made = Tokenizer(models.BPE(**_vocabulary(file), ignore_merges=known.whole_words))
    made.pre_tokenizer = pre_tokenizer(known)
    made.decoder = decoders.ByteLevel()
    return made


def _vocabulary(file: GGUFFile) -> dict[str, Any]:
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges")]
    return {
        "vocab": {token: number for number, token in enumerate(file.get("tokenizer.ggml.tokens"))},
        "merges": merges,
    }


def _merged(file: GGUFFile) -> Tokenizer:
    """Byte-pair encoding of characters; what is no token is bytes, and line ends that are a token together stay so."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    made = Tokenizer(models.BPE(**_vocabulary(file), byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", _SPACE)
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    made.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    lines = [token for token in file.get("tokenizer.ggml.tokens") if token and not token.strip("\n")]
    made.add_tokens([AddedToken(each, normalized=False) for each in lines if len(made.encode(each).ids) > 1])
    return made


def _scored(file: GGUFFile) -> Tokenizer:
    """Pairs of tokens that are a token are joined, the best score first: merges in the order of their scores."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = file.get("tokenizer.ggml.tokens")
    scores = np.asarray(file.get("tokenizer.ggml.scores")).tolist()
    vocab = {token: number for number, token in enumerate(tokens)}
    unknown = file.get("tokenizer.ggml.unknown_token_id")
    merges = _merges(tokens, scores, vocab)
    unk = None if unknown is None else tokens[unknown]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    prefixed = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    steps = [normalizers.Prepend(_SPACE)] if prefixed else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    ends = [decoders.Strip(" ", 1, 0)] if prefixed else []
    made.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    return made


def _merges(tokens: Sequence[str], scores: Sequence[float], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    found = []
    for number, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[number], number, left, right))
    found.sort()
    return [(tokens[left], tokens[right]) for *_, left, right in found]


def _described(made: Tokenizer, file: GGUFFile) -> FileTokenizer:
    """A tokenizer with the file's special tokens and its chat template."""
    from tokenizers import AddedToken

    tokens = file.get("tokenizer.ggml.tokens")
    ids = {name: file.get(f"tokenizer.ggml.{role}_token_id") for name, role in _ROLES.items()}
    texts = {name: tokens[number] for name, number in ids.items() if number is not None}
    kinds = np.asarray(file.get("tokenizer.ggml.token_type", np.ones(len(tokens))))
    special = [tokens[each] for each in np.flatnonzero((kinds == _CONTROL) | (kinds == _UNKNOWN))]
    special += [texts[name] for name in ("bos", "eos") if name in texts and texts[name] not in special]
    made.add_special_tokens([AddedToken(each, normalized=False) for each in special])
    made.add_tokens([AddedToken(tokens[each], normalized=False) for each in np.flatnonzero(kinds == _USER_DEFINED)])
    _add_ends(made, file, {name: (text, ids[name]) for name, text in texts.items()})
    # some files name an ordinary word as the token for padding, which transformers would make special
    named = {f"{name}_token": text for name, text in texts.items() if text in special}
    return FileTokenizer(made, ids["eos"], ids["bos"], named, file.get("tokenizer.chat_template"))


def _add_ends(made: Tokenizer, file: GGUFFile, roles: Mapping[str, tuple[str, int]]) -> None:
    """Let texts begin and end with the tokens for that, where the file or else its kind of tokenizer says so."""
    from tokenizers import processors

    kind = file.get("tokenizer.ggml.model")
    begins = kind != BYTE_LEVEL or known_of(file).bos
    begins = kind == _MERGED or file.get("tokenizer.ggml.add_bos_token", begins)  # Gemma 4's files are not asked
    first = [roles["bos"]] if begins and "bos" in roles else []
    last = [roles["eos"]] if file.get("tokenizer.ggml.add_eos_token", False) and "eos" in roles else []
    if first or last:
        before, after = ([text for text, _ in each] for each in (first, last))
        made.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], pair=[*before, "$A", "$B", *after], special_tokens=[*first, *last]
        )
