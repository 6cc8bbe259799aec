"""The reference of an audit: the target's weights here, which say how probable each sampled token was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof import models
from draftproof.audit.server.fault_models import FLOOR, Maker, ScoredAnswer, reference
from draftproof.backends.base import Backend, outputs_along
from draftproof.backends.loading.load import load
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.tokenization import load_tokenizer, refuse_different
from draftproof.backends.model_info import end_tokens
from draftproof.errors import UserError
from draftproof.grammar import Grammars
from draftproof.sampling import SamplingParams, Transforms


@dataclass(frozen=True)
class Gap:
    """Where the sampled token of a greedy answer is not the most likely one, and how far its logit is behind."""

    place: int
    token: int
    best: int
    behind: float


class Reference:
    """A target model, and its draft model where that is known, that read answers token by token."""

    def __init__(
        self, target: Backend, tokenizer: Any, *, draft: Backend | None = None, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self.target = target
        self.draft = draft
        self.tokenizer = tokenizer
        self.ends = tuple(eos_token_ids)

    @classmethod
    def load(cls, target: str, draft: str | None = None, *, dtype: str = "float32", **options: Any) -> Reference:
        """From names, as `Engine.load` takes them; a UserError for a draft model with another tokenizer."""
        read = LoadOptions(dtype=dtype, **options)
        backend = load(target, read).backend
        tokenizer = load_tokenizer(models.resolve(target))
        small = None
        if draft is not None:
            refuse_different(tokenizer, load_tokenizer(models.resolve(draft)), target_name=target, draft_name=draft)
            small = load(draft, read).backend
        ends = end_tokens(backend.eos_token_ids, tokenizer.eos_token_id)
        return cls(backend, tokenizer, draft=small, eos_token_ids=ends)

    @cached_property
    def grammars(self) -> Grammars:
        """What compiles the grammars of requests."""
        return Grammars.of(self.tokenizer, self.target.vocab_size, self.ends)

    def bind(self, params: SamplingParams, prompt: Sequence[int]) -> Transforms:
        """Sampling parameters for one prompt."""
        return params.bind(
            vocab_size=self.target.vocab_size,
            eos_token_ids=self.ends,
            prompt_ids=prompt,
            encode=lambda text: self.tokenizer.encode(text, add_special_tokens=False),
            constraint=None if params.grammar is None else self.grammars.constraint(params.grammar),
        )

    def encode(self, text: str) -> list[int]:
        """The token ids of a prompt."""
        return [int(token) for token in self.tokenizer.encode(text)]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of sampled tokens, special ones left out."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @torch.inference_mode()
    def read(
        self, params: SamplingParams, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
    ) -> list[ScoredAnswer]:
        """The contexts of some answers, in one forward pass."""
        for answer in answers:
            bad = next((token for token in answer if not 0 <= token < self.target.vocab_size), None)
            if bad is not None:
                raise UserError(
                    f"the server sampled token {bad}, and the target has {self.target.vocab_size}: name the weights "
                    "that it serves with --target"
                )
        rows = _rows(self.target, prompts, answers)
        drafted = _rows(self.draft, prompts, answers) if self.draft is not None else [None] * len(rows)
        return [
            ScoredAnswer(prompt, tuple(answer), logits, small, self.bind(params, prompt))
            for prompt, answer, logits, small in zip(prompts, answers, rows, drafted, strict=True)
        ]


def _rows(
    backend: Backend, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[Float[Tensor, "tokens vocab"]]:
    return [each.logits.float().cpu() for each in outputs_along(backend, prompts, [answer[:-1] for answer in answers])]


def gaps(answer: ScoredAnswer) -> list[Gap]:
    """Where a greedy answer leaves the most likely token."""
    best = answer.rows().argmax(-1)
    at = torch.tensor(list(answer.tokens))
    behind = answer.logits.gather(-1, best.unsqueeze(-1)) - answer.logits.gather(-1, at.unsqueeze(-1))
    return [
        Gap(int(place), int(at[place]), int(best[place]), float(behind[place]))
        for place in (at != best).nonzero().flatten()
    ]


def drifts(
    right: Sequence[ScoredAnswer], rounded: Sequence[ScoredAnswer], kinds: Mapping[str, Maker]
) -> dict[str, float]:
    """By how much the mean of r/p differs from 1 under rounded probabilities: the mean absolute value over contexts."""
    sums = dict.fromkeys(kinds, 0.0)
    count = 0
    for exact, other in zip(right, rounded, strict=True):
        p, mixed = reference(exact)
        change = other.rows() - p
        count += p.shape[0]
        for name, make in kinds.items():
            ratio = (1 - FLOOR) * make(exact, p) / mixed.clamp(min=1e-30)
            sums[name] += float((change * ratio).sum(-1).abs().sum())
    return {name: total / max(count, 1) for name, total in sums.items()}


def largest_change(right: Sequence[ScoredAnswer], rounded: Sequence[ScoredAnswer]) -> float:
    """The largest difference of two logits' distance between both arithmetics, among likely tokens."""
    most = 0.0
    for exact, other in zip(right, rounded, strict=True):
        top = exact.logits.topk(min(8, exact.logits.shape[-1]), -1).indices
        change = (exact.logits - other.logits).gather(-1, top)
        most = max(most, float((change.amax(-1) - change.amin(-1)).amax()))
    return most
