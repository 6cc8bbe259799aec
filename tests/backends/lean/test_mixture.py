"""Mixtures of experts: each row gets what its experts' products give alone, whatever rows are beside it."""

import math
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from draftproof.backends.lean.mixture import Mixture
from draftproof.backends.lean.traits import Experts, Traits
from draftproof.native.ggml import StoredMatrix
from draftproof.native.tensors import Interleaved
from support.gguf_files import SCALES, random_blocks
from support.native_levels import OPERATIONS, close, drawn

COUNT, CHOSEN, SIZE, INNER, SHARED = 7, 3, 256, 512, 768
CASES = {
    "Q4_K and Q6_K": (12, 14, Traits(experts=Experts(COUNT, CHOSEN))),
    "Q8_0, shares as they are, scaled": (8, 8, Traits(experts=Experts(COUNT, CHOSEN, whole=False, factor=2.5))),
    "MXFP4, biases, clamped gates": (39, 39, Traits(experts=Experts(COUNT, CHOSEN), activation="clamped")),
    "plain, biases, gelu": (None, None, Traits(experts=Experts(COUNT, CHOSEN), activation="gelu_tanh")),
    "an expert of all tokens": (12, 8, Traits(experts=Experts(COUNT, CHOSEN, shared=True))),
    "one with a share": (None, 12, Traits(experts=Experts(COUNT, 1, shared=True, weighed=True))),
    "one expert": (8, 8, Traits(experts=Experts(1, 1))),
    "sigmoids, chosen with others": (None, 12, Traits(experts=Experts(COUNT, CHOSEN, sigmoid=True, least=0.1))),
    "sigmoids as they are": (12, 8, Traits(experts=Experts(COUNT, CHOSEN, whole=False, factor=1.5, sigmoid=True))),
}


def linear(seed, kind, dtype, *shape, bias=False):
    """A layer with weights in blocks of a type, or plain ones; three numbers are the shape of several matrices."""
    *outs, ins = shape
    added = drawn(seed + 1, *outs, dtype=dtype) if bias else None
    if kind is None:
        weight = drawn(seed, *shape, scale=ins**-0.5, dtype=dtype)
    else:
        content = torch.from_numpy(random_blocks(kind, math.prod(outs), ins, seed, SCALES[kind]).ravel())
        weight = StoredMatrix(content, math.prod(outs), ins, kind, dtype)
    return SimpleNamespace(weight=weight, bias=added, out_features=math.prod(outs))


def parts(name, dtype):
    """Everything that a mixture is made from; biases where the name of the case says so."""
    first, second, traits = CASES[name]
    experts, bias = traits.experts, "biases" in name

    def gated(seed, inner, *count):
        return SimpleNamespace(
            gate_proj=linear(seed, first, dtype, *count, inner, SIZE, bias=bias),
            up_proj=linear(seed + 10, first, dtype, *count, inner, SIZE, bias=bias),
            down_proj=linear(seed + 20, second, dtype, *count, SIZE, inner, bias=bias),
        )

    return traits, SimpleNamespace(
        gate=linear(1, None, dtype, experts.count, SIZE, bias=bias),
        experts=gated(100, INNER, experts.count),
        shared_expert=gated(200, SHARED),
        shared_expert_gate=linear(3, None, dtype, SIZE),
    )


def alone(operations, layer, x, expert=None):
    """The product of a row with the matrix of one expert, or of the expert of all."""
    weight, bias = layer.weight, layer.bias
    if isinstance(weight, StoredMatrix):
        if expert is not None:
            outs = SIZE if weight.ins == INNER else INNER
            size = len(weight.content) * outs // weight.outs
            content = weight.content[expert * size : (expert + 1) * size]
            weight = StoredMatrix(content, outs, weight.ins, weight.type, weight.dtype)
        bias = bias if bias is None or expert is None else bias[expert]
        return operations.ggml_product(x, operations.ggml_repacked(weight), bias)
    if expert is None:
        return operations.product(x, Interleaved.of(weight), bias)
    return operations.rows_product(x, weight[expert], None if bias is None else bias[expert])


