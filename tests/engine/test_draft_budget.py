"""A budget of drafted tokens over a batch: what it bounds, to whom it gives; outputs keep their distribution."""

import math

import pytest
import torch

from draftproof import Engine, SamplingParams, UserError
from draftproof.audit.compositions import DRAFT, DRAFTERS, VOCAB, toy_target
from draftproof.draft import Draft
from draftproof.drafters.base import DraftRequest
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.engine.options import EngineOptions
from draftproof.engine.verifier_parts import VERIFIERS, make_verifier
from draftproof.errors import RequestError
from draftproof.rng import CounterRoundRng
from draftproof.stoppers.auto import Auto
from draftproof.stoppers.budget import DraftBudget, likeliest
from draftproof.stoppers.fixed import FixedLength
from draftproof.stoppers.probability import Predicted
from draftproof.testing import TableModel
from draftproof.theory.cost import BatchCosts, RoundCosts
from draftproof.tree import TokenTree
from support.changing_costs import changing
from support.distributions import joint_distance

PAIR, GREEDY = ("embedded:stories", "embedded:stories-draft"), SamplingParams(temperature=0, max_tokens=40)
TWO = FixedLength(2)
BOTH = [[0, 1, 2], [1, 2, 1]]
PROMPTS = ["Once upon a time", "The little dog", "One day Tom", "Lily was", "A big red ball"]


def toy(drafter, stopper):
    small = TableModel(VOCAB, 0, order=1, rows=DRAFT, predicts=True)
    return DRAFTERS[drafter].make(DraftModel(small, vocab_size=VOCAB), stopper)


class WithPadding:
    """Draws of `match` from rows that are padding, whose outcome nobody looks at: always 0."""

    def __init__(self, rng):
        self._rng = rng

    def at(self, *of, **rows):
        return WithPadding(self._rng.at(*of, **rows))

    def bernoulli(self, prob):
        return self._rng.bernoulli(prob)

    def categorical(self, weights):
        weights = weights.clone()
        weights[..., 0] += weights.sum(-1) == 0
        return self._rng.categorical(weights)


def maker(rule, budget, drafter="model", stopper=TWO, seen=None):
    """Engines over the toy pair; `seen` gets the lengths of the drafts of each round."""

    def make(round_rng):
        rng = (lambda *of: WithPadding(round_rng(*of))) if rule == "match" else round_rng
        engine = Engine(toy_target(), toy(drafter, stopper), make_verifier(rule), round_rng=rng, draft_budget=budget)
        cut = engine._budget.cut

        def watched(rows, drafts):
            made = cut(rows, drafts)
            if seen is not None:
                seen.add(tuple(map(len, made)))
            return made

        engine._budget.cut = watched
        return engine

    return make


# --- the distribution ---------------------------------------------------------------------------------------------


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("rule", "drafter", "stopper", "budget", "tokens"),
    [
        ("token", "model", TWO, 3, (3, 3)),
        ("block", "model", TWO, 3, (3, 3)),
        ("block", "model", TWO, 2, (3, 3)),
        ("block", "model", Predicted(0.1, 2), 3, (3, 3)),
        ("gumbel", "model", TWO, 3, (3, 2)),
        ("trie_block", "model", TWO, 2, (3, 2)),
        *[(rule, "model", TWO, 2, (3, 2)) for rule in ("spectr", "multi_round", "traversal", "multi_path")],
        pytest.param("match", "model", TWO, 2, (3, 2), marks=pytest.mark.slow),
        ("block", "model+suffix", FixedLength(1), 3, (3, 3)),
        ("token", "suffix", FixedLength(1), 3, (3, 3)),
    ],
)
def test_the_joint_distribution_of_two_requests_with_one_budget(rule, drafter, stopper, budget, tokens):
    """What one request drafts depends on what was drawn for the other; the outputs stay independent."""
    seen, params = set(), [SamplingParams(max_tokens=most) for most in tokens]
    make = maker(rule, budget, drafter, stopper, seen)
    make(CounterRoundRng).generate(BOTH, params)  # once with shapes and types checked
    assert joint_distance(make, BOTH, params) < 1e-12
    assert max(map(sum, seen)) == budget
    assert any(len(lengths) == 2 and lengths[0] != lengths[1] for lengths in seen), "never shared unevenly"


