"""A small model, and prompts of words for it."""

import torch
import transformers

from support.helpers import RANGE

VOCAB = 60


CONFIG = transformers.LlamaConfig(
    **RANGE,
    vocab_size=97,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    max_position_embeddings=4096,
)


def words(seed, length):
    source = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCAB, (length,), generator=source).tolist()
