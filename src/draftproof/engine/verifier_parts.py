"""The declarations of all verification rules: name, parameter, accepted drafts, whether they are lossless."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from draftproof.engine.composition import VerifierTraits
from draftproof.engine.parts import VerifierPart, find, number
from draftproof.verifiers.base import Verifier
from draftproof.verifiers.chain import (
    block_verifier,
    gumbel_verifier,
    last_token_verifier,
    match_verifier,
    mentored_verifier,
    mixture_verifier,
    token_verifier,
    typical_verifier,
)
from draftproof.verifiers.greedy import GreedyBlockVerifier
from draftproof.verifiers.trie import (
    multi_path_verifier,
    multi_round_verifier,
    spectr_verifier,
    traversal_verifier,
    trie_block_verifier,
)

DEFAULT_VERIFIER, DEFAULT_TREE_VERIFIER = "block", "trie_block"
SEEDED_VERIFIER = "gumbel"  # for requests with a seed whose drafts depend on a clock or on other requests


def _rule(make: Callable[..., Verifier], about: str, *, argument: str = "", example: str = "") -> VerifierPart:
    """The declaration of a rule, with the traits of the verifier that `make` returns."""
    made = make()

    def build(given: str) -> Verifier:
        return make(number(given, example)) if given else make()

    name = made.name.partition(":")[0]
    traits = replace(VerifierTraits.of(made), name=name)
    return VerifierPart(name=name, about=about, argument=argument, make=build, traits=traits, lossless=made.lossless)


VERIFIERS: dict[str, VerifierPart] = {
    part.name: part
    for part in (
        _rule(block_verifier, "keeps the longest prefix that passes a joint test; never worse than token"),
        _rule(token_verifier, "keeps each token with probability min(1, p/q) until the first rejection"),
        _rule(GreedyBlockVerifier, "block with a state over rounds; constant lengths only"),
        _rule(match_verifier, "samples from the target and keeps the draft while it is the same"),
        _rule(gumbel_verifier, "match with the draft's random numbers: a seed gives the same text with any draft"),
        _rule(trie_block_verifier, "block verification of several drafts, with SpecTr's coupling"),
        _rule(spectr_verifier, "SpecTr: K-SEQ at each position of several drafts"),
        _rule(multi_round_verifier, "SpecInfer's recursive rejection of several drafts"),
        _rule(traversal_verifier, "the bottom-up form of multi_round"),
        _rule(multi_path_verifier, "the best of several drafts by p/q, verified as one block"),
        _rule(last_token_verifier, "lossy, SPRINTER's rule: only the last drafted token is verified"),
        _rule(
            typical_verifier,
            "lossy: keeps tokens that the target finds plausible",
            argument="EPSILON",
            example="typical:0.09",
        ),
        _rule(
            mixture_verifier,
            "lossy: the mixture (1 - EPSILON) p + EPSILON q",
            argument="EPSILON",
            example="mixture:0.1",
        ),
        _rule(
            mentored_verifier,
            "lossy: as much acceptance as BUDGET nats of divergence allow",
            argument="BUDGET",
            example="mentored:0.1",
        ),
    )
}
LOSSY = tuple(name for name, part in VERIFIERS.items() if not part.lossless)


def find_verifier(spec: str) -> tuple[VerifierPart, str]:
    """The part and parameter of "name" or "name:parameter"."""
    lossless = ", ".join(known for known in VERIFIERS if known not in LOSSY)
    return find(VERIFIERS, spec, "verifier", f"{lossless}, or the lossy {', '.join(LOSSY)}")


def make_verifier(spec: str) -> Verifier:
    """Make a verification rule from "name" or "name:parameter"."""
    part, argument = find_verifier(spec)
    return part.make(argument)
