"""Backend snapshot where the lean forward can read the model: its passes are native, and nothing else differs.

What the lean forward cannot read is read by transformers' own modules, and `rounding` says why.
"""

from __future__ import annotations

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

    _held_tokens = -1  # the most tokens of a request that were held at the end of a pass

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
        widest = max(states.after, key=lambda state: state.replayed)
        if widest.replayed > self._held_tokens:
            self._held_tokens = widest.replayed
            self._states_nbytes = 2 * widest.nbytes  # that of before, and a new one, each with what drafts bring
        return made
