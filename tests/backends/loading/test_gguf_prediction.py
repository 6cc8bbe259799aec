"""Prediction layers inside GGUF files (`nextn`): drafts equal those of safetensors, and change no token."""

import functools

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed, Session
from draftproof.backends.heads.published.mtp import has_prediction_layers, mtp_backend
from draftproof.backends.loading.by_name import load_backend
from draftproof.backends.loading.gguf_modules import read_modules
from draftproof.backends.loading.load import load
from draftproof.backends.loading.match import reads
from draftproof.backends.loading.options import LoadOptions
from draftproof.drafters.none import NoDrafter
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.verifier_parts import make_verifier
from draftproof.models.gguf_file import GGUFFile
from draftproof.testing import total_variation
from support.distributions import distribution_of_three_tokens
from support.gguf_files import write_llama
from support.gguf_modules import module_model, prediction_read, write_modules
from support.qwen_mtp import tensors_of, written_with
from support.recurrent_models import take_refused_states

FAMILIES = ("qwen35", "qwen35moe", "qwen3next")
FEW, Q8_0 = (12, 14, 8), (8,)
LAYER = 4  # the number of the prediction layer
TOKENS = [5, 9, 2, 7, 11, 3, 200, 41, 17, 8, 160, 77]
PROMPTS = [[5, 9, 2, 7] * 4, [8, 8, 1], [70, 12, 33, 4, 4]]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The file of a case, its model and the tensors `mtp.*` in it, made once."""
    folder = tmp_path_factory.mktemp("predicting")

    @functools.cache
    def get(name, kinds=FEW):
        model, path = module_model(name), folder / f"{name.replace(', ', '-')}-{kinds}.gguf"
        own = tensors_of(model.config)
        write_modules(path, model, name, kinds, own=own)
        return path, model, own

    return get


def read(path, name="x", **options):
    return read_modules(GGUFFile(path), name=name, dtype=torch.float32, **options)


def drafted(head, states, further=3):
    """Logits after some tokens whose states are given, and after each further one, with states of the head's own."""
    owner, known = Session(), len(states)
    owner.remember(states)
    owner.read(TOKENS[:known])
    session = head.follow(owner)
    feeds = [TOKENS[1 : known + 1], *([token] for token in TOKENS[known + 1 : known + 1 + further])]
    return torch.stack([head.forward([Feed(session, tokens)])[0].logits[-1] for tokens in feeds])


def off(found, expected):
    return float((found - expected).norm() / expected.norm())


def safetensors_head(folder, target, model, own):
    """The drafter of a checkpoint whose prediction layer, embedding and output layer have these numbers."""
    every = torch.arange(target.vocab_size)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(target.embed(every))
        model.lm_head.weight.copy_(target.output_rows(every))
    folder.mkdir()
    return mtp_backend(load_backend(str(written_with(folder, model, own)), LoadOptions(dtype="float32")))


@pytest.mark.grid(1)
@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_drafts_are_those_of_safetensors_with_the_same_numbers(name, written, tmp_path):
    path, model, own = written(name)
    states = torch.randn(7, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    dense = read(path, activations="float")
    numbers = prediction_read(path, own, LAYER)
    expected = drafted(safetensors_head(tmp_path / "checkpoint", dense, model, numbers), states)
    assert off(drafted(mtp_backend(dense), states), expected) < 1e-5
    assert 1e-5 < off(drafted(mtp_backend(read(path)), states), expected) < 0.15, "inputs have 8 bits"
    swapped = {
        **numbers,
        "mtp.pre_fc_norm_hidden.weight": numbers["mtp.pre_fc_norm_embedding.weight"],
        "mtp.pre_fc_norm_embedding.weight": numbers["mtp.pre_fc_norm_hidden.weight"],
    }
    other = {name: each + 1.0 if each.dim() == 1 else each for name, each in numbers.items()}
    for number, wrong in enumerate((swapped, other)):  # negative controls: other norms, and 1 added twice
        head = safetensors_head(tmp_path / f"wrong{number}", dense, model, wrong)
        assert off(drafted(head, states), expected) > 0.05


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_are_those_of_plain_decoding(name, written):
    """At temperature 0, and at 1 with the rule whose draws do not depend on drafts; alone and in a batch."""
    target = read(written(name)[0])
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=16, temperature=temperature, seed=4, ignore_eos=True)
        plain = Engine(target, None, make_verifier("gumbel")).generate(PROMPTS, params)
        drafter = make_drafter("mtp", target=target, draft=None, stopper="fixed:3")
        made = Engine(target, drafter, make_verifier("gumbel")).generate(PROMPTS, params)
        assert [each.token_ids for each in made] == [each.token_ids for each in plain]
        assert all(each.stats.num_draft_tokens > each.stats.num_drafts > 0 for each in made)


