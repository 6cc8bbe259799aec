"""Memory: figures that can be computed by hand, caches that grow by need, and nothing left of requests that ended."""

import gc
import json
import re
import threading
import types
import weakref
from collections import Counter, deque

import pytest
import torch
import transformers
from typer.testing import CliRunner

from draftproof import Engine, SamplingParams, UserError, native, peak
from draftproof.audit.compositions import PROMPT, compositions, toy_engine
from draftproof.backends.base import Session
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.backend import LeanBackend
from draftproof.backends.products.packed_linear import packs
from draftproof.cli import app
from draftproof.draft import Draft, Verdict
from draftproof.drafters.base import DraftRequest
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.suffix import SuffixDrafter, _ContextNode
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.request import Request
from draftproof.engine.verifier_parts import make_verifier
from draftproof.finish import Cutter
from draftproof.functional.greedy import GreedyState
from draftproof.profiling.memory import Workload, format_bytes, measure, slot_caches, weights
from draftproof.profiling.phases import Phases, TensorAllocations
from draftproof.profiling.tensor_memory import tensor_memory, walk
from draftproof.provenance import KEY
from draftproof.rng import CounterRoundRng
from draftproof.sampling import Transforms
from draftproof.stoppers.history import Schedule
from draftproof.testing import TableModel
from support.feature_heads import drafted, net_for
from support.helpers import CONFIGS, ROPE, embedded_model, engine, random_model

CPU = torch.device("cpu")
MEGABYTE = 1 << 20
PER_REQUEST = (Request, Session, DraftRequest, Draft, Verdict, Cutter, GreedyState, Transforms)
# What may outlast a request, each with a bound: rows of a table by context, lengths by rate and batch, the memory of
# finished requests (`capacity`).
BOUNDED = re.compile(r"(target|backend)\._rows|stopper\._best|drafter\._memory")
COMPOSED = [made for made in compositions() if not made.refused]
WITH_STOPPER = {(made.drafter, made.stopper): made for made in reversed(COMPOSED)}  # of each pair the first rule


# --- the instruments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["mark", "whole"])
def test_a_peak_that_is_over_is_seen(how, monkeypatch, tmp_path):
    if how == "mark" and not peak._reset_mark():
        pytest.skip("this system does not let a process reset its high-water mark")
    if how == "whole":
        monkeypatch.setattr(peak, "_PROC", tmp_path)
    watch = peak.Peak(CPU)
    torch.ones(16 * MEGABYTE)  # 64 MB, gone at once
    block = torch.ones(16 * MEGABYTE)
    del block
    most = watch.stop()
    assert watch.how == how
    assert most >= 60 * MEGABYTE + (watch.before or 0)
    assert most <= peak.process_peak() + MEGABYTE


def test_a_sampled_peak_that_is_over_is_seen(monkeypatch):
    """The system's figures are replaced, because it may page memory out, and the sampler may get no time."""
    size, sampled = [100], threading.Event()

    def resident():
        now = size[0]
        if now > 100:
            sampled.set()
        return now

    monkeypatch.setattr(peak, "_reset_mark", lambda: False)
    monkeypatch.setattr(peak, "resident", resident)
    watch = peak.Peak(CPU)
    size[0] = 164
    assert sampled.wait(60)
    size[0] = 100
    assert (watch.how, watch.before, watch.stop()) == ("sampled", 100, 164)


def test_an_accelerators_peak_is_its_allocators(monkeypatch):
    """The calls and their order are tested, because there is not always an accelerator."""
    calls = []
    figures = {"synchronize": None, "reset_peak_memory_stats": None, "memory_allocated": 7, "max_memory_allocated": 9}
    for name, figure in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, name=name, figure=figure: (calls.append(name), figure)[1])
    watch = peak.Peak(torch.device("cuda"))
    assert (watch.how, watch.before, watch.stop()) == ("cuda", 7, 9)
    assert calls == [*list(figures)[:3], "synchronize", "max_memory_allocated"]


