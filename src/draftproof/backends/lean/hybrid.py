"""The lean forward of models with recurrent layers, over a transformers model whose weights stay where they are.

Layers have attention, a mixer that keeps a recurrent state, or both side by side, and then a gated part. A family says
under which names these are (`FamilyNames`); what a mixer is, its own parts say (`mixers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from draftproof import native
from draftproof.backends.cache.windows import FULL, RECURRENT, Windows
from draftproof.backends.lean.attention import Heads, NativeAttention
from draftproof.backends.lean.inputs import Joint, product_of_layer, whole_product
from draftproof.backends.lean.layers import Lean, Norm, WholeNorm, norm_of_heads
from draftproof.backends.lean.mixers import Mixer
from draftproof.backends.lean.mixture import Mixture, StoredMixture
from draftproof.backends.lean.mixture_modules import is_mixture, mixture_of
from draftproof.backends.lean.native_layers import NativeLayers
from draftproof.backends.lean.rotary import Rope, Rotary
from draftproof.backends.lean.traits import (
    Traits,
    UnreadError,
    activation_of,
    frequencies_of,
    is_hooked,
    kinds_of_rotary,
    offset_of,
    order_in_heads,
    padded_frequencies,
)
from draftproof.backends.products.packed_linear import PackedLinear


@dataclass(frozen=True)
class FamilyNames:
    """Names of a family's parts.

    Attributes:
        norms: of a layer, before attention or the mixer, and before the gated part.
        last: norm after all layers, in the model.
        mixer: what keeps a state.
        gated: the gated part.
        gates: its linear layers that read the same rows.
        down: its last linear layer.
        out: the last linear layer of attention.
        turned: norms of queries and keys.
        experts: a mixture of experts beside the gated part; one may also stand in its place.
        factors: names of the numbers by which something is multiplied, where a family has them: `entering` and
            `divisor` or `logits` (of the model), `residual`, `mixed` and `attended` (of what parts of a layer add),
            `attention` (of what it reads), `keys`, `gates` and `down`; each with the path from the model or the layer.
    """

    norms: tuple[str, str]
    last: str
    mixer: str
    gated: str
    gates: tuple[str, ...]
    down: str
    out: str = "o_proj"
    turned: tuple[str, ...] = ()
    experts: str = ""
    factors: Mapping[str, str] = field(default_factory=dict)


_PROJECTED = ("gate_proj", "up_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_ROTARY = ("rotary_emb", "pos_emb")  # names of what makes angles
FAMILIES = (
    FamilyNames(
        ("operator_norm", "ffn_norm"),
        "embedding_norm",
        "conv",
        "feed_forward",
        ("w1", "w3"),
        "w2",
        out="out_proj",
        turned=("q_layernorm", "k_layernorm"),
    ),
    FamilyNames(_NORMS, "norm", "linear_attn", "mlp", _PROJECTED, "down_proj", turned=("q_norm", "k_norm")),
    FamilyNames(
        _NORMS,
        "norm",
        "mamba",
        "shared_mlp",
        ("input_linear",),
        "output_linear",
        experts="block_sparse_moe",
        factors={
            "entering": "model.embedding_multiplier",
            "divisor": "config.logits_scaling",
            "residual": "residual_multiplier",
        },
    ),
    FamilyNames(
        ("input_layernorm", "pre_ff_layernorm"),
        "final_layernorm",
        "mamba",
        "feed_forward",
        _PROJECTED,
        "down_proj",
        factors={
            "entering": "model.embedding_multiplier",
            "logits": "model.lm_head_multiplier",
            "mixed": "ssm_out_multiplier",
            "attended": "attn_out_multiplier",
            "attention": "attention_in_multiplier",
            "keys": "self_attn.key_multiplier",
            "gates": "feed_forward.gate_multiplier",
            "down": "feed_forward.down_multiplier",
        },
    ),
)
"""LFM2; Qwen3-Next and Qwen3.5; Granite 4; Falcon-H1; and the first three with experts."""


def _family_of(inner: Any) -> FamilyNames:
    layers = inner._modules.get("layers") or ()  # noqa: SLF001 - has no public name
    names = {name for layer in layers for name, _ in layer.named_children()}
    for family in FAMILIES:
        layer = {*family.norms, family.mixer, family.gated}
        has_angles = any(hasattr(inner, name) for name in _ROTARY)
        if names - {"self_attn", family.experts} == layer and has_angles and _has(inner, family.last):
            return family
    raise UnreadError(f"its layers have parts that are not known together here ({', '.join(sorted(names))})")


class _Factors:
    """The numbers by which a model or a layer multiplies something; 1 where a family has none.

    Args:
        owner: of the numbers.
        family: says where they are.
    """

    def __init__(self, owner: Any, family: FamilyNames) -> None:
        self._owner = owner
        self._paths = family.factors

    def __getitem__(self, name: str) -> float:
        if name not in self._paths:
            return 1.0
        found = self._owner
        for part in self._paths[name].split("."):
            if not hasattr(found, part):
                raise UnreadError(f"its {type(found).__name__} has no {part}")
            found = getattr(found, part)
        return float(found)


class HybridLean(Lean):
    """The forward pass over a model with recurrent layers.

    Args:
        model: a transformers causal LM on the CPU, with weights of any form that has native products.
        windows: the kinds of attention mask that it builds.

    Attributes:
        layers: in order.
        mixers: what keeps recurrent states.

    Raises:
        UnreadError: a part that is not known here.
    """

    layers: list[Any]

    def __init__(self, model: Any, windows: Windows) -> None:
        hooked = next((name or "the model" for name, each in model.named_modules() if is_hooked(each)), None)
        if hooked is not None:
            raise UnreadError(f"hooks are attached to {hooked}")
        if not _has(model, "model"):
            raise UnreadError(f"{type(model).__name__} has parts that are not known together here")
        inner = model.model
        family = _family_of(inner)
        if windows.kinds - {FULL, *RECURRENT}:
            raise UnreadError(f"its attention is of kinds that are not known here ({', '.join(sorted(windows.kinds))})")
        last = getattr(inner, family.last)
        offset, factors = offset_of(last), _Factors(model, family)
        attentions = [layer.self_attn for layer in inner.layers if _has(layer, "self_attn")]
        if not attentions:
            raise UnreadError("none of its layers attends")
        angles_of = next(getattr(inner, name) for name in _ROTARY if hasattr(inner, name))
        order, angles = _rotary(attentions[0], angles_of)
        self.traits = Traits(
            offset=offset,
            order=order,
            entering=factors["entering"],
            divisor=factors["divisor"] / factors["logits"],
        )
        self.embed = model.get_input_embeddings()
        self.head = whole_product(model.get_output_embeddings())
        self.norm = Norm(last, offset=offset)
        if not self.norm.is_native:
            raise UnreadError(f"there are no native operations on {last.weight.dtype}, or they are off")
        self.rope = Rope(Rotary(*angles), last.weight)
        self.windows = Windows(frozenset({FULL}))
        heads = {_heads_of(each) for each in attentions}
        if len(heads) > 1:
            raise UnreadError("its attention differs from layer to layer")
        self._family = family
        self._heads = next(iter(heads))
        self.layers = [self.layer_like(layer, number) for number, layer in enumerate(inner.layers)]
        self.mixers: list[Mixer] = [layer.mixer for layer in self.layers if layer.mixer is not None]
        self.run_layers = NativeLayers(self.layers)
        self._pieces = {}

    def layer_like(self, layer: Any, number: int) -> HybridLayer:
        """A layer of the same family, whose keys and values have this number in a cache.

        Raises:
            UnreadError: a part that is not known here.
        """
        return HybridLayer(layer, number, self._family, self.traits, heads=self._heads)

    @property
    @override
    def rounding(self) -> str:
        return ""


def _has(layer: Any, name: str) -> bool:
    """Whether a layer has a part; where it has not, its family may say so with None."""
    return layer._modules.get(name) is not None  # noqa: SLF001 - has no public name


def _rotary(attention: Any, rotary: Any) -> tuple[tuple[int, ...], tuple[Tensor, float]]:
    """The order of a head's numbers, and the frequencies that turn them; zeros where nothing is turned."""
    dim = int(attention.head_dim)
    if rotary is None:
        return (), (torch.zeros(dim // 2), 1.0)
    (kind,) = kinds_of_rotary(rotary)
    frequencies, scale = padded_frequencies(*frequencies_of(rotary, kind), dim)
    return order_in_heads(attention, rotary), (torch.tensor(frequencies), scale)


def _heads_of(attention: Any) -> Heads:
    config = attention.config
    counts = int(config.num_attention_heads), int(config.num_key_value_heads)
    return Heads(*counts, int(attention.head_dim), float(attention.scaling))


class HybridLayer:
    """One layer, for native code; attributes as those of `layers.Layer`.

    Args:
        layer: transformers' own.
        number: its place, from 0.
        family: names of its parts.
        traits: of the model.
        heads: of attention, in the layers that have it.

    Attributes:
        mixer: what keeps a recurrent state, if there is something.
        gates: numbers by which what attention makes is multiplied.
        factors: of what attention and the gated part add to the hidden states.
    """

    mixed = made = sinks = None  # no family has these
    gates_natively = True
    products: Mapping[str, PackedLinear] = MappingProxyType({})  # all are native

    def __init__(self, layer: Any, number: int, family: FamilyNames, traits: Traits, *, heads: Heads) -> None:
        factors = _Factors(layer, family)
        self.number = number
        self.kind = FULL
        self.traits = traits
        self.heads = heads
        self.before, self.between = (Norm(getattr(layer, name), offset=traits.offset) for name in family.norms)
        self.size = len(self.before.weight)
        operations = native.operations_for(self.before.weight)
        if operations is None or not operations.attends(heads.dim):
            raise UnreadError(f"there is no native attention with heads of {heads.dim} numbers")
        self.attention = NativeAttention(heads, operations)
        self.gates = 0
        self.qkv: Joint | None = None
        self.out: PackedLinear | None = None
        self.turned: Norm | WholeNorm | None = None
        if _has(layer, "self_attn"):
            self._read_attention(layer.self_attn, family, factors)
        self.mixer: Mixer | None = None
        if _has(layer, family.mixer):
            self.mixer = Mixer(getattr(layer, family.mixer), number, self.size, factors["residual"] * factors["mixed"])
        self.factors = factors["residual"] * factors["attended"], factors["residual"] * factors["down"]
        self.inner = 0
        self.gate_up: Joint | None = None
        self.down: PackedLinear | None = None
        gated = getattr(layer, family.gated)
        self.mixture: Mixture | None = None
        experts = getattr(layer, family.experts) if _has(layer, family.experts) else gated
        if isinstance(experts, StoredMixture):
            self.mixture = experts.mixture
        elif is_mixture(experts):
            self.mixture = mixture_of(experts)
        elif experts is not gated:
            raise UnreadError(f"there is no native mixture like its {type(experts).__name__}")
        if gated is not experts or self.mixture is None:
            self._read_gated(gated, family, factors["gates"])

    def _read_attention(self, attention: Any, family: FamilyNames, factors: _Factors) -> None:
        heads, modules = self.heads, [getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")]
        wide, turned, keys = (
            heads.queries * heads.dim,
            list(self.traits.order or range(heads.dim)),
            heads.keys * heads.dim,
        )
        outs, *others = (len(product_of_layer(module)[1]) for module in modules)
        self.out = whole_product(getattr(attention, family.out))
        fits = outs in (wide, 2 * wide) and others == [keys, keys] and self.out.weight.ins == wide
        if not fits or self.out.weight.outs != self.size:
            raise UnreadError(f"its attention has other sizes than those of {heads.queries} heads of {heads.dim}")
        # of each head its query, and then its gates where there are some
        every = torch.arange(outs).view(heads.queries, -1, heads.dim)
        rest = (outs + torch.arange(2 * keys)).view(2, heads.keys, heads.dim)
        parts = every[:, 0, turned], rest[0][:, turned], rest[1], every[:, 1:]
        by = factors["attention"]
        if by != 1.0 and any(module.bias is not None for module in modules):
            raise UnreadError("its attention has factors of inputs, and biases")
        of_parts = by, by * factors["keys"], by, by
        each = torch.cat([torch.full((part.numel(),), one) for part, one in zip(parts, of_parts, strict=True)])
        self.qkv = Joint.of_modules(modules, torch.cat([part.flatten() for part in parts]), each)
        self.gates = parts[-1].numel()
        self.turned = norm_of_heads([getattr(attention, name) for name in family.turned], heads, self.traits)

    def _read_gated(self, gated: Any, family: FamilyNames, by: float) -> None:
        if not all(_has(gated, name) for name in (*family.gates, family.down)):
            raise UnreadError(f"its {type(gated).__name__} has parts that are not known together here")
        for name in ("act_fn", "activation"):
            if _has(gated, name) and activation_of(getattr(gated, name)) != self.traits.activation:
                raise UnreadError(f"its gates are not {self.traits.activation}")
        self.down = whole_product(getattr(gated, family.down))
        self.inner = int(self.down.weight.ins)
        each = torch.ones(2 * self.inner)
        each[: self.inner] = by
        self.gate_up = Joint.of_modules([getattr(gated, name) for name in family.gates], factors=each)
        if self.gate_up.arguments.places != 2 * self.inner or self.down.weight.outs != self.size:
            raise UnreadError(f"its {type(gated).__name__} has other sizes than those of gates")
