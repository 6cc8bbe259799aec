"""How much errors of weights count: weighted rounding, what is measured, and the drafts that come of it."""

import copy
from dataclasses import replace

import pytest
import torch

from draftproof import native
from draftproof.backends.base import Feed
from draftproof.backends.heads.self_draft import QuantizedBackend
from draftproof.backends.hf import backend as hf
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean import backend as lean
from draftproof.backends.lean.backend import LeanBackend, LeanForward
from draftproof.backends.lean.native_layers import PRODUCTS
from draftproof.backends.products import calibration
from draftproof.backends.products.calibration import InputStatistics, write
from draftproof.backends.products.packed_linear import PackedLinear
from draftproof.native.tensors import Interleaved, MeasuredInputs
from support.native_levels import OPERATIONS, drawn, needs_native
from support.uneven_models import WIDE, uneven_model


@pytest.mark.parametrize("group", [32, 64])
def test_errors_are_small_where_they_count(group, dtype, level):
    weight, quantize = Interleaved.of(drawn(1, 40, 130, dtype=dtype)), OPERATIONS[dtype].quantize
    counts = torch.ones(130)
    counts[::5] = 50.0
    mean = torch.zeros(130)

    def lost(made):
        return ((made.to_dense() - weight.to_dense().float()) ** 2 * counts).sum()

    alike, weighted = quantize(weight, 4, group), quantize(weight, 4, group, MeasuredInputs(counts, mean))
    assert lost(weighted) < 0.8 * lost(alike)
    assert lost(quantize(weight, 4, group, MeasuredInputs(51 - counts, mean))) > lost(alike), "wrong counts are seen"
    same = quantize(weight, 4, group, MeasuredInputs(torch.full((130,), 4.0), mean))
    assert torch.equal(same.blocks, alike.blocks)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_what_outputs_lack_on_the_mean(bits, group, dtype, level):
    weight = Interleaved.of(drawn(1, 40, 130, dtype=dtype))
    mean = torch.randn(130, generator=torch.Generator().manual_seed(2))
    made = OPERATIONS[dtype].quantize(weight, bits, group, MeasuredInputs(torch.ones(130), mean))
    expected = (weight.to_dense().double() - made.to_dense().double()) @ mean.double()
    assert made.lost.shape == (40,)
    assert torch.allclose(made.lost.double(), expected, atol=1e-5)
    assert not torch.allclose(made.lost.double(), 1.01 * expected, atol=1e-5)


@needs_native
@pytest.mark.parametrize("output", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_the_mean_input_has_the_outputs_of_the_whole_weights(output, biased):
    weight, mean = drawn(3, 48, 128, dtype=torch.float32), torch.randn(128, generator=torch.Generator().manual_seed(4))
    whole = PackedLinear(weight, torch.arange(48.0) if biased else None)
    known = MeasuredInputs(torch.ones(128), mean)
    for inputs, off in ((known, 0.02), (None, 0.2)):
        made = whole.quantized_output(4, None, inputs) if output else whole.quantized(4, inputs=inputs)
        made = made._rough if output else made
        error = (made(mean) - whole(mean)).norm() / (whole(mean) - (whole.bias if biased else 0)).norm()
        assert error < off
        if inputs is None:
            assert error > 0.03, "weights are rounded"
    made = whole.quantized_output(4, None, known)
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(5))
    assert torch.allclose(made(x), whole(x), atol=1e-4), "all 48 outputs are computed again, with the whole bias"


def test_counts_of_another_size_are_refused():
    made = native.operations_for(torch.zeros(1))
    if made is None:
        pytest.skip("no native operations on this machine")
    with pytest.raises(ValueError, match=r"expected counts to be .* of shape \(8,\)"):
        made.quantize(Interleaved.of(torch.rand(20, 8)), 4, 32, MeasuredInputs(torch.ones(7), torch.ones(7)))


