"""Stoppers: when they stop, what they learn, the files of their heads, and late decisions that change no draft."""

import json
import math

import pytest
import torch

from draftproof import Engine, SamplingParams, UserError
from draftproof.draft import DraftStep
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.sampled_tree import SampledTreeDrafter
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.stopper_parts import make_stopper
from draftproof.engine.verifier_parts import make_verifier
from draftproof.heads import Head, HeadConfig, load_head, save_head
from draftproof.stoppers.base import Stopper
from draftproof.stoppers.fixed import FixedLength
from draftproof.stoppers.history import Oracle, Schedule
from draftproof.stoppers.probability import Confidence, Entropy
from draftproof.stoppers.trained import Acceptance, Approximate, Ratio
from support.helpers import backend, engine


def head(kind="acceptance", width=4, **options):
    config = HeadConfig(kind, width, draft="small", target="large", **options)
    made = Head(config)
    with torch.no_grad():
        source = torch.Generator().manual_seed(1)
        for weights in made.parameters():
            weights.copy_(0.5 * torch.randn(weights.shape, generator=source))
    return made.eval()


def step(rows, tokens=None, hidden=None):
    probs = torch.tensor(rows)
    return DraftStep(torch.tensor(tokens or [0] * len(rows)), probs, hidden, probs.log())


EVERY = [
    FixedLength(3),
    Confidence(),
    Entropy(),
    Schedule(),
    Oracle({}),
    Acceptance(head()),
    Ratio(head("log_ratio")),
    Approximate(head("verifier")),
]


@pytest.mark.parametrize("stopper", EVERY, ids=lambda stopper: stopper.name)
def test_every_stopper_keeps_the_contract(stopper):
    assert isinstance(stopper, Stopper)
    assert 0 <= stopper.length(7) <= stopper.limit
    stopper.release(7)  # unknown rows are fine


def test_confidence_looks_at_the_newest_row():
    stopper = Confidence(0.5)
    assert stopper.signal(step([[0.7, 0.3], [0.45, 0.55]])).tolist() == pytest.approx([0.7, 0.55])
    assert not stopper.stop_after([0.3, 0.7], 0)
    assert stopper.stop_after([0.7, 0.3], 0)


def test_entropy_bound_and_threshold():
    stopper = Entropy(0.5, gamma=0.2)
    certain, uniform = stopper.signal(step([[1.0, 0.0], [0.5, 0.5]])).tolist()
    assert certain == 1
    assert uniform == pytest.approx(1 - math.sqrt(0.2 * math.log(2)))
    assert stopper.stop_after([0.49], 1)
    for _ in range(20):
        stopper.observe(1, 4, 4)  # all accepted: the threshold falls
    assert not stopper.stop_after([0.49], 1)
    assert stopper.stop_after([0.49], 2), "every row has its own threshold"
    stopper.release(1)
    assert stopper.stop_after([0.49], 1)


@pytest.mark.grid(2)
@pytest.mark.parametrize("make", [lambda: Confidence(0.6, 9), lambda: Entropy(0.4, 9)])
@pytest.mark.parametrize("drafter", ["model", "chains:2"])
def test_probabilities_stop_a_greedy_draft(make, drafter):
    """At temperature 0 q is a point mass; the stopper uses the model's own distribution."""
    built = engine(verifier="trie_block")
    built.drafter = make_drafter(drafter, target=built.target, draft=backend("draft"), stopper="fixed:9")
    built.drafter.stopper = make()
    (out,) = built.generate("Once upon a time", SamplingParams(max_tokens=40, temperature=0))
    assert 1 < out.stats.num_draft_tokens / out.stats.num_drafts < 8


