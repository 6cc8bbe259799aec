"""Which heads fit which targets: forms of weights do not matter, sizes do; and heads on targets of few bits."""

import logging
from types import SimpleNamespace

import pytest
import transformers

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import logits_along
from draftproof.backends.heads.feature_net import save_net
from draftproof.backends.heads.fit import MadeFor, refuse_unfit
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.loading.load import load
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.products.packed_linear import PackedLinear
from draftproof.engine.drafter_parts import DRAFTERS, make_drafter
from draftproof.engine.verifier_parts import make_verifier
from draftproof.testing import engine_distribution, target_distribution, total_variation
from support import gguf_files, packed_checkpoints
from support.feature_heads import net_for
from support.helpers import CONFIGS, random_model
from support.native_levels import needs_native
from support.published import WRITERS
from type_checks import checks_off

# --- the rule ---------------------------------------------------------------------------------------------------------

FITTING = MadeFor("OWNER/Tiny-1B", hidden=32, vocab=97, layers=2, architectures=("LlamaForCausalLM",))


def named(name, architecture="LlamaForCausalLM"):
    model = random_model(CONFIGS["llama"]())
    model.config.architectures = [architecture]
    return HFBackend(model, name=name, check=False)


@pytest.mark.parametrize(
    "name", ["OWNER/Tiny-1B", "tiny-1b-q4", "x/Tiny-1B-Q4_K_M.gguf", "OTHER/Tiny-1B-GGUF:Q8_0", "Tiny-1B-GPTQ-Int4"]
)
def test_the_same_model_in_another_form_is_silent(name, caplog):
    """Also a class of the same family, and a head that names nothing."""
    with caplog.at_level(logging.WARNING):
        refuse_unfit("the head", FITTING, named(name))
        refuse_unfit("the head", FITTING, named(name, "LlamaForConditionalGeneration"))
        refuse_unfit("the head", MadeFor(None, 32, None), named(name))
    assert not caplog.text


def test_another_model_of_the_same_sizes_is_one_warning(caplog):
    with caplog.at_level(logging.WARNING):
        refuse_unfit("the head 'x'", FITTING, named("OWNER/Tiny-1B-Math-Q4_K_M.gguf"))
    (said,) = caplog.messages
    assert "the head 'x' was made for OWNER/Tiny-1B, and the target is OWNER/Tiny-1B-Math-Q4_K_M.gguf" in said
    assert "few of its drafts are accepted (generate --compare shows" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": 48}, "hidden states of width 48, got tiny-1b-q4 with hidden states of width 32"),
        ({"vocab": 98}, "98 tokens, got tiny-1b-q4 with 97 tokens"),
        ({"layers": 3}, "3 layers, got tiny-1b-q4 with 2 layers"),
        (
            {"architectures": ("Qwen3ForCausalLM",)},
            "architecture Qwen3ForCausalLM, got tiny-1b-q4 with architecture Ll",
        ),
    ],
)
def test_other_sizes_are_refused_whatever_the_name(change, words):
    made_for = MadeFor(**{**vars(FITTING), **change})
    with pytest.raises(UserError, match=rf"^the head \(made for OWNER/Tiny-1B\): expected a target with {words}"):
        refuse_unfit("the head", made_for, named("tiny-1b-q4"))


# --- targets of few bits ----------------------------------------------------------------------------------------------

SHAPE = {
    **packed_checkpoints.SHAPE,
    "vocab_size": 3,
    "eos_token_id": 2,
    "initializer_range": 0.1,
    "max_position_embeddings": 512,
}
FORMS = {  # names of files and folders
    "gguf": "tiny-Q4_K_M.gguf",
    "gptq": "Tiny-GPTQ-Int4",
    "awq": "tiny-AWQ",
    "compressed-tensors": "tiny-quantized.w4a16",
    "nf4": "tiny-bnb-4bit",
    "int8": "rounded-8/tiny",
    "int4": "rounded-4/tiny",
}
HEADS = ["feature_head", *WRITERS]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """Makes a target of three tokens in a form of weights, with its own name, and the model that its heads are for."""
    made, home = {}, tmp_path_factory.mktemp("forms")

    def target(form, dtype="float32"):
        if (form, dtype) not in made:
            config, place = transformers.LlamaConfig(**SHAPE), FORMS[form]
            place, options = home / dtype / place, {"dtype": dtype}
            place.parent.mkdir(parents=True, exist_ok=True)
            if form == "gguf":
                model = random_model(config, seed=3)
                metadata = {**gguf_files.METADATA, "block_count": 2, "rope.freq_base": 10000.0}
                gguf_files.write_model(place, model, "llama", metadata)
            elif form in ("int8", "int4"):
                options["weights"] = form
                model = packed_checkpoints.checkpoint(place, "float", config=config)
            else:
                model = packed_checkpoints.checkpoint(place, form, config=config)
            made[form, dtype] = (
                load(str(place), LoadOptions(**options)).backend,
                HFBackend(model, name="OWNER/tiny", check=False),
            )
        return made[form, dtype]

    return target


