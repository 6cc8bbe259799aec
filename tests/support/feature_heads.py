"""Untrained feature heads for small targets."""

import torch

from draftproof.backends.heads.feature_head import FeatureBackend
from draftproof.backends.heads.feature_net import FeatureConfig, FeatureNet
from draftproof.drafters.head import HeadDraftModel, head_drafter
from draftproof.stoppers.fixed import FixedLength


def net_for(target, *, ids=None, name=None, own_output=False, window=64, layers=None, seed=3, scale=1.0):
    """A random head for a target; `ids` are the tokens that it can draft."""
    ids = list(range(target.vocab_size)) if ids is None else ids
    config = FeatureConfig(
        target=name or target.name,
        hidden_size=target.capabilities.hidden,
        vocab_size=target.vocab_size,
        heads=4,
        key_heads=2,
        inner_size=24,
        ids=len(ids),
        own_output=own_output,
        window=window,
        layers=layers,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = FeatureNet(config)
        for weight in net.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=scale * weight.shape[1] ** -0.5)
    net.ids.copy_(torch.tensor(ids))
    return net.requires_grad_(requires_grad=False).eval()


def model_for(target, net, *, bits=None, **changes):
    return HeadDraftModel(FeatureBackend(target, net, bits), target, **changes)


def drafted(target, net, *, chains=1, length=4, **changes):
    return head_drafter(model_for(target, net, **changes), FixedLength(length), "feature_head", chains=chains)
