"""The number of threads of a round, if other processes need the processors too.

The C library's own threads let others run while they wait, and torch's do not spin while rounds are computed on them
(`native.threads`). This module is for rounds whose products, or other large parts, are torch's.

A product of matrices is done when its last thread is. The threads of a team wait for each other hundreds of times in a
round. They wait by spinning, which is the fastest way on a quiet machine. But if another process has one of the
processors, each wait may take a time slice of the system's scheduler, and a round with all threads takes ten times as
long as one with fewer. So if threads are interrupted often, the current number is compared by the clock with all
threads, one, half, a quarter and so on, alternately, and the fastest is kept. The results of native layers do not
depend on the number. More threads are only tried if small products on them are not held up; otherwise two rounds could
take many seconds.

OpenMP keeps a team of threads for every thread that ever computed, for its next region. If all teams together have more
threads than there are processors, GNU's runtime lets them wait without spinning, even if only one team has work, and a
round takes twice as long. So the team of a thread ends when the thread is not known to compute again.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch

from draftproof.native.threads import end_team, limit_spinning, openmp_function

SUSPICIOUS = 100.0  # interruptions per second; a quiet machine has fewer (60 were seen), two busy neighbours cause 250
_WINDOW = 1.0  # seconds over which interruptions are counted; within tenths of a second, a quiet machine has many
_BLOCK = 2  # rounds with one number before the other number takes its turn
_ROUNDS, _SECONDS = 8, 1.0  # needed for each number: this many rounds, or this much time with half as many rounds
_CLEAR = ((4.0, _BLOCK), (2.0, _ROUNDS // 2))  # enough earlier: this ratio of times, in this many rounds
_FEWER = 0.9  # fewer threads win if they need at most this share of the time per token
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds between comparisons
_AGAIN = 4.0  # seconds between probes of more threads
_PROBE, _SMALL = 0.03, 1 << 15  # seconds of a probe, longer than a time slice; numbers that each thread adds to
_HELD_UP, _SLOW = 1.5, 1e-3  # times the usual time of a small product, or seconds, that say a processor was taken


@dataclass
class _Spent:
    """The time of rounds with one number of threads."""

    rounds: int = 0
    seconds: float = 0.0
    tokens: int = 0

    def add(self, seconds: float, tokens: int) -> None:
        self.rounds += 1
        self.seconds += seconds
        self.tokens += tokens

    @property
    def each(self) -> float:
        """Seconds per token."""
        return self.seconds / max(self.tokens, 1)


def _known(one: _Spent, other: _Spent) -> bool:
    """Whether two numbers of threads have been compared for long enough."""
    rounds, times = min(one.rounds, other.rounds), sorted((one.each, other.each))
    if any(rounds >= least and times[1] > ratio * times[0] for ratio, least in _CLEAR):
        return True
    return rounds >= _ROUNDS // 2 and all(each.rounds >= _ROUNDS or each.seconds >= _SECONDS for each in (one, other))


class ThreadCount:
    """Chooses the number of threads of each round.

    Args:
        interruptions: returns how often threads of this process were interrupted so far; None if that is unknown, and
            the number of threads is then never changed.
        clock: returns seconds.
        held_up: returns whether this many threads are held up in small products; None compares rounds without asking.
        own: whether products run on the C library's own threads.

    Attributes:
        count: number of threads of the next round; at most torch's number.
    """

    def __init__(
        self,
        interruptions: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        held_up: Callable[[int], bool] | None = None,
        *,
        own: bool = False,
    ) -> None:
        self.count = 0
        self._own = own
        self._interruptions = interruptions
        self._clock = clock
        self._held_up = held_up
        self._most = 0
        self._since = clock()
        self._before = interruptions() if interruptions else 0
        self._pause = FIRST_PAUSE
        self._next = 0.0
        self._candidates: list[int] = []
        self._other: int | None = None
        self._turn = 0
        self._spent: dict[int, _Spent] = {}

    @contextmanager
    def set(self) -> Iterator[None]:
        """Set the chosen number of threads for this thread's OpenMP regions within the block."""
        most = torch.get_num_threads()
        if most != self._most:  # the first round, or the caller chose another number
            self._most = self.count = most
            self._other = None
            self._candidates = []
        now, change = self._now, omp_set_num_threads()
        limit_spinning(self._own)
        with _team():
            if now == most or change is None:
                yield
                return
            change(now)
            try:
                yield
            finally:
                change(most)

    @property
    def _now(self) -> int:
        """The number for the next round; in a comparison the two numbers take turns."""
        if self._other is not None and self._turn // _BLOCK % 2:
            return self._other
        return self.count

    def record_time(self, seconds: float, tokens: int) -> None:
        """Record the time and the number of tokens of a round that read no prompts."""
        if self._most < 2 or self._interruptions is None or omp_set_num_threads() is None:
            return
        if self._other is None:
            self._watch()
            return
        self._spent.setdefault(self._now, _Spent()).add(seconds, tokens)
        self._turn += 1
        if len(self._spent) == 2 and _known(*self._spent.values()):
            self._decide()

    def _watch(self) -> None:
        """Start a comparison if it is time for one."""
        assert self._interruptions is not None, "checked by record_time"
        now = self._clock()
        if now - self._since < _WINDOW:
            return
        count = self._interruptions()
        rate = (count - self._before) / (now - self._since)
        self._since = now
        self._before = count
        if now < self._next or (self.count == self._most and rate < SUSPICIOUS):
            return
        halves = [self._most >> times for times in range(self._most.bit_length())]
        # A single thread waits for no other, so it is tried early.
        order = self._candidates or [self._most, halves.pop(), *halves[1:]]
        self._candidates = [each for each in order if each != self.count] or [self._most]
        self._other = self._candidates.pop(0)
        self._turn = 0
        self._spent = {}
        if self._other > self.count and self._held_up is not None and self._held_up(self._other):
            self._other = None
            self._next = self._clock() + _AGAIN

    def _decide(self) -> None:
        """End the comparison with the better number."""
        assert self._other is not None, "a comparison runs"
        few, many = sorted((self.count, self._other))
        better = few if self._spent[few].each < _FEWER * self._spent[many].each else many
        self._pause = FIRST_PAUSE if better != self.count else min(self._pause * 2, LONGEST_PAUSE)
        self.count = better
        self._other = None
        self._since = self._clock()
        self._before = self._interruptions() if self._interruptions else 0
        self._next = self._since + self._pause


