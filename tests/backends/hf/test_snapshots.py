"""Models with recurrent layers: drafts that are refused leave no trace in a state, whoever shares the pass."""

import copy
import functools
import re
from dataclasses import replace

import pytest
import torch

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed, unread
from draftproof.backends.cache.passes import PREFILL_CHUNK
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.hf.snapshots import SnapshotBackend, SnapshotSession
from draftproof.backends.loading.by_name import load_backend, suitable
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.recurrent import mixers as mixers_module
from draftproof.backends.recurrent.mixers import continuation, mixers_of
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import point_chain
from draftproof.drafters.none import NoDrafter
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.verifier_parts import make_verifier
from draftproof.stoppers.fixed import FixedLength
from draftproof.tree import TokenTree
from support import quantized_drafts as quantized
from support.architectures.check import disturbed
from support.architectures.tiny import VOCAB, tiny_config, tiny_model
from support.native_levels import needs_native
from support.recurrent_models import backend, by_modules, model

TYPES = (
    "lfm2",
    "qwen3_next",
    "falcon_h1",
    "mamba",
)  # convolution; delta rule; state space beside attention; scan without a state
LENGTHS = (3, 60, 17, 41)
NEW = 20
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)


def prompts():
    source = torch.Generator().manual_seed(5)
    return [torch.randint(4, VOCAB, (length,), generator=source).tolist() for length in LENGTHS]


@functools.cache
def reference(name):
    """transformers' own greedy tokens."""
    found = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
        out = model(name).generate(ids, attention_mask=torch.ones_like(ids), **options)
        found.append(tuple(out[0, len(prompt) :].tolist()))
    return found


class Wrong(NoDrafter):
    """Drafts the right continuation with one wrong token, at a place for each round in turn; None: all are right."""

    name, point_masses, limit = "wrong", True, 5

    def __init__(self, name, places):
        self._known = {tuple(prompt): tokens for prompt, tokens in zip(prompts(), reference(name), strict=True)}
        self._places, self._rounds = places, {}

    def propose(self, requests, rng):  # noqa: ARG002
        return [self._draft(request) for request in requests]

    def _draft(self, request):
        number = self._rounds[request.id] = self._rounds.get(request.id, -1) + 1
        known = self._known[tuple(request.tokens[: request.prompt_length])]
        start = len(request.tokens) - request.prompt_length
        tokens = list(known[start : start + max(min(self.limit, request.limit), 0)])
        place = self._places[(number + request.id) % len(self._places)]
        if place is not None and place < len(tokens):
            tokens[place] = 4 + (tokens[place] - 3) % (VOCAB - 4)
        return point_chain(tokens)


def generate(target, drafter=None, params=GREEDY, **options):
    engine = Engine(target, drafter or NoDrafter(), make_verifier(options.pop("verifier", "block")), **options)
    return [output.token_ids for output in engine.generate(prompts(), params)]


@pytest.fixture
def reads(monkeypatch):
    """The numbers of tokens in all feeds of the target."""
    backend("lfm2")  # its check reads too
    found = []
    run = SnapshotBackend._run

    def counted(self, feeds, **options):
        found.extend(len(feed) for feed in feeds)
        return run(self, feeds, **options)

    monkeypatch.setattr(SnapshotBackend, "_run", counted)
    return found


# --- the same tokens as transformers ----------------------------------------------------------------------------------

SCRIPTS = {"at once": (0,), "in every round": (2, 0, 4, 1, 3), "at last": (4,), "now and then": (None, 1, None, None)}


@pytest.mark.grid(5)
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name", TYPES)
def test_refused_drafts_leave_no_trace(name, script):
    assert generate(backend(name), Wrong(name, SCRIPTS[script])) == reference(name)


@pytest.mark.parametrize("name", TYPES)
def test_a_session_that_keeps_the_state_after_refused_drafts_is_seen(name, monkeypatch):
    target = backend(name)  # before the change, which its check would see

    def advanced(self, length):
        self._marks = self._marks[-1:]
        self._settled = True
        return length

    monkeypatch.setattr(SnapshotSession, "_reachable", advanced)
    assert generate(target, Wrong(name, (2, 0, 4, 1, 3))) != reference(name)


@pytest.mark.parametrize("name", TYPES)
def test_padding_that_reaches_a_state_is_seen(name, monkeypatch):
    def one_group(self, feeds):
        width = max(len(feed) for feed in feeds)
        every = groups(self, feeds)
        if len({len(feed) for feed in feeds}) < 2 or len({feed.session.length == 0 for feed in feeds}) > 1:
            return every
        cuts = tuple(range(1, width + 1)) if self.stepwise else (width,)
        sessions = [feed.session.state for feed in feeds]
        return [mixers_module.RowGroup(list(range(len(feeds))), cuts, None, sessions)]

    target, groups = by_modules(name), SnapshotBackend._groups  # its check would see the change
    monkeypatch.setattr(SnapshotBackend, "_groups", one_group)
    assert generate(target, max_batch=4) != reference(name)


