"""Build the C library for every level that this processor runs, as many at once as it has cores, and keep them.

    python scripts/build_levels.py

What is kept already is not built again. A level takes half a minute to some minutes.
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from draftproof.errors import UserError
from draftproof.native import build


def built(level: build.Level) -> str:
    """Build a level; returns what became of it."""
    began = time.monotonic()
    try:
        build.load(level)
    except UserError as error:  # an old compiler knows fewer levels; their tests are skipped
        return f"{level.name}: {error}"
    return f"{level.name}: {time.monotonic() - began:.0f} s"


def main() -> None:
    """Build all levels, the one that takes longest first."""
    try:
        levels = build.choose()[::-1]
    except build.UnavailableError as error:
        sys.exit(f"nothing to build: {error}")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for line in pool.map(built, levels):
            print(line, flush=True)


if __name__ == "__main__":
    main()
