"""The threads that the C library runs on: a pool of its own (c/pool.c), or those of torch's OpenMP runtime.

The variable DRAFTPROOF_THREADS may be
    auto    (the default) as pool;
    pool    the pool, whose threads let others run while they wait;
    openmp  torch's OpenMP runtime; an error where that does not offer GNU's functions.

GNU's threads spin for milliseconds after each region, also those of torch's own operations, and so keep a processor
from the pool. They do not where the process has more of them than processors (libgomp's manual, GOMP_SPINCOUNT). So
while rounds are computed on the pool, one more team of them exists and sleeps (`limit_spinning`).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import queue
import threading
from pathlib import Path
from typing import Any

import torch

from draftproof.errors import UserError, refuse_outside, refuse_unknown
from draftproof.native.cores import most_threads, processor_time, processors

VARIABLE = "DRAFTPROOF_THREADS"
LEGAL = ("auto", "openmp", "pool")
NUMBER = "OMP_NUM_THREADS"
_ENTRIES = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier")
_PROCESSORS = "omp_get_num_procs"
_SOFT = 1  # `omp_pause_soft`: give up threads, keep settings
_CHOSEN: list[int] = []  # the number that an engine asked for last
_log = logging.getLogger(__name__)


def kind() -> str:
    """Whose threads are used: openmp or pool."""
    value = os.environ.get(VARIABLE) or "auto"
    refuse_unknown(VARIABLE, value, LEGAL)
    if value == "openmp" and not all(openmp_function(name) for name in _ENTRIES):
        raise UserError(f"{VARIABLE}: expected auto or pool, got {value!r}, which this build of torch does not offer")
    return "openmp" if value == "openmp" else "pool"


@functools.cache
def limit_threads() -> None:
    """Let torch have no more threads than a limit of processor time is enough for; the first call decides.

    Threads beyond it would use up the time of a period together, and all stop until the next one. A number in
    OMP_NUM_THREADS stays, and so does one that torch is given later. From then on a fork ends the calling thread's
    OpenMP team: the new process has none of its threads, but GNU's runtime would wait for them without end.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=end_team)
    before, time = torch.get_num_threads(), processor_time()
    now = most_threads(before, time)
    if now < before and not os.environ.get(NUMBER):
        torch.set_num_threads(now)
        _log.info("threads: %d of %d, since processor time is limited to %.3g processors", now, before, time)


def require_threads(number: int) -> None:
    """Refuse a number of threads that this process cannot run at once."""
    most = processors()
    refuse_outside("threads", number, 1, most, ", the processors that this process may use")


def use_threads(number: int) -> None:
    """Compute with so many threads from now on, torch's and the C library's; it holds for the whole process.

    Threads that have computed before keep their own number.
    """
    require_threads(number)
    if _CHOSEN and number not in _CHOSEN:
        _log.warning(
            "threads: %d for the whole process, where an engine before asked for %d: name one number for all engines",
            number,
            *_CHOSEN,
        )
    _CHOSEN[:] = [number]
    limit_threads()  # first: it would replace a number that it finds
    torch.set_num_threads(number)


def attach_threads(library: ctypes.CDLL) -> None:
    """Make a library run on the chosen threads."""
    library.draftproof_attach.argtypes = [ctypes.c_void_p] * len(_ENTRIES)
    if kind() == "openmp":
        library.draftproof_attach(*(ctypes.cast(openmp_function(name), ctypes.c_void_p) for name in _ENTRIES))
    else:
        library.draftproof_attach(*(None for _ in _ENTRIES))


@functools.cache
def openmp_function(name: str) -> Any:
    """A function of the OpenMP runtime that torch has loaded; None where it does not offer it."""
    try:
        return getattr(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")), name)
    except (OSError, AttributeError):
        return None


def end_team() -> None:
    """End the OpenMP team of the calling thread; its next region starts one again, in 0.2 ms with two threads."""
    if (pause := openmp_function("omp_pause_resource_all")) is not None:
        pause(_SOFT)


class _SleepingTeam:
    """A thread with an OpenMP team that has nothing to do, or without one."""

    def __init__(self) -> None:
        self._exists = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wanted: queue.SimpleQueue[tuple[bool, threading.Event]] = queue.SimpleQueue()

    def exist(self, wanted: bool) -> None:
        """Have a team, or have none; returns when that is so."""
        if wanted == self._exists:
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="draftproof sleeping team", daemon=True)
                self._thread.start()
            done = threading.Event()
            self._wanted.put((wanted, done))
            done.wait()
            self._exists = wanted

    def _serve(self) -> None:
        parallel, meet, processors = map(openmp_function, (_ENTRIES[0], _ENTRIES[3], _PROCESSORS))
        while True:
            wanted, done = self._wanted.get()
            try:
                if wanted:
                    parallel(ctypes.cast(meet, ctypes.c_void_p), None, processors() + 1, 0)
                else:
                    end_team()
            finally:
                done.set()  # a round waits for it


@functools.cache
def _sleeping_team(process: int) -> _SleepingTeam:  # noqa: ARG001 - one that was forked has none of the threads
    return _SleepingTeam()


def limit_spinning(wanted: bool) -> None:
    """Keep torch's threads from spinning after its operations, or let them spin again.

    Without effect where torch's OpenMP runtime does not offer GNU's functions, or the C library runs on it.
    """
    if kind() == "pool" and all(openmp_function(name) for name in (*_ENTRIES, _PROCESSORS)):
        _sleeping_team(os.getpid()).exist(wanted)
