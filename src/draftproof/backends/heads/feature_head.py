"""A feature head as a backend: it reads drafted tokens with the states that the target left in its own session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.backends.base import Feed, FeedOutput
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.heads.base import Flat, FollowingSession, HeadBackend, LayeredNet, Passes
from draftproof.backends.heads.feature_net import EPS, FeatureConfig, FeatureNet, rotary
from draftproof.backends.heads.fit import MadeFor, refuse_unfit
from draftproof.backends.lean.attention import Pass
from draftproof.backends.lean.layers import Layer, Norm, in_order
from draftproof.backends.lean.native_layers import native_layers
from draftproof.backends.lean.rotary import Rope
from draftproof.backends.products.packed_linear import PackedLinear
from draftproof.errors import UserError

_KIND = "full_attention"


class LeanNet(LayeredNet):
    """A head's network as the lean forward runs a layer: the same numbers as `FeatureNet`, in fewer operations."""

    def __init__(self, net: FeatureNet, target: SlotBackend, bits: int | None = None) -> None:
        config = net.config
        self.width = config.hidden_size
        self.embed = target.embed
        self.ids = None if config.ids == target.vocab_size else net.ids
        output = PackedLinear(target.output_rows(net.ids) if net.output is None else net.output.weight.detach())
        self.logits = output
        self._states = Norm(_norm(net.norms[0]))
        self._embedded = Norm(_norm(net.norms[1]))
        self._last = Norm(_norm(net.norms[4]))
        self._fuse = PackedLinear(net.fuse.weight.detach())
        layer = Layer(_llama_layer(net), 0, _KIND)
        if bits is not None:
            if native_layers([layer]) is None or self._fuse.layout != "native":
                raise UserError(
                    f"the feature head of {config.target} cannot be quantized, because its products are not native "
                    f"here: use a float type, or unset DRAFTPROOF_NATIVE=0"
                )
            layer = layer.quantized(bits)
            self._fuse = self._fuse.quantized(bits)
            self.logits = output.quantized_output(bits)
        self._run_layers = in_order([layer])
        rope = Rope(partial(_angles, config), net.fuse.weight.detach())
        self._passes = Passes(rope, layer.attention, {_KIND: config.window})

    def _run(self, x: Flat, embedded: Flat, at: Pass, masks: dict[str, Any]) -> Flat:
        x = self._fuse(torch.cat([self._states(x), self._embedded(embedded)], -1))
        return self._last(self._run_layers(x, at, masks))


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
    return SimpleNamespace(weight=weight.detach(), bias=None)


def _norm(weight: Float[Tensor, " dim"]) -> SimpleNamespace:
    return SimpleNamespace(weight=weight.detach(), variance_epsilon=EPS)


def _angles(config: FeatureConfig, like: Tensor, *, position_ids: Int[Tensor, "1 positions"]) -> tuple[Tensor, Tensor]:
    """Cosines and sines in the shape that transformers' rotary embeddings have."""
    cos, sin = rotary(config, position_ids, like.dtype)
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


class FeatureBackend(HeadBackend):
    """A feature head over the target it was made for.

    Raises:
        UserError: it does not fit the target, or it cannot be quantized here.
    """

    def __init__(self, target: SlotBackend, net: FeatureNet, bits: int | None = None) -> None:
        refuse_other_target(net, target)
        self.config = net.config
        net = net.to(device=target.device, dtype=target.dtype)
        super().__init__(target, LeanNet(net, target, bits), f"feature head of {target.name}")


def refuse_other_target(net: FeatureNet, target: SlotBackend) -> None:
    """Refuse a head that does not fit a target (`fit`)."""
    config = net.config
    made_for = MadeFor(config.target, config.hidden_size, config.vocab_size, config.layers)
    refuse_unfit("the feature head", made_for, target)


# --- without a target beside it --------------------------------------------------------------------------------------


class _Followed(FollowingSession):
    """A head's session that owns the target's."""

    def close(self) -> None:
        """Release both slots."""
        super().close()
        self.owner.close()


class StandaloneHead(FeatureBackend):
    """A feature head as a model of its own, which reads chains: its target reads the first feed of a session.

    A draft of the head begins at a target's last state. In a session opened here, the first feed is taken as the
    committed tokens, and all later tokens as drafted ones. So code that reads or samples from a draft model also works
    with a feature head.
    """

    def __init__(self, target: SlotBackend, net: FeatureNet) -> None:
        super().__init__(target, net)
        self._target = target
        self.capabilities = replace(self.capabilities, trees=False)

    def open(self) -> FollowingSession:
        """A session whose draft begins where its first feed ends."""
        return _Followed(self._cache, self._target.open())

    def forward(self, feeds: Sequence[Feed], *, hidden: bool = False) -> list[FeedOutput]:
        """Read every feed: rows for the last chain token of each, and for the nodes of a chain below it.

        Raises:
            ValueError: nothing to read, or a tree that branches.
        """
        if any(feed.tree is not None and not feed.tree.is_chain for feed in feeds):
            raise ValueError("a feature head that reads by itself reads chains only")
        self._begin([feed for feed in feeds if not feed.session.length])
        found = [[output] for output in super().forward([replace(feed, tree=None) for feed in feeds], hidden=hidden)]
        drafted = [() if feed.tree is None else feed.tree.ids for feed in feeds]
        for place in range(max(map(len, drafted), default=0)):
            active = [row for row, tokens in enumerate(drafted) if place < len(tokens)]
            read = super().forward([Feed(feeds[row].session, [drafted[row][place]]) for row in active], hidden=hidden)
            for row, output in zip(active, read, strict=True):
                found[row].append(output)
        return [_joined(parts) for parts in found]

    def _begin(self, feeds: Sequence[Feed]) -> None:
        """Let the target read the first tokens of new sessions, except the last one, which the head reads."""
        sessions = [feed.session for feed in feeds if len(feed.tokens) > 1 and isinstance(feed.session, _Followed)]
        parts = [feed.tokens[:-1] for feed in feeds if len(feed.tokens) > 1]
        if sessions:
            self._target.forward([Feed(each.owner, part) for each, part in zip(sessions, parts, strict=True)])


def _joined(parts: Sequence[FeedOutput]) -> FeedOutput:
    states = [part.hidden for part in parts if part.hidden is not None]
    logits = torch.cat([part.logits for part in parts])
    return FeedOutput(logits, torch.cat(states) if states else None, parts[0].ids)
