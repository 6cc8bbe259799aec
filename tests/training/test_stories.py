"""The trained models in the package: their provenance is right, they write English, and the drafts are accepted."""

import functools
import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftproof import Engine, SamplingParams
from draftproof.embedded import stories_draft_dir, stories_target_dir
from draftproof.provenance import fingerprint

DIRECTORIES = {"target": stories_target_dir(), "draft": stories_draft_dir()}


@functools.cache
def model(name):
    return AutoModelForCausalLM.from_pretrained(DIRECTORIES[name], dtype="auto").eval()


@functools.cache
def engine():
    return Engine.load(target="embedded:stories", draft="embedded:stories-draft", verifier="block", stopper="fixed:4")


def provenance(name, file="provenance.json"):
    return json.loads((DIRECTORIES[name] / file).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", DIRECTORIES)
def test_each_directory_loads_in_float32_and_stays_small(name):
    assert model(name).dtype == torch.float32
    assert model(name).num_parameters() == provenance(name)["metrics"]["parameters"]
    size = sum(path.stat().st_size for path in DIRECTORIES[name].iterdir())
    assert size < {"target": 8e6, "draft": 2e6}[name]


@pytest.mark.parametrize("name", DIRECTORIES)
def test_provenance_names_data_and_no_machine(name):
    found = provenance(name)
    assert [source["name"] for source in found["data"]] == ["tinystories.txt", "sampled.jsonl"]
    text = (DIRECTORIES[name] / "provenance.json").read_text(encoding="utf-8")
    assert not re.search(r'"/|/tmp|/home|/work', text)
    assert set(found["machine"]) <= {"architecture", "system", "threads", "accelerator"}


def test_the_draft_was_trained_for_this_target():
    assert provenance("draft")["imitation"]["fingerprint"] == fingerprint("embedded:stories")
    tokenizers = [(where / "tokenizer.json").read_bytes() for where in DIRECTORIES.values()]
    assert tokenizers[0] == tokenizers[1]


def test_the_engine_accepts_drafts_as_often_as_the_provenance_says_and_ends_stories():
    prompts = ["Once upon a time, there was a little girl named Lily.", "One day, a dog", "Tom and Sam", "The sun"]
    params = [SamplingParams(max_tokens=100, seed=seed) for seed in range(len(prompts))]
    outputs = engine().generate(prompts, params)
    calls, tokens = (sum(getattr(o.stats, n) for o in outputs) for n in ("num_target_calls", "num_tokens"))
    assert tokens / calls > 0.8 * provenance("draft")["metrics"]["block_efficiency_4"]
    assert engine().eos_token_ids == (0,)


def test_greedy_text_is_english():
    (out,) = engine().generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=120))
    words = re.findall(r"[a-z]+", out.text.lower())
    common = {"the", "a", "and", "to", "was", "he", "she", "it", "they", "her", "his", "said", "with", "in", "of"}
    assert sum(word in common for word in words) > 0.2 * len(words)
    assert "\ufffd" not in out.text


@pytest.mark.slow
def test_acceptance_is_that_of_the_provenance():
    tokenizer = AutoTokenizer.from_pretrained(DIRECTORIES["target"])
    torch.manual_seed(0)
    met = []
    # without "Once upon a time", whose continuation is easy to predict
    for beginning in ("Lily", "One day", "The", "Tom", "There", "A", "Sara", "In"):
        start = tokenizer(beginning, return_tensors="pt").input_ids.expand(4, -1)
        with torch.no_grad():
            ids = model("target").generate(start, do_sample=True, top_k=0, max_new_tokens=96, eos_token_id=None)
            p, q = (model(name)(ids).logits[:, start.shape[1] :].softmax(-1) for name in ("target", "draft"))
        met.append(torch.minimum(p, q).sum(-1).mean().item())
    found = sum(met) / len(met)
    assert found == pytest.approx(provenance("draft")["metrics"]["on_own_samples"]["acceptance"], abs=0.05)


def test_the_fast_draft_is_accepted_more_often_than_the_truncated_one():
    found = {}
    for draft in ("embedded:draft", "embedded:fast-draft"):
        pair = Engine.load(target="embedded:target", draft=draft, verifier="block", stopper="fixed:4")
        outputs = pair.generate(
            ["Once upon a time"] * 4, [SamplingParams(max_tokens=80, seed=seed) for seed in range(4)]
        )
        calls, tokens = (sum(getattr(o.stats, n) for o in outputs) for n in ("num_target_calls", "num_tokens"))
        found[draft] = tokens / calls
    assert found["embedded:fast-draft"] > found["embedded:draft"] + 0.2
