"""A model whose layers have inputs of uneven size."""

import torch
import transformers

from support.helpers import ROPE, random_model

WIDE = {**ROPE, "head_dim": 32}


def uneven_model(seed=0):
    """A model some of whose channels are much larger than others, as in trained ones."""
    model = random_model(transformers.LlamaConfig(**WIDE), seed)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if name.endswith("norm.weight"):
                each[::8] *= 12
    return model
