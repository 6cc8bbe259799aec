"""A target and its draft model on held-out text: bits per byte, acceptance, tokens per target call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftproof import models
from draftproof.backends.loading.by_name import load_backend, load_model, refuse_gguf
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.tokenization import load_tokenizer, refuse_different
from draftproof.errors import UserError
from draftproof.progress import Watch, silent
from draftproof.provenance import run_facts, without_directory
from draftproof.results import Results, mean_and_deviation, table
from draftproof.sampling import SamplingParams
from draftproof.stoppers.fixed import FixedLength
from draftproof.training import distil
from draftproof.training.corpus import held_out
from draftproof.training.data import read_examples, split
from draftproof.training.features import ModelPair
from draftproof.training.sweep import Trial

PROMPT = 32  # tokens of a window that the target continues by itself
WINDOW, RUN = 256, 128  # tokens of a window, and most tokens of a run of the engine
LENGTHS = (4, 8)


@dataclass(frozen=True)
class PairOptions:
    """What is evaluated.

    Attributes:
        target, draft: names of the models, run in float32.
        texts: text, split as in training; only the tenth that is for tests is read.
        form: how texts stand in .txt files.
        tokens: tokens of held-out text.
        seeds: seed of the windows and the draws.
        trials: held-out prompts that the engine continues.
    """

    target: str
    draft: str
    texts: Sequence[Path]
    form: str = "stories"
    tokens: int = 20_000
    seeds: Sequence[int] = (0, 1, 2)
    trials: int = 16


def evaluate_pair(options: PairOptions, *, watch: Watch = silent) -> Results:
    """Bits per byte and acceptance of both models, and tokens per target call in the engine."""
    facts, names = run_facts(), (options.target, options.draft)
    for name in names:
        refuse_gguf(name, "the evaluation of a pair")
    tokenizers = [load_tokenizer(models.resolve(name)) for name in names]
    refuse_different(*tokenizers, target_name=options.target, draft_name=options.draft)
    tokenizer, end = tokenizers[0], int(tokenizers[0].eos_token_id)
    examples = split(read_examples(options.texts, form=options.form)[0])["test"]
    ids = [tokenizer(example.text, add_special_tokens=False)["input_ids"] for example in examples]
    windows, taken = held_out(ids, end, length=WINDOW, tokens=options.tokens)
    prompts = [row for row in (tokenizer(example.prompt)["input_ids"] for example in examples) if 0 < len(row) <= 64]
    if not prompts or not bool((windows[:, :PROMPT] >= 0).all(-1).any()):
        raise UserError(
            f"too little held-out text: needed are an opening of at most 64 tokens and {PROMPT} tokens together"
        )
    nbytes = sum(len(example.text.encode()) for example in examples[:taken])
    target, draft = loaded = [load_model(models.resolve(name), LoadOptions(dtype="float32")).eval() for name in names]
    shown = [without_directory(name) for name in names]
    found: dict[str, Any] = {
        "bytes": nbytes,
        "parameters": {n: sum(p.numel() for p in m.parameters()) for n, m in zip(shown, loaded, strict=True)},
        "bits_per_byte": {n: distil.bits_per_byte(m, windows, nbytes) for n, m in zip(shown, loaded, strict=True)},
        "acceptance": distil.agreement(target, draft, windows)["acceptance"],
        "seeds": [],
    }
    backends = [load_backend(name, LoadOptions(dtype="float32")) for name in names]
    pair = ModelPair(backends[0], backends[1], SamplingParams())
    openings = windows[(windows[:, :PROMPT] >= 0).all(-1)][:32, :PROMPT]
    with watch("evaluating", len(options.seeds), 0) as tick:
        for number, seed in enumerate(options.seeds, 1):
            torch.manual_seed(seed)
            own = distil.sampled(target, openings, WINDOW)
            row = {"acceptance on its own samples": distil.agreement(target, draft, own, skip=PROMPT)["acceptance"]}
            found["seeds"].append(row | _calls(Trial(pair, prompts[: options.trials], (end,), RUN, seed)))
            tick(number)
    return Results(f"{shown[0]} and {shown[1]} on held-out text", _lines(options, found), found, facts)


def _calls(trial: Trial) -> dict[str, float]:
    """Tokens per target call with drafts of each length."""
    rates = {length: trial.rates(FixedLength(length), "block") for length in LENGTHS}
    return {f"tokens per target call, n = {length}": each["block_efficiency"] for length, each in rates.items()}


def _lines(options: PairOptions, found: dict[str, Any]) -> list[str]:
    sizes, bits = found["parameters"], found["bits_per_byte"]
    rows = [("expected acceptance at temperature 1, held-out text", f"{found['acceptance']:.3f}")]
    rows += [(name, mean_and_deviation([row[name] for row in found["seeds"]])) for name in found["seeds"][0]]
    return [
        about(options.texts, options.seeds),
        "",
        *table(
            ("", *sizes),
            [
                ("parameters", *(f"{size:,}".replace(",", " ") for size in sizes.values())),
                (f"bits per byte ({found['bytes']} bytes)", *(f"{value:.3f}" for value in bits.values())),
            ],
        ),
        "",
        *table(("measure", "value"), rows),
        "",
        "Tokens per target call: block verification, temperature 1, openings of held-out texts.",
    ]


def about(files: Sequence[Path], seeds: Sequence[int]) -> str:
    """One line on the data and the seeds of an evaluation."""
    names = ", ".join(path.name for path in files)
    return f"Texts: {names}. Seeds {', '.join(map(str, seeds))}: mean and standard deviation."
