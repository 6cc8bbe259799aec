"""Models in GGUF files that transformers' modules read beside llama.cpp: log-probabilities of tiny random models.

    PYTHONPATH=FOLDER python scripts/compare_gguf_modules.py [NAME ...]

Each model of tests/support/gguf_modules.py is written with weights in float32, and with blocks of three types in
turns. llama.cpp (package xllamacpp, which `pip install --target FOLDER xllamacpp` has put into FOLDER) and draftproof
read the same tokens, which llama.cpp continues greedily. Exits with 1 where a log-probability differs by more than
rounding explains.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from draftproof.backends.base import Feed
from draftproof.backends.loading.gguf_modules import read_modules
from draftproof.models.gguf_file import GGUFFile

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.gguf_modules import CONFIGS, VOCAB, module_model, write_modules

STEPS = 12
PROMPT = range(5, 320, 21)
# llama.cpp reads GELU, of Gemma 4, from a table of 16-bit floats
MOST = {"float32": 5e-2, "blocks": 0.5, "gemma4, experts": 3.0}
KINDS: dict[str, tuple[int | None, ...]] = {"float32": (None,), "blocks": (12, 14, 8)}
# llama.cpp returns nothing for tokens that are parts of a character
TOKENS = {
    "tokenizer.ggml.tokens": [*(f"t{number}" for number in range(VOCAB - 2)), "a", "b"],
    "tokenizer.ggml.merges": ["a b"],
}


def server(path: Path) -> Any:
    """llama.cpp with a file, and keys and values in float32."""
    import xllamacpp  # type: ignore[import-not-found]

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_parallel, params.n_ctx, params.verbosity = 1, 256, -1
    params.warmup, params.fit_params = False, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return xllamacpp.Server(params)


def theirs(running: Any, ids: list[int]) -> torch.Tensor:
    """The log-probabilities of the next token."""
    asked = {"prompt": ids, "n_predict": 1, "temperature": 0, "cache_prompt": False, "n_probs": VOCAB}
    (token,) = running.handle_completions({**asked, "logprobs": VOCAB})["choices"][0]["logprobs"]["content"]
    row = torch.full((VOCAB,), float("nan"))
    for each in token["top_logprobs"]:
        row[each["id"]] = each["logprob"]
    return row


def compare(path: Path) -> tuple[int, float]:
    """How many of the most likely tokens are the same, and the largest difference of a log-probability."""
    running, backend = server(path), read_modules(GGUFFile(path), name="file", dtype=torch.float32)
    session, ids, same, most = backend.open(), list(PROMPT), 0, 0.0
    pending = list(ids)
    for _ in range(STEPS):
        right = theirs(running, ids)
        found = backend.forward([Feed(session, pending)])[0].logits[-1].log_softmax(-1)
        same += int(found.argmax() == right.argmax())
        most = max(most, float((found - right).abs().max()))
        pending = [int(right.argmax())]
        ids += pending
    return same, most


def main() -> None:
    """Compare the models that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CONFIGS))
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in parser.parse_args().names or CONFIGS:
            for form, kinds in KINDS.items():
                path = Path(folder) / "model.gguf"
                write_modules(path, module_model(name), name, kinds, TOKENS)
                same, most = compare(path)
                print(f"{name}, {form}: {same} of {STEPS} tokens, off by at most {most:.2g}", flush=True)
                wrong += most > MOST.get(name if form == "blocks" else form, MOST[form])  # a router may choose others
    sys.stdout.flush()
    os._exit(int(bool(wrong)))  # the server's destructor can wait for ever


if __name__ == "__main__":
    main()