class DecidedByTheToken(DraftBudget):
    """Looks at the tokens that it chooses among: it drops the drawn one that was least likely."""

    def admit(self, rows, rooms, logits):  # noqa: ARG002
        return [True] * len(rows)

    def cut(self, rows, drafts):  # noqa: ARG002
        found = list(drafts)
        while sum(map(len, found)) > self.most:
            last = [float(each.probs[-1, each.tree.tokens[-1]]) if len(each) else 2.0 for each in found]
            worst = last.index(min(last))
            found[worst] = found[worst].first(len(found[worst]) - 1)
        return found


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_budget_that_is_decided_by_the_token_itself_is_detected(rule):
    """Negative control."""

    def make(round_rng):
        engine = maker(rule, 2)(round_rng)
        engine._budget = DecidedByTheToken(2)
        return engine

    assert joint_distance(make, BOTH, [SamplingParams(max_tokens=3), SamplingParams(max_tokens=2)]) > 0.01


def test_every_lossless_rule_that_takes_a_budget_is_enumerated():
    (cases,) = [
        mark.args[1]
        for mark in test_the_joint_distribution_of_two_requests_with_one_budget.pytestmark
        if mark.name == "parametrize"
    ]
    rules = {getattr(case, "values", case)[0] for case in cases}
    lossless = {name for name, part in VERIFIERS.items() if part.lossless and not part.traits.constant_length}
    assert rules == lossless


def test_the_joint_distribution_while_drafters_change():
    """The drafter `auto`, with sources, lookups and a budget that all of them share."""
    seen = set()

    def make(round_rng):
        drafter = changing((0.05, 0.04))
        propose = drafter.propose

        def watched(requests, rng):
            drafts = propose(requests, rng)
            seen.add((bool(drafter._choice.lookups), drafter._choice.source is not None, sum(map(len, drafts))))
            return drafts

        drafter.propose = watched
        return Engine(TableModel(3, 1, zeros=0.5), drafter, round_rng=round_rng, draft_budget=2)

    prompts = [[0, 2, 1, 0, 2, 1, 0, 2], [1]]
    assert joint_distance(make, prompts, [SamplingParams(max_tokens=3)] * 2) < 1e-12
    assert {each[:2] for each in seen} >= {(True, True), (False, True)}


# --- what it bounds -------------------------------------------------------------------------------------------------


def watched(engine):
    """The number of drafted tokens of each pass of the target."""
    seen, forward = [], engine.target.forward

    def noting(feeds):
        seen.append(sum(0 if feed.tree is None else len(feed.tree) for feed in feeds))
        return forward(feeds)

    engine.target.forward = noting
    return seen


@pytest.fixture(scope="module")
def plain():
    return Engine.load(PAIR[0], drafter="none").generate(PROMPTS, GREEDY)


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("drafter", "stopper", "verifier"),
    [
        ("model", "fixed:4", "block"),
        ("model", "confidence:0.3", "token"),
        ("model", "schedule:3", "gumbel"),
        ("model", "auto", None),
        ("model+suffix:8", "fixed:3", "block"),
        ("ngram:8", None, "token"),
        ("suffix:16", None, "block"),
        ("auto", None, None),
    ],
)
def test_greedy_texts_are_plain_ones_and_no_round_is_over_the_budget(drafter, stopper, verifier, plain):
    """Ragged prompts, more of them than places, so that requests join and leave."""
    draft = PAIR[1] if drafter.startswith(("model", "auto")) else None
    engine = Engine.load(
        PAIR[0], draft, drafter=drafter, stopper=stopper, verifier=verifier, draft_budget=5, max_batch=3
    )
    rounds = watched(engine)
    params = [SamplingParams(temperature=0, max_tokens=most) for most in (40, 7, 1, 23, 40)]
    outputs = engine.generate(PROMPTS, params)
    for output, whole, own in zip(outputs, plain, params, strict=True):
        assert output.token_ids == whole.token_ids[: own.max_tokens]
    assert 0 < max(rounds) <= 5
    assert drafter == "auto" or stopper == "auto" or max(rounds) == 5, "a budget that never binds proves nothing"


