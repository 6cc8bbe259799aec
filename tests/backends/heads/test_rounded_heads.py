"""Published heads whose weights are rounded to few bits: other drafts, and the target's distribution all the same."""

from dataclasses import replace

import pytest
import torch

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed
from draftproof.backends.heads.published.rounding import rounded_head
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.products import packed_linear
from draftproof.backends.products.packed_linear import PackedLinear, RescoredProduct
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.verifier_parts import make_verifier
from draftproof.native.tensors import Quantized
from support.helpers import assert_output_distribution, tiny_llama
from support.published import IDS, WRITERS, tiny_target


def first_row(target, drafter):
    """The distribution from which the first token of a draft is drawn."""
    owner = target.open()
    target.forward([Feed(owner, IDS[:6])])
    session = drafter.model.backend.follow(owner)
    return drafter.model.backend.forward([Feed(session, IDS[1:7])])[0].logits[-1]


@pytest.mark.grid(2)
@pytest.mark.parametrize("bits", [8, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WRITERS)
def test_exact_output_distribution(tmp_path, name, bits):
    target = HFBackend(tiny_llama().model.float(), name="tiny")  # native products have no float64
    folder = WRITERS[name](tmp_path / "head", target, ids=[0, 2])

    def drafter():
        return make_drafter(f"{name}:{folder}", target=target, draft=None, stopper="fixed:2", bits=bits)

    assert_output_distribution(target, drafter, "block", length=3, tolerance=1e-5)


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", WRITERS)
def test_texts_and_what_is_rounded(tmp_path, name, monkeypatch):
    """Drafts are other ones than those of the whole head, and nothing of the text changes."""
    target, made = tiny_target(), {8: [], None: []}
    folder, params = WRITERS[name](tmp_path / "head", target), SamplingParams(max_tokens=20, temperature=0)
    plain = Engine(target).generate([IDS[:5], IDS[3:9]], params)
    quantized = PackedLinear.quantized

    def counted(self, bits, *args, **kwargs):
        made[8].append(quantized(self, bits, *args, **kwargs))
        return made[8][-1]

    monkeypatch.setattr(PackedLinear, "quantized", counted)
    for bits in (8, None):
        before = len(made[8])
        drafter = make_drafter(f"{name}:{folder}", target=target, draft=None, stopper="fixed:3", bits=bits)
        assert (len(made[8]) > before) is (bits == 8)
        outs = Engine(target, drafter, make_verifier("block")).generate([IDS[:5], IDS[3:9]], params)
        assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
        assert all(out.stats.num_draft_tokens for out in outs)
    assert all(isinstance(each.weight, Quantized) and each.weight.bits == 8 for each in made[8])


def test_rows_are_near_those_of_the_whole_head(tmp_path):
    target = tiny_target()
    folder = WRITERS["eagle3"](tmp_path / "head", target)
    made = [
        make_drafter(f"eagle3:{folder}", target=target, draft=None, stopper="fixed:3", bits=bits)
        for bits in (None, 8, 4)
    ]
    whole, eight, four = (first_row(target, drafter) for drafter in made)
    assert 0 < (eight - whole).norm() < 0.1 * whole.norm()
    assert (eight - whole).norm() < (four - whole).norm()


def test_a_head_that_would_stay_whole_is_refused():
    why = "the head x cannot be rounded to 8 bits: its layers are the target's"
    with pytest.raises(UserError, match=why), rounded_head("the head x", 8):
        pass
    with rounded_head("the head x", None):
        pass


def test_without_native_operations_it_is_refused(tmp_path, monkeypatch):
    target = tiny_target()
    folder = WRITERS["eagle3"](tmp_path / "head", target)
    monkeypatch.setenv("DRAFTPROOF_NATIVE", "0")
    monkeypatch.setattr("draftproof.native.operations_for", lambda _: None)
    with pytest.raises(UserError, match=r"the head .* cannot be rounded to 8 bits: its products are not native"):
        make_drafter(f"eagle3:{folder}", target=target, draft=None, stopper="fixed:3", bits=8)


def test_what_was_rounded_ends_with_the_head(tmp_path):
    """Negative control: a head that is read afterwards is whole."""
    target = tiny_target()
    folder = WRITERS["eagle3"](tmp_path / "head", target)
    rows = [
        first_row(target, make_drafter(f"eagle3:{folder}", target=target, draft=None, stopper="fixed:3", bits=bits))
        for bits in (None, 8, None)
    ]
    assert torch.equal(rows[0], rows[2])
    assert not torch.equal(rows[0], rows[1])


def make_large(monkeypatch):
    """Vocabularies of three tokens are large ones; one of three outputs is whole."""
    monkeypatch.setattr(packed_linear, "ROUGH_OUTPUTS", 3)
    monkeypatch.setattr(packed_linear, "ROUGH_SHARE", 3)


def test_a_large_output_layer_of_the_target_is_rounded_for_its_head(tmp_path, monkeypatch):
    """Other probabilities, the same likeliest tokens, and a target that stays as it is."""
    target = tiny_target()
    folder = WRITERS["eagle"](tmp_path / "head", target)
    rows, texts = [], []
    for large in (False, True):
        if large:
            make_large(monkeypatch)
        drafter = make_drafter(f"eagle:{folder}", target=target, draft=None, stopper="fixed:3")
        assert isinstance(drafter.model.backend.net.logits, RescoredProduct) is large
        rows.append(drafter.model.backend.net.logits(target.embed(torch.tensor(IDS)).float()))
        (out,) = Engine(target, drafter).generate([IDS[:5]], SamplingParams(max_tokens=20, temperature=0))
        texts.append(out.token_ids)
    assert torch.equal(rows[0].argmax(-1), rows[1].argmax(-1))
    assert 0.01 < float((rows[1] - rows[0]).norm() / rows[0].norm()) < 0.6
    assert texts[0] == texts[1]


def test_exact_output_distribution_with_a_rounded_output_layer_of_the_target(tmp_path, monkeypatch):
    make_large(monkeypatch)
    target = HFBackend(tiny_llama().model.float(), name="tiny")
    folder = WRITERS["eagle"](tmp_path / "head", target)

    def drafter():
        return make_drafter(f"eagle:{folder}", target=target, draft=None, stopper="fixed:2")

    assert isinstance(drafter().model.backend.net.logits, RescoredProduct)
    assert_output_distribution(target, drafter, "block", length=3, tolerance=1e-5)


def test_a_head_stays_whole_where_its_dtype_is_named(tmp_path, monkeypatch):
    """Over a target of few bits, where it would have 8, with the target's output layer, which is large."""
    make_large(monkeypatch)
    target, rounded, quantized = tiny_target(), [], PackedLinear.quantized
    target.facts = replace(target.facts, bits=4)
    folder, own = WRITERS["eagle"](tmp_path / "head", target), str(target.dtype).removeprefix("torch.")

    def counted(self, bits, *args, **kwargs):
        rounded.append(bits)
        return quantized(self, bits, *args, **kwargs)

    monkeypatch.setattr(PackedLinear, "quantized", counted)
    for whole in (None, own):
        rounded.clear()
        drafter = make_drafter(f"eagle:{folder}", target=target, draft=None, stopper="fixed:3", whole=whole)
        assert isinstance(drafter.model.backend.net.logits, RescoredProduct) is (whole is None)
        assert (8 in rounded) is (whole is None)
        assert bool(rounded) is (whole is None)
    other = {"float32": "bfloat16", "bfloat16": "float32"}[own]
    with pytest.raises(UserError, match=f"draft_dtype: expected auto, int8, int4 or {own}, .*, got {other}"):
        make_drafter(f"eagle:{folder}", target=target, draft=None, stopper="fixed:3", whole=other)
