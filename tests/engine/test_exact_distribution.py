"""The engine's output distribution equals the target's, by enumerating every draw; negative controls must fail it."""

import pytest
import torch

from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.none import NoDrafter
from draftproof.engine.engine import Engine
from draftproof.functional.chain import ChainVerdict, block_acceptance, block_verify, token_verify
from draftproof.rng import CounterRoundRng
from draftproof.sampling import SamplingParams
from draftproof.stoppers.fixed import FixedLength
from draftproof.testing import TableModel, assert_lossless, engine_distribution, target_distribution, total_variation
from draftproof.verifiers.chain import ChainVerifier, block_verifier, token_verifier
from support.distributions import joint_distance

VOCAB = 3


def maker(verifier, *, length=2, target=None, draft=None, eos=(), drafter=ModelDrafter, **options):
    target = target or TableModel(VOCAB, 1)
    draft = draft or TableModel(VOCAB, 2, order=2)

    def make(round_rng):
        part = NoDrafter()
        if length:
            part = drafter(DraftModel(draft, vocab_size=target.vocab_size, **options), FixedLength(length))
        return Engine(target, part, verifier(), eos_token_ids=eos, round_rng=round_rng)

    return make


RULES = pytest.mark.parametrize("verifier", [token_verifier, block_verifier], ids=["token", "block"])


@pytest.mark.grid(4)
@RULES
@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_output_distribution_is_the_targets(verifier, length):
    assert_lossless(maker(verifier, length=length), params=SamplingParams(max_tokens=4 if length < 2 else 3))


@RULES
def test_output_distribution_for_three_drafted_tokens_over_several_rounds(verifier):
    target, draft = TableModel(VOCAB, 4, zeros=0.4), TableModel(VOCAB, 5, zeros=0.4)
    assert_lossless(maker(verifier, length=3, target=target, draft=draft), params=SamplingParams(max_tokens=4))


TRANSFORMS = {
    "temperature": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3},
    "repetition": {"repetition_penalty": 1.7},
    "presence and frequency": {"presence_penalty": 0.8, "frequency_penalty": 0.6},
    "logit bias": {"logit_bias": {0: 1.0, 2: -2.0}},
    "all": {"temperature": 0.8, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
}


@pytest.mark.grid(6)
@RULES
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_output_distribution_under_sampling_parameters(verifier, transform):
    assert_lossless(maker(verifier), prompt=(0, 1), params=SamplingParams(max_tokens=3, **transform))


@pytest.mark.grid(1)
@RULES
def test_output_distribution_with_eos_inside_a_block(verifier):
    assert_lossless(maker(verifier, length=3, eos=(1,)), params=SamplingParams(max_tokens=4))


@pytest.mark.grid(1)
@RULES
def test_output_distribution_with_min_tokens_before_eos(verifier):
    assert_lossless(maker(verifier, eos=(1,)), params=SamplingParams(max_tokens=4, min_tokens=2))


@RULES
def test_output_distribution_with_stop_token_and_ignored_eos(verifier):
    params = SamplingParams(max_tokens=3, stop_token_ids=[2], ignore_eos=True)
    assert_lossless(maker(verifier, eos=(1,)), params=params)


@RULES
@pytest.mark.parametrize("most", [1, 2, 3])
def test_output_distribution_with_max_tokens_inside_a_block(verifier, most):
    assert_lossless(maker(verifier, length=3), params=SamplingParams(max_tokens=most))


@RULES
@pytest.mark.parametrize("options", [{"temperature": 0.4}, {"temperature": 0.0}, {"top_k": 1}], ids=str)
def test_output_distribution_when_the_draft_is_sampled_otherwise(verifier, options):
    assert_lossless(maker(verifier, **options), params=SamplingParams(max_tokens=3))


@RULES
def test_output_distribution_with_zeros_and_disjoint_supports(verifier):
    target = TableModel(VOCAB, 7, order=1, rows={(0,): [0.5, 0.5, 0.0], (1,): [0.0, 0.0, 1.0], (2,): [0.2, 0.2, 0.6]})
    draft = TableModel(VOCAB, 8, order=1, rows={(0,): [0.0, 0.3, 0.7], (1,): [0.5, 0.5, 0.0], (2,): [0.2, 0.2, 0.6]})
    assert_lossless(maker(verifier, target=target, draft=draft), params=SamplingParams(max_tokens=4))


