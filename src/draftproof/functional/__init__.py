"""Verification rules as pure functions on tensors: the part other engines import."""

from draftproof.functional.chain import ChainVerdict, block_verify, token_verify
from draftproof.functional.coupling import kseq_gamma, kseq_select
from draftproof.functional.greedy import GreedyState, advance, greedy_block_verify, modified_target
from draftproof.functional.lossy import last_token_verify, mentored_verify, mixture_verify, typical_verify
from draftproof.functional.match import match_verify
from draftproof.functional.multi_path import multi_path_on_tries, multi_path_verify
from draftproof.functional.multi_round import (
    multi_round_on_tries,
    multi_round_verify,
    multi_round_verify_without_replacement,
)
from draftproof.functional.nodes import NodeVerdict, PathVerdict, Tries
from draftproof.functional.otm import otm_plan, otm_select
from draftproof.functional.spectr import spectr_on_tries, spectr_verify
from draftproof.functional.traversal import traversal_on_tries, traversal_verify
from draftproof.functional.trie_block import trie_block_on_tries, trie_block_verify

__all__ = [
    "ChainVerdict",
    "GreedyState",
    "NodeVerdict",
    "PathVerdict",
    "Tries",
    "advance",
    "block_verify",
    "greedy_block_verify",
    "kseq_gamma",
    "kseq_select",
    "last_token_verify",
    "match_verify",
    "mentored_verify",
    "mixture_verify",
    "modified_target",
    "multi_path_on_tries",
    "multi_path_verify",
    "multi_round_on_tries",
    "multi_round_verify",
    "multi_round_verify_without_replacement",
    "otm_plan",
    "otm_select",
    "spectr_on_tries",
    "spectr_verify",
    "token_verify",
    "traversal_on_tries",
    "traversal_verify",
    "trie_block_on_tries",
    "trie_block_verify",
    "typical_verify",
]
