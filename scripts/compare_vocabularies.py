"""Whole tokenizers of GGUF files beside those of llama.cpp: what `compare_tokenizers.py --files` does.

A text must have llama.cpp's tokens, with and without those at its ends. Token ids must have its text, which is that of
its pieces one after another: bytes that are no character are replaced, and where a text begins with a blank that only
its tokens have, it is without it. Text that comes token by token must be the same.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp_tokens
import tokenizer_texts
from common import deliver, say
from llama_cpp_tokens import Answer, Question

from draftproof.backends.loading.tokenization import read_tokenizer
from draftproof.errors import UserError
from draftproof.finish import TextDecoder
from draftproof.models.gguf_file import GGUFFile
from draftproof.models.gguf_roles import TokenType, token_types
from draftproof.models.gguf_text import BYTES
from draftproof.provenance import run_facts
from draftproof.results import Results, table

WORDS = 3000  # tokens whose texts strings are made of
ERROR = "[UNK_BYTE_0x"  # what llama.cpp writes where an ordinary byte-level token has other letters
HEADS = (
    "file", "tokenizer", "tokens", "strings", "differ", "with both ends, differ", "rows of ids", "texts differ",
    "token by token, differ",
)  # fmt: skip


def compare(path: Path, plain: Sequence[str], count: int, seed: int) -> dict[str, Any]:
    """How many strings and rows of ids of a file differ, with the first of each."""
    made: dict[str, Any] = {"file": path.name}
    try:
        file = GGUFFile(path)
        ours = read_tokenizer(file)
    except UserError as error:
        return {**made, "refused": str(error).replace(str(path), path.name)}
    tokens, types = file.get("tokenizer.ggml.tokens"), token_types(file)
    special = [number for number, kind in enumerate(types) if kind not in {TokenType.NORMAL, TokenType.BYTE}]
    chosen = random.Random(seed).sample(range(len(tokens)), min(WORDS, len(tokens)))
    words = [ours.decode([each], skip_special_tokens=False, clean_up_tokenization_spaces=False) for each in chosen]
    words = [word for word in words if word and "\ufffd" not in word]
    texts = tokenizer_texts.texts(plain, [tokens[each] for each in special], words, count, seed)
    rows = tokenizer_texts.rows(len(tokens), _byte_tokens(tokens), special, count, seed)
    right = llama_cpp_tokens.ask(Question(str(path), texts, texts, rows))
    if right is None:
        return {**made, "refused": "llama.cpp does not load it"}
    found = [(ours(text, add_special_tokens=False)["input_ids"], ours(text)["input_ids"]) for text in texts]
    wrong = {
        "differ": [at for at, (ids, _) in enumerate(found) if ids != right.texts[at]],
        "ends_differ": [at for at, (_, ids) in enumerate(found) if ids != right.special[at]],
    }
    made |= {
        "build": right.build,
        "tokenizer": " ".join(filter(None, (file.get(f"tokenizer.ggml.{key}") for key in ("model", "pre")))),
        "tokens": len(tokens),
        "strings": len(texts),
        "rows": len(rows),
        **{key: len(places) for key, places in wrong.items()},
    }
    if wrong["differ"]:
        at = wrong["differ"][0]
        made["first"] = {"text": texts[at], "llama.cpp": right.texts[at], "draftproof": found[at][0]}
    return made | _texts(ours, rows, right, prefixed=_prefixed(file))


def _byte_tokens(tokens: Sequence[str]) -> dict[int, int]:
    ids = {token: number for number, token in enumerate(tokens)}
    letters = {byte: letter for letter, byte in BYTES.items()}
    names = {byte: f"<0x{byte:02X}>" if "<0x00>" in ids else letters[byte] for byte in range(256)}
    return {byte: ids[name] for byte, name in names.items()} if all(name in ids for name in names.values()) else {}


def _prefixed(file: GGUFFile) -> bool:
    """Whether the first word of a text has a blank in its tokens."""
    return file.get("tokenizer.ggml.model") == "llama" and bool(file.get("tokenizer.ggml.add_space_prefix", True))


def _texts(ours: Any, rows: Sequence[Sequence[int]], right: Answer, *, prefixed: bool) -> dict[str, Any]:
    """How many rows have another text, with and without special tokens; how many have it token by token."""
    hidden, errors, wrong, streamed = set(right.hidden), 0, [], 0
    for row in rows:
        for skip in (False, True):
            pieces = [bytes.fromhex(right.pieces[each]) for each in row if not (skip and each in hidden)]
            text = b"".join(pieces).decode(errors="replace")
            text = text.removeprefix(" ") if prefixed else text
            found = ours.decode(list(row), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            if ERROR in text:
                errors += 1
            elif found != text:
                wrong.append({"ids": row, "llama.cpp": text, "draftproof": found})
            decoder = TextDecoder(ours, skip_special_tokens=skip)
            streamed += "".join(decoder.push(each) for each in row) + decoder.flush() != found
    made = {"texts_differ": len(wrong), "streams_differ": streamed, "errors_of_llama.cpp": errors}
    return {**made, "first_text": wrong[0]} if wrong else made


def main(options: argparse.Namespace, plain: Sequence[str]) -> int:
    """Compare files, print the page or its figures; 1 if anything differs."""
    facts = run_facts()
    found = []
    for path in options.files:
        say(options, path.name)
        found.append(compare(path, plain, options.strings, options.seed))
    read = [each for each in found if "refused" not in each]
    lines = table(HEADS, [_row(each) for each in read])
    builds = sorted({each["build"] for each in read})
    lines = [
        f"{', '.join(builds)}; seed {options.seed}. {_summary(found)}", "", *lines, "", *_remarks(found)
    ]  # fmt: skip
    figures = {"seed": options.seed, "files": found}
    deliver(options, Results("Tokenizers of GGUF files beside llama.cpp's", lines, figures, facts))
    counts = ("differ", "ends_differ", "texts_differ", "streams_differ")
    return int(any(each[count] for each in read for count in counts))


def _summary(found: Sequence[dict[str, Any]]) -> str:
    """What was compared, in a sentence."""
    read = [each for each in found if "refused" not in each]
    return (
        f"{len(read)} files; each string is encoded with special tokens recognised in it, as prompts are, and each row "
        "is decoded with and without special tokens."
    )


def _row(each: dict[str, Any]) -> list[object]:
    keys = ("file", "tokenizer", "tokens", "strings", "differ", "ends_differ", "rows", "texts_differ", "streams_differ")
    return [each[key] for key in keys]


def _remarks(found: Sequence[dict[str, Any]]) -> list[str]:
    lines = [f"- Refused: {each['refused']}." for each in found if "refused" in each]
    for each in found:
        if each.get("errors_of_llama.cpp"):
            lines.append(
                f"- {each['file']}: {each['errors_of_llama.cpp']} texts, not counted, have ordinary tokens whose "
                f"letters stand for no byte; llama.cpp writes `{ERROR}...]` for them, and draftproof their text."
            )
        firsts = [each[key] for key in ("first", "first_text") if key in each]
        lines += [f"- {each['file']}, first difference: `{json.dumps(first)}`." for first in firsts]
    return lines
