"""What CUDA adds to the CPU's path, on a pretended device: tensors in their places, few waits, passes from graphs."""

import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from draftproof import Engine, SamplingParams, native
from draftproof.backends.base import Feed
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.hf.probe import Probe
from draftproof.backends.lean import graph_backend
from draftproof.backends.lean.backend import LeanBackend
from draftproof.backends.lean.graph_backend import WIDEST, GraphBackend
from draftproof.backends.loading import by_name as loading
from draftproof.errors import RequestError
from draftproof.profiling import forward as forward_profile
from draftproof.rng import CounterRng, SplitRng
from draftproof.sampling import LogitsCheck
from draftproof.stoppers.base import AcceptanceRates
from draftproof.theory.cost import RoundCosts
from draftproof.tree import TokenTree
from support.helpers import CONFIGS, random_model
from support.lean_models import NATIVE, VARIANTS
from support.pretend_cuda import COUNTS, OnDevice, place, pretended

IDS = [[3, 4, 5], [7], [10, 11, 12, 13, 14, 3, 4, 5, 9, 3, 4]]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=6)
EVERYTHING = SamplingParams(
    top_k=20,
    min_p=0.02,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias={5: 2.0},
    bad_words=["dog"],
    min_tokens=3,
    logprobs=2,
    seed=9,
    max_tokens=5,
    n=2,
)


@pytest.fixture
def device(monkeypatch, tmp_path):
    monkeypatch.setenv("DRAFTPROOF_HOME", str(tmp_path))
    monkeypatch.setenv("DRAFTPROOF_NATIVE", "0")  # the CPU's other path, whose float32 sums are in another order
    with pretended(monkeypatch) as counts:
        yield counts


@pytest.fixture
def unchecked(device, monkeypatch):
    """The device, and models that are not checked when they are loaded, which tests of places and families see."""
    monkeypatch.setattr(Probe, "check", lambda *_, **__: None)
    return device


def load(where, **options):
    return Engine.load("embedded:target", device=where, dtype="float32", **options)


def written(engine, *params):
    return [[output.token_ids for output in engine.generate(IDS, each)] for each in params]


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("drafter", "verifier"),
    [
        ("none", "block"),
        ("ngram:4", "block"),
        pytest.param("suffix", "token", marks=pytest.mark.slow),
        ("model", "block"),
        pytest.param("model", "greedy_block", marks=pytest.mark.slow),
        pytest.param("model", "gumbel", marks=pytest.mark.slow),
        pytest.param("early_exit:2", "token", marks=pytest.mark.slow),
        ("chains:2", "trie_block"),
        pytest.param("chains:2", "spectr", marks=pytest.mark.slow),
        pytest.param("tree:2x1", "multi_round", marks=pytest.mark.slow),
        ("early_exit:2x2", "traversal"),
    ],
)
def test_every_tensor_is_in_its_place(drafter, verifier, device):
    kind = drafter.partition(":")[0]
    options = {"drafter": drafter, "verifier": verifier, "backend": "lean"}
    options |= {"draft": "embedded:draft"} if kind in ("model", "chains", "tree") else {}
    options |= {} if kind in ("none", "ngram", "suffix") else {"stopper": "fixed:3"}
    expected = written(load("cpu", **options), GREEDY, DRAWN, EVERYTHING)
    engine = load("cuda", **options)
    assert isinstance(engine.target.lean.head.weight, OnDevice)
    assert written(engine, GREEDY, DRAWN, EVERYTHING) == expected
    assert device.launches["linear"]


