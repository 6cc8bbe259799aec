"""The rule `gumbel`: its noise, its closed forms, and texts that depend on the seed and the target alone.

Tests with real noise have fixed seeds, so they are deterministic. A chi-square test fails if correct noise would give
such a statistic with probability ALPHA = 1e-6 or less. There are six such statistics, so correct noise had a chance of
6e-6 to fail when the seeds were chosen. Everything else here is exact, or an equality of texts.
"""

import copy
import os
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from draftproof import Engine, SamplingParams, UserError
from draftproof.audit.compositions import DRAFTERS, PROMPT, STOPPERS, UNSTOPPED, toy_engine
from draftproof.audit.distributions import all_drafts, expected_accepted, verdicts_with_shared_noise
from draftproof.audit.suite import suite
from draftproof.backends.lean.backend import LeanBackend
from draftproof.drafters import suffix
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.engine.drafter_parts import make_drafter, why_not
from draftproof.engine.verifier_parts import make_verifier
from draftproof.functional import block_verify, match_verify
from draftproof.native.dispatch import VARIABLE
from draftproof.rng import CounterRoundRng, NoiseRoundRng, Purpose, first_arrival
from draftproof.stoppers.fixed import FixedLength
from draftproof.testing import EnumeratedNoise, TableModel, assert_lossless, exact_distribution, target_distribution
from draftproof.theory.acceptance import gumbel_acceptance, match_acceptance, token_acceptance
from draftproof.verifiers.chain import ChainVerifier, gumbel_verifier
from support.chi_square import ALPHA, chi_square, counts_of
from support.feature_heads import drafted as head_drafter
from support.feature_heads import net_for
from support.lean_models import lively_model
from support.native_levels import LEVELS
from support.native_models import MODELS

needs_native = pytest.mark.usefixtures("level") if LEVELS else pytest.mark.skip(reason="no native operations here")
SINGLE_CHAINS = [name for name in DRAFTERS if name not in {"chains", "tree", "wide"}]


def noise(seeds, places):
    return NoiseRoundRng(seeds, places)


def winners(row, number, *, seed=3, place=None):
    """Draws from one row: of one seed at many places, or of many seeds at one place."""
    rows = row.expand(number, -1)
    if place is None:
        return noise([seed], [0]).at(Purpose.VERIFY).categorical(rows.unsqueeze(0))[0]
    return noise(range(number), [place] * number).at(Purpose.DRAFT).categorical(rows)


# --- races ------------------------------------------------------------------------------------------------------------

WEIGHT = st.one_of(st.just(0.0), st.floats(0, 1, width=32), st.sampled_from([1e-45, 1e-38, 1e-30, 1.0, 3e38]))


@settings(max_examples=200)
@given(
    row=st.lists(WEIGHT, min_size=1, max_size=12).filter(any),
    key=st.integers(0, (1 << 64) - 1),
    wide=st.booleans(),
    natively=st.booleans(),
)
def test_an_index_without_weight_never_wins(row, key, wide, natively):
    weights = torch.tensor([row], dtype=torch.float64 if wide else torch.float32)
    with patch.dict(os.environ, {VARIABLE: "auto" if natively else "0"}):
        assert weights[0, int(first_arrival(weights, [key]))] > 0


def test_weights_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"expected \[rows, vocab\] or .* with 2 rows"):
        noise([1, 2], [0, 0]).at(Purpose.DRAFT).categorical(torch.ones(3, 5))


# --- the law ----------------------------------------------------------------------------------------------------------

P = torch.tensor([0.05, 0.3, 0.0, 0.25, 0.4])
Q = torch.tensor([0.25, 0.1, 0.2, 0.0, 0.45])


@pytest.mark.grid(1)
@pytest.mark.parametrize("place", [None, 7])
def test_winners_have_the_distribution_of_the_row(place):
    assert chi_square(counts_of(winners(P, 100_000, place=place), 5), P) > ALPHA
    assert chi_square(counts_of(winners(P, 100_000, place=place), 5), (P + 0.01) / (P + 0.01).sum()) < ALPHA


