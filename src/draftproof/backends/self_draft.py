"""The first layers of a model as a draft model, on the same weights and in the same cache.

A truncated model computes the same keys and values as the whole model's first layers. So the draft model need not read
again what the target has read, and the target overwrites what the draft model wrote with the same numbers.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from draftproof.backends.base import Session
from draftproof.backends.layout import Layout
from draftproof.backends.sessions import SlotSession
from draftproof.backends.slots import SlotBackend
from draftproof.errors import UserError, reason


class EarlyExitBackend(SlotBackend):
    """The first `layers` layers of a backend's model, followed by its own final norm and output layer.

    Args:
        whole: the backend of the whole model; weights and cache are shared with it.
        layers: how many of its layers, 1 to one less than all.

    Raises:
        UserError: a number out of range, or the model's first layers do not work on their own.
    """

    def __init__(self, whole: SlotBackend, layers: int) -> None:
        total = whole.facts.layers
        if not 1 <= layers < total:
            raise UserError(f"early exit after {layers} layers of {whole.name}: legal are 1 to {total - 1}")
        super().__init__(whole.facts, cache=whole.cache)
        self.name = f"{whole.name}, first {layers} layers"
        try:
            self.part = whole.first_layers(layers)
        except UserError as cause:
            raise UserError(f"early exit: {reason(cause)}") from cause
        self.embed = self.part.embed
        self.capabilities, self.max_positions = self.part.capabilities, whole.max_positions

    def _compute(self, layout: Layout, *, hidden: bool) -> tuple[Tensor, Tensor | None]:
        return self.part._compute(layout, hidden=hidden)  # noqa: SLF001 - a part of this backend

    def output_rows(self, ids: Int[Tensor, " ids"]) -> Float[Tensor, "ids dim"]:
        """Rows of the whole model's output layer."""
        return self.part.output_rows(ids)

    def first_layers(self, layers: int) -> SlotBackend:
        """The first layers of this part."""
        return self.part.first_layers(layers)

    def borrow(self, owner: Session) -> BorrowedSession:
        """A session in the slot of the whole model's session, which has read the same tokens."""
        assert isinstance(owner, SlotSession), "the owner is a session of the whole model's backend"
        return BorrowedSession(owner)


class BorrowedSession(SlotSession):
    """A session that continues another one in its slot; valid until that one reads or rolls back.

    Args:
        owner: without a tail; call `unread` on it first.
    """

    def __init__(self, owner: SlotSession) -> None:
        Session.__init__(self)
        assert owner.stem == owner.length, "a borrowed session continues a chain"
        self.cache = owner.cache
        self.slot = owner.slot
        self._tokens = list(owner.tokens)
        self._length = owner.length

    def close(self) -> None:
        """The slot stays with its owner."""
        self.slot = -1
