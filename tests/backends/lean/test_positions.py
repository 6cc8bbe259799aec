"""Positions that change: ALiBi biases, and rotary angles that depend on the length of the text."""

import copy

import pytest
import torch
import transformers

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed, unread
from draftproof.backends.hf import longrope as switching
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.backend import LeanBackend, supports
from draftproof.drafters.ngram import NgramDrafter
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.verifier_parts import make_verifier
from draftproof.tree import TokenTree
from support.helpers import CONFIGS, ROPE, random_model
from support.long_contexts import GREEDY, LONGROPE, PROMPTS, check_text, phi3

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
    "mpt": lambda: mpt(max_seq_len=128),
    "mpt, six heads": lambda: mpt(n_heads=6, max_seq_len=94),  # the longest text of the check ends there
}


def mpt(**options):
    given = {"vocab_size": 97, "d_model": 48, "n_heads": 4, "n_layers": 2, "initializer_range": 0.3, "eos_token_id": 0}
    return transformers.MptConfig(**given | options)


@pytest.mark.grid(2)
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
    monkeypatch.setattr("draftproof.backends.cache.layout.Layout.key_positions", property(slot_positions))
    assert not HFBackend(random_model(ALIBI["bloom"]()), name="bloom").capabilities.trees


def slot_positions(layout):
    return torch.arange(layout.plan.horizon).expand(len(layout.feeds), -1)


def test_without_the_seam_alibi_models_are_refused(monkeypatch):
    monkeypatch.setattr("draftproof.backends.hf.alibi._PASS", _Nothing())
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


@pytest.mark.parametrize("known", [3, 20, 60])
def test_every_row_of_a_tree_of_mpt_is_that_of_a_pass_of_its_own(known):
    """Beside a longer row and one without a tree, after a kept branch, and with more slots than its table has."""
    model = random_model(mpt(max_seq_len=64))
    made = HFBackend(model, name="mpt")
    tokens, others = [(7 * i) % 97 for i in range(known)], [(3 * i + 1) % 97 for i in range(known + 2)]
    session, chain, third = made.open(), made.open(), made.open()
    tree = TokenTree(torch.tensor([5, 6, 7, 8, 9, 10, 11]), (-1, 0, 1, 0, 3, -1, 5))
    rows = made.forward([Feed(session, tokens, tree), Feed(chain, others), Feed(third, [3, 4, 5])])
    paths = [[], [5], [5, 6], [5, 6, 7], [5, 8], [5, 8, 9], [10], [10, 11]]
    for row, path in zip(rows[0].logits, paths, strict=True):
        assert torch.allclose(row, row_after(model, tokens + path), atol=1e-4), path
    assert torch.allclose(rows[1].logits[0], row_after(model, others), atol=1e-4)
    session.keep(known, (0, 3))
    row = made.forward([Feed(session, unread(session, [*tokens, 5, 8, 12]))])[0].logits[0]
    assert torch.allclose(row, row_after(model, [*tokens, 5, 8, 12]), atol=1e-4)


def test_without_positions_of_the_pass_mpt_reads_no_trees(monkeypatch):
    """The control: biases by slot are wrong in a tree, and the check at load sees it."""
    monkeypatch.setattr("draftproof.backends.cache.layout.Layout.key_positions", property(slot_positions))
    assert not HFBackend(random_model(mpt()), name="mpt").capabilities.trees


def test_mpt_ends_where_its_table_of_biases_ends():
    """So does transformers, whose table is then shorter than the keys."""
    model = random_model(mpt(max_seq_len=64))
    made = HFBackend(model, name="mpt")
    assert made.max_positions == 64
    prompt = [(5 * i) % 97 for i in range(70)]
    with pytest.raises(UserError, match="expected 1 to 63"):
        Engine(made).generate([prompt], GREEDY)
    with pytest.raises(RuntimeError, match="size of tensor"):
        model(input_ids=torch.tensor([prompt]))
    ends = Engine(made, two_chains(made), make_verifier("trie_block")).generate([prompt[:50]], GREEDY)[0]
    assert ends.finish_reason == "length"
    assert list(ends.token_ids) == generated(model, prompt[:50], 14)


# --- past every original length, what transformers generates ---------------------------------------------------------


def rotary(kind, **options):
    """A llama whose rotary angles were made for LENGTH tokens, and stretched."""
    made = {"rope_type": kind, "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": LENGTH}
    return transformers.LlamaConfig(**ROPE, rope_parameters=made | options)


STRETCHED = {
    "linear": lambda: rotary("linear"),
    "yarn": lambda: rotary("yarn"),
    "llama3": lambda: rotary("llama3", low_freq_factor=1.0, high_freq_factor=4.0),
    "longrope": lambda: phi3(**LONGROPE),
    "sliding window": lambda: transformers.MistralConfig(**ROPE, sliding_window=20),
    **ALIBI,
}


