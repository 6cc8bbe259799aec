"""DSpark and DFlash 2: rows as `speculators` computes them after every token, predictions that end drafts, refusals."""

import json
import math

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed
from draftproof.backends.heads.published.dflash import DFlashBackend, DFlashNet
from draftproof.backends.heads.published.dflash2 import DFlash2Net
from draftproof.backends.heads.published.dspark import DSparkNet
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.backend import LeanBackend
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.options import EngineOptions
from draftproof.models import REGISTRY
from draftproof.tree import TokenTree
from support import head_references, published
from support.head_references import DFLASH2, DSPARK, block_outputs, read_block_head
from support.helpers import (
    CONFIGS,
    assert_other_rows_are_seen,
    assert_output_distribution,
    embedded_model,
    random_model,
    tiny_llama,
)
from support.published import DATA, IDS, WRITERS, changed, tiny_target

NETS = {"dspark": DSparkNet, "dflash2": DFlash2Net}


@pytest.mark.grid(4)
@pytest.mark.parametrize("make", [HFBackend, LeanBackend])
@pytest.mark.parametrize("name", DSPARK + DFLASH2)
def test_rows_are_those_of_speculators_after_every_token(name, make):
    """From every place: three kinds of correction, predictions with and without the token, windows, and no anchor."""
    found = head_references.block(name, make)
    assert found.share < 1e-5
    assert found.accepted < 1e-5


@pytest.mark.grid(4)
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("dspark_vanilla", {"mask_token_id": 4}),
        ("dspark_vanilla", {"aux_hidden_state_layer_ids": [4, 1, 6]}),
        ("dspark_gated", {"sliding_window_non_causal": True}),
        ("dflash2_windows", {"sliding_window_non_causal": False}),
        ("dflash2_windows", {"selector_top_k": 5}),
        ("dflash2_anchor", {"mask_token_id": 4}),
    ],
)
def test_other_fields_change_the_rows(tmp_path, name, fields):
    """Negative control of the comparison above."""
    assert head_references.block(name, folder=changed(tmp_path / "head", name, **fields)).share > 0.01


@pytest.mark.parametrize("name", DSPARK + DFLASH2)
def test_another_token_before_changes_the_row(name):
    """Rows depend on the drafted token, so that q of one path is not that of another."""
    target = tiny_target()
    head = read_block_head(DATA / name, target)
    owner = target.open()
    target.forward([Feed(owner, IDS[:4])])
    rows = []
    for token in (11, 6):
        session = head.follow(owner)
        head.forward([Feed(session, IDS[1:5])])
        rows.append(head.forward([Feed(session, [token])])[0].logits)
    assert (rows[0] - rows[1]).nan_to_num(0).abs().max() > 0.1 or not torch.equal(*(row.isfinite() for row in rows))


@pytest.mark.parametrize("name", DSPARK + DFLASH2)
def test_a_tree_gives_the_rows_of_its_paths(name):
    """Two requests at once, level by level."""
    target = tiny_target()
    head = read_block_head(DATA / name, target)
    owners = [target.open(), target.open()]
    target.forward([Feed(owners[0], IDS[:4]), Feed(owners[1], IDS[:6])])
    sessions = [head.follow(owner) for owner in owners]
    known = [IDS[1:5], IDS[1:7]]
    head.forward([Feed(*each) for each in zip(sessions, known, strict=True)])
    head.forward([Feed(session, (), TokenTree(torch.tensor([11, 6]), (-1, -1))) for session in sessions])
    made = head.forward([Feed(session, (), TokenTree(torch.tensor([3, 8]), (1, 0), 2)) for session in sessions])
    for owner, read, output in zip(owners, known, made, strict=True):
        for row, path in zip(output.logits, ([6, 3], [11, 8]), strict=True):
            alone = head.follow(owner)
            head.forward([Feed(alone, read)])
            for token in path:
                found = head.forward([Feed(alone, [token])])[0].logits[-1]
            assert torch.allclose(row, found, atol=1e-4)


