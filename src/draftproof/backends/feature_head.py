"""A feature head as a backend: it reads drafted tokens with the states that the target left in its own session."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftproof.backends.attention import Pass
from draftproof.backends.base import Capabilities, Feed, FeedOutput, Session
from draftproof.backends.feature_net import EPS, FeatureConfig, FeatureNet, rotary
from draftproof.backends.layout import Layout
from draftproof.backends.lean_layers import Layer, Norm, Rope, in_order
from draftproof.backends.native_layers import native_layers
from draftproof.backends.packed import HEAD_BITS, Product
from draftproof.backends.passes import in_passes
from draftproof.backends.sessions import SlotSession
from draftproof.backends.slot_cache import SlotCache
from draftproof.backends.slots import SlotBackend
from draftproof.errors import UserError

_KIND = "full_attention"


class FeatureSession(SlotSession):
    """What a feature head has read of a sequence: its own keys, values and output states, beside the target's session.

    Args:
        cache: the head's.
        owner: the target's session of the same sequence, whose states are read.

    Attributes:
        certain: leading slots that were read with the target's states; the others are read again when those are there.
    """

    def __init__(self, cache: SlotCache, owner: Session) -> None:
        super().__init__(cache)
        self.owner = owner
        self.certain = 0

    def _empty(self) -> None:
        """It cannot be copied: it follows another session."""

    @property
    def known(self) -> int:
        """How many leading states the target's session holds."""
        return self.owner.stem if self.owner.records else 0

    def rewind(self) -> None:
        """Forget what was read with states of the head's own making."""
        self.certain = min(self.certain, self.stem)
        if self.length > self.certain:
            self.keep(self.certain)

    def above(self, feed: Feed) -> tuple[Float[Tensor, "tokens dim"] | None, int]:
        """The state before each token of a feed, and how many of them are the target's; None before the first token.

        Raises:
            ValueError: a state that this very pass would have to make.
        """
        first, known, chain = self.length, self.known, len(feed.tokens)
        slots = list(range(first - 1, first - 1 + chain))
        if feed.tree is not None:
            stem = self.stem + chain
            slots += [stem + parent if parent >= 0 else stem - 1 for parent in feed.tree.parents]
        true = sum(slot < known for slot in slots)
        theirs, own = slots[:true], slots[true:]
        if own and max(own) >= first:
            raise ValueError("a feature head reads drafted tokens level by level, and others after the target did")
        if theirs and theirs[0] < 0:
            theirs = theirs[1:]
        parts = [each.states_at(some) for each, some in ((self.owner, theirs), (self, own)) if some]
        return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else None, true


class LeanNet:
    """A head's network as the lean forward runs a model's layer: the same numbers as `FeatureNet`, in fewer operations.

    Args:
        net: on its device, in its dtype.
        bits: of quantized weights; None for weights of its dtype.

    Raises:
        UserError: it cannot be quantized here.
    """

    def __init__(self, net: FeatureNet, bits: int | None = None) -> None:
        config = net.config
        self._window = config.window
        self._states, self._embedded, self._last = (Norm(_norm(net.norms[place])) for place in (0, 1, 4))
        self._fuse = Product(net.fuse.weight.detach())
        layer = Layer(_llama_layer(net), 0, _KIND)
        if bits is not None:
            if native_layers([layer]) is None or self._fuse.layout != "native":
                raise UserError(
                    f"the feature head of {config.target} cannot be quantized, because its products are not native "
                    f"here: legal are float types, and DRAFTPROOF_NATIVE must not be 0"
                )
            layer, self._fuse = layer.quantized(bits), self._fuse.quantized(bits)
        self._attention, self._run_layers = layer.attention, in_order([layer])
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


