"""Models with recurrent layers by the lean forward: transformers' logits, and the same bits however a chain is read."""

import copy
import functools
import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftproof import Engine, SamplingParams
from draftproof.backends.base import Feed, rounding, unread
from draftproof.backends.cache.layout import Layout
from draftproof.backends.lean.mixture_modules import is_mixture
from draftproof.backends.lean.snapshots import LeanSnapshotBackend
from draftproof.backends.loading.by_name import load_backend
from draftproof.backends.loading.in_memory import backend_in_memory
from draftproof.backends.loading.stored_backends import rounded
from draftproof.drafters.ngram import NgramDrafter
from draftproof.native.structures import STATES, LinearArguments, Sequences
from support.architectures.check import disturbed
from support.chain_rows import assert_same_bits, off, read
from support.gguf_modules import module_model
from support.helpers import engine
from support.native_levels import needs_native
from support.recurrent_models import backend as recurrent

pytestmark = needs_native
IDS = [5, 9, 2, 7, 11, 3, 300, 41, 17, 8, 260, 77, 30, 31, 32]
MIXTURES = ("lfm2moe", "qwen35moe", "qwen3next", "granitehybrid, experts")
READ = ("lfm2", "qwen35", "qwen35, tied", "falcon-h1", "falcon-h1, norm", "granitehybrid", *MIXTURES)
DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def model(name, dtype=torch.float32):
    changes = {"tie_word_embeddings": False} if name in MIXTURES else {}  # tied random ones repeat one token
    return module_model(name, **changes).to(dtype)


@functools.cache
def backend(name, dtype=torch.float32, *, pack=True):
    """As loading makes it, or with weights that stay where they are."""
    own = copy.deepcopy(model(name, dtype)) if pack else model(name, dtype)
    return LeanSnapshotBackend(own, pack=pack, name=name)


def own_logits(name):
    with torch.inference_mode():
        return model(name)(torch.tensor([IDS])).logits[0]


@pytest.mark.grid(10)
@pytest.mark.parametrize("pack", [True, False], ids=["packed", "in place"])
@pytest.mark.parametrize("name", READ)
def test_logits_are_those_of_transformers(name, pack):
    target = backend(name, pack=pack)
    assert off(read(target, target.open(), IDS[:1], IDS[1:]), own_logits(name)) < 1e-5
    assert (rounding(target), target.packed) == ("", pack)
    plain = {path for path, each in target.model.named_modules() if isinstance(each, torch.nn.Linear)}
    if pack:
        assert all(is_mixture(target.model.get_submodule(path.rpartition(".")[0])) for path in plain)


@pytest.mark.parametrize("name", ["lfm2", "qwen3next"])
def test_a_chain_has_the_same_bits_where_weights_stay(name):
    assert_same_bits(backend(name, torch.bfloat16, pack=False), IDS)


def test_a_model_in_memory_stays_as_it_is_and_one_by_name_is_packed(tmp_path):
    whole = model("lfm2", torch.bfloat16)
    whole.save_pretrained(tmp_path)
    before = [each.data_ptr() for each in whole.parameters()]
    for made, packed in ((load_backend(str(tmp_path)), True), (backend_in_memory(whole), False)):
        assert (type(made), made.packed, rounding(made)) == (LeanSnapshotBackend, packed, "")
        assert_same_bits(made, IDS)
    assert [each.data_ptr() for each in whole.parameters()] == before
    assert type(whole.lm_head) is torch.nn.Linear


