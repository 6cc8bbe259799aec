"""Memory of each phase of a round: an engine's parts are observed, and allocations are counted between their calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftproof.backends.base import Backend, Session
from draftproof.backends.hf.snapshots import SnapshotSession
from draftproof.drafters.base import Drafter
from draftproof.engine.engine import Engine
from draftproof.profiling.tensor_memory import walk
from draftproof.verifiers.base import Verifier

PHASES = ("draft", "target", "probabilities", "verify", "commit")
ROUND = "round"


class TensorAllocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of tensors allocated and not yet released while it is entered, and their peak since `reset_peak`.

    An allocation is counted by the output of an operation. Memory that an operation allocates and releases inside is
    not seen, and packed tensors are not counted. So the figures are the same on every device and exact for small
    tensors, which an allocator serves from memory that it already has.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocated = self.peak = 0
        self._known: set[int] = set()

    def reset_peak(self) -> None:
        """Set the peak to what is allocated now."""
        self.peak = self.allocated

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and count its outputs; an output that shares the memory of an input is not new."""
        given = {storage._cdata for storage in _storages((args, kwargs))}  # noqa: SLF001 - the storage's identity
        made = func(*args, **(kwargs or {}))
        for storage in _storages(made):
            key = storage._cdata  # noqa: SLF001
            if key not in given and key not in self._known:
                self._known.add(key)
                size = storage.nbytes()
                self.allocated += size
                weakref.finalize(storage, self._release, key, size).atexit = False
        self.peak = max(self.peak, self.allocated)
        return made

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.allocated -= size


def _storages(tree: Any) -> Iterator[Any]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and not leaf.is_mkldnn:
            yield leaf.untyped_storage()


@dataclass(frozen=True)
class RowShape:
    """Rows over the vocabulary that a phase returned: batch, largest number of rows of a request, vocabulary.

    `nbytes` are less than the shape gives if requests have different numbers of rows.
    """

    shape: tuple[int, int, int]
    dtype: str
    nbytes: int


class Phases:
    """Counts the allocations of every phase of every round of an observed engine, and of the whole rounds."""

    def __init__(self) -> None:
        self.first = dict.fromkeys((*PHASES, ROUND), 0)  # peak bytes beyond those when it began, in the first round
        self.later = dict.fromkeys((*PHASES, ROUND), 0)  # the same in the largest of the other rounds
        self.peak = 0  # bytes of all tensors allocated since observation began
        self.rows: dict[str, RowShape] = {}  # the largest returned by each phase
        self.longest: dict[int, int] = {}  # tokens of the longest request by the id of its slot cache
        self.states = 0  # peak bytes of the hidden states in sessions
        self.recurrent = 0  # peak bytes of the states of recurrent layers in sessions, after a pass
        self._allocations = TensorAllocations()
        self._done = 0
        self._phase_start = self._round_start = self._round_peak = 0

    @contextmanager
    def observe(self, engine: Engine) -> Iterator[None]:
        """Replace an engine's parts by observed ones, and count."""
        parts = engine.drafter, engine.target, engine.verifier
        engine.drafter = cast("Drafter", _observed(parts[0], "propose", after=self._drafted))
        engine.target = cast("Backend", _observed(parts[1], "forward", after=lambda made: self._read(engine, made)))
        engine.verifier = cast("Verifier", _observed(parts[2], "verify", before=self._ready, after=self._verified))
        try:
            with self._allocations:
                yield
        finally:
            engine.drafter = parts[0]
            engine.target = parts[1]
            engine.verifier = parts[2]

    def end_round(self) -> None:
        """End a round."""
        self._end("commit")
        table = self.later if self._done else self.first
        table[ROUND] = max(table[ROUND], self._round_peak - self._round_start)
        self._done += 1
        self._round_start = self._round_peak = self._allocations.allocated

    def _end(self, phase: str) -> None:
        allocations = self._allocations
        table = self.later if self._done else self.first
        table[phase] = max(table[phase], allocations.peak - self._phase_start)
        self._round_peak = max(self._round_peak, allocations.peak)
        self.peak = max(self.peak, allocations.peak)
        allocations.reset_peak()
        self._phase_start = allocations.allocated

    def _drafted(self, made: Any) -> None:
        self._note("draft", [draft.probs for draft in made if len(draft) and draft.probs is not None], len(made))
        self._end("draft")

    def _read(self, engine: Engine, made: Any) -> None:
        self._note("target", [output.logits for output in made], len(made))
        self._end("target")
        self._note_sessions(engine)

    def _ready(self, *given: Any) -> None:
        self._note("probabilities", given[1], len(given[1]))
        self._end("probabilities")

    def _verified(self, made: Any) -> None:  # noqa: ARG002 - every observer gets it
        self._end("verify")

    def _note(self, phase: str, rows: Sequence[Tensor], batch: int) -> None:
        """Keep the shape of the rows that a phase returned, if they are its largest."""
        nbytes = sum(part.nbytes for part in rows)
        if rows and nbytes > (self.rows[phase].nbytes if phase in self.rows else 0):
            most = max(part.shape[0] for part in rows)
            self.rows[phase] = RowShape((batch, most, rows[0].shape[-1]), str(rows[0].dtype).split(".")[-1], nbytes)

    def _note_sessions(self, engine: Engine) -> None:
        """Keep the sizes of sessions while they contain drafted tokens."""
        sessions = [item for _, item in walk(engine) if isinstance(item, Session)]
        for session in sessions:
            key = id(getattr(session, "cache", None))
            self.longest[key] = max(self.longest.get(key, 0), session.length)
        whole = [part for session in sessions for part in session._states.values()]  # noqa: SLF001 - with spare capacity
        self.states = max(self.states, sum(part.nbytes for part in whole))
        recurrent = sum(session.state_nbytes for session in sessions if isinstance(session, SnapshotSession))
        self.recurrent = max(self.recurrent, recurrent)


class _Observed:
    """A part of an engine whose method calls `before` with its arguments, and `after` with its result."""

    def __init__(
        self, part: object, method: str, *, before: Callable[..., None] | None = None, after: Callable[[Any], None]
    ) -> None:
        self._part = part
        self._method = method
        self._before = before
        self._after = after

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        return self._with_callbacks(found) if name == self._method else found

    def _with_callbacks(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def observed(*given: Any, **options: Any) -> Any:
            if self._before is not None:
                self._before(*given)
            made = method(*given, **options)
            self._after(made)
            return made

        return observed


def _observed(part: object, method: str, **callbacks: Any) -> _Observed:
    """A part with callbacks; arguments as of `_Observed`.

    Its class has the part's names: since Python 3.12, whether an object fits a protocol is looked up without
    `__getattr__`.
    """

    def read(name: str) -> property:
        return property(lambda self: self.__getattr__(name))

    names = {name: read(name) for name in dir(part) if not name.startswith("_")}
    made: type[_Observed] = type("_Observed", (_Observed,), names)
    return made(part, method, **callbacks)