@pytest.mark.parametrize("name", NETS)
def test_both_layouts_are_one_head(tmp_path, name):
    """The authors' layouts count layers from the one after the embedding."""
    target = tiny_target()
    ids = [1, 5, 6, 30] if name == "dspark" else None
    heads = []
    for original in (False, True):
        theirs = {} if not original or name == "dspark" else {"causal": False}
        folder = tmp_path / str(original)
        WRITERS[name](folder, target, ids=ids, layers=(1, 3), original=original, **theirs)
        drafter = make_drafter(f"{name}:{folder}", target=target, draft=None, stopper="fixed:2")
        heads.append(drafter.model.backend)
    outputs = [block_outputs(target, head, 7) for head in heads]
    assert len(outputs[0]) == 4
    for one, other in zip(*outputs, strict=True):
        assert torch.equal(one.logits, other.logits)


def test_tokens_in_another_order_are_the_same_head(tmp_path):
    """The map d2t may name tokens in any order; corrections follow it."""
    target, ids = tiny_target(), [1, 5, 6, 30]
    folder = published.dspark(tmp_path / "a", target, ids=ids)
    tensors, order = load_file(folder / "model.safetensors"), [2, 0, 3, 1]
    for key in ("lm_head.weight", "markov_head.markov_w2.weight"):
        tensors[key] = tensors[key][order].contiguous()
    tensors["d2t"] = torch.tensor(ids)[order] - torch.arange(4)
    other = published.write(tmp_path / "b", json.loads((folder / "config.json").read_text()), tensors)
    one, two = (block_outputs(target, DFlashBackend(str(each), target, DSparkNet), 7) for each in (folder, other))
    assert all(torch.equal(row.logits, same.logits) for row, same in zip(one, two, strict=True))


# --- predictions that end drafts -------------------------------------------------------------------------------------


def test_drafts_end_where_the_head_predicts_a_rejection(tmp_path):
    """The chain ends before the first token with which the product of all predictions is below the threshold."""
    target = tiny_llama()
    folder = published.dspark(tmp_path / "head", target)
    params, drafted = SamplingParams(max_tokens=20, seed=3, ignore_eos=True), []
    for threshold in (0.05, 0.3, 0.9):
        drafter = make_drafter(f"dspark:{folder}", target=target, draft=None, stopper=f"predicted:{threshold}")
        seen, propose, judge = [], drafter.propose, drafter.stopper.stop_after
        drafter.stopper.stop_after = lambda signals, row, s=seen, j=judge: s.append(list(signals)) or j(signals, row)

        def watched(requests, rng, propose=propose, seen=seen, threshold=threshold):
            seen.clear()
            (draft,) = propose(requests, rng)
            assert len(draft) == sum(math.prod(signals) >= threshold for signals in seen)
            assert all(0 < signal < 1 for signals in seen for signal in signals)
            return [draft]

        drafter.propose = watched
        out = Engine(target, drafter).generate([[1, 0, 2, 1]], params)[0]
        drafted.append(out.stats.num_draft_tokens)
    assert drafted[0] > drafted[1] > drafted[2]


TREES = pytest.param(2, "trie_block", {0, 1}, marks=pytest.mark.slow)


@pytest.mark.parametrize(("chains", "rule", "depths"), [(1, "block", {0, 1, 2}), TREES])
def test_predictions_leave_the_output_distribution_exact(tmp_path, chains, rule, depths):
    """By enumeration, with a threshold that ends drafts before the first token, the second, and not at all."""
    target = tiny_llama()
    folder = published.dspark(tmp_path / "head", target, ids=[0, 2])
    spec = f"dspark:{folder}" + (f"x{chains}" if chains > 1 else "")
    drafted = set()

    def make():
        drafter = make_drafter(spec, target=target, draft=None, stopper="predicted:0.4")
        propose = drafter.propose

        def watched(requests, rng):
            drafts = propose(requests, rng)
            drafted.update(draft.depth for draft in drafts)
            return drafts

        drafter.propose = watched
        return drafter

    assert_output_distribution(target, make, rule, length=max(depths) + 2)
    assert drafted == depths


