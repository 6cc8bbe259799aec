"""Backends over a slot cache: sessions, and forward passes over ragged feeds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from draftproof.backends.base import Capabilities, Feed, FeedOutput
from draftproof.backends.cache.layout import Layout, feed_depths
from draftproof.backends.cache.passes import PREFILL_CHUNK, in_passes
from draftproof.backends.cache.sessions import SlotSession
from draftproof.backends.cache.slot_cache import SlotCache
from draftproof.backends.model_info import ModelInfo
from draftproof.errors import UserError


class SlotBackend(ABC):
    """A model whose keys and values are in a slot cache; subclasses compute one pass.

    Two threads may use one backend: each call of `forward` and each change of a session's slot holds the cache's lock.
    """

    kind: str
    embed: Callable[[Tensor], Tensor]  # embeddings [*shape, dim] of token ids [*shape], as the first layer reads them

    def __init__(self, facts: ModelInfo, *, cache: SlotCache | None = None) -> None:
        self.facts = facts
        self.name = facts.name
        self.vocab_size = facts.vocab_size
        self.dtype = facts.dtype
        self.device = facts.device
        self.max_positions = facts.max_positions  # the longest sequence it reads; None when unbounded
        self.bounded_by = ""  # why that is shorter than the model's context; empty when it is not
        self.capabilities = Capabilities(hidden=facts.hidden_size)
        self._cache = SlotCache(facts.max_positions) if cache is None else cache
        self.prefill = PREFILL_CHUNK  # tokens of a prompt that are read in one pass
        self.packs = False  # whether feeds of any lengths are read in one pass without padding
        # whether what calibration finds is kept in files; not for weights that training changes again and again
        self.keeps = True
        self._recorded: tuple[tuple[int, ...], ...] = ()
        # a `FactorSwitch`, which has feeds of each length read with rotary factors of their own; None for most models
        self._switch: Any = None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        return self.facts.eos_token_ids

    @property
    def rounding(self) -> str:
        """Why a token's last digits may depend on the other tokens of a pass; empty where they cannot."""
        return f"backend {self.kind} computes by transformers' own modules, whose sums depend on the rows of a pass"

    @property
    def cache(self) -> SlotCache:
        """Keys and values of its sessions."""
        return self._cache

    def open(self) -> SlotSession:
        """A fresh session."""
        return SlotSession(self._cache)

    def sequences_nbytes(self, lengths: Sequence[int]) -> int:
        """Bytes that sessions of these lengths take together: keys, values and recorded states."""
        states = self.facts.hidden_size * self.dtype.itemsize * sum(max(len(layers), 1) for layers in self._recorded)
        return self._cache.batch_nbytes(lengths) + states * sum(lengths)

    def use_context(self, positions: int) -> None:
        """From now on, read sequences of at most this many tokens."""
        most = self.max_positions
        if positions < 2 or (most is not None and positions > most):
            why = f" ({self.bounded_by})" if self.bounded_by else ""
            reads = "has no limit of its own" if most is None else f"reads at most {most} positions{why}"
            legal = "2 or more" if most is None else f"2 to {most}"
            raise UserError(f"max_model_len: expected {legal}, got {positions}: {self.name} {reads}")
        if positions != most:
            self.max_positions = positions
            self.bounded_by = f"max_model_len is {positions}"

    def record_states(self, layers: Sequence[int] = ()) -> None:
        """From now on, record hidden states of each slot that a session reads (`Session.states_of`).

        Args:
            layers: i for the states after layer i, before any final norm, 0 for those before the first one; by default
                the last hidden states, after the final norm.
        """
        wrong = [layer for layer in layers if not 0 <= layer <= self.facts.layers]
        if wrong:
            raise UserError(f"hidden states of {self.name}: expected layers 0 to {self.facts.layers}, got {wrong[0]}")
        if tuple(layers) not in self._recorded:
            self._recorded = (*self._recorded, tuple(layers))

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], *, hidden: bool = False) -> list[FeedOutput]:
        """Read every feed: long prompts first, one by one in chunks, then feeds of similar length together.

        Where passes are packed, feeds of all lengths are read together.

        Raises:
            ValueError: nothing to read, or longer than the model's context.
        """
        read = partial(self._read_all, hidden=hidden)
        with self._cache.lock:
            return read(feeds) if self._switch is None else self._switch.forward(feeds, read, self.open)

    def _read_all(self, feeds: Sequence[Feed], *, hidden: bool) -> list[FeedOutput]:
        for feed in feeds:
            self._check(feed)
        if len({id(feed.session) for feed in feeds}) < len(feeds):
            raise ValueError("a session was fed twice in one forward pass")
        run = partial(self._run, hidden=hidden)
        return in_passes(feeds, run, ragged=self.capabilities.ragged, packed=self.packs, chunk=self.prefill)

    def _check(self, feed: Feed) -> None:
        feed.session.admit(len(feed.tokens), feed.tree)
        if not isinstance(feed.session, SlotSession) or feed.session.cache is not self._cache:
            raise ValueError(f"a session of another backend was fed to {self.name}")
        if feed.session.slot < 0:
            raise ValueError("a closed session was fed")
        end = feed.session.stem + len(feed.tokens) + max(feed_depths(feed), default=0)
        if self.max_positions is not None and end > self.max_positions:
            why = f" ({self.bounded_by})" if self.bounded_by else ""
            raise ValueError(f"{self.name} reads at most {self.max_positions} positions{why}, requested are {end}")

    def _run(self, feeds: Sequence[Feed], *, hidden: bool) -> list[FeedOutput]:
        inner = sorted({layer for layers in self._recorded for layer in layers})
        layout = Layout(feeds, self.device, inner, packed=self.packs)
        self._cache.claim(layout.plan.slots, layout.plan.ends)
        logits, states = self._compute(layout, hidden=hidden or () in self._recorded)
        outputs = layout.split(logits, states)
        for layers in self._recorded:
            found = torch.cat([layout.taken[layer] for layer in layers], -1) if layers else states
            assert found is not None, "asked for"
            for row, feed in enumerate(feeds):
                feed.session.remember(layout.own(found, row), layers)
        for feed in feeds:
            feed.session.read(feed.tokens, feed.tree)
        return outputs

    @abstractmethod
    def _compute(
        self, layout: Layout, *, hidden: bool
    ) -> tuple[Float[Tensor, "rows columns vocab"], Float[Tensor, "rows width dim"] | None]:
        """Logits of every column or only of `layout.columns`, and if `hidden` last hidden states of every column.

        Hidden states of `layout.layers` go to `layout.taken`.
        """

    def quantized(self, bits: int) -> SlotBackend:
        """The model with linear weights of 4 or 8 bits, in the same cache."""
        *_, made = self.quantizing(bits)
        assert made is not None, "the last step gives the model"
        return made

    def for_drafts(self) -> SlotBackend:
        """The model as a draft model, in the same cache: a large output layer is rounded; itself where none is."""
        return self

    def rounded(self, bits: int) -> SlotBackend:
        """The model with linear weights of 4 or 8 bits as a target, and an empty cache; this backend is used up.

        Raises:
            UserError: as `quantizing`, or a backend that has no such form.
        """
        raise UserError(
            f"weights of {bits} bits: expected backend lean, hf or snapshot, got {self.name} on backend {self.kind}: "
            "take a checkpoint that is quantized already"
        )

    @property
    def stores_kv(self) -> bool:
        """Whether `store_kv` works."""
        return False

    def store_kv(self, dtype: torch.dtype) -> None:
        """From now on, store keys and values in fewer bits: another model, whose sessions take less memory.

        Call it before a session is opened.

        Args:
            dtype: int8 (`rounding`), bfloat16 beside float32 rows, or that of the rows.

        Raises:
            UserError: another dtype, or a backend that stores them as they are.
        """
        name, rows = (str(each).removeprefix("torch.") for each in (dtype, self.dtype))
        if dtype == self.dtype and self._cache.kept is None:
            return
        if not self.stores_kv:
            raise UserError(
                f"kv_dtype: expected auto for {self.name} on backend {self.kind} and {self.device.type}, got {name}: "
                "only backend lean stores keys and values in another format, on a CPU"
            )
        if dtype not in (self.dtype, torch.int8) and (self.dtype, dtype) != (torch.float32, torch.bfloat16):
            legal = ", ".join(("auto", rows, *(["bfloat16"] if self.dtype == torch.float32 else []), "int8"))
            raise UserError(f"kv_dtype: expected one of {legal} for {self.name}, whose dtype is {rows}, got {name}")
        self._cache = SlotCache(self.facts.max_positions, kept=None if dtype == self.dtype else dtype)

    @abstractmethod
    def output_rows(self, ids: Int[Tensor, " ids"]) -> Float[Tensor, "ids dim"]:
        """Rows of the output layer's weight, in the model's dtype."""

    @abstractmethod
    def first_layers(self, layers: int) -> SlotBackend:
        """The model's first layers, its final norm and its output layer, on the same weights and in the same cache."""

    def with_weights(self, weights: nn.Module | Mapping[str, Tensor]) -> SlotBackend:  # noqa: ARG002 - of subclasses
        """The model with new weights and an empty cache; this backend must not be used any more.

        Args:
            weights: a model of the same architecture, or its state dict under transformers' names.

        Raises:
            UserError: weights of another model, or a backend that cannot change them; this one stays as it was.
        """
        raise UserError(
            f"the weights of {self.name} cannot be changed on backend {self.kind}: use backend lean, hf or "
            "snapshot, or load the model again"
        )

    def quantizing(self, bits: int) -> Iterator[SlotBackend | None]:
        """The model with linear weights of 4 or 8 bits, in the same cache, made in short steps.

        Returns:
            None after each step, and at last the model; the first step only checks.
        """
        raise UserError(
            f"{self.name} cannot be quantized to {bits} bits on backend {self.kind}: use backend lean, hf or snapshot"
        )
