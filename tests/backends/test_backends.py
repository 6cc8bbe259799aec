"""Every row a backend returns equals a forward pass from scratch, whatever was read, kept, closed or grown before."""

import copy
import random
from itertools import product

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from draftproof import UserError
from draftproof.backends.base import Feed, Session, unread
from draftproof.backends.cache import passes
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.model_info import cache_names
from draftproof.tree import TokenTree
from support.helpers import CONFIGS, backend, embedded_model, random_model
from support.programs import Mistakes, Program, run_program

ARCHITECTURES = ["target", *CONFIGS]
LAYERS = 2  # of each of CONFIGS


def run_programs(seeds, under_test):
    for seed in seeds:
        run_program(seed, under_test)


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", ARCHITECTURES)
@settings(max_examples=20, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_any_program_of_reads_and_rollbacks_reproduces_plain_forward_passes(name, seed):
    assert run_program(seed, backend(name)) > 0


class TwiceLayer(LlamaDecoderLayer):
    """A layer that is run twice, each time with keys and values of its own, as Dory does it (transformers 5.24)."""

    def forward(self, *args, **kwargs):
        for name in cache_names():
            cache = kwargs.get(name)
            if cache is not None and len(cache.layers) == LAYERS:
                cache.layers += [copy.deepcopy(each) for each in cache.layers]
        first = super().forward(*args, **kwargs)
        self.self_attn.layer_idx += LAYERS
        try:
            return super().forward(first, *args[1:], **kwargs)
        finally:
            self.self_attn.layer_idx -= LAYERS


def test_layers_may_be_run_several_times_in_a_pass():
    model = random_model(CONFIGS["llama"]())
    assert len(model.model.layers) == LAYERS
    for layer in model.model.layers:
        layer.__class__ = TwiceLayer
    assert run_program(0, HFBackend(model)) > 0


@pytest.mark.parametrize("name", ["target", "gemma3", "gpt2"])
@settings(max_examples=3, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_programs_whose_prompts_outgrow_chunks_and_capacity(name, seed):
    draw = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "PREFILL_CHUNK", 24)
        patch.setattr(passes, "PASS", 1)
        fresh = HFBackend(backend(name).model, check=False)
        program = Program(fresh)
        vocab = fresh.vocab_size
        prompts = {
            row: [draw.randrange(vocab) for _ in range(draw.choice([3, 23, 24, 25, 100, 240]))] for row in range(3)
        }
        program.forward([(row, prompt, [5, 6, 7], [-1, 0, 0]) for row, prompt in prompts.items()])
        program.keep(1, len(prompts[1]), (0, 2))
        program.keep(0, 2)
        program.forward(
            [(1, prompts[0], [8], [-1]), (2, [], [9, 9], [1, 3]), (0, prompts[1] + prompts[2][:40], [], [])]
        )
        program.keep(2, len(prompts[2]), (0, 1, 3))
        for step in range(4):
            program.forward([(row, [step, row], [1, 2], [-1, -1]) for row in (2, 0)])
            program.keep(2, len(program.records[2][0]), (1,))
            program.keep(0, len(program.records[0][0]))
        program.forward([(3, [draw.randrange(vocab) for _ in range(400)], [], [])], hidden=True)
        program.close_all()


def padded(groups, lengths):
    return sum(passes.PASS + len(group) * max(lengths[row] for row in group) for group in groups)


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=6))
def test_rows_of_like_length_are_read_together(lengths):
    groups = passes.similar_lengths(lengths)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    assert all(group == sorted(group) for group in groups)
    every = product(range(3), repeat=len(lengths))
    splits = ([[row for row in range(len(lengths)) if of[row] == number] for number in set(of)] for of in every)
    assert padded(groups, lengths) <= min(padded(split, lengths) for split in splits)


def test_rows_of_a_round_are_read_at_once():
    assert passes.similar_lengths([1, 5, 1, 1, 3, 1, 1, 1]) == [list(range(8))]
    assert passes.similar_lengths([60, 64, 400, 58]) == [[0, 1, 3], [2]]
    assert passes.similar_lengths([]) == [[]]


def test_capacity_growth_keeps_what_other_sessions_have_read():
    program = Program(HFBackend(backend("llama").model, check=False))
    program.forward([(0, list(range(50)), [], [])])
    for row in range(1, 6):
        program.forward([(row, [row] * (60 * row), [], [])])
    program.forward([(row, [7], [8, 9], [-1, -1]) for row in (5, 0, 3)])
    program.close_all()


