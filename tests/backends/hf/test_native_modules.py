"""Copies of transformers models that multiply natively: what they share, what they leave alone, and equal outputs."""

import copy
import functools

import pytest
import torch
import transformers
from torch import nn

from draftproof import Engine, SamplingParams
from draftproof.backends.hf import native_modules
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.hf.native_modules import QuantizedExperts, native_experts, natively
from draftproof.backends.hf.probe import Probe
from draftproof.backends.hf.quantized_modules import quantizing
from draftproof.backends.hf.snapshots import SnapshotBackend
from draftproof.backends.loading.in_memory import backend_in_memory
from draftproof.backends.recurrent.mixers import mixers_of
from draftproof.errors import UndraftableError
from draftproof.native.dispatch import VARIABLE
from draftproof.native.operations import Operations
from support.architectures.check import check, make_model
from support.architectures.configurations import configurations
from support.architectures.reference import NotMadeError
from support.helpers import CONFIGS, ROPE, random_model
from support.native_levels import needs_native
from support.quantized_drafts import drafted

pytestmark = needs_native
MODELS = ("gpt2", "gemma3", "gpt_neox", "opt")
TOKENS = torch.tensor([[5, 9, 2, 7, 11, 3]])
EVERY = [each for each in configurations() if each.variant == "default"]
LEFT = {  # these do not say how they keep their weights; each is computed as before
    "llama4": "Llama4TextExperts",
    "llama4_text": "Llama4TextExperts",
    "jetmoe": "JetMoeParallelExperts",
    "longcat_flash": "LongcatFlashExperts",
    "inkling_text": "InklingSharedExperts",
}


@functools.cache
def with_experts():
    """Configurations of which a model has a module of experts, with the path of the first: found, not listed."""
    found = {}
    for each in EVERY:
        try:
            model = make_model(each, 0)
        except NotMadeError:
            continue
        paths = [path for path, module in model.named_modules() if is_mixture(module)]
        if paths:
            found[each.name] = each, paths
    return found


def is_mixture(module):
    return type(module).__name__.endswith("Experts") and any(
        weight.dim() == 3 for weight in module._parameters.values()
    )


@pytest.fixture
def products(monkeypatch):
    """How many rows each native product has read."""
    seen, product = [], Operations.rows_product

    def counted(self, x, *more):
        seen.append(x.numel() // x.shape[-1])
        return product(self, x, *more)

    monkeypatch.setattr(Operations, "rows_product", counted)
    return seen


def logits(model, tokens=TOKENS):
    with torch.inference_mode():
        return model(input_ids=tokens, use_cache=False).logits


def far(found, expected):
    return float((found - expected).detach().norm() / expected.detach().norm())


# --- linear layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", MODELS)
def test_a_copy_computes_what_the_model_does_on_the_same_weights(family, dtype, products):
    model = random_model(CONFIGS[family](), dtype=dtype)
    before, modules = logits(model), dict(model.named_modules())
    made = natively(model)
    assert far(logits(made), before) < (2e-6 if dtype == torch.float32 else 2e-2)
    linear = [path for path, each in made.named_modules() if hasattr(each, "weight") and each.weight.dim() == 2]
    assert len(products) >= len(linear) - 2, "all but the embeddings"
    assert dict(model.named_modules()) == modules, "the model itself has what it had"
    products.clear()
    assert torch.equal(logits(model), before)
    assert not products
    own = dict(model.named_parameters())
    assert all(each is own[path] for path, each in made.named_parameters())
    assert made.state_dict().keys() == model.state_dict().keys()


def test_new_weights_are_seen_wherever_they_are_put():
    model = random_model(CONFIGS["gpt_neox"]())
    made = natively(model)
    layer = model.gpt_neox.layers[0].mlp.dense_h_to_4h
    with torch.no_grad():
        layer.weight.mul_(1.5)
    assert far(logits(made), logits(model)) < 2e-6
    layer.weight = nn.Parameter(torch.randn_like(layer.weight))
    assert far(logits(made), logits(model)) < 2e-6
    layer.weight.data = torch.randn_like(layer.weight)
    assert far(logits(made), logits(model)) < 2e-6


def test_many_rows_and_gradients_are_the_models_own(products):
    made = natively(random_model(CONFIGS["gpt_neox"]()))
    logits(made, torch.arange(native_modules.MOST_ROWS + 1)[None])
    assert not products
    made(input_ids=TOKENS, use_cache=False).logits.sum().backward()
    assert not products
    assert made.gpt_neox.layers[0].mlp.dense_h_to_4h.weight.grad.abs().sum() > 0
    logits(made, torch.arange(native_modules.MOST_ROWS)[None])
    assert set(products) == {native_modules.MOST_ROWS}


def test_a_deep_copy_has_weights_of_its_own():
    made = natively(random_model(CONFIGS["gpt2"]()))
    other, before = copy.deepcopy(made), logits(made)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.5)
    assert torch.equal(logits(made), before)
    assert far(logits(other), before) > 0.1


