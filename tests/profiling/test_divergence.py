"""`draftproof profile divergence`: figures of two forms of a model, beside their definitions."""

import json
import math
import shutil

import pytest
import torch
from typer.testing import CliRunner

from draftproof import UserError, models
from draftproof.backends.loading.load import load
from draftproof.backends.loading.options import LoadOptions
from draftproof.cli import app
from draftproof.profiling.divergence import DivergenceOptions, measure_divergence
from support.helpers import embedded_model

TEXTS = ["Once upon a time, there was a little girl.", "The dog ran to the park, and it was very happy to be there."]


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS * 4))
    return f"lines:{path}"


def test_a_model_is_not_apart_from_itself(texts):
    found = measure_divergence(DivergenceOptions(target="embedded:target", dataset=texts)).figures
    assert found["divergence"]["value"] == pytest.approx(0, abs=1e-9)
    assert found["same"]["value"] == 1
    assert found["perplexity"] == found["other perplexity"]


def test_figures_are_those_of_their_definitions(texts):
    options = DivergenceOptions(target="embedded:target", against="embedded:draft", dataset=texts)
    found = measure_divergence(options).figures
    tokenizer = load("embedded:target", LoadOptions()).tokenizer
    sums, count = torch.zeros(4, dtype=torch.float64), 0
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.inference_mode():
            p, q = (embedded_model(name)(ids).logits[0].double().log_softmax(-1) for name in ("target", "draft"))
        for place, following in enumerate(ids[0, 1:]):
            right = q[place].exp()
            sums[0] += (right * (q[place] - p[place])).sum()
            sums[1] += p[place].argmax() == q[place].argmax()
            sums[2] -= p[place, following]
            sums[3] -= q[place, following]
        count += ids.shape[1] - 1
    mean = (sums / count).tolist()
    assert found["divergence"]["value"] == pytest.approx(mean[0], rel=1e-4)
    assert found["same"]["value"] == pytest.approx(mean[1])
    assert found["perplexity"]["value"] == pytest.approx(math.exp(mean[2]), rel=1e-4)
    assert found["other perplexity"]["value"] == pytest.approx(math.exp(mean[3]), rel=1e-4)
    assert found["divergence"]["low"] <= found["divergence"]["value"] <= found["divergence"]["high"]


def test_fewer_bits_are_farther_apart(texts):
    eight, four = (
        measure_divergence(DivergenceOptions(target="embedded:target", weights=weights, dataset=texts)).figures
        for weights in ("int8", "int4")
    )
    assert 0 < eight["divergence"]["value"] < four["divergence"]["value"] < 1


def test_no_more_is_read_than_both_models_can(texts, tmp_path):
    short = tmp_path / "short"
    shutil.copytree(models.resolve("embedded:target"), short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}))
    for names in ((str(short), "embedded:target"), ("embedded:target", str(short))):
        figures = measure_divergence(DivergenceOptions(target=names[0], against=names[1], dataset=texts)).figures
        assert max(each["tokens"] for each in figures["tokens"]) == 15
        assert figures["divergence"]["value"] == pytest.approx(0, abs=1e-9)


def test_the_command(texts):
    words = ["profile", "divergence", "--target", "embedded:target", "--weights", "int8", "--dataset", texts, "--json"]
    made = CliRunner().invoke(app, words)
    assert made.exit_code == 0, made.output
    assert set(json.loads(made.stdout)) >= {"divergence", "same", "perplexity", "other perplexity", "tokens"}


def test_what_cannot_be_compared_is_refused(texts):
    with pytest.raises(UserError, match="questions: expected 1 or more, got 0"):
        DivergenceOptions(questions=0)
    with pytest.raises(UserError, match=r"cannot be compared with embedded:stories: .*; both must share one tokenizer"):
        measure_divergence(DivergenceOptions(target="embedded:target", against="embedded:stories", dataset=texts))
