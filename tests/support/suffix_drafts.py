"""Requests for lookup drafters, and what they draft."""

from draftproof import SamplingParams
from draftproof.drafters.base import DraftRequest
from draftproof.rng import CounterRoundRng

RNG = CounterRoundRng([], [])


def request(tokens, name=0, *, limit=64, **params):
    transforms = SamplingParams(**params).bind(vocab_size=100)
    return DraftRequest(name, list(tokens), len(tokens), limit, transforms)


def drafted(drafter, tokens, name=0, **options):
    (draft,) = drafter.propose([request(tokens, name, **options)], RNG)
    assert draft.probs is None
    assert draft.tree.is_chain
    return draft.tree.ids
