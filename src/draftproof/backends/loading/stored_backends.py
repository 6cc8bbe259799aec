"""Backends for transformers' modules whose weights have few bits: their attention is native, in our passes.

Inputs of such products are rounded to 8 bits. So where attention sums in another order in another pass, a last digit
that differs can become a difference that is seen. Native attention sums in one order, and so do products with the
weights that are left as floats.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof import native
from draftproof.backends.cache.layout import Layout
from draftproof.backends.cache.passes import during
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.cache.slot_cache import CacheView, SlotCache
from draftproof.backends.cache.windows import FULL, RECURRENT, SLIDING, windows_of
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.attention import Heads, NativeAttention, Pass
from draftproof.backends.lean.module_backend import LeanModulesBackend, pack_layers, why_unread
from draftproof.backends.lean.snapshots import LeanSnapshotBackend
from draftproof.backends.lean.traits import UnreadError
from draftproof.backends.loading.stored_mixtures import with_rounded_experts
from draftproof.errors import UserError, reason
from draftproof.native.structures import PassMask

_NAME = "draftproof"
_UNKNOWN = ("softcap", "s_aux", "position_bias", "head_mask")  # what changes attention and is not known to native code
_log = logging.getLogger(__name__)


class StoredBackend(HFBackend):
    """A model with weights of few bits, read by its own modules; its config names `attention_name()`."""

    def _past(self, layout: Layout) -> CacheView:
        return _NewOnly(self._cache, layout.plan)

    def _call(self, layout: Layout, view: CacheView, *, hidden: bool) -> tuple[Tensor, Tensor | None]:
        with during(_PASS, _PassContext(layout, self._cache)):
            return super()._call(layout, view, hidden=hidden)

    def _mask(self, layout: Layout, window: int | None) -> Tensor:  # noqa: ARG002 - of HFBackend
        return torch.full((1, 1, 1, 1), window or 0)  # in place of a mask, for `attend`


class _NewOnly(CacheView):
    """Of keys and values only the new ones: attention writes and reads the cache by itself."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """The new keys and values of a layer (called by attention layers)."""
        return key_states, value_states


class _PassContext:
    """What the attention layers of a pass share."""

    def __init__(self, layout: Layout, cache: SlotCache) -> None:
        self._layout = layout
        self._cache = cache
        self._passes: dict[tuple[int, torch.dtype], Pass] = {}
        self._masks: dict[int | None, PassMask] = {}
        self._written: dict[int, tuple[int, Tensor]] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Float[Tensor, "rows tokens heads dim"]:
        """Write new keys and values, and attend; keys may be those of another layer, where layers share them.

        Queries, keys and values are [rows, heads, tokens, dim].
        """
        rows, heads, width, dim = query.shape
        operations = native.operations_for(query)
        if operations is None or not operations.attends(dim) or value.shape != key.shape:
            raise UnreadError(f"there is no native attention for heads of {dim} numbers in {query.dtype}")
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


_PASS: ContextVar[_PassContext | None] = ContextVar("_PASS", default=None)


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
        odd = [name for name in _UNKNOWN if options.get(name) is not None]
        if odd or attention_mask is None or attention_mask.numel() != 1:
            raise UnreadError(f"its attention takes {odd[0] if odd else 'another mask than that of its layer'}")
        window = int(attention_mask) or None
        return passing.attend(module.layer_idx, query, key, value, options["scaling"], window), None

    ALL_ATTENTION_FUNCTIONS.register(_NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return _NAME


# --- models of transformers whose linear layers have few bits --------------------------------------------------------


def stored_backend(model: Any, name: str, *, snapshot: bool, check: bool) -> HFBackend:
    """The backend of a model whose linear layers became native products with weights of few bits.

    Attention is native where that is known to be right: where the check was asked for, and passed.
    """
    if snapshot:
        return LeanSnapshotBackend(model, pack=True, name=name, check=check)
    if why_unread(model) is None:
        try:
            return LeanModulesBackend(model, pack=True, name=name, check=check)
        except UserError as cause:
            _log.warning("%s is read by transformers' own modules, which are slower: %s", name, cause)
    if not check:
        return HFBackend(model, name=name, check=False)
    plain = model.config._attn_implementation  # noqa: SLF001 - has no public name
    try:
        _natively(model)
        return StoredBackend(model, name=name)
    except (UserError, UnreadError, ValueError) as cause:
        _log.info("%s has torch's attention: %s", name, reason(cause))
    model.set_attn_implementation(plain)
    return HFBackend(model, name=name)


def rounded(backend: SlotBackend, bits: int, *, check: bool = True) -> SlotBackend:
    """A model with linear weights of 4 or 8 bits as a target, and an empty cache; the given one is used up."""
    if type(backend) not in (HFBackend, StoredBackend, LeanModulesBackend, LeanSnapshotBackend):
        return backend.rounded(bits)
    assert isinstance(backend, HFBackend), "all are"
    backend.refuse_few_bits(bits)
    model = backend.rounded_copy(with_rounded_experts(backend.model, bits, backend.name), bits)
    snapshot = isinstance(backend, LeanSnapshotBackend)
    made = stored_backend(model, backend.name, snapshot=snapshot, check=check)
    made.facts = replace(made.facts, bits=bits)
    return made


def _natively(model: Any) -> None:
    """Let attention and the linear layers that have floats be native, so that their sums have one order."""
    if model.device.type != "cpu" or native.operations_for(torch.empty(0, dtype=model.dtype)) is None:
        raise UnreadError(f"there are no native operations on {model.dtype}, or they are off ({native.VARIABLE})")
    odd = windows_of(model).kinds - {FULL, SLIDING, *RECURRENT}
    if odd:
        raise UnreadError(f"its attention is of kinds that are not known here ({', '.join(sorted(odd))})")
    model.set_attn_implementation(attention_name())
    pack_layers(model)
