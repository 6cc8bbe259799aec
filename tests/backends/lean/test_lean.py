"""The lean forward computes what transformers computes, on every family, and stands aside where it does not."""

import copy
import functools
import importlib
import threading
from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed
from draftproof.backends.cache.windows import Windows, windows_of
from draftproof.backends.heads.self_draft import EarlyExitBackend
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.hf.truncate import first_layers
from draftproof.backends.lean import attention as attention_module
from draftproof.backends.lean import backend as lean_module
from draftproof.backends.lean import layers as lean_layers
from draftproof.backends.lean.attention import TorchAttention
from draftproof.backends.lean.backend import LeanBackend, LeanForward, supports
from draftproof.backends.lean.layers import Lean, Norm
from draftproof.backends.lean.rotary import Rope, order_of
from draftproof.backends.lean.traits import LLAMA, traits_of
from draftproof.backends.loading.by_name import load_backend
from draftproof.backends.loading.in_memory import backend_in_memory
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.products.packed_linear import LinearSlice, packs
from draftproof.engine.verifier_parts import make_verifier
from draftproof.models import resolve
from draftproof.native.dispatch import VARIABLE
from draftproof.tree import TokenTree
from support.helpers import CONFIGS, ROPE, embedded_model, engine, plain_rows, random_model
from support.lean_models import NATIVE, VARIANTS, WIDE, exercise, lean_backend, lively_model, rope
from support.long_contexts import LONGROPE, phi3
from support.programs import Program, run_program
from support.quantized_drafts import early_exit

PACKS = packs(torch.float32, "cpu")


@functools.cache
def reference(name, dtype=torch.float32):
    """The model of a variant that no backend has touched."""
    return lively_model(VARIANTS[name](), dtype)


@functools.cache
def lean(name, dtype=torch.float32):
    return lean_backend(reference(name, dtype))


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.grid(6)
@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=5, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_any_program_of_reads_and_rollbacks_reproduces_transformers_rows(name, seed):
    assert run_program(seed, lean(name)) > 0


