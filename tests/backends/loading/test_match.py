"""What on a disk can draft for a target: by tokenizer and bytes."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from draftproof import Engine, UserError, models
from draftproof.backends.loading import match
from draftproof.backends.loading.load import load
from draftproof.backends.loading.match import VERIFIED, Match, matches
from draftproof.cli import app
from draftproof.embedded import draft_dir, stories_draft_dir, stories_target_dir, target_dir
from draftproof.engine import engine
from draftproof.models.layers import truncated_copy
from support.vocabularies import renumbered

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DRAFTPROOF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, source in (("small", draft_dir()), ("same", target_dir()), ("other", stories_target_dir())):
        shutil.copytree(source, tmp_path / "here" / name)
    renumbered(draft_dir(), tmp_path / "here" / "renumbered", missing=0.3)
    (tmp_path / "here" / "broken").mkdir()
    (tmp_path / "here" / "broken" / "config.json").write_text("{}")
    return tmp_path / "here"


def test_what_fits_comes_first_and_what_does_not_says_why(folder):
    found = {each.name.rsplit("/", 1)[-1]: each for each in matches(load("embedded:target"), [folder])}
    assert next(iter(found)) == "small"
    assert found["small"].why_not == ""
    assert 0 < found["small"].share < 1
    assert "not smaller than the target" in found["same"].why_not
    assert found["small"].shared is None
    assert found["renumbered"].why_not == ""
    assert 0.3 < found["renumbered"].shared < 1
    assert "not smaller than the target" in found["other"].why_not
    assert found["other"].shared is None, "no tokenizer is read where the size already says no"
    assert found["broken"].why_not


def test_a_candidate_that_cannot_be_had_is_listed_with_its_error(folder):
    (folder / "gone.gguf").symlink_to(folder / "nowhere.gguf")
    found = {each.name.rsplit("/", 1)[-1]: each for each in matches(load("embedded:target"), [folder])}
    assert "no such file or directory" in found["gone.gguf"].why_not
    assert found["small"].why_not == ""


def test_the_cost_of_five_rows_is_the_measured_one():
    measured = json.loads((ROOT / "docs" / "results" / "gguf.json").read_text(encoding="utf-8"))
    times = measured["random 1.5b, Q4_K_M's types"]["rows"]
    assert times["5"] / times["1"] == pytest.approx(VERIFIED, abs=0.005)


def test_the_gain_is_that_of_the_bytes():
    one = Match("x", 1, 0.1, "")
    gains = {g: (1 - 0.8 ** (g + 1)) / 0.2 / (g * 0.1 + VERIFIED) for g in range(1, 9)}
    best = max(gains, key=gains.get)
    assert one.gain(0.8) == (pytest.approx(gains[best]), best)
    assert one.gain(0.5)[1] < best


def loaded(monkeypatch, *places, draft=None):
    """What an engine loads that finds its draft model among these."""
    names = []
    monkeypatch.setenv("DRAFTPROOF_NATIVE", "0")  # where HOME is empty, the library would be built
    monkeypatch.setattr(match, "found_files", lambda: [SimpleNamespace(name=str(place)) for place in places])
    monkeypatch.setattr(engine, "load", lambda name, *rest, **more: names.append(name) or load(name, *rest, **more))
    Engine.load("embedded:stories", draft, find_draft=True, drafter="none", check=False)
    return names


def test_an_engine_takes_the_model_on_this_disk_that_gains_most(folder, monkeypatch, caplog):
    shallow = truncated_copy(stories_target_dir(), [0], folder / "shallow")
    here = [folder / "other", folder / "broken", stories_draft_dir(), shallow]
    smallest = min(here[2:], key=lambda place: (place / "model.safetensors").stat().st_size)
    assert loaded(monkeypatch, *here) == ["embedded:stories", str(smallest)]
    assert f"the draft model of embedded:stories is {smallest}, which reads 0." in caplog.text
    named = str(stories_draft_dir())
    assert loaded(monkeypatch, *here, draft=named) == ["embedded:stories", named]  # a name goes before what is found


def test_without_a_model_that_gains_an_engine_has_no_draft_model(folder, monkeypatch, caplog):
    here = [folder / name for name in ("other", "renumbered", "broken")]
    assert loaded(monkeypatch, *here) == ["embedded:stories"]
    assert "no model on this disk gains as a draft model of embedded:stories" in caplog.text


def test_the_command(folder):
    shown = CliRunner().invoke(app, ["models", "match", "embedded:target", "--in", str(folder)])
    assert shown.exit_code == 0, shown.output
    first, *_ = shown.stdout.splitlines()
    assert "small" in first
    assert "times as fast" in first
    assert "other vocabulary" not in first
    assert "other vocabulary: " in next(line for line in shown.stdout.splitlines() if "renumbered" in line)
    made = CliRunner().invoke(app, ["models", "match", "embedded:target", "--in", str(folder), "--json"])
    rows = json.loads(made.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert rows[0]["gain"] > 0
    assert {row["share"] for row in rows if "broken" in row["name"]} == {None}
    alone = CliRunner().invoke(app, ["models", "match", "embedded:target"])
    assert "no other models here" in alone.output
    wrong = CliRunner().invoke(app, ["models", "match", "embedded:target", "--accepted", "1.5"])
    assert wrong.exit_code == 1
    assert "between 0 and 1" in wrong.output


def test_a_target_that_is_not_there(folder):
    with pytest.raises(UserError, match="no such file"):
        matches(load("./nowhere"), [folder])
    assert models.resolve("embedded:target")
