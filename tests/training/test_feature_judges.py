"""Heads for the drafts of a feature head: they are trained on the states of its runs, and stored in its directory."""

import json

import pytest
import torch

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed
from draftproof.backends.heads.feature_head import FeatureBackend, StandaloneHead
from draftproof.backends.heads.feature_net import FeatureConfig, FeatureNet, save_net
from draftproof.backends.hf.backend import HFBackend
from draftproof.training.head_artefact import make_head, make_verifier_head
from draftproof.training.head_options import HeadJob, Material
from draftproof.training.loop import TrainingPlan
from draftproof.tree import TokenTree
from support.helpers import embedded_model

STORY = [1, 403, 407, 261, 378]


def random_net():
    config = FeatureConfig("embedded:target", 64, 512, 8, 4, 32, 512)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return FeatureNet(config).requires_grad_(requires_grad=False).eval()


@pytest.fixture
def target():
    return HFBackend(embedded_model("target"), name="embedded:target")


def test_a_followed_head_reads_known_tokens_as_if_it_had_drafted_them(target):
    """Known tokens after a prompt give the same states as a draft of these tokens, read one by one or at once."""
    drawn = [12, 300, 7, 45]
    head = FeatureBackend(target, random_net())
    owner = target.open()
    target.forward([Feed(owner, STORY[:-1])])
    session = head.follow(owner)
    run = [head.forward([Feed(session, STORY)], hidden=True)[0]]
    run += [head.forward([Feed(session, [token])], hidden=True)[0] for token in drawn]
    alone = StandaloneHead(target, random_net())
    feeds = [
        Feed(alone.open(), STORY, TokenTree.chain(torch.tensor(drawn))),
        Feed(alone.open(), STORY[:2]),
        Feed(alone.open(), STORY[:1], TokenTree.chain(torch.tensor(drawn[:2]))),
    ]
    outputs = alone.forward(feeds, hidden=True)
    assert [len(output.logits) for output in outputs] == [5, 1, 3]
    assert torch.allclose(outputs[0].logits, torch.cat([output.logits for output in run]), atol=1e-4)
    assert torch.allclose(outputs[0].hidden, torch.cat([output.hidden for output in run]), atol=1e-4)
    known = FeatureBackend(target, random_net())
    target.forward([Feed(owner, [STORY[-1], *drawn])])
    other = known.forward([Feed(known.follow(owner), [*STORY, *drawn])])[0].logits[-1]
    assert not torch.allclose(outputs[0].logits[-1], other, atol=1e-3), "with the target's states the draft differs"


def test_a_followed_head_reads_chains_only_and_frees_both_slots(target):
    alone = StandaloneHead(target, random_net())
    session = alone.open()
    with pytest.raises(ValueError, match="chains only"):
        alone.forward([Feed(session, STORY, TokenTree(torch.tensor([1, 2]), (-1, -1)))])
    alone.forward([Feed(session, STORY)])
    session.close()
    again = alone.open()
    assert (again.slot, again.owner.slot) == (0, 0)


@pytest.fixture
def place(tmp_path):
    """A feature head in its directory, and a file of prompts."""
    (tmp_path / "mine").mkdir()
    save_net(random_net(), tmp_path / "mine", torch.float32)
    names = ["Tim", "Lily", "Tom", "Anna", "Ben", "Sue"]
    lines = [
        f"Once upon a time {name} had a {thing} {n}." for n in range(8) for name in names for thing in ("cat", "car")
    ]
    (tmp_path / "stories.txt").write_text("\n".join(lines))
    return tmp_path


def job(place, out, prompts=None, **options):
    material = Material(
        "embedded:target",
        f"feature_head:{place / 'mine'}",
        (place / "stories.txt",),
        params=SamplingParams(max_tokens=6),
        starts=1,
        prompts=prompts,
        cache=place / "cache",
    )
    plan = TrainingPlan(steps=20, learning_rate=3e-3, log_every=10)
    known = {"plan": plan, "depth": 1, "trial_prompts": 2, "trial_tokens": 12, "batch": 64, **options}
    return HeadJob(material, out, **known)


def test_heads_for_a_feature_head_are_its_stoppers(place):
    summary = make_head(job(place, place / "mine" / "heads" / "acceptance", threshold=0.5))
    assert summary["kl"] >= 0
    assert summary["rows"] > 50
    config = json.loads((place / "mine" / "heads" / "acceptance" / "config.json").read_text())
    assert (config["draft"], config["hidden_size"]) == ("feature_head:mine", 64)
    provenance = (place / "mine" / "heads" / "acceptance" / "provenance.json").read_text()
    assert str(place) not in provenance
    for stopper in (f"acceptance:{place / 'mine' / 'heads' / 'acceptance'}:0.5", "acceptance"):
        engine = Engine.load("embedded:target", drafter=f"feature_head:{place / 'mine'}", stopper=stopper)
        (out,) = engine.generate("Once upon a time", SamplingParams(max_tokens=12, seed=1))
        assert len(out.token_ids) == 12
        assert out.stats.num_draft_tokens > 0
    with pytest.raises(UserError, match="stopper ratio needs the directory of a head"):
        Engine.load("embedded:target", drafter=f"feature_head:{place / 'mine'}", stopper="ratio")


@pytest.mark.slow
def test_a_verifier_for_a_feature_head(place):
    summary = make_verifier_head(job(place, place / "verifier", kind="verifier", depth=0, threshold=0.5, prompts=40))
    found = summary["sprinter"]
    assert 0 <= found["drift"]["position_tv"] <= found["drift"]["draft_tv"] <= 1
    assert found["lossless"]["block_efficiency"] >= 1
