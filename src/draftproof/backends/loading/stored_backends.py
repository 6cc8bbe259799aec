"""Backends for transformers' modules whose weights have few bits: their attention is native, in our passes.

Inputs of such products are rounded to 8 bits. So where attention sums in another order in another pass, a last digit
that differs can become a difference that is seen. Native attention sums in one order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from draftproof import native
from draftproof.backends.cache.layout import Layout
from draftproof.backends.cache.slot_cache import CacheView, SlotCache
from draftproof.backends.cache.windows import FULL, SLIDING
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.attention import Heads, NativeAttention, Pass
from draftproof.backends.lean.snapshots import LeanSnapshotBackend
from draftproof.backends.products.stored_modules import StoredLinear
from draftproof.errors import UserError
from draftproof.native.structures import PassMask

_NAME = "draftproof"


class _StoredWeights(HFBackend):
    """A model whose weights have few bits; inputs of their products are rounded to 8 bits."""

    rounds_inputs = True

    def output_rows(self, ids: Int[Tensor, " ids"]) -> Float[Tensor, "ids dim"]:
        """Rows of the output layer's weight."""
        head = self.model.get_output_embeddings()
        return head.product.rows(ids) if isinstance(head, StoredLinear) else super().output_rows(ids)

    def quantizing(self, bits: int) -> NoReturn:
        """Refused: see Raises.

        Raises:
            UserError: always; the weights have few bits already.
        """
        raise UserError(
            f"{self.name} cannot be quantized to {bits} bits: its weights have few bits already; it can be drafted for "
            "by another drafter"
        )

    def with_weights(self, weights: nn.Module | Mapping[str, Tensor]) -> NoReturn:  # noqa: ARG002 - of SlotBackend
        """Refused: see Raises.

        Raises:
            UserError: always; the weights are those of a file.
        """
        raise UserError(f"the weights of {self.name} cannot be changed: they are the blocks of a .gguf file")


class StoredBackend(_StoredWeights):
    """Such a model that its own modules read; its config names `attention_name()`."""

    def _past(self, layout: Layout) -> CacheView:
        return _NewOnly(self._cache, layout.plan)

    def _call(self, layout: Layout, view: CacheView, *, hidden: bool) -> tuple[Tensor, Tensor | None]:
        with _in_pass(_Passing(layout, self._cache)):
            return super()._call(layout, view, hidden=hidden)

    def _masks(self, layout: Layout) -> dict[str, Tensor | None]:  # noqa: ARG002 - of HFBackend
        return dict.fromkeys((FULL, SLIDING))


class StoredSnapshotBackend(_StoredWeights, LeanSnapshotBackend):
    """Such a model with recurrent layers."""


class _NewOnly(CacheView):
    """Of keys and values only the new ones: attention writes and reads the cache by itself."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """The new keys and values of a layer (called by attention layers)."""
        return key_states, value_states


class _Passing:
    """What the attention layers of a pass share.

    Args:
        layout: of the pass.
        cache: of keys and values.
    """

    def __init__(self, layout: Layout, cache: SlotCache) -> None:
        self._layout = layout
        self._cache = cache
        self._passes: dict[tuple[int, torch.dtype], Pass] = {}
        self._masks: dict[int | None, PassMask] = {}
        self._written: dict[int, tuple[int, Tensor]] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Float[Tensor, "rows tokens heads dim"]:
        """Write new keys and values, and attend.

        Args:
            layer: its number.
            query: [rows, heads, tokens, dim], as keys and values are.
            key: of the new tokens; another layer's own where layers share them.
            value: likewise.
            scale: of scores.
            window: how many tokens are seen; None for all.
        """
        rows, heads, width, dim = query.shape
        operations = native.operations_for(query)
        assert operations is not None, "the model was read by native operations"
        attention = NativeAttention(Heads(heads, key.shape[1], dim, scale), operations)
        if (dim, query.dtype) not in self._passes:
            angles = query.new_ones((rows * width, 1, dim)), query.new_zeros((rows * width, 1, dim))  # turned already
            self._passes[dim, query.dtype] = Pass(rows, width, *angles, self._cache, self._layout.plan)
        if window not in self._masks:
            self._masks[window] = attention.mask(self._layout, window, query.dtype)
        heads_of = [each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)]
        fused = torch.cat(heads_of, 1).contiguous()
        # A layer that reads the keys of an earlier one writes them once more, in that one's place. The tensor is kept,
        # so that no other gets its address.
        source, _ = self._written.setdefault(id(key), (layer, key))
        made = attention(source, fused, self._passes[dim, query.dtype], self._masks[window])
        return made.view(rows, width, heads, dim)


_PASS: ContextVar[_Passing | None] = ContextVar("_PASS", default=None)


@contextmanager
def _in_pass(passing: _Passing) -> Iterator[None]:
    token = _PASS.set(passing)
    try:
        yield
    finally:
        _PASS.reset(token)


@functools.cache
def attention_name() -> str:
    """The name under which transformers knows the attention: native in our passes, and else that of torch."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        passing = _PASS.get()
        if passing is None:
            made: tuple[Tensor, Tensor | None] = own(module, query, key, value, attention_mask, **options)
            return made
        window = options.get("sliding_window")
        return passing.attend(module.layer_idx, query, key, value, options["scaling"], window), None

    ALL_ATTENTION_FUNCTIONS.register(_NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return _NAME