@needs_native
def test_statistics_are_those_of_the_inputs_of_transformers_own_layers():
    model, tokens = uneven_model(), [5, 9, 2, 7, 11, 3]
    reference = copy.deepcopy(model)
    backend = LeanBackend(model, name="llama")
    statistics = {"head": InputStatistics()}
    statistics |= {f"{n}.{name}": InputStatistics() for n in range(backend.facts.layers) for name in PRODUCTS}
    reader = LeanForward(backend.facts, backend.lean._measured(statistics))
    reader.forward([Feed(reader.open(), tokens)])

    inputs = {}
    for path, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, given, path=path: inputs.update({path: given[0]}))
    reference(input_ids=torch.tensor([tokens]), use_cache=False)
    own = {"qkv": "self_attn.q_proj", "out": "self_attn.o_proj", "gate_up": "mlp.up_proj", "down": "mlp.down_proj"}
    for place, found in statistics.items():
        if place == "head":
            continue
        number, name = place.split(".")
        rows = inputs[f"model.layers.{number}.{own[name]}"].flatten(0, 1)
        variance = rows.var(0, correction=0)
        assert torch.allclose(found.found().counts, variance / variance.mean() + calibration.FLOOR, rtol=1e-2), name
        assert torch.allclose(found.found().mean, rows.mean(0), atol=1e-4), name
    assert torch.allclose(statistics["head"]._sum, inputs["lm_head"].flatten(0, 1)[-1], rtol=1e-3, atol=1e-4)
    assert statistics["head"].found() is None, "one row has no variance"


@pytest.mark.grid(1)
@needs_native
@pytest.mark.parametrize("kind", [LeanBackend, HFBackend])
def test_drafts_are_nearer_to_the_model_and_the_same_every_time(kind, monkeypatch):
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(1)).tolist()

    def logits(target):
        made = QuantizedBackend(target, 4)
        return torch.cat([made.forward([Feed(made.borrow(target.open()), tokens[:n])])[0].logits for n in range(8, 40)])

    def made(seed, measured):
        with monkeypatch.context() as patch:
            if not measured:
                patch.setattr(lean, "write", lambda *_: iter(()))
                patch.setattr(hf, "write", lambda *_: iter(()))
            return logits(kind(uneven_model(seed), name="llama"))

    alike, weighted = 0.0, 0.0
    for seed in range(8):  # four of them differ by a seventh
        target = kind(uneven_model(seed), name="llama")
        whole = torch.cat([target.forward([Feed(target.open(), tokens[:n])])[0].logits for n in range(8, 40)])
        alike += float((made(seed, measured=False) - whole).norm())
        weighted += float((found := made(seed, measured=True) - whole).norm())
    assert weighted < 0.9 * alike
    assert torch.equal(found, made(seed, measured=True) - whole)


@needs_native
def test_the_models_own_cache_is_not_used():
    target = LeanBackend(uneven_model(), name="llama")
    session = target.open()
    before = target.forward([Feed(session, [5, 9, 2])])[0].logits
    extent = target.cache.extent
    target.quantized(4)
    assert target.cache.extent == extent
    session.keep(0)
    assert torch.equal(target.forward([Feed(session, [5, 9, 2])])[0].logits, before)


@needs_native
def test_a_model_without_legal_logits_is_quantized_as_if_all_counted_alike():
    target = LeanBackend(uneven_model(), name="llama")
    target.lean.head = PackedLinear(torch.full((97, WIDE["hidden_size"]), float("nan")))
    assert list(write(target, [])) == []
    assert target.quantized(4).facts.bits == 4
    for wrong in (0.0, float("nan"), float("inf")):
        statistics = InputStatistics()
        statistics.add(torch.tensor([[wrong] * 8, [0.0] * 8]))
        assert statistics.found() is None


def test_what_first_tokens_add_is_dropped(monkeypatch):
    target = HFBackend(uneven_model(), name="llama")
    statistics = InputStatistics()
    monkeypatch.setattr(target, "_compute", watched(target._compute, statistics))
    seen = [statistics._sum for _ in write(target, [statistics])]
    assert seen[0] is None
    assert all(each is not None for each in seen[1:])
    assert len(seen) == calibration.TOKENS


@needs_native
@pytest.mark.parametrize(
    ("bos", "eos", "first"), [(7, (3,), [7]), (None, (3, 4), [3]), (97, (3,), [3]), (None, (), None)]
)
def test_rows_begin_as_texts_do(bos, eos, first, monkeypatch):
    target = LeanBackend(uneven_model(), name="llama")
    target.facts = replace(target.facts, bos_token_id=bos, eos_token_ids=eos)
    read = []
    monkeypatch.setattr(target, "forward", lambda feeds: read.append([f.tokens for f in feeds]) or forward(feeds))
    forward = LeanBackend.forward.__get__(target)
    list(write(target, []))
    spread = [[(2 * row + 1) * 97 // 32] for row in range(16)]
    assert read[0] == (spread if first is None else [first] * 16)
    texts = {tuple(pass_[row][0] for pass_ in read) for row in range(16)}
    assert len(texts) > 8, "rows go on in their own ways"


def watched(compute, statistics):
    def computed(layout, *, hidden):
        statistics.add(torch.ones(1, 4))
        return compute(layout, hidden=hidden)

    return computed
