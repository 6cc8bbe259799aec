"""Tokenizers of GGUF files without transformers: byte-level ones, and SentencePiece's with scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from draftproof.backends.loading.fast_tokenizer import LEFT_TO_TRANSFORMERS, Description, FastTokenizer
from draftproof.errors import UserError, reason
from draftproof.models.gguf import BYTE_LEVEL, known_of, pre_tokenizer
from draftproof.models.gguf_file import GGUFFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SCORED = "llama"  # the model of SentencePiece's tokenizers with scores, whose words begin with _SPACE
_SPACE = "\u2581"
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens that are never split
_ROLES = ("bos", "eos", "unknown", "padding")
_NAMES = {"unknown": "unk", "padding": "pad"}  # of roles in chat templates


def read_tokenizer(file: GGUFFile, original: Callable[[], Any]) -> FastTokenizer | None:
    """The tokenizer of a file; None where it is of a kind that is not read here.

    Args:
        file: opened.
        original: loads transformers' own, for what is asked seldom.

    Raises:
        UserError: its tokens and merges do not fit together, or it names a pre-tokenizer that is not known.
    """
    kinds = {BYTE_LEVEL: _byte_level, _SCORED: _scored}
    make = kinds.get(file.get("tokenizer.ggml.model"))
    try:
        made = None if make is None else make(file)
    except UserError:
        raise
    except Exception as cause:  # the library raises no narrower one
        raise UserError(f"cannot make the tokenizer of {file.path}: {reason(cause)}") from cause
    return None if made is None else _described(made, file, original)


def _byte_level(file: GGUFFile) -> Tokenizer:
    """Byte-pair encoding of bytes, whose texts are split by an expression that the file names."""
    from tokenizers import Tokenizer, decoders, models

    known = known_of(file)
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges")]
    vocab = {token: number for number, token in enumerate(file.get("tokenizer.ggml.tokens"))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=known.whole_words))
    made.pre_tokenizer = pre_tokenizer(known)
    made.decoder = decoders.ByteLevel()
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


def _described(made: Tokenizer, file: GGUFFile, original: Callable[[], Any]) -> FastTokenizer:
    """A tokenizer with the file's special tokens and its chat template."""
    from tokenizers import AddedToken, processors

    tokens = file.get("tokenizer.ggml.tokens")
    kinds = np.asarray(file.get("tokenizer.ggml.token_type", np.ones(len(tokens))))
    made.add_special_tokens([AddedToken(tokens[each], normalized=False) for each in np.flatnonzero(kinds == _CONTROL)])
    made.add_tokens([AddedToken(tokens[each], normalized=False) for each in np.flatnonzero(kinds == _USER_DEFINED)])
    roles = {role: file.get(f"tokenizer.ggml.{role}_token_id") for role in _ROLES}
    texts = {_NAMES.get(role, role): tokens[number] for role, number in roles.items() if number is not None}
    begins = file.get("tokenizer.ggml.add_bos_token", file.get("tokenizer.ggml.model") == _SCORED or known_of(file).bos)
    if begins and "bos" in texts:
        bos = texts["bos"], roles["bos"]
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos[0]} $A", pair=f"{bos[0]} $A $B", special_tokens=[bos]
        )
    template = file.get("tokenizer.chat_template")
    renders = template is not None and not any(word in template for word in LEFT_TO_TRANSFORMERS)
    special = {f"{role}_token": text for role, text in texts.items()}
    described = Description(roles["eos"], roles["bos"], special, template, renders)
    return FastTokenizer(made.to_str(), described, original)
