"""Heads that others published: logits as `speculators` computes them, exact distributions, refusals by name."""

import copy
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed, unread
from draftproof.backends.heads.published.dflash import DFlashBackend
from draftproof.backends.heads.published.eagle import eagle_backend
from draftproof.backends.heads.published.eagle3 import eagle3_backend
from draftproof.backends.heads.published.medusa import MedusaBackend
from draftproof.backends.heads.published.peagle import PEagleBackend
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.backend import LeanBackend
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.verifier_parts import make_verifier
from draftproof.tree import TokenTree
from support import head_references, published
from support.head_references import DFLASH, EAGLE3, drafted_rows
from support.helpers import (
    CONFIGS,
    assert_other_rows_are_seen,
    assert_output_distribution,
    embedded_model,
    random_model,
    tiny_llama,
    tokenizer,
)
from support.published import DATA, IDS, STEPS, WRITERS, changed, reference, tiny_target

PROMPTS = ["Once upon a time", "The little dog", "One day, Tim and his mom went to the"]


@pytest.mark.parametrize("make", [HFBackend, LeanBackend])
def test_the_target_of_the_references_passes_the_check_of_models(make):
    """Once here, and in no other test of heads."""
    tiny_target(make, check=True)


# --- eagle3 as speculators computes it -------------------------------------------------------------------------------


@pytest.mark.grid(3)
@pytest.mark.parametrize("make", [HFBackend, LeanBackend])
@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3_logits_are_those_of_speculators_at_every_step(name, make):
    """The target's states of its layers too."""
    assert head_references.eagle3(name, make).share < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("package", ["speculators", "transformers"])
def test_logits_are_those_that_the_packages_compute_now(package):
    """Live: scripts/compare_heads.py makes the references again where the package is installed."""
    python = os.environ.get(f"DRAFTPROOF_{package.upper()}")
    if not python:
        pytest.skip(f"DRAFTPROOF_{package.upper()} names no Python of an environment with {package}")
    script = DATA.parents[3] / "scripts" / "compare_heads.py"
    subprocess.run([sys.executable, script, f"--{package}", python, "-q"], check=True, timeout=500)


