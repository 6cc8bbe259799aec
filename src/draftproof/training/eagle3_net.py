"""The networks of EAGLE-3 and P-EAGLE heads while they are trained, and their directory as `speculators` has it.

They read the target's hidden states of several layers, which one product fuses, and have one Llama layer whose
attention reads them beside the embedding (EAGLE-3, arXiv 2503.01840). `backends.heads.published` runs the results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import silu
from typing_extensions import override

from draftproof.backends.heads.feature_net import EPS, Attend, FeatureConfig, HeadModule, rotate
from draftproof.errors import UserError
from draftproof.files import write_json
from draftproof.heads import CONFIG, WEIGHTS

_VERSION = "0.9.0"  # of the package whose layout this is


class Eagle3Module(HeadModule):
    """An EAGLE-3 head with one layer, which reads the hidden states of some layers of the target.

    The window of its config is that of training; the written head has none.

    Attributes:
        first_place: the first token of a text is left out, since no state comes before it.
        algorithm, architecture: their names in the written config.
        places: number of drafted tokens that the written config proposes.
    """

    first_place = 1
    algorithm, architecture = "eagle3", "Eagle3Speculator"
    places = 4

    def __init__(self, config: FeatureConfig, layers: tuple[int, ...]) -> None:
        super().__init__(config)
        self.layers = layers
        width, inner = config.hidden_size, config.inner_size
        keys = config.key_heads * self.head_dim
        self.fc = nn.Linear(len(layers) * width, width, bias=False)
        self.input_layernorm = nn.Parameter(torch.ones(width))
        self.hidden_norm = nn.Parameter(torch.ones(width))
        self.post_attention_layernorm = nn.Parameter(torch.ones(width))
        self.norm = nn.Parameter(torch.ones(width))
        self.q_proj = nn.Linear(2 * width, width, bias=False)
        self.k_proj = nn.Linear(2 * width, keys, bias=False)
        self.v_proj = nn.Linear(2 * width, keys, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self._add_output()

    @override
    def entered(
        self, states: Float[Tensor, "rows width dim"], features: Float[Tensor, "rows width inner"] | None
    ) -> Float[Tensor, "rows width dim"]:
        assert features is not None, "states of several layers were kept for it"
        made: Tensor = self.fc(features.to(self.fc.weight.dtype))
        return made.to(states.dtype) if torch.is_autocast_enabled() else made

    @override
    def predicted(self, out: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        return self._norm(self.norm, out)

    def own_config(self) -> dict[str, Any]:
        """Fields of the written config besides those of an EAGLE-3 head."""
        return {}

    def own_tensors(self) -> dict[str, Tensor]:
        """Written tensors besides those of an EAGLE-3 head."""
        return {}

    @override
    def forward(
        self,
        states: Float[Tensor, "rows width dim"],
        embedded: Float[Tensor, "rows width dim"],
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Float[Tensor, "rows width dim"]:
        """The output is not normed, and takes the place of the fused states."""
        hidden = self._norm(self.hidden_norm, states)
        both = torch.cat([self._norm(self.input_layernorm, embedded), hidden], -1)
        queries = rotate(self._heads(self.q_proj(both)), rotary)
        found = attend(queries, rotate(self._heads(self.k_proj(both)), rotary), self._heads(self.v_proj(both)))
        x = hidden + self.o_proj(found.transpose(1, 2).flatten(2))
        h = self._norm(self.post_attention_layernorm, x)
        made: Tensor = x + self.down_proj(silu(self.gate_proj(h)) * self.up_proj(h))
        return made


class PEagleModule(Eagle3Module):
    """A P-EAGLE head with one layer, which drafts all tokens in one pass.

    After the known tokens come masked places. They all read one mask token, and one learned vector in place of the
    target's states; each sees the known tokens and the masked places before it. The unrolled steps of the loss are
    these places, so nothing is drafted in training and every place is learnt at every position of a text.

    Args:
        config, layers: as `Eagle3Module`.
        mask_token: the token that masked places read, one that no draft continues; its embedding is not trained.
        places: number of tokens that the head drafts.
    """

    algorithm, architecture = "peagle", "PEagleSpeculator"

    def __init__(self, config: FeatureConfig, layers: tuple[int, ...], *, mask_token: int, places: int) -> None:
        super().__init__(config, layers)
        self.mask_token = mask_token
        self.places = places
        self.mask_hidden = nn.Parameter(torch.randn(len(layers) * config.hidden_size))

    @override
    def carried(self, out: Float[Tensor, "rows width dim"], ids: Int[Tensor, "rows width"]) -> tuple[Tensor, Tensor]:
        """What every masked place reads."""
        mask: Tensor = self.fc(self.mask_hidden)
        return mask.to(out.dtype).expand_as(out), torch.full_like(ids, self.mask_token)

    @override
    def own_config(self) -> dict[str, int]:
        return {"mask_token_id": self.mask_token}

    @override
    def own_tensors(self) -> dict[str, Tensor]:
        return {"mask_hidden": self.mask_hidden.data.view(1, 1, -1)}


def default_layers(total: int) -> tuple[int, ...]:
    """A low, a middle and a high layer: those that the formats take where none are named, or others in small models."""
    for found in ((2, total // 2, total - 3), (1, total // 2, total - 1)):
        if 0 < found[0] < found[1] < found[2]:
            return found
    raise UserError(f"target of an EAGLE-3 head: expected 4 layers or more, of which it reads three, got {total}")


def save_eagle3(
    net: Eagle3Module,
    directory: Path,
    *,
    embedding: Float[Tensor, "vocab dim"],
    output: Float[Tensor, "ids dim"],
    architectures: list[str],
    max_positions: int,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a head into an existing directory, in the layout of `speculators`.

    Embedding, architectures and positions are the target's, and for a head without an output layer `output`: the rows
    of the target's for the head's tokens.
    """
    config, at = net.config, "layers.0."
    parts = {name: value.data for name, value in net.named_parameters()}
    tensors: dict[str, Tensor] = {
        "embed_tokens.weight": embedding,
        "fc.weight": parts["fc.weight"],
        "norm.weight": parts["norm"],
        "lm_head.weight": output if net.output is None else net.output.weight.data,
        **net.own_tensors(),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"{at}{name}.weight"] = parts[name]
    for owner, names in (
        ("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("mlp", ("gate_proj", "up_proj", "down_proj")),
    ):
        tensors |= {f"{at}{owner}.{name}.weight": parts[f"{name}.weight"] for name in names}
    tensors = {name: value.to("cpu", dtype).contiguous() for name, value in tensors.items()}
    if config.ids < config.vocab_size:
        mask = torch.zeros(config.vocab_size, dtype=torch.bool)
        mask[net.ids.cpu()] = True
        tensors |= {"t2d": mask, "d2t": net.ids.cpu() - torch.arange(config.ids)}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    write_json(directory / CONFIG, _config(net, architectures, max_positions, dtype))


def _config(net: Eagle3Module, architectures: list[str], max_positions: int, dtype: torch.dtype) -> dict[str, Any]:
    config = net.config
    return {
        "architectures": [net.architecture],
        "speculators_model_type": net.algorithm,
        "speculators_version": _VERSION,
        "draft_vocab_size": config.ids,
        "norm_before_residual": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(net.layers),
        "tie_word_embeddings": False,
        **net.own_config(),
        "dtype": str(dtype).removeprefix("torch."),
        "speculators_config": {
            "algorithm": net.algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": net.places}],
            "verifier": {"name_or_path": config.target, "architectures": architectures},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.inner_size,
            "num_hidden_layers": 1,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.key_heads,
            "head_dim": net.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": EPS,
            "max_position_embeddings": max_positions,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        },
    }
