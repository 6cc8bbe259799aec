"""Packed matrices as linear layers of models without a lean forward over them: transformers' own with our products."""

import pytest
import torch
import transformers

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.hf.native_modules import natively
from draftproof.backends.loading.load import load
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.stored_backends import _PassContext
from draftproof.backends.products.packed_linear import LinearSlice, StoredProduct
from draftproof.drafters.ngram import NgramDrafter
from draftproof.engine.drafter_parts import make_drafter
from draftproof.tree import TokenTree
from support.packed_checkpoints import IDS, SHAPE, checkpoint, logits_of, off, read, round_rows

FAMILIES = {
    "hf": lambda: transformers.Gemma3TextConfig(
        **SHAPE,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "snapshot": lambda: transformers.Lfm2Config(
        **SHAPE, layer_types=["conv", "full_attention"], block_ff_dim=512, block_auto_adjust_ff_dim=False
    ),
    "with biases": lambda: transformers.PhiConfig(**SHAPE, tie_word_embeddings=False),
}
PLAIN = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


def loaded(folder, **changes):
    return load(str(folder), LoadOptions(dtype="float32", **changes)).backend


@pytest.mark.grid(3)
@pytest.mark.parametrize(
    ("family", "method", "most"),
    [
        *((family, "nf4-nested", 2e-5) for family in FAMILIES),
        ("hf", "w8a8", 0.03),
        *((family, "gptq-act-order", 0.03) for family in FAMILIES),
        *((family, "awq", 0.03) for family in FAMILIES),
        ("hf", "compressed-tensors, zeros", 0.03),
    ],
)
def test_logits_and_texts(family, method, most, tmp_path):
    model = checkpoint(tmp_path, method, 64, config=FAMILIES[family]())
    if method == "w8a8":
        round_rows(model)
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    backend = loaded(tmp_path)
    assert backend.kind == ("snapshot" if family == "snapshot" else "hf")
    session = backend.open()
    found = torch.cat([backend.forward([Feed(session, [token])])[0].logits for token in IDS])
    assert off(found, expected) < most
    replaced = [each for each in backend.model.modules() if isinstance(each, LinearSlice)]
    packed = sum("_proj.weight" in name for name in model.state_dict())
    few = sum(isinstance(each.product, StoredProduct) for each in replaced)
    # with act-order the lean forward reads none, and floats are multiplied where they are
    left = {"hf": 1, "snapshot": 0 if method == "gptq-act-order" else 1 + 2 * 3, "with biases": 1 + 2 * 3}[family]
    assert (few, len(replaced)) == (packed, packed + left), "and the layers that are left as floats are native"
    prompts = [IDS * 2, IDS[3:]]
    together = [out.token_ids for out in Engine(backend, NgramDrafter(), max_batch=2).generate(prompts, PLAIN)]
    alone = [Engine(backend, None).generate(prompt, PLAIN)[0].token_ids for prompt in prompts]
    assert together == alone
    if (family, method) == ("snapshot", "gptq-act-order"):  # native layers do not change the order of inputs
        assert "another order (desc_act)" in backend.rounding
        return
    session, whole = backend.open(), logits_of(backend)
    rows = torch.stack([backend.forward([Feed(session, [token])])[0].logits[-1] for token in IDS])
    assert torch.equal(rows, whole)
    chain = TokenTree.chain(torch.tensor(IDS[1:] * 2))  # more rows than torch's products are left to
    for output in backend.forward([Feed(backend.open(), IDS[:1], chain) for _ in range(3)]):
        assert torch.equal(output.logits[: len(IDS)], whole)


def test_attention_that_is_not_known_is_that_of_transformers(tmp_path, caplog):
    """Gemma 2 caps its scores, which is not done natively here."""
    config = transformers.Gemma2Config(**SHAPE, head_dim=64, query_pre_attn_scalar=64, sliding_window=6)
    model = checkpoint(tmp_path, "gptq", 64, config=config)
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    with caplog.at_level("INFO"):
        backend = loaded(tmp_path)
    assert type(backend) is HFBackend
    assert "has torch's attention: " in caplog.text
    assert off(logits_of(backend), expected) < 0.03


@pytest.mark.parametrize("change", ["window", "scale"])
def test_another_attention_than_the_models_own_is_not_taken(change, tmp_path, monkeypatch):
    """Negative control: the check when the model is loaded sees it, and attention stays transformers'."""
    checkpoint(tmp_path, "nf4", 64, config=FAMILIES["hf"]())
    attend = _PassContext.attend

    def other(self, layer, query, key, value, scale, window):
        scale, window = (scale, None) if change == "window" else (2 * scale, window)
        return attend(self, layer, query, key, value, scale, window)

    monkeypatch.setattr(_PassContext, "attend", other)
    assert type(loaded(tmp_path)) is HFBackend


def test_without_a_check_attention_is_that_of_transformers(tmp_path):
    checkpoint(tmp_path, "nf4", 64, config=FAMILIES["hf"]())
    assert type(loaded(tmp_path, check=False)) is HFBackend


def test_other_layers_are_native_and_no_drafter_rounds_again(tmp_path):
    checkpoint(tmp_path, "nf4", 64, config=FAMILIES["hf"]())
    backend = loaded(tmp_path)
    assert type(natively(backend.model).lm_head) is not torch.nn.Linear
    with pytest.raises(UserError, match=r"its weights have few bits already; .*another drafter"):
        make_drafter("quantized:8", target=backend, draft=None, stopper="fixed:3")


def test_inputs_in_floats_are_the_reference(tmp_path):
    model = checkpoint(tmp_path, "w8a16", config=FAMILIES["hf"]())
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    assert 1e-5 < off(logits_of(loaded(tmp_path)), expected) < 0.03
    assert off(logits_of(loaded(tmp_path, activations="float")), expected) < 2e-5


@pytest.mark.parametrize(
    ("changes", "options", "why"),
    [
        ({"intermediate_size": 256}, {}, "mlp.down_proj.weight of shape (256, 512) is no linear layer of the model"),
        ({"num_attention_heads": 0}, {}, "transformers makes no empty model of it"),
        ({}, {"backend": "lean"}, "its architecture is 'gemma3_text', not one of"),
    ],
)
def test_models_that_do_not_fit_are_left_to_transformers(changes, options, why, tmp_path, caplog):
    model = checkpoint(tmp_path, "nf4", 64, config=FAMILIES["hf"]())
    for name, value in changes.items():
        text = (tmp_path / "config.json").read_text()
        old = getattr(model.config, name)
        assert f'"{name}": {old}' in text
        (tmp_path / "config.json").write_text(text.replace(f'"{name}": {old}', f'"{name}": {value}'))
    assert read(tmp_path, **options) is None
    assert why in caplog.text
