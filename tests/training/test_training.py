"""Training of heads: data from files, labels of table models, what heads learn, and interrupted runs.

`loop`, `responses` and `features` must survive interruptions: in every case the files must have the same bytes.
"""

import contextlib
import gzip
import json
import lzma
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

from draftproof.cli import app
from draftproof.cli.train import app as train_app
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.engine.engine import Engine
from draftproof.errors import UserError
from draftproof.heads import HeadConfig, load_head
from draftproof.provenance import fingerprint
from draftproof.sampling import SamplingParams
from draftproof.stoppers.trained import Acceptance
from draftproof.testing import TableModel
from draftproof.theory.cost import PassCosts
from draftproof.theory.sprinter import expected_accepted
from draftproof.training import data, features, metrics, pair_data, sprinter, sweep
from draftproof.training.head_artefact import make_head, make_verifier_head
from draftproof.training.head_options import HeadJob, Material
from draftproof.training.heads import Labels, evaluate_head, fresh_head, head_loss, ratio_loss, train_head, weighted_bce
from draftproof.training.loop import Loss, TrainingPlan, train
from draftproof.training.responses import Response, sample_responses
from support import helpers


class KilledError(Exception):
    """Ends a run in a test."""


# --- data ---------------------------------------------------------------------------------------------------------


def written(folder, name, text):
    raw = text.encode()
    packed = {".gz": gzip.compress, ".xz": lzma.compress}
    path = folder / name
    path.write_bytes(packed.get(path.suffix, bytes)(raw))
    return path


@pytest.mark.parametrize("packing", ["", ".gz", ".xz"])
def test_text_files_are_read_in_each_form(tmp_path, packing):
    text = "One cat. It sat.\n\nStill one.\nTwo dogs! They ran.\n"
    path = written(tmp_path, f"a.txt{packing}", text)
    prompts = {form: [each.prompt for each in data.read_examples([path], form=form)[0]] for form in data.FORMS}
    assert prompts["lines"] == ["One cat.", "Still one.", "Two dogs!"]
    assert prompts["paragraphs"] == ["One cat.", "Still one."]
    assert prompts["stories"] == ["One cat.", "Two dogs!"]
    whole = data.read_examples([path], form="stories", opening=0)[0]
    assert whole[0].prompt == whole[0].text == "One cat. It sat.\n\nStill one."


def test_json_lines_are_read_by_every_known_key(tmp_path):
    rows = [{"prompt": "p"}, {"text": "t. u."}, {"turns": ["first", "second"]}, {"question": "q"}, {"instruction": "i"}]
    path = written(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)))
    examples, sources = data.read_examples([path])
    assert [each.prompt for each in examples] == ["p", "t. u.", "first", "q", "i"]
    assert sources[0].name == "a.jsonl"
    assert sources[0].texts == 5


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"prompt": "x"}\n{', "line 2: not JSON"),
        ("a.jsonl", '{"answer": "x"}', "one of prompt"),
        ("a.jsonl", '{"turns": [3]}', "holds no text"),
        ("a.txt", "\n\n", "holds no text"),
        ("a.csv", "x", "expected a name that ends in .txt"),
    ],
)
def test_broken_data_is_refused_with_its_line(tmp_path, name, text, message):
    with pytest.raises(UserError, match=message):
        data.read_examples([written(tmp_path, name, text)])


