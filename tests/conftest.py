"""Every test runs with shape and type checks on, one thread, and no network."""

import gc
import os
import signal
from pathlib import Path

import torch

os.environ.setdefault("GOMP_SPINCOUNT", "0")
# Some tests run their own files, or those of support/, in processes of their own.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DRAFTPROOF_TARGET", "embedded:stories")  # for `draftproof generate`
os.environ.setdefault("DRAFTPROOF_CHECKED", "0")  # tests/backends/loading/test_verified.py is about it
os.environ.setdefault("DRAFTPROOF_CALIBRATION", "0")  # tests/backends/products/test_calibration_files.py is about it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A client of HTTP would read all certificates, which takes longer than most answers, and here all servers are local.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
# Read once, while triton is imported, which peft does too. Tests on a device shall use what its users get.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

import type_checks

type_checks.install("draftproof")

import pytest
from hypothesis import settings

from draftproof.engine.engine import Engine
from draftproof.stoppers.costs import LearnedCosts

pytest_plugins = ("support.processor_time", "support.native_levels", "support.grids", "support.slices")
torch.set_num_threads(int(os.environ.get("DRAFTPROOF_TEST_THREADS", "1")))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background: tests interrupt programs
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("draftproof", deadline=None, print_blob=True)
settings.load_profile("draftproof")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules and tests stay until the end: a collection of garbage that looks at them all takes up to a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(autouse=True)
def checks_from_the_start():
    """Each test begins with the checks of shapes and types on."""
    type_checks.start()


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    """Costs of rounds stay as they are assumed: no result depends on a clock, and no file is read or written."""
    monkeypatch.setattr(LearnedCosts, "learn", lambda *_, **__: None)
    monkeypatch.setattr(Engine, "keep_costs", lambda *_: None)
