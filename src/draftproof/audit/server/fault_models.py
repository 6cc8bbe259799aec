"""Kinds of faults: in each context of an answer, the distribution r that a faulty server would draw from instead of p.

Most come from faults that were released somewhere: a transform that is skipped or forgets drafted tokens, a row of
another position, a rule that accepts drafts too easily or takes the wrong residual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.sampling import SamplingParams, Transforms, probabilities

FLOOR = 1e-4  # share of the untransformed distribution that is mixed into p: no ratio is infinite
_WINDOW = 32  # tokens that "repetition" looks back
_MATCHES = (3, 2, 1)  # lengths of the passages that "lookup" matches, longest first


@dataclass(frozen=True)
class ScoredAnswer:
    """The contexts of one answer: logits for each sampled token, of a draft model too, and transforms."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    logits: Float[Tensor, "tokens vocab"]
    draft: Float[Tensor, "tokens vocab"] | None
    transforms: Transforms

    def rows(self, params: SamplingParams | None = None, *, forgotten: int = 0, draft: bool = False) -> Tensor:
        """The distribution of each token.

        `params` are others than the request's; transforms do not see so many last tokens as are `forgotten`; `draft`
        takes the draft model instead of the target.
        """
        own = self.transforms if params is None else replace(self.transforms, params=params)
        paths = [self.tokens[: max(0, place - forgotten)] for place in range(len(self.tokens))]
        logits = self.draft if draft else self.logits
        assert logits is not None, "asked for only where there is a draft model"
        return probabilities(logits, own, (), paths)


Rows = Float[Tensor, "tokens vocab"]
Maker = Callable[[ScoredAnswer, Rows], Rows]


def _normalised(rows: Rows, otherwise: Rows) -> Rows:
    """Rows divided by their sums; those that are 0 are taken from `otherwise`."""
    total = rows.sum(-1, keepdim=True)
    return torch.where(total > 1e-6, rows / total.clamp(min=1e-12), otherwise)


def _tempered(power: float) -> Maker:
    def made(_: ScoredAnswer, p: Rows) -> Rows:
        return _normalised((p / p.amax(-1, keepdim=True)).pow(power) * (p > 0), p)

    return made


def _repeated(answer: ScoredAnswer, p: Rows) -> Rows:
    text = [*answer.prompt, *answer.tokens]
    seen = torch.zeros_like(p)
    for row in range(p.shape[0]):
        end = len(answer.prompt) + row
        seen[row, torch.tensor(text[max(0, end - _WINDOW) : end])] = 1.0
    return _normalised(p * seen, p)


def looked_up(text: Sequence[int]) -> int | None:
    """The token after the latest earlier place with the same last tokens; None where there is none."""
    for size in _MATCHES:
        if len(text) <= size:
            continue
        end = list(text[-size:])
        for start in range(len(text) - size - 1, -1, -1):
            if list(text[start : start + size]) == end:
                return text[start + size]
    return None


def _lookups(answer: ScoredAnswer) -> list[int | None]:
    text = [*answer.prompt, *answer.tokens]
    return [looked_up(text[: len(answer.prompt) + row]) for row in range(len(answer.tokens))]


def _lookup(answer: ScoredAnswer, p: Rows) -> Rows:
    made = p.clone()
    for row, token in enumerate(_lookups(answer)):
        if token is not None:
            made[row] = 0
            made[row, token] = 1.0
    return made


def _no_lookup(answer: ScoredAnswer, p: Rows) -> Rows:
    made = p.clone()
    for row, token in enumerate(_lookups(answer)):
        if token is not None:
            made[row, token] = 0
    return _normalised(made, p)


def _q(answer: ScoredAnswer, p: Rows) -> Rows:
    return answer.rows(draft=True) if answer.draft is not None else p