def test_files_with_other_content_are_refused(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(b"not packed")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\xfa")
    for name, message in (("a.txt.gz", "cannot unpack"), ("b.txt", "not UTF-8"), ("c.txt", "cannot read")):
        with pytest.raises(UserError, match=message):
            data.read_examples([tmp_path / name])


def test_a_text_is_in_the_same_part_among_any_other_texts():
    examples = [data.Example(f"text {i}", f"text {i}") for i in range(400)]
    parts, fewer = data.split(examples), data.split(examples[:200][::-1])
    assert sum(map(len, parts.values())) == 400
    assert 280 < len(parts["train"]) < 360
    for name in data.SPLITS:
        assert set(fewer[name]) <= set(parts[name])
    limited = data.split(examples, limit=40)
    assert {name: len(part) for name, part in limited.items()} == {"train": 32, "valid": 4, "test": 4}
    with pytest.raises(UserError, match="texts: expected about 30 or more"):
        data.split(examples[:3])


def test_tokens_come_back_from_the_cache(tmp_path):
    texts = ["Once upon a time", "a cat", "dogs"]
    first = data.tokenize(texts, helpers.tokenizer(), cache=tmp_path, key="k")
    assert data.tokenize(texts, None, cache=tmp_path, key="k") == first


# --- responses ----------------------------------------------------------------------------------------------------


def test_interrupted_responses_are_completed_to_the_same_ones(tmp_path):
    engine = helpers.engine(draft=None)
    prompts = [[1, 5 + i] for i in range(20)]
    params = SamplingParams(max_tokens=6)
    whole = sample_responses(engine, prompts, params, cache=tmp_path / "a", key="k")
    with pytest.raises(KilledError):
        sample_responses(engine, prompts, params, cache=tmp_path / "b", key="k", watch=killer(2))
    assert len(list((tmp_path / "b").rglob("*.json"))) == 2
    assert sample_responses(engine, prompts, params, cache=tmp_path / "b", key="k") == whole
    assert sample_responses(engine, prompts, params, cache=tmp_path / "b", key="k", seed=1) != whole
    assert {len(row.tokens) for row in whole} <= set(range(1, 7))


def killer(after):
    """A watch that raises at the given tick, counted over all its progress bars."""
    left = [after]

    def tick(*_, **__):
        left[0] -= 1
        if left[0] == 0:
            raise KilledError

    @contextmanager
    def watch(*_):
        yield tick

    return watch


# --- the loop -----------------------------------------------------------------------------------------------------

WEIGHTS = torch.linspace(-1, 1, 8)


def batch_of(step):
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
    return x, x @ WEIGHTS


def squared(module, batch):
    return Loss(((module(batch[0]).squeeze(-1) - batch[1]) ** 2).mean(), 32)


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))  # dropout draws at every step


def held_out(module):
    return {"error": float(squared(module, batch_of(10**6)).value)}


PLAN = TrainingPlan(steps=120, warmup=5, save_every=7, log_every=10, evaluate_every=20, keep_best="error")


def test_ten_interruptions_change_neither_weights_nor_history(tmp_path):
    plain = network()
    history = train(plain, batch_of, squared, PLAN, evaluate=held_out)
    dice, kills, done = random.Random(3), 0, None
    while done is None:
        module = network()
        watch = killer(dice.randrange(1, 25)) if kills < 10 else killer(10**6)
        try:
            options = {"checkpoint": tmp_path / "c.safetensors", "evaluate": held_out, "watch": watch}
            done = train(module, batch_of, squared, PLAN, **options)
        except KilledError:
            kills += 1
    assert kills == 10
    assert done == history
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), module.parameters(), strict=True))


def test_training_lowers_the_loss_and_leaves_the_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    history = train(network(), batch_of, squared, replace(PLAN, learning_rate=1e-2), evaluate=held_out)
    losses = [record["loss"] for record in history if "loss" in record]
    assert losses[-1] < 0.3 * losses[0]
    assert torch.equal(torch.rand(3), expected)


def test_a_checkpoint_of_another_run_or_a_broken_one_is_refused(tmp_path):
    file = tmp_path / "c.safetensors"
    train(network(), batch_of, squared, PLAN, checkpoint=file, identity="mine", evaluate=held_out)
    with pytest.raises(UserError, match="other data or options"):
        train(network(), batch_of, squared, PLAN, checkpoint=file, identity="yours", evaluate=held_out)
    file.write_bytes(b"torn")
    with pytest.raises(UserError, match="cannot resume"):
        train(network(), batch_of, squared, PLAN, checkpoint=file, evaluate=held_out)


def test_a_loss_that_is_not_finite_is_refused(tmp_path):
    def nan(module, batch):
        return Loss(squared(module, batch).value * float("nan"), 1)

    with pytest.raises(UserError, match="nan at step 1"):
        train(network(), batch_of, nan, PLAN, checkpoint=tmp_path / "c.safetensors", evaluate=held_out)
    assert not (tmp_path / "c.safetensors").exists()


