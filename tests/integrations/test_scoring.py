"""Log-likelihoods of continuations as trees, against transformers' own forward pass."""

import pytest
import torch

from draftproof import UserError
from draftproof.integrations import scoring
from draftproof.integrations.scoring import score
from support.helpers import VOCAB, backend

FAMILIES = ["llama", "mistral", "gemma3", "gpt2", "opt"]


def expected(model, context, tail):
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *tail]])).logits[0, len(context) - 1 : -1]
    rows, ids = logits.double().log_softmax(-1), torch.tensor(tail)
    return float(rows.gather(-1, ids.unsqueeze(-1)).sum()), bool((logits.argmax(-1) == ids).all())


def continuations(model, seed):
    """Contexts of several lengths, each with continuations that share beginnings, one greedy, one of one token."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pairs = []
        for length in (1, 4, 11, 30):
            context = torch.randint(VOCAB, (length,)).tolist()
            tail = torch.randint(VOCAB, (6,)).tolist()
            greedy = model.generate(torch.tensor([context]), max_new_tokens=5, eos_token_id=None, pad_token_id=0)
            pairs += [(context, tail), (context, [*tail[:3], 7, 8]), (context, tail[:1]), (context, tail)]
            pairs.append((context, greedy[0, length:].tolist()))
    return pairs


@pytest.mark.grid(4)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("rows", [512, 4])
def test_scores_are_those_of_the_models_own_pass(name, rows, monkeypatch):
    monkeypatch.setattr(scoring, "_ROWS", rows)  # 4: nearly everything is long, and read in pieces
    read = backend(name)
    pairs = continuations(read.model, seed=3)
    found = dict(score(read, pairs, max_batch=3))
    assert sorted(found) == list(range(len(pairs)))
    flags = []
    for place, (context, tail) in enumerate(pairs):
        logprob, greedy = expected(read.model, context, tail)
        assert found[place].logprob == pytest.approx(logprob, abs=2e-3)
        assert found[place].greedy is greedy
        flags.append(greedy)
    assert any(flags)
    assert not all(flags)


def test_a_context_is_read_once_for_all_its_continuations(monkeypatch):
    read, sizes = backend("llama"), []
    original = type(read).forward
    monkeypatch.setattr(
        type(read), "forward", lambda self, feeds: sizes.extend(map(len, feeds)) or original(self, feeds)
    )
    context = list(range(5, 45))
    assert len(dict(score(read, [(context, [7, 8, token]) for token in range(10, 20)]))) == 10
    assert sizes == [42], "40 tokens, and the two that all continuations share"


def test_models_without_trees_score_chains(monkeypatch):
    read = backend("llama")
    pairs = continuations(read.model, seed=5)
    trees = dict(score(read, pairs))
    monkeypatch.setattr(read, "capabilities", type(read.capabilities)(trees=False, ragged=False))
    chains = dict(score(read, pairs))
    for place, each in trees.items():
        assert chains[place].logprob == pytest.approx(each.logprob, abs=1e-4)


def test_what_cannot_be_scored_is_named():
    read = backend("llama")
    for pair, words in ((([], [1]), "pair 0"), (([1], []), "pair 0"), (([1] * 640, [1, 2]), "640")):
        with pytest.raises(UserError, match=words):
            list(score(read, [pair]))
