"""`draftproof bench batches | engines | rules | stoppers`: comparisons of one kind of part, on the embedded pair."""

import json
import os
import signal
import stat
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from draftproof.backends.loading import by_name
from draftproof.bench import batches, engines, worker
from draftproof.bench.engines import EngineComparison, _other_engine
from draftproof.bench.model_cache import ModelCache
from draftproof.bench.rules import RuleComparison, SyntheticModel, compare_rules
from draftproof.bench.stoppers import StopperComparison, compare_stoppers, costs, default_stoppers, means
from draftproof.errors import UserError
from draftproof.provenance import KEY
from draftproof.results import mean_and_error
from draftproof.theory.acceptance import optimal_acceptance
from support.commands import call
from support.gguf_files import write_llama

bench = partial(call, "bench")


# --- rules ------------------------------------------------------------------------------------------------------------


def test_rules_are_compared_on_the_embedded_pair(tmp_path):
    small = ("--n", 2, "--drafts", 1, "--drafts", 2, "--questions", 1, "--seeds", 2, "--max-tokens", 6)
    options = ("--rule", "token", "--rule", "spectr", *small)
    shown = bench("rules", *options, "--out", tmp_path / "rules").stdout
    assert "| rule | K = 1 | K = 2 |" in shown
    assert f"written: {tmp_path / 'rules.json'}" in shown
    found = json.loads((tmp_path / "rules.json").read_text())
    assert [(row["rule"], row["drafts"]) for row in found["rows"]] == [("token", 1), ("spectr", 1), ("spectr", 2)]
    assert all(len(row["tokens_per_call"]) == 2 and min(row["tokens_per_call"]) >= 1 for row in found["rows"])
    assert {"commit", "date", "command", "versions", "machine", "load_average"} <= set(found[KEY])
    assert shown.startswith((tmp_path / "rules.md").read_text())
    again = json.loads(bench("rules", *options, "--json", "--quiet").stdout)
    assert again["rows"] == found["rows"]


def test_synthetic_models_of_a_family_resemble_each_other():
    target, draft = SyntheticModel(50, 1, 2, 0.0), SyntheticModel(50, 1, 3, 1.0)
    stranger = SyntheticModel(50, 9, 3, 1.0)
    p, q, other = (model.logits((4,)).softmax(-1)[None] for model in (target, draft, stranger))
    assert float(optimal_acceptance(p, q, 1)) > 0.5 > float(optimal_acceptance(p, other, 1))
    assert torch.equal(SyntheticModel(50, 1, 7, 0.0).logits((4,)), target.logits((4,)))


def test_rules_on_a_synthetic_pair_have_one_table_for_each_size():
    found = compare_rules(RuleComparison(synthetic=(8, 9), rules=("block",), lengths=(2,), seeds=1, tokens=4))
    assert [row["pair"] for row in found.figures["rows"]] == [f"synthetic, vocabulary {size}" for size in (8, 9)]
    assert found.markdown().count("## synthetic") == 2


# --- stoppers ---------------------------------------------------------------------------------------------------------


def test_stoppers_are_compared_with_fixed_lengths(tmp_path):
    named = ("--stopper", "fixed:1", "--stopper", "fixed:3", "--stopper", "confidence:0.4")
    small = ("--questions", 2, "--seeds", 2, "--max-tokens", 8, "--cost", 0.1)
    shown = bench("stoppers", *named, *small, "--out", tmp_path / "s").stdout
    for words in ("| confidence:0.4 |", "| oracle |", "## Temperature 1", "## Temperature 0", "cost at 0.1"):
        assert words in shown
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    at_one = [row for row in rows if row["temperature"] == 1]
    assert [(row["stopper"], row["seed"]) for row in at_one[:3]] == [("fixed:1", 0), ("fixed:1", 1), ("fixed:3", 0)]
    oracle = next(row for row in rows if row["stopper"] == "oracle")
    assert oracle["discard_rate"] == 0, "the oracle drafts no token that is rejected"
    greedy = [row["verification_rate"] for row in rows if row["temperature"] == 0]
    assert oracle["verification_rate"] == min(greedy)