def test_other_layers_or_another_map_change_the_logits(tmp_path):
    """Negative control of the comparison above."""
    target, expected = tiny_target(), reference("eagle3_llama")["logits"]
    folder = tmp_path / "other"
    shutil.copytree(DATA / "eagle3_llama", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eagle_aux_hidden_state_layer_ids": [3, 2, 4]}))
    rows = drafted_rows(target, eagle3_backend(str(folder), target), 5, 1)
    assert (rows - expected[:1, 5]).abs().max() > 0.1


def test_a_tree_of_an_eagle3_head_gives_the_rows_of_its_paths():
    target = tiny_target()
    head = eagle3_backend(str(DATA / "eagle3_residual"), target)
    owner = target.open()
    target.forward([Feed(owner, IDS[:4])])
    session = head.follow(owner)
    head.forward([Feed(session, IDS[1:5])])
    head.forward([Feed(session, (), TokenTree(torch.tensor([11, 6]), (-1, -1)))])
    rows = head.forward([Feed(session, (), TokenTree(torch.tensor([3, 8]), (1, 0), 2))])[0].logits
    for row, path in zip(rows, ([6, 3], [11, 8]), strict=True):
        alone = head.follow(owner)
        head.forward([Feed(alone, IDS[1:5])])
        for token in path:
            found = head.forward([Feed(alone, [token])])[0].logits[-1]
        assert torch.allclose(row, found, atol=1e-4)


@pytest.mark.parametrize("original", [False, True])
def test_both_layouts_of_eagle3_are_one_head(tmp_path, original):
    """SafeAILab's layout, whose first layer is called midlayer, gives the rows of the same weights in the other one."""
    target = tiny_target()
    head = eagle3_backend(str(published.eagle3(tmp_path / "a", target, ids=[1, 5, 6, 30], original=original)), target)
    other = eagle3_backend(str(published.eagle3(tmp_path / "b", target, ids=[1, 5, 6, 30])), target)
    assert head.net.ids.tolist() == [1, 5, 6, 30]
    assert torch.equal(drafted_rows(target, head, 4, 3), drafted_rows(target, other, 4, 3))


# --- P-EAGLE as speculators computes it ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [HFBackend, LeanBackend])
def test_all_places_of_peagle_are_those_of_speculators(make):
    assert head_references.peagle(make=make).share < 1e-5


def test_peagle_reads_only_new_tokens_in_the_next_round():
    """Masked places leave nothing behind: a second round gives the rows of a fresh session, in one pass."""
    target = tiny_target()
    head = PEagleBackend(str(DATA / "peagle"), target)
    owner = target.open()
    target.forward([Feed(owner, IDS[:6])])
    session, fresh = head.follow(owner), head.follow(owner)
    head.forward([Feed(session, IDS[1:4])])
    head.forward([Feed(session, [30])])
    session.rewind()
    assert unread(session, IDS[1:7]) == IDS[4:7]
    head.forward([Feed(session, IDS[4:7])])
    head.forward([Feed(fresh, IDS[1:7])])
    assert torch.allclose(session.places.logits, fresh.places.logits, atol=1e-4)
    assert session.inner.length == 6


# --- DFlash as speculators computes it -------------------------------------------------------------------------------


def block_rows(target, head, known):
    """All rows of a block after known tokens, whose last one the target has not read."""
    owner = target.open()
    target.forward([Feed(owner, known[:-1])])
    session = head.follow(owner)
    head.forward([Feed(session, known[1:])])
    return session.places.logits


@pytest.mark.parametrize("make", [HFBackend, LeanBackend])
@pytest.mark.parametrize("name", DFLASH)
def test_dflash_blocks_are_those_of_speculators_from_every_place(name, make):
    """Full attention, windows that end at the block, causal and not, and blocks that draft at the committed token."""
    assert head_references.block(name, make).share < 1e-5


@pytest.mark.parametrize(
    "fields",
    [
        {"aux_hidden_state_layer_ids": [3, 0]},
        {"mask_token_id": 4},
        {"sliding_window_non_causal": True},
        {"transformer_layer_config__sliding_window": 2},
        {"transformer_layer_config__layer_types": ["sliding_attention", "full_attention"]},
    ],
)
def test_other_dflash_fields_change_the_logits(tmp_path, fields):
    """Negative control of the comparison above."""
    target, expected = tiny_target(), reference("dflash_sliding")
    head = DFlashBackend(str(changed(tmp_path / "head", "dflash_sliding", **fields)), target)
    place = expected["anchor"].tolist().index(7)
    made = block_rows(target, head, IDS[:8])
    assert (made - expected["logits"][place, 1:]).abs().max() > 0.01 * expected["logits"].abs().max()


def test_dflash_reads_only_new_states_in_the_next_round():
    """Blocks leave nothing behind: a second round, in a batch, gives the rows of fresh sessions."""
    target = tiny_target()
    head = DFlashBackend(str(DATA / "dflash_sliding"), target)
    owners = [target.open(), target.open()]
    target.forward([Feed(owners[0], IDS[:3]), Feed(owners[1], IDS[:6])])
    sessions = [head.follow(owner) for owner in owners]
    head.forward([Feed(sessions[0], IDS[1:4]), Feed(sessions[1], IDS[1:7])])
    head.forward([Feed(session, [30]) for session in sessions])
    target.forward([Feed(owners[0], IDS[3:9])])
    for session in sessions:
        session.rewind()
    assert unread(sessions[0], IDS[1:10]) == IDS[4:10]
    head.forward([Feed(sessions[0], IDS[4:10]), Feed(sessions[1], unread(sessions[1], IDS[1:7]))])
    for session, length in zip(sessions, (10, 7), strict=True):
        assert torch.allclose(session.places.logits, block_rows(target, head, IDS[:length]), atol=1e-4)
        assert session.inner.length == length - 1


@pytest.mark.parametrize(
    ("fields", "theirs"),
    [({}, {}), ({"sliding_window_non_causal": True}, {"causal": False}), ({}, {"attention_value_scale": None})],
)
def test_both_layouts_of_dflash_are_one_head(tmp_path, fields, theirs):
    """The authors' layout counts layers from the one after the embedding."""
    target = tiny_target()
    ids, layers = [1, 5, 6, 30], (1, 3)
    folders = (
        published.dflash(tmp_path / "a", target, ids=ids, layers=layers, **fields),
        published.dflash(tmp_path / "b", target, ids=ids, layers=layers, original=True, **theirs),
    )
    rows = [block_rows(target, DFlashBackend(str(folder), target), IDS[:9]) for folder in folders]
    assert rows[0].shape == (4, 4)
    assert torch.equal(*rows)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"block_size": 1}, "has block_size 1: expected 2 to 64"),
        ({"mask_token_id": 40}, "has mask_token_id 40: expected 0 to 39, a token of tiny-target"),
        ({"aux_hidden_state_layer_ids": [0, 9]}, "has 7 layers: expected different numbers from 0 to 7"),
        ({"aux_hidden_state_layer_ids": [0]}, r"fc.weight has shape \[16, 32\]"),
        ({"speculators_model_type": "dflash2"}, "of algorithm dflash2: use drafter dflash2:"),
        ({"transformer_layer_config__num_hidden_layers": 1}, "layer_types|does not name here"),
    ],
)
def test_dflash_heads_that_do_not_fit_are_refused(tmp_path, fields, words):
    folder = changed(tmp_path / "head", "dflash_sliding", **fields)
    with pytest.raises(UserError, match=words):
        make_drafter(f"dflash:{folder}", target=tiny_target(), draft=None, stopper="fixed:2")