def head_for(name, made_for, folder, **options):
    """A random head that was made for the model in full weights."""
    if name != "feature_head":
        return f"{name}:{WRITERS[name](folder, made_for, **options)}"
    folder.mkdir()
    save_net(net_for(made_for, **options), folder)
    return f"feature_head:{folder}"


@pytest.mark.grid(14)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("form", FORMS)
def test_greedy_text_of_a_quantized_target_is_the_same_with_a_head(form, name, dtype, quantized, tmp_path, caplog):
    """In a batch, with drafts that are accepted and refused at temperature 1; no name is an obstacle."""
    target, original = quantized(form, dtype)
    assert target.facts.bits is not None
    prompts, spec = [[0, 2, 1, 0], [1, 1]], head_for(name, original, tmp_path / "head")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        drafter = make_drafter(spec, target=target, draft=None, stopper="fixed:3")
    assert not caplog.text
    engines = Engine(target), Engine(target, drafter, make_verifier("block"))
    for temperature in (0, 1):
        params = SamplingParams(max_tokens=60, temperature=temperature, ignore_eos=True, seed=3)
        plain, found = (engine.generate(prompts, params) for engine in engines)
        if not temperature:
            assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    accepted = sum(one.stats.num_accepted_tokens for one in found)
    assert 0 < accepted < sum(one.stats.num_draft_tokens for one in found)


@pytest.mark.grid(5)
@pytest.mark.parametrize("name", ["feature_head", "eagle3", "medusa"])
@pytest.mark.parametrize("form", ["gguf", "gptq", "int8"])
def test_the_distribution_of_a_quantized_target_with_a_head(form, name, quantized, tmp_path):
    """By enumeration; a drafter that lies of its distribution fails."""
    target, original = quantized(form)
    spec, params, prompt = head_for(name, original, tmp_path / "head"), SamplingParams(max_tokens=3), [0, 2]

    def distance(lies):
        drafter = make_drafter(spec, target=target, draft=None, stopper="fixed:2")
        propose = drafter.propose

        def moved(requests, rng):
            drafts = propose(requests, rng)
            for draft in drafts:
                if len(draft):
                    draft.probs[:] = 0.5 * draft.probs + 0.5 / 3
            return drafts

        drafter.propose = moved if lies else propose

        def make(round_rng):
            return Engine(target, drafter, make_verifier("block"), round_rng=round_rng)

        with checks_off():
            return total_variation(engine_distribution(make, prompt, params), expected)

    rows = SimpleNamespace(vocab_size=3, logits=lambda context: logits_along(target, context, [])[-1])
    with checks_off():
        expected = target_distribution(rows, prompt, params)
    assert distance(lies=False) < 1e-6
    assert distance(lies=True) > 1e-4


@needs_native
@pytest.mark.parametrize("name", ["feature_head", "eagle3", "medusa"])
def test_a_head_has_8_bits_over_a_target_of_few_bits(name, quantized, tmp_path, monkeypatch):
    """Where it can: where it cannot be rounded it stays whole, which is an error only if bits were asked for."""
    target, original = quantized("gguf")
    spec, made = head_for(name, original, tmp_path / "head"), []
    quantize = PackedLinear.quantized
    monkeypatch.setattr(
        PackedLinear, "quantized", lambda *args, **more: made.append(args[1]) or quantize(*args, **more)
    )

    def bits(over, **options):
        made.clear()
        make_drafter(spec, target=over, draft=None, stopper="fixed:2", **options)
        return set(made)

    assert bits(target) == {8}
    assert bits(target, bits=4) == {4}
    assert bits(original) == set()
    monkeypatch.setattr(PackedLinear, "why_not_quantized", lambda *_: "it has no such form")
    monkeypatch.setattr("draftproof.backends.heads.feature_head.native_layers", lambda _: None)
    assert bits(target) == set()
    with pytest.raises(UserError, match=r"cannot be (rounded|quantized)"):
        bits(target, bits=8)


@pytest.mark.parametrize("form", ["gguf", "gptq"])
@pytest.mark.parametrize("change", [{"hidden_size": 128}, {"vocab_size": 4}, {"num_hidden_layers": 3}])
def test_a_head_for_other_sizes_is_refused_on_a_quantized_target(form, change, quantized, tmp_path):
    """Its name is that of the target."""
    other = HFBackend(random_model(transformers.LlamaConfig(**{**SHAPE, **change})), name="OWNER/tiny")
    target, _ = quantized(form)
    last = other.facts.layers
    for name, options in (
        ("feature_head", {"layers": last}),
        ("eagle3", {"layers": (0, 1, last)}),
        ("dflash", {"original": True}),
    ):
        spec = head_for(name, other, tmp_path / name, **options)
        with pytest.raises(UserError, match=r"expected (a target with|different numbers from 0 to 2)"):
            make_drafter(spec, target=target, draft=None, stopper="fixed:2")


# --- the head in the package ------------------------------------------------------------------------------------------


def test_auto_offers_the_head_in_the_package_for_both_forms_of_its_target():
    assert DRAFTERS["feature_head"].about.endswith("(smollm2-135m, smollm2-135m-q4)")
