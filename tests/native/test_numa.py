"""Threads and weights go to memory nodes: on pretended machines, with recorded system calls, and with real ones."""

import ctypes
import errno
import itertools
import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from draftproof import Engine, SamplingParams
from draftproof.engine.options import EngineOptions
from draftproof.errors import UserError
from draftproof.native import numa, threads
from draftproof.native.ggml import GGMLWeight, Segment, repacked_shape
from draftproof.native.tensors import Interleaved, Plain, Quantized
from support.native_levels import LEVELS, OPERATIONS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nodes are read on Linux only")
PAGE = os.sysconf("SC_PAGESIZE")


def machine_of(root, processors, memory=None, siblings=0, allowed_memory=None):
    """A machine as Linux describes it: the processors of each node; of one core are those `siblings` apart."""
    folder, count = root / "sys/devices/system/node", len(processors)
    folder.mkdir(parents=True)
    (folder / "online").write_text(f"0-{count - 1}\n")
    (folder / "has_memory").write_text(f"{memory or f'0-{count - 1}'}\n")
    for number, each in enumerate(processors):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(f"{each}\n")
        apart = [10 if other == number else 20 + 2 * abs(other - number) for other in range(count)]
        (folder / f"node{number}" / "distance").write_text(" ".join(map(str, apart)) + "\n")
        for cpu in numa.numbers_of(each):
            topology = root / f"sys/devices/system/cpu/cpu{cpu}" / "topology"
            topology.mkdir(parents=True)
            first = cpu % siblings if siblings else cpu
            (topology / "thread_siblings_list").write_text(f"{first},{first + siblings}\n" if siblings else f"{cpu}\n")
    (root / "proc/self").mkdir(parents=True)
    listed = allowed_memory or f"0-{count - 1}"
    (root / "proc/self/status").write_text(f"Name:\tx\nMems_allowed:\t3\nMems_allowed_list:\t{listed}\n")
    return root


TWO = ["0-3,8-11", "4-7,12-15"]  # two sockets of four cores, each of which runs two threads at once
FOUR = ["0-1", "2-3", "4-5", "6-7"]


@pytest.mark.parametrize(
    ("given", "allowed", "expected"),
    [
        ({"processors": TWO, "siblings": 8}, range(16), {0: (8, 4), 1: (8, 4)}),
        ({"processors": TWO}, range(16), {0: (8, 8), 1: (8, 8)}),
        ({"processors": TWO, "siblings": 8}, range(4), {0: (4, 4)}),  # one node alone
        ({"processors": TWO, "siblings": 8}, (0, 8, 4, 5), {0: (2, 1), 1: (2, 2)}),
        ({"processors": TWO, "siblings": 8, "allowed_memory": "1"}, range(16), {1: (16, 8)}),
        ({"processors": FOUR}, range(8), dict.fromkeys(range(4), (2, 2))),
        ({"processors": FOUR, "memory": "0,2"}, range(8), {0: (4, 4), 2: (4, 4)}),  # 1 as near to 0 as to 2
        ({"processors": ["0-7", "", "8-9"]}, range(10), {0: (8, 8), 2: (2, 2)}),  # memory without processors
        ({"processors": ["0-7"]}, range(8), {0: (8, 8)}),
    ],
)
def test_nodes_are_those_with_memory_and_processors_that_may_be_used(given, allowed, expected, monkeypatch, tmp_path):
    monkeypatch.setattr(numa.os, "sched_getaffinity", lambda _: set(allowed))
    found = numa.nodes(machine_of(tmp_path, **given))
    assert {each.number: (len(each.processors), each.cores) for each in found} == expected


def test_a_system_that_does_not_describe_nodes_has_none(monkeypatch, tmp_path):
    assert numa.nodes(tmp_path) == []
    machine_of(tmp_path, FOUR)
    (tmp_path / "proc/self/status").write_text("Name:\tx\n")
    assert numa.nodes(tmp_path) == []


