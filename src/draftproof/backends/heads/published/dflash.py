"""DFlash heads (arXiv 2602.06036) in the layout of `speculators`, and in that of their authors.

The head drafts a block in one pass: the last committed token, and mask tokens after it. Its layers do not read the
tokens before the block. They attend to keys and values that each layer makes of the target's states there, several
layers of the target fused by one product; within the block every place sees every other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from draftproof.backends.base import Feed, FeedOutput, Session, unread
from draftproof.backends.cache.layout import Layout
from draftproof.backends.cache.passes import in_passes
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.cache.slot_cache import SlotCache
from draftproof.backends.heads.base import FollowingSession
from draftproof.backends.heads.published.files import (
    ALGORITHM,
    HeadFiles,
    cast,
    mask_token_of,
    read_head,
    refuse_other_target,
)
from draftproof.backends.heads.published.layers import LayerShape, make_layers, make_norm, passes_of
from draftproof.backends.heads.published.net import embedding_of, factor_of, output_of, states_of, vocabulary_of
from draftproof.backends.heads.published.parallel import FeedRows, ParallelHeadBackend, ParallelLogits, ParallelSession
from draftproof.backends.lean.layers import Layer
from draftproof.backends.products.packed_linear import PackedLinear
from draftproof.tree import TokenTree

_LONGEST = 64  # places of a block
_ORIGINAL = ("mask_token_id", "target_layer_ids", "block_size", "causal", "use_swa", "swa_window_size")
_ENTERING, _MULTIPLIER, _CAP = _SCALES = "input_embedding_scale", "output_multiplier", "final_logit_softcapping"
# Fields of the authors' layouts, beside those that are nested, which change what is computed; each net says which of
# them it reads.
_CHANGING = (*_SCALES, "logit_scale", "dspark_draft_topk", "dspark_bonus_anchor")


class LayerMask(NamedTuple):
    """The attention mask of a layer for the places of a block."""

    window: int | None  # positions before the block; None for all of them
    causal: bool  # whether a place sees only itself and those before it in the block


class _Block(NamedTuple):
    """The layout of a head's blocks, from its config."""

    size: int  # places of a block, with that of the last committed token
    mask: int  # token of the other places
    layers: Any  # layers of the target, as the config counts them (0 is before the first layer)
    first: int  # the first place whose row is that of a drafted token
    layer_masks: tuple[LayerMask, ...]  # of each layer

    @classmethod
    def of(cls, files: HeadFiles, shape: LayerShape, target: SlotBackend, net: type[DFlashNet]) -> _Block:
        """Read either layout."""
        config, windows = files.config, shape.windows
        size, mask = (files.field(key) for key in ("block_size", "mask_token_id"))
        if ALGORITHM in config:
            layers = config.get("aux_hidden_state_layer_ids")
            first = 0 if config.get("sample_from_anchor", net.from_anchor) else 1
            apart = not config.get("sliding_window_non_causal", net.whole_windows)
            causal = [window is not None and apart for window in windows]
        else:
            _refuse_strange(files, net.fields)
            layers, first = files.field("target_layer_ids"), 0 if net.starts_at_anchor(files) else 1
            layers = [each + 1 for each in layers] if isinstance(layers, list) else layers  # it counts from 0 after one
            if files.field("use_swa") and not any(windows):
                windows = (files.field("swa_window_size") or config.get("sliding_window"),) * len(windows)
            said = files.nested.get("causal", config.get("is_causal"))
            causal = [window is not None if said is None else bool(said) for window in windows]
        if not isinstance(size, int) or not 2 <= size <= _LONGEST:
            raise files.refused(f"has block_size {size!r}: expected 2 to {_LONGEST}")
        return cls(size, mask_token_of(files, mask, target), layers, first, tuple(map(LayerMask, windows, causal)))


def _refuse_strange(files: HeadFiles, more: Sequence[str]) -> None:
    """Refuse fields of the authors' layout that change what is computed."""
    legal = (*_ORIGINAL, *more)
    found = {f"{files.nest}.{key}": value for key, value in files.nested.items() if value and key not in legal}
    unread = [key for key in _CHANGING if key not in more]
    found |= {key: files.config[key] for key in unread if files.config.get(key) not in (None, False, 0, 1)}
    if found:
        name, value = min(found.items())
        raise files.refused(f"has {name} {value!r}, which is not read here: expected {', '.join(legal)}")


class RowContext(NamedTuple):
    """What a row may depend on."""

    tokens: list[int]  # those before it, from the last committed one on
    states: Float[Tensor, "places dim"]  # of all places of its block


def last_tokens(before: Sequence[RowContext], device: torch.device) -> Int[Tensor, " rows"]:
    """The token before each row."""
    return torch.tensor([each.tokens[-1] for each in before], dtype=torch.long, device=device)