def test_schedule_follows_a_row():
    stopper = Schedule(5, 8)
    assert stopper.length(0) == 5
    stopper.observe(0, 5, 5)
    assert (stopper.length(0), stopper.length(1)) == (7, 5)
    stopper.observe(0, 7, 7)
    assert stopper.length(0) == 8
    for _ in range(20):
        stopper.observe(0, 4, 1)
    assert stopper.length(0) == 1
    stopper.observe(1, 0, 0)
    assert stopper.length(1) == 5, "a round without a draft changes nothing"


def test_a_tree_that_was_accepted_to_its_depth_counts_as_accepted_completely():
    """Four chains of a draft that is the target: the accepted path is as deep as the tree, which has more nodes."""
    model = DraftModel(backend("target"), vocab_size=backend("target").vocab_size)
    stopper = Schedule(2)
    under_test = Engine(backend("target"), SampledTreeDrafter(model, stopper, chains=4), make_verifier("trie_block"))
    (request,) = under_test.add([5, 9, 2], SamplingParams(max_tokens=60, seed=1, ignore_eos=True))
    seen = []
    while len(seen) < 4:
        under_test.step()
        seen.append(stopper.length(request.id))
    assert seen == [4, 6, 8, 10]


def test_oracle_stops_before_each_disagreement():
    stopper = Oracle({3: [True, True, False, False, True]})
    assert stopper.length(3) == 2
    stopper.observe(3, 2, 2)  # two accepted tokens and the bonus token
    assert stopper.length(3) == 0
    stopper.observe(3, 0, 0)
    assert stopper.length(3) == 1


def test_oracle_on_a_recorded_greedy_run_discards_nothing():
    """SpecDec++, arXiv 2405.19715, Lemma 2.1, in the engine: one target call for each disagreement, nothing discarded.

    The last round needs a call of its own if it ends on an agreement.
    """
    greedy = SamplingParams(max_tokens=32, temperature=0)
    target = engine(draft=None).generate("Once upon a time", greedy)[0]
    made = engine(length=1)
    prompt = made.encode("Once upon a time")[1]
    rows = backend("draft").model(input_ids=torch.tensor([[*prompt, *target.token_ids]])).logits[0]
    best = rows.argmax(-1).tolist()
    agrees = [best[len(prompt) - 1 + i] == token for i, token in enumerate(target.token_ids)]
    made.drafter.stopper = Oracle({0: agrees})
    found = made.generate("Once upon a time", greedy)[0]
    assert found.token_ids == target.token_ids
    assert found.stats.discard_rate == 0
    ended_on_agreement = agrees[-1]
    assert found.stats.num_target_calls == agrees.count(False) + ended_on_agreement
    fixed = engine(length=4).generate("Once upon a time", greedy)[0]
    assert found.stats.num_target_calls < fixed.stats.num_target_calls
    assert fixed.stats.discard_rate > 0


def test_acceptance_multiplies_and_leaves_the_root_out():
    stopper = Acceptance(head(), 0.5)
    low = math.log(0.1)
    assert not stopper.stop_after([low], 0), "the first signal belongs to a committed token"
    assert not stopper.stop_after([low, math.log(0.8), math.log(0.7)], 0)  # 1 - 0.56
    assert stopper.stop_after([low, math.log(0.8), math.log(0.6)], 0)  # 1 - 0.48


def test_ratio_recovers_where_a_product_cannot():
    ratios = [0.0, -2.0, 1.9, 0.3]
    assert not Ratio(head("log_ratio"), 0.5).stop_after(ratios, 0)
    assert Ratio(head("log_ratio"), 0.5).stop_after([0.0, 1.9, -2.0], 0), "P is capped at 1 on the way"
    accepted = [min(0.0, value) for value in ratios]
    assert Acceptance(head(), 0.5).stop_after(accepted, 0)


