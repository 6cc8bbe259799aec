"""Backend snapshot where the lean forward can read the model: its passes are native, and nothing else differs.

Weights stay those of the transformers model. What the lean forward cannot read is read by transformers' own modules,
and `rounding` says why.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from draftproof.backends.cache.layout import Layout
from draftproof.backends.cache.windows import windows_of
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.hf.snapshots import SnapshotBackend
from draftproof.backends.lean.hybrid import HybridLean
from draftproof.backends.lean.mixers import PassStates
from draftproof.backends.lean.traits import UnreadError
from draftproof.backends.recurrent.mixers import ResumedMixers
from draftproof.backends.recurrent.states import State

_log = logging.getLogger(__name__)


class LeanSnapshotBackend(SnapshotBackend):
    """A model with recurrent layers; arguments as of SnapshotBackend.

    Attributes:
        lean: its forward pass; None where transformers' own modules make it.
    """

    lean: HybridLean | None = None
    _unread = ""  # why there is no lean forward

    def _continuation(self, model: Any) -> ResumedMixers:
        """How it goes on from a state: native code always reads tokens as in one pass over everything."""
        try:
            HybridLean(model, windows_of(model))
        except UnreadError:
            return super()._continuation(model)
        return ResumedMixers(several=True, single=True, divisible=frozenset())

    def _multiply_natively(self) -> None:
        super()._multiply_natively()
        self._read_lean()

    def _read_lean(self) -> None:
        """Read the model as it is now by a lean forward, where that is possible."""
        self.lean = None
        try:
            self.lean = HybridLean(self.model, self._windows)
        except UnreadError as cause:
            self._unread = str(cause)
            _log.info("%s is read by transformers' own modules: %s", self.name, cause)
        self.packs = self.lean is not None
        self.own_threads |= self.packs

    @property
    @override
    def rounding(self) -> str:
        return super().rounding + f" ({self._unread})" if self.lean is None else self.lean.rounding

    @override
    def with_weights(self, weights: nn.Module | Mapping[str, Tensor]) -> HFBackend:
        """What was made of the weights is made again."""
        made = super().with_weights(weights)
        assert isinstance(made, LeanSnapshotBackend), "a copy of this one"
        made._read_lean()  # noqa: SLF001 - of this class
        return made

    def _with_model(self, model: Any) -> HFBackend:
        made = super()._with_model(model)
        assert isinstance(made, LeanSnapshotBackend), "a copy of this one"
        made._read_lean()  # noqa: SLF001 - of this class
        return made

    def _compute(self, layout: Layout, *, hidden: bool) -> tuple[Tensor, Tensor | None]:
        if self.lean is None:
            return super()._compute(layout, hidden=hidden)
        sessions = [self._session(feed) for feed in layout.feeds]
        before = [session.state for session in sessions]
        states = PassStates(self.lean.mixers, len(self.lean.layers), layout, before)
        made = self.lean(layout, self._cache, hidden=hidden, sequences=states.sequences)
        for row, session in enumerate(sessions):
            session.stage(State(states.root, row) if states.marked[row] else None, State(states.end, row))
        self._state_nbytes = self._state_nbytes or State(states.end, 0).nbytes
        return made
