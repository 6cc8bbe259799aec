"""The text that models write: continuations of held-out openings, judged by a larger model and by a list of words."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftproof import models
from draftproof.backends.loading.by_name import load_backend, refuse_gguf
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.tokenization import load_tokenizer
from draftproof.engine.engine import Engine
from draftproof.errors import UserError
from draftproof.progress import Watch, silent
from draftproof.provenance import run_facts, without_directory
from draftproof.results import Results, table
from draftproof.sampling import SamplingParams
from draftproof.training.data import Example, read_examples, read_text, split
from draftproof.training.features import ModelPair
from draftproof.training.responses import Response

_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")
REAL = "the texts themselves"
Continuations = list[tuple[str, str]]  # openings and their continuations
Judge = Callable[[Continuations], float]


@dataclass(frozen=True)
class TextEvaluationOptions:
    """What is evaluated.

    Attributes:
        models: a model that writes.
        judge: a larger model that reads; its bits per byte say how much a continuation surprises it.
        texts: text, split as in training; openings are of the tenth that is for tests.
        form: how texts stand in .txt files.
        known: more text whose words count as known.
        temperature: temperature of the text.
        count: how many openings are continued.
        size: characters of each continuation that count.
        tokens: most tokens of each continuation.
        shown: continuations that are printed in full.
    """

    models: Sequence[str]
    judge: str
    texts: Sequence[Path]
    form: str = "stories"
    known: Sequence[Path] = ()
    temperature: Sequence[float] = (1.0, 0.7)
    count: int = 48
    size: int = 400
    tokens: int = 200
    shown: int = 6


def evaluate_text(options: TextEvaluationOptions, *, watch: Watch = silent) -> Results:
    """Bits per byte under the judge, and the share of words that no known text has."""
    facts = run_facts()
    examples = split(read_examples(options.texts, form=options.form)[0])["test"][: options.count]
    if not examples:
        raise UserError("no held-out text: give more text")
    known = {word for path in (*options.texts, *options.known) for word in _words(read_text(path)[1])}
    judge = _judge(options)
    real = [(each.prompt, _cut(each.text[len(each.prompt) :], options.size)) for each in examples]
    rows = [_row(REAL, real, judge, known)]
    samples: dict[str, Continuations] = {}
    with watch("evaluating", len(options.models) * len(options.temperature), 0) as tick:
        for name in options.models:
            engine = Engine.load(name, drafter="none", max_batch=16)
            for temperature in options.temperature:
                title = f"{without_directory(name)}, temperature {temperature:g}"
                samples[title] = _continuations(engine, examples, temperature, options)
                rows.append(_row(title, samples[title], judge, known))
                tick(len(samples))
    return Results("Text written by models", _lines(options, rows, samples), {"rows": rows}, facts)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _cut(text: str, size: int) -> str:
    """At most `size` characters, whole words, one line end between paragraphs."""
    text = re.sub(r"\s*\n\s*", "\n", text)
    return text if len(text) <= size else text[: text.rfind(" ", 0, size)]


def _continuations(
    engine: Engine, examples: Sequence[Example], temperature: float, options: TextEvaluationOptions
) -> Continuations:
    """A model's continuations of the openings, plainly decoded."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=options.tokens, seed=seed) for seed in range(len(examples))
    ]
    outputs = engine.generate([each.prompt for each in examples], params)
    return [(each.prompt, _cut(out.text, options.size)) for each, out in zip(examples, outputs, strict=True)]


def _judge(options: TextEvaluationOptions) -> Judge:
    """Bits per byte of continuations, under the model that reads."""
    refuse_gguf(options.judge, "a judge of texts")
    tokenizer = load_tokenizer(models.resolve(options.judge))
    model = load_backend(options.judge, LoadOptions(dtype="float32"))
    pair = ModelPair(model, model, SamplingParams())

    def bits_per_byte(pairs: Continuations) -> float:
        rows = []
        for opening, text in pairs:
            given = tokenizer(_cut(opening, len(opening)))["input_ids"]
            rows.append(Response(tuple(given), tuple(tokenizer(text, add_special_tokens=False)["input_ids"])))
        likely = math.fsum(pair.log_likelihoods([row for row in rows if row.tokens]))
        return -likely / math.log(2) / max(sum(len(text.encode()) for _, text in pairs), 1)

    return bits_per_byte


def _row(title: str, pairs: Continuations, judge: Judge, known: set[str]) -> dict[str, Any]:
    words = [word for _, text in pairs for word in _words(text.rpartition(" ")[0])]  # the last word may be cut off
    coined = sum(word not in known for word in words)
    return {"text": title, "bits_per_byte": judge(pairs), "coined_words": coined / max(len(words), 1)}


def _lines(
    options: TextEvaluationOptions, rows: Sequence[dict[str, Any]], samples: dict[str, Continuations]
) -> list[str]:
    cells = [(row["text"], f"{row['bits_per_byte']:.3f}", f"{row['coined_words']:.2%}") for row in rows]
    judge = without_directory(options.judge)
    lines = [
        f"At most {options.count} held-out openings, {options.size} characters after each, one seed each; judge",
        f"{judge} in float32. Coined words: the share of words that are in none of the texts.",
        "",
        *table(("continuations of", f"bits per byte under {judge}", "coined words"), cells),
    ]
    for title, pairs in samples.items():
        lines += ["", f"## {title}", ""]
        lines += [f"- **{opening}** {text.strip()}".replace("\n", " / ") for opening, text in pairs[: options.shown]]
    return lines
