"""Checkpoints of GPTQ, AWQ, compressed-tensors, bitsandbytes and MXFP4, read in their own numbers.

Matrices of the first four are those of `packed_weights`; gpt-oss's experts become blocks of GGUF files. Nothing is
rounded again, and the packages of these methods are not needed. What is not known here (other bits, other forms) is an
`UnreadError`, and transformers reads the checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor

from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.cache.windows import FULL, SLIDING
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.backend import LeanForward
from draftproof.backends.lean.checkpoint import Weights
from draftproof.backends.lean.traits import UnreadError
from draftproof.backends.loading.by_name import load_backend
from draftproof.backends.loading.gguf_model import FamilyDefaults, architecture_of, family_of, own_forward
from draftproof.backends.loading.gguf_rotary import own_frequencies
from draftproof.backends.loading.gguf_tensors import refuse_inexact, require_native
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.packed_layers import PackedLayers
from draftproof.backends.loading.packed_weights import METHODS, PackedWeights
from draftproof.backends.model_info import end_tokens
from draftproof.backends.new_weights import HEAD
from draftproof.backends.products.packed_linear import dense as dense_of
from draftproof.errors import UserError
from draftproof.files import read_object
from draftproof.native.ggml import MXFP4, StoredMatrix

_log = logging.getLogger(__name__)
_FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
"""Architectures of the other methods, mixtures included, and their names in GGUF."""
_MXFP4, _OSS = "mxfp4", "gpt_oss"
_KEYS = {
    "expert_weights_norm": "norm_topk_prob",
    "expert_used_count": "num_experts_per_tok",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
}


def read_packed(where: str, name: str, options: LoadOptions) -> SlotBackend | None:
    """The model in a checkpoint of one of the methods; None where it is another kind, or transformers reads it.

    A model that has no lean forward here is transformers' own with linear layers of ours.
    """
    config = _config(where)
    method = (config.get("quantization_config") or {}).get("quant_method")
    dtype = options.own_dtype(torch.bfloat16) if method in (*METHODS, _MXFP4) else None
    if dtype is None:
        return None
    try:
        if method == _MXFP4 or config.get("model_type") in _FAMILIES:
            return _read(_folder(where), name, config, dtype, options)
        layers = _layers(where, config, dtype, options)
    except UnreadError as cause:
        _log.warning("%s is read by transformers and the packages of %s: %s", name, method, cause)
        return None
    except (KeyError, OSError, SafetensorError, TypeError, ValueError) as cause:
        _log.warning("%s is read by transformers and the packages of %s: %s is missing or odd", name, method, cause)
        return None
    changed = replace(options, dtype=str(dtype).removeprefix("torch."), quantization_config=layers)
    made = load_backend(name, changed)
    if isinstance(made, HFBackend):
        made.prediction = layers.prediction
    return made


def _config(where: str) -> dict[str, Any]:
    """The config of a checkpoint; nothing where there is none, which transformers says better."""
    folder = Path(where)
    if folder.is_dir():
        return _json(folder / "config.json")
    from huggingface_hub import constants
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(where, "config.json", cache_dir=constants.HF_HUB_CACHE)
    except Exception:  # noqa: BLE001 - whatever the hub's library raises
        return {}
    return {} if found is None else _json(Path(found))


def _folder(where: str) -> Path:
    """The directory of a checkpoint, whose files are downloaded where it is a hub id."""
    if Path(where).is_dir():
        return Path(where)
    from huggingface_hub import constants, snapshot_download

    patterns = ["*.safetensors", "*.json"]
    return Path(snapshot_download(where, allow_patterns=patterns, cache_dir=constants.HF_HUB_CACHE))


def _layers(where: str, config: Mapping[str, Any], dtype: torch.dtype, options: LoadOptions) -> PackedLayers:
    """The packed matrices as linear layers for transformers' own model."""
    if options.backend != "auto":
        raise UnreadError(f"its architecture is {config.get('model_type')!r}, not one of {', '.join(_FAMILIES)}")
    require_native(dtype)
    fields, dense = config["quantization_config"], options.activations == "float"
    weights = PackedWeights(_folder(where), fields, dtype, dense=dense)
    if options.check:
        weights.check()
    return PackedLayers.of(where, weights)


