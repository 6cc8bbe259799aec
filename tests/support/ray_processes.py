"""Waiting for processes of a cluster."""

import time
from pathlib import Path


def processes(name):
    """Ids of this user's processes whose title begins with a name."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            try:
                if place.joinpath("cmdline").read_bytes().startswith(name.encode()):
                    found.append(int(place.name))
            except OSError:
                continue
    return found


def until(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
