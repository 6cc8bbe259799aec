"""Models in GGUF files, read by the lean forward in the file's own numbers, without transformers.

Metadata say what a config says elsewhere, under other names; what they leave out is in `_FAMILIES`. A type of tensor, a
kind of rotary embedding or an architecture that is not known here is an `UnreadError`, and transformers reads the file.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.cache.windows import FULL, SLIDING
from draftproof.backends.heads.published.files import CONFIG, DRAFTERS
from draftproof.backends.lean.backend import LeanForward
from draftproof.backends.lean.checkpoint import Architecture, TensorsByName
from draftproof.backends.lean.traits import LLAMA, Traits, UnreadError
from draftproof.backends.loading.gguf_families import ARCHITECTURES
from draftproof.backends.loading.gguf_modules import read_modules
from draftproof.backends.loading.gguf_rotary import (
    FACTORS,
    LONG,
    SHORT,
    Frequencies,
    ModelMetadata,
    frequencies,
    longest,
    own_frequencies,
    padded,
    switches_at,
)
from draftproof.backends.loading.gguf_tensors import FileTensors, dtype_of, experts_of, named, single
from draftproof.backends.loading.options import ACTIVATIONS, LoadOptions
from draftproof.backends.model_info import ModelInfo
from draftproof.backends.new_weights import EMBEDDING, mismatch
from draftproof.errors import UserError
from draftproof.models.gguf_file import GGUFFile, TensorEntry, generation_config
from draftproof.models.gguf_roles import end_tokens
from draftproof.native.operations import Operations
from draftproof.native.threads import limit_threads
from draftproof.progress import bar, silent

_log = logging.getLogger(__name__)
_LARGE = 1 << 30  # bytes of a file from which on reading takes seconds
_FEW_BITS = 8  # of a weight, on the mean: products with such weights round their inputs to 8 bits
_SCALED_BY_TRANSFORMERS = ("gpt-oss",)  # architectures whose `rope.scaling` transformers reads
_FULL = "the weights of %s are read as full ones, by transformers: %s"

_BEFORE, _BETWEEN = "input_layernorm", "post_attention_layernorm"
_GEMMA_NORMS = (_BEFORE, _BETWEEN, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    _BEFORE: "attn_norm",
    _BETWEEN: "ffn_norm",
}


@dataclass(frozen=True)
class FamilyDefaults:
    """What an architecture's metadata do not say."""

    traits: Traits = LLAMA  # how layers are read; factors and angles come from the metadata
    # whether rows of queries and keys are stored so that numbers that are turned together are neighbours
    permuted: bool = False
    neighbours: bool = False  # whether numbers that are turned together are neighbours in the weights themselves
    names: tuple[tuple[str, str], ...] = ()  # of tensors in a layer, where they differ from `_IN_LAYER`
    gemma: bool = False  # embeddings are scaled by the root of their width, and norms are stored with 1 added
    window_of: Callable[[int], bool] | None = None  # whether a layer has a window, by its number
    local_base: float | None = None  # base of the angles in layers with a window, where it is another one
    turns: Callable[[int], bool] | None = None  # whether a layer turns queries and keys, by its number
    whole_shares: bool = True  # whether the shares of a token's experts add up to 1
    whole_pairs: bool = True  # whether YaRN's bounds between high and low frequencies are whole numbers


_TURNED = ("q_norm", "k_norm")
_POST = ((_BETWEEN, "post_attention_norm"), (_GEMMA_NORMS[2], "ffn_norm"), (_GEMMA_NORMS[3], "post_ffw_norm"))
_GEMMA = Traits(norms=_GEMMA_NORMS, activation="gelu_tanh", offset=1.0)
_FAMILIES = {
    "llama": FamilyDefaults(permuted=True),
    "qwen2": FamilyDefaults(),
    "qwen2moe": FamilyDefaults(whole_shares=False),
    "qwen3": FamilyDefaults(Traits(turned=_TURNED)),
    "qwen3moe": FamilyDefaults(Traits(turned=_TURNED)),
    "gemma2": FamilyDefaults(_GEMMA, names=_POST, gemma=True, window_of=lambda number: number % 2 == 0),
    "gemma3": FamilyDefaults(
        replace(_GEMMA, turned=_TURNED),
        names=_POST,
        gemma=True,
        window_of=lambda number: number % 6 != 5,
        local_base=10000.0,
    ),
    "gpt-oss": FamilyDefaults(
        Traits(activation="clamped", sinks=True),
        names=((_BETWEEN, "post_attention_norm"),),
        window_of=lambda number: number % 2 == 0,
        whole_pairs=False,
    ),
    "granite": FamilyDefaults(permuted=True),
    "granitemoe": FamilyDefaults(permuted=True),
    "smollm3": FamilyDefaults(permuted=True, turns=lambda number: number % 4 != 3),
    "olmo2": FamilyDefaults(
        Traits(norms=(None, _BETWEEN, None, _GEMMA_NORMS[3]), turned=_TURNED, whole=True),
        names=((_BETWEEN, "post_attention_norm"), (_GEMMA_NORMS[3], "post_ffw_norm")),
    ),
    "olmoe": FamilyDefaults(Traits(turned=_TURNED, whole=True), whole_shares=False),
    "phi3": FamilyDefaults(Traits(qkv=("qkv_proj",), gate_up=("gate_up_proj",)), window_of=lambda _: True),
    "glm4": FamilyDefaults(
        Traits(norms=(_BEFORE, "post_self_attn_layernorm", _BETWEEN, "post_mlp_layernorm"), gate_up=("gate_up_proj",)),
        neighbours=True,
        names=(("post_self_attn_layernorm", "post_attention_norm"), ("post_mlp_layernorm", "post_ffw_norm")),
    ),
}
FAMILIES = tuple(_FAMILIES)


