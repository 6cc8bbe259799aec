"""Texts and prompts from files (.txt and .jsonl, also compressed), their split by hash, and their tokens."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import UserError, reason, refuse_unknown
from draftproof.files import home, json_value, read_bytes
from draftproof.provenance import digest
from draftproof.training.shards import shard

KEYS = ("prompt", "text", "turns", "question", "instruction", "content")
SPLITS = ("train", "valid", "test")
_TENTHS = {"train": range(8), "valid": range(8, 9), "test": range(9, 10)}
_SENTENCE = re.compile(r".+?[.!?][\"')\]]*(?=\s|$)", re.DOTALL)
_UNPACK: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.decompress, ".xz": lzma.decompress}


@dataclass(frozen=True)
class Example:
    """A prompt, and the text that begins with it (the prompt itself where there is no more)."""

    prompt: str
    text: str


@dataclass(frozen=True)
class DataFile:
    """A data file as a provenance file describes it: its name without folders, the hash and number of its bytes."""

    name: str
    sha256: str
    size: int
    texts: int


def cache_folder(chosen: Path | None) -> Path:
    """The folder for tokens, responses and features that other runs can use: the chosen one, else in `files.home()`."""
    return chosen or home() / "training"


def lines(text: str) -> list[str]:
    """Each line is a text."""
    return [line.strip() for line in text.split("\n")]


def paragraphs(text: str) -> list[str]:
    """Blank lines separate texts; line ends inside a text become spaces."""
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]


def stories(text: str) -> list[str]:
    """A line directly after another one begins a text; blank lines separate its paragraphs (as in TinyStories)."""
    return [part.strip() for part in re.split(r"(?<=\S)[ \t]*\n(?=\S)", text)]


def documents(text: str) -> list[str]:
    """A line `<|endoftext|>` separates texts, which may be whole books."""
    return [part.strip() for part in re.split(r"^<\|endoftext\|>[ \t]*$", text, flags=re.MULTILINE)]


FORMS: dict[str, Callable[[str], list[str]]] = {
    "lines": lines,
    "paragraphs": paragraphs,
    "stories": stories,
    "documents": documents,
}


def read_examples(
    files: Iterable[str | Path], *, form: str = "lines", opening: int | None = None
) -> tuple[list[Example], list[DataFile]]:
    """The distinct examples of files, in order, and a description of each file.

    Args:
        files: .txt (texts in one of FORMS) or .jsonl (one of KEYS in each object), also compressed (.gz, .xz).
        form: how texts are separated in a .txt file.
        opening: number of sentences of a text that are its prompt, 0 for all; None is 1 for .txt and 0 for .jsonl.
    """
    refuse_unknown("form", form, FORMS)
    found: dict[Example, None] = {}
    sources = []
    for file in map(Path, files):
        raw, text = read_text(file)
        texts, default = _texts(file, text, form)
        if not texts:
            raise UserError(f"{file} holds no text: expected .txt, or .jsonl with one of {', '.join(KEYS)}")
        sentences = default if opening is None else opening
        found |= {Example(_opening(text, sentences), text): None for text in texts}
        sources.append(DataFile(file.name, hashlib.sha256(raw).hexdigest(), len(raw), len(texts)))
    if not found:
        raise UserError("no data: name at least one .txt or .jsonl file")
    return list(found), sources


def read_text(file: Path) -> tuple[bytes, str]:
    """The bytes of a file and its text, unpacked."""
    raw = read_bytes(file)
    unpack = _UNPACK.get(file.suffix)
    try:
        return raw, (unpack(raw) if unpack else raw).decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as cause:
        raise UserError(f"{file} is not UTF-8 text (byte {cause.start})") from None
    except (OSError, EOFError, lzma.LZMAError) as cause:
        raise UserError(f"cannot unpack {file}: {reason(cause)}") from cause


def _texts(file: Path, text: str, form: str) -> tuple[list[str], int]:
    """The texts of a file and the default of `opening` for its kind."""
    suffix = Path(file.stem).suffix if file.suffix in _UNPACK else file.suffix
    if suffix == ".jsonl":
        rows = enumerate(text.split("\n"), 1)  # not splitlines: JSON text may contain the other line ends
        return [_of_json(row, f"{file}, line {number}") for number, row in rows if row.strip()], 0
    if suffix not in {".txt", ".raw", ""}:
        raise UserError(f"{file}: expected a name that ends in .txt, .raw or .jsonl, or with .gz or .xz after it")
    return [part for part in FORMS[form](text) if part], 1


def _of_json(row: str, where: str) -> str:
    """The text in one line of JSON; of several turns (Spec-Bench), the first one."""
    record = json_value(row, where)
    key = next((key for key in KEYS if isinstance(record, dict) and record.get(key)), None)
    if key is None:
        raise UserError(f"{where}: expected an object with one of {', '.join(KEYS)}")
    value = record[key][0] if isinstance(record[key], list) else record[key]
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: {key} holds no text")
    return value.strip()


def _opening(text: str, sentences: int) -> str:
    """The first sentences of a text; the whole text for 0, or if it has no more sentences."""
    if sentences < 1:
        return text
    end = 0
    for number, match in enumerate(_SENTENCE.finditer(text), 1):
        end = match.end()
        if number == sentences:
            break
    return text[:end] if end else text


def split(examples: Sequence[Example], limit: int | None = None) -> dict[str, list[Example]]:
    """Split examples into train, valid and test in the proportion 8 : 1 : 1, by the hash of each text alone.

    So a text is always in the same part, in any file and among any other texts. `limit` is a number of examples in
    total: the first of each part by hash.
    """

    def key(example: Example) -> tuple[bytes, str]:
        return hashlib.sha256(example.text.encode()).digest(), example.prompt

    ordered = sorted(examples, key=key)
    parts: dict[str, list[Example]] = {}
    for name, tenths in _TENTHS.items():
        mine = [each for each in ordered if key(each)[0][-1] % 10 in tenths]
        parts[name] = mine if limit is None else mine[: max(limit * len(tenths) // 10, 1)]
    if short := [name for name in SPLITS if not parts[name]]:
        raise UserError(
            f"texts: expected about 30 or more, got {len(examples)}, none of which falls into the part {short[0]}"
        )
    return parts


def tokenize(texts: Sequence[str], tokenizer: Any, *, cache: Path, key: str) -> list[list[int]]:
    """Token ids of texts, cached; `key` identifies the tokenizer (the target's fingerprint)."""

    def ids() -> dict[str, Tensor]:
        rows = [[int(token) for token in tokenizer(text)["input_ids"]] for text in texts]
        flat = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
        return {"ids": flat, "sizes": torch.tensor([len(row) for row in rows], dtype=torch.int32)}

    found, _ = shard(cache / "tokens" / f"{digest(key, list(texts))[:24]}.safetensors", ids)
    return [row.tolist() for row in torch.split(found["ids"], found["sizes"].tolist())]
