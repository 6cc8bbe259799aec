"""Training of feature heads: training inputs equal drafting inputs, and an interrupted run gives the same head."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed
from draftproof.backends.heads.feature_head import FeatureBackend
from draftproof.backends.heads.feature_net import FeatureConfig, FeatureNet, load_net
from draftproof.backends.hf.backend import HFBackend
from draftproof.cli.train import app
from draftproof.provenance import command
from draftproof.training.feature_head import make_feature_head
from draftproof.training.feature_loss import Frame, acceptance, output_loss, steps, target_rows
from draftproof.training.feature_options import FeatureJob
from draftproof.training.feature_rows import FeatureStore, TrainingRow, frequent, spread, windows
from draftproof.training.loop import TrainingPlan
from support.feature_heads import drafted
from support.helpers import CONFIGS, random_model, tokenizer
from support.small_heads import whole_and_interrupted

WORDS = ["The little dog saw a big red ball.", "It ran and ran to get it.", "Then it was sad, and mom said: go home!"]


@pytest.fixture
def target():
    return HFBackend(random_model(CONFIGS["llama"]()), name="llama")


def random_net(*, own_output=False, ids=40, window=5):
    config = FeatureConfig("llama", 32, 97, 4, 2, 24, ids, own_output=own_output, window=window)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = FeatureNet(config)
    net.ids.copy_(torch.arange(ids) * 2)
    return net


def frame_for(target, net, **options):
    return Frame(target.model.get_input_embeddings(), target.output_rows(net.ids).clone(), autocast=False, **options)


def store_for(target, rows, tmp_path, length=12):
    return FeatureStore(target, [rows], length=length, cache=tmp_path, key="k")


ROWS = [TrainingRow(tuple((7 * i + j * j) % 97 for j in range(12)), start=i % 3) for i in range(40)]


@pytest.mark.parametrize("window", [4, 64])
def test_step_k_computes_the_state_of_the_kth_drafted_token(target, tmp_path, window):
    """The unrolled pass at every position equals a session that reads the same tokens and drafts from there."""
    net = random_net(window=window).requires_grad_(requires_grad=False)
    rows = store_for(target, ROWS[:1], tmp_path).shard(0)
    tokens = rows.ids[0].tolist()
    trained = [out[0] for out, _ in steps(net, rows, frame_for(target, net), 4)]
    head = FeatureBackend(target, net)
    for first in range(1, 9):
        owner = target.open()
        target.forward([Feed(owner, tokens[:first])])
        session = head.follow(owner)
        made = [head.forward([Feed(session, tokens[: first + 1])], hidden=True)[0].hidden[-1]]
        later = tokens[first + 1 : first + 4]
        made.extend(head.forward([Feed(session, [token])], hidden=True)[0].hidden[-1] for token in later)
        for step in range(4):
            assert torch.allclose(made[step], trained[step][first + step], atol=1e-4), (first, step)
        session.close()
        owner.close()


@pytest.mark.parametrize("tv", [0.0, 0.7])
def test_the_gradient_is_that_of_the_formula(tv):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(130, 6, generator=generator, requires_grad=True)
    weight = torch.randn(9, 6, generator=generator, requires_grad=True)
    target = torch.rand(130, 9, generator=generator).softmax(-1) * 0.9
    loss, overlap = output_loss(states, weight, target, tv)
    loss.backward()
    found = states.grad.clone(), weight.grad.clone()
    states.grad = weight.grad = None
    q = (states @ weight.T).softmax(-1)
    plain = torch.minimum(q, target).sum(-1)
    (-(target * q.log()).sum(-1) + tv * (1 - plain)).mean().backward()
    assert torch.allclose(overlap, plain, atol=1e-6)
    assert torch.allclose(found[0], states.grad, atol=1e-6)
    assert torch.allclose(found[1], weight.grad, atol=1e-5)


def test_rows_have_the_states_and_probabilities_of_the_target(target, tmp_path):
    store = store_for(target, ROWS, tmp_path)
    shard = store.shard(1)
    assert (len(store), shard.ids.shape) == (2, (8, 12))
    logits = target.model(input_ids=shard.ids, use_cache=False).logits
    net = random_net(ids=48)
    p = logits.softmax(-1).flatten(0, 1)[:, net.ids]
    assert torch.allclose(target_rows(shard, frame_for(target, net)), p, atol=1e-5)
    assert shard.counts[:, :3].tolist() == [[place >= i % 3 for place in range(3)] for i in range(32, 40)]
    again = store_for(target, ROWS, tmp_path)
    again.target = None  # so the shard must come from its file
    assert torch.equal(again.shard(1).states, shard.states)


def test_a_batch_is_a_function_of_its_step(target, tmp_path):
    store = store_for(target, ROWS, tmp_path)
    batches = [store.batch(step, 4, seed=5).ids for step in range(32)]
    assert all(torch.equal(store.batch(step, 4, seed=5).ids, batches[step]) for step in (31, 3, 17))
    first = {tuple(row) for ids in batches[:16] for row in ids.tolist()}
    assert first == {row.tokens for row in ROWS}, "every row is used in each pass"
    assert [ids.tolist() for ids in batches[16:]] != [ids.tolist() for ids in batches[:16]]


def test_acceptance_is_at_most_the_covered_mass(target, tmp_path):
    rows = store_for(target, ROWS, tmp_path).shard(0)
    net = random_net(ids=30)
    found = acceptance(net, rows, frame_for(target, net), positions=2)
    p = target_rows(rows, frame_for(target, net))[rows.counts.flatten()]
    assert found["covered"] == pytest.approx(float(p.sum(-1).mean()), abs=1e-5)
    assert 0 < found["accept_2"] < found["covered"]


def test_windows_have_the_full_length_and_ids_are_the_frequent_ones():
    rows = windows(WORDS * 40, tokenizer(), length=16, most=6, seed=1)
    assert len(rows) == 6
    assert {len(row.tokens) for row in rows} == {16}
    assert windows(WORDS * 40, tokenizer(), length=16, most=9, seed=1)[:6] == rows, "more windows begin with the same"
    assert frequent([[TrainingRow((7, 5, 5, 9, 9, 9))]], 3, 12, always=[2]) == [2, 5, 9]
    assert frequent([[TrainingRow((0, 5))], []], 4, 12) == [0, 1, 2, 5]


def test_a_small_kind_of_rows_has_the_same_weight():
    many, few = [TrainingRow((0, *[3, 4, 5] * 30))] * 10, [TrainingRow((0, 3, 8, 8, 8, 9), start=1)]
    assert frequent([many, few], 3, 12) == [3, 4, 8]
    assert frequent([many], 3, 12) == [3, 4, 5]
    assert spread([["a", "b"], list(range(9))]) == [0, "a", 1, "b", 2, 3, "a", 4, "b", 5, 6, "a", 7, "b", 8]
    assert spread([[], [1, 2]]) == [1, 2]
    assert spread([list("abcd"), [1, 2, 3]]) == ["a", 1, "b", 2, "c", 3, "d"]


# --- from options to files -------------------------------------------------------------------------------------------


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("\n\n".join(f"{WORDS[i % 3]} {WORDS[(i // 3) % 3]} Number {i}." for i in range(400)))
    return file


def job(tmp_path, texts, name, **options):
    plan = TrainingPlan(steps=12, seed=3, log_every=4, evaluate_every=6, save_every=1, learning_rate=3e-3)
    kept = {"windows": 24, "length": 16, "ids": 200, "trial_prompts": 2, "dtype": "float32", "cache": tmp_path / "c"}
    return FeatureJob("embedded:target", tmp_path / name, plan, (texts,), **{**kept, **options})


def test_a_trained_head_drafts_for_its_target_and_has_a_provenance(tmp_path, texts):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"{WORDS[i % 3]} {i}"}) for i in range(60)))
    loss = {"own_output": True, "tv": 1.0, "states": 0.1}
    first = job(tmp_path, texts, "made", prompts=(prompts,), length=48, answer_tokens=6, **loss)
    metrics = make_feature_head(first)
    assert set(metrics) == {"text", "answers", "runs"}
    assert metrics["runs"]["answers"]["block_efficiency"] >= 1
    provenance = (first.out / "provenance.json").read_text()
    assert str(tmp_path) not in provenance
    assert json.loads(provenance)["rows"] == {"text": 24, "answers": pytest.approx(48, abs=12)}
    assert not first.work.exists()
    made = Engine.load("embedded:target", drafter=f"feature_head:{first.out}", stopper="fixed:3")
    plain = Engine.load("embedded:target")
    greedy = SamplingParams(max_tokens=20, temperature=0)
    assert made.generate("Once upon a time", greedy)[0].text == plain.generate("Once upon a time", greedy)[0].text
    make_feature_head(job(tmp_path, texts, "more", start=first.out))
    assert load_net(tmp_path / "more").config == load_net(first.out).config, "the shape is kept"
    with pytest.raises(UserError, match=r"made for embedded:target\): expected a target with 5 layers"):
        Engine.load("embedded:draft", drafter=f"feature_head:{first.out}")


@pytest.mark.slow
def test_an_interrupted_run_gives_the_same_head(tmp_path, texts, monkeypatch):
    jobs = (job(tmp_path, texts, name) for name in ("whole", "cut"))
    one, two = whole_and_interrupted(*jobs, monkeypatch, 7)
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    net = load_net(tmp_path / "cut")
    target = HFBackend(Engine.load("embedded:target").target.model, name="embedded:target")
    assert drafted(target, net).name == "feature_head"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": 3}, "expected 1, 2, 4"),
        ({"length": 4}, "8 tokens or more"),
        ({"windows": 5, "length": 100_000}, "no window"),
        ({"answers_each": 0}, "answers each: expected 1 or more, got 0"),
    ],
)
def test_impossible_jobs_say_what_is_legal(tmp_path, texts, options, words):
    with pytest.raises(UserError, match=words):
        make_feature_head(job(tmp_path, texts, "no", **options))


def test_a_target_of_few_bits_is_refused(tmp_path, texts):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(
        UserError,
        match=r"training a feature head needs .*full weights.*a head trained on that drafts",
    ):
        make_feature_head(replace(job(tmp_path, texts, "no"), target=str(path)))


def test_the_command(tmp_path, texts):
    words = ["feature-head", "--target", "embedded:target", "--data", str(texts), "--out", str(tmp_path / "made")]
    words += ["--windows", "24", "--length", "16", "--steps", "4", "--ids", "200", "--trial-prompts", "1", "--quiet"]
    done = CliRunner().invoke(app, [*words, "--cache", str(tmp_path / "c"), "--dtype", "float32"])
    assert done.exit_code == 0, done.output
    assert "accept 1" in done.output
    assert (tmp_path / "made" / "config.json").exists()


def test_a_provenance_has_no_path(monkeypatch):
    words = ["/a/draftproof", "--draft", "feature_head:/b/mine", "--out=/c/d", "data/x.txt", "a:b"]
    monkeypatch.setattr("sys.argv", words)
    assert command() == ["draftproof", "--draft", "feature_head:mine", "--out=d", "data/x.txt", "a:b"]
