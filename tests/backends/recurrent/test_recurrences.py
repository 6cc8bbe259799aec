"""Recurrences inside layers: divided at the root while the layer reads on, and in another form for few tokens."""

import functools
import inspect
import logging
from unittest import mock

import pytest
import torch

from draftproof import UserError, native
from draftproof.backends.base import Feed
from draftproof.backends.hf.snapshots import SnapshotBackend
from draftproof.backends.recurrent import recurrences
from draftproof.backends.recurrent.convolutions import AFTER_STATE, ALL, Convolution
from draftproof.backends.recurrent.even import evenly
from draftproof.backends.recurrent.mixers import continuation, mixers_of
from draftproof.backends.recurrent.native_rule import NativeRule
from draftproof.backends.recurrent.native_scan import STEP, NativeScan, NativeStep
from draftproof.backends.recurrent.recurrences import FEW, Recurrence, StatelessScan
from draftproof.tree import TokenTree
from support.architectures.tiny import VOCAB
from support.native_levels import needs_native
from support.recurrent_models import by_modules as backend
from support.recurrent_models import model

DELTA_RULE = ("qwen3_next", "qwen3_5_text", "kimi_linear", "olmo_hybrid")
DIVISIBLE = (*DELTA_RULE, "lfm2", "falcon_h1", "bamba", "mamba2", "granitemoehybrid", "mamba", "jamba")
LONG = FEW + 1


@pytest.fixture(params=DELTA_RULE)
def name(request):
    return request.param


def replaced(name):
    """The functions that stand for both forms of a rule, by their names, and the names among which they are found."""
    names = inspect.unwrap(type(mixers_of(model(name))[0]).forward).__globals__
    return names, {key: made for key, made in names.items() if isinstance(made, Recurrence)}


def with_forms(name, monkeypatch, change, most=FEW):
    """Put others in place of both of transformers' forms of the rule, as where there is no C."""
    names, found = replaced(name)
    ((key, made),) = found.items()
    few = made.few.own if isinstance(made.few, NativeRule) else made.few
    monkeypatch.setitem(names, key, Recurrence(*change(made.many, few), most))


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
    with_forms(name, monkeypatch, lambda *forms: forms, most=0)
    chunked = passes(name)
    assert {form for form, *_ in calls} == {"chunked"}
    for one, other in zip(short, chunked, strict=True):
        torch.testing.assert_close(one.logits, other.logits, rtol=1e-4, atol=5e-5)
        torch.testing.assert_close(one.hidden, other.hidden, rtol=1e-4, atol=5e-5)


@needs_native
def test_the_numbers_are_those_of_c(name, monkeypatch):
    backend(name)
    found, rows = passes(name), []
    rule = native.operations_for(torch.zeros(1)).delta_rule

    def recorded(*given, **options):
        rows.append(given[0].shape[:2])
        return rule(*given, **options)

    monkeypatch.setattr(native.operations_for(torch.zeros(1)), "delta_rule", recorded)
    again = passes(name)
    assert {tuple(each) for each in rows} == {(2, LONG), (2, 2), (2, 4), (1, FEW), (1, 4), (1, LONG)}
    with_forms(name, monkeypatch, lambda *forms: forms)
    rows.clear()
    others = passes(name)
    assert not rows
    for one, same, other in zip(found, again, others, strict=True):
        assert torch.equal(one.logits, same.logits)
        torch.testing.assert_close(one.logits, other.logits, rtol=1e-4, atol=5e-5)


@needs_native
def test_c_stands_for_no_other_rule(name):
    backend(name)
    (made,) = replaced(name)[1].values()
    own = made.few.own

    def other(*args, **options):
        output, state = own(*args, **options)
        return output + 1e-3, state

    assert NativeRule.of(own) is not None
    assert NativeRule.of(other) is None
    assert NativeRule.of(lambda query: query) is None


@needs_native
def test_what_c_does_not_compute_is_left_to_transformers(name, monkeypatch):
    """Numbers of 64 bits, and gradients."""
    backend(name)
    (made,) = replaced(name)[1].values()
    rule = made.few
    monkeypatch.setattr(native.operations_for(torch.zeros(1)), "delta_rule", None)
    source = torch.Generator().manual_seed(3)
    inputs = [torch.randn(1, 2, 3, 8, generator=source) for _ in range(3)]
    channels = any(dims == 4 for dims, _ in rule.known)
    decays = [-torch.rand(1, 2, 3, *([8] if channels else []), generator=source), torch.rand(1, 2, 3, generator=source)]
    options = {"initial_state": None, "output_final_state": True}
    double = [each.double() for each in (*inputs, *decays)]
    for given in (double, [each.requires_grad_() for each in inputs] + decays):
        for one, other in zip(rule(*given, **options), rule.own(*given, **options), strict=True):
            assert torch.equal(one, other)


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


