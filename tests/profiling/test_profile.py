"""`draftproof profile round | forward | rules`: times of a round, of a pass and of rules, on the embedded pair."""

import json
import math
import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.loading import by_name
from draftproof.cli import app
from draftproof.models.gguf_file import GGUFFile
from draftproof.native.dispatch import VARIABLE
from draftproof.profiling import forward, hardware
from draftproof.profiling import round as round_module
from draftproof.profiling.forward import ForwardOptions
from draftproof.profiling.round import RoundOptions
from draftproof.profiling.rules import CHAIN, SEVERAL, SOFTMAX
from draftproof.provenance import KEY
from support.commands import call
from support.gguf_files import write_llama
from support.helpers import embedded_model


@pytest.fixture(autouse=True)
def quick_hardware(monkeypatch):
    """The machine is not measured: it reads a gigabyte a second and computes a gigaflop."""
    for module in (forward, round_module):
        monkeypatch.setattr(module, "bandwidth", lambda **_: 1e9)
    monkeypatch.setattr(round_module, "product_rate", lambda _: 1e9)


profile = partial(call, "profile")


def test_a_round_is_split_into_parts_for_each_backend_and_method(tmp_path):
    pair = ("--target", "embedded:target", "--draft", "embedded:draft", "-n", 2)
    small = ("--questions", 2, "--max-tokens", 6, "--backend", "hf", "--backend", "lean")
    found = json.loads(profile("round", *pair, *small, "--out", tmp_path / "r", "--json", "--quiet").stdout)
    assert found == json.loads((tmp_path / "r.json").read_text())
    methods = [(row["question"], row["backend"], row["method"]) for row in found["rows"]]
    model = "model, fixed:2, block"
    assert methods == [(q, b, m) for q in (1, 2) for b in ("hf", "lean") for m in ("plain", model)]
    for row in found["rows"]:
        assert row["tokens"] == 6
        parts = sum(row["seconds"][part] for part in ("draft", "target", "verify", "other"))
        assert row["seconds"]["total"] == pytest.approx(parts)
        assert (row["calls"] == 6) == (row["method"] == "plain")
    config = embedded_model("target")
    count = sum(weights.numel() for weights in config.parameters())
    assert found["floors"]["target"] == pytest.approx({"memory": 1000 * 4 * count / 1e9, "arithmetic": 6 * count / 1e6})
    assert list(found["floors"]) == ["draft", "target", "verify"]
    assert found[KEY]["machine"]["threads"] == 1
    page = (tmp_path / "r.md").read_text()
    assert f"| lean | {model} |" in page
    assert "| part | memory, ms | arithmetic, ms |" in page


def test_lookup_has_no_floor_for_drafting():
    options = RoundOptions("embedded:target", None, "ngram", draft_length=3)
    assert [cell.drafter for cell in options.cells()] == ["none", "ngram:3"] * 2
    assert round_module._draft_weights(options, torch.float32) is None


def test_weights_that_a_pass_reads_leave_out_an_untied_embedding():
    found = hardware.weights_read("embedded:target", "float32")
    model = embedded_model("target")
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    left_out = 0 if tied else model.get_input_embeddings().weight.numel()
    assert found.entries == sum(weights.numel() for weights in model.parameters()) - left_out
    assert (found.nbytes, found.dtype) == (4 * found.entries, torch.float32)


@pytest.fixture
def few_bits(tmp_path, monkeypatch):
    """A GGUF file, which transformers may not read."""
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    monkeypatch.setattr(by_name, "load_model", None)
    write_llama(tmp_path / "x.gguf")
    return tmp_path / "x.gguf"


def test_weights_of_a_file_are_counted_in_its_own_bits(few_bits):
    found = hardware.weights_read(str(few_bits), "auto")
    named = GGUFFile(few_bits).tensors.items()
    assert found.entries == sum(math.prod(each.shape) for name, each in named if name != "token_embd.weight")
    assert 0.5 * found.entries < found.nbytes < found.entries
    assert found.dtype == torch.float32
    assert hardware.weights_read(str(few_bits), "bfloat16").dtype == torch.bfloat16


def test_a_file_is_timed_in_its_own_numbers(few_bits, tmp_path):
    words = ("--target", few_bits, "--backend", "lean", "--context", 8, "--repeats", 1, "--new-tokens", 1)
    profile("forward", *words, "--out", tmp_path / "f")
    assert json.loads((tmp_path / "f.json").read_text())["rows"][0]["backend"] == "lean"
    pair = ("--target", few_bits, "--draft", few_bits, "-n", 2, "--questions", 1, "--max-tokens", 3)
    found = json.loads(profile("round", *pair, "--backend", "lean", "--json", "--quiet").stdout)
    nbytes = hardware.weights_read(str(few_bits), "auto").nbytes
    assert found["floors"]["target"] == pytest.approx({"memory": 1000 * nbytes / 1e9, "arithmetic": 0.0})


