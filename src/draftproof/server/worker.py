"""The thread that owns the engine: requests come to it through a queue, pieces of answers go back to the event loop.

Nothing that a client does makes the thread wait: pieces are handed over once a round, and a handler takes them when its
client reads. Requests of clients that left are dropped before the next round.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from draftproof.draft import Origin
from draftproof.engine.loop import DecodingLoop
from draftproof.engine.request import Request
from draftproof.engine.stats import Stats
from draftproof.engine.threads import release_team
from draftproof.errors import ContextError, NoTokenError, RequestError, UserError
from draftproof.sampling import Constraint, SamplingParams, TokenLogprob
from draftproof.server.errors import ApiError, failed, overloaded, stopping, too_late
from draftproof.server.metrics import Counted, Metrics

_log = logging.getLogger(__name__)
_ROUNDS_TRIED = 2  # failures of a round in a row after which requests are given up


@dataclass(frozen=True)
class Piece:
    """What one round added to one continuation.

    Attributes:
        index: of the continuation, over all prompts of the job.
        text: text that no later token can change.
        token_ids: tokens.
        logprobs: of these tokens; empty if not requested.
        finish_reason: None while it goes on.
        stop_reason: the stop string or token id that ended it.
        drafted: number of tokens that were drafted in the round.
        accepted: how many of `token_ids`, from the first on, were drafted.
        origin: where the drafted tokens came from.
        prompt_logprobs: of the prompt's tokens after the first, in the last piece; empty if not requested.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    drafted: int = 0
    accepted: int = 0
    origin: Origin = Origin.DRAFTER
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(eq=False)
class Job:
    """One HTTP request for completions: its prompts, and the pieces of its answer.

    Attributes:
        prompts: token ids of each.
        params: of all of them.
        seconds: it is given up after this time.
        prediction: token ids that the answer may repeat.
        streams: whether pieces are wanted after each round; else they come when a continuation ends, which spares the
            event loop the work of waking up.
        speculates: whether anything is drafted.
        constraint: the grammar of `params`, compiled.
    """

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    seconds: float = math.inf
    prediction: Sequence[int] = ()
    streams: bool = True
    speculates: bool = True
    constraint: Constraint | None = None
    arrival: float = field(default_factory=time.monotonic)
    _pieces: list[Piece] = field(default_factory=list)
    _error: ApiError | None = None
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def size(self) -> int:
        """Number of its continuations."""
        return len(self.prompts) * self.params.n

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """The pieces that came since the last ones, until every continuation has ended.

        Raises:
            ApiError: it failed.
        """
        left = self.size
        while left:
            await self._wake.wait()
            self._wake.clear()
            if self._error is not None:
                raise self._error
            taken, self._pieces = self._pieces, []
            left -= sum(piece.finish_reason is not None for piece in taken)
            if taken:
                yield taken

    def put(self, pieces: Sequence[Piece], error: ApiError | None) -> None:
        """Add pieces, or the error that ends the job; in the event loop's thread."""
        self._pieces += pieces
        self._error = self._error or error
        self._wake.set()


@dataclass(eq=False)
class _Continuation:
    """One request of the engine, and what was done with it."""

    job: Job
    request: Request
    index: int
    started: bool = False
    dropped: bool = False
    last: float = 0.0
    logprobs: int = 0
    counted: Counted = field(default_factory=lambda: Counted(Stats()))


