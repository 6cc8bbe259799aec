"""Tiny checkpoints whose weights are quantized, and what transformers generates with them."""

import torch
import transformers
from safetensors.torch import save_file

from draftproof import SamplingParams
from support.helpers import random_model

PROMPTS = [[7, 8, 9], [(5 * i) % 96 + 1 for i in range(41)], [11, 12, 11, 12]]
GREEDY = SamplingParams(temperature=0, max_tokens=16)


def original(folder):
    """A directory with a tiny llama in float32."""
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=640,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=1,
        pad_token_id=0,
    )
    model = random_model(config)
    model.save_pretrained(folder)
    return model


def saved(folder, converted, fields):
    """A checkpoint whose linear layers are stored as `converted` says: tensors by kind, from a weight."""
    model = original(folder)
    tensors = {}
    for name, weight in model.state_dict().items():
        kinds = converted(weight) if "_proj" in name else {"weight": weight.clone()}
        tensors |= {name.replace("weight", kind): values for kind, values in kinds.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.quantization_config = fields
    model.config.save_pretrained(folder)


def fp8(folder, block):
    """Weights in blocks of float8 with a scale each, as DeepSeek publishes them."""

    def converted(weight):
        grid = weight.view(weight.shape[0] // block, block, weight.shape[1] // block, block)
        scale = grid.abs().amax((1, 3)) / 448
        small = (grid / scale[:, None, :, None]).view_as(weight).to(torch.float8_e4m3fn)
        return {"weight": small, "weight_scale_inv": scale}

    fields = {"quant_method": "fp8", "weight_block_size": [block, block], "activation_scheme": "dynamic"}
    saved(folder, converted, fields)


def generated(model):
    """Transformers' own greedy texts."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        options = transformers.GenerationConfig(max_new_tokens=16, do_sample=False, pad_token_id=0)
        made = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
        found.append(made[0, len(prompt) :].tolist())
    return found