@pytest.mark.parametrize("room", [None, 20, 1])
def test_stoppers_are_compared_on_files_of_few_bits(room, tmp_path, monkeypatch):
    """In their own numbers: transformers may not read them; a draft with less room than the target is followed."""
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    monkeypatch.setattr(by_name, "load_model", None)
    names = [str(tmp_path / name) for name in ("target.gguf", "draft.gguf")]
    for path, changes in zip(names, ({}, {} if room is None else {"context_length": room}), strict=True):
        write_llama(path, **changes)
    options = StopperComparison(*names, stoppers=("fixed:2",), questions=1, seeds=1, tokens=6, temperature=(0.0,))
    rows = {row["stopper"]: row for row in compare_stoppers(options).figures["rows"]}
    assert rows["oracle"]["discard_rate"] == 0
    if room is None:
        assert rows["oracle"]["verification_rate"] < rows["fixed:2"]["verification_rate"], "both have the same weights"


def test_competitors_do_not_read_files_of_few_bits(tmp_path):
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    write_llama(tmp_path / "x.gguf")
    with pytest.raises(UserError, match=r"a competitor needs a model with full weights, and .*x\.gguf is a GGUF file"):
        ModelCache().model(str(tmp_path / "x.gguf"), "auto")


def rates(stopper, discard, verification, seed=0):
    values = {"discard_rate": discard, "verification_rate": verification}
    return {"temperature": 1.0, "stopper": stopper, "seed": seed, **values}


def test_rates_are_compared_with_the_line_between_two_fixed_lengths():
    rows = [rates("fixed:1", 0.2, 0.6), rates("fixed:2", 0.4, 0.5), rates("entropy:0.4", 0.3, 0.5)]
    rows += [rates("entropy:0.9", 0.9, 0.4), rates("fixed:1", 0.2, 0.8, seed=1)]
    found = {entry["stopper"]: entry for entry in means(rows, 1.0)}
    assert found["fixed:1"]["verification_rate"] == pytest.approx(0.7)
    assert found["fixed:1"]["verification_rates"] == [0.6, 0.8]
    assert [mean_and_error(found[each]["verification_rates"], 3) for each in ("fixed:1", "fixed:2")] == [
        "0.700 ± 0.100",
        "0.500",
    ]
    assert found["entropy:0.4"]["fixed_verification_rate"] == pytest.approx(0.6)
    assert found["entropy:0.9"]["fixed_verification_rate"] is None
    # Equation (2.3): t_draft (1 + discard) + (t_draft + t_target) verification, less what a round does not draft.
    assert costs(list(found.values()), 0.1)["fixed:2"] < costs(list(found.values()), 0.2)["fixed:2"]


def test_the_default_stoppers_have_heads_only_where_some_ship():
    kinds = {each.partition(":")[0] for each in default_stoppers("embedded:draft")}
    assert kinds == {"fixed", "schedule", "confidence", "entropy", "acceptance", "ratio", "approximate"}
    assert {each.partition(":")[0] for each in default_stoppers("mine")} == kinds - {
        "acceptance",
        "ratio",
        "approximate",
    }


def test_without_matplotlib_stoppers_have_no_picture_and_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr("draftproof.cli._output.find_spec", lambda _: None)
    small = ("--stopper", "fixed:1", "--temperature", "0", "--questions", "1", "--seeds", "1", "--max-tokens", "2")
    assert "need matplotlib" in bench("stoppers", *small, "--out", tmp_path / "s").stderr
    assert not (tmp_path / "s.png").exists()


# --- batches ----------------------------------------------------------------------------------------------------------


def test_batches_take_turns_on_the_same_questions(tmp_path, monkeypatch):
    order, measured = [], batches._measured

    def noting(engine, prompts, batch, *rest):
        order.append((engine.drafter.name, batch, prompts))
        return measured(engine, prompts, batch, *rest)

    monkeypatch.setattr(batches, "_measured", noting)
    sizes = ("--batch", 1, "--batch", 3, "--max-tokens", 6, "--repeats", 2)
    sets = ("--dataset", "tinystories", "--dataset", "story-openings")
    shown = bench("batches", "--target", "embedded:stories", *sets, *sizes, "--out", tmp_path / "b").stdout
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert [(row["batch"], row["warmup"]) for row in rows] == [
        (batch, first) for batch in (1, 3) for first in (True, False, False, False, False)
    ]
    assert [name for name, *_ in order[:6]] == ["none", "auto", "auto", "none", "none", "auto"], "reversed in turns"
    assert all(one[1:] == other[1:] for one, other in zip(order[::2], order[1::2], strict=True))
    assert [len(prompts) for _, _, prompts in order[::10]] == [4, 6], "a queue of two for each request, four at least"
    assert order[2][2] != order[6][2], "the second turn of a data set has other questions"
    for row in rows:
        plain, own = row["times"]["plain"], row["times"]["auto"]
        assert 0 < plain["first"] < plain["seconds"]
        assert plain["processor"] > 0
        assert own["tokens"] >= own["rounds"]
        assert plain["tokens"] == plain["rounds"]
    assert shown.count("| 3 | 0 |") == 2, "one row in each table"


