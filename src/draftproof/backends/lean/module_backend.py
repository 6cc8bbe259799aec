"""Backend lean over the modules of a transformers model whose layers differ from one another, as Gemma 4's.

Its modules multiply with the same weights, and make forms of it with few bits.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from draftproof import native
from draftproof.backends.cache.layout import Layout
from draftproof.backends.cache.slot_cache import SlotCache
from draftproof.backends.cache.windows import FULL, SLIDING, Windows
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.hf.native_modules import MOST_ROWS
from draftproof.backends.hf.truncate import first_layers, put, shallow
from draftproof.backends.lean.hybrid import HybridLean, family_of
from draftproof.backends.lean.mixture_modules import is_mixture
from draftproof.backends.lean.traits import UnreadError
from draftproof.backends.products.linear_layers import linear_layers, packed_layers
from draftproof.backends.products.packed_linear import LinearSlice, PlainProduct, fuse
from draftproof.errors import UserError
from draftproof.peak import FilePages, release_freed_memory

_log = logging.getLogger(__name__)


class ReadByLean(HFBackend):
    """A transformers model that is read by a lean forward over its modules, where that is possible.

    Args:
        pack: whether linear weights may move into the layout that native products read fastest, where the lean forward
            reads the model. A matrix unit reads bfloat16 weights as fast where they are.
        release: whether nobody else has the weights, so that pages of a checkpoint may go once they are packed.

    Attributes:
        lean: the forward pass; None where transformers' own modules make it.
        packed: whether linear weights are packed.
    """

    lean: HybridLean | None = None
    _unread = ""  # why there is no lean forward

    def __init__(self, model: Any, *, pack: bool = False, release: bool = False, **options: Any) -> None:
        self.packed = pack
        self._releases = release
        super().__init__(model, **options)

    @override
    def _multiply_natively(self) -> None:
        if self.packed:
            self._unread = why_unread(self.model, self._windows) or ""  # before it is taken apart
            self.packed = not self._unread
        if self.packed:
            pack_layers(self.model, release=self._releases)
        super()._multiply_natively()
        self._read_lean()
        if self.lean is None:
            _log.info("%s is read by transformers' own modules: %s", self.name, self._unread)

    def _read_lean(self) -> None:
        """Read the model as it is now by a lean forward, where that is possible."""
        self.lean = None
        try:
            self.lean = HybridLean(self.model, self._windows)
        except UnreadError as cause:
            self._unread = self._unread or str(cause)
        self.packs = self.lean is not None
        self.own_threads |= self.packs

    @property
    @override
    def rounding(self) -> str:
        return super().rounding + f" ({self._unread})" if self.lean is None else self.lean.rounding

    @override
    def with_weights(self, weights: nn.Module | Mapping[str, Tensor]) -> HFBackend:
        """The model's own tensors are written over; packed ones are packed again."""
        model = unpacked(self.model)
        self._write(model, weights)
        if self.packed:
            pack_layers(model)
        made = self._with_model(model)
        made.keeps = False
        made._cache = SlotCache(self.facts.max_positions, kept=self._cache.kept)  # noqa: SLF001 - of this class
        made._recorded = ()  # noqa: SLF001
        return made

    def _with_model(self, model: Any) -> HFBackend:
        made = super()._with_model(model)
        assert isinstance(made, ReadByLean), "a copy of this one"
        made._read_lean()  # noqa: SLF001 - of this class
        return made


class LeanModulesBackend(ReadByLean):
    """Such a model without recurrent layers; other arguments as of HFBackend.

    Args:
        pack: as of ReadByLean. Where weights stay and no matrix unit multiplies them, passes of many tokens are left to
            transformers' own modules, which multiply them faster.

    Attributes:
        reads_all: whether the lean forward makes passes of many tokens, too.
    """

    kind = "lean"
    reads_all = False

    @override
    def _multiply_natively(self) -> None:
        super()._multiply_natively()
        if self.lean is None:
            raise UserError(f"{self.name} has no lean forward: {self._unread}; use backend hf or auto")

    @override
    def _read_lean(self) -> None:
        """Forms of the model that measure what its modules are given are read by these."""
        super()._read_lean()
        operations = native.operations_for(next(self.model.parameters()))
        self.reads_all = self.packed or (operations is not None and operations.in_place)
        self.packs &= self.reads_all

    @property
    @override
    def rounding(self) -> str:
        if self.reads_all or self.lean is None:
            return super().rounding
        return (
            f"passes of more than {MOST_ROWS} tokens are those of transformers' own modules, whose sums depend on the "
            "rows of a pass"
        )

    @override
    def first_layers(self, layers: int) -> HFBackend:
        model, name = first_layers(self.model, layers, self.name), f"{self.name}, first {layers} layers"
        return type(self)(model, pack=self.packed, name=name, cache=self._cache)

    @property
    @override
    def stores_kv(self) -> bool:
        return self.reads_all

    @override
    def store_kv(self, dtype: torch.dtype) -> None:
        """Others do not read keys of 8 bits any more (`whole_keys`)."""
        super().store_kv(dtype)
        self.whole_keys = dtype != torch.int8

    def _compute(self, layout: Layout, *, hidden: bool) -> tuple[Tensor, Tensor | None]:
        if self.lean is None or not (self.reads_all or layout.ids.numel() <= MOST_ROWS):
            return super()._compute(layout, hidden=hidden)
        return self.lean(layout, self._cache, hidden=hidden)


def packing(kind: type) -> dict[str, Any]:
    """The options with which a kind of backend packs the weights of a model that nobody else has."""
    return {"pack": True, "release": True} if issubclass(kind, ReadByLean) else {}


def pack_layers(model: Any, *, release: bool = False) -> None:
    """Let linear layers of floats be native products, packed where nothing else has the weight.

    With `release`, pages of a checkpoint that hold packed weights go: what was changed in them would be lost to others.
    """
    pages = FilePages() if release else None
    users = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
    for path, each in linear_layers(model).items():
        place, _, name = path.rpartition(".")
        owner = model.get_submodule(place)
        if not isinstance(each, nn.Linear) or is_mixture(owner):  # a mixture reads its routers itself
            continue
        weight = each.weight.detach()
        if users[id(each.weight)] > 1:  # as that of a tied embedding
            setattr(owner, name, LinearSlice(PlainProduct(weight), 0, len(weight)))
        else:
            fuse(owner, [name])
            if pages is not None:
                pages.release(weight)
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
    """Why the lean forward does not read a model; None where it does.

    Its masks are those of `windows`; by default they are taken to be such as it reads, since a pass would show them.
    """
    try:
        family_of(model)
        HybridLean(model, windows or Windows(frozenset({FULL, SLIDING}), model.config))
    except UnreadError as cause:
        return str(cause)
    return None
