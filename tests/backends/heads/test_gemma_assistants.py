"""Gemma 4 assistants: logits as transformers computes them, exact drafts over the target's own keys, refusals."""

import itertools
import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed
from draftproof.backends.heads.published.assistant import AssistantBackend, AssistantNet
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.backend import LeanBackend
from draftproof.backends.lean.module_backend import LeanModulesBackend
from draftproof.backends.loading.by_name import load_backend
from draftproof.backends.loading.gguf_modules import read_modules
from draftproof.backends.loading.options import LoadOptions
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.options import EngineOptions
from draftproof.engine.verifier_parts import make_verifier
from draftproof.models.gguf_file import GGUFFile
from draftproof.tree import TokenTree
from support.architectures.tiny import multimodal
from support.gguf_modules import module_model, write_modules
from support.head_references import ASSISTANT_DATA as DATA
from support.head_references import ASSISTANTS, assistant, assistant_rows, gemma
from support.helpers import assert_output_distribution, random_model
from support.native_levels import needs_native
from support.published import IDS, tiny_target
from support.published import assistant as write_assistant

SLOW = [(1, "token", 4), (2, "trie_block", 3)]


TARGETS = (HFBackend, pytest.param(LeanModulesBackend, marks=[needs_native]))


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("name", ASSISTANTS)
def test_the_targets_of_the_references_pass_the_check_of_models(name, kind):
    """Once here, and in no other test of assistants."""
    assert gemma(name, kind, check=True).capabilities == gemma(name, kind).capabilities


