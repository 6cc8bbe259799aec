"""Memory that is handed back: when, and that it is."""

import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from draftproof import peak
from draftproof.peak import FilePages, ReleaseTimes

MIB = 1 << 20


def test_memory_is_handed_back_while_the_process_is_larger_than_it_was():
    looks = ReleaseTimes()
    assert [looks.due(size * MIB) for size in (100, 110, 130)] == [False] * 3
    assert looks.due(200 * MIB)
    looks.released(200 * MIB, 180 * MIB)
    assert looks.due(180 * MIB), "what was in use then may be free now, at the same size"


def test_it_is_tried_less_often_where_it_brings_nothing():
    looks = ReleaseTimes()
    looks.due(100 * MIB)
    tried = []
    for look in range(60):
        if looks.due(200 * MIB):
            looks.released(200 * MIB, 199 * MIB)
            tried.append(look)
    assert tried[:4] == [0, 2, 5, 10]
    assert max(later - earlier for earlier, later in pairwise(tried)) <= ReleaseTimes.most + 1
    assert not looks.due(100 * MIB)
    assert looks.due(200 * MIB), "new growth is looked at soon"


def test_a_containers_limit_counts(tmp_path):
    (tmp_path / "memory.current").write_text("300\n")
    for most, left in (("1000", 700), ("200", 0), ("max", None)):
        (tmp_path / "memory.max").write_text(f"{most}\n")
        assert peak._left_of_limit(tmp_path) == left
    assert peak._left_of_limit(tmp_path / "none") is None


def resident_of(path):
    """Bytes of a file that this process has in memory."""
    parts = Path("/proc/self/smaps").read_text().split(f"{path}\n")[1:]
    return 1024 * sum(int(re.search(r"Rss:\s+(\d+) kB", part)[1]) for part in parts)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is in memory")
def test_pages_of_a_checkpoint_are_let_go(tmp_path):
    """Those of one tensor, whose numbers are read from the file again; memory of other kinds stays as it is."""
    path, own = tmp_path / "model.safetensors", torch.full((1 << 20,), 3.0)
    save_file({"one": torch.ones(1 << 20), "two": torch.full((1 << 20,), 2.0)}, path)
    with safe_open(path, "pt") as file:
        one, two = file.get_tensor("one"), file.get_tensor("two")
        assert (float(one.sum()), float(two.sum())) == (float(1 << 20), float(2 << 20))
        pages, before = FilePages(), resident_of(path)
        assert before > 7 << 20
        pages.release(own)
        assert resident_of(path) == before
        pages.release(one)
        assert 3 << 20 < resident_of(path) < 5 << 20
        assert float(one.sum() + two.sum()) == float(3 << 20)
    assert float(own.sum()) == float(3 << 20)
