"""Rules broken on purpose: the exact output distribution of each mutant must differ from the target's.

Otherwise the tests of exact distributions would prove nothing. A mutant replaces one expression in one function of the
package, and models are tried until one of them shows a difference. Most models show no difference for most mutants:
the token-level residual in the block rule, for example, changes the distribution by a few hundredths at most.
"""

import __future__

import inspect
import itertools
import textwrap
from functools import partial

import pytest

from draftproof.audit.distributions import as_paths
from draftproof.functional import bottom_up, chain, coupling, greedy, multi_round, spectr, traversal, trie_block
from draftproof.testing import total_variation
from support.distributions import Toy, greedy_distribution, rule_distribution

MODULES = (chain, coupling, greedy, spectr, multi_round, bottom_up, trie_block, traversal)
VISIBLE_ERROR = 1e-3


def _chain(name, length):
    def both(toy):
        """The distribution under the rule, and the target's."""
        return rule_distribution(as_paths(getattr(chain, name)), toy, 1, length), toy.target_distribution(length + 1)

    return both


def _paths(module, name, count, length):
    def both(toy):
        return rule_distribution(getattr(module, name), toy, count, length), toy.target_distribution(length + 1)

    return both


def _rounds(toy):
    return greedy_distribution(toy, 2, 4), toy.target_distribution(4)


token, block = _chain("token_verify", 2), _chain("block_verify", 3)
one_of_two, multi = _paths(spectr, "spectr_verify", 2, 1), _paths(multi_round, "multi_round_verify", 2, 1)
wide, deep = _paths(trie_block, "trie_block_verify", 3, 1), _paths(trie_block, "trie_block_verify", 2, 2)
up = _paths(traversal, "traversal_verify", 2, 2)

MUTANTS = {
    "always accept": (
        token,
        chain.token_verify,
        "log_ratios(tokens, q, p).exp().clamp_(max=1)",
        "torch.ones_like(log_ratios(tokens, q, p))",
    ),
    "q over p": (
        token,
        chain.log_ratios,
        "log_p - q.gather(-1, index).squeeze(-1).double().log()",
        "q.gather(-1, index).squeeze(-1).double().log() - log_p",
    ),
    "bonus from the wrong row of p": (
        token,
        chain.bonus_weights,
        "weights = p[rows, accepted]",
        "weights = p[rows, (accepted + 1).clamp(max=tokens.shape[1])]",
    ),
    "bonus always from p": (
        token,
        chain.bonus_weights,
        "torch.where((accepted < lengths).unsqueeze(-1), residual, weights)",
        "weights",
    ),
    "wrong row of q": (token, chain.bonus_weights, "q[rows, at]", "q[rows, 0 * at]"),
    "residual without clamp": (token, chain.residual_weights, "weights.clamp_(min=0)", "weights.abs_()"),
    "token residual in the block rule": (
        block,
        chain.block_verify,
        "torch.cat([one, running], -1).gather(-1, accepted.unsqueeze(-1)).squeeze(-1)",
        "torch.ones_like(running[:, 0])",
    ),
    "the first rejection ends the block": (
        block,
        chain.block_verify,
        "(rng.bernoulli(h) * place).amax(-1)",
        "rng.bernoulli(h).long().cumprod(-1).sum(-1)",
    ),
    "joint ratio clipped at the end only": (
        block,
        chain.running_ratios,
        "(walk - walk.cummax(-1).values.clamp_(min=0)).exp()",
        "walk.exp().clamp(max=1)",
    ),
    "every prefix tested with P": (block, chain.block_acceptance, "surplus / (surplus + deficit)", "head"),
    "factor of 1": (one_of_two, coupling.kseq_gamma, "return high", "return torch.ones_like(high)"),
    "lower end of the root search": (
        one_of_two,
        coupling.kseq_gamma,
        "return high",
        "return low - 1e-2 * (low > 1.02)",
    ),
    "residual without acc / beta": (
        one_of_two,
        coupling.kseq_residual,
        "left.mul_(-plan.share.to(p.dtype).unsqueeze(-1))",
        "left.mul_(-1)",
    ),
    "residuals not renormalised": (multi, coupling.rounds_plan, "rest /= rejected.to(p.dtype).unsqueeze(-1)", "pass"),
    "the second draw tested against p": (
        multi,
        coupling.rounds_plan,
        "left = torch.where(",
        "left = left if j < 1 else torch.where(",
    ),
    "multiplicity ignored": (
        wide,
        bottom_up.hand_down,
        "torch.where(kids > 0, 1 - missed[flat], 1)",
        "torch.where(kids > 0, accept, 1)",
    ),
    "own acceptance not conditioned": (
        deep,
        trie_block.trie_block_plan,
        "(weight - rule.accept) / rejected",
        "(weight - rule.accept)",
    ),
    "the latest success wins": (
        wide,
        bottom_up._winner,
        "hit.long().argmax(-1, keepdim=True)",
        "(hit * (places + 1)).argmax(-1, keepdim=True)",
    ),
    "success on the first draw always": (
        wide,
        bottom_up.decide,
        "rng.categorical(success_draw_weights(tries, plan))",
        "(success_draw_weights(tries, plan) > 0).long().argmax(-1)",
    ),
    "weights of the root in every residual": (
        deep,
        trie_block._trie_block,
        "entry_at(plan.weight, at)",
        "torch.ones_like(plan.weight[:, 0])",
    ),
    "traversal without what is left": (
        up,
        traversal.traversal_plan,
        "rule.left.sum(-1, dtype=torch.float64).clamp_(0, 1)",
        "weight",
    ),
    "greedy without the bonus token's ratio": (
        _rounds,
        greedy._ratio_after,
        "log_r[at, verdict.accepted] + step",
        "log_r[at, verdict.accepted]",
    ),
    "greedy with windows of one place less": (
        _rounds,
        greedy.advance,
        "(n - emitted).clamp_(min=0)",
        "(n - emitted - 1).clamp_(min=0)",
    ),
    "greedy with block verification's acceptance": (
        _rounds,
        greedy.greedy_acceptance,
        "log_r = log_ratios(tokens, q, p).cumsum(-1)",
        "log_r = running_ratios(log_ratios(tokens, q, p)).log()",
    ),
}


