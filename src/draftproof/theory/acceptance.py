"""Acceptance at one position: of each rule with k draws, and upper bounds for all rules.

Acceptance is the probability that the emitted token is one of the k tokens drawn from q. Every function takes rows of p
and q, and returns one number for each row.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.functional.coupling import kseq_gamma, kseq_plan

EXACT_PASSES = 60


def token_acceptance(p: Float[Tensor, "R V"], q: Float[Tensor, "R V"]) -> Float[Tensor, " R"]:
    """sum_x min(p, q) = 1 - TV(p, q), the optimum for one draw (Leviathan et al. 2023, theorem 3.5)."""
    return torch.minimum(p, q).sum(-1, dtype=torch.float64)


def match_acceptance(p: Float[Tensor, "R V"], q: Float[Tensor, "R V"]) -> Float[Tensor, " R"]:
    """sum_x p q: acceptance of match verification, where the target draws its own token."""
    return (p.double() * q).sum(-1)


def gumbel_acceptance(p: Float[Tensor, "R V"], q: Float[Tensor, "R V"]) -> Float[Tensor, " R"]:
    """sum_i 1 / sum_x max(p_x / p_i, q_x / q_i): acceptance of `gumbel`, where draft and target share their noise.

    It is between (1 - TV) / (1 + TV) and 1 - TV, with TV the total variation of p and q.

    Source: Daliri, Musco, Suresh 2024, arXiv 2408.07978; the probability of a token i is that of an exponential race
    with the larger of both rates for every x, relative to i's.
    """
    p64, q64 = p.double(), q.double()
    order = torch.where(p64 > 0, q64 / p64, torch.inf).argsort(-1)
    p64, q64 = p64.gather(-1, order), q64.gather(-1, order)
    # behind i in this order, q_x / q_i is the larger of the two; up to i it is p_x / p_i
    before, behind = p64.cumsum(-1), q64.sum(-1, keepdim=True) - q64.cumsum(-1)
    both = (p64 > 0) & (q64 > 0)
    return torch.where(both, 1 / (before / p64 + behind / q64), 0).sum(-1)


def kseq_acceptance(p: Float[Tensor, "R V"], q: Float[Tensor, "R V"], k: int) -> Float[Tensor, " R"]:
    """Acceptance of K-SEQ at its best division factor (SpecTr, arXiv 2310.15141, Algorithm 2 and Theorem 2).

    It counts accepted draws only, and not tokens from the residual that are equal to one of the draws.
    """
    return kseq_plan(p, q, k, gamma=kseq_gamma(p, q, k, passes=EXACT_PASSES)).accept


def multi_round_acceptance(p: Float[Tensor, "R V"], q: Float[Tensor, "R V"], k: int) -> Float[Tensor, " R"]:
    """Acceptance of recursive rejection (Miao et al. 2023): 1 - prod TV(r_j, q) over its residuals r_j."""
    left, missed = p.double(), torch.ones(p.shape[0], dtype=torch.float64, device=p.device)
    for _ in range(k):
        rest = (left - q).clamp_(min=0)
        total = rest.sum(-1)
        missed = missed * total
        left = rest / total.masked_fill(total <= 0, 1).unsqueeze(-1)
    return 1 - missed


def optimal_acceptance(p: Float[Tensor, "R V"], q: Float[Tensor, "R V"], k: int) -> Float[Tensor, " R"]:
    """Acceptance of the best coupling of k i.i.d. draws, without a linear program, in O(V log V) for each row.

    alpha_k = 1 - max_H [q(H)^k - p(H)]: when all draws are in H, the token must be in H to be one of them. The best H
    is a prefix of the tokens in ascending order of p/q. On every model that was tried, this equals the linear program
    of SpecTr, arXiv 2310.15141, equation (4).
    """
    p64, q64 = p.double(), q.double()
    order = torch.where(q64 > 0, p64 / q64, torch.inf).argsort(-1)
    mass_p, mass_q = p64.gather(-1, order).cumsum(-1), q64.gather(-1, order).cumsum(-1)
    return 1 - (mass_q**k - mass_p).amax(-1).clamp_(min=0)


def union_bound(p: Float[Tensor, "R V"], q: Float[Tensor, "R V"], k: int) -> Float[Tensor, " R"]:
    """sum_x min(p, 1 - (1 - q)^k), an upper bound for every coupling.

    Source: SpecTr, arXiv 2310.15141, Theorem 1 with all tokens in the subset.
    """
    seen = -torch.expm1(k * torch.log1p(-q.double()))
    return torch.minimum(p.double(), seen).sum(-1)


def subset_bound(p: Float[Tensor, " V"], q: Float[Tensor, " V"], k: int, subset: Collection[int]) -> float:
    """The upper bound of SpecTr, arXiv 2310.15141, Theorem 1, for one subset, by enumerating all V^k draws.

    It is for tests and small vocabularies.

    Args:
        p: the target's distribution.
        q: the draft's distribution.
        k: number of draws.
        subset: the tokens that are bounded one by one; the others are bounded through the draws that contain them.
    """
    target, draft = p.double().tolist(), q.double().tolist()
    bound: float = sum(min(target[y], 1 - (1 - draft[y]) ** k) for y in subset)
    for drawn in itertools.product(range(len(target)), repeat=k):
        chance = 1.0
        for x in drawn:
            chance *= draft[x]
        bound += min(chance, sum(target[y] for y in set(drawn) - set(subset)))
    return bound


def kseq_guarantee(k: int) -> float:
    """1 - (1 - 1/k)^k, a lower bound on K-SEQ's fraction of the optimum; it is above 1 - 1/e.

    Source: SpecTr, arXiv 2310.15141, Theorem 2.
    """
    return 1.0 - (1.0 - 1.0 / k) ** k


def uniform_acceptance(ratio: int, k: int) -> float:
    """Optimal acceptance for q uniform on d tokens and p uniform on d / ratio of them; K-SEQ reaches it.

    Source: SpecTr, arXiv 2310.15141, appendix D.1.
    """
    return 1.0 - (1.0 - 1.0 / ratio) ** k


def uniform_gamma(ratio: int, k: int) -> float:
    """K-SEQ's division factor for the pair of `uniform_acceptance` (SpecTr, arXiv 2310.15141, appendix D.1)."""
    return ratio * uniform_acceptance(ratio, k)
