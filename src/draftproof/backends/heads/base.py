"""Heads over a target's hidden states as backends: they read drafted tokens with states that others left in a session.

Knows: which states were made by whom, and which of them must be made again. Does not know: what a head computes.

A head reads pairs of a token and the state before it. For tokens that the target has read on, these are the target's
states; for drafted tokens they are the head's own output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from draftproof.backends.base import Capabilities, Feed, FeedOutput, Session
from draftproof.backends.cache.layout import Layout
from draftproof.backends.cache.passes import in_passes
from draftproof.backends.cache.sessions import SlotSession
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.cache.slot_cache import SlotCache
from draftproof.backends.lean.attention import Attention, Pass
from draftproof.backends.lean.rotary import Rope

States = Float[Tensor, "rows width dim"]  # a state for each token of padded feeds
Flat = Float[Tensor, "tokens dim"]  # the same, row after row


class HeadNet(ABC):
    """The network of a head."""

    width: int  # of the states that it makes
    # whose hidden states of the target it reads, side by side; () for the last ones, after the final norm
    layers: tuple[int, ...] = ()
    ids: Int[Tensor, " ids"] | None = None  # the tokens that it can draft, ascending; None for all of the target's
    embed: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]  # of `ids`, from states after the tokens

    def fuse(self, states: Float[Tensor, "tokens inner"]) -> Float[Tensor, "tokens dim"]:
        """The target's states in the form and width of the head's own; here they have that already."""
        return states

    @abstractmethod
    def __call__(self, states: States, embedded: States, layout: Layout, cache: SlotCache) -> States:
        """The states after the tokens; keys and values go to the cache."""


class Passes:
    """What all layers of a head share in a pass: rotary angles and masks.

    Args:
        attention: of some layer.
        windows: of each kind of layer, the number of last positions that it sees; None for all.
    """

    def __init__(self, rope: Rope, attention: Attention, windows: Mapping[str, int | None]) -> None:
        self._rope = rope
        self._attention = attention
        self._windows = windows

    def __call__(self, x: States, layout: Layout, cache: SlotCache) -> tuple[Pass, dict[str, Any]]:
        """The pass, and the mask of each kind of layer."""
        masks = {kind: self._attention.mask(layout, window, x.dtype) for kind, window in self._windows.items()}
        return self.at(layout, cache), masks

    def at(self, layout: Layout, cache: SlotCache) -> Pass:
        """The pass alone."""
        rows, width = layout.ids.shape
        return Pass(rows, width, *self._rope(layout.positions.view(-1), layout.plan.horizon), cache, layout.plan)


class LayeredNet(HeadNet):
    """The network of a head whose layers are those of the lean forward."""

    _passes: Passes

    @override
    def __call__(self, states: States, embedded: States, layout: Layout, cache: SlotCache) -> States:
        at, masks = self._passes(states, layout, cache)
        return self._run(states.flatten(0, 1), embedded.flatten(0, 1), at, masks).view(states.shape)

    @abstractmethod
    def _run(self, x: Flat, embedded: Flat, at: Pass, masks: dict[str, Any]) -> Flat:
        """The states after the tokens."""


class PrecedingStates(NamedTuple):
    """The states before the tokens of a feed: first those of others, then the head's own."""

    # theirs, own: None where there are none
    theirs: Float[Tensor, "tokens inner"] | None
    own: Float[Tensor, "tokens dim"] | None
    lead: int  # how many of the first tokens have no state before them
    true: int  # how many tokens have a state that is not the head's own, or none


class HeadSession(Session, ABC):
    """A session of a head."""

    @abstractmethod
    def rewind(self) -> None:
        """Begin a round: forget what was drafted, and what was read with states of the head's own making."""


class FollowingSession(SlotSession, HeadSession):
    """What a head has read of a sequence: its own keys, values and output states, beside the session of another model.

    Args:
        owner: the session of the same sequence whose states are read: the target's, or that of an earlier head.
        back: 1 where the token of slot s stands in slot s of the owner too, so that the state before it is that of slot
            s - 1, and the first token has none; 0 where this session leaves out the owner's first token.
    """

    def __init__(self, cache: SlotCache, owner: Session, layers: tuple[int, ...] = (), back: int = 1) -> None:
        super().__init__(cache)
        self.owner = owner
        self.layers = layers
        self.back = back
        # leading slots that were read with the owner's states; the others are read again when those are there
        self.certain = 0

    def _empty(self) -> None:
        """It cannot be copied: it follows another session."""

    @property
    def known(self) -> int:
        """How many leading states the owner holds."""
        return self.owner.recorded(self.layers)

    @override
    def rewind(self) -> None:
        self.certain = min(self.certain, self.stem)
        if self.length > self.certain:
            self.keep(self.certain)

    def above(self, feed: Feed) -> PrecedingStates:
        """The states before the tokens of a feed.

        Raises:
            ValueError: a state that this very pass would have to make.
        """
        first, chain = self.length, len(feed.tokens)
        slots = list(range(first - self.back, first - self.back + chain))
        if feed.tree is not None:
            stem = self.stem + chain
            nodes = [stem + parent if parent >= 0 else stem - 1 for parent in feed.tree.parents]
            slots += [slot - self.back + 1 for slot in nodes]
        true = sum(slot < self.known for slot in slots)
        theirs, own = slots[:true], [slot + self.back - 1 for slot in slots[true:]]
        if own and max(own) >= first:
            raise ValueError("a feature head reads drafted tokens level by level, and others after the target did")
        lead = sum(slot < 0 for slot in theirs)
        theirs = theirs[lead:]
        return PrecedingStates(
            self.owner.states_at(theirs, self.layers) if theirs else None,
            self.states_at(own) if own else None,
            lead,
            true,
        )


