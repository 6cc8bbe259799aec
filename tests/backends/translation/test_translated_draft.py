"""A draft model with another vocabulary: exact outputs by enumeration, and sessions that follow the target's tokens."""

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed, room, unread
from draftproof.backends.cache.prefix_cache import PrefixCache
from draftproof.backends.translation.backend import TranslatedBackend
from draftproof.backends.translation.token_map import WIDEST, TokenMap
from draftproof.bench.cell import Cell
from draftproof.bench.model_cache import ModelCache
from draftproof.drafters.base import DraftRequest
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.sampled_tree import SampledTreeDrafter
from draftproof.embedded import draft_dir, target_dir
from draftproof.engine.verifier_parts import make_verifier
from draftproof.integrations.transformers import speculative
from draftproof.rng import CounterRoundRng
from draftproof.stoppers.fixed import FixedLength
from draftproof.testing import TableModel, assert_lossless
from draftproof.tree import TokenTree
from support.helpers import backend, tokenizer
from support.vocabularies import added, padded, renamed, renumbered

TOKENS = TokenMap({4: 0, 1: 2}, {1: (0, 3)}.__getitem__, opening=(2,))  # the target's token 1 is written by two


def translated(**options):
    return TranslatedBackend(TableModel(5, 2, order=4, **options), TOKENS)


class FullModel(DraftModel):
    """q without normalisation over the shared tokens: what the draft model gives them among all its own."""

    def _rows(self, request, logits, paths, ids):
        found = super()._rows(request, logits, paths, ids)
        return found * 0.8


def maker(rule, *, drafter=ModelDrafter, model=DraftModel, draft=None, eos=(), **options):
    def make(round_rng):
        target = TableModel(3, 1)
        part = drafter(model(draft or translated(), vocab_size=3), FixedLength(2), **options)
        return Engine(target, part, make_verifier(rule), eos_token_ids=eos, round_rng=round_rng)

    return make


RULES = pytest.mark.parametrize("rule", ["token", "block", "gumbel", "match"])


@pytest.mark.grid(2)
@RULES
def test_the_output_distribution_is_the_targets(rule):
    assert_lossless(maker(rule), prompt=(0, 1), params=SamplingParams(max_tokens=2 if rule == "match" else 3))


@pytest.mark.parametrize("rule", ["trie_block", "traversal", "multi_round"])
@pytest.mark.parametrize("options", [{"chains": 2}, {"factors": (2, 1)}], ids=str)
def test_the_output_distribution_is_the_targets_with_trees(rule, options):
    make = maker(rule, drafter=SampledTreeDrafter, **options)
    assert_lossless(make, prompt=(1, 0), params=SamplingParams(max_tokens=2))


@pytest.mark.grid(5)
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.6, "top_k": 2},
        {"temperature": 0.0},
        {"logit_bias": {1: 3.0, 2: -1.0}},
        {"repetition_penalty": 1.7, "frequency_penalty": 0.4},
        {"min_tokens": 2},
    ],
    ids=str,
)
def test_the_output_distribution_is_the_targets_under_sampling_parameters(rule, params):
    assert_lossless(maker(rule, eos=(2,)), prompt=(1,), params=SamplingParams(max_tokens=3, **params))


def test_the_output_distribution_is_the_targets_across_the_end_of_the_drafts_context():
    short = translated(max_positions=6)
    assert room(short, [1], vocab_size=3, edits=False) == 3
    assert room(short, [1, 1, 1], vocab_size=3, edits=False) < 0
    assert_lossless(maker("block", draft=short), prompt=(1,), params=SamplingParams(max_tokens=4))


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_q_that_is_not_normalised_over_the_shared_tokens_is_found(rule):
    with pytest.raises(AssertionError, match="total variation"):
        assert_lossless(maker(rule, model=FullModel), prompt=(0, 1), params=SamplingParams(max_tokens=3))


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_output_distribution_is_the_targets_where_the_draft_has_a_token_more(rule):
    """Nothing is translated then; with a q that is not normalised over the target's tokens it fails."""
    options = {"prompt": (0, 1), "params": SamplingParams(max_tokens=3)}
    assert_lossless(maker(rule, draft=TableModel(4, 2)), **options)
    with pytest.raises(AssertionError, match="total variation"):
        assert_lossless(maker(rule, draft=TableModel(4, 2), model=FullModel), **options)


