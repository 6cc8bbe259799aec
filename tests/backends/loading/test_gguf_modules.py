"""Models with recurrent layers in GGUF files: logits equal transformers', and drafts change no token."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed
from draftproof.backends.hf.snapshots import SnapshotSession
from draftproof.backends.lean.hybrid import HybridLean
from draftproof.backends.lean.traits import UnreadError
from draftproof.backends.loading.gguf_families import ARCHITECTURES
from draftproof.backends.loading.gguf_model import in_own_numbers
from draftproof.backends.loading.gguf_modules import read_modules
from draftproof.backends.loading.load import load
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.stored_backends import _PassContext
from draftproof.drafters.ngram import NgramDrafter
from draftproof.drafters.none import NoDrafter
from draftproof.engine.verifier_parts import make_verifier
from draftproof.models.gguf_file import GGUFFile
from draftproof.profiling.tensor_memory import tensor_memory
from draftproof.testing import engine_distribution, total_variation
from draftproof.tree import TokenTree
from support.distributions import checks_off
from support.gguf_modules import CONFIGS, module_model, write_modules

IDS = [5, 9, 2, 7, 11, 3, 300, 41, 17, 8, 260, 77, 30, 31, 32]
Q8_0, FEW, F16, BF16 = (8,), (12, 14, 8), 1, 30


FAST = ("lfm2", "qwen35", "falcon-h1, norm", "granitehybrid, experts", "gemma4")
CASES = [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in CONFIGS]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The file of a case and the model in it, made once."""
    folder = tmp_path_factory.mktemp("hybrids")

    @functools.cache
    def get(name, kinds=FEW):
        model, path = module_model(name), folder / f"{name.replace(', ', '-')}-{kinds}.gguf"
        write_modules(path, model, name, kinds)
        return model, path

    return get


@pytest.fixture(scope="module")
def loaded(written):
    """A backend with few bits, made once."""

    @functools.cache
    def get(name, dtype=torch.float32):
        return read_modules(GGUFFile(written(name)[1]), name=name, dtype=dtype)

    return get


def logits_of(backend, ids=IDS):
    session = backend.open()
    try:
        return backend.forward([Feed(session, ids[:1], TokenTree.chain(torch.tensor(ids[1:])))])[0].logits
    finally:
        session.close()


def off(found, expected):
    return float((found - expected).norm() / expected.norm())