def _mutate(monkeypatch, function, old, new):
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    assert old in source, f"{function.__name__} no longer contains {old!r}: write this mutant again"
    module = inspect.getmodule(inspect.unwrap(function))
    code = compile(source.replace(old, new), "mutant", "exec", flags=__future__.annotations.compiler_flag)
    made = {}
    exec(code, module.__dict__, made)  # noqa: S102
    for other in MODULES:
        if getattr(other, function.__name__, None) is function:
            monkeypatch.setattr(other, function.__name__, made[function.__name__])


def _error(both, toy):
    """Total variation between the rule's distribution and the target's; 1 where the rule attempts an invalid draw."""
    try:
        return total_variation(*both(toy))
    except ValueError:
        return 1.0


@pytest.mark.grid(8)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_killed(name, monkeypatch):
    both, function, old, new = MUTANTS[name]
    order = 1 if both is _rounds else None
    models = [
        partial(Toy.random, seed, kind=kind, depth=3 if both is block else 2, order=order)
        for seed, kind in itertools.product(range(20), ("peaked", "dense"))
    ]
    assert _error(both, models[0]()) < 1e-12
    monkeypatch.setattr(greedy, "running_ratios", chain.running_ratios, raising=False)
    _mutate(monkeypatch, function, old, new)
    assert any(_error(both, model()) > VISIBLE_ERROR for model in models), f"no model shows the mutant {name!r}"


def test_two_tokens_hide_the_wrong_residual(monkeypatch):
    """With two tokens, both residuals have mass on one token only: a negative control needs three tokens."""
    _mutate(monkeypatch, *MUTANTS["token residual in the block rule"][1:])
    toys = [Toy.random(seed, vocab=2, depth=3) for seed in range(5)]
    assert max(_error(block, toy) for toy in toys) < 1e-12