def test_changed_weights_stay_where_others_may_have_them(tmp_path):
    """A checkpoint's pages have them; they were once let go after packing, and showed the file again."""
    model("lfm2", torch.bfloat16).save_pretrained(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        for each in whole.parameters():
            each.mul_(1.25)
    held = [(each, each.detach().clone()) for each in whole.parameters()]
    assert LeanSnapshotBackend(whole, pack=True, name="x", check=False).packed
    assert all(torch.equal(each, copied) for each, copied in held)


def test_experts_of_16_bits_stay_where_they_are():
    """Whatever the processor has: a matrix unit multiplies them there."""
    target = LeanSnapshotBackend(copy.deepcopy(model("lfm2moe", torch.bfloat16)), pack=True, name="x", check=False)
    assert target.lean is not None
    assert target.packed
    assert_same_bits(target, IDS)


def test_a_packed_model_is_quantized_and_rounded():
    target = LeanSnapshotBackend(copy.deepcopy(model("qwen35")), pack=True, name="x", check=False)
    whole = own_logits("qwen35")
    draft = target.quantized(4)
    assert draft.lean is not None
    assert 1e-3 < off(read(draft, draft.open(), IDS[:1], IDS[1:]), whole) < 0.6
    assert off(read(target, target.open(), IDS[:1], IDS[1:]), whole) < 1e-5, "the target is as it was"
    made = rounded(target, 8)
    assert rounding(made) == ""
    assert 1e-3 < off(read(made, made.open(), IDS[:1], IDS[1:]), whole) < 0.1


@pytest.mark.grid(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", READ)
def test_a_chain_has_the_same_bits_however_it_is_read(name, dtype):
    assert_same_bits(backend(name, dtype), IDS)


@pytest.mark.grid(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", READ)
def test_refused_drafts_leave_no_trace(name, dtype):
    target = backend(name, dtype)
    whole = read(target, target.open(), IDS[:1], IDS[1:])
    for accepted in range(4):
        session = target.open()
        read(target, session, IDS[:4], [*IDS[4 : 4 + accepted], 100, 101])
        left = unread(session, IDS[:12])
        assert left == IDS[4 + accepted : 12], "accepted tokens are not read again"
        assert torch.equal(read(target, session, left, IDS[12:]), whole[11:])


def test_a_state_after_refused_drafts_would_be_seen():
    """Negative control of the test above."""
    target = backend("lfm2")
    whole = read(target, target.open(), IDS[:1], IDS[1:])
    session = target.open()
    read(target, session, IDS[:4], [100, 101])
    (mark,) = session._marks
    session._marks = [mark._replace(length=4)]  # the refused tokens among those that are replayed
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


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "in place"])
def test_new_weights_are_read(pack):
    own = copy.deepcopy(model("granitehybrid"))
    target = LeanSnapshotBackend(own, pack=pack, name="changed", check=False)
    other = disturbed(model("granitehybrid"))
    with torch.inference_mode():
        expected = other(torch.tensor([IDS])).logits[0]
    assert off(read(target, target.open(), IDS[:1], IDS[1:]), expected) > 1e-3
    made = target.with_weights(other)
    assert off(read(made, made.open(), IDS[:1], IDS[1:]), expected) < 1e-5


def test_what_is_not_known_is_read_by_transformers_own_modules_and_the_reason_is_said():
    assert "MambaForCausalLM has parts that are not known together here" in rounding(recurrent("mamba"))
    assert "its layers have parts that are not known together here" in rounding(recurrent("jamba"))
    hooked = copy.deepcopy(model("lfm2"))
    hooked.model.layers[1].register_forward_hook(lambda *_: None)
    assert "hooks are attached to model.layers.1" in rounding(LeanSnapshotBackend(hooked, name="x", check=False))
    wide = LeanSnapshotBackend(copy.deepcopy(model("lfm2")).double(), name="x", check=False)
    assert wide.lean is None
    assert "native" in rounding(wide)


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", MIXTURES)
def test_texts_of_mixtures_are_those_of_transformers_with_and_without_drafts(name):
    prompt = IDS * 2
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        made = model(name).generate(ids, do_sample=False, max_new_tokens=24, min_new_tokens=24)
    expected = made[0, len(prompt) :].tolist()
    assert len(set(expected)) > 4
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    for drafter in (None, NgramDrafter()):
        (output,) = Engine(backend(name), drafter, eos_token_ids=()).generate([prompt], params)
        assert list(output.token_ids) == expected
        assert output.same_bits
    draft = backend(name).quantized(4)
    assert draft.lean is not None
    (output,) = engine(backend(name), draft, length=3, tokenizer=None, eos_token_ids=()).generate([prompt], params)
    assert list(output.token_ids) == expected
    assert output.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MIXTURES)
def test_weights_of_experts_stay_where_they_are(name, dtype):
    own = {each.data_ptr() for path, each in backend(name, dtype).model.named_parameters() if ".experts." in path}
    read = [layer.mixture for layer in backend(name, dtype).lean.layers if layer.mixture is not None]
    assert {getattr(each.arguments, part).weight for each in read for part in ("gate_up", "down")} == own


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", MIXTURES)
def test_quantized_mixtures_are_those_of_the_modules_with_few_bits(name):
    draft = backend(name).quantized(4)
    assert draft.lean is not None
    assert all(each.mixture.arguments.gate_up.bits == 4 for each in draft.lean.layers if each.mixture is not None)
    found = read(draft, draft.open(), IDS[:1], IDS[1:])
    with torch.inference_mode():
        few = draft.model(torch.tensor([IDS])).logits[0]
        whole = model(name)(torch.tensor([IDS])).logits[0]
    assert off(found, few) < 0.05 < off(found, whole), "inputs of 8 bits may be rounded to the next number"


