"""Recipes run end to end on the embedded pair, are resumed and not repeated, and give the same tables again."""

import json
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from draftproof.cli.bench import app
from draftproof.errors import UserError
from draftproof.reproduction import experiments as laboratory
from draftproof.reproduction import run as reproduce
from draftproof.reproduction.draft_samples import Field, fixed_lengths, gather, round_sums, stopped_lengths
from draftproof.reproduction.experiments import SMALL, ExperimentProfile, Experiments, openings
from draftproof.reproduction.recipes.base import Mark
from draftproof.reproduction.recipes.block_verification_v1 import block_level, token_level
from draftproof.reproduction.recipes.couplings import TOY_P, TOY_Q, toy_ccdf
from draftproof.reproduction.recipes.index import RECIPES
from draftproof.reproduction.recipes.specdec_pp import exact_gain, shipped_head
from draftproof.reproduction.recipes.toys import constant
from draftproof.reproduction.run import profile_named, without_times
from draftproof.stoppers.trained import LIMIT, Acceptance
from draftproof.theory.lengths import block_length, token_length
from draftproof.training.sweep import rates

TINY = ExperimentProfile("tiny", (SMALL,), prompts=4, seeds=1, tokens=12, places=4)
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
def lab(tmp_path_factory):
    return Experiments(tmp_path_factory.mktemp("lab"), TINY)


def test_exact_recipes_reproduce_every_cell(tmp_path):
    made = reproduce.reproduce(EXACT, tmp_path, TINY)
    for each in made:
        assert each.content["claims"], each.name
        assert {cell["mark"] for cell in each.content["cells"]} == {Mark.REPRODUCED}, each.name
        assert (tmp_path / f"{each.name}.png").stat().st_size > 1000


def test_recipes_of_models_end_to_end(tmp_path):
    said = []
    names = ["block-verification-figure4", "block-verification-table4", "specdec-pp-table1"]
    made = reproduce.reproduce(names, tmp_path, TINY, tell=said.append)
    assert [each.name for each in made] == [
        "block-verification-figure4",
        "block-verification-table4",
        "specdec-pp-table1",
    ]
    report = (tmp_path / "reproduce.md").read_text(encoding="utf-8")
    for each in made:
        assert f"## {each.name}: " in report
        paper = each.content["paper"]
        assert len(each.content["cells"]) == sum(x is not None for row in paper["rows"].values() for x in row)
    assert "| LM1B | 3.21" in report
    assert "embedded:target / embedded:draft" in report
    whole = json.loads((tmp_path / "reproduce.json").read_text(encoding="utf-8"))
    assert [each["name"] for each in whole["recipes"]] == names
    assert whole["provenance"]["profile"]["name"] == "tiny"
    assert "turns: 4 compositions on embedded:target" in said


@pytest.mark.slow
def test_every_recipe_runs(tmp_path):
    made = reproduce.reproduce([], tmp_path, TINY)
    assert [each.name for each in made] == list(RECIPES)
    for each in made:
        assert each.content["cells"], each.name
        assert each.content["rows"], each.name


def test_a_second_run_measures_nothing_and_a_fresh_one_gives_the_same_tables(tmp_path, monkeypatch):
    names = ["block-verification-table4", "sprinter-table5"]
    first = reproduce.reproduce(names, tmp_path / "a", TINY)
    fresh = reproduce.reproduce(names, tmp_path / "b", TINY)
    contents = [[each.content for each in made] for made in (first, fresh)]
    assert without_times(contents[0]) == without_times(contents[1])
    monkeypatch.setattr(Experiments, "_turns", None)  # measuring would raise
    monkeypatch.setattr(Experiments, "_places", None)
    assert reproduce.reproduce(names, tmp_path / "a", TINY) == first


def test_a_killed_recipe_goes_on_from_its_records(tmp_path, monkeypatch):
    original, begun = Experiments._places, []

    def dying(self, asked):
        if begun:
            raise KeyboardInterrupt
        begun.append(asked)
        return original(self, asked)

    monkeypatch.setattr(Experiments, "_places", dying)
    with pytest.raises(KeyboardInterrupt):
        reproduce.reproduce(["spectr-table4"], tmp_path, TINY)
    assert not (tmp_path / "outcomes").exists()
    again = []
    monkeypatch.setattr(Experiments, "_places", lambda self, asked: again.append(asked) or original(self, asked))
    reproduce.reproduce(["spectr-table4"], tmp_path, TINY)
    assert [asked.drafter for asked in (*begun, *again)] == [f"early_exit:{layers}" for layers in (2, 3, 4)]


def test_compared_runs_take_turns(lab, monkeypatch):
    order = []
    original = laboratory._answers

    def noting(run, engine, prompts, seed, first):
        order.append((run.verifier, seed, first))
        return original(run, engine, prompts, seed, first)

    monkeypatch.setattr(laboratory, "_answers", noting)
    base = lab.scaled_run(SMALL, prompts=4, seeds=2, batch=2, tokens=6, stopper="fixed:3")
    runs = [replace(base, verifier=rule) for rule in ("token", "block")]
    found = lab.in_turns(runs)
    assert order == [(rule, seed, first) for seed in (0, 1) for first in (0, 2) for rule in ("token", "block")]
    assert [[row["token_ids"] for row in rows] for rows in found] == [
        [row["token_ids"] for row in lab.runs(run)] for run in runs
    ]


