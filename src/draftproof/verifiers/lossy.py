"""Verifiers for the lossy rules: `lossless` is false for them, and every result reports it to the user."""

from __future__ import annotations

from functools import partial

from draftproof.errors import UserError
from draftproof.functional.lossy import last_token_verify, mentored_verify, mixture_verify, typical_verify
from draftproof.verifiers.chain import ChainVerifier


def last_token_verifier() -> ChainVerifier:
    """SPRINTER's rule: keep every drafted token but the last without a test, verify the last one (arXiv 2502.04557)."""
    return ChainVerifier("last_token", last_token_verify, lossless=False)


def typical_verifier(epsilon: float = 0.09) -> ChainVerifier:
    """Typical acceptance: keep tokens above epsilon, or plausible under the target otherwise; q is not used."""
    _in_range("typical", epsilon, 1.0)
    return ChainVerifier(f"typical:{epsilon:g}", partial(typical_verify, epsilon=epsilon), lossless=False)


def mixture_verifier(epsilon: float = 0.1) -> ChainVerifier:
    """The fixed mixture (1 - epsilon) p + epsilon q at every drafted position, epsilon 0 to 1."""
    _in_range("mixture", epsilon, 1.0)
    return ChainVerifier(f"mixture:{epsilon:g}", partial(mixture_verify, epsilon=epsilon), lossless=False)


def mentored_verifier(budget: float = 0.1) -> ChainVerifier:
    """Mentored decoding: as much acceptance as a divergence budget allows, 0 to 10 nats at each drafted position."""
    _in_range("mentored", budget, 10.0)
    return ChainVerifier(
        f"mentored:{budget:g}", partial(mentored_verify, budget=budget), lossless=False, point_masses=False
    )


def _in_range(name: str, value: float, most: float) -> None:
    if not 0 <= value <= most:
        raise UserError(f"verifier {name}: expected a number from 0 to {most:g}, got {value:g}")
