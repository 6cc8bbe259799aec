"""Checkpoints that cannot be trusted or are not whole are refused by name, before anything runs on random numbers."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from draftproof import Engine, UserError
from draftproof.backends.base import Feed
from draftproof.backends.loading import by_name as loading
from draftproof.backends.loading.by_name import load_backend, load_model
from draftproof.backends.loading.options import LoadOptions
from draftproof.drafters.ngram import NgramDrafter
from draftproof.sampling import SamplingParams, default_params
from support.helpers import CONFIGS, random_model


@pytest.fixture
def saved(tmp_path):
    """A directory with a tiny llama."""
    random_model(CONFIGS["llama"]()).save_pretrained(tmp_path)
    return tmp_path


def without(directory, *names):
    tensors = load_file(directory / "model.safetensors")
    for name in names:
        del tensors[name]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def test_missing_tensors_are_an_error_that_names_them(saved):
    without(saved, "model.layers.1.mlp.down_proj.weight", "model.norm.weight")
    with pytest.raises(UserError, match=r"lacks 2 tensors of LlamaForCausalLM: .*layers.1.mlp.down_proj.*norm.weight"):
        load_backend(str(saved))


def test_many_missing_tensors_are_counted(saved):
    without(saved, *(name for name in load_file(saved / "model.safetensors") if "layers.1." in name))
    with pytest.raises(UserError, match=r"lacks 9 tensors .* and 4 more\. The model would compute with random numbers"):
        load_model(str(saved))


def test_a_tied_output_layer_is_not_missing(tmp_path):
    config = CONFIGS["llama"]()
    config.tie_word_embeddings = True
    random_model(config).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert load_backend(str(tmp_path)).vocab_size == config.vocab_size


def test_tensors_of_other_shapes_are_an_error(saved):
    tensors = load_file(saved / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(16)
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.norm\.weight|shape"):
        load_model(str(saved))


def test_pickled_weights_are_refused_on_purpose_and_that_is_said(saved):
    (saved / "model.safetensors").unlink()
    torch.save({}, saved / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pickled weights only \(pytorch_model.bin\): they are refused on purpose"):
        load_backend(str(saved))


def test_a_place_without_a_model_says_what_is_expected(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"the directory has no config\.json: expected one with config\.json"):
        Engine.load(str(tmp_path))
    (tmp_path / "y.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"the directory holds \.gguf files, .* by its path: y\.gguf$"):
        Engine.load(str(tmp_path))
    with pytest.raises(UserError, match=r"is named by its kind: nobody/x-GGUF:Q4_K_M\)"):
        Engine.load("nobody/x-GGUF")


def test_an_adapter_without_peft_says_what_it_is(saved, monkeypatch):
    (saved / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x"}))
    monkeypatch.setattr(loading, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="holds a LoRA adapter, not a whole model: install peft"):
        load_backend(str(saved))


# --- the checkpoint's own sampling defaults ---------------------------------------------------------------------------


def test_a_generation_config_gives_defaults_and_nothing_else():
    found = default_params(
        {
            "temperature": 0.6,
            "top_p": 0.9,
            "top_k": 20,
            "min_p": None,
            "repetition_penalty": 1.05,
            "max_new_tokens": 7,
            "do_sample": True,
            "eos_token_id": 2,
        }
    )
    assert found == SamplingParams(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05, max_tokens=7)
    assert default_params({}) == SamplingParams()
    with pytest.raises(
        UserError, match=r"the generation config of some model: temperature: expected .* got -1.* generation_config"
    ):
        default_params({"temperature": -1}, "some model")


@pytest.fixture
def with_defaults(embedded_copy):
    """The embedded target with a generation config of its own."""
    file = embedded_copy / "generation_config.json"
    given = json.loads(file.read_text()) | {"do_sample": True, "temperature": 0.6, "top_k": 5, "max_new_tokens": 6}
    file.write_text(json.dumps(given))
    return str(embedded_copy)


@pytest.fixture
def embedded_copy(tmp_path):
    import shutil

    from draftproof.embedded import target_dir

    return shutil.copytree(target_dir(), tmp_path / "model")


def test_requests_without_parameters_get_the_checkpoints(with_defaults):
    engine = Engine.load(with_defaults)
    assert engine.default_params == SamplingParams(temperature=0.6, top_k=5, max_tokens=6)
    (out,) = engine.generate("Once upon a time")
    assert len(out.token_ids) == 6
    assert out.to_dict()["sampling"] == {
        "temperature": 0.6,
        "top_k": 5,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    (own,) = engine.generate("Once upon a time", SamplingParams(max_tokens=3))
    assert own.params.temperature == 1.0, "what a request says is not mixed with the checkpoint's"


def test_they_can_be_left_alone(with_defaults):
    assert Engine.load(with_defaults, generation_config="none").default_params == SamplingParams()
    with pytest.raises(UserError, match="generation_config: expected auto or none, got 'vllm'"):
        Engine.load(with_defaults, generation_config="vllm")


# --- a context of one's own choice ------------------------------------------------------------------------------------


@pytest.mark.grid(2)
@pytest.mark.parametrize("drafter", ["none", "model", "early_exit:1", "ngram"])
def test_a_shorter_context_ends_texts_and_refuses_prompts(drafter):
    draft = "embedded:draft" if drafter == "model" else None
    engine = Engine.load("embedded:target", draft, drafter=drafter, max_model_len=24)
    greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    (out,) = engine.generate([[1, 80, 90, 11]], greedy)
    (whole,) = Engine.load("embedded:target", drafter="none").generate([[1, 80, 90, 11]], greedy)
    assert (len(out.token_ids), out.finish_reason) == (20, "length")
    assert out.token_ids == whole.token_ids[:20]
    with pytest.raises(UserError, match=r"expected 1 to 23 tokens, .*\(max_model_len is 24\)"):
        engine.generate([[1] * 24], greedy)


@pytest.mark.parametrize("length", [0, 1, -3, 100_000])
def test_a_context_that_is_none_is_refused_with_both_numbers(length):
    own = Engine.load("embedded:target", drafter="none").target.max_positions
    with pytest.raises(
        UserError, match=f"max_model_len: expected 2 to {own}, got {length}: embedded:target reads at most {own} "
    ):
        Engine.load("embedded:target", max_model_len=length)
    assert Engine.load("embedded:target", max_model_len=own).target.bounded_by == ""


def test_a_draft_model_with_a_shorter_context_keeps_its_own(embedded_copy):
    config = json.loads((embedded_copy / "config.json").read_text()) | {"max_position_embeddings": 32}
    (embedded_copy / "config.json").write_text(json.dumps(config))
    engine = Engine.load("embedded:target", str(embedded_copy), drafter="model", max_model_len=48)
    assert (engine.target.max_positions, engine.drafter.max_positions) == (48, 32)


# --- shards, attention, ends of texts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["lean", "hf"])
def test_shards_give_the_same_rows_as_one_file(tmp_path, backend):
    model = random_model(CONFIGS["qwen2"]())
    for folder, size in (("one", "1GB"), ("many", "9KB")):
        model.save_pretrained(tmp_path / folder, max_shard_size=size)
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 3
    one, many = (load_backend(str(tmp_path / folder), LoadOptions(backend=backend)) for folder in ("one", "many"))
    tokens = [i * i % 97 for i in range(40)]
    rows = [each.forward([Feed(each.open(), tokens)])[0].logits for each in (one, many)]
    assert torch.equal(*rows)


def test_a_missing_shard_is_an_error_that_names_it(tmp_path):
    random_model(CONFIGS["llama"]()).save_pretrained(tmp_path, max_shard_size="9KB")
    first, *_ = sorted(tmp_path.glob("model-*.safetensors"))
    first.unlink()
    with pytest.raises(UserError, match=f"cannot load a model from .*{first.name}"):
        load_backend(str(tmp_path))


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_an_attention_of_transformers_can_be_chosen(tmp_path, name):
    model = random_model(CONFIGS["gemma3"]())
    model.save_pretrained(tmp_path)
    made = load_backend(str(tmp_path), LoadOptions(attn_implementation=name, backend="hf"))
    assert made.model.config._attn_implementation == name
    session, tokens = made.open(), [i * i % 97 for i in range(40)]
    found = torch.cat([made.forward([Feed(session, part)])[0].logits for part in (tokens[:30], tokens[30:])])
    expected = model(input_ids=torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(found.cpu(), expected[[29, 39]], rtol=1e-3, atol=1e-3)


def test_attention_that_is_none_or_without_effect_is_refused(saved):
    with pytest.raises(UserError, match="attn_implementation: expected one of eager, sdpa, got 'flash_attention_2'"):
        load_backend(str(saved), LoadOptions(attn_implementation="flash_attention_2"))
    with pytest.raises(UserError, match="is read by backend lean, which has its own attention: leave it out, or name"):
        load_backend(str(saved), LoadOptions(attn_implementation="eager"))
    assert load_backend(str(saved), LoadOptions(attn_implementation="eager", backend="hf")).kind == "hf"


def test_every_end_token_ends_a_text(embedded_copy):
    greedy = SamplingParams(temperature=0, max_tokens=24)
    (plain,) = Engine.load("embedded:target", drafter="none").generate([[1, 80, 90, 11]], greedy)
    at = {plain.token_ids.index(token): token for token in plain.token_ids}
    place, other = sorted(at.items())[5]
    file = embedded_copy / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [2, 95, other]}))
    engine = Engine.load(str(embedded_copy), "embedded:draft", stopper="fixed:4")
    assert set(engine.eos_token_ids) >= {2, 95, other}
    (out,) = engine.generate([[1, 80, 90, 11]], greedy)
    assert (out.finish_reason, list(out.token_ids)[:place]) == ("stop", list(plain.token_ids)[:place])
    assert len(out.token_ids) in (place, place + 1)


# --- spread over devices and the disk ---------------------------------------------------------------------------------

PLACES = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}  # the output layer is tied


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("first", "drafter"),
    [
        pytest.param(first, drafter, marks=[pytest.mark.slow] * ((row + column) % 2))
        for row, first in enumerate(["cpu", "disk"])
        for column, drafter in enumerate(["none", "ngram:3", "model", "early_exit:1", "auto"])
    ],
)
def test_a_model_on_cpu_and_disk_generates_what_the_whole_one_does(embedded_copy, drafter, first):
    options = {"drafter": drafter, "dtype": "float32", "draft": "embedded:draft" if drafter == "model" else None}
    layers = json.loads((embedded_copy / "config.json").read_text())["num_hidden_layers"]
    places = PLACES | {f"model.layers.{n}": "disk" if n % 2 else "cpu" for n in range(layers)}
    places |= {"model.embed_tokens": first, "lm_head": first}
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [[1, 80, 90, 11], [1, 30, 31, 32, 33, 34, 35]]
    spread, whole = (Engine.load(str(embedded_copy), device=each, **options) for each in (places, "cpu"))
    assert any(weights.is_meta for weights in spread.target.model.parameters())
    assert (spread.target.kind, whole.target.kind) == ("hf", "lean")
    texts = [[out.token_ids for out in engine.generate(prompts, greedy)] for engine in (spread, whole)]
    assert texts[0] == texts[1]


def test_auto_takes_one_device_where_the_model_fits(embedded_copy, monkeypatch):
    assert Engine.load(str(embedded_copy), device="auto", drafter="none").target.kind == "lean"
    with pytest.raises(UserError, match="cannot load a model from"):
        Engine.load(str(embedded_copy), device={"": "cuda:99"}, drafter="none")
    monkeypatch.setattr(loading, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="'auto' spreads a model, which needs the package accelerate: pip install"):
        Engine.load(str(embedded_copy), device="auto")


def test_drafts_that_read_weights_on_the_disk_are_refused(embedded_copy):
    places = PLACES | {"model.layers": "disk", "lm_head": "cpu"}
    with pytest.raises(UserError, match="spread over devices"):
        Engine.load(str(embedded_copy), device=places, drafter="quantized:8")


def test_a_tied_output_layer_in_another_place_is_refused_with_the_remedy(embedded_copy):
    places = PLACES | {"model.embed_tokens": "cpu", "model.layers": "cpu", "lm_head": "disk"}
    said = r"tied to its embedding, .*embed_tokens on cpu and lm_head on disk\): put both in the same one"
    with pytest.raises(UserError, match=said):
        Engine.load(str(embedded_copy), device=places, drafter="none")
    places |= {"model.embed_tokens": "disk", "lm_head": "cpu"}
    with pytest.raises(UserError, match="an output layer that is tied to the embedding must be in the same place"):
        Engine.load(str(embedded_copy), device=places, drafter="none")


@pytest.mark.grid(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["lfm2", "mamba"])
def test_a_model_with_states_on_cpu_and_disk_generates_what_the_whole_one_does(kind, dtype, tmp_path):
    sizes = {"vocab_size": 97, "hidden_size": 32, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": False}
    if kind == "lfm2":
        types = ["conv", "full_attention", "conv"]
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
        config = transformers.Lfm2Config(**sizes, **heads, num_hidden_layers=3, layer_types=types)
        parts, layers = ("embed_tokens", "embedding_norm", "rotary_emb", "pos_emb"), "model.layers"
    else:
        config = transformers.MambaConfig(**sizes, num_hidden_layers=3, state_size=4)
        parts, layers = ("embeddings", "norm_f"), "backbone.layers"
    random_model(config).save_pretrained(tmp_path)
    places = {f"{layers.partition('.')[0]}.{part}": "cpu" for part in parts} | {"lm_head": "cpu"}
    places |= {f"{layers}.{n}": "disk" if n != 1 else "cpu" for n in range(3)}
    spread, whole = (load_backend(str(tmp_path), LoadOptions(device=each, dtype=dtype)) for each in (places, "cpu"))
    assert (spread.kind, whole.kind) == ("snapshot", "snapshot")
    assert any(weights.is_meta for weights in spread.model.parameters())
    prompts, greedy = (
        [[3, 5, 7, 3, 5], [(5 * i) % 96 + 1 for i in range(30)]],
        SamplingParams(temperature=0, max_tokens=16),
    )
    texts = [
        [out.token_ids for out in Engine(each, NgramDrafter(3)).generate(prompts, greedy)] for each in (spread, whole)
    ]
    assert texts[0] == texts[1]


# --- quantized checkpoints --------------------------------------------------------------------------------------------

QUANTIZED = {
    "bitsandbytes": ("bitsandbytes", {"load_in_4bit": True}),
    "gptq": ("optimum", {"bits": 4, "group_size": 32}),
    "awq": ("gptqmodel", {"bits": 4, "group_size": 32}),
    "compressed-tensors": ("compressed_tensors", {"format": "int-quantized", "config_groups": {}}),
    "torchao": ("torchao", {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}}}),
}


def test_quantization_that_transformers_does_not_know_is_refused(saved):
    config = json.loads((saved / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "of tomorrow", "bits": 3}
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="quantized by the method 'of tomorrow', which this version of transformers"):
        load_backend(str(saved))


@pytest.mark.parametrize("method", QUANTIZED)
def test_quantized_checkpoints_name_the_package_that_is_missing(saved, method):
    package, fields = QUANTIZED[method]
    if loading.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    config = json.loads((saved / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, **fields}
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"(?i)cannot load a model from .*{package.replace('_', '.')}") as caught:
        load_backend(str(saved))
    assert "install" in str(caught.value)
    assert "\n" not in str(caught.value)