@pytest.mark.grid(1)
@RULES
def test_output_distribution_across_the_end_of_the_drafts_context(verifier):
    draft = TableModel(VOCAB, 2, max_positions=3)
    assert_lossless(maker(verifier, draft=draft), params=SamplingParams(max_tokens=4))


def test_output_distribution_of_a_batch():
    """Two rows of different lengths at once: the joint distribution is the product, so the rows are independent."""
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=1)]
    assert joint_distance(maker(block_verifier, length=1), [[0], [0, 2, 1]], params) < 1e-12


# --- negative controls: the test must detect each of these mistakes ---------------------------------------------------


def distance(make, **params):
    params = SamplingParams(max_tokens=3, **params)
    return total_variation(
        engine_distribution(make, (0,), params), target_distribution(make(CounterRoundRng).target, (0,), params)
    )


def always_accept(tokens, q, p, *, rng, lengths=None, validate=True):
    rows = torch.arange(len(tokens))
    return ChainVerdict(lengths, rng.categorical(p[rows, lengths]))


def token_residual_in_block_rule(tokens, q, p, *, rng, lengths=None, validate=True):
    """A mistake that another project shipped: block acceptance with the residual of the token rule."""
    _, h = block_acceptance(tokens, q, p, lengths)
    place = torch.arange(1, tokens.shape[1] + 1)
    accepted = (rng.bernoulli(h) * place).amax(-1) if tokens.shape[1] else lengths
    rows = torch.arange(len(tokens))
    weights = p[rows, accepted]
    if q is not None and int(accepted) < int(lengths):
        weights = (weights - q[rows, accepted]).clamp(min=0)
        weights = weights if weights.sum() > 0 else p[rows, accepted]
    return ChainVerdict(accepted, rng.categorical(weights))


class WrongQ(ModelDrafter):
    """Reports q at another temperature than the one it drew with."""

    def propose(self, requests, rng):
        drafts = super().propose(requests, rng)
        return [
            type(draft)(draft.tree, draft.probs**0.5 / (draft.probs**0.5).sum(-1, keepdim=True))
            if len(draft)
            else draft
            for draft in drafts
        ]


class DroppedToken(ModelDrafter):
    """Discards its last token when it is unlikely, so its length is no stopping time."""

    def propose(self, requests, rng):
        made = []
        for draft in super().propose(requests, rng):
            unlikely = len(draft) and draft.probs[-1, draft.tree.tokens[-1]] < 0.4
            keep = len(draft) - 1 if unlikely else len(draft)
            tree = type(draft.tree).chain(draft.tree.tokens[:keep])
            made.append(type(draft)(tree, draft.probs[:keep] if keep else None))
        return made


# Chosen from 400 random pairs: the token residual in the block rule changes the distribution of this pair by 0.05, and
# that of the median pair hardly at all.
SENSITIVE = {"target": TableModel(VOCAB, 87, order=1), "draft": TableModel(VOCAB, 1087, order=1)}


def test_control_always_accept_is_detected():
    assert distance(maker(lambda: ChainVerifier("always", always_accept))) > 0.05


def test_control_token_residual_in_block_rule_is_detected():
    rule = ChainVerifier("wrong", token_residual_in_block_rule)
    assert distance(maker(lambda: rule, **SENSITIVE)) > 0.04


@RULES
def test_control_wrong_q_is_detected(verifier):
    assert distance(maker(verifier, drafter=WrongQ)) > 0.01


@RULES
def test_control_dropped_token_is_detected(verifier):
    assert distance(maker(verifier, drafter=DroppedToken)) > 0.01


@pytest.mark.parametrize("rule", [token_verify, block_verify])
def test_the_models_of_the_controls_pass_with_the_right_rule(rule):
    assert distance(maker(lambda: ChainVerifier("right", rule), **SENSITIVE)) < 1e-12
