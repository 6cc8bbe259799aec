"""Sequential evidence about sampled tokens: bets against the target's distribution, and shares of faults excluded.

A fault of kind k in share e means: each token is drawn from (1 - e) p + e r, where p is the target's distribution in
the token's context and r the one that the fault would draw from. A bet on it multiplies its wealth by the factor
1 + e (r(y)/p(y) - 1) for each token y. While the server is right, the mean of this factor is 1 at most, so the wealth
is a test martingale. It ever reaches 1/a with probability a at most, whenever one looks (Ville's inequality), and so
does the mean of the wealths of all bets.

The inverse of the wealth is an e-value against the hypothesis "this fault in this share or a larger one", because
E[(l - 1)/(1 + e (l - 1))] <= 0 under p for l = r/p. So the same sums stop an audit in both directions.

A server whose numbers are rounded otherwise than the reference's draws from p' near p. The tested hypothesis is wider
by a slack: the mean of r/p under p' is 1 + s at most, on average over the tokens, with an s for each kind. Every factor
is divided by 1 + e s, so the bound on false alarms holds for every server within the slack.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

SHARES = (0.9, 0.5, 0.2, 0.1, 0.05, 0.02)


@dataclass(frozen=True)
class Excluded:
    """What is known about a kind of fault: the smallest share that is excluded, the largest wealth of a bet on it."""

    kind: str
    share: float | None
    evidence: float


class Wealth:
    """The mean of the wealths of several bets, by the logarithm of the largest one so far."""

    _peak = 0.0

    @property
    def e_value(self) -> float:
        """The largest mean of the wealths so far; its inverse is a p-value that holds at any time."""
        return math.exp(min(self._peak, 700.0))

    @property
    def p_value(self) -> float:
        """Anytime-valid: under a right server, below a with probability a at most, whenever the audit stops."""
        return min(1.0, math.exp(-self._peak))


class Evidence(Wealth):
    """The wealth of all bets in one check.

    Args:
        kinds: names of the faults that are bet on.
        slack: for each kind, by how much the mean of r/p may exceed 1 under a right server; see the module.
        floor: by how much the ratios understate r/p (`kinds.FLOOR`).
        shares: of tokens, each with a bet of its own.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        slack: Mapping[str, float] | None = None,
        shares: Sequence[float] = SHARES,
        *,
        floor: float = 0.0,
    ) -> None:
        self.kinds = tuple(kinds)
        self.shares = tuple(shares)
        self.tokens = 0
        self._share = torch.tensor(self.shares, dtype=torch.float64)
        own = torch.tensor([(slack or {}).get(kind, 0.0) for kind in self.kinds], dtype=torch.float64)
        self._cost = torch.log1p(own.unsqueeze(-1) * self._share)
        self._log = torch.zeros(len(self.kinds), len(self.shares), dtype=torch.float64)
        self._against = self._log.clone()  # minus the logarithm of the e-values against each fault
        self._best = self._log.clone()
        self._least = self._log.clone()
        self._loss = -math.log1p(-floor)

    def add(self, ratios: Float[Tensor, "tokens kinds"]) -> None:
        """Add the tokens of one answer: r(y)/p(y) of each token under each kind, 0 or more."""
        if not ratios.shape[0]:
            return
        factors = torch.log1p(self._share * (ratios.double().unsqueeze(-1) - 1))
        self._log += (factors - self._cost).sum(0)
        self._against += (factors + self._cost + self._loss).sum(0)
        self._least = torch.minimum(self._least, self._against)
        self._best = torch.maximum(self._best, self._log)
        self._peak = max(self._peak, self.log_e_value)
        self.tokens += ratios.shape[0]

    @property
    def log_e_value(self) -> float:
        """Natural logarithm of the mean of all wealths now."""
        return float(self._log.flatten().logsumexp(0)) - math.log(max(self._log.numel(), 1)) if self.kinds else 0.0

    def found(self, alpha: float) -> bool:
        """Whether a fault is found, with a false-alarm rate of `alpha` for this check."""
        return self._peak >= -math.log(alpha)

    def known(self, beta: float) -> list[Excluded]:
        """What is known about each kind, with error rate `beta` for each statement."""
        made = []
        for row, kind in enumerate(self.kinds):
            ruled = [share for col, share in enumerate(self.shares) if float(self._least[row, col]) <= math.log(beta)]
            best = math.exp(min(float(self._best[row].max()), 700.0))
            made.append(Excluded(kind, min(ruled, default=None), best))
        return made

    def to_dict(self, beta: float) -> dict[str, Any]:
        """Values for JSON."""
        return {
            "tokens": self.tokens,
            "e_value": self.e_value,
            "p_value": self.p_value,
            "kinds": [
                {"kind": one.kind, "excluded_share": one.share, "e_value": one.evidence} for one in self.known(beta)
            ],
        }


def needed_tokens(
    probs: Float[Tensor, "rows vocab"],
    ratios: Float[Tensor, "rows vocab"],
    others: Float[Tensor, "rows vocab"],
    *,
    share: float,
    slack: float,
    alpha: float,
    bets: int,
) -> float:
    """About how many tokens it takes to find a fault in a share of the tokens: log(bets/alpha) over the mean growth.

    In some contexts `probs` are p, `ratios` r/p as bets see it, and `others` r. Infinite where the bet does not grow.
    """
    drawn = (1 - share) * probs.double() + share * others.double()
    growth = (drawn * torch.log1p(share * (ratios.double() - 1))).sum(-1).mean() - math.log1p(share * slack)
    return math.log(bets / alpha) / float(growth) if growth > 1e-9 else math.inf
