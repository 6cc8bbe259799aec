"""Published heads with weights of few bits: what is drafted from is what was rounded, so drafts stay lossless."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from draftproof.backends.cache.passes import during
from draftproof.backends.lean.layers import Layer
from draftproof.backends.products.packed_linear import PackedLinear
from draftproof.errors import UserError


@dataclass
class _Rounding:
    """How a head that is being read is rounded, without bits not at all; `count` are its products so far."""

    name: str
    bits: int | None
    count: int = 0

    def require(self, product: PackedLinear) -> None:
        """Refuse a product that has no quantized form."""
        assert self.bits is not None, "the caller looked"
        self.count += 1
        if (why := product.why_not_quantized(self.bits)) is not None:
            raise UserError(f"{self.name} cannot be rounded to {self.bits} bits: {why}; leave out draft_dtype")


_ROUNDING: ContextVar[_Rounding | None] = ContextVar("_ROUNDING", default=None)


@contextmanager
def rounded_head(name: str, bits: int | None, *, whole: bool = False) -> Iterator[None]:
    """Linear layers of a head that is read meanwhile have so many bits; None leaves them, and `whole` the output layer.

    Raises:
        UserError: it has none that can be rounded.
    """
    if bits is None and not whole:
        yield
        return
    rounding = _Rounding(name, bits)
    with during(_ROUNDING, rounding):
        yield
    if bits is not None and not rounding.count:
        raise UserError(f"{name} cannot be rounded to {bits} bits: its layers are the target's; leave out draft_dtype")


def rounded_product(product: PackedLinear, *, output: bool = False) -> PackedLinear:
    """A linear layer of a head as it is read now; of an output layer the largest outputs are whole."""
    rounding = _ROUNDING.get()
    if rounding is None or rounding.bits is None:
        return product
    rounding.require(product)
    return product.quantized_output(rounding.bits) if output else product.quantized(rounding.bits)


def stays_whole() -> bool:
    """Whether the head that is read now keeps its output layer as it is."""
    rounding = _ROUNDING.get()
    return rounding is not None and rounding.bits is None


def drafting_output(rows: Float[Tensor, "out in"]) -> PackedLinear:
    """The output layer of a head that has none: rows of the target's, with the bits that were asked for.

    Where no fewer than 8 were asked for, a large one has few bits on a CPU (`PackedLinear.for_drafts`).
    """
    whole, rounding = PackedLinear(rows), _ROUNDING.get()
    if stays_whole():
        return whole
    made = whole.for_drafts(rows) if rounding is None or rounding.bits is None or rounding.bits >= 8 else whole
    if made is whole:
        return rounded_product(whole, output=True)
    if rounding is not None:
        rounding.count += 1
    return made


def rounded_layer(layer: Layer) -> Layer:
    """A layer of a head, likewise."""
    rounding = _ROUNDING.get()
    if rounding is None or rounding.bits is None:
        return layer
    for product in layer.products.values():
        rounding.require(product)
    return layer.quantized(rounding.bits)
