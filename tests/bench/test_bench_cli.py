"""`draftproof bench` on the command line: runs, reports, comparisons of parts, and errors in one line."""

import json
import sys
from functools import partial

import pytest

from draftproof import Engine, models
from draftproof.bench import plan as planning
from draftproof.bench.model_cache import ModelCache
from draftproof.bench.plan import PROFILES, BenchOptions, parts, plan
from draftproof.bench.report import write_report
from draftproof.errors import UserError
from support.commands import call

SMALL = ("--dataset", "tinystories", "--questions", "2", "--max-tokens", "4", "--repeats", "1", "--warmup", "0")


bench = partial(call, "bench")


def test_a_run_its_report_and_the_same_command_again(tmp_path):
    out = tmp_path / "run"
    options = (*SMALL, "--out", out, "--temperature", 0, "--n", 2, "--n", 3, "--verifier", "token")
    result = bench("run", *options)
    for word in ("tinystories, temperature 0", "model, fixed:2, token", "model, fixed:3, token", "plain", "report.md"):
        assert word in result.stdout
    records = (out / "records.jsonl").read_bytes()
    report = (out / "report.md").read_bytes()
    assert len(records.splitlines()) == 3 * 2
    bench("run", *options, "-q")
    assert (out / "records.jsonl").read_bytes() == records
    (out / "report.md").unlink()
    bench("report", out)
    assert (out / "report.md").read_bytes() == report
    lines = [json.loads(line) for line in bench("report", out, "--json", "--no-plots").stdout.splitlines()]
    assert [line["method"] for line in lines] == ["plain", "model, fixed:2, token", "model, fixed:3, token"]
    assert lines[0]["block_efficiency"]["value"] == 1
    assert "other repeats" in bench("run", *options, "--repeats", 2, code=1).stderr


def test_refused_compositions_are_named_and_left_out(tmp_path):
    parts = ("--drafter", "model", "--drafter", "chains:2", "--verifier", "token", "--verifier", "spectr")
    result = bench("run", *SMALL, "--out", tmp_path / "x", *parts, "--temperature", 1, "--no-plots")
    assert "left out chains:2, fixed:4, token: drafter chains:2 drafts trees" in result.stderr
    assert "Left out chains:2, fixed:4, token" in (tmp_path / "x" / "report.md").read_text()
    assert not list((tmp_path / "x").glob("*.png"))


def test_drafts_of_several_number_formats_are_told_apart(tmp_path):
    formats = ("--draft-dtype", "auto", "--draft-dtype", "bfloat16")
    result = bench("run", *SMALL, "--out", tmp_path / "x", *formats, "--temperature", 0, "--no-plots", "-q")
    assert "[bfloat16]" in result.stdout.replace("\n", "")
    assert "[auto]" not in (tmp_path / "x" / "report.md").read_text()
    assert "[bfloat16]" in (tmp_path / "x" / "report.md").read_text()


def test_without_matplotlib_there_is_a_report_and_a_note(tmp_path, monkeypatch):
    bench("run", *SMALL, "--out", tmp_path / "x", "--temperature", 0, "--no-plots", "-q")
    monkeypatch.setattr("draftproof.cli._output.find_spec", lambda name: None)  # noqa: ARG005
    result = bench("report", tmp_path / "x")
    assert "need matplotlib (pip install 'draftproof[bench]')" in result.stderr
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="need matplotlib"):
        write_report(tmp_path / "x")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--dataset", "nothing"), "data set: expected "),
        (("--target", "embedded:nobody"), "no embedded model 'embedded:nobody'"),
        (("--drafter", "telepathy"), "got 'telepathy'"),
        (("--stopper", "never"), "got 'never'"),
        (("--n", "0"), "expected a draft length of 1 to 64, got 0"),
        (("--verifier", "perhaps"), "got 'perhaps'"),
        (("--temperature", "-1"), "temperature: expected a finite number >= 0"),
        (("--top-p", "2"), "top_p: expected 0 < top_p <= 1, got 2"),
        (("--dtype", "float7"), "float7"),
        (("--draft-dtype", "int2"), "draft_dtype: expected one of"),
        (("--device", "abacus"), "abacus"),
        (("--competitor", "llamas"), "competitor: expected one of transformers"),
        (("--competitor", "transformers-assisted", "--target", "embedded:fast-draft"), "needs a draft model"),
        (("--profile", "instant"), "profile: expected one of quick, full, got 'instant'"),
        (("--questions", "0"), "0"),
        (("--repeats", "0"), "expected 1 repeat or more"),
        (("--max-tokens", "0"), "max tokens: expected 1 or more, got 0"),
    ],
)
def test_errors_are_one_line(tmp_path, args, words):
    small = ("--out", tmp_path / "x", "--temperature", "0", "--questions", "1", "--max-tokens", "2", "-q")
    assert words in bench("run", *small, *args, code=1).stderr
    assert not (tmp_path / "x" / "records.jsonl").exists()


