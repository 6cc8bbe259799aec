"""Models that draft for themselves: with quantized weights, or by their first layers."""

import transformers

from draftproof.backends.heads.self_draft import EarlyExitBackend, QuantizedBackend
from draftproof.backends.lean.backend import LeanBackend
from draftproof.drafters.self_draft import SelfDraftModel, self_drafter
from draftproof.stoppers.fixed import FixedLength
from support.helpers import ROPE, random_model

WIDE = {**ROPE, "head_dim": 32}


def drafted(target, bits=4, *, chains=1, length=4):
    model = SelfDraftModel(QuantizedBackend(target, bits), f"quantized:{bits}")
    return self_drafter(model, FixedLength(length), chains=chains)


def early_exit(target, layers, *, chains=1, length=4):
    model = SelfDraftModel(EarlyExitBackend(target, layers), f"early_exit:{layers}")
    return self_drafter(model, FixedLength(length), chains=chains)


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
