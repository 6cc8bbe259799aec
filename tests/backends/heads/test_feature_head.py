"""Feature heads: drafts of one layer on the target's hidden states, and the states of a session after every change."""

import copy
import json

import pytest
import torch

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed, unread
from draftproof.backends.heads.feature_head import FeatureBackend
from draftproof.backends.heads.feature_net import load_net, save_net
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.backend import LeanBackend
from draftproof.drafters.base import DraftRequest
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.verifier_parts import make_verifier
from draftproof.sampling import probabilities
from draftproof.tree import TokenTree
from support.feature_heads import drafted, model_for, net_for
from support.helpers import CONFIGS, assert_output_distribution, embedded_model, random_model, tiny_llama, tokenizer

PROMPTS = ["Once upon a time", "The little dog", "One day, Tim and his mom went to the"]


def fresh(name="llama"):
    """One that no test has read; it is equal to one of `support.helpers.backend`, which is checked."""
    model = embedded_model("target") if name == "target" else random_model(CONFIGS[name]())
    return HFBackend(model, name=name, check=False)


def plain_states(backend, tokens):
    out = backend.model(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    return out.hidden_states[-1][0]


# --- the target's states ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CONFIGS, "lean"])
def test_states_follow_the_session(name):
    """After parts, a batch, a rollback and a tree's path the states are those of a plain pass."""
    target = LeanBackend(random_model(CONFIGS["llama"]()), name=name) if name == "lean" else fresh(name)
    target.record_states()
    one, two = target.open(), target.open()
    target.forward([Feed(one, [5, 9, 2]), Feed(two, [3, 1, 4, 1, 5])])
    assert torch.allclose(two.states, plain_states(target, [3, 1, 4, 1, 5]), atol=1e-4)
    unread(one, [5, 9, 7, 8])
    assert one.states.shape[0] == 2
    tree = TokenTree(torch.tensor([11, 6, 12, 13]), (-1, -1, 1, 0))
    target.forward([Feed(one, [7, 8], tree), Feed(two, [9])])
    assert one.states.shape[0] == 8
    assert unread(one, [5, 9, 7, 8, 6, 12, 20]) == [20]
    assert torch.allclose(one.states, plain_states(target, [5, 9, 7, 8, 6, 12]), atol=1e-4)
    assert torch.allclose(two.states, plain_states(target, [3, 1, 4, 1, 5, 9]), atol=1e-4)


def test_long_prompts_and_growth_keep_their_states():
    target = fresh()
    target.record_states()
    session, tokens = target.open(), [i % 90 for i in range(600)]
    target.forward([Feed(session, tokens)])
    assert torch.allclose(session.states, plain_states(target, tokens), atol=1e-4)


def test_states_are_recorded_only_on_request_and_completely():
    target = fresh()
    session = target.open()
    target.forward([Feed(session, [1, 2])])
    assert session.states is None
    target.record_states()
    target.forward([Feed(session, [3])])
    assert session.states is None, "two of its states were never recorded"


# --- the head's session ----------------------------------------------------------------------------------------------


def reference_rows(target, net, tokens, given):
    """Logits after the last token, with the target's states for the first `given` tokens and then the head's own."""
    states = list(plain_states(target, tokens)[:given])
    embedded = target.model.get_input_embeddings()(torch.tensor([tokens]))
    width = len(tokens)
    mask = torch.ones(width, width, dtype=torch.bool).tril() & ~torch.ones(width, width, dtype=torch.bool).tril(
        -net.config.window
    )

    def attend(queries, keys, values):
        return torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask[: queries.shape[2], : queries.shape[2]], enable_gqa=True
        )

    out = None
    for end in range(1, width + 1):  # the input states of a token are computed one by one
        above = torch.stack([torch.zeros(net.config.hidden_size), *states[: end - 1]]).unsqueeze(0)
        out = net(above, embedded[:, :end], net.rotary(torch.arange(end).unsqueeze(0)), attend)[0]
        if end > given:
            states.append(out[-1])
    return out[-1:] @ target.model.get_output_embeddings().weight[net.ids].T


@pytest.mark.parametrize("window", [3, 64])
def test_drafted_tokens_use_the_heads_own_states(window):
    target = fresh()
    net = net_for(target, window=window)
    head = FeatureBackend(target, net)
    owner, tokens = target.open(), [5, 9, 2, 7, 11, 3]
    target.forward([Feed(owner, tokens[:3])])
    session = head.follow(owner)
    rows = head.forward([Feed(session, tokens[:4])])[0].logits
    assert torch.allclose(rows, reference_rows(target, net, tokens[:4], 3), atol=1e-4)
    for end in (5, 6):
        rows = head.forward([Feed(session, tokens[end - 1 : end])])[0].logits
        assert torch.allclose(rows, reference_rows(target, net, tokens[:end], 3), atol=1e-4)
    assert (session.certain, session.length) == (4, 6)
    target.forward([Feed(owner, tokens[3:5])])  # the target has read more: drafted entries are computed again
    session.rewind()
    rows = head.forward([Feed(session, unread(session, tokens))])[0].logits
    assert torch.allclose(rows, reference_rows(target, net, tokens, 5), atol=1e-4)
    assert session.certain == 6


