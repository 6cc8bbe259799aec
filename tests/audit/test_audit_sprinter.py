"""SPRINTER (arXiv 2502.04557) with trained verifiers: Theorem 3.1 by enumeration, and a negative control."""

import itertools
import json

import pytest
from typer.testing import CliRunner

from draftproof.audit import sprinter
from draftproof.audit.sprinter import ORDER, VOCAB, audit_sprinter, first_token_distribution, trained
from draftproof.cli import audit as cli
from draftproof.sampling import SamplingParams
from draftproof.testing import TableModel
from draftproof.training.features import ModelPair
from type_checks import checks_off


@pytest.fixture(autouse=True)
def _fast():
    with checks_off():
        yield


@pytest.fixture(scope="module")
def lines():
    with checks_off():
        return list(audit_sprinter(1))


def test_the_enumerated_distribution_is_that_of_the_theorem_in_every_context(lines):
    assert len(lines) == 2
    for line in lines:
        assert line.contexts == VOCAB**ORDER
        assert line.exact, line


def test_verifiers_accept_some_tokens_and_reject_others(lines):
    for line in lines:
        assert 0 < line.passed < 1, line
        assert 0 < line.drift < 1, line


def test_one_rate_for_all_contexts_is_an_approximation(lines):
    """The theorem assumes independent decisions, which trained verifiers do not make; its prediction is close."""
    for line in lines:
        assert line.predicted == pytest.approx(line.drift, abs=0.1)
    assert any(abs(line.predicted - line.drift) > 1e-3 for line in lines)


def test_the_algorithm_read_literally_has_another_distribution():
    """Negative control: a token that the verifier rejects is redrawn even when the target accepts it."""
    draft = TableModel(VOCAB, 1000, order=ORDER, hidden=sprinter.WIDTH)
    pair = ModelPair(TableModel(VOCAB, 0, order=ORDER), draft, SamplingParams())
    head = trained(pair, depth=0, reads_draw=False, seed=0)
    far = []
    for context in itertools.product(range(VOCAB), repeat=ORDER):
        p, q, passed = sprinter._at(pair, head, context)
        residual = (p - q).clamp(min=0)
        literal = q * passed + (q * ~passed).sum() * residual / residual.sum()
        far.append(float((literal - first_token_distribution(pair, head, context)).abs().sum() / 2))
    assert max(far) > 0.05


def test_the_command_prints_a_table_and_fails_where_the_theorem_does_not_hold(lines, monkeypatch):
    monkeypatch.setattr(sprinter, "audit_sprinter", lambda pairs: iter(lines[: 2 * pairs]))
    good = CliRunner().invoke(cli.app, ["sprinter", "--pairs", "1"])
    assert good.exit_code == 0
    assert sum(line.endswith("ok") for line in good.stdout.splitlines()) == 2
    assert "FAIL" not in good.stdout
    (first, *_) = CliRunner().invoke(cli.app, ["sprinter", "--pairs", "1", "--json"]).stdout.splitlines()
    assert json.loads(first)["exact"] is True
    monkeypatch.setattr(sprinter, "EXACT", 0.0)
    assert CliRunner().invoke(cli.app, ["sprinter", "--pairs", "1"]).exit_code == 1