def test_a_rule_that_needs_constant_drafts_is_refused():
    with pytest.raises(UserError, match="greedy_block is exact only for drafts of constant length"):
        maker("greedy_block")(None)


# --- rows and sessions ------------------------------------------------------------------------------------------------


def test_rows_are_those_of_the_draft_model_for_the_shared_tokens():
    wrapped = translated()
    inner = wrapped.inner
    assert wrapped.vocab_size == 2
    (output,) = wrapped.forward([Feed(wrapped.open(), [0, 1, 2])])
    assert output.ids.tolist() == [0, 2]
    torch.testing.assert_close(output.logits[0], inner.logits([2, 4, 0, 3, 1])[[4, 1]])
    tree = TokenTree(torch.tensor([2, 0, 1]), (-1, -1, 0))
    (output,) = wrapped.forward([Feed(wrapped.open(), [1], tree)])
    contexts = [[2, 0, 3], [2, 0, 3, 1], [2, 0, 3, 4], [2, 0, 3, 1, 3]]
    torch.testing.assert_close(output.logits, torch.stack([inner.logits(each)[[4, 1]] for each in contexts]))


def test_a_session_of_another_model_is_refused():
    with pytest.raises(ValueError, match="a session of another backend was fed to table:2"):
        translated().forward([Feed(TableModel(3, 1).open(), [0])])


class OnlyOne:
    """A constraint, or a processor of scores, that leaves the token 1 alone, which is not shared."""

    def __call__(self, scores, _output_ids, paths):
        return scores.masked_fill(~self.allowed((), paths), float("-inf"))

    def fresh(self):
        return self

    def allowed(self, _output_ids, paths):
        return torch.tensor([[False, True, False]]).expand(len(paths), 3)

    def forced(self, _output_ids):
        return []


@pytest.mark.parametrize("most", [30, 100])
@pytest.mark.parametrize("kind", ["constraint", "processor"])
def test_edits_of_logits_may_draw_tokens_that_are_not_shared(kind, most):
    wrapped = translated(max_positions=most)
    drafter = ModelDrafter(DraftModel(wrapped, vocab_size=3), FixedLength(4))
    transforms = replace(SamplingParams().bind(vocab_size=3, prompt_ids=[0, 0]), **{kind: OnlyOne()})
    (draft,) = drafter.propose([DraftRequest(0, [0, 0], 2, 9, transforms)], CounterRoundRng([1], [0]))
    room = (most - 3) // WIDEST  # each may be written by so many
    assert draft.tree.ids == (1,) * min(room, 4)
    assert draft.probs.tolist() == [[0.0, 1.0, 0.0]] * min(room, 4)
    drafter.release(0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["chain", "tree", "level", "keep", "fork", "trim"]),
        st.integers(0, 5),
        st.lists(st.integers(0, 2), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=8,
)


@functools.cache
def models():
    """A table, and a transformer with a cache, of 97 tokens: every third one is shared."""
    some = TokenMap({3 * each + 1: each for each in (0, 2)}, {1: (5, 6, 7)}.__getitem__, opening=(9,))
    return [translated(), TranslatedBackend(backend("llama"), some)]


@settings(deadline=None, max_examples=60)
@given(STEPS, st.integers(0, 1))
def test_whatever_was_read_and_kept_rows_are_those_of_a_fresh_session(steps, which):
    wrapped = models()[which]
    session = wrapped.open()
    for kind, number, tokens in [*steps, ("check", 0, [0, 2, 1])]:
        if kind in ("chain", "check") or not session.length:
            session.keep(session.stem)
            text = [*session.tokens, *tokens]
            (found,) = wrapped.forward([Feed(session, unread(session, text))])
            assert session.tokens == text
            torch.testing.assert_close(found.logits[0], fresh(wrapped, text), rtol=1e-4, atol=1e-4)
        elif kind in ("tree", "level"):
            known = len(session.tail) if kind == "level" else 0
            if kind == "tree":
                session.keep(session.stem)
            shared = [2 * (each % 2) for each in tokens]
            parents = tuple((number * each) % (known + each + 1) - 1 for each in range(len(shared)))
            tree = TokenTree(torch.tensor(shared), parents, known)
            (found,) = wrapped.forward([Feed(session, (), tree)])
            path = paths_of(session)[-1]
            stem = session.tokens[: session.stem]
            text = [*stem, *(session.tokens[session.stem + node] for node in path)]
            torch.testing.assert_close(found.logits[-1], fresh(wrapped, text), rtol=1e-4, atol=1e-4)
        elif kind == "keep" and session.tail and number > 2:
            session.keep(session.stem, paths_of(session)[number % len(session.tail)])
        elif kind == "keep":
            session.keep(min(number, session.stem))
        else:
            session.keep(session.stem)
            if kind == "trim":
                session.trim()
            else:
                session = session.fork(session.reach(min(number, session.stem)))
    session.close()


