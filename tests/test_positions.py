"""Positions that change: ALiBi biases, and rotary angles that depend on the length of the text."""

import pytest
import torch
import transformers

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends import switching
from draftproof.backends.base import Feed, unread
from draftproof.backends.hf import HFBackend
from draftproof.drafters.ngram import NgramDrafter
from draftproof.engine.registry import make_drafter
from draftproof.tree import TokenTree
from helpers import CONFIGS, ROPE, random_model
from test_probe import GREEDY, LONGROPE, PROMPTS, check_text, phi3

LENGTH = 40  # where the factors of LONGROPE change
HEADS = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
ALIBI = {
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=97, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3, eos_token_id=0
    ),
    "falcon": lambda: transformers.FalconConfig(**HEADS, alibi=True, eos_token_id=0),
    "falcon, eager": lambda: transformers.FalconConfig(
        **HEADS, alibi=True, attn_implementation="eager", eos_token_id=0
    ),
}


@pytest.mark.parametrize("kind", ALIBI)
def test_alibi_models_read_chains_trees_and_ragged_batches(kind):
    model = random_model(ALIBI[kind]())
    made = HFBackend(model, name=kind)
    assert made.capabilities.trees
    assert made.capabilities.ragged
    check_text(made, model)
    check_text(made, model, drafter=NgramDrafter(4))
    ids = torch.arange(12).unsqueeze(0)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # outside of our passes, biases follow the mask as they always did
    assert torch.allclose(
        model(input_ids=ids, attention_mask=mask).logits[0, 3:], model(input_ids=ids[:, 3:]).logits[0], atol=1e-4
    )


def test_alibi_biases_of_a_tree_count_by_depth_not_by_slot(monkeypatch):
    """Without the seam the check at load sees the mistake, and trees are off."""
    monkeypatch.setattr("draftproof.backends.layout.Layout.key_positions", property(slot_positions))
    assert not HFBackend(random_model(ALIBI["bloom"]()), name="bloom").capabilities.trees


def slot_positions(layout):
    return torch.arange(layout.plan.horizon).expand(len(layout.feeds), -1)


def test_without_the_seam_alibi_models_are_refused(monkeypatch):
    monkeypatch.setattr("draftproof.backends.alibi._PASS", _Nothing())
    with pytest.raises(UserError, match="positions are ALiBi biases"):
        HFBackend(random_model(ALIBI["falcon"]()), name="falcon")


class _Nothing:
    """A context variable that is never set."""

    def get(self):
        return None

    def set(self, _):
        return None

    def reset(self, _):
        return None


def test_mpt_ends_where_its_table_of_biases_ends():
    config = transformers.MptConfig(vocab_size=97, d_model=32, n_heads=4, n_layers=2, max_seq_len=64)
    made = HFBackend(random_model(config), name="mpt")
    assert made.max_positions == 64
    with pytest.raises(UserError, match="legal are 1 to 63"):
        Engine(made).generate([[(5 * i) % 97 for i in range(70)]], GREEDY)


# --- two sets of rotary factors ---------------------------------------------------------------------------------------


def longrope(family):
    config = phi3(**LONGROPE) if family == "phi3" else transformers.LlamaConfig(**ROPE, **LONGROPE)
    return random_model(config)


def row_after(model, tokens):
    """The logits after some tokens, of one pass over them."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_texts_grow_past_the_original_length(family):
    model = longrope(family)
    made = HFBackend(model, name=family)
    assert made.max_positions == 640
    check_text(made, model)
    check_text(made, model, drafter=NgramDrafter(4))


@pytest.mark.parametrize("known", [LENGTH - 4, LENGTH - 2, LENGTH - 1, LENGTH, LENGTH + 1])
def test_every_row_around_the_length_is_that_of_a_pass_of_its_own(known):
    """A root and a tree below it, before, across and after the length; then one more root, longer and shorter."""
    model = longrope("phi3")
    made = HFBackend(model, name="phi3")
    tokens = [(7 * i) % 97 for i in range(known)]
    session, other = made.open(), made.open()
    tree = TokenTree(torch.tensor([5, 6, 7, 8, 9]), (-1, 0, 1, 0, 3))
    feeds = [Feed(session, tokens, tree), Feed(other, [3, 4, 5])]
    rows = made.forward(feeds)[0].logits
    paths = [[], [5], [5, 6], [5, 6, 7], [5, 8], [5, 8, 9]]
    for row, path in zip(rows, paths, strict=True):
        assert torch.allclose(row, row_after(model, tokens + path), atol=1e-4), path
    kept = [*tokens, 5, 8, 9]
    for following in ([*kept, 11], [*kept, 11, 12], [*tokens, 5, 8], [*tokens, 5, 8, 10, 11, 12]):
        row = made.forward([Feed(session, unread(session, following))])[0].logits[0]
        assert torch.allclose(row, row_after(model, following), atol=1e-4), len(following)


@pytest.mark.parametrize("forgotten", ["_deeper", "_again"])
def test_the_row_test_sees_what_is_forgotten(forgotten, monkeypatch):
    def again(_self, feed, *, long):
        return feed, len(switching._rows(feed))

    monkeypatch.setattr(switching.Switch, forgotten, again if forgotten == "_again" else lambda *_: None)
    with pytest.raises((AssertionError, ValueError)):  # the check at load sees it too, and ends the context
        test_every_row_around_the_length_is_that_of_a_pass_of_its_own(LENGTH - 2)


def test_a_target_with_two_sets_of_factors_drafts_for_itself():
    model = longrope("phi3")
    made = HFBackend(model, name="phi3")
    part = make_drafter("quantized:8", target=made, draft=None, stopper="fixed:4")
    engine = Engine(made, part)
    outs = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    plain = Engine(HFBackend(model, name="phi3")).generate(
        PROMPTS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    )
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    assert sum(out.stats.num_accepted_tokens for out in outs)


def test_without_the_switch_the_context_ends_at_the_length(monkeypatch):
    monkeypatch.setattr("draftproof.backends.hf.switch_of", lambda _: None)
    made = HFBackend(longrope("phi3"), name="phi3")
    assert made.max_positions == LENGTH
    with pytest.raises(UserError, match=r"legal are 1 to 39 .*original_max_position_embeddings is 40"):
        Engine(made).generate([[(5 * i) % 97 for i in range(70)]], GREEDY)


def test_dynamic_angles_end_the_context_with_the_reason():
    options = {**ROPE, "max_position_embeddings": LENGTH}
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}
    model = random_model(transformers.LlamaConfig(**options, **dynamic))
    made = HFBackend(model, name="llama")
    check_text(made, model, [prompt[:16] for prompt in PROMPTS])
    with pytest.raises(UserError, match=r"legal are 1 to 39 .*rotary angles \(type dynamic\) change with every token"):
        Engine(made).generate([[(5 * i) % 97 for i in range(70)]], GREEDY)


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_fixed_factors_are_exact_at_every_length(kind):
    options = {"rope_type": kind, "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": LENGTH}
    if kind == "linear":
        del options["original_max_position_embeddings"]
    model = random_model(transformers.LlamaConfig(**ROPE, rope_parameters=options))
    check_text(HFBackend(model, name=kind), model)


def test_models_without_two_sets_have_no_switch():
    assert switching.switch_of(random_model(CONFIGS["llama"]())) is None
