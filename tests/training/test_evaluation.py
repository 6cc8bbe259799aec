"""`draftproof train evaluate-...`: trained parts on held-out text, small enough to run on the embedded pair."""

import json

import pytest

from draftproof.backends.heads.feature_net import save_net
from draftproof.backends.loading.by_name import load_backend
from draftproof.backends.loading.options import LoadOptions
from draftproof.provenance import KEY
from draftproof.results import mean_and_deviation
from draftproof.training.evaluation import drafter, heads, pair, text
from support.commands import call
from support.feature_heads import net_for

PAIR = ("--target", "embedded:target", "--draft", "embedded:draft")
ONE = ("--seed", "0", "--trials", "1", "--quiet")


def evaluate(what, *args, code=0):
    """A call of one of the commands."""
    return call("train", f"evaluate-{what}", *args, code=code)


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """Responses and features are kept in a folder of the test."""
    monkeypatch.setenv("DRAFTPROOF_HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    """Forty short stories in one file, one a line."""
    names, things = ("Lily", "Tom", "Sue", "Ben", "Max", "Ann", "Bob", "Sam"), ("cat", "ball", "kite", "dog", "car")
    file = tmp_path_factory.mktemp("texts") / "stories.txt"
    lines = [f"{name} had a {thing}. {name} liked the {thing} a lot. It was red." for name in names for thing in things]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def test_a_pair_is_evaluated_and_both_files_are_written(stories, tmp_path, monkeypatch):
    for name, value in {"WINDOW": 48, "RUN": 8}.items():
        monkeypatch.setattr(pair, name, value)
    options = (*PAIR, "--data", stories, "--form", "lines", "--tokens", 300, *ONE)
    found = json.loads(evaluate("pair", *options, "--out", tmp_path / "pair", "--json").stdout)
    assert json.loads((tmp_path / "pair.json").read_text())["bits_per_byte"] == found["bits_per_byte"]
    assert set(found["bits_per_byte"]) == {"embedded:target", "embedded:draft"}
    assert 0 < found["acceptance"] < 1
    assert found["seeds"][0]["tokens per target call, n = 4"] > 1
    page = (tmp_path / "pair.md").read_text()
    assert page.startswith(f"# {found['title']}\n\n- Measured at commit ")
    assert f"threads: {found[KEY]['machine']['threads']}" in page
    assert "| bits per byte" in page


def test_a_feature_head_is_compared_with_three_other_drafters(stories, tmp_path, monkeypatch):
    for name, value in {"WINDOW": 32, "WINDOWS": 2, "ANSWER": 6, "RUN": 6}.items():
        monkeypatch.setattr(drafter, name, value)
    save_net(net_for(load_backend("embedded:target", LoadOptions(dtype="float32"))), tmp_path)
    options = ("--head", tmp_path, "--target", "embedded:target", "--layers", 2, "--data", stories, "--form", "lines")
    shown = evaluate("drafter", *options, "--prompts", stories, *ONE).stdout
    for name in ("feature head", "the same, untrained", "first 2 layers", "lookup"):
        assert shown.count(f"| {name} |") == 2
    for title in ("## Held-out text", "## Own answers"):
        assert title in shown


def test_lookup_finds_what_followed_the_last_two_tokens():
    assert drafter._lookup([5, 6, 7, 5, 6, 8, 5, 6]) == [-1, -1, -1, -1, 7, -1, -1, 8]


def test_heads_are_evaluated_beside_fixed_lengths(stories, monkeypatch):
    monkeypatch.setattr(heads.sweep, "LENGTHS", (1, 14))
    monkeypatch.setattr(heads.sweep, "THRESHOLDS", (0.5,))
    monkeypatch.setattr(heads, "RUN", 8)
    options = (*PAIR, "--data", stories, "--form", "lines", "--max-tokens", 4, "--kind", "acceptance", *ONE)
    shown = evaluate("heads", *options).stdout
    assert "| binary KL |" in shown
    assert "## `acceptance` beside fixed lengths (token verification)" in shown
    assert "| fixed:14 |" in shown


class FakeTrial(heads.Trial):
    """A trial that only keeps the thresholds of the stoppers."""

    pair = prompts = None
    tried = ()

    def run(self, stopper, rule, *, max_batch=8, shift=0):  # noqa: ARG002
        object.__setattr__(self, "tried", (*self.tried, getattr(stopper, "threshold", None)))
        return []


def test_trying_other_thresholds_leaves_the_verifiers_own_one(monkeypatch):
    """The prediction of Theorem 3.3 and the error rates of the next seed are at the verifier's own threshold."""
    monkeypatch.setattr(heads.sprinter, "rouge", lambda *_: None)
    monkeypatch.setattr(heads.sprinter, "log_likelihood", lambda *_: 0.0)
    monkeypatch.setattr(heads, "rates", lambda _: {})
    head = heads.load_head(heads.SHIPPED_HEADS["embedded:draft"] / "approximate")
    own, trial = head.config.threshold, object.__new__(FakeTrial)
    rows = heads._quality(trial, head, None)
    assert [row["setting"] for row in rows] == ["lossless, fixed:4", *(f"tau {tau:g}" for tau in heads.THRESHOLDS)]
    assert trial.tried[2:] == heads.THRESHOLDS
    assert head.config.threshold == own


def test_the_text_of_models_is_judged(stories):
    options = ("--model", "embedded:target", "--judge", "embedded:target", "--data", stories, "--form", "lines")
    small = ("--count", 2, "--size", 40, "--max-tokens", 8, "--temperature", 1, "--shown", 1, "--quiet")
    found = json.loads(evaluate("text", *options, *small, "--json").stdout)
    real, written = found["rows"]
    assert (real["text"], real["coined_words"]) == (text.REAL, 0.0)
    assert written["text"] == "embedded:target, temperature 1"
    assert all(row["bits_per_byte"] > 0 for row in found["rows"])


def test_texts_are_cut_between_words():
    assert text._cut("one two\n\n three", 20) == "one two\nthree"
    assert text._cut("one two three", 9) == "one two"
    assert text._cut("short", 14) == "short"


@pytest.mark.parametrize(
    ("what", "args", "words"),
    [
        ("pair", (*PAIR, "--data", "nowhere.txt"), "nowhere.txt"),
        ("pair", ("--target", "embedded:nobody", "--draft", "embedded:draft", "--data", "x.txt"), "embedded:nobody"),
        ("heads", ("--target", "embedded:target", "--draft", "embedded:target", "--data", "x.txt"), "no head ships"),
        ("heads", (*PAIR, "--data", "x.txt", "--kind", "nothing"), "holds no head"),
        (
            "drafter",
            ("--head", "x", "--target", "embedded:target", "--layers", 2, "--data", "x", "--prompts", "x"),
            "x",
        ),
        ("text", ("--judge", "embedded:target", "--data", "nowhere.txt"), "nowhere.txt"),
    ],
)
def test_errors_are_one_line(what, args, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in evaluate(what, *args, code=1).stderr


@pytest.mark.parametrize(
    ("what", "args"),
    [
        ("pair", ("--target", "embedded:target", "--draft", "x.gguf")),
        ("drafter", ("--head", "x", "--target", "x.gguf", "--layers", 2, "--prompts", "x")),
        ("text", ("--judge", "x.gguf", "--form", "lines")),
    ],
)
def test_files_of_few_bits_are_refused_where_full_weights_are_needed(what, args, stories, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert (
        "needs a model with full weights, and x.gguf is a GGUF file"
        in evaluate(what, *args, "--data", stories, code=1).stderr
    )


def test_means_have_a_deviation_where_there_are_several_values():
    assert mean_and_deviation([1.5]) == "1.500"
    assert mean_and_deviation([1.0, 2.0], 1) == "1.5 ± 0.7"
    assert mean_and_deviation([120.0, 130.0]) == "125"
