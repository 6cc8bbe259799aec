"""Few tokens of a pass go through the recurrent form of a delta rule, with the numbers of the form in chunks."""

import functools
import inspect

import pytest
import torch

from draftproof import UserError
from draftproof.backends.base import Feed
from draftproof.backends.hf.snapshots import SnapshotBackend
from draftproof.backends.recurrent import few_tokens
from draftproof.backends.recurrent.few_tokens import FEW
from draftproof.backends.recurrent.mixers import mixers_of
from draftproof.tree import TokenTree
from support.architectures.tiny import VOCAB
from support.recurrent_models import backend, model

TYPES = ("qwen3_next", "qwen3_5_text", "kimi_linear", "olmo_hybrid")
LONG = FEW + 1


@pytest.fixture(params=TYPES)
def name(request):
    return request.param


def replaced(name):
    """The functions that stand for both forms of a rule, by their names, and the names among which they are found."""
    names = inspect.unwrap(type(mixers_of(model(name))[0]).forward).__globals__
    return names, {key: made for key, made in names.items() if isinstance(made, few_tokens._Either)}


def with_forms(name, monkeypatch, change):
    """Put others in place of both forms of the rule."""
    names, found = replaced(name)
    ((key, made),) = found.items()
    monkeypatch.setitem(names, key, few_tokens._Either(*change(made.chunked, made.recurrent)))


@pytest.fixture
def calls(name, monkeypatch):
    """The form, the number of rows and of tokens of each call of the layers, and whether it goes on from a state."""
    backend(name)  # loaded, and checked, before
    found = []

    def recorded(form, run):
        def rule(query, *args, **options):
            found.append((form, *query.shape[:2], options["initial_state"] is not None))
            return run(query, *args, **options)

        return rule

    with_forms(name, monkeypatch, lambda chunked, other: (recorded("chunked", chunked), recorded("recurrent", other)))
    return found


def tokens(count, seed):
    return torch.randint(4, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def passes(name):
    """Logits and hidden states of two rows after a long prompt and of a row that begins, in the same pass."""
    target = backend(name)
    first, second, fresh = (target.open() for _ in range(3))
    made = target.forward([Feed(first, tokens(LONG, 1)), Feed(second, tokens(LONG, 2))], hidden=True)
    drafts = [TokenTree.chain(torch.tensor(tokens(4, seed))) for seed in range(3)]
    made += target.forward(
        [
            Feed(first, tokens(2, 3), drafts[0]),
            Feed(second, tokens(2, 4), drafts[1]),
            Feed(fresh, tokens(FEW, 5), drafts[2]),
        ],
        hidden=True,
    )
    assert first.keep(LONG + 2, range(4)) == LONG + 6
    made += target.forward([Feed(first, tokens(LONG, 6))], hidden=True)
    for each in (first, second, fresh):
        each.close()
    return made


def test_short_pieces_are_recurrent_and_long_ones_in_chunks(name, calls):
    passes(name)
    assert set(calls) == {
        ("chunked", 2, LONG, False),
        ("recurrent", 2, 2, True),
        ("recurrent", 2, 4, True),
        ("recurrent", 1, FEW, False),
        ("recurrent", 1, 4, True),
        ("chunked", 1, LONG, True),
    }


def test_the_numbers_are_those_of_the_form_in_chunks(name, calls, monkeypatch):
    short = passes(name)
    calls.clear()
    monkeypatch.setattr(few_tokens, "FEW", 0)
    chunked = passes(name)
    assert {form for form, *_ in calls} == {"chunked"}
    for one, other in zip(short, chunked, strict=True):
        torch.testing.assert_close(one.logits, other.logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one.hidden, other.hidden, rtol=1e-5, atol=1e-5)


def test_passes_of_others_are_as_they_were(name, calls):
    with torch.inference_mode():
        model(name)(input_ids=torch.tensor([tokens(4, 1)]))
    assert set(calls) == {("chunked", 1, 4, False)}


def test_a_recurrent_form_that_forgets_the_state_is_refused(name, monkeypatch):
    backend(name)

    def forgetful(run, *args, **options):
        return run(*args, **{**options, "initial_state": None})

    with_forms(name, monkeypatch, lambda chunked, other: (chunked, functools.partial(forgetful, other)))
    with pytest.raises(UserError, match="does not reproduce its own logits"):
        SnapshotBackend(model(name), name="forgetful")


def test_layers_without_two_forms_are_left_as_they_are():
    assert backend("lfm2").kind == "snapshot"
    assert not replaced("lfm2")[1]