def test_neighbouring_places_and_seeds_are_independent():
    pair = torch.outer(P, P).flatten()
    at = winners(P, 200_000)
    assert chi_square(counts_of(at[::2] * 5 + at[1::2], 25), pair) > ALPHA
    one, other = (winners(P, 100_000, place=place) for place in (4, 5))
    assert chi_square(counts_of(one[:-1] * 5 + other[:-1], 25), pair) > ALPHA
    assert chi_square(counts_of(one[:-1:2] * 5 + one[1::2], 25), pair) > ALPHA
    assert chi_square(counts_of(one * 5 + one, 25), pair) < ALPHA, "negative control: the same noise twice"


def closed_form(p, q):
    """The probability that both draws are i, for each i."""
    p, q = p.double(), q.double()
    ratios = torch.maximum(p.unsqueeze(0) / p.unsqueeze(1), q.unsqueeze(0) / q.unsqueeze(1))
    return torch.where((p > 0) & (q > 0), 1 / ratios.nan_to_num(posinf=torch.inf).sum(-1), 0)


def test_draft_and_target_agree_as_often_as_the_closed_form_says():
    same = closed_form(P, Q)
    one, other = winners(P, 200_000), winners(Q, 200_000)
    found = torch.where(one == other, one, 5)
    assert chi_square(counts_of(found, 6), torch.cat([same, 1 - same.sum(0, keepdim=True)])) > ALPHA
    assert gumbel_acceptance(P[None], Q[None]).item() == pytest.approx(float(same.sum()), abs=1e-12)


def joint_of(p, q):
    """The exact joint distribution of two draws at one place, by areas."""
    return exact_distribution(lambda rng: _both(EnumeratedNoise(rng), p, q))


def _both(noise, p, q):
    return noise.draw(0, 0, q.tolist()), noise.draw(0, 0, p.tolist())


THREE = st.lists(st.sampled_from([0.0, 0.05, 0.3, 1.0, 2.5]), min_size=3, max_size=3).filter(any)


@settings(max_examples=150)
@given(p=THREE, q=THREE)
def test_exact_areas_closed_form_and_bounds(p, q):
    p, q = (torch.tensor(row, dtype=torch.float64) / sum(row) for row in (p, q))
    joint = joint_of(p, q)
    for x in range(3):
        assert sum(w for (_, b), w in joint.items() if b == x) == pytest.approx(float(p[x]), abs=1e-12)
        assert sum(w for (a, _), w in joint.items() if a == x) == pytest.approx(float(q[x]), abs=1e-12)
        assert joint.get((x, x), 0.0) == pytest.approx(float(closed_form(p, q)[x]), abs=1e-12)
    assert sum(w for (a, b), w in joint.items() if a == b) == pytest.approx(
        gumbel_acceptance(p[None], q[None]).item(), abs=1e-12
    )


@settings(max_examples=200)
@given(seed=st.integers(0, 1 << 30), width=st.integers(1, 40), sharp=st.sampled_from([0.3, 1.0, 4.0]))
def test_acceptance_is_between_its_bounds(seed, width, sharp):
    source = torch.Generator().manual_seed(seed)
    p, q = (sharp * torch.randn(2, 1, width, generator=source, dtype=torch.float64)).softmax(-1)
    p[:, ::3] = 0 if width > 3 else p[:, ::3]
    p = p / p.sum(-1, keepdim=True)
    found, best = gumbel_acceptance(p, q), token_acceptance(p, q)
    assert found <= best + 1e-12
    assert found >= best / (2 - best) - 1e-12, "(1 - TV) / (1 + TV)"
    assert found >= match_acceptance(p, q) - 1e-12


def test_expected_lengths_of_the_rule_are_those_of_the_closed_form():
    for pair in suite():
        p, q = pair.p(()).unsqueeze(0), pair.q(()).unsqueeze(0)
        drafts = all_drafts(pair, 1, 1)
        joint = verdicts_with_shared_noise(_as_paths, pair, drafts)
        assert expected_accepted(joint) == pytest.approx(gumbel_acceptance(p, q).item(), abs=1e-9)


def _as_paths(tokens, q, p, **options):
    accepted, token = match_verify(tokens[:, 0], q[:, 0], p[:, 0], **options)
    return torch.zeros_like(accepted), accepted, token


def test_more_than_three_tokens_cannot_be_enumerated():
    with pytest.raises(ValueError, match="expected up to 3 tokens"):
        joint_of(torch.ones(4), torch.ones(4))


