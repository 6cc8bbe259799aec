"""Tokens per target call of verification rules, by draft length and number of drafts, on one pair of models.

Every rule gets the same pair, prompts and seeds. Nothing is timed. The pair is one of language models, or a synthetic
pair with a vocabulary of any size, which needs no weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.backends.base import Backend
from draftproof.bench.model_cache import ModelCache
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.engine import Engine
from draftproof.engine.verifier_parts import make_verifier
from draftproof.errors import UserError, refuse_below_one, refuse_unknown
from draftproof.progress import Watch, silent
from draftproof.provenance import run_facts, shown_options, without_directory
from draftproof.results import Results, mean_and_error, table
from draftproof.rng import fold
from draftproof.sampling import SamplingParams
from draftproof.testing import TableModel
from draftproof.training.sweep import rates

SINGLE = ("match", "gumbel", "token", "block")  # rules for one draft
SEVERAL = ("multi_round", "spectr", "traversal", "trie_block", "multi_path")  # rules for several drafts
_SHARPNESS, _NOISE = 3.0, 1.0  # of synthetic pairs
_MOST_ENTRIES = 1 << 25  # most entries of a synthetic model's rows that are kept


class SyntheticModel(TableModel):
    """Rows softmax(3 a + noise b) for each last token, with random a and b; models of one family share a.

    `family` and `own` are the seeds of a and b. With noise 0, b is left out.
    """

    def __init__(self, vocab: int, family: int, own: int, noise: float) -> None:
        super().__init__(vocab, own, order=1)
        self._family = family
        self._noise = noise

    def logits(self, context: Sequence[int]) -> Float[Tensor, " vocab"]:
        """The row after a context; all kept rows are dropped when they would take too much memory."""
        if len(self._rows) * self.vocab_size > _MOST_ENTRIES:
            self._rows.clear()
        return super().logits(context)

    def _random_row(self, key: tuple[int, ...]) -> Float[Tensor, " vocab"]:
        shared = torch.Generator().manual_seed(fold(self._family, *key) >> 1)
        own = torch.Generator().manual_seed(fold(self._seed, *key) >> 1)
        scores = _SHARPNESS * torch.randn(self.vocab_size, dtype=torch.float64, generator=shared)
        scores += self._noise * torch.randn(self.vocab_size, dtype=torch.float64, generator=own)
        return scores.log_softmax(-1)


@dataclass(frozen=True)
class RuleComparison:
    """Options of a comparison of rules.

    Attributes:
        target, draft, dtype: the pair of models.
        synthetic: measure a synthetic pair with a vocabulary of this size instead of the models.
        rules: a rule, a name of SINGLE or SEVERAL.
        lengths: draft length.
        drafts: number of drafts, for the rules that take several.
        dataset, questions: of the prompts of language models.
        seeds: runs of each prompt with other draws.
        tokens: tokens of every answer; stop tokens are ignored.
    """

    target: str = "embedded:target"
    draft: str = "embedded:draft"
    dtype: str = "auto"
    synthetic: Sequence[int] = ()
    rules: Sequence[str] = (*SINGLE, *SEVERAL)
    lengths: Sequence[int] = (4, 8)
    drafts: Sequence[int] = (1, 2, 4, 8)
    dataset: str = "story-openings"
    questions: int = 4
    seeds: int = 8
    tokens: int = 48

    def __post_init__(self) -> None:
        for rule in self.rules:
            refuse_unknown("rule", rule, (*SINGLE, *SEVERAL))
        refuse_below_one(n=min(self.lengths), drafts=min(self.drafts), seeds=self.seeds, tokens=self.tokens)
        if min(self.synthetic, default=2) < 2:
            raise UserError(f"synthetic vocabulary: expected 2 tokens or more, got {min(self.synthetic)}")


def compare_rules(options: RuleComparison, *, watch: Watch = silent) -> Results:
    """Tokens per target call of every rule: the mean over seeds with its standard error."""
    facts = run_facts()
    pairs = [f"synthetic, vocabulary {size}" for size in options.synthetic] or [
        f"{without_directory(options.target)} / {without_directory(options.draft)}"
    ]
    settings = [
        (n, rule, count)
        for n, rule, count in itertools.product(options.lengths, options.rules, options.drafts)
        if rule in SEVERAL or count == options.drafts[0]
    ]
    rows: list[dict[str, Any]] = []
    with watch("measuring", len(pairs) * len(settings), 0) as tick:
        for place, pair in enumerate(pairs):
            target, draft, prompts = (
                _synthetic(options.synthetic[place])
                if options.synthetic
                else ModelCache().pair(options.target, options.draft, options.dtype, options.dataset, options.questions)
            )
            for n, rule, count in settings:
                drafter = f"chains:{count}" if rule in SEVERAL else "model"
                part = make_drafter(drafter, target=target, draft=draft, stopper=f"fixed:{n}")
                values = _efficiency(Engine(target, part, make_verifier(rule)), prompts, options)
                setting = {"pair": pair, "n": n, "rule": rule, "drafts": count if rule in SEVERAL else 1}
                rows.append({**setting, "tokens_per_call": values})
                tick(len(rows), tokens=options.seeds * options.tokens * len(prompts))
    figures = {"options": shown_options(options), "rows": rows}
    return Results("Tokens per target call by rule and number of drafts", _lines(options, rows), figures, facts)


def _synthetic(vocab: int) -> tuple[Backend, Backend, list[list[int]]]:
    """A synthetic target and draft model, with prompts of one token."""
    return (
        SyntheticModel(vocab, 1, 2, 0.0),
        SyntheticModel(vocab, 1, 3, _NOISE),
        [[token % vocab] for token in range(4)],
    )


def _efficiency(engine: Engine, prompts: Sequence[Sequence[int]], options: RuleComparison) -> list[float]:
    """Tokens per target call of each seed, all prompts together."""
    found = []
    for seed in range(options.seeds):
        params = SamplingParams(max_tokens=options.tokens, seed=seed, ignore_eos=True)
        found.append(rates(engine.generate([list(prompt) for prompt in prompts], params))["block_efficiency"])
    return found


def _lines(options: RuleComparison, rows: Sequence[dict[str, Any]]) -> list[str]:
    """One table for each pair and draft length: a row for each rule, a column for each number of drafts K."""
    lines = [
        f"Temperature 1, {options.tokens} tokens an answer, {options.seeds} seeds: mean over seeds and its standard",
        "error. Synthetic pairs: rows softmax(3 a + b) by the last token, a shared by target and draft model, b the",
        "draft model's own.",
    ]
    for pair, n in itertools.product(dict.fromkeys(row["pair"] for row in rows), options.lengths):
        found = {
            (row["rule"], row["drafts"]): mean_and_error(row["tokens_per_call"], 2)
            for row in rows
            if (row["pair"], row["n"]) == (pair, n)
        }
        counts = sorted({drafts for _, drafts in found})
        lines += ["", f"## {pair}, n = {n}", ""]
        heads = ("rule", *(f"K = {count}" for count in counts))
        lines += table(heads, [(rule, *(found.get((rule, k), "") for k in counts)) for rule in options.rules])
    return lines
