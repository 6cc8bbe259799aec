"""Small decoders of every family that the lean forward reads."""

import copy

import torch
import transformers

from draftproof.backends.lean.backend import LeanBackend
from support.helpers import CONFIGS, ROPE, random_model


def rope(kind, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


WIDE = {**ROPE, "head_dim": 32}  # wide enough for native layers


BOTH = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}


VARIANTS = {
    **{name: CONFIGS[name] for name in ("llama", "mistral", "qwen2", "qwen3")},
    "llama, biases": lambda: transformers.LlamaConfig(**ROPE, attention_bias=True, mlp_bias=True),
    "llama, tied": lambda: transformers.LlamaConfig(**ROPE, tie_word_embeddings=True),
    "llama, one head a key": lambda: transformers.LlamaConfig(**{**ROPE, "num_key_value_heads": 4}),
    "llama, one key head": lambda: transformers.LlamaConfig(**{**ROPE, "num_key_value_heads": 1}, head_dim=24),
    "llama, linear": lambda: transformers.LlamaConfig(**ROPE, **rope("linear", factor=4.0)),
    "llama, llama3": lambda: transformers.LlamaConfig(
        **ROPE,
        **rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama, yarn": lambda: transformers.LlamaConfig(
        **ROPE, **rope("yarn", factor=4.0, original_max_position_embeddings=160)
    ),
    "mistral, no window": lambda: transformers.MistralConfig(**ROPE, sliding_window=None, head_dim=16),
    "qwen2, both kinds of layer": lambda: transformers.Qwen2Config(
        **ROPE, use_sliding_window=True, sliding_window=6, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3, biases": lambda: transformers.Qwen3Config(**ROPE, head_dim=16, attention_bias=True),
    # factors, norms, angles and orders of numbers that the Llama family has not
    "gemma3": CONFIGS["gemma3"],
    "gemma3, wide": lambda: transformers.Gemma3TextConfig(**WIDE, **BOTH, query_pre_attn_scalar=24),
    "gemma": lambda: transformers.GemmaConfig(**WIDE),
    "gemma2": lambda: transformers.Gemma2Config(
        **WIDE, sliding_window=6, query_pre_attn_scalar=24, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "phi3": lambda: transformers.Phi3Config(**ROPE, pad_token_id=0),
    "phi3, partial": lambda: transformers.Phi3Config(
        **{**ROPE, "hidden_size": 128}, pad_token_id=0, **rope("default", partial_rotary_factor=0.75)
    ),
    "granite": lambda: transformers.GraniteConfig(
        **WIDE, embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.3, logits_scaling=8.0
    ),
    "smollm3": lambda: transformers.SmolLM3Config(**WIDE, no_rope_layers=[1, 0], pad_token_id=0),
    "olmo2": lambda: transformers.Olmo2Config(**WIDE),
    "olmo3": lambda: transformers.Olmo3Config(**WIDE, **BOTH),
    "ministral": lambda: transformers.MinistralConfig(**WIDE, **BOTH),
    "seed_oss": lambda: transformers.SeedOssConfig(**WIDE, attention_out_bias=True),
    "ernie4_5": lambda: transformers.Ernie4_5Config(**WIDE, use_bias=True),
    "helium": lambda: transformers.HeliumConfig(
        **{**WIDE, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    ),
    "exaone4": lambda: transformers.Exaone4Config(**WIDE, **BOTH),
    "glm": lambda: transformers.GlmConfig(**WIDE, pad_token_id=0, attention_bias=True),
    "glm4": lambda: transformers.Glm4Config(**WIDE, pad_token_id=0, partial_rotary_factor=0.5),
    "hyperclovax": lambda: transformers.HyperCLOVAXConfig(
        **WIDE, use_post_norm=True, residual_multiplier=0.5, logits_scaling=0.125, embedding_multiplier=3.0
    ),
}


NATIVE = (  # other families than Llama's, wide enough for native layers
    "gemma",
    "gemma2",
    "gemma3, wide",
    "phi3, partial",
    "granite",
    "smollm3",
    "olmo2",
    "olmo3",
    "ministral",
    "seed_oss",
    "ernie4_5",
    "helium",
    "exaone4",
    "glm",
    "glm4",
    "hyperclovax",
)


def lively_model(config, dtype=torch.float32, seed=0):
    """A random model whose norms and biases are not ones and zeros, so that leaving one out shows."""
    model = random_model(config, seed)
    source = torch.Generator().manual_seed(1 + seed)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "norm" in name or "bias" in name:
                weights.add_(0.3 * torch.randn(weights.shape, generator=source))
    return model.to(dtype)


def lean_backend(model):
    """A lean backend of a copy; `model` stays what its rows are compared with."""
    made = LeanBackend(copy.deepcopy(model))
    made.model = model
    return made


def exercise(program):
    """Chains, ragged batches, trees, tails continued, paths kept, hidden states; prompts beyond the folded width."""
    program.forward([(0, [1, 80, 90, 11], [5, 6, 7], [-1, 0, -1]), (1, [1, 30], [], [])], hidden=True)
    program.keep(0, 4, (0, 1))
    program.forward([(1, [7], [8], [-1]), (0, [9, 10], [], [])], hidden=True)
    program.forward([(0, [3], [], [])], hidden=True)
    program.forward([(2, [i % 97 for i in range(150)], [4], [-1]), (0, [2], [4, 5, 6], [-1, -1, 1])])
    program.forward([(2, [], [9, 8], [0, 1])])
    program.keep(2, 60)
    program.forward([(2, [5], [], []), (1, [], [9], [0])])