@pytest.mark.slow
def test_a_draft_that_ends_before_a_token_because_of_that_token_is_detected(tmp_path):
    """Negative control: dropping what was drawn changes the output distribution."""
    target = tiny_llama()
    folder = published.dspark(tmp_path / "head", target)

    def dropping():
        drafter = make_drafter(f"dspark:{folder}", target=target, draft=None, stopper="fixed:2")
        propose = drafter.propose
        drafter.propose = lambda requests, rng: [
            draft.first(len(draft) - 1) if len(draft) and int(draft.tree.tokens[-1]) == 2 else draft
            for draft in propose(requests, rng)
        ]
        return drafter

    with pytest.raises(AssertionError):
        assert_output_distribution(target, dropping, "block", length=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_second_tokens_are_exact_and_a_false_row_of_theirs_is_detected(tmp_path, name):
    """By enumeration, where the row of the second drafted token depends on the first; and its negative control."""
    target = tiny_llama()
    folder = WRITERS[name](tmp_path / "head", target)

    def make():
        return make_drafter(f"{name}:{folder}", target=target, draft=None, stopper="fixed:2")

    assert_output_distribution(target, make, "token", length=4)
    assert_other_rows_are_seen(target, make, "token", first=1, length=4)


def test_heads_that_predict_nothing_are_refused_with_that_stopper(tmp_path):
    target = tiny_target()
    for name, more in (("dspark", {"confidence": False}), ("dflash", {})):
        folder = WRITERS[name](tmp_path / name, target, **more)
        with pytest.raises(UserError, match=r"needs a draft head that predicts acceptance, but .* does not"):
            make_drafter(f"{name}:{folder}", target=target, draft=None, stopper="predicted")
    with pytest.raises(UserError, match="stopper predicted: expected 0 < threshold < 1, got 2"):
        make_drafter(f"dspark:{tmp_path / 'dspark'}", target=target, draft=None, stopper="predicted:2")


# --- factors that a config may name ----------------------------------------------------------------------------------


def original(folder, name, target, *, scaled=1.0, **fields):
    """A head in its authors' layout with fields in its config, and its own embedding multiplied."""
    WRITERS[name](folder, target, original=True)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(target.vocab_size, target.capabilities.hidden, generator=generator)
    save_file({**tensors, "embed_tokens.weight": scaled * table}, folder / "model.safetensors")
    nested = {} if name == "dspark" else {"dflash_config": {**config.get("dflash_config", {}), **fields}}
    (folder / "config.json").write_text(json.dumps({**config, **(nested or fields)}))
    return DFlashBackend(str(folder), target, {**NETS, "dflash": DFlashNet}[name])


@pytest.mark.parametrize("name", ["dflash", "dflash2"])
def test_rows_are_multiplied_and_capped_as_the_authors_do(tmp_path, name):
    """The embedding before the first layer; logits before the choice of the best tokens, whose scores are not."""
    target = tiny_target()
    plain, other = (
        torch.cat(
            [output.logits for output in block_outputs(target, original(tmp_path / str(n), name, target, **more), 4)]
        )
        for n, more in enumerate(
            ({"scaled": 1.5}, {"input_embedding_scale": 1.5, "output_multiplier": 3.0, "final_logit_softcapping": 4.0})
        )
    )
    kept = plain.isfinite()
    assert torch.equal(kept, other.isfinite())
    follows = 0.0
    if name == "dflash2":  # what the selector adds is neither multiplied nor capped
        head = original(tmp_path / "alone", name, target, scaled=1.5)
        head._net.conditional = False
        unary = torch.cat([output.logits for output in block_outputs(target, head, 4)])
        follows, plain = (plain - unary)[kept], unary
    expected = (plain * 3.0 / 4.0).tanh() * 4.0
    assert (other[kept] - expected[kept] - follows).abs().max() < 1e-4
    assert (other[kept] - plain[kept] - follows).abs().max() > 0.1, "negative control"


def test_a_scale_of_dspark_is_that_of_rows_and_corrections(tmp_path):
    target = tiny_target()
    plain, scaled = (
        block_outputs(target, original(tmp_path / str(n), "dspark", target, **more), 4)
        for n, more in enumerate(({}, {"logit_scale": 0.25}))
    )
    for one, other in zip(plain, scaled, strict=True):
        assert torch.allclose(other.logits, 0.25 * one.logits, atol=1e-5)
        assert torch.equal(one.accepted, other.accepted)


def test_the_anchor_of_dspark_drafts_unless_its_config_says_otherwise(tmp_path):
    target = tiny_target()
    for n, (more, places) in enumerate(
        [
            ({}, 4),
            ({"dspark_bonus_anchor": False}, 4),
            ({"dspark_bonus_anchor": True}, 3),
            ({"sample_from_anchor": False}, 3),
        ]
    ):
        assert original(tmp_path / str(n), "dspark", target, **more).deepest == places


def test_a_block_reads_the_rows_of_the_table_without_the_factor_of_the_target(tmp_path):
    """Gemma multiplies its embedding in the module; block heads name a factor of their own."""
    config = transformers.Gemma3TextConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, layer_types=["full_attention"] * 3,
    )  # fmt: skip
    model, ids = random_model(config), torch.tensor([3, 1, 7])
    table = model.get_input_embeddings().weight
    for make in (HFBackend, LeanBackend):
        target = make(model, name="gemma")
        folder = published.dflash(tmp_path / make.__name__, target)
        raw = DFlashBackend(str(folder), target)._net.embedded(ids)
        assert torch.allclose(raw, table[ids], atol=1e-6)
        assert (target.embed(ids) - table[ids]).abs().max() > 0.1, "negative control"