class DFlashNet:
    """The network of a DFlash head."""

    algorithm: ClassVar[str] = "dflash"
    # whether the place of the last committed token drafts too, where the config does not say
    from_anchor: ClassVar[bool] = False
    # whether places of layers with a window see later ones too, where the config does not say
    whole_windows: ClassVar[bool] = False
    fields: ClassVar[tuple[str, ...]] = _SCALES  # of the authors' layout, beside those of every block head
    conditional: ClassVar[bool] = False  # whether a row depends on the tokens that were drafted before it
    predicts = False  # see `Capabilities`

    def __init__(self, files: HeadFiles, target: SlotBackend) -> None:
        shape = LayerShape.of(files)
        self.block = block = _Block.of(files, shape, target, type(self))
        shape = replace(shape, windows=tuple(layer_mask.window for layer_mask in block.layer_masks))
        self.layers = states_of(files, block.layers, target)
        given = int(files.config.get("target_hidden_size") or shape.size)
        refuse_other_target(files, target, hidden=given, vocab=vocabulary_of(files, shape))
        self.width = shape.size
        self.places = block.size - block.first
        self.embed = embedding_of(files, shape, target)
        self._fc = PackedLinear(cast(files.take("fc.weight", [shape.size, len(self.layers) * given]), target))
        self._fused_norm = make_norm(files, shape, "hidden_norm", target)
        self._decoder = make_layers(files, shape, target)
        self._norm = make_norm(files, shape, "norm", target)
        self._passes = passes_of(shape, self._decoder, target)
        self.ids, self._order, self._head = output_of(files, shape, target)
        factors = {name: files.factor(name) for name in _SCALES if name in self.fields}
        self._entering = (factors.get(_ENTERING) or 1.0) / factor_of(self.embed)
        self._multiplier = factors.get(_MULTIPLIER)
        self._cap = factors.get(_CAP)
        files.ignore("verifier_lm_head.weight", "verifier_norm.weight")

    @classmethod
    def starts_at_anchor(cls, files: HeadFiles) -> bool:  # noqa: ARG003
        """Whether the place of the last committed token drafts, in the authors' layout."""
        return cls.from_anchor

    def fuse(self, states: Float[Tensor, "tokens inner"]) -> Float[Tensor, "tokens dim"]:
        """The target's states of all layers, as the head's layers make keys and values of them."""
        return self._fused_norm(self._fc(states))

    def __call__(
        self, before: Sequence[Float[Tensor, "_ dim"]], layout: Layout, cache: SlotCache
    ) -> Float[Tensor, "blocks dim"]:
        """States of all blocks of a pass, one after another; `before` are the fused states that each block follows."""
        width, at = layout.width, self._passes.at(layout, cache)
        given = before[0].new_zeros(len(before), width, self.width)
        for row, states in enumerate(before):
            given[row, : len(states)] = states
        given = given.flatten(0, 1)
        starts = [row * width + len(states) for row, states in enumerate(before)]
        inside = [start + place for start, feed in zip(starts, layout.feeds, strict=True) for place in _places(feed)]
        block = torch.tensor(inside, dtype=torch.long, device=given.device)
        x = self.embedded(layout.ids.flatten().index_select(0, block))
        masks = {
            layer_mask: self._decoder[0].attention.masked(layout, self._allowed(layout, layer_mask), given.dtype)
            for layer_mask in set(self.block.layer_masks)
        }
        for layer, layer_mask in zip(self._decoder, self.block.layer_masks, strict=True):
            x = self._layer(layer, given, x, block, at, masks[layer_mask])
        return self._norm(x)

    def embedded(self, ids: Int[Tensor, " blocks"]) -> Float[Tensor, "blocks dim"]:
        """Tokens as the first layer reads them: rows of the table without a factor of the target's own."""
        rows = self.embed(ids)
        return rows if self._entering == 1.0 else rows * self._entering

    def _layer(
        self, layer: Layer, given: Tensor, x: Tensor, block: Int[Tensor, " blocks"], at: Any, mask: Any
    ) -> Tensor:
        """One layer: keys and values of all places, all else of those in blocks."""
        fused = layer.project(given.index_copy(0, block, layer.normed(x)))
        return layer.finish(layer.attention(layer.number, fused, at, mask).index_select(0, block), x)

    def _allowed(self, layout: Layout, layer_mask: LayerMask) -> Bool[Tensor, "tokens horizon"]:
        """Which slots each place sees; places outside of blocks are not asked, and see the first slot."""
        size, width, plan = self.block.size, layout.width, layout.plan
        slots = torch.arange(plan.horizon, device=layout.device)
        allowed = torch.zeros(len(layout.feeds) * width, plan.horizon, dtype=torch.bool, device=layout.device)
        allowed[:, 0] = True
        inside = torch.ones(size, size, dtype=torch.bool, device=layout.device)
        for row, feed in enumerate(layout.feeds):
            if not _places(feed):
                continue
            start, begin = row * width + len(feed.tokens), plan.bases[row] + len(feed.tokens)
            seen = (
                slots < begin if layer_mask.window is None else (slots < begin) & (slots >= begin - layer_mask.window)
            )
            allowed[start : start + size] = seen
            allowed[start : start + size, begin : begin + size] = inside.tril() if layer_mask.causal else inside
        return allowed

    def logits(self, states: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens ids"]:
        """Logits of `ids` after the tokens: multiplied and then capped, as the authors' code does."""
        made = self._head(states)
        if self._multiplier is not None:
            made = made * self._multiplier
        return made if self._cap is None else (made / self._cap).tanh() * self._cap

    def conditioned(self, rows: FeedRows, before: Sequence[RowContext]) -> FeedRows:  # noqa: ARG002
        """Rows of all sessions, given what was drafted before each of them; here that changes nothing."""
        return rows


def _places(feed: Feed) -> range:
    """The places of a feed's block; none where only the target's states are read."""
    return range(0 if feed.tree is None else len(feed.tree))


class DFlashBackend(ParallelHeadBackend):
    """A head of the DFlash family over the target that it was made for."""

    def __init__(self, source: str, target: SlotBackend, kind: type[DFlashNet] = DFlashNet) -> None:
        files = read_head(source, kind.algorithm)
        self._net = net = kind(files, target)
        files.refuse_left()
        self._cache = SlotCache(target.max_positions)
        self._dtype = target.dtype
        name = f"{kind.algorithm} head {source}"
        super().__init__(target, name, places=net.places, width=net.width, layers=net.layers, ids=net.ids)
        self.capabilities = replace(self.capabilities, predicts=net.predicts)

    @override
    def follow(self, owner: Session) -> ParallelSession:
        return ParallelSession(owner, FollowingSession(self._cache, owner, self.layers, back=0))

    def _compute(self, sessions: Sequence[ParallelSession]) -> list[ParallelLogits]:
        feeds = []
        for session in sessions:
            inner = _following(session.inner)
            inner.rewind()
            tokens = [session.tokens[-1]] + [self._net.block.mask] * (self._net.block.size - 1)
            feeds.append(Feed(inner, unread(inner, session.tokens), TokenTree.chain(torch.tensor(tokens))))
        with self._cache.lock:
            outputs = in_passes(feeds, self._run)
        for session in sessions:
            _following(session.inner).rewind()
        return [ParallelLogits(out.logits, out.hidden) for out in outputs if out.hidden is not None]

    def _rows(self, sessions: Sequence[ParallelSession], asked: Sequence[list[int]]) -> list[FeedRows]:
        rows = super()._rows(sessions, asked)
        if not self._net.conditional:
            return rows
        counts = [len(depths) for depths in asked]
        before = [
            RowContext(path, session.places.states)
            for session, count in zip(sessions, counts, strict=True)
            for path in session.paths(count)
            if session.places is not None
        ]
        joined = FeedRows(torch.cat([row.logits for row in rows]), torch.cat([row.states for row in rows]))
        logits, states, accepted = self._net.conditioned(joined, before)
        parts = [torch.split(each, counts) for each in (logits, states)]
        predictions = [None] * len(rows) if accepted is None else torch.split(accepted, counts)
        return [FeedRows(*each) for each in zip(*parts, predictions, strict=True)]

    def _run(self, feeds: Sequence[Feed]) -> list[FeedOutput]:
        """Read the target's states of every feed's chain; rows of the drafted places of those that have a block."""
        layout, net = Layout(feeds, self.device), self._net
        before = []
        for feed in feeds:
            theirs, own, *_ = _following(feed.session).above(Feed(feed.session, feed.tokens))
            assert theirs is not None, "every token has a state of the target before it"
            assert own is None, "drafts begin where the target's states end"
            before.append(net.fuse(theirs.to(self.device, self._dtype)))
        self._cache.claim(layout.plan.slots, layout.plan.ends)
        states = torch.split(net(before, layout, self._cache), [len(_places(feed)) for feed in feeds])
        for feed in feeds:
            _following(feed.session).certain += len(feed.tokens)
            feed.session.read(feed.tokens, feed.tree)
        drafted = [block[net.block.first :] for block in states]
        rows = torch.split(net.logits(torch.cat(drafted)), [len(block) for block in drafted])
        return [FeedOutput(row, block) for row, block in zip(rows, drafted, strict=True)]


def _following(session: Session | None) -> FollowingSession:
    """What the head has read of a sequence."""
    assert isinstance(session, FollowingSession), "made by `DFlashBackend.follow`"
    return session
