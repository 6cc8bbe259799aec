"""Any transformers model with quantized linear layers: what is copied, what is shared, and that outputs are exact."""

import copy
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed
from draftproof.backends.heads.self_draft import QuantizedBackend
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.hf.native_modules import QuantizedExperts
from draftproof.backends.hf.quantized_modules import QuantizedLinear, quantizing
from draftproof.backends.products import packed_linear as packed
from draftproof.backends.products.packed_linear import PackedLinear
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.verifier_parts import make_verifier
from support.helpers import CONFIGS, RANGE, ROPE, random_model
from support.native_levels import needs_native
from support.pretend_cuda import OnDevice
from support.quantized_drafts import drafted

FAMILIES = {
    **{name: CONFIGS[name] for name in ("gpt2", "gemma3", "gpt_neox", "opt", "llama")},
    "phi": lambda: transformers.PhiConfig(**ROPE, tie_word_embeddings=False),
    "falcon": lambda: transformers.FalconConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **RANGE, alibi=False
    ),
    "mixtral": lambda: transformers.MixtralConfig(**ROPE, num_local_experts=3, num_experts_per_tok=3),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **ROPE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(**ROPE, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
}
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")


def last(steps):
    *_, made = steps
    return made


@needs_native
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_copy_is_the_model_with_the_weights_that_its_products_have(family, bits, monkeypatch):
    monkeypatch.setattr(packed, "MORE_RESCORED", 97)  # all outputs
    model, tokens = random_model(FAMILIES[family]()), torch.tensor([[5, 9, 2, 7, 11, 3]])
    before = model(input_ids=tokens, use_cache=False).logits
    modules = dict(model.named_modules())
    made = last(quantizing(model, bits, family))
    rows = made(input_ids=tokens, use_cache=False).logits
    assert dict(model.named_modules()) == modules, "the model itself has what it had"
    assert torch.equal(model(input_ids=tokens, use_cache=False).logits, before)
    expected = copy.deepcopy(model)
    layers = {path: each for path, each in made.named_modules() if isinstance(each, QuantizedLinear)}
    assert layers
    left = [path for path, each in made.named_modules() if isinstance(each, nn.Linear)]
    assert not left, "all of them are replaced, classes of the family's own, too"
    for path, layer in layers.items():
        assert layer.product.weight.bits == bits
        plain = expected.get_submodule(path)
        dense = layer.product.weight.to_dense()
        if bits == 4 and layer is made.get_output_embeddings():
            dense = layer.weight
        plain.weight = nn.Parameter(dense if isinstance(plain, nn.Linear) else dense.t())
    experts = {path: each for path, each in made.named_modules() if isinstance(each, QuantizedExperts)}
    assert bool(experts) == (family in MIXTURES)
    for path, each in experts.items():
        plain = expected.get_submodule(path)
        for name, weights in each.quantized.items():
            assert weights.bits == bits
            dense = torch.stack([replace(weights, blocks=each).to_dense() for each in weights.blocks])
            setattr(plain, name, nn.Parameter(dense.transpose(1, 2) if each.is_transposed else dense))
    twin = expected(input_ids=tokens, use_cache=False).logits
    error = (rows - twin).norm() / twin.norm()
    assert error < 0.04, "only inputs are rounded besides"
    if bits == 4:
        assert (rows - before).norm() / before.norm() > 1.5 * error, "the weights are not the plain ones"


@needs_native
def test_everything_but_linear_weights_is_shared():
    model = random_model(CONFIGS["gemma3"]())
    made = last(quantizing(model, 4, "gemma3"))
    own = {each.data_ptr() for each in model.state_dict().values()}
    assert all(each.data_ptr() in own for each in made.state_dict().values())
    assert made.get_input_embeddings() is model.get_input_embeddings()


