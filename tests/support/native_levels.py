"""A pytest plugin for tests of native operations: the builds that are tested, and what these tests have in common.

By default the best level of processors that runs here and the portable one are tested in full; `pytest -m levels` tests
the levels between, of which tests/native/test_native_levels.py otherwise compares two with the best. With
DRAFTPROOF_NATIVE=LEVEL the whole suite runs with that level alone. A level is built when the first test asks for it,
once for all processes.
"""

import fcntl
import os
import tempfile
from pathlib import Path

import pytest
import torch

from draftproof import native
from draftproof.errors import UserError
from draftproof.native import build as library
from draftproof.native import threads
from draftproof.native.dispatch import VARIABLE

DTYPES = [torch.bfloat16, torch.float32]
SINGLE = 2.0**-24  # the relative error of one rounding to float32, at most


def runs_here(name):
    """Whether this processor has what a level needs; nothing is built."""
    try:
        library.choose(name)
    except UserError:
        return False
    return True


def _levels():
    if next(library._compilers(), None) is None and not library.PACKAGED.exists():
        return []
    names = [level.name for level in library.LEVELS]
    forced = os.environ.get(VARIABLE)
    return [name for name in ([forced] if forced in names else names) if runs_here(name)]


LEVELS = _levels()  # best first
BETWEEN = LEVELS[1:-1]
needs_native = pytest.mark.skipif(not LEVELS, reason="no native operations on this machine")


class Chosen(dict):
    """The operations of the level under test, by type of rows."""

    def __missing__(self, dtype):
        return native.operations_for(torch.zeros(1, dtype=dtype))


OPERATIONS = Chosen()


def have(name):
    """Build a level, or wait until another process of this run has."""
    with Path(tempfile.gettempdir(), f"draftproof-tests-{os.getuid()}-{name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            library.load(*library.choose(name))
        except UserError as error:  # an old compiler knows fewer levels
            pytest.skip(f"{name} cannot be built here: {error}")


def run_on(kind, level, monkeypatch):
    """Have the library of a level run on threads of this kind."""
    monkeypatch.setenv(threads.VARIABLE, kind)
    threads.attach_threads(library.load(library.level_named(level)))


@pytest.fixture(params=[pytest.param(each, marks=[pytest.mark.levels] * (each in BETWEEN)) for each in LEVELS])
def level(request, monkeypatch):
    """Each of the tested builds is the one in use."""
    have(request.param)
    monkeypatch.setenv(VARIABLE, request.param)
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request, level):
    """Each type of rows that native operations read, at each of the tested levels."""
    return request.param


def drawn(seed, *shape, scale=1.0, dtype=torch.bfloat16):
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def close(found, expected, slack, *, roundings=1):
    """Whether found is expected, rounded; `slack` is what sums in float32 may be off by."""
    unit = torch.finfo(found.dtype).eps / 2 * roundings + 6 * SINGLE
    return bool(((found.double() - expected).abs() <= unit * expected.abs() + slack).all())
