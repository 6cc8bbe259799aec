"""Match verification: the target draws its own token at every position, and the draft is kept while it is equal."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.functional.chain import ChainVerdict
from draftproof.functional.checks import check_chain
from draftproof.rng import Rng


def match_verify(
    tokens: Int[Tensor, "B n"],
    q: Float[Tensor, "B n V"] | None,
    p: Float[Tensor, "B n+1 V"],
    *,
    rng: Rng,
    lengths: Int[Tensor, " B"] | None = None,
    validate: bool = True,
) -> ChainVerdict:
    """Draw y_i ~ p at each position and accept while y_i is the drafted token; the first other y_i is the bonus token.

    Lossless for any drafter, because q is not used. A token is accepted with probability sum_x p(x) q(x), which is
    less than token verification's sum_x min(p, q) unless q is a point mass. Arguments and errors are those of
    `draftproof.functional.token_verify`; q is ignored, but checked when it is given.

    Source: blockwise parallel decoding (Stern et al. 2018), with a draw from p instead of the most likely token.
    """
    if validate:
        check_chain(tokens, q, p, lengths)
    n = tokens.shape[1]
    drawn = rng.categorical(p)
    same = drawn[:, :n] == tokens
    if lengths is not None:
        same = same & (torch.arange(n, device=tokens.device) < lengths.unsqueeze(-1))
    accepted = same.long().cumprod(-1).sum(-1)
    return ChainVerdict(accepted, drawn.gather(-1, accepted.unsqueeze(-1)).squeeze(-1))