def test_passes_are_timed_for_chains_and_tries_on_every_backend(tmp_path):
    shapes = ("--new-tokens", 1, "--new-tokens", 3, "--trie", "2x2", "--draft", "embedded:draft", "--prompt", 30)
    small = ("--target", "embedded:target", "--context", 12, "--repeats", 2, "--backend", "hf", "--backend", "lean:0")
    shown = profile("forward", *small, *shapes, "--out", tmp_path / "f").stdout
    rows = json.loads((tmp_path / "f.json").read_text())["rows"]
    names = ("1 token", "3 tokens", "2 chains of 2, temperature 1", "2 chains of 2, nothing merged", "prompt of 30")
    assert [(row["backend"], row["shape"]) for row in rows] == [(b, s) for b in ("hf", "lean:0") for s in names]
    positions = {row["shape"]: row["positions"] for row in rows}
    assert (positions[names[0]], positions[names[1]], positions[names[3]]) == (1, 3, 5)
    assert positions["prompt of 30"] == 30
    assert 3 <= positions[names[2]] <= 5, "equal prefixes are merged"
    assert all(len(row["seconds"]) == 2 for row in rows)
    assert "| over 1 token | speed over hf |" in shown


def test_a_backends_value_sets_the_native_switch_while_it_is_loaded(monkeypatch):
    seen, loaded = [], HFBackend(embedded_model("target"))

    def load(_, options):
        seen.append((options.dtype, options.backend, os.environ.get(VARIABLE)))
        return SimpleNamespace(backend=loaded)

    monkeypatch.setattr(forward, "load", load)
    monkeypatch.setenv(VARIABLE, "auto")
    forward._load("x", "auto", "lean:0")
    forward._load("x", "auto", "hf")
    assert seen == [("auto", "lean", "0"), ("auto", "hf", "auto")]
    assert os.environ[VARIABLE] == "auto"
    monkeypatch.delenv(VARIABLE)
    forward._load("x", "auto", "lean:0")
    assert VARIABLE not in os.environ


def test_every_rule_is_timed_beside_a_softmax(tmp_path):
    small = ("--vocab", 40, "--batch", 2, "--drafts", 1, "--drafts", 2, "--n", 2, "--repeats", 2)
    shown = profile("rules", *small, "--out", tmp_path / "c").stdout
    rows = json.loads((tmp_path / "c.json").read_text())["rows"]
    single = [row["rule"] for row in rows if row["drafts"] == 1]
    assert single == [SOFTMAX, *CHAIN, *SEVERAL]
    assert [row["rule"] for row in rows if row["drafts"] == 2] == [SOFTMAX, *SEVERAL]
    assert all(len(row["seconds"]) == 2 and row["memory"] >= 0 for row in rows)
    assert "| 40 | 2 | 1 | token |" in shown
    assert "| V | B | K | rule | ms |" in shown


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("round", "-n", 0), "draft length: expected 1 or more, got 0"),
        (("round", "--questions", 0), "questions: expected 1 or more, got 0"),
        (("round", "--drafter", "telepathy"), "got 'telepathy'"),
        (("round", "--backend", "abacus"), "got 'abacus'"),
        (("round", "--dataset", "nothing"), "data set: expected "),
        (("round", "--target", "embedded:fast-draft"), "needs a draft model"),
        (("forward", "--context", 0), "context: expected 1 or more, got 0"),
        (("forward", "--new-tokens", 0), "new tokens: expected 1 or more, got 0"),
        (("forward", "--context", 400, "--new-tokens", 400), "the context of embedded:stories"),
        (("forward", "--prompt", 4000), "the context of embedded:stories"),
        (("forward", "--target", "embedded:nobody"), "embedded:nobody"),
        (("rules", "--vocab", 1), "vocab: expected 2 or more, got 1"),
        (("rules", "--repeats", 0), "repeats: expected 1 or more, got 0"),
    ],
)
def test_errors_are_one_line(args, words):
    assert words in profile(*args, code=1).stderr


def test_a_trie_has_two_numbers():
    result = CliRunner().invoke(app, ["profile", "forward", "--trie", "8by4"], prog_name="draftproof")
    assert result.exit_code == 2
    assert "expected KxL" in result.stderr


def test_the_defaults_are_legal():
    assert ForwardOptions().new_tokens[0] == 1
    assert len(RoundOptions().cells()) == 4