def test_a_tree_read_by_levels_gives_the_rows_of_its_paths():
    target = fresh()
    net = net_for(target)
    head = FeatureBackend(target, net)
    owner, tokens = target.open(), [5, 9, 2, 7]
    target.forward([Feed(owner, tokens[:3])])
    session = head.follow(owner)
    head.forward([Feed(session, tokens)])
    first = head.forward([Feed(session, (), TokenTree(torch.tensor([11, 6]), (-1, -1)))])[0].logits
    second = head.forward([Feed(session, (), TokenTree(torch.tensor([3, 8]), (1, 0), 2))])[0].logits
    for rows, paths in ((first, [[11], [6]]), (second, [[6, 3], [11, 8]])):
        for row, path in zip(rows, paths, strict=True):
            assert torch.allclose(row, reference_rows(target, net, [*tokens, *path], 3)[0], atol=1e-4)
    session.rewind()
    assert session.tokens == tokens
    with pytest.raises(ValueError, match="level by level"):
        head.forward([Feed(session, (), TokenTree(torch.tensor([3, 8]), (-1, 0)))])


# --- engines ---------------------------------------------------------------------------------------------------------


@pytest.mark.grid(2)
@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize(("ids", "make"), [(None, HFBackend), (list(range(3, 200)), LeanBackend)])
def test_greedy_output_equals_the_targets(chains, ids, make):
    options = {"tokenizer": tokenizer(), "eos_token_ids": (1, 2)}
    greedy = SamplingParams(max_tokens=40, temperature=0)
    plain = Engine(fresh("target"), **options).generate(PROMPTS, greedy)
    target = make(copy.deepcopy(embedded_model("target")), name="target")  # its weights may move into the backend
    rule = make_verifier("trie_block" if chains > 1 else "block")
    made = Engine(target, drafted(target, net_for(target, ids=ids), chains=chains), rule, **options)
    outs = made.generate(PROMPTS, greedy)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    assert sum(out.stats.num_draft_tokens for out in outs) > 0
    assert outs[0].drafter == ("feature_head" if chains == 1 else "feature_head:x3")
    again = made.generate(PROMPTS[:1], greedy)
    assert again[0].token_ids == plain[0].token_ids, "slots are used again"


