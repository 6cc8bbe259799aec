"""Random heads in published layouts, written to directories, and the same computed plainly for tests."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file

from draftproof.backends.hf.backend import HFBackend

DATA = Path(__file__).parent / "data" / "speculators"
PROVENANCE = json.loads((DATA / "provenance.json").read_text())
IDS, STEPS = PROVENANCE["tokens"], PROVENANCE["steps"]


def tiny_target(make=HFBackend, *, check=False, data=DATA):
    """The target of the reference heads; test_published_heads.py checks it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(data / "target", dtype=torch.float32)
    return make(model, name="tiny-target", check=check)


def reference(name, data=DATA):
    """What the package computes with a head."""
    return load_file(data / name / "reference.safetensors")


def changed(folder, head="eagle3_llama", **fields):
    """A copy of a reference head with other fields in its config."""
    shutil.copytree(DATA / head, folder)
    config = json.loads((folder / "config.json").read_text())
    for name, value in fields.items():
        place = config
        *path, last = name.split("__")
        for part in path:
            place = place[part]
        place[last] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


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


class LayerShape(NamedTuple):
    """Sizes of a head's layers: attention heads, those of keys, numbers of one, and the inner width."""

    heads: int
    key_heads: int
    dim: int
    inner: int


def small(size):
    """The shape of layers in tests."""
    return LayerShape(2, 1, size // 2, 2 * size)


def llama_config(size, vocab, layers=1, *, shape=None, **more):
    """Fields of a Llama config."""
    shape = shape or small(size)
    return {
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": shape.inner,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.dim,
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


def eagle3(folder, target, *, ids=None, layers=(0, 1, 2), seed=5, original=False, shape=None, **more):
    """A random EAGLE-3 head for a target, in `speculators`' layout or SafeAILab's."""
    size, vocab = target.capabilities.hidden, target.vocab_size
    shape = shape or small(size)
    ids = list(range(vocab)) if ids is None else ids
    at = "midlayer." if original else "layers.0."
    shapes = {
        "fc.weight": (size, len(layers) * size),
        "norm.weight": (size,),
        "lm_head.weight": (len(ids), size),
        "embed_tokens.weight": (vocab, size),
        **{f"{at}{name}.weight": (size,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        **attention(at, size, *shape[:3], wide=2),
        **mlp(at, size, shape.inner),
    }
    tensors = {**weights(shapes, seed), **(maps(ids, vocab) if len(ids) < vocab else {})}
    layer = llama_config(size, vocab, shape=shape)
    own = {"draft_vocab_size": len(ids), "eagle_aux_hidden_state_layer_ids": list(layers), **more}
    if original:
        old = {"torch_dtype": "float16", "transformers_version": "4.28.1", "rope_scaling": None, "rope_theta": 10000.0}
        return write(folder, {"architectures": ["LlamaForCausalLMEagle3"], **layer, **old, **own}, tensors)
    nested = {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
    return write(folder, {**nested, "speculators_config": verified("eagle3", target.name), **own}, tensors)


def peagle(folder, target, *, ids=None, layers=(0, 1, 2), seed=6, shape=None):
    """A random P-EAGLE head for a target: an EAGLE-3 head with a mask token and a vector for masked places."""
    eagle3(folder, target, ids=ids, layers=layers, seed=seed, shape=shape)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    config |= {
        "speculators_model_type": "peagle",
        "mask_token_id": 1,
        "speculators_config": verified("peagle", target.name),
    }
    mask = torch.randn(1, 1, len(layers) * target.capabilities.hidden, generator=source(seed))
    return write(folder, config, {**tensors, "mask_hidden": mask})


def dflash(folder, target, *, ids=None, layers=(0, 1, 2), seed=9, original=False, block=5, shape=None, **more):
    """A random DFlash head for a target, in `speculators`' layout or its authors', with a window in one layer."""
    size, vocab = target.capabilities.hidden, target.vocab_size
    shape = shape or small(size)
    shapes = {"fc.weight": (size, len(layers) * size), "norm.weight": (size,), "hidden_norm.weight": (size,)}
    for number in range(2):
        at = f"layers.{number}."
        shapes |= {f"{at}{name}.weight": (size,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}self_attn.{name}.weight": (shape.dim,) for name in ("q_norm", "k_norm")}
        shapes |= {**attention(at, size, *shape[:3]), **mlp(at, size, shape.inner)}
    own = {}
    if ids is not None and len(ids) < vocab:
        shapes["lm_head.weight"], own = (len(ids), size), maps(ids, vocab)
    tensors = {**weights(shapes, seed), **own}
    windows = {"use_sliding_window": True, "sliding_window": 3}
    kinds = {"layer_types": ["full_attention", "sliding_attention"]}
    layer = llama_config(size, vocab, 2, shape=shape, **windows, **kinds) | {"model_type": "qwen3"}
    drafted = {"draft_vocab_size": len(ids)} if own else {}
    if original:
        nested = {"mask_token_id": 1, "target_layer_ids": [each - 1 for each in layers], **more}
        config = {"architectures": ["DFlashDraftModel"], **layer, **drafted, "block_size": block}
        return write(folder, {**config, "num_target_layers": target.facts.layers, "dflash_config": nested}, tensors)
    config = {"speculators_model_type": "dflash", "transformer_layer_config": layer, "mask_token_id": 1, **drafted}
    config |= {"aux_hidden_state_layer_ids": list(layers), "block_size": block, **more}
    return write(folder, {**config, "speculators_config": verified("dflash", target.name)}, tensors)


def kindred(folder, target, algorithm, fields, shapes, *, seed, original=False, **more):
    """A random DFlash head as a head of another algorithm, with further fields and weights."""
    dflash(folder, target, seed=seed, original=original, **more)
    config = json.loads((folder / "config.json").read_text())
    tensors = {**load_file(folder / "model.safetensors"), **weights(shapes, seed + 1)}
    if original:
        return write(folder, config | fields, tensors)
    told = {"speculators_model_type": algorithm, "speculators_config": verified(algorithm, target.name)}
    return write(folder, config | told | fields, tensors)


def dspark(folder, target, *, ids=None, kind="vanilla", rank=3, confidence=True, original=False, seed=10, **more):
    """A random DSpark head for a target, in `speculators`' layout or DeepSpec's."""
    size, vocab = target.capabilities.hidden, target.vocab_size
    drafted = vocab if ids is None else len(ids)
    shapes = {"markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (drafted, rank)}
    if kind != "vanilla":
        name, outs, ins = {"gated": ("gate", rank, rank), "rnn": ("joint", 3 * rank, 2 * rank)}[kind]
        shapes[f"markov_head.{name}_proj.weight"] = (outs, size + ins)
        shapes[f"markov_head.{name}_proj.bias"] = (outs,)
    if confidence:
        shapes |= {"confidence_head.proj.weight": (1, size + rank), "confidence_head.proj.bias": (1,)}
    fields = {"markov_rank": rank, "markov_head_type": kind, "enable_confidence_head": confidence}
    fields |= {"architectures": ["Qwen3DSparkModel"]} if original else {"sample_from_anchor": True}
    more = {"ids": ids, "seed": seed, "original": original, "block": 4, **more}
    return kindred(folder, target, "dspark", fields, shapes, **more)


def dflash2(folder, target, *, ids=None, rank=3, kept=2, group=None, taps=2, original=False, seed=11, **more):
    """A random DFlash 2 head for a target, in `speculators`' layout or its authors'; it drafts all tokens."""
    size, vocab = target.capabilities.hidden, target.vocab_size
    group = group or size // 2
    shapes = {f"candidate_selector.{name}_codebook": (vocab, rank) for name in ("predecessor", "successor")}
    shapes["candidate_selector.hidden_projection.weight"] = (rank, size)
    for at in (f"layers.{number}.{part}_conv." for number in range(2) for part in ("attention", "mlp")):
        shapes[f"{at}base_kernel"] = (2, taps, size)
        shapes[f"{at}kernel_projection.weight"] = (2 * taps * size // group, size)
    fields = {"conv_kernel_size": taps, "conv_group_size": group, "selector_rank": rank, "selector_top_k": kept}
    if original:
        return kindred(
            folder, target, "dflash2", {"architectures": ["DFlash2DraftModel"]}, shapes, seed=seed, original=True,
            **fields, **more
        )  # fmt: skip
    return kindred(folder, target, "dflash2", fields, shapes, seed=seed, **more)


def eagle(folder, target, *, seed=7, depth=1, bias=True, shape=None, **_):
    """A random EAGLE head for a target, in SafeAILab's layout."""
    size, vocab = target.capabilities.hidden, target.vocab_size
    shape = shape or small(size)
    shapes = {
        "fc.weight": (size, 2 * size),
        **({"fc.bias": (size,)} if bias else {}),
        "embed_tokens.weight": (vocab, size),
    }
    for number in range(depth):
        at = f"layers.{number}."
        norms = ["post_attention_layernorm"] + (["input_layernorm"] if number else [])
        shapes |= {f"{at}{name}.weight": (size,) for name in norms}
        shapes |= {**attention(at, size, *shape[:3]), **mlp(at, size, shape.inner)}
    config = {"architectures": ["LlamaForCausalLM"], "bias": bias, **llama_config(size, vocab, depth, shape=shape)}
    return write(folder, config, weights(shapes, seed))


def medusa(folder, target, *, heads=4, depth=1, seed=8, prefix="", **_):
    """Random Medusa heads for a target, in FasterDecoding's layout."""
    size, vocab = target.capabilities.hidden, target.vocab_size
    shapes = {}
    for head in range(heads):
        for number in range(depth):
            shapes[f"{prefix}{head}.{number}.linear.weight"] = (size, size)
            shapes[f"{prefix}{head}.{number}.linear.bias"] = (size,)
        shapes[f"{prefix}{head}.{depth}.weight"] = (vocab, size)
    config = {"medusa_num_heads": heads, "medusa_num_layers": depth, "base_model_name_or_path": target.name}
    return write(folder, config, weights(shapes, seed))


def mtp(folder, target, *, seed=13):
    """A random prediction layer of family qwen3 for a target, in `speculators`' layout; it reads chains only."""
    size, at = target.capabilities.hidden, "mtp_layers.0."
    shape = small(size)
    norms = ("token", "hidden", "input", "post_attention", "final")
    shapes = {f"{at}input_proj.weight": (size, 2 * size), **{f"{at}{name}_layernorm.weight": (size,) for name in norms}}
    shapes |= {f"{at}self_attn.{name}_norm.weight": (shape.dim,) for name in "qk"}
    shapes |= {**attention(at, size, *shape[:3]), **mlp(at, size, shape.inner)}
    layer = {**llama_config(size, target.vocab_size), "model_type": "qwen3"}
    config = {"speculators_model_type": "mtp", "transformer_layer_config": layer}
    return write(folder, config | {"speculators_config": verified("mtp", target.name)}, weights(shapes, seed))


def assistant(folder, target, *, layers, size=8, inner=16, heads=2, clusters=None, kept=2, seed=12, scale=3.0):
    """A random Gemma 4 assistant for a target, with clusters of tokens.

    Args:
        folder: to write to.
        target: the model whose keys and values it reads.
        layers: of each layer its kind and the numbers of a head.
        size: numbers of a hidden state.
        inner: gated numbers.
        heads: of queries, in each layer.
        clusters: number of them; by default one for each token.
        kept: clusters whose tokens it may draft.
        seed: of the weights.
        scale: of the weights of matrices.
    """
    width, vocab, config = target.capabilities.hidden, target.vocab_size, target.config.to_dict()
    clusters = clusters or vocab
    shapes = {"model.embed_tokens.weight": (vocab, size), "model.norm.weight": (size,)}
    shapes |= {"pre_projection.weight": (size, 2 * width), "post_projection.weight": (width, size)}
    for number, (_, dim) in enumerate(layers):
        at, wide = f"model.layers.{number}.", heads * dim
        shapes |= {f"{at}self_attn.q_proj.weight": (wide, size), f"{at}self_attn.q_norm.weight": (dim,)}
        shapes |= {f"{at}self_attn.o_proj.weight": (size, wide), f"{at}layer_scalar": (1,), **mlp(at, size, inner)}
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{at}{name}_layernorm.weight"] = (size,)
    shapes["masked_embedding.centroids.weight"] = (clusters, size)
    tensors = {**weights(shapes, seed, scale), "masked_embedding.token_ordering": torch.arange(vocab).flip(0)}
    fields = {"model_type": "gemma4_assistant", "backbone_hidden_size": width, "use_ordered_embeddings": True}
    fields |= {"num_centroids": clusters, "centroid_intermediate_top_k": kept}
    config |= {"hidden_size": size, "intermediate_size": inner, "num_attention_heads": heads}
    config |= {"num_hidden_layers": len(layers), "num_kv_shared_layers": len(layers)}
    config |= {"layer_types": [kind for kind, _ in layers], "hidden_size_per_layer_input": 0}
    config |= {"per_layer_config": {str(number): {"head_dim": dim} for number, (_, dim) in enumerate(layers)}}
    config |= {"use_double_wide_mlp": False, "final_logit_softcapping": None}
    return write(folder, {**fields, "text_config": config}, tensors)


WRITERS = {
    "eagle3": eagle3,
    "peagle": peagle,
    "dflash": dflash,
    "dspark": dspark,
    "dflash2": dflash2,
    "eagle": eagle,
    "medusa": medusa,
}


# --- the same in plain torch, over a whole sequence at a time ---------------------------------------------------------


def rms(x, weight, eps=1e-5):
    """Root mean square norm."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def turned(x, positions, theta=10000.0):
    """Rotary embedding of [heads, tokens, dim]: pairs of the two halves."""
    dim = x.shape[-1]
    angles = positions[:, None] * theta ** -(torch.arange(0, dim, 2).float() / dim)
    left, right = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)


def llama_layer(tensors, at, given, x, heads=2):
    """A Llama layer whose attention reads `given` [tokens, wide] and adds to x [tokens, dim]: causal, no cache."""
    length, size = x.shape
    dim = size // heads
    places = torch.arange(length).float()
    q, k, v = (
        (given @ tensors[f"{at}self_attn.{name}.weight"].T).view(length, -1, dim).transpose(0, 1)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    q, k = turned(q, places), turned(k, places)
    k, v = k.repeat_interleave(heads // k.shape[0], 0), v.repeat_interleave(heads // v.shape[0], 0)
    scores = q @ k.transpose(-1, -2) / dim**0.5
    scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), float("-inf"))
    x = x + (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1) @ tensors[f"{at}self_attn.o_proj.weight"].T
    normed = rms(x, tensors[f"{at}post_attention_layernorm.weight"])
    gate, up = (normed @ tensors[f"{at}mlp.{name}.weight"].T for name in ("gate_proj", "up_proj"))
    return x + (torch.nn.functional.silu(gate) * up) @ tensors[f"{at}mlp.down_proj.weight"].T


def eagle_rows(folder, states, tokens, output, depth=1):
    """Logits of the EAGLE paper's head after `tokens`: the target's states, then the head's own, one token at a time.

    Args:
        folder: of the head.
        states: the target's last hidden states of the first tokens.
        tokens: all tokens, of which the first has no embedding here.
        output: weight of the target's output layer.
        depth: number of layers.
    """
    tensors = load_file(folder / "model.safetensors")
    features = list(states)
    rows = []
    while len(features) < len(tokens):
        length = len(features)
        embedded = tensors["embed_tokens.weight"][tokens[1 : length + 1]]
        x = torch.cat([embedded, torch.stack(features)], -1) @ tensors["fc.weight"].T + tensors.get("fc.bias", 0)
        for number in range(depth):
            at = f"layers.{number}."
            x = llama_layer(tensors, at, rms(x, tensors[f"{at}input_layernorm.weight"]) if number else x, x)
        features.append(x[-1])
        rows.append(x[-1] @ output.T)
    return torch.stack(rows)


def medusa_rows(folder, state, heads=4, depth=1, prefix=""):
    """Logits of every Medusa head from one state."""
    tensors = load_file(folder / "model.safetensors")
    rows = []
    for head in range(heads):
        x = state
        for number in range(depth):
            at = f"{prefix}{head}.{number}.linear."
            x = x + torch.nn.functional.silu(tensors[f"{at}weight"] @ x + tensors[f"{at}bias"])
        rows.append(tensors[f"{prefix}{head}.{depth}.weight"] @ x)
    return torch.stack(rows)


# --- checkpoints with prediction layers of their own ------------------------------------------------------------------

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "moe_intermediate_size": 16,
}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
PREDICTING = {
    "deepseek_v3": lambda layers, vocab: transformers.DeepseekV3Config(
        **TINY, **LATENT, **EXPERTS, vocab_size=vocab, num_key_value_heads=4, num_mtp_layers=layers
    ),
    "glm4_moe": lambda layers, vocab: transformers.Glm4MoeConfig(
        **TINY, **EXPERTS, vocab_size=vocab, num_key_value_heads=2, head_dim=8, num_mtp_layers=layers
    ),
    "mellum": lambda layers, vocab: transformers.AutoConfig.for_model(
        "mellum",
        **TINY,
        vocab_size=vocab,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            kind: {"rope_type": "default", "rope_theta": 1000.0} for kind in ("sliding_attention", "full_attention")
        },
        num_mtp_layers=layers,
    ),
}
_MELLUM = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}


def predicting(folder, name, monkeypatch, *, layers=1, vocab=97, seed=3, dtype=torch.float32):
    """A random checkpoint with prediction layers, written as its publishers write them, and loaded again."""
    from transformers.modeling_layers import MtpModel

    config = PREDICTING[name](layers, vocab)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        mtp = MtpModel(model, layers)
    if name != "mellum":  # transformers looks for the layers after the published checkpoints' own numbers of layers
        pattern = rf"model\.layers\.[{config.num_hidden_layers}-9].*"
        monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", [pattern])
    model.save_pretrained(folder)
    shapes = {key: tuple(value.shape) for key, value in mtp.state_dict().items() if key.startswith("layers.")}
    made = {}
    for key, value in weights(shapes, seed).items():
        _, number, rest = key.split(".", 2)
        part, _, tail = rest.partition(".")
        if name == "mellum":
            made[f"mtp.{_MELLUM[part]}.{tail}" if part in _MELLUM else f"mtp.layers.0.{tail}"] = value
        else:
            rest = {"mtp_block": tail, "post_norm": f"shared_head.norm.{tail}"}.get(part, rest)
            made[f"model.layers.{int(number) + config.num_hidden_layers}.{rest}"] = value
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, **made}, folder / "model.safetensors", metadata={"format": "pt"})
    options = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
