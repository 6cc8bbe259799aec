"""Linear layers of a model that read the same rows, as one operation of native code, whatever their weights are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float32, Int
from torch import Tensor, nn

from draftproof import native
from draftproof.backends.hf.quantized_modules import QuantizedLinear
from draftproof.backends.lean.traits import UnreadError, is_stock
from draftproof.backends.products.packed_linear import REORDERED, LinearSlice, PackedLinear, PlainProduct, SplitProduct
from draftproof.native.structures import MOST_INPUTS, InputsArguments, LinearArguments
from draftproof.native.tensors import Immutable


class FusedProducts(Immutable):
    """Products with the same rows, whose outputs are one row.

    Args:
        products: one after another.
        order: which of all outputs stands at each place of a row; None where they are in order.
        factors: of each place; None where all are 1.

    Attributes:
        arguments: for native.c; they hold addresses of tensors that are kept here.
    """

    def __init__(
        self,
        products: Sequence[PackedLinear],
        order: Int[Tensor, " places"] | None = None,
        factors: Float32[Tensor, " places"] | None = None,
    ) -> None:
        outs = [product.weight.outs for product in products]
        if len(products) > MOST_INPUTS:
            raise UnreadError(f"{len(products)} of its weights are read together, of at most {MOST_INPUTS}")
        if order is not None and torch.equal(order, torch.arange(sum(outs))):
            order = None
        self.products = products
        self._order = None if order is None else order.to(torch.int32).contiguous()
        self._factors = None if factors is None or bool((factors == 1).all()) else factors.float().contiguous()
        self.arguments = InputsArguments(
            count=len(products),
            places=sum(outs) if order is None else len(order),
            order=_address_of(self._order),
            factors=_address_of(self._factors),
        )
        for place, product in enumerate(products):
            self.arguments.of[place] = linear_arguments(product)
            self.arguments.outs[place] = outs[place]

    @classmethod
    def of(cls, product: PackedLinear | FusedProducts) -> FusedProducts:
        """A product alone, or the parts of one that is split."""
        if isinstance(product, FusedProducts):
            return product
        return cls(product.products if isinstance(product, SplitProduct) else [product])

    @classmethod
    def of_modules(
        cls,
        modules: Sequence[Any],
        order: Int[Tensor, " places"] | None = None,
        factors: Float32[Tensor, " places"] | None = None,
    ) -> FusedProducts:
        """Linear layers of a model; `order` and `factors` as of the class."""
        starts: dict[int, int] = {}
        products, rows = list[PackedLinear](), list[Tensor]()
        for module in modules:
            product, mine = product_of_layer(module)
            if id(product) not in starts:
                starts[id(product)] = sum(each.weight.outs for each in products)
                products.append(product)
            rows.append(starts[id(product)] + mine)
        every = torch.cat(rows)
        return cls(products, every if order is None else every[order], factors)


def product_of_layer(module: Any) -> tuple[PackedLinear, Int[Tensor, " outs"]]:
    """The product that a linear layer is part of, and which of its outputs are the layer's."""
    if isinstance(module, LinearSlice):
        if module.product.layout == REORDERED:
            raise UnreadError("the inputs of its products have another order (desc_act)")
        return module.product, module.outputs
    if isinstance(module, QuantizedLinear):
        return module.product, torch.arange(module.product.weight.outs)
    is_plain = isinstance(module, nn.Linear) and is_stock(type(module)) and type(module.weight) is nn.Parameter
    operations = native.operations_for(module.weight) if is_plain else None
    if operations is None or not module.weight.is_contiguous():
        raise UnreadError(f"there is no native product with a {type(module).__name__}")
    bias = None if module.bias is None else module.bias.detach()
    return PlainProduct(module.weight.detach(), bias), torch.arange(len(module.weight))


def linear_arguments(product: PackedLinear) -> LinearArguments:
    """A native product for native.c; it holds addresses."""
    address, bits, group = product.weight.arguments
    return LinearArguments(address, None if product.bias is None else product.bias.data_ptr(), bits, group)


def whole_product(module: Any) -> PackedLinear:
    """The product that a linear layer is, with all its outputs in order."""
    product, outs = product_of_layer(module)
    if not torch.equal(outs, torch.arange(product.weight.outs)):
        raise UnreadError(f"a {type(module).__name__} is a part of another product")
    return product


def _address_of(tensor: Tensor | None) -> int | None:
    """Where a tensor is; None where there is none."""
    return None if tensor is None else tensor.data_ptr()
