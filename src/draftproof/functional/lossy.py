"""Lossy rules: they accept more than exactness allows. Each docstring states the law that is known to come out.

Knows: probabilities. Does not know: models, requests, that somebody must be told: callers mark these rules as lossy.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.functional.chain import ChainVerdict, log_ratios, residual_weights
from draftproof.functional.checks import check_chain
from draftproof.rng import Rng

KL_STEPS = 50
TINY = 1e-300


def _sizes(tokens: Int[Tensor, "B n"], lengths: Int[Tensor, " B"] | None) -> Int[Tensor, " B"]:
    return torch.full_like(tokens[:, :1].sum(-1), tokens.shape[1]) if lengths is None else lengths


def _leading(accept: Float[Tensor, "B n"], size: Int[Tensor, " B"], rng: Rng) -> Int[Tensor, " B"]:
    """Number of tokens before the first refusal."""
    place = torch.arange(accept.shape[1], device=accept.device)
    return rng.bernoulli(accept.masked_fill(place >= size.unsqueeze(-1), 0)).long().cumprod(-1).sum(-1)


def _finish(
    accepted: Int[Tensor, " B"],
    size: Int[Tensor, " B"],
    tokens: Int[Tensor, "B n"],
    q: Float[Tensor, "B n V"] | None,
    p: Float[Tensor, "B n+1 V"],
    rng: Rng,
) -> ChainVerdict:
    """The bonus token: from norm(max(p - q, 0)) at a refusal, from p after a full chain."""
    at = torch.arange(tokens.shape[0], device=tokens.device)
    weights = p[at, accepted]
    if tokens.shape[1] > 0:
        place = accepted.clamp(max=tokens.shape[1] - 1)
        one = torch.ones(tokens.shape[0], device=tokens.device)
        residual = residual_weights(weights, None if q is None else q[at, place], tokens[at, place], one)
        weights = torch.where((accepted < size).unsqueeze(-1), residual, weights)
    return ChainVerdict(accepted, rng.categorical(weights))


def last_token_verify(
    tokens: Int[Tensor, "B n"],
    q: Float[Tensor, "B n V"] | None,
    p: Float[Tensor, "B n+1 V"],
    *,
    rng: Rng,
    lengths: Int[Tensor, " B"] | None = None,
    validate: bool = True,
) -> ChainVerdict:
    """Accept every drafted token but the last unseen, and token-verify the last one: SPRINTER's rule at the target.

    It belongs with a stopper that ends the draft at the first token it refuses. Known law: with a stopper that lets
    acceptable tokens (q <= p) pass and refuses the others but for a fraction eta, each position has law (1 - eta) p +
    eta q given its prefix (SPRINTER, Theorem 3.1), read so that the token is kept when the target accepts it. With
    any other stopper, or at a length limit, the law is not known in closed form. Arguments as for
    `draftproof.functional.chain.token_verify`.

    Source: SPRINTER, arXiv 2502.04557, Algorithm 1 and Theorem 3.1.
    """
    if validate:
        check_chain(tokens, q, p, lengths)
    size = _sizes(tokens, lengths)
    place = torch.arange(tokens.shape[1], device=tokens.device)
    accept = log_ratios(tokens, q, p).exp().clamp_(max=1).masked_fill(place < (size - 1).unsqueeze(-1), 1)
    return _finish(_leading(accept, size, rng), size, tokens, q, p, rng)


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

    H is the entropy of p at that place. Known law: given its prefix, a position has law q(x) on typical tokens plus
    the mass of q on the others spread as p; after a full chain it has law p. Arguments as for
    `draftproof.functional.chain.token_verify`; q is not used but checked.

    Args:
        tokens: drafted token ids.
        q: ignored.
        p: the target's distribution before each drafted token and after the last one.
        rng: source of all randomness.
        epsilon: probability above which a token is always typical.
        delta: factor of exp(-H), which lowers the threshold where the target is undecided.
        lengths: tokens in each row when rows differ; entries beyond a row's length are padding.
        validate: check shapes, ranges and normalisation first; raises ValueError naming the row.

    Source: Cai et al. 2024 (Medusa, arXiv 2401.10774), section on typical acceptance, with its defaults; Hewitt et
    al. 2022.
    """
    if validate:
        check_chain(tokens, q, p, lengths)
    size, n = _sizes(tokens, lengths), tokens.shape[1]
    entropy = torch.special.entr(p[:, :n]).sum(-1, dtype=torch.float64)
    threshold = (delta * torch.exp(-entropy)).clamp_(max=epsilon)
    typical = p[:, :n].gather(-1, tokens.unsqueeze(-1)).squeeze(-1) > threshold
    accepted = _leading(typical.double(), size, rng)
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
    """Token verification against the mixture (1 - epsilon) p + epsilon q.

    Acceptance is min(1, (1 - epsilon) p/q + epsilon), and the residual is token verification's own, norm(max(p - q,
    0)). Known law: each drafted position has law (1 - epsilon) p + epsilon q given its prefix, at a distance of epsilon
    TV(p, q) from p; the bonus token after a full chain has law p, q being unknown there.

    Args:
        tokens: drafted token ids.
        q: the distribution each token was drawn from; None for point masses.
        p: the target's distribution before each drafted token and after the last one.
        rng: source of all randomness.
        epsilon: weight of the draft's law, 0 (lossless) to 1 (everything is accepted).
        lengths: tokens in each row when rows differ; entries beyond a row's length are padding.
        validate: check shapes, ranges and normalisation first; raises ValueError naming the row.

    Raises:
        ValueError: epsilon outside [0, 1], or what `validate` finds.

    Source: the law of SPRINTER, arXiv 2502.04557, Theorem 3.1, made a rule of its own.
    """
    if not 0 <= epsilon <= 1:
        raise ValueError(f"epsilon is {epsilon}: legal are 0 (lossless) to 1 (accept everything)")
    if validate:
        check_chain(tokens, q, p, lengths)
    size = _sizes(tokens, lengths)
    accept = (log_ratios(tokens, q, p).exp() * (1 - epsilon) + epsilon).clamp_(max=1)
    return _finish(_leading(accept, size, rng), size, tokens, q, p, rng)