def test_every_architecture_has_a_case():
    assert {name.split(",")[0] for name in CONFIGS} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name, written):
    model, path = written(name, (None,))
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    assert off(logits_of(read_modules(GGUFFile(path), name=name, dtype=torch.float32)), expected) < 1e-5
    _, few = written(name, Q8_0)
    backend = read_modules(GGUFFile(few), name=name, dtype=torch.float32)
    most = 0.5 if name == "gemma4, experts" else 0.15  # a token may choose another expert
    assert 1e-5 < off(logits_of(backend), expected) < most, "weights and inputs have 8 bits"


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", CASES)
def test_files_of_16_bits_keep_them(name, written):
    model, path = written(name, (F16,))
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    backend = read_modules(GGUFFile(path), name=name, dtype=torch.float32)
    assert off(logits_of(backend), expected) < 5e-3
    assert backend.facts.bits == 16
    dense = read_modules(GGUFFile(path), name=name, dtype=torch.float32, activations="float")
    assert off(logits_of(backend), logits_of(dense)) < 1e-5, "nothing is rounded"
    narrow = in_own_numbers(GGUFFile(written(name, (BF16,))[1]), name, LoadOptions())
    assert narrow.dtype == torch.bfloat16
    assert narrow.facts.bits is None
    most = {"gemma4, experts": 0.5, "gemma4, keys are values": 0.2}.get(name, 0.05)  # torch's sums on AMX are others
    if (narrow.max_positions or len(IDS)) < len(IDS):  # a token chose another expert: its check saw a window in that
        assert name == "gemma4, experts"
        return
    assert off(logits_of(narrow).float(), expected) < most, "the dtype that such files have elsewhere, too"


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_products_of_blocks_are_those_of_their_numbers(name, written, loaded):
    dense = read_modules(GGUFFile(written(name)[1]), name=name, dtype=torch.float32, activations="float")
    assert 1e-5 < off(logits_of(loaded(name)), logits_of(dense)) < 0.15


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", CASES)
def test_texts_are_equal_with_and_without_drafts(name, loaded):
    backend, prompt = loaded(name), [5, 9, 2, 7] * 4
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=24, temperature=temperature, seed=4, ignore_eos=True)
        texts = []
        for drafter in (None, NgramDrafter()):
            engine = Engine(backend, drafter, make_verifier("gumbel"))
            (made,) = engine.generate(prompt, params)
            texts.append(made.token_ids)
            several = engine.generate([prompt[::-1], prompt, [7, 300, 41]], params)
            assert temperature or several[1].token_ids == made.token_ids, "beside others"
        assert texts[0] == texts[1]


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=[pytest.mark.slow])], ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(name, dtype, loaded):
    backend = loaded(name, dtype)
    ids = IDS[: backend.max_positions]
    assert ids == IDS or name == "gemma4, experts", "a token chose another expert: its check saw a window in that"
    whole = logits_of(backend, ids)
    session = backend.open()
    one_by_one = [backend.forward([Feed(session, [token])])[0].logits[-1] for token in ids]
    assert torch.equal(torch.stack(one_by_one), whole)
    sessions = [backend.open() for _ in range(3)]
    chain = TokenTree.chain(torch.tensor(ids[1:]))
    for output in backend.forward([Feed(each, IDS[:1], chain) for each in sessions]):
        assert torch.equal(output.logits, whole)


def test_another_order_of_sums_would_be_seen(loaded, monkeypatch):
    """Negative control: other last digits become differences that are seen, as inputs are rounded to 8 bits."""
    backend = loaded("lfm2")
    whole = logits_of(backend)
    monkeypatch.setattr(backend, "lean", None)  # read by transformers' own modules, and attention of torch
    monkeypatch.setattr(backend, "packs", False)
    assert 0 < off(logits_of(backend), whole) < 0.05
    session = backend.open()
    one_by_one = [backend.forward([Feed(session, [token])])[0].logits[-1] for token in IDS]
    assert not torch.equal(torch.stack(one_by_one), logits_of(backend))


def test_every_architecture_is_read_by_the_lean_forward(loaded):
    for name in CONFIGS:
        assert loaded(name).rounding == "", name


@pytest.mark.parametrize("name", ["gemma4", "gemma4, experts"])
def test_a_backend_may_be_named(name, written):
    """Gemma 4 is read by the lean forward, or by transformers' own modules."""
    file = GGUFFile(written(name)[1])
    for asked, kind in (("auto", "lean"), ("lean", "lean"), ("hf", "hf")):
        made = in_own_numbers(file, "x", LoadOptions(backend=asked, dtype="float32"))
        assert made.kind == kind
    assert off(logits_of(made), logits_of(read_modules(file, name="x", dtype=torch.float32))) < 0.05


def distribution(backend, drafter):
    """Of outputs of three tokens, by enumeration."""

    def make(round_rng):
        return Engine(backend, drafter(), make_verifier("token"), round_rng=round_rng)

    with checks_off():
        return engine_distribution(make, [0, 1, 2, 0, 1], SamplingParams(max_tokens=3, ignore_eos=True))


