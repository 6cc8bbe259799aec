"""The suite's own tools: which tests and cases run, parts of the tests by turns, and the processor time of tests."""

import os
import subprocess
import sys
from collections import Counter
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import pytest

from support import grids, processor_time, slices


@pytest.mark.parametrize("sizes", [(3, 4), (5, 2, 2), (7,)])
def test_few_cases_have_every_value_and_more_have_every_pair(sizes):
    cases = [dict(zip("abc", each, strict=False)) for each in product(*map(range, sizes))]
    chosen = [cases[place] for place in grids.covering(cases, max(sizes))]
    assert len(chosen) == max(sizes)
    assert {pair for case in chosen for pair in case.items()} == {pair for case in cases for pair in case.items()}
    pairs = [set(combinations(sorted(case.items()), 2)) for case in cases]
    assert set().union(*(pairs[place] for place in grids.covering(cases, len(cases)))) == set().union(*pairs)


class Case:
    def __init__(self, name, **params):
        self.nodeid, self.callspec, self.marks = (
            name,
            SimpleNamespace(params=params),
            {"grid": SimpleNamespace(args=(2,))},
        )

    def get_closest_marker(self, name):
        return self.marks.get(name)

    def add_marker(self, mark):
        self.marks[mark.name] = mark


def test_cases_that_are_left_out_are_slow_and_run_by_their_own_name():
    cases = [Case(f"a.py::test[{number}]", number=number) for number in range(6)]
    grids.pytest_collection_modifyitems(cases)
    assert sum("slow" in case.marks for case in cases) == 4
    alone = Case("a.py::test[5]", number=5)
    grids.pytest_collection_modifyitems([alone])
    assert "slow" not in alone.marks
    bare = Case("a.py::test")
    del bare.callspec
    with pytest.raises(pytest.UsageError, match="has no parameters"):
        grids.pytest_collection_modifyitems([bare])


GRID = """
import pytest

@pytest.mark.grid(3)
@pytest.mark.parametrize("word", ["a", "b", "c"])
@pytest.mark.parametrize(("some", "number"), [([1], 1), ({}, True), ([1], 2)])
def test(word, some, number):
    pass
"""


def test_pytests_own_cases_are_chosen_by_the_values_of_their_parameters(tmp_path):
    """Not the first three: all have another word and another number, though `True == 1`."""
    path = tmp_path / "test_grid.py"
    path.write_text(GRID)
    command = [sys.executable, "-m", "pytest", "-p", "support.grids", "-m", "not slow", "--co", "-q", path]
    # options that the environment adds may be those of other plug-ins
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "PYTEST_ADDOPTS": ""}
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment).stdout
    cases = [line.partition("[")[2].rstrip("]").split("-") for line in found.splitlines() if "[" in line]
    assert sorted(word for *_, word in cases) == ["a", "b", "c"]
    assert sorted(number for _, number, _ in cases) == ["1", "2", "True"]


def test_no_test_starts_after_the_time_is_over():
    stash = {slices._END: slices.time.monotonic() + 60}
    slices.pytest_runtest_setup(SimpleNamespace(config=SimpleNamespace(stash=stash)))
    stash[slices._END] -= 61
    with pytest.raises(pytest.skip.Exception, match="start-for"):
        slices.pytest_runtest_setup(SimpleNamespace(config=SimpleNamespace(stash=stash)))


def test_the_cases_of_a_function_are_dealt_evenly():
    names = [f"{file}.py::test[{case}]" for file in "abc" for case in range(23)]
    found = dict(zip(names, slices.parts_of(names, 5), strict=True))
    for file in "abc":
        counts = Counter(part for name, part in found.items() if name.startswith(f"{file}.py"))
        assert sorted(counts.values()) == [4, 4, 5, 5, 5]
    more = ["0.py::test", *names, "c.py::test[23]"]
    later = dict(zip(more, slices.parts_of(more, 5), strict=True))
    assert {name: later[name] for name in names} == found, "what is added moves no other test"


def test_functions_of_one_case_are_spread():
    names = [f"a.py::test_{number}" for number in range(200)]
    assert all(20 < count < 60 for count in Counter(slices.parts_of(names, 5)).values())


SLICED = """
import pytest


@pytest.mark.parametrize("case", range(9))
def test(case):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("case", range(9))
def test_slow(case):
    pass
"""


def test_every_selected_test_is_in_one_slice(tmp_path):
    (tmp_path / "test_sliced.py").write_text(SLICED)
    seen = Counter()
    for part in range(3):
        command = [sys.executable, "-m", "pytest", "-p", "support.slices", "-m", "slow", "--co", "-q", "--slice"]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "PYTEST_ADDOPTS": ""}
        command += [f"{part}/3", "-W", "ignore"]
        found = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment
        ).stdout
        seen.update(line for line in found.splitlines() if "::" in line)
    assert len(seen) == 9
    assert set(seen.values()) == {1}


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
