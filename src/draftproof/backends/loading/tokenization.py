"""Tokenizers: loading one, and comparing those of two models.

Speculative decoding needs a drafter whose token ids mean the same as the target's. Vocabularies that differ only in
their padded size are accepted; different ones are refused (docs/log.md says why).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from draftproof.backends.loading.fast_tokenizer import LEFT_TO_TRANSFORMERS, Description, FastTokenizer
from draftproof.errors import UserError, reason
from draftproof.models.gguf_file import GGUFFile, is_gguf
from draftproof.models.gguf_tokenizer import read_file_tokenizer


def load_tokenizer(source: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model that is given as a hub id, a directory or a .gguf file.

    Raises:
        UserError: there is none.
    """
    where = Path(source)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if is_gguf(where):
        read = read_file_tokenizer(GGUFFile(where))
        if read is not None:
            return read.for_transformers()
        source, options = str(where.parent), {**options, "gguf_file": where.name}
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, **options)
    except Exception as cause:
        raise UserError(f"cannot load a tokenizer from {str(where)!r}: {reason(cause)}") from cause


def read_tokenizer(file: GGUFFile) -> FastTokenizer | None:
    """The tokenizer of a GGUF file without transformers; None where it is of a kind that is not read here.

    Raises:
        UserError: as `read_file_tokenizer`.
    """
    read = read_file_tokenizer(file)
    if read is None:
        return None
    template = read.chat_template
    renders = template is not None and not any(word in template for word in LEFT_TO_TRANSFORMERS)
    described = Description(read.eos_token_id, read.bos_token_id, dict(read.special_tokens), template, renders)
    return FastTokenizer(read.tokenizer.to_str(), described, partial(load_tokenizer, str(file.path)))


def refuse_different(target: Any, draft: Any, *, target_name: str, draft_name: str) -> None:
    """Refuse two tokenizers that have different ids for the same token.

    Raises:
        UserError: naming the first token that differs, or how few tokens the two share.
    """
    why = why_different(draft, target)
    if why is not None:
        raise UserError(
            f"{draft_name} cannot draft for {target_name}: {why}; draft and target must share one tokenizer"
        )


def why_different(first: Any, second: Any) -> str | None:
    """The first token whose ids differ in two tokenizers, or how few tokens the two share; None where they agree."""
    ours, theirs = first.get_vocab(), second.get_vocab()
    for token, index in sorted(ours.items(), key=lambda item: item[1]):
        if token in theirs and theirs[token] != index:
            return f"token {token!r} has id {index} in the first, {theirs[token]} in the second"
    shared = len(ours.keys() & theirs.keys())
    if shared < 0.99 * min(len(ours), len(theirs)):
        return f"their vocabularies share {shared} tokens of {len(ours)} and {len(theirs)}"
    return None
