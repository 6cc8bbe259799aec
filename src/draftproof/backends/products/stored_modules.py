"""Modules of few bits in the places of a model's linear layers and embeddings, whose own forward pass goes on."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from draftproof.backends.products.packed_linear import Part, StoredProduct, operations_for_stored
from draftproof.native.ggml import StoredMatrix


class StoredLinear(Part):
    """Some outputs of a product with matrices of few bits.

    Args:
        product: of all matrices that are read with the same inputs.
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
        self._inputs = inputs

    def __deepcopy__(self, memo: object) -> StoredLinear:
        return self  # nothing changes it

    @property
    def weight(self) -> Tensor:
        """A tensor without memory that has the weight's shape, for modules that look at it."""
        return torch.empty((self.stop - self.start, self.product.weight.ins), device="meta")

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """The layer's outputs."""
        return super().forward(x if self._inputs is None else x[..., self._inputs])


class StoredEmbedding(nn.Module):
    """Rows of a matrix of few bits."""

    def __init__(self, matrix: StoredMatrix) -> None:
        super().__init__()
        self._matrix = matrix
        self._operations = operations_for_stored(matrix)

    @property
    def weight(self) -> Tensor:
        """A tensor without memory that has the weight's shape, for modules that look at it."""
        return torch.empty(self._matrix.shape, device="meta")

    def forward(self, ids: Int[Tensor, "*some"]) -> Float[Tensor, "*some dim"]:
        """The rows of some tokens."""
        return self._operations.ggml_rows(self._matrix, ids)
