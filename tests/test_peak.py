"""Memory that is handed back: when, and that it is."""

from itertools import pairwise

from draftproof import peak
from draftproof.peak import ReleaseTimes

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