# --- heads in place of a draft model ----------------------------------------------------------------------------------


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", [*WRITERS])
def test_a_head_is_known_by_its_config_or_weights(tmp_path, name):
    """Named as the draft model, `auto` chooses it, too."""
    folder = WRITERS[name](tmp_path / "head", tiny_target())
    made = EngineOptions(draft=str(folder)).of_head()
    assert (made.draft, made.drafter) == (None, f"auto:{name}:{folder}")
    assert EngineOptions(draft=str(folder), drafter="auto").of_head() == made
    assert EngineOptions(draft=str(DATA / "target")).of_head().draft == str(DATA / "target")
    for other in ("owner/none", "owner/none:Q4_K_M", "embedded:draft", *REGISTRY):  # nothing is fetched or refused here
        assert EngineOptions(draft=other).of_head().draft == other


def test_a_model_of_one_layer_is_not_taken_for_an_eagle_head(tmp_path):
    """Its config is that of such a head, and its weights are not; a pickled head is refused as one."""
    config = CONFIGS["llama"]()
    config.num_hidden_layers = 1
    random_model(config).save_pretrained(tmp_path / "model")
    assert EngineOptions(draft=str(tmp_path / "model")).of_head().draft == str(tmp_path / "model")
    folder = published.eagle(tmp_path / "head", tiny_target())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    drafter = EngineOptions(draft=str(folder)).of_head().drafter
    with pytest.raises(UserError, match="has pickled weights only"):
        make_drafter(drafter, target=tiny_target(), draft=None, stopper="fixed:2")
    (folder / "tokenizer.json").write_text("{}")
    assert EngineOptions(draft=str(folder)).of_head().draft == str(folder)


def test_a_directory_whose_name_ends_like_a_number_of_chains(tmp_path):
    """It is one head with one chain, also as a source of `auto`; an engine that is asked for chains makes them."""
    folder = published.dspark(tmp_path / "headx3", HFBackend(embedded_model("target"), name="target"))
    options = {"stopper": "fixed:2", "check": False}
    assert Engine.load("embedded:target", str(folder), **options).drafter.name == "dspark"  # auto has one source of it
    made = [Engine.load("embedded:target", drafter=f"dspark:{folder}{more}", **options) for more in ("", "x2")]
    assert [engine.drafter.branching for engine in made] == [False, True]