def test_the_comparison_of_two_runs_can_fail(tmp_path):
    (made,) = reproduce.reproduce(["sprinter-table5"], tmp_path, TINY)
    moved, late = (json.loads(json.dumps(made.content)) for _ in range(2))
    moved["cells"][0]["ours"]["value"] += 1e-6
    late["seconds"] += 1.0
    told = [without_times([content]) for content in (made.content, moved, late)]
    assert told[0] != told[1]
    assert told[0] == told[2]


def test_a_folder_of_another_profile_is_refused(tmp_path):
    reproduce.reproduce(["spectr-figure1"], tmp_path, TINY)
    with pytest.raises(UserError, match="another profile"):
        reproduce.reproduce(["spectr-figure1"], tmp_path, profile_named("quick"))


def test_no_matplotlib_is_said_and_the_data_are_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = []
    (made,) = reproduce.reproduce(["spectr-figure1"], tmp_path, TINY, tell=said.append)
    assert made.content["figure"]["series"][0]["y"]
    assert any("draftproof[bench]" in line for line in said)
    assert not list(tmp_path.glob("*.png"))


# --- the command line -------------------------------------------------------------------------------------------------


def run_cli(*words):
    return CliRunner().invoke(app, ["reproduce", *words])


def test_the_list_names_every_recipe():
    listed = run_cli("--list").stdout
    assert "block-verification-table1" in listed
    assert "sprinter-figure12" in listed
    told = json.loads(run_cli("--list", "--json").stdout)
    assert {"name", "how", "title", "place"} == set(told[0])


def test_the_command_prints_marks_and_writes_the_report(tmp_path):
    done = run_cli("spectr-figure1", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "spectr-figure1: 4 reproduced, 0 direction only, 0 not reproduced; 4 of 4 claims hold" in done.stdout
    assert (tmp_path / "reproduce.md").exists()
    (told,) = json.loads(run_cli("spectr-figure1", "--out", str(tmp_path), "--json").stdout)
    assert told["name"] == "spectr-figure1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope", "--out", "x"], "recipe is 'nope': legal are block-verification-v1-figure2"),
        (["block-verification-table1", "--out", "x", "--profile", "slow"], "profile is 'slow': legal are quick, full"),
        (["block-verification-table1"], "--out"),
    ],
)
def test_bad_requests_are_refused_with_what_is_legal(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed = run_cli(*words)
    assert isinstance(failed.exception, UserError)
    assert message in str(failed.exception)
    assert not list(tmp_path.iterdir())


# --- what the recipes compute -----------------------------------------------------------------------------------------


def test_toy_laws_have_the_means_of_the_theory():
    p, q = constant(TOY_P), constant(TOY_Q)
    for rule, length in (("token", token_length), ("block", block_length)):
        assert sum(toy_ccdf(rule, 5)[1:]) == pytest.approx(length(p, q, 5), abs=1e-12)


def test_memoryless_sources_by_hand():
    assert token_level(0.25, 2) == pytest.approx(0.5 + 0.25)
    assert block_level(0.25, 2) == pytest.approx(0.5 + (1 / 16 + 6 / 16 + 1 / 16))


def test_the_exact_gain_of_the_best_policy_is_no_loss():
    assert exact_gain().verdict == "holds"


def test_openings_are_distinct_and_bounded():
    assert len(set(openings(32))) == 32
    with pytest.raises(UserError, match="legal are 2 to 32"):
        openings(33)


def test_unknown_data_sets_are_refused(lab):
    assert len(lab.prompts(SMALL.target, 4, "gsm8k")) == 4
    with pytest.raises(UserError, match="gsm8k has 16 questions"):
        lab.prompts(SMALL.target, 17, "gsm8k")
    with pytest.raises(UserError, match="data set is 'nowhere': legal are stories"):
        lab.prompts(SMALL.target, 4, "nowhere")


def test_stoppers_on_kept_drafts_end_where_the_engine_ends_them(lab):
    """Rates by common drafts against whole runs of the engine: the same stopper, the same pair."""
    field = Field(SMALL, prompts=12, places=12)
    harvest = gather(lab, field)
    head = shipped_head()
    lengths = [stopped_lengths(harvest, head, Acceptance(head, 0.7)), fixed_lengths(harvest, 4)]
    totals = round_sums(harvest, lengths).sum(0)
    assert harvest.chance.shape == (144, LIMIT)
    for place, stopper in enumerate(("acceptance:0.7", "fixed:4")):
        asked = lab.scaled_run(SMALL, stopper=stopper, verifier="token", prompts=12, seeds=2, tokens=40)
        rows = lab.runs(asked)
        drafted, accepted = (sum(row[name] for row in rows) for name in ("num_draft_tokens", "num_accepted_tokens"))
        rounds = sum(row["num_drafts"] for row in rows)
        assert float(totals[1 + 2 * place] / totals[0]) == pytest.approx(drafted / rounds, rel=0.12)
        assert float(totals[2 + 2 * place] / totals[0]) == pytest.approx(accepted / rounds, rel=0.2)


def test_profiles_are_the_ones_announced():
    assert set(reproduce.PROFILES) == {"quick", "full"}
    assert laboratory.SMOLLM2 in profile_named("full").pairs
    assert rates([])["tokens"] == 0