def _clamped_mass(
    ratio: Float[Tensor, "R V"],
    mass_p: Float[Tensor, "R W"],
    mass_q: Float[Tensor, "R W"],
    bound: Float[Tensor, " R"],
) -> tuple[Float[Tensor, " R"], Float[Tensor, " R"]]:
    """Two masses of the tokens with q/p below a bound, from prefix sums over tokens sorted by q/p."""
    at = torch.searchsorted(ratio, bound.unsqueeze(-1))
    return mass_p.gather(-1, at).squeeze(-1), mass_q.gather(-1, at).squeeze(-1)


def _floor_for(
    filled: Float[Tensor, "R V"],
    mass_p: Float[Tensor, "R W"],
    mass_q: Float[Tensor, "R W"],
    taken: Float[Tensor, " R"],
) -> Float[Tensor, " R"]:
    """The floor a at which what a p adds to q is `taken`; `filled` is what it adds when it reaches each token's q/p."""
    at = torch.searchsorted(filled, taken.unsqueeze(-1), right=True)
    floor = (taken + mass_q.gather(-1, at).squeeze(-1)) / mass_p.gather(-1, at).squeeze(-1)
    return floor.clamp_(TINY, 1)  # above 0, so that tokens which q never draws count in the divergence


def mentored_bounds(
    p: Float[Tensor, "R V"], q: Float[Tensor, "R V"], budget: float
) -> tuple[Float[Tensor, " R"], Float[Tensor, " R"]]:
    """The floor a and ceiling b of mentored decoding: its output law is pi = clamp(q, a p, b p), a <= 1 <= b.

    pi maximises the acceptance sum_x min(q, pi) among the laws with KL(p || pi) <= budget that give nothing to tokens
    the target forbids (p = 0): the stationary points of the Lagrangian are b p where q is cut, a p where it is filled
    up, q between. b is found by bisection (on 1/b), a follows from sum pi = 1; with prefix sums over the tokens sorted
    by q/p, no step of the search passes over the vocabulary.
    """
    if budget == 0:  # the divergence is flat there, so a search would stop 1e-8 short
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

    low, high = torch.zeros_like(p64[:, 0]), torch.ones_like(p64[:, 0])  # of 1/b: at 1 the law is p itself
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
    """Mentored decoding: accept as much as a divergence KL(p || law) of at most `budget` a position allows.

    Accept x with min(1, b p/q), else draw from norm(max(a p - q, 0)). Known law: each drafted position has law
    clamp(q, a p, b p) given its prefix (`mentored_bounds`), the bonus token after a full chain has law p; budget 0 is
    token verification. A token with p = 0 is never accepted, whatever the budget.

    Args:
        tokens: drafted token ids.
        q: the distribution each token was drawn from.
        p: the target's distribution before each drafted token and after the last one.
        rng: source of all randomness.
        budget: the largest divergence in nats at each position.
        lengths: tokens in each row when rows differ; entries beyond a row's length are padding.
        validate: check shapes, ranges and normalisation first; raises ValueError naming the row.

    Raises:
        ValueError: a negative budget, or what `validate` finds.

    Source: Tran-Thien 2023, "An optimal lossy variant of speculative decoding" (Hugging Face blog).
    """
    if budget < 0:
        raise ValueError(f"budget is {budget}: a divergence is not negative; 0 is lossless")
    if validate:
        check_chain(tokens, q, p, lengths)
    size, n = _sizes(tokens, lengths), tokens.shape[1]
    if n == 0:
        return ChainVerdict(size, rng.categorical(p[:, 0]))
    floor, ceiling = (x.view(-1, n) for x in mentored_bounds(p[:, :n].flatten(0, 1), q.flatten(0, 1), budget))
    accept = (log_ratios(tokens, q, p).exp() * ceiling).clamp_(max=1)
    accepted = _leading(accept, size, rng)
    at, place = torch.arange(tokens.shape[0], device=tokens.device), accepted.clamp(max=n - 1)
    weights = p[at, accepted]
    residual = residual_weights(weights, q[at, place], tokens[at, place], floor[at, place])
    return ChainVerdict(accepted, rng.categorical(torch.where((accepted < size).unsqueeze(-1), residual, weights)))
