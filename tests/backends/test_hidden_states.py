"""Recorded states are those that were written last, whatever waits and whatever was taken back."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from draftproof.backends.hidden_states import HiddenStates

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 40), st.integers(1, 40)),
        st.tuples(st.just("read"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("move"), st.integers(0, 9), st.integers(1, 4)),
        st.tuples(st.just("trim"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("copy"), st.integers(0, 9), st.just(0)),
    ),
    max_size=60,
)


@given(STEPS)
def test_they_are_what_was_written_last(steps):
    states, expected, made = HiddenStates(), [], 0
    states.add(0, torch.zeros(1, 3))
    expected.append(0)
    for kind, back, size in steps:
        if kind == "add":
            start = max(len(expected) - back, 0)  # what was read after it was taken back
            rows = list(range(made + 1, made + 1 + size))
            made += size
            whole = torch.tensor([0, *rows, 0], dtype=torch.float32).unsqueeze(-1).expand(-1, 3).contiguous()
            states.add(start, whole[1:-1])  # a part of a pass
            expected[start:] = rows
        elif kind == "move":
            slots = list(range(max(len(expected) - 2 * size, 0), len(expected), 2))[:size]
            base = min(slots)
            states.move(base, slots)
            expected[base:] = [expected[slot] for slot in slots]
        else:
            del expected[max(len(expected) - back, 1) :]
            if kind == "trim":
                states.trim(len(expected))
            elif kind == "copy":
                before, states = states, states.copy(len(expected))
                before.add(0, torch.full((1, 3), -1.0))
        if kind == "read":
            assert states.first(len(expected))[:, 0].tolist() == expected
    assert states.first(len(expected))[:, 2].tolist() == expected
    assert states.nbytes >= 12 * len(expected)


def test_short_additions_wait_and_long_ones_do_not():
    states, one = HiddenStates(), torch.ones(1, 3)
    for place in range(32):
        states.add(place, one)
    assert states._written is None
    states.add(32, one)
    assert states._written is not None
    assert not states._waiting
    whole = torch.zeros(1000, 3)
    states.add(33, whole[5:6])
    assert not states._waiting, "a view would keep all of what the pass made"
