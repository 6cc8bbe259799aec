"""Keys and values of 8 bits: near to what was rounded, and a position's numbers are its own."""

import math

import pytest
import torch

from draftproof.backends.cache import rounding
from draftproof.backends.cache.slot_cache import SlotCache, WritePlan
from support.native_levels import drawn

NAMES = {"keys": (rounding.rounded_keys, rounding.restored_keys), "values": (rounding.rounded, rounding.restored)}


@pytest.mark.parametrize(("around", "back"), NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("dim", [1, 5, 12, 64, 80, 128])
def test_what_is_restored_is_within_half_a_step(around, back, dim):
    x = drawn(dim, 3, 2, 7, dim, dtype=torch.float32)
    numbers, scales = around(x)
    restored = back(numbers, scales, torch.float32)
    step = scales * (1 if around is rounding.rounded else rounding.hadamard_size(dim) ** -0.5)
    slack = 0.5 if around is rounding.rounded else 0.5 * math.sqrt(rounding.hadamard_size(dim))
    assert ((restored - x).abs() <= (slack + 1e-3) * step).all()
    assert numbers.abs().amax(-1).eq(127).all()
    assert (restored - x).abs().max() > 0 or dim == 1


def test_the_matrix_is_its_own_inverse_up_to_its_size():
    for dim, size in ((1, 1), (12, 4), (64, 64), (80, 16), (96, 32)):
        assert rounding.hadamard_size(dim) == size
        x = drawn(dim, 5, dim, dtype=torch.float64)
        turned = rounding.hadamard(x)
        assert torch.allclose(rounding.hadamard(turned), size * x)
        assert torch.allclose(turned.norm(dim=-1), math.sqrt(size) * x.norm(dim=-1))


def test_a_large_number_costs_the_others_of_a_key_little():
    keys = drawn(1, 200, 64, dtype=torch.float32)
    keys[:, 9] += 60

    def off(around, back):
        return float((back(*around(keys), torch.float32) - keys).square().mean())

    assert off(*NAMES["keys"]) < off(*NAMES["values"]) / 4


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_not_hidden(wrong):
    x = drawn(3, 4, 2, 64, dtype=torch.float32)
    x[1, 0, 7] = wrong
    for around, back in NAMES.values():
        found = back(*around(x), torch.float32).isnan().all(-1)
        assert found[1, 0]
        assert found.sum() == 1


def test_zeros_and_numbers_near_zero_are_zeros():
    x = torch.zeros(2, 8)
    x[1] = 1e-38
    assert all(not back(*around(x), torch.float32).any() for around, back in NAMES.values())


def stored(passes, keys, values):
    """What a cache restores after some passes over two slots: pairs of slots and the positions that each writes."""
    cache = SlotCache(kept=torch.int8)
    for _ in range(2):
        cache.acquire()
    for slots, base, width in passes:
        cache.claim(slots, [base + width] * len(slots))
        plan = WritePlan(tuple(slots), (base,) * len(slots), (width,) * len(slots))
        at = list(slots), slice(None), slice(base, base + width)
        cache.write(0, plan, keys[at], values[at])
    return [each[:, :, : keys.shape[2]] for each in cache.buffers(0, keys.shape[1], keys.shape[3], keys)]


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared over a pass"])
def test_what_a_position_stores_does_not_depend_on_its_pass(shared, monkeypatch):
    """A scale that the positions of a pass share is seen."""
    keys, values = (drawn(seed, 2, 2, 9, 16, dtype=torch.float32) for seed in (1, 2))
    if shared:
        right = rounding.rounded

        def of_a_pass(x):
            scales = (x.abs().amax((0, 2, 3), keepdim=True) / 127).expand(*x.shape[:-1], 1)
            return (x / scales).round().to(torch.int8), scales

        monkeypatch.setattr(rounding, "rounded", of_a_pass)
        assert not torch.equal(right(keys)[0], of_a_pass(keys)[0])
    whole = stored([((0, 1), 0, 9)], keys, values)
    alone = stored([((slot,), place, 1) for place in range(9) for slot in (1, 0)], keys, values)
    pieces = stored([((1,), 0, 4), ((0, 1), 0, 6), ((0, 1), 6, 3)], keys, values)
    for other in (alone, pieces):
        assert all(torch.equal(*pair) for pair in zip(whole, other, strict=True)) is not shared


def test_slots_are_copied_moved_and_cleared_with_their_scales():
    keys, values = (drawn(seed, 1, 2, 9, 16, dtype=torch.float32) for seed in (1, 2))
    cache = SlotCache(kept=torch.int8)
    one = cache.acquire()
    cache.claim([one], [9])
    plan = WritePlan((one,), (0,), (9,))
    read = cache.write(0, plan, keys, values)

    def restored(slot, length):
        found = cache.buffers(0, 2, 16, keys)
        of_keys, of_values = found.scales[slot, :, :length].chunk(2)
        return (
            rounding.restored_keys(found.keys[slot, :, :length], of_keys, torch.float32),
            rounding.restored(found.values[slot, :, :length], of_values, torch.float32),
        )

    other = cache.acquire()
    cache.copy(one, other, 5)
    assert all(torch.equal(a, b[0, :, :5]) for a, b in zip(restored(other, 5), read, strict=True))
    cache.gather(one, 3, (5, 8))
    kept = [0, 1, 2, 5, 8]
    assert all(torch.equal(a, b[0, :, kept]) for a, b in zip(restored(one, 5), read, strict=True))
    cache.trim(one, 2)
    cache.release(other)
    found = cache.buffers(0, 2, 16, keys)
    assert all(not each[one, :, 2:].any() and not each[other].any() for each in found)
    assert all(each[one, :, :2].any() for each in found)


@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (2, 128), (3, 64)])
def test_a_long_sequence_takes_about_half_of_its_bytes_in_16_bits(heads, dim):
    def size(*, kept):
        cache = SlotCache(kept=kept)
        cache.claim([cache.acquire()], [8192])
        for layer in range(2):
            cache.buffers(layer, heads, dim, torch.zeros(1, dtype=torch.bfloat16))
        assert cache.nbytes == cache.sequence_nbytes(8192) == cache.batch_nbytes([8192])
        return cache.nbytes

    assert size(kept=torch.int8) / size(kept=None) == pytest.approx((dim + 4) / (2 * dim), rel=1e-3)
