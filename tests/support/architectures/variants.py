"""Variants of model types: what a configuration can say about windows, rotary embeddings, layers, heads and logits."""

from support.architectures.overrides import ENCODERS, each

SHORT = 40  # positions of the context that a rotary embedding is scaled from; most prompts are longer
HALF_HEAD = 8
SLIDING, FULL, CHUNKED, LINEAR = "sliding_attention", "full_attention", "chunked_attention", "linear_attention"

MIXED = {"layer_types": [SLIDING, FULL]}
ALL_SLIDING = {"layer_types": [SLIDING, SLIDING]}
ALL_FULL = {"layer_types": [FULL, FULL]}
WINDOW = {"sliding_window": 20}
NO_WINDOW = {"sliding_window": None}
BIDIRECTIONAL = {"is_decoder": False}


def rope(kind, **more):
    """Changes for a rotary embedding."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


def long_factors(dim=HALF_HEAD):
    """Factors of the longrope embedding; short and long ones are far apart."""
    return {
        "short_factor": [1.0 + 0.1 * i for i in range(dim)],
        "long_factor": [2.0 + 0.7 * i for i in range(dim)],
        "original_max_position_embeddings": SHORT,
    }


YARN = {"factor": 16.0, "original_max_position_embeddings": SHORT}
LLAMA3 = {
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": SHORT,
}
ROPES = {
    "rope linear": rope("linear", factor=4.0),
    "rope dynamic": rope("dynamic", factor=4.0),
    "rope dynamic, beyond its context": {**rope("dynamic", factor=4.0), "max_position_embeddings": SHORT},
    "rope yarn": rope("yarn", **YARN),
    "rope llama3": rope("llama3", **LLAMA3),
    "rope longrope": rope("longrope", factor=16.0, **long_factors()),
}
LAYERS = {"mixed layers": {**WINDOW, **MIXED}, "all layers sliding": {**WINDOW, **ALL_SLIDING}}
CHOICE = {**LAYERS, "all layers full": {**WINDOW, **ALL_FULL}}
QWEN = {
    "window from layer 1": {"use_sliding_window": True, "max_window_layers": 1, "layer_types": ...},
    "window in all layers": {"use_sliding_window": True, "max_window_layers": 0, "layer_types": ...},
    "mixed layers": {"use_sliding_window": True, **MIXED},
    "a window that it does not use": {"use_sliding_window": False, "max_window_layers": 0, "layer_types": ...},
}
GRANITE = {
    "multipliers": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    }
}
ATTENTION_ONLY = {"attention only": ALL_FULL}
NOT_A_DECODER = {"not a decoder": BIDIRECTIONAL}
IGNORED_WINDOW = {"a window that it ignores": WINDOW}
WIDE_INDEX = {"indexer that sees everything": {"index_topk": 640}}
NO_QUERY_RANK = {"queries of full rank": {"q_lora_rank": None}}

VARIANTS = {
    "llama": {
        **ROPES,
        **IGNORED_WINDOW,
        **CHOICE,
        "biases": {"attention_bias": True, "mlp_bias": True},
        "tied": {"tie_word_embeddings": True},
        "one key head": {"num_key_value_heads": 1},
        "as many key heads": {"num_key_value_heads": 4},
        "wide heads": {"head_dim": 24},
        "eager attention": {"attn_implementation": "eager"},
    },
    "mistral": {
        **CHOICE,
        "no window": NO_WINDOW,
        "use_sliding_window false": {"use_sliding_window": False},
        "eager attention": {"attn_implementation": "eager"},
        "rope yarn": rope("yarn", **YARN),
    },
    "qwen2": {**QWEN, "rope yarn": rope("yarn", **YARN), "tied": {"tie_word_embeddings": True}},
    "qwen3": {**QWEN, "biases": {"attention_bias": True}},
    "qwen2_moe": {**QWEN, "no biases": {"qkv_bias": False}, "every other layer sparse": {"decoder_sparse_step": 2}},
    "qwen3_moe": {
        **LAYERS,
        "use_sliding_window": {"use_sliding_window": True},
        "every other layer sparse": {"decoder_sparse_step": 2},
    },
    "phi3": {
        **{name: {**NO_WINDOW, **changes} for name, changes in ROPES.items()},
        "no window": NO_WINDOW,
        "rope longrope with a window": rope("longrope", factor=16.0, **long_factors()),
        "rope on half of each head": {**NO_WINDOW, **rope("default", partial_rotary_factor=0.5)},
        "one key head": {"num_key_value_heads": 1},
        **LAYERS,
    },
    "phimoe": {
        "no window": NO_WINDOW,
        "rope longrope": {
            **NO_WINDOW,
            **rope("longrope", factor=16.0, short_mscale=1.1, long_mscale=1.3, **long_factors()),
        },
    },
    "phi4_multimodal": {
        "no window": NO_WINDOW,
        "rope longrope": {**NO_WINDOW, **rope("longrope", factor=16.0, **long_factors())},
    },
    "phi": {"norms of queries and keys": {"qk_layernorm": True}, **IGNORED_WINDOW, "rope linear": ROPES["rope linear"]},
    "mixtral": {"no window": NO_WINDOW, **LAYERS},
    "starcoder2": {"no window": NO_WINDOW, "no biases": {"use_bias": False}, **LAYERS},
    "ministral": {"all layers full": ALL_FULL, "mixed layers": MIXED},
    "ministral3": {
        "no window": NO_WINDOW,
        "attention scaled by position": {
            **NO_WINDOW,
            **rope(
                "yarn", mscale=1.0, mscale_all_dim=1.0, beta_fast=32.0, beta_slow=1.0, llama_4_scaling_beta=0.5, **YARN
            ),
        },
    },
    "gemma": {**IGNORED_WINDOW, "bidirectional": {"use_bidirectional_attention": True}},
    "gemma2": {
        "all layers full": ALL_FULL,
        "all layers sliding": ALL_SLIDING,
        "no soft caps": {"final_logit_softcapping": None, "attn_logit_softcapping": None},
        "bidirectional": {"use_bidirectional_attention": True},
    },
    "gemma3_text": {
        "all layers full": ALL_FULL,
        "all layers sliding": ALL_SLIDING,
        "soft caps": {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 5.0, "attn_implementation": "eager"},
        "bidirectional": {"use_bidirectional_attention": True},
    },
    "gemma3n_text": {"no shared keys": {"num_kv_shared_layers": 0}},
    "gemma4_text": {
        "shared keys": {
            "num_hidden_layers": 4,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "num_kv_shared_layers": 2,
        },
        "values are keys": {"attention_k_eq_v": True},
        "experts": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
        "no embeddings in layers": {"hidden_size_per_layer_input": 0},
        "bidirectional": {"use_bidirectional_attention": "all"},
    },
    "vaultgemma": {"all layers full": ALL_FULL},
    "cohere": {"norms of queries and keys": {"use_qk_norm": True}, **IGNORED_WINDOW},
    "cohere2": {"all layers full": ALL_FULL, "all layers sliding": ALL_SLIDING},
    "llama4_text": {
        "all layers chunked": {"layer_types": [CHUNKED, CHUNKED]},
        "all layers full": ALL_FULL,
        "layers without rotary embedding, attention scaled by position": {
            "no_rope_layers": [1, 0],
            "floor_scale": 16,
            "attn_scale": 0.5,
        },
    },
    "smollm3": {
        "window": {"use_sliding_window": True, **WINDOW, "no_rope_layers": [0, 1]},
        "layers without rotary embedding": {"no_rope_layers": [1, 0]},
    },
    "gpt_oss": {"all layers sliding": ALL_SLIDING, "rope yarn": rope("yarn", beta_fast=32.0, beta_slow=1.0, **YARN)},
    "exaone4": {"all layers full": {**NO_WINDOW, **ALL_FULL}, "all layers sliding": ALL_SLIDING},
    "olmo3": {"all layers full": ALL_FULL, "all layers sliding": ALL_SLIDING},
    "olmo": {"clipped queries": {"clip_qkv": 1.0}},
    "olmo2": {**IGNORED_WINDOW, "mixed layers": {**WINDOW, **MIXED}},
    "olmoe": {"clipped queries": {"clip_qkv": 1.0}},
    "bloom": {"norm before the residual": {"apply_residual_connection_post_layernorm": True}},
    "falcon": {
        "alibi": {"alibi": True},
        "alibi, eager attention": {"alibi": True, "attn_implementation": "eager"},
        "new decoder": {"new_decoder_architecture": True},
        "many key heads": {"multi_query": False, "num_kv_heads": 4},
        "biases, attention before the MLP": {"bias": True, "parallel_attn": False},
    },
    "mpt": {
        "clipped queries, norms of queries and keys": {"attn_config": {"clip_qkv": 1.0, "qk_ln": True}},
    },
    "gpt2": {
        "scores scaled by layer": {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
        "eager attention": {"attn_implementation": "eager"},
        "untied": {"tie_word_embeddings": False},
    },
    "gpt_bigcode": {"many key heads": {"multi_query": False}},
    "gpt_neo": {
        "all layers local": {"attention_types": [[["local", "local"], 1]]},
        "all layers global": {"attention_types": [[["global", "global"], 1]]},
    },
    "gpt_neox": {
        "attention before the MLP": {"use_parallel_residual": False},
        "whole heads turned": rope("default", partial_rotary_factor=1.0),
        "no biases": {"attention_bias": False},
        **IGNORED_WINDOW,
        "rope dynamic": ROPES["rope dynamic"],
        "rope yarn": ROPES["rope yarn"],
    },
    "opt": {
        "norm after attention": {"do_layer_norm_before": False},
        "narrow embeddings": {"word_embed_proj_dim": 32},
        "no biases": {"enable_bias": False, "layer_norm_elementwise_affine": False},
    },
    "stablelm": {
        "norms of queries and keys": {"qk_layernorm": True, "use_parallel_residual": True},
        "biases of queries, keys and values": {"use_qkv_bias": True},
        **IGNORED_WINDOW,
    },
    "granite": {**GRANITE, **IGNORED_WINDOW},
    "granitemoe": GRANITE,
    "granitemoeshared": GRANITE,
    "granitemoehybrid": {
        **ATTENTION_ONLY,
        "attention only, rope": {**ALL_FULL, "position_embedding_type": "rope"},
        "attention only, multipliers": {**ALL_FULL, **GRANITE["multipliers"], "position_embedding_type": "rope"},
        "attention only, dense": {**ALL_FULL, "num_local_experts": 0, "position_embedding_type": "rope"},
    },
    "seed_oss": {**IGNORED_WINDOW, "output bias": {"attention_out_bias": True}},
    "doge": {
        "keeps everything": {"keep_window_size": 640},
        "sliding window": {"sliding_window": 20},
        "experts": {"is_moe": True, "num_experts": 16},
    },
    "dots1": {
        "mixed layers": {"max_window_layers": 1, "layer_types": [FULL, SLIDING]},
        "all layers sliding": ALL_SLIDING,
    },
    "dory": {"keys and values of the last loop": {"recurrent_kv_cache_mode": "last_loop"}},
    "laguna": {"mixed layers": MIXED},
    "mellum": {"mixed layers": MIXED, "all layers sliding": ALL_SLIDING},
    "zaya": {"a window": {"layer_types": ["hybrid", "hybrid_sliding"]}},
    "modernbert-decoder": {"all layers full": ALL_FULL, "all layers sliding": ALL_SLIDING},
    "minimax_m3_vl_text": {
        "sparse layers": {
            "layer_types": [FULL, "minimax_m3_sparse"],
            "index_block_size": 8,
            "index_topk_blocks": 2,
            "index_n_heads": 2,
        }
    },
    "deepseek_v2": {
        **NO_QUERY_RANK,
        "rope yarn": rope("yarn", mscale=1.0, mscale_all_dim=1.0, **YARN),
        "experts in groups": {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
    },
    "deepseek_v3": {**NO_QUERY_RANK, "rope yarn": rope("yarn", mscale=1.0, mscale_all_dim=1.0, **YARN)},
    **each("axk2 deepseek_v32 glm_moe_dsa hy_v4", WIDE_INDEX),
    "nemotron_h": {
        "attention only": {"num_hidden_layers": 4, "layers_block_type": [FULL, "moe", FULL, "mlp"]},
    },
    "jamba": {"attention only": {"attn_layer_period": 1, "attn_layer_offset": 0}},
    "bamba": {"attention only": {"attn_layer_indices": [0, 1]}},
    **each("lfm2 lfm2_moe qwen3_next qwen3_5_text qwen3_5_moe_text minimax", ATTENTION_ONLY),
    "lfm3": {"attention only": {"num_hidden_layers": 2, **MIXED}},
    "bailing_hybrid": {"attention only": {"layer_types": [FULL] * 3}},
    "kimi_linear": {"attention only": {"layer_types": [FULL] * 3}},
    "recurrent_gemma": {"attention only": {"num_hidden_layers": 2, "block_types": ["attention"]}},
    "qwen4_exp_text": {
        "n-gram embeddings": {
            "ple_layer_ids": [1],
            "ple_embed_dim": 32,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 101,
            "make_ngram_vocab_size_divisible_by": 1,
            "split_ngram_parts": 1,
        },
    },
    **each(ENCODERS, NOT_A_DECODER),
    "big_bird": {**NOT_A_DECODER, "block sparse": {"attention_type": "block_sparse", "block_size": 8}},
    "trocr": {"sinusoidal positions": {"use_learned_position_embeddings": False}},
    "xlm": {"causal": {"causal": True}},
    "xlnet": {"one direction": {"attn_type": "uni"}},
}