@pytest.mark.grid(1)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_output_distribution_is_that_without_drafts(rule, tmp_path, monkeypatch):
    """By enumeration, on a model with three tokens."""
    path, model = tmp_path / "x.gguf", module_model("qwen35", vocab_size=3)
    write_modules(path, model, "qwen35", FEW, own=tensors_of(model.config))
    target = read(path)

    def drafter():
        return make_drafter("mtp", target=target, draft=None, stopper="fixed:2")

    expected = distribution_of_three_tokens(target, NoDrafter, rule)
    assert total_variation(distribution_of_three_tokens(target, drafter, rule), expected) < 1e-6

    take_refused_states(monkeypatch)
    assert total_variation(distribution_of_three_tokens(target, drafter, rule), expected) > 1e-4


def test_auto_takes_it_and_a_file_has_it_by_its_tensors(written, caplog):
    path, *_ = written("qwen35")
    options = {"check": False, "dtype": "float32"}
    made = Engine.load(str(path), **options)
    assert "mtp" in [one.name for one in made.drafter.sources]
    greedy = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    plain = Engine.load(str(path), drafter="none", **options).generate(PROMPTS, greedy)
    assert [one.token_ids for one in made.generate(PROMPTS, greedy)] == [one.token_ids for one in plain]
    source = next(one for one in made.drafter.sources if one.name == "mtp")
    assert source.stopper.shared_rates.counts, "it drafted"
    assert Engine.load(str(path), stopper="fixed:2", **options).drafter.name == "mtp"
    assert not caplog.text


def _beside(place, shape=(320, 256)):
    return {"extra": [(f"blk.{LAYER}.{place}", np.zeros(shape, np.float32))]}


REFUSED = {
    "none, whatever its metadata say": (
        {"own": None, "changes": {"block_count": 5, "nextn_predict_layers": 1}},
        "no tensor nextn.eh_proj.weight",
    ),
    "none": ({"own": None}, "no tensor nextn.eh_proj.weight"),
    "several": ({"changes": {"block_count": 6, "nextn_predict_layers": 2}}, r"2 layers \(nextn_predict_layers\)"),
    "an embedding of its own": (_beside("nextn.embed_tokens.weight"), "too much: blk.4.nextn.embed_tokens.weight"),
    "an output layer of its own": (
        _beside("nextn.shared_head_head.weight"),
        "too much: blk.4.nextn.shared_head_head.weight",
    ),
    "a missing tensor": ({"without": ["blk.4.nextn.enorm.weight"]}, "lack blk.4.nextn.enorm.weight"),
    "another shape": ({"without": ["blk.4.attn_k.weight"], **_beside("attn_k.weight", (64, 256))}, "not .128, 256."),
}