@pytest.mark.parametrize("drafter", ["model", "model+suffix:8"])
def test_a_grammar_holds_under_a_budget(drafter):
    engine = Engine.load(*PAIR, drafter=drafter, stopper="fixed:4", draft_budget=5)
    rounds = watched(engine)
    params = SamplingParams(max_tokens=24, seed=2, n=4, grammar="regex:([a-z]{1,3} )*")
    for output in engine.generate("Once upon a time", params):
        assert all(1 <= len(word) <= 3 and word.islower() for word in output.text.split())
    assert max(rounds) == 5


@pytest.mark.grid(1)
@pytest.mark.parametrize("rule", [None, "block", "token"])
def test_a_seed_gives_one_text_alone_and_with_others(rule):
    """What a request drafts depends on the others, so one with a seed is verified by gumbel, whatever rule is named.

    Two requests with one seed share the numbers of their draws: a token of one would decide about that of the other.
    """
    engine = Engine.load(*PAIR, stopper="fixed:4", drafter="model", draft_budget=3, verifier=rule)
    params = SamplingParams(max_tokens=24, seed=5)
    (alone,) = engine.generate(PROMPTS[0], params)
    together = engine.generate(PROMPTS[:3], params)[0]
    assert alone.verifier == together.verifier == "gumbel"
    assert alone.token_ids == together.token_ids
    assert engine.generate(PROMPTS[0], SamplingParams(max_tokens=8))[0].verifier == (rule or "block")
    assert Engine.load(*PAIR, stopper="fixed:4", drafter="model", verifier=rule).seeded_verifier is None


def test_lengths_of_a_draft_do_not_depend_on_the_stride():
    found = []
    for stride in (1, 4):
        engine = maker("block", 3, stopper=FixedLength(4))(None)
        engine.drafter._stride = stride
        outputs = engine.generate([[0, 1], [1, 2], [2]], [SamplingParams(max_tokens=8, seed=seed) for seed in range(3)])
        found.append([(output.token_ids, output.stats.num_draft_tokens) for output in outputs])
    assert found[0] == found[1]


def test_auto_counts_no_request_as_one_that_cannot_be_drafted_for():
    """A request without a draft because others took the budget may have one in the next round."""
    drafter = changing((0.05, 0.04))
    engine = Engine(TableModel(3, 1), drafter, draft_budget=1)
    outputs = engine.generate([[0, 2], [1]], [SamplingParams(max_tokens=20, seed=seed) for seed in (1, 2)])
    assert all(output.stats.num_draft_tokens for output in outputs)
    assert not any(source.unable for source in drafter.sources)


# --- to whom it gives -----------------------------------------------------------------------------------------------


def test_the_likeliest_tokens_of_all_chains():
    assert likeliest([[0.9, 0.8, 0.2], [0.5, 0.4]], 3) == [2, 1]
    assert likeliest([[0.9, 0.8, 0.2], [0.5, 0.4]], 9) == [3, 2]
    assert likeliest([[0.9], [], [0.5]], 0) == [0, 0, 0]
    assert likeliest([[0.5, 0.5], [0.5, 0.5]], 2) == [1, 1], "of equals first the tokens that are nearer"


def certain(*rows):
    return [torch.tensor(row).log() for row in rows]


