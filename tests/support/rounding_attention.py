"""transformers' models over keys and values of fewer bits, as the cache stores them and native attention reads them."""

import torch
import transformers
from transformers.masking_utils import eager_mask

from draftproof.backends.cache import rounding as of_cache

MOST_DIGITS = 127 * 128 + 63  # as in cache_bytes.h


class RoundingCache(transformers.DynamicCache):
    """transformers' own cache, with the keys and values that stand for the rounded ones."""

    def __init__(self, kept):
        super().__init__()
        self.kept = kept

    def update(self, key_states, value_states, *arguments, **options):
        if self.kept == torch.int8:
            keys = of_cache.restored_keys(*of_cache.rounded_keys(key_states), key_states.dtype)
            values = of_cache.restored(*of_cache.rounded(value_states), value_states.dtype)
        else:
            keys, values = (each.to(self.kept).to(each.dtype) for each in (key_states, value_states))
        return super().update(keys, values, *arguments, **options)


def halved(x):
    return x.to(torch.bfloat16).float()


def rounding_attention(module, query, key, value, mask, scaling, softcap=None, **_):
    """What native attention computes beside keys and values of fewer bits: queries, weights and outputs in bfloat16."""
    eight, digits = module.kept == torch.int8, module.digits
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    size = of_cache.hadamard_size(query.shape[-1])
    query = halved(of_cache.hadamard(query) / size if eight else query)
    if digits:  # whole numbers of 15 bits, for sums of bytes
        step = (query.abs().amax(-1, keepdim=True) / MOST_DIGITS).clamp(min=1e-30)
        query = (query / step).round() * step
    query = of_cache.hadamard(query) if eight else query
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores if softcap is None else (scores / softcap).tanh() * softcap
    scores = scores if mask is None else scores + mask[..., : key.shape[2]]
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    scales = (value.abs().amax(-1) / 127).clamp(min=1e-30) if eight else torch.ones(value.shape[:-1])
    numbers = value / scales.unsqueeze(-1)
    out = halved(halved(weights * scales.unsqueeze(2)) @ numbers / weights.sum(-1, keepdim=True))
    return out.transpose(1, 2), None


transformers.AttentionInterface.register("rounding", rounding_attention)
transformers.AttentionMaskInterface.register("rounding", eager_mask)


def with_rounding_attention(model, kept, *, digits=False):
    """Let a model's layers compute `rounding_attention`; with `digits`, queries are whole numbers of 15 bits."""
    model.set_attn_implementation("rounding")
    for layer in model.model.layers:
        layer.self_attn.kept, layer.self_attn.digits = kept, digits
