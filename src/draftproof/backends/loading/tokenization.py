"""Tokenizers: loading one, and comparing those of two models.

Speculative decoding needs a drafter whose token ids mean the same as the target's. Vocabularies that differ only in
their padded size are accepted; different ones are refused (docs/log.md says why).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftproof.errors import UserError, reason
from draftproof.models.gguf import settle
from draftproof.models.gguf_file import is_gguf


def load_tokenizer(source: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model that is given as a hub id, a directory or a .gguf file.

    Raises:
        UserError: there is none.
    """
    from transformers import AutoTokenizer

    where = Path(source)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if is_gguf(where):
        source, options = str(where.parent), {**options, "gguf_file": where.name}
    try:
        made = AutoTokenizer.from_pretrained(source, **options)
    except Exception as cause:
        raise UserError(f"cannot load a tokenizer from {str(where)!r}: {reason(cause)}") from cause
    if is_gguf(where):
        settle(made, where)
    return made


def refuse_different(target: Any, draft: Any, *, target_name: str, draft_name: str) -> None:
    """Refuse two tokenizers that have different ids for the same token.

    Raises:
        UserError: naming the first token that differs, or how few tokens the two share.
    """
    ours, theirs = target.get_vocab(), draft.get_vocab()
    for token, index in sorted(theirs.items(), key=lambda item: item[1]):
        if token in ours and ours[token] != index:
            raise UserError(
                f"{draft_name} cannot draft for {target_name}: token {token!r} has id {index} there, "
                f"{ours[token]} in the target; "
                "draft and target must share one tokenizer"
            )
    shared = len(ours.keys() & theirs.keys())
    if shared < 0.99 * min(len(ours), len(theirs)):
        raise UserError(
            f"{draft_name} cannot draft for {target_name}: their vocabularies share {shared} tokens "
            f"of {len(theirs)} and {len(ours)}; "
            "draft and target must share one tokenizer"
        )
