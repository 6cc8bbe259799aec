"""Any transformers causal language model as a Backend: padding, positions and masks live here.

Knows: transformers' forward signature, attention masks, what makes a model unable to roll back. Does not know: rules,
requests, sampling.

A model is checked once at construction (`probe`): reading tokens piecewise, rolling back and reading a tree must
reproduce a plain forward pass. A model that cannot (recurrent state, positions not honoured) is refused there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.backends.base import Capabilities, Feed, FeedOutput, Session
from draftproof.backends.slot_cache import CacheView, SlotCache, WritePlan
from draftproof.errors import UserError, reason
from draftproof.tree import TokenTree

PREFILL_CHUNK = 512
PASS = 32  # positions that take as long to read as the weights do (two CPU cores, SmolLM2-135M in bfloat16)
_ROLLS_BACK = {"full_attention", "sliding_attention"}
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}


class HFSession(Session):
    """A session whose keys and values live in one slot of its backend's cache."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self.cache = cache
        self.slot = cache.acquire()

    def _gather(self, base: int, slots: Sequence[int]) -> None:
        self.cache.gather(self.slot, base, slots)

    def close(self) -> None:
        """Give the slot back."""
        if self.slot >= 0:
            self.cache.release(self.slot)
        self.slot = -1


class HFBackend:
    """A loaded transformers causal LM.

    Args:
        model: in eval mode, weights in place.
        name: how errors and reports call it.
        check: run `probe` now; costs a few short forward passes.

    Raises:
        UserError: the architecture cannot roll back, or the probe found that it does not.
    """

    def __init__(self, model: Any, *, name: str | None = None, check: bool = True) -> None:
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self._embedding = model.get_input_embeddings()
        self.name = name or getattr(model.config, "_name_or_path", "") or type(model).__name__
        refuse_unless_rollback(model, self.name)
        self._cache = SlotCache()
        self._windows = attention_windows(self.config)
        parameters = inspect.signature(model.forward).parameters
        self._keeps_rows = "logits_to_keep" in parameters
        self._records = False
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.max_positions: int | None = getattr(self.config, "max_position_embeddings", None)
        self.capabilities = Capabilities(trees=True, hidden=int(self.config.hidden_size))
        if check:
            self.capabilities = Capabilities(trees=probe(self), hidden=self.capabilities.hidden)

    @property
    def device(self) -> torch.device:
        """Device of the embedding, where tokens are fed."""
        device: torch.device = self._embedding.weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of the model's generation config."""
        found = getattr(self.model.generation_config, "eos_token_id", None)
        if found is None:
            found = getattr(self.config, "eos_token_id", None)
        return () if found is None else tuple(found) if isinstance(found, list | tuple) else (int(found),)

    def open(self) -> HFSession:
        """A fresh session."""
        return HFSession(self._cache)

    def record_states(self) -> None:
        """From now on every session holds the last hidden state of each slot it reads (`Session.states`)."""
        self._records = True

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], *, hidden: bool = False) -> list[FeedOutput]:
        """Read every feed; long prompts go first, one by one and in chunks, and feeds of like length are read together.

        Raises:
            ValueError: nothing to read, or longer than the model's context.
        """
        for feed in feeds:
            self._check(feed)
        if len({id(feed.session) for feed in feeds}) < len(feeds):
            raise ValueError("a session was fed twice in one forward pass")
        return in_passes(feeds, partial(self._run, hidden=hidden))

    def _check(self, feed: Feed) -> None:
        feed.session.admit(len(feed.tokens), feed.tree)
        if not isinstance(feed.session, HFSession) or feed.session.cache is not self._cache:
            raise ValueError(f"a session of another backend was fed to {self.name}")
        if feed.session.slot < 0:
            raise ValueError("a closed session was fed")
        end = feed.session.stem + len(feed.tokens) + max(feed_depths(feed), default=0)
        if self.max_positions is not None and end > self.max_positions:
            raise ValueError(f"{self.name} reads at most {self.max_positions} positions, asked for {end}")

    def _run(self, feeds: Sequence[Feed], *, hidden: bool) -> list[FeedOutput]:
        layout = Layout(feeds, self.device)
        self._cache.reserve(layout.plan.horizon)
        logits, states = self._compute(layout, hidden=hidden or self._records)
        outputs = layout.split(logits, states)
        for row, (feed, chain) in enumerate(zip(feeds, layout.chains, strict=True)):
            if self._records and states is not None:
                feed.session.remember(states[row, : len(feed)])
            feed.session.read(chain, feed.tree)
        return outputs

    def _compute(self, layout: Layout, *, hidden: bool) -> tuple[Tensor, Tensor | None]:
        """Logits of every column or of the wanted ones only, and the last hidden states of every column if asked."""
        keep = {"logits_to_keep": layout.wanted} if self._keeps_rows else {}
        out = self.model(
            input_ids=layout.ids,
            attention_mask=self._masks(layout),
            position_ids=layout.positions,
            past_key_values=CacheView(self._cache, layout.plan),
            use_cache=True,
            output_hidden_states=hidden,
            **keep,
        )
        return out.logits, out.hidden_states[-1] if hidden else None

    def _masks(self, layout: Layout) -> Tensor | dict[str, Tensor]:
        made = {kind: layout.mask(window, self.dtype) for kind, window in self._windows.items()}
        return made if len(made) > 1 or "sliding_attention" in made else next(iter(made.values()))


