"""Random heads in published layouts, written to directories, and the same computed plainly for tests."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

DATA = Path(__file__).parent / "data" / "speculators"


def source(seed):
    return torch.Generator().manual_seed(seed)


def weights(shapes, seed, scale=1.5):
    """Random tensors by name, large enough that a wrong mask or position changes the logits visibly."""
    rng = source(seed)
    made = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            made[name] = 1 + 0.3 * torch.randn(shape, generator=rng)
        else:
            made[name] = torch.randn(shape, generator=rng) * scale * shape[-1] ** -0.5
    return made


def attention(at, size, heads, key_heads, dim, wide=1):
    """Shapes of an attention's weights."""
    return {
        f"{at}self_attn.q_proj.weight": (heads * dim, wide * size),
        f"{at}self_attn.k_proj.weight": (key_heads * dim, wide * size),
        f"{at}self_attn.v_proj.weight": (key_heads * dim, wide * size),
        f"{at}self_attn.o_proj.weight": (size, heads * dim),
    }


def mlp(at, size, inner):
    """Shapes of the weights of a gated feed-forward part."""
    return {
        f"{at}mlp.gate_proj.weight": (inner, size),
        f"{at}mlp.up_proj.weight": (inner, size),
        f"{at}mlp.down_proj.weight": (size, inner),
    }


def maps(ids, vocab):
    """d2t and t2d of some ascending tokens."""
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": torch.tensor(ids) - torch.arange(len(ids)), "t2d": mask}


def write(folder, config, tensors):
    """A head's directory."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def llama_config(size, vocab, layers=1, **more):
    """Fields of a Llama config."""
    return {
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": 2 * size,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": size // 2,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        **more,
    }


def verified(algorithm, target, architecture="LlamaForCausalLM"):
    """What `speculators` says of a head's target."""
    return {
        "algorithm": algorithm,
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": target, "architectures": [architecture]},
    }


def eagle3(folder, target, *, ids=None, layers=(0, 1, 2), seed=5, original=False, **more):
    """A random EAGLE-3 head for a target, in `speculators`' layout or SafeAILab's."""
    size, vocab = target.capabilities.hidden, target.vocab_size
    ids = list(range(vocab)) if ids is None else ids
    at = "midlayer." if original else "layers.0."
    shapes = {
        "fc.weight": (size, len(layers) * size),
        "norm.weight": (size,),
        "lm_head.weight": (len(ids), size),
        "embed_tokens.weight": (vocab, size),
        **{f"{at}{name}.weight": (size,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        **attention(at, size, 2, 1, size // 2, wide=2),
        **mlp(at, size, 2 * size),
    }
    tensors = {**weights(shapes, seed), **(maps(ids, vocab) if len(ids) < vocab else {})}
    layer = llama_config(size, vocab)
    own = {"draft_vocab_size": len(ids), "eagle_aux_hidden_state_layer_ids": list(layers), **more}
    if original:
        return write(folder, {"architectures": ["LlamaForCausalLMEagle3"], **layer, **own}, tensors)
    nested = {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
    return write(folder, {**nested, "speculators_config": verified("eagle3", target.name), **own}, tensors)