def test_allocations_are_counted_once_and_until_released():
    known = torch.ones(1000)
    with torch.inference_mode(), TensorAllocations() as counted:
        view = known[10:20]
        assert counted.allocated == 0, "a view of what was there is not new"
        made = known + 1
        assert (counted.allocated, counted.peak) == (4000, 4000)
        part = made[:3]
        more = made * 2
        del made
        assert counted.allocated == 8000, "a view holds the whole"
        del part, more
        assert (counted.allocated, counted.peak) == (0, 8000)
        counted.reset_peak()
        known.mul_(1)
        assert counted.peak == 0, "nothing is made in place"
        assert view.numel() == 10


def test_tensor_memory_counts_storages_and_not_tensors():
    whole = torch.ones(100)
    other = torch.ones(10)
    assert tensor_memory([whole, whole[:3]], {"a": [whole]}, other).total == 440
    assert (tensor_memory([whole, other]) - tensor_memory(whole)).total == 40
    assert (tensor_memory([whole, other]) & tensor_memory(whole)).total == 400
    linear = torch.nn.Linear(8, 4)
    linear.weight = torch.nn.Parameter(linear.weight.detach())
    assert tensor_memory(linear).total == 4 * (8 * 4 + 4)


# --- the figures -----------------------------------------------------------------------------------------------------


def pair(**options):
    return Engine.load("embedded:target", "embedded:draft", stopper="fixed:3", dtype="float32", **options)


@pytest.mark.grid(1)
@pytest.mark.parametrize("kind", ["hf", "lean"])
def test_figures_are_those_of_the_shapes(kind):
    workload = Workload(batch=2, prompt_tokens=20, new_tokens=12)
    found = measure(lambda: pair(max_batch=2, backend=kind), workload, CPU)
    config = embedded_model("target").config
    token = config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * 4
    target, draft = found.caches
    assert (target.part, target.token, target.paged) == ("target", token, True)
    page = 4096 // (config.head_dim * 4)  # positions of one head
    assert target.taken == 2 * -(-32 // page) * page * token
    assert draft.token == token * 4 // 5, "the draft has four of five layers"
    assert target.used == 2 * target.sequence
    assert 20 * token < target.sequence <= (20 + 12) * token
    rows = {phase: (one.shape, one.dtype) for phase, one in found.rows.items()}
    vocab = config.vocab_size
    assert rows == {
        "draft": ((2, 3, vocab), "float32"),
        "target": ((2, 4, vocab), "float32"),
        "probabilities": ((2, 4, vocab), "float32"),
    }
    for phase, size in found.first.items():
        assert size >= (found.rows[phase].nbytes if phase in found.rows else 0), phase
    assert found.later["verify"] > 0
    assert max(found.first["round"], found.later["round"]) <= found.temporaries
    parts = sum(one.own for one in found.weights), sum(one.taken for one in found.caches), found.temporaries
    assert found.total == sum(parts) == found.to_dict()["total"]


def test_weights_are_those_of_the_parameters_and_packed_where_they_are():
    plain = sum(weight.nbytes for weight in random_model(CONFIGS["llama"]()).parameters())
    (whole,) = weights(Engine(HFBackend(random_model(CONFIGS["llama"]()))))
    assert plain <= whole.own <= plain + 4096, "buffers, such as rotary frequencies, are small"
    assert whole.packed == whole.shared == 0
    (lean,) = weights(Engine(LeanBackend(random_model(CONFIGS["llama"]()))))
    assert plain <= lean.own <= 1.5 * plain, "rotary table and scaled norms come to it, and no second copy"
    assert (lean.packed > 0.5 * plain) == packs(torch.float32, "cpu")


@pytest.mark.parametrize("spec", ["early_exit:1", "early_exit:1x2"])
@pytest.mark.parametrize("kind", [HFBackend, LeanBackend])
def test_layers_that_draft_are_the_targets(spec, kind):
    target = kind(random_model(CONFIGS["llama"]()))
    found = {one.part: one for one in weights(Engine(target, *composed(target, spec)))}
    assert found["draft"].own <= 4096
    assert found["draft"].shared > 0.4 * found["target"].own


@pytest.mark.skipif(native.operations_for(torch.zeros(1)) is None, reason="no native operations on this machine")
def test_a_quantized_draft_has_small_weights_of_its_own_and_shares_the_rest():
    target = LeanBackend(random_model(transformers.LlamaConfig(**ROPE, head_dim=32)))
    found = {one.part: one for one in weights(Engine(target, *composed(target, "quantized:4")))}
    quantized, whole = found["draft"], found["target"]
    assert 0.1 * whole.packed < quantized.packed < 0.35 * whole.packed, "five bits of 32, and padded outputs"
    assert quantized.own < quantized.packed + 4096
    assert quantized.shared > 0, "embeddings and norms"


def test_a_feature_head_shares_the_targets_embedding():
    target = HFBackend(random_model(CONFIGS["llama"]()), name="llama")
    embedding = target.model.get_input_embeddings().weight.nbytes
    made = Engine(target, drafted(target, net_for(target)))
    found = {one.part: one for one in weights(made)}
    assert found["draft"].shared == embedding
    assert found["draft"].own > 0
    phases = Phases()
    with phases.observe(made):
        made.generate([[3, 4, 5]], SamplingParams(max_tokens=6, seed=1))
    assert phases.states >= 256 * 32 * 4, "two sessions hold states of width 32"


def test_observing_changes_nothing():
    one, two = engine(), engine()
    phases, params = Phases(), SamplingParams(max_tokens=12, seed=3)
    parts = one.drafter, one.target, one.verifier
    with phases.observe(one):
        seen = one.generate(["Once upon a time", "The dog"], params)
    assert (one.drafter, one.target, one.verifier) == parts
    assert [out.token_ids for out in seen] == [
        out.token_ids for out in two.generate(["Once upon a time", "The dog"], params)
    ]


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        ((0, 1, 1), "batch: expected 1 or more, got 0"),
        ((1, -3, 1), "prompt tokens: expected 1 or more, got -3"),
        ((1, 1, 0), "new tokens: expected 1 or more, got 0"),
        ((1, 500, 13), "expected at most 512 together, .* got 500 and 13"),
    ],
)
def test_impossible_workloads_are_refused(workload, words):
    with pytest.raises(UserError, match=words):
        measure(engine, Workload(*workload), CPU)