def test_dflash_fields_that_change_attention_are_refused(tmp_path):
    target = tiny_target()
    folder = published.dflash(tmp_path / "head", target, original=True, attention_sink_bias=True)
    with pytest.raises(UserError, match=r"dflash_config.attention_sink_bias True, which is not read here: expected"):
        DFlashBackend(str(folder), target)


# --- EAGLE and Medusa, computed plainly from the papers ---------------------------------------------------------------


@pytest.mark.parametrize("make", [HFBackend, LeanBackend])
@pytest.mark.parametrize(("depth", "bias"), [(1, True), (2, False)])
def test_eagle_logits_are_those_of_the_paper(tmp_path, depth, bias, make):
    target = tiny_target(make)
    folder = published.eagle(tmp_path / "head", target, depth=depth, bias=bias)
    head = eagle_backend(str(folder), target)
    output = load_file(DATA / "target" / "model.safetensors")["lm_head.weight"]
    for place in (0, 3, 7):
        owner = target.open()
        target.forward([Feed(owner, IDS[: place + 1])])
        expected = published.eagle_rows(folder, owner.states, IDS[: place + 1 + STEPS], output, depth)
        rows = drafted_rows(target, head, place, STEPS)
        assert (rows - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize(("depth", "prefix"), [(1, ""), (2, "medusa_head.")])
def test_medusa_rows_are_those_of_the_paper(tmp_path, depth, prefix):
    target = tiny_target()
    folder = published.medusa(tmp_path / "head", target, depth=depth, prefix=prefix)
    head = MedusaBackend(str(folder), target)
    owner = target.open()
    target.forward([Feed(owner, IDS[:6])])
    session = head.follow(owner)
    first = head.forward([Feed(session, IDS[1:7])])[0].logits
    second = head.forward([Feed(session, [3])])[0].logits
    tree = head.forward([Feed(session, (), TokenTree(torch.tensor([5, 6, 7]), (-1, -1, 0)))])[0].logits
    expected = published.medusa_rows(folder, owner.states[5], depth=depth, prefix=prefix)
    assert torch.allclose(torch.cat([first, second]), expected[:2], atol=1e-4)
    assert torch.allclose(tree, expected[[2, 2, 3]], atol=1e-4)
    with pytest.raises(ValueError, match="drafts 4 tokens at most"):
        head.forward([Feed(session, (), TokenTree(torch.tensor([5, 6]), (2, 3), 3))])


def test_one_pass_drafts_all_tokens(tmp_path, monkeypatch):
    """Heads of one pass compute once a round, whatever the length; a longer draft than they have places is cut."""
    kinds = {"medusa": MedusaBackend, "peagle": PEagleBackend, "dflash": DFlashBackend, "dspark": DFlashBackend}
    for name, kind in kinds.items():
        target = story_target()
        folder = WRITERS[name](tmp_path / name, target)
        calls = []
        compute = kind._compute
        monkeypatch.setattr(
            kind, "_compute", lambda self, sessions, c=compute, n=calls: n.append(1) or c(self, sessions)
        )
        drafter = make_drafter(f"{name}:{folder}", target=target, draft=None, stopper="fixed:9")
        out = Engine(target, drafter, tokenizer=tokenizer()).generate(
            PROMPTS[:1], SamplingParams(max_tokens=20, seed=1)
        )
        stats = out[0].stats
        assert len(calls) == stats.num_drafts
        assert stats.num_draft_tokens > 3 * stats.num_drafts
        assert len(stats.num_accepted_tokens_per_pos) <= 4


# --- engines ---------------------------------------------------------------------------------------------------------


def story_target(make=HFBackend):
    return make(copy.deepcopy(embedded_model("target")), name="target")


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("name", "make", "chains"),
    [
        ("eagle3", LeanBackend, 3),
        ("eagle", HFBackend, 1),
        ("medusa", HFBackend, 3),
        ("peagle", LeanBackend, 1),
        ("dflash", LeanBackend, 2),
        ("dspark", HFBackend, 3),
        ("dflash2", LeanBackend, 1),
        *(pytest.param(name, LeanBackend, 2, marks=pytest.mark.slow) for name in WRITERS),
    ],
)
def test_greedy_output_equals_transformers_token_for_token(tmp_path, name, chains, make):
    """A batch of three requests, with sampled trees too; the head drafts a part of the vocabulary."""
    options = {"tokenizer": tokenizer(), "eos_token_ids": (1, 2)}
    target = story_target(make)
    folder = WRITERS[name](tmp_path / "head", target, ids=list(range(3, 200)))
    spec = f"{name}:{folder}" + (f"x{chains}" if chains > 1 else "")
    drafter = make_drafter(spec, target=target, draft=None, stopper="fixed:4")
    rule = make_verifier("trie_block" if chains > 1 else "block")
    outs = Engine(target, drafter, rule, **options).generate(PROMPTS, SamplingParams(max_tokens=24, temperature=0))
    model = embedded_model("target")
    for prompt, out in zip(PROMPTS, outs, strict=True):
        ids = tokenizer()(prompt, return_tensors="pt")
        made = model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids["input_ids"].shape[1] :].tolist()
        assert list(out.token_ids) == made[: len(out.token_ids)]
        assert out.stats.num_draft_tokens > 0


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", WRITERS)
def test_output_is_the_same_alone_and_in_a_batch(tmp_path, name):
    target = story_target()
    folder = WRITERS[name](tmp_path / "head", target)
    drafter = make_drafter(f"{name}:{folder}", target=target, draft=None, stopper="fixed:3")
    made = Engine(target, drafter, make_verifier("block"), tokenizer=tokenizer())
    params = [SamplingParams(max_tokens=16, seed=seed) for seed in range(3)]
    together = made.generate(PROMPTS, params)
    alone = [made.generate([prompt], each)[0] for prompt, each in zip(PROMPTS, params, strict=True)]
    assert [out.token_ids for out in together] == [out.token_ids for out in alone]
    assert [out.stats.num_accepted_tokens for out in together] == [out.stats.num_accepted_tokens for out in alone]


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("chains", "rule", "ids"),
    [
        (1, "block", [0, 2]),
        pytest.param(1, "token", None, marks=pytest.mark.slow),
        pytest.param(2, "trie_block", [0, 2], marks=pytest.mark.slow),
        pytest.param(1, "block", None, marks=pytest.mark.slow),
        pytest.param(1, "token", [0, 2], marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", WRITERS)
def test_exact_output_distribution(tmp_path, name, chains, rule, ids):
    """By enumeration: the distribution is the target's, also where the head cannot draft one of three tokens."""
    target = tiny_llama()
    folder = WRITERS[name](tmp_path / "head", target, ids=ids)
    spec = f"{name}:{folder}" + (f"x{chains}" if chains > 1 else "")
    assert_output_distribution(
        target, lambda: make_drafter(spec, target=target, draft=None, stopper="fixed:2"), rule, length=3
    )


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", WRITERS)
def test_long_and_short_prompts_and_penalties(tmp_path, name):
    """A prompt that is read in chunks, one of a single token, and transforms that depend on the path."""
    target = HFBackend(random_model(CONFIGS["llama"]()), name="llama")
    folder = WRITERS[name](tmp_path / "head", target)
    prompts = [[(i * i) % 90 for i in range(600)], [7], [3, 1]]
    params = SamplingParams(max_tokens=10, temperature=0, repetition_penalty=1.3, logit_bias={5: 2.0})
    plain = Engine(target).generate(prompts, params)
    drafter = make_drafter(f"{name}:{folder}", target=target, draft=None, stopper="confidence:0.02")
    outs = Engine(target, drafter).generate(prompts, params)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    assert all(out.stats.num_draft_tokens for out in outs)


def test_rows_of_another_map_are_detected(tmp_path):
    """Negative control: q of other tokens than those that were drawn gives another distribution."""
    target = tiny_llama()
    folder = published.eagle3(tmp_path / "head", target, ids=[0, 2])

    def drafter():
        return make_drafter(f"eagle3:{folder}", target=target, draft=None, stopper="fixed:2")

    assert_other_rows_are_seen(target, drafter, "token", length=3)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.grid(4)
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"speculators_config__verifier__architectures": ["GemmaForCausalLM"]},
            "with architecture GemmaForCausalLM, got tiny-target with architecture",
        ),
        (
            {"target_hidden_size": 24},
            r"\(made for tiny-target\): expected a target with hidden states of width 24, got .* 16 \(take a head",
        ),
        ({"num_target_layers": 8}, "expected a target with 8 layers, got tiny-target with 7 layers"),
        ({"transformer_layer_config__hidden_size": 24}, "width 24"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 9]}, "has 7 layers: expected different numbers from 0 to 7"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 4]}, r"fc.weight has shape \[16, 48\]"),
        ({"draft_vocab_size": 20}, r"d2t has shape \[24\]"),
        ({"speculators_model_type": "xpress"}, "'xpress', which is not read here: expected eagle3, peagle"),
        ({"speculators_model_type": "peagle"}, "of algorithm peagle: use drafter peagle:"),
        ({"transformer_layer_config__hidden_act": "gelu"}, "activation 'gelu'"),
        ({"transformer_layer_config__model_type": "gemma2"}, "layers of type 'gemma2': expected llama and qwen3"),
        ({"transformer_layer_config__num_hidden_layers": 2}, "have no layers.1"),
        ({"norm_before_fc": True}, "have no input_norm.weight"),
        ({"norm_before_fc": True, "fc_norm": True}, "expected at most one of them"),
        ({"transformer_layer_config__intermediate_size": 30}, r"gate_proj.weight has shape \[24, 16\]"),
    ],
)
def test_heads_that_do_not_fit_are_refused_by_name(tmp_path, fields, words):
    folder = changed(tmp_path / "head", **fields)
    with pytest.raises(UserError, match=words):
        make_drafter(f"eagle3:{folder}", target=tiny_target(), draft=None, stopper="fixed:2")


