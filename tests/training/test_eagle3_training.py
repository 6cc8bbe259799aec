"""Training of EAGLE-3 and P-EAGLE heads: what is trained is drafted, and what is written is read by `speculators`."""

import json
import os
import subprocess

import pytest
import torch
from safetensors.torch import load_file

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed
from draftproof.backends.heads.published.eagle3 import eagle3_backend
from draftproof.backends.heads.published.peagle import PEagleBackend
from draftproof.backends.hf.backend import HFBackend
from draftproof.models import resolve
from draftproof.training.eagle3_net import PEagleModule, default_layers
from draftproof.training.feature_head import make_feature_head
from draftproof.training.feature_loss import Frame, feature_loss, steps
from draftproof.training.feature_rows import FeatureStore, TrainingRow
from support.helpers import CONFIGS, random_model
from support.small_heads import job, random_net, whole_and_interrupted, write, write_texts

REFERENCE = os.environ.get("DRAFTPROOF_SPECULATORS")  # a Python that has the package


@pytest.mark.parametrize("own_output", [False, True])
def test_step_k_computes_the_row_of_the_kth_drafted_token(tmp_path, own_output):
    """The unrolled pass of training at every position equals a draft of the written head from there."""
    target = HFBackend(random_model(CONFIGS["llama"]()), name="llama")
    net = random_net((0, 1, 2), own_output=own_output)
    rows = [TrainingRow(tuple((7 * i + j * j) % 97 for j in range(12))) for i in range(2)]
    with pytest.raises(IndexError):
        FeatureStore(target, [rows], length=12, cache=tmp_path, key="k", layers=[9]).shard(0)
    shard = FeatureStore(target, [rows], length=12, cache=tmp_path, key="k", layers=[0, 1]).shard(0)
    net = random_net((0, 1), own_output=own_output)
    frame = Frame(target.model.get_input_embeddings(), target.output_rows(net.ids).clone(), autocast=False)
    weight = frame.output if net.output is None else net.output.weight
    trained = [net.predicted(out[0]) @ weight.T for out, _ in steps(net, shard, frame, 4)]
    head, tokens = eagle3_backend(write(net, target, tmp_path / "head"), target), shard.ids[0].tolist()
    for first in range(1, 8):
        owner = target.open()
        target.forward([Feed(owner, tokens[:first])])
        session, fed = head.follow(owner), tokens[1 : first + 1]
        for step in range(4):
            row = head.forward([Feed(session, fed)])[0].logits[-1]
            assert torch.allclose(row, trained[step][first + step], atol=1e-4), (first, step)
            fed = [tokens[first + step + 1]]


@pytest.mark.parametrize("places", [2, 4])
def test_step_k_computes_the_row_of_the_kth_masked_place(tmp_path, places):
    """The places of the loss at every position equal those of the written head after the known tokens."""
    target = HFBackend(random_model(CONFIGS["llama"]()), name="llama")
    rows = [TrainingRow(tuple((7 * i + j * j) % 97 for j in range(12))) for i in range(2)]
    shard = FeatureStore(target, [rows], length=12, cache=tmp_path, key="k", layers=[0, 1]).shard(0)
    net = random_net((0, 1), make=PEagleModule, mask_token=5, places=places)
    frame = Frame(target.model.get_input_embeddings(), target.output_rows(net.ids).clone(), autocast=False)
    trained = [net.predicted(out[0]) @ frame.output.T for out, _ in steps(net, shard, frame, places)]
    head, tokens = PEagleBackend(write(net, target, tmp_path / "head"), target), shard.ids[0].tolist()
    assert head.deepest == places
    for first in range(1, 12 - places):
        owner = target.open()
        target.forward([Feed(owner, tokens[:first])])
        session = head.follow(owner)
        head.forward([Feed(session, tokens[1 : first + 1])])
        found = torch.stack([trained[step][first + step] for step in range(places)])
        assert torch.allclose(session.places.logits, found, atol=1e-4), first
    assert (found[1] - found[0]).abs().max() > 0.1  # the places differ
    altered = random_net((0, 1), make=PEagleModule, mask_token=6, places=places)
    other = [altered.predicted(out[0]) @ frame.output.T for out, _ in steps(altered, shard, frame, places)]
    assert torch.equal(other[0], trained[0])
    assert not torch.allclose(other[1][2:], trained[1][2:], atol=1e-2)  # the mask token counts


