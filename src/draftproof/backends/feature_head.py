"""A feature head as a backend: it reads drafted tokens with the states that the target left in its own session.

Knows: where the state before a token comes from (the target's session, or the head's own output), the head's cache.
Does not know: the network's inside, requests, drafting.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from draftproof.backends.base import Capabilities, Feed, Output, Session
from draftproof.backends.feature_net import FeatureNet
from draftproof.backends.hf import PREFILL_CHUNK, HFBackend, HFSession, Layout
from draftproof.backends.lean import sees_all
from draftproof.backends.packed import Product, fuse
from draftproof.backends.slot_cache import SlotCache
from draftproof.errors import UserError


class FeatureSession(HFSession):
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

    @property
    def known(self) -> int:
        """How many leading states the target's session holds."""
        return 0 if self.owner.states is None else self.owner.stem

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
        first, known = self.length, self.known
        chain = len(feed.tokens)
        slots = list(range(first - 1, first - 1 + chain))
        if feed.tree is not None:
            stem = self.stem + chain
            slots += [stem + parent if parent >= 0 else stem - 1 for parent in feed.tree.parents]
        true = sum(slot < known for slot in slots)
        rest = slots[true:]
        if rest and max(rest) >= first:
            raise ValueError("a feature head reads drafted tokens level by level, and others after the target did")
        parts: list[Tensor] = []
        if true and slots[true - 1] >= 0:
            assert self.owner.states is not None, "they are known"
            parts.append(self.owner.states[max(first - 1, 0) : slots[true - 1] + 1])
        if rest:
            assert self.states is not None, "a slot was read"
            parts.append(self.states[rest])
        return torch.cat(parts) if parts else None, true


class FeatureBackend:
    """A feature head over the target it was made for.

    Args:
        target: a backend of a transformers model; it is told to record its states.
        net: the head; moved to the target's device and dtype, its weights into packed products.

    Raises:
        UserError: made for a target of another name, width or vocabulary.
    """

    def __init__(self, target: HFBackend, net: FeatureNet) -> None:
        refuse_other_target(net, target)
        self.name = f"feature head of {target.name}"
        self.vocab_size = target.vocab_size
        self.max_positions = target.max_positions
        self.capabilities = Capabilities(trees=target.capabilities.trees, hidden=net.config.hidden_size)
        self.net = net.to(device=target.device, dtype=target.dtype)
        self._dtype = target.dtype
        self._embed: Any = target.model.get_input_embeddings()
        self._output = fuse(net, ["output"]) if net.output is not None else Product(output_rows(target, net))
        for layers in (["fuse"], ["queries", "keys_values"], ["mixed"], ["gate_up"], ["down"]):
            fuse(net, layers)
        self._whole = net.config.ids == self.vocab_size
        self._cache = SlotCache()
        target.record_states()

    @property
    def device(self) -> torch.device:
        """The target's."""
        return self.net.ids.device

    def open(self) -> FeatureSession:
        """A session without a target's: it can read one token, and continue it one by one."""
        return self.follow(Session())

    def follow(self, owner: Session) -> FeatureSession:
        """A session that reads what the target's session has read, with its states."""
        return FeatureSession(self._cache, owner)

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], *, hidden: bool = False) -> list[Output]:
        """Read every feed; the drafted tokens of one level a pass.

        Raises:
            ValueError: nothing to read, or a state that nobody has made yet.
        """
        for feed in feeds:
            feed.session.admit(len(feed.tokens), feed.tree)
        return self._run([self._without_long_prefix(feed) for feed in feeds], hidden=hidden)

    def _without_long_prefix(self, feed: Feed) -> Feed:
        """Read all but the last chunk of a long prompt now."""
        tokens = feed.tokens
        while len(tokens) > PREFILL_CHUNK:
            self._run([Feed(feed.session, tokens[:PREFILL_CHUNK])], hidden=False)
            tokens = tokens[PREFILL_CHUNK:]
        return Feed(feed.session, tokens, feed.tree)

    def _run(self, feeds: Sequence[Feed], *, hidden: bool) -> list[Output]:
        sessions = [feed.session for feed in feeds if isinstance(feed.session, FeatureSession)]
        assert len(sessions) == len(feeds), "a feature head reads sessions of its own"
        layout = Layout(feeds, self.device)
        found = [session.above(feed) for session, feed in zip(sessions, feeds, strict=True)]
        states = self._padded([self._filled(part, len(feed)) for (part, _), feed in zip(found, feeds, strict=True)])
        out = self._pass(layout, states)
        outputs = self._outputs(feeds, out, hidden=hidden)
        for row, (session, feed, chain) in enumerate(zip(sessions, feeds, layout.chains, strict=True)):
            if session.certain == session.length:
                session.certain += found[row][1]
            session.remember(out[row, : len(feed)])
            session.read(chain, feed.tree)
        return outputs

    def _filled(self, part: Tensor | None, size: int) -> Float[Tensor, "tokens dim"]:
        """States before a feed's tokens; zeros before the first token of all."""
        width, dtype = self.net.config.hidden_size, self._dtype
        if part is None:
            return torch.zeros(size, width, dtype=dtype, device=self.device)
        part = part.to(dtype)
        return part if part.shape[0] == size else torch.cat([part.new_zeros(size - part.shape[0], width), part])

    @staticmethod
    def _padded(rows: list[Tensor]) -> Float[Tensor, "rows width dim"]:
        return rows[0].unsqueeze(0) if len(rows) == 1 else pad_sequence(rows, batch_first=True)

    def _pass(self, layout: Layout, states: Float[Tensor, "rows width dim"]) -> Float[Tensor, "rows width dim"]:
        window = self.net.config.window
        mask = None if sees_all(layout, window) else layout.mask(window, states.dtype)
        grouped = self.net.config.heads != self.net.config.key_heads
        self._cache.reserve(layout.plan.horizon)

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            keys, values = self._cache.write(0, layout.plan, keys, values)
            return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=grouped)

        rotary = self.net.rotary(layout.positions)
        made: Tensor = self.net(states, self._embed(layout.ids), rotary, attend)
        return made

    def _outputs(self, feeds: Sequence[Feed], out: Float[Tensor, "rows width dim"], *, hidden: bool) -> list[Output]:
        """Rows for the last chain token and the nodes of each feed, at the width of the whole vocabulary."""
        wanted = [out[row, max(len(feed.tokens) - 1, 0) : len(feed)] for row, feed in enumerate(feeds)]
        logits = self._output(torch.cat(wanted))
        if not self._whole:
            full = logits.new_full((logits.shape[0], self.vocab_size), float("-inf"))
            logits = full.index_copy_(1, self.net.ids, logits)
        rows = torch.split(logits, [part.shape[0] for part in wanted])
        return [Output(row, part if hidden else None) for row, part in zip(rows, wanted, strict=True)]


def output_rows(target: HFBackend, net: FeatureNet) -> Float[Tensor, "ids dim"]:
    """The rows of the target's output layer for the tokens that a head speaks of."""
    weight: Tensor = target.model.get_output_embeddings().weight
    return weight.detach()[net.ids.to(weight.device)]


def refuse_other_target(net: FeatureNet, target: HFBackend) -> None:
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
