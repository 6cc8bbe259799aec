"""A pytest plugin: the processor time of tests, with that of the processes they waited for.

It depends far less on what else the machine does than the time on a clock. The heaviest tests and files are listed at
the end. A test that is not marked slow and takes more than the budget is pointed out there, and is a failure only where
`--most-processor-time SECONDS` asks for it.
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

BUDGET = 5.0  # seconds of a test that is not marked slow
SHOWN = 10
SHORT = 60.0  # seconds of a run that needs no list
PROPERTY = "processor_seconds"
_BEGAN = pytest.StashKey()


def pytest_addoption(parser):
    group = parser.getgroup("processor time")
    group.addoption("--processor-times", metavar="FILE", help="write each test's processor time to FILE, as JSON lines")
    group.addoption(
        "--most-processor-time",
        type=float,
        metavar="SECONDS",
        help="fail if a test that is not marked slow takes more processor time",
    )


def _spent():
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.stash[_BEGAN] = _spent()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":
        report.user_properties.append((PROPERTY, _spent() - item.stash[_BEGAN]))
    return report


def measured(reporter):
    """Processor seconds of each test that ran, and whether it is marked slow."""
    reports = [each for some in reporter.stats.values() for each in some if getattr(each, "when", None) == "teardown"]
    return {each.nodeid: (dict(each.user_properties)[PROPERTY], "slow" in each.keywords) for each in reports}


def over(found, budget):
    return sorted(name for name, (seconds, slow) in found.items() if seconds > budget and not slow)


def pytest_sessionfinish(session):
    most, reporter = (
        session.config.getoption("--most-processor-time"),
        session.config.pluginmanager.get_plugin("terminalreporter"),
    )
    if most is not None and reporter is not None and over(measured(reporter), most) and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    found = measured(terminalreporter)
    heaviest = sorted(found, key=lambda name: -found[name][0])
    if (file := config.getoption("--processor-times")) is not None:
        lines = [json.dumps({"test": name, "seconds": round(found[name][0], 3)}) + "\n" for name in heaviest]
        Path(file).write_text("".join(lines), encoding="utf-8")
    budget = config.getoption("--most-processor-time") or BUDGET
    beyond = set(over(found, budget))
    if sum(seconds for seconds, _ in found.values()) < SHORT and not beyond:
        return
    files = Counter()
    for name, (seconds, _) in found.items():
        files[name.partition("::")[0]] += seconds
    minutes = sum(files.values()) / 60
    terminalreporter.section(f"the {SHOWN} heaviest of {len(found)} tests, of {minutes:.1f} minutes of processor time")
    for name in dict.fromkeys([*heaviest[:SHOWN], *sorted(beyond, key=lambda name: -found[name][0])]):
        remark = f" (more than {budget:g} s: mark it slow or make it lighter)" if name in beyond else ""
        terminalreporter.write_line(f"{found[name][0]:7.1f} s  {name}{remark}")
    terminalreporter.write_line(
        "files: " + ", ".join(f"{name} {each:.0f} s" for name, each in files.most_common(SHOWN))
    )
