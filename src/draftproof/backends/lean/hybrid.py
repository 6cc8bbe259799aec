"""The lean forward of models whose layers differ, over a transformers model whose weights stay where they are.

Layers have attention, a mixer that keeps a recurrent state, or both side by side, and then a gated part. Heads may have
another size in each kind of layer, layers may read keys and values of earlier ones, and embeddings of their own
(`embedded`). A family says under which names these are (`FamilyNames`); what a mixer is, its own parts say (`mixers`).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import override

from draftproof import native
from draftproof.backends.cache.windows import FULL, RECURRENT, SLIDING, Windows
from draftproof.backends.lean.attention import Heads, NativeAttention
from draftproof.backends.lean.embedded import EmbeddedPart, LayerEmbeddings
from draftproof.backends.lean.inputs import FusedProducts, product_of_layer, whole_product
from draftproof.backends.lean.layers import Lean, Norm, WholeNorm, norm_of_heads
from draftproof.backends.lean.mixers import Mixer
from draftproof.backends.lean.mixture import Mixture, StoredMixture
from draftproof.backends.lean.mixture_modules import ParallelExperts, is_mixture, mixture_of
from draftproof.backends.lean.native_layers import NativeLayers
from draftproof.backends.lean.rotary import Rope, Rotary
from draftproof.backends.lean.traits import (
    LLAMA,
    Traits,
    UnreadError,
    activation_of,
    eps_of,
    frequencies_of,
    is_hooked,
    is_stock,
    kinds_of_rotary,
    offset_of,
    order_in_heads,
    padded_frequencies,
)
from draftproof.backends.products.packed_linear import PackedLinear


@dataclass(frozen=True)
class FamilyNames:
    """Names of a family's parts."""

    # of a layer, before attention or the mixer, after it, before the gated part, and after it; None where there is none
    norms: tuple[str | None, ...]
    last: str  # norm after all layers, in the model
    mixer: str  # what keeps a state; empty where nothing does. Layers of models with experts may be without it
    gated: str  # the gated part
    gates: tuple[str, ...]  # its linear layers that read the same rows
    down: str  # its last linear layer
    out: str = "o_proj"  # the last linear layer of attention
    turned: tuple[str, ...] = ()  # norms of queries, of keys and of values, as far as there are some
    # what adds a layer's own embeddings of tokens: the linear layer that makes gates, that behind them, the norm of
    # what is added, and the activation; some models have them
    embedded: tuple[str, ...] = ()
    experts: str = ""  # a mixture of experts beside the gated part; one may also stand in its place
    beside: ParallelExperts | None = (
        None  # where experts are beside the gated part without a module around them, what they need
    )
    # names of the numbers by which something is multiplied, where a family has them: `entering` and `divisor` or
    # `logits` (of the model), `cap` (soft limit of the logits), `residual`, `mixed` and `attended` (of what parts of a
    # layer add), `attention` (of what it reads), `keys`, `gates` and `down`, `leaving` (of what a layer makes); each
    # with the path from the model or the layer
    factors: Mapping[str, str] = field(default_factory=dict)