def refuse_head(file: GGUFFile, name: str) -> None:
    """Refuse a file that says by its architecture that it is a draft head, not a model."""
    architecture = str(file.get("general.architecture"))
    said = architecture.lower().replace("_", "-")
    kinds = [each for each in DRAFTERS if said.startswith(each) or said.endswith(f"-{each}")]
    if kinds:
        kind = max(kinds, key=len)  # of dflash and dflash2 the one that is named
        raise UserError(
            f"expected a .gguf file of a model (architecture {', '.join((*FAMILIES, *ARCHITECTURES))}), got {name!r}, "
            f"a draft head of architecture {architecture!r}: heads are not read from .gguf files (name the head's "
            f"directory or hub id, with {CONFIG} and safetensors, as the draft, or as drafter {kind}:HEAD)"
        )


def in_own_numbers(file: GGUFFile, name: str, options: LoadOptions) -> SlotBackend | None:
    """The model in a file with the file's own numbers; None where transformers reads it, which is said.

    Raises:
        UserError: transformers would read it otherwise than it is: a mixture of experts that is not known here, or
            angles that are scaled, since it does not read all such metadata.
    """
    limit_threads()
    kinds = ARCHITECTURES.get(file.get("general.architecture"))
    read = read_model if kinds is None else partial(read_modules, backend=options.backend)
    kinds = kinds or (LeanForward.kind,)
    dtype = options.own_dtype(dtype_of(file), kinds)
    if dtype is None:
        why = (
            f"its own numbers need a CPU, backend auto or {' or '.join(kinds)}, dtype auto, float32 or bfloat16, "
            "and no options that alter the model"
        )
        _leave_to_transformers(file, name, why)
        return None
    large = sum(entry.nbytes for entry in file.tensors.values()) > _LARGE
    watch = bar if large and sys.stderr is not None and sys.stderr.isatty() else silent
    try:
        with watch(f"reading {name}", len(file.tensors), 0) as tick:
            made = read(file, name=name, dtype=dtype, activations=options.activations, check=options.check, tick=tick)
    except UnreadError as cause:
        if file.of_architecture("expert_count"):
            raise UserError(
                f"the mixture of experts in {name} is not read here: {cause}; and transformers does not read all that "
                "such a file says: take the model's own directory or hub id"
            ) from cause
        _leave_to_transformers(file, name, str(cause))
        return None
    if options.kv_dtype == "auto" and options.activations == "int8" and _stores_halves(made):
        made.store_kv(torch.bfloat16)
    return made


def _stores_halves(made: SlotBackend) -> bool:
    """Whether keys and values are bfloat16 by default: where inputs of products are rounded to far fewer bits."""
    bits = made.facts.bits
    return made.stores_kv and made.dtype == torch.float32 and bits is not None and bits <= _FEW_BITS


def _leave_to_transformers(file: GGUFFile, name: str, why: str) -> None:
    """Say that transformers reads a file, unless it would lose what the angles of the model are."""
    scaled = [each for each in FACTORS if each in file.tensors]
    kind = file.of_architecture("rope.scaling.type", "none")
    if kind != "none" and file.get("general.architecture") not in _SCALED_BY_TRANSFORMERS:
        scaled.append(f"rope.scaling.type {kind}")
    if scaled:
        raise UserError(
            f"{name} cannot be read: {why}; and transformers, which reads such files as full weights, ignores its "
            f"{', '.join(scaled)}, so that angles would be wrong: load it without these options, or take the model's "
            "own directory or hub id"
        )
    _log.warning(_FULL, name, why)