# --- the exact output distribution, and mistakes that it shows --------------------------------------------------------


def toy(verifier=None):
    def make(round_rng):
        engine = toy_engine("model", "fixed", "gumbel", round_rng)
        engine.verifier = verifier or engine.verifier
        return engine

    return make


SHORT = SamplingParams(max_tokens=4)


MISTAKES = {"one noise for all places": lambda _: 0, "of two places": lambda place: place // 2}


@pytest.mark.grid(2)
@pytest.mark.parametrize("mistake", [None, *MISTAKES, "keyed by the round"])
def test_the_enumeration_sees_noise_that_is_used_again(mistake, monkeypatch):
    if mistake in MISTAKES:  # noise that is given to another place than its own
        # The method and not the class: type checks look the class up by name once, and would ask for the changed one.
        draw, wrong = EnumeratedNoise.draw, MISTAKES[mistake]
        monkeypatch.setattr(
            EnumeratedNoise, "draw", lambda self, seed, place, weights: draw(self, seed, wrong(place), weights)
        )
    if mistake == "keyed by the round":
        monkeypatch.setattr("draftproof.engine.request.Request.place", property(lambda row: row.round))
        monkeypatch.setattr(
            "draftproof.engine.request.Request.remaining", property(lambda row: row.max_tokens - len(row.output_ids))
        )
    if mistake is None:
        assert_lossless(toy(), prompt=PROMPT, params=SHORT)
    else:
        with pytest.raises(AssertionError, match=r"total variation 0\.[0-9]"):
            assert_lossless(toy(), prompt=PROMPT, params=SHORT)


def test_another_rule_on_shared_noise_is_seen():
    """The draft's noise must not decide what block verification draws from its residual."""
    with pytest.raises(AssertionError, match=r"total variation 0\.[0-9]"):
        assert_lossless(toy(ChainVerifier("block", block_verify, shared_noise=True)), prompt=PROMPT, params=SHORT)


@pytest.mark.grid(1)
@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_output_distribution_with_transforms_and_eos(drafter):
    def make(round_rng):
        engine = toy_engine(drafter, "" if drafter in UNSTOPPED else "fixed", "gumbel", round_rng)
        engine.eos_token_ids = (1,)
        return engine

    params = SamplingParams(max_tokens=4, temperature=0.8, repetition_penalty=1.4, top_p=0.9)
    assert_lossless(make, prompt=PROMPT, params=params)


def test_a_batch_is_the_product_of_its_rows():
    target = TableModel(3, 11, zeros=0.4, order=1)
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=3)]
    prompts = [[0], [0, 2, 1]]

    def joint(rng):
        shared = EnumeratedNoise(rng)
        engine = toy_engine("model", "fixed", "gumbel", shared.round, target=target)
        return tuple(output.token_ids for output in engine.generate(prompts, params))

    first, second = (target_distribution(target, prompt, own) for prompt, own in zip(prompts, params, strict=True))
    found = exact_distribution(joint)
    assert all(found[a, b] == pytest.approx(x * y, abs=1e-12) for a, x in first.items() for b, y in second.items())


# --- one text for a seed ----------------------------------------------------------------------------------------------

VOCAB = 7


def table(seed, *, order=1, **options):
    return TableModel(VOCAB, seed, order=order, **options)


def texts(drafter, stopper, prompts, params, *, max_batch=8, distance=1, rounds=None):
    """Tokens of every request, and the drafted and accepted tokens of all."""
    small = TableModel(VOCAB, 1 if distance == 0 else 5, order=1, hidden=4, predicts=True)
    ends = STOPPERS[stopper].make() if stopper else FixedLength(3)
    made = DRAFTERS[drafter].make(DraftModel(small, vocab_size=VOCAB), ends)
    engine = Engine(
        table(1),
        made,
        gumbel_verifier(),
        max_batch=max_batch,
        eos_token_ids=(6,),
        **({"round_rng": rounds} if rounds else {}),
    )
    outputs = engine.generate(prompts, params)
    return [one.token_ids for one in outputs], outputs


