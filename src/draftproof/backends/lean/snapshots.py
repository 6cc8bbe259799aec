"""Backend snapshot where the lean forward can read the model: its passes are native, and nothing else differs.

What the lean forward cannot read is read by transformers' own modules, and `rounding` says why.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from draftproof.backends.cache.layout import Layout
from draftproof.backends.cache.windows import windows_of
from draftproof.backends.hf.snapshots import SnapshotBackend
from draftproof.backends.lean.mixers import PassStates
from draftproof.backends.lean.module_backend import ReadByLean, why_unread
from draftproof.backends.recurrent.mixers import ResumedMixers


class LeanSnapshotBackend(ReadByLean, SnapshotBackend):
    """A model with recurrent layers; arguments as of ReadByLean and SnapshotBackend."""

    def _continuation(self, model: Any) -> ResumedMixers:
        """How it goes on from a state: native code always reads tokens as in one pass over everything."""
        if why_unread(model, windows_of(model)) is not None:
            return super()._continuation(model)
        return ResumedMixers(several=True, single=True, divisible=frozenset())

    def _compute(self, layout: Layout, *, hidden: bool) -> tuple[Tensor, Tensor | None]:
        if self.lean is None:
            return super()._compute(layout, hidden=hidden)
        sessions = [self._session(feed) for feed in layout.feeds]
        before = [session.state for session in sessions]
        states = PassStates(self.lean.mixers, len(self.lean.layers), layout, before)
        made = self.lean(layout, self._cache, hidden=hidden, sequences=states.sequences)
        for session, state in zip(sessions, states.after, strict=True):
            session.stage(None, state)
        self._state_nbytes = self._state_nbytes or replace(states.after[0], held={}).nbytes
        return made