def generated(model, prompt, count=24):
    """What `model.generate` writes, by an untouched copy."""
    ids = torch.tensor([prompt])
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    made = copy.deepcopy(model).generate(ids, max_new_tokens=count, **given)
    return made[0, len(prompt) :].tolist()


def two_chains(target):
    """A drafter of trees: two chains of a draft model that is the target with disturbed weights."""
    disturbed = copy.deepcopy(target.model)
    with torch.no_grad():
        for weights in disturbed.parameters():
            weights.add_(0.05 * weights.std() * torch.randn(weights.shape, generator=torch.Generator().manual_seed(1)))
    draft = HFBackend(disturbed, name="draft")
    return make_drafter("chains:2", target=target, draft=draft, stopper="fixed:4", temperature=1.0)


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] * (kind in {"linear", "llama3", "falcon, eager"}))
        for kind in STRETCHED
    ],
)
def test_texts_are_what_transformers_generates_past_every_original_length(kind):
    model = random_model(STRETCHED[kind]())
    expected = [generated(model, prompt) for prompt in PROMPTS]
    made = HFBackend(copy.deepcopy(model), name=kind)
    backends = [made] if supports(model) is not None else [made, LeanBackend(copy.deepcopy(model))]
    for each in backends:
        for drafter, rule in [(None, "block"), (NgramDrafter(4), "block"), (two_chains(made), "trie_block")]:
            outs = Engine(each, drafter, make_verifier(rule), max_batch=3).generate(PROMPTS, GREEDY)
            assert [list(out.token_ids) for out in outs] == expected


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

    monkeypatch.setattr(switching.FactorSwitch, forgotten, again if forgotten == "_again" else lambda *_: None)
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
    monkeypatch.setattr("draftproof.backends.hf.backend.switch_of", lambda _: None)
    made = HFBackend(longrope("phi3"), name="phi3")
    assert made.max_positions == LENGTH
    with pytest.raises(UserError, match=r"expected 1 to 39 .*original_max_position_embeddings is 40"):
        Engine(made).generate([[(5 * i) % 97 for i in range(70)]], GREEDY)


def dynamic():
    angles = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}
    return random_model(transformers.LlamaConfig(**{**ROPE, "max_position_embeddings": LENGTH}, **angles))


def test_dynamic_angles_end_the_context_with_the_reason():
    """Prompts of every length: texts are transformers' up to the length, and end there; longer prompts are refused."""
    model = dynamic()
    made = HFBackend(copy.deepcopy(model), name="llama")
    for drafter in (None, NgramDrafter(4), two_chains(made)):
        rule = make_verifier("block" if drafter is None or isinstance(drafter, NgramDrafter) else "trie_block")
        engine = Engine(made, drafter, rule)
        for size in (3, 17, LENGTH - 2, LENGTH - 1):
            prompt = [(5 * i * i + i) % 97 for i in range(size)]
            (out,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
            assert out.finish_reason == "length"
            assert list(out.token_ids) == generated(model, prompt, LENGTH - size)
        for size in (LENGTH, LENGTH + 1, 70):
            with pytest.raises(
                UserError, match=r"expected 1 to 39 .*rotary angles \(type dynamic\) change with every token"
            ):
                engine.generate([[(5 * i) % 97 for i in range(size)]], GREEDY)


def test_past_its_length_a_dynamic_model_of_transformers_has_three_answers():
    """Why the context ends there: one prompt, and which angles its keys have depends on what else was computed.

    With a cache, keys keep the angles of the moment when they were read; without, all have those of the whole text; and
    after a longer text the angles of that stay.
    """
    model, prompt = dynamic(), [(5 * i * i + i) % 97 for i in range(70)]
    scores = {}
    for name, before, cached in [("fresh", 0, True), ("without a cache", 0, False), ("after another", 90, True)]:
        each = copy.deepcopy(model)
        if before:
            each.generate(torch.full((1, before), 3), max_new_tokens=8, do_sample=False, pad_token_id=0)
        options = {"use_cache": cached, "output_logits": True, "return_dict_in_generate": True, "eos_token_id": None}
        ids = torch.tensor([prompt])
        made = each.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False, pad_token_id=0, **options
        )
        scores[name] = made.logits[1] if name != "after another" else made.logits[0]
        if name == "fresh":
            first = made.logits[0]
    assert (scores["fresh"] - scores["without a cache"]).abs().max() > 0.01
    assert (first - scores["after another"]).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_fixed_factors_are_exact_at_every_length(kind):
    options = {"rope_type": kind, "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": LENGTH}
    if kind == "linear":
        del options["original_max_position_embeddings"]
    model = random_model(transformers.LlamaConfig(**ROPE, rope_parameters=options))
    check_text(HFBackend(model, name=kind), model)


def test_models_without_two_sets_have_no_switch():
    assert switching.switch_of(random_model(CONFIGS["llama"]())) is None