class SmallProducts:
    """Detects whether threads are held up: small parallel regions take longer than half of them did at best.

    They are not compared with the shortest one: where threads sleep while they wait, they take 3 to 7 times as long on
    average, on a quiet machine, too.
    """

    def __init__(self) -> None:
        self._usual: dict[int, float] = {}  # the least median of a measurement, by number of threads

    def held_up(self, threads: int) -> bool:
        """Whether this many threads of the caller wait for each other because other processes have a processor.

        The measurement takes 0.03 seconds, or a few time slices.
        """
        change = omp_set_num_threads()
        if change is None:
            return False
        numbers, took, own = torch.zeros(threads * _SMALL), list[float](), torch.get_num_threads()
        change(threads)
        try:
            start = before = time.perf_counter()
            while before - start < _PROBE:
                numbers.add_(1.0)
                now = time.perf_counter()
                took.append(now - before)
                before = now
        finally:
            change(own)
        usual = self._usual[threads] = min(median(took), self._usual.get(threads, math.inf))
        mean = sum(took) / len(took)
        return mean > _SLOW or mean > _HELD_UP * usual


_with_team: set[int] = set()  # threads that computed rounds, and may have a team


@contextmanager
def _team() -> Iterator[None]:
    """Run rounds of the calling thread; its team ends afterwards if other threads compute, too."""
    mine = threading.get_ident()
    _with_team.add(mine)
    try:
        yield
    finally:
        if len(_with_team) > 1:
            _with_team.intersection_update(thread.ident for thread in threading.enumerate() if thread.ident)
            _with_team.add(mine)
        if len(_with_team) > 1:
            _end_team()


def release_team() -> None:
    """End the team of the calling thread; its next region starts a new one, which takes 0.2 ms with two threads."""
    _with_team.discard(threading.get_ident())
    _end_team()


def _end_team() -> None:
    if torch.get_num_threads() > 1:
        end_team()


def omp_set_num_threads() -> Callable[[int], None] | None:
    """A function that sets the number of threads of the calling thread's regions; None if OpenMP does not have it.

    `torch.set_num_threads` would also change the number for threads that start later.
    """
    found: Callable[[int], None] | None = openmp_function("omp_set_num_threads")
    return found


def interruptions() -> Callable[[], int] | None:
    """A counter of involuntary context switches of this process's threads; None if the system has none."""
    if sys.platform == "win32":
        return None
    import resource

    return lambda: resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