def test_layers_without_a_recurrence_are_left_as_they_are():
    assert backend("lfm2").kind == "snapshot"
    assert not replaced("lfm2")[1]


# --- state spaces and convolutions in few operations --------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("kind", ["falcon_h1", "granitemoehybrid", "bamba", "mamba2"])
def test_state_spaces_are_computed_natively(kind):
    backend(kind)
    names, found = replaced(kind)
    (made,) = found.values()
    assert isinstance(made.few, NativeScan)
    step = names[STEP].other
    assert isinstance(step, NativeStep)
    for form, own in ((NativeScan, made.few.own), (NativeStep, step.own)):
        assert form.of(own) is not None
        assert form.of(_slightly_off(own)) is None
        assert form.of(lambda x: x) is None


def _slightly_off(own):
    def other(*args, **options):
        made = own(*args, **options)
        return (made[0] + 1e-3, *made[1:]) if isinstance(made, tuple) else made + 1e-3

    return other


@needs_native
def test_what_state_spaces_in_c_do_not_compute_is_left_to_transformers(monkeypatch):
    backend("falcon_h1")
    (made,) = replaced("falcon_h1")[1].values()
    monkeypatch.setattr(native.operations_for(torch.zeros(1)), "delta_rule", None)
    source = torch.Generator().manual_seed(3)
    x, dt, B, C = (
        torch.randn(shape, generator=source) for shape in ((1, 3, 4, 6), (1, 3, 4), (1, 3, 2, 8), (1, 3, 2, 8))
    )
    A = -torch.rand(4, generator=source)
    for given in ([each.double() for each in (x, dt, A, B, C)], [x.requires_grad_(), dt, A, B, C]):
        found, expected = (form(*given, chunk_size=4, dt_softplus=True) for form in (made.few, made.few.own))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_5_text", "falcon_h1", "mamba2"])
@pytest.mark.parametrize("name", [ALL, AFTER_STATE])
def test_convolutions_are_sums_in_one_order(name, kind):
    backend(kind)
    made = replaced(kind)[0][name].other
    assert isinstance(made, Convolution)
    assert Convolution.of(name, made.own) is not None
    assert Convolution.of(name, _slightly_off(made.own)) is None
    source = torch.Generator().manual_seed(3)
    x, weight = torch.randn(2, 37, 9, generator=source), torch.randn(37, 4, generator=source)
    with torch.inference_mode():
        whole = Convolution(made.own, states=False)(x, weight, None, "silu")
        state, parts = torch.zeros(2, 37, 4), []
        for start, stop in ((0, 1), (1, 6), (6, 9)):
            parts.append(Convolution(made.own, states=True)(x[:, :, start:stop], state, weight, None, "silu"))
        before = () if name == ALL else (torch.zeros(2, 37, 4).double(),)
        double = made(x.double(), *before, weight.double(), None, "silu")
    assert torch.equal(torch.cat(parts, -1), whole)
    assert torch.equal(state, x[:, :, -4:])
    assert 0 < float((double - whole).abs().max()) < 1e-5, "numbers of 64 bits are left to transformers"


def test_functions_of_few_numbers_are_those_of_many():
    x = torch.randn(40, 12, generator=torch.Generator().manual_seed(3))
    for function in (torch.sigmoid, torch.nn.functional.softplus):
        whole = evenly(x, function)
        assert torch.equal(torch.cat([evenly(row, function) for row in x.split(1)]), whole)
        torch.testing.assert_close(whole, function(x))


# --- divided at the root ------------------------------------------------------------------------------------------


def states(session):
    """All states at the end of a session, by layer."""
    return {key: tensor[session.state.row] for key, tensor in session.state.tensors.items()}


