"""The cores of a machine, of which each may run several threads at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_PROCESSORS = Path("/sys/devices/system/cpu")


def physical_cores(folder: Path = _PROCESSORS) -> int:
    """The cores that this process may use, each once, also where it runs two threads at once.

    Args:
        folder: where Linux describes processors. Those that it does not describe are counted as cores.
    """
    if sys.platform != "linux":
        return os.cpu_count() or 1
    cores = set()
    for number in os.sched_getaffinity(0):
        try:
            cores.add(Path(folder, f"cpu{number}", "topology", "thread_siblings_list").read_text(encoding="utf-8"))
        except OSError:
            cores.add(str(number))
    return len(cores)
