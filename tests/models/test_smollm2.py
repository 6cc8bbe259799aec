"""A real model: SmolLM2-135M-Instruct and its draft, through the names that `draftproof models pull` fetches."""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftproof import Engine, SamplingParams, models

NAMES = ("smollm2-135m", "smollm2-135m-draft")
PROMPTS = (
    "The capital of France is",
    [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
    "def fibonacci(n):",
)
MISSING = [name for name in NAMES if not models.pulled(name)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not here, for each: draftproof models pull NAME: {MISSING}"),
]


@functools.cache
def pair(verifier="block", stopper=None):
    return Engine.load(*NAMES, dtype="float32", verifier=verifier, stopper=stopper, max_batch=3)


@functools.cache
def greedy(verifier="block"):
    return pair(verifier).generate(list(PROMPTS), SamplingParams(temperature=0, max_tokens=24))


def test_greedy_float32_is_transformers_own_token_for_token():
    model = AutoModelForCausalLM.from_pretrained(models.resolve(NAMES[0]), dtype=torch.float32)
    for prompt, output in zip(PROMPTS, greedy(), strict=True):
        ids = torch.tensor([pair().encode(prompt)[1]])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, repetition_penalty=1.0
        )
        assert output.token_ids == tuple(expected[0, ids.shape[1] :].tolist())


def test_the_text_is_sane():
    assert "Paris" in greedy()[0].text
    assert "Paris" in greedy()[1].text


def test_drafts_are_accepted():
    """With drafts of one length: the default stopper drafts nothing where the clock says that it does not pay."""
    outputs = pair(stopper="fixed:3").generate(list(PROMPTS), SamplingParams(temperature=0, max_tokens=24))
    assert all(output.stats.block_efficiency > 1 for output in outputs)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in greedy()]


def test_a_batch_is_answered_like_each_prompt_alone():
    """Seeded texts are those of the seed under `gumbel`, whatever is drafted: lengths of drafts depend on the clock."""
    params = [SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8 + 4 * i, seed=i) for i in range(len(PROMPTS))]
    together = pair("gumbel").generate(list(PROMPTS), params)
    alone = [pair("gumbel").generate([prompt], own)[0] for prompt, own in zip(PROMPTS, params, strict=True)]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]


@pytest.mark.skipif(not models.pulled("smollm2-135m-q4"), reason="not here: draftproof models pull smollm2-135m-q4")
def test_the_4_bit_file_is_drafted_for_by_the_head_in_the_package():
    """It is a source of `auto` there, and greedy text is that of plain decoding."""
    params = SamplingParams(temperature=0, max_tokens=24)
    plain, made, fixed = (
        Engine.load("smollm2-135m-q4", drafter=drafter, stopper=stopper)
        for drafter, stopper in (("none", None), ("auto", None), ("feature_head", "fixed:3"))
    )
    assert [source.name for source in made.drafter.sources] == ["feature_head"]
    expected = [output.token_ids for output in plain.generate(list(PROMPTS), params)]
    for engine in (made, fixed):
        found = engine.generate(list(PROMPTS), params)
        assert [output.token_ids for output in found] == expected
    assert all(output.stats.num_accepted_tokens for output in found)