@pytest.mark.parametrize("drafter", ["ngram:4", "suffix", "auto"])
def test_drafters_without_a_model_compose(drafter):
    target = backend("lfm2")
    part = make_drafter(drafter, target=target, draft=None, stopper="auto" if drafter == "auto" else "fixed:4")
    assert generate(target, part) == reference("lfm2")


@pytest.mark.parametrize(("target", "draft"), [("lfm2", "qwen3_next"), ("llama", "lfm2"), ("lfm2", "llama")])
def test_recurrent_and_attention_models_draft_for_each_other(target, draft):
    made = {name: HFBackend(model(name), name=name) if name == "llama" else backend(name) for name in (target, draft)}
    own = DraftModel(made[draft], vocab_size=VOCAB)
    assert generate(made[target], ModelDrafter(own, FixedLength(4))) == reference(target)


@pytest.mark.grid(4)
@needs_native
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", TYPES)
def test_the_target_with_fewer_bits_drafts_from_the_targets_own_states(name, bits):
    target = backend(name)
    drafter = quantized.drafted(target, bits)
    outputs = Engine(target, drafter, make_verifier("block")).generate(prompts(), GREEDY)
    assert [output.token_ids for output in outputs] == reference(name)
    drafted, accepted = (
        sum(getattr(output.stats, each) for output in outputs) for each in ("num_draft_tokens", "num_accepted_tokens")
    )
    assert accepted / drafted > (0.7 if bits == 8 else 0.15), "0.07 at most after another state"


@needs_native
def test_a_lent_session_that_shares_no_state_is_seen(monkeypatch):
    target = backend("lfm2")
    monkeypatch.setattr(
        SnapshotSession,
        "state",
        property(lambda self: None if self._is_lent else self._marks[-1].state if self._marks else None),
    )
    drafter = quantized.drafted(target, 8)
    outputs = Engine(target, drafter, make_verifier("block")).generate(prompts(), GREEDY)
    assert [output.token_ids for output in outputs] == reference("lfm2"), "drafts change no output"
    assert sum(output.stats.num_accepted_tokens for output in outputs) < 0.5 * sum(
        output.stats.num_draft_tokens for output in outputs
    )


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", TYPES)
def test_sampled_alone_is_sampled_in_a_batch(name):
    own = DraftModel(SnapshotBackend(disturbed(model(name)), name="draft", check=False), vocab_size=VOCAB)
    seeds = [SamplingParams(max_tokens=10, seed=seed, ignore_eos=True) for seed in range(len(LENGTHS))]
    together = generate(backend(name), ModelDrafter(own, FixedLength(4)), seeds, max_batch=3)
    alone = generate(backend(name), ModelDrafter(own, FixedLength(4)), seeds, max_batch=1)
    assert together == alone
    assert len(set(together)) == len(together)


# --- what is read -----------------------------------------------------------------------------------------------------


def test_plain_decoding_reads_nothing_twice(reads):
    generate(backend("lfm2"))
    assert sum(reads) == sum(LENGTHS) + len(LENGTHS) * (NEW - 1)


