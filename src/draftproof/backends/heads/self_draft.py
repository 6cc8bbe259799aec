"""A model drafts for itself, in its own cache: its first layers, or all layers with quantized weights.

A session of such a draft model continues the target's session in its slot, so the draft model need not read again what
the target has read. What it writes there is overwritten when the target verifies: the first layers write the same
numbers as the whole model, quantized weights write others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxtyping import Float, Int
from torch import Tensor

from draftproof.backends.base import Session
from draftproof.backends.cache.layout import Layout
from draftproof.backends.cache.sessions import SlotSession
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.errors import UserError, reason, refuse_outside


class SelfDraftBackend(SlotBackend):
    """A smaller form of a model, which reads and writes the whole model's cache."""

    stationary = True  # whether its probabilities after a text are the same in every round

    def __init__(self, whole: SlotBackend, part: SlotBackend, name: str) -> None:
        super().__init__(whole.facts, cache=whole.cache)
        self.name = name
        self.part = part
        self.embed = part.embed
        self.prefill = part.prefill
        self.packs = part.packs
        self.capabilities = part.capabilities
        self.max_positions = whole.max_positions

    def _compute(self, layout: Layout, *, hidden: bool) -> tuple[Tensor, Tensor | None]:
        return self.part._compute(layout, hidden=hidden)  # noqa: SLF001 - a part of this backend

    def sequences_nbytes(self, lengths: Sequence[int]) -> int:  # noqa: ARG002
        """0: its sessions have no memory of their own."""
        return 0

    def output_rows(self, ids: Int[Tensor, " ids"]) -> Float[Tensor, "ids dim"]:
        """Rows of the part's output layer."""
        return self.part.output_rows(ids)

    def first_layers(self, layers: int) -> SlotBackend:
        """The first layers of this part."""
        return self.part.first_layers(layers)

    def quantizing(self, bits: int) -> Iterator[SlotBackend | None]:
        """This part with quantized weights."""
        return self.part.quantizing(bits)

    def borrow(self, owner: Session) -> SlotSession:
        """A session in the slot of the whole model's session, which has read the same tokens."""
        assert isinstance(owner, SlotSession), "the owner is a session of the whole model's backend"
        return owner.lend()


class EarlyExitBackend(SelfDraftBackend):
    """The first `layers` layers of a backend's model, followed by its own final norm and output layer."""

    def __init__(self, whole: SlotBackend, layers: int) -> None:
        total = whole.facts.layers
        refuse_outside(f"early exit of {whole.name}", layers, 1, total - 1, " layers")
        try:
            part = whole.first_layers(layers)
        except UserError as cause:
            raise UserError(f"early exit: {reason(cause)}") from cause
        super().__init__(whole, part, f"{whole.name}, first {layers} layers")


class QuantizedBackend(SelfDraftBackend):
    """A backend's model with the weights of its linear layers quantized to 4 or 8 bits.

    Inside a draft it reads keys that its own layers wrote. In the next round the accepted tokens have the target's
    keys, and after the same text it has other probabilities. That matters only to rules that remember earlier rounds.
    """

    stationary = False

    def __init__(self, whole: SlotBackend, bits: int, part: SlotBackend | None = None) -> None:
        super().__init__(whole, part or whole.quantized(bits), f"{whole.name}, {bits} bits")