def test_approximate_judges_the_newest_token_by_its_draw():
    stopper = Approximate(head("verifier", depth=0, reads_draw=True), 0.5)
    hidden = torch.zeros(2, 4)
    unlikely, likely = stopper.signal(step([[0.9, 0.1], [0.9, 0.1]], [1, 0], hidden)).tolist()
    assert unlikely != likely
    assert stopper.stop_after([0.9, 0.5], 0)
    assert not stopper.stop_after([0.1, 0.6], 0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Confidence(1.0), "expected 0 < threshold < 1"),
        (lambda: Schedule(0), "expected a first length of 1 to"),
        (lambda: FixedLength(65), "expected a draft length of 1 to 64, got 65"),
        (lambda: Acceptance(head("verifier")), "expected a head of kind acceptance"),
        (lambda: Approximate(head("verifier"), 1.5), "expected 0 < threshold < 1"),
        (lambda: make_stopper("oracle"), "recorded run"),
        (lambda: make_stopper("acceptance:/no/such/place:0.5"), "no head in '/no/such/place'"),
        (lambda: make_stopper("schedule:many"), "expected an integer"),
        (
            lambda: HeadConfig("nonsense", 4, "a", "b"),
            "expected one of acceptance, log_ratio, verifier, got 'nonsense'",
        ),
        (lambda: HeadConfig("acceptance", 4, "a", "b", reads_draw=True), "cannot also read its draw"),
    ],
)
def test_bad_arguments_say_what_is_legal(make, words):
    with pytest.raises(UserError, match=words.replace("(", r"\(")):
        make()


def test_a_head_for_another_hidden_size_is_refused_by_name():
    with pytest.raises(UserError, match=r"width 4 \(its head was trained on small\), but those of draft have 64"):
        ModelDrafter(DraftModel(backend("draft"), vocab_size=512), Acceptance(head()))


# --- heads and their files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"depth": 0}, {"shared_blocks": True}])
def test_a_head_is_the_same_after_saving_and_loading(tmp_path, options):
    made = head(**options)
    save_head(made, tmp_path)
    found = load_head(tmp_path)
    assert found.config == made.config
    x = torch.randn(3, 4)
    assert torch.equal(found(x), made(x))


def test_blocks_have_their_own_weights_unless_shared():
    count = lambda made: sum(weights.numel() for weights in made.parameters())  # noqa: E731
    assert count(head(depth=3)) == 3 * (4 * 4 + 4) + 5
    assert count(head(depth=3, shared_blocks=True)) == (4 * 4 + 4) + 5
    assert count(head(depth=0)) == 5


def test_broken_heads_are_refused(tmp_path):
    save_head(head(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, words in (
        ({"format": 2}, "not the config of a head"),
        ({"colour": "red"}, "not the config of a head"),
        ({"depth": 1}, "do not fit its config"),
        ({"kind": "guess"}, "kind of a head"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=words):
            load_head(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="expected the config of a head"):
        load_head(tmp_path)


# --- late decisions -------------------------------------------------------------------------------------------------


def wide_head(kind):
    made = head(kind, 64)
    with torch.no_grad():
        made.out.bias.fill_(0.5)
    return made


@pytest.mark.parametrize(
    "stopper",
    [lambda: Confidence(0.5, 9), lambda: Entropy(0.4, 9), lambda: Acceptance(wide_head("acceptance"), 0.6, 9)],
)
def test_a_drafter_that_asks_late_submits_the_same_draft(stopper):
    """On an accelerator several tokens are drawn before the stopper is asked: same draws, same cut, same output."""
    prompts = ["Once upon a time", "The dog", "One day, Lily and her mom went to the"]
    params = SamplingParams(max_tokens=24, seed=3)

    def run(stride):
        made = engine()
        made.drafter = ModelDrafter(made.drafter.model, stopper(), stride=stride)
        return made.generate(prompts, params)

    at_once, late = run(1), run(4)
    assert [out.token_ids for out in at_once] == [out.token_ids for out in late]
    assert [out.stats.num_draft_tokens for out in at_once] == [out.stats.num_draft_tokens for out in late]
    lengths = {out.stats.num_draft_tokens / out.stats.num_drafts for out in at_once}
    assert max(lengths) < 9, "the stopper stops"
