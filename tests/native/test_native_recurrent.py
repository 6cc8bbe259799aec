"""The delta rule and state spaces in C are their formulas, beside float64, and a row's bits depend on that row only."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from support.native_levels import OPERATIONS, drawn

pytestmark = pytest.mark.usefixtures("level")
FLOAT = torch.float32
SHAPES = [  # rows, tokens, key heads, heads, dim, size
    (1, 1, 1, 1, 16, 16),
    (2, 5, 2, 4, 128, 128),
    (3, 3, 1, 3, 33, 50),
    (1, 20, 4, 4, 7, 5),
    (1, 2, 2, 2, 256, 90),
]


def rule(*inputs, **options):
    return OPERATIONS[FLOAT].delta_rule(*inputs, **options)


def inputs(shape, channels=False):
    """Queries, keys, values, decays, betas and a state."""
    rows, tokens, key_heads, heads, dim, size = shape
    narrow, wide = (rows, tokens, key_heads, dim), (rows, tokens, heads)
    q, k, v, g, beta, state = (
        drawn(seed, *each, dtype=FLOAT)
        for seed, each in enumerate(
            (narrow, narrow, (*wide, size), (*wide, dim) if channels else wide, wide, (rows, heads, dim, size))
        )
    )
    return q, k, v, -g.abs(), beta.sigmoid(), state


def formula(q, k, v, g, beta, state, *, unit=True):
    """Outputs and the last state, token by token in float64."""
    share = v.shape[2] // k.shape[2]
    q, k, v, g, beta = (each.double() for each in (q, k, v, g, beta))
    q, k = (each.repeat_interleave(share, dim=2) for each in (q, k))
    if unit:
        q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    g = g.unsqueeze(-1) if g.dim() == 3 else g
    state = torch.zeros(*k.shape[::2], k.shape[3], v.shape[3]).double() if state is None else state.double()
    out = []
    for t in range(k.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1)
        change = (v[:, t] - torch.einsum("rhds,rhd->rhs", state, k[:, t])) * beta[:, t].unsqueeze(-1)
        state = state + torch.einsum("rhd,rhs->rhds", k[:, t], change)
        out.append(torch.einsum("rhds,rhd->rhs", state, q[:, t]) / math.sqrt(k.shape[3]))
    return torch.stack(out, 1), state


def near(found, expected):
    return all(
        torch.allclose(one.double(), two, rtol=1e-4, atol=1e-4) for one, two in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_formula(shape, channels):
    given = inputs(shape, channels)
    assert near(rule(*given), formula(*given))
    assert near(rule(*given[:-1]), formula(*given[:-1], None))
    for number in range(3, 6):  # the control: another decay, beta or state is seen
        other = [each * 1.1 if place == number else each for place, each in enumerate(given)]
        assert not near(rule(*given), formula(*other))


def test_keys_of_any_length():
    q, k, v, g, beta, state = inputs((2, 4, 2, 2, 24, 18))
    k = 0.2 * k
    assert near(rule(q, k, v, g, beta, state, unit=False), formula(q, k, v, g, beta, state, unit=False))
    assert not near(rule(q, k, v, g, beta, state), formula(q, k, v, g, beta, state, unit=False))


@pytest.mark.parametrize("shape", SHAPES)
def test_without_betas_it_is_a_state_space(shape):
    q, k, v, g, _, state = inputs(shape)
    share = v.shape[2] // k.shape[2]
    keys, queries = (each.double().repeat_interleave(share, dim=2) for each in (k, q))
    end, out = state.double(), []
    for t in range(shape[1]):
        end = end * g[:, t].double().exp()[..., None, None] + torch.einsum(
            "rhd,rhs->rhds", keys[:, t], v[:, t].double()
        )
        out.append(torch.einsum("rhds,rhd->rhs", end, queries[:, t]))
    expected = torch.stack(out, 1), end
    assert near(rule(q, k, v, g, None, state, unit=False), expected)
    for number in range(5):  # the control: another input is seen
        given = [each * 1.1 if place == number else each for place, each in enumerate((q, k, v, g, state))]
        assert not near(rule(*given[:4], None, given[4], unit=False), expected)
    pieces = [rule(*(each[:, :1] for each in (q, k, v, g)), None, state, unit=False)]
    pieces.append(rule(*(each[:, 1:] for each in (q, k, v, g)), None, pieces[0][1], unit=False))
    whole = rule(q, k, v, g, None, state, unit=False)
    assert torch.equal(torch.cat([out for out, _ in pieces], 1), whole[0])
    assert torch.equal(pieces[1][1], whole[1])


@pytest.mark.parametrize("channels", [False, True])
def test_a_rows_bits_do_not_depend_on_the_batch_the_pieces_or_the_threads(channels):
    given = inputs((3, 6, 2, 4, 70, 45), channels)
    out, end = rule(*given)
    alone = rule(*(each[1:2] for each in given))
    assert torch.equal(alone[0], out[1:2])
    assert torch.equal(alone[1], end[1:2])
    state, parts = given[-1], []
    for start, stop in ((0, 1), (1, 4), (4, 6)):
        part, state = rule(*(each[:, start:stop] for each in given[:-1]), state)
        parts.append(part)
    assert torch.equal(torch.cat(parts, 1), out)
    assert torch.equal(state, end)
    threads = torch.get_num_threads()
    try:
        for some in (1, 2, 3):
            torch.set_num_threads(some)
            assert all(torch.equal(one, two) for one, two in zip(rule(*given), (out, end), strict=True))
    finally:
        torch.set_num_threads(threads)


def test_the_state_before_is_left_as_it_was():
    given = inputs((1, 3, 1, 2, 20, 20))
    kept = given[-1].clone()
    rule(*given)
    assert torch.equal(given[-1], kept)


@pytest.mark.parametrize(
    ("place", "change"),
    [
        (0, lambda x: x[:, :, :, 1:]),
        (1, lambda x: F.pad(x, (0, 237))),
        (2, lambda x: x[:, 1:]),
        (3, lambda x: x[..., :1]),
        (4, lambda x: x[:, :, :1]),
        (5, lambda x: x[:, :1]),
    ],
)
def test_what_does_not_belong_together_is_refused(place, change):
    given = list(inputs((1, 3, 1, 2, 20, 20)))
    given[place] = change(given[place])
    with pytest.raises((ValueError, TypeError), match=r"expected|parameter"):  # the tests' own check of shapes, too
        rule(*given)