_PROJECTED = ("gate_proj", "up_proj")
_NORMS = ("input_layernorm", None, "post_attention_layernorm", None)
_ROTARY = ("rotary_emb", "pos_emb")  # names of what makes angles
_GRANITE = {
    "entering": "model.embedding_multiplier",
    "divisor": "config.logits_scaling",
    "residual": "residual_multiplier",
}
FAMILIES = (
    FamilyNames(
        ("operator_norm", None, "ffn_norm", None),
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
        factors=_GRANITE,
    ),
    FamilyNames(
        ("input_layernorm", None, "pre_ff_layernorm", None),
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
    FamilyNames(
        ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        "norm",
        "",
        "mlp",
        _PROJECTED,
        "down_proj",
        turned=("q_norm", "k_norm", "v_norm"),
        embedded=("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm", "act_fn"),
        beside=ParallelExperts(
            "experts",
            "router",
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_2",
            "post_feedforward_layernorm_1",
        ),
        factors={"leaving": "layer_scalar", "cap": "config.final_logit_softcapping"},
    ),
    FamilyNames(_NORMS, "norm", "", "block_sparse_moe", (), "", factors=_GRANITE),
)
"""LFM2; Qwen3-Next and Qwen3.5, and without recurrent layers Qwen3-MoE, Mixtral and others that are like Llama but for
their experts; Granite 4; Falcon-H1; Gemma 4; Granite 3 with experts. All but Falcon-H1 may have experts."""


def family_of(model: Any) -> FamilyNames:
    """The family of a model, whose weights are not looked at."""
    hooked = next((name or "the model" for name, each in model.named_modules() if is_hooked(each)), None)
    if hooked is not None:
        raise UnreadError(f"hooks are attached to {hooked}")
    if not _has(model, "model"):
        raise UnreadError(f"{type(model).__name__} has parts that are not known together here")
    inner = model.model
    layers = inner._modules.get("layers") or ()  # noqa: SLF001 - has no public name
    names = {name for layer in layers for name, _ in layer.named_children()}
    for family in FAMILIES:
        layer = {*filter(None, family.norms), family.gated}
        has_angles = any(hasattr(inner, name) for name in _ROTARY)
        some = {"self_attn", family.mixer, family.experts, *family.embedded, *_names_of(family.beside)}
        if names - some != layer or not has_angles or not _has(inner, family.last):
            continue
        # without a mixer and without experts, other forward passes read it
        if not family.mixer or family.mixer in names or any(_has_mixture(each, family) for each in layers):
            return family
    raise UnreadError(f"its layers have parts that are not known together here ({', '.join(sorted(names))})")


def beside_of(layer: Any) -> ParallelExperts | None:
    """Names of the experts of a layer and of what they need, where they are beside its gated part."""
    known = (family.beside for family in FAMILIES if family.beside is not None)
    return next((each for each in known if all(_has(layer, name) for name in astuple(each))), None)


def _is_mixture(part: Any) -> bool:
    return isinstance(part, StoredMixture) or is_mixture(part)


def _has_mixture(layer: Any, family: FamilyNames) -> bool:
    names = (family.gated, family.experts)
    return any(_is_mixture(getattr(layer, name)) for name in names if name and _has(layer, name))


def _names_of(beside: ParallelExperts | None) -> tuple[str, ...]:
    return () if beside is None else astuple(beside)


class _Factors:
    """The numbers by which a model or a layer multiplies something; 1 where a family has none."""

    def __init__(self, owner: Any, family: FamilyNames) -> None:
        self._owner = owner
        self._paths = family.factors

    def get(self, name: str, default: float) -> float:
        """A number; by default where a family has none, or a model says None."""
        if name not in self._paths:
            return default
        found = self._owner
        for part in self._paths[name].split("."):
            if not hasattr(found, part):
                raise UnreadError(f"its {type(found).__name__} has no {part}")
            found = getattr(found, part)
        return default if found is None else float(found)

    def __getitem__(self, name: str) -> float:
        return self.get(name, 1.0)


class HybridLean(Lean):
    """The forward pass over a model whose layers differ.

    Args:
        model: a transformers causal LM on the CPU, with weights of any form that has native products.
        windows: the kinds of attention mask that it builds.

    Attributes:
        mixers: what keeps recurrent states.
    """

    layers: list[Any]

    def __init__(self, model: Any, windows: Windows) -> None:
        family, inner = family_of(model), model.model
        if windows.kinds - {FULL, SLIDING, *RECURRENT}:
            raise UnreadError(f"its attention is of kinds that are not known here ({', '.join(sorted(windows.kinds))})")
        last = getattr(inner, family.last)
        offset = offset_of(last)
        others = {str(each.weight.dtype) for each in model.modules() if type(each) is nn.Linear} - {
            str(last.weight.dtype)
        }
        if others:
            raise UnreadError(
                f"its linear layers have weights of {', '.join(others)}, and norms of {last.weight.dtype}"
            )
        factors = _Factors(model, family)
        attentions = {number: layer.self_attn for number, layer in enumerate(inner.layers) if _has(layer, "self_attn")}
        if not attentions:
            raise UnreadError("none of its layers attends")
        _refuse_strange(inner.layers, family)
        self.windows = Windows(windows.kinds & {FULL, SLIDING} or frozenset({FULL}), windows.config)
        self._kinds = self._kinds_of(model.config, len(inner.layers))
        self._family = family
        angles_of = next(getattr(inner, name) for name in _ROTARY if hasattr(inner, name))
        order, tables, starts = _angles(attentions, self._kinds, angles_of)
        self.traits = Traits(
            offset=offset,
            order=order,
            activation=_activation_of_gates(inner.layers, family),
            whole=_norms_all_heads(attentions.values(), family),
            entering=factors["entering"],
            divisor=factors["divisor"] / factors["logits"],
            logit_cap=factors.get("cap", 0.0),
        )
        self.embed = model.get_input_embeddings()
        self.head = whole_product(model.get_output_embeddings())
        self.norm = Norm(last, offset=offset)
        if not self.norm.is_native:
            raise UnreadError(f"there are no native operations on {last.weight.dtype}, or they are off")
        self.rope = Rope([Rotary(*each) for each in tables], last.weight)
        self._sources = _sources(attentions, self._kinds)
        heads = {
            number: _heads_of(attention, attentions[self._sources[number]], starts[number])
            for number, attention in attentions.items()
        }
        self._heads = next(iter(heads.values()))
        self.layers = [
            self._layer(layer, number, self._sources.get(number, number), heads.get(number, self._heads))
            for number, layer in enumerate(inner.layers)
        ]
        self._embeddings = LayerEmbeddings.of(inner, self.layers)
        self.mixers: list[Mixer] = [layer.mixer for layer in self.layers if layer.mixer is not None]
        self.run_layers = NativeLayers(self.layers)
        self._pieces = {}

    def _kinds_of(self, config: Any, layers: int) -> list[str]:
        """The kind of each layer's mask."""
        kinds = sorted(self.windows.kinds)
        named = getattr(config, "layer_types", None) or []
        if len(kinds) == 1 or len(named) < layers:
            return kinds[:1] * layers
        return [kind if kind in kinds else FULL for kind in named[:layers]]

    def _layer(self, layer: Any, number: int, source: int, heads: Heads) -> HybridLayer:
        kind = self._kinds[number]
        return HybridLayer(layer, number, self._family, self.traits, heads=heads, kind=kind, source=source)

    def layer_like(self, layer: Any, number: int) -> HybridLayer:
        """A layer of the same family, whose keys and values have this number in a cache."""
        if len({each.heads for each in self.layers}) > 1:
            raise UnreadError("its attention differs from layer to layer")
        return self._layer(layer, number, number, self._heads)

    @override
    def for_drafts(self) -> HybridLean:
        made = copy.copy(self)
        made.head = self.head.for_drafts()
        return made

    @property
    @override
    def rounding(self) -> str:
        return ""

    @override
    def embedded(self, ids: Int[Tensor, " tokens"], x: Float[Tensor, "tokens dim"]) -> Tensor | None:
        return None if self._embeddings is None else self._embeddings(ids, x)


def _has(layer: Any, name: str) -> bool:
    """Whether a layer has a part; where it has not, its family may say so with None."""
    return layer._modules.get(name) is not None  # noqa: SLF001 - has no public name


def _norm_in(layer: Any, name: str | None, traits: Traits) -> Norm | None:
    return None if name is None else Norm(getattr(layer, name), offset=traits.offset)


def _refuse_strange(layers: Iterable[Any], family: FamilyNames) -> None:
    """Refuse layers and attention that do not say what they do as others do, or have numbers that are not known here.

    The check of whole passes would find what such numbers do, too; but it may be left out.
    """
    known = {"attention_dropout", "scaling", *(path.rpartition(".")[2] for path in family.factors.values())}
    for layer in layers:
        attention = layer._modules.get("self_attn")  # noqa: SLF001 - has no public name
        for each in filter(None, (layer, attention)):
            if found := {name for name, value in vars(each).items() if _is_factor(name, value)} - known:
                raise UnreadError(f"its {type(each).__name__} has numbers not known here ({', '.join(sorted(found))})")
        if attention is None:
            continue
        if lacking := [name for name in ("config", "head_dim", "scaling") if not hasattr(attention, name)]:
            raise UnreadError(f"its {type(attention).__name__} has no {' and no '.join(lacking)}")
        own = (*attention.named_parameters(recurse=False), *attention.named_buffers(recurse=False))
        clipped = ["clip_qkv"] if getattr(attention.config, "clip_qkv", None) is not None else []
        if strange := [name for name, _ in own] + clipped:
            raise UnreadError(f"its {type(attention).__name__} has parts not known here ({', '.join(strange)})")


def _is_factor(name: str, value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and name.endswith(("factor", "multiplier", "scale")))


def _angles(
    attentions: Mapping[int, Any], kinds: Sequence[str], rotary: Any
) -> tuple[tuple[int, ...], list[tuple[Tensor, float]], dict[int, int]]:
    """How heads are turned.

    Returns:
        the order of a head's numbers; frequencies and a factor for each kind of layer, with zeros where nothing is
        turned; and for each layer the first of all angles, one kind after another, that is its own.
    """
    tables: dict[tuple[str, int], tuple[int, tuple[Tensor, float]]] = {}
    orders, starts, end = set(), {}, 0
    own = {"": "default"} if rotary is None else kinds_of_rotary(rotary)
    for number, attention in attentions.items():
        kind, dim = kinds[number] if kinds[number] in own else next(iter(own)), int(attention.head_dim)
        if (kind, dim) not in tables:
            frequencies: tuple[Any, float] = (torch.zeros(dim // 2), 1.0)
            order: tuple[int, ...] = ()
            if rotary is not None:
                order = order_in_heads(attention, rotary, kind)
                numbers, scale = padded_frequencies(*frequencies_of(rotary, kind), dim)
                frequencies = torch.tensor(numbers), scale
            orders.add(order)
            tables[kind, dim] = end, frequencies
            end += dim
        starts[number] = tables[kind, dim][0]
    if len(orders) > 1:
        raise UnreadError("its layers turn queries and keys in different orders")
    return orders.pop(), [frequencies for _, frequencies in tables.values()], starts


def _sources(attentions: Mapping[int, Any], kinds: Sequence[str]) -> dict[int, int]:
    """For each layer with attention the last one of its kind, up to it, that makes keys and values."""
    found, latest = {}, dict[str, int]()
    for number, attention in attentions.items():
        if _has(attention, "k_proj"):
            latest[kinds[number]] = number
        if kinds[number] not in latest:
            raise UnreadError("a layer reads keys that no layer before it makes")
        found[number] = latest[kinds[number]]
    return found


def _heads_of(attention: Any, source: Any, angles: int) -> Heads:
    """The heads of a layer that reads the keys of `source`."""
    dim = int(attention.head_dim)
    keys = len(product_of_layer(source.k_proj)[1]) // dim
    queries = int(attention.config.num_attention_heads)
    if int(source.head_dim) != dim or not keys or queries % keys:
        raise UnreadError(f"its attention has {queries} heads of {dim}, over {keys} heads of {source.head_dim}")
    return Heads(queries, keys, dim, float(attention.scaling), angles)


def _activation_of_gates(layers: Iterable[Any], family: FamilyNames) -> str:
    """The activation of a family's gates, by those of the first layer that has some."""
    for layer in layers:
        gated = getattr(layer, family.gated)
        act = next((getattr(gated, name) for name in ("act_fn", "activation") if _has(gated, name)), None)
        if act is not None:
            return activation_of(act)
    return LLAMA.activation


def _norms_all_heads(attentions: Collection[Any], family: FamilyNames) -> bool:
    """Whether the norm of queries is over all heads together."""
    found = (getattr(each, name) for each in attentions for name in family.turned[:1] if _has(each, name))
    weights = (norm.weight for norm in found if getattr(norm, "weight", None) is not None)
    dims = {int(each.head_dim) for each in attentions}
    return any(len(weight) not in dims for weight in weights)


class HybridLayer:
    """One layer, for native code; attributes as those of `layers.Layer`.

    Args:
        source: number of the layer whose keys and values it reads; its own where it makes some.

    Attributes:
        mixer: what keeps a recurrent state, if there is something.
        gates: numbers by which what attention makes is multiplied.
        factors: of what attention and the gated part add to the hidden states.
        leaving: factor of what the layer makes.
        embedded: embeddings of tokens in this layer, if there are some.
        experts_in, experts_out, gated_out: norms as of `ParallelExperts`, where the layer has these.
    """

    sinks = None  # no family has these
    gates_natively = True
    products: Mapping[str, PackedLinear] = MappingProxyType({})  # all are native

    def __init__(
        self,
        layer: Any,
        number: int,
        family: FamilyNames,
        traits: Traits,
        *,
        heads: Heads,
        kind: str = FULL,
        source: int | None = None,
    ) -> None:
        factors = _Factors(layer, family)
        self.number = number
        self.source = number if source is None else source
        self.kind = kind
        self.traits = traits
        self.heads = heads
        self.leaving = factors["leaving"]
        before, mixed, between, made = family.norms
        self.before = _norm_in(layer, before, traits)
        self.mixed = _norm_in(layer, mixed, traits)
        self.between = _norm_in(layer, between, traits)
        self.made = _norm_in(layer, made, traits)
        assert self.before is not None, "every family has it"
        self.size = len(self.before.weight)
        operations = native.operations_for(self.before.weight)
        if operations is None or not operations.attends(heads.dim):
            raise UnreadError(f"there is no native attention with heads of {heads.dim} numbers")
        self.attention = NativeAttention(heads, operations)
        self.gates = 0
        self.qkv: FusedProducts | None = None
        self.out: PackedLinear | None = None
        self.turned: Norm | WholeNorm | None = None
        if _has(layer, "self_attn"):
            self._read_attention(layer.self_attn, family, factors)
        self.mixer: Mixer | None = None
        if family.mixer and _has(layer, family.mixer):
            self.mixer = Mixer(getattr(layer, family.mixer), number, self.size, factors["residual"] * factors["mixed"])
        self.factors = factors["residual"] * factors["attended"], factors["residual"] * factors["down"]
        self.inner = 0
        self.gate_up: FusedProducts | None = None
        self.down: PackedLinear | None = None
        gated = getattr(layer, family.gated)
        self.mixture = _mixture_in(layer, family)
        if not _is_mixture(gated):
            self._read_gated(gated, family, factors["gates"])
        beside = beside_of(layer)
        self.experts_in = None if beside is None else _norm_in(layer, beside.experts_in, traits)
        self.experts_out = None if beside is None else _norm_in(layer, beside.experts_out, traits)
        self.gated_out = None if beside is None else _norm_in(layer, beside.gated_out, traits)
        self.embedded = EmbeddedPart.of(layer, family.embedded, traits)

    def _read_attention(self, attention: Any, family: FamilyNames, factors: _Factors) -> None:
        heads, own = self.heads, self.source == self.number
        # values may be keys before their norm, and keys and values may be those of another layer
        names = [name for name in ("q_proj", "k_proj", "v_proj") if _has(attention, name)]
        modules = [getattr(attention, name) for name in names]
        wide, turned, keys = (
            heads.queries * heads.dim,
            list(self.traits.order or range(heads.dim)),
            heads.keys * heads.dim,
        )
        outs, *others = (len(product_of_layer(module)[1]) for module in modules)
        self.out = whole_product(getattr(attention, family.out))
        fits = outs in (wide, 2 * wide) and self.out.weight.ins == wide
        if not fits or others != [keys] * (len(names) - 1) or self.out.weight.outs != self.size:
            raise UnreadError(f"its attention has other sizes than those of {heads.queries} heads of {heads.dim}")
        # of each head its query, and then its gates where there are some
        every = torch.arange(outs).view(heads.queries, -1, heads.dim)
        rest = (outs + torch.arange(keys * (len(names) - 1))).view(-1, heads.keys, heads.dim)
        none = rest[:0]
        of_keys, of_values = (rest[0][:, turned], rest[-1]) if own else (none, none)
        parts = every[:, 0, turned], of_keys, of_values, every[:, 1:]
        by = factors["attention"]
        if by != 1.0 and any(module.bias is not None for module in modules):
            raise UnreadError("its attention has factors of inputs, and biases")
        of_parts = by, by * factors["keys"], by, by
        each = torch.cat([torch.full((part.numel(),), one) for part, one in zip(parts, of_parts, strict=True)])
        self.qkv = FusedProducts.of_modules(modules, torch.cat([part.flatten() for part in parts]), each)
        self.gates = parts[-1].numel()
        norms = [_with_weight(getattr(attention, name), heads.dim) for name in family.turned if _has(attention, name)]
        if len(norms) not in ((0, len(family.turned)) if own else (0, 1)):
            raise UnreadError("some of its heads have norms, and others have not")
        sizes = [heads.dim * (count if self.traits.whole else 1) for count in (heads.queries, heads.keys, heads.keys)]
        if any(len(norm.weight) != size for norm, size in zip(norms, sizes, strict=False)):
            raise UnreadError("the norms of its heads have other sizes than these")
        self.turned = norm_of_heads(norms, heads, self.traits)

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
        modules = [getattr(gated, name) for name in family.gates]
        self.gate_up = FusedProducts.of_modules(modules, factors=each)
        if self.gate_up.arguments.places != 2 * self.inner or self.down.weight.outs != self.size:
            raise UnreadError(f"its {type(gated).__name__} has other sizes than those of gates")


def _mixture_in(layer: Any, family: FamilyNames) -> Mixture | None:
    """The mixture of experts of a layer, in place of its gated part or beside it; None where there is none."""
    beside, gated = beside_of(layer), getattr(layer, family.gated)
    if beside is None and any(_has(layer, name) for name in _names_of(family.beside)):
        raise UnreadError("its layers have only a part of what experts beside a gated part need")
    experts = getattr(layer, family.experts) if _has(layer, family.experts) else gated
    experts = experts if beside is None else getattr(layer, beside.experts)
    if isinstance(experts, StoredMixture):
        return experts.mixture
    if beside is not None:
        return mixture_of(layer, beside)
    if is_mixture(experts):
        return mixture_of(experts)
    if experts is not gated:
        raise UnreadError(f"there is no native mixture like its {type(experts).__name__}")
    return None


def _with_weight(norm: Any, size: int) -> Any:
    """A norm of heads; of one without weights, one with ones in their place.

    Raises:
        UnreadError: it has no weights, and computes something else than with ones.
    """
    if getattr(norm, "weight", None) is not None:
        return norm
    made = SimpleNamespace(weight=torch.ones(size), eps=eps_of(norm))
    x = torch.linspace(-2, 3, 3 * size).view(3, size)
    expected = x * (x.square().mean(-1, keepdim=True) + made.eps).rsqrt()
    if not is_stock(type(norm)) or not torch.allclose(norm(x), expected, rtol=1e-5, atol=1e-6):
        raise UnreadError(f"its {type(norm).__name__} without weights is not a root mean square norm")
    return made