@pytest.mark.grid(2)
@pytest.mark.parametrize("what", REFUSED)
def test_other_layers_are_refused_in_words_and_plain_decoding_goes_on(what, written, tmp_path):
    changes, message = REFUSED[what]
    _, model, own = written("qwen35")
    path = tmp_path / "x.gguf"
    write_modules(path, model, "qwen35", FEW, **{"own": own, **changes})
    target = read(path, "mine.gguf")
    with pytest.raises(UserError, match=f"drafter mtp: the prediction layer of mine.gguf cannot be read: .*{message}"):
        make_drafter("mtp", target=target, draft=None, stopper="fixed:2")
    assert has_prediction_layers(target) == ("none" not in what), "auto says why it goes on without one that is there"
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    made, plain = (Engine(each).generate(PROMPTS, params) for each in (target, read(written("qwen35")[0])))
    assert [each.token_ids for each in made] == [each.token_ids for each in plain]


def file_of(path, architecture):
    """A file of this architecture with one tensor, and no tokenizer."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tensor("markov_head.markov_w1.weight", np.zeros((8, 32), np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return str(path)


HEADS = {
    "dspark": "dspark",
    "dflash": "dflash",
    "dflash-draft": "dflash",
    "dflash2": "dflash2",
    "eagle3": "eagle3",
    "gemma4-assistant": "assistant",
    "gemma4_assistant": "assistant",
}


@pytest.mark.parametrize("architecture", HEADS)
def test_heads_in_such_files_are_refused(architecture, tmp_path):
    """As heads are published for llama.cpp: the file's architecture is named, and the option that takes a head."""
    head, drafter = file_of(tmp_path / "head.gguf", architecture), HEADS[architecture]
    expected = (
        rf"expected a .gguf file of a model \(architecture llama, .*qwen35.*\), got '.*head.gguf', a draft head of "
        rf"architecture '{architecture}': .* safetensors, as the draft, or as drafter {drafter}:HEAD\)"
    )
    with pytest.raises(UserError, match=expected):
        Engine.load("embedded:target", head, check=False)
    with pytest.raises(UserError, match=expected):
        Engine.load(head, check=False)
    if drafter != "assistant":  # these look at the target first
        with pytest.raises(UserError, match=r"head.gguf' is a file: expected the directory or the hub id of a head"):
            Engine.load("embedded:target", drafter=f"{drafter}:{head}", check=False)


@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_other_files_are_not_taken_for_heads(architecture, tmp_path):
    with pytest.raises(UserError, match=r"x\.gguf has no tokenizer .* expected gemma4, gpt2, llama") as refused:
        Engine.load(file_of(tmp_path / "x.gguf", architecture), check=False)
    assert "draft head" not in str(refused.value)


def test_it_is_not_counted_among_what_a_token_reads(written, tmp_path):
    path, model, own = written("qwen35")
    write_modules(tmp_path / "x.gguf", model, "qwen35", FEW)
    whole, without = GGUFFile(path), GGUFFile(tmp_path / "x.gguf")
    assert whole.prediction_layers == ("blk.4.",)
    assert sum(each.nbytes for each in whole.read_for_a_token) == sum(each.nbytes for each in without.read_for_a_token)
    assert reads(path).of(1) == reads(tmp_path / "x.gguf").of(1)
    assert own, "the first one has such a layer"


def test_a_layer_of_another_architecture_is_left_out(tmp_path):
    """As in files of GLM-OCR, which are of a plain architecture but for such a layer."""
    beyond = [(f"blk.4.{name}", np.ones((256,), np.float32)) for name in ("attn_norm.weight", "nextn.enorm.weight")]
    for name, changes, extra in (("plain", {}, ()), ("more", {"block_count": 5, "nextn_predict_layers": 1}, beyond)):
        write_llama(tmp_path / f"{name}.gguf", extra=extra, **changes)
    target, plain = (load(str(tmp_path / f"{name}.gguf")).backend for name in ("more", "plain"))
    assert target.kind == plain.kind == "lean"
    one, other = (each.forward([Feed(each.open(), TOKENS)])[0].logits for each in (target, plain))
    assert torch.equal(one, other)
    assert not has_prediction_layers(target)
    with pytest.raises(UserError, match=r"more.gguf has no prediction layers of its own that are read here .*nextn"):
        make_drafter("mtp", target=target, draft=None, stopper="fixed:2")