def fresh(wrapped, text):
    """The row after a text, in a session that has read nothing else."""
    session = wrapped.open()
    (output,) = wrapped.forward([Feed(session, text)])
    session.close()
    return output.logits[0]


def paths_of(session):
    paths = []
    for node, parent in enumerate(session.tail):
        paths.append([node] if parent < 0 else [*paths[parent], node])
    return paths


def test_what_is_kept_of_a_request_is_not_read_again(monkeypatch):
    wrapped = models()[1]
    reads = []
    forward = type(wrapped.inner).forward

    def counted(self, feeds, **options):
        reads.extend(len(each) for each in feeds)
        return forward(self, feeds, **options)

    monkeypatch.setattr(type(wrapped.inner), "forward", counted)
    kept = PrefixCache(4, shortest=4)
    text = [0, 1, 2, 0, 0, 2, 1, 1]
    session = kept.open(wrapped, text)
    wrapped.forward([Feed(session, unread(session, text))])
    kept.keep(wrapped, session, text)
    assert session.nbytes > 0
    again = kept.open(wrapped, [*text, 2, 1])
    assert again.length >= len(text) - 1
    row = wrapped.forward([Feed(again, unread(again, [*text, 2, 1]))])[0].logits[0]
    assert reads == [15, 7]  # 1 is written by three tokens, and one stands before a text; the last 1 is read again
    torch.testing.assert_close(row, fresh(wrapped, [*text, 2, 1]), rtol=1e-4, atol=1e-4)
    again.close()


# --- models by name ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    folder = tmp_path_factory.mktemp("renumbered")
    return {
        "all": renumbered(draft_dir(), folder / "all"),
        "most": renumbered(draft_dir(), folder / "most", missing=0.3),
    }


PROMPTS = ["Once upon a time", "Lily had a big red ball. She", "One day, Tom"]


def outputs(draft, **options):
    engine = Engine.load(str(target_dir()), str(draft), **{"stopper": "fixed:3", "drafter": "model", **options})
    return engine.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=40))


@pytest.mark.parametrize("options", [{}, {"drafter": "tree:2x1x1"}, {"draft_dtype": "int8"}], ids=str)
def test_other_ids_change_nothing(copies, options):
    """Everything is shared, so each draft is the same one."""
    ours, theirs = outputs(draft_dir(), **options), outputs(copies["all"], **options)
    assert [each.token_ids for each in ours] == [each.token_ids for each in theirs]
    counts = [(each.stats.num_draft_tokens, each.stats.num_accepted_tokens, each.stats.num_drafts) for each in ours]
    assert counts == [
        (each.stats.num_draft_tokens, each.stats.num_accepted_tokens, each.stats.num_drafts) for each in theirs
    ]


OFTEN = tokenizer().convert_tokens_to_ids("\u2581the")
ALIKE = {  # vocabularies that differ a little, and whether tokens are translated at all
    "a token with another text": (lambda folder: renamed(draft_dir(), folder, "\u2581happ"), False),
    "rows without tokens": (lambda folder: padded(draft_dir(), folder), False),
    "a token more, which the draft likes best": (lambda folder: added(draft_dir(), folder, OFTEN), False),
    "two tokens in each other's place": (lambda folder: renumbered(draft_dir(), folder, exchanged=(300, 301)), True),
}