@pytest.mark.parametrize(
    "name", ["lfm2", *(pytest.param(name, marks=[pytest.mark.slow]) for name in ("qwen35", "falcon-h1"))]
)
def test_the_output_distribution_is_that_without_drafts(name, tmp_path, monkeypatch):
    path = tmp_path / "x.gguf"
    write_modules(path, module_model(name, vocab_size=3), name, FEW)
    backend = read_modules(GGUFFile(path), name=name, dtype=torch.float32)
    expected = distribution(backend, NoDrafter)
    assert total_variation(distribution(backend, NgramDrafter), expected) < 1e-7

    def advanced(self, length):  # Negative control: a state after refused drafts is taken for the one before them.
        self._marks = self._marks[-1:]
        self._settled = True
        return length

    monkeypatch.setattr(SnapshotSession, "_reachable", advanced)
    assert total_variation(distribution(backend, NgramDrafter), expected) > 1e-4


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gemma4", "lean"),
        *(pytest.param("gemma4, experts", kind, marks=[pytest.mark.slow]) for kind in ("lean", "hf")),
    ],
)
def test_the_output_distribution_of_gemma_4_is_that_without_drafts(name, kind, tmp_path, monkeypatch):
    path = tmp_path / "x.gguf"
    sizes = {"vocab_size": 3, "vocab_size_per_layer_input": 3}
    write_modules(path, module_model(name, **sizes), name, FEW)
    backend = read_modules(GGUFFile(path), name=name, dtype=torch.float32, backend=kind)
    expected = distribution(backend, NoDrafter)
    assert total_variation(distribution(backend, NgramDrafter), expected) < 1e-7
    attend, enter = _PassContext.attend, HybridLean.enter

    def kept(self, layer, query, key, *others):  # Negative control: drafted tokens do not see their own keys.
        return attend(self, layer, query, key * (query.shape[2] == 1), *others)

    def others(self, ids):  # Negative control: drafted tokens have the embeddings of others.
        return enter(self, ids.flip(-1) if len(ids) < 5 else ids)

    monkeypatch.setattr(_PassContext, "attend", kept)
    monkeypatch.setattr(HybridLean, "enter", others)
    assert total_variation(distribution(backend, NgramDrafter), expected) > 1e-4


def test_linear_layers_that_read_the_same_inputs_are_one_product(loaded):
    layers = loaded("qwen35").model.model.layers
    attention, linear = layers[3].self_attn, layers[0].linear_attn
    assert attention.q_proj.product is attention.k_proj.product is attention.v_proj.product
    assert linear.in_proj_qkv.product is linear.in_proj_z.product
    assert layers[0].mlp.gate_proj.product is layers[0].mlp.up_proj.product


def test_memory_is_that_of_the_file(written, loaded):
    file = GGUFFile(written("lfm2")[1])
    stored = sum(entry.nbytes for entry in file.tensors.values())
    model = loaded("lfm2").model
    floats = sum(each.nbytes for each in model.parameters())
    assert stored - floats < tensor_memory(model).total_packed < 1.3 * stored, "the output layer's table once more"
    assert floats < 0.02 * stored


def test_tables_are_the_files_numbers(written, loaded):
    for name in ("lfm2", "qwen35"):
        backend, ids = loaded(name), torch.tensor([3, 0, 319])
        dense = read_modules(GGUFFile(written(name)[1]), name=name, dtype=torch.float32, activations="float")
        assert torch.equal(backend.output_rows(ids), dense.output_rows(ids))
        assert torch.equal(backend.embed(ids), dense.embed(ids))


def test_what_it_cannot_do_is_refused(loaded):
    with pytest.raises(UserError, match="cannot be quantized to 4 bits: its weights have few bits already"):
        loaded("lfm2").quantized(4)
    with pytest.raises(UserError, match="weights of lfm2 cannot be changed: they have few bits"):
        loaded("lfm2").with_weights({})


ONE = np.ones(4, np.float32)


