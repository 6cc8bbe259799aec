"""Random checkpoints of Qwen3-Next and Qwen3.5 with their prediction layer, and the same computed plainly for tests."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from support.architectures.tiny import tiny_config, tiny_model
from support.published import attention, mlp, turned, weights

DATA = Path(__file__).parent / "data" / "mtp_qwen"


def shapes_of(config):
    """Shapes of the tensors `mtp.*`."""
    size, dim, at = config.hidden_size, config.head_dim, "mtp.layers.0."
    shapes = {"mtp.fc.weight": (size, 2 * size), "mtp.norm.weight": (size,)}
    shapes |= {f"mtp.pre_fc_norm_{name}.weight": (size,) for name in ("embedding", "hidden")}
    shapes |= {f"{at}{name}_layernorm.weight": (size,) for name in ("input", "post_attention")}
    shapes |= {f"{at}self_attn.{name}_norm.weight": (dim,) for name in "qk"}
    shapes |= attention(at, size, config.num_attention_heads, config.num_key_value_heads, dim)
    shapes[f"{at}self_attn.q_proj.weight"] = (2 * config.num_attention_heads * dim, size)
    if not has_experts(config):
        return shapes | mlp(at, size, config.intermediate_size)
    shapes |= {f"{at}mlp.gate.weight": (config.num_experts, size), f"{at}mlp.shared_expert_gate.weight": (1, size)}
    inner = {f"experts.{number}": config.moe_intermediate_size for number in range(config.num_experts)}
    for part, width in {**inner, "shared_expert": config.shared_expert_intermediate_size}.items():
        shapes |= {name.replace(".mlp.", f".mlp.{part}."): each for name, each in mlp(at, size, width).items()}
    return shapes


def has_experts(config):
    return getattr(config, "num_experts", 0) > 0


def tensors_of(config, seed=4):
    """Random tensors `mtp.*`; norms are stored as what is added to 1."""
    made = weights(shapes_of(config), seed)
    return {name: value - 1 if value.ndim == 1 else value for name, value in made.items()}


def written(folder, name, *, seed=4, multimodal=False, vocab=None, change=lambda tensors: tensors, **fields):
    """A checkpoint with a prediction layer, and its folder.

    Args:
        folder: to write to.
        name: of the type of model.
        seed: of the layer's weights.
        multimodal: whether the text is a part of a model for images.
        vocab: number of tokens; by default that of tiny models.
        change: of the tensors `mtp.*` before they are written.
        fields: of the config.
    """
    sizes = {**({} if vocab is None else {"vocab_size": vocab}), **fields}
    config = tiny_config(name, **({"text_config": sizes} if multimodal else sizes))
    if multimodal:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = transformers.AutoModelForImageTextToText.from_config(config)
            for weight in model.model.language_model.parameters():
                if weight.ndim > 1:
                    torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    else:
        model = tiny_model(config)
    return written_with(folder, model, change(tensors_of(config.get_text_config(), seed)))


def written_with(folder, model, own):
    """The checkpoint of a model and these tensors `mtp.*`, and its folder."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, **own}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def in_blocks(folder, block=16):
    """Make the matrices of layers of a checkpoint FP8 with a scale for each block, as Qwen publishes them.

    Returns:
        The tensors `mtp.*` with the numbers that they stand for then.
    """
    tensors, stands = load_file(folder / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        if name.endswith("_proj.weight") and ".linear_attn." not in name:
            grid = weight.view(weight.shape[0] // block, block, weight.shape[1] // block, block)
            scales = grid.abs().amax((1, 3)) / 448
            small = (grid / scales[:, None, :, None]).to(torch.float8_e4m3fn)
            tensors |= {name: small.view_as(weight), f"{name}_scale_inv": scales}
            stands[name] = (small.float() * scales[:, None, :, None]).view_as(weight)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [block, block],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head", "mtp.fc"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    own = {name: value for name, value in tensors.items() if name.startswith("mtp.") and not name.endswith("_inv")}
    return {name: stands.get(name, value) for name, value in own.items()}


def own_tensors(folder):
    """The tensors `mtp.*` of a checkpoint."""
    return {name: value for name, value in load_file(folder / "model.safetensors").items() if name.startswith("mtp.")}


def norm(x, weight, eps):
    """Root mean square norm whose weight is added to 1."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 + weight)


def gated_attention(tensors, at, x, config):
    """Attention over [tokens, dim]: half of each head's queries gates its output, a part of each head is turned."""
    length, dim = x.shape[0], config.head_dim
    q, gate = (x @ tensors[f"{at}q_proj.weight"].T).view(length, -1, 2 * dim).chunk(2, -1)
    k, v = ((x @ tensors[f"{at}{name}_proj.weight"].T).view(length, -1, dim) for name in "kv")
    q, k = (
        norm(each, tensors[f"{at}{name}_norm.weight"], config.rms_norm_eps).transpose(0, 1)
        for each, name in ((q, "q"), (k, "k"))
    )
    rope = config.rope_parameters
    turning, places = int(dim * rope["partial_rotary_factor"]), torch.arange(length).float()
    q, k = (
        torch.cat([turned(each[..., :turning], places, rope["rope_theta"]), each[..., turning:]], -1) for each in (q, k)
    )
    groups = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(groups, 0), v.transpose(0, 1).repeat_interleave(groups, 0)
    scores = (q @ k.transpose(-1, -2) / dim**0.5).masked_fill(~torch.ones(length, length).bool().tril(), -torch.inf)
    mixed = (scores.softmax(-1) @ v).transpose(0, 1) * gate.sigmoid()
    return mixed.reshape(length, -1) @ tensors[f"{at}o_proj.weight"].T


def feed_forward(tensors, at, x):
    """The gated part of a dense layer, or of one expert."""
    gate, up = (x @ tensors[f"{at}{name}_proj.weight"].T for name in ("gate", "up"))
    return (torch.nn.functional.silu(gate) * up) @ tensors[f"{at}down_proj.weight"].T


def experts(tensors, at, x, config):
    """The chosen experts by their shares, and the one that all tokens share by its gate."""
    shares, chosen = (x @ tensors[f"{at}gate.weight"].T).softmax(-1).topk(config.num_experts_per_tok)
    shares = shares / shares.sum(-1, keepdim=True)
    made = torch.stack([feed_forward(tensors, f"{at}experts.{number}.", x) for number in range(config.num_experts)], 1)
    mixed = (made.gather(1, chosen[..., None].expand(-1, -1, x.shape[1])) * shares[..., None]).sum(1)
    shared = (x @ tensors[f"{at}shared_expert_gate.weight"].T).sigmoid()
    return mixed + shared * feed_forward(tensors, f"{at}shared_expert.", x)


def layer(tensors, config, embedded, given):
    """The layer's states over a whole text.

    Args:
        tensors: `mtp.*`.
        config: of the text model.
        embedded: of the tokens.
        given: the state before each of them.
    """
    at = "mtp.layers.0."

    def normed(x, name):
        return norm(x, tensors[f"mtp.{name}.weight"], config.rms_norm_eps)

    x = torch.cat([normed(embedded, "pre_fc_norm_embedding"), normed(given, "pre_fc_norm_hidden")], -1)
    x = x @ tensors["mtp.fc.weight"].T
    x = x + gated_attention(tensors, f"{at}self_attn.", normed(x, "layers.0.input_layernorm"), config)
    inner = normed(x, "layers.0.post_attention_layernorm")
    if has_experts(config):
        return normed(x + experts(tensors, f"{at}mlp.", inner, config), "norm")
    return normed(x + feed_forward(tensors, f"{at}mlp.", inner), "norm")


def rows(tensors, config, table, output, states, tokens):
    """Logits of a draft: after the last token with a state of the target before it, and after each further one.

    Args:
        tensors: `mtp.*`.
        config: of the text model.
        table: the embedding.
        output: weight of the output layer.
        states: the target's last hidden states of the first tokens.
        tokens: all tokens, of which the first has no embedding here.
    """
    given, found = list(states), []
    while len(given) < len(tokens):
        made = layer(tensors, config, table[tokens[1 : len(given) + 1]], torch.stack(given))
        given.append(made[-1])
        found.append(made[-1] @ output.T)
    return torch.stack(found)


NAMES = {
    "mtp.fc": "input_proj",
    "mtp.norm": "final_layernorm",
    "mtp.pre_fc_norm_hidden": "hidden_layernorm",
    "mtp.pre_fc_norm_embedding": "token_layernorm",
}


def as_head(own):
    """The tensors `mtp.*` of a checkpoint under the names of the package, which has the experts in one tensor."""
    made, experts = {}, {}
    for key, value in own.items():
        name, _, kind = key.rpartition(".")
        if ".experts." in key:
            at, _, rest = name.partition(".experts.")
            number, _, part = rest.partition(".")
            experts.setdefault(at, {}).setdefault(part, {})[int(number)] = value
        else:
            made[f"mtp_layers.0.{NAMES.get(name, name.removeprefix('mtp.layers.0.'))}.{kind}"] = value
    for at, parts in experts.items():
        gate, up, down = (
            torch.stack([each[n] for n in sorted(each)])
            for each in map(parts.get, ("gate_proj", "up_proj", "down_proj"))
        )
        there = f"mtp_layers.0.{at.removeprefix('mtp.layers.0.')}.experts"
        made |= {f"{there}.gate_up_proj": torch.cat([gate, up], 1), f"{there}.down_proj": down}
    return made
