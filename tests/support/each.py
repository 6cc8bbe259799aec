"""One test case for many small things: all of them are looked at, and all failures are reported together."""

import pytest


def for_each(items, name=str):
    """Make a test of one item a test of all of them; `name` says how an item is called in the report."""
    items = list(items)

    def decorate(test):
        def look_at_all():
            failures = []
            for item in items:
                try:
                    test(item)
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - all are reported below
                    failures.append(f"{name(item)}: {type(error).__name__}: {error}")
            assert not failures, f"{len(failures)} of {len(items)} failed:\n" + "\n".join(failures)

        assert items, f"{test.__name__} has nothing to look at"
        look_at_all.__name__, look_at_all.__doc__ = test.__name__, test.__doc__
        look_at_all.__module__, look_at_all.__qualname__ = test.__module__, test.__qualname__
        return look_at_all

    return decorate
