"""How far two forms of a model are apart: divergence of their next tokens and perplexity, on texts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from draftproof import models
from draftproof.backends.base import logits_along
from draftproof.backends.loading.load import LoadedModel, load
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.tokenization import why_different
from draftproof.bench.estimate import bootstrap
from draftproof.bench.questions import read_questions
from draftproof.errors import UserError, refuse_below_one
from draftproof.progress import Watch, silent
from draftproof.provenance import run_facts, without_directory
from draftproof.results import Results, table

_LONGEST = 256  # tokens of a text that are read, where both models read so many


@dataclass(frozen=True)
class DivergenceOptions:
    """Options of `measure_divergence`.

    Attributes:
        target: the model.
        against: what it is compared with; without it the same name, with its own weights and inputs in floats.
        weights: int8 or int4 round the target's weights; auto leaves them.
        activations: int8 or float: inputs of weights that a .gguf file holds in few bits.
        kv_dtype: int8, bfloat16 or float32: the format of the target's keys and values; auto has the model's dtype,
            and bfloat16 for a .gguf file in few bits.
        dtype: number format of both models.
        dataset: the texts.
        questions: how many of them.
    """

    target: str = models.DEFAULT_TARGET
    against: str | None = None
    weights: str = "auto"
    activations: str = "int8"
    kv_dtype: str = "auto"
    dtype: str = "auto"
    dataset: str = "fiction"
    questions: int | None = None

    def __post_init__(self) -> None:
        if self.questions is not None:
            refuse_below_one(questions=self.questions)


@dataclass(frozen=True)
class _Found:
    """Sums over the tokens of one text: KL divergence from the other, in nats, and minus the log-probabilities.

    `same` counts the tokens whose most likely one is the same.
    """

    tokens: int
    divergence: float
    same: int
    loss: float
    other_loss: float


def measure_divergence(options: DivergenceOptions, *, watch: Watch = silent) -> Results:
    """Divergence, same most likely token and perplexity on texts, with intervals over texts."""
    facts = run_facts()
    changed = LoadOptions(
        dtype=options.dtype, weights=options.weights, activations=options.activations, kv_dtype=options.kv_dtype
    )
    one = load(options.target, changed)
    other = load(options.against or options.target, LoadOptions(dtype=options.dtype, activations="float"))
    if (why := why_different(one.tokenizer, other.tokenizer)) is not None:
        raise UserError(f"{one.name} cannot be compared with {other.name}: {why}; both must share one tokenizer")
    longest = min(each.backend.max_positions or _LONGEST for each in (one, other))
    texts = [question.turns[0] for question in read_questions(options.dataset, options.questions)]
    found = []
    with watch("comparing", len(texts), 0) as tick:
        for number, text in enumerate(texts, 1):
            ids = one.tokenizer(text)["input_ids"][: min(longest, _LONGEST)]
            if len(ids) > 1:
                found.append(_compared(ids, *(logits_along(each.backend, ids[:1], ids[1:-1]) for each in (one, other))))
            tick(number)
    if not found:
        raise UserError(f"dataset is {options.dataset!r}: expected texts of at least two tokens")
    return _page(options, one, other, found, facts)


def _compared(ids: list[int], ours: Tensor, theirs: Tensor) -> _Found:
    vocab = min(ours.shape[-1], theirs.shape[-1])  # one of them may be padded
    p, q = (each[:, :vocab].double().log_softmax(-1) for each in (ours, theirs))
    following = torch.tensor(ids[1:], device=p.device).unsqueeze(-1)
    return _Found(
        tokens=len(ids) - 1,
        divergence=float((q.exp() * (q - p)).sum()),
        same=int((p.argmax(-1) == q.argmax(-1)).sum()),
        loss=-float(p.gather(-1, following).sum()),
        other_loss=-float(q.gather(-1, following).sum()),
    )


def _page(options: DivergenceOptions, one: LoadedModel, other: LoadedModel, found: list[_Found], facts: Any) -> Results:
    def share(field: str) -> Any:
        return bootstrap(found, lambda texts: fmean(_each(texts, field)))

    def perplexity(field: str) -> Any:
        return bootstrap(found, lambda texts: math.exp(fmean(_each(texts, field))))

    figures = {
        "divergence": share("divergence"),
        "same": share("same"),
        "perplexity": perplexity("loss"),
        "other perplexity": perplexity("other_loss"),
    }
    shown = [["mean KL divergence, nats", figures["divergence"]], ["same most likely token", figures["same"]]]
    shown += [["perplexity", figures["perplexity"]], ["perplexity of the other", figures["other perplexity"]]]
    named = f"weights {options.weights}, activations {options.activations}, keys and values {options.kv_dtype}"
    lines = [
        f"{without_directory(one.name)} ({named}) beside {without_directory(other.name)} as it is, dataset",
        f"{options.dataset}: {sum(each.tokens for each in found)} tokens of {len(found)} texts; intervals of 95% over",
        "texts. The divergence is that of the first from the other, which is taken for right.",
        "",
        *table(["", "value"], shown),
    ]
    figures = {name: value.to_dict() for name, value in figures.items()}
    return Results("Divergence of two forms of a model", lines, {**figures, "tokens": [vars(x) for x in found]}, facts)


def _each(texts: Any, field: str) -> list[float]:
    """The figure of each token, on the mean of its text, so that tokens count alike."""
    total = sum(text.tokens for text in texts)
    return [getattr(text, field) * len(texts) / total for text in texts]