@pytest.mark.parametrize(("kind", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_signals_wait_for_a_checkpoint(tmp_path, kind, raised):
    def interrupted(module, batch):
        os.kill(os.getpid(), kind)
        return squared(module, batch)

    before = signal.getsignal(kind)
    plan, file = replace(PLAN, save_every=0), tmp_path / "c.safetensors"
    with pytest.raises(raised):
        train(network(), batch_of, interrupted, plan, checkpoint=file, evaluate=held_out)
    assert file.exists()
    assert signal.getsignal(kind) is before
    module, plain = network(), network()
    train(module, batch_of, squared, plan, checkpoint=file, evaluate=held_out)
    train(plain, batch_of, squared, plan, evaluate=held_out)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), module.parameters(), strict=True))


def test_frozen_parameters_stay_out_of_the_checkpoint(tmp_path):
    module = network()
    module[0].requires_grad_(requires_grad=False)
    kept = module[0].weight.clone()
    train(module, batch_of, squared, PLAN, checkpoint=tmp_path / "c.safetensors", evaluate=held_out)
    assert torch.equal(module[0].weight, kept)
    assert b"module.0.weight" not in (tmp_path / "c.safetensors").read_bytes()


# --- features -----------------------------------------------------------------------------------------------------


def table_pair():
    return features.ModelPair(TableModel(5, 1), TableModel(5, 2, hidden=6), SamplingParams())


RESPONSES = [Response((0, 1), (2, 3, 4, 0, 1, 2)), Response((3,), (1, 1, 4))]


def expected(pair, context, token):
    p, q = (model.logits(context).softmax(-1)[token] for model in (pair.target, pair.draft))
    return float(p.log() - q.log()), float(q.log())


def test_labels_of_drafted_tokens_are_those_of_the_tables():
    pair = table_pair()
    for row, rows in zip(RESPONSES, features.drafted(pair)(RESPONSES, 7), strict=True):
        for i, token in enumerate(row.tokens):
            ratio, log_q = expected(pair, [*row.prompt, *row.tokens[:i]], token)
            assert float(rows.log_ratio[i]) == pytest.approx(ratio, abs=1e-5)
            assert float(rows.log_q[i]) == pytest.approx(log_q, abs=1e-5)
    assert rows.group.tolist() == [8, 8, 8]
    assert rows.place.tolist() == [0, 1, 2]


def test_the_state_is_the_one_at_the_token_or_the_one_above_it():
    pair = table_pair()
    at, above = (features.drafted(pair, above=flag)(RESPONSES, 0)[0] for flag in (False, True))
    assert torch.equal(at.hidden[:-1], above.hidden[1:])
    assert torch.equal(at.log_ratio, above.log_ratio)
    states = pair.q([Response((0, 1), (2,))])[0][1]
    assert torch.equal(above.hidden[0], states[0].half())
    assert torch.equal(at.hidden[0], states[1].half())


def test_token_mixing_labels_after_x_and_reads_states_after_z():
    pair = table_pair()
    row = Response((0, 1), tuple(random.Random(0).choices(range(5), k=400)))
    (rows,) = features.mixed(pair, 0.25, seed=3)([row], 0)
    assert 0.65 < len(rows) / 400 < 0.85  # only places taken from y
    for label, log_q, place in zip(rows.log_ratio, rows.log_q, rows.place, strict=True):
        context = [*row.prompt, *row.tokens[: int(place)]]
        legal = [expected(pair, context, token) for token in range(5)]
        assert any(abs(label - a) < 1e-4 and abs(log_q - b) < 1e-4 for a, b in legal)
    (all_x,) = features.mixed(pair, 0.999999, seed=3)([row], 0)
    assert len(all_x) == 0
    # with r = 0 Z is y, so the states after drawn tokens are those of other prefixes than X
    (none_x,) = features.mixed(pair, 0.0, seed=3)([row], 0)
    assert len(none_x) == 400
    assert not torch.equal(none_x.hidden[5:], pair.q([row])[0][1][6:].half())


def test_tokens_drawn_along_a_text_follow_q():
    pair = table_pair()
    rows = features.join(features.before(pair, 0)([Response((0, 1, 2), (3,))] * 600, 0))
    _, counts = torch.unique(rows.log_q, return_counts=True)
    q = pair.draft.logits([0, 1, 2]).softmax(-1).sort().values
    assert torch.allclose(counts / 600, q.float(), atol=0.06)
    assert (rows.hidden == rows.hidden[0]).all()