def test_answers_of_batches_may_have_different_lengths(tmp_path, monkeypatch):
    given, measured = [], batches._measured

    def noting(engine, prompts, batch, temperature, limits):
        given.append(limits)
        return measured(engine, prompts, batch, temperature, limits)

    monkeypatch.setattr(batches, "_measured", noting)
    options = ("--batch", 2, "--max-tokens", 8, "--least-tokens", 2, "--repeats", 2)
    shown = bench("batches", *options, "--out", tmp_path / "b").stdout
    assert all(plain == own for plain, own in zip(given[::2], given[1::2], strict=True)), "alike for both"
    assert len({tuple(limits) for limits in given}) > 1
    assert {limit for limits in given for limit in limits} <= set(range(2, 9))
    assert "limits of 2 to 8 tokens an answer" in shown
    assert "expected 1 to tokens, which is 8" in bench("batches", "--max-tokens", 8, "--least-tokens", 9, code=1).stderr
    assert "embedded:stories: auto beside plain decoding" in shown


# --- engines ----------------------------------------------------------------------------------------------------------

FAKE = """
import json, sys
print("ready", flush=True)
for number, line in enumerate(sys.stdin):
    request = json.loads(line)
    assert len(request["prompts"]) == 2 and request["tokens"] == 4 and request["temperature"] == 0
    {answer}
"""


@pytest.fixture
def fake_python(tmp_path):
    """A stand-in for the Python of another environment, whose engine does what the test says."""

    def make(answer):
        script, python = tmp_path / "engine.py", tmp_path / "python"
        script.write_text(FAKE.format(answer=answer))
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}"\n')
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        return python

    return make


SMALL = ("--batch", 2, "--temperature", 0, "--max-tokens", 4, "--repeats", 2)


@pytest.mark.skipif(os.name != "posix", reason="the stand-in is a shell script")
def test_engines_take_turns_on_the_same_prompts(fake_python, tmp_path, monkeypatch):
    order, measure = [], engines._measure

    def noting(engine):
        inner = measure(engine)
        return lambda request: (order.append((engine.drafter.name, request["prompts"])), inner(request))[1]

    monkeypatch.setattr(engines, "_measure", noting)
    python = fake_python("print(json.dumps(8.0), flush=True)")
    pair = ("--target", "embedded:target", "--draft", "embedded:draft", "--drafter", "model")
    shown = bench("engines", "--other", "vllm", "--python", python, *pair, *SMALL, "--out", tmp_path / "e").stdout
    rows = json.loads((tmp_path / "e.json").read_text())["rows"]
    assert [row["engine"] for row in rows] == ["vllm", "draftproof, plain", "draftproof, model"]
    assert rows[0]["tokens_per_second"] == [1.0, 1.0], "eight tokens in eight seconds; the first turn does not count"
    assert rows[1]["tokens_per_call"] == 1 <= rows[2]["tokens_per_call"]
    assert [name for name, _ in order] == ["none", "model", "model", "none", "none", "model"]
    prompts = [prompts for _, prompts in order]
    assert prompts[0] == prompts[1] == prompts[2] != prompts[4]
    assert "| 2 | 0 | vllm | 1.0 | - | - |" in shown
    assert str(tmp_path) not in (tmp_path / "e.md").read_text() + (tmp_path / "e.json").read_text()


@pytest.mark.skipif(os.name != "posix", reason="the stand-in is a shell script")
@pytest.mark.parametrize("answer", ["sys.exit('out of memory')", "raise ValueError('out of memory')"])
def test_an_engine_that_fails_is_reported_with_its_last_line(fake_python, answer):
    python = fake_python(answer)
    stderr = bench("engines", "--other", "vllm", "--python", python, *SMALL, code=1).stderr
    assert "vllm failed" in stderr
    assert "out of memory" in stderr


