"""A lean forward pass for decoders: the arithmetic of transformers' modules in a third of the operations.

Queries, keys and values are one product, and so are gate and up; weights are packed for the CPU (`packed`); keys go
straight into the slot cache, in transformers' layout, and are never expanded to the number of query heads
(`attention`); logits are computed for the requested columns only. Where all parts of layers are C code they are one
call (`native_layers`). `traits` says what differs between families.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from jaxtyping import Float, Int
from torch import Tensor

from draftproof import native
from draftproof.backends.cache.layout import Layout
from draftproof.backends.cache.slot_cache import SlotCache
from draftproof.backends.cache.windows import Windows
from draftproof.backends.hf.longrope import is_long
from draftproof.backends.lean.attention import Heads, NativeAttention, Pass
from draftproof.backends.lean.attention import attention as attention_of
from draftproof.backends.lean.mixture import Mixture
from draftproof.backends.lean.native_layers import NORMS, PRODUCTS, NativeLayers, computes_natively, native_layers
from draftproof.backends.lean.rotary import Rope, Rotary
from draftproof.backends.lean.traits import ACTIVATIONS, LLAMA, Traits, eps_of
from draftproof.backends.products.calibration import MEASURED_BITS, InputStatistics, MeasuredProduct
from draftproof.backends.products.calibration_files import measure
from draftproof.backends.products.packed_linear import (
    REORDERED,
    PackedLinear,
    fuse,
    operations_for_stored,
    plain_of,
    product_of,
)
from draftproof.errors import UserError
from draftproof.native.ggml import StoredMatrix
from draftproof.native.operations import Operations
from draftproof.native.structures import MOST_DIM, Sequences
from draftproof.native.tensors import BITS, UNITS, MeasuredInputs
from draftproof.peak import release_freed_memory
from draftproof.triton.choose import fused

_HEAD = "head"  # the output layer, beside the products of layers


class Lean:
    """The forward pass over the weights of a model, which move in here.

    Args:
        model: a transformers model that `lean.supports` supports, or parts of the same names (`checkpoint`).
        windows: the kinds of attention mask that it builds.
    """

    def __init__(
        self,
        model: Any,
        windows: Windows,
        traits: Traits,
        layer_kinds: Sequence[str] | None = None,
        *,
        pack: bool = True,
    ) -> None:
        inner = model.model
        tied = model.lm_head.weight is inner.embed_tokens.weight
        self.traits = traits
        self.embed = Embedding(inner.embed_tokens.weight, traits.embedding)
        self.tied = tied
        self.head = product_of(self.embed.weight, pack=pack) if tied else fuse(model, ["lm_head"], pack=pack)
        like = inner.norm.weight
        self.rope = _rope_of(traits.angles, like)
        self.long_rope = _rope_of(traits.long_angles, like)
        self.windows = windows
        kinds = [next(iter(windows.kinds))] * len(inner.layers) if len(windows.kinds) == 1 else layer_kinds
        assert kinds is not None, "a model with several kinds of layer says which is which"
        self.layers = [
            Layer(layer, number, kinds[number], traits, angles=traits.angles_of[number], pack=pack)
            for number, layer in enumerate(inner.layers)
        ]
        self.run_layers = in_order(self.layers)
        self._pieces: dict[tuple[int, int], Callable[..., Tensor]] = {}
        self.norm = Norm(inner.norm, offset=traits.offset, pack=pack)
        release_freed_memory()

    @property
    def packs(self) -> bool:
        """Whether its attention reads feeds without padding (`Layout`)."""
        return all(isinstance(layer.attention, NativeAttention) for layer in self.layers)

    @property
    def is_native(self) -> bool:
        """Whether all parts of its layers are."""
        return isinstance(self.run_layers, NativeLayers) or all(map(computes_natively, self.layers))

    @property
    def rounding(self) -> str:
        """Why a token's last digits may depend on the other tokens of a pass; empty where they cannot."""
        weight, dim = self.embed.weight, max(layer.heads.dim for layer in self.layers)
        if weight.device.type != "cpu":
            return f"its sums on {weight.device.type} depend on the rows of a pass"
        if self.is_native and self.head.layout in ("native", REORDERED) and self.norm.is_native:
            return ""
        why = "some of its layers are not native"
        if weight.dtype not in UNITS:
            why = f"there are no native operations on {str(weight.dtype).removeprefix('torch.')}"
        elif native.operations_for(weight) is None:
            why = f"native operations are off or not available ({native.VARIABLE})"
        elif not Operations.attends(dim):
            why = f"its heads have {dim} numbers, and native attention takes at most {MOST_DIM}"
        return f"{why}, and torch's sums depend on the rows of a pass"

    def for_drafts(self) -> Lean:
        """The same with the output layer of a draft model (`PackedLinear.for_drafts`)."""
        made, table = copy.copy(self), self.embed.weight
        made.head = self.head.for_drafts(table if self.tied and isinstance(table, Tensor) else None)
        return made

    def first(self, layers: int) -> Lean:
        """The same with its first layers only."""
        return self._of(self.layers[:layers])

    def _of(self, layers: list[Layer]) -> Lean:
        """The same with other layers."""
        made = copy.copy(self)
        made.layers = layers
        made.run_layers = in_order(layers)
        made._pieces = {}  # noqa: SLF001 - of this class
        return made

    def quantizing(
        self,
        bits: int,
        name: str,
        write: Callable[[Lean, Collection[InputStatistics]], Iterator[None]],
        *,
        kept: bool = True,
        head_bits: int | None = None,
    ) -> Iterator[Lean | None]:
        """The same with quantized weights, made in steps: None after each step, and at last the result.

        `write` lets a form of the model that measures its inputs write a text (`calibration.write`). By default the
        output layer has as many bits as are enough for a draft (`PackedLinear.quantized_output`).

        Raises:
            UserError: another number of bits, or layers that are not native; before the first step.
        """
        if bits not in BITS:
            raise UserError(f"bits of the weights of {name}: expected {' or '.join(map(str, BITS))}, got {bits}")
        why = self._why_not_quantized(bits)
        if why is not None:
            raise UserError(f"{name} cannot be quantized: {why}")
        yield None
        products = {_HEAD: self.head}
        products |= {_place(number, each): getattr(layer, each) for number, layer, each in self._products()}
        statistics = {place: InputStatistics() for place in products}
        if bits == MEASURED_BITS:
            weights = {place: product.numbers for place, product in products.items()}
            measured = partial(write, self._measured(statistics))
            yield from measure(statistics, weights, measured, name=name, kept=kept)
        layers = []
        for number, layer in enumerate(self.layers):
            inputs = {each: statistics[_place(number, each)].found() for each in layer.products}
            layers.append(layer.quantized(bits, inputs))
            yield None
        made = self._of(layers)
        table = plain_of(self.embed.weight) if self.tied else None
        if head_bits is None:
            made.head = self.head.quantized_output(bits, table, statistics[_HEAD].found())
        else:
            made.head = self.head.quantized(head_bits)
        yield made

    def _products(self) -> Iterator[tuple[int, Layer, str]]:
        """Number, layer and name of every product of the layers."""
        yield from ((number, layer, each) for number, layer in enumerate(self.layers) for each in layer.products)

    def _measured(self, statistics: Mapping[str, InputStatistics]) -> Lean:
        """The same, whose products add to the statistics of their inputs."""
        layers = [copy.copy(layer) for layer in self.layers]
        for number, layer, name in self._products():
            measured = MeasuredProduct(getattr(layer, name), statistics[_place(number, name)])
            setattr(layers[number], name, measured)
        made = self._of(layers)
        made.head = MeasuredProduct(self.head, statistics[_HEAD])
        return made

    def _why_not_quantized(self, bits: int) -> str | None:
        if self.embed.weight.device.type == "cpu" and native_layers(self.layers) is None:
            return (
                "its layers are not native: backend lean needs a model in float32 or bfloat16 whose heads have at most "
                f"{MOST_DIM} numbers, and {native.VARIABLE} must not be 0"
            )
        if self.traits.experts is not None:
            return "its feed-forward parts are mixtures of experts"
        products = [getattr(layer, name) for _, layer, name in self._products()]
        return next((why for each in (*products, self.head) if (why := each.why_not_quantized(bits)) is not None), None)

    def __call__(
        self, layout: Layout, cache: SlotCache, *, hidden: bool, sequences: Sequences | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of the requested columns [rows, columns, vocab], and the last hidden state of each column if asked."""
        rows, width = layout.ids.shape
        x = self.enter(layout.ids.view(-1))
        rope = self.long_rope if self.traits.length and is_long() else self.rope
        angles = rope(layout.positions.view(-1), layout.plan.horizon)
        at = Pass(rows, width, *angles, cache, layout.plan, sequences, self.embedded(layout.ids.view(-1), x))
        attention = self.layers[0].attention
        masks = {kind: attention.mask(layout, window, x.dtype) for kind, window in self.windows.now().items()}
        states = self.norm(self._run(x, at, masks, layout)).view(rows, width, -1)
        columns = len(layout.columns)
        chosen = states if columns == width else states.index_select(1, layout.requested)
        logits = self.logits(chosen.flatten(0, 1)).view(rows, columns, -1)
        return logits, states if hidden else None

    def enter(self, ids: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens dim"]:
        """What the first layer reads."""
        return _scaled(self.embed(ids), self.traits.entering)

    def embedded(self, ids: Int[Tensor, " tokens"], x: Float[Tensor, "tokens dim"]) -> Tensor | None:  # noqa: ARG002
        """Embeddings of tokens in all layers, where x is what the first layer reads; None where there are none."""
        return None

    def logits(self, states: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens vocab"]:
        """Logits after normed last states."""
        made, traits = self.head(states), self.traits
        if traits.divisor != 1.0:
            made = made.div_(traits.divisor)
        return made if not traits.logit_cap else made.div_(traits.logit_cap).tanh_().mul_(traits.logit_cap)

    def _run(self, x: Tensor, at: Pass, masks: Mapping[str, Any], layout: Layout) -> Float[Tensor, "tokens dim"]:
        """All layers; in pieces where states between them are to be taken."""
        if not layout.layers:
            return self.run_layers(x, at, masks)
        ends = (0, *layout.layers, len(self.layers))
        for start, end in itertools.pairwise(ends):
            if end > start:
                if (start, end) not in self._pieces:
                    self._pieces[start, end] = in_order(self.layers[start:end])
                x = self._pieces[start, end](x, at, masks)
            if end in layout.layers:
                layout.taken[end] = x.clone().view(at.rows, at.width, -1)  # the next layers may overwrite x
        return x


def _rope_of(angles: Sequence[tuple[Sequence[float], float]], like: Tensor) -> Rope:
    return Rope([Rotary(torch.tensor(each, device=like.device), scale) for each, scale in angles], like)


class Embedding:
    """Rows of a table by token id; those of a table of few bits are read as they are stored."""

    def __init__(self, weight: Float[Tensor, "vocab dim"] | StoredMatrix, factor: float = 1.0) -> None:
        self.weight: Any = weight
        self.factor = factor
        self._rows = operations_for_stored(weight).ggml_rows if isinstance(weight, StoredMatrix) else _plain_rows

    def __call__(self, ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape dim"]:
        """The rows."""
        return _scaled(self._rows(self.weight, ids), self.factor)


def _plain_rows(weight: Float[Tensor, "vocab dim"], ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape dim"]:
    return F.embedding(ids, weight)


def _scaled(x: Float[Tensor, "*shape"], factor: float) -> Float[Tensor, "*shape"]:
    return x if factor == 1.0 else x.mul_(factor)


def _plain_norm(x: Float[Tensor, "*rows dim"], weight: Tensor, eps: float, whole: bool) -> Float[Tensor, "*rows dim"]:
    shape = x.shape[-1:]
    if whole:
        return F.rms_norm(x.to(weight.dtype), shape, eps=eps).mul_(weight).to(x.dtype)
    normed: Tensor = F.rms_norm(x, shape, eps=eps) * weight
    return normed


@fused("layers")
def scaled_norm(
    x: Float[Tensor, "*rows dim"], weight: Float[Tensor, " dim"], eps: float, whole: bool
) -> Float[Tensor, "*rows dim"]:
    """Rows normed by their root mean square and scaled; rounded once if `whole`, as where weights have an offset."""
    return _plain_norm(x, weight, eps, whole)


@fused("layers")
def gated_silu(x: Float[Tensor, "*rows both"]) -> Float[Tensor, "*rows dim"]:
    """silu(gate) up of rows that hold gate and up."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


class Norm:
    """Root mean square norm over the last dimension.

    Args:
        module: transformers' norm, or several whose inputs stand above one another in the last but one dimension.
        counts: how many rows of that dimension each of several norms has, one for each head.
        offset: added to the weights.
        pack: whether states may be read in ways of the CPU's own.
    """

    def __init__(self, *modules: Any, counts: tuple[int, ...] = (), offset: float = 0.0, pack: bool = True) -> None:
        weight = modules[0].weight
        if counts:
            weight = torch.cat([one.weight.expand(n, -1) for one, n in zip(modules, counts, strict=True)])
        size = weight.shape[-1]
        self.weight = weight.detach()
        self.shape = (size,)
        self.eps = eps_of(modules[0])
        self.fused = weight.device.type != "cpu"
        self.wide = torch.promote_types(weight.dtype, torch.float32)
        self.whole = self.weight.to(self.wide) + offset if offset else None
        self.scaled = (self.weight.to(self.wide) if self.whole is None else self.whole) * size**0.5
        self.added = size * self.eps  # to the sum of squares
        self.heads = sum(counts)
        self.least = torch.tensor(self.added**0.5, dtype=self.wide)
        self._counts = counts
        self._operations = native.operations_for(weight) if pack else None

    @property
    def is_native(self) -> bool:
        """Whether rows are normed by `native`."""
        return self._operations is not None

    def __call__(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """The normed rows; on the CPU in four operations, where torch's own has seven."""
        if self._operations is not None and not self._counts:
            return self._operations.norm(x, self.scaled, self.added)
        if self._operations is not None:
            each = zip(torch.split(x, list(self._counts), -2), itertools.accumulate(self._counts), strict=True)
            return torch.cat([self._operations.norm(part, self.scaled[end - 1], self.added) for part, end in each], -2)
        if self.fused and self.weight.dim() == 1:
            weight = self.weight if self.whole is None else self.whole
            return scaled_norm(x, weight, self.eps, self.whole is not None)
        if self.fused:
            return _plain_norm(x, self.weight if self.whole is None else self.whole, self.eps, self.whole is not None)
        length = torch.linalg.vector_norm(x, 2, -1, True, dtype=self.wide).hypot_(self.least)
        made: Tensor = (x * self.scaled).div_(length).to(x.dtype)
        return made


class WholeNorm:
    """A norm of all query heads together, and one of all key heads."""

    def __init__(self, norms: Sequence[Norm], counts: Sequence[int]) -> None:
        self._norms = norms
        self._counts = counts
        self.scaled = torch.cat([norm.scaled for norm in norms])
        self.added = norms[0].added
        self.eps = norms[0].eps
        self.heads = sum(counts)

    def __call__(self, x: Float[Tensor, "tokens heads dim"]) -> Float[Tensor, "tokens heads dim"]:
        """The normed heads of queries and keys."""
        each = zip(self._norms, torch.split(x, list(self._counts), 1), strict=True)
        return torch.cat([norm(part.flatten(1)).view(part.shape) for norm, part in each], 1)


class Layer:
    """One decoder layer.

    Args:
        layer: transformers' own, whose linear weights move in here.
        kind: of its attention mask.
        angles: which of the pass's rotary angles are its own.

    Attributes:
        source: number of the layer whose keys and values it reads, its own.
        embedded: embeddings of tokens in the layer; no family here has some.
        leaving: factor of what the layer makes.
        experts_in, experts_out, gated_out: norms where a layer has experts beside its gated part; no family here has.
    """

    embedded = experts_in = experts_out = gated_out = None
    leaving = 1.0

    def __init__(
        self, layer: Any, number: int, kind: str, traits: Traits = LLAMA, *, angles: int = 0, pack: bool = True
    ) -> None:
        attention, config = layer.self_attn, layer.self_attn.config
        self.number = self.source = number
        self.kind = kind
        self.traits = traits
        heads = Heads(
            int(config.num_attention_heads),
            int(config.num_key_value_heads),
            int(attention.head_dim),
            float(attention.scaling),
            angles * int(attention.head_dim),
            traits.cap,
        )
        self.heads = heads
        before, mixed, between, made = traits.norms
        self.before = _norm_in(layer, before, traits, pack=pack)
        self.mixed = _norm_in(layer, mixed, traits, pack=pack)
        self.between = _norm_in(layer, between, traits, pack=pack)
        self.made = _norm_in(layer, made, traits, pack=pack)
        turned = [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
        self.turned = norm_of_heads(turned, heads, traits, pack=pack)
        like = getattr(layer, next(filter(None, traits.norms))).weight
        self.sinks = attention.sinks.float() if traits.sinks else None
        self.attention = attention_of(heads, like, self.sinks, pack=pack)
        rows = _rows_in_order(heads, traits.order) if traits.order else None
        self.qkv = fuse(attention, traits.qkv, rows=rows, pack=pack)
        self.out = fuse(attention, ["o_proj"], pack=pack)
        self.mixture = None if traits.experts is None else Mixture(layer.mlp, traits, like)
        self.mixer = None
        self.gates = 0
        self.gate_up: Any = None
        self.down: Any = None
        if self.mixture is None:
            self.gated = gate_of(like, traits.activation, pack=pack)
            self.gate_up = fuse(layer.mlp, traits.gate_up, pack=pack)
            self.down = fuse(layer.mlp, ["down_proj"], pack=pack)

    @property
    def products(self) -> dict[str, PackedLinear]:
        """All its products but those of experts, by name."""
        return {name: getattr(self, name) for name in PRODUCTS[: 4 if self.mixture is None else 2]}

    @property
    def size(self) -> int:
        """Numbers of a hidden state."""
        return int(self.out.weight.outs)

    @property
    def factors(self) -> tuple[float, float]:
        """Of what attention and the gated part add to the hidden states."""
        return self.traits.residual, self.traits.residual

    @property
    def inner(self) -> int:
        """Number of the gated inputs; 0 where these are in experts."""
        return int(self.down.weight.ins) if self.mixture is None else 0

    @property
    def norms(self) -> list[Norm | WholeNorm]:
        """All its norms."""
        every: list[Norm | WholeNorm | None] = [getattr(self, name) for name in NORMS]
        return [norm for norm in every if norm is not None]

    def quantized(self, bits: int, inputs: Mapping[str, MeasuredInputs | None] | None = None) -> Layer:
        """The same with quantized weights, and what is known of each product's inputs; norms are shared."""
        made = copy.copy(self)
        for name, product in self.products.items():
            setattr(made, name, product.quantized(bits, inputs=(inputs or {}).get(name)))
        return made

    @property
    def gates_natively(self) -> bool:
        """Whether rows are gated by `native`."""
        return self.mixture is not None or not isinstance(self.gated, TorchGate)

    def __call__(self, x: Float[Tensor, "tokens dim"], at: Pass, mask: Any) -> Float[Tensor, "tokens dim"]:
        """The layer's output; its keys and values go to the cache."""
        return self.attend(self.normed(x), x, at, mask)

    def normed(self, x: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """What attention reads: x, normed where the family does that."""
        return x if self.before is None else self.before(x)

    def attend(
        self, given: Float[Tensor, "tokens wide"], x: Float[Tensor, "tokens dim"], at: Pass, mask: Any
    ) -> Float[Tensor, "tokens dim"]:
        """The same where attention reads `given` in place of the normed x."""
        return self.finish(self.attention(self.number, self.project(given), at, mask), x)

    def project(self, given: Float[Tensor, "tokens wide"]) -> Float[Tensor, "tokens heads dim"]:
        """Queries, keys and values of what attention reads, in the form that it takes."""
        heads = self.heads
        fused = self.qkv(given).view(given.shape[0], -1, heads.dim)
        if self.turned is not None:
            turned = fused.narrow(1, 0, heads.queries + heads.keys)
            turned.copy_(self.turned(turned))
        return fused

    def finish(self, attended: Float[Tensor, "tokens inner"], x: Float[Tensor, "tokens dim"]) -> Tensor:
        """The layer's output after attention's, where x is the layer's input."""
        x = self._added(self.out, attended, x, self.mixed)
        given = x if self.between is None else self.between(x)
        if self.mixture is not None:
            return self._added(self.mixture, given, x, self.made)
        return self._added(self.down, self.gated(self.gate_up(given)), x, self.made)

    def _added(self, product: PackedLinear | Mixture, given: Tensor, x: Tensor, norm: Norm | None) -> Tensor:
        """x with what a part adds to it: a product, normed and scaled where the family does that."""
        if norm is None and self.traits.residual == 1.0:
            return product.onto(given, x)
        made = product(given)
        return _scaled(made if norm is None else norm(made), self.traits.residual).add_(x)


def _norm_in(layer: Any, name: str | None, traits: Traits, *, pack: bool) -> Norm | None:
    return None if name is None else Norm(getattr(layer, name), offset=traits.offset, pack=pack)


def norm_of_heads(norms: Sequence[Any], heads: Heads, traits: Traits, *, pack: bool = True) -> Norm | WholeNorm | None:
    """The norm of queries and keys, and of values where they have one, from the norms of each in this order."""
    if not norms:
        return None
    counts = (heads.queries, heads.keys, heads.keys)[: len(norms)]
    order, plain = torch.tensor(traits.order or range(heads.dim)), torch.arange(heads.dim)
    if not traits.whole:
        ordered = [_norm_in_order(one, each) for one, each in zip(norms, (order, order, plain), strict=False)]
        return Norm(*ordered, counts=counts, offset=traits.offset, pack=pack)
    rows = [(torch.arange(count).unsqueeze(1) * heads.dim + order).flatten() for count in counts]
    ordered = [_norm_in_order(one, each) for one, each in zip(norms, rows, strict=True)]
    return WholeNorm([Norm(one, offset=traits.offset, pack=pack) for one in ordered], counts)


def _norm_in_order(norm: Any, order: Int[Tensor, " dim"]) -> SimpleNamespace:
    return SimpleNamespace(weight=norm.weight.detach()[order.to(norm.weight.device)], variance_epsilon=eps_of(norm))


def _rows_in_order(heads: Heads, order: Sequence[int]) -> Int[Tensor, " outs"]:
    """Rows of the joint weight of queries, keys and values, those of queries and keys in another order in each head."""
    whole = torch.arange((heads.queries + 2 * heads.keys) * heads.dim).view(-1, heads.dim)
    turned = heads.queries + heads.keys
    return torch.cat((whole[:turned, list(order)], whole[turned:])).flatten()


def _place(number: int, product: str) -> str:
    """What a product of a layer is called in files."""
    return f"{number}.{product}"


def in_order(layers: Sequence[Any]) -> Callable[[Tensor, Pass, Mapping[str, Any]], Tensor]:
    """Layers that follow one another, as one function of hidden states, the pass and what each kind of layer sees."""
    return native_layers(layers) or partial(_one_by_one, layers)


def _one_by_one(layers: Sequence[Layer], x: Tensor, at: Pass, masks: Mapping[str, Any]) -> Float[Tensor, "tokens dim"]:
    for layer in layers:
        x = layer(x, at, masks[layer.kind])
    return x


class TorchGate:
    """act(gate) up of rows that hold gate and up, by torch's operations."""

    def __init__(self, activation: str) -> None:
        self._act = ACTIVATIONS[activation]
        self._is_silu = activation == "silu"

    def __call__(self, x: Float[Tensor, "*rows both"]) -> Float[Tensor, "*rows dim"]:
        """The gated rows."""
        if self._is_silu and x.is_cuda:
            return gated_silu(x)
        gate, up = x.chunk(2, -1)
        return self._act(gate).mul_(up)


def gate_of(like: Tensor, activation: str = "silu", *, pack: bool) -> Callable[[Tensor], Tensor]:
    """The fastest way to gate rows; see `attention_of`."""
    operations = native.operations_for(like) if pack else None
    if operations is None:
        return TorchGate(activation)
    return partial(operations.gated, activation=activation)
