"""Byte-level tokenizers of GGUF files, made of their metadata without transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from draftproof.backends.loading.fast_tokenizer import LEFT_TO_TRANSFORMERS, Description, FastTokenizer
from draftproof.models.gguf import BYTE_LEVEL, KNOWN, pre_tokenizer
from draftproof.models.gguf_file import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4  # types of tokens that are never split
_ROLES = ("bos", "eos", "unknown", "padding")
_NAMES = {"unknown": "unk", "padding": "pad"}  # of roles in chat templates


def read_tokenizer(file: GGUFFile, original: Callable[[], Any]) -> FastTokenizer | None:
    """The tokenizer of a file; None where it is of a kind, or splits texts in a way, that is not known here.

    Args:
        file: opened.
        original: loads transformers' own, for what is asked seldom.
    """
    known = KNOWN.get(file.get("tokenizer.ggml.pre", ""))
    if file.get("tokenizer.ggml.model") != BYTE_LEVEL or known is None:
        return None
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    tokens = file.get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges")]
    vocab = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=known.whole_words))
    made.pre_tokenizer = pre_tokenizer(known)
    made.decoder = decoders.ByteLevel()
    kinds = np.asarray(file.get("tokenizer.ggml.token_type", np.ones(len(tokens))))
    made.add_special_tokens([AddedToken(tokens[each], normalized=False) for each in np.flatnonzero(kinds == _CONTROL)])
    made.add_tokens([AddedToken(tokens[each], normalized=False) for each in np.flatnonzero(kinds == _USER_DEFINED)])
    roles = {role: file.get(f"tokenizer.ggml.{role}_token_id") for role in _ROLES}
    texts = {_NAMES.get(role, role): tokens[number] for role, number in roles.items() if number is not None}
    if file.get("tokenizer.ggml.add_bos_token") and "bos" in texts:
        bos = texts["bos"], roles["bos"]
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos[0]} $A", pair=f"{bos[0]} $A $B", special_tokens=[bos]
        )
    template = file.get("tokenizer.chat_template")
    renders = template is not None and not any(word in template for word in LEFT_TO_TRANSFORMERS)
    special = {f"{role}_token": text for role, text in texts.items()}
    described = Description(roles["eos"], roles["bos"], special, template, renders)
    return FastTokenizer(made.to_str(), described, original)
