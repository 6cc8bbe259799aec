"""PEFT adapters: merged or beside the weights, texts are those of transformers with peft, token for token."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

peft = pytest.importorskip("peft")

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.loading import adapters
from draftproof.backends.loading import verified as checked
from draftproof.backends.loading.by_name import load_backend
from draftproof.backends.loading.options import LoadOptions
from draftproof.embedded import target_dir
from support.helpers import embedded_model

PROMPT = [1, 80, 90, 11]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
LAYERS = ["q_proj", "v_proj", "down_proj"]
KINDS = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=LAYERS, init_lora_weights=False),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=LAYERS, init_lora_weights=False, use_dora=True),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "embedding": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], init_lora_weights=False),
}


@pytest.fixture
def base(tmp_path):
    """A copy of the embedded target: an adapter's config names its directory."""
    return shutil.copytree(target_dir(), tmp_path / "base")


def plain(base):
    return type(embedded_model("target")).from_pretrained(base, dtype=torch.float32)


def save_adapter(base, folder, kind="lora"):
    """Write an adapter with random weights; returns the text that transformers and peft generate with it."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        wrapped = peft.get_peft_model(plain(base), KINDS[kind]())
        if kind == "ia3":
            for name, weights in wrapped.named_parameters():
                if "ia3" in name:
                    weights.data = 1 + 0.5 * torch.randn_like(weights)
    wrapped.save_pretrained(folder)
    return generated(wrapped)


def generated(model):
    options = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
    return model.eval().generate(input_ids=torch.tensor([PROMPT]), **options)[0, len(PROMPT) :].tolist()


def text(engine):
    return list(engine.generate([PROMPT], GREEDY)[0].token_ids)


@pytest.mark.grid(2)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_are_those_of_transformers_and_peft(base, tmp_path, kind):
    expected = save_adapter(base, tmp_path / "adapter", kind)
    options = {"dtype": "float32", "device": "cpu", "stopper": "fixed:3"}
    engine = Engine.load(str(base), "embedded:draft", adapter=str(tmp_path / "adapter"), **options)
    assert text(engine) == expected != generated(plain(base))
    assert engine.target.kind == ("hf" if kind == "embedding" else "lean"), "the output layer is tied to the embedding"


def test_an_adapter_that_is_not_merged_gives_the_same_text(base, tmp_path, monkeypatch):
    expected = save_adapter(base, tmp_path / "adapter")
    monkeypatch.setattr(peft.tuners.lora.LoraModel, "merge_and_unload", lambda *_, **__: 1 / 0)
    for drafter in ("none", "ngram:3", "early_exit:1", "quantized:8"):
        engine = Engine.load(
            str(base), adapter=str(tmp_path / "adapter"), drafter=drafter, dtype="float32", device="cpu"
        )
        assert (engine.target.kind, text(engine)) == ("hf", expected), drafter


def test_a_directory_that_is_an_adapter_brings_its_base_model_and_tokenizer(base, tmp_path):
    expected = save_adapter(base, tmp_path / "adapter")
    engine = Engine.load(str(tmp_path / "adapter"), drafter="none", dtype="float32", device="cpu")
    assert (engine.target.kind, text(engine)) == ("lean", expected)
    assert len(engine.generate("Once upon a time", GREEDY)[0].text) > 0
    with pytest.raises(UserError, match="is itself an adapter, and another one is named"):
        Engine.load(str(tmp_path / "adapter"), adapter=str(tmp_path / "adapter"))


def test_what_is_kept_of_checks_never_answers_for_an_adapter(base, tmp_path, monkeypatch):
    monkeypatch.setenv(checked.VARIABLE, "1")
    monkeypatch.setenv("DRAFTPROOF_HOME", str(tmp_path / "home"))
    expected = save_adapter(base, tmp_path / "adapter")
    options = {"drafter": "none", "dtype": "float32", "device": "cpu"}
    own = text(Engine.load(str(base), **options))
    assert type(Engine.load(str(base), **options).target).__name__ == "LeanForward", "kept, and used"
    assert text(Engine.load(str(base), adapter=str(tmp_path / "adapter"), **options)) == expected
    assert text(Engine.load(str(base), **options)) == own


# --- what is refused --------------------------------------------------------------------------------------------------


def test_without_peft_the_package_is_named(base, tmp_path, monkeypatch):
    save_adapter(base, tmp_path / "adapter")
    monkeypatch.setattr(adapters, "find_spec", lambda _: None)
    for name, options in ((str(base), {"adapter": str(tmp_path / "adapter")}), (str(tmp_path / "adapter"), {})):
        with pytest.raises(UserError, match="needs the package peft, which is not installed: pip install peft"):
            load_backend(name, LoadOptions(**options))


def test_a_directory_that_is_none_is_refused(base):
    with pytest.raises(UserError, match=r"is no adapter: there is no adapter_config\.json"):
        load_backend(str(base), LoadOptions(adapter=str(base)))
    with pytest.raises(UserError, match="no such file or directory: 'nowhere/at/all'"):
        load_backend(str(base), LoadOptions(adapter="nowhere/at/all"))


def test_pickled_and_foreign_and_missing_tensors_are_refused(base, tmp_path):
    folder = tmp_path / "adapter"
    save_adapter(base, folder)
    weights = load_file(folder / "adapter_model.safetensors")
    first, *_ = weights
    save_file({name: each for name, each in weights.items() if name != first}, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"was made for another model than this LlamaForCausalLM: .* missing"):
        load_backend(str(base), LoadOptions(adapter=str(folder)))
    save_file(weights | {"base_model.model.other": torch.ones(2)}, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"another model .*base_model\.model\.other"):
        load_backend(str(base), LoadOptions(adapter=str(folder)))
    save_file(weights | {first: torch.ones(3, 3)}, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match="does not fit LlamaForCausalLM"):
        load_backend(str(base), LoadOptions(adapter=str(folder)))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(UserError, match="pickled weights are refused on purpose"):
        load_backend(str(base), LoadOptions(adapter=str(folder)))


def test_adapters_that_add_tokens_are_refused(base, tmp_path):
    wrapped = peft.get_peft_model(plain(base), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    wrapped.save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError, match=r"\(PROMPT_TUNING\) depends on the tokens of a prompt .* expected LoRA"):
        load_backend(str(base), LoadOptions(adapter=str(tmp_path / "adapter")))


def test_a_base_model_that_is_not_there_is_named(base, tmp_path):
    save_adapter(base, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "gone/with/it"}))
    with pytest.raises(UserError, match=r"made for 'gone/with/it', which cannot be had here .* name its base model as"):
        load_backend(str(tmp_path / "adapter"))
