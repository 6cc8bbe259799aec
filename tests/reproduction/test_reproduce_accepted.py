"""Expected accepted tokens given the drafts equal those of the rules, by enumeration of the rules' randomness."""

from collections import Counter

import pytest
import torch

from draftproof.draft import Draft
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.sampled_tree import SampledTreeDrafter
from draftproof.engine.engine import Engine
from draftproof.functional import block_verify, multi_round_on_tries, spectr_verify, token_verify
from draftproof.functional.greedy import greedy_block_verify
from draftproof.functional.nodes import Tries
from draftproof.reproduction.expected_accepted import Recorder, chain_ccdf, chains_of, key, pieces, trie_ccdf
from draftproof.sampling import SamplingParams
from draftproof.stoppers.fixed import FixedLength
from draftproof.testing import TableModel, exact_distribution
from draftproof.theory.lengths import block_length, token_length
from draftproof.tree import TokenTree

VOCAB, LENGTH, DRAFTS = 4, 3, 3


def drafts(seed):
    """K chains of tokens with the rows of two table models along them."""
    models = [TableModel(VOCAB, 10 * seed + i, order=4, sharpness=1.0) for i in range(2)]
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (1, DRAFTS, LENGTH), generator=generator)
    rows = [
        [[model.logits(chain[:i]).softmax(-1) for i in range(LENGTH + extra)] for chain in tokens[0].tolist()]
        for extra, model in enumerate(models)
    ]
    q, p = (torch.stack([torch.stack(chain) for chain in own]).unsqueeze(0) for own in rows)
    return tokens, q, p


def at_least(distribution):
    return [sum(chance for accepted, chance in distribution.items() if accepted >= i) for i in range(1, LENGTH + 1)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("rule", "verify"), [("token", token_verify), ("block", block_verify), ("greedy_block", greedy_block_verify)]
)
def test_single_drafts(seed, rule, verify):
    tokens, q, p = (part[:, 0] for part in drafts(seed))
    distribution = exact_distribution(lambda rng: int(verify(tokens, q, p, rng=rng).accepted[0]))
    assert chain_ccdf(rule, tokens, q, p)[0].tolist() == pytest.approx(at_least(distribution), abs=1e-12)


@pytest.mark.grid(3)
@pytest.mark.parametrize("seed", range(6))
def test_spectr(seed):
    tokens, q, p = drafts(seed)
    distribution = exact_distribution(lambda rng: int(spectr_verify(tokens, q, p, rng=rng).accepted[0]))
    assert trie_ccdf("spectr", tokens, q, p)[0].tolist() == pytest.approx(at_least(distribution), abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_multi_round(seed):
    tokens, q, p = drafts(seed)
    tries = Tries.from_chains(tokens)

    def program(rng):
        node = multi_round_on_tries(tries, q.flatten(0, 2), p.flatten(0, 2), rng=rng).node
        return int(tries.depth[0, node + 1])

    distribution = exact_distribution(program)
    assert trie_ccdf("multi_round", tokens, q, p)[0].tolist() == pytest.approx(at_least(distribution), abs=1e-12)


def test_the_cases_are_not_trivial():
    """A draft that is accepted with certainty tests nothing; most of those above are not."""
    kept = [float(trie_ccdf("spectr", *drafts(seed))[0, -1]) for seed in range(6)]
    assert sum(0.01 < chance < 0.99 for chance in kept) >= 4


def test_equal_drafts_are_one_token_with_two_chances():
    tokens, q, p = drafts(1)
    twice = [torch.cat([part[:, :1], part[:, :1]], 1) for part in (tokens, q, p)]
    distribution = exact_distribution(lambda rng: int(spectr_verify(*twice, rng=rng).accepted[0]))
    assert trie_ccdf("spectr", *twice)[0].tolist() == pytest.approx(at_least(distribution), abs=1e-12)


def test_a_batch_is_its_rows():
    parts = [drafts(seed) for seed in range(4)]
    together = trie_ccdf("spectr", *(torch.cat(part) for part in zip(*parts, strict=True)))
    alone = torch.cat([trie_ccdf("spectr", *part) for part in parts])
    assert torch.allclose(together, alone, atol=1e-12)


def test_chains_come_out_of_a_tree_as_they_were_drawn():
    tree = TokenTree(torch.tensor([5, 7, 1, 2, 3]), (-1, -1, 0, 0, 1))
    draft = Draft(tree, torch.ones(5, 8) / 8, draws=(0, 1, 0, 2, 3, 4))
    assert chains_of(draft) == [[0, 2], [1, 4], [0, 3]]
    tokens, q, p = pieces([draft], [torch.arange(48.0).reshape(6, 8)])
    assert tokens.tolist() == [[[5, 1], [7, 3], [5, 2]]]
    assert q.shape == (1, 3, 2, 8)
    assert p[0, :, :, 0].tolist() == [[0.0, 8.0, 24.0], [0.0, 16.0, 40.0], [0.0, 8.0, 32.0]]


def test_the_recorder_decodes_plainly_and_agrees_with_theory():
    target, small = TableModel(3, 1, order=1), TableModel(3, 2, order=1)
    drafter = SampledTreeDrafter(DraftModel(small, vocab_size=3), FixedLength(3), chains=4)
    recorder = Recorder((1, 3), (2,))
    engine = Engine(target, drafter, recorder, max_batch=8)
    prompts = [[0], [1], [2]] * 2
    each = [SamplingParams(max_tokens=63, seed=seed, ignore_eos=True) for seed in range(6)]
    outs = engine.generate(prompts, each)
    assert all(out.stats.num_target_calls == out.stats.num_tokens for out in outs)
    plain = Engine(target, max_batch=8).generate(prompts, each)
    counts = [Counter(token for out in some for token in out.token_ids) for some in (outs, plain)]
    assert counts[0][0] / 378 == pytest.approx(counts[1][0] / 378, abs=0.08)  # one distribution, other draws
    p, q = ((lambda context, model=model: model.logits(context).softmax(-1)) for model in (target, small))
    for rule, length in (("token", token_length), ("block", block_length)):
        lengths = [length(p, q, 3, (last,)) for last in range(3)]  # the models look at the last token only
        expected = recorded = 0.0
        for place, recorded_round in enumerate(recorder.rounds):
            for row, value in enumerate(recorded_round[key(rule, 3)]):
                context = ([*prompts[row], *outs[row].token_ids])[: place + 1]
                expected += lengths[context[-1]]
                recorded += value
        assert recorded == pytest.approx(expected, rel=0.05)
    assert len(recorder.rounds) == 60
