"""Models in GGUF files, read by the lean forward in the file's own numbers, without transformers.

Metadata say what a config says elsewhere, under other names; what they leave out is in `_FAMILIES`. A type of tensor, a
kind of rotary embedding or an architecture that is not known here is an `UnreadError`, and transformers reads the file.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftproof import native
from draftproof.backends.cache.windows import FULL, SLIDING
from draftproof.backends.lean.backend import LeanForward
from draftproof.backends.lean.checkpoint import Architecture
from draftproof.backends.lean.traits import LLAMA, Experts, Traits, UnreadError
from draftproof.backends.loading.gguf_rotary import (
    FACTORS,
    Frequencies,
    Keys,
    frequencies,
    longest,
    own_frequencies,
    padded,
)
from draftproof.backends.loading.options import ACTIVATIONS, LoadOptions
from draftproof.backends.model_info import ModelInfo
from draftproof.backends.new_weights import misfit
from draftproof.backends.products.packed_linear import dense, why_not_exact
from draftproof.errors import UserError
from draftproof.models.gguf_file import FLOATS, GGUFFile, TensorEntry, generation_config
from draftproof.native.ggml import TYPES, StoredMatrix
from draftproof.native.operations import MOST_EXPERTS, Operations

_log = logging.getLogger(__name__)

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
_SOFTMAX, _SOFTMAX_OF_CHOSEN = 1, 3  # kinds of routers, by the number that files have for them
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>")
"""Texts of tokens that end an answer, as llama.cpp collects them, besides those that metadata name."""


@dataclass(frozen=True)
class Family:
    """What an architecture's metadata do not say.

    Attributes:
        traits: how layers are read; factors and angles come from the metadata.
        permuted: whether rows of queries and keys are stored so that numbers that are turned together are neighbours.
        neighbours: whether numbers that are turned together are neighbours in the weights themselves.
        names: of tensors in a layer, where they differ from `_IN_LAYER`.
        gemma: embeddings are scaled by the root of their width, and norms are stored with 1 added.
        window_of: whether a layer has a window, by its number.
        local_base: base of the angles in layers with a window, where it is another one.
        turns: whether a layer turns queries and keys, by its number.
        whole_shares: whether the shares of a token's experts add up to 1.
        whole_pairs: whether YaRN's bounds between high and low frequencies are whole numbers.
    """

    traits: Traits = LLAMA
    permuted: bool = False
    neighbours: bool = False
    names: tuple[tuple[str, str], ...] = ()
    gemma: bool = False
    window_of: Callable[[int], bool] | None = None
    local_base: float | None = None
    turns: Callable[[int], bool] | None = None
    whole_shares: bool = True
    whole_pairs: bool = True


_TURNED = ("q_norm", "k_norm")
_POST = ((_BETWEEN, "post_attention_norm"), (_GEMMA_NORMS[2], "ffn_norm"), (_GEMMA_NORMS[3], "post_ffw_norm"))
_GEMMA = Traits(norms=_GEMMA_NORMS, activation="gelu_tanh", offset=1.0)
_FAMILIES = {
    "llama": Family(permuted=True),
    "qwen2": Family(),
    "qwen2moe": Family(whole_shares=False),
    "qwen3": Family(Traits(turned=_TURNED)),
    "qwen3moe": Family(Traits(turned=_TURNED)),
    "gemma2": Family(_GEMMA, names=_POST, gemma=True, window_of=lambda number: number % 2 == 0),
    "gemma3": Family(
        replace(_GEMMA, turned=_TURNED),
        names=_POST,
        gemma=True,
        window_of=lambda number: number % 6 != 5,
        local_base=10000.0,
    ),
    "gpt-oss": Family(
        Traits(activation="clamped", sinks=True),
        names=((_BETWEEN, "post_attention_norm"),),
        window_of=lambda number: number % 2 == 0,
        whole_pairs=False,
    ),
    "granite": Family(permuted=True),
    "granitemoe": Family(permuted=True),
    "smollm3": Family(permuted=True, turns=lambda number: number % 4 != 3),
    "olmo2": Family(
        Traits(norms=(None, _BETWEEN, None, _GEMMA_NORMS[3]), turned=_TURNED, whole=True),
        names=((_BETWEEN, "post_attention_norm"), (_GEMMA_NORMS[3], "post_ffw_norm")),
    ),
    "olmoe": Family(Traits(turned=_TURNED, whole=True), whole_shares=False),
    "phi3": Family(Traits(qkv=("qkv_proj",), gate_up=("gate_up_proj",)), window_of=lambda _: True),
    "glm4": Family(
        Traits(norms=(_BEFORE, "post_self_attn_layernorm", _BETWEEN, "post_mlp_layernorm"), gate_up=("gate_up_proj",)),
        neighbours=True,
        names=(("post_self_attn_layernorm", "post_attention_norm"), ("post_mlp_layernorm", "post_ffw_norm")),
    ),
}
FAMILIES = tuple(_FAMILIES)


def in_own_numbers(file: GGUFFile, name: str, options: LoadOptions) -> LeanForward | None:
    """The model in a file with the file's own numbers; None where transformers reads it, which is said.

    Args:
        file: opened.
        name: for errors and reports.
        options: how it is loaded.

    Raises:
        UserError: a mixture of experts that is not known here, since transformers does not read all its metadata.
    """
    dtype = options.own_dtype(torch.float32)
    if dtype is None:
        return None
    try:
        return read_model(file, name=name, dtype=dtype, activations=options.activations, check=options.check)
    except UnreadError as cause:
        if file.of_architecture("expert_count"):
            raise UserError(
                f"the mixture of experts in {name} is not read here: {cause}; and transformers does not read all that "
                "such a file says: take the model's own directory or hub id"
            ) from cause
        _log.warning("the weights of %s are read as full ones, by transformers: %s", name, cause)
        return None


def read_model(
    file: GGUFFile, *, name: str, dtype: torch.dtype, activations: str = ACTIVATIONS[0], check: bool = True
) -> LeanForward:
    """The model in a file, with its own numbers.

    Args:
        file: opened.
        name: for errors and reports.
        dtype: of hidden states, keys and values: float32 or bfloat16.
        activations: "int8" rounds the inputs of products to 8 bits, in groups of 32; "float" multiplies the same
            weights without that, as a reference: they take the memory of `dtype` then.
        check: compare a product of each type with torch's now.

    Raises:
        UnreadError: an architecture, a type or a kind of angle that is not known here, or native operations are off.
    """
    if native.operations_for(torch.empty(0, dtype=dtype)) is None:
        raise UnreadError(f"native operations are off or not available for {dtype} ({native.VARIABLE})")
    weights = _FileWeights(file, dtype, dense=activations == "float")
    architecture = architecture_of(file, weights.family, weights.floats)
    state = weights.state(architecture)
    if "model.embed_tokens.weight" not in state:
        raise UnreadError("it has no token_embd.weight")
    vocab, hidden = state["model.embed_tokens.weight"].shape
    problem = misfit({key: entry.shape for key, entry in state.items()}, architecture.shapes(state, hidden, vocab))
    if problem is not None:
        raise UnreadError(f"its tensors {problem}")
    if check:
        weights.check()
    facts = ModelInfo(
        name=name,
        vocab_size=vocab,
        hidden_size=hidden,
        layers=architecture.layers,
        max_positions=longest(file),
        dtype=dtype,
        device=torch.device("cpu"),
        bits=weights.bits,
        eos_token_ids=end_tokens(file),
        bos_token_id=file.get("tokenizer.ggml.bos_token_id"),
        sampling_defaults=generation_config(file),
    )
    return LeanForward(facts, architecture.lean_from(weights))


def end_tokens(file: GGUFFile) -> tuple[int, ...]:
    """Ids of the tokens that end a text: those that metadata name, and those with a text that is known for it."""
    named = (file.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    found = [int(each) for each in named if each is not None]
    tokens, kinds = file.get("tokenizer.ggml.tokens", []), file.get("tokenizer.ggml.token_type")
    if kinds is not None:
        control = np.flatnonzero(np.asarray(kinds)[: len(tokens)] == 3)
        special = {tokens[index]: int(index) for index in control}
        found += [special[text] for text in _ENDS if text in special]
    return tuple(dict.fromkeys(found))


def family_of(name: str) -> Family:
    """What the metadata of an architecture do not say."""
    return _FAMILIES[name]


def architecture_of(keys: Keys, family: Family, floats: Callable[[str], Tensor]) -> Architecture:
    """What the lean forward needs besides weights.

    Args:
        keys: of the model.
        family: of its architecture.
        floats: reads a tensor of floats by its name in the file.

    Raises:
        UnreadError: something that is not known here.
    """
    of = keys.of_architecture
    layers, width = _named(keys, "block_count"), _named(keys, "embedding_length")
    heads = _single(_named(keys, "attention.head_count"), "heads")
    key_heads = _single(of("attention.head_count_kv", heads), "key heads")
    dim = of("attention.key_length", width // heads)
    if of("attention.value_length", dim) != dim:
        raise UnreadError("its values have another size than its keys")
    if family.traits.sinks and not Operations.attends(dim):
        raise UnreadError(f"its heads have {dim} numbers and sinks, which native attention does not take")
    eps = float(_named(keys, "attention.layer_norm_rms_epsilon"))
    window = of("attention.sliding_window")
    windowed = [bool(window and family.window_of and family.window_of(number)) for number in range(layers)]
    angles, angles_of = _angles(keys, family, dim, windowed, floats)
    traits = replace(
        family.traits,
        experts=_experts(keys, family) if of("expert_count") else None,
        embedding=math.sqrt(width) if family.gemma else 1.0,
        entering=float(of("embedding_scale", 1.0)),
        residual=float(of("residual_scale", 1.0)),
        divisor=float(of("logit_scale", 1.0)),
        logit_cap=float(of("final_logit_softcapping", 0.0)),
        cap=float(of("attn_logit_softcapping", 0.0)),
        order=_order(dim, of("rope.dimension_count", dim), neighbours=family.neighbours),
        angles=angles,
        angles_of=angles_of,
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


def _named(keys: Keys, key: str) -> Any:
    """A value that must be there."""
    found = keys.of_architecture(key)
    if found is None:
        raise UnreadError(f"it does not name its {key}")
    return found


def _single(value: Any, what: str) -> int:
    """One number for all layers."""
    found = {int(each) for each in np.atleast_1d(np.asarray(value))}
    if len(found) != 1:
        raise UnreadError(f"its layers have {sorted(found)} {what}")
    return found.pop()


def _experts(keys: Keys, family: Family) -> Experts:
    """How the experts of a layer divide the work."""
    of = keys.of_architecture
    count, chosen = int(of("expert_count")), int(_named(keys, "expert_used_count"))
    if of("expert_gating_func", _SOFTMAX) not in (_SOFTMAX, _SOFTMAX_OF_CHOSEN):
        raise UnreadError("its experts are not chosen by a softmax")
    if any(of(key, 1) > 1 for key in ("expert_group_count", "interleave_moe_layer_step")):
        raise UnreadError("its experts are chosen from groups, or some of its layers have none")
    if not 1 <= chosen <= count <= MOST_EXPERTS:
        raise UnreadError(f"it chooses {chosen} of {count} experts, of at most {MOST_EXPERTS}")
    return Experts(
        count,
        chosen,
        whole=bool(of("expert_weights_norm", family.whole_shares)),
        factor=float(of("expert_weights_scale", 0.0)) or 1.0,
        shared="blk.0.ffn_gate_shexp.weight" in keys.tensors,
        weighed="blk.0.ffn_gate_inp_shexp.weight" in keys.tensors,
    )


def _scaling(family: Family, dim: int, width: int, heads: int, layers: int) -> float:
    """The factor of scores: Gemma's models of 27 B, which only their depth tells, have one of their own."""
    big = family.gemma and layers == {True: 62, False: 46}[family.local_base is not None]
    return float((width // heads if big else dim) ** -0.5)


def _angles(
    keys: Keys, family: Family, dim: int, windowed: list[bool], floats: Callable[[str], Tensor]
) -> tuple[tuple[Frequencies, ...], tuple[int, ...]]:
    """Frequencies of each kind of rotary embedding, and the kind of each layer."""
    of = keys.of_architecture
    found, angles_of = [frequencies(keys, dim, floats, whole_pairs=family.whole_pairs)], [0] * len(windowed)
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
    """See `Traits.order`."""
    low = range(0, turned, 2) if neighbours else range(turned // 2)
    high = range(1, turned, 2) if neighbours else range(turned // 2, turned)
    rest = range(turned, dim)
    made = (*low, *rest[: len(rest) // 2], *high, *rest[len(rest) // 2 :])
    return () if made == tuple(range(dim)) else made


class _FileWeights:
    """The tensors of a file under transformers' names (`TensorsByName`).

    Args:
        file: opened.
        dtype: of those that are no blocks.
        dense: whether matrices are read into memory, as the numbers that they stand for.

    Raises:
        UnreadError: an architecture or a type that is not known here.
    """

    def __init__(self, file: GGUFFile, dtype: torch.dtype, *, dense: bool) -> None:
        self._file = file
        self._dtype = dtype
        self._dense = dense
        name = file.get("general.architecture")
        if name not in _FAMILIES:
            raise UnreadError(f"its architecture is {name!r}, not one of {', '.join(_FAMILIES)}")
        self.family = _FAMILIES[name]
        self._names = {**_IN_LAYER, **dict(self.family.names)}
        unknown = {entry.type for entry in file.tensors.values()} - set(TYPES) - set(FLOATS)
        if unknown:
            raise UnreadError(f"it has tensors of ggml's types {sorted(unknown)}, which are not read here")
        if not any(entry.type in TYPES for entry in file.tensors.values()):
            raise UnreadError("its weights are not quantized")

    @property
    def bits(self) -> int:
        """Of a weight, on the mean, rounded down."""
        sizes = [
            (math.prod(entry.shape), TYPES[entry.type].size * 8 / TYPES[entry.type].elements)
            for entry in self._file.tensors.values()
            if entry.type in TYPES
        ]
        return int(sum(count * bits for count, bits in sizes) / sum(count for count, _ in sizes))

    def state(self, architecture: Architecture) -> dict[str, TensorEntry]:
        """All tensors but those of rotary factors, under transformers' names where they have one."""
        traits = architecture.traits
        parts = [f"{part}.{name}" for part, names in traits.linear.items() for name in names]
        parts += [*filter(None, traits.norms), *(f"self_attn.{name}" for name in traits.turned)]
        parts += ["self_attn.sinks"] if traits.sinks else []
        stems = [*_TOP, *(f"model.layers.{number}.{part}" for number in range(architecture.layers) for part in parts)]
        names = {self._place(f"{stem}.{kind}"): f"{stem}.{kind}" for stem in stems for kind in ("weight", "bias")}
        return {names.get(place, place): entry for place, entry in self._file.tensors.items() if place not in FACTORS}

    def check(self) -> None:
        """Compare native products of some rows of each type with torch's.

        Raises:
            UnreadError: they differ by more than rounding the inputs to 8 bits allows.
        """
        some = {entry.type: entry for entry in self._file.tensors.values() if entry.type in TYPES}
        for entry in some.values():
            why = why_not_exact(self._stored(entry))
            if why is not None:
                raise UnreadError(why)

    def _stored(self, entry: TensorEntry) -> StoredMatrix:
        if len(entry.shape) not in (2, 3):
            raise UnreadError(f"a tensor of {len(entry.shape)} dimensions has ggml's type {entry.type}")
        *outs, ins = entry.shape
        return StoredMatrix(entry.content, math.prod(outs), ins, entry.type, self._dtype, release=entry.release)

    def _place(self, name: str) -> str:
        """The name in the file."""
        stem, _, suffix = name.rpartition(".")
        if stem in _TOP:
            return f"{_TOP[stem]}.{suffix}"
        _, _, number, part = stem.split(".", 3)
        return f"blk.{number}.{self._names[part]}.{suffix}"

    def entry(self, name: str) -> TensorEntry:
        """Where a tensor lies.

        Raises:
            KeyError: it is not there.
        """
        return self._file.tensors[self._place(name)]

    def __contains__(self, name: str) -> bool:
        return self._place(name) in self._file.tensors

    def optional(self, name: str) -> Any:
        """The tensor, if it is there."""
        found = name in self
        return self[name] if found else None

    def __getitem__(self, name: str) -> Any:
        """The tensor; a matrix of blocks stays in the file."""
        entry, rows = self.entry(name), self._rows(name)
        if entry.type in TYPES:
            matrix = self._stored(entry)
            matrix = matrix if rows is None else matrix.in_order(rows)
            return dense(matrix).view(entry.shape) if self._dense else matrix
        made = self.floats(self._place(name))
        if self.family.gemma and name.endswith("norm.weight"):
            made = made - 1.0  # `Traits.offset`
        return (made if rows is None else made[rows]).to(self._dtype)

    def floats(self, place: str) -> Tensor:
        """A tensor of floats by its name in the file, in float32."""
        entry = self._file.tensors[place]
        if entry.type not in FLOATS:
            raise UnreadError(f"its {place} is of ggml's type {entry.type}")
        content = torch.frombuffer(
            entry.map, dtype=FLOATS[entry.type], count=math.prod(entry.shape), offset=entry.offset
        )
        return content.to(torch.float32, copy=True).view(entry.shape)

    def _rows(self, name: str) -> Tensor | None:
        """Which rows of a tensor of the file are the outputs of queries or keys, in transformers' order."""
        part = name.split(".")[-2]
        if not self.family.permuted or part not in ("q_proj", "k_proj"):
            return None
        of = self._file.of_architecture
        heads = of("attention.head_count")
        count = _single(heads if part == "q_proj" else of("attention.head_count_kv", heads), "heads")
        outs = self.entry(name).shape[0]
        return torch.arange(outs).view(count, outs // count // 2, 2).transpose(1, 2).flatten()
