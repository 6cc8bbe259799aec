"""Text with multi-modal checkpoints: the language model is taken out, or the whole model reads text."""

import copy

import pytest
import torch
from transformers import AutoModelForImageTextToText, GenerationConfig

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.loading import language_model as text_part_module
from draftproof.backends.loading.by_name import load_backend, load_model
from draftproof.backends.loading.language_model import text_part
from draftproof.backends.loading.options import LoadOptions
from draftproof.drafters.ngram import NgramDrafter
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.prompts import PromptReader
from support.architectures.tiny import multimodal
from support.helpers import tokenizer

MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
TYPES = {  # the class that reads text, and its backend
    "llava": ({}, "LlamaForCausalLM", "lean"),
    "mistral3": ({}, "MistralForCausalLM", "lean"),
    "gemma3": ({}, "Gemma3ForCausalLM", "lean"),
    "gemma4": ({}, "Gemma4ForCausalLM", "lean"),
    "qwen2_5_vl": ({"text_config": MROPE}, "Qwen2_5_VLForConditionalGeneration", "hf"),
    "qwen3_vl": ({}, "Qwen3VLForConditionalGeneration", "hf"),
    "lfm2_vl": ({}, "Lfm2ForCausalLM", "snapshot"),
}
PROMPTS = [[7, 8, 9], [(5 * i) % 97 + 4 for i in range(41)], [11, 12, 11, 12, 11]]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def whole_model(name):
    return multimodal(name, **copy.deepcopy(TYPES[name][0]))


def generated(model, prompt):
    """What the multi-modal model itself generates from text."""
    ids = torch.tensor([prompt])
    model.generation_config = GenerationConfig()
    options = GenerationConfig(max_new_tokens=16, do_sample=False)
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)[
        0, len(prompt) :
    ].tolist()


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", TYPES)
def test_text_is_what_the_multi_modal_model_generates(name, tmp_path):
    whole_model(name).save_pretrained(tmp_path)
    made = load_backend(str(tmp_path), LoadOptions(dtype="float32"))
    assert made.kind == TYPES[name][2]
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    expected = [generated(model, prompt) for prompt in PROMPTS]
    for drafter in (None, NgramDrafter(4), make_drafter("quantized:8", target=made, draft=None, stopper="fixed:3")):
        outs = Engine(made, drafter, max_batch=2).generate(PROMPTS, GREEDY)
        assert [list(out.token_ids) for out in outs] == expected


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", TYPES)
def test_the_language_model_is_taken_out_where_transformers_has_it_alone(name, tmp_path):
    whole = whole_model(name)
    whole.save_pretrained(tmp_path)
    made = load_model(str(tmp_path), LoadOptions(dtype="float32"))
    assert type(made).__name__ == TYPES[name][1]
    if type(made) is not type(whole):
        towers = [path for path, _ in made.named_modules() if "vision" in path or "projector" in path]
        assert not towers
        assert sum(map(torch.numel, made.parameters())) < sum(map(torch.numel, whole.parameters()))


def test_a_language_model_with_other_logits_stays_where_it_is(monkeypatch):
    whole = whole_model("llava")
    rows = text_part_module.sample_logits
    monkeypatch.setattr(text_part_module, "sample_logits", lambda model: rows(model) + float(model is whole))
    assert text_part(whole) is whole
    monkeypatch.undo()
    assert type(text_part(whole)).__name__ == "LlamaForCausalLM"


def test_models_of_text_alone_are_left_alone(tmp_path):
    from support.helpers import CONFIGS, random_model

    model = random_model(CONFIGS["gemma3"]())
    assert text_part(model) is model


def test_images_are_refused_with_the_place_of_the_message():
    reader = PromptReader(copy.copy(tokenizer()), "some-vl")
    reader.tokenizer.chat_template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    told = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert reader.chat_text(told) == "a\nb"
    told[0]["content"].append({"type": "image", "url": "cat.png"})
    with pytest.raises(UserError, match="message 0: expected parts of type text, got 'image'"):
        reader.chat_text(told)