def test_features_are_read_from_shards(tmp_path):
    pair, many = table_pair(), RESPONSES * 20
    with pytest.raises(KilledError):
        features.collect(features.before(pair, 1), many, tmp_path / "a", watch=killer(1))
    resumed = features.collect(features.before(pair, 1), many, tmp_path / "a")
    fresh = features.collect(features.before(pair, 1), many, tmp_path / "b")
    for name in ("hidden", "log_ratio", "log_q", "top", "group", "place"):
        assert torch.equal(getattr(resumed, name), getattr(fresh, name)), name
    assert len(resumed) == 180


# --- losses and metrics -------------------------------------------------------------------------------------------


def test_the_gradient_points_towards_the_label():
    for label, sign in ((1.0, -1), (0.0, 1), (0.9, -1), (0.1, 1)):
        output = torch.zeros(1, requires_grad=True)
        weighted_bce(output, torch.tensor([label])).backward()
        assert torch.sign(output.grad).item() == sign
    assert float(weighted_bce(torch.tensor([2.0]), torch.tensor([0.0]), 1.0, 6.0)) == pytest.approx(
        6 * float(weighted_bce(torch.tensor([2.0]), torch.tensor([0.0])))
    )


def test_the_weighted_loss_is_smallest_at_the_odds_that_evaluate_head_assumes():
    label, w = torch.tensor([0.7]), 6.0
    best = torch.tensor([0.7 / (0.3 * w)]).log()
    for shift in (-0.1, 0.1):
        assert weighted_bce(best, label, 1.0, w) < weighted_bce(best + shift, label, 1.0, w)


def test_ratio_labels_are_clamped():
    far = torch.tensor([-60.0, 60.0])
    assert float(ratio_loss(torch.tensor([-5.0, 5.0]), far)) == 0


def test_auc_and_rates_agree_with_counting():
    score = torch.tensor([0.1, 0.4, 0.4, 0.8, 0.9])
    good = torch.tensor([False, True, False, True, True])
    pairs = [(s > t) + 0.5 * (s == t) for s in score[good] for t in score[~good]]
    assert metrics.auc(score, good) == pytest.approx(float(sum(pairs)) / len(pairs))
    assert metrics.rates_at(score, good, 0.4) == pytest.approx((2 / 3, 0))
    assert metrics.roc(score, good)[0]["true_positive"] == 1


def test_calibration_and_kl_are_zero_for_the_truth():
    label = torch.rand(500, generator=torch.Generator().manual_seed(0))
    error, curve = metrics.calibration(label, label)
    assert error < 1e-7
    assert sum(each["rows"] for each in curve) == 500
    assert metrics.binary_kl(label, label) == pytest.approx(0, abs=1e-9)
    assert metrics.binary_kl(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5])) == pytest.approx(0.6931, abs=1e-4)
    assert metrics.calibration(label, torch.full_like(label, 0.9))[0] == pytest.approx(
        0.9 - float(label.mean()), abs=1e-6
    )


def test_the_fitted_baseline_finds_a_logistic_curve():
    x = torch.linspace(-3, 3, 200)
    slope, offset = metrics.fitted(x, (1.5 * x - 0.5).sigmoid())
    assert (slope, offset) == (pytest.approx(1.5, abs=1e-2), pytest.approx(-0.5, abs=1e-2))


# --- heads --------------------------------------------------------------------------------------------------------


