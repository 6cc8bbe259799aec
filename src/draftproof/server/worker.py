"""The thread that owns the engine: requests come to it through a queue, pieces of answers go back to the event loop.

Nothing that a client does makes the thread wait: pieces are handed over once a round, and a handler takes them when its
client reads. Requests of clients that left are dropped before the next round. Deadlines are kept in the event loop's
thread, where they also end requests that a stuck round holds up.

Jobs wait in a queue for each client, and the client with the least in the batch is next.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

from draftproof.engine.loop import DecodingLoop
from draftproof.engine.request import Chunk, Request
from draftproof.engine.stats import Stats
from draftproof.engine.threads import release_team
from draftproof.errors import ContextError, NoTokenError, RequestError, UserError
from draftproof.sampling import TokenLogprob
from draftproof.server.errors import ApiError, failed, overloaded, stopping, too_late
from draftproof.server.metrics import Metrics
from draftproof.server.parse_request import ParsedRequest

_log = logging.getLogger(__name__)
_ROUNDS_TRIED = 2  # failures of a round in a row after which requests are given up
_JOIN = 10.0  # seconds that the thread gets for its last round when the server ends


@dataclass(frozen=True)
class Piece(Chunk):
    """The output of one round for one continuation."""

    index: int = 0  # of the continuation, over all prompts of the job
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens; empty if not requested
    stop_reason: int | str | None = None  # the stop string or token id that ended it
    # Of the prompt's tokens after the first, in the last piece; empty if not requested.
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    reused: int = 0  # tokens of the prompt that were taken over from other requests


@dataclass(eq=False)
class Job:
    """An HTTP request for completions: its prompts, and the pieces of its answer."""

    parsed: ParsedRequest  # what is asked of the engine
    seconds: float = math.inf  # it is given up after this time
    # Whether pieces are wanted after each round; else they come when a continuation ends, which spares the event loop
    # the work of waking up.
    streams: bool = True
    speculates: bool = True  # whether anything is drafted
    client: str = ""  # who asks; clients take turns. Empty where clients are not known apart
    cache_salt: str = ""  # this and the next one as in `DecodingLoop.add`
    share_text: bool = True
    arrival: float = field(default_factory=time.monotonic)  # when its request came; the deadline counts from there
    ended: bool = False  # nobody waits for it any more
    _pieces: list[Piece] = field(default_factory=list)
    _error: ApiError | None = None
    _complete: int = 0  # continuations
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def size(self) -> int:
        """Number of continuations."""
        return len(self.parsed.prompts) * self.parsed.params.n

    @property
    def complete(self) -> bool:
        """Whether the answer is complete, even if the client has not read all of it."""
        return self._complete == self.size

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Yield new pieces until every continuation has ended; raises ApiError if the job failed."""
        left = self.size
        while left:
            await self._wake.wait()
            self._wake.clear()
            if self._error is not None:
                raise self._error
            taken = self._pieces
            self._pieces = []
            left -= sum(piece.finish_reason is not None for piece in taken)
            if taken:
                yield taken

    def put(self, pieces: Sequence[Piece], error: ApiError | None) -> None:
        """Add pieces, or the error that ends the job; called in the event loop's thread."""
        self._pieces += pieces
        self._complete += sum(piece.finish_reason is not None for piece in pieces)
        self._error = self._error or error
        self._wake.set()


@dataclass(eq=False)
class _Continuation:
    """A request of the engine and its progress."""

    job: Job
    request: Request
    index: int
    started: bool = False
    dropped: bool = False
    last: float = 0.0
    logprobs: int = 0
    counted: Stats = field(default_factory=Stats)  # what is in the metrics already


class _Queue:
    """Waiting jobs, in one queue for each client."""

    def __init__(self) -> None:
        self.size = 0  # continuations
        self._jobs: dict[str, dict[Job, None]] = {}
        self._turns: dict[str, int] = {}  # number of each client's last turn

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter([job for jobs in self._jobs.values() for job in jobs])

    def put(self, job: Job) -> None:
        """Append a job to the queue of its client."""
        self._jobs.setdefault(job.client, {})[job] = None
        self.size += job.size

    def remove(self, job: Job) -> bool:
        """Remove a job; returns whether it was queued."""
        jobs = self._jobs.get(job.client, {})
        if job not in jobs:
            return False
        del jobs[job]
        if not jobs:
            del self._jobs[job.client]
        self.size -= job.size
        return True

    def next(self, served: Mapping[str, int]) -> Job:
        """Pop the oldest job of the client with the fewest running continuations; equal clients take turns."""
        client = min(self._jobs, key=lambda each: (served.get(each, 0), self._turns.get(each, 0)))
        self._turns[client] = max(self._turns.values(), default=0) + 1
        job = next(iter(self._jobs[client]))
        self.remove(job)
        return job


