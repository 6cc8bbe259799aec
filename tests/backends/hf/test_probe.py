"""Models are checked when they are loaded: what a family does with its config, past every limit, and in company."""

import copy
import threading
from contextlib import contextmanager

import pytest
import torch
import transformers

from draftproof import UserError
from draftproof.backends.cache.windows import windows_of
from draftproof.backends.heads.self_draft import EarlyExitBackend
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.hf.probe import Limit, Probe, _batch_error, _tolerance, limits_of
from draftproof.backends.lean.backend import LeanBackend, supports
from draftproof.backends.products.packed_linear import fuse
from draftproof.drafters.ngram import NgramDrafter
from support.helpers import CONFIGS, ROPE, random_model
from support.long_contexts import LONGROPE, check_text, phi3

FULL = ["full_attention"] * 2
MIXED = ["sliding_attention", "full_attention"]
SLIDING = ["sliding_attention"] * 2
GPT_NEO = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 20,
    "max_position_embeddings": 640,
    "initializer_range": 0.3,
}


# What the family does with its fields: the kinds of mask, by transformers 5.23's own code.
FAMILIES = {
    "llama ignores a window": (lambda: transformers.LlamaConfig(**ROPE, sliding_window=20), {"full_attention": None}),
    "llama ignores kinds of layer": (
        lambda: transformers.LlamaConfig(**ROPE, sliding_window=20, layer_types=MIXED),
        {"full_attention": None},
    ),
    "llama ignores sliding layers": (
        lambda: transformers.LlamaConfig(**ROPE, sliding_window=20, layer_types=SLIDING),
        {"full_attention": None},
    ),
    "mistral ignores the switch": (
        lambda: transformers.MistralConfig(**ROPE, sliding_window=20, use_sliding_window=False),
        {"sliding_attention": 20},
    ),
    "mistral ignores kinds of layer": (
        lambda: transformers.MistralConfig(**ROPE, sliding_window=20, layer_types=FULL),
        {"sliding_attention": 20},
    ),
    "mistral ignores mixed layers": (
        lambda: transformers.MistralConfig(**ROPE, sliding_window=20, layer_types=MIXED),
        {"sliding_attention": 20},
    ),
    "mistral without a window": (
        lambda: transformers.MistralConfig(**ROPE, sliding_window=None),
        {"full_attention": None},
    ),
    "qwen2 follows both": (
        lambda: transformers.Qwen2Config(**ROPE, use_sliding_window=True, sliding_window=20, max_window_layers=1),
        {"full_attention": None, "sliding_attention": 20},
    ),
    "qwen2 follows the switch": (
        lambda: transformers.Qwen2Config(**ROPE, use_sliding_window=False, sliding_window=20),
        {"full_attention": None},
    ),
    "gemma3": (CONFIGS["gemma3"], {"full_attention": None, "sliding_attention": 6}),
}


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_windows_follow_what_the_family_does(name):
    config, kinds = FAMILIES[name]
    model = random_model(config())
    assert windows_of(model).now() == kinds
    check_text(HFBackend(model), model)


@pytest.mark.grid(4)
@pytest.mark.parametrize("name", [name for name in FAMILIES if not name.startswith("gemma")])
def test_the_lean_forward_follows_it_too(name):
    model = random_model(FAMILIES[name][0]())
    assert supports(model) is None
    check_text(LeanBackend(copy.deepcopy(model)), model)


def test_a_window_that_is_guessed_is_found_out(monkeypatch):
    """The control: with the window that the config names, llama's rows are wrong, and the check says so."""
    model = random_model(transformers.LlamaConfig(**ROPE, sliding_window=20))
    monkeypatch.setattr("draftproof.backends.cache.windows._FACTORIES", {"create_causal_mask": "sliding_attention"})
    with pytest.raises(UserError, match=r"does not reproduce its own logits|cannot be read"):
        HFBackend(random_model(transformers.LlamaConfig(**ROPE, sliding_window=3)))
    monkeypatch.undo()
    assert HFBackend(model).capabilities.trees


