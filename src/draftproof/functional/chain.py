"""Verification rules for one draft chain per row: token and block verification, vectorised over the batch.

Each rule first computes acceptance probabilities and residual weights as tensors, and then draws with `rng.bernoulli`
and `rng.categorical`. Nothing is copied from the device to the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof import native
from draftproof.functional.checks import check_chain
from draftproof.rng import Rng
from draftproof.triton.choose import Implementation, fused, implementation


class ChainVerdict(NamedTuple):
    """The outcome of a rule on chains.

    Attributes:
        accepted: number of accepted draft tokens in each row, 0 to the row's length.
        token: id of each row's bonus token.
    """

    accepted: Int[Tensor, " B"]
    token: Int[Tensor, " B"]


def log_ratios(
    tokens: Int[Tensor, "B n"], q: Float[Tensor, "B n V"] | None, p: Float[Tensor, "B m V"]
) -> Float[Tensor, "B n"]:
    """log(p(x_i) / q(x_i)) of each drafted token, in float64; q = None stands for point masses (q(x_i) = 1)."""
    index = tokens.unsqueeze(-1)
    log_p = p[:, : tokens.shape[1]].gather(-1, index).squeeze(-1).double().log()
    return log_p if q is None else log_p - q.gather(-1, index).squeeze(-1).double().log()


def running_ratios(log_ratio: Float[Tensor, "B n"]) -> Float[Tensor, "B n"]:
    """P_i = min(1, P_{i-1} p/q) with P_0 = 1 (Block Verification, arXiv 2403.10444, Algorithm 2), without a loop.

    In logarithms this is a walk that is capped at 0. It equals the free walk minus the running maximum of the free
    walk, where the maximum includes the start: log P_i = c_i - max(0, max_{j<=i} c_j), with c the cumulative sum of
    `log_ratio`.
    """
    walk = log_ratio.cumsum(-1)
    return (walk - walk.cummax(-1).values.clamp_(min=0)).exp()


def residual_weights(
    p: Float[Tensor, "B V"], q: Float[Tensor, "B V"] | None, drafted: Int[Tensor, " B"], scale: Float[Tensor, " B"]
) -> Float[Tensor, "B V"]:
    """Residual weights max(scale p - q, 0) of each row; p where all of them are 0 (0/0 in exact arithmetic).

    q = None stands for point masses on `drafted`; `scale` is 1 for token verification, P_tau for block verification.
    """
    weights = p * scale.to(p.dtype).unsqueeze(-1)
    if q is None:
        one = torch.ones_like(weights[:, :1])
        weights.scatter_add_(-1, drafted.unsqueeze(-1), -one)
    else:
        weights -= q
    weights.clamp_(min=0)
    return torch.where(weights.sum(-1, keepdim=True) > 0, weights, p)


@fused("chain")
def bonus_weights(
    p: Float[Tensor, "B m V"],
    q: Float[Tensor, "B n V"] | None,
    tokens: Int[Tensor, "B n"],
    accepted: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    scale: Float[Tensor, " B"],
) -> Float[Tensor, "B V"]:
    """Weights of the bonus token: the residual at the first position that was not accepted, or p after a full chain."""
    found = native.bonus_weights(p, q, tokens, accepted, lengths, scale) if tokens.shape[1] else None
    if found is not None:
        return found
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    weights = p[rows, accepted]
    if tokens.shape[1] > 0:
        at = accepted.clamp(max=tokens.shape[1] - 1)
        residual = residual_weights(weights, None if q is None else q[rows, at], tokens[rows, at], scale)
        weights = torch.where((accepted < lengths).unsqueeze(-1), residual, weights)
    return weights


def row_lengths(tokens: Int[Tensor, "B n"], lengths: Int[Tensor, " B"] | None) -> Int[Tensor, " B"]:
    """`lengths` where given, else n for every row."""
    if lengths is not None:
        return lengths
    return torch.full(tokens.shape[:1], tokens.shape[1], dtype=torch.int64, device=tokens.device)


def leading_accepted(accept: Float[Tensor, "B n"], lengths: Int[Tensor, " B"], rng: Rng) -> Int[Tensor, " B"]:
    """Accept each token with its own probability; return the number of tokens before the first rejected one."""
    padding = torch.arange(accept.shape[1], device=accept.device) >= lengths.unsqueeze(-1)
    return rng.bernoulli(accept.masked_fill(padding, 0)).long().cumprod(-1).sum(-1)


def plain_round(p: Float[Tensor, "B m V"], rng: Rng) -> ChainVerdict:
    """The verdict of a round without a draft: a token drawn from p, which is plain decoding."""
    first = p[:, 0]
    return ChainVerdict(torch.zeros(first.shape[:1], dtype=torch.int64, device=p.device), rng.categorical(first))


def token_verify(
    tokens: Int[Tensor, "B n"],
    q: Float[Tensor, "B n V"] | None,
    p: Float[Tensor, "B n+1 V"],
    *,
    rng: Rng,
    lengths: Int[Tensor, " B"] | None = None,
    validate: bool = True,
) -> ChainVerdict:
    """Token verification: accept x_i with probability min(1, p/q); at the first rejection draw from max(p - q, 0).

    Args:
        tokens: drafted token ids.
        q: the distribution each token was drawn from; None for point masses (n-gram drafts).
        p: the target's distribution before each drafted token and after the last one.
        rng: source of all randomness.
        lengths: number of tokens in each row when rows differ; entries beyond a row's length are padding.
        validate: check shapes, ranges and normalisation first.

    Raises:
        ValueError: `validate` found a mistake; the message names the row.

    Source: Leviathan et al. 2023; Block Verification, arXiv 2403.10444, Algorithm 1.
    """
    if validate:
        check_chain(tokens, q, p, lengths)
    if not tokens.shape[1]:
        rng.bernoulli(p[:, :0, 0])  # the same number of calls as with a draft, for an Rng that counts its calls
        return plain_round(p, rng)
    size = row_lengths(tokens, lengths)
    accept = log_ratios(tokens, q, p).exp().clamp_(max=1)
    accepted = leading_accepted(accept, size, rng)
    weights = bonus_weights(p, q, tokens, accepted, size, torch.ones_like(accept[:, :1].sum(-1)))
    return ChainVerdict(accepted, rng.categorical(weights))


@fused("chain")
def surplus_mass(
    p: Float[Tensor, "B m V"], q: Float[Tensor, "B m V"], scale: Float[Tensor, "B m"]
) -> Float[Tensor, "B m"]:
    """sum_x max(scale p(x) - q(x), 0) of each row.

    On a CPU the rows of the batch go one by one through a single buffer: a temporary for the whole batch costs more in
    page faults than in arithmetic.
    """
    one = p.device.type == "cpu"
    parts = [slice(row, row + 1) for row in range(p.shape[0])] if one else [slice(None)]
    buffer = torch.empty_like(p[:1] if one else p)
    mass = torch.empty_like(scale)
    for part in parts:
        torch.mul(p[part], scale[part].to(p.dtype).unsqueeze(-1), out=buffer)
        buffer.sub_(q[part]).clamp_(min=0)
        mass[part] = buffer.sum(-1)
    return mass


def block_acceptance(
    tokens: Int[Tensor, "B n"], q: Float[Tensor, "B n V"] | None, p: Float[Tensor, "B m V"], lengths: Int[Tensor, " B"]
) -> tuple[Float[Tensor, "B n"], Float[Tensor, "B n"]]:
    """P_i and h_i for i = 1..n: h_i = S_i / (S_i + 1 - P_i), and h_length = P_length.

    S_i = sum_x max(P_i p(x|x_<=i) - q(x|x_<=i), 0). Where S_i = 0 and P_i = 1 every h_i is right, because a longer
    prefix is then accepted with certainty; 1 is used. Beyond a row's length h is 0.

    Source: Block Verification, arXiv 2403.10444, Algorithm 2.
    """
    planned = native.block_plan(tokens, q, p, lengths) if implementation(p.device) is Implementation.TORCH else None
    if planned is not None:
        return planned
    n = tokens.shape[1]
    running = running_ratios(log_ratios(tokens, q, p))
    place = torch.arange(1, n + 1, device=tokens.device)
    h = torch.where(place == lengths.unsqueeze(-1), running, torch.zeros_like(running))
    if n > 1:
        head = running[:, :-1]
        if q is None:  # max(P p(x) - 1{x = drafted}, 0) sums to P (1 - p(drafted)), for P <= 1
            drafted = p[:, 1:n].gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1).double()
            surplus = head * (1 - drafted)
        else:
            surplus = surplus_mass(p[:, 1:n], q[:, 1:], head)
        deficit = 1 - head
        inner = torch.where(deficit > 0, surplus / (surplus + deficit), torch.ones_like(head))
        h[:, :-1] = torch.where(place[:-1] < lengths.unsqueeze(-1), inner, h[:, :-1])
    return running, h


def block_verify(
    tokens: Int[Tensor, "B n"],
    q: Float[Tensor, "B n V"] | None,
    p: Float[Tensor, "B n+1 V"],
    *,
    rng: Rng,
    lengths: Int[Tensor, " B"] | None = None,
    validate: bool = True,
) -> ChainVerdict:
    """Block verification: keep the longest prefix whose own test succeeds, then draw from max(P_tau p - q, 0).

    Every prefix is tested with its own probability h_i, and the longest prefix that passes is accepted. So
    Pr(at least i accepted | x) = P_i. In expectation the rule never accepts less than token verification. Arguments
    and errors are those of `token_verify`.

    Source: Block Verification, arXiv 2403.10444, Algorithm 2 and Lemma 3.
    """
    if validate:
        check_chain(tokens, q, p, lengths)
    if not tokens.shape[1]:
        return plain_round(p, rng)
    size = row_lengths(tokens, lengths)
    running, h = block_acceptance(tokens, q, p, size)
    place = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    accepted = (rng.bernoulli(h) * place).amax(-1)
    one = torch.ones_like(running[:, :1].sum(-1, keepdim=True))
    scale = torch.cat([one, running], -1).gather(-1, accepted.unsqueeze(-1)).squeeze(-1)
    return ChainVerdict(accepted, rng.categorical(bonus_weights(p, q, tokens, accepted, size, scale)))