@pytest.mark.grid(6)
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize(
    "change",
    [
        {"whole": False},
        {"sigmoid": True},
        {"sigmoid": False},
        {"factor": 1.1},
        {"least": 0.1},
        {"biases": None},
        {"shared_router": LinearArguments()},
        {"shared_down": LinearArguments()},
    ],
    ids=["whole", "sigmoid", "no sigmoid", "factor", "least", "biases", "shared_router", "shared_down"],
)
def test_another_routing_would_be_seen(name, change):
    """Negative control of the comparison with transformers."""
    target = LeanSnapshotBackend(model(name), name=name, check=False)
    with torch.inference_mode():
        expected = model(name)(torch.tensor([IDS])).logits[0]
    ((field, value),) = change.items()
    differs = False
    for layer in target.lean.layers:
        if layer.mixture is not None:
            before = getattr(layer.mixture.arguments, field)
            differs |= bool(before.weight) if isinstance(value, LinearArguments) else bool(before) != bool(value)
            differs |= isinstance(value, float) and before != value
            setattr(layer.mixture.arguments, field, value)
    assert (off(read(target, target.open(), IDS[:1], IDS[1:]), expected) > 1e-4) is differs


def changed_router(name, forward):
    """A model, one of whose routers computes something else."""
    own = copy.deepcopy(model(name))
    block = getattr(
        own.model.layers[1], "block_sparse_moe" if "granite" in name else "mlp" if "qwen" in name else "feed_forward"
    )
    router = block.router if "granite" in name else block.gate
    router.__class__ = type("Router", (type(router),), {"forward": forward, "__module__": type(router).__module__})
    return own


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", MIXTURES)
def test_routers_that_compute_something_else_are_left_to_the_modules(name):
    def more(self, *given):
        logits, shares, chosen = super(type(self), self).forward(*given)
        return logits, shares * 1.01, chosen

    def others(self, *given):
        logits, shares, chosen = super(type(self), self).forward(*given)
        return logits, shares, (chosen + 1) % len(self.weight)

    for forward in (more, others):
        target = LeanSnapshotBackend(changed_router(name, forward), name="x", check=False)
        assert "a native mixture with the weights of its" in rounding(target)
        assert target.lean is None
    unchanged = changed_router(name, lambda self, *given: super(type(self), self).forward(*given))
    assert LeanSnapshotBackend(unchanged, name="x", check=False).lean is not None


def test_a_router_that_is_set_otherwise_is_looked_at_again():
    own = copy.deepcopy(model("qwen3next"))
    assert LeanSnapshotBackend(own, name="x", check=False).lean is not None
    for layer in own.model.layers:
        layer.mlp.gate.norm_topk_prob = not layer.mlp.gate.norm_topk_prob
    with torch.inference_mode():
        expected = own(torch.tensor([IDS])).logits[0]
    again = LeanSnapshotBackend(own, name="x", check=False)
    assert off(read(again, again.open(), IDS[:1], IDS[1:]), expected) < 1e-5


def test_experts_with_other_parts_are_left_to_the_modules():
    own = copy.deepcopy(model("lfm2moe"))
    own.model.layers[1].feed_forward.register_buffer("further", torch.zeros(8))
    assert "numbers that are not known here (expert_bias, further)" in rounding(
        LeanSnapshotBackend(own, name="x", check=False)
    )
    own = copy.deepcopy(model("qwen35moe"))
    own.model.layers[1].mlp.second = torch.nn.Linear(2, 2)
    assert "it has the parts gate, second" in rounding(LeanSnapshotBackend(own, name="x", check=False))


def test_without_native_operations_transformers_own_modules_read(monkeypatch):
    monkeypatch.setenv("DRAFTPROOF_NATIVE", "0")
    target = LeanSnapshotBackend(copy.deepcopy(model("lfm2")), name="x", check=False)
    assert target.lean is None
    with torch.inference_mode():
        expected = model("lfm2")(torch.tensor([IDS])).logits[0]
    assert off(read(target, target.open(), IDS[:1], IDS[1:]), expected) < 1e-5


def test_sequences_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="spans of tokens"):
        Sequences([(0, 2, 2, 0)], [0] * STATES)
    with pytest.raises(ValueError, match="spans of tokens"):
        Sequences([(0, 2, 0, -1)], [0] * STATES)
    found = Sequences([(0, 2, 1, 0), (2, 3, 0, 0)], [0] * 2 * STATES)
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