def read_model(
    file: GGUFFile,
    *,
    name: str,
    dtype: torch.dtype,
    activations: str = ACTIVATIONS[0],
    check: bool = True,
    tick: Callable[[int], object] | None = None,
) -> LeanForward:
    """The model in a file, with its own numbers.

    With activations "int8" the inputs of products are rounded to 8 bits, in groups of 32; "float" multiplies the same
    weights without that, as a reference, and they take the memory of `dtype` then. With `check`, a product of each type
    is compared with torch's. `tick` is told how many tensors were read.
    """
    weights = _FileWeights(file, dtype, dense=activations == "float")
    architecture = architecture_of(file, weights.family, weights.floats)
    state = weights.state(architecture)
    if EMBEDDING not in state:
        raise UnreadError("it has no token_embd.weight")
    if check:
        weights.check()
    weights.tick = tick
    return own_forward(
        weights,
        architecture,
        state,
        name=name,
        dtype=dtype,
        bits=weights.bits,
        max_positions=longest(file),
        eos_token_ids=end_tokens(file),
        bos_token_id=file.get("tokenizer.ggml.bos_token_id"),
        sampling_defaults=generation_config(file),
    )


def own_forward(
    weights: TensorsByName, architecture: Architecture, state: Mapping[str, Any], **facts: Any
) -> LeanForward:
    """The lean forward over weights in their own numbers, which `state` has by name, with their shapes.

    The other facts are fields of `ModelInfo` that the weights do not say.

    Raises:
        UnreadError: other tensors than the architecture has.
    """
    vocab, hidden = state[EMBEDDING].shape
    problem = mismatch({key: each.shape for key, each in state.items()}, architecture.shapes(state, hidden, vocab))
    if problem is not None:
        raise UnreadError(f"its tensors {problem}")
    found = ModelInfo(
        vocab_size=vocab, hidden_size=hidden, layers=architecture.layers, device=torch.device("cpu"), **facts
    )
    return LeanForward(found, architecture.lean_from(weights))


def family_of(name: str) -> FamilyDefaults:
    """What the metadata of an architecture do not say."""
    return _FAMILIES[name]


