"""Native operations on the library's own pool of threads compute the bits that they compute on one thread."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from draftproof.backends.base import Feed
from draftproof.backends.lean.backend import LeanBackend
from draftproof.errors import UserError
from draftproof.native import build as library
from draftproof.native import structures, threads
from draftproof.native.tensors import Interleaved
from support.lean_models import lively_model
from support.native_levels import LEVELS, OPERATIONS, drawn, run_on
from support.native_models import MODELS

NUMBERS = (2, 3, 5)
FILES = ("native/test_native.py", "native/test_ggml.py", "native/test_rows.py", "backends/lean/test_mixture.py")
OFFERED = threads.openmp_function("GOMP_parallel") is not None
needs_native = pytest.mark.skipif(not LEVELS, reason="no native operations on this machine")


@pytest.fixture
def pool(level, monkeypatch):
    """The level under test runs on its own threads."""
    assert OPERATIONS[torch.float32].level == level  # loaded
    before = torch.get_num_threads()
    run_on("pool", level, monkeypatch)
    yield level
    torch.set_num_threads(before)
    run_on("auto", level, monkeypatch)


def on(number, compute, dtype):
    torch.set_num_threads(number)
    return compute(dtype)


def products(dtype):
    """Products in shares of equal size, and in such that threads take as they come."""
    made, x, weight = OPERATIONS[dtype], drawn(1, 7, 576, dtype=dtype), drawn(2, 900, 576, dtype=dtype)
    packed = made.quantize(Interleaved.of(weight), 4, 32)
    return [made.product(x, Interleaved.of(weight)), made.quantized_product(x, packed), made.rows_product(x, weight)]


def logits(dtype):
    """Those of a prompt and of a token after it: whole layers, and attention whose threads meet within a region."""
    backend = LeanBackend(lively_model(MODELS["llama"](), dtype))
    session, tokens = backend.open(), [(7 * i * i) % 97 for i in range(200)]
    return [backend.forward([Feed(session, part)])[0].logits for part in (tokens, [5])]


@pytest.mark.grid(5)
@pytest.mark.parametrize("compute", [products, logits])
def test_every_number_of_threads_gives_the_same_bits(compute, dtype, pool, monkeypatch):
    monkeypatch.setattr(structures, "_WORTH_DIVIDING", 0)
    alone = on(1, compute, dtype)
    for number in NUMBERS:
        assert all(map(torch.equal, on(number, compute, dtype), alone)), f"{number} threads"
    if OFFERED:
        run_on("openmp", pool, monkeypatch)
        assert all(map(torch.equal, on(2, compute, dtype), alone)), "OpenMP's threads"


def test_threads_that_compute_at_once_get_their_own_results(pool):
    expected, found = on(1, products, torch.float32), {}

    def compute(number):
        found[number] = [on(number, products, torch.float32) for _ in range(5)]

    callers = [threading.Thread(target=compute, args=[number]) for number in NUMBERS]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    assert all(all(map(torch.equal, results, expected)) for each in found.values() for results in each)
    assert len(found) == len(NUMBERS)


PROGRAM = """
import os, signal, threading
from pathlib import Path
import torch
from draftproof.native import operations_for, threads

def softmax(number):
    torch.set_num_threads(number)
    found = made.softmax(scores)
    torch.set_num_threads(1)  # torch itself starts none
    return found

def own():
    return set(os.listdir("/proc/self/task"))

torch.set_num_threads(1)
scores, made = torch.randn((9, 50000), generator=torch.Generator().manual_seed(0)), operations_for(torch.zeros(1))
expected, before = softmax(1), own()
assert torch.equal(softmax(3), expected)
started = own() - before
assert len(started) == 2, started
for task in started:  # signals are for Python's own threads, faults of a thread for itself
    (blocked,) = [line for line in Path(f"/proc/self/task/{task}/status").read_text().splitlines() if "SigBlk" in line]
    assert int(blocked.split()[1], 16) >> (signal.SIGINT - 1) & 1
    assert not int(blocked.split()[1], 16) >> (signal.SIGSEGV - 1) & 1

stop = threading.Event()
def compute():
    while not stop.is_set():
        softmax(3)
beside = threading.Thread(target=compute)
beside.start()
for _ in range(5):  # in the middle of a region of the other thread, or not
    if (child := os.fork()) == 0:
        right = len(own()) == 1 and torch.equal(softmax(3), expected) and len(own()) == 3
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0, "a forked process"
stop.set()
beside.join()
into = torch.empty_like(scores)
given = scores.data_ptr(), into.data_ptr(), *scores.shape, 3
def compute_on():  # while the interpreter ends; torch itself ends the process where it is interrupted so
    while True:
        made._softmax(*given)