def test_hidden_states_of_both_are_those_of_the_model():
    """Twins share hooks: recorders that each hung on for itself would record every layer twice."""
    model, twin = (random_model(CONFIGS["gemma3"]()) for _ in range(2))
    made = natively(twin)
    expected = model(input_ids=TOKENS, output_hidden_states=True, use_cache=False).hidden_states
    for each in (made, twin, made):
        found = each(input_ids=TOKENS, output_hidden_states=True, use_cache=False).hidden_states
        assert len(found) == len(expected)
        assert all(far(one, other) < 2e-6 for one, other in zip(found, expected, strict=True))


def test_what_others_changed_is_left_alone(products, monkeypatch):
    for change in (
        lambda model: setattr(model.model.layers[0], "_hf_hook", object()),
        lambda model: setattr(model, "peft_config", {}),
        lambda model: setattr(model.config, "quantization_config", {"quant_method": "some"}),
    ):
        model = random_model(CONFIGS["gemma3"]())
        change(model)
        assert natively(model) is model
    assert natively(random_model(CONFIGS["gemma3"]()).half().eval()) is not None
    model = random_model(CONFIGS["gpt_neox"]())
    seen = []
    watched = model.gpt_neox.layers[0].mlp.dense_h_to_4h
    watched.register_forward_pre_hook(lambda *_: seen.append("before"))
    made = natively(model)
    assert made.gpt_neox.layers[0].mlp.dense_h_to_4h is watched
    logits(made)
    assert (seen, len(products)) == (["before"], 2 * 4)
    monkeypatch.setenv(VARIABLE, "0")
    model = random_model(CONFIGS["gemma3"]())
    assert natively(model) is model


# --- backends ---------------------------------------------------------------------------------------------------------


@pytest.mark.grid(2)
@pytest.mark.parametrize("family", MODELS)
def test_backend_hf_reads_natively_and_says_what_transformers_says(family, products):
    model = random_model(CONFIGS[family]())
    model.generation_config.eos_token_id = None
    target, prompts = HFBackend(model, name=family), [[1, 2, 3], [7], [5, 9, 11, 4, 2, 8] * 7]
    params = SamplingParams(max_tokens=20, temperature=0)
    products.clear()
    outs = Engine(target, drafted(target, 4)).generate(prompts, params)
    assert products
    for prompt, out in zip(prompts, outs, strict=True):
        ids = torch.tensor([prompt])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        assert list(out.token_ids) == made[0, len(prompt) :].tolist()
        assert out.token_ids == Engine(target).generate([prompt], params)[0].token_ids


def test_the_check_reads_with_the_model_as_it_was(products, monkeypatch):
    """Rows are expected as the untouched model computes them, and what reads natively is compared with them."""
    read, plain = [], Probe._plain
    monkeypatch.setattr(Probe, "_plain", lambda *given: (plain(*given), read.append(len(products)))[0])
    HFBackend(random_model(CONFIGS["gpt2"]()), name="gpt2")
    assert read
    assert set(read) == {0}
    assert products


def test_a_wrong_product_is_seen_by_the_check(monkeypatch):
    product = Operations.rows_product

    def wrong(self, x, *more):
        made = product(self, x, *more)
        made[..., -1] *= 2
        return made

    monkeypatch.setattr(Operations, "rows_product", wrong)
    with pytest.raises(UndraftableError, match="does not reproduce its own logits"):
        HFBackend(random_model(CONFIGS["gpt2"]()), name="gpt2")


