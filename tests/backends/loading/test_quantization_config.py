"""Targets that are quantized while they are loaded: `quantization_config`, by transformers and the library it names."""

import importlib.util
import json
import warnings
from dataclasses import replace

import pytest
import torch
import transformers
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from draftproof import Engine, UserError
from draftproof.backends.loading import load as door
from draftproof.backends.loading.by_name import load_backend
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.quantization import quantization_fields, read_quantization
from draftproof.batch.rows import RowOptions
from draftproof.batch.run import settings_of
from draftproof.batch.source import RowSource
from support.commands import call
from support.helpers import tokenizer
from support.quantized_models import GREEDY, PROMPTS, fp8, generated, original


class RoundingConfig(QuantizationConfigMixin):
    """Weights of the linear layers rounded to multiples of `step`, by no library; swallows fields as others do."""

    def __init__(self, step=0.25, quant_method="rounding", **_):
        self.step, self.quant_method = step, quant_method


class Rounding(HfQuantizer):
    requires_calibration = False

    def _process_model_after_weight_loading(self, model, **_):
        step = self.quantization_config.step
        for name, module in model.named_modules():
            if "_proj" in name:
                module.weight.data = (module.weight.data / step).round() * step
        self.quantization_config.step = -1.0  # transformers' own write into their configs, too
        return model

    def is_serializable(self):
        return True

    @property
    def is_trainable(self):
        return False


@pytest.fixture(autouse=True)
def _methods(monkeypatch):
    monkeypatch.setitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "rounding", RoundingConfig)
    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "rounding", Rounding)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    original(folder)
    tokenizer().save_pretrained(folder)
    return folder


ROUNDED = {"quant_method": "rounding", "step": 0.5}


@pytest.fixture(scope="module")
def rounded_texts(checkpoint):
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for name, module in model.named_modules():
        if "_proj" in name:
            module.weight.data = (module.weight.data / 0.5).round() * 0.5
    found = generated(model)
    assert found != generated(transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32))
    return found


def texts(engine):
    return [list(out.token_ids) for out in engine.generate(PROMPTS, replace(GREEDY, ignore_eos=True))]


# --- a target of one's own choice -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["mapping", "object", "text", "file"])
def test_every_form_of_the_option_quantizes_the_target(form, checkpoint, rounded_texts, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(ROUNDED), encoding="utf-8")
    given = {
        "mapping": ROUNDED,
        "object": RoundingConfig(step=0.5),
        "text": f"  {json.dumps(ROUNDED)}",
        "file": str(path),
    }[form]
    for drafter in ("none", "ngram:4"):
        engine = Engine.load(str(checkpoint), drafter=drafter, dtype="float32", quantization_config=given)
        assert texts(engine) == rounded_texts
    if form == "object":
        assert given.step == 0.5, "the caller's own config is left as it was"


def test_a_draft_model_is_not_quantized_with_its_target(checkpoint, monkeypatch):
    asked = {}

    def loading(source, options):
        asked[options.dtype] = options.quantization_config
        return load_backend(source, options)

    monkeypatch.setattr(door, "load_backend", loading)
    options = {"dtype": "float32", "draft_dtype": "bfloat16", "backend": "hf", "quantization_config": ROUNDED}
    Engine.load(str(checkpoint), str(checkpoint), drafter="model", **options)
    assert asked == {"float32": ROUNDED, "bfloat16": None}


def test_what_was_checked_of_the_whole_model_is_not_used(checkpoint, rounded_texts):
    """A checkpoint that was read before without the option leaves a note by which transformers is not asked again."""
    plain = texts(Engine.load(str(checkpoint), drafter="none", dtype="float32"))
    again = texts(Engine.load(str(checkpoint), drafter="none", dtype="float32", quantization_config=ROUNDED))
    assert again == rounded_texts != plain
    assert texts(Engine.load(str(checkpoint), drafter="none", dtype="float32")) == plain


def test_a_command_takes_the_option_and_refuses_what_is_none(monkeypatch):
    given = {}

    def loading(target, draft, **options):
        given.update(options)
        raise UserError("enough")

    monkeypatch.setattr(Engine, "load", loading)
    text = json.dumps(ROUNDED)
    call("generate", "--target", "embedded:target", "--quantization-config", text, "Hello", code=1)
    assert given["quantization_config"] == text


# --- methods of libraries ---------------------------------------------------------------------------------------------


