"""Recipes run end to end on the embedded pair, are resumed and not repeated, and give the same tables again."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftproof.cli import app
from draftproof.errors import UserError
from draftproof.provenance import KEY, header
from draftproof.reproduction import draft_samples, recipes
from draftproof.reproduction import experiments as experiments_module
from draftproof.reproduction import run as reproduce
from draftproof.reproduction.draft_samples import SamplePlan, fixed_lengths, round_sums, sample_drafts, stopped_lengths
from draftproof.reproduction.expected_accepted import CHAIN_RULES, TRIE_RULES, key
from draftproof.reproduction.experiments import SMALL, ExperimentProfile, Experiments
from draftproof.reproduction.recipes.base import Mark
from draftproof.reproduction.recipes.block_verification_v1 import block_level, token_level
from draftproof.reproduction.recipes.couplings import TOY_P, TOY_Q, toy_ccdf
from draftproof.reproduction.recipes.specdec_pp import exact_gain, shipped_head
from draftproof.reproduction.recipes.toys import constant
from draftproof.reproduction.run import PROFILES, RECIPES, without_times
from draftproof.stoppers.trained import LIMIT, Acceptance
from draftproof.theory.lengths import block_length, token_length
from draftproof.training.sweep import rates

TINY = ExperimentProfile("tiny", (SMALL,), prompts=4, seeds=1, tokens=8, places=4)
EXACT = [
    "block-verification-v1-figure2",
    "block-verification-figure3",
    "spectr-figure1",
    "spectr-figure2",
    "spectr-figure3",
    "sprinter-figure5",
    "sprinter-figure6",
]


@pytest.fixture(scope="module")
def experiments(tmp_path_factory):
    return Experiments(tmp_path_factory.mktemp("records"), TINY)


def test_exact_recipes_reproduce_every_cell(tmp_path):
    made = reproduce.reproduce(EXACT, tmp_path, TINY)
    for each in made:
        assert each["claims"], each["name"]
        assert {cell["mark"] for cell in each["cells"]} == {Mark.REPRODUCED}, each["name"]
        assert (tmp_path / f"{each['name']}.png").stat().st_size > 1000


def test_recipes_of_models_end_to_end(tmp_path):
    said = []
    names = ["block-verification-figure4", "block-verification-table4", "specdec-pp-table1"]
    made = reproduce.reproduce(names, tmp_path, TINY, notify=said.append)
    assert [each["name"] for each in made] == [
        "block-verification-figure4",
        "block-verification-table4",
        "specdec-pp-table1",
    ]
    report = (tmp_path / "reproduce.md").read_text(encoding="utf-8")
    for each in made:
        assert f"## {each['name']}: " in report
        paper = each["paper"]
        assert len(each["cells"]) == sum(x is not None for row in paper["rows"].values() for x in row)
    assert "| LM1B | 3.21" in report
    assert "embedded:target / embedded:draft" in report
    whole = json.loads((tmp_path / "reproduce.json").read_text(encoding="utf-8"))
    assert [each["name"] for each in whole["recipes"]] == names
    assert whole["profile"]["name"] == "tiny"
    assert all(each[KEY] == whole[KEY] for each in whole["recipes"])
    assert report.startswith("\n".join(["# The papers' tables and figures, reproduced", "", *header(whole[KEY])]))
    assert "turns: 4 compositions on embedded:target" in said


# What runs by default: the lightest recipe of each module, and what once ran in nobody's tests and had lost its names.
OFTEN = {
    "couplings": ["spectr-figure1"],
    "block_verification_v1": ["block-verification-v1-figure2"],
    "block_verification": ["block-verification-table5"],
    "spectr": ["spectr-table4"],
    "specdec_pp": ["specdec-pp-figure4"],
    "passes": ["specdec-pp-table2"],
    "heads": ["specdec-pp-table3"],
    "sprinter": ["sprinter-table2", "sprinter-table3"],
    "small_verifiers": ["sprinter-figure12"],
}


def test_recipes_of_every_module_run_often():
    modules = {
        path.stem for path in Path(recipes.__file__).parent.glob("*.py") if "\nRECIPES = " in path.read_text("utf-8")
    }
    assert set(OFTEN) == modules
    for module, names in OFTEN.items():
        assert set(names) <= {each.name for each in importlib.import_module(f"{recipes.__name__}.{module}").RECIPES}


@pytest.mark.parametrize("module", OFTEN)
def test_recipes_run(module, tmp_path, monkeypatch):
    monkeypatch.setattr(draft_samples, "STEPS", 10)
    made = reproduce.reproduce(OFTEN[module], tmp_path, TINY)
    assert sorted(each["name"] for each in made) == sorted(OFTEN[module])
    for each in made:
        assert each["cells"], each["name"]
        assert each["rows"], each["name"]


@pytest.mark.slow
def test_every_recipe_runs(tmp_path):
    made = reproduce.reproduce([], tmp_path, TINY)
    assert [each["name"] for each in made] == list(RECIPES)
    for each in made:
        assert each["cells"], each["name"]
        assert each["rows"], each["name"]


def test_a_second_run_measures_nothing_and_a_fresh_one_gives_the_same_tables(tmp_path, monkeypatch):
    names = ["block-verification-table4", "sprinter-table5"]
    first = reproduce.reproduce(names, tmp_path / "a", TINY)
    fresh = reproduce.reproduce(names, tmp_path / "b", TINY)
    assert without_times(first) == without_times(fresh)
    monkeypatch.setattr(Experiments, "_turns", None)  # measuring would raise
    monkeypatch.setattr(Experiments, "_places", None)
    assert reproduce.reproduce(names, tmp_path / "a", TINY) == first


def test_a_killed_recipe_is_resumed_from_its_records(tmp_path, monkeypatch):
    begun, again = [], []

    def measured(places):
        columns = {key(rule, n) for rule in CHAIN_RULES for n in places.lengths}
        columns |= {key(rule, n, k) for rule in TRIE_RULES for n in places.lengths for k in places.drafts}
        return [{"prompt": at, "places": 4, "accepted": dict.fromkeys(columns, 1.0 + at)} for at in range(4)]

    def dying(_, places):
        if begun:
            raise KeyboardInterrupt
        begun.append(places)
        return measured(places)

    monkeypatch.setattr(Experiments, "_places", dying)
    with pytest.raises(KeyboardInterrupt):
        reproduce.reproduce(["spectr-table4"], tmp_path, TINY)
    assert not (tmp_path / "outcomes").exists()
    monkeypatch.setattr(Experiments, "_places", lambda _, places: again.append(places) or measured(places))
    reproduce.reproduce(["spectr-table4"], tmp_path, TINY)
    assert [places.drafter for places in (*begun, *again)] == [f"early_exit:{layers}" for layers in (2, 3, 4)]


def test_compared_runs_take_turns(experiments, monkeypatch):
    order = []
    original = experiments_module._answers

    def noting(run, engine, prompts, seed, first):
        order.append((run.verifier, seed, first))
        return original(run, engine, prompts, seed, first)

    monkeypatch.setattr(experiments_module, "_answers", noting)
    base = experiments.scaled_run(SMALL, prompts=4, seeds=2, batch=2, max_tokens=4, stopper="fixed:3")
    runs = [replace(base, verifier=rule) for rule in ("token", "block")]
    found = experiments.in_turns(runs)
    assert order == [(rule, seed, first) for seed in (0, 1) for first in (0, 2) for rule in ("token", "block")]
    assert [[row["token_ids"] for row in rows] for rows in found] == [
        [row["token_ids"] for row in experiments.runs(run)] for run in runs
    ]


def test_the_comparison_of_two_runs_can_fail(tmp_path):
    (made,) = reproduce.reproduce(["sprinter-table5"], tmp_path, TINY)
    moved, late = (json.loads(json.dumps(made)) for _ in range(2))
    moved["cells"][0]["ours"]["value"] += 1e-6
    late["seconds"] += 1.0
    late[KEY]["date"] = "another day"
    hashes = [without_times([content]) for content in (made, moved, late)]
    assert hashes[0] != hashes[1]
    assert hashes[0] == hashes[2]


def test_a_folder_of_another_profile_is_refused(tmp_path):
    reproduce.reproduce(["spectr-figure1"], tmp_path, TINY)
    with pytest.raises(UserError, match="another profile"):
        reproduce.reproduce(["spectr-figure1"], tmp_path, PROFILES["quick"])


def test_without_matplotlib_the_data_are_written_and_a_note_is_shown(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = []
    (made,) = reproduce.reproduce(["spectr-figure1"], tmp_path, TINY, notify=said.append)
    assert made["figure"]["series"][0]["y"]
    assert any("draftproof[bench]" in line for line in said)
    assert not list(tmp_path.glob("*.png"))


# --- the command line -------------------------------------------------------------------------------------------------


def run_cli(*words):
    return CliRunner().invoke(app, ["reproduce", *words], prog_name="draftproof")


def test_the_list_names_every_recipe():
    listed = run_cli("--list").stdout
    assert "block-verification-table1" in listed
    assert "sprinter-figure12" in listed
    found = json.loads(run_cli("--list", "--json").stdout)
    assert {"name", "how", "title", "place"} == set(found[0])


def test_the_command_prints_marks_and_writes_the_report(tmp_path):
    done = run_cli("spectr-figure1", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "spectr-figure1: 4 reproduced, 0 direction only, 0 not reproduced; 4 of 4 claims hold" in done.stdout
    assert (tmp_path / "reproduce.md").exists()
    (found,) = json.loads(run_cli("spectr-figure1", "--out", str(tmp_path), "--json").stdout)
    assert found["name"] == "spectr-figure1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope", "--out", "x"], "recipe: expected one of block-verification-figure3"),
        (
            ["block-verification-table1", "--out", "x", "--profile", "slow"],
            "profile: expected one of quick, full, got 'slow'",
        ),
        (["block-verification-table1"], "--out"),
    ],
)
def test_bad_requests_are_refused_with_what_is_legal(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed = run_cli(*words)
    assert failed.exit_code == 1
    assert failed.stdout == ""
    assert failed.stderr.startswith("draftproof: error: ")
    assert failed.stderr.count("\n") == 1
    assert message in failed.stderr
    assert not list(tmp_path.iterdir())


# --- what the recipes compute -----------------------------------------------------------------------------------------


def test_distributions_of_the_toy_pair_have_the_means_of_the_theory():
    p, q = constant(TOY_P), constant(TOY_Q)
    for rule, length in (("token", token_length), ("block", block_length)):
        assert sum(toy_ccdf(rule, 5)[1:]) == pytest.approx(length(p, q, 5), abs=1e-12)


def test_memoryless_sources_by_hand():
    assert token_level(0.25, 2) == pytest.approx(0.5 + 0.25)
    assert block_level(0.25, 2) == pytest.approx(0.5 + (1 / 16 + 6 / 16 + 1 / 16))


def test_the_exact_gain_of_the_best_policy_is_no_loss():
    assert exact_gain().verdict == "holds"


def test_unknown_data_sets_are_refused(experiments):
    assert len(experiments.prompts(SMALL.target, 4, "gsm8k")) == 4
    with pytest.raises(UserError, match="gsm8k has 16 questions: 17 are needed"):
        experiments.prompts(SMALL.target, 17, "gsm8k")
    with pytest.raises(UserError, match="data set: expected one of copying"):
        experiments.prompts(SMALL.target, 4, "nowhere")


def test_stoppers_on_sampled_drafts_end_where_the_engine_ends_them(experiments):
    """Rates by common drafts against whole runs of the engine: the same stopper, the same pair."""
    samples = sample_drafts(experiments, SamplePlan(SMALL, prompts=8, places=8))
    head = shipped_head()
    lengths = [stopped_lengths(samples, head, Acceptance(head, 0.7)), fixed_lengths(samples, 4)]
    totals = round_sums(samples, lengths).sum(0)
    assert samples.prefix_acceptance.shape == (64, LIMIT)
    for place, stopper in enumerate(("acceptance:0.7", "fixed:4")):
        run = experiments.scaled_run(SMALL, stopper=stopper, verifier="token", prompts=8, seeds=1, max_tokens=40)
        rows = experiments.runs(run)
        drafted, accepted = (sum(row[name] for row in rows) for name in ("num_draft_tokens", "num_accepted_tokens"))
        rounds = sum(row["num_drafts"] for row in rows)
        assert float(totals[1 + 2 * place] / totals[0]) == pytest.approx(drafted / rounds, rel=0.12)
        assert float(totals[2 + 2 * place] / totals[0]) == pytest.approx(accepted / rounds, rel=0.2)


def test_profiles_are_quick_and_full():
    assert set(reproduce.PROFILES) == {"quick", "full"}
    assert experiments_module.SMOLLM2 in PROFILES["full"].pairs
    assert rates([])["tokens"] == 0
