"""What configuration classes need beside sizes that go by the names of their fields, by model type.

`...` leaves a field to the class.
"""

import copy


def each(names, value):
    """The same value for each of several names, which are given in one text."""
    return {name: copy.deepcopy(value) for name in names.split()}


_LATENT = {
    "head_dim": ...,
    "num_key_value_heads": 4,
}  # heads of latent attention are made of two parts, as many as of queries
_LOOPED = {"num_hidden_layers": 3}  # the one in the middle reads several times in a pass
_SMALL_IMAGES = {"image_size": 32, "patch_size": 16, "hidden_size": 16, "intermediate_size": 16}
_DECODER = {"is_decoder": True}
ENCODERS = (
    "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
    "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod"
)

CANNOT_BE_MADE = {  # where the exception does not say why
    "gemma3n": "its image tower needs the package timm, which is not installed; gemma3n_text is its language model",
    "gemma4_assistant": "it reads the keys and values of another model and cannot generate by itself",
    "gemma4_unified_assistant": "it reads the keys and values of another model and cannot generate by itself",
    "musicgen": "transformers itself cannot make its language model from this type's own configuration",
    "musicgen_melody": "transformers itself cannot make its language model from this type's own configuration",
}
OVERRIDES = {
    **each(ENCODERS, _DECODER),
    **each(
        "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_linear minicpm3 sarvam_mla "
        "youtu",
        _LATENT,
    ),
    "bailing_hybrid": {**_LATENT, "first_k_dense_replace": 1},
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {**_DECODER, "attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {"encoder_hash_byte_group_vocab": 101, "max_position_embeddings": 640},
    "blt_local_encoder": {"hidden_size_global": 64},
    "blt_local_decoder": {"hidden_size_global": 64},
    "codegen": {"rotary_dim": 8},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5},
    "cohere2_moe": {"logit_scale": 0.5},
    "cohere_compass_text": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64},
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64, "downsample_hidden_size": 8},
    "dots3_note_vision_encoder": {
        "adapter_in_dim": 64,
        "adapter_out_dim": 64,
        "num_hidden_layers": 2,
        "mlp_layer_types": ["dense", "dense"],
    },
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "head_dim": 24,
        "index_topk": 2048,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "dory": {
        **_LOOPED,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "n_input_layers": 1,
        "n_output_layers": 1,
    },
    "doge": {"sliding_window": None, "keep_window_size": 10},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1, "max_window_layers": 1},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
    },
    "gemma4_unified_vision": {"mm_embed_dim": 16, "output_proj_dims": 16},
    "git_vision_model": _SMALL_IMAGES,
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 2,
        },
        "backbone_hidden_size": 64,
        "num_centroids": 8,
    },
    "gemma4_unified_assistant": {
        "text_config": {"num_kv_shared_layers": 2},
        "backbone_hidden_size": 64,
        "num_centroids": 8,
    },
    "got_ocr2_vision": {**_SMALL_IMAGES, "mlp_dim": 16, "output_channels": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "inkling2_loop_text": {
        **_LOOPED,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "rel_extent": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
    },
    "inkling2_text": {"rel_extent": 32},
    "inkling_text": {"rel_extent": 32, "logits_mup_width_multiplier": 1.0},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {**_LATENT, "head_dim": 8, "zero_expert_num": 2, "num_layers": 1},
    "mamba2": {"num_heads": 8},
    "mvp": {"prompt_length": 4, "prompt_mid_dim": 16},
    **each("phi3 phi4_multimodal", {"original_max_position_embeddings": 40}),
    "phi4_multimodal_audio": {
        "ext_pw_out_channel": 16,
        "depthwise_separable_out_channel": 16,
        "nemo_conv_channels": 16,
        "bias_max_distance": 16,
    },
    "phi4_multimodal_vision": {**_SMALL_IMAGES, "crop_size": 32},
    "qwen4_exp_text": {
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"num_buckets": 4, "is_decoder": True, "axial_pos_shape": [20, 32], "axial_pos_embds_dim": [32, 32]},
    "roc_bert": {
        **_DECODER,
        "pronunciation_vocab_size": 101,
        "shape_vocab_size": 101,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
    },
    "rwkv": {"attention_hidden_size": 64},
    "xmod": {**_DECODER, "default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "n_mamba_heads": 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
