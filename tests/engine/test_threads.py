"""The number of threads follows the machine: simulated machines, and the engine's own rounds."""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import draftproof.engine.threads as threads_module
from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import own_threads
from draftproof.backends.hf.backend import HFBackend
from draftproof.engine import loop
from draftproof.engine.threads import (
    LONGEST_PAUSE,
    SUSPICIOUS,
    ThreadCount,
    interruptions,
    omp_set_num_threads,
    release_team,
)
from draftproof.native.cores import processors
from support.helpers import embedded_model
from support.native_levels import LEVELS, run_on

pytestmark = pytest.mark.skipif(omp_set_num_threads() is None, reason="torch has another threading runtime here")


class Machine:
    """Rounds take the time of the work, and where more threads run than processors are free, a multiple of it."""

    def __init__(self, threads, *, work=0.02, penalty=10.0, probed=False):
        self.free, self.work, self.penalty = threads, work, penalty
        self.now, self.count, self.rate = 0.0, 0.0, None
        self.used = []
        self.probes = 0
        self.chosen = ThreadCount(lambda: int(self.count), lambda: self.now, self.held_up if probed else None)

    def held_up(self, threads):
        self.probes += 1
        self.now += 0.03
        return threads > self.free

    def round(self, tokens=1):
        with self.chosen.set():
            now = torch.get_num_threads()
        busy = now > self.free
        seconds = self.work / now * (self.penalty if busy else 1.0)
        rate = self.rate if self.rate is not None else 20 * SUSPICIOUS if busy else SUSPICIOUS / 10
        self.now += seconds
        self.count += rate * seconds
        self.used.append((now, seconds))
        self.chosen.record_time(seconds, tokens)

    def run(self, seconds):
        """Returns the share of the time in rounds with each number of threads."""
        self.used, until = [], self.now + seconds
        while self.now < until:
            self.round()
        total = sum(each for _, each in self.used)
        return {number: sum(s for n, s in self.used if n == number) / total for number in {n for n, _ in self.used}}


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_a_quiet_machine_keeps_all_threads(threads):
    threads(2)
    assert Machine(2).run(60) == {2: 1.0}


def test_fewer_threads_where_others_have_the_processors_and_all_again_when_they_left(threads):
    threads(2)
    machine = Machine(2)
    machine.run(5)
    machine.free = 1
    machine.run(3)
    assert machine.chosen.count == 1
    assert machine.run(60)[1] > 0.9  # the rest is looking again, with rounds that take ten times as long
    machine.free = 2
    machine.run(LONGEST_PAUSE + 2)
    assert machine.chosen.count == 2
    assert machine.run(60) == {2: 1.0}


@pytest.mark.parametrize("probed", [True, False])
def test_rounds_that_take_seconds_are_not_tried_where_small_products_say_so(threads, probed):
    """With all threads a round takes 400 times as long here; without the probe they are tried again and again."""
    threads(2)
    machine = Machine(2, penalty=800.0, probed=probed)
    machine.run(5)
    machine.free = 1
    machine.run(60)
    assert machine.chosen.count == 1
    machine.probes = 0
    shares = machine.run(120)
    if not probed:
        assert shares[2] > 0.3, "the control"
        return
    assert shares == {1: 1.0}
    assert 20 < machine.probes < 40
    machine.free = 2
    machine.run(10)  # much sooner than by pauses that double
    assert machine.chosen.count == 2
    machine.probes = 0
    assert machine.run(60) == {2: 1.0}
    assert machine.probes == 0


