"""Output layers of few bits in a file, as draft models have them: a rough copy, and whole rows for likely outputs."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from transformers import LlamaConfig

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed
from draftproof.backends.loading.gguf_model import read_model
from draftproof.backends.products import packed_linear as packed
from draftproof.backends.products.packed_linear import RescoredProduct, StoredProduct
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.none import NoDrafter
from draftproof.engine.drafter_parts import make_drafter, names_head
from draftproof.engine.verifier_parts import make_verifier
from draftproof.models.gguf_file import GGUFFile
from draftproof.native import operations as native_operations
from draftproof.native.ggml import LAYOUTS, SIXTEEN_BITS, TYPES, StoredMatrix
from draftproof.native.tensors import Interleaved, Quantized
from draftproof.testing import total_variation
from draftproof.tree import TokenTree
from support.distributions import distribution_of_three_tokens
from support.gguf_files import METADATA, SCALES, random_blocks, write_model
from support.helpers import random_model
from support.native_levels import OPERATIONS, drawn, needs_native

IDS = [5, 9, 2, 7, 11, 3, 300, 41, 17, 8, 260, 77]
PROMPT = [5, 9, 2, 7] * 4


def stored(kind, outs, ins, dtype, seed=0):
    """A matrix of random numbers, as a file has it."""
    if kind in SIXTEEN_BITS:
        numbers = drawn(seed, outs, ins, dtype={1: torch.float16, 30: torch.bfloat16}[kind])
        content = numbers.view(torch.uint8).flatten()
    else:
        content = torch.from_numpy(random_blocks(kind, outs, ins, seed=seed, scale=SCALES[kind])).flatten()
    return StoredMatrix(content, outs, ins, kind, dtype, release=lambda: None)


@pytest.mark.parametrize("kind", [*TYPES, *SIXTEEN_BITS], ids=lambda kind: LAYOUTS[kind].name)
@pytest.mark.parametrize("outs", [1, 200])
def test_outputs_are_computed_again_with_rows_of_a_file(outs, kind, dtype, level):
    ins = 66 if kind in SIXTEEN_BITS else 256
    matrix, x, bias = stored(kind, outs, ins, dtype), drawn(2, 3, ins, dtype=dtype), drawn(3, outs, dtype=dtype)
    operations, given = OPERATIONS[dtype], drawn(4, 3, outs, dtype=dtype)
    weight = OPERATIONS[torch.float32].ggml_rows(replace(matrix, dtype=torch.float32), torch.arange(outs)).double()
    exact, sizes = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    count, found = min(outs, 70), given.clone()
    operations.rescore(found, x, matrix, bias, count=count)
    chosen = given >= given.topk(count).values[:, -1:]
    assert torch.equal(found[~chosen], given[~chosen])
    exact, sizes = exact + bias.double(), sizes + bias.double().abs()
    # least values are added apart from numbers, so sums are of terms twice as large and more
    limit = 16 * ins * torch.finfo(torch.float32).eps * sizes + torch.finfo(dtype).eps * exact.abs()
    assert ((found.double() - exact)[chosen].abs() <= limit[chosen]).all()
    other = given.clone()
    operations.rescore(other, x, stored(kind, outs, ins, dtype, seed=1), bias, count=count)
    assert ((other.double() - exact)[chosen].abs() > limit[chosen]).any(), "other numbers are seen"


@pytest.mark.parametrize("kind", [8, 12, 14, 39, 30], ids=lambda kind: LAYOUTS[kind].name)
@pytest.mark.parametrize("outs", [48, 53])
def test_a_stored_matrix_is_rounded_as_its_floats_are(outs, kind, level, monkeypatch):
    operations, matrix = OPERATIONS[torch.float32], stored(kind, outs, 512, torch.float32)
    floats = Interleaved.of(operations.ggml_rows(matrix, torch.arange(outs)))
    expected = operations.quantize(floats, 2, 64)
    for together in (1, 1 << 22):  # sixteen rows at once, and all
        monkeypatch.setattr(native_operations, "_TOGETHER", together)
        made = operations.ggml_quantized(matrix, 2, 64)
        assert torch.equal(made.blocks, expected.blocks)
    assert not torch.equal(
        operations.ggml_quantized(stored(kind, outs, 512, torch.float32, 1), 2, 64).blocks, made.blocks
    )


def test_other_orders_and_shapes_are_refused():
    matrix = stored(8, 32, 64, torch.float32)
    x, logits, turned = torch.rand(1, 64), torch.rand(1, 32), matrix.in_order(torch.arange(32).flip(0))
    for wrong in (turned, stored(8, 31, 64, torch.float32), stored(8, 32, 96, torch.float32)):
        with pytest.raises(ValueError, match="expected a weight of 32 x 64 in order"):
            OPERATIONS[torch.float32].rescore(logits, x, wrong, count=4)
    with pytest.raises(ValueError, match="in order"):
        OPERATIONS[torch.float32].ggml_quantized(turned, 2, 64)
    with pytest.raises(ValueError, match="on float32"):
        OPERATIONS[torch.bfloat16].ggml_quantized(matrix, 2, 64)


# --- models -----------------------------------------------------------------------------------------------------------


def written(path, vocab=320, seed=3, kinds=(8,), **changes):
    """A file with a Llama of four layers."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        **changes,
    )
    write_model(path, random_model(config, seed=seed), "llama", METADATA, kinds=kinds)
    return path