def command(*args):
    return CliRunner().invoke(app, ["profile", "memory", *args], prog_name="draftproof")


def test_the_command_prints_figures_or_json():
    small = ("--prompt-tokens", "8", "--new-tokens", "6", "--batch", "2", "-n", "2", "--target", "embedded:target")
    found = json.loads(command(*small, "--draft", "embedded:draft", "--json").stdout)
    assert found[KEY]["machine"]["threads"] == 1
    assert found["parts"] == {"drafter": "model", "stopper": "fixed:2", "verifier": "block"}
    assert found["resident"]["peak"] > 0
    shown = command(*small, "--drafter", "ngram").stdout
    assert "keys and values" in shown
    assert "drafter ngram:2, verifier block" in shown


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--batch", "0"], "batch: expected 1 or more, got 0"),
        (["--draft-length", "0"], "stopper fixed: expected a draft length of 1 to 64, got 0"),
        (["--dtype", "int4"], "dtype: expected one of auto, float32, bfloat16, float16, got 'int4'"),
        (["--drafter", "feature_head:nowhere"], "no feature head in 'nowhere'"),
        (["--new-tokens", "100000"], "the context of embedded:stories"),
    ],
)
def test_the_commands_errors_are_one_line(args, words):
    result = command(*args)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("draftproof: error: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_999, "1 MB"), (1.5e9, "1.5 GB"), (123456, "123 kB")],
)
def test_bytes_are_shown_to_three_digits(size, words):
    assert format_bytes(int(size)) == words


# --- caches grow by need ---------------------------------------------------------------------------------------------


