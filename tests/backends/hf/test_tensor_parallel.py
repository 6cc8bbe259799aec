"""Targets that are divided among processes: the same text as in one, refusals, and processes that die."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import support
from draftproof import Engine
from draftproof.backends.base import Feed
from draftproof.backends.cache.sessions import SlotSession
from draftproof.backends.hf.tensor_parallel import FeedRow, ParallelCache
from draftproof.backends.loading.by_name import load_backend
from draftproof.backends.loading.options import LoadOptions
from draftproof.bench.model_cache import ModelCache
from draftproof.cli._launch import _exit_code
from draftproof.embedded import draft_dir, target_dir
from draftproof.errors import UserError
from draftproof.tree import TokenTree
from support.commands import call
from support.helpers import CONFIGS, random_model
from support.parallel_driver import COMPOSITIONS, texts

FAMILIES = ("gemma3", "qwen3")  # windows of two kinds, and norms of queries and keys
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
SECONDS = 300  # until a test gives up, also on a busy machine


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {"target": str(target_dir()), "draft": str(draft_dir())}
    for name in FAMILIES:
        made[name] = str(tmp_path_factory.mktemp(name))
        random_model(CONFIGS[name]()).save_pretrained(made[name])
    return made


@pytest.fixture(scope="module")
def divided(folders, tmp_path_factory):
    """What two processes made together."""
    out = tmp_path_factory.mktemp("divided")
    driver = Path(support.__file__).with_name("parallel_driver.py")
    command = [*TORCHRUN, "2", "--log-dir", out, driver, json.dumps(folders), "2", out / "found.json"]
    subprocess.run(command, check=True, timeout=SECONDS, env=environment(), capture_output=True)
    return json.loads((out / "found.json").read_text())


@pytest.fixture(scope="module")
def alone(folders):
    """What one process makes."""
    return texts(folders, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["auto", *COMPOSITIONS, *FAMILIES])
def test_two_processes_write_what_one_writes(divided, alone, name):
    assert divided[name] == alone[name]


@pytest.mark.slow
def test_the_target_was_divided(divided, alone):
    assert {divided[f"{name}, kind"] for name in FAMILIES} == {"TensorParallelBackend"}
    assert {alone[f"{name}, kind"] for name in FAMILIES} == {"HFBackend"}


@pytest.mark.slow
def test_drafters_that_read_the_targets_weights_are_refused(divided):
    for name, what in (("quantized", "it has no quantized twin"), ("early_exit", "its first layers cannot draft")):
        assert f"divided among 2 processes, so {what}: use drafter model, chains, tree, ngram" in divided[name]


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_heads_that_cannot_be_divided_are_refused_with_what_is_legal():
    said = r"tensor_parallel: expected one of 1, 2, 4, got 3: .* has num_attention_heads 8 and num_key_value_heads 4, "
    with pytest.raises(UserError, match=said):
        load_backend(str(target_dir()), LoadOptions(tensor_parallel=3))


def test_a_type_without_a_plan_is_refused_by_name(tmp_path):
    random_model(CONFIGS["gpt2"]()).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no tensor-parallel plan for its type \(gpt2\); use tensor_parallel 1"):
        load_backend(str(tmp_path), LoadOptions(tensor_parallel=2))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backend": "lean"}, "backend is 'lean': only transformers' own forward pass .* use --backend hf"),
        ({"device": "cpu"}, "does not go with device 'cpu'"),
        ({"adapter": "somewhere"}, "does not go with adapter 'somewhere'"),
    ],
)
def test_options_that_do_not_go_with_several_processes_are_refused(options, said):
    with pytest.raises(UserError, match=said):
        load_backend(str(target_dir()), LoadOptions(tensor_parallel=2, **options))


def test_a_gguf_file_is_refused(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    with pytest.raises(UserError, match="is a GGUF file: only checkpoints in safetensors are divided"):
        load_backend(str(file), LoadOptions(tensor_parallel=2))


def test_a_program_that_was_started_alone_is_told_how_to_start_it():
    with pytest.raises(UserError, match=r"needs 2 processes, .*: start the program by torchrun --nproc-per-node 2"):
        Engine.load(str(target_dir()), tensor_parallel=2)


def test_numbers_below_one_are_refused():
    with pytest.raises(UserError, match=r"tensor_parallel: expected 1 \(one process\) or more, got 0"):
        Engine.load(str(target_dir()), tensor_parallel=0)
    said = call("generate", "hi", "--tensor-parallel", "0", code=1).stderr
    assert "--tensor-parallel: expected 1 (one process) or more, got 0" in said


# --- benchmarks -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_benchmark_of_a_divided_target_measures_the_same_texts(tmp_path):
    words = ["--draft", "embedded:draft", "--dtype", "float32", "--drafter", "model", "--temperature", "0"]
    words += ["--questions", "1", "--max-tokens", "12", "--repeats", "1", "--no-plots", "--quiet"]
    words = ["bench", "run", "--target", "embedded:target", *words, "--out"]
    call(*words, tmp_path / "1")
    divided = [sys.executable, "-m", "draftproof", *words, tmp_path / "2", "--tensor-parallel", "2"]
    subprocess.run(divided, env=environment(), check=True, capture_output=True, timeout=SECONDS)
    alone, together = (
        [json.loads(line) for line in (tmp_path / name / "records.jsonl").read_text().splitlines()] for name in "12"
    )
    assert [each["method"] for each in together] == ["plain", "model, fixed:4, block"]
    assert [each["token_ids"] for each in together] == [each["token_ids"] for each in alone]
    assert json.loads((tmp_path / "2" / "provenance.json").read_text())["processes"] == 2
    assert "The target is divided among 2 processes." in (tmp_path / "2" / "report.md").read_text()


def test_competitors_of_a_divided_target_are_refused():
    with pytest.raises(UserError, match=r"tensor_parallel is 2, and competitors have whole models .*: leave out"):
        ModelCache(device="cpu", tensor_parallel=2).model("embedded:target", "float32")


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_a_feed_arrives_as_it_was_sent():
    noted = []
    cache = ParallelCache(noted.append)
    session = SlotSession(cache)
    session.read([3, 4], TokenTree.chain(torch.tensor([5, 6])))
    feed = Feed(session, [], TokenTree(torch.tensor([7]), (1,), 2))
    got = FeedRow.of(feed).feed(ParallelCache(noted.append))
    assert (got.session.slot, got.session.length, got.session.stem) == (session.slot, 4, 2)
    assert (got.session.tail, got.tree.ids, got.tree.parents, got.tree.known) == ((-1, 0), (7,), (1,), 2)
    session.close()
    assert noted == [("acquire", ()), ("release", (0,))]


# --- processes that die -----------------------------------------------------------------------------------------------


def rank_of(process):
    """The rank of a process that the launcher started."""
    words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return next((int(word[5:]) for word in words if word.startswith(b"RANK=")), None)


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_others_with_a_message():
    words = ["generate", "Once upon a time", "--target", target_dir(), "--drafter", "ngram:4", "--max-tokens", "1900"]
    command = [sys.executable, "-m", "draftproof", *words, "--ignore-eos", "--tensor-parallel", "2"]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(), **pipes) as run:
        assert run.stdout.read(20)  # it decodes
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        ranks = {rank_of(child): int(child) for child in children}
        os.kill(ranks[1], signal.SIGKILL)
        _, said = run.communicate(timeout=SECONDS)
    assert run.returncode == 1
    assert b"process 1 of 2 (--tensor-parallel 2) was ended by SIGKILL, so the others were ended, too" in said
    assert b"Traceback" not in said
    for child in ranks.values():
        assert not Path(f"/proc/{child}").exists()


def test_the_exit_code_is_that_of_process_0_unless_another_one_was_to_blame():
    assert _exit_code({0: 2}, 2) == 2
    assert _exit_code({0: 1, 1: 1}, 2) == 1
    assert _exit_code({0: 1, 1: -signal.SIGTERM}, 2) == 1
    with pytest.raises(UserError, match=r"process 1 of 2 .* was ended by SIGKILL"):
        _exit_code({0: 1, 1: -signal.SIGKILL}, 2)
    with pytest.raises(UserError, match=r"process 1 of 2 .* ended with exit code 1"):
        _exit_code({1: 1}, 2)