@pytest.mark.grid(2)
@pytest.mark.parametrize("window", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", [HFBackend, LeanBackend])
def test_windows_of_a_few_tokens_are_read(window, kind):
    model = random_model(transformers.MistralConfig(**ROPE, sliding_window=window))
    made = kind(copy.deepcopy(model))
    assert made.max_positions == ROPE["max_position_embeddings"]
    check_text(made, model)


def test_a_pattern_of_windows_is_no_limit():
    model = random_model(transformers.LlamaConfig(**ROPE))
    model.config.prefix_dense_sliding_window_pattern = 1
    assert not limits_of(model)


def test_a_limit_of_a_few_tokens_ends_the_context_there(monkeypatch):
    monkeypatch.setattr(
        "draftproof.backends.hf.probe._chain_error", lambda _, scenario: float(scenario.limit is not None)
    )
    made = HFBackend(random_model(transformers.MistralConfig(**ROPE, sliding_window=1)))
    assert made.max_positions == 1


# --- past the limits --------------------------------------------------------------------------------------------------


def test_limits_are_found_where_configs_have_them():
    found = {(limit.name, limit.value) for limit in limits_of(random_model(phi3(**LONGROPE, sliding_window=25)))}
    assert found == {("original_max_position_embeddings", 40), ("sliding_window", 25)}


def test_a_limit_is_lowered_everywhere_and_put_back():
    model = random_model(CONFIGS["gemma3"]())
    layer = model.model.layers[0].self_attn
    assert (model.config.sliding_window, layer.sliding_window) == (6, 6)
    with Limit("sliding_window", 6).lowered([model], 3):
        assert (model.config.sliding_window, layer.sliding_window) == (3, 3)
    assert (model.config.sliding_window, layer.sliding_window) == (6, 6)


def test_a_model_that_minds_the_length_of_the_keys_ends_where_it_would_mind():
    model = random_model(transformers.DogeConfig(**ROPE, keep_window_size=20))
    made = HFBackend(model, name="doge")
    assert made.max_positions == 20
    assert "keep_window_size is 20" in made.bounded_by
    model = random_model(transformers.DogeConfig(**ROPE, keep_window_size=30, sliding_window=16))
    assert HFBackend(model, name="doge").max_positions == 16


def test_a_mask_that_the_family_cuts_itself_is_right_for_rows_of_any_length():
    """GPT-Neo cuts its own mask from the end of the keys, which is another row's end in a ragged batch."""
    model = random_model(transformers.GPTNeoConfig(**GPT_NEO))
    made = HFBackend(model, name="gpt-neo")
    assert not made.capabilities.ragged
    check_text(made, model, [[(5 * i) % 97 for i in range(150)], [(3 * i + 1) % 97 for i in range(400)]])
    check_text(made, model, drafter=NgramDrafter(4))
    options = GPT_NEO | {"attention_types": [[["global"], 2]]}
    model = random_model(transformers.GPTNeoConfig(**options))
    made = HFBackend(model, name="gpt-neo")
    assert not made.capabilities.ragged
    check_text(made, model, drafter=NgramDrafter(4))


@pytest.mark.parametrize(("hidden", "alone"), [(0.0, False), (1e-4, True)])
def test_requests_are_read_alone_only_where_an_error_could_count(hidden, alone, monkeypatch):
    """A row that is far less off than the tolerance counts as wrong where it is far beyond rounding."""
    made = LeanBackend(random_model(CONFIGS["llama"]()), name="llama")
    forward, read = made.forward, []

    @torch.inference_mode()
    def shifted(feeds):
        read.append(len(feeds))
        outputs = forward(feeds)
        if len(feeds) > 1:
            outputs[0].logits.mul_(1 + hidden)
        return outputs

    monkeypatch.setattr(made, "forward", shifted)
    (scenario,), tolerance = made.probe._scenarios, _tolerance(torch.float32, rounded=False)
    assert (_batch_error(made, scenario, tolerance=tolerance) > tolerance) is alone
    assert (1 in read) is alone


def test_nobody_else_reads_with_shared_weights_while_limits_are_lowered(monkeypatch):
    """The first layers of a model are checked while another thread may decode with the whole model."""
    whole = HFBackend(random_model(transformers.MistralConfig(**ROPE, sliding_window=20)), name="whole")
    free, lowered = [], Limit.lowered

    @contextmanager
    def watched(limit, models, value):
        with lowered(limit, models, value):
            tried = threading.Thread(target=lambda: free.append(whole.cache.lock.acquire(blocking=False)))
            tried.start()
            tried.join()
            yield

    monkeypatch.setattr(Limit, "lowered", watched)
    whole.first_layers(1)
    assert free
    assert not any(free)


# --- what is compared -------------------------------------------------------------------------------------------------


def test_rows_are_compared_with_those_of_the_untouched_model(monkeypatch):
    """A bias that is lost while weights move would cancel out if the converted model were compared with itself."""
    model = random_model(transformers.LlamaConfig(**ROPE, attention_bias=True))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.add_(torch.linspace(-2, 2, 16))
            layer.self_attn.q_proj.bias.add_(torch.linspace(2, -1, 32))

    def forgetful(owner, names, **options):
        for name in names:
            getattr(owner, name).bias = None
        return fuse(owner, names, **options)

    monkeypatch.setattr("draftproof.backends.lean.layers.fuse", forgetful)
    with pytest.raises(UserError, match="does not reproduce its own logits"):
        LeanBackend(copy.deepcopy(model))
    monkeypatch.undo()
    check_text(LeanBackend(copy.deepcopy(model)), model)


def test_a_bias_on_some_of_the_projections_is_kept():
    model = random_model(transformers.LlamaConfig(**ROPE))
    for layer in model.model.layers:
        layer.self_attn.k_proj = with_bias(layer.self_attn.k_proj)
    check_text(LeanBackend(copy.deepcopy(model)), model)


def with_bias(linear):
    made = torch.nn.Linear(linear.in_features, linear.out_features)
    made.weight.data.copy_(linear.weight.data)
    made.bias.data.copy_(torch.linspace(-1, 1, linear.out_features))
    return made


ALTERED = {
    "a layer used twice": lambda model: model.model.layers.__setitem__(1, model.model.layers[0]),
    "another final norm": lambda model: setattr(model.model, "norm", torch.nn.LayerNorm(32)),
    "no final norm": lambda model: setattr(model.model, "norm", torch.nn.Identity()),
    "a missing projection": lambda model: setattr(model.model.layers[1].self_attn, "o_proj", torch.nn.Identity()),
}


@pytest.mark.parametrize("how", ALTERED)
def test_altered_models_stand_aside_before_anything_moves(how):
    model = random_model(CONFIGS["llama"]())
    before = copy.deepcopy(model)
    ALTERED[how](before)
    ALTERED[how](model)
    assert supports(model) is not None
    with pytest.raises(UserError, match=r"has no lean forward: .*; use backend hf"):
        LeanBackend(model)
    ids = torch.arange(9).unsqueeze(0)
    assert torch.equal(model(input_ids=ids).logits, before(input_ids=ids).logits)


def test_weights_that_are_not_numbers_are_named():
    model = random_model(CONFIGS["gpt2"]())
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[3, 4] = float("nan")
    with pytest.raises(UserError, match=r"not finite: its weights hold NaN .*transformer.h.1.mlp.c_fc.weight"):
        HFBackend(model, name="broken")


REFUSED = {
    "openai-gpt": (
        lambda: transformers.OpenAIGPTConfig(vocab_size=97, n_embd=32, n_layer=2, n_head=4),
        "keeps no keys and values between calls",
    ),
    "xlm": (
        lambda: transformers.XLMConfig(vocab_size=97, emb_dim=32, n_layers=2, n_heads=4, causal=True),
        "keeps its past in its own form",
    ),
    "mamba": (
        lambda: transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4),
        "has layers with a recurrent state.*use backend snapshot",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_the_true_reason_in_one_line(name):
    config, why = REFUSED[name]
    with pytest.raises(UserError, match=why) as caught:
        HFBackend(transformers.AutoModelForCausalLM.from_config(config()), name=name)
    assert "\n" not in str(caught.value)
    assert "too many values" not in str(caught.value)


def test_quantized_products_that_depend_on_their_neighbours_are_called_that():
    model = random_model(CONFIGS["llama"]())
    model.config.quantization_config = transformers.BitsAndBytesConfig(load_in_8bit=True)

    def by_neighbours(_module, args, made):
        return made + 0.5 * made.abs().amax() * made.shape[1]

    model.model.layers[0].mlp.register_forward_hook(by_neighbours)
    with pytest.raises(UserError, match=r"weights are quantized \(.*\), and its products depend on the rows beside"):
        HFBackend(model, name="eight-bit")


def test_a_state_that_is_only_declared_does_not_count():
    """GraniteMoeHybrid says that it is stateful; with attention layers only it is not."""
    config = transformers.GraniteMoeHybridConfig(
        **ROPE,
        layer_types=FULL,
        mamba_n_heads=4,
        mamba_expand=2,
        mamba_d_head=16,
        shared_intermediate_size=48,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    model = random_model(config)
    assert getattr(model, "_is_stateful", False)
    check_text(HFBackend(model, name="granite"), model)


SHARING = {"num_hidden_layers": 4, "layer_types": MIXED * 2, "num_kv_shared_layers": 2, "head_dim": 16}
PER_LAYER = {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8, "sliding_window": 6}
UNCUTTABLE = {
    "gemma3n": lambda: transformers.Gemma3nTextConfig(
        **{**ROPE, **SHARING, **PER_LAYER}, laurel_rank=8, altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 4
    ),
    "gemma4": lambda: transformers.Gemma4TextConfig(**{**ROPE, **SHARING, **PER_LAYER}),
}


@pytest.mark.parametrize("kind", UNCUTTABLE)
def test_early_exit_refuses_models_that_cannot_be_cut_in_one_line(kind):
    whole = HFBackend(random_model(UNCUTTABLE[kind]()), name=kind)
    with pytest.raises(UserError, match=f"early exit: {kind}, first 1 layers .* cannot read two tokens") as caught:
        EarlyExitBackend(whole, 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_inputs_rounded_to_bytes_get_twice_the_tolerance_in_16_bits_and_no_fault_hides_there(name):
    assert [_tolerance(dtype, rounded=True) for dtype in (torch.float32, torch.bfloat16)] == [0.08, 0.16]
    model = random_model(CONFIGS[name](), seed=3).to(torch.bfloat16)
    probe = Probe(model, "x", rounded=True)
    probe.check(HFBackend(copy.deepcopy(model), check=False))
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        wrong = copy.deepcopy(model)
        with torch.no_grad():
            wrong.model.layers[1].get_submodule(part).weight.neg_()
        with pytest.raises(UserError, match="does not reproduce its own logits"):
            probe.check(HFBackend(wrong, check=False))


class Unsteady(HFBackend):
    """A backend whose logits after one prompt are off, always or in company only."""

    always = True

    def _compute(self, layout, *, hidden):
        logits, states = super()._compute(layout, hidden=hidden)
        noisy = (layout.ids[:, 0] == 2) & (layout.positions[:, 0] == 0)  # the prompt of the request beside
        if self.always or len(noisy) > 1:
            logits = logits + 0.5 * noisy[:, None, None] * logits.roll(1, -1)
        return logits, states


@pytest.mark.parametrize("always", [True, False])
def test_an_ill_conditioned_row_is_no_fault_of_company(always, monkeypatch):
    monkeypatch.setattr(Unsteady, "always", always)
    assert Unsteady(random_model(CONFIGS["llama"]())).capabilities.ragged is always
