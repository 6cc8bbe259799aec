"""Tiny random models of any architecture: sizes by the names of configuration fields, weights drawn from a seed."""

import copy
import dataclasses
import inspect
import re

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from support.architectures.overrides import OVERRIDES, each

VOCAB = 101
CONTEXT = 640
WINDOW = 20
MOST_PARAMETERS = 3_000_000


SIZES = {
    **each("vocab_size unpadded_vocab_size decoder_vocab_size vocab_size_per_layer_input", VOCAB),
    **each("hidden_size d_model n_embd embedding_size emb_dim embedding_dim word_embed_proj_dim lru_width", 64),
    **each(
        "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dff dim_ff d_inner ffn_hidden_size "
        "dense_intermediate_size intermediate_size_mlp feed_forward_size attention_hidden_size",
        96,
    ),
    **each(
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
        "moe_shared_expert_intermediate_size shared_experts_intermediate_size",
        48,
    ),
    **each(
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
        "num_encoder_layers num_blocks",
        2,
    ),
    **each(
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads "
        "num_decoder_attention_heads num_encoder_attention_heads linear_num_heads linear_num_value_heads",
        4,
    ),
    **each("num_key_value_heads num_kv_heads linear_num_key_heads index_n_heads", 2),
    **each(
        "head_dim d_head dim_head kv_channels index_head_dim v_head_dim qk_nope_head_dim linear_key_head_dim "
        "linear_value_head_dim linear_head_dim attention_head_size mamba_d_head mamba_head_dim chunk_size "
        "mamba_chunk_size o_lora_rank",
        16,
    ),
    **each(
        "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length max_target_positions",
        CONTEXT,
    ),
    **each(
        "sliding_window attention_chunk_size keep_window_size attention_window_size window_size local_attention "
        "sliding_window_size local_attention_window_len index_topk",
        WINDOW,
    ),
    **each("num_experts n_routed_experts num_local_experts moe_num_experts", 4),
    **each("num_experts_per_tok num_experts_per_token moe_topk moe_k", 2),
    **each("n_group topk_group num_expert_group n_groups mamba_n_groups mamba_ngroups", 1),
    **each("q_lora_rank kv_lora_rank", 32),
    **each(
        "qk_rope_head_dim mamba_d_state state_size ssm_state_size mamba_n_heads mamba_num_heads "
        "hidden_size_per_layer_input laurel_rank",
        8,
    ),
    **each("time_step_rank mamba_dt_rank", 4),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    **each("sep_token_id cls_token_id eod_token_id", 3),
}


def fields_of(kind):
    """Names that a configuration class takes."""
    declared = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    return declared | set(inspect.signature(kind).parameters)


def one_layer_of_each_kind(kind):
    """The shortest choice of layers of the default configuration that has every kind of attention and of MLP."""
    try:
        default = kind()
    except Exception:  # noqa: BLE001 - some classes have no default configuration
        return {}
    patterns = {name: getattr(default, name, None) for name in ("layer_types", "mlp_layer_types")}
    patterns = {name: list(found) for name, found in patterns.items() if found and name in fields_of(kind)}
    if not patterns:
        return {}
    seen, chosen = set(), []
    for layer, kinds in enumerate(zip(*patterns.values(), strict=False)):
        if not set(zip(patterns, kinds, strict=True)) <= seen:
            seen |= set(zip(patterns, kinds, strict=True))
            chosen.append(layer)
    if len(chosen) < 2:
        chosen = [0, 1]
    return {
        "num_hidden_layers": len(chosen),
        **{name: [kinds[layer] for layer in chosen] for name, kinds in patterns.items()},
    }


def tiny_fields(kind, changes):
    """The fields of a tiny configuration of a class: sizes by their names, then what the type needs, then changes."""
    names = fields_of(kind)
    made = {name: value for name, value in SIZES.items() if name in names}
    made |= one_layer_of_each_kind(kind)
    made |= copy.deepcopy(OVERRIDES.get(kind.model_type, {}))
    for name, inner in sub_configs(kind).items():
        if name not in made or isinstance(made[name], dict):
            made[name] = tiny_fields(inner, made.get(name, {})) | {"model_type": inner.model_type}
    for name, value in copy.deepcopy(changes).items():
        if isinstance(value, dict) and isinstance(made.get(name), dict) and name.endswith("_config"):
            made[name] |= value
        else:
            made[name] = value
    return {name: value for name, value in made.items() if value is not ...}


def sub_configs(kind):
    """The classes of the configurations inside one."""
    specs = kind.sub_configs_defaults
    return {
        name: CONFIG_MAPPING[specs[name].model_type] if inner is AutoConfig else inner
        for name, inner in kind.sub_configs.items()
    }


def tiny_config(model_type, **changes):
    """A tiny configuration of a model type; `changes` are fields on top, a dict for a configuration inside."""
    kind = CONFIG_MAPPING[model_type]
    return kind(**tiny_fields(kind, changes))


def tiny_model(config, seed=0):
    """A random model of a configuration in float32, always the same one for a seed.

    Weights are not the family's own initial ones, which make logits nearly uniform: a wrong mask or position must
    change them visibly.

    Raises:
        ValueError: the configuration is not tiny.
    """
    with torch.device("meta"):
        size = sum(weights.numel() for weights in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters are not tiny")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).eval()
    draw_weights(model, torch.Generator().manual_seed(seed))
    return model


def multimodal(model_type, **changes):
    """A tiny random model of text and images, always the same one; `changes` as of `tiny_config`."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = tiny_config(model_type, **changes)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    draw_weights(model, torch.Generator().manual_seed(0))
    return model


@torch.no_grad()
def draw_weights(model, source, gain=1.5):
    """Draw matrices so that outputs are `gain` times as large as inputs, and move vectors off their ones and zeros.

    Half of the weights of each norm are negative: with tied embeddings a model would otherwise repeat its last token.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for name, weights in model.named_parameters():
        if not weights.is_floating_point():
            continue
        noise = torch.randn(weights.shape, generator=source)
        if weights.dim() >= 2:
            weights.copy_(noise * (0.3 if id(weights) in embeddings else gain / weights.shape[-1] ** 0.5))
        elif re.search(r"(norm|ln)[^.]*\.weight$", name):
            centre = 0.0 if weights.abs().max() > 0 else 1.0  # some families add one to what they hold
            weights.copy_(noise.sign() * (1 + 0.2 * noise.abs()) - centre)
        else:
            weights.add_(0.1 * noise)
