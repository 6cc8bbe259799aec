"""`generate --compare`: pairs in alternating order, and a verdict only where the interval allows one."""

import pytest

from draftproof import Engine, SamplingParams
from draftproof.audit.compositions import PROMPT, toy_engine
from draftproof.bench.estimate import geometric_mean
from draftproof.cli import _compare
from draftproof.cli._compare import Comparison, TimedRun, compare, comparison
from draftproof.rng import CounterRoundRng


def made_up(*ratios, drafted=5, identical=None, dtype="float32"):
    """A comparison whose pairs have these speed-ups over 100 tokens a second."""
    pairs = [(TimedRun(100.0 * ratio, drafted), TimedRun(100.0, 0)) for ratio in ratios]
    return Comparison(pairs, 2.5, identical, dtype)


@pytest.mark.parametrize(
    ("ratios", "verdict", "words"),
    [
        ((1.5, 1.6, 1.55, 1.5, 1.6, 1.7), "faster", "faster than plain decoding: 1.57x its speed"),
        ((0.5, 0.6, 0.55, 0.5, 0.6, 0.5), "slower", "SLOWER than plain decoding: 0.54x its speed"),
        ((0.9, 1.1, 1.05, 1.0, 0.95, 1.02), "no clear difference", "no clear difference from plain decoding: 1.00x"),
        # Every single pair is faster, and the interval still contains 1: the pairs differ too much.
        ((1.01, 3.0, 1.05, 1.02, 2.5, 1.01), "no clear difference", "no clear difference"),
        ((1.4, 1.6), "no clear difference", "2 pairs in alternating order"),
        ((1.5, 1.5001), "faster", "2 pairs in alternating order"),
    ],
)
def test_a_verdict_needs_an_interval_without_1(ratios, verdict, words):
    found = made_up(*ratios)
    assert found.verdict == found.to_dict()["verdict"] == verdict
    lines = comparison(found)
    assert words in lines[0]
    assert "95% interval" in lines[0]
    assert "at best 2.50x" in lines[1]
    interval = geometric_mean(ratios)
    assert (found.speed_up.low, found.speed_up.high) == pytest.approx((interval.low, interval.high))


def test_json_has_the_interval_and_the_number_of_pairs():
    found = made_up(1.5, 1.6, 1.55, 1.5, 1.6, 1.7).to_dict()
    assert found["speed_up"] == pytest.approx((1.5 * 1.6 * 1.55 * 1.5 * 1.6 * 1.7) ** (1 / 6))
    assert 1 < found["speed_up_low"] < found["speed_up"] < found["speed_up_high"]
    assert (found["pairs"], found["confidence"], found["drafted_tokens"]) == (6, 0.95, 30)
    assert (found["plain_tokens_per_second"], found["speculative_tokens_per_second"]) == pytest.approx((100.0, 157.5))


def test_without_drafts_there_is_no_verdict_whatever_the_timings_say():
    found = made_up(*[2.0] * 6, drafted=0)
    assert found.to_dict()["verdict"] is None
    (line,) = comparison(found)
    assert "nothing was drafted" in line
    assert "faster" not in line
    assert "x its speed" not in line


@pytest.mark.parametrize(
    ("dtype", "words"), [("float32", "should not happen"), ("bfloat16", "round differently in bfloat16")]
)
def test_different_greedy_tokens_are_reported(dtype, words):
    lines = comparison(made_up(1.0, 1.0, identical=False, dtype=dtype))
    assert "DIFFER" in lines[-1]
    assert words in lines[-1]


class Clock:
    """Time that passes only while an engine generates."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def timed(monkeypatch):
    """Compares an engine with plain decoding on made-up time: the result, and the drafters in the order of calls."""

    def run(engine_seconds, plain_seconds):
        clock, calls, generate = Clock(), [], Engine.generate

        def slow(self, prompts, params, predictions=None):
            calls.append(self.drafter.name)
            clock.now += plain_seconds if self.drafter.name == "none" else engine_seconds
            return generate(self, prompts, params)

        engine = toy_engine("model", "fixed", "token", CounterRoundRng)
        params = [SamplingParams(temperature=0, max_tokens=4)]
        known = engine.generate([list(PROMPT)], params)
        monkeypatch.setattr(_compare, "time", clock)
        monkeypatch.setattr(Engine, "generate", slow)
        return compare(engine, [list(PROMPT)], params, known), calls

    return run


def test_the_order_alternates_from_pair_to_pair(timed):
    found, calls = timed(0.1, 0.2)
    reference, *rest = calls
    assert reference == "none"
    pairs = list(zip(rest[::2], rest[1::2], strict=True))
    assert pairs == [("model", "none"), ("none", "model")] * (len(pairs) // 2)
    assert len(pairs) == len(found.pairs)
    assert found.speed_up.value == pytest.approx(2.0)
    assert found.identical is True
    assert found.verdict == "faster"
    assert found.drafted > 0


@pytest.mark.parametrize(
    ("seconds", "pairs"),
    [
        (0.001, _compare.MOST),  # quick runs: as many as are useful
        (0.25, 8),  # until ENOUGH seconds have passed
        (5.0, _compare.FEWEST),
        (100.0, 2),  # very long ones
    ],
)
def test_the_number_of_pairs_depends_on_their_time_and_is_even(timed, seconds, pairs):
    found, _ = timed(seconds, seconds)
    assert len(found.pairs) == found.to_dict()["pairs"] == pairs
    assert pairs % 2 == 0
