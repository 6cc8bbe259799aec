"""GGUF files for tests: random blocks, and models of transformers with their weights in blocks."""

import math

import numpy as np

HALVES = {2: [0], 3: [0, 2], 6: [0], 7: [0, 2], 8: [0], 10: [80, 82], 11: [108], 12: [0, 2], 13: [0, 2], 14: [208]}
HALVES |= {20: [0], 23: [0], 39: []}
"""Where the float16 numbers of a block stand, by type."""


F16, BF16, MXFP4 = 1, 30, 39


def random_blocks(kind, outs, ins, seed=0, scale=0.01):
    """Bytes of random blocks, whose float16 numbers are small; [blocks, bytes]."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    generator, count = np.random.default_rng(seed), outs * (ins // elements)
    blocks = generator.integers(0, 256, (count, size), dtype=np.uint8)
    if kind == MXFP4:  # its scales are powers of two
        blocks[:, 0] = generator.integers(-4, 3, count) + round(np.log2(scale)) + 128
    for at in HALVES[kind]:
        halves = (generator.standard_normal(count) * scale).astype(np.float16)
        blocks[:, at : at + 2] = halves[:, None].view(np.uint8)
    return blocks


SCALES = {2: 1e-2, 3: 5e-3, 6: 5e-3, 7: 3e-3, 8: 7e-4, 10: 3e-3, 11: 1e-3, 12: 1e-4, 13: 6e-5, 14: 4e-5, 20: 7e-4}
SCALES |= {23: 4e-5, MXFP4: 1e-2}
"""Of the float16 numbers of blocks, by type, so that weights are as large as those of models."""

_TOP = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.sinks": "attn_sinks",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_POST = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_OTHER_PARTS = {
    "gemma2": {**_POST, "pre_feedforward_layernorm": "ffn_norm"},
    "gemma3": {**_POST, "pre_feedforward_layernorm": "ffn_norm"},
    "olmo2": _POST,
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
    "glm4": {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
}
PERMUTED = ("llama", "granite", "granitemoe", "smollm3")
_ROUTERS = ("ffn_gate_inp", "ffn_gate_inp_shexp")  # which are never written in blocks


def permuted(rows, heads):
    """Rows of queries or keys as llama.cpp's converter stores them for some architectures."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def restored(rows, heads):
    """The inverse of `permuted`."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _tensors(name, weight, names, architecture):
    """The tensors of a file that one of a model becomes, by name, as views of the model's."""
    if name in _TOP:
        return {f"{_TOP[name]}.weight": weight}
    _, _, number, *parts = name.split(".")
    part, at = ".".join(parts), f"blk.{number}."
    if "experts." in part or "input_linear" in part:
        kind, stem = ("bias" if part.endswith("_bias") else "weight"), "shexp" if "input_linear" in part else "exps"
        if architecture == "gpt-oss":
            weight = weight.transpose(1, 2) if kind == "weight" else weight
            halves = weight[:, ::2], weight[:, 1::2]
        else:
            halves = weight.chunk(2, 0 if stem == "shexp" else 1)
        found = {"down": weight} if "down" in part else dict(zip(("gate", "up"), halves, strict=True))
        return {f"{at}ffn_{half}_{stem}.{kind}": view for half, view in found.items()}
    stem, suffix = (part, "weight") if part.endswith("sinks") else part.rsplit(".", 1)
    return {f"{at}{names[stem]}.{suffix}": weight[0] if stem == "mlp.shared_expert_gate" else weight}


def write_model(path, model, architecture, metadata, kinds=(12, 14, 8), extra=(), without=()):
    """Write a model of transformers as a GGUF file; its matrices become random blocks of some types in turn.

    Args:
        path: of the file.
        model: its weights are replaced by those of the blocks.
        architecture: name in GGUF.
        metadata: without the architecture before the keys.
        kinds: types of matrices; None keeps a matrix in float32, and floats of 16 bits are its own numbers, rounded.
        extra: further tensors, by name.
        without: names of tensors that are left out.
    """
    import torch
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[list] = writer.add_array
        add[type(value)](key if key.split(".")[0] in ("tokenizer", "general") else f"{architecture}.{key}", value)
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    names = {**_PARTS, **_OTHER_PARTS.get(architecture, {})}
    tied, number = model.lm_head.weight is model.model.embed_tokens.weight, 0
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        turned = heads.get(name.split(".")[-2]) if architecture in PERMUTED else None
        for place, view in _tensors(name, weight, names, architecture).items():
            if place in without:
                continue
            is_matrix = view.dim() > 1 and place.split(".")[-2] not in _ROUTERS and place.endswith("weight")
            if is_matrix and (kind := kinds[number % len(kinds)]) is not None:
                *outs, ins = view.shape
                if kind in (F16, BF16):
                    blocks = quants.quantize(np.ascontiguousarray(view.numpy()), GGMLQuantizationType(kind))
                else:
                    blocks = random_blocks(kind, math.prod(outs), ins, seed=number, scale=SCALES[kind])
                blocks = blocks.reshape(*outs, -1)
                numbers = quants.dequantize(blocks, GGMLQuantizationType(kind)).reshape(view.shape)
                view.copy_(torch.from_numpy(restored(numbers, turned) if turned else numbers))
                writer.add_tensor(place, blocks, raw_dtype=GGMLQuantizationType(kind))
            else:
                content = np.ascontiguousarray(view.numpy())
                if architecture.startswith("gemma") and "norm" in name:
                    content = content + 1
                writer.add_tensor(place, permuted(content, turned) if turned else content)
            number += is_matrix
    for name, content in extra:
        writer.add_tensor(name, content)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


METADATA = {
    "block_count": 4,
    "context_length": 512,
    "embedding_length": 256,
    "feed_forward_length": 512,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 50000.0,
}
"""Of a Llama with four layers, as `write_model` takes it."""


def write_llama(path, extra=(), **changes):
    """Write a Llama of four layers with random weights of few bits, and a tokenizer of bytes; `changes` of metadata."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import LlamaConfig

    from support.helpers import random_model

    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, "th", "the", "<s>", "</s>"]
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
    )
    words = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": tokens,
        "token_type": [1] * (len(tokens) - 2) + [3, 3],
        "merges": ["t h", "th e"],
        "bos_token_id": len(tokens) - 2,
        "eos_token_id": len(tokens) - 1,
    }
    named = {f"tokenizer.ggml.{key}": value for key, value in words.items()}
    write_model(path, random_model(config, seed=3), "llama", {**METADATA, **named, **changes}, extra=extra)
