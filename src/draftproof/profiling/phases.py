"""What each phase of a round takes: an engine's parts say when they end, and live tensors are counted between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from draftproof.backends.base import Backend, Session
from draftproof.drafters.base import Drafter
from draftproof.engine.engine import Engine
from draftproof.profiling.live_tensors import Live
from draftproof.profiling.tensor_memory import walk
from draftproof.verifiers.base import Verifier

PHASES = ("draft", "target", "probabilities", "verify", "commit")
ROUND = "round"


@dataclass(frozen=True)
class RowShape:
    """Rows over the vocabulary that a phase handed on.

    Attributes:
        shape: batch, most rows of a sequence, vocabulary.
        dtype: of them.
        nbytes: of all sequences; less than the shape says where sequences differ.
    """

    shape: tuple[int, int, int]
    dtype: str
    nbytes: int


class Phases:
    """Counts the tensors of every phase of every round while it is watching.

    Attributes:
        first, later: bytes that each phase, and the whole round, held at most beyond what there was when it began; of
            the first round, and of the largest one after it.
        most: bytes of all tensors made since watching began that were held at once.
        rows: the largest rows handed on, by phase.
        longest: slots of the longest sequence by the id of its slot cache.
        states: bytes of hidden states that sessions held at most.
    """

    def __init__(self) -> None:
        self.first = dict.fromkeys((*PHASES, ROUND), 0)
        self.later = dict.fromkeys((*PHASES, ROUND), 0)
        self.most = 0
        self.rows: dict[str, RowShape] = {}
        self.longest: dict[int, int] = {}
        self.states = 0
        self._live = Live()
        self._done = 0
        self._phase = self._round = self._round_most = 0

    @contextmanager
    def watching(self, engine: Engine) -> Iterator[None]:
        """Put reporters in the places of an engine's parts, and count."""
        parts = engine.drafter, engine.target, engine.verifier
        engine.drafter = cast("Drafter", _Told(parts[0], "propose", after=self._drafted))
        engine.target = cast("Backend", _Told(parts[1], "forward", after=lambda made: self._read(engine, made)))
        engine.verifier = cast("Verifier", _Told(parts[2], "verify", before=self._ready, after=self._verified))
        try:
            with self._live:
                yield
        finally:
            engine.drafter, engine.target, engine.verifier = parts

    def end_round(self) -> None:
        """A round is over."""
        self._end("commit")
        table = self.later if self._done else self.first
        table[ROUND] = max(table[ROUND], self._round_most - self._round)
        self._done += 1
        self._round = self._round_most = self._live.now

    def _end(self, phase: str) -> None:
        live = self._live
        table = self.later if self._done else self.first
        table[phase] = max(table[phase], live.most - self._phase)
        self._round_most = max(self._round_most, live.most)
        self.most = max(self.most, live.most)
        live.mark()
        self._phase = live.now

    def _drafted(self, made: Any) -> None:
        self._keep("draft", [draft.probs for draft in made if len(draft) and draft.probs is not None], len(made))
        self._end("draft")

    def _read(self, engine: Engine, made: Any) -> None:
        self._keep("target", [output.logits for output in made], len(made))
        self._end("target")
        self._look(engine)

    def _ready(self, *given: Any) -> None:
        self._keep("probabilities", given[1], len(given[1]))
        self._end("probabilities")

    def _verified(self, made: Any) -> None:  # noqa: ARG002 - told to every reporter
        self._end("verify")

    def _keep(self, phase: str, rows: Sequence[Tensor], batch: int) -> None:
        nbytes = sum(part.nbytes for part in rows)
        if rows and nbytes > (self.rows[phase].nbytes if phase in self.rows else 0):
            most = max(part.shape[0] for part in rows)
            self.rows[phase] = RowShape((batch, most, rows[0].shape[-1]), str(rows[0].dtype).split(".")[-1], nbytes)

    def _look(self, engine: Engine) -> None:
        """Take note of the sessions while they hold drafted tokens."""
        sessions = [item for _, item in walk(engine) if isinstance(item, Session)]
        for session in sessions:
            key = id(getattr(session, "cache", None))
            self.longest[key] = max(self.longest.get(key, 0), session.length)
        whole = [session._states for session in sessions]  # noqa: SLF001 - with the room that they grow into
        self.states = max(self.states, sum(part.nbytes for part in whole if part is not None))


class _Told:
    """A part in whose place this stands: the same, and one method is followed, or led, by a report.

    Args:
        part: whose place.
        method: of it.
        before: told the method's arguments.
        after: told what it returned.
    """

    def __init__(
        self,
        part: object,
        method: str,
        *,
        before: Callable[..., None] | None = None,
        after: Callable[[Any], None],
    ) -> None:
        self._part, self._method, self._before, self._after = part, method, before, after

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        return self._reporting(found) if name == self._method else found

    def _reporting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def told(*given: Any, **options: Any) -> Any:
            if self._before is not None:
                self._before(*given)
            made = method(*given, **options)
            self._after(made)
            return made

        return told