@pytest.mark.parametrize("what", ALIKE)
def test_a_vocabulary_that_differs_a_little_costs_no_token(what, tmp_path):
    """As many tokens are drafted and accepted in as many passes of the target."""
    make, translates = ALIKE[what]
    folder = make(tmp_path / "draft")
    engine = Engine.load(str(target_dir()), str(folder), stopper="fixed:3", drafter="model")
    (model,) = engine.drafter.backends
    assert isinstance(model, TranslatedBackend) == translates
    ours, theirs = outputs(draft_dir()), engine.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=40))
    for one, other in zip(ours, theirs, strict=True):
        assert other.token_ids == one.token_ids
        assert other.stats.block_efficiency == one.stats.block_efficiency > 1.5
        assert other.stats.num_draft_tokens == one.stats.num_draft_tokens


def test_alone_the_draft_writes_the_token_that_it_has_in_addition(tmp_path):
    """Negative control of that case: only the target's vocabulary keeps this token out of drafts."""
    engine = Engine.load(str(added(draft_dir(), tmp_path / "draft", OFTEN)), drafter="none")
    assert engine.tokenizer.convert_tokens_to_ids("<|more|>") == len(tokenizer())
    for output in engine.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=40)):
        assert len(tokenizer()) in output.token_ids


def test_with_missing_tokens_less_is_accepted_and_the_text_is_the_same(copies, caplog):
    ours, theirs = outputs(draft_dir()), outputs(copies["most"])
    assert [each.token_ids for each in ours] == [each.token_ids for each in theirs]
    accepted = [sum(each.stats.num_accepted_tokens for each in some) for some in (ours, theirs)]
    assert 0 < accepted[1] < accepted[0]
    assert "has another vocabulary than" in caplog.text


def test_the_default_drafter_takes_it_too(copies):
    plain = Engine.load(str(target_dir()), drafter="none").generate(
        PROMPTS, SamplingParams(temperature=0.0, max_tokens=40)
    )
    found = outputs(copies["most"], drafter="auto", stopper=None, kv_memory="64MiB", max_model_len=200)
    assert [each.token_ids for each in plain] == [each.token_ids for each in found]


def test_weights_can_change(copies):
    engine = Engine.load(str(target_dir()), str(copies["all"]), drafter="model", stopper="fixed:3")
    params = SamplingParams(temperature=0.0, max_tokens=20)
    before = engine.generate(PROMPTS, params)
    target, draft = (AutoModelForCausalLM.from_pretrained(each) for each in (target_dir(), copies["all"]))
    engine.update_weights(target, draft)
    after = engine.generate(PROMPTS, params)
    assert [each.stats.num_accepted_tokens for each in before] == [each.stats.num_accepted_tokens for each in after]


def test_a_grammar_is_kept(copies):
    params = SamplingParams(temperature=0.0, max_tokens=30, grammar="regex:[a-z]{3} (the|and|was) she [a-z]+[.]")
    plain, drafted = (
        Engine.load(str(target_dir()), draft, drafter=name, stopper="fixed:3").generate(PROMPTS, params)
        for draft, name in ((None, "ngram:2"), (str(copies["most"]), "model"))
    )
    assert [each.text for each in plain] == [each.text for each in drafted]
    assert all(each.stats.num_accepted_tokens for each in drafted)


def test_benchmarks_and_generate_of_transformers_take_it(copies):
    cell = Cell(str(target_dir()), str(copies["most"]), "model", "fixed:3", "block", dtype="float32")
    measured = ModelCache(device="cpu").engine(cell).generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=40))
    expected = outputs(copies["most"], dtype="float32")
    assert [each.stats.num_accepted_tokens for each in measured] == [
        each.stats.num_accepted_tokens for each in expected
    ]
    model = AutoModelForCausalLM.from_pretrained(target_dir(), dtype=torch.float32)
    words = tokenizer()
    given = words(PROMPTS[0], return_tensors="pt")
    plain = model.generate(**given, max_new_tokens=40, do_sample=False)
    drafted = model.generate(
        **given,
        max_new_tokens=40,
        do_sample=False,
        custom_generate=speculative(str(copies["most"]), drafter="model", tokenizer=words),
    )
    assert plain.tolist() == drafted.tolist()
