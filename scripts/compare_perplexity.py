"""Perplexity of GGUF files in their own numbers, beside llama.cpp's on the same tokens.

    python scripts/compare_perplexity.py TEXT FILE.gguf ... --program llama-perplexity [--chunks 16] [--out OUT]

The rule is that of llama.cpp's program: the text is cut into chunks of 512 tokens, each begins anew (with the token
that begins a text, where the file has one), and the second half of a chunk counts. Both engines read the same files:
llama.cpp by its program, which must be built for this machine, draftproof with inputs in 8 bits and in floats.
"""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import common
import torch

from draftproof.backends.base import logits_along
from draftproof.backends.loading.load import load
from draftproof.backends.loading.options import LoadOptions
from draftproof.provenance import run_facts
from draftproof.results import Results, table

CHUNK = 512
LETTERS = 12  # of a token at most, on the mean: the text is cut before it is divided into tokens


def losses(file: Path, text: str, chunks: int, activations: str) -> list[float]:
    """Minus the mean logarithm of the probability of each token that counts, for each chunk, in nats."""
    model = load(str(file), LoadOptions(activations=activations))
    ids = model.tokenizer(text[: CHUNK * chunks * LETTERS])["input_ids"]
    begins = model.tokenizer.bos_token_id if model.tokenizer("")["input_ids"] else None
    half, found = CHUNK // 2, []
    for number in range(chunks):
        each = list(ids[CHUNK * number : CHUNK * (number + 1)])
        if len(each) < CHUNK:
            break
        if begins is not None:
            each[0] = begins
        logits = logits_along(model.backend, each[: half + 1], each[half + 1 : -1])
        following = torch.tensor(each[half + 1 :])
        found.append(float(torch.nn.functional.cross_entropy(logits.float(), following)))
    return found


def llama_losses(program: str, file: Path, text: str, chunks: int) -> list[float]:
    """The same by llama.cpp, from what it prints: the perplexity of all chunks so far, after each."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as written:
        written.write(text[: CHUNK * chunks * LETTERS])
        written.flush()
        command = [program, "-m", str(file), "-f", written.name, "-c", str(CHUNK), "--chunks", str(chunks)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    running = [float(value) for value in re.findall(r"\[\d+\]([\d.]+),", made.stdout + made.stderr)]
    if made.returncode or not running:
        raise SystemExit(f"{program} ended with code {made.returncode}:\n{(made.stdout + made.stderr)[-2000:]}")
    sums = [0.0, *(count * math.log(value) for count, value in enumerate(running, 1))]
    return [after - before for before, after in itertools.pairwise(sums)]


def main() -> None:
    """Compare the files."""
    parser = common.parser(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--program", required=True, help="llama.cpp's llama-perplexity")
    parser.add_argument("--chunks", type=int, default=16)
    options = parser.parse_args()
    text, facts = options.text.read_text(encoding="utf-8"), run_facts()
    rows, figures = [], dict[str, Any]()
    for file in options.files:
        common.say(options, "reading", file.name)
        found = {"llama.cpp": llama_losses(options.program, file, text, options.chunks)}
        for activations in ("int8", "float"):
            found[f"draftproof, inputs {activations}"] = losses(file, text, options.chunks, activations)
        figures[file.name] = found
        theirs = found["llama.cpp"]
        for name, ours in found.items():
            apart = [one - other for one, other in zip(ours, theirs, strict=True)]
            shown = f"{math.exp(fmean(ours)):.3f}", f"{fmean(apart):+.5f}", f"{max(apart, key=abs):+.5f}"
            rows.append([file.name, name, *shown])
    heads = ["file", "engine", "perplexity", "mean loss less llama.cpp's, nats", "greatest of a chunk"]
    lines = [
        f"{options.text.name}, the first {options.chunks} chunks of {CHUNK} tokens; the second half of each counts.",
        "",
        *table(heads, rows),
    ]
    common.deliver(options, Results("Perplexity of GGUF files beside llama.cpp", lines, figures, facts))


if __name__ == "__main__":
    main()