def _wide_residual(steps: int) -> Maker:
    """p moved from the residual max(P p - q, 0) towards max(p - q, 0): a block rule that forgets its running ratio P.

    P is that of the last `steps` tokens, as if they had been drafted and accepted together.
    """

    def made(answer: ScoredAnswer, p: Rows) -> Rows:
        q = _q(answer, p)
        at = torch.tensor(list(answer.tokens)).unsqueeze(-1)
        log_ratio = (p.gather(-1, at) / q.gather(-1, at).clamp(min=1e-30)).clamp(1e-9, 1e9).log()
        running = torch.zeros_like(log_ratio)
        for step in range(steps, 0, -1):  # the ratio of the token `step` places before, 1 before the answer begins
            ago = torch.cat([torch.zeros_like(log_ratio[:step]), log_ratio[:-step]])[: len(log_ratio)]
            running = (running + ago).clamp(max=0)
        ratio = running.exp()
        right, wrong = (ratio * p - q).clamp(min=0), (p - q).clamp(min=0)
        mass, wide = right.sum(-1, keepdim=True), wrong.sum(-1, keepdim=True)
        most = 1 / (ratio / mass.clamp(min=1e-9) - 1 / wide.clamp(min=1e-9)).clamp(min=1e-2)
        moved = p + most * (_normalised(wrong, p) - _normalised(right, p))
        return torch.where((mass > 1e-6) & (ratio < 0.99), _normalised(moved.clamp(min=0), p), p)

    return made


def kinds_of(params: SamplingParams, *, drafted: bool) -> dict[str, Maker]:
    """The kinds of faults that can show under these sampling parameters; `drafted` if the draft model is known."""
    if params.temperature == 0:
        return {}
    made: dict[str, Maker] = {
        "too cold": _tempered(1.5),
        "too hot": _tempered(0.7),
        "greedy tokens": lambda _, p: torch.zeros_like(p).scatter_(-1, p.argmax(-1, keepdim=True), 1.0),
        "row of the token before": lambda _, p: torch.cat([p[:1], p[:-1]]),
        "any token": lambda _, p: torch.full_like(p, 1 / p.shape[-1]),
        "tokens repeated": _repeated,
        "looked-up drafts accepted": _lookup,
        "looked-up drafts refused": _no_lookup,
    }
    made |= _skipped(params)
    if drafted:
        made |= {
            "drafts accepted": _q,
            "drafts refused": lambda answer, p: _normalised((p - _q(answer, p)).clamp(min=0), p),
            "only what both draw": lambda answer, p: _normalised(torch.minimum(p, _q(answer, p)), p),
            "block residual without its ratio": _wide_residual(1),
            "block residual without its long ratio": _wide_residual(3),
        }
    return made


_OFF: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "min_tokens": 0,
}
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


def _skipped(params: SamplingParams) -> dict[str, Maker]:
    """Transforms that are left out, or that do not see drafted tokens."""
    on = [name for name, off in _OFF.items() if getattr(params, name) != off]
    made = {f"{name} skipped": _without(replace(params, **{name: _OFF[name]})) for name in on}
    if set(on) & set(_PENALTIES) or params.bad_words:
        made |= {f"last {count} tokens not counted": _forgetting(count) for count in (1, 2, 4)}
    return made


def _without(changed: SamplingParams) -> Maker:
    return lambda answer, _: answer.rows(changed)


def _forgetting(count: int) -> Maker:
    return lambda answer, _: answer.rows(forgotten=count)


def reference(answer: ScoredAnswer) -> tuple[Rows, Rows]:
    """p of each token, and p with a small share of the untransformed distribution, by which ratios are divided."""
    p = answer.rows()
    full = answer.logits.float().softmax(-1)
    return p, (1 - FLOOR) * p + FLOOR * full


def ratios(answer: ScoredAnswer, kinds: dict[str, Maker]) -> Float[Tensor, "tokens kinds"]:
    """r/p of each sampled token under each kind; its mean under p is 1 at most, in every context."""
    p, mixed = reference(answer)
    at = torch.tensor(list(answer.tokens)).unsqueeze(-1)
    below = mixed.gather(-1, at).squeeze(-1)
    found = [make(answer, p).gather(-1, at).squeeze(-1) for make in kinds.values()]
    return (1 - FLOOR) * torch.stack(found, -1) / below.clamp(min=1e-30).unsqueeze(-1)
