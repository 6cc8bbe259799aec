"""Lossy rules: they accept more than a lossless rule may. Each docstring states the output distribution that is known.

Callers mark these rules as lossy: `draftproof.verifiers.chain` does so for the engine.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.functional.chain import (
    ChainVerdict,
    bonus_weights,
    leading_accepted,
    log_ratios,
    plain_round,
    row_lengths,
)
from draftproof.functional.checks import check_chain
from draftproof.rng import Rng

KL_STEPS = 50
TINY = 1e-300


def _accept_each(
    accept: Float[Tensor, "B n"],
    lengths: Int[Tensor, " B"] | None,
    tokens: Int[Tensor, "B n"],
    q: Float[Tensor, "B n V"] | None,
    p: Float[Tensor, "B n+1 V"],
    rng: Rng,
) -> ChainVerdict:
    """Accept tokens with these probabilities, then draw from max(p - q, 0), or from p after a full chain."""
    size = row_lengths(tokens, lengths)
    accepted = leading_accepted(accept, size, rng)
    one = torch.ones(tokens.shape[0], dtype=torch.float64, device=tokens.device)
    return ChainVerdict(accepted, rng.categorical(bonus_weights(p, q, tokens, accepted, size, one)))


def last_token_verify(
    tokens: Int[Tensor, "B n"],
    q: Float[Tensor, "B n V"] | None,
    p: Float[Tensor, "B n+1 V"],
    *,
    rng: Rng,
    lengths: Int[Tensor, " B"] | None = None,
    validate: bool = True,
) -> ChainVerdict:
    """Accept every drafted token but the last without a test, and the last one by token verification.

    This is what SPRINTER does at the target. It is meant for a stopper that ends the draft at the first token it
    rejects.

    Output distribution: suppose that the stopper passes all acceptable tokens (q <= p) and a fraction eta of the
    others. Then each position has the distribution (1 - eta) p + eta q given its prefix (SPRINTER, Theorem 3.1, read
    such that the last token is kept when the target accepts it). With any other stopper, or at a length limit, the
    distribution is not known in closed form. Arguments and errors are those of
    `draftproof.functional.token_verify`.

    Source: SPRINTER, arXiv 2502.04557, Algorithm 1 and Theorem 3.1.
    """
    if validate:
        check_chain(tokens, q, p, lengths)
    last = row_lengths(tokens, lengths) - 1
    place = torch.arange(tokens.shape[1], device=tokens.device)
    accept = log_ratios(tokens, q, p).exp().clamp_(max=1).masked_fill(place < last.unsqueeze(-1), 1)
    return _accept_each(accept, lengths, tokens, q, p, rng)


def typical_verify(
    tokens: Int[Tensor, "B n"],
    q: Float[Tensor, "B n V"] | None,
    p: Float[Tensor, "B n+1 V"],
    *,
    rng: Rng,
    epsilon: float = 0.09,
    delta: float = 0.3,
    lengths: Int[Tensor, " B"] | None = None,
    validate: bool = True,
) -> ChainVerdict:
    """Typical acceptance: keep x_i while p(x_i) > min(epsilon, delta exp(-H(p))), then draw the next token from p.

    H is the entropy of p at that position. A token above the threshold is called typical: always above `epsilon`, and
    above less where the target is undecided. q is not used, but checked when given. Other arguments and errors are
    those of `draftproof.functional.token_verify`.

    Output distribution: given its prefix, a drafted position has q(x) on typical tokens, plus the mass of q on all
    other tokens times p(x). The bonus token after a full chain has the distribution p.

    Source: Cai et al. 2024 (Medusa, arXiv 2401.10774), section on typical acceptance, with its defaults; Hewitt et
    al. 2022.
    """
    if validate:
        check_chain(tokens, q, p, lengths)
    size, n = row_lengths(tokens, lengths), tokens.shape[1]
    entropy = torch.special.entr(p[:, :n]).sum(-1, dtype=torch.float64)
    threshold = (delta * torch.exp(-entropy)).clamp_(max=epsilon)
    typical = p[:, :n].gather(-1, tokens.unsqueeze(-1)).squeeze(-1) > threshold
    accepted = leading_accepted(typical.double(), size, rng)
    return ChainVerdict(accepted, rng.categorical(p[torch.arange(tokens.shape[0], device=tokens.device), accepted]))


def mixture_verify(
    tokens: Int[Tensor, "B n"],
    q: Float[Tensor, "B n V"] | None,
    p: Float[Tensor, "B n+1 V"],
    *,
    rng: Rng,
    epsilon: float,
    lengths: Int[Tensor, " B"] | None = None,
    validate: bool = True,
) -> ChainVerdict:
    """Token verification against the mixture (1 - epsilon) p + epsilon q, epsilon from 0 (lossless) to 1.

    A token is accepted with probability min(1, (1 - epsilon) p/q + epsilon). The residual is that of token
    verification, max(p - q, 0). Other arguments and errors are those of `draftproof.functional.token_verify`.

    Output distribution: each drafted position has (1 - epsilon) p + epsilon q given its prefix, at total variation
    distance epsilon TV(p, q) from p. The bonus token after a full chain has the distribution p, because q is not known
    there.

    Source: the output distribution of SPRINTER, arXiv 2502.04557, Theorem 3.1, as a rule that needs no stopper.
    """
    if not 0 <= epsilon <= 1:
        raise ValueError(f"epsilon: expected 0 (lossless) to 1 (accept everything), got {epsilon}")
    if validate:
        check_chain(tokens, q, p, lengths)
    accept = (log_ratios(tokens, q, p).exp() * (1 - epsilon) + epsilon).clamp_(max=1)
    return _accept_each(accept, lengths, tokens, q, p, rng)


def _clamped_mass(
    ratio: Float[Tensor, "R V"], mass_p: Float[Tensor, "R W"], mass_q: Float[Tensor, "R W"], bound: Float[Tensor, " R"]
) -> tuple[Float[Tensor, " R"], Float[Tensor, " R"]]:
    """Two masses of the tokens with q/p below a bound, from prefix sums over tokens sorted by q/p."""
    at = torch.searchsorted(ratio, bound.unsqueeze(-1))
    return mass_p.gather(-1, at).squeeze(-1), mass_q.gather(-1, at).squeeze(-1)


def _floor_for(
    filled: Float[Tensor, "R V"], mass_p: Float[Tensor, "R W"], mass_q: Float[Tensor, "R W"], taken: Float[Tensor, " R"]
) -> Float[Tensor, " R"]:
    """The floor a at which max(a p - q, 0) sums to `taken`; `filled` holds that sum for a = q/p of each token."""
    at = torch.searchsorted(filled, taken.unsqueeze(-1), right=True)
    floor = (taken + mass_q.gather(-1, at).squeeze(-1)) / mass_p.gather(-1, at).squeeze(-1)
    return floor.clamp_(TINY, 1)  # above 0, so that tokens with q = 0 count in the divergence


def mentored_bounds(
    p: Float[Tensor, "R V"], q: Float[Tensor, "R V"], budget: float
) -> tuple[Float[Tensor, " R"], Float[Tensor, " R"]]:
    """The floor a and the ceiling b of mentored decoding, for each row: a <= 1 <= b.

    The rule's output distribution is pi = clamp(q, a p, b p). Among the distributions with KL(p || pi) <= budget that
    give no mass to tokens with p = 0, pi has the largest acceptance sum_x min(q, pi): the stationary points of the
    Lagrangian are b p where q is cut off, a p where q is filled up, and q between. b is found by bisection (on 1/b), a
    follows from sum pi = 1. Prefix sums over the tokens sorted by q/p make each step of the search a look-up instead of
    a pass over the vocabulary.
    """
    if budget == 0:  # the divergence is flat there, so a search would stop 1e-8 too early
        return torch.ones_like(p[:, 0], dtype=torch.float64), torch.ones_like(p[:, 0], dtype=torch.float64)
    p64, q64 = p.double(), q.double()
    ratio, order = torch.where(p64 > 0, q64 / p64, torch.inf).sort(-1)
    start = torch.zeros_like(p64[:, :1])
    sorted_p, sorted_q = p64.gather(-1, order), q64.gather(-1, order)
    mass_p, mass_q = (torch.cat([start, x.cumsum(-1)], -1) for x in (sorted_p, sorted_q))
    cost = torch.where((sorted_p > 0) & (ratio > 0), -sorted_p * ratio.log(), 0.0)
    mass_c = torch.cat([start, cost.cumsum(-1)], -1)
    filled = ratio * mass_p[:, :-1] - mass_q[:, :-1]
    filled[:, 0] = 0

    def floor_under(ceiling: Float[Tensor, " R"]) -> Float[Tensor, " R"]:
        p_low, q_low = _clamped_mass(ratio, mass_p, mass_q, ceiling)
        return _floor_for(filled, mass_p, mass_q, mass_q[:, -1] - q_low - ceiling * (mass_p[:, -1] - p_low))

    low, high = torch.zeros_like(p64[:, 0]), torch.ones_like(p64[:, 0])  # bounds of 1/b; at 1 pi is p
    for _ in range(KL_STEPS):
        middle = (low + high) / 2
        ceiling = middle.reciprocal()
        floor = floor_under(ceiling)
        p_floor, c_floor = _clamped_mass(ratio, mass_p, mass_c, floor)
        p_ceiling, c_ceiling = _clamped_mass(ratio, mass_p, mass_c, ceiling)
        kl = torch.xlogy(-p_floor, floor) + c_ceiling - c_floor - (mass_p[:, -1] - p_ceiling) * ceiling.log()
        within = kl <= budget
        low, high = torch.where(within, low, middle), torch.where(within, middle, high)
    return floor_under(high.reciprocal()), high.reciprocal()


def mentored_verify(
    tokens: Int[Tensor, "B n"],
    q: Float[Tensor, "B n V"],
    p: Float[Tensor, "B n+1 V"],
    *,
    rng: Rng,
    budget: float,
    lengths: Int[Tensor, " B"] | None = None,
    validate: bool = True,
) -> ChainVerdict:
    """Mentored decoding: accept as much as possible while KL(p || output) is at most `budget` nats at each position.

    A token is accepted with probability min(1, b p/q); at a rejection the next one is drawn from max(a p - q, 0).
    `mentored_bounds` gives a and b. Budget 0 is token verification. A token with p = 0 is never accepted. Other
    arguments and errors are those of `draftproof.functional.token_verify`.

    Output distribution: each drafted position has clamp(q, a p, b p) given its prefix. The bonus token after a full
    chain has the distribution p.

    Source: Tran-Thien 2023, "An optimal lossy variant of speculative decoding" (Hugging Face blog).
    """
    if budget < 0:
        raise ValueError(f"budget: expected a divergence, 0 (lossless) or more, got {budget}")
    if validate:
        check_chain(tokens, q, p, lengths)
    size, n = row_lengths(tokens, lengths), tokens.shape[1]
    if n == 0:
        return plain_round(p, rng)
    floor, ceiling = (x.view(-1, n) for x in mentored_bounds(p[:, :n].flatten(0, 1), q.flatten(0, 1), budget))
    accept = (log_ratios(tokens, q, p).exp() * ceiling).clamp_(max=1)
    accepted = leading_accepted(accept, size, rng)
    scale = floor.gather(-1, accepted.clamp(max=n - 1).unsqueeze(-1)).squeeze(-1)
    return ChainVerdict(accepted, rng.categorical(bonus_weights(p, q, tokens, accepted, size, scale)))
