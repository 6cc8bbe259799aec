"""Verifiers for several drafts per row: SpecTr, multi-round selection, traversal, trie block and multi-path."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.draft import Draft, Verdict
from draftproof.functional.multi_path import multi_path_on_tries
from draftproof.functional.multi_round import multi_round_on_tries
from draftproof.functional.nodes import NodeVerdict, Tries
from draftproof.functional.spectr import spectr_on_tries
from draftproof.functional.traversal import traversal_on_tries
from draftproof.functional.trie_block import trie_block_on_tries
from draftproof.rng import Rng
from draftproof.tree import ROOT


class TrieVerifier:
    """A Verifier that applies a rule for tries, such as `trie_block_on_tries`.

    A single chain is a trie with one draw at each node.
    """

    branching = True
    lossless = True
    point_masses = True
    constant_length = False
    shared_noise = False

    def __init__(self, name: str, rule: Callable[..., NodeVerdict]) -> None:
        self.name = name
        self._rule = rule

    def verify(
        self,
        drafts: Sequence[Draft],
        target_probs: Sequence[Float[Tensor, "_ vocab"]],
        rng: Rng,
        states: Sequence[object] = (),  # noqa: ARG002 - these rules have no state
    ) -> list[Verdict]:
        """Verdicts of all trees, by one call of the rule."""
        tries = Tries.from_trees([draft.tree for draft in drafts], [draft.draws for draft in drafts])
        drawn = [draft.probs for draft in drafts if draft.probs is not None]
        q = torch.cat(drawn) if len(drawn) > 1 else drawn[0] if drawn else None
        p = torch.cat(list(target_probs)) if len(target_probs) > 1 else target_probs[0]
        found = self._rule(tries, q, p, rng=rng, validate=False)
        pairs = torch.stack([found.node, found.token], -1).tolist()
        return [_verdict(draft, node, token) for draft, (node, token) in zip(drafts, pairs, strict=True)]


def _verdict(draft: Draft, node: int, token: int) -> Verdict:
    path = () if node == ROOT else draft.tree.paths[node]
    return Verdict(path, token, (*(draft.tree.ids[at] for at in path), token))


def spectr_verifier() -> TrieVerifier:
    """SpecTr: selection among drafts by K-SEQ (arXiv 2310.15141)."""
    return TrieVerifier("spectr", spectr_on_tries)


def multi_round_verifier() -> TrieVerifier:
    """SpecInfer's multi-round selection: recursive rejection, for draws with replacement (arXiv 2305.09781)."""
    return TrieVerifier("multi_round", multi_round_on_tries)


def traversal_verifier() -> TrieVerifier:
    """Traversal verification: multi-round selection, decided from the leaves up (arXiv 2505.12398)."""
    return TrieVerifier("traversal", traversal_on_tries)


def trie_block_verifier() -> TrieVerifier:
    """Trie block verification: SpecTr's coupling inside block verification; with one chain it is block verification."""
    return TrieVerifier("trie_block", trie_block_on_tries)


def multi_path_verifier() -> TrieVerifier:
    """Greedy multi-path block verification (arXiv 2602.16961): the best drawn path, verified as one block.

    The rule conditions on the number of draws at each node, so chains may stop at any length and trees may branch.
    """
    return TrieVerifier("multi_path", multi_path_on_tries)
