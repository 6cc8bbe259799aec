"""A feature head as a backend: it reads drafted tokens with the states that the target left in its own session."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.backends.cache.layout import Layout
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.cache.slot_cache import SlotCache
from draftproof.backends.heads.base import HeadBackend, HeadNet
from draftproof.backends.heads.feature_net import EPS, FeatureConfig, FeatureNet, rotary
from draftproof.backends.lean.attention import Pass
from draftproof.backends.lean.layers import Layer, Norm, in_order
from draftproof.backends.lean.native_layers import native_layers
from draftproof.backends.lean.rotary import Rope
from draftproof.backends.products.packed_linear import Product
from draftproof.errors import UserError

_KIND = "full_attention"


class LeanNet(HeadNet):
    """A head's network as the lean forward runs a layer: the same numbers as `FeatureNet`, in fewer operations."""

    def __init__(self, net: FeatureNet, target: SlotBackend, bits: int | None = None) -> None:
        config = net.config
        self.width = config.hidden_size
        self.embed = target.embed
        self.ids = None if config.ids == target.vocab_size else net.ids
        output = Product(target.output_rows(net.ids) if net.output is None else net.output.weight.detach())
        self.logits = output
        self._window = config.window
        self._states, self._embedded, self._last = (Norm(_norm(net.norms[place])) for place in (0, 1, 4))
        self._fuse = Product(net.fuse.weight.detach())
        layer = Layer(_llama_layer(net), 0, _KIND)
        if bits is not None:
            if native_layers([layer]) is None or self._fuse.layout != "native":
                raise UserError(
                    f"the feature head of {config.target} cannot be quantized, because its products are not native "
                    f"here: use a float type, or unset DRAFTPROOF_NATIVE=0"
                )
            layer, self._fuse = layer.quantized(bits), self._fuse.quantized(bits)
            self.logits = output.quantized_output(bits)
        self._attention = layer.attention
        self._run_layers = in_order([layer])
        self._rope = Rope(partial(_angles, config), net.fuse.weight.detach())

    def __call__(
        self,
        states: Float[Tensor, "rows width dim"],
        embedded: Float[Tensor, "rows width dim"],
        layout: Layout,
        cache: SlotCache,
    ) -> Float[Tensor, "rows width dim"]:
        """See `FeatureNet.forward`; keys and values go to the cache."""
        rows, width, _ = states.shape
        at = Pass(rows, width, *self._rope(layout.positions.view(-1), layout.plan.horizon), cache, layout.plan)
        masks = {_KIND: self._attention.mask(layout, self._window, states.dtype)}
        x = self._fuse(torch.cat([self._states(states), self._embedded(embedded)], -1).flatten(0, 1))
        return self._last(self._run_layers(x, at, masks)).view(states.shape)


def _llama_layer(net: FeatureNet) -> SimpleNamespace:
    """A head's weights under the names that `Layer` knows them by."""
    config = net.config
    keys, values = net.keys_values.weight.chunk(2)
    gate, up = net.gate_up.weight.chunk(2)
    return SimpleNamespace(
        input_layernorm=_norm(net.norms[2]),
        post_attention_layernorm=_norm(net.norms[3]),
        self_attn=SimpleNamespace(
            head_dim=net.head_dim,
            scaling=net.head_dim**-0.5,
            config=SimpleNamespace(num_attention_heads=config.heads, num_key_value_heads=config.key_heads),
            q_proj=_linear(net.queries.weight),
            k_proj=_linear(keys),
            v_proj=_linear(values),
            o_proj=_linear(net.mixed.weight),
        ),
        mlp=SimpleNamespace(gate_proj=_linear(gate), up_proj=_linear(up), down_proj=_linear(net.down.weight)),
    )


def _linear(weight: Float[Tensor, "out in"]) -> SimpleNamespace:
    return SimpleNamespace(weight=weight.detach(), bias=None, out_features=weight.shape[0])


def _norm(weight: Float[Tensor, " dim"]) -> SimpleNamespace:
    return SimpleNamespace(weight=weight.detach(), variance_epsilon=EPS)


def _angles(config: FeatureConfig, like: Tensor, *, position_ids: Int[Tensor, "1 positions"]) -> tuple[Tensor, Tensor]:
    """Cosines and sines in the shape that transformers' rotary embeddings have."""
    cos, sin = rotary(config, position_ids, like.dtype)
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


class FeatureBackend(HeadBackend):
    """A feature head over the target it was made for.

    Raises:
        UserError: made for a target of another name, width or vocabulary, or it cannot be quantized here.
    """

    def __init__(self, target: SlotBackend, net: FeatureNet, bits: int | None = None) -> None:
        refuse_other_target(net, target)
        self.config = net.config
        net = net.to(device=target.device, dtype=target.dtype)
        super().__init__(target, LeanNet(net, target, bits), f"feature head of {target.name}")


def refuse_other_target(net: FeatureNet, target: SlotBackend) -> None:
    """Refuse a head that was made for another model."""
    config = net.config
    there = (target.capabilities.hidden, target.vocab_size)
    if (config.hidden_size, config.vocab_size) != there:
        raise UserError(
            f"the feature head was made for {config.target} (width {config.hidden_size}, {config.vocab_size} tokens), "
            f"and {target.name} has width {there[0]} and {there[1]} tokens: train one for it"
        )
    if Path(config.target).name.lower() != Path(target.name).name.lower():
        raise UserError(
            f"the feature head was made for {config.target}, and the target is {target.name}: "
            "train one for it with `draftproof train feature-head`"
        )
