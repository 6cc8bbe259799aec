"""Engines made faulty on purpose, one for each fault that an audit of a server must find: its positive controls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from draftproof.backends.base import FeedOutput
from draftproof.draft import Draft, Verdict
from draftproof.engine.engine import Engine
from draftproof.engine.request import Request
from draftproof.functional.chain import ChainVerdict, block_acceptance, bonus_weights, token_verify
from draftproof.rng import Rng
from draftproof.sampling import probabilities
from draftproof.verifiers.chain import ChainVerifier, token_verifier

Probs = Float[Tensor, "rows vocab"]


def _token_residual(
    tokens: Int[Tensor, "B n"],
    q: Float[Tensor, "B n V"] | None,
    p: Float[Tensor, "B m V"],
    *,
    rng: Rng,
    lengths: Int[Tensor, " B"],
    validate: bool,
) -> ChainVerdict:
    """Block verification that draws the bonus token from max(p - q, 0), without the running ratio."""
    if not tokens.shape[1]:
        return token_verify(tokens, q, p, rng=rng, lengths=lengths, validate=False)
    running, accept = block_acceptance(tokens, q, p, lengths)
    accepted = (rng.bernoulli(accept) * torch.arange(1, tokens.shape[1] + 1)).amax(-1)
    weights = bonus_weights(p, q, tokens, accepted, lengths, torch.ones_like(running[:, 0]))
    return ChainVerdict(accepted, rng.categorical(weights))


def _greedy_accepted(
    tokens: Int[Tensor, "B n"],
    q: Float[Tensor, "B n V"] | None,
    p: Float[Tensor, "B m V"],
    *,
    rng: Rng,
    lengths: Int[Tensor, " B"],
    validate: bool,
) -> ChainVerdict:
    """Accept drafted tokens while they are the most likely ones, at any temperature; then draw from p."""
    length = tokens.shape[1]
    same = (tokens == p[:, :length].argmax(-1)) & (torch.arange(length) < lengths.unsqueeze(-1))
    accepted = same.long().cumprod(-1).sum(-1)
    return ChainVerdict(accepted, rng.categorical(p[torch.arange(tokens.shape[0]), accepted]))


class _Changed(ChainVerifier):
    """Token verification of drafts and rows that a fault has changed."""

    def __init__(self, name: str, change: Callable[[Draft, Probs], tuple[Draft, Probs]]) -> None:
        super().__init__(name, token_verify)
        self._change = change

    @override
    def verify(
        self, drafts: Sequence[Draft], target_probs: Sequence[Probs], rng: Rng, states: Sequence[object] = ()
    ) -> list[Verdict]:
        changed = [self._change(*row) for row in zip(drafts, target_probs, strict=True)]
        return super().verify([draft for draft, _ in changed], [probs for _, probs in changed], rng, states)


TEMPERATURE = 0.7  # at which "q before temperature" is audited


def _untempered(draft: Draft, probs: Probs) -> tuple[Draft, Probs]:
    """The rule is given q as it was before the temperature of 0.7."""
    if draft.probs is None or not len(draft):
        return draft, probs
    before = draft.probs.pow(TEMPERATURE)
    return replace(draft, probs=before / before.sum(-1, keepdim=True)), probs


def _wrong_row(draft: Draft, probs: Probs) -> tuple[Draft, Probs]:
    """After a whole accepted draft, the bonus token comes from the row before its own."""
    return draft, torch.cat([probs[:-1], probs[-2:-1]]) if len(draft) else probs


class _DraftsWithoutTopP(Engine):
    """Rows of drafted tokens are verified without top_p; only the last row has it."""

    def _target_probs(self, row: Request, draft: Draft, output: FeedOutput) -> Probs:
        right = super()._target_probs(row, draft, output)
        outputs, paths = row.contexts(draft)
        loose = replace(row.transforms, params=replace(row.params, top_p=1.0))
        return torch.cat([probabilities(output.logits, loose, outputs, paths)[:-1], right[-1:]])


class _ForgetfulPenalties(Engine):
    """Penalties of drafted rows count committed tokens only."""

    def _target_probs(self, row: Request, draft: Draft, output: FeedOutput) -> Probs:
        super()._target_probs(row, draft, output)
        outputs, paths = row.contexts(draft)
        return probabilities(output.logits, row.transforms, outputs, [()] * len(paths))


# name: (class of the engine, its verifier, the check that must find it)
FAULTS: dict[str, tuple[type[Engine], Callable[[], ChainVerifier], str]] = {
    "token residual in block verification": (Engine, lambda: ChainVerifier("block", _token_residual), "plain"),
    "q taken before temperature": (Engine, lambda: _Changed("token", _untempered), "temperature"),
    "bonus token from the wrong row": (Engine, lambda: _Changed("token", _wrong_row), "plain"),
    "top_p skipped on drafts": (_DraftsWithoutTopP, token_verifier, "top_p"),
    "penalty forgets drafted tokens": (_ForgetfulPenalties, token_verifier, "presence"),
    "greedy drafts accepted": (Engine, lambda: ChainVerifier("token", _greedy_accepted), "plain"),
}


def faulty_engine(name: str, right: Engine, **options: Any) -> Engine:
    """An engine with one fault, on the models and the drafter of a right one.

    Args:
        name: of FAULTS.
        right: an engine that decodes with chains; it must not be used at the same time.
        options: of the engine.
    """
    kind, rule, _ = FAULTS[name]
    return kind(
        right.target,
        right.drafter,
        rule(),
        tokenizer=right.tokenizer,
        eos_token_ids=right.eos_token_ids,
        max_batch=right.max_batch,
        **options,
    )