class EngineWorker:
    """Runs an engine, with exclusive use of it, in its own thread.

    Args:
        max_waiting: continuations that may wait for a place in the batch.
        max_per_client: continuations that one client may have, waiting ones included; None for no limit of its own.
        stuck_after: seconds of one round after which the thread counts as stuck; 0 is never.
        redact: makes a message of the engine fit for clients.

    Attributes:
        died: called in the event loop's thread if the engine's thread ends by an error.
    """

    def __init__(
        self,
        engine: DecodingLoop,
        metrics: Metrics,
        *,
        max_waiting: int = 64,
        max_per_client: int | None = None,
        stuck_after: float = 0.0,
        redact: Callable[[str], str] = str,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._redact = redact
        self.died: Callable[[], None] = lambda: None
        self.capacity = engine.max_batch + max_waiting
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._most = max_per_client
        self._stuck_after = stuck_after
        self._open: dict[Job, asyncio.TimerHandle | None] = {}  # with their deadlines, in the event loop's thread
        self._open_size = 0  # continuations
        self._arrivals = 0.0  # sum over the open jobs
        self._sizes: dict[str, int] = {}  # continuations that are open, by client
        self._queue = _Queue()
        self._jobs: dict[Job, list[_Continuation]] = {}  # in the engine
        self._served: dict[str, int] = {}  # continuations in the engine, by client
        self._out: dict[Job, tuple[list[Piece], ApiError | None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._failures = 0
        self._since: float | None = None  # when the thread began what it does; None while it waits
        self._ends = self._prepared = False
        self.dead = self.failed = False

    # --- in the event loop's thread -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; pieces go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Drop running jobs and end the thread; a stuck thread is abandoned after some seconds."""
        self._inbox.put(self._end)
        if self._thread.is_alive():
            self._thread.join(_JOIN)
        if self._thread.is_alive():
            _log.error("the engine's thread did not end within %g s; it is here:\n%s", _JOIN, self.stack)

    @property
    def running(self) -> bool:
        """Whether the thread is running, even if it is stuck."""
        return self._thread.is_alive()

    @property
    def stack(self) -> str:
        """The current stack of the thread, for the log."""
        frame = sys._current_frames().get(self._thread.ident or 0)  # noqa: SLF001 - its documented name
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    @property
    def stuck(self) -> float:
        """Seconds since the thread last started or ended a round, if that is too long ago; else 0."""
        since = self._since
        seconds = 0.0 if since is None else time.monotonic() - since
        return seconds if seconds > self._stuck_after > 0 else 0.0

    @property
    def ready(self) -> bool:
        """Whether a request would be accepted."""
        return self._thread.is_alive() and not self.dead and not self._ends and not self.stuck

    def submit(self, job: Job) -> None:
        """Queue a job; raises ApiError if the queue is full or the engine has stopped."""
        self.refuse_without_room(job.size, job.client)
        timer = None
        if job.seconds < math.inf:
            left = job.arrival + job.seconds - time.monotonic()
            timer = asyncio.get_running_loop().call_later(max(left, 0.0), self._expire, job)
        self._open[job] = timer
        self._open_size += job.size
        self._arrivals += job.arrival
        self._sizes[job.client] = self._sizes.get(job.client, 0) + job.size
        self._inbox.put(lambda: self._add(job))

    def refuse_without_room(self, size: int = 1, client: str = "") -> None:
        """Refuse a job of this many continuations if it cannot be queued now."""
        if not self.ready:
            raise stopping()
        own = self._sizes.get(client, 0) + size
        if self._open_size + size > self.capacity or (self._most is not None and own > max(self._most, size)):
            raise overloaded(self._wait())

    def close(self, job: Job, reason: str = "abort") -> None:
        """Forget a job and drop the rest of it: its answer is complete, or its client has gone."""
        if job not in self._open:
            return
        timer = self._open.pop(job)
        if timer is not None:
            timer.cancel()
        self._open_size -= job.size
        self._arrivals -= job.arrival
        self._sizes[job.client] -= job.size
        if not self._sizes[job.client]:
            del self._sizes[job.client]
        job.ended = True
        self._inbox.put(lambda: self._drop(job, reason))

    def _expire(self, job: Job) -> None:
        """End a job whose time is over, whatever the engine is doing."""
        if job.complete:
            return
        job.put([], too_late(job.seconds))
        self.close(job, "error")

    def _wait(self) -> int:
        """Estimated seconds until a place is free: half the mean age of the open jobs."""
        age = time.monotonic() - self._arrivals / max(len(self._open), 1) if self._open else 0.0
        return max(1, min(30, round(age / 2)))

    def _abandon(self) -> None:
        """The engine's thread has ended: fail all open jobs, including those that it never received."""
        for job in self._open:
            job.put([], stopping())
        if self.failed:
            self.died()

    def _hand_over(self, out: dict[Job, tuple[list[Piece], ApiError | None]]) -> None:
        for job, (pieces, error) in out.items():
            job.put(pieces, error)

    # --- in the engine's thread -----------------------------------------------------------------------------------

    @property
    def _rows(self) -> list[_Continuation]:
        return [row for rows in self._jobs.values() for row in rows]

    def _run(self) -> None:
        failed = True
        try:
            while not self._ends:
                self._take()
                self._since = time.monotonic()
                self._admit()
                if self._jobs:
                    self._round()
                self._deliver()
            failed = False
        except BaseException:  # noqa: BLE001 - whatever it is, also a panic of a library, clients get an answer
            _log.exception("the engine's thread ended")
        finally:
            self._since = None
            self.failed = failed
            self.dead = True
            for job in [*self._queue, *self._jobs]:
                with suppress(BaseException):
                    self._drop(job, "error")
            assert self._loop is not None, "set by start"
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._abandon)

    def _take(self) -> None:
        """Process new commands; if there is no other work, prepare drafts or wait."""
        while not (self._jobs or self._queue or self._prepared) and self._inbox.empty():
            self._prepare()
        if not (self._jobs or self._queue):
            release_team()  # an application may compute in other threads, too
            self._since = None
            asked = self._inbox.get()
            self._since = time.monotonic()
            asked()
        while True:
            try:
                asked = self._inbox.get_nowait()
            except Empty:
                return
            asked()

    def _prepare(self) -> None:
        """Prepare drafts by one step; otherwise this would happen between the rounds of the first requests."""
        try:
            self._since = time.monotonic()
            self._prepared = self._engine.prepare(0.0)
        except BaseException:  # noqa: BLE001 - whatever it is, requests are served without it
            self._prepared = True
            _log.exception("drafts could not be prepared")

    def _end(self) -> None:
        self._ends = True

    def _add(self, job: Job) -> None:
        if not job.ended:
            self._queue.put(job)
            self._metrics.waiting.inc(job.size)

    def _admit(self) -> None:
        """Pass waiting jobs to the engine, as far as it has room."""
        while self._queue and sum(self._served.values()) < self._engine.max_batch:
            self._begin(self._queue.next(self._served))

    def _begin(self, job: Job) -> None:
        made: list[Request] = []
        asked = job.parsed
        try:
            for prompt in asked.prompts:
                made += self._engine.add(
                    list(prompt),
                    asked.params,
                    prediction=asked.prediction,
                    speculates=job.speculates,
                    cache_salt=job.cache_salt,
                    share_text=job.share_text,
                    constraint=asked.constraint,
                    reasoning=asked.reasoning,
                )
        except BaseException as error:  # noqa: BLE001 - whatever it is, also a panic of a library, it is this job's
            for request in made:
                self._engine.abort(request)
            self._fail(job, explained(error, self._redact))
            _release(error)
            return
        finally:
            job.parsed = replace(asked, constraint=None)  # the engine's rows have it as long as they need it
            del asked
        self._jobs[job] = [_Continuation(job, request, index) for index, request in enumerate(made)]
        self._serves(job, len(made))

    def _serves(self, job: Job, more: int) -> None:
        """Count continuations that entered or left the engine."""
        self._served[job.client] = self._served.get(job.client, 0) + more
        if not self._served[job.client]:
            del self._served[job.client]

    def _round(self) -> None:
        begin = time.monotonic()
        try:
            self._engine.step()
        except BaseException:  # noqa: BLE001 - whatever it is, also a panic of a library, clients get an answer
            self._failures += 1
            _log.exception("a round failed")
            self._give_up()
            return
        self._failures = 0
        now = time.monotonic()
        for row in self._rows:
            self._collect(row, begin, now)
        self._count()

    def _give_up(self) -> None:
        """After failures in a row: running requests that have had no round yet are to blame; without one, all running.

        The engine rolls back what a failed round did, so the first failure is only tried again.
        """
        if self._failures < _ROUNDS_TRIED:
            return
        running = [row for row in self._rows if not self._engine.waits(row.request)] or self._rows
        blamed = [row for row in running if not row.request.round] or running
        for job in {row.job: None for row in blamed}:
            self._fail(job, failed())
        self._failures = 0

    def _collect(self, row: _Continuation, begin: float, now: float) -> None:
        request, job = row.request, row.job
        if row.dropped:  # another continuation of its job failed in this round
            return
        if request.error is not None:
            self._fail(job, explained(request.error, self._redact))
            _release(request.error)
            return
        if not request.chunks:
            return
        self._observe(row, begin, now)
        pieces, _ = self._out.setdefault(job, ([], None))
        made = pieces_of(request, row.index, row.logprobs)
        row.logprobs += sum(len(piece.logprobs) for piece in made)
        pieces += made
        for piece in made:
            self._metrics.made(str(piece.origin), piece.accepted, len(piece.token_ids))
        if request.finished:
            self._remove(row)
            self._metrics.ended(str(request.cutter.finish), now - job.arrival, request.stats.num_tokens)

    def _observe(self, row: _Continuation, begin: float, now: float) -> None:
        if not row.started:
            row.started = True
            self._metrics.queue_time.observe(begin - row.job.arrival)
            self._metrics.first_token.observe(now - row.job.arrival)
            self._metrics.prompt_sizes.observe(row.request.prompt_length)
            self._metrics.prompt_tokens.inc(row.request.prompt_length)
            self._metrics.prefix_queries.inc(row.request.prompt_length)
            self._metrics.prefix_hits.inc(row.request.reused)
        else:
            made = row.request.stats.num_tokens - row.counted.num_tokens
            self._metrics.between_tokens.observe((now - row.last) / max(made, 1))
        row.last = now
        row.counted = self._metrics.decoded(row.counted, row.request.stats)

    def _remove(self, row: _Continuation) -> None:
        """Forget a finished continuation, and free its grammar at once, which may take many megabytes."""
        row.request.transforms = replace(row.request.transforms, constraint=None)
        rows = self._jobs[row.job]
        rows.remove(row)
        if not rows:
            del self._jobs[row.job]
        self._serves(row.job, -1)

    def _count(self) -> None:
        rows = self._rows
        started = sum(row.started for row in rows)
        self._metrics.running.set(started)
        self._metrics.holds(self._engine.memory)
        self._metrics.waiting.set(len(rows) - started + self._queue.size)

    def _fail(self, job: Job, error: ApiError) -> None:
        """End a job with an error, and drop its other continuations."""
        _, earlier = self._out.get(job, ([], None))
        self._drop(job, "error")
        self._out[job] = [], earlier or error

    def _drop(self, job: Job, reason: str) -> None:
        """Release a job in the engine, or its place in the queue."""
        seconds = time.monotonic() - job.arrival
        self._out.pop(job, None)
        if self._queue.remove(job):
            for _ in range(job.size):
                self._metrics.ended(reason, seconds, 0)
            self._metrics.waiting.dec(job.size)
            return
        for row in list(self._jobs.get(job, ())):
            self._remove(row)
            row.dropped = True
            self._engine.abort(row.request)
            self._metrics.ended(reason, seconds, row.request.stats.num_tokens)
        self._count()

    def _deliver(self) -> None:
        """Pass all pieces to the event loop at once."""
        out = {job: found for job, found in self._out.items() if _needs_delivery(job, *found)}
        if not out:
            return
        self._out = {job: found for job, found in self._out.items() if job not in out}
        assert self._loop is not None, "set by start"
        try:
            self._loop.call_soon_threadsafe(self._hand_over, out)
        except RuntimeError:  # the loop is closed: nobody waits any more
            self._ends = True


def pieces_of(request: Request, index: int, reported: int = 0) -> list[Piece]:
    """Turn the chunks of a request into pieces; log-probabilities of the first `reported` tokens were sent before."""
    made = []
    while request.chunks:
        chunk = request.chunks.popleft()
        last = request.finished and not request.chunks
        logprobs = tuple(request.logprobs[reported : reported + len(chunk.token_ids)])
        reported += len(logprobs)
        made.append(
            Piece(
                **vars(chunk),
                index=index,
                logprobs=logprobs,
                stop_reason=request.cutter.stop_reason if last else None,
                prompt_logprobs=tuple(request.prompt_logprobs) if last else (),
                reused=request.reused,
            )
        )
    return made


def explained(error: BaseException, redact: Callable[[str], str]) -> ApiError:
    """The error for a client after an error of the engine, cleaned by `redact`; the log has the full error."""
    if isinstance(error, RequestError):
        _log.error("%s", error)
        if isinstance(error.__cause__, NoTokenError):
            return ApiError(redact(str(error.__cause__)))
        return failed()
    if isinstance(error, UserError):
        code = "context_length_exceeded" if isinstance(error, ContextError) else None
        return ApiError(redact(str(error)), code=code)
    _log.error("a request failed", exc_info=error)
    return failed()


def _release(error: BaseException | None) -> None:
    """Clear the frames of an error's traceback; otherwise a lexer of many megabytes waits for the garbage collector."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _needs_delivery(job: Job, pieces: Sequence[Piece], error: ApiError | None) -> bool:
    return job.streams or error is not None or any(piece.finish_reason is not None for piece in pieces)