def test_a_silent_engine_is_given_up(fake_python, monkeypatch):
    monkeypatch.setattr(engines, "TIMEOUT", 0.5)
    monkeypatch.setattr(engines, "SHUTDOWN", 0.1)
    python = fake_python("import time; time.sleep(60)")
    stderr = bench("engines", "--other", "vllm", "--python", python, *SMALL, code=1).stderr
    assert "no answer in 0.5 s" in stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_transformers_answers_in_a_process_of_its_own():
    found = engines.compare_engines(
        EngineComparison("transformers", target="embedded:target", batch=(2,), temperature=(0.0,), tokens=4, repeats=1)
    )
    theirs, ours = found.figures["rows"]
    assert theirs["engine"] == "transformers"
    assert theirs["tokens_per_second"][0] > 0 < ours["tokens_per_second"][0]


def test_the_worker_imports_nothing_of_draftproof():
    source = open(worker.__file__, encoding="utf-8").read()  # noqa: PTH123, SIM115
    assert "import draftproof" not in source
    assert "from draftproof" not in source


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("engines", "--other", "gpu-engine"), "other engine: expected one of vllm"),
        (("engines", "--python", "/no/python"), "cannot run /no/python"),
        (("engines", "--batch", 0), "batch: expected 1 or more, got 0"),
        (("batches", "--batch", 0), "batch: expected 1 or more, got 0"),
        (("batches", "--drafter", "none"), "drafter none is plain decoding"),
        (("batches", "--dataset", "nothing"), "data set: expected "),
        (("batches", "--drafter", "perhaps"), "got 'perhaps'"),
        (("rules", "--rule", "perhaps"), "rule: expected one of match"),
        (("rules", "--seeds", 0), "seeds: expected 1 or more, got 0"),
        (("rules", "--synthetic", 1), "synthetic vocabulary: expected 2 tokens or more, got 1"),
        (("rules", "--target", "embedded:nobody"), "embedded:nobody"),
        (("stoppers", "--stopper", "schedule:3"), "no fixed length to compare with"),
        (("stoppers", "--stopper", "fixed:2", "--stopper", "never"), "got 'never'"),
        (("stoppers", "--max-tokens", 0), "tokens: expected 1 or more, got 0"),
        (("stoppers", "--dataset", "nothing"), "data set: expected "),
    ],
)
def test_errors_are_one_line(args, words):
    assert words in bench(*args, code=1).stderr


def test_comparisons_of_illegal_values_are_refused():
    with pytest.raises(UserError, match="repeats: expected 1 or more, got 0"):
        EngineComparison("transformers", repeats=0)
    with pytest.raises(UserError, match="batch: expected 1 or more, got 0"):
        StopperComparison(batch=0)


OTHER = """#!/bin/sh
( while :; do echo >> {folder}/beat; sleep 0.02; done ) &
echo $! > {folder}/child
until [ -s {folder}/beat ]; do sleep 0.01; done
echo ready
while read line; do echo 1.5; done
"""


@pytest.mark.skipif(sys.platform == "win32", reason="it runs a shell script")
def test_processes_of_another_engine_rest_between_its_turns_and_end_with_it(tmp_path):
    """vLLM's workers wait for requests by spinning, and outlive the process that started them."""
    script, beat = tmp_path / "python", tmp_path / "beat"
    script.write_text(OTHER.format(folder=tmp_path))
    script.chmod(0o700)

    def beats():
        before = beat.stat().st_size
        time.sleep(0.3)
        return beat.stat().st_size > before

    with _other_engine(EngineComparison(other="vllm", python=script)) as measure:
        child = int((tmp_path / "child").read_text())
        beats()
        assert not beats(), "it rests before its first turn"
        assert measure({"prompts": [], "temperature": 0.0, "tokens": 1}) == (1.5, None)
        beats()
        assert not beats(), "it rests after a turn"
        os.killpg(os.getpgid(child), signal.SIGCONT)
        assert beats(), "and would not without being stopped"
    for _ in range(200):
        if not Path(f"/proc/{child}").exists() or "State:\tZ" in Path(f"/proc/{child}/status").read_text():
            return
        time.sleep(0.05)
    pytest.fail("what it started still runs")
