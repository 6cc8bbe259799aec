"""The fast rules make the same decisions as the reference."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftproof import reference
from draftproof.functional.chain import block_acceptance, block_verify, log_ratios, token_verify


class Scripted:
    """An Rng whose draws come from given uniforms."""

    def __init__(self, uniforms, last):
        self.uniforms, self.last = torch.tensor([uniforms], dtype=torch.float64), last

    def bernoulli(self, prob):
        return self.uniforms[:, : prob.shape[1]] < prob

    def categorical(self, weights):
        return torch.tensor([reference.draw(row, lambda: self.last) for row in weights.tolist()])


def distribution(source, vocab):
    weights = [source.random() ** 3 * (source.random() < 0.8) for _ in range(vocab)]
    weights[source.randrange(vocab)] += 0.1
    return [weight / sum(weights) for weight in weights]


@st.composite
def rounds(draw):
    """A drafted chain with q and p; some rows of p are equal to q."""
    source = random.Random(draw(st.integers(0, 2**32)))
    n, vocab = draw(st.integers(1, 6)), draw(st.integers(2, 7))
    q = [distribution(source, vocab) for _ in range(n)]
    p = [row if source.random() < 0.2 else distribution(source, vocab) for row in q] + [distribution(source, vocab)]
    tokens = [source.choices(range(vocab), row)[0] for row in q]
    return tokens, q, p, [source.random() for _ in range(n)], source.random()


def tensors(tokens, q, p):
    return torch.tensor([tokens]), torch.tensor([q], dtype=torch.float64), torch.tensor([p], dtype=torch.float64)


@given(rounds())
def test_acceptance_probabilities_are_the_references(drawn):
    tokens, q, p, *_ = drawn
    running, h = block_acceptance(*tensors(tokens, q, p), torch.tensor([len(tokens)]))
    levels, passes = reference.block_acceptance(tokens, q, p)
    assert running[0].tolist() == pytest.approx(levels, abs=1e-12)
    # Where 1 - P is a rounding error (p = q), h is 0/0 and any value is right.
    for found, expected, level in zip(h[0].tolist(), passes, levels, strict=True):
        assert level > 1 - 1e-9 or found == pytest.approx(expected, abs=1e-9)
    ratios = log_ratios(*tensors(tokens, q, p)).exp().clamp(max=1)[0].tolist()
    assert ratios == pytest.approx(reference.token_acceptance(tokens, q, p), abs=1e-12)


@given(rounds())
def test_token_rule_decides_as_the_reference(drawn):
    tokens, q, p, uniforms, last = drawn
    found = token_verify(*tensors(tokens, q, p), rng=Scripted(uniforms, last))
    kept = int(found.accepted)
    script = iter([*uniforms[: min(kept + 1, len(tokens))], last])
    assert (kept, int(found.token)) == reference.token_verify(tokens, q, p, lambda: next(script))


@given(rounds())
def test_block_rule_decides_as_the_reference(drawn):
    tokens, q, p, uniforms, last = drawn
    found = block_verify(*tensors(tokens, q, p), rng=Scripted(uniforms, last))
    script = iter([*uniforms, last])
    assert (int(found.accepted), int(found.token)) == reference.block_verify(tokens, q, p, lambda: next(script))


def test_rows_of_a_ragged_batch_equal_rows_alone():
    source = random.Random(0)
    rows, n, vocab = 12, 5, 6
    q = torch.tensor([[distribution(source, vocab) for _ in range(n)] for _ in range(rows)], dtype=torch.float64)
    p = torch.tensor([[distribution(source, vocab) for _ in range(n + 1)] for _ in range(rows)], dtype=torch.float64)
    tokens = torch.multinomial(q.reshape(-1, vocab), 1).reshape(rows, n)
    lengths = torch.arange(rows) % (n + 1)
    running, h = block_acceptance(tokens, q, p, lengths)
    for row, size in enumerate(lengths.tolist()):
        cut = (tokens[row : row + 1, :size], q[row : row + 1, :size], p[row : row + 1, : size + 1])
        alone = block_acceptance(*cut, lengths[row : row + 1])
        assert torch.equal(alone[0][0], running[row, :size])
        assert torch.equal(alone[1][0], h[row, :size])
        assert not h[row, size:].any()


@pytest.mark.parametrize("rule", [token_verify, block_verify])
def test_point_masses_equal_their_one_hot_rows(rule):
    source = random.Random(1)
    for _ in range(50):
        p = torch.tensor([[distribution(source, 4) for _ in range(4)]], dtype=torch.float64)
        tokens = torch.tensor([[source.randrange(4) for _ in range(3)]])
        one_hot = torch.nn.functional.one_hot(tokens, 4).double()
        script = ([source.random() for _ in range(3)], source.random())
        found = [rule(tokens, q, p, rng=Scripted(*script)) for q in (None, one_hot)]
        assert found[0] == found[1]
