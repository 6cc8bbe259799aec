"""Backend snapshot for models whose weights have few bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from jaxtyping import Float, Int
from torch import Tensor, nn

from draftproof.backends.lean.snapshots import LeanSnapshotBackend
from draftproof.backends.products.stored_modules import StoredLinear
from draftproof.errors import UserError


class StoredSnapshotBackend(LeanSnapshotBackend):
    """A model with recurrent layers whose weights have few bits; inputs of their products are rounded to 8 bits."""

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
