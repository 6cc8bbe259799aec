"""SPRINTER (arXiv 2502.04557) in closed form: lengths, times and drift, from the error rates of its small verifier.

`true_positive` is the rate at which the small verifier accepts acceptable tokens (q <= p), and `false_positive` the
rate at which it accepts all other tokens; its decisions are independent. `run` is the number of acceptable tokens that
the draft model produces before its first unacceptable one; all tokens after that one count as unacceptable.
"""

from __future__ import annotations

import math


def accepted_pmf(count: int, run: int, true_positive: float, false_positive: float) -> float:
    """Pr(the verifier accepts exactly `count` tokens) (SPRINTER, arXiv 2502.04557, Theorem 3.3)."""
    if count < run:
        return true_positive**count * (1 - true_positive)
    return true_positive**run * false_positive ** (count - run) * (1 - false_positive)


def expected_accepted(run: int, true_positive: float, false_positive: float) -> float:
    """E[number of tokens that the verifier accepts]; infinite if it never rejects.

    Source: SPRINTER, arXiv 2502.04557, Theorem 3.3, equation (3).
    """
    before = math.fsum(true_positive**i for i in range(run))
    return before - 1 + true_positive**run * _reciprocal(1 - false_positive)


def expected_stopping_time(run: int, true_positive: float, false_positive: float, draft_seconds: float) -> float:
    """E[seconds until the target is called], with one draft step for each token that the verifier reads.

    Source: SPRINTER, arXiv 2502.04557, Theorem 3.4, equation (4).
    """
    before = math.fsum(true_positive**i for i in range(run))
    return draft_seconds * (before + true_positive**run * _reciprocal(1 - false_positive))


def acceptance_rate(false_positive: float, total_variation: float) -> float:
    """Pr(a drafted token is kept) = 1 - (1 - eta_FP) TV(p, q) (SPRINTER, arXiv 2502.04557, Theorem A.4)."""
    return 1 - (1 - false_positive) * total_variation


def drift(false_positive: float, total_variation: float) -> float:
    """Total variation between the output distribution of a position and the target's: eta_FP TV(p, q).

    Source: SPRINTER, arXiv 2502.04557, Theorem 3.1.
    """
    return false_positive * total_variation


def _reciprocal(x: float) -> float:
    return 1 / x if x > 0 else math.inf