def read(path, dtype=torch.float32):
    return read_model(GGUFFile(path), name=path.stem, dtype=dtype)


@pytest.fixture
def large(monkeypatch):
    """Vocabularies of three tokens are large ones; one of three outputs is whole."""
    monkeypatch.setattr(packed, "ROUGH_OUTPUTS", 3)
    monkeypatch.setattr(packed, "ROUGH_SHARE", 3)


def logits_of(backend, ids=IDS):
    return backend.forward([Feed(backend.open(), ids[:1], TokenTree.chain(torch.tensor(ids[1:])))])[0].logits


@needs_native
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_likely_outputs_are_those_of_the_file(dtype, tied, tmp_path, large):
    whole = read(written(tmp_path / "x.gguf", tie_word_embeddings=tied), dtype)
    made = whole.for_drafts()
    assert isinstance(made.lean.head, RescoredProduct)
    assert isinstance(made.lean.head.weight, Quantized)
    assert made.lean.head.weight.bits == packed.ROUGH_BITS
    assert type(whole.lean.head) is StoredProduct, "the model itself stays as it is"
    assert made is whole.for_drafts(), "several engines share one copy"
    assert made is made.for_drafts() or made.for_drafts().lean.head is made.lean.head
    expected, found = logits_of(whole).float(), logits_of(made).float()
    assert torch.equal(expected.argmax(-1), found.argmax(-1))
    likely = expected >= expected.topk(20).values[:, -1:]
    off = (found - expected).abs() / expected.std()
    assert off[likely].max() < 0.1, "the inputs of a whole layer have 8 bits"
    assert off[~likely].max() > 0.2, "rough outputs are seen"


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype, tmp_path, large):
    backend = read(written(tmp_path / "x.gguf"), dtype).for_drafts()
    assert backend.rounding == ""
    whole, session = logits_of(backend), backend.open()
    one_by_one = [backend.forward([Feed(session, [token])])[0].logits[-1] for token in IDS]
    assert torch.equal(torch.stack(one_by_one), whole)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(logits_of(backend), whole)
    finally:
        torch.set_num_threads(before)


@needs_native
@pytest.mark.parametrize("kinds", [(8,), (10,)], ids=["Q8_0", "Q2_K"])
def test_it_is_for_large_layers_of_more_bits(kinds, tmp_path, monkeypatch):
    backend = read(written(tmp_path / "x.gguf", kinds=kinds))
    assert backend.for_drafts() is backend, "320 outputs are few"
    monkeypatch.setattr(packed, "ROUGH_OUTPUTS", 320)
    other = read(tmp_path / "x.gguf")
    assert (other.for_drafts() is other) is (kinds == (10,)), "2 bits are hardly fewer than it has"