@pytest.mark.grid(4)
@pytest.mark.parametrize("mistake", [name for name in vars(Mistakes) if not name.startswith("_")])
def test_programs_see_the_mistake(mistake, monkeypatch):
    under_test = HFBackend(backend("gemma3").model)
    getattr(Mistakes, mistake)(monkeypatch)
    with pytest.raises(AssertionError, match="a row is off by"):
        run_programs(range(5), under_test)


def test_bfloat16_rows_stay_near_the_plain_pass():
    model = transformers.AutoModelForCausalLM.from_pretrained(
        embedded_model("target").name_or_path, dtype=torch.bfloat16
    )
    program = Program(HFBackend(model), tolerance=0.1)
    program.forward([(0, [1, 80, 90, 100], [5, 6, 7], [-1, 0, -1]), (1, [1, 300], [], [])])
    program.keep(0, 4, (0, 1))
    program.forward([(1, [7], [8], [-1]), (0, [9, 10], [], [])], hidden=True)


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator on this machine")
def test_an_accelerator_reproduces_its_plain_passes():
    model = random_model(CONFIGS["llama"]()).to(torch.accelerator.current_accelerator())
    under_test = HFBackend(model)
    assert under_test.device.type == torch.accelerator.current_accelerator().type
    session = under_test.open()
    under_test.forward([Feed(session, [1, 2, 3], TokenTree(torch.tensor([4, 5, 6]), (-1, 0, 0)))])
    session.keep(3, (0, 2))
    assert session.tokens == [1, 2, 3, 4, 6]
    found = under_test.forward([Feed(session, [7])])[0].logits
    expected = model(input_ids=torch.tensor([[1, 2, 3, 4, 6, 7]], device=under_test.device)).logits[0, -1:]
    assert torch.allclose(found, expected, atol=1e-2)


# --- what the cache holds ---------------------------------------------------------------------------------------------


def test_slots_are_reused_and_the_lowest_first():
    under_test = HFBackend(backend("llama").model, check=False)
    sessions = [under_test.open() for _ in range(4)]
    for row in (2, 0):
        sessions[row].close()
        sessions[row].close()  # a second close changes nothing
    opened = [under_test.open() for _ in range(3)]
    assert [session.slot for session in opened] == [0, 2, 4]


def test_nan_left_in_a_slot_does_not_reach_the_next_session():
    under_test = HFBackend(backend("llama").model, check=False)
    first, other = under_test.open(), under_test.open()
    under_test.forward([Feed(first, list(range(20))), Feed(other, list(range(30)))])
    with torch.inference_mode():
        for buffer in (*under_test._cache._keys.values(), *under_test._cache._values.values()):
            buffer[first.slot] = torch.nan
    first.close()
    reused = under_test.open()
    assert reused.slot == 0
    rows = under_test.forward([Feed(reused, [1, 2, 3]), Feed(other, [4])])
    assert all(output.logits.isfinite().all() for output in rows)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_forward_that_dies_midway_is_repeated_as_if_nothing_had_happened(layer):
    under_test = backend("llama")
    program = Program(under_test)
    program.forward([(0, [1, 2, 3], [4, 5, 6], [-1, 0, -1]), (1, [9, 8], [], [])])
    program.keep(0, 3, (0, 1))

    def die(*_):
        raise MemoryError("out of memory")

    hook = under_test.model.model.layers[layer].register_forward_hook(die)
    feeds = [Feed(program.sessions[0], [7], TokenTree.chain(torch.tensor([8, 9]))), Feed(program.sessions[1], [7])]
    with pytest.raises(MemoryError):
        under_test.forward(feeds)
    hook.remove()
    program.agrees(0)
    program.agrees(1)
    program.forward([(1, [5], [1], [-1]), (0, [6, 6], [7, 8, 9], [-1, 0, 0])])
    program.close_all()


# --- what is refused --------------------------------------------------------------------------------------------------


def refused():
    tiny = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}
    return {
        "mamba": (transformers.MambaForCausalLM, transformers.MambaConfig(**tiny, state_size=4)),
        "rwkv": (transformers.RwkvForCausalLM, transformers.RwkvConfig(**tiny, attention_hidden_size=32)),
        "t5": (
            transformers.T5ForConditionalGeneration,
            transformers.T5Config(vocab_size=97, d_model=32, d_ff=48, d_kv=8, num_heads=4, num_layers=2),
        ),
    }


@pytest.mark.parametrize("name", ["mamba", "rwkv", "t5"])
def test_models_that_cannot_roll_back_are_refused_in_one_line(name):
    make, config = refused()[name]
    with pytest.raises(UserError, match=name) as caught:
        HFBackend(make(config), name=name)
    assert "\n" not in str(caught.value)


def test_a_model_without_an_output_embedding_is_refused():
    with pytest.raises(UserError, match="no output embedding"):
        HFBackend(transformers.LlamaModel(CONFIGS["llama"]()), name="headless")