@pytest.fixture
def calls(monkeypatch):
    """The system calls that would be made, on a machine whose memory of former modes is lost afterwards."""
    made = []
    monkeypatch.setattr(numa, "_spread", [])
    monkeypatch.setattr(numa, "_isolated", [])
    monkeypatch.setattr(numa, "_refused", set())
    monkeypatch.setattr(numa, "_kept", [])
    monkeypatch.setattr(numa, "_libraries", [])
    monkeypatch.setattr(numa, "_HUGE", PAGE)
    monkeypatch.setattr(numa, "_call", lambda name, *given: made.append((name, *given)))
    monkeypatch.setattr(numa.os, "sched_setaffinity", lambda task, where: made.append(("affinity", task, set(where))))
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield made
    torch.set_num_threads(before)


class Library:
    """What would get the places of the pool's threads."""

    def __init__(self):
        self.kept = None

    def draftproof_keep_threads(self, address):
        found = numa._Kept.from_address(address)
        masks = (ctypes.c_uint64 * (found.threads * found.words)).from_address(found.masks)
        bits = [[word * 64 + bit for word in range(found.words) for bit in range(64)] for _ in range(found.threads)]
        of = [masks[start : start + found.words] for start in range(0, len(masks), max(found.words, 1))]
        self.kept = [{b for b in each if mask[b // 64] >> b % 64 & 1} for each, mask in zip(bits, of, strict=True)]


def two(monkeypatch, tmp_path, processors=TWO, **given):
    monkeypatch.setattr(numa.os, "sched_getaffinity", lambda _: set(range(200)))
    found = numa.nodes(machine_of(tmp_path, processors, **given))
    monkeypatch.setattr(numa, "nodes", lambda: found)
    return found


def test_distributed_threads_are_kept_on_nodes_by_their_cores(calls, monkeypatch, tmp_path):
    found, library = two(monkeypatch, tmp_path, ["0-5", "64-65,130"]), Library()
    numa._libraries.append(library)
    numa.use_processors(None, "distribute")
    assert library.kept == [set(range(6))] * 6 + [{64, 65, 130}] * 2
    ((name, policy, mask, length),) = calls
    assert (name, policy, mask[0], length) == ("set_mempolicy", numa.INTERLEAVE, 0b11, 65)
    for number, parts in ((1, [(0, 1), (1, 1)]), (2, [(0, 2), (2, 2)]), (3, [(0, 2), (2, 3)]), (9, [(0, 6), (6, 9)])):
        torch.set_num_threads(number)
        assert numa._parts() == parts, found


def moved(calls):
    return [(start, start + size, policy, mask[0]) for _, start, size, policy, mask, *_ in calls]


def weights():
    """Weights of some kinds, each with the tensors whose rows threads divide, one after another."""
    dense = Interleaved.of(torch.zeros(1024, 1000))
    plain = Plain(torch.zeros(1000, 700))
    few = Quantized(torch.zeros(64, 20000, dtype=torch.uint8), 1024, 0, 4, 32)
    shapes = [repacked_shape(outs, 4096, 12) for outs in (512, 256)]
    segments = [torch.zeros(shape, dtype=torch.uint8) for shape in shapes]
    return {
        "interleaved": (dense, [dense.blocks]),
        "plain": (plain, [plain.weight]),
        "quantized": (few, [few.blocks]),
        "ggml": (GGMLWeight((Segment(segments[0], 512, 12), Segment(segments[1], 256, 12)), 4096), segments),
    }


@pytest.mark.parametrize("kind", ["interleaved", "plain", "quantized", "ggml"])
def test_the_part_of_a_weight_lies_where_the_thread_is_that_reads_it(kind, calls, monkeypatch, tmp_path):
    """By C's division of outputs among threads; whole pages, each in one range."""
    found = two(monkeypatch, tmp_path, siblings=8)
    numa.use_processors(None, "distribute")
    calls.clear()
    made, tensors = weights()[kind]
    assert made.arguments  # when these are made, parts that were joined are placed
    ranges = [
        each for each in moved(calls) if any(t.data_ptr() - PAGE < each[0] < t.data_ptr() + t.nbytes for t in tensors)
    ]
    assert all(start % PAGE == end % PAGE == 0 for start, end, *_ in ranges)
    assert {policy for *_, policy, _ in ranges} == {numa.PREFERRED}
    assert all(size % PAGE == 0 and flags == numa.MOVE for _, _, size, _, _, _, flags in calls)
    rows, threads_ = sum(map(len, tensors)), torch.get_num_threads()
    owner = [found[thread * len(found) // threads_].number for thread in range(threads_)]
    at, wrong, seen = 0, 0, 0
    for tensor in tensors:
        for row in range(len(tensor)):
            address = tensor.data_ptr() + row * tensor.stride(0) * tensor.element_size()
            thread = next(t for t in range(threads_) if rows * t // threads_ <= at < rows * (t + 1) // threads_)
            here = [mask for start, end, _, mask in ranges if start <= address < end]
            assert len(here) <= 1
            seen += len(here)
            wrong += bool(here) and here[0] != 1 << owner[thread]
            at += 1
    assert seen >= rows - 2 * len(tensors) * (1 + PAGE // (tensors[0].stride(0) * tensors[0].element_size() or 1))
    assert wrong <= len(tensors) * (1 + PAGE // (tensors[0].stride(0) * tensors[0].element_size()))
    assert len({mask for *_, mask in ranges}) == 2


def test_weights_that_have_no_order_are_interleaved_and_small_ones_stay(calls, monkeypatch, tmp_path):
    two(monkeypatch, tmp_path)
    several = torch.zeros(4, 64, 20000, dtype=torch.uint8)
    Quantized(several, 1024, 0, 4, 32)
    assert not calls, "nothing is touched by default"
    numa.use_processors(None, "distribute")
    calls.clear()
    Quantized(several, 1024, 0, 4, 32)
    found = moved(calls)
    assert [mask for *_, mask in found] == ([1, 2] * 32)[: len(found)]
    assert len(found) > 32
    assert {policy for _, _, policy, _ in found} == {numa.PREFERRED}
    assert all(one[1] == other[0] for one, other in itertools.pairwise(found))
    assert 0 <= found[0][0] - several.data_ptr() < PAGE
    assert 0 <= found[-1][1] - several.data_ptr() - several.nbytes < PAGE
    calls.clear()
    Plain(torch.zeros(64, 64))
    assert not calls


def test_huge_pages_are_not_divided(calls, monkeypatch, tmp_path):
    two(monkeypatch, tmp_path)
    monkeypatch.setattr(numa, "_HUGE", 1 << 21)
    numa.use_processors(None, "distribute")
    calls.clear()
    weight = Plain(torch.zeros(2000, 2000)).weight
    (first, second) = moved(calls)
    assert first[1] == second[0]
    assert first[1] % (1 << 21) == 0
    assert abs(first[1] - weight.data_ptr() - weight.nbytes // 2) <= 1 << 20
    small = Plain(torch.zeros(1000, 300)).weight  # of which no edge is outside
    assert all(0 <= end - small.data_ptr() < small.nbytes + PAGE for _, end, *_ in moved(calls)[2:])
    assert all(start >= small.data_ptr() for start, *_ in moved(calls)[2:])


@pytest.mark.parametrize(
    ("processors", "here", "chosen"),
    [(TWO, 0, TWO[0]), (TWO, 12, TWO[1]), (["0-3", "4-9"], 0, "4-9"), (FOUR, 5, "4-5")],
)
def test_an_isolated_process_is_on_the_node_with_the_most_cores(processors, here, chosen, calls, monkeypatch, tmp_path):
    two(monkeypatch, tmp_path, processors)
    monkeypatch.delenv(threads.NUMBER, raising=False)
    monkeypatch.setattr(numa.ctypes, "CDLL", lambda *_: type("C", (), {"sched_getcpu": lambda _: here})())
    stop = threading.Event()
    beside = threading.Thread(target=stop.wait)
    beside.start()
    numa.use_processors(None, "isolate")
    expected = numa.numbers_of(chosen)
    assert {where == expected for _, _, where in calls} == {True}
    assert {os.getpid(), beside.native_id} <= {task for _, task, _ in calls}
    assert torch.get_num_threads() == min(8, len(expected))
    stop.set()
    beside.join()


def test_threads_that_a_node_has_no_room_for_are_refused_before_the_process_is_kept_there(calls, monkeypatch, tmp_path):
    two(monkeypatch, tmp_path)
    numa.use_processors(None, "distribute")
    calls.clear()
    with pytest.raises(UserError, match=r"threads: expected 1 to 8, the processors of node [01], .* got 9"):
        numa.use_processors(9, "isolate")
    assert not calls
    assert numa._spread


def test_processes_of_one_target_take_nodes_in_turn(calls, monkeypatch, tmp_path):
    two(monkeypatch, tmp_path)
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
    for place, node in (("0", TWO[0]), ("1", TWO[1]), ("2", TWO[0])):
        calls.clear()
        monkeypatch.setenv("LOCAL_RANK", place)
        numa.use_processors(None, "isolate")
        assert {frozenset(where) for *_, where in calls} == {frozenset(numa.numbers_of(node))}


def test_isolation_ends_distribution(calls, monkeypatch, tmp_path):
    two(monkeypatch, tmp_path)
    library = Library()
    numa._libraries.append(library)
    numa.use_processors(None, "distribute")
    numa.use_processors(None, "isolate")
    assert library.kept == []
    assert ("set_mempolicy", numa.DEFAULT, None, 0) in calls
    calls.clear()
    Plain(torch.zeros(1000, 1000))
    assert not calls


def test_distribution_after_isolation_is_an_error(calls, monkeypatch, tmp_path):
    """The process may use one node alone then, so that distribution would have no effect."""
    found = two(monkeypatch, tmp_path)
    numa.use_processors(None, "isolate")
    (kept,) = numa._isolated
    monkeypatch.setattr(numa, "nodes", lambda: [kept])
    calls.clear()
    expected = f"numa: expected isolate or off, .* on node {kept.number}, got 'distribute' .*start another process"
    with pytest.raises(UserError, match=expected):
        numa.use_processors(3, "distribute")
    assert torch.get_num_threads() != 3, "refused before anything is changed"
    numa.use_processors(None, "isolate")
    numa.use_processors(None, "off")
    assert not calls
    monkeypatch.setattr(numa, "nodes", lambda: found)  # somebody let the process run everywhere again
    numa.use_processors(None, "distribute")
    assert calls


@pytest.mark.parametrize("mode", numa.MODES)
def test_one_node_is_left_alone_without_a_word(mode, calls, monkeypatch, tmp_path, caplog):
    two(monkeypatch, tmp_path, ["0-7"])
    numa.use_processors(None, mode)
    Plain(torch.zeros(1000, 1000))
    assert not calls
    assert not caplog.records


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_what_the_system_refuses_is_said_once(number, calls, monkeypatch, tmp_path, caplog):
    two(monkeypatch, tmp_path)

    def refuse(name, *_):
        calls.append(name)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(numa, "_call", refuse)
    for _ in range(2):
        numa.use_processors(None, "distribute")
        Plain(torch.zeros(1000, 1000))
    said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert calls == ["set_mempolicy", "mbind"]
    assert len(said) == 2
    assert all("the system refuses" in each and os.strerror(number) in each for each in said)


def test_modes_that_cannot_be_had_are_errors(monkeypatch):
    with pytest.raises(UserError, match="numa: expected one of off, isolate, distribute, got 'all'"):
        EngineOptions(numa="all")
    monkeypatch.setattr(numa.sys, "platform", "darwin")
    EngineOptions(numa="off")
    with pytest.raises(UserError, match="numa: expected off on darwin, got 'isolate', which is for Linux"):
        EngineOptions(numa="isolate")


def test_real_calls_succeed_or_are_refused(monkeypatch, caplog):
    """On this machine, whose first node has memory; the policy of this thread alone is changed, and changed back."""
    here = [numa.Node(0, frozenset(os.sched_getaffinity(0)), 1)]
    numbers, ended = torch.arange(1 << 20, dtype=torch.int32), []

    def attempt():
        monkeypatch.setattr(numa, "_refused", set())
        ended.append(numa._attempt("set_mempolicy", lambda: numa._set_policy(numa.INTERLEAVE, here)))
        numa._attempt("set_mempolicy", lambda: numa._set_policy(numa.DEFAULT, []))
        numa._move(numbers, 0, numbers.nbytes, here[0])

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert torch.equal(numbers, torch.arange(1 << 20, dtype=torch.int32))
    assert ended == [not any("set_mempolicy" in each.getMessage() for each in caplog.records)]
    monkeypatch.setattr(numa, "_refused", set())
    if ended == [True]:  # a node that does not exist is refused, so that a mask that nobody reads would be seen
        assert not numa._attempt("mbind", lambda: numa._call("mbind", 0, PAGE, 99, None, 0, 0))
        assert not numa._attempt(
            "set_mempolicy", lambda: numa._set_policy(numa.INTERLEAVE, [numa.Node(900, frozenset(), 1)])
        )


def tasks():
    return {int(each.name) for each in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(not LEVELS, reason="no native operations on this machine")
def test_threads_of_the_pool_go_where_they_are_kept():
    assert OPERATIONS[torch.float32].level  # loaded
    allowed, before = sorted(os.sched_getaffinity(0)), torch.get_num_threads()
    scores = torch.zeros(9, 50000)
    try:
        torch.set_num_threads(4)
        expected = OPERATIONS[torch.float32].softmax(scores)
        numa._keep([frozenset(allowed), frozenset(allowed[:1]), frozenset(allowed[-1:])])
        assert torch.equal(OPERATIONS[torch.float32].softmax(scores), expected)
        found = [os.sched_getaffinity(task) for task in tasks()]
        if len(allowed) > 1:
            assert {allowed[0]} in found
            assert {allowed[-1]} in found
        assert os.sched_getaffinity(0) == set(allowed), "the caller's is not changed"
    finally:
        numa._keep([frozenset(allowed)] * 256)
        OPERATIONS[torch.float32].softmax(scores)
        torch.set_num_threads(before)
        numa._kept.clear()
    assert all(os.sched_getaffinity(task) == set(allowed) for task in tasks())


@pytest.mark.parametrize("drafter", ["none", "ngram:4"])
def test_every_mode_writes_the_same_text(drafter, monkeypatch):
    """With two nodes that are pretended on one, whose calls and affinities are real."""
    allowed = sorted(os.sched_getaffinity(0))
    halves = [frozenset(allowed[:1]), frozenset(allowed[1:] or allowed)]
    monkeypatch.setattr(numa, "nodes", lambda: [numa.Node(0, each, len(each)) for each in halves])
    monkeypatch.setattr(numa, "_LEAST", 1 << 14)
    monkeypatch.setattr(numa, "_spread", [])
    monkeypatch.setattr(numa, "_isolated", [])
    policies, real, before = [], numa._call, torch.get_num_threads()
    monkeypatch.setattr(numa, "_call", lambda name, *given: policies.append((name, given[2:3])) or real(name, *given))
    texts = {}
    try:
        for mode in numa.MODES:
            torch.set_num_threads(2)
            policies.clear()
            made = Engine.load("embedded:stories", numa=mode, drafter=drafter)
            (out,) = made.generate(["Once upon a time"], SamplingParams(temperature=1, seed=3, max_tokens=24))
            texts[mode] = out.token_ids
            assert any(name == "mbind" for name, _ in policies) == (mode == "distribute")
    finally:
        numa._spread.clear()
        numa._keep([frozenset(allowed)] * 256)
        numa._attempt("set_mempolicy", lambda: numa._set_policy(numa.DEFAULT, []))
        numa._keep_process(frozenset(allowed))
        torch.set_num_threads(before)
    assert texts["off"] == texts["isolate"] == texts["distribute"]


def test_wrong_places_would_be_seen(calls, monkeypatch, tmp_path):
    """A negative control of the test of parts."""
    monkeypatch.setattr(numa, "_parts", lambda: [(4, 8), (0, 4)])
    with pytest.raises(AssertionError):
        test_the_part_of_a_weight_lies_where_the_thread_is_that_reads_it("plain", calls, monkeypatch, tmp_path)
