"""The faults that `scripts/check_native.py mutants` puts into the C code."""

from pathlib import Path

import pytest

from draftproof.native.build import SOURCES
from support.native_mutants import MUTANTS

TESTS = Path(__file__).parent.parent


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.name)
def test_a_fault_can_still_be_put_in(mutant, tmp_path):
    """Their own run compiles each of them, and expects the tests of its file to fail."""
    mutant.write(tmp_path / "c")
    changed = [each.name for each in SOURCES.iterdir() if each.read_text() != (tmp_path / "c" / each.name).read_text()]
    assert changed == [mutant.file]
    assert (TESTS / mutant.tests).is_file()


def test_a_fault_whose_place_has_changed_is_named(tmp_path):
    with pytest.raises(AssertionError, match=r"typed\.h: nowhere in it -> .*: it is there 0 times: write it again"):
        MUTANTS[0]._replace(old="nowhere in it").write(tmp_path / "c")
