"""Small vocabularies made up here, with the tokens and texts that llama.cpp makes with them, for the tests.

    python scripts/freeze_tokenizers.py tests/models/llama_cpp_tokens.json

It needs the package llama-cpp-python. Each vocabulary has what the library `tokenizers` reads otherwise by itself:
equal scores, blanks that belong to tokens, tokens that overlap, bytes without a token, texts that say a token's type.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import llama_cpp_tokens
from gguf import GGUFWriter
from llama_cpp_tokens import Question

from draftproof.files import whole_file
from draftproof.models.gguf_text import BYTES

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
HEAD = (("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL))
ALL_BYTES = tuple((f"<0x{byte:02X}>", BYTE) for byte in range(256))
COUNT = 25  # strings and rows of each vocabulary
GROUPS = ("ab", "ab ", "aab \n", "ab\n\n<")


def vocabularies() -> dict[str, dict[str, Any]]:
    """By name: metadata, without `tokenizer.ggml.`; general.name with it."""
    letters = tuple((each, NORMAL) for each in f"{SPACE}ab")
    words = random.Random(3).sample([*map("".join, itertools.product(f"{SPACE}ab", repeat=3))], 9)
    scored = (*HEAD, *ALL_BYTES, *letters, *((each, NORMAL) for each in ("ab", "ba", f"{SPACE}a", "bb", *words)))
    scores = [0.0] * 262 + [-float(each % 3) for each in range(13)]
    marks = (("<|user|>", CONTROL), ("<|x|>", USER_DEFINED), ("  ", USER_DEFINED), ("\u00e9", USER_DEFINED))
    ends = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    merges = ["a b", f"{SPACE} a", "b b", f"{SPACE}a b", "\n \n"]
    lines = (("\n", NORMAL), *((merge.replace(" ", ""), NORMAL) for merge in merges), ("\n\n\n", NORMAL))
    kept = [letter for letter in BYTES if letter not in {"z", "\u0102", "\u00f6"}]  # of ASCII, of others, of none
    level = [
        *((letter, NORMAL) for letter in kept), ("ab", NORMAL), ("\u0120a", NORMAL), ("</s>", NORMAL), ("<s>", CONTROL),
        ("<|fim_prefix|>", NORMAL), ("<|channel|>", CONTROL), ("\u00f6", USER_DEFINED), ("<<a", USER_DEFINED),
        ("a<b<", USER_DEFINED), ("<unk>", UNKNOWN), ("left", UNUSED), ("\U0001f600", USER_DEFINED),
    ]  # fmt: skip
    return {
        "equal scores": _of("llama", (*scored, *marks), scores=[*scores, *[0.0] * 4], add_eos_token=True, **ends),
        "scores without a blank before": _of("llama", scored, scores=scores, add_space_prefix=False, **ends),
        "blanks after tokens": {
            **_of("llama", (*scored, *marks, ("<|endoftext|>", CONTROL)), scores=[*scores, *[0.0] * 5], **ends),
            "general.name": "Phi-3 made up",
        },
        "line ends": _of(
            "gemma4",
            (*HEAD, *ALL_BYTES, *letters, *lines, *marks), merges=merges, **ends
        ),
        "bytes": _of("gpt2", level, merges=["a b", "\u0120 a"], pre="gpt-2", add_bos_token=True),
    }  # fmt: skip


def _of(model: str, tokens: Sequence[tuple[str, int]], **more: Any) -> dict[str, Any]:
    texts, kinds = zip(*tokens, strict=True)
    return {"model": model, "tokens": list(texts), "token_type": list(kinds), **more}


def write(path: Path, vocabulary: Mapping[str, Any]) -> None:
    """A GGUF file with a vocabulary alone."""
    writer = GGUFWriter(path, "llama")
    for add in (writer.add_block_count, writer.add_context_length, writer.add_head_count):
        add(1)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in vocabulary.items():
        name = key if "." in key else f"tokenizer.ggml.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_uint32(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def strings(vocabulary: Mapping[str, Any], dice: random.Random) -> list[str]:
    """Texts of few letters, with the vocabulary's own tokens inside."""
    ids = range(len(vocabulary["tokens"]))
    whole = [vocabulary["tokens"][at] for at in ids if vocabulary["token_type"][at] in {CONTROL, USER_DEFINED, UNKNOWN}]
    found = dict.fromkeys(["", " ", "\n" * 5, "</s>", "<|fim_prefix|>ab", "<<a<b<", "bzb \u0e40b", "\u4f60a\t\u00e9"])
    while len(found) < COUNT:
        made = [dice.choice(whole) if dice.random() < 0.3 else "".join(dice.choices(dice.choice(GROUPS), k=5))]
        made += dice.choices((*whole, " ", "\t", "\u00a0", "\n\n\n", "b" * 5, " a" * 3, "\u2581"), k=dice.randint(0, 3))
        found["".join(made)] = None
    return list(found)


def rows(vocabulary: Mapping[str, Any], dice: random.Random) -> list[list[int]]:
    """Rows of token ids, many of them bytes of characters that are cut anywhere."""
    ids = {token: number for number, token in enumerate(vocabulary["tokens"])}
    letters = {byte: letter for letter, byte in BYTES.items()}
    content = "\u00e9\u4f60\n\U0001f600a".encode()
    found = [[at] for at, kind in enumerate(vocabulary["token_type"]) if kind in {USER_DEFINED, UNUSED}]
    while len(found) < COUNT:
        start = dice.randrange(len(content))
        part = content[start : start + dice.randint(0, 6)]
        names = [f"<0x{byte:02X}>" if "<0x00>" in ids else letters[byte] for byte in part]
        row = [ids[name] for name in names if name in ids]
        row[dice.randint(0, len(row)) : 0] = dice.choices(range(len(ids)), k=dice.randint(0, 2))
        found.append(row)
    return found


def frozen() -> dict[str, Any]:
    """All vocabularies, with what llama.cpp makes of texts and rows."""
    made: dict[str, Any] = {"made_by": "", "vocabularies": {}}
    for name, vocabulary in vocabularies().items():
        dice = random.Random(name)
        texts, ids = strings(vocabulary, dice), rows(vocabulary, dice)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "x.gguf"
            write(path, vocabulary)
            found = llama_cpp_tokens.ask(Question(str(path), texts, texts[:3], ids))
        if found is None:
            raise SystemExit(f"{name}: llama.cpp does not load it")
        hidden = set(found.hidden)
        pieces = {token: bytes.fromhex(piece) for token, piece in found.pieces.items()}
        made["made_by"] = found.build
        made["vocabularies"][name] = {
            "metadata": vocabulary,
            "tokens": list(zip(texts, found.texts, strict=True)),
            "with_ends": list(zip(texts, found.special, strict=False)),
            "texts": [
                [row, *(_text([pieces[each] for each in row if show or each not in hidden]) for show in (True, False))]
                for row in ids
            ],
        }
    return made


def _text(pieces: Sequence[bytes]) -> str:
    return b"".join(pieces).decode(errors="replace")


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a JSON file")
    options = parser.parse_args()
    with whole_file(options.out) as path:
        path.write_text(json.dumps(frozen(), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
