"""How much work a worker does for jobs that wait; a program of its own, since tracing and signals do not mix."""

import asyncio
import sys
import threading

from draftproof import SamplingParams
from draftproof.server import worker as worker_module
from draftproof.server.metrics import Metrics
from draftproof.server.parse_request import ParsedRequest
from draftproof.server.worker import EngineWorker, Job
from support.raw_http import Slow
from support.serving import small_engine, until


class Compared(Job):
    """A job that counts how often jobs are compared."""

    times = 0

    def __eq__(self, other):
        Compared.times += 1
        return self is other

    __hash__ = Job.__hash__


def work_for(count):
    """Lines that a worker runs, and jobs that it compares, where so many jobs wait and then leave."""
    slow = Slow(engine := small_engine(max_batch=1))
    slow.may.clear()
    worker = EngineWorker(engine, Metrics("x"), max_waiting=2 * count)
    lines = 0

    def counting(frame, *_):
        nonlocal lines
        if frame.f_code.co_filename != worker_module.__file__:
            return None
        lines += 1
        return counting

    async def run():
        asked = ParsedRequest(((1, 2),), (None,), SamplingParams(max_tokens=1))
        jobs = [Compared(asked) for _ in range(count)]
        worker.start()
        for job in jobs:
            worker.submit(job)
        for job in jobs:
            worker.close(job)
        slow.may.set()
        await asyncio.to_thread(until, lambda: not (worker._queue or worker._jobs) and worker._inbox.empty(), 60)
        worker.stop()

    Compared.times, before = 0, sys.gettrace()
    threading.settrace(counting)
    sys.settrace(counting)
    try:
        asyncio.run(run())
    finally:
        sys.settrace(before)
        threading.settrace(None)
    return lines + Compared.times


if __name__ == "__main__":
    sys.stdout.write(" ".join(str(work_for(int(count))) for count in sys.argv[1:]))
