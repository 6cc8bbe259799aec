"""Training of language models: they learn, a draft comes closer to its target, interrupted runs, written files."""

import dataclasses
import json
import math
import random

import pytest
import torch
import transformers
from typer.testing import CliRunner

from draftproof import Engine, SamplingParams
from draftproof.cli import app
from draftproof.errors import UserError
from draftproof.training import corpus, distil, drafter
from draftproof.training.drafter import END, train_tokenizer
from draftproof.training.drafter_artefact import make_drafter
from draftproof.training.drafter_options import DrafterJob, Imitation, Shape, Texts
from draftproof.training.loop import TrainingPlan

SHAPE = Shape(layers=1, width=32, heads=2, positions=96, vocabulary=300)
PLAN = TrainingPlan(steps=40, learning_rate=5e-3, warmup=4, log_every=10, evaluate_every=20)


class KilledError(Exception):
    """Ends a run in a test."""


def sentences(number, seed=0):
    chooser = random.Random(seed)
    who, what, where = ("cat", "dog", "little girl", "old man"), ("ran", "sat", "played", "slept"), ("park", "sun")
    rows = []
    for _ in range(number):
        text = [f"The {chooser.choice(who)} {chooser.choice(what)} in the {chooser.choice(where)}." for _ in range(4)]
        rows.append(" ".join(text))
    return rows


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "tales.txt"
    path.write_text("\n".join(sentences(80)), encoding="utf-8")
    return path


def job(text, out, **changes):
    known = {"texts": Texts((text,)), "out": out, "shape": SHAPE, "plan": PLAN, "rows": 4, "length": 40}
    return DrafterJob(**{**known, "trial_prompts": 2, "trial_tokens": 8, "device": "cpu", **changes})