class EngineWorker:
    """Runs an engine in a thread of its own.

    Args:
        engine: nobody else may use it while the worker runs.
        metrics: what happens is counted there.
        max_waiting: continuations that may wait for a place in the batch.
        shown: makes a message of the engine fit for clients.
        died: called in the event loop's thread if the engine's thread ends by an error.
    """

    def __init__(
        self,
        engine: DecodingLoop,
        metrics: Metrics,
        *,
        max_waiting: int = 64,
        shown: Callable[[str], str] = str,
        died: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine, self._metrics, self._shown, self._died = engine, metrics, shown, died
        self.capacity = engine.max_batch + max_waiting
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._open: set[Job] = set()  # in the event loop's thread
        self._rows: list[_Continuation] = []
        self._out: dict[Job, tuple[list[Piece], ApiError | None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._failures = 0
        self._ends = self._prepared = False
        self.dead = self.failed = False

    # --- in the event loop's thread -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; pieces go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Drop what still runs, and end the thread."""
        self._inbox.put(self._end)
        if self._thread.is_alive():
            self._thread.join()

    @property
    def ready(self) -> bool:
        """Whether a request would be served."""
        return self._thread.is_alive() and not self.dead and not self._ends

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
            ApiError: the queue is full, or nothing runs any more.
        """
        self.refuse_without_room(job.size)
        self._open.add(job)
        self._inbox.put(lambda: self._add(job))

    def refuse_without_room(self, size: int = 1) -> None:
        """Refuse a job of so many continuations where it cannot be queued now.

        Raises:
            ApiError: see `submit`.
        """
        if not self.ready:
            raise stopping()
        if sum(each.size for each in self._open) + size > self.capacity:
            raise overloaded(self._wait())

    def close(self, job: Job) -> None:
        """Forget a job, and drop what is left of it: its answer is complete, or nobody waits for it."""
        if job in self._open:
            self._open.remove(job)
            self._inbox.put(lambda: self._drop(job, "abort"))

    def _wait(self) -> int:
        """Seconds after which a place may be free: half the time that the open jobs have been here."""
        now = time.monotonic()
        ages = [now - job.arrival for job in self._open]
        return max(1, min(30, round(sum(ages) / max(len(ages), 1) / 2)))

    def _abandon(self) -> None:
        """The thread has ended: nobody answers what is still open, some of which it never saw."""
        for job in self._open:
            job.put([], stopping())
        if self.failed:
            self._died()

    def _hand_over(self, out: dict[Job, tuple[list[Piece], ApiError | None]]) -> None:
        for job, (pieces, error) in out.items():
            job.put(pieces, error)

    # --- in the engine's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ends:
                self._take()
                self._expire()
                if self._rows:
                    self._round()
                self._deliver()
        except Exception:  # noqa: BLE001 - whatever it is, clients get an answer
            self.failed = True
            _log.exception("the engine's thread ended")
        self.dead = True
        for row in list(self._rows):
            with suppress(Exception):
                self._drop(row.job, "error")
        assert self._loop is not None, "set by start"
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._abandon)

    def _take(self) -> None:
        """Do what was asked for; prepares drafts, or waits, where there is nothing else to do."""
        while not self._rows and self._inbox.empty() and not self._prepared:
            self._prepare()
        if not self._rows:
            release_team()  # an application may compute in other threads, too
            self._inbox.get()()
        while True:
            try:
                self._inbox.get_nowait()()
            except Empty:
                return

    def _prepare(self) -> None:
        """One step of what drafts need; else it would be made between the rounds of the first requests."""
        try:
            self._prepared = self._engine.prepare(0.0)
        except Exception:  # noqa: BLE001 - whatever it is, requests are served without it
            self._prepared = True
            _log.exception("drafts could not be prepared")

    def _end(self) -> None:
        self._ends = True

    def _add(self, job: Job) -> None:
        made: list[Request] = []
        try:
            for prompt in job.prompts:
                made += self._engine.add(
                    list(prompt),
                    job.params,
                    prediction=job.prediction,
                    speculates=job.speculates,
                    constraint=job.constraint,
                )
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this job's
            for request in made:
                self._engine.abort(request)
            self._fail(job, explained(error, self._shown))
            return
        self._rows += [_Continuation(job, request, index) for index, request in enumerate(made)]

    def _expire(self) -> None:
        now = time.monotonic()
        for job in {row.job: None for row in self._rows}:
            if now - job.arrival > job.seconds:
                self._fail(job, too_late(job.seconds))

    def _round(self) -> None:
        begin = time.monotonic()
        try:
            self._engine.step()
        except Exception:  # noqa: BLE001 - whatever it is, clients get an answer
            self._failures += 1
            _log.exception("a round failed")
            self._give_up()
            return
        self._failures = 0
        now = time.monotonic()
        for row in list(self._rows):
            self._collect(row, begin, now)
        self._count()

    def _give_up(self) -> None:
        """After failures in a row: running requests that have had no round yet are to blame; without one, all running.

        The engine rolls back what a failed round did, so the first failure is only tried again.
        """
        if self._failures < _ROUNDS_TRIED:
            return
        running = [row for row in self._rows if not self._engine.waits(row.request)] or self._rows
        for row in [row for row in running if not row.request.round] or running:
            self._fail(row.job, failed())
        self._failures = 0

    def _collect(self, row: _Continuation, begin: float, now: float) -> None:
        """Take what a round made of a continuation."""
        request, job = row.request, row.job
        if row.dropped:  # another continuation of its job failed in this round
            return
        if request.error is not None:
            self._fail(job, explained(request.error, self._shown))
            return
        if not request.chunks:
            return
        self._observe(row, begin, now)
        pieces, _ = self._out.setdefault(job, ([], None))
        made = pieces_of(request, row.index, row.logprobs)
        row.logprobs += sum(len(piece.logprobs) for piece in made)
        pieces += made
        if request.finished:
            self._rows.remove(row)
            self._metrics.ended(str(request.cutter.finish), now - job.arrival, request.stats.num_tokens)

    def _observe(self, row: _Continuation, begin: float, now: float) -> None:
        """Count a continuation's round in the metrics."""
        if not row.started:
            row.started = True
            self._metrics.queue_time.observe(begin - row.job.arrival)
            self._metrics.first_token.observe(now - row.job.arrival)
            self._metrics.prompt_sizes.observe(row.request.prompt_length)
            self._metrics.prompt_tokens.inc(row.request.prompt_length)
            self._metrics.prefix_queries.inc(row.request.prompt_length)
            self._metrics.prefix_hits.inc(row.request.reused)
        else:
            made = row.request.stats.num_tokens - row.counted.tokens
            self._metrics.between_tokens.observe((now - row.last) / max(made, 1))
        row.last = now
        row.counted = self._metrics.decoded(row.counted, row.request.stats)

    def _count(self) -> None:
        started = sum(row.started for row in self._rows)
        self._metrics.running.set(started)
        self._metrics.holds(self._engine.memory)
        self._metrics.waiting.set(len(self._rows) - started)

    def _fail(self, job: Job, error: ApiError) -> None:
        """End a job with an error; its other continuations are dropped."""
        _, earlier = self._out.get(job, ([], None))
        self._drop(job, "error")
        self._out[job] = [], earlier or error

    def _drop(self, job: Job, reason: str) -> None:
        """Release what the engine holds of a job."""
        now = time.monotonic()
        self._out.pop(job, None)
        for row in [row for row in self._rows if row.job is job]:
            self._engine.abort(row.request)
            self._rows.remove(row)
            row.dropped = True
            self._metrics.ended(reason, now - job.arrival, row.request.stats.num_tokens)
        self._count()

    def _deliver(self) -> None:
        """Hand the pieces over to the event loop, all at once."""
        out = {job: found for job, found in self._out.items() if _wanted(job, *found)}
        if not out:
            return
        self._out = {job: found for job, found in self._out.items() if job not in out}
        assert self._loop is not None, "set by start"
        try:
            self._loop.call_soon_threadsafe(self._hand_over, out)
        except RuntimeError:  # the loop is closed: nobody waits any more
            self._ends = True


def pieces_of(request: Request, index: int, reported: int = 0) -> list[Piece]:
    """The chunks of a request that nobody has taken yet, as pieces.

    Args:
        request: its chunks are taken away.
        index: of the continuation.
        reported: tokens whose log-probabilities earlier pieces have.
    """
    made = []
    while request.chunks:
        chunk = request.chunks.popleft()
        last = request.finished and not request.chunks
        logprobs = tuple(request.logprobs[reported : reported + len(chunk.token_ids)])
        reported += len(logprobs)
        made.append(
            Piece(
                index,
                chunk.text,
                chunk.token_ids,
                logprobs,
                chunk.finish_reason,
                request.cutter.stop_reason if last else None,
                chunk.drafted,
                chunk.accepted,
                chunk.origin,
                tuple(request.prompt_logprobs) if last else (),
            )
        )
    return made


def explained(error: BaseException, shown: Callable[[str], str]) -> ApiError:
    """What a client is told of an error; what it is not told is in the log.

    Args:
        error: of the engine.
        shown: makes a message of the engine fit for clients.
    """
    if isinstance(error, RequestError):
        _log.error("%s", error)
        if isinstance(error.__cause__, NoTokenError):
            return ApiError(shown(str(error.__cause__)))
        return failed()
    if isinstance(error, UserError):
        code = "context_length_exceeded" if isinstance(error, ContextError) else None
        return ApiError(shown(str(error)), code=code)
    _log.error("a request failed", exc_info=error)
    return failed()


def _wanted(job: Job, pieces: Sequence[Piece], error: ApiError | None) -> bool:
    """Whether a job's handler is woken for these pieces."""
    return job.streams or error is not None or any(piece.finish_reason is not None for piece in pieces)
