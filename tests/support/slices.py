"""A pytest plugin for tests that take turns: `--slice 2/5` runs one of five parts of the tests that were selected.

The cases of a function are dealt to the parts in turn, from a part that its name decides: the few functions that take
most of the time are then divided evenly. A prime number of parts also separates cases that are alike, since these often
come at equal distances. So five runs with the slices 0/5 to 4/5 run every test, also where functions were added between
them, or cases at the end of one. CI takes turns by the time (`.ci/run`).

With `--start-for MINUTES` no test starts later than that: those that are left are skipped, and their number is said at
the end. Which they are is left to chance where several processes run: then each run begins at another test.
"""

import re
import time
import zlib
from collections import Counter

import pytest

OVER = "the minutes of --start-for are over"
_END = pytest.StashKey()


def pytest_addoption(parser):
    group = parser.getgroup("turns")
    group.addoption(
        "--slice", type=a_slice, metavar="PART/PARTS", help="run one part of the selected tests: 0/5 to 4/5"
    )
    group.addoption("--start-for", type=float, metavar="MINUTES", help="start tests for so long, and skip the others")


def a_slice(text):
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not int(found[1]) < int(found[2]):
        raise pytest.UsageError(f"--slice is {text!r}: expected PART/PARTS with 0 <= PART < PARTS, for example 0/5")
    return int(found[1]), int(found[2])


def parts_of(names, parts):
    """The part of each of some tests, in their order."""
    counts = Counter()
    for name in names:
        function = name.partition("[")[0]
        yield (zlib.crc32(function.encode()) + counts[function]) % parts
        counts[function] += 1


@pytest.hookimpl(trylast=True)  # of the tests that were selected
def pytest_collection_modifyitems(config, items):
    if (wanted := config.getoption("--slice")) is None:
        return
    part, parts = wanted
    found = list(zip(items, parts_of([item.nodeid for item in items], parts), strict=True))
    config.hook.pytest_deselected(items=[item for item, place in found if place != part])
    items[:] = [item for item, place in found if place == part]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    """All processes of one run begin at the same test."""
    run = getattr(session.config, "workerinput", {}).get("testrunuid")
    if run is not None and session.config.getoption("--start-for") is not None and session.items:
        first = zlib.crc32(run.encode()) % len(session.items)
        session.items[:] = session.items[first:] + session.items[:first]


def pytest_sessionstart(session):
    minutes = session.config.getoption("--start-for")
    session.config.stash[_END] = None if minutes is None else time.monotonic() + 60 * minutes


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if (end := item.config.stash[_END]) is not None and time.monotonic() > end:
        pytest.skip(OVER)


def pytest_terminal_summary(terminalreporter):
    left = sum(OVER in str(each.longrepr) for each in terminalreporter.stats.get("skipped", []))
    if left:
        terminalreporter.section(f"{left} tests were not started: {OVER}")
