"""The script that puts heads side by side: its acceptance is that of training, place by place; and its page."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from draftproof.backends.heads.published.eagle3 import eagle3_backend
from draftproof.backends.heads.published.peagle import PEagleBackend
from draftproof.backends.hf.backend import HFBackend
from draftproof.training.eagle3_net import Eagle3Module, PEagleModule
from draftproof.training.feature_head import make_feature_head
from draftproof.training.feature_loss import Frame, steps, target_rows
from draftproof.training.feature_rows import FeatureStore, TrainingRow
from support.helpers import CONFIGS, random_model
from support.small_heads import job, random_net, write, write_texts

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        yield importlib.import_module("head_formats")


@pytest.mark.parametrize(
    ("make", "more", "read"),
    [(Eagle3Module, {}, eagle3_backend), (PEagleModule, {"mask_token": 5, "places": 4}, PEagleBackend)],
)
def test_acceptance_is_that_of_the_loss(tmp_path, script, make, more, read):
    """At every position and place, the overlap of the rows that training computes."""
    target = HFBackend(random_model(CONFIGS["llama"]()), name="llama")
    row = TrainingRow(tuple((7 + j * j) % 97 for j in range(14)), 2)
    shard = FeatureStore(target, [[row]], length=14, cache=tmp_path, key="k", layers=[0, 1]).shard(0)
    net = random_net((0, 1), make=make, **more)
    frame = Frame(target.model.get_input_embeddings(), target.output_rows(net.ids).detach(), autocast=False)
    p = target_rows(shard, frame)
    with torch.no_grad():
        q = [(net.predicted(out[0]) @ frame.output.T).softmax(-1) for out, _ in steps(net, shard, frame, 4)]
    head = read(write(net, target, tmp_path / "head"), target)
    found = script.along(target, {"mine": head}, row, 3)
    assert [each["anchor"] for each in found] == [2, 5, 8]
    for each in found:
        for place, accepted in enumerate(each["accepted"]):
            at = each["anchor"] + place
            assert accepted == pytest.approx(float(torch.minimum(p[at], q[place][at]).sum()), abs=1e-4)
        assert len(each["accepted"]) == 4
        assert max(each["accepted"]) < 0.99  # random heads


@pytest.mark.slow
def test_the_page_compares_heads(tmp_path, script, monkeypatch):
    """Two small heads: all places, runs in turns beside plain decoding, and greedy outputs that are equal."""
    heads, texts = {}, write_texts(tmp_path)
    for kind in ("draftproof", "peagle"):
        made = job(tmp_path, texts, kind, format=kind, unroll=4)
        make_feature_head(made)
        heads[kind] = f"{'feature_head' if kind == 'draftproof' else kind}:{made.out}"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Tell me of the number {i}."}) + "\n" for i in range(60)))
    words = [
        "head_formats.py",
        "embedded:stories",
        "--dtype",
        "float32",
        "--texts",
        str(texts),
        "--prompts",
        str(prompts),
    ]
    words += ["--every", "64", "--trials", "2", "--tokens", "10", "--turns", "1", "--out", str(tmp_path / "page")]
    for name, drafter in heads.items():
        words += ["--head", f"{name}={drafter}"]
    monkeypatch.setattr(sys, "argv", words)
    script.main()
    page = (tmp_path / "page.md").read_text()
    figures = json.loads((tmp_path / "page.json").read_text())
    assert "At temperature 0, 8 of 8 outputs equal" in page
    assert {row["head"] for row in figures["acceptance"]} == set(heads)
    assert len(figures["runs"]) == 2 * 2 * 2 * 3  # kinds, requests, temperatures, plain decoding and two heads
    assert figures["heads"]["peagle"]["options"]["unroll"] == 4
    monkeypatch.setattr(sys, "argv", [*words, "--head", "other=ngram:4"])
    with pytest.raises(SystemExit, match="expected one of feature_head, eagle3, peagle, got 'ngram'"):
        script.main()