def test_caches_grow_by_need_and_slots_are_used_again():
    target = HFBackend(random_model(CONFIGS["llama"]()))
    made, params = Engine(target, max_batch=3), SamplingParams(max_tokens=4, seed=1)
    ((_, cache),) = slot_caches(made)
    assert (cache.nbytes, cache.in_use) == (0, 0)
    made.generate([[5, 6]] * 9, params)
    assert (cache.extent[0], cache.in_use) == (3, 0), "nine requests ran three at a time"
    page = 4096 // 32
    assert cache.peak == 3 * page * cache.token_nbytes or cache.peak == 4 * page * cache.token_nbytes
    made.generate([[7] * 300, [5, 6]], params)
    made.forget()
    assert cache.peak == (3 + 1) * page * cache.token_nbytes, "each has its own length"
    for length in range(1, 40):
        made.generate([[5] * length] * 3, params)
    made.forget()
    assert (cache.nbytes, cache.in_use) == (0, 0)


# --- nothing is left of requests that ended --------------------------------------------------------------------------


def composed(target, spec, rule=None):
    """A drafter on a target's own layers, and its rule."""
    drafter = make_drafter(spec, target=target, draft=None, stopper="schedule:2")
    return drafter, make_verifier(rule or ("trie_block" if drafter.branching else "block"))


def leftovers(made):
    """Objects of requests that an engine still reaches."""
    return [f"{path}: {type(item).__name__}" for path, item in walk(made) if isinstance(item, PER_REQUEST)]


def sizes(made):
    """Lengths of everything that could grow, bounded memories aside."""
    growing = (dict, list, deque, set)
    return {path: len(item) for path, item in walk(made) if isinstance(item, growing) and not BOUNDED.search(path)}


def use(made, prompt, params):
    """Requests that finish, wait, and are dropped: in flight, while waiting, and by a part that raises."""
    made.generate([prompt] * 3, params)
    flying = [sequence for _ in range(3) for sequence in made.add(prompt, params)]
    made.step()
    assert leftovers(made), "running requests are found"
    for sequence in flying:
        made.abort(sequence)
    stream = made.stream(prompt, params)
    next(stream)
    stream.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made.target, "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made.generate([prompt] * 3, params)


def check_idle(made, prompt, params):
    fresh = sizes(made)
    use(made, prompt, params)
    made.forget()
    assert leftovers(made) == []
    assert sizes(made) == fresh
    assert not made.busy
    for _, cache in slot_caches(made):
        assert cache.in_use == 0


def composition(one):
    """Every drafter with every rule, and with every stopper; all three together are slow."""
    often = one.stopper in {"", "fixed"} or one is WITH_STOPPER[one.drafter, one.stopper]
    name = f"{one.drafter}-{one.stopper or 'none'}-{one.rule}"
    return pytest.param(one, id=name, marks=[pytest.mark.slow] * (not often))


@pytest.mark.grid(23)
@pytest.mark.parametrize("one", [composition(made) for made in COMPOSED])
def test_nothing_is_left_of_requests_in_any_composition(one):
    made = toy_engine(one.drafter, one.stopper, one.rule, CounterRoundRng)
    made.max_batch = 2
    check_idle(made, list(PROMPT), SamplingParams(max_tokens=6, seed=2))


@pytest.mark.grid(3)
@pytest.mark.parametrize("spec", ["model", "chains:2", "early_exit:1", "early_exit:1x2", "head", "headx2"])
@pytest.mark.parametrize("kind", [HFBackend, LeanBackend])
def test_nothing_is_left_of_requests_in_caches(spec, kind):
    target = kind(random_model(CONFIGS["llama"]()), name="llama")
    if spec.startswith("head"):
        drafter = drafted(target, net_for(target), chains=2 if spec == "headx2" else 1)
    else:
        small = None if spec.startswith("early") else HFBackend(random_model(CONFIGS["llama"]()), name="llama")
        drafter = make_drafter(spec, target=target, draft=small, stopper="schedule:2")
    rule = make_verifier("trie_block" if drafter.branching else "block")
    made = Engine(target, drafter, rule, max_batch=2)
    params = SamplingParams(max_tokens=6, seed=2)
    made.generate([[5, 6, 7, 8]] * 2, params)  # caches are made when first read into
    check_idle(made, [5, 6, 7, 8], params)


