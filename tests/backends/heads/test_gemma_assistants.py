"""Gemma 4 assistants: logits as transformers computes them, exact drafts over the target's own keys, refusals."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed
from draftproof.backends.heads.published.assistant import AssistantBackend
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.backend import LeanBackend
from draftproof.engine.options import EngineOptions
from draftproof.engine.registry import make_drafter, make_verifier
from draftproof.tree import TokenTree
from support.helpers import CONFIGS, assert_output_distribution, random_model
from support.published import DATA as HEADS
from support.published import tiny_target, weights, write

DATA = HEADS.parent / "assistants"
PROVENANCE = json.loads((DATA / "provenance.json").read_text())
IDS, STEPS = PROVENANCE["tokens"], PROVENANCE["steps"]
NAMES = ["shared", "equal"]  # layers that share keys and clusters of tokens; values that are keys, and all tokens


def gemma(name):
    """The target of a reference assistant."""
    model = transformers.AutoModelForCausalLM.from_pretrained(DATA / name / "target", dtype=torch.float32)
    return HFBackend(model, name="gemma")


def changed(folder, name="shared", **fields):
    """A copy of a reference assistant with other fields in its config."""
    shutil.copytree(DATA / name / "assistant", folder)
    config = json.loads((folder / "config.json").read_text())
    for key, value in fields.items():
        (config["text_config"] if key in config["text_config"] else config)[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rows(target, assistant, length, more=()):
    """Logits of a draft after the first known tokens; the target may have read and rolled back more tokens."""
    owner = target.open()
    target.forward([Feed(owner, [*IDS[: length - 1], *more])])
    owner.keep(length - 1)
    session = assistant.follow(owner)
    made = [assistant.forward([Feed(session, IDS[1:length])])[0].logits[-1]]
    for step in range(1, STEPS):
        made.append(assistant.forward([Feed(session, [IDS[length - 1 + step]])])[0].logits[-1])
    return torch.stack(made)


def difference(name, folder, more=()):
    """The largest difference to transformers' logits, as a share of the largest of them."""
    target = gemma(name)
    assistant = AssistantBackend(str(folder), target)
    expected, worst = load_file(DATA / name / "reference.safetensors")["logits"], 0.0
    for place, right in enumerate(expected):
        made = rows(target, assistant, place + 2, more)
        seen = made.isfinite()
        if name == "shared":  # transformers gives other tokens the least logit less one
            assert torch.equal(seen, right > right.amin(-1, keepdim=True))
        worst = max(worst, float((made - right)[seen].abs().max() / expected.abs().max()))
    return worst


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers_at_every_step(name):
    """From every position, with windows that end before the text begins and after it."""
    assert difference(name, DATA / name / "assistant") < 1e-5


def test_keys_of_rejected_tokens_are_not_read():
    """The target has read two more tokens than are committed."""
    assert difference("shared", DATA / "shared" / "assistant", more=(7, 9)) < 1e-5