def test_a_model_that_ignores_positions_is_refused():
    model = transformers.AutoModelForCausalLM.from_pretrained(embedded_model("target").name_or_path)

    def drop_positions(_module, args, kwargs):
        return args, {**kwargs, "position_ids": None}

    model.model.register_forward_pre_hook(drop_positions, with_kwargs=True)
    with pytest.raises(UserError, match="does not reproduce its own logits after a rollback"):
        HFBackend(model, name="doctored")


def test_illegal_feeds_are_refused_before_anything_is_read():
    under_test = backend("llama")
    good, bad, closed = under_test.open(), under_test.open(), under_test.open()
    closed.close()
    under_test.forward([Feed(bad, [1], TokenTree.chain(torch.tensor([2])))])
    whole, piece = TokenTree.chain(torch.tensor([3])), TokenTree(torch.tensor([3]), (0,), known=2)
    wrong = {
        "without tokens": Feed(bad, []),
        "call keep first": Feed(bad, [2]),
        "came after 1": Feed(bad, [], whole),
        "continues 2 nodes": Feed(bad, [], piece),
        "must read a chain first": Feed(under_test.open(), [], whole),
        "closed session": Feed(closed, [1]),
        "another backend": Feed(backend("gpt2").open(), [1]),
        "at most 640 positions, requested are 641": Feed(under_test.open(), [1] * 640, whole),
        "fed twice": Feed(good, [1]),
    }
    for message, feed in wrong.items():
        with pytest.raises(ValueError, match=message):
            under_test.forward([Feed(good, [1]), feed])
        assert good.length == 0
    for session in (good, bad):
        session.close()


# --- sessions without a model -----------------------------------------------------------------------------------------


def session_with(stem, tail=(), parents=()):
    session = Session()
    if stem:
        session.read(torch.tensor(stem), TokenTree(torch.tensor(tail, dtype=torch.int64), tuple(parents)))
    return session


def test_a_session_tells_stem_from_tail():
    session = session_with([1, 2, 3], [4, 5, 6], [-1, 0, -1])
    assert (session.tokens, session.stem, session.length, session.tail) == ([1, 2, 3, 4, 5, 6], 3, 6, (-1, 0, -1))
    session.read(torch.tensor([], dtype=torch.int64), TokenTree(torch.tensor([7]), (2,), known=3))
    session.keep(3, (2, 3))
    assert (session.tokens, session.stem, session.tail) == ([1, 2, 3, 6, 7], 5, ())


@pytest.mark.parametrize(
    ("base", "nodes"), [(-1, ()), (4, ()), (2, (0,)), (3, (1,)), (3, (0, 2)), (3, (3,)), (3, (-1,)), (3, (0, 0))]
)
def test_keep_refuses_what_is_no_path_and_changes_nothing(base, nodes):
    session = session_with([1, 2, 3], [4, 5, 6], [-1, 0, -1])
    with pytest.raises(ValueError, match=r"keep"):
        session.keep(base, nodes)
    assert (session.tokens, session.tail) == ([1, 2, 3, 4, 5, 6], (-1, 0, -1))


@pytest.mark.parametrize(
    ("tokens", "rest"),
    [
        ([1, 2, 3], [3]),
        ([1, 9, 3], [9, 3]),
        ([9], [9]),
        ([1], [1]),
        ([1, 2], [2]),
        ([1, 2, 3, 4], [4]),
        ([1, 2, 3, 4, 5], [5]),
        ([1, 2, 3, 5, 6, 7], [7]),
        ([1, 2, 3, 5, 4], [4]),
        ([1, 2, 3, 6], [6]),
    ],
)
def test_unread_keeps_what_is_shared_through_stem_and_tail_and_leaves_at_least_one_token(tokens, rest):
    session = session_with([1, 2, 3], [4, 5, 6], [-1, -1, 1])
    assert unread(session, tokens) == rest
    assert session.tokens == tokens[: len(tokens) - len(rest)]
    assert session.tail == ()


def test_unread_refuses_an_empty_sequence():
    with pytest.raises(ValueError, match="nothing to read"):
        unread(Session(), [])


@given(known=st.lists(st.integers(0, 2), max_size=6), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_what_is_kept_and_what_is_unread_make_the_sequence(known, tokens):
    session = session_with(known)
    rest = unread(session, tokens)
    assert rest
    assert session.tokens + rest == tokens
    agree = next(
        (i for i, pair in enumerate(zip(known, tokens, strict=False)) if pair[0] != pair[1]),
        min(len(known), len(tokens)),
    )
    assert session.length == min(agree, len(tokens) - 1)