def biases_of(name):
    """What is added to the scores by which experts are chosen."""
    return torch.linspace(-0.5, 0.5, COUNT)[[3, 0, 5, 1, 6, 2, 4]] if "chosen with" in name else None


def by_hand(traits, mlp, x, biases=None):
    """What each row gets, from the products of its experts alone, and the size of what is added."""
    operations, experts, made = OPERATIONS[x.dtype], traits.experts, torch.zeros(x.shape, dtype=torch.float64)
    logits = operations.product(x, Interleaved.of(mlp.gate.weight), mlp.gate.bias).double()
    sizes = torch.zeros_like(made)

    def add(row, share, gated, expert=None):
        both = [alone(operations, getattr(gated, f"{name}_proj"), x[row : row + 1], expert) for name in ("gate", "up")]
        inner = operations.gated(torch.cat(both, -1), traits.activation)
        outer = share * alone(operations, gated.down_proj, inner, expert)[0].double()
        made[row] += outer
        sizes[row] += outer.abs()

    for row in range(len(x)):
        scores = logits[row].sigmoid() if experts.sigmoid else logits[row].softmax(-1)
        chosen = (scores if biases is None else scores + biases).topk(experts.chosen).indices
        shares = scores[chosen]
        shares = experts.factor * (shares / (shares.sum() + experts.least) if experts.whole else shares)
        for share, expert in zip(shares, chosen, strict=True):
            add(row, share, mlp.experts, int(expert))
        if experts.shared:
            gate = operations.product(x[row], Interleaved.of(mlp.shared_expert_gate.weight.view(1, -1))).double()
            add(row, gate.sigmoid() if experts.weighed else 1.0, mlp.shared_expert)
    return made, sizes


@pytest.mark.grid(22)
@pytest.mark.parametrize("name", CASES)
def test_a_row_gets_what_its_experts_give(name, dtype):
    traits, mlp = parts(name, dtype)
    x = drawn(5, 9, SIZE, dtype=dtype)
    expected, sizes = by_hand(traits, mlp, x, biases_of(name))
    found = Mixture(mlp, traits, x, biases=biases_of(name))(x)
    assert close(found, expected, 4e-6 * sizes)
    assert not close(found, expected * 1.02, 4e-6 * sizes), "other shares are seen"
    wrong = expected.roll(1, 0)
    assert not close(found, wrong, 4e-6 * sizes), "the experts of another row are seen"


@pytest.mark.grid(4)
@pytest.mark.parametrize("name", CASES)
def test_a_row_has_the_same_bits_whatever_rows_and_threads_there_are(name, dtype):
    traits, mlp = parts(name, dtype)
    x = drawn(5, 150, SIZE, dtype=dtype)
    mixture, threads = Mixture(mlp, traits, x, biases=biases_of(name)), torch.get_num_threads()
    whole = mixture(x)
    for size in (1, 2, 3, 4, 5, 7, 8, 13, 60):
        assert torch.equal(mixture(x[7 : 7 + size]), whole[7 : 7 + size]), f"{size} rows"
    assert torch.equal(mixture(x.flip(0)), whole.flip(0))
    same = x[:1].expand(9, -1).contiguous()  # all rows go to the same experts
    assert torch.equal(mixture(same), whole[:1].expand(9, -1))
    try:
        torch.set_num_threads(1)
        assert torch.equal(mixture(x), whole)
    finally:
        torch.set_num_threads(threads)


def test_rows_of_another_size_are_refused(dtype):
    traits, mlp = parts("one expert", dtype)
    mixture = Mixture(mlp, traits, torch.zeros(1, dtype=dtype))
    with pytest.raises(ValueError, match="expected x to be"):
        mixture(torch.zeros(2, SIZE + 1, dtype=dtype))


def test_nan_stays_in_its_row(dtype):
    traits, mlp = parts("Q4_K and Q6_K", dtype)
    x = drawn(5, 6, SIZE, dtype=dtype)
    mixture = Mixture(mlp, traits, x)
    whole = mixture(x)
    x[2, 5] = math.nan
    found = mixture(x)
    assert found[2].isnan().all()
    assert torch.equal(found[torch.arange(6) != 2], whole[torch.arange(6) != 2])