def _read(folder: Path, name: str, config: Mapping[str, Any], dtype: torch.dtype, options: LoadOptions) -> LeanForward:
    kind, fields = config["model_type"], config["quantization_config"]
    if fields["quant_method"] == _MXFP4 and kind != _OSS:
        raise UnreadError(f"its architecture is {kind!r}, not {_OSS}")
    require_native(dtype)
    if config.get("use_sliding_window"):
        raise UnreadError("some of its layers have a window")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise UnreadError("some of its layers have no experts")
    if config.get("hidden_act", "silu") != "silu":
        raise UnreadError(f"its activation is {config['hidden_act']}")
    weights: PackedWeights | OssWeights
    if kind == _OSS:
        _check_oss(config)
        weights, family = OssWeights(folder, dtype, dense=options.activations == "float"), family_of("gpt-oss")
    else:
        weights = PackedWeights(folder, fields, dtype, dense=options.activations == "float")
        known = family_of(_FAMILIES[kind])
        family = FamilyDefaults(
            known.traits, window_of=lambda _: kind in ("mistral", "mixtral"), whole_shares=known.whole_shares
        )
    keys = ConfigKeys(config)
    architecture = architecture_of(keys, family, keys.factors)
    state = weights.state()
    if (HEAD in state) is bool(config.get("tie_word_embeddings")):
        raise UnreadError("its tensors name an output layer of its own, or lack it, other than the config says")
    if options.check:
        weights.check()
    generation = _json(folder / "generation_config.json")
    return own_forward(
        weights,
        architecture,
        state,
        name=name,
        dtype=dtype,
        bits=weights.bits,
        max_positions=config.get("max_position_embeddings"),
        eos_token_ids=end_tokens(generation.get("eos_token_id")) or end_tokens(config.get("eos_token_id")),
        bos_token_id=next(iter(end_tokens(config.get("bos_token_id"))), None),
        sampling_defaults={key: value for key, value in generation.items() if key != "transformers_version"},
    )


def _json(path: Path) -> dict[str, Any]:
    """A file of a checkpoint; nothing where there is none, or another kind of file."""
    try:
        return read_object(path, "a file of a checkpoint")
    except UserError:
        return {}