class TargetHead(ABC):
    """A head over the target it was made for, whose sessions keep the states that it reads, from now on.

    Args:
        width: of the states that it makes.
        layers: whose hidden states of the target it reads; () for the last ones.
        trees: whether its drafts may branch.

    Raises:
        UserError: the target records no such states.
    """

    back = 0  # see `FollowingSession`
    deepest: int | None = None  # largest depth of a draft; None where there is no limit

    def __init__(
        self, target: SlotBackend, name: str, *, width: int, layers: tuple[int, ...] = (), trees: bool = True
    ) -> None:
        self.name = name
        self.layers = layers
        self.vocab_size = target.vocab_size
        self.device = target.device
        self.max_positions = target.max_positions
        self.capabilities = Capabilities(trees=trees, hidden=width)
        target.record_states(layers)

    def open(self) -> HeadSession:
        """A session without a target's."""
        return self.follow(Session())

    @abstractmethod
    def follow(self, owner: Session) -> HeadSession:
        """A session that reads what the target's session has read, with its states."""

    @abstractmethod
    def forward(self, feeds: Sequence[Feed], *, hidden: bool = False) -> list[FeedOutput]:
        """Read every feed."""


class HeadBackend(TargetHead):
    """A head whose network is on the target's device; it reads tokens one by one, or a level of drafted ones."""

    def __init__(self, target: SlotBackend, net: HeadNet, name: str, *, back: int = 1) -> None:
        super().__init__(target, name, width=net.width, layers=net.layers, trees=target.capabilities.trees)
        self.net = net
        self.back = back
        self._dtype = target.dtype
        self._cache = SlotCache(target.max_positions)

    @override
    def follow(self, owner: Session) -> FollowingSession:
        return FollowingSession(self._cache, owner, self.net.layers, self.back)

    def sequences_nbytes(self, lengths: Sequence[int]) -> int:
        """Bytes that sessions of these lengths take together: keys, values and output states."""
        return self._cache.batch_nbytes(lengths) + self.net.width * self._dtype.itemsize * sum(lengths)

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
        sessions = [feed.session for feed in feeds if isinstance(feed.session, FollowingSession)]
        assert len(sessions) == len(feeds), "a head reads sessions of its own"
        layout = Layout(feeds, self.device)
        found = [session.above(feed) for session, feed in zip(sessions, feeds, strict=True)]
        states = self._padded([self._filled(above) for above in found])
        self._cache.claim(layout.plan.slots, layout.plan.ends)
        out = self.net(states, self.net.embed(layout.ids), layout, self._cache)
        outputs = self._outputs(feeds, out, hidden=hidden)
        for row, (session, feed) in enumerate(zip(sessions, feeds, strict=True)):
            if session.certain == session.length:
                session.certain += found[row].true
            session.remember(out[row, : len(feed)])
            session.read(feed.tokens, feed.tree)
        return outputs

    def _filled(self, above: PrecedingStates) -> Float[Tensor, "tokens dim"]:
        """States before a feed's tokens; zeros before the first token of all."""
        parts = []
        if above.lead:
            parts.append(torch.zeros(above.lead, self.net.width, dtype=self._dtype, device=self.device))
        if above.theirs is not None:
            parts.append(self.net.fuse(above.theirs.to(self.device, self._dtype)))
        if above.own is not None:
            parts.append(above.own.to(self._dtype))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    @staticmethod
    def _padded(rows: list[Tensor]) -> States:
        return rows[0].unsqueeze(0) if len(rows) == 1 else pad_sequence(rows, batch_first=True)

    def _outputs(self, feeds: Sequence[Feed], out: States, *, hidden: bool) -> list[FeedOutput]:
        """Rows for the last chain token and the nodes of each feed, for the tokens that the head can draft."""
        chosen = [out[row, max(len(feed.tokens) - 1, 0) : len(feed)] for row, feed in enumerate(feeds)]
        logits = self.net.logits(torch.cat(chosen) if len(chosen) > 1 else chosen[0])
        rows = torch.split(logits, [part.shape[0] for part in chosen])
        return [FeedOutput(row, part if hidden else None, self.net.ids) for row, part in zip(rows, chosen, strict=True)]
