"""Greedy multi-path block verification, and SpecTr-GBV as published: exact distributions, identities, closed forms."""

from functools import partial

import pytest
import torch

from draftproof.audit.distributions import as_paths
from draftproof.functional import block_verify, multi_path_on_tries, multi_path_verify
from draftproof.functional import multi_path as module
from draftproof.functional.multi_path import power_difference
from draftproof.functional.nodes import Tries
from draftproof.rng import TorchRng
from draftproof.testing import total_variation
from draftproof.tree import TokenTree
from support.distributions import KINDS, Toy, rule_distribution, rule_length
from support.published_rules import spectr_gbv

EXACT = 1e-12
RULES = {"of the whole path": multi_path_verify, "of each node": partial(multi_path_verify, joint=False)}


def distance(rule, toy, count, length):
    return total_variation(rule_distribution(rule, toy, count, length), toy.target_distribution(length + 1))


@pytest.mark.grid(18)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("count", "length"), [(2, 2), (3, 1)])
def test_it_is_exact(name, kind, count, length):
    assert distance(RULES[name], Toy.random(1, kind=kind, depth=length), count, length) < EXACT


@pytest.mark.parametrize("name", RULES)
def test_one_chain_is_block_verification(name):
    for seed in range(3):
        toy = Toy.random(seed, kind="dense", depth=3)
        block = rule_length(as_paths(block_verify), toy, 1, 3)
        assert abs(rule_length(RULES[name], toy, 1, 3) - block) < EXACT


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("made = power_difference(low, step, count)", "made = drafted"),
        ("below, mass = low.gather(-1, token), mass", "below, mass = below, mass"),
        ("mass * drafted.gather(-1, token)", "mass"),
        ("place.gather(-1, ids)", "-place.gather(-1, ids)"),
    ],
    ids=["q itself", "paths ranked below forgotten", "mass of the prefix forgotten", "the worst draw"],
)
def test_mutants_are_seen(old, new, monkeypatch):
    import inspect

    source = inspect.getsource(module._select)
    assert old in source
    scope = dict(vars(module))
    exec("from __future__ import annotations\n" + source.replace(old, new), scope)  # noqa: S102
    monkeypatch.setattr(module, "_select", scope["_select"])
    worst = max(distance(multi_path_verify, Toy.random(s, kind="dense", depth=2), 2, 2) for s in range(4))
    assert worst > 1e-3


def test_selecting_can_cost_acceptance():
    """p = q uniform over two tokens, two drafts: the selected token has probabilities 1/4 and 3/4."""
    half = torch.full((1, 2, 1, 2), 0.5, dtype=torch.float64)
    row = torch.full((1, 2, 2, 2), 0.5, dtype=torch.float64)
    accepted = 0.0
    for first in range(2):
        for second in range(2):
            tokens = torch.tensor([[[first], [second]]])
            kept = [int(multi_path_verify(tokens, half, row, rng=TorchRng(seed)).accepted) for seed in range(400)]
            accepted += sum(kept) / len(kept) / 4
    assert abs(accepted - 0.75) < 0.05  # 1600 draws: four standard errors


@pytest.mark.parametrize("power", [1, 2, 5])
def test_differences_of_powers_keep_their_digits(power):
    low, step = torch.tensor([[0.5, 0.9, 0.0]], dtype=torch.float64), torch.tensor([[1e-18, 0.1, 0.3]]).double()
    found = power_difference(low, step, torch.tensor([[power]]))
    exact = torch.tensor([[power * 1e-18 * 0.5 ** (power - 1), 1 - 0.9**power, 0.3**power]], dtype=torch.float64)
    assert torch.allclose(found, exact, rtol=1e-6, atol=0)


def test_a_tree_whose_branches_end_at_different_depths():
    tree = TokenTree(torch.tensor([0, 1, 2]), (-1, -1, 1))
    tries = Tries.from_trees([tree], [(0, 1, 1, 2, 2)])
    q, p = torch.full((3, 3), 1 / 3), torch.tensor([[0.2, 0.5, 0.3]]).repeat(4, 1)
    found = multi_path_on_tries(tries, q, p, rng=TorchRng(0))
    assert int(found.node) in (-1, 1, 2)


def test_spectr_gbv_as_published_is_lossless_for_one_token_of_one_draft_only():
    assert distance(spectr_gbv, Toy.random(1, kind="dense", depth=1), 1, 1) < EXACT
    for count, length in ((2, 1), (3, 1), (1, 2), (2, 2)):
        toys = [Toy.random(seed, kind=kind, depth=length) for kind in ("near", "sparse") for seed in range(4)]
        worst = max(distance(spectr_gbv, toy, count, length) for toy in toys)
        assert worst > 0.05, (count, length)
