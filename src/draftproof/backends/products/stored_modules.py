"""Modules of few bits in the places of a model's linear layers and embeddings, whose own forward pass goes on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from draftproof.backends.products.packed_linear import LinearSlice, PackedLinear, StoredProduct, operations_for_stored
from draftproof.native.ggml import StoredMatrix
from draftproof.native.tensors import Immutable


class StoredLinear(Immutable, LinearSlice):
    """Some outputs of a product with all matrices of few bits that are read with the same inputs.

    Attributes:
        inputs: which of the layer's inputs each of the product's is; None where they have the same order.
    """

    def __init__(
        self,
        product: StoredProduct,
        start: int,
        stop: int,
        places: Int[Tensor, " part"] | None = None,
        inputs: Int[Tensor, " in"] | None = None,
    ) -> None:
        super().__init__(product, start, stop, places)
        self.inputs = inputs

    @property
    def weight(self) -> Tensor:
        """A tensor without memory that has the weight's shape, for modules that look at it."""
        return torch.empty((self.stop - self.start, self.product.weight.ins), device="meta")

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """The layer's outputs."""
        return super().forward(x if self.inputs is None else x[..., self.inputs])


class StoredEmbedding(nn.Module):
    """Rows of a matrix of few bits, times a factor."""

    few_bits = True

    def __init__(self, matrix: StoredMatrix, factor: float = 1.0) -> None:
        super().__init__()
        self._matrix = matrix
        self._factor = factor
        self._operations = operations_for_stored(matrix)

    @property
    def weight(self) -> Tensor:
        """A tensor without memory that has the weight's shape, for modules that look at it."""
        return torch.empty(self._matrix.shape, device="meta")

    def forward(self, ids: Int[Tensor, "*some"]) -> Float[Tensor, "*some dim"]:
        """The rows of some tokens."""
        rows = self._operations.ggml_rows(self._matrix, ids)
        return rows if self._factor == 1.0 else rows.mul_(self._factor)


class StoredGates(nn.Module):
    """A feed-forward part with gates.

    Args:
        gate_up: the product that makes gates, and behind them what they let through.
    """

    def __init__(self, gate_up: PackedLinear, gated: Callable[[Tensor], Tensor], down: nn.Module) -> None:
        super().__init__()
        self._gate_up = gate_up
        self._gated = gated
        self.down_proj = down

    def forward(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """What the part makes of every row."""
        made: Tensor = self.down_proj(self._gated(self._gate_up(x)))
        return made


class NativeNorm(nn.Module):
    """A norm by native operations, whose last digits do not depend on the rows of a pass."""

    def __init__(self, norm: Callable[[Tensor], Tensor], weight: Float[Tensor, " dim"]) -> None:
        super().__init__()
        self._norm = norm
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)

    def forward(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """The normed rows."""
        return self._norm(x.contiguous())
