"""Prediction layers (MTP): of a checkpoint itself, as transformers computes them, and in the layout of speculators."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed
from draftproof.backends.heads.published.mtp import _load, mtp_backend
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.backend import LeanBackend
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.verifier_parts import make_verifier
from support import head_references, published
from support.helpers import assert_other_rows_are_seen, assert_output_distribution, random_model, tiny_llama
from support.published import DATA
from support.qwen_mtp import in_blocks

PROVENANCE = json.loads((DATA / "provenance.json").read_text())
IDS, STEPS = PROVENANCE["tokens"], PROVENANCE["steps"]
PROMPTS = [[5, 9, 2, 7, 11, 3, 60, 41], [8, 8, 1], [70, 12, 33, 4, 4]]


@pytest.mark.parametrize(("name", "layers"), [("deepseek_v3", 1), ("deepseek_v3", 3), ("glm4_moe", 1), ("mellum", 1)])
def test_logits_are_transformers_own_at_every_step(tmp_path, monkeypatch, name, layers):
    """As its assisted generation drafts: each layer one token, from the most likely one of the layer before."""
    model = published.predicting(tmp_path / "model", name, monkeypatch, layers=layers)
    target, tokens = HFBackend(model, name=name), [*PROMPTS[0], 17]
    head, mtp = mtp_backend(target), MtpModel.from_pretrained(model)
    with torch.no_grad():
        states = model(input_ids=torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states[-1]
        places = torch.arange(1, len(tokens))[None]
        cache = MtpCache(config=model.config.get_mtp_config())
        drafted, expected, _ = mtp(torch.tensor([tokens[1:]]), states, None, places, cache)
    owner = target.open()
    target.forward([Feed(owner, tokens[:-1])])
    session, fed = head.follow(owner), tokens[1:]
    for step in range(layers):
        row = head.forward([Feed(session, fed)])[0].logits[-1]
        assert torch.allclose(row, expected[0, step], atol=1e-4)
        fed = [int(drafted[0, step])]
    assert expected.abs().max() > 0.5


@pytest.mark.grid(2)
@pytest.mark.parametrize(("name", "layers"), [("deepseek_v3", 1), ("deepseek_v3", 3), ("glm4_moe", 1), ("mellum", 1)])
def test_greedy_output_equals_transformers_token_for_token(tmp_path, monkeypatch, name, layers):
    """A batch of prompts of different lengths; rejected drafts are read again by every layer."""
    model = published.predicting(tmp_path / "model", name, monkeypatch, layers=layers)
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        made = model.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected.append(made[0, len(prompt) :].tolist())
    target = HFBackend(model, name=name)
    drafter = make_drafter("mtp", target=target, draft=None, stopper="fixed:3")
    outs = Engine(target, drafter, make_verifier("block")).generate(
        PROMPTS, SamplingParams(max_tokens=16, temperature=0)
    )
    assert [list(out.token_ids) for out in outs] == expected
    assert sum(out.stats.num_draft_tokens for out in outs) > 0


@pytest.mark.parametrize(
    ("name", "place"), [("glm4_moe", "model.layers.2.self_attn.o_proj"), ("mellum", "mtp.layers.0.self_attn.o_proj")]
)
def test_layers_in_fp8_are_read_with_their_scales_where_transformers_forgot_how_it_read_the_model(
    tmp_path, monkeypatch, name, place
):
    """As it does from 5.24 on; a layer without them drafts badly, and no output would show it."""
    published.predicting(tmp_path, name, monkeypatch)
    in_blocks(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    scales = stored[f"{place}.weight_scale_inv"].repeat_interleave(16, 0).repeat_interleave(16, 1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    vars(model).pop("_weight_conversions", None)
    found = _load(HFBackend(model, name=name)).layers[0].mtp_block.self_attn.o_proj.weight
    assert torch.allclose(found, stored[f"{place}.weight"].float() * scales)
    assert not torch.allclose(scales, torch.ones(()), atol=0.5)


def test_layers_after_a_rejection_are_those_of_a_fresh_session(tmp_path, monkeypatch):
    """Three layers: what two of them read of a rejected token must not stay."""
    target = HFBackend(published.predicting(tmp_path / "model", "deepseek_v3", monkeypatch, layers=3), name="m")
    head, tokens = mtp_backend(target), [5, 9, 2, 7, 11, 3, 60, 41]
    owner = target.open()
    target.forward([Feed(owner, tokens[:4])])
    session = head.follow(owner)
    head.forward([Feed(session, tokens[1:5])])
    for wrong in ([50], [51]):
        head.forward([Feed(session, wrong)])
    target.forward([Feed(owner, tokens[4:7])])
    fresh = head.follow(owner)
    session.rewind()
    session.keep(4)
    rows = []
    for one, first in ((session, tokens[5:8]), (fresh, tokens[1:8])):
        rows.append([head.forward([Feed(one, fed)])[0].logits[-1] for fed in (first, [6], [33])])
    assert torch.allclose(torch.stack(rows[0]), torch.stack(rows[1]), atol=1e-4)
    with pytest.raises(ValueError, match="drafts 3 tokens at most"):
        head.forward([Feed(session, [1])])


@pytest.mark.grid(1)
@pytest.mark.parametrize(("layers", "rule"), [(1, "block"), (2, "token")])
def test_exact_output_distribution(tmp_path, monkeypatch, layers, rule):
    """By enumeration, on a model with three tokens."""
    model = published.predicting(
        tmp_path / "m", "deepseek_v3", monkeypatch, layers=layers, vocab=3, dtype=torch.float64
    )
    target = HFBackend(model, name="tiny")

    def drafter():
        return make_drafter("mtp", target=target, draft=None, stopper="fixed:2")

    assert_output_distribution(target, drafter, rule, length=3)


def test_several_layers_draft_chains_and_one_layer_trees(tmp_path, monkeypatch):
    one = HFBackend(published.predicting(tmp_path / "1", "deepseek_v3", monkeypatch), name="one")
    drafter = make_drafter("mtp:x3", target=one, draft=None, stopper="fixed:2")
    assert drafter.name == "mtp:x3"
    out = Engine(one, drafter, make_verifier("trie_block")).generate(
        PROMPTS, SamplingParams(max_tokens=8, temperature=0)
    )
    plain = Engine(one).generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0))
    assert [each.token_ids for each in out] == [each.token_ids for each in plain]
    two = HFBackend(published.predicting(tmp_path / "2", "deepseek_v3", monkeypatch, layers=2), name="two")
    with pytest.raises(UserError, match="cannot read trees"):
        make_drafter("mtp:x3", target=two, draft=None, stopper="fixed:2")


# --- refusals --------------------------------------------------------------------------------------------------------


def test_targets_without_prediction_layers_are_refused():
    target = HFBackend(AutoModelForCausalLM.from_pretrained(DATA / "target"), name="tiny-target")
    with pytest.raises(UserError, match="tiny-target has no prediction layers of its own that are read here"):
        make_drafter("mtp", target=target, draft=None, stopper="fixed:2")


def test_checkpoints_that_lack_the_weights_are_refused(tmp_path, monkeypatch):
    """A config that names layers, and files without them: as many conversions are published."""
    published.predicting(tmp_path / "model", "deepseek_v3", monkeypatch)
    path = tmp_path / "model" / "model.safetensors"
    kept = {name: value for name, value in load_file(path).items() if ".layers.2." not in name}
    save_file(kept, path, metadata={"format": "pt"})
    target = HFBackend(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), name="cut")
    with pytest.raises(UserError, match=r"prediction layers of cut cannot be read .*: expected 1"):
        make_drafter("mtp", target=target, draft=None, stopper="fixed:2")
    unsaved = HFBackend(random_model(published.PREDICTING["deepseek_v3"](1, 97)), name="unsaved")
    with pytest.raises(UserError, match="prediction layers of unsaved cannot be read"):
        make_drafter("mtp", target=unsaved, draft=None, stopper="fixed:2")


def test_a_pass_that_differs_from_transformers_own_is_refused(tmp_path, monkeypatch):
    """Negative control of the check when a model is loaded: another mask."""
    from draftproof.backends.cache.layout import Layout

    target = HFBackend(published.predicting(tmp_path / "model", "deepseek_v3", monkeypatch), name="m")
    whole = Layout.mask
    monkeypatch.setattr(
        "draftproof.backends.heads.published.mtp.Layout.mask",
        lambda self, window, dtype: 0 * whole(self, window, dtype),
    )
    with pytest.raises(UserError, match="differ from transformers' own by"):
        mtp_backend(target)


# --- the layout of speculators ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [HFBackend, LeanBackend])
def test_a_published_layer_has_the_logits_of_speculators_at_every_step(make):
    assert head_references.mtp(make=make).share < 1e-5


def test_a_published_layer_drafts_for_its_target():
    target = HFBackend(AutoModelForCausalLM.from_pretrained(DATA / "target", dtype=torch.float32), name="tiny-target")
    greedy = SamplingParams(max_tokens=12, temperature=0)
    plain = Engine(target).generate([IDS[:5], IDS], greedy)
    drafter = make_drafter(f"mtp:{DATA / 'mtp'}", target=target, draft=None, stopper="fixed:9")
    outs = Engine(target, drafter).generate([IDS[:5], IDS], greedy)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    assert outs[0].stats.num_draft_tokens > 2 * outs[0].stats.num_drafts


@pytest.mark.grid(1)
@pytest.mark.parametrize("rule", ["block", "token"])
def test_exact_output_distribution_with_a_published_layer(tmp_path, rule):
    """By enumeration, and with rows of q that nothing was drawn from it fails."""
    target = tiny_llama()
    folder = published.mtp(tmp_path / "head", target)

    def drafter():
        return make_drafter(f"mtp:{folder}", target=target, draft=None, stopper="fixed:2")

    assert_output_distribution(target, drafter, rule, length=3)
    assert_other_rows_are_seen(target, drafter, rule, length=3, tolerance=1e-4)