def test_an_engine_drafts_with_a_head_that_is_named_as_the_draft_model(tmp_path):
    folder = published.dspark(tmp_path / "head", HFBackend(embedded_model("target"), name="target"))
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    plain = Engine.load("embedded:target", drafter="none").generate("Once upon", params)[0]
    made = Engine.load("embedded:target", str(folder), stopper="predicted:0.1").generate("Once upon", params)[0]
    assert made.token_ids == plain.token_ids
    assert made.stats.num_draft_tokens > 0


def test_two_ways_to_name_a_drafter_and_unknown_heads_are_refused(tmp_path):
    folder = DATA / "dspark_vanilla"
    with pytest.raises(
        UserError, match=r"draft names a head of algorithm dspark, but drafter is 'ngram:4': leave one .* dspark:/"
    ):
        EngineOptions(draft=str(folder), drafter="ngram:4").of_head()
    other = changed(tmp_path / "head", "dspark_vanilla", speculators_model_type="xpress")
    with pytest.raises(UserError, match="'xpress', which is not read here: expected eagle3, peagle, dflash, dspark"):
        EngineOptions(draft=str(other)).of_head()


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.grid(5)
@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("dspark_gated", {"markov_head_type": "fir"}, "markov_head_type 'fir': expected vanilla, gated, rnn"),
        ("dspark_rnn", {"sample_from_anchor": False}, "expected sample_from_anchor true with it"),
        ("dspark_vanilla", {"markov_rank": 4}, r"markov_w1.weight has shape \[40, 5\]"),
        ("dspark_vanilla", {"markov_rank": 0}, "confidence head that reads 21 numbers: expected 16"),
        ("dflash2_windows", {"conv_kernel_size": 5}, "conv_kernel_size 5 and conv_group_size 4: expected at most 4"),
        ("dflash2_windows", {"conv_group_size": 3}, "and a divisor of 16"),
        ("dflash2_windows", {"selector_top_k": 41}, "selector_top_k 41: expected 1 to 40"),
        ("dflash2_windows", {"speculators_model_type": "dflash"}, "does not name here: candidate_selector"),
    ],
)
def test_heads_that_do_not_fit_are_refused(tmp_path, name, fields, words):
    folder = changed(tmp_path / "head", name, **fields)
    algorithm = fields.get("speculators_model_type") or name.partition("_")[0]
    with pytest.raises(UserError, match=words):
        make_drafter(f"{algorithm}:{folder}", target=tiny_target(), draft=None, stopper="fixed:2")


def test_fields_of_the_authors_that_change_rows_are_refused(tmp_path):
    target = tiny_target()
    folder = published.dspark(tmp_path / "head", target, original=True)
    config = json.loads((folder / "config.json").read_text())
    for more, words in (
        ({"output_multiplier": 2.0}, "has output_multiplier 2.0, which is not read here"),
        ({"dspark_draft_topk": 8}, "has dspark_draft_topk 8, which is not read here"),
        ({"logit_scale": -1.0}, "has logit_scale -1.0: expected a number above 0"),
        ({"sample_from_anchor": True, "dspark_bonus_anchor": True}, "expected one of them true, not both"),
        ({"dflash_config": {**config["dflash_config"], "shift_label": True}}, "has dflash_config.shift_label True"),
    ):
        (folder / "config.json").write_text(json.dumps(config | more))
        with pytest.raises(UserError, match=words):
            DFlashBackend(str(folder), target, DSparkNet)


def test_a_part_of_the_vocabulary_is_refused_for_dflash2(tmp_path):
    target = tiny_target()
    folder = published.dflash2(tmp_path / "head", target)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    tensors |= {"lm_head.weight": torch.zeros(2, target.capabilities.hidden), **published.maps([1, 5], 40)}
    (folder / "config.json").write_text(json.dumps({**config, "draft_vocab_size": 2}))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match="drafts a part of the vocabulary: dflash2 needs all of it"):
        DFlashBackend(str(folder), target, DFlash2Net)
