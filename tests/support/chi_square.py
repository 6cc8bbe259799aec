"""The chi-square test of counts, and its false-alarm rate."""

import torch

ALPHA = 1e-6


def chi_square(counts, probs):
    """p-value of counts against probabilities; cells with an expected count below 5 are pooled."""
    expected = probs.double() * counts.sum()
    order = expected.argsort()
    small = int((expected[order].cumsum(0) < 5).sum()) + 1
    groups = [order[:small], *order[small:].unsqueeze(-1)]
    found = torch.stack([counts[group].sum() for group in groups]).double()
    means = torch.stack([expected[group].sum() for group in groups])
    assert found[means == 0].sum() == 0, "an outcome of probability 0 was drawn"
    possible = means > 0
    statistic = ((found - means)[possible] ** 2 / means[possible]).sum()
    freedom = torch.tensor((int(possible.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def counts_of(draws, size):
    return torch.bincount(draws.flatten(), minlength=size)
