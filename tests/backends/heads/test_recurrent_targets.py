"""Draft heads on targets with recurrent layers: states of accepted tokens stay, also if the tokens are read again."""

import functools

import pytest
import torch

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed, Session, unread
from draftproof.backends.cache.prefix_cache import PrefixCache
from draftproof.backends.heads.feature_head import StandaloneHead
from draftproof.backends.heads.published.eagle3 import eagle3_backend
from draftproof.backends.hf.snapshots import SnapshotBackend
from draftproof.backends.lean.snapshots import LeanSnapshotBackend
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.verifier_parts import make_verifier
from draftproof.tree import TokenTree
from support import published
from support.architectures.tiny import VOCAB, tiny_config, tiny_model
from support.feature_heads import drafted, net_for
from support.helpers import assert_output_distribution
from support.recurrent_models import model, take_refused_states

TYPES = (
    "lfm2",
    "qwen3_next",
    "falcon_h1",
    "mamba",
)  # convolution; delta rule; state space beside attention; scan without a state
LAYERS = (0, 1)
ACCEPTED = (2, 0, 4, 1, 3, 3, 4, 0)  # of four drafted tokens, in each round
PROMPTS = [[5, 9, 2, 7, 11, 3, 60, 41], [8, 8, 1], [70, 12, 33, 4, 4]]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@functools.cache
def target_of(name, kind=LeanSnapshotBackend):
    """A backend of its own, since it records states from now on; one of transformers' modules reads tokens again."""
    target = kind(model(name), name=name)
    target.record_states()
    target.record_states(LAYERS)
    return target


def text(seed=1):
    return torch.randint(4, VOCAB, (48,), generator=torch.Generator().manual_seed(seed)).tolist()


@functools.cache
def expected(name):
    """Hidden states of one pass over the text: the last ones, and those of the layers."""
    with torch.inference_mode():
        found = model(name)(input_ids=torch.tensor([text()]), output_hidden_states=True).hidden_states
    return found[-1][0], torch.cat([found[layer][0] for layer in LAYERS], -1)


def rounds(target, session, tokens):
    """Read a text in rounds of four drafts, some of which are wrong; the number of tokens committed before each."""
    known = 6
    for accepted in ACCEPTED:
        drafts = list(tokens[known : known + 4])
        if accepted < 4:
            drafts[accepted] = 4 + (drafts[accepted] - 3) % (VOCAB - 4)
        pending = unread(session, tokens[:known])
        yield known
        target.forward([Feed(session, pending, TokenTree.chain(torch.tensor(drafts)))])
        known += accepted + 1
    unread(session, tokens[:known])
    yield known


def far(found, other):
    return float((found - other).norm() / other.norm())


@pytest.mark.parametrize("kind", [LeanSnapshotBackend, SnapshotBackend])
@pytest.mark.parametrize("name", TYPES)
def test_states_of_accepted_tokens_are_those_of_one_pass_before_and_after_they_are_read_again(name, kind):
    target = target_of(name, kind)
    session, again = target.open(), 0
    last, layers = expected(name)
    for known in rounds(target, session, text()):
        if not session.records:
            continue
        assert session.recorded(()) == session.recorded(LAYERS) == known - 1
        again += session.length < known - 1
        slots = range(known - 1)
        assert far(session.states_at(slots), last[: known - 1]) < 1e-4
        assert far(session.states_at(slots, LAYERS), layers[: known - 1]) < 1e-4
        assert far(session.states_of(LAYERS), layers[: session.length]) < 1e-4
    holds = kind is LeanSnapshotBackend and target.lean is not None
    assert again == (0 if holds else 4), "2, 1 and twice 3 of four tokens"
    session.close()


@pytest.mark.parametrize("name", TYPES)
def test_a_head_reads_accepted_tokens_as_a_fresh_head_after_one_pass(name, tmp_path):
    target = target_of(name)
    head = eagle3_backend(str(published.eagle3(tmp_path / "head", target, layers=LAYERS)), target)
    session = target.open()
    mine = head.follow(session)
    for known in rounds(target, session, text()):
        if not session.records:
            continue
        mine.rewind()
        found = head.forward([Feed(mine, unread(mine, text()[1:known]))])[0].logits[-1]
        head.forward([Feed(mine, [50])])  # with a state of its own
        fresh = target.open()
        target.forward([Feed(fresh, text()[: known - 1])])
        other = head.forward([Feed(head.follow(fresh), text()[1:known])])[0].logits[-1]
        assert far(found, other) < 1e-3
        assert mine.certain == known - 1
        fresh.close()
    session.close()


@pytest.mark.parametrize("name", TYPES)
def test_states_of_refused_tokens_are_seen(name, monkeypatch):
    """Negative control: a session that takes what it read next for accepted."""
    target, tokens = target_of(name, SnapshotBackend), text()
    monkeypatch.setattr(Session, "expect", lambda *_: None)
    session = target.open()
    target.forward([Feed(session, tokens[:6], TokenTree.chain(torch.tensor(tokens[6:10])))])
    unread(session, tokens[:9])
    other = [*tokens[:6], *text(2)[6:]]
    with torch.inference_mode():
        states = model(name)(input_ids=torch.tensor([other[:8]]), output_hidden_states=True).hidden_states[-1][0]
    unread(session, other[:9])
    assert session.recorded(()) == 8
    assert far(session.states_at(range(8)), states) > 0.1
    session.close()


