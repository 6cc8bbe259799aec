"""A pytest plugin: `@pytest.mark.grid(6)` runs six cases of a test by default, and marks the others slow.

It is for tests of many cases that differ by parameters. The six are chosen so that together they have as many values of
each parameter, then as many pairs of values, as six can. The choice depends on the cases alone: it is the same in every
run and every process. With `-m slow` the others run, in CI by turns (`slices.py`).
"""

from itertools import combinations

import pytest


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "grid(cases): run that many cases of the test by default, chosen by their parameters; others are slow",
    )


def values_of(params):
    """What tells the value of each parameter apart; pytest's own indices number the cases of a test, not the values."""
    return {
        name: (type(value), value if isinstance(value, int | float | str) else id(value))
        for name, value in params.items()
    }


def covering(cases, most):
    """The places of at most so many cases; cases are dicts of parameters and their values."""
    values = [set(case.items()) for case in cases]
    pairs = [set(combinations(sorted(case.items()), 2)) for case in cases]
    chosen, seen, seen_pairs = [], set(), set()
    while len(chosen) < min(most, len(cases)):
        left = (place for place in range(len(cases)) if place not in chosen)
        best = max(left, key=lambda place: (len(values[place] - seen), len(pairs[place] - seen_pairs), -place))
        chosen.append(best)
        seen |= values[best]
        seen_pairs |= pairs[best]
    return sorted(chosen)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    tests = {}
    for item in items:
        if item.get_closest_marker("grid") and not any(map(item.get_closest_marker, ("slow", "levels"))):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in tests.items():
        if not hasattr(cases[0], "callspec"):
            raise pytest.UsageError(f"{name} is marked as a grid, and has no parameters (take the mark away)")
        (most,) = cases[0].get_closest_marker("grid").args
        chosen = covering([values_of(case.callspec.params) for case in cases], most)
        for place, case in enumerate(cases):
            if place not in chosen:
                case.add_marker(pytest.mark.slow)
