"""The model `draftproof` of lm-eval beside lm-eval's own hf model; needs the extra `eval`."""

import pytest

pytest.importorskip("lm_eval")

import lm_eval.api.registry
import torch
from lm_eval.api.instance import Instance

from draftproof import UserError
from draftproof.embedded import target_dir
from draftproof.integrations.lm_eval import DraftproofLM

STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."


def instances(kind, *arguments):
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


@pytest.fixture(scope="module")
def models():
    hf = lm_eval.api.registry.get_model("hf")(pretrained=str(target_dir()), dtype="float32", device="cpu", batch_size=2)
    ours = DraftproofLM("embedded:target", draft="embedded:draft", dtype="float32", device="cpu", batch_size=4)
    return hf, ours


def test_the_registry_knows_the_model():
    assert lm_eval.api.registry.get_model("draftproof") is DraftproofLM


def test_log_likelihoods_are_those_of_hf(models):
    pairs = [(STORY, each) for each in (" The sun was bright.", " The sun was dark.", " She", " He went home and")]
    pairs += [("", "Once upon a time"), ("A dog ", "ran"), (STORY * 40, " and then"), ("One", " day" * 30)]
    wanted, found = (each.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True) for each in models)
    for (logprob, greedy), (ours, same) in zip(wanted, found, strict=True):
        assert ours == pytest.approx(logprob, abs=5e-3)
        assert same == greedy


def test_rolling_log_likelihoods_are_those_of_hf(models):
    texts = [(STORY,), (STORY * 60,), ("A",)]
    wanted, found = (
        each.loglikelihood_rolling(instances("loglikelihood_rolling", *texts), disable_tqdm=True) for each in models
    )
    for logprob, ours in zip(wanted, found, strict=True):
        assert ours == pytest.approx(logprob, rel=1e-4)


def test_greedy_answers_are_those_of_hf(models):
    kwargs = {"until": [".", "\n"], "max_gen_toks": 40, "do_sample": False}
    asked = [(STORY, kwargs), ("The dog", kwargs), ("Tom said", {"until": [], "max_gen_toks": 30})]
    asked.append((STORY * 40, {**kwargs, "until": " the"}))
    wanted, found = (each.generate_until(instances("generate_until", *asked), disable_tqdm=True) for each in models)
    assert found == wanted
    assert all(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would be used")
@pytest.mark.parametrize("drafter", ["none", "ngram:4"])
def test_the_default_device_of_lm_evals_command_line_needs_no_cuda(drafter):
    made = DraftproofLM("embedded:target", drafter=drafter, device="cuda:0", batch_size="1")
    assert made.engine.target.device.type == "cpu"
    assert made.generate_until(instances("generate_until", ("The dog", {"max_gen_toks": 4})), disable_tqdm=True)[0]


def test_options_that_do_not_exist_are_named(models):
    for options in ({"drafters": "ngram"}, {"pretrained": "x"}):
        with pytest.raises(UserError):
            DraftproofLM("embedded:target", **options)
    for kwargs, words in (({"num_beams": 2}, "num_beams"), ({"max_gen_toks": 4096}, "max_gen_toks")):
        with pytest.raises(UserError, match=words):
            models[1].generate_until(instances("generate_until", ("A", kwargs)), disable_tqdm=True)
    assert models[1].engine.busy is False
