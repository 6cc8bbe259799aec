"""Tokens and texts of llama.cpp, by the bindings of llama-cpp-python; run as a script it answers one question.

    python scripts/llama_cpp_tokens.py < question.json > answer.json

llama.cpp ends its process where it finds a file impossible, so `ask` has the question answered by a process of its own.
Only the vocabulary of a file is read: it needs no tensors. With LLAMA_CPP_LIB_PATH the bindings take another build.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

CONTROL, UNKNOWN = 1 << 3, 1 << 0  # attributes of tokens that texts hide


@dataclass(frozen=True)
class Question:
    """What is asked about a file: tokens of texts, and texts of token ids."""

    path: str
    texts: Sequence[str] = ()
    special: Sequence[str] = ()  # texts whose tokens are asked with those that are put at both ends
    rows: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class Answer:
    """What llama.cpp makes of a file.

    A piece is the bytes of a token as hexadecimal digits, in texts with special tokens.
    """

    build: str
    texts: list[list[int]] = field(default_factory=list)
    special: list[list[int]] = field(default_factory=list)
    pieces: dict[int, str] = field(default_factory=dict)  # of all tokens in `rows`
    hidden: list[int] = field(default_factory=list)  # those of them that are in no text without special tokens
    bos: int | None = None
    eos: int | None = None


def ask(question: Question) -> Answer | None:
    """The answer of llama.cpp; None where it refuses the file."""
    asked = json.dumps(asdict(question))
    done = subprocess.run([sys.executable, __file__], input=asked, capture_output=True, text=True, check=False)
    if done.returncode:
        if "No module named" in done.stderr:
            raise SystemExit(f"{done.stderr.strip().splitlines()[-1]}: expected llama-cpp-python (pip install it)")
        if "Traceback" in done.stderr:  # not a file that it refuses, but bindings that do not work
            raise SystemExit(done.stderr.strip().splitlines()[-1])
        return None
    found = json.loads(done.stdout)
    return Answer(**{**found, "pieces": {int(token): piece for token, piece in found["pieces"].items()}})


def answer(question: Question) -> Answer:
    """Ask llama.cpp in this process."""
    bindings: Any = importlib.import_module("llama_cpp")
    calls = bindings.llama_cpp
    quiet = calls.llama_log_callback(lambda *_: None)
    calls.llama_log_set(quiet, None)
    calls.llama_backend_init()
    options = calls.llama_model_default_params()
    options.vocab_only = True
    model = calls.llama_model_load_from_file(str(question.path).encode(), options)
    if not model:
        raise SystemExit(f"llama.cpp does not load {question.path}")
    vocab = calls.llama_model_get_vocab(model)

    def tokens(text: str, *, special: bool) -> list[int]:
        content = text.encode()
        room = len(content) + 16
        ids = (calls.llama_token * room)()
        count = calls.llama_tokenize(vocab, content, len(content), ids, room, special, True)
        assert count >= 0, "a byte is at most one token"
        return list(ids[:count])

    def piece(token: int) -> bytes:
        size = 4096
        buffer = ctypes.create_string_buffer(size)
        count = calls.llama_token_to_piece(vocab, token, buffer, size, 0, True)
        assert count >= 0, "no token is longer"
        return buffer.raw[:count]

    used = sorted({token for row in question.rows for token in row})
    none = -1
    bos, eos = calls.llama_vocab_bos(vocab), calls.llama_vocab_eos(vocab)
    return Answer(
        build=f"llama.cpp in llama-cpp-python {bindings.__version__}",
        texts=[tokens(text, special=False) for text in question.texts],
        special=[tokens(text, special=True) for text in question.special],
        pieces={token: piece(token).hex() for token in used},
        hidden=[token for token in used if calls.llama_vocab_get_attr(vocab, token) & (CONTROL | UNKNOWN)],
        bos=None if bos == none else bos,
        eos=None if eos == none else eos,
    )


if __name__ == "__main__":
    print(json.dumps(asdict(answer(Question(**json.load(sys.stdin))))))