@pytest.mark.grid(2)
@pytest.mark.parametrize("stopper", ["auto", "confidence:0.4", "entropy", "schedule", "acceptance", "approximate"])
def test_stoppers_read_the_device(stopper, unchecked, monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    options = {"draft": "embedded:draft", "stopper": stopper, "backend": "hf"}
    assert written(load("cuda", **options), GREEDY) == written(load("cpu", **options), GREEDY)
    assert not waited  # figures are given to tests: nothing is measured


@pytest.mark.grid(4)
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gpt2", *NATIVE])
def test_families(family, device):
    config, make = CONFIGS.get(family) or VARIANTS[family], HFBackend if family == "gpt2" else LeanBackend
    here, there = make(random_model(config())), make(place(random_model(config())))
    found, expected = written(Engine(there), GREEDY), written(Engine(here), GREEDY)
    assert found == expected


def waits_of(rounds, engine, prompts):
    """Waits of each of some rounds, after two others."""
    for ids in prompts:
        engine.add(ids, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    engine.step()
    engine.step()
    COUNTS.clear()
    for _ in range(rounds):
        engine.step()
    return sum(COUNTS.waits.values()) / rounds


@pytest.mark.parametrize("prompts", [IDS[:1], IDS])
def test_a_plain_round_waits_for_its_tokens_only(prompts, unchecked):
    # the rule's copy of the tokens, and after it the look at the logits
    assert waits_of(4, load("cuda", backend="lean"), prompts) == 2


def test_drafting_waits_once_whatever_its_length(unchecked):
    found = [
        waits_of(4, load("cuda", draft="embedded:draft", stopper=f"fixed:{length}", backend="lean"), IDS[:1])
        for length in (2, 6)
    ]
    assert found[0] == found[1] <= 5  # the draft's logits, the rule, the target's logits, tokens of both sessions


def test_drafting_ends_with_a_wait(unchecked):
    """So the host's clock shows what drafting takes, and costs of rounds can be learned from it."""
    engine = load("cuda", draft="embedded:draft", stopper="fixed:3", backend="lean")
    checks, propose, seen = engine.drafter.model.checks, engine.drafter.propose, []
    finish = checks.finish

    def finished():
        before = sum(unchecked.waits.values())
        finish()
        seen.append((sum(unchecked.waits.values()) - before, unchecked.launches["linear"]))

    def proposed(*args):
        drafts = propose(*args)
        assert seen[-1] == (1, unchecked.launches["linear"]), "no pass of the draft model came after the wait"
        return drafts

    checks.finish, engine.drafter.propose = finished, proposed
    written(engine, GREEDY)
    assert seen


# --- the drafter auto -------------------------------------------------------------------------------------------------


AGAIN = [[3, 4] * 16, [20, 40, 9]]
MIXED = [
    SamplingParams(logit_bias={3: 50.0, 4: 50.0}, seed=5, max_tokens=16),
    SamplingParams(temperature=0.7, max_tokens=12),
]


def mixing(where, rule, *, masses=True):
    """An engine whose second request is drafted for by a model while drafts of the first are looked up; their kinds."""
    engine = load(where, draft="embedded:draft", verifier=rule, backend="lean")
    drafter, kinds = engine.drafter, Counter()
    drafter._masses = masses
    drafter.sources = drafter.sources[:1]
    drafter.sources[0].stopper.costs = RoundCosts(1.0, 0.01)
    drafter.lookup_rates.assumed = {kind: AcceptanceRates(0.95, 0.95) for kind in drafter.lookup_rates.assumed}
    propose = drafter.propose

    def proposed(requests, rng):
        drafts = propose(requests, rng)
        choice = drafter._choice
        kinds[choice.source is not None, len(choice.lookups)] += 1
        assert not choice.lookups or len({draft.tree.tokens.device for draft in drafts}) == 1
        return drafts

    drafter.propose = proposed
    return engine, kinds


@pytest.mark.grid(2)
@pytest.mark.parametrize(("rule", "masses"), [(None, True), ("block", False), ("gumbel", True), ("spectr", True)])
def test_looked_up_drafts_beside_drawn_ones(rule, masses, unchecked):
    texts = []
    for where in ("cpu", "cuda"):
        engine, kinds = mixing(where, rule, masses=masses)
        requests = [engine.add(ids, params)[0] for ids, params in zip(AGAIN, MIXED, strict=True)]
        assert len({request.rule.name for request in requests}) == (1 if rule else 2), (
            "without a name, those with a seed have their own"
        )
        for request in requests:
            request.seed = 5
        while engine.busy:
            engine.step()
        assert not any(request.error for request in requests)
        assert kinds[True, 1], kinds
        texts.append([request.tokens for request in requests])
    assert texts[0] == texts[1]


def test_rows_that_draw_in_several_ways_wait_for_nothing(device):
    weights, found = torch.rand(3, 7, generator=torch.Generator().manual_seed(1)), []
    for given in (weights, OnDevice(weights)):
        device.clear()
        rng = SplitRng([([0, 2], CounterRng([1, 2])), ([1], CounterRng([3]))])
        found.append([rng.categorical(given), rng.bernoulli(given)])
        assert not device.waits
    for here, there in zip(*found, strict=True):
        assert torch.equal(here, there.held)


# --- illegal logits ---------------------------------------------------------------------------------------------------


@pytest.mark.grid(1)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_request_fails_alone(bad, unchecked):
    engine = load("cuda", draft="embedded:draft", stopper="fixed:3", backend="lean")
    expected = written(engine, DRAWN)[0]
    for backend in (engine.target, engine.drafter.model.backend):
        plain = backend.forward

        def broken(feeds, *, hidden=False, plain=plain):
            outputs = plain(feeds, hidden=hidden)
            for feed, output in zip(feeds, outputs, strict=True):
                if feed.session.length > 5 and feed.session.tokens[0] == IDS[2][0]:
                    output.logits[-1, 3] = bad
            return outputs

        backend.forward = broken
        with pytest.raises(RequestError, match=r"the logits of the .* hold (NaN|.inf)") as error:
            engine.generate(IDS, DRAWN)
        backend.forward = plain
        assert [output and output.token_ids for output in error.value.outputs] == [*expected[:2], None]
    assert written(engine, DRAWN)[0] == expected  # nothing is left of the failed rounds


def test_a_check_names_the_first_bad_request(device):
    check, rows = LogitsCheck(), OnDevice(torch.zeros(2, 5))
    check.add(4, rows, "x")
    check.finish()
    check.add(4, rows, "x")
    check.add(7, rows - torch.inf, "x")
    with pytest.raises(RequestError, match="request 7 failed: the logits of x hold no finite value"):
        check.finish()
    check.finish()  # nothing is left
    check.add(7, rows / 0, "x")
    check.clear()
    check.finish()


# --- graphs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(device, monkeypatch):
    """Recordings that are run again; a recording may not wait for the device, and neither may a replay."""
    made = []

    def record(run, pool):
        device.clear()
        outputs = tuple(each.clone() for each in run())
        assert not device.waits
        assert not device.sends
        for each in outputs:
            each.fill_(torch.nan)

        def replay():
            for mine, each in zip(outputs, run(), strict=True):
                mine.copy_(each)

        made.append(outputs)
        return outputs, replay

    monkeypatch.setattr(graph_backend, "record", record)
    monkeypatch.setattr(graph_backend, "new_pool", object)
    return made


TREE = TokenTree(torch.tensor([7, 3, 11, 2]), (-1, -1, 0, 1))
LONG = [(5 * place) % 97 for place in range(WIDEST + 20)]
READS = [
    [(0, LONG, None), (1, [3, 1, 4], None), (2, [8], None)],
    [(0, [9], None)],
    [(0, [4], TREE)],
    [(1, [1, 2, 3], None), (2, [6], None)],
    [(0, [9], None), (1, [7], None), (2, [4], None)],
    [(0, [9, 8], TREE), (1, [7], TREE), (2, [4], None)],
    [(0, [9], None), (2, [4], None)],  # no neighbours in the cache
    *[[(0, [token], None)] for token in range(6)],
    [(0, [8], TREE)],
    [(0, [3], None), (1, [2], None), (2, [1], None)],
]


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("family", "part"),
    [("llama", "all"), ("mistral", "all"), ("qwen3", "all"), ("llama", "first layers"), ("qwen3", "states of layers")],
)
def test_graphs_give_the_lean_logits(family, part, recorded, monkeypatch):
    monkeypatch.setattr(graph_backend, "_BUCKET", 8)
    made = [kind(place(random_model(CONFIGS[family]()))) for kind in (GraphBackend, LeanBackend)]
    if part == "first layers":
        made = [backend.first_layers(1) for backend in made]
    elif part == "states of layers":
        for backend in made:
            backend.record_states((0, 1))
    sessions = [[backend.open() for _ in range(3)] for backend in made]
    for read in READS:
        outputs = [
            backend.forward([Feed(own[number], tokens, tree) for number, tokens, tree in read], hidden=True)
            for backend, own in zip(made, sessions, strict=True)
        ]
        for found, expected in zip(*outputs, strict=True):
            for name in ("logits", "hidden"):
                one, other = getattr(found, name).held, getattr(expected, name).held
                assert torch.allclose(one, other, atol=1e-4), read
        if part == "states of layers":
            for one, other in zip(*sessions, strict=True):
                assert len(one.states_of((0, 1))) == len(other.states_of((0, 1)))
                assert torch.allclose(one.states_of((0, 1)).held, other.states_of((0, 1)).held, atol=1e-4), read
        for session in [session for own in sessions for session in own]:
            session.keep(session.stem)
    assert recorded


def test_rows_that_are_not_neighbours_are_recorded(recorded):
    made = [kind(place(random_model(CONFIGS["llama"]()))) for kind in (GraphBackend, LeanBackend)]
    sessions = [[backend.open() for _ in range(4)] for backend in made]
    for order in ((0, 1, 2, 3), (0, 2, 3), (3, 0, 2), (2, 0, 3)):
        outputs = [
            backend.forward([Feed(own[number], [number + 3, 4]) for number in order])
            for backend, own in zip(made, sessions, strict=True)
        ]
        for found, expected in zip(*outputs, strict=True):
            assert torch.allclose(found.logits.held, expected.logits.held, atol=1e-4), order
    count = len(recorded)
    made[0].forward([Feed(sessions[0][number], [5, 4]) for number in (3, 2, 0)])
    assert len(recorded) == count, "one recording serves all slots"


def test_texts_from_graphs(recorded):
    options = {"draft": "embedded:draft", "stopper": "fixed:3"}
    expected = written(load("cuda", **options, backend="lean"), GREEDY, DRAWN)
    engine = load("cuda", **options, backend="graphs")
    assert engine.target.kind == "graphs"
    for _ in range(2):  # what came once is recorded when it comes again
        assert written(engine, GREEDY, DRAWN) == expected
    count = len(recorded)
    assert written(engine, GREEDY, DRAWN) == expected
    assert len(recorded) == count  # every shape was there already


def test_auto_takes_graphs(recorded):
    assert load("cuda").target.kind == "graphs"
    assert load("cpu").target.kind == "lean"


def test_shapes_that_come_once_are_not_recorded(recorded):
    backend = GraphBackend(place(random_model(CONFIGS["llama"]())), check=False)
    count, session = len(recorded), backend.open()
    backend.forward([Feed(session, [5])])
    for width in (3, 4, 5, 6, 7):
        backend.forward([Feed(session, [5] * width)])
    assert len(recorded) == count
    backend.forward([Feed(session, [5] * 4)])
    assert len(recorded) == count + 1


def test_outputs_do_not_change_with_the_next_pass(recorded):
    backend = GraphBackend(place(random_model(CONFIGS["llama"]())))
    session = backend.open()
    backend.forward([Feed(session, [3, 4])])
    first = backend.forward([Feed(session, [5])])[0].logits
    before = first.held.clone()
    backend.forward([Feed(session, [6])])
    assert torch.equal(first.held, before)


def test_only_some_graphs_are_kept(recorded, monkeypatch):
    monkeypatch.setattr(graph_backend, "MOST", 2)
    backend = GraphBackend(place(random_model(CONFIGS["llama"]())), check=False)
    session = backend.open()
    for width in (1, 2, 3, 1, 3, 2, 1, 3):
        backend.forward([Feed(session, [5] * width)])
    (graphs_,) = backend._graphs.values()
    assert len(graphs_._kept) == 2


def test_what_cannot_be_recorded_is_launched(recorded, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graph_backend, "record", broken)
    engine = load("cuda", backend="graphs")
    assert written(engine, GREEDY, DRAWN) == written(load("cpu", backend="lean"), GREEDY, DRAWN)
    assert caplog.text.count("CUDA cannot record") == 1
    assert "operation not permitted" in caplog.text


# --- times ------------------------------------------------------------------------------------------------------------


def test_measured_passes_wait_for_the_device(device, monkeypatch):
    calls = []
    monkeypatch.setattr(forward_profile, "synchronize", calls.append)
    monkeypatch.setattr(forward_profile, "bandwidth", lambda **_: 1.0)
    monkeypatch.setattr(forward_profile, "run_facts", lambda _: {})
    for module in (loading, forward_profile):
        monkeypatch.setattr(module, "parse_device", lambda _: torch.device("cuda", 0))
    options = forward_profile.ForwardOptions(
        target="embedded:target", dtypes=["float32"], backends=["lean"], new_tokens=[1], context=5, repeats=2
    )
    forward_profile.measure_forward(options)
    assert calls == [torch.device("cuda", 0)] * (2 + forward_profile.WARM_UP)


def test_native_operations_are_for_the_cpu(device):
    assert native.operations_for(OnDevice(torch.zeros(2))) is None


def test_the_script_that_measures_runs(tmp_path, monkeypatch):
    where = Path(__file__).parents[2] / "scripts" / "measure_cuda.py"
    monkeypatch.syspath_prepend(where.parent)
    script = runpy.run_path(str(where))
    script["BACKENDS"].pop("graphs")  # of a device only
    command = [
        str(where),
        "--out",
        str(tmp_path / "out"),
        "--small",
        "--device",
        "cpu",
        "--tokens",
        "4",
        "--repeats",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setenv("DRAFTPROOF_TRITON", "0")
    script["main"]()
    page = (tmp_path / "out.md").read_text()
    assert "| transformers |" in page
    assert "| lean | 9 |" in page
    assert "4 of 4" in page
    assert "failed" not in page


# --- the pretended device itself --------------------------------------------------------------------------------------


def test_tensors_of_two_places_do_not_mix(device):
    here, there = torch.ones(3), OnDevice(torch.ones(3))
    assert there.device == torch.device("cuda", 0)
    with pytest.raises(RuntimeError, match="tensors of cuda:0 and of the cpu"):
        here + there
    assert (there + torch.tensor(1.0)).held.tolist() == [2, 2, 2]  # a number may come from the host
    device.clear()
    there.tolist()
    there.cpu()
    here.to("cuda")
    bool(there.any())
    assert sum(device.waits.values()) == 4