def in_passes(feeds: Sequence[Feed], run: Callable[[Sequence[Feed]], list[FeedOutput]]) -> list[FeedOutput]:
    """What comes of feeds that are read in several passes: long prompts in chunks, one by one, and then what is alike.

    Args:
        feeds: of sessions of their own.
        run: reads some of them in one pass.
    """
    left = []
    for feed in feeds:
        tokens = feed.tokens
        while len(tokens) > PREFILL_CHUNK:
            run([Feed(feed.session, tokens[:PREFILL_CHUNK])])
            tokens = tokens[PREFILL_CHUNK:]
        left.append(Feed(feed.session, tokens, feed.tree))
    outputs: dict[int, FeedOutput] = {}
    for group in alike([len(feed) for feed in left]):
        outputs |= zip(group, run([left[row] for row in group]), strict=True)
    return [outputs[row] for row in range(len(left))]


def alike(lengths: Sequence[int]) -> list[list[int]]:
    """Rows in groups that are cheapest to read when every row is padded to the longest of its group.

    A pass over the weights counts as PASS positions. The rows of a group are in ascending order.

    Args:
        lengths: positions of each row.
    """
    if max(lengths, default=0) * len(lengths) - sum(lengths) <= PASS:
        return [list(range(len(lengths)))]
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    best: list[tuple[int, int]] = [(0, 0)]  # of the first rows in order: least cost, and where the last group begins
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        best.append(min((best[begin][0] + PASS + (end - begin) * longest, begin) for begin in range(end)))
    groups, end = [], len(order)
    while end:
        begin = best[end][1]
        groups.append(sorted(order[begin:end]))
        end = begin
    return groups[::-1]