@pytest.mark.grid(1)
@pytest.mark.parametrize("chains", [1, 2])
def test_output_is_the_same_alone_and_in_a_batch(chains):
    target = fresh("target")
    rule = make_verifier("trie_block" if chains > 1 else "block")
    made = Engine(target, drafted(target, net_for(target), chains=chains), rule, tokenizer=tokenizer())
    params = [SamplingParams(max_tokens=24, seed=seed) for seed in range(3)]
    together = made.generate(PROMPTS, params)
    alone = [made.generate([prompt], each)[0] for prompt, each in zip(PROMPTS, params, strict=True)]
    assert [out.token_ids for out in together] == [out.token_ids for out in alone]
    drafts = [[out.stats.num_draft_tokens, out.stats.num_accepted_tokens] for out in together]
    assert drafts == [[out.stats.num_draft_tokens, out.stats.num_accepted_tokens] for out in alone]


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("chains", "rule", "ids"),
    [
        (1, "token", [0, 2]),
        (1, "block", None),
        (1, "block", [0, 2]),
        (2, "trie_block", [0, 2]),
        pytest.param(1, "token", None, marks=pytest.mark.slow),
        pytest.param(2, "trie_block", None, marks=pytest.mark.slow),
    ],
)
def test_exact_output_distribution_on_a_real_model(chains, rule, ids):
    """By enumeration: the distribution is the target's, also where the head cannot draft one of three tokens."""
    target = tiny_llama()
    net = net_for(target, ids=ids, own_output=True, scale=2.0)
    assert_output_distribution(target, lambda: drafted(target, net, chains=chains, length=2), rule, length=3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 2},
        {"top_p": 0.8, "min_p": 0.01},
        {"logit_bias": {5: 4.0, 6: 100.0}},
        {"repetition_penalty": 1.3, "bad_words": ["dog"]},
    ],
)
def test_rows_are_those_of_the_whole_vocabulary_and_0_elsewhere(options):
    target, ids = fresh("target"), [1, 2, 5, 7, 40, 41, 200]
    model = model_for(target, net_for(target, ids=ids))
    params = SamplingParams(**options)
    encode = lambda text: tokenizer()(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    bound = params.bind(vocab_size=target.vocab_size, prompt_ids=[1, 5], encode=encode)
    session = target.open()
    model.session(DraftRequest(7, [1, 5, 40], 2, 4, bound, session))
    logits = torch.randn(3, len(ids), generator=torch.Generator().manual_seed(1))
    whole = torch.full((3, target.vocab_size), float("-inf"))
    whole[:, ids] = logits
    request = DraftRequest(7, [1, 5, 40], 2, 4, bound, session)
    rows = model.rows(request, logits, [[], [7], [7, 41]], torch.tensor(ids))
    expected = probabilities(whole, bound, [40], [[], [7], [7, 41]])
    assert torch.allclose(rows, expected, rtol=1e-5, atol=0)
    assert rows.shape == whole.shape
    moved = model.rows(request, logits, [[], [7], [7, 41]], torch.tensor(ids) + 1)
    assert not torch.allclose(moved, expected, rtol=1e-5, atol=0), "other tokens change the rows"


def test_a_long_prompt_is_read_in_chunks():
    greedy = SamplingParams(max_tokens=12, temperature=0)
    prompt = [(i * i) % 90 for i in range(600)]
    plain = Engine(fresh()).generate([prompt], greedy)[0]
    target = fresh()
    drafter = drafted(target, net_for(target), length=3)
    out = Engine(target, drafter).generate([prompt], greedy)[0]
    assert out.token_ids == plain.token_ids
    assert out.stats.num_draft_tokens > 0
    owner, net = target.open(), drafter.model.backend
    target.forward([Feed(owner, prompt)])
    one, many = net.follow(owner), net.follow(owner)
    rows = net.forward([Feed(one, [*prompt, 5])])[0].logits
    for first in range(0, 600, 150):
        net.forward([Feed(many, prompt[first : first + 150])])
    assert torch.allclose(net.forward([Feed(many, [5])])[0].logits, rows, atol=1e-4)
    assert one.certain == many.certain == 601


def test_a_prompt_of_one_token_and_a_draft_temperature():
    target = fresh()
    made = Engine(target, drafted(target, net_for(target), temperature=0.5))
    out = made.generate([[7]], SamplingParams(max_tokens=12, temperature=0))[0]
    ids = [7]
    for _ in range(12):
        ids.append(int(target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert list(out.token_ids) == ids[1:]


def test_rules_for_constant_drafts_refuse_it():
    target = fresh()
    with pytest.raises(UserError, match="constant length"):
        Engine(target, drafted(target, net_for(target)), make_verifier("greedy_block"))


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own_output", [False, True])
def test_a_head_is_the_same_after_saving_and_loading(tmp_path, own_output):
    target = fresh()
    net = net_for(target, ids=[1, 5, 90], own_output=own_output)
    save_net(net, tmp_path, torch.float32)
    found = load_net(tmp_path)
    assert found.config == net.config
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in found.state_dict().items())
    made = make_drafter(f"feature_head:{tmp_path}", target=target, draft=None, stopper="fixed:2")
    assert made.name == "feature_head"
    chains = make_drafter(f"feature_head:{tmp_path}x3", target=target, draft=None, stopper="fixed:2")
    assert chains.name == "feature_head:x3"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 16}, "do not fit"),
        ({"vocab_size": 98}, "expected a target with 98 tokens, got llama with 97 tokens"),
        ({"layers": 5}, "expected a target with 5 layers, got llama with"),
        ({"ids": 98}, "expected 1 to 97"),
        ({"key_heads": 3}, "key heads divide heads"),
        ({"format": 9}, "of format 1"),
        ({"extra": 1}, "of format 1"),
    ],
)
def test_other_and_broken_heads_are_refused(tmp_path, change, words):
    target = fresh()
    save_net(net_for(target, ids=[1, 5, 90]), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError, match=words):
        make_drafter(f"feature_head:{tmp_path}", target=target, draft=None, stopper="fixed:2")


@pytest.mark.parametrize("ids", [[5, 1, 90], [1, 5, 5], [-1, 5, 90], [1, 5, 97]])
def test_tokens_out_of_order_twice_or_outside_are_refused(tmp_path, ids):
    save_net(net_for(fresh(), ids=ids), tmp_path)
    with pytest.raises(UserError, match="names tokens out of order, twice or outside its vocabulary"):
        load_net(tmp_path)


def test_names_without_a_head_say_what_is_legal(tmp_path):
    target = fresh()
    for spec, words in (
        ("feature_head", "needs the directory of a head"),
        (f"feature_head:{tmp_path}/no", "is missing"),
    ):
        with pytest.raises(UserError, match=words):
            make_drafter(spec, target=target, draft=None, stopper="fixed:2")
