"""A pytest plugin: `--slice 2/5` runs one of five parts of the tests that were selected.

A test's part depends on its name alone. So five runs with the slices 0/5 to 4/5 run every test, also where tests were
added between them. CI takes turns by the time (`.ci/run`).
"""

import re
import zlib

import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--slice", type=a_slice, metavar="PART/PARTS", help="run one part of the selected tests: 0/5 to 4/5"
    )


def a_slice(text):
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not int(found[1]) < int(found[2]):
        raise pytest.UsageError(f"--slice is {text!r}: expected PART/PARTS with 0 <= PART < PARTS, for example 0/5")
    return int(found[1]), int(found[2])


def in_slice(name, part, parts):
    return zlib.crc32(name.encode()) % parts == part


def pytest_collection_modifyitems(config, items):
    if (wanted := config.getoption("--slice")) is None:
        return
    left = [item for item in items if not in_slice(item.nodeid, *wanted)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if in_slice(item.nodeid, *wanted)]
