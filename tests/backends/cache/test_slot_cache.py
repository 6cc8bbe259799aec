"""Buffers of keys and values: mapped for the longest sequence at once where addresses cost nothing, else they grow."""

import copy
import mmap
import resource
import sys

import pytest
import torch

from draftproof.backends.base import Feed
from draftproof.backends.cache import pages, slot_cache
from draftproof.backends.cache.pages import Buffer, addresses_are_free
from draftproof.backends.cache.slot_cache import SlotCache
from draftproof.backends.lean.backend import LeanBackend
from draftproof.peak import resident
from support.helpers import random_model
from support.word_models import CONFIG, words

CPU = torch.device("cpu")
LENGTHS = (3, 300, 40, 700, 1500)
linux = pytest.mark.skipif(sys.platform != "linux", reason="buffers are plain tensors elsewhere")


def lean():
    return LeanBackend(random_model(CONFIG), name="lean", check=False)


@pytest.fixture
def free(monkeypatch):
    monkeypatch.setattr(pages, "_unlimited", lambda: True)


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr(pages, "_unlimited", lambda: False)


def read(target):
    """Logits after texts of several lengths that are read in pieces, in turns."""
    sessions = [target.open() for _ in LENGTHS]
    rows = []
    for start in range(0, max(LENGTHS), 256):
        for session, length in zip(sessions, LENGTHS, strict=True):
            if piece := words(length, length)[start : start + 256]:
                rows.append(target.forward([Feed(session, piece)])[0].logits[-1])
    return sessions, torch.stack(rows)


@linux
def test_buffers_are_mapped_once_and_never_copied(free):
    target = lean()
    _, rows = read(target)
    slots, positions, replaced = target.cache.extent
    assert (slots, positions, replaced) == (len(LENGTHS), CONFIG.max_position_embeddings, 0)
    assert target.cache.nbytes == target.cache.batch_nbytes(LENGTHS), "memory is that of the sequences all the same"
    assert torch.isfinite(rows).all()


@linux
def test_where_addresses_are_counted_buffers_grow_and_say_the_same(free, monkeypatch):
    _, expected = read(lean())
    monkeypatch.setattr(pages, "_unlimited", lambda: False)
    target = lean()
    _, rows = read(target)
    assert target.cache.extent[2] > 0, "they were copied"
    assert target.cache.is_paged
    assert target.cache.nbytes == target.cache.batch_nbytes(LENGTHS)
    assert torch.equal(rows, expected)


@linux
def test_what_is_mapped_takes_no_memory(free):
    before = resident()
    cache = SlotCache(1 << 17)
    slot = cache.acquire()
    cache.claim([slot], [5])
    keys, values, _ = cache.buffers(0, 8, 128, torch.zeros(1))
    keys[slot, :, :5], values[slot, :, :5] = 1.0, 2.0
    assert keys.shape == values.shape == (64, 8, 1 << 17, 128)
    assert keys.nbytes > 30 << 30
    assert resident() - before < 4 << 20
    assert cache.nbytes == 2 * 8 * mmap.PAGESIZE
    cache.release(slot)
    assert cache.nbytes == 0
    assert not keys[slot, :, :5].any()


@linux
def test_a_limit_on_addresses_that_shows_late_is_no_error(free, monkeypatch):
    """The first layers are mapped, then the system refuses: the others take what they need."""
    expected = read(lean())[1]
    made = []

    class Limited(Buffer):
        def __init__(self, shape, like, *, mapped=False):
            made.append(mapped)
            if mapped and sum(made) > 2:
                raise OSError("Cannot allocate memory")
            super().__init__(shape, like, mapped=mapped)

    monkeypatch.setattr(slot_cache, "Buffer", Limited)
    target = lean()
    assert torch.equal(read(target)[1], expected)
    assert made[:3] == [True, True, True]
    assert not any(made[3:])


@linux
def test_more_slots_and_positions_than_were_mapped_are_copied_to(free, monkeypatch):
    _, expected = read(lean())
    monkeypatch.setattr(slot_cache, "_MAPPED", (2, 512))
    target = lean()
    sessions, rows = read(target)
    assert torch.equal(rows, expected)
    assert target.cache.extent[2] > 0
    for session in sessions:
        session.close()
    assert target.cache.nbytes == 0


@linux
@pytest.mark.parametrize("where", ["free", "counted"])
def test_a_copy_takes_what_was_written_and_goes_on_alike(where, request):
    request.getfixturevalue(where)
    target = lean()
    sessions, _ = read(target)
    copied = copy.deepcopy((target, sessions))
    for buffer in copied[0].cache._buffers():
        assert buffer.shape[:1] + buffer.shape[2:3] == (len(LENGTHS), max(LENGTHS))
    for made, (session, *_) in ((target, sessions), copied):
        rows = made.forward([Feed(session, [5, 6, 7])])[0].logits
        if made is target:
            expected = rows
    assert torch.allclose(rows, expected, atol=1e-5)
    other = target.forward([Feed(sessions[1], [9])])[0].logits
    assert torch.allclose(copied[0].forward([Feed(copied[1][1], [9])])[0].logits, other, atol=1e-5)


def test_addresses_are_not_free_under_a_limit_or_a_strict_policy(monkeypatch, tmp_path):
    policy = tmp_path / "overcommit_memory"
    monkeypatch.setattr(pages, "_POLICY", policy)
    monkeypatch.setattr(pages.sys, "platform", "linux")
    found = {}
    for said, limit in (("0", resource.RLIM_INFINITY), ("2", resource.RLIM_INFINITY), ("0", 1 << 34), (None, -1)):
        policy.unlink(missing_ok=True)
        if said is not None:
            policy.write_text(f"{said}\n", encoding="ascii")
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        pages._unlimited.cache_clear()
        found[said, limit] = addresses_are_free(CPU)
    pages._unlimited.cache_clear()
    assert found == {
        ("0", resource.RLIM_INFINITY): True,
        ("2", resource.RLIM_INFINITY): False,
        ("0", 1 << 34): False,
        (None, -1): False,
    }
    assert not addresses_are_free(torch.device("cuda"))