def test_the_row_of_a_token_that_is_not_drawn_yet_decides():
    budget = DraftBudget(2)
    assert budget.admit([7, 8], [1, 1], certain([0.5, 0.5], [0.1, 0.9])) == [True, True], "enough for both"
    budget.begin()
    assert budget.admit([7, 8, 9], [1, 1, 1], certain([0.5, 0.5], [0.1, 0.9], [0.3, 0.7])) == [False, True, True]
    assert budget.within(3) == 0


def test_room_for_later_tokens_of_a_sure_chain_is_kept():
    budget = DraftBudget(2)
    assert budget.admit([7, 8], [4, 4], certain([0.5, 0.5], [0.02, 0.98])) == [False, True], "0.94 and 0.66, or 0.56"
    assert budget.admit([8], [3], certain([0.5, 0.5])) == [True]
    assert budget.within(9) == 0


def test_what_was_accepted_says_what_is_likely():
    """Tokens of sure rows are always wrong here, and those of others right."""
    budget, rows = DraftBudget(2), certain([0.02, 0.98], [0.5, 0.5], [0.5, 0.5])
    for _ in range(30):
        budget.begin()
        for request, goes in enumerate(budget.admit([0, 1, 2], [1, 1, 1], rows)):
            budget.observe(request, int(goes), int(goes and request > 0))
    budget.begin()
    assert budget.admit([5, 6, 7], [1, 1, 1], rows) == [False, True, True]


def chain(*tokens, drawn):
    return Draft(TokenTree.chain(torch.tensor(tokens)), torch.full((len(tokens), 4), 0.25), certain_from=drawn)


def test_only_tokens_that_were_not_drawn_are_cut():
    budget = DraftBudget(3)
    drafts = [chain(1, 2, 3, drawn=1), chain(2, 3, drawn=2)]
    assert [len(each) for each in budget.cut([0, 1], drafts)] == [1, 2]
    budget = DraftBudget(4)
    assert [len(each) for each in budget.cut([0, 1], drafts)] == [2, 2]


def test_the_plan_of_auto_counts_the_tokens_that_the_budget_allows():
    """Four requests, of whose first tokens a half is accepted: one token among four does not pay for the draft."""
    costs = BatchCosts((4,), (RoundCosts(1.0, 0.05, token=0.2),))
    plans = [Auto(costs, 8, most=most).make_plan(range(4), batch=4) for most in (1.0, 2.0, 4.0, 8.0, math.inf)]
    assert [plan.length for plan in plans] == [0, 1, 1, 2, 2]
    assert plans[1].speed == pytest.approx((4 + 2 * 0.5) / 4 / (1 + 0.05 + 0.2 / 2))


def test_a_draft_model_that_fails_for_a_request_ends_that_request_only():
    wrong = TableModel(VOCAB, 0, order=1, rows={**DRAFT, (1,): [math.nan] * VOCAB})
    drafter = ModelDrafter(DraftModel(wrong, vocab_size=VOCAB), TWO)
    engine = Engine(TableModel(VOCAB, 0, order=1, rows={(0,): [1.0, 0.0, 0.0]}), drafter, draft_budget=3)
    with pytest.raises(RequestError) as caught:
        engine.generate([[1], [0]], SamplingParams(max_tokens=6))
    failed, whole = caught.value.outputs
    assert failed is None
    assert whole.token_ids == (0,) * 6


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_a_budget_is_refused_for():
    with pytest.raises(UserError, match="drafts trees"):
        Engine(toy_target(), toy("chains", TWO), make_verifier("trie_block"), draft_budget=4)
    with pytest.raises(UserError, match="constant length"):
        maker("greedy_block", 4)(None)
    with pytest.raises(UserError, match="draft_budget: expected 1 or more"):
        EngineOptions(draft_budget=0)


def test_drafters_get_no_bound_without_one():
    request = DraftRequest(0, [1], 1, 4, SamplingParams().bind(vocab_size=3, eos_token_ids=(), prompt_ids=[1]))
    assert request.budget.within(64) == 64
    assert request.budget.admit([0], [9], []) == [True]
