"""Cores are counted on a pretended machine with two sockets, less what limits of processor time leave, and divided."""

import os
import sys

import pytest
import torch

from draftproof import models
from draftproof.backends.loading.by_name import load_model
from draftproof.cli import _launch
from draftproof.native import cores, threads
from draftproof.provenance import header, machine, run_facts
from support.helpers import engine


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
    monkeypatch.setattr(_launch, "usable_cores", lambda: 8)
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", lambda *_: lambda *_: seen.update(os.environ))
    for processes, each in ((2, "4"), (3, "2"), (16, "1")):
        monkeypatch.setenv("OMP_NUM_THREADS", "")
        monkeypatch.delenv("OMP_NUM_THREADS")
        assert _launch._run_processes(processes, []) == 0
        assert seen["OMP_NUM_THREADS"] == each
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    _launch._run_processes(2, [])
    assert seen["OMP_NUM_THREADS"] == "5", "what the user set stays"


def groups(folder, files, *lines):
    """Control groups as Linux shows them: limits by path, and a process in the groups of these lines."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f"{content}\n")
    membership = folder / "membership"
    membership.write_text("".join(f"{line}\n" for line in lines))
    return folder, membership


HOST = "docker/0a1b"  # a path that does not exist inside a container


@pytest.mark.parametrize(
    ("files", "lines", "expected"),
    [
        ({"cpu.max": "200000 100000"}, ["0::/"], 2.0),
        ({"cpu.max": "max 100000"}, ["0::/"], None),
        ({"cpu.max": "25000 50000"}, [f"0::/{HOST}"], 0.5),
        ({"a/cpu.max": "max 100000", "a/b/cpu.max": "300000 100000"}, ["0::/a/b"], 3.0),
        ({"a/cpu.max": "150000 100000", "a/b/cpu.max": "300000 100000"}, ["0::/a/b"], 1.5),  # the outer one is less
        ({"other/cpu.max": "100000 100000"}, ["0::/a"], None),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, [f"4:cpu,cpuacct:/{HOST}"], 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, ["4:cpu,cpuacct:/"], None),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, ["3:cpuset:/", "0::/"], None),
        ({"cpu.max": ""}, ["0::/"], None),
        ({}, [], None),
    ],
)
def test_limits_of_processor_time_are_read(files, lines, expected, tmp_path):
    assert cores.processor_time(*groups(tmp_path, files, *lines)) == expected


def test_without_control_groups_there_is_no_limit(tmp_path):
    assert cores.processor_time(tmp_path, tmp_path / "absent") is None


@pytest.mark.parametrize(("time", "count"), [(None, 8), (0.5, 1), (2.0, 2), (2.1, 3), (64.0, 8)])
def test_a_limit_leaves_so_many_threads_as_have_work(time, count, monkeypatch):
    monkeypatch.setattr(cores, "physical_cores", lambda: 8)
    monkeypatch.setattr(cores, "processor_time", lambda: time)
    assert cores.usable_cores() == count


@pytest.mark.parametrize(
    ("time", "variable", "number"),
    [(2.0, None, 2), (0.3, None, 1), (9.0, None, 8), (None, None, 8), (2.0, "8", 8)],
)
def test_torch_gets_as_many_threads_as_the_limit_is_enough_for(time, variable, number, monkeypatch):
    given = []
    monkeypatch.setattr(threads, "processor_time", lambda: time)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.delenv(threads.NUMBER, raising=False)
    if variable is not None:
        monkeypatch.setenv(threads.NUMBER, variable)
    threads.limit_threads.__wrapped__()
    assert given == ([] if number == 8 else [number])


def test_models_and_engines_have_no_more_threads_than_the_limit(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "processor_time", lambda: 1.0)
    monkeypatch.delenv(threads.NUMBER, raising=False)
    engine()  # its models are loaded now
    makers = (machine, lambda: load_model(models.resolve("embedded:target")), engine)
    try:
        for make in makers:
            threads.limit_threads.cache_clear()
            torch.set_num_threads(2)
            make()
            assert torch.get_num_threads() == 1
            torch.set_num_threads(2)
            make()
            assert torch.get_num_threads() == 2, "what the user sets later stays"
    finally:
        torch.set_num_threads(before)


def test_a_limit_is_a_fact_of_results(monkeypatch):
    monkeypatch.setattr("draftproof.provenance.processor_time", lambda: 1.5)
    assert "; processor time: 1.5;" in header(run_facts())[2]
    monkeypatch.setattr("draftproof.provenance.processor_time", lambda: None)
    assert "processor time" not in header(run_facts())[2]