def test_a_draft_that_is_refused_at_once_or_accepted_whole_is_not_read_again(reads):
    generate(backend("lfm2"), Wrong("lfm2", (None,)))
    assert sum(reads) == sum(LENGTHS) + len(LENGTHS) * (NEW - 1)
    reads.clear()
    generate(backend("lfm2"), Wrong("lfm2", (0,)), SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert sum(reads) == sum(LENGTHS) + len(LENGTHS) * (3 - 1 + 2 + 1)  # drafts of 2, 1 and 0


def rounds(target):
    """Rounds of which three of four drafts are accepted: how many tokens each begins with, and the last text."""
    session, tokens, found = target.open(), prompts()[1][:7], []
    for number in range(8):
        pending = unread(session, tokens)
        found.append(len(pending))
        drafts = [(5 * number + place) % VOCAB for place in range(4)]
        target.forward([Feed(session, pending, TokenTree.chain(torch.tensor(drafts)))])
        tokens = [*tokens, *drafts[:3], 50]
    session.close()
    return found


@pytest.mark.parametrize("name", TYPES)
def test_at_most_one_draft_is_read_twice(name):
    assert rounds(by_modules(name)) == [7, *[4] * 7], "three accepted tokens again, and the one after them"


@needs_native
@pytest.mark.parametrize("name", TYPES[:3])
def test_where_inputs_of_recurrences_are_held_nothing_is_read_twice(name):
    assert rounds(backend(name)) == [7, *[1] * 7]


@needs_native
@pytest.mark.parametrize("name", TYPES[:3])
def test_inputs_of_many_drafts_count_as_memory_of_a_request(name):
    """They need more than a state does, and a pass makes others while they are there."""
    target = backend(name)
    session = target.open()
    target.forward([Feed(session, [1, 2, 3, 4], TokenTree.chain(torch.full((59,), 5)))])
    assert target.sequences_nbytes([63]) == SlotBackend.sequences_nbytes(target, [63]) + 2 * session.state_nbytes
    session.close()


@needs_native
@pytest.mark.parametrize("name", TYPES[:3])
def test_a_session_goes_back_to_any_token_whose_inputs_are_held(name):
    """A copy and a trimmed session go on as a session that read just those tokens."""
    target, tokens = backend(name), prompts()[1]
    session, whole = target.open(), target.open()
    (expected,) = target.forward([Feed(whole, tokens[:9], TokenTree.chain(torch.tensor(tokens[9:14])))])
    target.forward([Feed(session, tokens[:6], TokenTree.chain(torch.tensor(tokens[6:12])))])
    assert session.keep(6, range(5)) == 11
    assert [session.reach(length) for length in (5, 6, 9, 11)] == [0, 6, 9, 11]
    memory = session.state_nbytes
    copies = [session.fork(9), session.fork(9)]
    copies[1].trim()
    assert session.keep(9) == 9
    for each in (session, *copies):
        (found,) = target.forward([Feed(each, tokens[9:10], TokenTree.chain(torch.tensor(tokens[10:14])))])
        assert torch.equal(found.logits, expected.logits[1:])
    assert 0 < copies[1].state_nbytes <= memory
    for each in (session, *copies, whole):
        each.close()


def test_a_session_keeps_less_than_it_is_asked_to_and_says_how_much():
    target = by_modules("qwen3_next")
    session = target.open()
    target.forward([Feed(session, [5, 6, 7], TokenTree.chain(torch.tensor([8, 9])))])
    assert session.nbytes > 0
    assert session.keep(3, (0, 1)) == 5, "all accepted: the state at the end"
    assert (session.tokens, session.tail) == ([5, 6, 7, 8, 9], ())
    target.forward([Feed(session, [10], TokenTree.chain(torch.tensor([11, 12])))])
    assert session.keep(6, (0,)) == 6, "the state at the root"
    assert session.tokens == [5, 6, 7, 8, 9, 10]
    assert session.keep(4) == 0, "no state is kept there: everything is read again"
    assert (session.tokens, session.state, session.length) == ([], None, 0)
    session.close()


def test_a_prompt_in_chunks_stays_when_drafts_after_it_are_refused():
    target = backend("lfm2")
    target.max_positions = None
    session, tokens = target.open(), [4 + place % 90 for place in range(PREFILL_CHUNK + 30)]
    target.forward([Feed(session, tokens, TokenTree.chain(torch.tensor([8, 9])))])
    assert len(unread(session, [*tokens, 50])) == 1
    session.close()


def test_a_pass_that_fails_changes_nothing(monkeypatch):
    name = "lfm2"
    target, failed = SnapshotBackend(copy.deepcopy(model(name)), name=name), []
    call = target._call

    def fails_now_and_then(*args, **options):
        made = call(*args, **options)
        failed.append(len(failed) % 4 == 3)
        if failed[-1]:
            raise RuntimeError("no memory left")
        return made

    monkeypatch.setattr(target, "_call", fails_now_and_then)
    engine = Engine(target, Wrong(name, (2, 0, None)), make_verifier("block"), max_batch=4)
    requests = [engine.add(prompt, GREEDY)[0] for prompt in prompts()]
    while engine.busy:
        try:
            engine.step()
        except RuntimeError:
            assert not any("forward" in vars(each) for each in target.model.modules()), "mixers are as they were"
    assert any(failed)
    assert [tuple(request.output_ids) for request in requests] == reference(name)


# --- what decides -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "several", "single"),
    [
        ("lfm2", True, True),
        ("qwen3_next", True, True),
        ("mamba", True, True),
        ("zamba", False, True),
        ("zamba2", True, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_how_mixers_go_on_from_a_state_is_found_in_every_dtype(name, several, single, dtype):
    found = tiny_model(tiny_config(name)).to(dtype)
    how = continuation(found, mixers_of(found))
    assert (how.several, how.single) == (several, single)
    assert how.stepwise == (not (several and single))


@pytest.mark.parametrize(
    ("name", "resumes"), [("zamba", True), ("zamba2", False), ("nemotron_h", False), ("lfm2", True)]
)
def test_a_prefix_is_reused_only_where_single_tokens_have_the_same_logits(name, resumes):
    prompt, params = prompts()[1], SamplingParams(max_tokens=2, temperature=0, logprobs=20)

    def scores(*before):
        made = Engine(by_modules(name))
        made.generate([*before, prompt], replace(params, n=2))  # beside another one with its prefix, and as two
        (output,) = made.generate(prompt, params)
        assert (made.memory.reused_tokens > 0) == (resumes and bool(before))
        return [entry.logprob for entry in output.logprobs]

    with torch.inference_mode():
        rows = model(name)(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    assert by_modules(name).capabilities.resumes == resumes
    assert scores(prompt[:40])[0] == pytest.approx(float(rows.max()), abs=1e-5)
    assert scores(prompt[:40]) == pytest.approx(scores(), abs=1e-5)


def test_a_mixer_that_forgets_its_state_is_refused(monkeypatch):
    def forgotten(self, layer_idx, state_idx=0):
        return None

    monkeypatch.setattr("draftproof.backends.recurrent.states.StateView.get_recurrent_state", forgotten)
    with pytest.raises(UserError, match="does not reproduce its own logits after a rollback"):
        SnapshotBackend(model("qwen3_next"), name="forgetful")


def test_auto_takes_the_backend_that_a_model_needs(tmp_path):
    assert suitable(model("lfm2")) == "snapshot"
    assert suitable(model("mamba")) == "snapshot"
    assert suitable(model("llama")) == "lean"
    assert suitable(model("gpt2")) == "hf"
    copy.deepcopy(model("lfm2")).save_pretrained(tmp_path)  # which changes a config that tests share
    assert load_backend(str(tmp_path), LoadOptions(dtype="float32")).kind == "snapshot"


@pytest.mark.parametrize("name", ["lfm2", "mamba"])
def test_other_backends_name_the_one_for_recurrent_layers(name):
    with pytest.raises(UserError, match=r"layers with a recurrent state.*use backend snapshot"):
        HFBackend(model(name), name=name)


def test_models_that_keep_no_state_in_the_cache_are_refused():
    with pytest.raises(UserError, match="keeps no recurrent state in transformers' own cache"):
        SnapshotBackend(model("llama"), name="llama")
    with pytest.raises(UserError, match="a recurrent state that is not in transformers' own cache"):
        HFBackend(model("minimax"), name="minimax")


@pytest.mark.parametrize("drafter", ["chains:2", "tree:2x2"])
def test_trees_are_refused_when_the_engine_is_built(drafter):
    target, draft = backend("lfm2"), HFBackend(model("llama"), name="draft")
    part = make_drafter(drafter, target=target, draft=draft, stopper="fixed:4")
    with pytest.raises(UserError, match=re.escape("lfm2 cannot read them")):
        Engine(target, part, make_verifier("trie_block"))
    with pytest.raises(UserError, match="cannot read trees"):
        make_drafter(drafter, target=draft, draft=target, stopper="fixed:4")
    session = target.open()
    with pytest.raises(ValueError, match="chains, not trees"):
        target.forward([Feed(session, [5], TokenTree(torch.tensor([6, 7]), (-1, -1)))])
    session.close()


@pytest.mark.parametrize(("drafter", "why"), [("early_exit:1", "cannot draft")])
def test_drafters_inside_the_target_are_refused_with_a_reason(drafter, why):
    with pytest.raises(UserError, match=why):
        make_drafter(drafter, target=backend("lfm2"), draft=None, stopper="fixed:4")


def test_hidden_states_are_those_of_one_pass():
    target, tokens = backend("lfm2"), prompts()[2]
    session = target.open()
    chain = TokenTree.chain(torch.tensor(tokens[-4:]))
    found = target.forward([Feed(session, tokens[:-4], chain)], hidden=True)[0].hidden
    with torch.inference_mode():
        expected = model("lfm2")(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0, -5:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    session.close()


# --- every family -----------------------------------------------------------------------------------------------------

FAMILIES = (
    "bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid inkling2_text inkling_text jamba kimi_linear lfm2 "
    "lfm2_moe lfm3 mamba mamba2 nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next zamba zamba2 zaya"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES.split())
def test_every_family_is_right_when_drafts_are_refused_in_every_round(name):
    made = backend(name)
    for places in SCRIPTS.values():
        assert generate(made, Wrong(name, places), max_batch=3) == reference(name)
