"""Verifiers for one chain per row, of any lengths; those with `lossless` false are the lossy ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.accelerator import to_device
from draftproof.draft import Draft, Verdict
from draftproof.errors import refuse_outside
from draftproof.functional.chain import ChainVerdict, block_verify, token_verify
from draftproof.functional.lossy import last_token_verify, mentored_verify, mixture_verify, typical_verify
from draftproof.functional.match import match_verify
from draftproof.rng import Rng


class ChainBatch(NamedTuple):
    """Drafted chains of a batch, padded to the longest; q is None if every token is a point mass."""

    tokens: Int[Tensor, "B n"]
    q: Float[Tensor, "B n V"] | None
    p: Float[Tensor, "B m V"]
    lengths: Int[Tensor, " B"]


def _pad(rows: Sequence[Tensor]) -> Tensor:
    """Stack rows of different lengths, padded with zeros at the end; a batch of one is a view."""
    if len(rows) == 1:
        return rows[0].unsqueeze(0)
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def pad_chains(drafts: Sequence[Draft], target_probs: Sequence[Float[Tensor, "_ vocab"]]) -> ChainBatch:
    """Pad the chains of a batch; rows without a draft have length 0.

    Raises:
        ValueError: a draft branches, or only some of the drafts are point masses.
    """
    for row, draft in enumerate(drafts):
        if not draft.tree.is_chain:
            raise ValueError(f"row {row}: expected a chain, got a draft that branches (use a rule for trees)")
    drawn = [draft.probs for draft in drafts if len(draft)]
    masses = sum(probs is None for probs in drawn)
    if 0 < masses < len(drawn):
        raise ValueError(
            f"expected all drafts with probabilities or all without, got {masses} of {len(drawn)} without (use one "
            "drafter for the whole batch)"
        )
    p = _pad(target_probs)
    q = p.new_zeros(len(drafts), 0, p.shape[-1]) if not drawn else None
    if drawn and not masses:
        q = _pad([p.new_zeros(0, p.shape[-1]) if draft.probs is None else draft.probs for draft in drafts])
    lengths = to_device([len(draft) for draft in drafts], p.device)
    return ChainBatch(_pad([draft.tree.tokens for draft in drafts]), q, p, lengths)


class ChainVerifier:
    """A Verifier that applies a rule for chains.

    Args:
        rule: `token_verify`, `block_verify` or a function with their signature.
        lossless: whether the rule's output distribution is the target's.
        point_masses: whether the rule accepts drafts without probabilities.
        shared_noise: whether target and draft draw with the same noise.
    """

    branching = False
    constant_length = False

    def __init__(
        self,
        name: str,
        rule: Callable[..., ChainVerdict],
        *,
        lossless: bool = True,
        point_masses: bool = True,
        shared_noise: bool = False,
    ) -> None:
        self.name = name
        self.lossless = lossless
        self.point_masses = point_masses
        self.shared_noise = shared_noise
        self._rule = rule

    def verify(
        self,
        drafts: Sequence[Draft],
        target_probs: Sequence[Float[Tensor, "_ vocab"]],
        rng: Rng,
        states: Sequence[object] = (),  # noqa: ARG002 - these rules have no state
    ) -> list[Verdict]:
        """Verdicts of all chains, by one call of the rule; this makes the round's only copy to the host."""
        tokens, q, p, lengths = pad_chains(drafts, target_probs)
        found = self._rule(tokens, q, p, rng=rng, lengths=lengths, validate=False)
        host = torch.cat([found.accepted.unsqueeze(-1), found.token.unsqueeze(-1), tokens], -1).tolist()
        return [Verdict(tuple(range(kept)), token, (*drafted[:kept], token)) for kept, token, *drafted in host]


def token_verifier() -> ChainVerifier:
    """Token verification (Leviathan et al. 2023; Block Verification, arXiv 2403.10444, Algorithm 1)."""
    return ChainVerifier("token", token_verify)


def block_verifier() -> ChainVerifier:
    """Block verification (arXiv 2403.10444, Algorithm 2): accepts at least as much as token verification on average."""
    return ChainVerifier("block", block_verify)


def match_verifier() -> ChainVerifier:
    """Sample from p, and keep tokens as long as they equal the draft, as llama.cpp, mlx-lm and exllama do."""
    return ChainVerifier("match", match_verify)


def gumbel_verifier() -> ChainVerifier:
    """Match verification in which target and draft draw with the same noise, so that they mostly draw the same token.

    The text depends on the seed and the target alone, whatever is drafted (Daliri, Musco, Suresh 2024, arXiv
    2408.07978).
    """
    return ChainVerifier("gumbel", match_verify, shared_noise=True)


# --- lossy rules: every result tells the user ------------------------------------------------------------------------


def last_token_verifier() -> ChainVerifier:
    """SPRINTER's rule: keep all drafted tokens but the last unverified, and verify the last (arXiv 2502.04557)."""
    return ChainVerifier("last_token", last_token_verify, lossless=False)


def typical_verifier(epsilon: float = 0.09) -> ChainVerifier:
    """Typical acceptance: keep tokens above epsilon, or above less if the target is undecided; q is not used."""
    refuse_outside("verifier typical", epsilon, 0, 1)
    return ChainVerifier(f"typical:{epsilon:g}", partial(typical_verify, epsilon=epsilon), lossless=False)


def mixture_verifier(epsilon: float = 0.1) -> ChainVerifier:
    """The fixed mixture (1 - epsilon) p + epsilon q at every drafted position, epsilon 0 to 1."""
    refuse_outside("verifier mixture", epsilon, 0, 1)
    return ChainVerifier(f"mixture:{epsilon:g}", partial(mixture_verify, epsilon=epsilon), lossless=False)


def mentored_verifier(budget: float = 0.1) -> ChainVerifier:
    """Mentored decoding: as much acceptance as a divergence budget allows, 0 to 10 nats at each drafted position."""
    refuse_outside("verifier mentored", budget, 0, 10)
    return ChainVerifier(
        f"mentored:{budget:g}", partial(mentored_verify, budget=budget), lossless=False, point_masses=False
    )
