"""Rooflines of passes, rounds and clusters against closed forms."""

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from draftproof.theory.lengths import iid_block_efficiency

SPEC = importlib.util.spec_from_file_location("scale_model", Path(__file__).parents[2] / "scripts" / "scale_model.py")
script = sys.modules[SPEC.name] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)

MACHINE = script.Machine("machine", operations=1e14, bandwidth=1e12, memory=64e9, link=1e11, sum=2e-6)
MODEL = script.Model("model", 8e9, layers=32, width=4096, cached=65536, queries=4096)
BALANCED = MACHINE.ridge * MODEL.bytes / 2  # tokens of a pass that take as long to compute as the weights to read


def test_a_small_pass_takes_as_long_as_its_weights_and_keys_are_read():
    assert script.pass_seconds(MACHINE, MODEL, 1, context=999) == pytest.approx((16e9 + 1000 * 65536 * 2) / 1e12)
    reached = replace(MACHINE, reached=(0.5, 0.25), start=0.0001)
    assert script.pass_seconds(reached, MODEL, 1, context=999) == pytest.approx(
        0.0032 + 4 * (16e9 + 1000 * 65536 * 2) / 1e12
    )


def test_a_large_pass_takes_as_long_as_its_arithmetic():
    tokens = 20 * 60
    attention = 4 * 32 * 4096 * 60 * tokens
    assert script.pass_seconds(MACHINE, MODEL, 20, 60) == pytest.approx((2 * 8e9 * tokens + attention) / 1e14)


def test_both_times_are_equal_at_the_ridge():
    bare = replace(MODEL, cached=0, queries=0)
    assert BALANCED == 100
    assert script.pass_seconds(MACHINE, bare, 100) == pytest.approx(16e9 / 1e12)
    assert script.pass_seconds(MACHINE, bare, 50, 4) == pytest.approx(2 * 16e9 / 1e12)


@pytest.mark.parametrize("devices", [2, 8])
def test_tensor_parallelism_divides_both_times_and_adds_two_sums_a_layer(devices):
    sums = 64 * (2e-6 + 2 * (devices - 1) / devices * 3 * 4096 * 2 / 1e11)
    expected = script.pass_seconds(replace(MACHINE, link=0.0), MODEL, 3, context=500) / devices + sums
    assert script.pass_seconds(MACHINE, MODEL, 3, context=500, devices=devices) == pytest.approx(expected)


def test_a_machine_without_a_link_has_one_device():
    with pytest.raises(ValueError, match=r"devices: expected 1, as .*machine has no link to others"):
        script.pass_seconds(replace(MACHINE, link=0.0), MODEL, 1, devices=2)


def test_where_memory_is_the_bound_the_gain_is_that_of_the_paper():
    small = replace(MODEL.first(1 / 8), cached=0)
    setting, how = script.Setting(MACHINE, replace(MODEL, cached=0, queries=0)), script.Speculation(small, 0.8)
    for drafted in (1, 4, 10):
        expected = iid_block_efficiency(0.8, drafted) / (1 + drafted / 8)  # Leviathan et al. 2023, theorem 3.8
        assert setting.speed(1, how, drafted) / setting.speed(1) == pytest.approx(expected)


def test_where_arithmetic_is_the_bound_nothing_is_drafted():
    setting, free = script.Setting(MACHINE, replace(MODEL, cached=0, queries=0)), script.Speculation(None, 0.9)
    rows = 10 * round(BALANCED)
    for drafted in (1, 4):
        expected = iid_block_efficiency(0.9, drafted) / (drafted + 1)
        assert setting.speed(rows, free, drafted) / setting.speed(rows) == pytest.approx(expected)
    assert setting.best(rows, free) == (0, 1.0)


def test_the_best_length_is_the_best_of_all():
    setting, how = script.Setting(MACHINE, MODEL, 1000), script.Speculation(MODEL.first(1 / 32), 0.7, longest=8)
    length, gain = setting.best(16, how)
    speeds = [setting.speed(16, how, drafted) for drafted in range(9)]
    assert gain == max(speeds) / speeds[0]
    assert speeds[length] == max(speeds)


