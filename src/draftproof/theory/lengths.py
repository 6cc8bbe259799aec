"""Expected number of accepted tokens: by enumeration on small models, in closed form for i.i.d. acceptance.

A model is a function from the context to its next-token distribution. Lengths count accepted draft tokens; a round
emits one token more.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

Context = tuple[int, ...]
Model = Callable[[Context], Float[Tensor, " V"]]


def _pairs(p: Model, q: Model, context: Context) -> list[tuple[int, float, float]]:
    """Tokens that can be drafted, with their target and draft probabilities."""
    rows = zip(p(context).double().tolist(), q(context).double().tolist(), strict=True)
    return [(token, a, b) for token, (a, b) in enumerate(rows) if b > 0]


def token_length(p: Model, q: Model, drafted: int, context: Context = ()) -> float:
    """E[accepted] of token verification: the sum over prefixes of prod min(p, q) (Leviathan et al. 2023).

    Args:
        p: the target.
        q: the draft model.
        drafted: number of drafted tokens; the work is V^drafted.
        context: the committed tokens.
    """
    if drafted == 0:
        return 0.0
    return math.fsum(
        min(a, b) * (1 + token_length(p, q, drafted - 1, (*context, token)))
        for token, a, b in _pairs(p, q, context)
        if a > 0
    )


def block_length(p: Model, q: Model, drafted: int, context: Context = (), running: float = 1.0) -> float:
    """E[accepted] of block verification: the sum over i of E[P_i].

    Arguments as for `token_length`; `running` is P at the context.

    Source: Block Verification, arXiv 2403.10444, Lemma 3.
    """
    if drafted == 0 or running == 0:
        return 0.0
    total = 0.0
    for token, a, b in _pairs(p, q, context):
        after = min(1.0, running * a / b)
        total += b * (after + block_length(p, q, drafted - 1, (*context, token), after))
    return total


def full_information_length(
    p: Model, q: Model, drafted: int, context: Context = (), joint: tuple[float, float] = (1.0, 1.0)
) -> float:
    """The upper bound of E[accepted] for one round of any rule: the sum over prefixes of min(p(x^i), q(x^i)).

    Greedy block verification reaches it, but must verify later rounds against a modified target. Arguments as for
    `token_length`; `joint` holds the joint probabilities of the context under p and q.

    Source: Block Verification, arXiv 2403.10444, Lemma 10.
    """
    if drafted == 0:
        return 0.0
    total = 0.0
    for token, a, b in _pairs(p, q, context):
        after = (joint[0] * a, joint[1] * b)
        total += min(after) + full_information_length(p, q, drafted - 1, (*context, token), after)
    return total


def iid_length(alpha: float, drafted: int) -> float:
    """E[accepted] when tokens are accepted independently with probability alpha: alpha + ... + alpha^n."""
    return math.fsum(alpha**i for i in range(1, drafted + 1))


def iid_block_efficiency(alpha: float, drafted: int) -> float:
    """Expected tokens per round, (1 - alpha^(n+1)) / (1 - alpha) (Leviathan et al. 2023, equation (1))."""
    return 1 + iid_length(alpha, drafted)


def iid_speedup(alpha: float, drafted: int, cost: float) -> float:
    """Speed relative to plain decoding; cost = t_draft / t_target (Leviathan et al. 2023, theorem 3.8)."""
    return iid_block_efficiency(alpha, drafted) / (drafted * cost + 1)


def iid_operations(alpha: float, drafted: int, cost: float) -> float:
    """Arithmetic operations relative to plain decoding; cost = draft operations / target operations per token.

    Source: Leviathan et al. 2023, theorem 3.11.
    """
    return (drafted * cost + drafted + 1) / iid_block_efficiency(alpha, drafted)