def bitsandbytes(bits):
    options = {"load_in_8bit": True} if bits == 8 else {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
    return transformers.BitsAndBytesConfig(**options)


def torchao(kind):
    import torchao.quantization as kinds

    return transformers.TorchAoConfig(getattr(kinds, kind)())


METHODS = {  # package, function, its argument, and the backend that reads it
    "bitsandbytes, 8 bits": ("bitsandbytes", bitsandbytes, 8, "generate"),
    "bitsandbytes, 4 bits": ("bitsandbytes", bitsandbytes, 4, "hf"),
    "torchao, int8 weights": ("torchao", torchao, "Int8WeightOnlyConfig", "hf"),
    "torchao, int8 products": ("torchao", torchao, "Int8DynamicActivationInt8WeightConfig", "hf"),
    "quanto, int8 weights": ("optimum.quanto", transformers.QuantoConfig, "int8", "hf"),
}


@pytest.mark.parametrize("method", METHODS)
def test_texts_are_what_transformers_generates(method, checkpoint):
    package, make, argument, backend = METHODS[method]
    if importlib.util.find_spec(package.split(".")[0]) is None or importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = make(argument)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, quantization_config=make(argument)
        )
        for given in (config, config.to_dict()):
            engine = Engine.load(
                str(checkpoint),
                drafter="ngram:4" if backend == "hf" else "none",
                dtype="float32",
                quantization_config=given,
            )
            assert engine.target.kind == backend
            assert texts(engine) == generated(model)


# --- what is refused --------------------------------------------------------------------------------------------------

REFUSED = {
    "no JSON": ("{4 bits", "no JSON"),
    "a list": ("[4]", "no file that can be read"),
    "no such file": ("nowhere.json", "nowhere.json.*no file that can be read"),
    "a number": (4, "it is a int"),
    "no method": ({"step": 0.5}, "it has no quant_method"),
    "a method that is none": (
        {"quant_method": "rotate"},
        "expected one of the methods .*bitsandbytes.*torchao.*, got 'rotate'",
    ),
    "no bits": ({"quant_method": "bitsandbytes"}, "it has no load_in_4bit or load_in_8bit"),
    "no bits, as an object": (transformers.BitsAndBytesConfig(), "it has no load_in_4bit or load_in_8bit"),
    "an unknown field": ({**ROUNDED, "setp": 1}, "unknown field 'setp': expected for rounding quant_method, step"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_config_is_refused_in_one_line(case, checkpoint):
    given, said = REFUSED[case]
    with pytest.raises(UserError, match=said) as caught:
        load_backend(str(checkpoint), LoadOptions(quantization_config=given))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["bitsandbytes", "torchao", "hqq", "quanto"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(method, checkpoint, monkeypatch):
    package = {"quanto": "optimum-quanto"}.get(method, method)
    fields = {
        "bitsandbytes": {"load_in_4bit": True},
        "torchao": {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}},
        "hqq": {"nbits": 8},
        "quanto": {"weights": "int8"},
    }[method]
    if importlib.util.find_spec({"quanto": "optimum"}.get(method, method)) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(UserError, match=f"pip install {package}") as caught:
        load_backend(str(checkpoint), LoadOptions(quantization_config={"quant_method": method, **fields}))
    assert "\n" not in str(caught.value)


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path):
    fp8(tmp_path, 32)
    with pytest.raises(UserError, match=r"asks for rounding, and the weights .* are quantized already .fp8"):
        load_backend(str(tmp_path), LoadOptions(quantization_config=ROUNDED))
    whole = {"quant_method": "fp8", "weight_block_size": [32, 32], "dequantize": True}  # how it is read stays legal
    assert texts(Engine(load_backend(str(tmp_path), LoadOptions(dtype="float32", quantization_config=whole)))) == texts(
        Engine(load_backend(str(tmp_path), LoadOptions(dtype="float32")))
    )


def test_it_does_not_go_with_tensor_parallel_or_gguf(checkpoint, tmp_path):
    with pytest.raises(UserError, match=r"tensor_parallel is 2.*quantization_config"):
        load_backend(str(checkpoint), LoadOptions(tensor_parallel=2, quantization_config=ROUNDED))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"does not go with .*model.gguf.*leave it out"):
        load_backend(str(path), LoadOptions(quantization_config=ROUNDED))


# --- runs that name it ------------------------------------------------------------------------------------------------


def test_a_run_is_told_apart_by_what_a_file_says_and_not_by_its_name(checkpoint, tmp_path):
    path, rows = tmp_path / "config.json", tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Hello"}\n', encoding="utf-8")
    made = []
    for step in (0.5, 0.25):
        path.write_text(json.dumps({**ROUNDED, "step": step}), encoding="utf-8")
        engine = {"target": str(checkpoint), "quantization_config": str(path)}
        made.append(settings_of(RowSource(rows), engine, RowOptions())["quantization_config"])
    assert [each["step"] for each in made] == [0.5, 0.25]
    assert quantization_fields(RoundingConfig(step=0.5))["step"] == 0.5


def test_workers_elsewhere_need_no_file(tmp_path):
    cluster = pytest.importorskip("draftproof.integrations.ray.cluster", reason="needs ray")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(ROUNDED), encoding="utf-8")
    placed = cluster._placed({"target": "embedded:target", "quantization_config": str(path)})
    assert placed == {"target": "embedded:target", "quantization_config": ROUNDED}


def test_each_reading_makes_a_config_of_its_own():
    given = RoundingConfig(step=0.5)
    first, second = read_quantization(given), read_quantization(given)
    assert first is not given
    assert first is not second