@pytest.mark.grid(13)
@pytest.mark.parametrize("drafted", [1, 2, 4, LONG])
@pytest.mark.parametrize("kind", DIVISIBLE)
def test_the_state_at_the_root_is_that_of_the_chain_alone(kind, drafted):
    """Rows of different lengths, one of which begins: after all drafts are refused, the root's states are right."""
    target = backend(kind)
    chains = [(tokens(5, 1), tokens(2, 2)), (tokens(7, 3), tokens(1, 4)), ([], tokens(2, 5))]
    sessions, alone = ([target.open() for _ in chains] for _ in range(2))
    for (before, chain), session, other in zip(chains, sessions, alone, strict=True):
        if before:
            target.forward([Feed(session, before)])
            target.forward([Feed(other, before)])
        target.forward([Feed(other, chain)])
    drafts = [TokenTree.chain(torch.tensor(tokens(drafted, 6 + row))) for row in range(3)]
    target.forward(
        [Feed(session, chain, tree) for (_, chain), session, tree in zip(chains, sessions, drafts, strict=True)]
    )
    for (before, chain), session, other in zip(chains, sessions, alone, strict=True):
        assert session.keep(len(before) + len(chain)) == len(before) + len(chain)
        found, expected = states(session), states(other)
        assert found.keys() == expected.keys()
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-4)
        session.close()
        other.close()


@pytest.mark.parametrize("kind", DIVISIBLE)
def test_a_layer_reads_a_pass_once(kind):
    """So its weights are read once: two calls of its first projection are the two groups of rows."""
    target = backend(kind)
    first, second = target.open(), target.open()
    mixer = mixers_of(model(kind))[0]
    seen = []
    inner = next(each for each in mixer.modules() if isinstance(each, torch.nn.Linear))
    handle = inner.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    drafts = TokenTree.chain(torch.tensor(tokens(4, 1)))
    target.forward([Feed(first, tokens(3, 2), drafts), Feed(second, tokens(5, 3), drafts)])
    handle.remove()
    assert sorted(seen) == [7, 9]
    first.close()
    second.close()


def test_a_scan_that_forgets_the_state_makes_layers_read_one_by_one(monkeypatch):
    """The control: as transformers' own scan of these layers does."""
    assert not backend("jamba").stepwise

    def forgetful(scan, *args, **options):
        return scan.own(*args, **options)

    monkeypatch.setattr(StatelessScan, "__call__", forgetful)
    assert continuation(model("jamba"), mixers_of(model("jamba"))).stepwise


@pytest.mark.parametrize("kind", ["qwen3_5_text", "falcon_h1"])
def test_a_wrong_state_at_the_root_makes_a_layer_read_in_pieces(kind, monkeypatch):
    """The control: a recurrence whose state at the root is that at the end is noticed before it is used."""
    assert backend(kind)._goes_on.divisible
    found = replaced(kind)[1]
    call = Recurrence.__call__

    def late(rule, *args, **options):
        output, state = call(rule, *args, **options)
        view = recurrences._PASS.get()
        if view is not None and view.divide is not None:
            view.state_at_root = state
        return output, state

    monkeypatch.setattr(Recurrence, "__call__", late)
    mixers = mixers_of(model(kind))
    assert found
    goes_on = continuation(model(kind), mixers)
    assert goes_on.several
    assert goes_on.single
    assert not goes_on.divisible


def test_a_recurrence_whose_state_has_no_name_is_not_divided(monkeypatch):
    """It is read in pieces then, and no error ends the loading."""
    backend("qwen3_5_text")
    monkeypatch.setattr(recurrences, "_STATES", ("another",))
    goes_on = continuation(model("qwen3_5_text"), mixers_of(model("qwen3_5_text")))
    assert not goes_on.stepwise
    assert not goes_on.divisible


@pytest.mark.parametrize("kind", ["nemotron_h", "zamba"])
def test_layers_that_read_one_by_one_are_not_divided(kind):
    assert backend(kind).stepwise
    assert not backend(kind)._goes_on.divisible


def test_packages_for_gpus_are_not_recommended(caplog):
    caplog.set_level(logging.WARNING, "transformers.integrations.hub_kernels")
    logger, seen = logging.getLogger("transformers.integrations.hub_kernels"), []
    text = "`causal_conv1d_fn` is falling back to its reference PyTorch implementation because it is not installed."
    listener = logging.Handler()
    listener.emit = lambda record: seen.append(record.getMessage())
    with mock.patch.object(logger, "filters", []), mock.patch.object(logger, "handlers", [listener]):
        logger.warning(text)
        assert seen == [text], "as transformers says it"
        mixers_of(model("lfm2"))
        logger.warning(text)
        logger.warning("another")
    assert seen == [text, "another"]
