"""Draft heads beside what packages compute with them: the largest difference of rows, over all steps and positions."""

import json
import math
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file

from draftproof.backends.base import Feed, Session
from draftproof.backends.heads.published.assistant import AssistantBackend
from draftproof.backends.heads.published.dflash import DFlashBackend, DFlashNet
from draftproof.backends.heads.published.dflash2 import DFlash2Net
from draftproof.backends.heads.published.dspark import DSparkNet
from draftproof.backends.heads.published.eagle3 import eagle3_backend
from draftproof.backends.heads.published.mtp import mtp_backend
from draftproof.backends.heads.published.mtp_head import mtp_head_backend
from draftproof.backends.heads.published.peagle import PEagleBackend
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.module_backend import packing
from draftproof.backends.loading.by_name import load_backend
from draftproof.backends.loading.options import LoadOptions
from support.helpers import random_model
from support.published import DATA, IDS, STEPS, reference, tiny_target
from support.qwen_mtp import DATA as QWEN_DATA
from support.qwen_mtp import as_head, written_with

EAGLE3 = ("eagle3_llama", "eagle3_residual", "eagle3_qwen3", "eagle3_sliding")
DFLASH = ("dflash_full", "dflash_sliding", "dflash_anchor")
DSPARK = ("dspark_vanilla", "dspark_gated", "dspark_rnn")
DFLASH2 = ("dflash2_windows", "dflash2_anchor")
QWEN = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# Layers that share keys, and clusters of tokens; values that are keys, and all tokens; the same of the unified family.
ASSISTANTS = ("shared", "equal", "unified")
NETS = {"dflash": DFlashNet, "dspark": DSparkNet, "dflash2": DFlash2Net}
ASSISTANT_DATA = DATA.parent / "assistants"
ASSISTANT_STEPS = json.loads((ASSISTANT_DATA / "provenance.json").read_text())["steps"]


class Difference(NamedTuple):
    """The largest difference as a share of the largest number, inf where other tokens have one; and the rows read.

    `accepted` is the largest difference of a predicted acceptance.
    """

    share: float
    rows: int
    accepted: float = 0.0


def share(made, right, scale):
    """The largest difference of rows, as a share; inf where numbers stand for other tokens."""
    if not torch.equal(made.isfinite(), right.isfinite()):
        return math.inf
    return float((made - right).nan_to_num(0).abs().max() / scale)


def drafted_rows(target, head, place, steps):
    """Rows of a draft along the known tokens, after the target has read the tokens up to `place`."""
    owner = target.open()
    target.forward([Feed(owner, IDS[: place + 1])])
    session = head.follow(owner)
    known = IDS[1 : place + 2]
    rows = [head.forward([Feed(session, known)])[0].logits[-1]]
    for step in range(1, steps):
        if place + 1 + step == len(IDS):
            break
        rows.append(head.forward([Feed(session, [IDS[place + 1 + step]])])[0].logits[-1])
    return torch.stack(rows)


def eagle3(name, make=HFBackend, data=DATA):
    """Every step from every position, and the target's states.

    A window ends earlier in the package's later steps: those are left out.
    """
    target, expected = tiny_target(make, data=data), reference(name, data)
    head = eagle3_backend(str(data / name), target)
    owner = target.open()
    target.forward([Feed(owner, IDS[:-1])])
    worst = share(owner.states_of(head.layers), expected["features"], expected["features"].abs().max())
    logits, count = expected["logits"], 0
    for place in range(logits.shape[1]):
        rows = drafted_rows(target, head, place, STEPS)
        seen = len(rows) if name != "eagle3_sliding" or place + STEPS <= 4 else 1
        worst = max(worst, share(rows[:seen], logits[:seen, place], logits.abs().max()))
        count += seen
    return Difference(worst, count)


def peagle(name="peagle", make=HFBackend, data=DATA):
    """Every place from every position from which the package drafts.

    It samples the places that it trains on; a place before the first token is an artefact of that.
    """
    target, expected = tiny_target(make, data=data), reference(name, data)
    head = PEagleBackend(str(data / name), target)
    owner = target.open()
    target.forward([Feed(owner, IDS[:-1])])
    seen, worst, scale = [], 0.0, expected["logits"].abs().max()
    places = zip(expected["anchor"].tolist(), expected["depth"].tolist(), expected["logits"], strict=True)
    for anchor, depth, row in places:
        if anchor < 0:
            continue
        session = head.follow(owner)
        head.forward([Feed(session, IDS[1 : anchor + 2])])
        worst = max(worst, share(session.places.logits[depth], row, scale))
        seen.append(depth)
    assert set(seen) == set(range(STEPS))
    return Difference(worst, len(seen))


def read_block_head(folder, target):
    """A head that drafts a block, by the algorithm that its config names."""
    config = json.loads((folder / "config.json").read_text())
    return DFlashBackend(str(folder), target, NETS[config["speculators_model_type"]])


def block_outputs(target, head, anchor):
    """What the head gives at every place of a block after the known tokens up to `anchor`, along the known tokens."""
    owner = target.open()
    target.forward([Feed(owner, IDS[:anchor])])
    session = head.follow(owner)
    outputs = head.forward([Feed(session, IDS[1 : anchor + 1])])
    for place in range(1, head.deepest):
        outputs += head.forward([Feed(session, [IDS[anchor + place]])])
    return outputs


