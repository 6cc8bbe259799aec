"""The suite's own tools: parts of the tests by turns, and the processor time of tests."""

from types import SimpleNamespace

import pytest

from support import processor_time, slices

NAMES = [f"tests/test_{name}.py::test[{number}]" for name in "abcde" for number in range(40)]


def test_every_test_is_in_one_slice_and_none_is_much_larger():
    parts = [[name for name in NAMES if slices.in_slice(name, part, 5)] for part in range(5)]
    assert sorted(name for part in parts for name in part) == sorted(NAMES)
    assert all(20 < len(part) < 60 for part in parts)


def test_slices_are_read():
    assert slices.a_slice("3/5") == (3, 5)
    for wrong in ("5/5", "3", "-1/5", "a/b"):
        with pytest.raises(pytest.UsageError, match="expected PART/PARTS"):
            slices.a_slice(wrong)


def report(name, seconds, *keywords):
    return SimpleNamespace(
        nodeid=name, when="teardown", keywords=keywords, user_properties=[(processor_time.PROPERTY, seconds)]
    )


def test_tests_over_the_budget_are_found_unless_they_are_marked():
    reports = [report("light", 1.0), report("heavy", 9.0), report("known", 9.0, "slow")]
    found = processor_time.measured(SimpleNamespace(stats={"passed": [SimpleNamespace(when="call")], "": reports}))
    assert processor_time.over(found, 5.0) == ["heavy"]
    assert processor_time.over(found, 10.0) == []


def test_processor_time_counts_this_process(request):
    began = processor_time._spent()
    sum(range(3_000_000))
    assert processor_time._spent() > began
    assert request.node.stash[processor_time._BEGAN] <= began
