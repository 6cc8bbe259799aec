"""Tokenizers: loading one, and telling whether two models speak the same tokens.

Knows: transformers' tokenizers. Does not know: models, sampling.

Speculation needs a drafter whose token ids mean what the target's mean. Vocabularies that differ in padded size only
are fine; truly different ones are refused (docs/log.md says why).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftproof.errors import UserError, reason


def load_tokenizer(source: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer beside a model: of a hub id, a directory or inside a .gguf file.

    Raises:
        UserError: none to be had there.
    """
    from transformers import AutoTokenizer

    where = Path(source)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if where.suffix == ".gguf":
        source, options = str(where.parent), {**options, "gguf_file": where.name}
    try:
        return AutoTokenizer.from_pretrained(source, **options)
    except Exception as cause:
        raise UserError(f"cannot load a tokenizer from {str(where)!r}: {reason(cause)}") from cause


def end_tokens(*found: int | Sequence[int] | None) -> tuple[int, ...]:
    """Tokens that end a text: every id that a config, a generation config or a tokenizer names, each once, in order."""
    ids: list[int] = []
    for each in found:
        ids += [each] if isinstance(each, int) else each or ()
    return tuple(dict.fromkeys(ids))


def refuse_different(target: Any, draft: Any, *, target_name: str, draft_name: str) -> None:
    """Refuse two tokenizers that give one text different ids.

    Raises:
        UserError: naming the first token that differs.
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