KINDS = [
    SamplingParams(max_tokens=30),
    SamplingParams(max_tokens=17, temperature=0.7, top_k=3),
    SamplingParams(max_tokens=23, temperature=1.3, top_p=0.8, repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingParams(max_tokens=12, temperature=0),
    SamplingParams(max_tokens=9, min_p=0.1, min_tokens=4, logit_bias={2: 1.5}, presence_penalty=0.5),
]
PROMPTS = [[0], [1, 2, 3, 1, 2, 3], [5] * 9, [2, 4], [0, 1, 0, 1]]


def mixed(seed):
    return [replace(kind, seed=seed + number) for number, kind in enumerate(KINDS)]


@pytest.mark.grid(7)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
@pytest.mark.parametrize(
    ("drafter", "stopper"),
    [(name, stopper) for name in SINGLE_CHAINS for stopper in ([""] if name in UNSTOPPED else STOPPERS)],
)
def test_text_is_plain_decodings_with_every_drafter_stopper_and_batch(drafter, stopper, seed):
    expected, _ = texts("none", "", PROMPTS, mixed(seed), max_batch=1)
    drafts = 0
    for max_batch in (1, 2, 8):
        found, outputs = texts(drafter, stopper, PROMPTS, mixed(seed), max_batch=max_batch)
        assert found == expected
        drafts += sum(output.stats.num_draft_tokens for output in outputs)
    assert drafts > 0 or drafter == "none"


@settings(max_examples=30)
@given(
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
    drafter=st.sampled_from([name for name in SINGLE_CHAINS if name != "none"]),
    stopper=st.sampled_from([*STOPPERS]),
    batch=st.integers(1, 5),
    prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8), min_size=1, max_size=5),
    kinds=st.lists(st.sampled_from(KINDS), min_size=5, max_size=5),
    n=st.integers(1, 3),
)
def test_any_requests_have_plain_decodings_texts(seed, drafter, stopper, batch, prompts, kinds, n):
    params = [replace(kind, seed=seed, n=n) for kind in kinds[: len(prompts)]]
    expected, _ = texts("none", "", prompts, params, max_batch=1)
    found, _ = texts(drafter, "" if drafter in UNSTOPPED else stopper, prompts, params, max_batch=batch)
    assert found == expected
    longest = max(range(len(expected)), key=lambda at: len(expected[at]))
    assume(len(expected[longest]) > 3)


def round_keyed(seeds, places):
    round_keyed.number += 1
    return NoiseRoundRng(seeds, [100 * round_keyed.number] * len(seeds))


@pytest.mark.parametrize("wrong", ["block", "match", "keyed by the round"])
def test_other_rules_and_keys_do_not_have_plain_decodings_text(wrong):
    """Negative controls: with these, the same comparison fails."""
    params = SamplingParams(max_tokens=30, seed=3)
    round_keyed.number = 0
    keys = {"keyed by the round": round_keyed}.get(wrong)
    rule = make_verifier("gumbel" if keys else wrong)
    made = [
        Engine(table(1), drafter, rule, **({"round_rng": keys} if keys else {})).generate([[0]], params)[0].token_ids
        for drafter in (None, ModelDrafter(DraftModel(table(5), vocab_size=VOCAB), FixedLength(3)))
    ]
    assert made[0] != made[1]


def test_an_equal_draft_is_always_accepted_and_another_seldom():
    params = SamplingParams(max_tokens=400, seed=1, ignore_eos=True)
    for draft, accepted in ((table(1), True), (table(5), False)):
        engine = Engine(table(1), ModelDrafter(DraftModel(draft, vocab_size=VOCAB), FixedLength(4)), gumbel_verifier())
        stats = engine.generate([[0]], params)[0].stats
        assert (stats.num_accepted_tokens == stats.num_draft_tokens) == accepted


def test_a_failed_request_changes_no_others_text():
    class Failing(TableModel):
        def logits(self, context):
            made = super().logits(context)
            return made * torch.nan if list(context[-2:]) == [6, 6] else made

    target = Failing(VOCAB, 1, order=1)
    alone = Engine(target, None, gumbel_verifier()).generate([[0, 1]], SamplingParams(max_tokens=20, seed=5))[0]
    drafter = ModelDrafter(DraftModel(table(5), vocab_size=VOCAB), FixedLength(3))
    engine = Engine(target, drafter, gumbel_verifier())
    good = engine.add([0, 1], SamplingParams(max_tokens=20, seed=5))[0]
    bad = engine.add([6, 6], SamplingParams(max_tokens=20, seed=6))[0]
    while engine.busy:
        engine.step()
    assert bad.error is not None
    assert tuple(good.output_ids) == alone.token_ids