class Layout:
    """The padded tensors of one forward pass over ragged feeds.

    Attributes:
        ids, positions: [rows, width], padded on the right.
        chains: the chain tokens of each feed as a tensor.
        plan: where the slot cache is written.
    """

    def __init__(self, feeds: Sequence[Feed], device: torch.device) -> None:
        self.feeds = feeds
        self.device = device
        self.chains = [torch.as_tensor(feed.tokens, dtype=torch.int64, device=device).reshape(-1) for feed in feeds]
        self.plan = WritePlan(
            slots=tuple(feed.session.slot for feed in feeds if isinstance(feed.session, HFSession)),
            bases=tuple(feed.session.length for feed in feeds),
            widths=tuple(len(feed) for feed in feeds),
        )
        self.width = max(self.plan.widths)
        self.ids = self._pad([self._row_ids(row) for row in range(len(feeds))])
        host = [self._row_positions(feed) for feed in feeds]
        self.positions = torch.tensor([row + [0] * (self.width - len(row)) for row in host], device=device)

    @cached_property
    def columns(self) -> list[int]:
        """Columns whose logits some row wants."""
        return sorted({column for row in range(len(self.feeds)) for column in self._columns(row)})

    @cached_property
    def wanted(self) -> Int[Tensor, " columns"]:
        """The same where the model is."""
        return torch.tensor(self.columns, device=self.device)

    def _row_ids(self, row: int) -> Int[Tensor, " tokens"]:
        tree = self.feeds[row].tree
        return self.chains[row] if tree is None else torch.cat([self.chains[row], tree.tokens.to(self.device)])

    def _pad(self, rows: list[Int[Tensor, " _"]]) -> Int[Tensor, "rows width"]:
        if len(rows) == 1:
            return rows[0].unsqueeze(0)
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
        """Columns whose logits a row wants: its last chain token and its nodes."""
        chain = len(self.feeds[row].tokens)
        return range(max(chain - 1, 0), self.plan.widths[row])

    def split(
        self,
        logits: Float[Tensor, "rows columns vocab"],
        states: Float[Tensor, "rows width dim"] | None,
    ) -> list[FeedOutput]:
        """The wanted rows of each feed; logits hold every column, or only the wanted ones."""
        trimmed = logits.shape[1] < self.width
        outputs = []
        for row in range(len(self.feeds)):
            columns = self._columns(row)
            first = self.columns.index(columns.start) if trimmed else columns.start
            hidden = None if states is None else states[row, columns.start : columns.stop]
            outputs.append(FeedOutput(logits[row, first : first + len(columns)], hidden))
        return outputs

    def mask(self, window: int | None, dtype: torch.dtype) -> Float[Tensor, "rows 1 width horizon"]:
        """Additive attention mask: 0 where a token may look, the dtype's minimum elsewhere.

        A chain token sees every slot up to its own; a node sees the stem and its ancestors; padding sees slot 0, so
        that no row of a softmax is empty. With a window only positions closer than `window` are seen.
        """
        horizon = self.plan.horizon
        slots = torch.arange(horizon, device=self.device)
        allowed = slots <= self.limits.unsqueeze(-1)
        key_positions = slots.expand(len(self.feeds), horizon)
        for row, feed in enumerate(self.feeds):
            if not self._is_straight(feed):
                allowed[row], key_positions = self._open_tree(row, feed, allowed[row], key_positions)
        if window is not None:
            allowed &= self.positions.unsqueeze(-1) - key_positions.unsqueeze(1) < window
            allowed[..., 0] |= ~allowed.any(-1)
        blocked = torch.zeros(allowed.shape, dtype=dtype, device=self.device)
        return blocked.masked_fill_(~allowed, torch.finfo(dtype).min).unsqueeze(1)

    @cached_property
    def host_limits(self) -> list[list[int]]:
        """Last slot that each column of each row may see, tree nodes aside."""
        return [self._limits(row) for row in range(len(self.feeds))]

    @cached_property
    def limits(self) -> Int[Tensor, "rows width"]:
        """The same where the model is."""
        return torch.tensor(self.host_limits, device=self.device)

    @cached_property
    def straight(self) -> bool:
        """Whether `limits` say it all, windows aside: every feed is a chain, or a tree that is one, above no tail."""
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
        return [*range(base, base + chain), *ends, *[0] * (self.width - len(feed))]

    def _open_tree(
        self, row: int, feed: Feed, allowed: Tensor, key_positions: Int[Tensor, "rows horizon"]
    ) -> tuple[Tensor, Int[Tensor, "rows horizon"]]:
        """Let each node see its ancestors, and give the tail's slots their true positions."""
        assert feed.tree is not None, "only trees are opened"
        known, stem = len(feed.session.tail), feed.session.stem + len(feed.tokens)
        whole = TokenTree(
            torch.zeros(known + len(feed.tree), dtype=torch.int64), (*feed.session.tail, *feed.tree.parents)
        )
        chain, end = len(feed.tokens), stem + len(whole)
        allowed[chain : len(feed), stem:end] = whole.visible[known:].to(self.device)
        key_positions = key_positions.clone()
        key_positions[row, stem:end] = torch.tensor([stem - 1 + d for d in whole.depths], device=self.device)
        return allowed, key_positions


def feed_depths(feed: Feed) -> list[int]:
    """Depth of each node that a feed adds; children of the stem's last token have depth 1."""
    if feed.tree is None:
        return []
    depths: list[int] = []
    for parent in (*feed.session.tail, *feed.tree.parents):
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths[len(feed.session.tail) :]