def test_weights_that_the_layout_does_not_name_are_refused(tmp_path):
    folder = changed(tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "layers.0.extra.weight": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"weights that its layout does not name here: layers.0.extra.weight"):
        make_drafter(f"eagle3:{folder}", target=tiny_target(), draft=None, stopper="fixed:2")


@pytest.mark.parametrize(
    ("offsets", "words"), [([0] * 23 + [99], "names tokens twice or outside"), ([1] * 24, "name different tokens")]
)
def test_maps_that_contradict_are_refused(tmp_path, offsets, words):
    folder = changed(tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "d2t": torch.tensor(offsets)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=words):
        make_drafter(f"eagle3:{folder}", target=tiny_target(), draft=None, stopper="fixed:2")


def test_files_that_are_missing_or_pickled_are_refused(tmp_path):
    target = tiny_target()

    def refused(spec, words):
        with pytest.raises(UserError, match=words):
            make_drafter(spec, target=target, draft=None, stopper="fixed:2")

    refused("eagle3", "expected the directory or hub id of a head")
    refused(f"eagle3:{tmp_path}", "config.json is missing")
    refused(f"eagle3:{tmp_path}/none", "no such file or directory")
    folder = changed(tmp_path / "head")
    refused(f"eagle3:{folder}/config.json", "is a file: expected the directory")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused(f"eagle3:{folder}", "has pickled weights only .pytorch_model.bin.: they are refused on purpose")
    (folder / "pytorch_model.bin").unlink()
    refused(f"eagle3:{folder}", "no weights in the head")
    (folder / "model.safetensors").write_bytes(b"nothing")
    refused(f"eagle3:{folder}", "cannot be read")
    (folder / "config.json").write_text("[]")
    refused(f"eagle3:{folder}", "is no JSON object")


