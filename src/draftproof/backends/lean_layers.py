"""A lean forward pass for the Llama family: the arithmetic of transformers' modules in a third of the operations.

Queries, keys and values are one product, and so are gate and up; weights are packed for the CPU (`packed`); keys go
straight into the slot cache, in transformers' layout, and are never expanded to the number of query heads
(`attention`); logits are computed for the requested columns only. Where all parts of layers are C code they are one
call (`native_layers`).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.backends.attention import Heads, NativeAttention, Pass
from draftproof.backends.attention import attention as attention_of
from draftproof.backends.layout import Layout
from draftproof.backends.native_layers import PRODUCTS, native_layers
from draftproof.backends.packed import Product, fuse, give_back
from draftproof.backends.slot_cache import SlotCache
from draftproof.backends.windows import Windows
from draftproof.errors import UserError
from draftproof.kernels import native
from draftproof.kernels.operations import BITS

_FIRST_POSITIONS = 512


class Lean:
    """The forward pass over the weights of a model, which move in here.

    Args:
        model: a transformers model that `lean.supports` supports, or parts of the same names (`checkpoint`).
        windows: the kinds of attention mask that it builds.
        layer_kinds: the kind of each layer, where there are several.
        pack: whether to pack weights for the CPU.
    """

    def __init__(
        self, model: Any, windows: Windows, layer_kinds: Sequence[str] | None = None, *, pack: bool = True
    ) -> None:
        inner = model.model
        tied = model.lm_head.weight is inner.embed_tokens.weight
        self.embed = Embedding(inner.embed_tokens.weight)
        self.tied = tied
        self.head = Product(self.embed.weight, pack=pack) if tied else fuse(model, ["lm_head"], pack=pack)
        self.rope = Rope(inner.rotary_emb, self.embed.weight)
        self.windows = windows
        kinds = [next(iter(windows.kinds))] * len(inner.layers) if len(windows.kinds) == 1 else layer_kinds
        assert kinds is not None, "a model with several kinds of layer says which is which"
        self.layers = [Layer(layer, number, kinds[number], pack=pack) for number, layer in enumerate(inner.layers)]
        self.run_layers = in_order(self.layers)
        self._pieces: dict[tuple[int, int], Callable[..., Tensor]] = {}
        self.norm = Norm(inner.norm, pack=pack)
        give_back()

    @property
    def packs(self) -> bool:
        """Whether its attention reads feeds without padding (`Layout`)."""
        return all(isinstance(layer.attention, NativeAttention) for layer in self.layers)

    def first(self, layers: int) -> Lean:
        """The same with its first layers only."""
        made = copy.copy(self)
        made.layers = self.layers[:layers]
        made.run_layers, made._pieces = in_order(made.layers), {}  # noqa: SLF001 - of this class
        return made

    def quantizing(self, bits: int, name: str) -> Iterator[Lean | None]:
        """The same with quantized weights, made in steps: None after each step, and at last the result.

        Args:
            bits: of a weight.
            name: the model's, for errors.

        Raises:
            UserError: another number of bits, or layers that are not native; before the first step.
        """
        if bits not in BITS:
            raise UserError(f"{bits} bits for the weights of {name}: legal are {' and '.join(map(str, BITS))}")
        why = self._why_not_quantized(bits)
        if why is not None:
            raise UserError(f"{name} cannot be quantized: {why}")
        yield None
        made = copy.copy(self)
        made.layers = []
        for layer in self.layers:
            made.layers.append(layer.quantized(bits))
            yield None
        made.head = self.head.quantized_output(bits, self.embed.weight if self.tied else None)
        made.run_layers, made._pieces = in_order(made.layers), {}  # noqa: SLF001 - of this class
        yield made

    def _why_not_quantized(self, bits: int) -> str | None:
        if self.embed.weight.device.type == "cpu" and native_layers(self.layers) is None:
            return (
                "its layers are not native: legal on backend lean are models whose heads have a multiple of 16 numbers "
                "(32 in bfloat16), and DRAFTPROOF_NATIVE must not be 0"
            )
        products = [getattr(layer, name) for layer in self.layers for name in PRODUCTS]
        return next((why for each in (*products, self.head) if (why := each.why_not_quantized(bits)) is not None), None)

    def __call__(self, layout: Layout, cache: SlotCache, *, hidden: bool) -> tuple[Tensor, Tensor | None]:
        """Logits of the requested columns [rows, columns, vocab], and the last hidden state of each column if asked."""
        rows, width = layout.ids.shape
        x = self.embed(layout.ids.view(-1))
        at = Pass(rows, width, *self.rope(layout.positions.view(-1), layout.plan.horizon), cache, layout.plan)
        attention = self.layers[0].attention
        masks = {kind: attention.mask(layout, window, x.dtype) for kind, window in self.windows.now().items()}
        states = self.norm(self._run(x, at, masks, layout)).view(rows, width, -1)
        columns = len(layout.columns)
        chosen = states if columns == width else states.index_select(1, layout.requested)
        logits = self.head(chosen.flatten(0, 1)).view(rows, columns, -1)
        return logits, states if hidden else None

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


class Embedding:
    """Rows of a table by token id.

    Args:
        weight: the table.
    """

    def __init__(self, weight: Float[Tensor, "vocab dim"]) -> None:
        self.weight = weight

    def __call__(self, ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape dim"]:
        """The rows."""
        return F.embedding(ids, self.weight)


class Rope:
    """Rotary angles by position, from the model's own module; the table grows by doubling.

    Args:
        module: the model's rotary embedding.
        like: a tensor of the dtype and on the device of the hidden states.
    """

    def __init__(self, module: Any, like: Tensor) -> None:
        self.module = module
        self._like = like
        self._table = like.new_empty((0, 0))

    def __call__(self, positions: Int[Tensor, " tokens"], horizon: int) -> tuple[Tensor, Tensor]:
        """Cosine, and sine with the sign of `rotate_half`, each [tokens, 1, dim].

        Args:
            positions: of each token.
            horizon: more than the largest of them.
        """
        if horizon > self._table.shape[0]:
            self._grow(max(horizon, 2 * self._table.shape[0], _FIRST_POSITIONS))
        cos, sin = F.embedding(positions, self._table).unsqueeze(1).chunk(2, -1)
        return cos, sin

    def _grow(self, size: int) -> None:
        positions = torch.arange(size, device=self._like.device).unsqueeze(0)
        cos, sin = self.module(self._like, position_ids=positions)
        low, high = sin[0].chunk(2, -1)
        self._table = torch.cat((cos[0], -low, high), -1)


class Norm:
    """Root mean square norm over the last dimension.

    Args:
        module: transformers' norm, or several whose inputs stand above one another in the last but one dimension.
        counts: how many rows of that dimension each of several norms has.
        pack: whether states may be read in ways of the CPU's own.
    """

    def __init__(self, *modules: Any, counts: tuple[int, ...] = (), pack: bool = True) -> None:
        weight = modules[0].weight
        if counts:
            weight = torch.cat([one.weight.expand(n, -1) for one, n in zip(modules, counts, strict=True)])
        size = weight.shape[-1]
        self.weight, self.shape, self.eps = weight.detach(), (size,), float(modules[0].variance_epsilon)
        self.fused = weight.device.type != "cpu"
        self.wide = torch.promote_types(weight.dtype, torch.float32)
        self.scaled = weight.detach().to(self.wide) * size**0.5
        self.added = size * self.eps  # to the sum of squares
        self.least = torch.tensor(self.added**0.5, dtype=self.wide)
        self._operations = native.operations(weight) if pack and not counts else None

    @property
    def is_native(self) -> bool:
        """Whether rows are normed by `native`."""
        return self._operations is not None

    def __call__(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """The normed rows; on the CPU in four operations, where torch's own has seven."""
        if self._operations is not None:
            return self._operations.norm(x, self.scaled, self.added)
        if self.fused:
            normed: Tensor = F.rms_norm(x, self.shape, eps=self.eps) * self.weight
            return normed
        length = torch.linalg.vector_norm(x, 2, -1, True, dtype=self.wide).hypot_(self.least)
        made: Tensor = (x * self.scaled).div_(length).to(x.dtype)
        return made


