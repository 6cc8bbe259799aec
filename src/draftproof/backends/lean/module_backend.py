"""Backend lean over the modules of a transformers model whose layers differ from one another, as Gemma 4's.

Its modules multiply with the same weights, and make forms of it with few bits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import override

from draftproof.backends.cache.layout import Layout
from draftproof.backends.cache.slot_cache import SlotCache
from draftproof.backends.cache.windows import FULL, SLIDING, Windows
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.hf.native_modules import MOST_ROWS
from draftproof.backends.hf.truncate import first_layers, put, shallow
from draftproof.backends.lean.hybrid import HybridLean, family_of
from draftproof.backends.lean.traits import UnreadError
from draftproof.backends.new_weights import copy_into, state_of
from draftproof.backends.products.linear_layers import linear_layers, packed_layers
from draftproof.backends.products.packed_linear import LinearSlice, PlainProduct, fuse
from draftproof.errors import UserError
from draftproof.peak import release_freed_memory

_log = logging.getLogger(__name__)


class ReadByLean(HFBackend):
    """A transformers model that is read by a lean forward over its modules, where that is possible.

    Attributes:
        lean: the forward pass; None where transformers' own modules make it.
    """

    lean: HybridLean | None = None
    _unread = ""  # why there is no lean forward

    def _multiply_natively(self) -> None:
        super()._multiply_natively()
        self._read_lean()

    def _read_lean(self) -> None:
        """Read the model as it is now by a lean forward, where that is possible."""
        self.lean = None
        try:
            self.lean = self._lean_of(self._windows)
        except UnreadError as cause:
            self._unread = str(cause)
            _log.info("%s is read by transformers' own modules: %s", self.name, cause)
        self.packs = self.lean is not None
        self.own_threads |= self.packs

    def _lean_of(self, windows: Windows) -> HybridLean:
        return HybridLean(self.model, windows)

    @property
    @override
    def rounding(self) -> str:
        return super().rounding + f" ({self._unread})" if self.lean is None else self.lean.rounding

    @override
    def with_weights(self, weights: nn.Module | Mapping[str, Tensor]) -> HFBackend:
        """What was made of the weights is made again."""
        made = super().with_weights(weights)
        assert isinstance(made, ReadByLean), "a copy of this one"
        made._read_lean()  # noqa: SLF001 - of this class
        return made

    def _with_model(self, model: Any) -> HFBackend:
        made = super()._with_model(model)
        assert isinstance(made, ReadByLean), "a copy of this one"
        made._read_lean()  # noqa: SLF001 - of this class
        return made


class LeanModulesBackend(ReadByLean):
    """Such a model without recurrent layers; other arguments as of HFBackend.

    Args:
        pack: whether linear weights may move into the layout that native products read fastest. Where they stay, passes
            of many tokens are left to transformers' own modules, which multiply them faster.

    Raises:
        UserError: as of HFBackend, or a model that the lean forward does not read.
    """

    kind = "lean"

    def __init__(self, model: Any, *, pack: bool = True, **options: Any) -> None:
        self._packs_weights = pack
        super().__init__(model, **options)

    @override
    def _multiply_natively(self) -> None:
        if self._packs_weights:
            if (why := why_unread(self.model, self._windows)) is not None:  # before it is taken apart
                raise self._refused(why)
            pack_layers(self.model)
        super()._multiply_natively()
        if self.lean is None:
            raise self._refused(self._unread)

    def _refused(self, why: str) -> UserError:
        return UserError(f"{self.name} has no lean forward: {why}; use backend hf or auto")

    @override
    def _read_lean(self) -> None:
        """Forms of the model that measure what its modules are given are read by these."""
        super()._read_lean()
        self.packs &= self._packs_weights

    @override
    def _lean_of(self, windows: Windows) -> HybridLean:
        return HybridLean(self.model, windows, few=not self._packs_weights)

    @property
    @override
    def rounding(self) -> str:
        if self._packs_weights or self.lean is None:
            return super().rounding
        return (
            f"passes of more than {MOST_ROWS} tokens are those of transformers' own modules, whose sums depend on the "
            "rows of a pass"
        )

    @override
    def output_rows(self, ids: Int[Tensor, " ids"]) -> Float[Tensor, "ids dim"]:
        head = self.model.get_output_embeddings()
        return head.product.rows(ids) if isinstance(head, LinearSlice) else super().output_rows(ids)

    @override
    def first_layers(self, layers: int) -> HFBackend:
        model, name = first_layers(self.model, layers, self.name), f"{self.name}, first {layers} layers"
        return type(self)(model, pack=self._packs_weights, name=name, cache=self._cache)

    @override
    def with_weights(self, weights: nn.Module | Mapping[str, Tensor]) -> HFBackend:
        """Packed ones are packed again."""
        model = unpacked(self.model)
        copy_into(model, state_of(weights), self.name)
        if self._packs_weights:
            pack_layers(model)
        made = self._with_model(model)
        made.keeps = False
        made._cache = SlotCache(self.facts.max_positions, rounds=self._cache.rounds)  # noqa: SLF001 - of this class
        made._recorded = ()  # noqa: SLF001
        return made

    @override
    def round_kv(self) -> None:
        """Others do not read its keys any more (`whole_keys`)."""
        if not self._packs_weights:
            super().round_kv()
        self._cache = SlotCache(self.facts.max_positions, rounds=True)
        self.whole_keys = False

    def _compute(self, layout: Layout, *, hidden: bool) -> tuple[Tensor, Tensor | None]:
        if self.lean is None or not (self._packs_weights or layout.ids.numel() <= MOST_ROWS):
            return super()._compute(layout, hidden=hidden)
        return self.lean(layout, self._cache, hidden=hidden)


def pack_layers(model: Any) -> None:
    """Let the linear layers of a model that have floats be native products, packed where they are no table, too."""
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    for path, each in linear_layers(model).items():
        owner, _, name = path.rpartition(".")
        if isinstance(each, nn.Linear) and id(each.weight) not in tables:
            fuse(model.get_submodule(owner), [name])
        elif isinstance(each, nn.Linear):
            setattr(
                model.get_submodule(owner), name, LinearSlice(PlainProduct(each.weight.detach()), 0, len(each.weight))
            )
    release_freed_memory()


def unpacked(model: Any) -> Any:
    """A copy of a model with linear layers whose weights are yet to be filled in place of packed ones."""
    twin = shallow(model)
    copied: dict[str, Any] = {"": twin}
    tables = {each.weight.data_ptr(): each.weight for each in model.modules() if isinstance(each, nn.Embedding)}
    for path, packed in packed_layers(model).items():
        outs, ins, bias = packed.product.weight.outs, packed.product.weight.ins, packed.product.bias
        layer = nn.Linear(ins, outs, bias=bias is not None, device="meta")
        numbers = packed.product.numbers
        made = tables.get(numbers.data_ptr())
        layer.weight = nn.Parameter(numbers.new_empty((outs, ins)), requires_grad=False) if made is None else made
        if bias is not None:
            layer.bias = nn.Parameter(torch.empty_like(bias), requires_grad=False)
        put(copied, path, layer)
    return twin


def why_unread(model: Any, windows: Windows | None = None) -> str | None:
    """Why `LeanModulesBackend` does not read a model; None where it does.

    Its masks are those of `windows`; by default they are taken to be such as it reads, since a pass would show them.
    """
    try:
        family_of(model)
        HybridLean(model, windows or Windows(frozenset({FULL, SLIDING}), model.config), few=True)
    except UnreadError as cause:
        return str(cause)
    return None