def changed(folder, name="shared", **fields):
    """A copy of a reference assistant with other fields in its config."""
    shutil.copytree(DATA / name / "assistant", folder)
    config = json.loads((folder / "config.json").read_text())
    for key, value in fields.items():
        (config["text_config"] if key in config["text_config"] else config)[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.grid(3)
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("name", ASSISTANTS)
def test_logits_are_those_of_transformers_at_every_step(name, kind):
    """From every position, with windows that end before the text begins and after it."""
    most = 1e-5 if kind is HFBackend else 3e-5  # sums in another order
    assert assistant(name, kind).share < most


@pytest.mark.parametrize("kind", TARGETS)
def test_keys_of_rejected_tokens_are_not_read(kind):
    """The target has read two more tokens than are committed."""
    most = 1e-5 if kind is HFBackend else 3e-5
    assert assistant("shared", kind, more=(7, 9)).share < most


@pytest.mark.parametrize("fields", [{"sliding_window": 2}, {"rms_norm_eps": 0.1}, {"centroid_intermediate_top_k": 3}])
def test_other_fields_change_the_logits(tmp_path, fields):
    """Negative control of the comparison above."""
    assert assistant("shared", folder=changed(tmp_path / "assistant", **fields)).share > 1e-3


def test_another_position_or_keys_change_the_logits(monkeypatch):
    """Negative control: a position that moves with the draft, and one key more, of a token that was rejected."""
    forward = AssistantNet.__call__

    def moved(self, tokens, states, positions, pasts):
        return forward(self, tokens, states, positions + 1, pasts)

    def longer(self, tokens, states, positions, pasts):
        return forward(self, tokens, states, positions, [past._replace(length=past.length + 1) for past in pasts])

    for wrong in (moved, longer):
        monkeypatch.setattr(AssistantNet, "__call__", wrong)
        assert assistant("equal", more=(7, 9)).share > 1e-3


def test_a_tree_gives_the_rows_of_its_paths():
    """Two requests of other lengths at once, level by level."""
    target = gemma("shared")
    assistant = AssistantBackend(str(DATA / "shared" / "assistant"), target)
    owners = [target.open(), target.open()]
    target.forward([Feed(owners[0], IDS[:4]), Feed(owners[1], IDS[:7])])
    sessions, known = [assistant.follow(owner) for owner in owners], [IDS[1:5], IDS[1:8]]
    assistant.forward([Feed(*each) for each in zip(sessions, known, strict=True)])
    assistant.forward([Feed(session, (), TokenTree(torch.tensor([11, 6]), (-1, -1))) for session in sessions])
    made = assistant.forward([Feed(session, (), TokenTree(torch.tensor([3, 8]), (1, 0), 2)) for session in sessions])
    for owner, read, output in zip(owners, known, made, strict=True):
        for row, path in zip(output.logits, ([6, 3], [11, 8]), strict=True):
            alone = assistant.follow(owner)
            for tokens in (read, *([token] for token in path)):
                found = assistant.forward([Feed(alone, tokens)])[0].logits[-1]
            assert torch.allclose(row, found, atol=1e-4)
    with pytest.raises(ValueError, match="reads drafted tokens level by level"):
        assistant.forward([Feed(sessions[0], (), TokenTree(torch.tensor([1, 2]), (3, 4), 4))])


# --- engines ---------------------------------------------------------------------------------------------------------


def tiny_gemma():
    """A Gemma 4 of three tokens in float64, small enough to enumerate its outputs."""
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma4TextConfig(
        vocab_size=3, vocab_size_per_layer_input=3, hidden_size=8, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, global_head_dim=8, hidden_size_per_layer_input=0,
        num_kv_shared_layers=0, layer_types=kinds, sliding_window=3, enable_moe_block=False, initializer_range=1.0,
        max_position_embeddings=64,
    )  # fmt: skip
    return HFBackend(random_model(config, dtype=torch.float64), name="tiny-gemma")


def assistant_for(folder, target, *, dims=(8, 8), **options):
    """A random assistant of one layer of each kind, whose heads have `dims` numbers, with a cluster for each token."""
    layers = list(zip(("sliding_attention", "full_attention"), dims, strict=True))
    return write_assistant(folder, target, layers=layers, **options)


@pytest.mark.parametrize("name", ["gemma4", "gemma4, experts"])
def test_keys_and_values_of_a_gguf_file_are_read(name, tmp_path):
    """They are in the places that backend hf has for them, although native attention writes them."""
    path = tmp_path / "x.gguf"
    write_modules(path, module_model(name), name, (8,))
    few, dense = (
        read_modules(GGUFFile(path), name="few", dtype=torch.float32, activations=each) for each in ("int8", "float")
    )
    whole = HFBackend(dense.model, name="whole")
    folder = assistant_for(tmp_path / "assistant", whole, kept=320, heads=4, dims=(64, 128))
    made, expected, other = (
        assistant_rows(target, AssistantBackend(str(folder), target), length)
        for target, length in ((dense, 9), (whole, 9), (whole, 8))
    )
    assert float((made - expected).norm() / expected.norm()) < 1e-3
    assert float((other - expected).norm() / expected.norm()) > 0.1, "negative control: a token less"
    for kept, temperature in itertools.product((torch.float32, torch.bfloat16), (0.0, 1.0)):
        few.store_kv(kept)
        drafter = make_drafter(f"assistant:{folder}", target=few, draft=None, stopper="fixed:3")
        params = SamplingParams(max_tokens=16, temperature=temperature, seed=3, ignore_eos=True)
        plain, drafted = (
            Engine(few, each, make_verifier("gumbel")).generate([IDS, IDS[:3]], params) for each in (None, drafter)
        )
        assert [out.token_ids for out in plain] == [out.token_ids for out in drafted]
        assert all(out.stats.num_draft_tokens for out in drafted)


@pytest.mark.parametrize(
    ("chains", "rule", "length"), [(1, "block", 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_exact_output_distribution(tmp_path, chains, rule, length):
    """By enumeration: drafts are drawn from the assistant's own q, which is 0 outside of the clusters."""
    target = tiny_gemma()
    spec = f"assistant:{assistant_for(tmp_path / 'assistant', target)}" + (f"x{chains}" if chains > 1 else "")
    assert_output_distribution(
        target, lambda: make_drafter(spec, target=target, draft=None, stopper="fixed:2"), rule, length=length
    )


def test_greedy_drafts_are_point_masses_and_exact(tmp_path):
    """By enumeration, with the draft's own temperature 0: the likeliest tokens, and q of 1 for each of them."""
    target = tiny_gemma()
    spec, rows = f"assistant:{assistant_for(tmp_path / 'assistant', target)}", []

    def make():
        drafter = make_drafter(spec, target=target, draft=None, stopper="fixed:2", temperature=0.0)
        propose = drafter.propose

        def watched(requests, rng):
            drafts = propose(requests, rng)
            rows.extend(draft.probs[range(len(draft)), draft.tree.tokens] for draft in drafts if len(draft))
            return drafts

        drafter.propose = watched
        return drafter

    assert_output_distribution(target, make, "block", length=3)
    assert_output_distribution(target, make, "token", length=3)
    assert set(torch.cat(rows).tolist()) == {1.0}


@pytest.mark.slow
def test_a_published_generator_that_names_another_q_is_detected(tmp_path):
    """Negative control: transformers drafts the likeliest token and hands on the softmax as its q."""
    target = tiny_gemma()
    folder = assistant_for(tmp_path / "assistant", target)

    def greedy():
        drafter = make_drafter(f"assistant:{folder}", target=target, draft=None, stopper="fixed:1")
        propose = drafter.propose

        def likeliest(requests, rng):
            drafts = propose(requests, rng)
            for draft in drafts:
                draft.tree.tokens[:] = draft.tree.tokens if draft.probs is None else draft.probs.argmax(-1)
            return drafts

        drafter.propose = likeliest
        return drafter

    with pytest.raises(AssertionError):
        assert_output_distribution(target, greedy, "token", length=3)


@pytest.mark.grid(2)
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize(("name", "chains"), [("shared", 1), ("equal", 3)])
def test_greedy_output_equals_transformers_token_for_token(name, chains, kind):
    """A batch of three prompts of several lengths, longer than the window."""
    target = gemma(name, kind)
    spec = f"assistant:{DATA / name / 'assistant'}" + (f"x{chains}" if chains > 1 else "")
    drafter = make_drafter(spec, target=target, draft=None, stopper="fixed:3")
    rule = make_verifier("trie_block" if chains > 1 else "block")
    prompts = [IDS, IDS[:2], [7]]
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    for prompt, out in zip(prompts, Engine(target, drafter, rule).generate(prompts, params), strict=True):
        found = list(prompt)
        for _ in range(20):
            found.append(int(target.model(torch.tensor([found]), use_cache=False).logits[0, -1].argmax()))
        assert list(out.token_ids) == found[len(prompt) :]
        assert out.stats.num_draft_tokens > 0


@pytest.mark.parametrize("kind", TARGETS)
def test_output_is_the_same_alone_and_in_a_batch(kind):
    target = gemma("shared", kind)
    folder = DATA / "shared" / "assistant"
    drafter = make_drafter(f"assistant:{folder}", target=target, draft=None, stopper="confidence:0.05")
    made, prompts = Engine(target, drafter, make_verifier("block")), [IDS, IDS[:3], [7, 9]]
    params = [SamplingParams(max_tokens=16, seed=seed, ignore_eos=True) for seed in range(3)]
    together = made.generate(prompts, params)
    alone = [made.generate([prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
    assert [out.token_ids for out in together] == [out.token_ids for out in alone]
    assert all(out.stats.num_draft_tokens for out in together)


def test_an_assistant_drafts_for_a_checkpoint_for_images_and_sound(tmp_path):
    """As Gemma 4 is published: the text is that of plain decoding, and of transformers' whole model."""
    whole = multimodal("gemma4")
    whole.save_pretrained(tmp_path / "target")
    target = load_backend(str(tmp_path / "target"), LoadOptions(dtype="float32"))
    assert target.config.model_type == "gemma4_text"
    full = target.model.config.per_layer_config[1].head_dim
    folder = assistant_for(tmp_path / "assistant", target, kept=50, heads=4, dims=(16, full))
    prompts, expected = [[5, 9, 2, 7] * 9, [8, 8, 1], [70, 12, 33, 4, 4]], []
    for prompt in prompts:
        made = whole.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None)
        expected.append(made[0, len(prompt) :].tolist())
    drafter = make_drafter(f"assistant:{folder}", target=target, draft=None, stopper="fixed:3")
    for each in (None, drafter):
        outs = Engine(target, each).generate(prompts, SamplingParams(max_tokens=16, temperature=0, ignore_eos=True))
        assert [list(out.token_ids) for out in outs] == expected
    assert all(out.stats.num_draft_tokens > out.stats.num_drafts > 3 for out in outs)


def test_an_assistant_is_known_by_its_config():
    folder = str(DATA / "shared" / "assistant")
    made = EngineOptions(draft=folder).of_head()
    assert (made.draft, made.drafter) == (None, f"auto:assistant:{folder}")


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"backbone_hidden_size": 24}, "hidden states of width 24, got gemma with hidden states of width 16"),
        ({"vocab_size": 50}, "with 50 tokens, got gemma with 40 tokens"),
        ({"hidden_activation": "silu"}, "activation 'silu': expected gelu_pytorch_tanh"),
        ({"model_type": "gemma3_text"}, "layers of type 'gemma3_text': expected gemma4_text and"),
        ({"num_centroids": 7}, "num_centroids 7 and centroid_intermediate_top_k 4: expected a divisor of 40"),
        ({"use_ordered_embeddings": False}, "does not name here: masked_embedding.centroids.weight"),
        ({"per_layer_config": {}}, "reads keys of 8 numbers of a layer of kind full_attention, and gemma has none"),
    ],
)
def test_assistants_that_do_not_fit_are_refused(tmp_path, fields, words):
    folder = tmp_path / "assistant"
    changed(folder, **fields)
    with pytest.raises(UserError, match=words):
        make_drafter(f"assistant:{folder}", target=gemma("shared"), draft=None, stopper="fixed:2")


def test_a_table_of_clusters_without_all_tokens_is_refused(tmp_path):
    folder = changed(tmp_path / "assistant")
    tensors = load_file(folder / "model.safetensors")
    tensors["masked_embedding.token_ordering"] = torch.zeros(40, dtype=torch.long)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"token_ordering of the assistant .* is no order of all tokens"):
        AssistantBackend(str(folder), gemma("shared"))


def test_other_targets_and_backends_are_refused():
    folder = str(DATA / "shared" / "assistant")
    with pytest.raises(UserError, match="is LlamaForCausalLM on backend lean: use a Gemma 4 target in one"):
        AssistantBackend(folder, tiny_target(LeanBackend))
    for other, kind in ((tiny_target(), "tiny-target is llama"), (gemma("unified"), "gemma is gemma4_unified_text")):
        with pytest.raises(UserError, match=f"reads keys and values of gemma4_text, and {kind}"):
            AssistantBackend(folder, other)