def test_states_go_with_the_first_other_token():
    target, tokens = target_of("lfm2", SnapshotBackend), text()
    session = target.open()
    target.forward([Feed(session, tokens[:6], TokenTree.chain(torch.tensor(tokens[6:10])))])
    assert unread(session, tokens[:9]) == tokens[6:9]
    assert (session.length, session.recorded(())) == (6, 8)
    assert unread(session, [*tokens[:7], 50, 51]) == [tokens[6], 50, 51]
    assert session.recorded(()) == 7
    target.forward([Feed(session, tokens[6:7])])
    assert (session.length, session.recorded(())) == (7, 7)
    session.close()


def test_a_session_that_a_later_request_takes_over_has_states_of_its_own_tokens_only():
    target, tokens, kept = target_of("lfm2", SnapshotBackend), text(), PrefixCache(shortest=4)
    session = target.open()
    target.forward([Feed(session, tokens[:30], TokenTree.chain(torch.tensor(tokens[30:34])))])
    unread(session, tokens[:33])
    assert session.recorded(()) == 32
    kept.keep(target, session, tokens[:33])
    other = [*tokens[:31], *text(2)[:5]]
    found = kept.open(target, other)
    assert found is session
    unread(found, other)
    assert found.recorded(()) == 30
    found.close()


ALIKE = pytest.param("dflash2", marks=pytest.mark.slow)  # dspark shows the same


@pytest.mark.grid(2)
@pytest.mark.parametrize("algorithm", ["eagle3", "peagle", "dflash", "dspark", ALIKE, "eagle", "medusa"])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_greedy_output_equals_transformers_token_for_token(name, algorithm, tmp_path):
    target = LeanSnapshotBackend(model(name), name=name)
    folder = published.WRITERS[algorithm](tmp_path / "head", target)
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        made = model(name).generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected.append(made[0, len(prompt) :].tolist())
    drafter = make_drafter(f"{algorithm}:{folder}", target=target, draft=None, stopper="fixed:3")
    outputs = Engine(target, drafter, make_verifier("block")).generate(PROMPTS, GREEDY)
    assert [list(output.token_ids) for output in outputs] == expected
    assert all(output.stats.num_draft_tokens > output.stats.num_drafts > 10 for output in outputs)


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", TYPES)
def test_a_draft_after_every_round_whatever_was_accepted(name):
    """Sampled at a high temperature, so that some tokens of most drafts are accepted."""
    target = LeanSnapshotBackend(model(name), name=name)
    engine = Engine(target, drafted(target, net_for(target)), make_verifier("token"))
    params = [SamplingParams(max_tokens=30, temperature=4.0, seed=seed, ignore_eos=True) for seed in range(3)]
    outputs = engine.generate(PROMPTS, params)
    for stats in (output.stats for output in outputs):
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        assert stats.num_drafts >= stats.num_target_calls - 2, "not in the first round, nor for the last token"
    alone = [engine.generate([prompt], each)[0] for prompt, each in zip(PROMPTS, params, strict=True)]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]


def enumerable(name):
    """A target of three tokens in float64."""
    made = tiny_model(tiny_config(name, vocab_size=3, pad_token_id=0, bos_token_id=1, eos_token_id=2)).double()
    return LeanSnapshotBackend(made, name="tiny")


def maker(target, algorithm, folder):
    """Makes drafters of two tokens from a random head."""
    if algorithm == "feature_head":
        net = net_for(target, own_output=True, scale=2.0)
        return lambda: drafted(target, net, length=2)
    head = published.WRITERS[algorithm](folder, target)
    return lambda: make_drafter(f"{algorithm}:{head}", target=target, draft=None, stopper="fixed:2")


EXACT = [
    ("lfm2", "eagle3", "token"),
    ("lfm2", "medusa", "block"),
    ("mamba", "eagle", "block"),
    ("lfm2", "dflash", "block"),
    ("lfm2", "dspark", "token"),
    ("lfm2", "dflash2", "token"),
    ("falcon_h1", "dflash2", "block"),
    ("falcon_h1", "peagle", "token"),
    ("falcon_h1", "feature_head", "block"),
]


@pytest.mark.grid(3)
@pytest.mark.parametrize(("name", "algorithm", "rule"), EXACT)
def test_exact_output_distribution(name, algorithm, rule, tmp_path, monkeypatch):
    """By enumeration, on models with three tokens; with states of refused tokens it fails."""
    target = enumerable(name)
    make = maker(target, algorithm, tmp_path / "head")
    assert_output_distribution(target, make, rule, length=3)
    take_refused_states(monkeypatch)
    with pytest.raises(AssertionError, match="the rules work on"):
        assert_output_distribution(target, make, rule, length=3, tolerance=1e-4)


def test_a_head_as_a_model_of_its_own_reads_chains():
    target = LeanSnapshotBackend(model("lfm2"), name="lfm2")
    head, tokens = StandaloneHead(target, net_for(target)), text()[:9]
    session = head.open()
    whole = head.forward([Feed(session, tokens[:6], TokenTree.chain(torch.tensor(tokens[6:])))])[0].logits
    assert whole.shape == (4, VOCAB)
    session.close()


def test_heads_that_draft_several_chains_are_refused_with_a_reason(tmp_path):
    target = LeanSnapshotBackend(model("lfm2"), name="lfm2")
    folder = published.eagle3(tmp_path / "head", target)
    with pytest.raises(UserError, match="cannot read"):
        Engine(target, make_drafter(f"eagle3:{folder}x3", target=target, draft=None, stopper="fixed:3"))