def attention_windows(config: Any) -> dict[str, int | None]:
    """Kinds of attention mask a model needs, and the window of each (None: everything before)."""
    window = getattr(config, "sliding_window", None)
    kinds = sorted(set(getattr(config, "layer_types", None) or ()))
    if "sliding_attention" in kinds:
        return {kind: window if kind == "sliding_attention" else None for kind in kinds}
    uses = getattr(config, "use_sliding_window", True) and not kinds
    return {"full_attention": window if uses else None}


def refuse_unless_rollback(model: Any, name: str) -> None:
    """Refuse architectures that are known not to roll back, by what they declare.

    Raises:
        UserError: encoder-decoder, recurrent or linear-attention layers, or no output embedding.
    """
    config = model.config.get_text_config()
    advice = "speculative decoding needs a decoder-only transformer whose cache is addressed by position"
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(f"{name} is an encoder-decoder model: {advice}")
    foreign = sorted(set(getattr(config, "layer_types", None) or ()) - _ROLLS_BACK)
    if foreign:
        raise UserError(f"{name} has layers of kind {', '.join(foreign)}, whose state cannot be rolled back: {advice}")
    if getattr(model, "_is_stateful", False):
        raise UserError(f"{name} ({type(model).__name__}) keeps a recurrent state that cannot be rolled back: {advice}")
    if model.get_output_embeddings() is None:
        raise UserError(f"{name} ({type(model).__name__}) has no output embedding, so it is no causal language model")


def probe(backend: HFBackend) -> bool:
    """Check that piecewise reading with rollback reproduces a plain forward pass; returns whether trees do as well.

    Raises:
        UserError: the model fails at it, or its logits differ beyond the dtype's tolerance.
    """
    spread = torch.linspace(1, backend.vocab_size - 1, 9).long().tolist()
    try:
        plain = _plain_logits(backend, spread)
        chain = _probe_chain(backend, spread)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError) as cause:
        message = f"{backend.name} cannot be read piecewise with a position-addressed cache: {reason(cause)}"
        raise UserError(message) from cause
    tolerance = _TOLERANCE.get(backend.dtype, 8e-2)
    error = _distance(chain, plain[5:])
    if not error < tolerance:
        raise UserError(
            f"{backend.name} does not reproduce its own logits after a rollback "
            f"(relative error {error:.2g}, allowed {tolerance:.2g}): "
            "its cache or positions cannot be controlled, so speculation would change its output; it is refused"
        )
    return _distance(_probe_tree(backend, spread), plain[7:]) < tolerance


def _distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12))


@torch.inference_mode()
def _plain_logits(backend: HFBackend, tokens: list[int]) -> Float[Tensor, "tokens vocab"]:
    logits: Tensor = backend.model(input_ids=torch.tensor([tokens], device=backend.device), use_cache=False).logits
    return logits[0]


def _probe_chain(backend: HFBackend, tokens: list[int]) -> Float[Tensor, "4 vocab"]:
    """Rows 5 to 8 of the plain pass, read in three pieces with a wrong turn that is rolled back."""
    session = backend.open()
    try:
        backend.forward([Feed(session, [*tokens[:3], tokens[7], tokens[6]])])
        session.keep(3)
        backend.forward([Feed(session, tokens[3:5])])
        chain = TokenTree.chain(torch.tensor(tokens[6:], device=backend.device))
        return backend.forward([Feed(session, tokens[5:6], chain)])[0].logits
    finally:
        session.close()


def _probe_tree(backend: HFBackend, tokens: list[int]) -> Float[Tensor, "2 vocab"]:
    """Rows 7 and 8 of the plain pass, row 7 from a branching tree whose path is kept."""
    session = backend.open()
    try:
        nodes = torch.tensor([tokens[0], tokens[6], tokens[7], tokens[1]], device=backend.device)
        rows = backend.forward([Feed(session, tokens[:6], TokenTree(nodes, (-1, -1, 1, 0)))])[0].logits
        session.keep(6, (1, 2))
        last = backend.forward([Feed(session, tokens[8:])])[0].logits
        return torch.cat([rows[3:4], last])
    finally:
        session.close()
