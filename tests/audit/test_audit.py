"""Audits fail wrong rules, pass right ones, and state the power of their tests."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import transformers
from typer.testing import CliRunner

import draftproof.audit.adapters
import draftproof.audit.check
import draftproof.audit.rules
from draftproof.audit.check import RuleCheckOptions, load_rule
from draftproof.audit.distributions import SharedRng, all_drafts, as_paths, compare, complete, verdicts, verdicts_alone
from draftproof.audit.rules import IN_ENGINE, all_rules, count_lines
from draftproof.audit.statistics import (
    chi_square_survival,
    chi_square_test,
    needed_noncentrality,
    noncentral_survival,
    pooled,
)
from draftproof.audit.suite import CONTEXTS, ToyPair, suite
from draftproof.cli import app
from draftproof.engine.verifier_parts import LOSSY, VERIFIERS
from draftproof.functional import block_verify, spectr_verify, token_verify
from draftproof.testing import total_variation
from type_checks import checks_off

FEW = ("trap", "zeros", "disjoint", "one-hot p")
RULES = '''
import torch
from draftproof.functional import ChainVerdict, block_verify, trie_block_verify
from draftproof.functional.chain import block_acceptance, residual_weights


class Own:
    def bernoulli(self, prob):
        return torch.rand_like(prob) < prob

    def categorical(self, weights):
        return torch.multinomial(weights.reshape(-1, weights.shape[-1]), 1).reshape(weights.shape[:-1])


def right(tokens, q, p, *, rng):
    return block_verify(tokens, q, p, rng=rng)


def right_path(tokens, q, p, *, rng):
    return trie_block_verify(tokens, q, p, rng=rng)


def residual(tokens, q, p, *, rng):
    """Block verification with token verification's residual."""
    rows, n = tokens.shape
    _, h = block_acceptance(tokens, q, p, torch.full((rows,), n))
    kept = (rng.bernoulli(h) * torch.arange(1, n + 1)).amax(-1)
    at, place = torch.arange(rows), kept.clamp(max=n - 1)
    left = residual_weights(p[at, kept], q[at, place], tokens[at, place], torch.ones(rows))
    return kept, rng.categorical(torch.where((kept < n).unsqueeze(-1), left, p[at, kept]))


def always(tokens, q, p, *, rng):
    return torch.full_like(tokens[:, 0], tokens.shape[1]), rng.categorical(p[:, -1])


def own(tokens, q, p):
    return block_verify(tokens, q, p, rng=Own())


def own_wrong(tokens, q, p):
    return residual(tokens, q, p, rng=Own())


def too_many(tokens, q, p, *, rng):
    return torch.full_like(tokens[:, 0], 9), rng.categorical(p[:, -1])


def fragile(tokens, q, p, *, rng):
    if (q == 0).any():
        raise ZeroDivisionError("q holds a zero")
    return block_verify(tokens, q, p, rng=rng)


def both(tokens, q, p, *, rng):
    torch_says, rng_says = torch.rand(()) < 0.5, block_verify(tokens, q, p, rng=rng)
    if torch_says:
        rng.bernoulli(torch.tensor([0.5]))
    return rng_says


def three(tokens, q, p):
    return tokens, q, p


