"""How much errors of weights count: weighted rounding, what is measured, and the drafts that come of it."""

import copy

import pytest
import torch
import transformers

from draftproof.backends import calibration, hf, lean
from draftproof.backends.base import Feed
from draftproof.backends.calibration import InputSquares, write
from draftproof.backends.hf import HFBackend
from draftproof.backends.lean import LeanBackend, LeanForward
from draftproof.backends.native_layers import PRODUCTS
from draftproof.backends.packed import Product
from draftproof.backends.self_draft import QuantizedBackend
from draftproof.kernels import native
from draftproof.kernels.operations import Interleaved
from helpers import ROPE, random_model
from test_native import LEVELS, OPERATIONS, drawn, dtype, level  # noqa: F401 - fixtures

needs_native = pytest.mark.skipif(not LEVELS, reason="no native operations on this machine")
WIDE = {**ROPE, "head_dim": 32}


def uneven_model(seed=0):
    """A model some of whose channels are much larger than others, as in trained ones."""
    model = random_model(transformers.LlamaConfig(**WIDE), seed)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if name.endswith("norm.weight"):
                each[::8] *= 12
    return model


@pytest.mark.parametrize("group", [32, 64])
def test_errors_are_small_where_they_count(group, dtype, level):  # noqa: F811
    weight, quantize = Interleaved.of(drawn(1, 40, 130, dtype=dtype)), OPERATIONS[dtype].quantize
    counts = torch.ones(130)
    counts[::5] = 50.0

    def lost(made):
        return ((made.to_dense() - weight.to_dense().float()) ** 2 * counts).sum()

    alike, weighted = quantize(weight, 4, group), quantize(weight, 4, group, counts)
    assert lost(weighted) < 0.8 * lost(alike)
    assert lost(quantize(weight, 4, group, 51 - counts)) > lost(alike), "counts of other inputs are seen"
    assert torch.equal(quantize(weight, 4, group, torch.full((130,), 4.0)).blocks, alike.blocks)


def test_counts_of_another_size_are_refused():
    made = native.operations(torch.zeros(1))
    if made is None:
        pytest.skip("no native operations on this machine")
    with pytest.raises(ValueError, match=r"legal is .* of shape \(8,\)"):
        made.quantize(Interleaved.of(torch.rand(20, 8)), 4, 32, torch.ones(7))


@needs_native
def test_squares_are_those_of_the_inputs_of_transformers_own_layers():
    model, tokens = uneven_model(), [5, 9, 2, 7, 11, 3]
    reference = copy.deepcopy(model)
    backend = LeanBackend(model, name="llama")
    squares = {"head": InputSquares()}
    squares |= {(n, name): InputSquares() for n in range(backend.facts.layers) for name in PRODUCTS}
    reader = LeanForward(backend.facts, backend.lean._measured(squares))
    reader.forward([Feed(reader.open(), tokens)])

    inputs = {}
    for path, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, given, path=path: inputs.update({path: given[0]}))
    reference(input_ids=torch.tensor([tokens]), use_cache=False)
    own = {"qkv": "self_attn.q_proj", "out": "self_attn.o_proj", "gate_up": "mlp.up_proj", "down": "mlp.down_proj"}
    for (number, name), found in ((place, each) for place, each in squares.items() if place != "head"):
        expected = inputs[f"model.layers.{number}.{own[name]}"].flatten(0, 1).square().sum(0)
        expected = expected / expected.mean() + calibration.FLOOR
        assert torch.allclose(found.counts(), expected, rtol=1e-3), name
    last = inputs["lm_head"].flatten(0, 1)[-1].square()
    assert torch.allclose(squares["head"].counts(), last / last.mean() + calibration.FLOOR, rtol=1e-3)


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
    for seed in range(4):
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
    target.lean.head = Product(torch.full((97, WIDE["hidden_size"]), float("nan")))
    assert list(write(target, [])) == []
    assert target.quantized(4).facts.bits == 4
    for wrong in (0.0, float("nan"), float("inf")):
        squares = InputSquares()
        squares.add(torch.full((3, 8), wrong))
        assert squares.counts() is None


def test_what_first_tokens_add_is_dropped(monkeypatch):
    target = HFBackend(uneven_model(), name="llama")
    squares = InputSquares()
    monkeypatch.setattr(target, "_compute", watched(target._compute, squares))
    seen = [squares._sum for _ in write(target, [squares])]
    assert seen[0] is None
    assert all(each is not None for each in seen[1:])
    assert len(seen) == calibration.TOKENS


def watched(compute, squares):
    def computed(layout, *, hidden):
        squares.add(torch.ones(1, 4))
        return compute(layout, hidden=hidden)

    return computed