@pytest.mark.parametrize("original", [False, True])
def test_dspark_heads_with_layers_of_gemma_4_are_refused(tmp_path, original):
    """In both layouts, also where the head is named without its format."""
    folder = published.dspark(tmp_path, story_target(), original=original)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Gemma4DSparkModel"]
    config.get("transformer_layer_config", config)["model_type"] = "gemma4_text"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="has layers of type 'gemma4_text': expected llama and qwen3"):
        Engine.load("embedded:target", str(folder), check=False)


def test_a_hub_id_is_read_from_the_hubs_cache(tmp_path, monkeypatch):
    """A head that huggingface_hub has fetched before drafts without a network."""
    from huggingface_hub import constants

    place = tmp_path / "models--owner--head" / "snapshots" / "0123"
    shutil.copytree(DATA / "eagle3_llama", place)
    (tmp_path / "models--owner--head" / "refs").mkdir()
    (tmp_path / "models--owner--head" / "refs" / "main").write_text("0123")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    made = make_drafter("eagle3:owner/head", target=tiny_target(), draft=None, stopper="fixed:2")
    assert made.name == "eagle3"
    with pytest.raises(UserError, match="no head 'owner/other' here, and the hub gave none"):
        make_drafter("eagle3:owner/other", target=tiny_target(), draft=None, stopper="fixed:2")


def test_targets_without_such_states_are_refused():
    target = tiny_target()
    with pytest.raises(UserError, match="hidden states of tiny-target: expected layers 0 to 7, got 8"):
        target.record_states([1, 8])