@pytest.mark.grid(3)
@pytest.mark.parametrize("free", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("probed", [True, False])
def test_as_many_threads_as_there_are_free_processors(threads, free, probed):
    threads(16)
    machine = Machine(16, work=0.16, penalty=40.0, probed=probed)
    machine.free = free
    machine.run(60)
    assert machine.chosen.count == free
    assert machine.run(120)[free] > 0.85


def test_interruptions_that_cost_nothing_cost_little(threads):
    """Fewer threads are tried, and are slower; the control is a machine that is looked at all the time."""
    threads(2)
    machine = Machine(2)
    machine.rate = 100 * SUSPICIOUS
    shares = machine.run(300)
    assert 0 < shares[1] < 0.02
    assert machine.chosen.count == 2
    eager = Machine(2)
    eager.rate = 100 * SUSPICIOUS
    eager.chosen._pause = 0.0  # doubling it leaves it there
    assert eager.run(300)[1] > 0.1


def test_one_thread_and_an_unknown_system_are_left_alone(threads):
    threads(1)
    machine = Machine(0)
    assert machine.run(5) == {1: 1.0}
    threads(2)
    machine.chosen = ThreadCount(None, lambda: machine.now)
    assert machine.run(5) == {2: 1.0}


def test_the_callers_own_number_is_followed(threads):
    threads(4)
    machine = Machine(4)
    machine.free = 1
    machine.run(20)
    assert machine.chosen.count == 1
    threads(3)
    machine.round()
    assert machine.used[-1][0] == 3


def test_rounds_give_the_number_back_and_the_text_does_not_depend_on_it(threads):
    threads(2)
    engine = Engine.load("embedded:stories", drafter="quantized:4")
    params = SamplingParams(max_tokens=24, seed=3, ignore_eos=True)
    whole = engine.generate("Once upon a time", params)[0]
    inside, elsewhere = [], []
    forward = engine.target.forward

    def seen(feeds, **options):
        inside.append(torch.get_num_threads())
        other = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
        other.start()
        other.join()
        return forward(feeds, **options)

    engine._threads.count = 1
    engine._threads.record_time = lambda *_: None
    engine.target.forward = seen
    alone = engine.generate("Once upon a time", params)[0]
    assert set(inside) == {1}
    assert set(elsewhere) == {2}
    assert torch.get_num_threads() == 2
    assert alone.token_ids == whole.token_ids

    def fails(_feeds, **_options):
        raise RuntimeError("a device is gone")

    engine.target.forward = fails
    with pytest.raises(RuntimeError, match="gone"):
        engine.generate("Once upon a time", params)
    assert torch.get_num_threads() == 2


def test_small_products_are_timed_with_the_number_asked_for_and_the_own_number_stays(threads, monkeypatch):
    threads(2)
    clock, seen = [0.0], []

    def now():
        seen.append(torch.get_num_threads())
        return clock[0]

    times = iter([1e-5] * 400 + [3e-5] * 20000)

    def added(self, _):
        clock[0] += next(times)
        return self

    monkeypatch.setattr(torch.Tensor, "add_", added)
    monkeypatch.setattr(threads_module.time, "perf_counter", now)
    products = threads_module.SmallProducts()
    monkeypatch.setattr(threads_module, "_PROBE", 0.004)
    assert not products.held_up(3)
    assert set(seen) == {3}
    assert torch.get_num_threads() == 2
    monkeypatch.setattr(threads_module, "_PROBE", 0.03)
    assert products.held_up(3), "three times the least that was ever seen"
    assert not products.held_up(4), "of this number nothing else was seen"
    times = iter([2e-3] * 100)
    assert products.held_up(5), "nothing small takes so long"
    times = itertools.cycle([1e-5] + [5e-5] * 9)
    assert not products.held_up(6), "threads that sleep are seldom as fast as they can be"


@pytest.mark.parametrize("own", [True, False])
def test_all_threads_may_be_tried_at_any_time_where_they_let_others_run(own, monkeypatch):
    """Small products of torch would say nothing about them, and all would never compute again after a busy time."""
    target = HFBackend(embedded_model("target"), name="target")
    assert own_threads(target)
    monkeypatch.setattr(target, "own_threads", own)
    assert (Engine(target)._threads._held_up is None) is own


def test_this_system_counts_interruptions():
    count = interruptions()
    assert count is not None
    assert count() >= 0


def tasks():
    """Threads of this process, Python's and others'."""
    return {int(each.name) for each in Path("/proc/self/task").iterdir()}


def started(alone, expected):
    """Threads beside those of before, once they are as many as expected: ended ones are listed for a moment."""
    for _ in range(200):
        if len(tasks() - alone) == expected:
            break
        time.sleep(0.01)
    return len(tasks() - alone)


def compute():
    torch.ones(1_000_000).add_(1)


COUNTS_THREADS = Path("/proc/self/task").exists() and bool(LEVELS)  # and native operations can run on OpenMP
ALONE = "DRAFTPROOF_TEST_TEAMS"


@pytest.mark.slow
@pytest.mark.skipif(not COUNTS_THREADS, reason="the system does not list threads, or there are no native operations")
def test_teams_in_a_process_of_their_own():
    """Pools that earlier tests have started, and libraries that they have loaded again, are not in it."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__, "-k", "TestTeams"]
    environment = {**os.environ, ALONE: "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "...." in done.stdout, "none was skipped"


@pytest.mark.skipif(not COUNTS_THREADS or ALONE not in os.environ, reason="the test above runs it in a process")
class TestTeams:
    """Teams that wait make the one that computes slow: GNU's runtime counts all threads that it has started.

    Native operations run on OpenMP's threads here, as torch's products do in models that are not native.
    """

    @pytest.fixture(autouse=True)
    def three_threads(self, monkeypatch):
        monkeypatch.setattr(loop, "own_threads", lambda _: False)
        run_on("openmp", LEVELS[0], monkeypatch)
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        release_team()
        yield
        release_team()
        torch.set_num_threads(before)
        run_on("auto", LEVELS[0], monkeypatch)

    def test_a_team_ends_and_starts_again(self):
        alone = tasks()
        for _ in range(2):
            compute()
            assert started(alone, 2) == 2, "or the next lines show nothing"
            release_team()
            assert started(alone, 0) == 0

    def test_loading_and_generating_leave_no_team(self):
        engine, alone = Engine.load("embedded:target", drafter="none"), tasks()
        compute()
        release_team()
        assert started(alone, 0) == 0
        engine = Engine.load("embedded:target", drafter="none")
        assert started(alone, 0) == 0
        engine.generate("Once", SamplingParams(max_tokens=4))
        assert started(alone, 0) == 0
        assert list(engine.stream("Once", SamplingParams(max_tokens=4)))
        assert started(alone, 0) == 0

    def test_a_thread_that_computes_alone_keeps_its_team(self):
        engine, alone = Engine.load("embedded:target", drafter="none"), tasks()
        (request,) = engine.add("Once", SamplingParams(max_tokens=8))
        engine.step()
        assert started(alone, 2) == 2, "each round would start it again"
        engine.abort(request)

    def test_threads_that_take_turns_leave_none(self):
        engine = Engine.load("embedded:target", drafter="none")
        engine.add("Once", SamplingParams(max_tokens=50, ignore_eos=True))
        alone, turn = tasks(), threading.Barrier(2)

        def other():
            for _ in range(3):
                turn.wait()
                engine.step()
                turn.wait()
            turn.wait()

        thread = threading.Thread(target=other)
        thread.start()
        engine.step()
        for _ in range(3):
            turn.wait()  # the other thread's turn
            turn.wait()
            engine.step()
            assert started(alone, 1) == 1, "the other thread, and no team"
        turn.wait()
        thread.join()
        engine.step()
        engine.step()
        assert started(alone, 2) == 2, "the only one that is left has a team again"


# --- a number that is named -------------------------------------------------------------------------------------------

NAMED = """
import json, logging, sys, threading
import torch
from draftproof import Engine, SamplingParams

warned = []
logging.getLogger("draftproof.native.threads").addFilter(lambda record: warned.append(record.getMessage()) or False)
params = [SamplingParams(temperature=0, max_tokens=24), SamplingParams(seed=3, max_tokens=24)]
found = []
for threads in map(int, sys.argv[1:]):
    for drafter in ("none", "suffix"):
        engine = Engine.load("embedded:target", drafter=drafter, threads=threads)
        later = []
        beside = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        beside.start()
        beside.join()
        texts = [out.text for out in engine.generate(["Once upon a time"] * 2, params)]
        found.append([threads, torch.get_num_threads(), *later, texts, len(warned)])
print(json.dumps(found))
"""


@pytest.mark.skipif(processors() < 2, reason="one processor")
def test_named_threads_compute_and_no_bit_depends_on_them():
    ran = subprocess.run([sys.executable, "-c", NAMED, "1", "2"], capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout)
    assert [each[:3] for each in found] == [[1, 1, 1], [1, 1, 1], [2, 2, 2], [2, 2, 2]]
    greedy = [texts[0] for *_, texts, _ in found]
    assert greedy == greedy[:1] * 4
    assert found[0][3] == found[2][3], "drawn tokens without drafts, too"
    assert [warned for *_, warned in found] == [0, 0, 1, 1], "another number for the whole process is said once"


@pytest.mark.parametrize("number", [0, -1, 1 + processors()])
def test_numbers_of_threads_that_cannot_run_are_refused(number):
    before = torch.get_num_threads()
    with pytest.raises(UserError, match=rf"threads: expected 1 to {processors()}, .* got {number}$"):
        Engine.load("embedded:target", threads=number)
    assert torch.get_num_threads() == before


def test_the_command_line_has_the_option():
    command = [sys.executable, "-m", "draftproof", "generate", "a", "--target", "embedded:target", "-t", "0"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith("draftproof: error: threads: expected 1 to")