class ConfigKeys:
    """A config under the names that the metadata of GGUF files have (`gguf_model.Keys`)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._rope = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
        self._rope |= config.get("rope_parameters") or {}
        self._kind = self._rope.get("rope_type", self._rope.get("type", "default"))
        self._experts = config.get("num_local_experts", config.get("num_experts"))
        tensors = ["rope_freqs.weight"] if self._kind == "llama3" else []
        if self._experts and config.get("shared_expert_intermediate_size"):
            tensors += ["blk.0.ffn_gate_shexp.weight", "blk.0.ffn_gate_inp_shexp.weight"]
        self.tensors: dict[str, Any] = dict.fromkeys(tensors)

    def of_architecture(self, key: str, default: Any = None) -> Any:
        """A value by its name in GGUF."""
        known = {
            "expert_count": self._experts,
            "rope.freq_base": self._rope["rope_theta"],
            "rope.scaling.type": {"default": "none", "llama3": "none"}.get(self._kind, self._kind),
            "rope.scaling.factor": self._rope.get("factor"),
            "rope.scaling.original_context_length": self._rope.get("original_max_position_embeddings"),
            "rope.scaling.yarn_beta_fast": self._rope.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": self._rope.get("beta_slow"),
        }
        named = {"attention_factor", "mscale", "partial_rotary_factor"} & set(self._rope)
        if key == "rope.scaling.type" and named:
            raise UnreadError(f"its rotary embedding names {', '.join(sorted(named))}")
        found = known[key] if key in known else self._config.get(_KEYS.get(key, ""))
        return default if found is None else found

    def factors(self, _: str) -> Float[Tensor, " half"]:
        """What frequencies are divided by in Llama 3.1 and later.

        Source: transformers, modeling_rope_utils, the kind llama3.
        """
        width = self.of_architecture("embedding_length") // self.of_architecture("attention.head_count")
        plain = own_frequencies(float(self._rope["rope_theta"]), self.of_architecture("attention.key_length", width))
        low, high = float(self._rope["low_freq_factor"]), float(self._rope["high_freq_factor"])
        turns = self._rope["original_max_position_embeddings"] * plain / (2 * torch.pi)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        divided: Tensor = (1 - smooth) / float(self._rope["factor"]) + smooth
        return 1 / divided


class OssWeights(Weights):
    """The tensors of a gpt-oss checkpoint with experts in MXFP4, under the names that the lean forward has for them."""

    bits = 4

    def __init__(self, folder: Path, dtype: torch.dtype, *, dense: bool) -> None:
        super().__init__(folder, dtype, torch.device("cpu"))
        self._dense = dense
        self._places = {name: (place, part) for place in self._files for name, part in _names_in_oss(place)}

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __getitem__(self, name: str) -> Any:
        """A tensor; the weights of experts are a matrix of few bits."""
        place, part = self._places[name]
        if not place.endswith(_BLOCKS):
            return super().__getitem__(place)[..., part]
        made = self._matrix(name)
        return dense_of(made).view(self._shape(name)) if self._dense else made

    def state(self) -> dict[str, torch.Tensor]:
        """Empty tensors with the shapes of all weights, under the lean forward's names."""
        return {name: torch.empty(self._shape(name), device="meta") for name in self._places}

    def check(self) -> None:
        """Compare native products with the weights of experts with torch's."""
        refuse_inexact(self._matrix("model.layers.0.mlp.experts.down_proj.weight"))

    def _shape(self, name: str) -> tuple[int, ...]:
        place, part = self._places[name]
        shape = self._files[place].get_slice(place).get_shape()
        if place.endswith(_BLOCKS):
            experts, outs, groups, size = shape
            return experts, len(range(outs)[part]), 2 * groups * size
        return *shape[:-1], len(range(shape[-1])[part])

    def _matrix(self, name: str) -> StoredMatrix:
        """All experts' outputs: a byte has two neighbours in this form, and numbers 16 apart in GGUF's."""
        place, part = self._places[name]
        packed, scales = (
            self._files[each].get_tensor(each)[:, part] for each in (place, place.replace(_BLOCKS, _SCALES))
        )
        numbers = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
        content = torch.cat((scales.unsqueeze(-1), numbers[..., :16] | numbers[..., 16:] << 4), -1)
        experts, outs, ins = self._shape(name)
        return StoredMatrix(content.flatten(), experts * outs, ins, MXFP4, self._dtype)


_BLOCKS, _SCALES = "_proj_blocks", "_proj_scales"


def _names_in_oss(place: str) -> list[tuple[str, slice]]:
    """What the lean forward calls a tensor of a checkpoint, or each part of its outputs: gates and ups take turns."""
    if ".mlp.experts." not in place:
        return [(place.replace(".mlp.router.", ".mlp.gate.").replace(".sinks", ".sinks.weight"), slice(None))]
    stem, _, kind = place.rpartition("_")
    if kind == "scales":
        return []
    name = f"{stem}.{'weight' if kind == 'blocks' else kind}"
    if "gate_up" not in name:
        return [(name, slice(None))]
    return [(name.replace("gate_up", half), slice(first, None, 2)) for first, half in enumerate(("gate", "up"))]


def _check_oss(config: Mapping[str, Any]) -> None:
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers", 0)
    if kinds is not None and kinds != [(SLIDING, FULL)[number % 2] for number in range(layers)]:
        raise UnreadError("its layers with a window are not every second one")
    if (config.get("swiglu_alpha", 1.702), config.get("swiglu_limit", 7.0)) != (1.702, 7.0):
        raise UnreadError("its gates have other numbers than gpt-oss's")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("truncate", True):
        raise UnreadError("its rotary embedding has whole bounds, other than gpt-oss's")