threading.Thread(target=compute_on, daemon=True).start()
print("right")
"""


@pytest.mark.grid(1)
@pytest.mark.builds  # its process chooses a build of its own
@needs_native
def test_forks_signals_and_the_end_of_the_interpreter(level):
    environment = os.environ | {threads.VARIABLE: "pool", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout == "right\n", done.stderr[-2000:]
    assert done.returncode == 0, done.stderr[-2000:]


def test_which_threads_are_used(monkeypatch):
    monkeypatch.delenv(threads.VARIABLE, raising=False)
    assert threads.kind() == "pool"
    monkeypatch.setenv(threads.VARIABLE, "openmp")
    if OFFERED:
        assert threads.kind() == "openmp"
    monkeypatch.setattr(threads, "openmp_function", lambda name: None if name == "GOMP_barrier" else print)
    with pytest.raises(UserError, match="expected auto or pool, got 'openmp'"):
        threads.kind()
    monkeypatch.setenv(threads.VARIABLE, "some")
    with pytest.raises(UserError, match="expected one of auto, openmp, pool, got 'some'"):
        threads.kind()


SPINNING = """
import os, sys, time
import torch
from draftproof.native import threads
from draftproof.native.threads import limit_spinning

torch.set_num_threads(2)
numbers = torch.zeros(1 << 17)

def idle():  # processor seconds of the process while it does nothing, after regions of torch's
    before = time.process_time()
    for _ in range(20):
        numbers.add_(1.0)
        time.sleep(0.01)
    return time.process_time() - before

def limited(wanted):
    limit_spinning(wanted)
    return idle()

idle()
print(*map(limited, (False, True, False, True)))
if (child := os.fork()) == 0:  # which has none of the threads
    limit_spinning(True)
    limit_spinning(False)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.builds  # its process has torch's threads only
@pytest.mark.skipif(not OFFERED, reason="torch has another threading runtime here")
def test_torchs_threads_do_not_spin_while_rounds_run_on_the_pool():
    environment = os.environ | {threads.VARIABLE: "pool", "OMP_NUM_THREADS": "2"}
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        environment.pop(name, None)
    command = [sys.executable, "-W", "ignore", "-c", SPINNING]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    free, limited, again, last = map(float, done.stdout.split())
    assert min(free, again) > 2 * max(limited, last), done.stdout


FORK = """
import os, signal
import torch
from draftproof.native.threads import limit_threads

torch.set_num_threads(2)
limit_threads()  # as every engine does
numbers = torch.zeros(1 << 17)
numbers.add_(1.0)  # the team of this thread
if (child := os.fork()) == 0:
    signal.alarm(60)  # ends a process that waits for ever
    numbers.add_(1.0)
    os._exit(0 if numbers.eq(2).all() else 1)
assert os.waitpid(child, 0)[1] == 0, "the forked process"
assert numbers.add_(1.0).eq(2).all()  # a team again
"""


@pytest.mark.builds  # its process has torch's threads only
@pytest.mark.skipif(not OFFERED, reason="torch has another threading runtime here")
def test_a_forked_process_computes_where_torch_has_threads():
    command = [sys.executable, "-W", "ignore", "-c", FORK]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


# --- slow -------------------------------------------------------------------------------------------------------------

WRONG = {
    "a part is left out": ("    running(argument);\n", ""),
    "nobody waits": ("  if (!arrive()) wait_beyond(&met, now);\n", "  (void)now;\n"),
}


@pytest.mark.builds
@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_pool_is_seen(mistake, tmp_path):
    sources = shutil.copytree(library.SOURCES, tmp_path / "c")
    source = sources / "pool.c"
    right = source.read_text(encoding="utf-8")
    assert right.count(WRONG[mistake][0]) == 1
    source.write_text(right.replace(*WRONG[mistake]), encoding="utf-8")
    portable = library.level_named("portable")
    library.compile_library(tmp_path / "portable.so", portable, extra=("-O1",), source=sources)
    code = f"from pathlib import Path; from draftproof.native import build; build.PACKAGED = Path({str(tmp_path)!r})\n"
    environment = os.environ | {threads.VARIABLE: "pool", "DRAFTPROOF_NATIVE": "portable"}
    command = [sys.executable, "-c", code + PROGRAM.replace("range(5)", "range(0)")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert "right" not in done.stdout


@pytest.mark.builds
@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("kind", ["pool", pytest.param("openmp", marks=pytest.mark.skipif(not OFFERED, reason="none"))])
def test_all_tests_of_native_operations_pass_on_three_threads(kind):
    files = [str(Path(__file__).parents[1] / name) for name in FILES]
    environment = os.environ | {threads.VARIABLE: kind, "DRAFTPROOF_TEST_THREADS": "3"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not builds and not slow and not levels", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