def test_a_model_in_memory_is_read_natively_and_stays_as_it_is(products):
    model = random_model(CONFIGS["gpt_neox"]())
    modules = {path: type(each) for path, each in model.named_modules()}
    made = backend_in_memory(model)
    assert products
    assert made.model is not model
    assert {path: type(each) for path, each in model.named_modules()} == modules


# --- experts ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nearly_every_mixture_of_experts_is_native():
    found = with_experts()
    assert len(found) > 40
    for name, (each, paths) in found.items():
        model = make_model(each, 0)
        left = {
            type(model.get_submodule(path)).__name__
            for path in paths
            if native_experts(model.get_submodule(path)) is None
        }
        assert left == ({LEFT[name]} if name in LEFT else set()), name


@pytest.mark.grid(4)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("place", range(6))
def test_the_experts_of_every_family_compute_what_their_own_forward_does(place, implementation, products):
    """Six parts of all families, so that they can be spread over processes."""
    for name, (each, paths) in list(with_experts().items())[place::6]:
        model = make_model(each, 0)
        made, source = natively(model), torch.Generator().manual_seed(1)
        products.clear()
        for path in paths:
            module, twin = model.get_submodule(path), made.get_submodule(path)
            if twin is module:
                continue
            module.config._experts_implementation = implementation
            with torch.inference_mode():
                for rows in (1, 2, 7):
                    size = module.down_proj.shape[2 if module.is_transposed else 1]
                    x = torch.randn((rows, size), generator=source)
                    shares, chosen = torch.rand((rows, module.num_experts), generator=source).topk(2)
                    expected, before = module(x, chosen, shares), len(products)
                    assert far(twin(x, chosen, shares), expected) < 2e-6, name
                    assert products[before:] == [2 * rows] * 2, "a product for each of both weights"
                    other = chosen.roll(1, -1)
                    assert far(twin(x, other, shares), expected) > 1e-3, "other experts' outputs are seen"
        assert far(logits(made), logits(model)) < 1e-5, name


def test_experts_that_compute_something_else_are_left(products):
    model = random_model(transformers.Qwen3MoeConfig(**ROPE, head_dim=8, num_experts=4, num_experts_per_tok=2))
    experts = model.model.layers[0].mlp.experts
    assert native_experts(experts) is not None

    class Clamped(type(experts)):
        def forward(self, x, chosen, shares):
            return super().forward(x, chosen, shares).clamp(-0.001, 0.001)

    experts.__class__ = Clamped
    assert native_experts(experts) is None
    experts.__class__ = Clamped.__mro__[1]
    experts.is_transposed = True
    assert native_experts(experts) is None
    assert natively(model).model.layers[0].mlp.experts is experts


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe",
        "gpt_oss",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("lfm2_moe", "nemotron_h", "aria_text")),
    ],
)
def test_families_with_experts_generate_what_transformers_generates(name, products):
    compositions = ("ngram:4", "model", "batch")
    result = check(with_experts()[name][0], compositions=compositions)
    assert (result.outcome, result.detail) == ("exact", "")
    assert products


@pytest.mark.grid(1)
@pytest.mark.parametrize("bits", [4, 8])
def test_drafts_with_quantized_experts_are_lossless(bits):
    """A sixth of all families: greedy texts are the target's own, and some drafts are accepted."""
    accepted, refused, families = 0, [], list(with_experts().values())[bits // 4 :: 6]
    for each, paths in families:
        model = make_model(each, 0)
        try:
            target = (SnapshotBackend if mixers_of(model) else HFBackend)(model, name=each.name)
        except UndraftableError:  # they are, without native products, too
            refused.append(each.name)
            continue
        *_, quantized = quantizing(target.model, bits, each.name)
        made = [type(quantized.get_submodule(path)).__mro__ for path in paths]
        assert any(QuantizedExperts in kinds for kinds in made) or each.name in LEFT, each.name
        params = SamplingParams(max_tokens=16, temperature=0)
        plain = Engine(target).generate([[3, 4, 5], [9]], params)
        outs = Engine(target, drafted(target, bits)).generate([[3, 4, 5], [9]], params)
        assert [out.token_ids for out in outs] == [out.token_ids for out in plain], each.name
        accepted += sum(out.stats.num_accepted_tokens for out in outs)
    assert accepted > 0
    assert len(refused) < len(families) / 3, refused