@pytest.mark.parametrize("where", ["drafter", "stopper"])
def test_a_part_that_forgets_to_forget_is_found(where, monkeypatch):
    kind = DraftModel if where == "drafter" else Schedule
    monkeypatch.setattr(kind, "release", lambda *_: None)
    made = toy_engine("model", "schedule", "block", CounterRoundRng)
    with pytest.raises(AssertionError):
        check_idle(made, list(PROMPT), SamplingParams(max_tokens=6, seed=2))


def test_a_finished_sequence_holds_no_state_of_its_rule():
    made = toy_engine("model", "fixed", "greedy_block", CounterRoundRng)
    (sequence,) = made.add(list(PROMPT), SamplingParams(max_tokens=5, seed=1))
    while made.busy:
        made.step()
    assert sequence.session is None
    assert sequence.verifier_state is None


def test_the_memory_of_finished_requests_keeps_to_its_capacity():
    capacity, table = 300, TableModel(40, 1, order=1)
    made = Engine(table, SuffixDrafter(4, capacity=capacity), max_batch=4)
    for start in range(12):
        made.generate([[start, 1, place] for place in range(4)], SamplingParams(max_tokens=9))
        memory = made.drafter._memory
        assert memory.size == sum(len(tokens) for _, tokens in memory.finished) <= capacity
        nodes = sum(isinstance(item, _ContextNode) for _, item in walk(memory))
        assert nodes <= 2 * capacity, "a token adds at most two"


def table_engine():
    small = DraftModel(TableModel(20, 2, order=1), vocab_size=20)
    return Engine(TableModel(20, 1, order=1), ModelDrafter(small, Schedule(2)), max_batch=8)


def many(made, count, first=0):
    """Requests of bounded size, eight at a time."""
    for start in range(first, first + count, 8):
        prompts = [[3 + (start + place) % 17] * (1 + (start + 5 * place) % 30) for place in range(8)]
        params = [SamplingParams(max_tokens=1 + (start + place) % 6, seed=start + place) for place in range(8)]
        made.generate(prompts, params)


def objects():
    """Objects by kind; without the pairs that abstract classes keep of every class they were asked about.

    The shape checks of the test run look at random elements, so those pairs come at random.
    """
    gc.collect()
    kinds = Counter(type(item) for item in gc.get_objects())
    for kind in (weakref.ReferenceType, types.BuiltinFunctionType):
        del kinds[kind]
    ours = {kind: n for kind, n in kinds.items() if str(kind.__module__).startswith("draftproof")}
    return ours, sum(kinds.values())


@pytest.mark.slow
@pytest.mark.parametrize("make", [table_engine, engine], ids=["table", "embedded"])
def test_objects_do_not_accumulate_over_160_requests(make):
    """One object a request would be 80; the first half fills what is kept for good."""
    made = make()
    many(made, 80)
    made.forget()
    before, all_before = objects()
    many(made, 80, first=80)
    made.forget()
    after, all_after = objects()
    assert after == before
    assert all_after - all_before < 80 // 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("spec", ["model", "suffix"])
def test_resident_memory_is_flat_over_10000_requests(spec):
    """A kilobyte a request would be 9 MB; allocators settle within the first thousand, and move by pages after that."""
    if peak.resident() is None:
        pytest.skip("this system does not say what is resident")
    made = engine(max_batch=8)
    if spec == "suffix":
        made = Engine(made.target, SuffixDrafter(8, capacity=5000), max_batch=8)
    many(made, 1000)
    gc.collect()
    before = peak.resident()
    many(made, 9000, first=1000)
    gc.collect()
    assert peak.resident() - before < 6 * MEGABYTE
