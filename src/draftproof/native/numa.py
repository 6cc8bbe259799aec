"""Memory nodes (NUMA), as machines with several sockets have them: which one threads run on, and weights lie on.

Threads divide the outputs of a weight in order: of n threads, thread i begins with those from i/n to (i + 1)/n of them
(c/native.c). So where the pool's threads are kept on nodes, each part of a weight can lie on the node that reads it.
What has no such order, as experts and keys and values, is interleaved. Linux only.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import mmap
import os
import platform
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.errors import UserError, refuse_unknown
from draftproof.native.cores import count_cores, numbers_of
from draftproof.native.threads import NUMBER, limit_threads, use_threads

MODES = ("off", "isolate", "distribute")
DEFAULT, PREFERRED, INTERLEAVE = 0, 1, 3  # policies, as in Linux's mempolicy.h
MOVE = 2  # MPOL_MF_MOVE: pages that exist move, too
_CALLS = {  # numbers of system calls, which libc has no functions for
    "x86_64": {"mbind": 237, "set_mempolicy": 238},
    "aarch64": {"mbind": 235, "set_mempolicy": 237},
}
_LEAST = 1 << 20  # bytes of a weight; smaller ones stay in caches, and every range costs the system a mapping
_HUGE = 1 << 21  # bytes of a huge page, of which much of a weight may consist
_PIECES = 64  # of a weight that is interleaved, at most, since each is a mapping
_WORD = 64  # bits
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Node:
    """A node with memory, and the processors that are nearest to it."""

    number: int
    processors: frozenset[int]  # that this process may use
    cores: int  # of these


class _Kept(ctypes.Structure):
    """The C structure `kept_threads` of parallel.h."""

    _fields_ = (("threads", ctypes.c_int64), ("words", ctypes.c_int64), ("masks", ctypes.c_void_p))


_spread: list[Node] = []  # over which weights are distributed; none otherwise
_isolated: list[Node] = []  # the node that an engine with `isolate` keeps this process on; none otherwise
_libraries: list[ctypes.CDLL] = []
_kept: list[tuple[_Kept, Any]] = []  # what C has the address of; a thread may still read an earlier one
_refused: set[str] = set()  # system calls


def require_numa(mode: str) -> None:
    """Refuse a mode that is unknown, or that this system does not have."""
    refuse_unknown("numa", mode, MODES)
    if mode != "off" and sys.platform != "linux":
        raise UserError(f"numa: expected off on {sys.platform}, got {mode!r}, which is for Linux: leave it out")


def nodes(root: Path = Path("/")) -> list[Node]:
    """The nodes with memory and processors that this process may use; none where Linux does not describe them.

    Processors of a node without memory count as those of the nearest one with memory.

    Args:
        root: below which Linux describes machine and process.
    """
    if sys.platform != "linux":
        return []
    folder, allowed = root / "sys/devices/system/node", os.sched_getaffinity(0)
    try:
        with_memory = numbers_of((folder / "has_memory").read_text(encoding="ascii")) & _memory_allowed(root)
        described = {number: folder / f"node{number}" for number in _online(folder)}
        near: dict[int, set[int]] = {number: set() for number in sorted(with_memory & described.keys())}
        for number, of in described.items():
            if processors := numbers_of((of / "cpulist").read_text(encoding="ascii")) & allowed:
                near[_nearest(number, of, list(described), near)] |= processors
    except (OSError, ValueError):
        return []
    cpus = root / "sys/devices/system/cpu"
    return [Node(number, frozenset(each), count_cores(each, cpus)) for number, each in near.items() if each]


def _online(folder: Path) -> list[int]:
    return sorted(numbers_of((folder / "online").read_text(encoding="ascii")))


def _memory_allowed(root: Path) -> set[int]:
    """Nodes whose memory the process's control group lets it use."""
    for line in (root / "proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == "Mems_allowed_list":
            return numbers_of(value)
    raise ValueError("no line Mems_allowed_list")


def _nearest(number: int, folder: Path, online: list[int], choice: Iterable[int]) -> int:
    """Of some nodes the one nearest to a node, by the distances that its folder has for those online, in order."""
    distances = dict(zip(online, map(int, (folder / "distance").read_text(encoding="ascii").split()), strict=True))
    return min(choice, key=lambda other: (other != number, distances[other], other))


def use_processors(threads: int | None, mode: str) -> None:
    """Compute from now on with so many threads (None: as before), on nodes by the mode; it holds for the process.

    A mode has no effect where the process may use only one node. What the system refuses is left out, and said once.

    Raises:
        UserError: a mode or a number of threads that cannot be had, or `distribute` after `isolate`.
    """
    require_numa(mode)
    found = [] if mode == "off" else nodes()
    if mode == "distribute" and _isolated and len(found) == 1:  # weights of the earlier engine lie there, too
        expected = f"isolate or off, as an earlier engine keeps this process on node {_isolated[0].number}"
        raise UserError(f"numa: expected {expected}, got {mode!r} (to use all nodes, start another process)")
    if mode == "isolate" and len(found) > 1:
        _isolate(found, threads)
    if threads is not None:
        use_threads(threads)
    if mode == "distribute" and len(found) > 1:
        _distribute(found)


def shown() -> str:
    """What rounds take may depend on it: over which nodes they are distributed, or nothing."""
    return f", nodes {' '.join(str(each.number) for each in _spread)}" if _spread else ""


def _isolate(found: list[Node], threads: int | None) -> None:
    """Keep all threads on a node: that with the most cores, among equal ones that of the calling thread.

    Linux takes new memory from the node of the thread that writes there first, and from others if that is full.
    Processes that share a target take nodes in turn. Threads that do not fit are refused before anything is changed.
    """
    if torch.distributed.is_available() and torch.distributed.is_torchelastic_launched():
        node = found[int(os.environ.get("LOCAL_RANK", "0")) % len(found)]
    else:
        here = ctypes.CDLL(None).sched_getcpu()
        node = max(found, key=lambda each: (each.cores, here in each.processors))
    if threads is not None and not 1 <= threads <= len(node.processors):
        most = f"1 to {len(node.processors)}, the processors of node {node.number}, where numa isolate keeps them"
        raise UserError(f"threads: expected {most}, got {threads}")
    if _spread:  # an earlier engine's
        _spread.clear()
        _attempt("set_mempolicy", lambda: _set_policy(DEFAULT, []))
        _keep([])
    if not _attempt("sched_setaffinity", lambda: _keep_process(node.processors)):
        return
    _isolated[:] = [node]
    limit_threads()
    if threads is None and not os.environ.get(NUMBER) and torch.get_num_threads() > node.cores:
        torch.set_num_threads(node.cores)
    _log.info("numa: all threads on node %d, %d cores", node.number, node.cores)


def _keep_process(processors: frozenset[int]) -> None:
    """Let all threads run on these processors only; those that start later do as the thread that starts them."""
    if sys.platform != "linux":
        return
    done: set[int] = set()
    while new := {int(each.name) for each in Path("/proc/self/task").iterdir()} - done:  # one may start in between
        for task in new:
            try:
                os.sched_setaffinity(task, processors)
            except ProcessLookupError:  # it ended
                continue
        done |= new


def _distribute(found: list[Node]) -> None:
    """Keep the pool's threads on nodes, by their cores, and interleave new memory of this thread and its children."""
    if _spread != found:
        _log.info("numa: threads and weights on nodes %s", [each.number for each in found])
    _spread[:] = found
    limit_threads()
    _keep([node.processors for node, (first, end) in zip(found, _parts(), strict=True) for _ in range(first, end)])
    _attempt("set_mempolicy", lambda: _set_policy(INTERLEAVE, found))


def _parts() -> list[tuple[int, int]]:
    """The first thread of each node, and the one after its last."""
    threads, cores, ends = torch.get_num_threads(), 0, [0]
    for node in _spread:
        cores += node.cores
        ends.append(-(-threads * cores // sum(each.cores for each in _spread)))
    return list(itertools.pairwise(ends))


def attach(library: ctypes.CDLL) -> None:
    """Keep the pool's threads of a library, too, where those of others are kept."""
    library.draftproof_keep_threads.argtypes = [ctypes.c_void_p]
    library.draftproof_keep_threads.restype = None
    _libraries.append(library)
    if _kept:
        library.draftproof_keep_threads(ctypes.addressof(_kept[-1][0]))


def _keep(processors: list[frozenset[int]]) -> None:
    """Let each thread of the pools run on these processors only, by its number; not 0, which is the caller's.

    Further threads stay where they are.
    """
    words = 1 + max((number for each in processors for number in each), default=0) // _WORD
    masks = (ctypes.c_uint64 * (words * len(processors)))()
    for thread, each in enumerate(processors):
        for number in each:
            masks[thread * words + number // _WORD] |= 1 << number % _WORD
    _kept.append((_Kept(len(processors), words, ctypes.addressof(masks)), masks))
    for library in _libraries:
        library.draftproof_keep_threads(ctypes.addressof(_kept[-1][0]))


def place(*parts: Tensor) -> None:
    """Put each part of a weight on the node whose threads read it, if weights are distributed.

    Args:
        parts: they follow one another, and rows of each are divided among threads in their order.
    """
    if not _spread or sum(each.nbytes for each in parts) < _LEAST:
        return
    rows, threads, start = sum(map(len, parts)), torch.get_num_threads(), 0
    for part in parts:
        size = part.nbytes // max(len(part), 1)
        for node, (first, end) in zip(_spread, _parts(), strict=True):
            least, most = (min(max(rows * each // threads - start, 0), len(part)) * size for each in (first, end))
            _move(part, least, most, node)
        start += len(part)


def interleave(weight: Tensor) -> None:
    """Put pieces of a weight that threads divide in no fixed way on nodes in turn, if weights are distributed.

    By a policy of this name, Linux would leave pages where they are that lie on any of the nodes.
    """
    if not _spread or weight.nbytes < _LEAST:
        return
    piece = -(-weight.nbytes // (_PIECES * _HUGE)) * _HUGE
    for number, start in enumerate(range(0, weight.nbytes, piece)):
        _move(weight, start, min(start + piece, weight.nbytes), _spread[number % len(_spread)])


def _move(weight: Tensor, first: int, end: int, to: Node) -> None:
    """Move the pages of some bytes; an edge within the weight is where a huge page begins, which only moves whole."""
    page, origin = mmap.PAGESIZE, weight.data_ptr()
    least, most = (-(-each // page) * page for each in (origin, origin + weight.nbytes))
    inner = ((origin + each + _HUGE // 2) // _HUGE * _HUGE for each in (first, end))
    start, stop = (
        least if each <= 0 else most if each >= weight.nbytes else min(max(edge, least), most)
        for each, edge in zip((first, end), inner, strict=True)
    )
    if weight.is_contiguous() and start < stop:
        _attempt("mbind", lambda: _call("mbind", start, stop - start, PREFERRED, *_mask([to]), MOVE))


def _set_policy(policy: int, to: list[Node]) -> None:
    _call("set_mempolicy", policy, *_mask(to))


def _mask(to: list[Node]) -> tuple[Any, int]:
    """The mask of some nodes, and its length as Linux counts it: one more than the bits."""
    words = 1 + max((each.number for each in to), default=0) // _WORD
    mask = (ctypes.c_uint64 * words)()
    for each in to:
        mask[each.number // _WORD] |= 1 << each.number % _WORD
    return (mask if to else None), words * _WORD + 1 if to else 0


def _call(name: str, *given: Any) -> None:
    """A system call.

    Raises:
        OSError: it failed, or its number is not known for this processor.
    """
    number = _CALLS.get(platform.machine(), {}).get(name)
    if number is None:
        raise OSError(f"no number is known for {platform.machine()}")
    system = ctypes.CDLL(None, use_errno=True).syscall
    arguments = (each if each is None or isinstance(each, ctypes.Array) else ctypes.c_ulong(each) for each in given)
    if system(ctypes.c_long(number), *arguments) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _attempt(name: str, what: Callable[[], None]) -> bool:
    """Do what a system may refuse, as containers do, which is said once and leaves results as they are."""
    if name in _refused:
        return False
    try:
        what()
    except OSError as error:
        _refused.add(name)
        _log.warning("numa: the system refuses %s (%s), so it is left out", name, error)
        return False
    return True
