"""Models with recurrent layers by the lean forward: transformers' logits, and the same bits however a chain is read."""

import copy
import functools
import itertools
from unittest import mock

import pytest
import torch

from draftproof.backends.base import Feed, rounding, unread
from draftproof.backends.cache.layout import Layout
from draftproof.backends.lean import inputs
from draftproof.backends.lean.snapshots import LeanSnapshotBackend
from draftproof.native.structures import Sequences
from draftproof.tree import TokenTree
from support.architectures.check import disturbed
from support.gguf_modules import module_model
from support.native_levels import needs_native
from support.recurrent_models import backend as recurrent

pytestmark = needs_native
IDS = [5, 9, 2, 7, 11, 3, 300, 41, 17, 8, 260, 77, 30, 31, 32]
READ = ("lfm2", "qwen35", "qwen35, tied", "falcon-h1", "falcon-h1, norm", "granitehybrid")
DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def model(name, dtype=torch.float32):
    return module_model(name).to(dtype)


@functools.cache
def backend(name, dtype=torch.float32):
    with mock.patch.object(
        inputs, "_SMALL", 1 << 20
    ):  # a matrix unit (AMX) takes larger weights; these are to be read here
        return LeanSnapshotBackend(model(name, dtype), name=name)


def chain(tokens):
    return TokenTree.chain(torch.tensor(tokens)) if tokens else None


def read(target, session, tokens, drafts=()):
    """Logits after the last token and after each draft."""
    return target.forward([Feed(session, tokens, chain(list(drafts)))])[0].logits


def off(found, expected):
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("name", READ)
def test_logits_are_those_of_transformers(name):
    with torch.inference_mode():
        expected = model(name)(torch.tensor([IDS])).logits[0]
    target = backend(name)
    assert off(read(target, target.open(), IDS[:1], IDS[1:]), expected) < 1e-5
    assert rounding(target) == ""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", READ)
def test_a_chain_has_the_same_bits_however_it_is_read(name, dtype):
    target = backend(name, dtype)
    whole = read(target, target.open(), IDS[:1], IDS[1:])
    session = target.open()
    assert torch.equal(torch.cat([read(target, session, [token]) for token in IDS]), whole), "one by one"
    sessions, cuts = [target.open() for _ in range(4)], (0, 1, 4, 9)
    for session, cut in zip(sessions[1:], cuts[1:], strict=True):
        read(target, session, IDS[:cut])
    feeds = [Feed(each, IDS[cut : cut + 1], chain(IDS[cut + 1 :])) for each, cut in zip(sessions, cuts, strict=True)]
    for cut, output in zip(cuts, target.forward(feeds), strict=True):
        assert torch.equal(output.logits, whole[cut:]), "beside others, of other lengths"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", READ)
def test_refused_drafts_leave_no_trace(name, dtype):
    target = backend(name, dtype)
    whole = read(target, target.open(), IDS[:1], IDS[1:])
    for accepted in range(4):
        session = target.open()
        read(target, session, IDS[:4], [*IDS[4 : 4 + accepted], 100, 101])
        left = unread(session, IDS[:12])
        assert left == IDS[4:12], "the state at the root is kept"
        assert torch.equal(read(target, session, left, IDS[12:]), whole[11:])


def test_a_state_after_refused_drafts_would_be_seen():
    """Negative control of the test above."""
    target = backend("lfm2")
    whole = read(target, target.open(), IDS[:1], IDS[1:])
    session = target.open()
    read(target, session, IDS[:4], [100, 101])
    session._marks = [session._marks[0]._replace(state=session._marks[-1].state)]
    assert not torch.equal(read(target, session, unread(session, IDS[:12]), IDS[12:]), whole[11:])


