"""Tokenizers: loading one, and comparing those of two models.

Speculative decoding needs a drafter whose token ids mean the same as the target's. Vocabularies that differ only in
their padded size are used as they are; between others, tokens are translated (`draftproof.backends.translation`).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from draftproof import models
from draftproof.backends.loading.fast_tokenizer import LEFT_TO_TRANSFORMERS, Description, FastTokenizer, RuledTokenizer
from draftproof.backends.translation.token_map import TokenContents, TokenMap, map_tokens
from draftproof.errors import UserError, reason
from draftproof.models.gguf_file import GGUFFile, is_gguf
from draftproof.models.gguf_tokenizer import read_file_tokenizer

LEAST_SHARED = 0.3  # of the target's tokens in a text: with fewer, at most 1 / 0.7 tokens come of a target pass
_TEXT = (
    "The ship left the harbour of Bergen on a grey morning in March 1897, with forty passengers and a cargo of wool. "
    "Nobody on board knew how long the voyage would take; the captain, who had crossed these waters many times, only "
    "said: “We will see.” By evening the wind had turned, and the children were asleep.\n\n"
    "Summarise the quarterly figures below, and explain which assumptions the forecast depends on. Revenue rose by "
    "12.5% to $3,480,000, while the cost of freight, insurance and storage fell slightly. A chemist calls this "
    "mixture unstable: the enzyme denatures above 40 °C. Her grandmother laughed, poured coffee, and told Marta and "
    "Tobias about the pawnbroker, the stolen lantern and the old cartographer of Ghent.\n\n"
    'def mean(values: list[float]) -> float:\n    """The arithmetic mean."""\n    total = 0.0\n'
    "    for value in values:\n        total += value\n    return total / len(values) if values else float('nan')\n"
)


def load_tokenizer(source: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model that is given as a hub id, a directory or a .gguf file."""
    where = Path(source)
    if is_gguf(where):
        return read_file_tokenizer(GGUFFile(where)).for_transformers()
    models.refuse_unreachable(source)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as cause:
        raise UserError(f"cannot load a tokenizer from {str(where)!r}: {_why_none(where, cause)}") from cause


def _why_none(where: Path, cause: Exception) -> str:
    """Why a place has no tokenizer: transformers' reason does not say what names of models people mix up."""
    if files := sorted(path.name for path in where.glob("*.gguf")):
        return f"the directory holds .gguf files, of which one is named by its path: {', '.join(files)}"
    if where.is_dir() and not (where / "config.json").exists():
        return "the directory has no config.json: expected one with config.json, a tokenizer and safetensors"
    said = reason(cause)
    if not where.exists() and ("couldn't connect" in said or "offline" in said.lower()):
        return models.nowhere(str(where))
    return said if where.exists() else said + models.about_kinds(str(where))


def read_tokenizer(file: GGUFFile) -> FastTokenizer:
    """The tokenizer of a GGUF file without transformers, with the tokens and texts of llama.cpp."""
    read = read_file_tokenizer(file)
    template = read.chat_template
    renders = template is not None and not any(word in template for word in LEFT_TO_TRANSFORMERS)
    described = Description(read.eos_token_id, read.bos_token_id, dict(read.special_tokens), template, renders)
    return RuledTokenizer(read.tokenizer.to_str(), described, partial(load_tokenizer, str(file.path)), read.rules)


def refuse_different(target: Any, draft: Any, *, target_name: str, draft_name: str) -> None:
    """Refuse two tokenizers that have different ids for the same token."""
    why = why_different(draft, target)
    if why is not None:
        raise UserError(
            f"{draft_name} cannot draft for {target_name}: {why}; draft and target must share one tokenizer"
        )


def shared_tokens(target: Any, draft: Any, *, target_name: str, draft_name: str) -> TokenMap | None:
    """The tokens that a draft model shares with a target; None where the same ids are the same tokens."""
    if why_different(draft, target) is None:
        return None
    try:
        found = map_tokens(TokenContents(target), TokenContents(draft))
    except ValueError:  # a tokenizer without the library, or no shared token
        found = None
    if found is None or share_of_text(found, target) < LEAST_SHARED:
        refuse_different(target, draft, target_name=target_name, draft_name=draft_name)
    return found


def share_of_text(tokens: TokenMap, target: Any) -> float:
    """The share of a target's tokens in a short text, English with some code, that a draft model has, too."""
    return tokens.share(target.backend_tokenizer.encode(_TEXT, add_special_tokens=False).ids)


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
