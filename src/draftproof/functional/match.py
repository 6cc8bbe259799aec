"""Match verification: the target draws its own token at every place, and the draft is kept while it guessed it.

Knows: probabilities. Does not know: models, requests, q.
"""

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
    """Draw y_i ~ p at each place and accept while y_i is the drafted token; the first other y_i is the bonus token.

    Lossless whatever drafted the tokens, since q is not used; a token is accepted with probability sum_x p(x) q(x),
    which is below token verification's sum_x min(p, q) unless q is a point mass.

    Args:
        tokens: drafted token ids.
        q: ignored, but checked when given: every chain rule is called the same way.
        p: the target's distribution before each drafted token and after the last one.
        rng: source of all randomness.
        lengths: tokens in each row when rows differ; entries beyond a row's length are padding.
        validate: check shapes, ranges and normalisation first; raises ValueError naming the row.

    Source: blockwise parallel decoding (Stern et al. 2018), with a draw from p in place of the most likely token.
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