class Layer:
    """One decoder layer.

    Args:
        layer: transformers' own, whose linear weights move in here.
        number: its place, from 0.
        kind: of its attention mask.
        pack: whether to pack weights for the CPU.
    """

    def __init__(self, layer: Any, number: int, kind: str, *, pack: bool = True) -> None:
        attention, config = layer.self_attn, layer.self_attn.config
        self.number, self.kind = number, kind
        heads = Heads(
            int(config.num_attention_heads),
            int(config.num_key_value_heads),
            int(attention.head_dim),
            float(attention.scaling),
        )
        self.heads = heads
        self.qk_norm = None
        if hasattr(attention, "q_norm"):
            self.qk_norm = Norm(attention.q_norm, attention.k_norm, counts=(heads.queries, heads.keys), pack=pack)
        self.before = Norm(layer.input_layernorm, pack=pack)
        self.between = Norm(layer.post_attention_layernorm, pack=pack)
        self.attention = attention_of(heads, layer.input_layernorm.weight, pack=pack)
        self.gated = gate_of(layer.input_layernorm.weight, pack=pack)
        self.qkv = fuse(attention, ["q_proj", "k_proj", "v_proj"], pack=pack)
        self.out = fuse(attention, ["o_proj"], pack=pack)
        self.gate_up = fuse(layer.mlp, ["gate_proj", "up_proj"], pack=pack)
        self.down = fuse(layer.mlp, ["down_proj"], pack=pack)

    def quantized(self, bits: int) -> Layer:
        """The same with quantized weights; norms are shared."""
        made = copy.copy(self)
        for name in PRODUCTS:
            setattr(made, name, getattr(self, name).quantized(bits))
        return made

    @property
    def gates_natively(self) -> bool:
        """Whether rows are gated by `native`."""
        return self.gated is not gated

    def __call__(self, x: Float[Tensor, "tokens dim"], at: Pass, mask: Any) -> Float[Tensor, "tokens dim"]:
        """The layer's output; its keys and values go to the cache."""
        return self.attend(self.before(x), x, at, mask)

    def attend(
        self, given: Float[Tensor, "tokens wide"], x: Float[Tensor, "tokens dim"], at: Pass, mask: Any
    ) -> Float[Tensor, "tokens dim"]:
        """The same where attention reads `given` in place of the normed x."""
        heads = self.heads
        fused = self.qkv(given).view(x.shape[0], -1, heads.dim)
        if self.qk_norm is not None:
            turned = fused.narrow(1, 0, heads.queries + heads.keys)
            turned.copy_(self.qk_norm(turned))
        x = self.out.onto(self.attention(self.number, fused, at, mask), x)
        return self.down.onto(self.gated(self.gate_up(self.between(x))), x)


def in_order(layers: Sequence[Layer]) -> Callable[[Tensor, Pass, Mapping[str, Any]], Tensor]:
    """Layers that follow one another, as one function of hidden states, the pass and what each kind of layer sees."""
    return native_layers(layers) or partial(_one_by_one, layers)


def _one_by_one(layers: Sequence[Layer], x: Tensor, at: Pass, masks: Mapping[str, Any]) -> Float[Tensor, "tokens dim"]:
    for layer in layers:
        x = layer(x, at, masks[layer.kind])
    return x


def gated(x: Float[Tensor, "*rows both"]) -> Float[Tensor, "*rows dim"]:
    """silu(gate) up, where each row holds gate and up."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gate_of(like: Tensor, *, pack: bool) -> Callable[[Tensor], Tensor]:
    """The fastest way to gate rows; see `attention_of`."""
    operations = native.operations(like) if pack else None
    return gated if operations is None else operations.gated