class FeatureBackend:
    """A feature head over the target it was made for.

    Args:
        target: a backend of a transformers model; its sessions keep their states from now on.
        net: the head; moved to the target's device and dtype.
        bits: of quantized weights, 4 or 8; its output layer has `HEAD_BITS` then. None for weights of its dtype.

    Raises:
        UserError: made for a target of another name, width or vocabulary, or it cannot be quantized here.
    """

    def __init__(self, target: SlotBackend, net: FeatureNet, bits: int | None = None) -> None:
        refuse_other_target(net, target)
        self.name = f"feature head of {target.name}"
        self.vocab_size = target.vocab_size
        self.max_positions = target.max_positions
        self.capabilities = Capabilities(trees=target.capabilities.trees, hidden=net.config.hidden_size)
        self.config = net.config
        net = net.to(device=target.device, dtype=target.dtype)
        self.ids = net.ids
        self._dtype = target.dtype
        self._embed = target.embed
        self._run_net = LeanNet(net, bits)
        self._output = Product(target.output_rows(net.ids) if net.output is None else net.output.weight.detach())
        if bits is not None:
            self._output = self._output.quantized(HEAD_BITS)
        self._ids = None if net.config.ids == self.vocab_size else net.ids
        self._cache = SlotCache()
        target.record_states()

    @property
    def device(self) -> torch.device:
        """The target's."""
        return self.ids.device

    def open(self) -> FeatureSession:
        """A session without a target's: it can read one token, and continue it one by one."""
        return self.follow(Session())

    def follow(self, owner: Session) -> FeatureSession:
        """A session that reads what the target's session has read, with its states."""
        return FeatureSession(self._cache, owner)

    def sequences_nbytes(self, lengths: Sequence[int]) -> int:
        """Bytes that sessions of these lengths take together: keys, values and output states."""
        return self._cache.batch_nbytes(lengths) + self.config.hidden_size * self._dtype.itemsize * sum(lengths)

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], *, hidden: bool = False) -> list[FeedOutput]:
        """Read every feed; the drafted tokens of one level a pass.

        Raises:
            ValueError: nothing to read, or a state that nobody has made yet.
        """
        with self._cache.lock:
            for feed in feeds:
                feed.session.admit(len(feed.tokens), feed.tree)
            return in_passes(feeds, partial(self._run, hidden=hidden))

    def _run(self, feeds: Sequence[Feed], *, hidden: bool) -> list[FeedOutput]:
        sessions = [feed.session for feed in feeds if isinstance(feed.session, FeatureSession)]
        assert len(sessions) == len(feeds), "a feature head reads sessions of its own"
        layout = Layout(feeds, self.device)
        found = [session.above(feed) for session, feed in zip(sessions, feeds, strict=True)]
        states = self._padded([self._filled(part, len(feed)) for (part, _), feed in zip(found, feeds, strict=True)])
        self._cache.claim(layout.plan.slots, layout.plan.ends)
        out = self._run_net(states, self._embed(layout.ids), layout, self._cache)
        outputs = self._outputs(feeds, out, hidden=hidden)
        for row, (session, feed) in enumerate(zip(sessions, feeds, strict=True)):
            if session.certain == session.length:
                session.certain += found[row][1]
            session.remember(out[row, : len(feed)])
            session.read(feed.tokens, feed.tree)
        return outputs

    def _filled(self, part: Tensor | None, size: int) -> Float[Tensor, "tokens dim"]:
        """States before a feed's tokens; zeros before the first token of all."""
        width, dtype = self.config.hidden_size, self._dtype
        if part is None:
            return torch.zeros(size, width, dtype=dtype, device=self.device)
        part = part.to(dtype)
        return part if part.shape[0] == size else torch.cat([part.new_zeros(size - part.shape[0], width), part])

    @staticmethod
    def _padded(rows: list[Tensor]) -> Float[Tensor, "rows width dim"]:
        return rows[0].unsqueeze(0) if len(rows) == 1 else pad_sequence(rows, batch_first=True)

    def _outputs(
        self, feeds: Sequence[Feed], out: Float[Tensor, "rows width dim"], *, hidden: bool
    ) -> list[FeedOutput]:
        """Rows for the last chain token and the nodes of each feed, for the tokens that the head can draft."""
        chosen = [out[row, max(len(feed.tokens) - 1, 0) : len(feed)] for row, feed in enumerate(feeds)]
        logits = self._output(torch.cat(chosen) if len(chosen) > 1 else chosen[0])
        rows = torch.split(logits, [part.shape[0] for part in chosen])
        return [FeedOutput(row, part if hidden else None, self._ids) for row, part in zip(rows, chosen, strict=True)]


def refuse_other_target(net: FeatureNet, target: SlotBackend) -> None:
    """Refuse a head that was made for another model.

    Raises:
        UserError: naming both models, and what differs.
    """
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