def test_a_report_of_nothing_is_refused(tmp_path):
    assert "holds no provenance.json" in bench("report", tmp_path, code=1).stderr
    (tmp_path / "provenance.json").write_text("{")
    assert "holds no provenance.json to read" in bench("report", tmp_path, code=1).stderr
    (tmp_path / "provenance.json").write_text('{"versions": {}}')
    assert "is not of a run of this version" in bench("report", tmp_path, code=1).stderr


@pytest.mark.parametrize("profile", PROFILES)
def test_profiles_name_what_exists(profile, monkeypatch, tmp_path):
    monkeypatch.setattr(models, "pulled", lambda name: True)  # noqa: ARG005
    monkeypatch.setattr(planning, "search", lambda cache, cell, questions, watch: {"": 1.0})  # noqa: ARG005
    made = plan(BenchOptions(), tmp_path, ModelCache(device="cpu"), profile=profile)
    assert {cell.target for cell in made.cells} == {"embedded:target", "smollm2-135m"}
    assert not [note for note in made.notes if note.startswith("left out")]
    methods = {cell.method for cell in made.cells if cell.target == "embedded:target"}
    assert {"plain", "model, fixed:8, block", "chains:4, fixed:4, trie_block", "model, acceptance, block"} <= methods
    assert len(set(made.cells)) == len(made.cells)


def test_options_take_precedence_over_a_profile_which_names_what_it_leaves_out(monkeypatch):
    monkeypatch.setattr(models, "pulled", lambda name: False)  # noqa: ARG005
    found, notes = parts(BenchOptions(temperature=(0.5,)), "quick")
    assert {part.target for part in found} == {"embedded:target"}
    assert {part.temperature for part in found} == {(0.5,)}
    assert notes == ["left out smollm2-135m: draftproof models pull smollm2-135m has not been run"]
    ((named,), none) = parts(BenchOptions(target="embedded:stories"), "quick")
    assert (named.draft, named.questions, none) == ("embedded:stories-draft", 6, [])


def test_bench_and_generate_have_one_default_pair(monkeypatch):
    ((made,), _) = parts(BenchOptions(), None)
    loaded = []

    def load(*names, **_):
        loaded.append(names)
        raise UserError("seen")

    monkeypatch.setattr(Engine, "load", load)
    call("generate", "Once", code=1)
    assert loaded == [(made.target, made.draft)] == [(models.DEFAULT_TARGET, models.DEFAULT_DRAFT)]


@pytest.mark.parametrize(
    "words",
    [
        ("bench", "run", "--out", "x"),
        ("bench", "rules", "--draft", "smollm2-135m-draft"),
        ("bench", "stoppers", "--draft", "smollm2-135m-draft"),
        ("bench", "engines"),
        ("profile", "memory"),
        ("profile", "round"),
        ("profile", "forward"),
        ("train", "feature-head", "--data", "x", "--out", "y"),
        ("train", "head", "--draft", "embedded:draft", "--data", "x", "--out", "y"),
    ],
    ids=" ".join,
)
def test_every_command_that_loads_models_pulls_registered_ones_first(words, monkeypatch, tmp_path):
    monkeypatch.setenv("DRAFTPROOF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    missing = []

    def pull(name, **_):
        missing.append(name)
        raise UserError(f"no network for {name}")

    monkeypatch.setattr(models, "pull", pull)
    assert "no network for smollm2-135m" in call(*words, "--target", "smollm2-135m", code=1).stderr
    assert missing == ["smollm2-135m"]


def test_a_download_that_is_forbidden_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("DRAFTPROOF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    words = ("run", *SMALL, "--target", "smollm2-135m", "--out", tmp_path / "x", "--offline")
    assert "draftproof models pull smollm2-135m" in bench(*words, code=1).stderr


def test_the_best_setting_is_searched_once_and_kept(monkeypatch, tmp_path):
    calls = []

    def search(bench, cell, questions, watch):
        calls.append((cell.engine, [question.dataset for question in questions]))
        return {"": 1.0, "num_assistant_tokens=2": 3.0}

    monkeypatch.setattr(planning, "search", search)
    options = BenchOptions(competitor=("transformers-assisted",), dataset=("tinystories", "fiction"))
    made = plan(options, tmp_path, ModelCache(device="cpu"))
    assert calls == [("transformers-assisted", ["tinystories", "fiction", "tinystories"])]
    settings = [cell.setting for cell in made.cells if cell.engine == "transformers-assisted"]
    assert settings == [*[""] * 4, *["num_assistant_tokens=2"] * 4]  # two data sets at two temperatures
    assert plan(options, tmp_path, ModelCache(device="cpu")) == made
    assert len(calls) == 1
    with pytest.raises(UserError, match=r"competitor: expected one of transformers, .*got 'draftproof'"):
        plan(BenchOptions(competitor=("draftproof",)), tmp_path, ModelCache(device="cpu"))
