"""Models with recurrent layers as a backend: keys and values in a slot cache, and states that are kept at the root.

Knows: after which tokens a state was kept. Does not know: what a state is (`states`), or how layers make it (`mixers`).

A recurrent layer has one state for all tokens that it has read, and no token can be taken out of it. So a session keeps
the state at its root, the last committed token, while the drafts are read. Native passes also hold what the drafts
bring to each recurrence, and the next pass begins with that of the accepted ones. Without them, when all drafts are
accepted, the state after them is the next root's. Otherwise the session returns to the root, and the accepted tokens
are read again, together with the next drafts.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxtyping import Int
from torch import Tensor
from typing_extensions import override

from draftproof.backends.base import Feed, Session
from draftproof.backends.cache.layout import Layout
from draftproof.backends.cache.sessions import SlotSession
from draftproof.backends.cache.slot_cache import CacheView, SlotCache
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.hf.probe import Probe
from draftproof.backends.recurrent.mixers import ResumedMixers, continuation, in_pieces, mixers_of
from draftproof.backends.recurrent.recurrences import follow_passes, in_pass
from draftproof.backends.recurrent.states import RowGroup, State, StateView
from draftproof.errors import UserError
from draftproof.tree import TokenTree

_log = logging.getLogger(__name__)


class _Mark(NamedTuple):
    """A number of tokens, and the state after them."""

    length: int
    state: State

    @property
    def first(self) -> int:
        """The least number of tokens that it has a state after."""
        return self.length - self.state.replayed

    def at(self, length: int) -> _Mark:
        """The same after fewer tokens, `first` at least; itself where it has not read so many."""
        return self if length >= self.length else _Mark(length, self.state.before(self.length - length))


class SnapshotSession(SlotSession):
    """A session with its keys and values in a slot, and the recurrent states at its root and at its end.

    `keep` goes back to the last state that is kept, so it may keep less than it is asked to.
    """

    def __init__(self, cache: SlotCache, lender: SnapshotSession | None = None) -> None:
        super().__init__(cache, lender)
        # At the root, and at the end if that is another place; one where inputs are held after the root.
        self._marks: list[_Mark] = [] if lender is None else lender._marks[-1:]  # noqa: SLF001 - of this class
        self._settled = True  # whether everything that was read is known to stay
        self._staged: tuple[State | None, State] | None = None

    @property
    def state(self) -> State | None:
        """The state at the end; None before the first token."""
        return self._marks[-1].state if self._marks else None

    @property
    def nbytes(self) -> int:
        """Memory of the keys, values and states that are kept, in bytes."""
        return super().nbytes + self.state_nbytes

    @property
    def state_nbytes(self) -> int:
        """Memory of the states that are kept, in bytes."""
        return sum(mark.state.nbytes for mark in self._marks)

    @override
    def reach(self, length: int) -> int:
        return max((min(mark.length, length) for mark in self._marks if mark.first <= length), default=0)

    @override
    def fork(self, length: int) -> Session | None:
        """States are shared, since none is ever changed."""
        made = super().fork(length)
        if isinstance(made, SnapshotSession):
            found = [mark for mark in self._marks if mark.first <= length <= mark.length]
            made._marks = [mark.at(length) for mark in found[:1]]  # noqa: SLF001 - of this class
        return made

    def _empty(self) -> Session | None:
        return SnapshotSession(self.cache)

    def stage(self, root: State | None, end: State) -> None:
        """States after the chain and after everything that the next `read` takes over (called by the backend).

        `root` is None where the chain is the end, or where there is none, or where `end` holds the inputs after it.
        """
        self._staged = root, end

    @override
    def read(self, chain: Sequence[int] | Int[Tensor, " tokens"], tree: TokenTree | None = None) -> None:
        super().read(chain, tree)
        assert self._staged is not None, "the backend stages states before it records what was read"
        root, end = self._staged
        self._staged = None
        if root is not None:
            self._marks = [_Mark(self.stem, root)]
        elif self._settled or end.replayed:
            self._marks = []
        self._marks = [*self._marks[:1], _Mark(self.length, end)]
        self._settled = False

    def _reachable(self, length: int) -> int:
        self._marks = [mark.at(length) for mark in self._marks if mark.first <= length][-1:]
        self._settled = True
        return self._marks[-1].length if self._marks else 0

    @override
    def trim(self) -> None:
        """A state of its own frees those of the rows that it was made with."""
        super().trim()
        self._marks = [_Mark(mark.length, mark.state.alone()) for mark in self._marks]

    @override
    def lend(self) -> SnapshotSession:
        """States are shared, since none is ever changed."""
        return SnapshotSession(self.cache, self)

    def close(self) -> None:
        """Release the slot and the states."""
        super().close()
        self._marks = []


class SnapshotBackend(HFBackend):
    """A loaded transformers causal LM with recurrent layers (linear attention, convolutions, state spaces).

    It reads chains only: the states of a tree's branches cannot share a row. Arguments as of HFBackend.

    Raises:
        UserError: the model keeps no states in transformers' own cache, or its rows differ from those of its plain
            pass.
    """

    kind = "snapshot"
    whole_keys = False  # some layers have states instead

    def __init__(self, model: Any, *, name: str | None = None, check: bool = True) -> None:
        self._mixers = mixers_of(model) or ()
        if not self._mixers:
            raise UserError(
                f"{name or type(model).__name__} keeps no recurrent state in transformers' own cache, which is what "
                "backend snapshot is for: use backend auto"
            )
        follow_passes(self._mixers)
        self._goes_on = self._continuation(model)
        self._states_nbytes = 0  # of a request's states while a pass makes others; 0 before the first one
        super().__init__(model, name=name, check=check)
        self.capabilities = replace(self.capabilities, trees=False)
        if self.stepwise:
            self.prefill = sys.maxsize  # only what a session reads first is read fast, and as transformers reads it
            self.capabilities = replace(self.capabilities, portions=False, resumes=not self._goes_on.own)
            _log.info(
                "%s: transformers' code for its recurrent layers goes on from a state by single tokens only, so they "
                "read drafts one by one, and drafts gain less",
                self.name,
            )

    @override
    def sequences_nbytes(self, lengths: Sequence[int]) -> int:
        """With the states that are kept, and those that a pass makes."""
        return super().sequences_nbytes(lengths) + self._states_nbytes * len(lengths)

    @property
    def stepwise(self) -> bool:
        """Whether recurrent layers read one token at a time after a state."""
        return self._goes_on.stepwise

    def _continuation(self, model: Any) -> ResumedMixers:
        return continuation(model, self._mixers)

    def _probe(self) -> Probe:
        self.capabilities = replace(self.capabilities, trees=False)
        return Probe(self.model, self.name, recurrent=True, stepped=self._goes_on.own, rounded=self.rounds_inputs)

    def _multiply_natively(self) -> None:
        own = self.model
        super()._multiply_natively()
        if self.model is not own:
            self._mixers = mixers_of(self.model) or ()

    def open(self) -> SnapshotSession:
        """A fresh session."""
        return SnapshotSession(self._cache)

    def first_layers(self, layers: int) -> HFBackend:
        """Refused: see Raises.

        Raises:
            UserError: always; the first layers' states cannot be left to the whole model.
        """
        raise UserError(f"the first {layers} layers of {self.name} cannot draft: it keeps recurrent states")

    def _with_model(self, model: Any) -> HFBackend:
        made = super()._with_model(model)
        assert isinstance(made, SnapshotBackend), "a copy of this one"
        made._mixers = mixers_of(made.model) or ()  # noqa: SLF001 - of this class
        return made

    def _check(self, feed: Feed) -> None:
        super()._check(feed)
        if feed.tree is not None and len(feed.tree) and not feed.tree.is_chain:
            raise ValueError(f"{self.name} keeps recurrent states: it reads drafts that are whole chains, not trees")

    def _compute(self, layout: Layout, *, hidden: bool) -> tuple[Tensor, Tensor | None]:
        groups = self._groups(layout.feeds)
        view = StateView(self._cache, layout.plan, groups)
        divisible = self._goes_on.divisible
        with in_pass(view), in_pieces(self._mixers, view, len(layout.feeds), layout.width, divisible):
            made = self._call(layout, view, hidden=hidden)
        for group in groups:
            for row, place in enumerate(group.rows):
                session = layout.feeds[place].session
                assert isinstance(session, SnapshotSession), "sessions were checked before"
                root = State(group.marked, row) if group.mark is not None else None
                session.stage(root, State(group.now, row))
                self._states_nbytes = 3 * State(group.now, row).nbytes  # at the root, at the end, and a new one
        return made

    def _inputs(self, layout: Layout, view: CacheView) -> dict[str, Any]:
        return {self._cache_name: view} if self._states_only else super()._inputs(layout, view)

    def _groups(self, feeds: Sequence[Feed]) -> list[RowGroup]:
        """Rows that recurrent layers read together: as many tokens and drafts, and all after a state or none."""
        found: dict[tuple[int, int, bool], list[int]] = {}
        for row, feed in enumerate(feeds):
            key = (len(feed.tokens), len(feed), feed.session.length == 0)
            found.setdefault(key, []).append(row)
        groups = []
        for (chain, total, fresh), rows in found.items():
            mark = chain if 0 < chain < total else None
            ends = {mark or total, total}
            if self.stepwise:
                ends |= set(range(chain if fresh else 1, total))
            groups.append(RowGroup(rows, tuple(sorted(ends)), mark, [self._session(feeds[row]).state for row in rows]))
        return groups

    @staticmethod
    def _session(feed: Feed) -> SnapshotSession:
        assert isinstance(feed.session, SnapshotSession), "sessions were checked before"
        return feed.session
