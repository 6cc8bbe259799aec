"""Models whose quantized weights draft."""

import transformers

from draftproof.backends.lean.backend import LeanBackend
from draftproof.drafters.self_draft import QuantizedModel, self_drafter
from draftproof.stoppers.fixed import FixedLength
from support.helpers import ROPE, random_model

WIDE = {**ROPE, "head_dim": 32}


def drafted(target, bits=4, *, chains=1, length=4):
    return self_drafter(QuantizedModel(target, bits), FixedLength(length), chains=chains)


def tiny(kind=LeanBackend, **options):
    """A Llama of three tokens with heads that native attention reads, small enough to enumerate its outputs."""
    config = transformers.LlamaConfig(
        vocab_size=3,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.7,
        **options,
    )
    return kind(random_model(config), name="tiny")
