"""Shapes of models whose layers are native."""

import transformers

from support.helpers import ROPE
from support.lean_models import NATIVE, VARIANTS

WIDE = {**ROPE, "head_dim": 32}


MODELS = {
    "llama": lambda: transformers.LlamaConfig(**WIDE),
    "llama, biases": lambda: transformers.LlamaConfig(**WIDE, attention_bias=True, mlp_bias=True),
    "llama, tied": lambda: transformers.LlamaConfig(**WIDE, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**WIDE, sliding_window=7),
    "qwen2, both kinds of layer": lambda: transformers.Qwen2Config(
        **WIDE, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**WIDE),
    **{name: VARIANTS[name] for name in NATIVE},
}