@pytest.mark.grid(6)
@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "mixtral"])
def test_greedy_output_is_the_targets(family, dtype):
    """Prompts of uneven lengths in one batch, one of them past every window."""
    target = HFBackend(random_model(FAMILIES[family]()).to(dtype), name=family)
    prompts, greedy = [[1, 2, 3], [7], [5, 9, 11, 4, 2, 8] * 7], SamplingParams(max_tokens=20, temperature=0)
    outs = Engine(target, drafted(target, 8)).generate(prompts, greedy)
    alone = [Engine(target).generate([prompt], greedy)[0] for prompt in prompts]
    assert sum(out.stats.num_accepted_tokens for out in outs) > 0
    if dtype == torch.float32:
        assert [out.token_ids for out in outs] == [out.token_ids for out in alone]


@needs_native
def test_the_target_overwrites_what_the_draft_wrote():
    target = HFBackend(random_model(CONFIGS["gemma3"]()), name="gemma3")
    made, tokens = QuantizedBackend(target, 4), [5, 9, 2, 7, 11]
    own, alone = target.open(), target.open()
    target.forward([Feed(own, tokens[:3])])
    borrowed = made.borrow(own)
    made.forward([Feed(borrowed, [*tokens[3:], 1, 2])])
    borrowed.close()
    target.forward([Feed(alone, tokens[:3])])
    rows = [target.forward([Feed(session, tokens[3:])])[0].logits for session in (own, alone)]
    assert torch.equal(*rows)


def test_models_without_plain_linear_layers_are_refused():
    model = random_model(CONFIGS["opt"]())

    class Other(nn.Linear):
        def forward(self, x):
            return super().forward(x).relu()

    for each in model.modules():
        if type(each) is nn.Linear:
            each.__class__ = Other
    with pytest.raises(UserError, match="none of its layers is a plain linear layer"):
        next(quantizing(model, 4, "opt"))


def test_layers_that_move_are_refused():
    model = random_model(CONFIGS["gpt2"]())
    model.transformer.h[1]._hf_hook = object()
    with pytest.raises(UserError, match="spread over devices"):
        next(quantizing(model, 4, "gpt2"))


def test_types_without_native_products_are_refused():
    model = random_model(CONFIGS["gpt2"]()).half()
    with pytest.raises(UserError, match=r"no native products of torch.float16"):
        next(quantizing(model, 4, "gpt2"))
    with pytest.raises(UserError, match="expected 4 or 8, got "):
        next(quantizing(model, 5, "gpt2"))


@needs_native
def test_a_model_that_does_not_run_with_such_layers_is_refused_in_one_line():
    model = random_model(CONFIGS["opt"]())
    layers = model.model.decoder.layers
    layers[0].forward = lambda *_, **__: model.model.decoder.layers[0].fc1.extra
    with pytest.raises(UserError, match=r"opt does not work with quantized layers \(AttributeError"):
        list(quantizing(model, 4, "opt"))


@needs_native
def test_it_is_at_hand_for_drafter_auto():
    target = HFBackend(random_model(CONFIGS["gpt2"]()), name="gpt2")
    assert [source.name for source in make_drafter("auto", target=target, draft=None, stopper="auto").sources] == [
        "quantized:4"
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("triton_is_installed", lambda: False), r"need Triton: pip install 'draftproof\[triton\]'"),
        (("_on_device", lambda: SimpleNamespace(why_not=lambda *_: "the kernel fails (no driver)")), r"\(no driver\)"),
    ],
)
def test_on_a_device_the_message_says_what_is_missing(change, words, monkeypatch):
    weight = torch.zeros(4, 64)
    product = PackedLinear(weight, pack=False)
    monkeypatch.setattr(packed, *change)
    product.weight = OnDevice(weight)
    assert re.search(words, product.why_not_quantized(4))


@needs_native
def test_chains_of_it_compose():
    target = HFBackend(random_model(CONFIGS["gemma3"]()), name="gemma3")
    drafter = drafted(target, 8, chains=3, length=3)
    params = SamplingParams(max_tokens=20, temperature=0)
    (out,) = Engine(target, drafter, make_verifier("trie_block")).generate([[5, 2]], params)
    (plain,) = Engine(target).generate([[5, 2]], params)
    assert out.token_ids == plain.token_ids
    assert out.stats.num_accepted_tokens > 0