@pytest.mark.parametrize("name", ["lfm2", "falcon-h1, norm", "granitehybrid"])  # whose keys are in one order
def test_sessions_may_go_on_by_transformers_own_modules_and_back(name, monkeypatch):
    target = backend(name)
    whole = read(target, target.open(), IDS[:1], IDS[1:])
    session, lean = target.open(), target.lean
    parts = []
    for number, (start, stop) in enumerate(itertools.pairwise((0, 3, 4, 8, 9, 15))):
        monkeypatch.setattr(target, "lean", lean if number % 2 else None)
        monkeypatch.setattr(target, "packs", bool(number % 2))
        parts.append(read(target, session, unread(session, IDS[: start + 1]), IDS[start + 1 : stop]))
    assert 0 < off(torch.cat(parts), whole) < 1e-5


def test_hidden_states_between_layers_are_those_of_transformers():
    target = LeanSnapshotBackend(copy.deepcopy(model("falcon-h1")), name="recorded", check=False)
    target.record_states((0, 2, 4))
    target.record_states()
    session = target.open()
    found = target.forward([Feed(session, IDS)], hidden=True)[0].hidden
    with torch.inference_mode():
        expected = model("falcon-h1")(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(found, expected[-1][0, -1:], rtol=1e-4, atol=1e-4)
    between = torch.cat([expected[0][0], expected[2][0]], -1)
    torch.testing.assert_close(session.states_of((0, 2, 4))[:, : between.shape[-1]], between, rtol=1e-4, atol=1e-4)


def test_new_weights_are_read():
    own = copy.deepcopy(model("granitehybrid"))
    target, other = LeanSnapshotBackend(own, name="changed", check=False), disturbed(model("granitehybrid"))
    with torch.inference_mode():
        expected = other(torch.tensor([IDS])).logits[0]
    assert off(read(target, target.open(), IDS[:1], IDS[1:]), expected) > 1e-3
    made = target.with_weights(other)
    assert off(read(made, made.open(), IDS[:1], IDS[1:]), expected) < 1e-5


def test_what_is_not_known_is_read_by_transformers_own_modules_and_the_reason_is_said():
    assert "has parts that are not known together here" in rounding(recurrent("qwen3_next")), "experts"
    assert "MambaForCausalLM has parts that are not known together here" in rounding(recurrent("mamba"))
    assert "its layers have parts that are not known together here" in rounding(recurrent("jamba"))
    hooked = copy.deepcopy(model("lfm2"))
    hooked.model.layers[1].register_forward_hook(lambda *_: None)
    assert "hooks are attached to model.layers.1" in rounding(LeanSnapshotBackend(hooked, name="x", check=False))
    wide = LeanSnapshotBackend(copy.deepcopy(model("lfm2")).double(), name="x", check=False)
    assert wide.lean is None
    assert "native" in rounding(wide)


def test_without_native_operations_transformers_own_modules_read(monkeypatch):
    monkeypatch.setenv("DRAFTPROOF_NATIVE", "0")
    target = LeanSnapshotBackend(copy.deepcopy(model("lfm2")), name="x", check=False)
    assert target.lean is None
    with torch.inference_mode():
        expected = model("lfm2")(torch.tensor([IDS])).logits[0]
    assert off(read(target, target.open(), IDS[:1], IDS[1:]), expected) < 1e-5


def test_sequences_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="spans of tokens"):
        Sequences([(0, 2, 2)], [0] * 6)
    found = Sequences([(0, 2, 1), (2, 3, 0)], [0] * 12)
    found.require_fitting(5, 1)
    for tokens, layers in ((4, 1), (5, 2)):
        with pytest.raises(ValueError, match="sequences of 5 tokens"):
            found.require_fitting(tokens, layers)


def test_layers_with_states_are_not_run_without_sequences():
    target = backend("lfm2")
    session = target.open()
    read(target, session, IDS[:1])
    layout = Layout([Feed(session, [7])], target.device, packed=True)
    with pytest.raises(ValueError, match="recurrent states, and no sequences"):
        target.lean(layout, target.cache, hidden=False)
