"""The tensors of a forward pass over ragged feeds: ids, positions, masks, and the write plan of the cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.accelerator import to_device
from draftproof.backends.base import Feed, FeedOutput
from draftproof.backends.cache.sessions import SlotSession
from draftproof.backends.cache.slot_cache import WritePlan
from draftproof.backends.cache.windows import ChunkedWindow
from draftproof.tree import TokenTree


class Layout:
    """The tensors of one forward pass over ragged feeds: rows padded to the longest, or packed one after another.

    Args:
        packed: whether all tokens are one row, without padding.
    """

    def __init__(
        self, feeds: Sequence[Feed], device: torch.device, layers: Sequence[int] = (), *, packed: bool = False
    ) -> None:
        self.feeds = feeds
        # numbers of the layers whose hidden states are to be taken: 0 before the first layer, i after layer i
        self.layers = tuple(layers)
        self.taken: dict[int, Tensor] = {}  # their hidden states [rows, width, dim], put there by the forward pass
        self.device = device
        self.packed = packed
        self.chains = [
            feed.tokens.to(device, torch.int64).reshape(-1)
            if isinstance(feed.tokens, Tensor)
            else to_device(feed.tokens, device, torch.int64)
            for feed in feeds
        ]
        self.plan = WritePlan(
            slots=tuple(feed.session.slot for feed in feeds if isinstance(feed.session, SlotSession)),
            bases=tuple(feed.session.length for feed in feeds),
            widths=tuple(len(feed) for feed in feeds),
        )
        self.width = max(self.plan.widths)
        self.sizes = self.plan.widths if packed else (self.width,) * len(feeds)  # columns of each feed, with padding
        # ids, positions: [rows, width], padded on the right; [1, tokens] where packed
        self.ids = self._placed([self._row_ids(row) for row in range(len(feeds))])
        host = [self._row_positions(feed) for feed in feeds]
        if packed:
            self.positions = to_device([list(itertools.chain.from_iterable(host))], device)
        else:
            self.positions = to_device([row + [0] * (self.width - len(row)) for row in host], device)

    @cached_property
    def starts(self) -> list[int]:
        """The first of each feed's columns, when all rows follow one another."""
        return list(itertools.accumulate(self.sizes[:-1], initial=0))

    @cached_property
    def columns(self) -> list[int]:
        """Columns whose logits some row needs."""
        if self.packed:
            return [self.starts[row] + column for row in range(len(self.feeds)) for column in self._columns(row)]
        return sorted({column for row in range(len(self.feeds)) for column in self._columns(row)})

    @cached_property
    def requested(self) -> Int[Tensor, " columns"]:
        """`columns` on the model's device."""
        return to_device(self.columns, self.device, torch.int64)

    def own(self, values: Float[Tensor, "rows width dim"], row: int) -> Float[Tensor, "tokens dim"]:
        """The values of one feed's tokens."""
        width = self.plan.widths[row]
        return values[0, self.starts[row] : self.starts[row] + width] if self.packed else values[row, :width]

    def _row_ids(self, row: int) -> Int[Tensor, " tokens"]:
        tree = self.feeds[row].tree
        return self.chains[row] if tree is None else torch.cat([self.chains[row], tree.tokens.to(self.device)])

    def _placed(self, rows: list[Int[Tensor, " _"]]) -> Int[Tensor, "rows width"]:
        if len(rows) == 1:
            return rows[0].unsqueeze(0)
        if self.packed:
            return torch.cat(rows).unsqueeze(0)
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    @staticmethod
    def _row_positions(feed: Feed) -> list[int]:
        """Position of each new token: consecutive on the chain, by depth in the tree."""
        start = feed.session.length
        chain = list(range(start, start + len(feed.tokens)))
        if feed.tree is None:
            return chain
        stem = feed.session.stem + len(feed.tokens)
        return chain + [stem - 1 + depth for depth in feed_depths(feed)]

    def _columns(self, row: int) -> range:
        """Columns whose logits a row needs: its last chain token and its nodes."""
        chain = len(self.feeds[row].tokens)
        return range(max(chain - 1, 0), self.plan.widths[row])

    def split(
        self, logits: Float[Tensor, "rows columns vocab"], states: Float[Tensor, "rows width dim"] | None
    ) -> list[FeedOutput]:
        """The output of each feed; `logits` has every column, or only `columns`."""
        trimmed = logits.shape[1] < self.positions.shape[1]
        outputs, before = [], 0
        for row in range(len(self.feeds)):
            columns = self._columns(row)
            if self.packed:
                first = before if trimmed else self.starts[row] + columns.start
                before += len(columns)
            else:
                first = self.columns.index(columns.start) if trimmed else columns.start
            hidden = None if states is None else self.own(states, row)[columns.start : columns.stop]
            outputs.append(FeedOutput(logits[0 if self.packed else row, first : first + len(columns)], hidden))
        return outputs

    def mask(self, window: int | None, dtype: torch.dtype) -> Float[Tensor, "*rows width horizon"]:
        """Additive attention mask: 0 where a token may attend, the dtype's minimum elsewhere.

        It is [rows, 1, width, horizon], or where packed [tokens, horizon]. A chain token sees every slot up to its own;
        a node sees the stem and its ancestors; padding sees slot 0, so that no row of a softmax is empty. With a window
        only positions closer than `window` are seen, with a `ChunkedWindow` those in the same chunk.
        """
        horizon = self.plan.horizon
        slots = torch.arange(horizon, device=self.device)
        allowed = slots <= self.limits.unsqueeze(-1)
        for row, (stem, whole) in self._open_trees.items():
            feed, first = self.feeds[row], self.starts[row] + len(self.feeds[row].tokens)
            visible = whole.visible[len(feed.session.tail) :].to(self.device)
            allowed[first : first + len(visible), stem : stem + len(whole)] = visible
        if window is not None:
            ours, theirs = self.positions.view(-1, 1), slots
            if not self.straight:
                theirs = self.key_positions.repeat_interleave(to_device(self.sizes, self.device, torch.int64), 0)
            allowed &= (
                ours // window == theirs // window if isinstance(window, ChunkedWindow) else ours - theirs < window
            )
            allowed[..., 0] |= ~allowed.any(-1)
        blocked = additive(allowed, dtype)
        return blocked if self.packed else blocked.view(len(self.feeds), 1, self.width, horizon)

    @cached_property
    def host_limits(self) -> list[list[int]]:
        """Last slot that each column of each row may see, apart from branching tree nodes."""
        return [self._limits(row) for row in range(len(self.feeds))]

    @cached_property
    def limits(self) -> Int[Tensor, " tokens"]:
        """`host_limits` on the model's device, row after row."""
        return to_device(list(itertools.chain.from_iterable(self.host_limits)), self.device)

    @cached_property
    def straight(self) -> bool:
        """Whether `limits` describe the mask, apart from windows: feeds are chains, or chain trees without a tail."""
        return all(self._is_straight(feed) for feed in self.feeds)

    @staticmethod
    def _is_straight(feed: Feed) -> bool:
        return feed.tree is None or (feed.tree.is_chain and not feed.session.tail)

    def _limits(self, row: int) -> list[int]:
        feed, base = self.feeds[row], self.plan.bases[row]
        chain = len(feed.tokens)
        stem = feed.session.stem + chain
        nodes = len(feed) - chain
        ends = [base + chain + i for i in range(nodes)] if self._is_straight(feed) else [stem - 1] * nodes
        return [*range(base, base + chain), *ends, *[0] * (self.sizes[row] - len(feed))]

    @cached_property
    def _open_trees(self) -> dict[int, tuple[int, TokenTree]]:
        """Of each row that is not straight: its first slot after the stem, and the whole tree from there."""
        found = {}
        for row, feed in enumerate(self.feeds):
            if not self._is_straight(feed):
                assert feed.tree is not None, "only trees are not straight"
                parents = (*feed.session.tail, *feed.tree.parents)
                whole = TokenTree(torch.zeros(len(parents), dtype=torch.int64), parents)
                found[row] = feed.session.stem + len(feed.tokens), whole
        return found

    @cached_property
    def key_positions(self) -> Int[Tensor, "rows horizon"]:
        """Position of the token in each slot: the slot's number, and in a tree its depth below the stem."""
        positions = torch.arange(self.plan.horizon, device=self.device).expand(len(self.feeds), -1)
        if self._open_trees:
            positions = positions.clone()
        for row, (stem, whole) in self._open_trees.items():
            positions[row, stem : stem + len(whole)] = to_device([stem - 1 + d for d in whole.depths], self.device)
        return positions


def additive(allowed: Bool[Tensor, "tokens horizon"], dtype: torch.dtype) -> Float[Tensor, "tokens horizon"]:
    """What is added to scores: 0 where a token may attend, the dtype's minimum elsewhere."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


def feed_depths(feed: Feed) -> list[int]:
    """Depth of each node that a feed adds; children of the stem's last token have depth 1."""
    if feed.tree is None:
        return []
    depths: list[int] = []
    for parent in (*feed.session.tail, *feed.tree.parents):
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths[len(feed.session.tail) :]
