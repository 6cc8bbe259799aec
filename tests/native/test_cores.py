"""Cores are counted on a pretended machine with two sockets, and divided among processes."""

import os
import sys

import pytest

from draftproof.cli import _launch
from draftproof.native import cores


def two_sockets(folder, siblings):
    """Processors 0 to 15 as Linux describes them: two sockets of four cores, each of which runs two threads at once."""
    for number in range(16):
        topology = folder / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        core = number % 8
        (topology / "thread_siblings_list").write_text(f"{core},{core + 8}\n" if siblings else f"{number}\n")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which processors are one core")
@pytest.mark.parametrize(
    ("siblings", "allowed", "count"),
    [
        (True, range(16), 8),
        (False, range(16), 16),
        (True, (0, 8), 1),
        (True, (0, 1, 2, 3, 8, 9, 10, 11), 4),  # the first socket alone
        (True, (3, 20, 21), 3),  # two that are not described
    ],
)
def test_threads_of_one_core_are_counted_once(siblings, allowed, count, monkeypatch, tmp_path):
    two_sockets(tmp_path, siblings)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(allowed))
    assert cores.physical_cores(tmp_path) == count


def test_processes_of_one_machine_share_its_cores(monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr(_launch, "physical_cores", lambda: 8)
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", lambda *_: lambda *_: seen.update(os.environ))
    for processes, each in ((2, "4"), (3, "2"), (16, "1")):
        monkeypatch.setenv("OMP_NUM_THREADS", "")
        monkeypatch.delenv("OMP_NUM_THREADS")
        assert _launch._launched(processes, []) == 0
        assert seen["OMP_NUM_THREADS"] == each
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    _launch._launched(2, [])
    assert seen["OMP_NUM_THREADS"] == "5", "what the user set stays"