def test_it_is_turned_off_where_the_closed_form_says():
    setting, how = (
        script.Setting(MACHINE, replace(MODEL, cached=0, queries=0)),
        script.Speculation(None, 0.6, longest=1),
    )
    # between half the balance and the balance, a round of two tokens computes, and a plain one reads weights
    expected = math.ceil(1.6 * BALANCED / (2 * script.GAIN))
    assert BALANCED / 2 < expected < BALANCED
    assert script.turned_off_at(lambda rows: setting.best(rows, how)[1]) == expected


def test_with_long_contexts_it_is_never_turned_off():
    setting, how = script.Setting(MACHINE, MODEL, 30_000), script.Speculation(None, 0.6, longest=4)
    assert script.turned_off_at(lambda rows: setting.best(rows, how)[1]) is None


def test_sampling_takes_time_for_each_token_of_a_pass():
    setting = script.Setting(replace(MACHINE, row=1e-3), MODEL)
    assert setting.round_seconds(4, None, 4) == pytest.approx(script.pass_seconds(MACHINE, MODEL, 4, 5) + 0.02)


def test_weights_and_keys_must_fit():
    setting = script.Setting(MACHINE, MODEL, 1000)
    own = 0.9 * 64e9 - 16e9
    assert setting.capacity() == int(own // (1000 * 65536 * 2))
    draft = MODEL.first(1 / 4)
    assert setting.capacity(draft) == int((own - 4e9) // (1000 * (65536 + 16384) * 2))
    assert replace(setting, devices=2).capacity() == int((2 * 0.9 * 64e9 - 16e9) // (1000 * 65536 * 2))
    assert replace(setting, machine=replace(MACHINE, memory=16e9)).capacity() == 0


def test_quantized_weights_are_read_faster_and_multiplied_as_fast():
    assert MODEL.quantized(4).size == pytest.approx(8e9 * 5 / 8)
    bare = replace(MODEL, cached=0, queries=0)
    assert script.pass_seconds(MACHINE, bare.quantized(4), 1) == pytest.approx(
        5 / 16 * script.pass_seconds(MACHINE, bare, 1)
    )
    assert script.pass_seconds(MACHINE, bare.quantized(4), 1000) == script.pass_seconds(MACHINE, bare, 1000)


def test_a_price_is_that_of_all_devices_for_the_time_of_a_million_tokens():
    one = script.Cluster(replicas=2, devices=4, rows=8, seconds=0.01, speed=1600.0, gain=1.5, length=3)
    assert one.price(3.0) == pytest.approx(8 * 3.0 * (1e6 / 1600) / 3600)


def test_layouts_divide_devices_and_requests():
    setting, how = script.Setting(MACHINE, MODEL, 1000), script.Speculation(MODEL.first(1 / 32), 0.7)
    found = script.layouts(setting, how, 8, 64, (1, 2, 3, 4, 8))
    assert [(one.replicas, one.devices, one.rows) for one in found] == [(8, 1, 8), (4, 2, 16), (2, 4, 32), (1, 8, 64)]
    for one in found:
        alone = replace(setting, devices=one.devices)
        assert one.speed == pytest.approx(one.replicas * alone.speed(one.rows, how, one.length))
        assert one.speed == pytest.approx(one.gain * one.replicas * alone.speed(one.rows))
        assert one.seconds == pytest.approx(64 / one.speed)
    cramped = replace(setting, machine=replace(MACHINE, memory=12e9))
    assert [one.devices for one in script.layouts(cramped, how, 8, 64, (1, 2, 4, 8))] == [2, 4, 8]
    assert [one.devices for one in script.layouts(setting, how, 8, 3, (1, 2, 4, 8))] == [
        4,
        8,
    ]  # no replica without a request
    assert [one.seconds for one in found] == sorted((one.seconds for one in found), reverse=True)