number = 3
'''


@pytest.fixture(autouse=True)
def few_pairs(monkeypatch):
    """A part of the suite."""
    for module in (draftproof.audit.rules, draftproof.audit.check, draftproof.audit.adapters):
        monkeypatch.setattr(module, "suite", lambda **_: [pair for pair in suite() if pair.name in FEW])


@pytest.fixture
def unchecked():
    """No shape checks: they take five times as long as the rest."""
    with checks_off():
        yield


@pytest.fixture
def rules_file(tmp_path, monkeypatch):
    (tmp_path / "audited_rules.py").write_text(RULES)
    monkeypatch.syspath_prepend(tmp_path)
    yield "audited_rules"
    sys.modules.pop("audited_rules", None)


def run(*args, code=0):
    result = CliRunner().invoke(app, ["audit", *args], prog_name="draftproof")
    assert result.exit_code == code, result.output
    return result


def objects(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


# --- our rules -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("in_engine", [IN_ENGINE[:1], pytest.param(IN_ENGINE, marks=pytest.mark.slow)], ids=len)
def test_every_rule_identity_and_ordering_holds(in_engine, monkeypatch):
    monkeypatch.setattr(draftproof.audit.rules, "IN_ENGINE", in_engine)
    found = objects(run("rules", "--json"))
    assert len(found) == count_lines()
    for line in found:
        lossy = line["kind"] == "rule" and not line["lossless"]
        assert line["verdict"] == ("lossy" if lossy else "ok"), line
    rules = {line["rule"]: line for line in found if line["kind"] == "rule"}
    assert set(VERIFIERS) <= set(rules)
    assert {name for name, line in rules.items() if not line["lossless"]} == set(LOSSY)
    assert all(line["total_variation"] < 1e-12 for name, line in rules.items() if line["lossless"] and name != "otm")
    assert all(line["total_variation"] > 0.01 for line in rules.values() if not line["lossless"])
    assert rules["token"]["against_token"] == 1
    assert rules["greedy_block"]["of_optimum"] == pytest.approx(1)
    assert all(0 < line["of_optimum"] <= 1 + 1e-9 for line in rules.values() if line["lossless"])


def test_a_broken_rule_fails_with_exit_code_1(monkeypatch, rules_file):
    broken = as_paths(__import__(rules_file).residual)

    def rules():
        found = all_rules()
        found["block"] = replace(found["block"], verify=lambda *tensors, rng, **_: broken(*tensors, rng=rng))
        return found

    monkeypatch.setattr(draftproof.audit.rules, "all_rules", rules)
    shown = run("rules", "--rule", "token", "--rule", "block", code=1).stdout.splitlines()
    assert shown[1].split()[0] == "token"
    assert shown[1].endswith("ok")
    assert "trap" in shown[2]
    assert shown[2].endswith("FAIL")


def test_an_unknown_rule_is_one_line():
    message = run("rules", "--rule", "nonsense", code=1).stderr
    assert message.startswith("draftproof: error: rule: expected one of token, block")
    assert message.count("\n") == 1


@pytest.mark.slow
def test_the_whole_table_in_a_separate_process():
    command = [sys.executable, "-c", "from draftproof.cli import main; main()", "audit", "rules"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout


# --- the user's rules ------------------------------------------------------------------------------------------------


@pytest.mark.grid(1)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("name", "kind"), [("right", "chain"), ("right_path", "path")])
def test_a_right_rule_passes(rules_file, name, kind):
    shown = run(f"{rules_file}:{name}").stdout
    assert f"a {kind} rule, enumerated" in shown
    assert shown.splitlines()[-1] == "ok: the target's distribution, to a total variation below 1e-12."


@pytest.mark.parametrize("name", ["residual", "always"])
def test_a_wrong_rule_fails_with_its_worst_cell(rules_file, name):
    result = objects(run("check", f"{rules_file}:{name}", "--json", code=1))[-1]
    cell = result["worst_cell"]
    assert (result["verdict"], result["method"]) == ("FAIL", "enumeration")
    assert result["worst_model"] == ("trap" if name == "residual" else "disjoint")
    assert abs(cell["found"] - cell["expected"]) > 0.01
    assert len(cell["outcome"]) == 4
    assert result["total_variation"] >= abs(cell["found"] - cell["expected"]) - 1e-12
    last = run("check", f"{rules_file}:{name}", code=1).stdout.splitlines()[-1]
    assert last.startswith("FAIL: total variation")
    assert "instead of" in last


@pytest.mark.slow
def test_a_rule_with_its_own_randomness_is_sampled(rules_file):
    shown = run(f"{rules_file}:own", "--samples", "20000").stdout
    assert "sampled 20000 times on each model" in shown
    result = objects(run("check", f"{rules_file}:own_wrong", "--samples", "20000", "--json", code=1))[-1]
    assert (result["method"], result["worst_model"], result["verdict"]) == ("statistics", "trap", "FAIL")
    assert result["false_alarm_rate"] == 0.01
    assert result["power"] == 0.99
    assert 0.01 < result["detectable"] < 0.05
    assert "detected with probability 0.99" in run(f"{rules_file}:own_wrong", "--samples", "20000", code=1).stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_many", "it returned accepted 9, not 0 to 3"),
        ("fragile", "on zeros it raised ZeroDivisionError: q holds a zero"),
    ],
)
def test_failures_of_a_rule_are_reported(rules_file, name, message):
    assert message in run(f"{rules_file}:{name}", code=1).stdout


def test_a_rule_with_further_randomness_does_not_pass(rules_file):
    assert "is not a function of its rng" in run(f"{rules_file}:both", code=1).stdout


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere.at.all:rule", "cannot import nowhere.at.all:rule: ModuleNotFoundError"),
        ("audited_rules:missing", "has no attribute 'missing'"),
        ("audited_rules:number", "expected a function, got one of type int"),
        ("audited_rules:three", "has another signature: as rule(tokens [B, n]"),
        ("audited_rules:", "expected package.module:function"),
    ],
)
@pytest.mark.usefixtures("rules_file")
def test_bad_targets_are_one_line(target, message):
    result = run(target, code=1)
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--kind", "tree"], 2, "expected chain or path"),
        (["--kind", "path"], 1, "another signature"),
        (["--samples", "10"], 1, "expected 1000 or more"),
        (["--alpha", "2"], 1, "between 0 and 1"),
    ],
)
def test_bad_options_are_one_line(rules_file, options, code, message):
    shown = run("check", f"{rules_file}:own", *options, code=code).stderr
    assert message in shown
    assert shown.count("\n") == 1


def test_the_audited_rule_leaves_the_global_generator_alone(rules_file):
    before = torch.get_rng_state()
    list(draftproof.audit.check.check(load_rule(f"{rules_file}:own"), RuleCheckOptions(samples=1000)))
    assert torch.equal(torch.get_rng_state(), before)


# --- other packages --------------------------------------------------------------------------------------------------

RULE = ("--only", "transformers rule")


def test_an_unknown_audit_is_one_line():
    message = run("packages", "--only", "x", code=1).stderr
    assert message.startswith("draftproof: error: --only: expected the beginning of one of transformers rule, ")


def test_transformers_is_audited_with_its_version():
    report, *_ = objects(run("packages", *RULE, "--json"))
    assert report["version"] == transformers.__version__
    assert report["status"] == "ok"  # as of 5.23
    assert {line["method"] for line in report["float64"]} == {"enumeration"}
    assert max(line["total_variation"] for line in report["float64"]) < 1e-12
    assert max(line["total_variation"] for line in report["float32"]) < 1e-6
    assert transformers.__version__ in run("packages", *RULE).stdout.splitlines()[0]
    assert torch.rand_like(torch.zeros(3)).shape == (3,)


def test_a_wrong_rule_of_another_package_fails(monkeypatch):
    from transformers.generation import utils

    whole = utils._speculative_sampling

    def lossy(*args):
        return whole(*args, assistant_ensemble_weight=0.5)

    monkeypatch.setattr(utils, "_speculative_sampling", lossy)
    report, *_ = objects(run("packages", *RULE, "--json", code=1))
    assert report["status"] == "FAIL"


def test_others_is_the_old_name_of_packages_and_warns(monkeypatch, caplog):
    monkeypatch.setattr(draftproof.audit.adapters, "ADAPTERS", {})
    assert not objects(run("others", "--json"))
    assert "audit others is now audit packages" in caplog.text


def test_a_package_that_is_missing_or_has_moved_is_reported(monkeypatch):
    from transformers.generation import utils

    monkeypatch.delattr(utils, "_speculative_sampling")
    assert "not audited: " in run("packages", *RULE).stdout

    def missing(name):
        raise draftproof.audit.adapters.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(draftproof.audit.adapters.importlib.metadata, "version", missing)
    assert run("packages").stdout.endswith("not installed\n")


# --- parts of audits -------------------------------------------------------------------------------------------------


def test_the_two_enumerations_agree():
    pair = suite()[2]
    for rule, chains in ((as_paths(token_verify), 1), (as_paths(block_verify), 1), (spectr_verify, 2)):
        drafts = all_drafts(pair, chains, 1 if chains > 1 else 2)
        alone, lost = verdicts_alone(rule, drafts)
        assert not lost
        assert torch.allclose(verdicts(rule, drafts), alone, atol=1e-14)
        assert float(alone.sum()) == pytest.approx(1)


def test_a_rule_that_ignores_the_draft_has_the_targets_distribution():
    pair = suite()[0]
    drafts = all_drafts(pair, 1, 2)
    rule = as_paths(lambda tokens, q, p, *, rng: (torch.zeros_like(tokens[:, 0]), rng.categorical(p[:, 0])))  # noqa: ARG005
    found = compare(pair, drafts, verdicts(rule, drafts))
    assert found.distance < 1e-15
    assert found.accepted == 0


@pytest.mark.parametrize("pair", suite(full=True), ids=lambda pair: pair.name)
def test_the_suite_is_made_of_distributions(pair):
    assert isinstance(pair, ToyPair)
    for row in (model(context) for model in (pair.p, pair.q) for context in CONTEXTS):
        assert float(row.sum()) == pytest.approx(1, abs=1e-14)
        assert (row >= 0).all()
    assert total_variation(complete(pair, {(): 1.0}, 2), complete(pair, {(): 1.0}, 2)) == 0


def test_shared_choices_refuse_values_that_are_no_probabilities():
    for call in (
        lambda rng: rng.bernoulli(torch.tensor([1.5])),
        lambda rng: rng.bernoulli(torch.tensor([math.nan])),
        lambda rng: rng.categorical(torch.tensor([[0.0, 0.0]])),
        lambda rng: rng.categorical(torch.tensor([[0.5, -0.5]])),
    ):
        with pytest.raises(ValueError, match=r"a draw from|probability of a decision"):
            call(SharedRng((), 1))


def test_the_chi_square_functions_against_scipy():
    stats = pytest.importorskip("scipy.stats")
    for x, df, strength in ((3.0, 2, 1.0), (40.0, 26, 70.0), (60.0, 26, 30.0)):
        assert chi_square_survival(x, df) == pytest.approx(stats.chi2.sf(x, df), rel=1e-9)
        assert noncentral_survival(x, df, strength) == pytest.approx(stats.ncx2.sf(x, df, strength), rel=1e-6)
    strength = needed_noncentrality(26, 0.001, 0.99)
    assert stats.ncx2.sf(stats.chi2.isf(0.001, 26), 26, strength) == pytest.approx(0.99, abs=1e-6)


def test_the_test_has_the_power_it_states():
    distribution = {0: 0.5, 1: 0.3, 2: 0.2}
    right = chi_square_test({0: 5000, 1: 3000, 2: 2000}, distribution, level=0.01)
    assert right.p_value == pytest.approx(1)
    gen, off, detected = torch.Generator().manual_seed(0), right.detectable, 0
    wrong = torch.tensor([0.5 - off, 0.3 + off, 0.2])
    for _ in range(200):
        counts = torch.multinomial(wrong, 10_000, replacement=True, generator=gen).bincount(minlength=3).tolist()
        detected += chi_square_test(dict(enumerate(counts)), distribution, level=0.01).p_value <= 0.01
    assert detected >= 193  # 198 expected; fewer than 193 has probability 0.002


def test_an_impossible_outcome_decides_and_rare_outcomes_are_pooled():
    assert chi_square_test({0: 999, 1: 1}, {0: 1.0}, level=0.01).p_value == 0
    assert chi_square_test({0: 1000}, {0: 1.0}, level=0.01).p_value == 1
    cells, share = pooled({0: 1.0, 1: 2.0, 2: 97.0, 3: 900.0}, {2: 100, 3: 900})
    assert cells == [(100.0, 100), (900.0, 900)]
    assert share == pytest.approx(0.1)