def test_the_mask_is_learnt(tmp_path):
    """Every place has a gradient for the vector in place of the states, but the first one."""
    target = HFBackend(random_model(CONFIGS["llama"]()), name="llama")
    rows = [TrainingRow(tuple((7 * i + j * j) % 97 for j in range(12))) for i in range(2)]
    shard = FeatureStore(target, [rows], length=12, cache=tmp_path, key="k", layers=[0, 1]).shard(0)
    net = random_net((0, 1), make=PEagleModule, mask_token=5, places=3).requires_grad_()
    for unroll, learnt in ((1, False), (3, True)):
        frame = Frame(target.model.get_input_embeddings(), target.output_rows(net.ids).clone(), unroll, autocast=False)
        net.zero_grad()
        feature_loss(net, shard, frame).value.backward()
        assert (net.mask_hidden.grad is not None) == learnt
    assert net.mask_hidden.grad.abs().max() > 0


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path)


def test_layers_are_low_middle_and_high():
    assert default_layers(30) == (2, 15, 27)
    assert default_layers(6) == (1, 3, 5)
    with pytest.raises(UserError, match="expected 4 layers or more, of which it reads three, got 2"):
        default_layers(2)


@pytest.mark.grid(1)
@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_a_trained_head_drafts_for_its_target_and_learns(tmp_path, texts, kind):
    made = job(tmp_path, texts, "head", format=kind)
    metrics = make_feature_head(made)
    history = json.loads((made.out / "provenance.json").read_text())["history"]
    losses = [record["loss"] for record in history if "loss" in record]
    assert losses[-1] < losses[0] - 0.5
    assert metrics["text"]["accept_1"] > 0.2
    config = json.loads((made.out / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    greedy = SamplingParams(max_tokens=20, temperature=0)
    drafting = Engine.load("embedded:stories", drafter=f"{kind}:{made.out}", stopper="fixed:3")
    out, plain = (
        drafting.generate("Once", greedy)[0],
        Engine.load("embedded:stories", drafter="none").generate("Once", greedy)[0],
    )
    assert out.text == plain.text
    assert out.stats.num_accepted_tokens > 0
    with pytest.raises(UserError, match="take a head that was made for this target"):
        Engine.load("embedded:stories-draft", drafter=f"{kind}:{made.out}")


def test_formats_that_are_none_are_refused(tmp_path, texts):
    with pytest.raises(UserError, match="format: expected one of draftproof, eagle3, peagle, got 'gguf'"):
        job(tmp_path, texts, "no", format="gguf")
    with pytest.raises(UserError, match="start continues a head of format draftproof"):
        job(tmp_path, texts, "no", start=tmp_path)
    with pytest.raises(UserError, match="unroll: expected 2 to 8 for format peagle, got 1"):
        job(tmp_path, texts, "no", format="peagle", unroll=1)


@pytest.mark.slow
def test_an_interrupted_training_of_masked_places_gives_the_same_head(tmp_path, texts, monkeypatch):
    jobs = (job(tmp_path, texts, name, format="peagle") for name in ("whole", "cut"))
    one, two = whole_and_interrupted(*jobs, monkeypatch, 17)
    assert "mask_hidden" in one
    assert all(torch.equal(value, two[name]) for name, value in one.items())


READ = """
import json, sys, torch
from safetensors.torch import save_file
from speculators.models.eagle3.core import Eagle3DraftModel
folder, out = sys.argv[1:]
model = Eagle3DraftModel.from_pretrained(folder, attn_implementation="eager").float().eval()
torch.manual_seed(0)
width, vocab = model.hidden_size, model.verifier_vocab_size
features, ids = torch.randn(1, 9, 3 * width), torch.randint(vocab, (1, 9))
made = []
model.lm_head.register_forward_hook(lambda m, i, o: made.append(o.detach()[0]))
with torch.no_grad():
    model(hidden_states=features, input_ids=ids, document_ids=torch.zeros_like(ids), ttt_steps=3)
save_file({"features": features[0], "ids": ids[0], "logits": torch.stack(made), "d2t": model.d2t}, out)
"""


READ_PLACES = """
import sys, torch
from safetensors.torch import save_file
from speculators.losses import resolve_loss_config
from speculators.models.peagle import core
folder, out = sys.argv[1:]
model = core.PEagleDraftModel.from_pretrained(folder, attn_implementation="eager").float().eval()
torch.manual_seed(0)
width, vocab = model.hidden_size, model.verifier_vocab_size
features, ids = torch.randn(1, 9, 3 * width), torch.randint(vocab, (1, 9))
places, sample = {}, core.generate_cod_sample_indices
def watched(**given):
    places["anchor"], places["depth"] = sample(**given)
    return places["anchor"], places["depth"]
core.generate_cod_sample_indices = watched
made = []
model.lm_head.register_forward_hook(lambda m, i, o: made.append(o.detach()[0]))
with torch.no_grad():
    model(hidden_states=features, input_ids=ids, document_ids=torch.zeros_like(ids), loss_mask=torch.ones_like(ids),
          verifier_last_hidden_states=torch.randn(1, 9, width), loss_config=resolve_loss_config("ce", "eager"),
          num_depths=3, down_sample_ratio=1.0, down_sample_ratio_min=1.0)
kept = {"features": features[0], "ids": ids[0], "logits": made[0], "d2t": model.d2t, **places}
save_file({name: value.contiguous() for name, value in kept.items()}, out)
"""


def as_the_package_reads(made, tmp_path, code):
    """What the package computes from a trained head: its directory names the target's, and code writes tensors."""
    config = json.loads((made.out / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = resolve("embedded:stories")
    config["transformer_layer_config"]["_attn_implementation"] = "eager"
    read = tmp_path / "read"
    read.mkdir()
    (read / "config.json").write_text(json.dumps(config))
    (read / "model.safetensors").write_bytes((made.out / "model.safetensors").read_bytes())
    result = tmp_path / "out.safetensors"
    subprocess.run([REFERENCE, "-c", code, str(read), str(result)], check=True, timeout=300, capture_output=True)
    return load_file(result)


needs_speculators = pytest.mark.skipif(not REFERENCE, reason="DRAFTPROOF_SPECULATORS names no Python with the package")


@pytest.mark.slow
@needs_speculators
def test_speculators_reads_what_is_written(tmp_path, texts):
    """The package loads the head with its target, and computes the logits of our drafter."""
    made = job(tmp_path, texts, "head")
    make_feature_head(made)
    found = as_the_package_reads(made, tmp_path, READ)
    target = Engine.load("embedded:stories", drafter="none", backend="hf", dtype="float32").target
    head, ids = eagle3_backend(str(made.out), target), found["ids"].tolist()
    assert torch.equal(found["d2t"] + torch.arange(200), head.net.ids)
    worst = 0.0
    for place in range(6):
        owner = target.open()
        owner.remember(found["features"][: place + 1], head.layers)
        owner.read([0, *ids[:place]])
        session, fed = head.follow(owner), ids[: place + 1]
        for step in range(3):
            row = head.forward([Feed(session, fed)])[0].logits[-1]
            worst = max(worst, float((row - found["logits"][step, place]).abs().max()))
            fed = [ids[place + 1 + step]]
    assert worst < 1e-5 * float(found["logits"].abs().max())


@pytest.mark.slow
@needs_speculators
def test_speculators_reads_masked_places(tmp_path, texts):
    """The same for a head that drafts all tokens in one pass."""
    made = job(tmp_path, texts, "head", format="peagle", unroll=3)
    make_feature_head(made)
    found = as_the_package_reads(made, tmp_path, READ_PLACES)
    target = Engine.load("embedded:stories", drafter="none", backend="hf", dtype="float32").target
    head, ids = PEagleBackend(str(made.out), target), found["ids"].tolist()
    assert head.deepest == 3
    seen, worst = set(), 0.0
    for anchor, depth, row in zip(found["anchor"].tolist(), found["depth"].tolist(), found["logits"], strict=True):
        if anchor < 0:
            continue
        owner = target.open()
        owner.remember(found["features"][: anchor + 1], head.layers)
        owner.read([0, *ids[:anchor]])
        session = head.follow(owner)
        head.forward([Feed(session, ids[: anchor + 1])])
        worst = max(worst, float((session.places.logits[depth] - row).abs().max()))
        seen.add(depth)
    assert seen == {0, 1, 2}
    assert worst < 1e-5 * float(found["logits"].abs().max())