def planted(rows, seed, *, shuffled=False):
    """Rows whose log ratio depends on one direction of the state."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 8, generator=generator)
    ratio = 2 * hidden[:, 0] - 1 + 0.1 * torch.randn(rows, generator=generator)
    if shuffled:
        ratio = ratio[torch.randperm(rows, generator=generator)]
    flat = torch.full((rows,), 0.5)
    count = torch.arange(rows, dtype=torch.int32)
    return features.JudgeRows(hidden.half(), ratio, flat.log(), flat, count, count)


SHORT = TrainingPlan(steps=200, learning_rate=1e-2, log_every=100)


@pytest.mark.parametrize("kind", ["acceptance", "log_ratio", "verifier"])
def test_a_head_learns_a_dependence_and_nothing_from_shuffled_labels(kind):
    labels = Labels(w_rej=1.0)
    for shuffled in (False, True):
        rows, valid, test = (planted(n, s, shuffled=shuffled) for n, s in ((3000, 0), (500, 1), (1000, 2)))
        config = HeadConfig(kind, 8, "draft", "target", depth=0 if kind == "verifier" else 1)
        head, _ = train_head(config, rows, valid, SHORT, labels)
        found = evaluate_head(head, test, rows, labels)
        ours, constant = (found["huber"], found["huber_constant"]) if kind == "log_ratio" else (
            found["kl"], found["kl_constant"],
        )  # fmt: skip
        if shuffled:
            assert ours > 0.98 * constant
            assert 0.4 < found["auc"] < 0.6
        else:
            assert ours < (0.8 if kind == "verifier" else 0.3) * constant  # a verifier's labels are hard
            assert found["auc"] > 0.95


def test_the_odds_correct_for_the_weights():
    rows, labels = planted(3000, 0), Labels(w_rej=6.0)
    head, _ = train_head(
        HeadConfig("acceptance", 8, "d", "t", depth=2), rows, planted(500, 1), replace(SHORT, steps=500), labels
    )
    found = evaluate_head(head, planted(1000, 2), rows, labels)
    assert found["kl_unweighted"] < 0.85 * found["kl"]
    assert found["ece_unweighted"] < 0.6 * found["ece"]


def test_blocks_have_their_own_weights_unless_shared():
    sizes = {}
    for shared in (False, True):
        config = HeadConfig("acceptance", 64, "d", "t", depth=3, shared_blocks=shared)
        head = fresh_head(config, 0)
        sizes[shared] = sum(p.numel() for p in head.parameters())
        rows = planted(4, 0)
        wide = replace(rows, hidden=torch.randn(4, 64).half())
        head_loss(head(wide.hidden), wide, "acceptance", Labels()).backward()
        assert all(p.grad is not None for p in head.parameters())
    block, out = 64 * 64 + 64, 64 + 1
    assert sizes == {False: 3 * block + out, True: block + out}


# --- in the engine ------------------------------------------------------------------------------------------------


def test_drafts_of_sprinter_have_the_length_of_theorem_3_3():
    for run, true, false in ((0, 0.9, 0.2), (3, 0.8, 0.3), (7, 0.95, 0.05)):
        long = sprinter.expected_drafted(run, true, false, limit=2000)
        assert long == pytest.approx(expected_accepted(run, true, false) + 1)
        assert sprinter.expected_drafted(run, true, false, limit=1) == 1


def test_the_distribution_of_a_position_is_between_q_and_p():
    p, q = (torch.rand(4, 6, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    yes = torch.ones(4, 1, dtype=torch.bool)
    assert torch.allclose(sprinter.position_distribution(p, q, yes), q)
    assert torch.allclose(sprinter.position_distribution(p, q, ~yes), p, atol=1e-6)
    some = torch.rand(4, 6, generator=torch.Generator().manual_seed(2)) > 0.5
    assert torch.allclose(sprinter.position_distribution(p, q, some).sum(-1), torch.ones(4), atol=1e-6)


def test_the_row_with_the_least_latency_and_the_dominated_lengths():
    short, long = {"discard_rate": 0.2, "verification_rate": 0.6}, {"discard_rate": 1.5, "verification_rate": 0.3}
    fixed = [{"length": 2, **short}, {"length": 8, **long}]
    heads = [{"threshold": 0.5, "discard_rate": 0.2, "verification_rate": 0.5}]
    assert sweep.dominated(fixed, heads) == [2]
    assert sweep.with_fixed_drafts(fixed, heads)[0]["fixed_verification_rate"] == pytest.approx(0.6)
    assert sweep.with_fixed_drafts(fixed, [{"discard_rate": 2.0}])[0]["fixed_verification_rate"] is None
    assert sweep.choose(sweep.with_latency(fixed, PassCosts(0.01, 1.0)))["length"] == 8
    assert sweep.choose(sweep.with_latency(fixed, PassCosts(0.5, 1.0)))["length"] == 2


@pytest.fixture(scope="module")
def story_file(tmp_path_factory):
    names, things = ("Lily", "Tom", "Sam", "Mia", "Ben", "Sue"), ("dog", "ball", "tree", "cake", "boat", "hat", "car")
    texts = [f"{name} had a {thing}. {name} liked the {thing} a lot." for name in names for thing in things]
    path = tmp_path_factory.mktemp("data") / "stories.txt"
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


@pytest.fixture
def loaded_once(monkeypatch):
    """The embedded pair, loaded once for all tests, and short tables of trials."""
    monkeypatch.setattr(sweep, "LENGTHS", (2,))
    monkeypatch.setattr(sweep, "THRESHOLDS", (0.3, 0.9))
    monkeypatch.setattr(
        pair_data, "load", lambda name, _: SimpleNamespace(backend=helpers.backend(name.partition(":")[2]))
    )
    monkeypatch.setattr(pair_data, "load_tokenizer", lambda _: helpers.tokenizer())


def job(folder, story_file, **options):
    params = SamplingParams(max_tokens=6)
    material = Material(
        "embedded:target", "embedded:draft", (story_file,), params=params, starts=1, cache=folder / "cache"
    )
    plan = TrainingPlan(steps=60, learning_rate=3e-3, log_every=10, save_every=3)
    known = {"plan": plan, "threshold": 0.5, "depth": 1, "trial_prompts": 2, "trial_tokens": 12, "batch": 64}
    return HeadJob(material, folder / "out", **{**known, **options})


def artefact(folder):
    files = {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors", "metrics.json")}
    provenance = json.loads((folder / "provenance.json").read_text())
    del provenance["seconds"]
    return files | {"provenance": provenance}


@pytest.mark.slow
@pytest.mark.usefixtures("loaded_once")
def test_ten_interruptions_at_random_moments_give_the_same_files(tmp_path, story_file):
    make_head(job(tmp_path / "plain", story_file))
    dice, kills, done = random.Random(7), 0, False
    while not done:
        watch = killer(dice.randrange(2, 16)) if kills < 10 else killer(10**6)
        try:
            make_head(job(tmp_path / "killed", story_file), watch)
            done = True
        except KilledError:
            kills += 1
            assert not (tmp_path / "killed" / "out").exists()
    assert kills == 10
    assert artefact(tmp_path / "plain" / "out") == artefact(tmp_path / "killed" / "out")
    assert not (tmp_path / "killed" / "out.work").exists()


@pytest.mark.usefixtures("loaded_once")
def test_a_trained_head_ends_drafts_in_the_engine(tmp_path, story_file):
    head_job = job(tmp_path, story_file, threshold=None, cost_ratio=0.2)
    summary = make_head(head_job)
    head = load_head(head_job.out)
    assert head.config.threshold == summary["chosen"]["threshold"]
    assert (head.config.draft, head.config.target) == ("embedded:draft", "embedded:target")
    drafted = {}
    for threshold in (0.05, 0.999):
        backend = helpers.backend("draft")
        model = DraftModel(backend, vocab_size=helpers.backend("target").vocab_size)
        drafter = ModelDrafter(model, Acceptance(head, threshold))
        engine = Engine(helpers.backend("target"), drafter, tokenizer=helpers.tokenizer(), eos_token_ids=(1, 2))
        (out,) = engine.generate("Once upon a time", SamplingParams(max_tokens=32, seed=1))
        drafted[threshold] = out.stats.num_draft_tokens / out.stats.num_target_calls
    assert drafted[0.05] < drafted[0.999]


@pytest.mark.slow
@pytest.mark.usefixtures("loaded_once")
def test_a_sweep_takes_the_cheapest_cell_and_continues_after_an_interruption(tmp_path, story_file, monkeypatch):
    monkeypatch.setattr(sweep, "DEPTHS", (0, 1))
    monkeypatch.setattr(sweep, "WEIGHTS", (3.0,))
    plan = TrainingPlan(steps=20, log_every=10)
    options = {"plan": plan, "threshold": None, "sweep": True, "cost_ratio": 0.2, "trial_prompts": 1, "trial_tokens": 6}
    made = make_head(job(tmp_path / "a", story_file, **options))
    with pytest.raises(KilledError):
        make_head(job(tmp_path / "b", story_file, **options), killer(45))
    assert list((tmp_path / "b" / "out.work").glob("cell-*"))
    assert make_head(job(tmp_path / "b", story_file, **options)) == made
    assert artefact(tmp_path / "a" / "out") == artefact(tmp_path / "b" / "out")
    table = json.loads((tmp_path / "a" / "out" / "metrics.json").read_text())["sweep"]["heads"]
    tried = {(row["depth"], row["w_rej"], row["threshold"]) for row in table}
    assert tried == {(depth, 3.0, h) for depth in (0, 1) for h in (0.3, 0.9)}
    config = load_head(tmp_path / "a" / "out").config
    assert (config.depth, config.threshold) == (made["chosen"]["depth"], made["chosen"]["threshold"])


@pytest.mark.usefixtures("loaded_once")
def test_a_verifier_has_its_rates_and_its_drift_in_its_files(tmp_path, story_file):
    head_job = job(tmp_path, story_file, kind="verifier", depth=0)
    summary = make_verifier_head(head_job)
    categories = json.loads((head_job.out / "metrics.json").read_text())["rows_of_each_category"]
    assert set(categories) == {"original", "draft", "target", "mixed"}
    assert len(set(categories.values())) == 1
    assert 0 <= summary["eta_fp"] <= 1
    assert summary["sprinter"]["drift"]["position_tv"] < summary["sprinter"]["drift"]["draft_tv"]
    assert (
        summary["sprinter"]["measured"]["rouge"] is None or 0 <= summary["sprinter"]["measured"]["rouge"]["rouge1"] <= 1
    )
    provenance = json.loads((head_job.out / "provenance.json").read_text())
    assert provenance["data"][0]["name"] == "stories.txt"
    assert str(tmp_path) not in json.dumps(provenance)


def test_jobs_with_illegal_values_are_refused(tmp_path, story_file):
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="exists already"):
        job(tmp_path, story_file)
    for options, message in (
        ({"mix": 1.0}, "mix: expected"),
        ({"threshold": 2.0}, "threshold: expected 0 to 1"),
        ({"cost_ratio": 0.0}, "cost ratio: expected"),
        ({"trial_prompts": 0}, "trial prompts: expected 1 or more, got 0"),
    ):
        with pytest.raises(UserError, match=message):
            job(tmp_path / "new", story_file, **options)
    with pytest.raises(UserError, match="depth of 0 to 64, got 64 and 99"):
        make_head(job(tmp_path / "new", story_file, depth=99))


def test_different_models_have_different_fingerprints():
    assert fingerprint("embedded:target") != fingerprint("embedded:draft")
    assert fingerprint("embedded:draft") == fingerprint("embedded:draft")


# --- the command --------------------------------------------------------------------------------------------------

PAIR = ["--target", "embedded:target", "--draft", "embedded:draft"]
SPRINTER = ["head", "--kind", "sprinter"]


@pytest.mark.parametrize("command", ["head", "verifier", "drafter", "feature-head"])
def test_every_option_has_a_help_text(command):
    parameters = typer.main.get_command(train_app).commands[command].params
    assert len(parameters) > 20
    for option in parameters:
        assert option.help, option.name
        assert "  " not in option.help
        assert option.help[-1] in ".)", option.help


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["head", *PAIR, "--data", "none.txt", "--out", "OUT"], 1, "cannot read none.txt"),
        (
            ["head", *PAIR, "--data", "DATA", "--out", "OUT", "--kind", "best"],
            2,
            "expected acceptance, log_ratio or sprinter",
        ),
        (["head", *PAIR, "--data", "DATA", "--out", "OUT", "--reads-draw"], 2, "needs --kind sprinter"),
        ([*SPRINTER, *PAIR, "--data", "DATA", "--out", "OUT", "--mix", "0.1"], 2, "--mix does not go with"),
        ([*SPRINTER, *PAIR, "--data", "DATA", "--out", "OUT", "--sweep"], 2, "--sweep does not go with"),
        (
            ["head", *PAIR, "--data", "DATA", "--out", "OUT", "--mix", "3"],
            1,
            "mix: expected 0 or more and less than 1, got 3",
        ),
        ([*SPRINTER, *PAIR, "--data", "DATA", "--out", "OUT", "--lambda", "0"], 1, "lambda"),
        ([*SPRINTER, *PAIR, "--data", "DATA", "--out", "DATA"], 1, "exists already"),
    ],
)
def test_mistakes_are_one_line(tmp_path, story_file, words, code, message):
    places = {"OUT": str(tmp_path / "out"), "DATA": str(story_file)}
    result = CliRunner().invoke(app, ["train", *[places.get(word, word) for word in words]])
    assert result.exit_code == code
    assert message in " ".join(result.stderr.split())
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_command_verifier_is_head_of_kind_sprinter_with_a_warning(tmp_path, story_file, monkeypatch, caplog):
    made = []
    monkeypatch.setattr("draftproof.cli.train.run", lambda make, job, *_, **__: made.append((make, job)))
    given = [*PAIR, "--data", str(story_file), "--out", str(tmp_path / "out"), "--reads-draw", "--lambda", "0.3"]
    for words in (SPRINTER, ["verifier"]):
        assert not caplog.records
        result = CliRunner().invoke(app, ["train", *words, *given])
        assert result.exit_code == 0, result.stderr
    assert "train verifier is now train head --kind sprinter" in caplog.text
    assert made[0] == made[1]
    make, job = made[0]
    assert make is make_verifier_head
    assert (job.kind, job.depth, job.threshold, job.plan.steps) == ("verifier", 0, 0.5, 2000)
    assert (job.labels.lam, job.reads_draw) == (0.3, True)


def test_a_head_prints_what_says_whether_it_is_of_use(tmp_path, story_file, monkeypatch):
    rates = {"latency": 0.5, "block_efficiency": 2.0, "discard_rate": 0.1}
    summary = {
        "rows": 9,
        "kl": 0.3,
        "auc": 0.75,
        "threshold": 0.4,
        "chosen": rates,
        "best_fixed": {"length": 3, **rates},
    }
    monkeypatch.setattr("draftproof.cli.train.make_head", lambda *_: summary)
    given = ["train", "head", *PAIR, "--data", str(story_file), "--out", str(tmp_path / "out"), "--quiet"]
    assert CliRunner().invoke(app, given).stdout.splitlines() == [
        "auc: 0.75",
        "threshold: 0.4",
        "chosen",
        "  latency: 0.5",
        "  block efficiency: 2",
        "best fixed",
        "  length: 3",
        "  latency: 0.5",
        "  block efficiency: 2",
        f"written: {tmp_path / 'out'}",
        f"all figures: {tmp_path / 'out' / 'metrics.json'}",
    ]
    assert json.loads(CliRunner().invoke(app, [*given, "--json"]).stdout) == {"path": str(tmp_path / "out"), **summary}


@pytest.mark.slow
def test_a_process_killed_ten_times_ends_with_the_same_files(tmp_path, story_file):
    def command(place):
        words = ["--max-tokens", "16", "--steps", "3000", "--threshold", "0.5", "--batch", "64", "--quiet"]
        where = ["--data", str(story_file), "--out", str(tmp_path / place), "--cache", str(tmp_path / f"{place}-cache")]
        return [sys.executable, "-c", "from draftproof.cli import main; main()", "train", "head", *PAIR, *where, *words]

    def kept():
        """What is on the disk of the run that is killed."""
        found = set()
        for folder in (tmp_path / "killed-cache", tmp_path / "killed.work"):
            with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                found |= {(path, path.stat().st_mtime_ns) for path in folder.rglob("*")}
        return found

    subprocess.run(command("plain"), check=True, capture_output=True)
    kills, dice = 0, random.Random(11)
    for _ in range(10):
        with subprocess.Popen(command("killed"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            for _ in range(dice.randint(1, 3)):  # killed by its progress: how long a run takes says little
                before = kept()
                while process.poll() is None and kept() == before:
                    time.sleep(0.01)
            time.sleep(dice.uniform(0, 0.2))
            kills += process.poll() is None
            process.send_signal(dice.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
        if (tmp_path / "killed").exists():
            break
    if not (tmp_path / "killed").exists():
        subprocess.run(command("killed"), check=True, capture_output=True)
    assert kills >= 1
    plain, killed = artefact(tmp_path / "plain"), artefact(tmp_path / "killed")
    for files in (plain, killed):
        del files["provenance"]["command"]
    assert plain == killed