@pytest.mark.grid(11)
@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("lfm2", {"extra": [("blk.1.attn_sub_norm.weight", ONE)]}, "have too much: blk.1.attn_sub_norm.weight"),
        ("lfm2", {"without": ["blk.2.ffn_up.weight"]}, "lack blk.2.ffn_up.weight"),
        ("lfm2", {"without": ["token_embd.weight"]}, "no token_embd.weight"),
        ("lfm2", {"changes": {"feed_forward_length": 256}}, r"blk.0.ffn_gate.weight is \[512, 256\], not \[256, 256\]"),
        ("lfm2", {"changes": {"shortconv.l_cache": 4}}, r"blk.0.shortconv.conv.weight is \[256, 3\]"),
        ("lfm2", {"changes": {"rope.scaling.type": "yarn"}}, r"rotary embedding is scaled \(yarn\)"),
        ("lfm2", {"changes": {"block_count": 3, "attention.head_count_kv": [0, 0, 2]}}, "have too much: blk.3"),
        ("qwen35", {"changes": {"attention.value_length": 32}}, "another size than its keys"),
        ("qwen3next", {"changes": {"expert_gating_func": 2}}, "not chosen by a softmax"),
        ("granitehybrid", {"changes": {"ssm.time_step_rank": 7}}, "transformers makes no model of its metadata"),
        ("granitehybrid", {"changes": {"rope.scaling.finetuned": True}}, "turns queries and keys"),
        ("lfm2", {"changes": {"attention.head_count_kv": [0, 2]}}, "head_count_kv has 2 numbers for 4 layers"),
        ("gemma4", {"changes": {"attention.sliding_window_pattern": [True, False]}}, "has 2 numbers for 4 layers"),
        ("gemma4", {"changes": {"attention.sliding_window_pattern": [True] * 4}}, "all its layers have a window"),
        ("gemma4", {"changes": {"attention.value_length_swa": 32}}, "another size than its keys"),
        (
            "gemma4",
            {"changes": {"feed_forward_length": 512}},
            r"ffn_gate.weight is \[1024, 256\], not",
        ),
        ("gemma4", {"without": ["rope_freqs.weight"]}, "rotary embedding is not that of Gemma 4"),
        ("gemma4", {"without": ["blk.0.layer_output_scale.weight"]}, "lack blk.0.layer_output_scale.weight"),
        ("gemma4, experts", {"without": ["blk.1.ffn_down_exps.scale"]}, "lack blk.1.ffn_down_exps.scale"),
    ],
)
def test_what_is_not_known_is_refused_with_a_reason(name, options, why, tmp_path):
    path = tmp_path / "x.gguf"
    write_modules(path, module_model(name), name, **options)
    with pytest.raises(UnreadError, match=why):
        read_modules(GGUFFile(path), name="x", dtype=torch.float32)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path, written):
    path, extra = tmp_path / "x.gguf", [("blk.4.nextn.eh_proj.weight", np.ones((256, 512), np.float32))]
    changes = {"block_count": 5, "nextn_predict_layers": 1}
    write_modules(path, module_model("qwen35"), "qwen35", changes=changes, extra=extra)
    found = read_modules(GGUFFile(path), name="x", dtype=torch.float32)
    expected = read_modules(GGUFFile(written("qwen35", (None,))[1]), name="x", dtype=torch.float32)
    assert torch.equal(logits_of(found), logits_of(expected))


def test_a_file_by_its_name(written, tmp_path):
    path = tmp_path / "x.gguf"
    changes = {"general.sampling.temp": 0.3, "tokenizer.chat_template": "{{ messages }}"}
    write_modules(path, module_model("lfm2"), "lfm2", FEW, changes)
    model = load(str(path))
    assert (model.backend.kind, model.backend.facts.bits) == ("snapshot", 6)
    assert model.backend.facts.sampling_defaults["temperature"] == pytest.approx(0.3)
    assert model.backend.facts.eos_token_ids == (319,)
    assert model.backend.max_positions == 512
    assert model.tokenizer.chat_template == "{{ messages }}"
    file = GGUFFile(path)
    for changes in ({"backend": "hf"}, {"backend": "lean"}, {"dtype": "float16"}):
        assert in_own_numbers(file, "x", dataclasses.replace(LoadOptions(), **changes)) is None
    assert in_own_numbers(file, "x", LoadOptions(backend="snapshot")).kind == "snapshot"