@needs_native
@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_output_distribution_is_the_targets(rule, tmp_path, large, monkeypatch):
    """By enumeration, on a pair with three tokens."""
    target = read(written(tmp_path / "target.gguf", vocab=3))
    whole = read(written(tmp_path / "draft.gguf", vocab=3, seed=4))
    draft = whole.for_drafts()
    assert draft is not whole

    def drafter():
        return make_drafter("model", target=target, draft=draft, stopper="fixed:2")

    expected = distribution_of_three_tokens(target, NoDrafter, rule)
    assert total_variation(distribution_of_three_tokens(target, drafter, rule), expected) < 1e-6

    propose = ModelDrafter.propose

    def of_the_whole_layer(self, requests, rng):  # Negative control: q is not what tokens were drawn from.
        made = []
        for request, one in zip(requests, propose(self, requests, rng), strict=True):
            logits = whole.forward([Feed(whole.open(), request.tokens, one.tree)])[0].logits
            made.append(replace(one, probs=logits[: len(one)].softmax(-1)) if len(one) else one)
        return made

    monkeypatch.setattr(ModelDrafter, "propose", of_the_whole_layer)
    assert total_variation(distribution_of_three_tokens(target, drafter, rule), expected) > 1e-4


@needs_native
def test_texts_are_the_targets_and_an_engine_takes_it_unless_a_dtype_is_named(tmp_path, large):
    target = read(written(tmp_path / "x.gguf"))
    for temperature, rule in ((0.0, "block"), (1.0, "gumbel")):
        params = SamplingParams(max_tokens=30, temperature=temperature, seed=4, ignore_eos=True)
        texts, accepted = [], []
        for named in (None, "auto", "float32"):
            draft = None if named is None else read(tmp_path / "x.gguf")
            options = {} if named is None else {"draft_dtype": named, "stopper": "fixed:3"}
            drafter = "none" if named is None else "model"
            engine = Engine.assemble(target, draft, None, drafter=drafter, rule=make_verifier(rule), **options)
            if draft is not None:
                head = engine.drafter.model.backend.lean.head
                assert isinstance(head, RescoredProduct) is (named == "auto")
            (out,) = engine.generate([PROMPT], params)
            texts.append(out.token_ids)
            accepted.append(out.stats.num_accepted_tokens)
        assert texts[0] == texts[1] == texts[2]
        assert accepted[1] > 10
        assert accepted[2] >= 20, "the target drafts for itself"


@needs_native
def test_an_engine_does_not_keep_the_whole_layer(tmp_path, large):
    target, draft = read(written(tmp_path / "x.gguf")), read(tmp_path / "x.gguf")
    layer, mapped = weakref.ref(draft.lean.head.weight), draft.lean.head._matrices[0].content.data_ptr()
    engine = Engine.assemble(target, draft, None, drafter="model")
    head = engine.drafter.model.backend.lean.head
    assert head._table.content.data_ptr() == mapped, "whole rows are those of the file's map"
    del draft
    gc.collect()
    assert layer() is None
    assert engine.drafter.model.backend is engine._draft


@needs_native
def test_a_model_in_floats_has_it_too(large):
    config = LlamaConfig(
        vocab_size=200, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    from draftproof.backends.lean.backend import LeanBackend

    whole = LeanBackend(random_model(config), name="x")
    made = whole.for_drafts()
    assert made.lean.head.weight.bits == packed.ROUGH_BITS
    ids = [each % 200 for each in IDS]
    assert torch.equal(logits_of(whole, ids).argmax(-1), logits_of(made, ids).argmax(-1))
    assert not torch.equal(logits_of(whole, ids), logits_of(made, ids))


def test_a_head_keeps_its_dtype_where_that_is_named():
    assert names_head("feature_head:x") and names_head("auto:eagle3:x") and names_head("mtp")  # noqa: PT018
    assert not any(map(names_head, (None, "auto", "model", "ngram:4")))
    with pytest.raises(UserError, match="but there is no draft model"):
        Engine.load("embedded:stories", draft_dtype="float32", drafter="ngram")