@pytest.mark.grid(12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_rows_agree_within_the_dtypes_tolerance(name, dtype):
    tolerance = {torch.float32: 2e-5, torch.float16: 0.02, torch.bfloat16: 0.12}[dtype]
    exercise(Program(lean(name, dtype), tolerance=tolerance))


@pytest.mark.grid(6)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_rows_agree_where_nothing_is_native(name, dtype, monkeypatch):
    """Of types with few bits the one that is never native, float16, is read above."""
    monkeypatch.setenv(VARIABLE, "0")
    made = lean_backend(reference(name, dtype))
    assert made.products != "native"
    exercise(Program(made, tolerance={torch.float32: 2e-5, torch.bfloat16: 0.12}[dtype]))


@pytest.mark.grid(8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_rounding_is_no_worse_than_transformers_own(name, dtype):
    model = reference(name, dtype)
    exact = copy.deepcopy(model).float()
    tokens = [(7 * i * i) % 97 for i in range(48)]
    wanted, _ = plain_rows(exact, [tokens[: i + 1] for i in range(32, 48)])
    theirs, _ = plain_rows(model, [tokens[: i + 1] for i in range(32, 48)])
    session = lean(name, dtype).open()
    ours = lean(name, dtype).forward([Feed(session, tokens[:33], TokenTree.chain(torch.tensor(tokens[33:])))])[0].logits
    session.close()
    assert (ours - wanted).norm() < 1.3 * (theirs - wanted).norm()


def test_float64_is_left_unpacked_and_right():
    model = lively_model(CONFIGS["qwen3"](), torch.float64)
    exercise(Program(lean_backend(model), tolerance=1e-5))


@pytest.mark.parametrize(("owner", "name", "native"), [(TorchAttention, "_attend", "0"), (Lean, "logits", "auto")])
def test_a_forward_that_dies_midway_is_repeated_as_if_nothing_had_happened(owner, name, native, monkeypatch):
    """In the attention of the first layer, or after all layers where these are one call."""
    with monkeypatch.context() as patch:
        patch.setenv("DRAFTPROOF_NATIVE", native)
        made = lean_backend(reference("llama"))
    program = Program(made)
    program.forward([(0, [1, 2, 3], [4, 5, 6], [-1, 0, -1]), (1, [9, 8], [], [])])
    program.keep(0, 3, (0, 1))

    def die(*_):
        raise MemoryError("out of memory")

    feeds = [Feed(program.sessions[0], [7]), Feed(program.sessions[1], [7])]
    monkeypatch.setattr(owner, name, die)
    with pytest.raises(MemoryError):
        made.forward(feeds)
    monkeypatch.undo()
    program.forward([(1, [5], [1], [-1]), (0, [6, 6], [7, 8, 9], [-1, 0, 0])])
    program.close_all()


class Mistakes:
    """Ways to get the forward wrong, to show that the rows see each."""

    @staticmethod
    def later_passes_turned_one_too_far(patch):
        right = Rope.__call__
        patch.setattr(Rope, "__call__", lambda self, at, end: right(self, at + int(end > at.numel()), end + 1))

    @staticmethod
    def sine_without_its_sign(patch):
        right = torch.Tensor.__neg__
        patch.setattr(torch.Tensor, "__neg__", lambda x: x if x.dim() == 2 else right(x))

    @staticmethod
    def norm_without_weight(patch):
        right = Norm.__init__

        def plain(self, *modules, **options):
            right(self, *modules, **options)
            self.scaled = torch.full_like(self.scaled, self.scaled.shape[-1] ** 0.5)

        patch.setattr(Norm, "__init__", plain)

    @staticmethod
    def queries_grouped_with_the_wrong_keys(patch):
        right = TorchAttention._attend
        patch.setattr(TorchAttention, "_attend", lambda self, q, *rest: right(self, q.roll(1, 1), *rest))

    @staticmethod
    def mask_forgotten(patch):
        patch.setattr(attention_module, "sees_all", lambda *_: True)

    @staticmethod
    def products_in_another_order(patch):
        right = lean_layers.fuse
        patch.setattr(
            lean_layers, "fuse", lambda owner, names, **pack: right(owner, sorted(names, reverse=True), **pack)
        )


@pytest.mark.parametrize("mistake", [name for name in vars(Mistakes) if not name.startswith("_")])
def test_rows_and_the_probe_see_the_mistake(mistake, monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")  # torch's operations are what the mistakes are made in
    model = reference("qwen3")
    getattr(Mistakes, mistake)(monkeypatch)
    made = LeanBackend(copy.deepcopy(model), check=False)
    made.model = model
    with pytest.raises(AssertionError, match="a row is off by"):
        exercise(Program(made))
    with pytest.raises(UserError, match="does not reproduce its own logits"):
        lean_backend(model)


def test_the_order_of_a_heads_numbers_is_found_by_turning_unit_vectors():
    llama, ernie, phi, glm = (
        importlib.import_module(f"transformers.models.{name}.modeling_{name}").apply_rotary_pos_emb
        for name in ("llama", "ernie4_5", "phi3", "glm")
    )
    assert order_of(llama, 8, 8) == tuple(range(8))
    assert order_of(ernie, 8, 8) == (0, 2, 4, 6, 1, 3, 5, 7)
    assert order_of(phi, 8, 4) == (0, 1, 4, 5, 2, 3, 6, 7)
    assert order_of(glm, 8, 4) == (0, 2, 4, 5, 1, 3, 6, 7)
    assert order_of(lambda q, k, cos, sin: llama(q, k, cos, -sin), 8, 8) == (4, 5, 6, 7, 0, 1, 2, 3), "backwards"
    assert order_of(phi, 9, 4) is None, "one number has no place"
    wrong = {
        "queries and keys differ": lambda q, k, cos, sin: (llama(q, k, cos, sin)[0], llama(q, k, cos, -sin)[1]),
        "longer": lambda q, k, cos, sin: llama(2 * q, 2 * k, cos, sin),
        "no cosine": lambda q, k, cos, sin: llama(q, k, torch.ones_like(cos), sin),
        "not at all": lambda q, k, *_: (q, k),
    }
    assert [name for name, turn in wrong.items() if order_of(turn, 8, 8) is not None] == []


@pytest.mark.parametrize(("name", "offset"), [("llama", 0.0), ("gemma3, wide", 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most", [1, 60, 300])
def test_large_weights_of_norms_do_not_hide_what_is_added_to_them(name, offset, dtype, most):
    """Gemma 3's last norm has weights from -0.8 to 300: rounded to bfloat16, w and 1 + w are close as a whole."""
    model = copy.deepcopy(reference(name)).to(dtype)
    draw = torch.Generator().manual_seed(0)
    for layer in model.modules():
        if type(layer).__name__.endswith("RMSNorm"):
            layer.weight.data.copy_(most * torch.rand(layer.weight.shape, generator=draw) ** 3 - 0.8 * offset)
    assert traits_of(model).offset == offset


WRONG = [  # a family, one of its traits, and what it would be by mistake
    ("gemma3, wide", "activation", "silu"),
    ("gemma3, wide", "offset", 0.0),
    ("gemma3, wide", "embedding", 1.0),
    ("gemma3, wide", "angles_of", (0, 1)),
    ("gemma3, wide", "norms", (LLAMA.norms[0], None, "pre_feedforward_layernorm", None)),
    ("gemma2", "cap", 0.0),
    ("gemma2", "logit_cap", 0.0),
    ("olmo2", "norms", (None, None, None, "post_feedforward_layernorm")),
    ("granite", "entering", 1.0),
    ("granite", "residual", 1.0),
    ("granite", "divisor", 1.0),
    ("smollm3", "angles_of", (0, 0)),
    ("phi3, partial", "order", ()),
    ("ernie4_5", "order", ()),
    ("glm4", "order", ()),
]


@pytest.mark.grid(9)
@pytest.mark.parametrize("by", ["auto", "0"])
@pytest.mark.parametrize(("name", "trait", "wrong"), WRONG)
def test_the_probe_sees_a_misread_trait(name, trait, wrong, by, monkeypatch):
    monkeypatch.setenv(VARIABLE, by)
    lean_backend(reference(name))
    monkeypatch.setattr(lean_module, "traits_of", lambda model: replace(traits_of(model), **{trait: wrong}))
    with pytest.raises(UserError, match="does not reproduce its own logits"):
        lean_backend(reference(name))


def test_a_model_that_another_thread_runs_is_not_watched():
    """Functions of a family's module are replaced while one of its models is watched: others must not notice."""
    watched, other = reference("gemma3, wide"), copy.deepcopy(reference("gemma3, wide"))
    for layer in other.model.layers:
        layer.self_attn.scaling *= 2  # a watched attention may not be told another scale
    ids, found = torch.tensor([[1, 2, 3]]), []
    with torch.inference_mode():
        expected = other(ids).logits

    @torch.inference_mode()
    def run():
        found.append(other(ids).logits)

    def beside(*_):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    other.config.sliding_window = 3  # its masks are of another window, too
    handle = watched.model.layers[0].register_forward_pre_hook(beside)
    traits, windows = traits_of(watched), windows_of(watched)
    handle.remove()
    assert len(found) == 2
    assert all(torch.equal(each, expected) for each in found)
    assert traits == traits_of(watched)
    assert windows.now() == windows_of(watched).now()


def test_what_is_wrong_past_a_window_only_is_refused(monkeypatch):
    model = lively_model(transformers.MistralConfig(**WIDE, sliding_window=20))
    made = lean_backend(model)
    assert (made.max_positions, made.bounded_by) == (640, "")
    monkeypatch.setattr(Windows, "_window", lambda *_: 100)
    with pytest.raises(UserError, match="has other logits past its sliding_window of 20 than transformers' own"):
        lean_backend(model)


def test_what_is_misread_is_left_to_transformers_unless_lean_is_asked_for(tmp_path, monkeypatch, caplog):
    random_model(CONFIGS["gemma3"]()).save_pretrained(tmp_path)
    assert type(load_backend(str(tmp_path))) is LeanBackend
    monkeypatch.setattr(lean_module, "traits_of", lambda model: replace(traits_of(model), embedding=1.0))
    made = load_backend(str(tmp_path))
    assert type(made) is HFBackend
    assert "does not reproduce its own logits" in caplog.text
    exercise(Program(made))
    with pytest.raises(UserError, match="does not reproduce its own logits"):
        load_backend(str(tmp_path), LoadOptions(backend="lean"))
    held = random_model(CONFIGS["gemma3"]())
    assert type(backend_in_memory(held)) is HFBackend
    with pytest.raises(UserError, match="does not reproduce its own logits"):
        backend_in_memory(held, backend="lean")


@pytest.mark.grid(9)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_in_memory_is_read_lean_and_left_as_it_is(name):
    model = reference(name)
    before = {key: each.clone() for key, each in model.state_dict().items()}
    made = backend_in_memory(model)
    assert type(made) is LeanForward
    made.model = model
    exercise(Program(made))
    assert all(torch.equal(each, before[key]) for key, each in model.state_dict().items())


@pytest.mark.parametrize("name", NATIVE)
def test_other_families_give_away_their_weights_and_compute_the_same(name):
    model = reference(name)
    given_away = copy.deepcopy(model)
    made = LeanBackend(given_away)
    ids = torch.arange(40).view(2, 20)
    with torch.inference_mode():
        assert torch.allclose(made.model(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(given_away.model.layers, model.model.layers, strict=True):
        for part, names in made.lean.traits.linear.items():
            for each in names:
                found, wanted = (getattr(getattr(layer, part), each) for layer in (ours, theirs))
                assert torch.equal(found.weight, wanted.weight)
                assert (found.bias is None) == (wanted.bias is None)
                assert found.bias is None or torch.equal(found.bias, wanted.bias)


@pytest.mark.grid(10)
@pytest.mark.parametrize("name", NATIVE)
def test_other_families_take_new_weights_by_their_own_names(name):
    made, other = LeanBackend(copy.deepcopy(reference(name))), lively_model(VARIANTS[name](), seed=3)
    renewed = made.with_weights(other)
    assert type(renewed) is LeanForward
    renewed.model = other
    exercise(Program(renewed))
    state = {key: each for key, each in other.state_dict().items() if "layers.1.mlp.down_proj" not in key}
    with pytest.raises(UserError, match=r"lack model\.layers\.1\.mlp\.down_proj\.weight"):
        made.with_weights(state)


def test_greedy_text_of_a_family_is_transformers_own():
    """Windows passed, drafts of its first layer and of its quantized weights, several prompts in one batch."""
    for name in ("gemma3, wide", "gemma2", "phi3, partial", "granite", "olmo3"):
        target = LeanBackend(copy.deepcopy(reference(name)))
        prompts = [[1, 2, 3], [7], [5, 9, 11, 4, 2, 8] * 7]
        greedy = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
        wanted = [transformers_text(reference(name), prompt, 30) for prompt in prompts]
        drafters = {"plain": None, "early": early_exit(target, 1)}
        drafters["chains"] = early_exit(target, 1, chains=3, length=3)
        for kind, drafter in drafters.items():
            made = Engine(target, drafter, make_verifier("trie_block" if kind == "chains" else "block"))
            assert [list(out.token_ids) for out in made.generate(prompts, greedy)] == wanted, (name, kind)


@torch.inference_mode()
def transformers_text(model, prompt, count):
    """Tokens of transformers' own greedy decoding."""
    out = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


# --- what becomes of the model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["llama, biases", "llama, tied", "qwen3"])
def test_the_model_that_was_given_still_computes_the_same(name, dtype):
    model = lively_model(VARIANTS[name](), dtype)
    given_away = copy.deepcopy(model)
    made = LeanBackend(given_away)
    ids = torch.arange(40).view(2, 20)
    with torch.inference_mode():
        error = (made.model(input_ids=ids).logits - model(input_ids=ids).logits).abs().max()
    assert error < {torch.float32: 1e-4, torch.bfloat16: 0.5, torch.float64: 1e-12}[dtype]
    assert torch.equal(made.model.get_output_embeddings().weight, model.lm_head.weight)
    for ours, theirs in zip(given_away.model.layers, model.model.layers, strict=True):
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            found, wanted = getattr(ours.self_attn, part), getattr(theirs.self_attn, part)
            assert torch.equal(found.weight, wanted.weight)
            assert (found.bias is None) == (wanted.bias is None)
            assert found.bias is None or torch.equal(found.bias, wanted.bias)
    assert not any(weights.requires_grad for weights in made.model.parameters())


@pytest.mark.skipif(not PACKS, reason="this torch does not pack float32 weights")
@pytest.mark.parametrize("name", ["llama, tied", "qwen2"])
def test_packed_weights_are_not_held_twice(name):
    model = lively_model(VARIANTS[name]())
    whole = sum(weights.numel() for weights in model.parameters())
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not model.lm_head)
    head = 0 if model.lm_head.weight is model.model.embed_tokens.weight else model.lm_head.weight.numel()
    biases = sum(m.bias.numel() for m in model.modules() if getattr(m, "bias", None) is not None)
    LeanBackend(model)
    assert sum(weights.numel() for weights in model.parameters()) == whole - linear - head - biases
    assert isinstance(model.model.layers[0].mlp.down_proj, LinearSlice)


def test_where_nothing_is_packed_parameters_are_views_of_the_fused_weights(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")
    monkeypatch.setattr("draftproof.backends.products.packed_linear.packs", lambda *_: False)
    model = lively_model(VARIANTS["llama, biases"]())
    made = lean_backend(model)
    exercise(Program(made))
    given_away = copy.deepcopy(model)
    kept = LeanBackend(given_away, check=False)
    fused = kept.lean.layers[0].qkv.weight
    attention = given_away.model.layers[0].self_attn
    assert attention.k_proj.weight.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
    assert kept.lean.head.weight is given_away.lm_head.weight or torch.equal(
        kept.lean.head.weight, given_away.lm_head.weight
    )


# --- caches, early exit, engines --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_the_cache_holds_what_transformers_would_have_put_there(name):
    hf, ours = HFBackend(reference(name), check=False), LeanBackend(copy.deepcopy(reference(name)), check=False)
    for made in (hf, ours):
        made.forward(
            [Feed(made.open(), [5, 9, 2]), Feed(made.open(), [1, 2, 3, 4], TokenTree.chain(torch.tensor([7])))]
        )
    for theirs, found in ((hf._cache._keys, ours._cache._keys), (hf._cache._values, ours._cache._values)):
        assert theirs.keys() == found.keys()
        assert all(torch.allclose(theirs[i][:, :, :3], found[i][:, :, :3], atol=1e-4) for i in theirs)


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2, both kinds of layer"])
def test_early_exit_is_lean_as_well_and_shares_the_cache(name):
    whole, tokens = LeanBackend(copy.deepcopy(reference(name))), [5, 9, 2, 7, 11]
    exit_, own = EarlyExitBackend(whole, 1), whole.open()
    assert len(exit_.part.lean.layers) == 1
    plain, _ = plain_rows(first_layers(reference(name), 1, name), [tokens])
    for part in (exit_, HFBackend(first_layers(reference(name), 1, name), check=False)):
        part._cache = whole._cache  # ours, then transformers' forward, on what the lean one has left there
        own.keep(0)
        whole.forward([Feed(own, tokens[:3])])
        borrowed = exit_.borrow(own)
        rows = part.forward([Feed(borrowed, tokens[3:])])[0].logits
        assert torch.allclose(rows, plain, atol=1e-4)
        borrowed.close()
        after = whole.forward([Feed(own, tokens[3:])])[0].logits
        assert torch.allclose(after, plain_rows(reference(name), [tokens])[0], atol=1e-4)


PROMPTS = ["Once upon a time", "The little dog", "One day, Tim and his mom went to the"]
GREEDY = SamplingParams(max_tokens=60, temperature=0)


def embedded_lean(name):
    return LeanBackend(copy.deepcopy(embedded_model(name)), name=name)


def test_greedy_output_of_the_embedded_pair_is_the_same_token_for_token():
    wanted = [out.token_ids for out in engine().generate(PROMPTS, GREEDY)]
    made = engine(target=embedded_lean("target"), draft=embedded_lean("draft"))
    assert [out.token_ids for out in made.generate(PROMPTS, GREEDY)] == wanted
    assert [out.token_ids for out in engine(target=embedded_lean("target"), draft=None).generate(PROMPTS, GREEDY)] == (
        wanted
    )


def test_greedy_output_with_early_exit_is_the_same_token_for_token():
    target = embedded_lean("target")
    plain = engine(draft=None)
    drafter = early_exit(target, 3)
    made = Engine(target, drafter, plain.verifier, tokenizer=plain.tokenizer, eos_token_ids=(1, 2))
    outs = made.generate(PROMPTS, GREEDY)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain.generate(PROMPTS, GREEDY)]
    assert sum(out.stats.num_accepted_tokens for out in outs) > 0


def smollm2():
    try:
        return resolve("smollm2-135m")
    except UserError:
        return None


@pytest.mark.grid(1)
@pytest.mark.skipif(smollm2() is None, reason="smollm2-135m is not pulled here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2_rows_agree(dtype):
    tokens = [(7919 * i) % 40000 for i in range(48)]
    rows = []
    for backend in ("hf", "lean"):
        made = load_backend("smollm2-135m", LoadOptions(dtype=dtype, backend=backend))
        session = made.open()
        first = made.forward([Feed(session, tokens[:40])])[0].logits
        rest = made.forward([Feed(session, tokens[40:41], TokenTree.chain(torch.tensor(tokens[41:])))])[0].logits
        rows.append(torch.cat((first, rest)).double())
    theirs, ours = rows
    assert (ours - theirs).norm() / theirs.norm() < {"float32": 1e-5, "bfloat16": 0.02}[dtype]


# --- what it does not support -----------------------------------------------------------------------------------------


UNREAD = {
    "gpt2": (CONFIGS["gpt2"], "c_attn is a Conv1D"),
    "gpt_neox": (CONFIGS["gpt_neox"], "the model has other parts than are known here"),
    "opt": (CONFIGS["opt"], "its model has other parts than are known here"),
    "hunyuan": (lambda: transformers.HunYuanDenseV1Config(**WIDE), "its attention has other parts .*query_layernorm"),
    "starcoder2": (lambda: transformers.Starcoder2Config(**ROPE, bos_token_id=0, eos_token_id=0), "c_fc"),
    "ministral3": (lambda: transformers.Ministral3Config(**WIDE), "calls get_llama_4_attn_scale"),
    "phi3, longrope": (lambda: phi3(**LONGROPE), "rotary embedding is longrope"),
    "olmo": (lambda: transformers.OlmoConfig(**ROPE, pad_token_id=0), "OlmoLayerNorm is not a norm with weights"),
    "apertus": (lambda: transformers.ApertusConfig(**ROPE, bos_token_id=0, eos_token_id=0), "attention_layernorm"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_other_architectures_fall_back_and_are_refused_when_asked_for(name, tmp_path):
    config, why = UNREAD[name]
    random_model(config()).save_pretrained(tmp_path)
    assert type(load_backend(str(tmp_path), LoadOptions(check=False))) is HFBackend
    with pytest.raises(UserError, match=f"has no lean forward: .*{why}.*; use backend hf"):
        load_backend(str(tmp_path), LoadOptions(check=False, backend="lean"))


def test_the_family_is_read_lean_unless_hf_is_asked_for(tmp_path):
    random_model(CONFIGS["llama"]()).save_pretrained(tmp_path)
    assert type(load_backend(str(tmp_path))) is LeanBackend
    assert type(load_backend(str(tmp_path), LoadOptions(backend="hf"))) is HFBackend
    with pytest.raises(UserError, match=r"backend: expected one of auto, hf, snapshot, lean.*, got 'fast'"):
        load_backend(str(tmp_path), LoadOptions(backend="fast"))
    made = Engine.load("embedded:target", "embedded:draft")
    assert type(made.target) is LeanBackend
    assert type(Engine.load("embedded:target", backend="hf").target) is HFBackend


def with_hook(model):
    model.model.layers[0].register_forward_hook(lambda *_: None)


def with_own_forward(model):
    model.model.forward = model.model.forward


def with_an_adapter(model):
    class LoraLinear(torch.nn.Linear):
        pass

    model.model.layers[1].mlp.down_proj = LoraLinear(48, 32, bias=False)


def with_two_dtypes(model):
    model.model.layers[1].mlp.down_proj.bfloat16()


@pytest.mark.parametrize(
    ("alter", "why"),
    [
        (with_hook, "hooks are attached to model.layers.0"),
        (with_own_forward, "hooks are attached to model"),
        (with_an_adapter, "its model.layers.1.mlp.down_proj is a LoraLinear"),
        (with_two_dtypes, "of several dtypes"),
    ],
)
def test_altered_models_are_not_read_lean(alter, why):
    model = random_model(CONFIGS["llama"]())
    assert supports(model) is None
    alter(model)
    assert why in supports(model)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"hidden_act": "gelu"}, "activation is GELUActivation, not one of silu, gelu_tanh"),
        (rope("dynamic", factor=2.0), "rotary embedding is dynamic"),
        (rope("linear", factor=2.0, partial_rotary_factor=0.5), "its rotary angles do not fit its heads"),
    ],
)
def test_unknown_variants_are_not_read_lean(options, why):
    assert why in (supports(random_model(transformers.LlamaConfig(**ROPE, **options))) or "")


def test_a_model_that_was_asked_for_hidden_states_before_is_still_supported():
    model = random_model(CONFIGS["llama"]())
    model(input_ids=torch.tensor([[1, 2]]), output_hidden_states=True)
    assert supports(model) is None