def block(name, make=HFBackend, data=DATA, folder=None):
    """Every place of blocks from every position, and predictions of acceptance; `folder` may hold another head."""
    target, expected = tiny_target(make, data=data), reference(name, data)
    head = read_block_head(folder or data / name, target)
    scale = expected["logits"][expected["logits"].isfinite()].abs().max()
    first, rows, predictions = STEPS - head.deepest, [], [0.0]
    for place, anchor in enumerate(expected["anchor"].tolist()):
        if not anchor:  # before the first token there are no states to read
            continue
        outputs = block_outputs(target, head, anchor)
        made = torch.cat([output.logits for output in outputs])
        rows.append(share(made, expected["logits"][place, first:], scale))
        if "accepted" in expected:
            accepted = torch.cat([output.accepted for output in outputs])
            predictions.append(float((accepted - expected["accepted"][place, first:]).abs().max()))
    assert len(rows) == len(IDS) - STEPS - 1
    return Difference(max(rows), len(rows) * head.deepest, max(predictions))


def stepwise(head, states, logits, last):
    """Every step of a head from every position; its target's states are given."""
    worst, scale = 0.0, logits.abs().max()
    for place in range(logits.shape[1]):
        owner = Session()
        owner.remember(states[: place + 1])
        owner.read(IDS[: place + 1])
        session, fed = head.follow(owner), IDS[1 : place + 2]
        for step in range(last):
            row = head.forward([Feed(session, fed)])[0].logits[-1]
            worst = max(worst, share(row, logits[step, place], scale))
            fed = [IDS[place + 2 + step]] if place + 2 + step < len(IDS) else []
    return Difference(worst, last * logits.shape[1])


def mtp(name="mtp", make=HFBackend, data=DATA):
    """Every step of a prediction layer in the package's layout."""
    expected = reference(name, data)
    model = transformers.AutoModelForCausalLM.from_pretrained(data / "target", dtype=torch.float32)
    with torch.no_grad():  # the package read its own embedding and output layer
        model.model.embed_tokens.weight.copy_(expected["embed"])
        model.lm_head.weight.copy_(expected["lm_head"])
    head = mtp_head_backend(str(data / name), make(model, name="tiny-target"))
    return stepwise(head, expected["features"], expected["logits"], STEPS)


def qwen_model(name, data=QWEN_DATA):
    """A random model with the embedding and the output layer of a reference, and the tensors `mtp.*` of that."""
    kept = load_file(data / name / "reference.safetensors")
    config = transformers.AutoConfig.for_model(**json.loads((data / name / "config.json").read_text()))
    model = random_model(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(kept["embed"])
        model.lm_head.weight.copy_(kept["lm_head"])
    return model, {key: value for key, value in kept.items() if key.startswith("mtp.")}


def read_folder(folder):
    """A checkpoint in float32."""
    return load_backend(str(folder), LoadOptions(dtype="float32"))


def qwen_first_step(name, data=QWEN_DATA):
    """The first step of the layer in a checkpoint, from every position."""
    kept, (model, own) = load_file(data / name / "reference.safetensors"), qwen_model(name, data)
    with tempfile.TemporaryDirectory() as folder:
        head = mtp_backend(read_folder(written_with(Path(folder), model, own)))
        return stepwise(head, kept["states"], kept["logits"][None], 1)


def write_qwen_head(folder, name, own, data=QWEN_DATA, **fields):
    """A head with the package's config for a family, and its folder."""
    folder.mkdir()
    config = json.loads((data / name / "head" / "config.json").read_text())
    config["transformer_layer_config"] |= fields
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: value.contiguous() for key, value in as_head(own).items()}, folder / "model.safetensors")
    return folder


def qwen_head(name, data=QWEN_DATA):
    """Every step of the same layer as a head in the package's layout."""
    kept, (model, own) = load_file(data / name / "reference.safetensors"), qwen_model(name, data)
    logits = load_file(data / name / "head" / "steps.safetensors")["logits"]
    with tempfile.TemporaryDirectory() as folder:
        target = read_folder(written_with(Path(folder) / "target", model, {}))
        head = mtp_head_backend(str(write_qwen_head(Path(folder) / "head", name, own, data)), target)
        assert head.deepest == len(logits)
        return stepwise(head, kept["states"], logits, len(logits))


def gemma(name, make=HFBackend, data=ASSISTANT_DATA, *, check=False):
    """The target of a reference assistant."""
    model = transformers.AutoModelForCausalLM.from_pretrained(data / name / "target", dtype=torch.float32)
    return make(model, name="gemma", check=check, **packing(make))


def assistant_rows(target, head, length, more=()):
    """Logits of a draft after the first known tokens; the target may have read and rolled back more tokens."""
    owner = target.open()
    target.forward([Feed(owner, [*IDS[: length - 1], *more])])
    owner.keep(length - 1)
    session = head.follow(owner)
    fed = [IDS[1:length], *([token] for token in IDS[length : length + ASSISTANT_STEPS - 1])]
    return torch.cat([head.forward([Feed(session, tokens)])[0].logits for tokens in fed])


def assistant(name, make=HFBackend, data=ASSISTANT_DATA, folder=None, more=()):
    """Every step of a Gemma 4 assistant from every position; `folder` may hold another assistant."""
    target = gemma(name, make, data)
    head = AssistantBackend(str(folder or data / name / "assistant"), target)
    expected, worst, count = load_file(data / name / "reference.safetensors")["logits"], 0.0, 0
    for place, right in enumerate(expected):
        made = assistant_rows(target, head, place + 2, more)
        seen = made.isfinite()
        if name == "shared" and not torch.equal(seen, right > right.amin(-1, keepdim=True)):
            return Difference(math.inf, count)  # transformers gives tokens of other clusters the least logit less one
        worst = max(worst, float((made - right)[seen].abs().max() / expected.abs().max()))
        count += len(right)
    return Difference(worst, count)
