"""The cores of a machine, of which each may run several threads at once, and the processor time of a process."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

_PROCESSORS = Path("/sys/devices/system/cpu")
_GROUPS, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def physical_cores(folder: Path = _PROCESSORS) -> int:
    """The cores that this process may use, each once, also where it runs two threads at once.

    Args:
        folder: where Linux describes processors. Those that it does not describe are counted as cores.
    """
    if sys.platform != "linux":
        return processors()
    return count_cores(os.sched_getaffinity(0), folder)


def count_cores(numbers: Iterable[int], folder: Path = _PROCESSORS) -> int:
    """The cores of some processors, by the `folder` of `physical_cores`."""
    cores = set()
    for number in numbers:
        try:
            cores.add(Path(folder, f"cpu{number}", "topology", "thread_siblings_list").read_text(encoding="utf-8"))
        except OSError:
            cores.add(str(number))
    return len(cores)


def numbers_of(text: str) -> set[int]:
    """The numbers of a list as Linux writes it: 0-3,8."""
    ends = [part.split("-") for part in text.strip().split(",") if part]
    return {number for each in ends for number in range(int(each[0]), int(each[-1]) + 1)}


def processors() -> int:
    """The processors that this process may use; a core that runs two threads at once is two of them."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_time(groups: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> float | None:
    """Seconds of processor time that this process may use in a second, as `docker --cpus` sets it; None: no limit.

    The least of its control groups and of those that contain them counts, in either version of control groups.

    Args:
        groups: where Linux shows control groups.
        membership: which of them this process is in.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [each for line in lines for folder in _folders(groups, line) if (each := _limit(folder)) is not None]
    return min(found, default=None)


def usable_cores() -> int:
    """How many threads can compute at once: a core for each, and no more than the processor time is enough for."""
    return most_threads(physical_cores(), processor_time())


def most_threads(threads: int, time: float | None) -> int:
    """So many threads, or as many as have work all the time within a limit of processor time."""
    return threads if time is None else min(threads, math.ceil(time))


def _folders(groups: Path, line: str) -> Iterator[Path]:
    """A group, from a line of the membership, and those that contain it.

    In a container, the path may be the host's, of which only the last folder exists here: the first one of all.
    """
    number, controllers, path = line.split(":", 2)
    if number != "0" and "cpu" not in controllers.split(","):
        return
    root = groups / "cpu" if number != "0" else groups
    inner = PurePosixPath(path.lstrip("/"))
    yield from (root / each for each in (inner, *inner.parents))


def _limit(folder: Path) -> float | None:
    """The limit of a group itself."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period")
            )
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # no such group; a group of version 2 without a limit has the word max
        return None