def architecture_of(keys: ModelMetadata, family: FamilyDefaults, floats: Callable[[str], Tensor]) -> Architecture:
    """What the lean forward needs besides weights; `floats` reads a tensor by its name in the file."""
    of = keys.of_architecture
    layers = int(named(keys, "block_count")) - int(of("nextn_predict_layers", 0))
    width = named(keys, "embedding_length")
    heads = single(named(keys, "attention.head_count"), "heads")
    key_heads = single(of("attention.head_count_kv", heads), "key heads")
    dim = of("attention.key_length", width // heads)
    if of("attention.value_length", dim) != dim:
        raise UnreadError("its values have another size than its keys")
    if family.traits.sinks and not Operations.attends(dim):
        raise UnreadError(f"its heads have {dim} numbers and sinks, which native attention does not take")
    eps = float(named(keys, "attention.layer_norm_rms_epsilon"))
    window = of("attention.sliding_window")
    windowed = [bool(window and family.window_of and family.window_of(number)) for number in range(layers)]
    angles, angles_of = _angles(keys, family, dim, windowed, floats)
    length = switches_at(keys)
    long_angles = _angles(keys, family, dim, windowed, floats, factors=LONG)[0] if length else ()
    traits = replace(
        family.traits,
        experts=experts_of(keys, whole=family.whole_shares) if of("expert_count") else None,
        embedding=math.sqrt(width) if family.gemma else 1.0,
        entering=float(of("embedding_scale", 1.0)),
        residual=float(of("residual_scale", 1.0)),
        divisor=float(of("logit_scale", 1.0)),
        logit_cap=float(of("final_logit_softcapping", 0.0)),
        cap=float(of("attn_logit_softcapping", 0.0)),
        order=_order(dim, of("rope.dimension_count", dim), neighbours=family.neighbours),
        angles=angles,
        angles_of=angles_of,
        long_angles=long_angles,
        length=length,
    )
    kinds = [SLIDING if each else FULL for each in windowed]
    return Architecture(
        layers=layers,
        heads=heads,
        key_heads=key_heads,
        head_dim=dim,
        scaling=float(of("attention.scale", 0.0)) or _scaling(family, dim, width, heads, layers),
        eps=eps,
        traits=traits,
        kinds=tuple(sorted(set(kinds))),
        window=window if any(windowed) else None,
        layer_kinds=tuple(kinds) if len(set(kinds)) > 1 else None,
    )


def _scaling(family: FamilyDefaults, dim: int, width: int, heads: int, layers: int) -> float:
    """The factor of scores: Gemma's models of 27 B, which only their depth tells, have one of their own."""
    big = family.gemma and layers == {True: 62, False: 46}[family.local_base is not None]
    return float((width // heads if big else dim) ** -0.5)


def _angles(
    keys: ModelMetadata,
    family: FamilyDefaults,
    dim: int,
    windowed: list[bool],
    floats: Callable[[str], Tensor],
    *,
    factors: str = SHORT,
) -> tuple[tuple[Frequencies, ...], tuple[int, ...]]:
    """Frequencies of each kind of rotary embedding, and the kind of each layer."""
    of = keys.of_architecture
    whole = frequencies(keys, dim, floats, whole_pairs=family.whole_pairs, factors=factors)
    found, angles_of = [whole], [0] * len(windowed)
    if family.local_base is not None:
        local = float(of("rope.freq_base_swa", family.local_base))
        found.append((padded(own_frequencies(local, of("rope.dimension_count", dim)), dim), 1.0))
        angles_of = [int(each) for each in windowed]
    if family.turns is not None:
        found.append(((0.0,) * (dim // 2), 1.0))
        angles_of = [0 if family.turns(number) else len(found) - 1 for number in range(len(windowed))]
    used = sorted(set(angles_of))
    return tuple(found[each] for each in used), tuple(used.index(each) for each in angles_of)


def _order(dim: int, turned: int, *, neighbours: bool) -> tuple[int, ...]:
    """Order of a head's rows in which `Traits.order` turns pairs; empty where it is that of the file."""
    low = range(0, turned, 2) if neighbours else range(turned // 2)
    high = range(1, turned, 2) if neighbours else range(turned // 2, turned)
    rest = range(turned, dim)
    made = (*low, *rest[: len(rest) // 2], *high, *rest[len(rest) // 2 :])
    return () if made == tuple(range(dim)) else made


class _FileWeights(FileTensors, TensorsByName):
    """The tensors of a file under transformers' names."""

    def __init__(self, file: GGUFFile, dtype: torch.dtype, *, dense: bool) -> None:
        name = file.get("general.architecture")
        if name not in _FAMILIES:
            raise UnreadError(f"its architecture is {name!r}, not one of {', '.join((*_FAMILIES, *ARCHITECTURES))}")
        super().__init__(file, dtype, dense=dense)
        self.family = _FAMILIES[name]
        self._names = {**_IN_LAYER, **dict(self.family.names)}

    def state(self, architecture: Architecture) -> dict[str, TensorEntry]:
        """All tensors but rotary factors and prediction layers, under transformers' names where they have one."""
        traits = architecture.traits
        parts = [f"{part}.{name}" for part, names in traits.linear.items() for name in names]
        parts += [*filter(None, traits.norms), *(f"self_attn.{name}" for name in traits.turned)]
        parts += ["self_attn.sinks"] if traits.sinks else []
        stems = [*_TOP, *(f"model.layers.{number}.{part}" for number in range(architecture.layers) for part in parts)]
        names = {self._place(f"{stem}.{kind}"): f"{stem}.{kind}" for stem in stems for kind in ("weight", "bias")}
        left = self.file.prediction_layers
        return {
            names.get(place, place): entry
            for place, entry in self.file.tensors.items()
            if place not in FACTORS and not place.startswith(left)
        }

    def _place(self, name: str) -> str:
        stem, _, suffix = name.rpartition(".")
        if stem in _TOP:
            return f"{_TOP[stem]}.{suffix}"
        _, _, number, part = stem.split(".", 3)
        return f"blk.{number}.{self._names[part]}.{suffix}"

    def entry(self, name: str) -> TensorEntry:
        return self.file.tensors[self._place(name)]

    def __contains__(self, name: str) -> bool:
        return self._place(name) in self.file.tensors

    def __getitem__(self, name: str) -> Any:
        """The tensor; a matrix of blocks stays in the file."""
        place = self._place(name)
        if self.family.gemma and name.endswith("norm.weight"):
            return (self.floats(place) - 1.0).to(self._dtype)  # `Traits.offset`
        return self.matrix(place, self._rows(name))

    def _rows(self, name: str) -> Tensor | None:
        """Which rows of a tensor of the file are the outputs of queries or keys, in transformers' order."""
        part = name.split(".")[-2]
        if not self.family.permuted or part not in ("q_proj", "k_proj"):
            return None
        of = self.file.of_architecture
        heads = of("attention.head_count")
        count = single(heads if part == "q_proj" else of("attention.head_count_kv", heads), "heads")
        outs = self.entry(name).shape[0]
        return torch.arange(outs).view(count, outs // count // 2, 2).transpose(1, 2).flatten()