@pytest.fixture(scope="module")
def target(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("models") / "target"
    make_drafter(job(text, out, shape=dataclasses.replace(SHAPE, layers=2, width=48)))
    return out


# --- from scratch -------------------------------------------------------------------------------------------------


def test_from_scratch_learns_and_loads_in_the_engine(text, target):
    metrics = json.loads((target / "metrics.json").read_text())
    evaluated = [record["bits_per_byte"] for record in metrics["history"] if "bits_per_byte" in record]
    assert evaluated[-1] < evaluated[0]
    assert metrics["test"]["bits_per_byte"] < 1.5  # sentences have three random words; an untrained model needs about 4
    engine = Engine.load(target=str(target))
    (out,) = engine.generate(["The cat"], SamplingParams(max_tokens=12, seed=1))
    assert out.text.strip()
    assert engine.eos_token_ids == (0,)
    provenance = (target / "provenance.json").read_text()
    assert json.loads(provenance)["data"][0]["name"] == text.name
    assert str(text.parent) not in provenance


def test_a_config_file_replaces_the_shape(text, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({
        "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 24, "vocab_size": 99999, "tie_word_embeddings": False, "max_position_embeddings": 64,
    }))  # fmt: skip
    out = tmp_path / "out"
    make_drafter(job(text, out, config=path, plan=dataclasses.replace(PLAN, steps=2)))
    made = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert (made.config.num_hidden_layers, made.config.num_key_value_heads, made.config.vocab_size) == (3, 1, 300)
    assert made.lm_head.weight.data_ptr() != made.model.embed_tokens.weight.data_ptr()


def test_stored_weights_are_small_and_load_as_float32(text, tmp_path):
    out = tmp_path / "out"
    make_drafter(job(text, out, stored="float16", precision="bfloat16", plan=dataclasses.replace(PLAN, steps=2)))
    assert Engine.load(target=str(out)).target.dtype == torch.float32
    numbers = transformers.AutoModelForCausalLM.from_pretrained(out).num_parameters()
    assert (out / "model.safetensors").stat().st_size < 2.2 * numbers


def test_training_continues_from_an_initial_model(text, target, tmp_path):
    out = tmp_path / "out"
    summary = make_drafter(job(text, out, init=str(target), plan=dataclasses.replace(PLAN, steps=4)))
    before = json.loads((target / "metrics.json").read_text())["test"]
    assert summary["bits_per_byte"] < before["bits_per_byte"] + 0.2
    assert summary["parameters"] == before["parameters"]
    assert (out / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
    assert json.loads((out / "provenance.json").read_text())["init"]["model"] == "target"


# --- imitation ----------------------------------------------------------------------------------------------------


def imitation(text, target, out, **options):
    return job(text, out, imitation=Imitation(str(target), **options))


def acceptance_untrained(options):
    run = drafter.DrafterRun(options)
    windows, _ = run.held_out("test")
    return distil.agreement(run.target, run.model().eval(), windows)["acceptance"]


@pytest.mark.parametrize("loss", distil.LOSSES)
def test_imitation_raises_acceptance(text, target, tmp_path, loss):
    options = imitation(text, target, tmp_path / "draft", loss=loss)
    before = acceptance_untrained(options)
    summary = make_drafter(options)
    assert summary["on_text"]["acceptance"] > max(0.5, before + 0.3)
    assert summary["on_own_samples"]["acceptance"] > before + 0.3
    assert 1 < summary["block_efficiency_4"] <= 5
    assert summary["block_efficiency_4"] <= summary["block_efficiency_8"] + 1
    provenance = json.loads((tmp_path / "draft" / "provenance.json").read_text())
    assert provenance["imitation"]["target"] == "target"


@pytest.mark.parametrize("policy", ["draft", "target"])
def test_imitation_on_continuations_by_a_model(text, target, tmp_path, policy):
    options = imitation(text, target, tmp_path / "draft", loss="tv", policy=policy, share=0.5)
    options = dataclasses.replace(options, plan=dataclasses.replace(PLAN, steps=24))
    before = acceptance_untrained(options)
    assert make_drafter(options)["on_own_samples"]["acceptance"] > before + 0.2


def test_a_draft_and_its_target_run_as_a_pair(text, target, tmp_path):
    make_drafter(dataclasses.replace(imitation(text, target, tmp_path / "d"), plan=dataclasses.replace(PLAN, steps=4)))
    engine = Engine.load(target=str(target), draft=str(tmp_path / "d"), verifier="block", stopper="fixed:3")
    (out,) = engine.generate(["The dog"], SamplingParams(max_tokens=10, seed=1))
    assert out.stats.num_draft_tokens > 0


# --- interrupted runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["none", "draft"])
def test_an_interrupted_run_ends_with_the_same_bytes(text, target, tmp_path, monkeypatch, policy):
    plan = dataclasses.replace(PLAN, steps=10, evaluate_every=4, save_every=3)
    options = {"plan": plan, "texts": Texts((text,), background=(text,), background_form="lines")}
    if policy != "none":
        options["imitation"] = Imitation(str(target), policy=policy)
    make_drafter(job(text, tmp_path / "whole", **options))
    steps = []
    whole = drafter.DrafterRun.loss

    def deadly(self, module, windows):
        steps.append(1)
        if len(steps) == 8:
            raise KilledError
        return whole(self, module, windows)

    monkeypatch.setattr(drafter.DrafterRun, "loss", deadly)
    with pytest.raises(KilledError):
        make_drafter(job(text, tmp_path / "killed", **options))
    assert not (tmp_path / "killed").exists()
    make_drafter(job(text, tmp_path / "killed", **options))
    for name in ("model.safetensors", "tokenizer.json", "config.json", "metrics.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert not (tmp_path / "killed.work").exists()


# --- parts --------------------------------------------------------------------------------------------------------


def test_distances_equal_their_definitions():
    p, q = torch.rand(5, 7).softmax(-1), (3 * torch.rand(5, 7)).softmax(-1)
    logs = p.log(), q.log()
    assert torch.allclose(distil.total_variation(*logs), 1 - torch.minimum(p, q).sum(-1), atol=1e-6)
    assert torch.allclose(
        distil.forward_kl(*logs),
        torch.nn.functional.kl_div(*logs[::-1], reduction="none", log_target=True).sum(-1),
        atol=1e-6,
    )
    assert torch.allclose(distil.reverse_kl(*logs), distil.forward_kl(*logs[::-1]), atol=1e-6)


def test_agreement_and_bits_equal_those_token_by_token():
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    p, q = (transformers.LlamaForCausalLM(config).eval() for _ in range(2))
    with torch.no_grad():
        for model in (p, q):
            model.lm_head.weight.mul_(60)
    windows = torch.tensor([[1, 2, 3, 4], [5, 6, -1, -1]])
    met, bits = [], 0.0
    for row in ([1, 2, 3, 4], [5, 6]):
        for at in range(1, len(row)):
            ours, theirs = (m(torch.tensor([row[:at]])).logits[0, -1].softmax(-1) for m in (p, q))
            met.append(float(torch.minimum(ours, theirs).sum().detach()))
            bits -= math.log2(float(ours[row[at]].detach()))
    found = distil.agreement(p, q, windows, at_once=1)
    assert found["acceptance"] == pytest.approx(sum(met) / 4, abs=1e-5)
    assert distil.agreement(p, q, windows, skip=3)["acceptance"] == pytest.approx(met[2], abs=1e-5)
    assert distil.bits_per_byte(p, windows, 10) == pytest.approx(bits / 10, abs=1e-5)


def test_windows_begin_at_the_beginning_of_texts():
    made = corpus.stream([[1, 2, 3], [4, 5], list(range(10, 40))], 0, length=6)
    assert made.ids.tolist() == [0, 1, 2, 3, 0, 4, 5, 0, *range(10, 40), 0]
    generator = torch.Generator().manual_seed(0)
    seen = {tuple(made.window(6, generator).tolist()) for _ in range(300)}
    assert {window for window in seen if window[0] < 10} == {
        (0, 1, 2, 3, 0, 4), (0, 4, 5, 0, 10, 11), (0, 10, 11, 12, 13, 14),
    }  # fmt: skip
    assert max(window[-2] for window in seen) == 39
    with pytest.raises(UserError, match="one window of 6 tokens, got 5"):
        corpus.stream([[1, 2, 3]], 0, length=6)


def test_models_of_few_bits_are_refused(text, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF")
    for changes in ({"imitation": Imitation(str(path))}, {"init": str(path)}):
        with pytest.raises(UserError, match="training a draft model needs a model with full weights"):
            make_drafter(job(text, tmp_path / "no", **changes))


def test_background_fades_out():
    main, aside = (corpus.stream([[token] * 50], 0, length=8) for token in (1, 2))
    batches = corpus.Batches(main, aside, share=0.5, rows=64, length=8, steps=10, seed=3)
    shares = [(batches(step) == 2).any(-1).float().mean().item() for step in range(10)]
    assert shares[0] == 1.0
    assert shares[9] < 0.3
    assert sum(shares) / 10 == pytest.approx(0.55, abs=0.1)
    assert torch.equal(batches(4), batches(4))
    most = corpus.Batches(main, aside, share=0.8, rows=64, length=8, steps=10, seed=3)
    shares = [(most(step) == 2).any(-1).float().mean().item() for step in range(10)]
    assert shares[0] == 1.0
    assert 0.45 < shares[9] < 0.8
    assert sum(shares) / 10 == pytest.approx(0.82, abs=0.05)


def test_held_out_texts_are_read_once_each():
    windows, taken = corpus.held_out([[1, 2, 3], [4, 5, 6], [7, 8]], 0, length=4, tokens=5)
    assert taken == 2
    assert windows.tolist() == [[0, 1, 2, 3], [3, 0, 4, 5], [5, 6, 0, -1]]


def test_tokenizer_encodes_any_text_and_marks_its_beginning():
    made = train_tokenizer(sentences(20), 280, positions=64)
    text = "The cat 5 € 中文 🙂\n\ttab"
    ids = made(text)["input_ids"]
    assert ids[0] == made.eos_token_id == made.bos_token_id == 0
    assert made.decode(ids, skip_special_tokens=True) == text
    assert made.convert_ids_to_tokens(0) == END
    assert len(made) == 280


# --- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--heads", "3"], "width: expected a multiple of twice the heads (6), got 128"),
        (["--kv-heads", "3"], "kv heads: expected a divisor of the 4 heads, got 3"),
        (["--layers", "0"], "layers: expected 1 or more, got 0"),
        (["--vocab", "100"], "(bytes and an end token), got 100"),
        (["--vocab", "60000"], "choose a smaller vocabulary"),
        (["--distil", "embedded:target", "--loss", "mse"], "loss: expected one of kl, reverse_kl, tv, got 'mse'"),
        (["--distil", "embedded:target", "--on-policy", "me"], "policy: expected one of text, draft, target, got 'me'"),
        (["--on-policy", "draft"], "--distil"),
        (["--distil", "embedded:nothing"], "no embedded model"),
        (["--config", "nowhere.json"], "cannot read a config from nowhere.json"),
        (["--precision", "int8"], "precision: expected one of float32, bfloat16, got 'int8'"),
        (["--background-share", "1.7"], "background share: expected 0 to 1, got 1.7"),
        (["--form", "verse"], "stories, documents, got 'verse'"),
        (["--length", "4"], "length: expected 18 or more, got 4"),
        (["--positions", "64"], "at most the 64 tokens that the model reads, got 256"),
        (["--distil", "embedded:target", "--init", "nowhere/at/all"], "no such file or directory"),
        (["--steps", "0"], "steps: expected 1 or more, got 0"),
    ],
)
def test_mistakes_are_one_line(text, tmp_path, options, message):
    out = tmp_path / "out"
    words = ["train", "drafter", "--data", str(text), "--out", str(out), "--quiet", *options]
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, words)
    shown = result.output + str(result.exception)
    assert result.exit_code != 0
    assert message in shown
    assert not out.exists()


def test_command_line_trains_and_prints(text, tmp_path):
    out = tmp_path / "out"
    shape = ["--layers", "1", "--width", "32", "--heads", "2", "--vocab", "300", "--positions", "96"]
    words = ["train", "drafter", "--data", str(text), "--out", str(out), "--steps", "5", "--length", "40", *shape]
    result = CliRunner().invoke(app, [*words, "--json", "--quiet"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["bits_per_byte"] > 0
    again = CliRunner().invoke(app, words)
    assert "exists already" in again.output + str(again.exception)
