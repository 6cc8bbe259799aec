"""Rules of other authors that are not lossless, written from their published code, to be enumerated."""

import torch

from draftproof.functional.nodes import PathVerdict


def spectr_gbv(tokens, q, p, *, rng):
    """SpecTr-GBV (arXiv 2604.25925) as in the decoding loop of its official repository, for K chains of one length.

    A block x of length i < n is accepted with probability (sum_y f(x, y) - g(x)) / (1 - (1 - q(x))^K - sum_y c(x, y)),
    the whole draft with c(x) / (1 - (1 - q(x))^K), where c = p (1 - (1 - min(q/p, 1))^K) for joint probabilities,
    g = p (1 - min(q/p, 1))^K, and f(x, y) = g(x, y). Candidates are tried one after another; each begins where the
    longest accepted block ends, and a block that was rejected is not tried again. The next round's target is not
    modified.
    """
    batch, count, n = tokens.shape
    rows = torch.arange(batch)
    own_p = p[:, :, :n].gather(-1, tokens.unsqueeze(-1)).squeeze(-1).cumprod(-1)
    own_q = q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).cumprod(-1)
    accepted, chosen = torch.zeros(batch, dtype=torch.int64), torch.zeros(batch, dtype=torch.int64)
    done = torch.zeros(batch, dtype=torch.bool)
    refused = torch.zeros(batch, count, n, dtype=torch.bool)

    def missed(a, b):
        """a (1 - min(b/a, 1))^K."""
        return a * (1 - torch.where(a > 0, b / a.clamp(min=1e-300), 1.0).clamp(max=1)) ** count

    for j in range(count):
        start = accepted.clone()
        for i in range(1, n):
            a, b = own_p[:, j, i - 1], own_q[:, j, i - 1]
            wide_a, wide_b = a.unsqueeze(-1) * p[:, j, i], b.unsqueeze(-1) * q[:, j, i]
            kept = missed(wide_a, wide_b).sum(-1)
            top = kept - missed(a, b)
            bottom = 1 - (1 - b) ** count - (wide_a.sum(-1) - kept)
            prob = torch.where(bottom > 1e-15, top / bottom.clamp(min=1e-300), 0.0).clamp(0, 1)
            same = torch.stack([(tokens[:, k, :i] == tokens[:, j, :i]).all(-1) for k in range(count)], -1)
            seen = (same & refused[:, :, i - 1]).any(-1)
            tried = ~done & (i > start) & ~seen
            taken = rng.bernoulli(torch.where(tried, prob, 0.0)).bool()
            refused[:, j, i - 1] = tried & ~taken
            accepted, chosen = torch.where(taken, i, accepted), torch.where(taken, j, chosen)
        a, b = own_p[:, j, n - 1], own_q[:, j, n - 1]
        prob = ((a - missed(a, b)) / (1 - (1 - b) ** count).clamp(min=1e-300)).clamp(0, 1)
        taken = rng.bernoulli(torch.where(done, 0.0, prob)).bool()
        accepted, chosen, done = torch.where(taken, n, accepted), torch.where(taken, j, chosen), done | taken
    at = accepted.clamp(max=n - 1)
    one = torch.ones(batch, count, 1, dtype=p.dtype)
    scale_p, scale_q = (torch.cat([one, own], -1)[rows, chosen, at].unsqueeze(-1) for own in (own_p, own_q))
    residual = missed(scale_p * p[rows, chosen, at], scale_q * q[rows, chosen, at])
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p[rows, chosen, at])
    weights = torch.where((accepted < n).unsqueeze(-1), residual, p[rows, chosen, accepted])
    return PathVerdict(chosen, accepted, rng.categorical(weights))