def test_continuations_and_seeds_differ():
    engine = Engine(table(1), None, gumbel_verifier())
    made = engine.generate([[0]], SamplingParams(max_tokens=20, seed=5, n=3))
    assert len({one.token_ids for one in made}) == 3
    assert engine.generate([[0]], SamplingParams(max_tokens=20, seed=6))[0].token_ids != made[0].token_ids


def test_what_earlier_requests_of_a_seed_taught_changes_no_text():
    """`suffix` may draft what the same noise wrote before: with this rule that is harmless."""
    params = SamplingParams(max_tokens=25, seed=4)
    expected = Engine(table(1), None, gumbel_verifier()).generate([[0, 1]], params)[0].token_ids
    engine = Engine(table(1), SuffixDrafter(6, threshold=0.0), gumbel_verifier())
    with patch.object(suffix, "_may_share", lambda request: True):  # noqa: ARG005
        once, again = (engine.generate([[0, 1]], params)[0] for _ in range(2))
    assert once.token_ids == again.token_ids == expected
    assert again.stats.num_accepted_tokens > once.stats.num_accepted_tokens + 10


def test_drafts_that_branch_are_refused_with_the_reason():
    for drafter in ("chains:4", "tree:2x1", "quantized:4x2", "feature_head:x4", "early_exit:2x2"):
        assert "would all be equal" in why_not(drafter, "fixed:4", "gumbel")
    with pytest.raises(UserError, match="share their noise: use one chain"):
        toy_engine("chains", "fixed", "gumbel", CounterRoundRng)


# --- models -----------------------------------------------------------------------------------------------------------

LIVELY = [
    SamplingParams(max_tokens=24, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=40, seed=2, ignore_eos=True, temperature=0.7, top_p=0.95),
    SamplingParams(max_tokens=32, seed=3, ignore_eos=True, top_k=20, repetition_penalty=1.1),
]
TEXTS = [[1, 2, 3], [4, 4, 4, 4, 9, 4, 4], [11] * 20]
COUNTS = "num_draft_tokens", "num_accepted_tokens"


def natively(drafter, target, draft):
    if drafter == "feature_head":
        return head_drafter(target, net_for(target, ids=list(range(0, target.vocab_size, 2))))
    if drafter == "model":
        return ModelDrafter(DraftModel(draft, vocab_size=target.vocab_size), FixedLength(4))
    if drafter in {"ngram", "suffix"}:
        return {"ngram": NgramDrafter, "suffix": SuffixDrafter}[drafter](4)
    return make_drafter(drafter, target=target, draft=None, stopper="fixed:4")


@pytest.mark.grid(4)
@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "drafter", ["model", "early_exit:1", "quantized:4", "quantized:8", "feature_head", "ngram", "suffix"]
)
def test_text_is_plain_decodings_to_the_bit_on_native_layers(drafter, dtype):
    model = lively_model(MODELS["llama"](), dtype)
    plain = Engine(LeanBackend(copy.deepcopy(model)), None, gumbel_verifier(), max_batch=1)
    expected = [plain.generate([text], own)[0].token_ids for text, own in zip(TEXTS, LIVELY, strict=True)]
    target, draft = LeanBackend(copy.deepcopy(model), name="llama"), copy.deepcopy(model)
    with torch.no_grad():
        for number, weight in enumerate(draft.parameters()):
            source = torch.Generator().manual_seed(number)
            weight.add_((0.3 * weight.float().std() * torch.randn(weight.shape, generator=source)).to(dtype))
    engine = Engine(target, natively(drafter, target, LeanBackend(draft)), gumbel_verifier(), max_batch=3)
    made = engine.generate(TEXTS, LIVELY)
    assert [one.token_ids for one in made] == expected
    drafted, accepted = (sum(getattr(one.stats, name) for one in made) for name in COUNTS)
    assert 0 < accepted < drafted or (drafter in {"ngram", "suffix"} and drafted > 0)
